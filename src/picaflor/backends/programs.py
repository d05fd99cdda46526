"""What programs of devices share: the host computes on where a call fails, and has then all that was written before.

Knows batches, steps and the host's twin; must not know any device or what a step computes. A device says how the steps
run (`compute`), and how rows come and go (`fetch`, `put`).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from picaflor.backends.api import Batch, ExpertProvider, Rows
from picaflor.backends.batches import Limits
from picaflor.backends.host import HostTwin
from picaflor.backends.recording import Step
from picaflor.formats.base import F32

EXPERTS: Final = "expert_ffn"
CLASSES: Final = ("attention", "matmul", "experts", "router", "head", "other")


class DeviceFailed(Exception):
    """A call of the device failed, and the host computes on: `call`, why and what cures it."""

    def __init__(self, call: str, reason: str, cure: str) -> None:
        super().__init__(reason)
        self.call = call
        self.reason = reason
        self.cure = cure


@dataclass(frozen=True, slots=True)
class Guard:
    """What a program asks of its backend: `allowed(op)` counts a call and raises DeviceFailed for one that is to fail;
    `failed` is told of it and raises UnsupportedKernel under `--strict`."""

    allowed: Callable[[str], None]
    failed: Callable[[DeviceFailed], None]


class DeviceProgram(ABC):
    """backends.api.Program. `twin`: the same program on the host, where it has `number`."""

    def __init__(self, steps: Sequence[Step], limits: Limits, twin: HostTwin, number: int, guard: Guard) -> None:
        self._steps = tuple(steps)
        self._limits = limits
        self._twin = twin
        self._number = number
        self._guard = guard
        self._asks = any(step.op == EXPERTS for step in steps)
        self._written: dict[tuple[int, int], tuple[Rows, NDArray[Any]]] = {}
        # By the buffer itself and the first column: Rows of one width are equal whatever buffer they belong to.
        self._seconds = dict.fromkeys(CLASSES, 0.0)

    @abstractmethod
    def compute(self, batch: Batch, experts: ExpertProvider | None) -> None:
        """Run all steps on the device. Raises DeviceFailed where the host is to compute on."""

    @abstractmethod
    def fetch(self, rows: Rows, count: int) -> NDArray[Any]:
        """The first `count` rows, from the device."""

    @abstractmethod
    def put(self, rows: Rows, values: NDArray[Any]) -> None:
        """Fill a buffer's first rows on the device."""

    def run(self, batch: Batch, experts: ExpertProvider | None = None) -> None:
        """Compute all rows. Raises ReadFailed from the provider, ValueError for a batch that does not fit."""
        if experts is None and self._asks:
            raise ValueError("the program has experts, and no provider was given")
        started = time.perf_counter()
        if not self._twin.active:
            try:
                self.compute(batch, experts)
            except DeviceFailed as failure:
                self._hand_over(failure)
        if self._twin.active:
            self._twin.run(self._number, batch, experts)
        self._written.clear()
        self._seconds["other"] += time.perf_counter() - started

    def _hand_over(self, failure: DeviceFailed) -> None:
        """Let the host compute, with all that the device was given."""
        self._guard.failed(failure)
        self._twin.take_over(str(failure), self._limits.touched)
        for rows, values in self._written.values():
            self._twin.write(self._number, rows, values)

    def view(self, rows: Rows, count: int) -> NDArray[Any]:
        """The first `count` rows `[count, width]`, copied to the host."""
        if self._twin.active:
            return self._twin.view(self._number, rows, count)
        started = time.perf_counter()
        values = self.fetch(rows, count)
        self._seconds["other"] += time.perf_counter() - started
        return values

    def write(self, rows: Rows, values: F32) -> None:
        """Fill an input buffer's first rows."""
        kept: NDArray[Any] = np.array(values, np.float32 if rows.dtype == "f32" else np.int32)
        self._written[id(rows.handle), rows.start] = (rows, kept)
        if self._twin.active:
            self._twin.write(self._number, rows, kept)
        else:
            self.put(rows, kept)

    def seconds(self) -> dict[str, float]:
        """Seconds of host time since the last call; the device's classes are not told apart."""
        taken, self._seconds = self._seconds, dict.fromkeys(CLASSES, 0.0)
        return taken
