"""The backend `vulkan`: kernels in WGSL, memory and queues from wgpu, for graphics of every maker.

Knows the device, capabilities and recorders; must not know families, files or the expert store. `open_backend` fails
with the reason where no device can be used; nothing else is then tried.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from picaflor.backends.api import ExpertProvider, Precision, Vector
from picaflor.backends.batches import Limits
from picaflor.backends.device import DeviceBackend
from picaflor.backends.table import CapabilityTable
from picaflor.backends.vulkan import capabilities
from picaflor.backends.vulkan.capabilities import NAME
from picaflor.backends.vulkan.device import open_gpu
from picaflor.backends.vulkan.program import VectorBuffer
from picaflor.backends.vulkan.recorder import VulkanRecorder
from picaflor.backends.vulkan.tier import ExpertTier
from picaflor.backends.vulkan.weights import Matrices
from picaflor.errors import UsageError
from picaflor.formats.base import F32

PRECISIONS: Final = ("fast", "standard", "exact")
FUSED: Final = {
    "fused": "fused products and sums, the CPU's bits",
    "float64": "products and sums through float64, the CPU's bits",
    "plain": "products and sums are rounded twice: other bits than the CPU's, repeatable",
}
"""What is told of each way of fused products and sums."""
UNTOLD_BYTES: Final = 2 << 30
"""For experts where `--vram` does not say how much memory there is: Vulkan tells no program what is free."""


class VulkanBackend(DeviceBackend):
    """One device, one precision. `isa` is `vulkan`, or `vulkan-software` for a rasteriser on the CPU.

    Raises UsageError for a precision that there is not, UnsupportedKernel where no device can be used.
    """

    name = NAME

    def __init__(
        self,
        *,
        threads: int | None = None,
        precision: Precision = "standard",
        table: CapabilityTable | None = None,
        fail_after: int | None = None,
        vram_bytes: int | None = None,
        notice: Callable[[str], None] | None = None,
    ) -> None:
        if precision not in PRECISIONS:
            raise UsageError(f"--precision {precision}: this version has {', '.join(PRECISIONS)}")
        self.gpu = open_gpu()
        declared = capabilities.declare(CapabilityTable()) if table is None else table
        super().__init__(Matrices(self.gpu), declared, threads=threads, precision=precision, fail_after=fail_after)
        self.isa = "vulkan-software" if self.gpu.software else "vulkan"
        self.tier = ExpertTier(self.gpu, free=self._free_bytes)
        self._vram_bytes = vram_bytes
        if self.gpu.software and notice is not None:
            notice(
                f"--backend vulkan: {self.gpu.name} is a software rasteriser on the CPU, for tests and not for speed"
            )

    @property
    def described(self) -> str:
        """The device in words: its name, whether it is none of its own, how products and sums are rounded."""
        kind = "software rasteriser, " if self.gpu.software else ""
        return f"{self.gpu.name} ({kind}{FUSED[self.gpu.fusion]})"

    def vector(self, name: str, values: F32) -> Vector:
        """Hold a copy of a parameter vector."""
        kept = np.array(values, np.float32)
        return Vector(name, len(kept), VectorBuffer(self.gpu.filled(kept, name), kept))

    def recorder(self, *, max_rows: int, max_outputs: int, page_tokens: int, pages: int) -> VulkanRecorder:
        """Start recording; buffers have `max_rows` rows, each KV plane `pages` pages of `page_tokens` tokens."""
        recorder = VulkanRecorder(
            backend=self.name,
            gpu=self.gpu,
            precision=self.precision,
            table=self.table,
            tier=self.tier,
            twin=self.twin(max_rows=max_rows, max_outputs=max_outputs, page_tokens=page_tokens, pages=pages),
            limits=Limits(max_rows, max_outputs, pages, page_tokens),
            guard=self._guard,
            ready=self._ready,
        )
        self._recorders.append(recorder)
        return recorder

    def values(self, vector: Vector) -> F32:
        """A parameter vector, on the host."""
        handle: VectorBuffer = vector.handle
        return handle.host

    def workspace_bytes(self) -> int:
        """Bytes of host memory that running takes: the buffers are on the device."""
        return 0

    def takes_experts(self, resident_bytes: int, expert_bytes: int) -> bool:
        """Whether all experts fit on the device beside matrices of so many bytes."""
        if self._vram_bytes is None:
            return expert_bytes <= UNTOLD_BYTES
        waiting = max(0, resident_bytes - self._matrices.nbytes)
        return expert_bytes * 1.02 <= self._free_bytes() - waiting

    def _free_bytes(self) -> int:
        """What is left for experts when all else is there: dense weights, pages and work come first."""
        if self._vram_bytes is None:
            return UNTOLD_BYTES
        return max(0, self._vram_bytes - self.vram_used())

    def _ready(self, experts: ExpertProvider | None) -> None:
        """What must be on the device before a program runs."""
        self._matrices.copy_all()
        self.tier.prepare(experts)


def open_backend(
    *,
    backend: str = NAME,
    threads: int | None = None,
    precision: Precision = "standard",
    isa: str = "auto",
    disable: Sequence[str] = (),
    strict: bool = False,
    notice: Callable[[str], None] | None = None,
    fail_after: int | None = None,
    vram_bytes: int | None = None,
) -> VulkanBackend:
    """The backend as options describe it. `isa` names instruction sets of the CPU and changes nothing here.

    Raises UsageError, and UnsupportedKernel where no device can be used.
    """
    table = capabilities.declare(CapabilityTable(strict=strict, notice=notice))
    table.disable(disable)
    return VulkanBackend(
        threads=threads,
        precision=precision,
        table=table,
        fail_after=fail_after,
        vram_bytes=vram_bytes,
        notice=notice,
    )
