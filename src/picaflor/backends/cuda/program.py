"""A recorded program of a GPU backend: steps over rows that stay on the device from the first to the last.

Knows batches, buffers of torch and steps; must not know what a step computes, families or files.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
import triton
from numpy.typing import NDArray

from picaflor.backends.api import Batch, ExpertProvider, Rows
from picaflor.backends.batches import Limits
from picaflor.backends.cuda.attention import BLOCK_KEYS
from picaflor.backends.cuda.clock import Clock, works_in_graphs
from picaflor.backends.cuda.current import current
from picaflor.backends.cuda.rows import Tensor
from picaflor.backends.programs import DeviceFailed, Guard
from picaflor.errors import OutOfBudget
from picaflor.formats.base import F32

if TYPE_CHECKING:
    from picaflor.backends.cuda.tier import ExpertTier
    from picaflor.backends.host import HostTwin

PINNED_BYTES: Final = 4 << 20
"""Most bytes of a result that come to the host through pinned memory, which is kept for the next one."""
MEASURED_REPLAY: Final = 32
"""The replay of a graph in which its classes of work are timed: by a graph of its own with marks between them."""
GRAPH_ROWS: Final = 8
"""Most rows that a captured graph computes; more rows keep the device busy without one."""
EXPERTS: Final = "expert_ffn"
CLASSES: Final = ("attention", "matmul", "experts", "router", "head", "other")


@dataclass(frozen=True, slots=True)
class Space:
    """Rows that a step acts on: all of the batch, or its output rows. i32 `[count]` each."""

    count: int
    tokens: Tensor
    sequences: Tensor
    positions: Tensor


@dataclass(frozen=True, slots=True)
class Frame:
    """One batch on the device. `outputs` has the output rows, `numbers` their numbers among `rows`."""

    rows: Space
    outputs: Space
    numbers: Tensor
    pages: Tensor
    longest: int
    experts: ExpertProvider | None


@dataclass(frozen=True, slots=True)
class Step:
    """One operation: its name, the class that its time counts for, whether it acts on the output rows."""

    op: str
    kind: str
    outputs: bool
    run: Callable[[Frame, Space], None]


@dataclass(slots=True)
class Part:
    """Steps that run together, and their graph for one size of batch; None until it was captured.

    `replays` counts since the last question for seconds, `lasts` are a replay's seconds by class, once measured.
    """

    steps: Sequence[Step]
    captured: Any = None
    age: int = 0
    replays: int = 0
    lasts: Mapping[str, float] = field(default_factory=dict)


def _parts(steps: Sequence[Step]) -> list[Sequence[Step]]:
    """Calls of experts alone, what lies between them together."""
    parts: list[list[Step]] = []
    for step in steps:
        if not parts or EXPERTS in (step.op, parts[-1][0].op):
            parts.append([])
        parts[-1].append(step)
    return list(parts)


@dataclass(slots=True)
class Batches:
    """Where batches lie on the device: one buffer of int32, filled by one copy.

    Order: tokens, sequences, positions of all rows, then output numbers and the same three of the output rows, then
    the page tables, `pages` wide each.
    """

    limits: Limits
    device: Any
    captures: bool = False
    _given: Tensor = field(init=False)
    _host: NDArray[np.int32] = field(init=False)
    _memory: Tensor = field(init=False)
    _copied: Any = None
    _pool: tuple[Any, Any] | None = None

    def __post_init__(self) -> None:
        limits = self.limits
        size = 3 * limits.max_rows + 4 * limits.max_outputs + limits.max_rows * limits.pages
        self._given = torch.zeros(size, dtype=torch.int32, pin_memory=self.device.type != "cpu")
        self._host = self._given.numpy()
        self._memory = torch.zeros(size, dtype=torch.int32, device=self.device)

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return int(self._host.nbytes)

    def pool(self) -> tuple[Any, Any]:
        """Memory that captured graphs share, as they run one after the other and leave nothing there, and the stream in
        which they are captured: torch's own one is that of the device that captured first."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle(), torch.cuda.Stream(self.device)
        return self._pool

    def load(self, batch: Batch, experts: ExpertProvider | None) -> Frame:
        """Check a batch and copy it to the device. Raises ValueError for one that does not fit."""
        self.limits.check(batch)
        rows, outputs, tables = len(batch.tokens), len(batch.outputs), self.limits.tables(batch)
        host, r, o, width = self._host, self.limits.max_rows, self.limits.max_outputs, self.limits.pages
        used = len(tables) * width
        numbers = batch.outputs
        if self._copied is not None:
            self._copied.synchronize()
        parts = (batch.tokens, batch.sequences, batch.positions)
        for index, values in enumerate(parts):
            host[index * r : index * r + rows] = values
        host[3 * r : 3 * r + outputs] = numbers
        for index, values in enumerate(parts, start=1):
            host[3 * r + index * o : 3 * r + index * o + outputs] = values[numbers]
        head = 3 * r + 4 * o
        host[head : head + used].reshape(-1, width)[:, : tables.shape[1]] = tables
        self._memory[: head + used].copy_(self._given[: head + used], non_blocking=True)
        if self.device.type != "cpu":
            self._copied = torch.cuda.Event()
            self._copied.record()
        return self._frame(rows, outputs, int(batch.positions.max(initial=0)) + 1, experts)

    def _frame(self, rows: int, outputs: int, longest: int, experts: ExpertProvider | None) -> Frame:
        memory, r, o = self._memory, self.limits.max_rows, self.limits.max_outputs
        first = [memory[index * r : index * r + rows] for index in range(3)]
        second = [memory[3 * r + index * o : 3 * r + index * o + outputs] for index in range(4)]
        pages = memory[3 * r + 4 * o :].view(r, self.limits.pages)
        return Frame(Space(rows, *first), Space(outputs, *second[1:]), second[0], pages, longest, experts)


class CudaProgram:
    """backends.api.Program. `twin`: the same program on the host, for the day when a call of the device fails.

    `again` brings what another device gave, where the run begins once more, here or on the host.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        batches: Batches,
        twin: HostTwin,
        number: int,
        *,
        guard: Guard,
        ready: Callable[[ExpertProvider | None], None],
        tier: ExpertTier,
    ) -> None:
        self._steps = tuple(steps)
        self._batches = batches
        self._twin = twin
        self._number = number
        self._guard = guard
        self._ready = ready
        self._tier = tier
        self._asks = any(step.op == EXPERTS for step in steps)
        self._graphs: dict[tuple[int, int, int, bool], list[Part]] = {}
        self._graphs_of = -1
        self.replays = 0
        self.again: Callable[[], None] = _nothing
        self._clock = Clock(batches.device)
        self._written: dict[tuple[int, int], tuple[Rows, F32]] = {}
        self._pinned: dict[tuple[int, int, int], Tensor] = {}
        self._seconds = dict.fromkeys(CLASSES, 0.0)

    @property
    def on_host(self) -> bool:
        """Whether a call of the device has failed and the host computes."""
        return self._twin.active

    def run(self, batch: Batch, experts: ExpertProvider | None = None) -> None:
        """Compute all rows. Raises ReadFailed from the provider, ValueError for a batch that does not fit."""
        if experts is None and self._asks:
            raise ValueError("the program has experts, and no provider was given")
        started = time.perf_counter()
        if not self._twin.active:
            with current(self._batches.device):
                self._on_device(batch, experts)
        if self._twin.active:
            self._twin.run(self._number, batch, experts)
        self._written.clear()
        self._seconds["other"] += time.perf_counter() - started

    def _on_device(self, batch: Batch, experts: ExpertProvider | None) -> None:
        """Run, a second time with fewer experts on the device where its memory was too small; or hand over."""
        try:
            try:
                self._run(self._batches.load(batch, experts))
            except torch.OutOfMemoryError:
                if not self._tier.shrink():
                    raise
                for rows, values in self._written.values():
                    rows.handle.view(rows)[: len(values)].copy_(torch.from_numpy(values))
                self.again()
                self._run(self._batches.load(batch, experts))
        except torch.OutOfMemoryError as error:
            raise OutOfBudget(f"the device is out of memory: {' '.join(str(error).split())}") from error
        except DeviceFailed as failure:
            self._guard.failed(failure)
            self._twin.take_over(str(failure), self._batches.limits.touched)
            for rows, values in self._written.values():
                self._twin.write(self._number, rows, values)
            self.again()

    def _run(self, frame: Frame) -> None:
        self._ready(frame.experts)
        if self._capturable(frame):
            self._replay(frame)
        else:
            self._launch(frame, self._steps)

    def _capturable(self, frame: Frame) -> bool:
        """Whether captured graphs can do it: few rows, on a device that has them."""
        return self._batches.captures and 0 < frame.rows.count <= GRAPH_ROWS

    def _replay(self, frame: Frame) -> None:
        """Run by captured graphs: one where all experts are here, else one between any two calls of experts.

        The first call of a size runs eagerly, the second is captured as it runs, later ones replay.
        """
        if self._graphs_of != self._tier.version:
            self._graphs.clear()
            self._graphs_of = self._tier.version
        blocks = triton.next_power_of_2(-(-frame.longest // BLOCK_KEYS))
        wide = replace(frame, longest=min(blocks * BLOCK_KEYS, self._batches.limits.capacity))
        whole = self._tier.all_here or not self._asks
        key = (frame.rows.count, frame.outputs.count, blocks, whole)
        known = self._graphs.get(key)
        if known is None:
            self._launch(wide, self._steps)
            self._graphs[key] = [Part(steps) for steps in ([self._steps] if whole else _parts(self._steps))]
            return
        for part in known:
            if not whole and part.steps[0].op == EXPERTS:
                self._launch(wide, part.steps)
                continue
            part.age += 1
            part.replays += 1
            self.replays += 1
            if part.captured is None:
                part.captured = self._captured(wide, part.steps, None)
                part.captured.replay()
            elif part.age == MEASURED_REPLAY and works_in_graphs():
                clock = Clock(self._batches.device, captured=True)
                self._captured(wide, part.steps, clock).replay()
                part.lasts = clock.take()
            else:
                part.captured.replay()
                for step in part.steps:  # while the device computes
                    self._guard.allowed(step.op)

    def _captured(self, frame: Frame, steps: Sequence[Step], clock: Clock | None) -> Any:
        """A graph of these steps; nothing is computed yet."""
        graph = torch.cuda.CUDAGraph()
        pool, stream = self._batches.pool()
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            self._put(frame, steps, clock)
        return graph

    def _launch(self, frame: Frame, steps: Sequence[Step]) -> None:
        self._put(frame, steps, self._clock)

    def _put(self, frame: Frame, steps: Sequence[Step], clock: Clock | None) -> None:
        """Give the steps to the device, with marks where a class begins."""
        for step in steps:
            space = frame.outputs if step.outputs else frame.rows
            if space.count:
                self._guard.allowed(step.op)
                if clock is not None:
                    clock.mark(step.kind)
                step.run(frame, space)
        if clock is not None:
            clock.mark("")

    def view(self, rows: Rows, count: int) -> NDArray[Any]:
        """The first `count` rows `[count, width]`, copied to the host."""
        if self._twin.active:
            return self._twin.view(self._number, rows, count)
        started = time.perf_counter()
        array = self._fetched(rows, rows.handle.view(rows)[:count])
        self._seconds["other"] += time.perf_counter() - started
        return array

    def _fetched(self, rows: Rows, values: Tensor) -> NDArray[Any]:
        """Values on the host, in memory that the next fetch of the same buffer may overwrite."""
        if values.device.type == "cpu" or values.numel() * 4 > PINNED_BYTES:
            plain: NDArray[Any] = values.cpu().numpy()
            return plain
        key = (id(rows.handle), rows.start, rows.width)
        kept = self._pinned.get(key)
        if kept is None or kept.shape[0] < values.shape[0]:
            kept = self._pinned[key] = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        kept[: len(values)].copy_(values, non_blocking=True)
        torch.cuda.current_stream(values.device).synchronize()
        array: NDArray[Any] = kept[: len(values)].numpy()
        return array

    def write(self, rows: Rows, values: F32) -> None:
        """Fill an input buffer's first rows."""
        kept: NDArray[Any] = np.array(values, np.float32 if rows.dtype == "f32" else np.int32)
        self._written[id(rows.handle), rows.start] = (rows, kept)
        if self._twin.active:
            self._twin.write(self._number, rows, kept)
        else:
            rows.handle.view(rows)[: len(kept)].copy_(torch.from_numpy(kept))

    def seconds(self) -> dict[str, float]:
        """Seconds since the last call: the device's by class, the rest of the host's as `other`.

        Replayed graphs count with what one replay was measured to take, with nothing before that.
        """
        taken, self._seconds = self._seconds, dict.fromkeys(CLASSES, 0.0)
        found = dict(self._clock.take())
        for part in (part for parts in self._graphs.values() for part in parts):
            for kind, seconds in part.lasts.items():
                found[kind] = found.get(kind, 0.0) + part.replays * seconds
            part.replays = 0
        for kind, seconds in found.items():
            taken[kind] += seconds
            if kind != "other":
                taken["other"] = max(0.0, taken["other"] - seconds)
        return taken


def _nothing() -> None:
    """All that a run needs is here."""
