"""Decoding speed beside its floor: replays of fixed tokens between passes that read memory.

Knows times and bytes; must not know files, devices or how a token is computed. The floor is the time that reading one
token's bytes takes at the rate that memory gave in the same process, between the very repeats that it is compared with.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from picaflor.backends.api import I32
from picaflor.errors import PicaflorError
from picaflor.formats import REGISTRY
from picaflor.telemetry.record import percentile

RECORD_VERSION = 1
PROBE_ROW_BYTES = 1 << 14


class DecodeSource(Protocol):
    """What is measured: a model that can be fed tokens of our choice."""

    def decode_replay(self, prompt: Sequence[int], tokens: Sequence[int]) -> list[float]:
        """Prefill the prompt in a fresh sequence, then one step per token; the seconds of each step."""
        ...

    def bytes_per_token(self) -> dict[str, int]:
        """Bytes of weights that one decoded token needs, by class."""
        ...


@dataclass(frozen=True, slots=True)
class ReadCount:
    """Bytes read from disk so far: of experts, as the store counts them, and what the system fetched from storage
    for this process (None: unknown)."""

    logical: int
    physical: int | None

    def since(self, start: ReadCount) -> ReadCount:
        """The difference."""
        known = self.physical is not None and start.physical is not None
        return ReadCount(self.logical - start.logical, (self.physical or 0) - (start.physical or 0) if known else None)


@dataclass(frozen=True, slots=True)
class DiskLimit:
    """How a measurement knows the disk: `rate()` measures bytes per second, in the shape in which the store reads;
    `counted()` are the reads so far; `decoded()` the bytes of experts that the decode steps of the last replay read."""

    rate: Callable[[], float]
    counted: Callable[[], ReadCount]
    decoded: Callable[[], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeBench:
    """One measurement. `step_s` has one list per repeat, `read_bytes_per_s` one rate before each and one at the end.

    The disk's figures are empty where nothing came from disk: `disk_bytes_per_s` one rate before each repeat and one at
    the end, `disk_bytes` the decode steps' bytes per repeat, `disk_reads` all reads of a repeat, prompt included.
    """

    step_s: tuple[tuple[float, ...], ...]
    read_bytes_per_s: tuple[float, ...]
    bytes_per_token: Mapping[str, int]
    disk_bytes_per_s: tuple[float, ...] = ()
    disk_bytes: tuple[int, ...] = ()
    disk_reads: tuple[ReadCount, ...] = ()

    @property
    def rates(self) -> tuple[float, ...]:
        """Tokens per second of each repeat."""
        return tuple(len(steps) / sum(steps) for steps in self.step_s)

    @property
    def tokens_per_s(self) -> float:
        """Median over the repeats."""
        return statistics.median(self.rates)

    @property
    def read_rate(self) -> float:
        """Median read rate of memory, bytes per second."""
        return statistics.median(self.read_bytes_per_s)

    @property
    def touched_bytes(self) -> int:
        """Bytes of weights of one token."""
        return sum(self.bytes_per_token.values())

    @property
    def floor_tokens_per_s(self) -> float:
        """Tokens per second if nothing but reading the weights took time."""
        return self.read_rate / self.touched_bytes

    @property
    def of_floor(self) -> float:
        """Measured rate as a part of the floor's."""
        return self.tokens_per_s / self.floor_tokens_per_s

    @property
    def of_disk(self) -> float | None:
        """Bytes from disk per second as a part of what the disk gave just before and after; the median repeat's."""
        if not self.disk_bytes_per_s:
            return None
        pairs = zip(self.disk_bytes_per_s, self.disk_bytes_per_s[1:], strict=False)
        times = (sum(steps) for steps in self.step_s)
        parts = zip(self.disk_bytes, times, pairs, strict=True)
        return statistics.median(nbytes / seconds / statistics.mean(rates) for nbytes, seconds, rates in parts)

    @property
    def physical_of_logical(self) -> float | None:
        """Bytes fetched from storage as a part of the bytes that the store read; None where that is unknown."""
        counts = [count for count in self.disk_reads if count.physical is not None]
        logical = sum(count.logical for count in counts)
        return sum(count.physical or 0 for count in counts) / logical if logical else None

    def _disk(self) -> dict[str, Any]:
        tokens = sum(len(steps) for steps in self.step_s)
        seconds = sum(sum(steps) for steps in self.step_s)
        return {
            "disk_bytes_per_s": statistics.median(self.disk_bytes_per_s),
            "disk_bytes_per_s_each": list(self.disk_bytes_per_s),
            "read_rate_from_disk": sum(self.disk_bytes) / seconds,
            "disk_bytes_per_token": sum(self.disk_bytes) / tokens,
            "of_disk": self.of_disk,
            "physical_of_logical": self.physical_of_logical,
        }

    def record(self) -> dict[str, Any]:
        """As JSON data; times in seconds, sizes in bytes."""
        steps = [second for repeat in self.step_s for second in repeat]
        return {
            "repeats": len(self.step_s),
            "tokens": len(self.step_s[0]),
            "tokens_per_s": self.tokens_per_s,
            "tokens_per_s_min": min(self.rates),
            "tokens_per_s_max": max(self.rates),
            "tokens_per_s_each": list(self.rates),
            "step_p50_s": percentile(steps, 50),
            "step_p99_s": percentile(steps, 99),
            "bytes_per_token": self.touched_bytes,
            "bytes_per_token_by_class": dict(self.bytes_per_token),
            "read_bytes_per_s": self.read_rate,
            "read_bytes_per_s_each": list(self.read_bytes_per_s),
            "weight_bytes_per_s": self.tokens_per_s * self.touched_bytes,
            "floor_tokens_per_s": self.floor_tokens_per_s,
            "of_floor": self.of_floor,
            **(self._disk() if self.disk_bytes_per_s else {}),
        }


def fixed_tokens(vocabulary: int, count: int, seed: int) -> I32:
    """`count` token ids that depend on the arguments only: every run and every configuration sees the same routes."""
    ids: I32 = np.random.Generator(np.random.PCG64(seed)).integers(0, vocabulary, count, dtype=np.int32)
    return ids


class MemoryProbe:
    """Reads the model's own bytes in memory with the plain loads of one instruction set; takes no memory itself.

    Where they fit a cache it is the cache's rate, which is the limit of such a model too.
    """

    def __init__(self, memory: Sequence[NDArray[np.uint8]], *, isa: str, threads: int) -> None:
        from picaflor import _native

        self._memory = [plane for plane in memory if plane.nbytes >= PROBE_ROW_BYTES]
        self._isa, self._threads = isa, threads
        self._read = _native.bench_read
        self._weights = [
            _native.Weight(
                list(REGISTRY).index("f32"),
                plane.nbytes // PROBE_ROW_BYTES,
                PROBE_ROW_BYTES // 4,
                group=0,
                codes=plane.ctypes.data,
                codes_bytes=plane.nbytes // PROBE_ROW_BYTES * PROBE_ROW_BYTES,
                scales=0,
                scales_bytes=0,
            )
            for plane in self._memory
        ]
        self.nbytes = sum(plane.nbytes // PROBE_ROW_BYTES * PROBE_ROW_BYTES for plane in self._memory)

    def __call__(self) -> float:
        """Bytes per second of the better of two passes with all threads."""
        return self.nbytes / min(float(self._read(self._isa, self._weights, self._threads)[0]) for _ in range(2))


def measure_decode(
    source: DecodeSource,
    *,
    prompt: Sequence[int],
    tokens: Sequence[int],
    repeats: int,
    read_rate: Callable[[], float],
    disk: DiskLimit | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> DecodeBench:
    """One unmeasured replay to warm up, then `repeats` of them, a read of memory before each and after the last.

    `read_rate()` gives bytes per second. With `disk`, and if that first replay read from it, the disk is measured at
    the same moments. Raises PicaflorError where a replay gives no time for a token.
    """
    steps: list[tuple[float, ...]] = []
    rates: list[float] = []
    disk_rates: list[float] = []
    disk_bytes: list[int] = []
    disk_reads: list[ReadCount] = []
    source.decode_replay(prompt, tokens)
    if disk is not None and disk.decoded() == 0:
        disk = None
    for number in range(repeats):
        progress(number, repeats)
        rates.append(read_rate())
        if disk is not None:
            disk_rates.append(disk.rate())
            before = disk.counted()
        found = tuple(source.decode_replay(prompt, tokens))
        if len(found) != len(tokens) or min(found, default=0.0) <= 0:
            raise PicaflorError(f"a replay of {len(tokens)} tokens gave {len(found)} times, or one that is not above 0")
        steps.append(found)
        if disk is not None:
            disk_bytes.append(disk.decoded())
            disk_reads.append(disk.counted().since(before))
    rates.append(read_rate())
    if disk is not None:
        disk_rates.append(disk.rate())
    progress(repeats, repeats)
    return DecodeBench(
        step_s=tuple(steps),
        read_bytes_per_s=tuple(rates),
        bytes_per_token=dict(source.bytes_per_token()),
        disk_bytes_per_s=tuple(disk_rates),
        disk_bytes=tuple(disk_bytes),
        disk_reads=tuple(disk_reads),
    )
