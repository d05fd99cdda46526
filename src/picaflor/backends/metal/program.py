"""A recorded program of the Metal backend: steps that build arrays, evaluated at the end or where the host must know.

Knows frames and steps; must not know what a step computes, families or files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from numpy.typing import NDArray

from picaflor.backends.api import Batch, ExpertProvider, KVPlane, Rows
from picaflor.backends.batches import Limits
from picaflor.backends.host import HostTwin
from picaflor.backends.metal.frames import Buffer, Frame, Pool
from picaflor.backends.metal.library import copied, mx, on_host
from picaflor.backends.programs import DeviceFailed, DeviceProgram, Guard
from picaflor.backends.recording import Step
from picaflor.errors import OutOfBudget


class MetalProgram(DeviceProgram):
    """backends.api.Program."""

    def __init__(
        self,
        steps: Sequence[Step],
        limits: Limits,
        twin: HostTwin,
        number: int,
        *,
        buffers: Sequence[Buffer],
        planes: Sequence[KVPlane],
        guard: Guard,
        ready: Callable[[ExpertProvider | None], None],
    ) -> None:
        super().__init__(steps, limits, twin, number, guard)
        self._buffers = buffers
        self._planes = planes
        self._ready = ready

    def compute(self, batch: Batch, experts: ExpertProvider | None) -> None:
        """Run; the host takes over also where MLX itself gives up, but for want of memory."""
        try:
            frame = Frame.of(batch, self._limits, experts)
            self._ready(experts)
            self._launch(frame)
        except RuntimeError as error:
            text = " ".join(str(error).split())
            if "malloc" in text or "memory" in text.lower():
                raise OutOfBudget(f"MLX is out of memory: {text}; lower --vram, --ctx or --prefill-chunk") from error
            raise DeviceFailed("run", f"MLX says: {text}", "--backend cpu") from error

    def _launch(self, frame: Frame) -> None:
        for step in self._steps:
            space = frame.outputs if step.outputs else frame.rows
            if space.count:
                self._guard.allowed(step.op)
                step.run(frame)
        pools: list[Pool] = [plane.handle for plane in self._planes]
        mx.eval(*(b.values for b in self._buffers if b.values is not None), *(p.values for p in pools))

    def fetch(self, rows: Rows, count: int) -> NDArray[Any]:
        """Rows from MLX's memory."""
        return on_host(rows.handle.read(rows, count))

    def put(self, rows: Rows, values: NDArray[Any]) -> None:
        """Rows to MLX's memory."""
        rows.handle.write(rows, copied(values))
