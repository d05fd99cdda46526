"""A recorded program of the backend: launches over rows that stay on the device, submitted once per segment.

Knows batches, buffers and steps; must not know what a step computes, families or files. A segment ends where a call of
experts has to ask the host.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from picaflor.backends.api import Batch, ExpertProvider, Rows, Vector
from picaflor.backends.batches import Limits
from picaflor.backends.host import HostTwin
from picaflor.backends.recording import Step
from picaflor.backends.vulkan.device import Buffer, Gpu, Stream
from picaflor.formats.base import F32

EXPERTS: Final = "expert_ffn"
CLASSES: Final = ("attention", "matmul", "experts", "router", "head", "other")
HEADER: Final = 4
"""Numbers before the rows: rows, output rows, then nothing."""


class DeviceFailed(Exception):
    """A call of the device failed, and the host computes on. The text says why."""


@dataclass(frozen=True, slots=True, eq=False)
class RowBuffer:
    """The handle of Rows: `[max_rows, width]` on the device."""

    memory: Buffer
    width: int


def memory_of(rows: Rows) -> Buffer:
    """The buffer of rows."""
    handle: RowBuffer = rows.handle
    return handle.memory


def stride_of(rows: Rows) -> int:
    """Values from a row to the next one."""
    handle: RowBuffer = rows.handle
    return handle.width


def view(prefix: str, rows: Rows) -> dict[str, int]:
    """Fields of a uniform for the columns of a buffer."""
    return {f"{prefix}_stride": stride_of(rows), f"{prefix}_at": rows.start}


@dataclass(frozen=True, slots=True, eq=False)
class VectorBuffer:
    """The handle of a vector: its values on the device, and on the host for the day when that computes on."""

    memory: Buffer
    host: F32


def values_of(vector: Vector) -> Buffer:
    """The buffer of a vector."""
    handle: VectorBuffer = vector.handle
    return handle.memory


@dataclass(frozen=True, slots=True)
class SpaceAt:
    """Where a frame has the rows that a step acts on: their number, then what each of them is."""

    space: int
    tokens: int
    sequences: int
    positions: int


class FrameBuffer:
    """A batch on the device: one buffer of int32, filled by one copy.

    Order: numbers of rows and outputs; tokens, sequences, positions of all rows; numbers of the output rows and the
    same three of them; page tables, `pages` wide each.
    """

    def __init__(self, gpu: Gpu, limits: Limits) -> None:
        self._gpu = gpu
        self._limits = limits
        r, o = limits.max_rows, limits.max_outputs
        second = HEADER + 3 * r
        self.all = SpaceAt(0, HEADER, HEADER + r, HEADER + 2 * r)
        self.numbers = second
        self.some = SpaceAt(1, second + o, second + 2 * o, second + 3 * o)
        self.pages = second + 4 * o
        self._host = np.zeros(self.pages + r * limits.pages, np.int32)
        self.memory = gpu.filled(self._host, "a batch")

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return int(self._host.nbytes)

    def load(self, batch: Batch) -> None:
        """Check a batch and copy it. Raises ValueError for one that does not fit."""
        self._limits.check(batch)
        host, width = self._host, self._limits.pages
        tables = batch.pages[: int(batch.sequences.max(initial=-1)) + 1, :width]
        if len(tables) > self._limits.max_rows:
            raise ValueError(f"rows of {len(tables)} sequences, at most {self._limits.max_rows} fit")
        rows, outputs = len(batch.tokens), len(batch.outputs)
        host[:2] = rows, outputs
        parts = (batch.tokens, batch.sequences, batch.positions)
        starts = ((self.all.tokens, self.some.tokens), (self.all.sequences, self.some.sequences),
                  (self.all.positions, self.some.positions))  # fmt: skip
        for values, (first, second) in zip(parts, starts, strict=True):
            host[first : first + rows] = values
            host[second : second + outputs] = values[batch.outputs]
        host[self.numbers : self.numbers + outputs] = batch.outputs
        used = self.pages + len(tables) * width
        host[self.pages : used].reshape(-1, width)[:, : tables.shape[1]] = tables
        self._gpu.write(self.memory, 0, host[:used])


@dataclass(frozen=True, slots=True)
class Moment:
    """A run of one step: where launches go, how many rows there are, positions up to `longest`, who has experts."""

    stream: Stream
    count: int
    longest: int
    experts: ExpertProvider | None


class VulkanProgram:
    """backends.api.Program. `twin`: the same program on the host, for the day when a call of the device fails.

    `allowed(op)` counts a call and raises DeviceFailed for one that is to fail. `submits` counts what was given to the
    device.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        frame: FrameBuffer,
        twin: HostTwin,
        number: int,
        *,
        gpu: Gpu,
        limits: Limits,
        allowed: Callable[[str], None],
        ready: Callable[[ExpertProvider | None, int], None],
    ) -> None:
        self._steps = tuple(steps)
        self._frame = frame
        self._twin = twin
        self._number = number
        self._gpu = gpu
        self._limits = limits
        self._allowed = allowed
        self._ready = ready
        self._asks = any(step.op == EXPERTS for step in steps)
        self._written: dict[Rows, F32] = {}
        self._seconds = dict.fromkeys(CLASSES, 0.0)
        self.submits = 0

    def run(self, batch: Batch, experts: ExpertProvider | None = None) -> None:
        """Compute all rows. Raises ReadFailed from the provider, ValueError for a batch that does not fit."""
        if experts is None and self._asks:
            raise ValueError("the program has experts, and no provider was given")
        started = time.perf_counter()
        if not self._twin.active:
            try:
                self._on_device(batch, experts)
            except DeviceFailed as failure:
                self._twin.take_over(str(failure), self._limits.touched)
                for rows, values in self._written.items():
                    self._twin.write(self._number, rows, values)
        if self._twin.active:
            self._twin.run(self._number, batch, experts)
        self._written.clear()
        self._seconds["other"] += time.perf_counter() - started

    def _on_device(self, batch: Batch, experts: ExpertProvider | None) -> None:
        self._frame.load(batch)
        longest = int(batch.positions.max(initial=0)) + 1
        self._ready(experts, longest)
        stream = Stream(self._gpu)
        try:
            for step in self._steps:
                count = len(batch.outputs if step.outputs else batch.tokens)
                if count:
                    self._allowed(step.op)
                    step.run(Moment(stream, count, longest, experts))
            stream.submit()
        except BaseException:
            stream.drop()
            raise
        self.submits += stream.submits

    def view(self, rows: Rows, count: int) -> NDArray[Any]:
        """The first `count` rows `[count, width]`, copied to the host."""
        if self._twin.active:
            return self._twin.view(self._number, rows, count)
        started = time.perf_counter()
        handle: RowBuffer = rows.handle
        raw = self._gpu.read(handle.memory, 0, 4 * max(count, 1) * handle.width)
        values = raw.view(np.float32 if rows.dtype == "f32" else np.int32).reshape(-1, handle.width)[:count]
        self._seconds["other"] += time.perf_counter() - started
        return np.array(values[:, rows.start : rows.start + rows.width])

    def write(self, rows: Rows, values: F32) -> None:
        """Fill an input buffer's first rows."""
        kept: NDArray[Any] = np.array(values, np.float32 if rows.dtype == "f32" else np.int32)
        self._written[rows] = kept
        if self._twin.active:
            self._twin.write(self._number, rows, kept)
            return
        handle: RowBuffer = rows.handle
        if rows.width == handle.width:
            self._gpu.write(handle.memory, 0, kept)
            return
        for number, row in enumerate(kept):
            self._gpu.write(handle.memory, 4 * (number * handle.width + rows.start), row)

    def seconds(self) -> dict[str, float]:
        """Seconds of host time since the last call; the device's classes are not told apart."""
        taken, self._seconds = self._seconds, dict.fromkeys(CLASSES, 0.0)
        return taken
