"""A program that several devices compute one after the other: each its layers, rows copied from device to device.

Knows programs of single devices and buffers of torch; must not know operations, models or why a layer lies where.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from numpy.typing import NDArray

from picaflor.backends.api import Batch, Chance, ExpertProvider, Rows
from picaflor.backends.cuda.program import CudaProgram
from picaflor.errors import OutOfBudget
from picaflor.formats.base import F32


@contextmanager
def naming(device: str) -> Iterator[None]:
    """Lets a lack of memory name the device that lacks it."""
    try:
        yield
    except OutOfBudget as error:
        raise OutOfBudget(f"{device}: {error}") from error


@dataclass(slots=True, eq=False)
class Shared:
    """The handle of Rows `[rows, width]`: by device, the buffer that it has there, once an operation needs it."""

    width: int
    dtype: Literal["f32", "i32"]
    parts: dict[int, Rows] = field(default_factory=dict)

    def on(self, device: int, rows: Rows) -> Rows:
        """Columns of this buffer on a device."""
        return Rows(rows.width, rows.dtype, self.parts[device].handle, rows.start)


@dataclass(frozen=True, slots=True, eq=False)
class Border:
    """A buffer that a stage needs as the stage `source` left it."""

    source: int
    buffer: Shared


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """Operations in a row on one device, called `name`. `borders`: what comes from earlier stages; `given`: what
    no stage wrote before it is used here, so that `write` has filled it; `left`: what is written here."""

    device: int
    name: str
    program: CudaProgram
    borders: tuple[Border, ...]
    given: frozenset[Shared]
    left: frozenset[Shared]


class SeveralProgram:
    """backends.api.Program. `asks`: it needs experts."""

    def __init__(self, stages: Sequence[Stage], *, asks: bool) -> None:
        self.stages = tuple(stages)
        self._asks = asks
        self._seconds = 0.0
        self._rows = 0
        for stage in stages:
            stage.program.again = partial(self._bring, stage)

    @property
    def replays(self) -> int:
        """Captured graphs that were replayed so far."""
        return sum(stage.program.replays for stage in self.stages)

    def run(self, batch: Batch, experts: ExpertProvider | None = None) -> None:
        """Compute all rows. Raises ReadFailed from the provider, ValueError for a batch that does not fit, OutOfBudget
        naming the device."""
        if experts is None and self._asks:
            raise ValueError("the program has experts, and no provider was given")
        self._rows = max(len(batch.tokens), len(batch.outputs))
        for stage in self.stages:
            self._bring(stage)
            with naming(stage.name):
                stage.program.run(batch, experts)

    def _bring(self, stage: Stage) -> None:
        """Copy what a stage needs to its device, which computes with it when it has come; torch orders the two."""
        started = time.perf_counter()
        for border in stage.borders:
            source = self.stages[border.source]
            there, here = border.buffer.parts[source.device], border.buffer.parts[stage.device]
            if source.program.on_host or stage.program.on_host:
                stage.program.write(here, source.program.view(there, self._rows))
            else:
                target: torch.Tensor = here.handle.memory[: self._rows]
                target.copy_(there.handle.memory[: self._rows], non_blocking=True)
        self._seconds += time.perf_counter() - started

    def view(self, rows: Rows, count: int) -> NDArray[Any]:
        """The first `count` rows `[count, width]`, copied to the host from where they were written last."""
        stage = self._last(rows)
        return stage.program.view(rows.handle.on(stage.device, rows), count)

    def draw(self, rows: Rows, chances: Sequence[Chance]) -> list[int]:
        """One token from each of a buffer's first rows of logits, on the device that has them."""
        stage = self._last(rows)
        return stage.program.draw(rows.handle.on(stage.device, rows), chances)

    def write(self, rows: Rows, values: F32) -> None:
        """Fill an input buffer's first rows on every device that reads them. Raises ValueError where none does."""
        stages = [stage for stage in self.stages if rows.handle in stage.given]
        if not stages:
            raise ValueError(f"a buffer of {rows.width} that no operation of the program reads before it is written")
        for stage in stages:
            stage.program.write(rows.handle.on(stage.device, rows), values)

    def seconds(self) -> dict[str, float]:
        """Seconds since the last call: those of all devices, which compute one after the other."""
        total: dict[str, float] = {}
        for stage in self.stages:
            for kind, seconds in stage.program.seconds().items():
                total[kind] = total.get(kind, 0.0) + seconds
        total["other"] = total.get("other", 0.0) + self._seconds
        self._seconds = 0.0
        return total

    def _last(self, rows: Rows) -> Stage:
        """The stage that wrote a buffer last, else the last one that was given it."""
        for stage in reversed(self.stages):
            if rows.handle in stage.left:
                return stage
        for stage in reversed(self.stages):
            if rows.handle in stage.given:
                return stage
        raise ValueError(f"a buffer of {rows.width} that no operation of the program uses")
