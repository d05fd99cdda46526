"""A recorded program of the backend: launches over rows that stay on the device, submitted once per segment.

Knows batches, buffers and steps; must not know what a step computes, families or files. A segment ends where a call of
experts has to ask the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from picaflor.backends.api import Batch, ExpertProvider, Rows, Vector
from picaflor.backends.batches import Limits
from picaflor.backends.host import HostTwin
from picaflor.backends.programs import DeviceProgram, Guard
from picaflor.backends.recording import Step
from picaflor.backends.vulkan.device import Buffer, Gpu, Stream
from picaflor.formats.base import F32

HEADER: Final = 4
"""Numbers before the rows: rows, output rows, then nothing."""


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
        tables = self._limits.tables(batch)
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


class VulkanProgram(DeviceProgram):
    """backends.api.Program. `submits` counts what was given to the device."""

    def __init__(
        self,
        steps: Sequence[Step],
        frame: FrameBuffer,
        twin: HostTwin,
        number: int,
        *,
        gpu: Gpu,
        limits: Limits,
        guard: Guard,
        ready: Callable[[ExpertProvider | None, int], None],
    ) -> None:
        super().__init__(steps, limits, twin, number, guard)
        self._frame = frame
        self._gpu = gpu
        self._ready = ready
        self.submits = 0

    def compute(self, batch: Batch, experts: ExpertProvider | None) -> None:
        """All launches, submitted together but where the host must choose experts."""
        self._frame.load(batch)
        longest = int(batch.positions.max(initial=0)) + 1
        self._ready(experts, longest)
        stream = Stream(self._gpu)
        try:
            for step in self._steps:
                count = len(batch.outputs if step.outputs else batch.tokens)
                if count:
                    self._guard.allowed(step.op)
                    step.run(Moment(stream, count, longest, experts))
            stream.submit()
        except BaseException:
            stream.drop()
            raise
        self.submits += stream.submits

    def fetch(self, rows: Rows, count: int) -> NDArray[Any]:
        """Rows from the device."""
        handle: RowBuffer = rows.handle
        raw = self._gpu.read(handle.memory, 0, 4 * max(count, 1) * handle.width)
        values = raw.view(np.float32 if rows.dtype == "f32" else np.int32).reshape(-1, handle.width)[:count]
        return np.array(values[:, rows.start : rows.start + rows.width])

    def put(self, rows: Rows, values: NDArray[Any]) -> None:
        """Rows to the device."""
        handle: RowBuffer = rows.handle
        if rows.width == handle.width:
            self._gpu.write(handle.memory, 0, values)
            return
        for number, row in enumerate(values):
            self._gpu.write(handle.memory, 4 * (number * handle.width + rows.start), row)
