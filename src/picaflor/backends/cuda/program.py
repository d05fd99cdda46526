"""A recorded program of a GPU backend: steps over rows that stay on the device from the first to the last.

Knows batches, buffers of torch and steps; must not know what a step computes, families or files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from picaflor.backends.api import Batch, Chance, ExpertProvider, Rows
from picaflor.backends.batches import Limits
from picaflor.backends.cuda.attention import BLOCK_KEYS
from picaflor.backends.cuda.clock import Clock, works_in_graphs
from picaflor.backends.cuda.current import current
from picaflor.backends.cuda.memory import all_given
from picaflor.backends.cuda.rows import Tensor
from picaflor.backends.programs import CLASSES, DeviceFailed, DeviceProgram, Guard
from picaflor.backends.recording import Step

if TYPE_CHECKING:
    from picaflor.backends.cuda.sampling import Drawing
    from picaflor.backends.cuda.tier import ExpertTier
    from picaflor.backends.host import HostTwin

PINNED_BYTES: Final = 4 << 20
"""Most bytes of a result that come to the host through pinned memory, which is kept for the next one."""
MEASURED_REPLAY: Final = 32
"""The replay of a graph in which its classes of work are timed: by a graph of its own with marks between them."""
FIRST_STEPS: Final = 32
"""Steps of the first graph, which keep the device busy until the host has launched the second."""
GRAPH_ROWS: Final = 8
"""Most rows that a captured graph computes; more rows keep the device busy without one."""


@dataclass(frozen=True, slots=True)
class Space:
    """Rows that a step acts on: all of the batch, or its output rows. i32 `[count]` each."""

    count: int
    tokens: Tensor
    sequences: Tensor
    positions: Tensor


@dataclass(frozen=True, slots=True)
class Size:
    """How much a batch has: rows, output rows, sequences with page tables; rows see up to `longest` positions."""

    rows: int
    outputs: int
    sequences: int
    longest: int


@dataclass(frozen=True, slots=True)
class Frame:
    """One batch on the device. `outputs` has the output rows, `numbers` their numbers among `rows`. `split`: the host
    computes the experts that are not on the device."""

    rows: Space
    outputs: Space
    numbers: Tensor
    pages: Tensor
    longest: int
    experts: ExpertProvider | None
    split: bool = False

    def space(self, step: Step) -> Space:
        """The rows that a step acts on."""
        return self.outputs if step.outputs else self.rows


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

    def replays_only(self) -> bool:
        """Whether it was captured and is not to be measured now."""
        return self.captured is not None and (self.age != MEASURED_REPLAY - 1 or not works_in_graphs())


def _parts(steps: Sequence[Step]) -> list[Sequence[Step]]:
    """What runs in one go: the host acts before the first step only."""
    parts: list[list[Step]] = []
    for step in steps:
        if not parts or step.host is not None:
            parts.append([])
        parts[-1].append(step)
    return list(parts)


def _halves(steps: Sequence[Step]) -> list[Sequence[Step]]:
    """Some steps first: a graph takes the host the longer the more there are, and the device begins meanwhile."""
    return [part for part in (steps[:FIRST_STEPS], steps[FIRST_STEPS:]) if part]


@dataclass(slots=True)
class Batches:
    """Where batches lie on the device: one buffer of int32, filled by one copy of what was put on the host side.

    Order: tokens, sequences, positions of all rows, then output numbers and the same three of the output rows, then
    the page tables, `pages` wide each.
    """

    limits: Limits
    device: Any
    captures: bool = False
    _given: Tensor = field(init=False)
    _host: NDArray[np.int32] = field(init=False)
    _memory: Tensor = field(init=False)
    _read: Any = None
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

    def put(self, batch: Batch) -> Size:
        """Check a batch and put it where copies start from. Raises ValueError for one that does not fit."""
        limits, host = self.limits, self._host
        limits.check(batch)
        r, o, width = limits.max_rows, limits.max_outputs, limits.pages
        rows, numbers = len(batch.tokens), batch.outputs
        tables = batch.pages[:, :width] if len(batch.pages) <= rows else limits.tables(batch)
        outputs = len(numbers)
        if self._read is not None:
            self._read.synchronize()
        at = 3 * r
        host[at : at + outputs] = numbers
        for index, values in enumerate((batch.tokens, batch.sequences, batch.positions)):
            host[index * r : index * r + rows] = values
            at += o
            host[at : at + outputs] = values[numbers]
        head = self._head()
        host[head : head + len(tables) * width].reshape(-1, width)[:, : tables.shape[1]] = tables
        return Size(rows, outputs, len(tables), int(batch.positions.max(initial=0)) + 1)

    def send(self, size: Size) -> None:
        """Copy what was put there to the device; may be captured."""
        used = self._head() + size.sequences * self.limits.pages
        self._memory[:used].copy_(self._given[:used], non_blocking=True)

    def sent(self) -> None:
        """What was given to the device so far reads the host's side: the next batch is put there when it is done."""
        if self.device.type != "cpu":
            if self._read is None:
                self._read = torch.cuda.Event()
            self._read.record()

    def frame(self, size: Size, experts: ExpertProvider | None) -> Frame:
        """Where the batch lies on the device."""
        memory, r, o = self._memory, self.limits.max_rows, self.limits.max_outputs
        first = [memory[index * r : index * r + size.rows] for index in range(3)]
        second = [memory[3 * r + index * o : 3 * r + index * o + size.outputs] for index in range(4)]
        pages = memory[self._head() :].view(r, self.limits.pages)
        return Frame(
            Space(size.rows, *first), Space(size.outputs, *second[1:]), second[0], pages, size.longest, experts
        )

    def _head(self) -> int:
        """Where page tables begin."""
        return 3 * self.limits.max_rows + 4 * self.limits.max_outputs


class CudaProgram(DeviceProgram):
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
        drawing: Drawing,
        tier: ExpertTier,
    ) -> None:
        super().__init__(steps, batches.limits, twin, number, guard)
        self._batches = batches
        self._ready = ready
        self._drawing = drawing
        self._tier = tier
        self._graphs: dict[tuple[int, int, int, int, bool], list[Part]] = {}
        self._graphs_of = -1
        self.replays = 0
        self.again: Callable[[], None] = _nothing
        self._clock = Clock(batches.device)
        self._pinned: dict[tuple[int, int, int], Tensor] = {}
        self._served_s = 0.0

    @property
    def on_host(self) -> bool:
        """Whether a call of the device has failed and the host computes."""
        return self._twin.active

    def compute(self, batch: Batch, experts: ExpertProvider | None) -> None:
        """Run, a second time with fewer experts on the device where its memory was too small."""
        with all_given(), current(self._batches.device):
            try:
                self._run(self._batches.put(batch), experts)
            except torch.OutOfMemoryError:
                if not self._tier.shrink():
                    raise
                for rows, values in self._written.values():
                    self.put(rows, values)
                self.again()
                self._run(self._batches.put(batch), experts)

    def _hand_over(self, failure: DeviceFailed) -> None:
        """Let the host compute, with what another device gave as well."""
        super()._hand_over(failure)
        self.again()

    def _run(self, size: Size, experts: ExpertProvider | None) -> None:
        self._ready(experts)
        whole = self._tier.all_here or not self._asks
        split = not whole and self._tier.splits(size.rows)
        if self._batches.captures and 0 < size.rows <= GRAPH_ROWS and (whole or split):
            self._replay(size, experts, whole)
        else:
            self._batches.send(size)
            self._batches.sent()
            self._launch(replace(self._batches.frame(size, experts), split=split), self._steps)

    def _replay(self, size: Size, experts: ExpertProvider | None, whole: bool) -> None:
        """Run by captured graphs: two where all experts are here, the first of which brings the batch too, else one
        between any two acts of the host.

        The first call of a size runs eagerly, the second is captured as it runs, later ones replay.
        """
        if self._graphs_of != self._tier.version:
            self._graphs.clear()
            self._graphs_of = self._tier.version
        blocks = (size.longest - 1) // BLOCK_KEYS
        blocks = 1 << blocks.bit_length()  # the next power of two
        key = (size.rows, size.outputs, size.sequences, blocks, whole)
        known = self._graphs.get(key)
        if whole and known is not None and all(part.replays_only() for part in known):
            self._again(known)
            return
        wide = replace(size, longest=min(blocks * BLOCK_KEYS, self._batches.limits.capacity))
        frame = replace(self._batches.frame(wide, experts), split=not whole)
        if known is None or not whole:
            self._batches.send(wide)
            self._batches.sent()
        if known is None:
            self._launch(frame, self._steps)
            self._graphs[key] = [Part(steps) for steps in (_halves(self._steps) if whole else _parts(self._steps))]
            return
        for part in known:
            self._host_acts(frame, part.steps[0])
            if part.replays_only():
                self._again([part])
            else:
                self._first_times(part, frame, wide if whole and part is known[0] else None)

    def _again(self, parts: Sequence[Part]) -> None:
        """Replay captured graphs, one behind the other."""
        for part in parts:
            part.captured.replay()
        self._batches.sent()
        for part in parts:  # while the device computes
            part.age += 1
            part.replays += 1
            self.replays += 1
            for step in part.steps:
                if step.op:
                    self._guard.allowed(step.op)

    def _first_times(self, part: Part, frame: Frame, brings: Size | None) -> None:
        """Capture a graph and replay it, or one that tells its seconds; `brings`: and the batch comes with it."""
        clock = Clock(self._batches.device, captured=True) if part.captured is not None else None
        captured = self._captured(frame, part.steps, clock, brings)
        captured.replay()
        self._batches.sent()
        if clock is None:
            part.captured = captured
        else:
            part.lasts = clock.take()
        part.age += 1
        part.replays += 1
        self.replays += 1

    def _captured(self, frame: Frame, steps: Sequence[Step], clock: Clock | None, brings: Size | None) -> Any:
        """A graph of these steps, behind the copy of a batch where it brings one; nothing is computed yet."""
        graph = torch.cuda.CUDAGraph()
        pool, stream = self._batches.pool()
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            if brings is not None:
                self._batches.send(brings)
            self._put(frame, steps, clock)
        return graph

    def _launch(self, frame: Frame, steps: Sequence[Step]) -> None:
        for part in _parts(steps) if frame.split else [steps]:
            if not part:  # a program of nothing
                continue
            self._host_acts(frame, part[0])
            self._put(frame, part, self._clock)

    def _host_acts(self, frame: Frame, step: Step) -> None:
        """What the host does before a step of a frame that is split; it counts as time of experts."""
        exchange = self._tier.exchange
        if not frame.split or step.host is None or exchange is None or not frame.space(step).count:
            return
        served = exchange.served_s
        step.host(frame, frame.space(step))
        self._served_s += exchange.served_s - served

    def _put(self, frame: Frame, steps: Sequence[Step], clock: Clock | None) -> None:
        """Give the steps to the device, with marks where a class begins."""
        for step in steps:
            space = frame.space(step)
            if space.count:
                if step.op:
                    self._guard.allowed(step.op)
                if clock is not None:
                    clock.mark(step.kind)
                step.run(frame, space)
        if clock is not None:
            clock.mark("")

    def draw(self, rows: Rows, chances: Sequence[Chance]) -> list[int]:
        """One token from each of a buffer's first rows of logits; NO_TOKEN where none of a row is finite."""
        count = len(chances)
        if self._twin.active:
            return self._drawing.on_host(self.view(rows, count), chances)
        with current(self._batches.device):
            return self._drawing(rows.handle.view(rows)[:count], chances)

    def fetch(self, rows: Rows, count: int) -> NDArray[Any]:
        """Rows on the host, in memory that the next fetch of the same buffer may overwrite."""
        values: Tensor = rows.handle.view(rows)[:count]
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

    def put(self, rows: Rows, values: NDArray[Any]) -> None:
        """Rows to the device."""
        rows.handle.view(rows)[: len(values)].copy_(torch.from_numpy(values))

    def seconds(self) -> dict[str, float]:
        """Seconds since the last call: the device's by class, the rest of the host's as `other`.

        Replayed graphs count with what one replay was measured to take, with nothing before that.
        """
        taken, self._seconds = self._seconds, dict.fromkeys(CLASSES, 0.0)
        found = dict(self._clock.take())
        found["experts"] = found.get("experts", 0.0) + self._served_s
        self._served_s = 0.0
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
