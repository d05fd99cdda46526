"""A recorded program of the Metal backend: steps that build arrays, evaluated at the end or where the host must know.

Knows frames, steps and the host's twin; must not know what a step computes, families or files.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from picaflor.backends.api import Batch, ExpertProvider, KVPlane, Rows
from picaflor.backends.batches import Limits
from picaflor.backends.host import HostTwin
from picaflor.backends.metal.frames import Buffer, Frame, Pool
from picaflor.backends.metal.library import copied, mx, on_host
from picaflor.backends.recording import Step
from picaflor.errors import OutOfBudget
from picaflor.formats.base import F32

CLASSES: Final = ("attention", "matmul", "experts", "router", "head", "other")
EXPERTS: Final = "expert_ffn"


class DeviceFailed(Exception):
    """A call of the device failed, and the host computes on: `call`, why and what cures it."""

    def __init__(self, call: str, reason: str, cure: str) -> None:
        super().__init__(reason)
        self.call = call
        self.reason = reason
        self.cure = cure


class MetalProgram:
    """backends.api.Program. `twin`: the same program on the host, for the day when a call of the device fails.

    `allowed(op)` counts a call and raises DeviceFailed for one that is to fail; `failed` is told of it.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        limits: Limits,
        twin: HostTwin,
        number: int,
        *,
        buffers: Sequence[Buffer],
        planes: Sequence[KVPlane],
        allowed: Callable[[str], None],
        failed: Callable[[DeviceFailed], None],
        ready: Callable[[ExpertProvider | None], None],
    ) -> None:
        self._steps = tuple(steps)
        self._limits = limits
        self._twin = twin
        self._number = number
        self._buffers = buffers
        self._planes = planes
        self._allowed = allowed
        self._failed = failed
        self._ready = ready
        self._asks = any(step.op == EXPERTS for step in steps)
        self._written: dict[Rows, NDArray[Any]] = {}
        self._seconds = dict.fromkeys(CLASSES, 0.0)

    def run(self, batch: Batch, experts: ExpertProvider | None = None) -> None:
        """Compute all rows. Raises ReadFailed from the provider, ValueError for a batch that does not fit."""
        if experts is None and self._asks:
            raise ValueError("the program has experts, and no provider was given")
        started = time.perf_counter()
        if not self._twin.active:
            self._on_device(batch, experts)
        if self._twin.active:
            self._twin.run(self._number, batch, experts)
        self._written.clear()
        self._seconds["other"] += time.perf_counter() - started

    def _on_device(self, batch: Batch, experts: ExpertProvider | None) -> None:
        """Run, or hand over: also where MLX itself gives up, but for want of memory."""
        try:
            frame = Frame.of(batch, self._limits, experts)
            self._ready(experts)
            self._launch(frame)
        except DeviceFailed as failure:
            self._hand_over(failure)
        except RuntimeError as error:
            text = " ".join(str(error).split())
            if "malloc" in text or "memory" in text.lower():
                raise OutOfBudget(f"MLX is out of memory: {text}; lower --vram, --ctx or --prefill-chunk") from error
            self._hand_over(DeviceFailed("run", f"MLX says: {text}", "--backend cpu"))

    def _launch(self, frame: Frame) -> None:
        for step in self._steps:
            space = frame.outputs if step.outputs else frame.rows
            if space.count:
                self._allowed(step.op)
                step.run(frame)
        pools: list[Pool] = [plane.handle for plane in self._planes]
        mx.eval(*(b.values for b in self._buffers if b.values is not None), *(p.values for p in pools))

    def _hand_over(self, failure: DeviceFailed) -> None:
        self._failed(failure)
        self._twin.take_over(str(failure), self._limits.touched)
        for rows, values in self._written.items():
            self._twin.write(self._number, rows, values)

    def view(self, rows: Rows, count: int) -> NDArray[Any]:
        """The first `count` rows `[count, width]`, copied to the host."""
        if self._twin.active:
            return self._twin.view(self._number, rows, count)
        return on_host(rows.handle.read(rows, count))

    def write(self, rows: Rows, values: F32) -> None:
        """Fill an input buffer's first rows."""
        kept: NDArray[Any] = np.array(values, np.float32 if rows.dtype == "f32" else np.int32)
        self._written[rows] = kept
        if self._twin.active:
            self._twin.write(self._number, rows, kept)
        else:
            rows.handle.write(rows, copied(kept))

    def seconds(self) -> dict[str, float]:
        """Seconds of host time since the last call; the device's classes are not told apart."""
        taken, self._seconds = self._seconds, dict.fromkeys(CLASSES, 0.0)
        return taken
