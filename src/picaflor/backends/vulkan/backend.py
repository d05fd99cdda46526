"""The backend `vulkan`: kernels in WGSL, memory and queues from wgpu, for graphics of every maker.

Knows the device, capabilities and recorders; must not know families, files or the expert store. `open_backend` fails
with the reason where no device can be used; nothing else is then tried.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

import picaflor._native as _native
from picaflor.backends.api import ExpertProvider, KVPlane, Precision, Vector, Weight
from picaflor.backends.batches import Limits
from picaflor.backends.cpu.backend import CpuBackend
from picaflor.backends.cpu.memory import allocate
from picaflor.backends.cpu.threads import default_threads
from picaflor.backends.host import HostTwin
from picaflor.backends.table import NO_FORMAT, CapabilityTable, Cell
from picaflor.backends.vulkan import capabilities
from picaflor.backends.vulkan.capabilities import HOST, NAME
from picaflor.backends.vulkan.device import open_gpu
from picaflor.backends.vulkan.program import DeviceFailed, VectorBuffer
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


class VulkanBackend:
    """One device, one precision. `fail_after`: calls of the device after so many fail, and the host computes on.

    `calls` counts steps that ran on the device, by operation. `isa` is `vulkan`, or `vulkan-software` for a rasteriser
    on the CPU. Raises UsageError for a precision that there is not, UnsupportedKernel where no device can be used.
    """

    on_device = True
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
        self.isa = "vulkan-software" if self.gpu.software else "vulkan"
        self.threads = default_threads() if threads is None else threads
        self.precision: Precision = precision
        self.table = capabilities.declare(CapabilityTable()) if table is None else table
        self.calls: Counter[str] = Counter()
        self.tier = ExpertTier(self.gpu, free=self._free_bytes)
        self._fail_after = fail_after
        self._vram_bytes = vram_bytes
        self._notice = notice
        self._matrices = Matrices(self.gpu)
        self._recorders: list[VulkanRecorder] = []
        self._sampled = False
        if self.gpu.software and notice is not None:
            notice(
                f"--backend vulkan: {self.gpu.name} is a software rasteriser on the CPU, for tests and not for speed"
            )

    @property
    def described(self) -> str:
        """The device in words: its name, whether it is none of its own, how products and sums are rounded."""
        kind = "software rasteriser, " if self.gpu.software else ""
        return f"{self.gpu.name} ({kind}{FUSED[self.gpu.fusion]})"

    def allocate(self, nbytes: int) -> NDArray[np.uint8]:
        """Zeroed host memory, untouched until written, with 64 more readable bytes behind it."""
        return allocate(nbytes)

    def weight(
        self, name: str, format_name: str, shape: tuple[int, int], group_size: int, planes: Sequence[NDArray[Any]]
    ) -> Weight:
        """Hold a matrix `[rows, cols]`. Its planes are copied to the device before the first program runs; they stay
        with the host, which computes on where the device fails.

        Raises UnsupportedKernel for a format that this backend does not know, ValueError for planes of the wrong size.
        """
        self.table.cell(self.name, "matmul", format_name)
        handle = self._matrices.bind(name, format_name, shape, group_size, planes)
        return Weight(name, format_name, *shape, group_size, handle)

    def vector(self, name: str, values: F32) -> Vector:
        """Hold a copy of a parameter vector."""
        kept = np.array(values, np.float32)
        return Vector(name, len(kept), VectorBuffer(self.gpu.filled(kept, name), kept))

    def recorder(self, *, max_rows: int, max_outputs: int, page_tokens: int, pages: int) -> VulkanRecorder:
        """Start recording; buffers have `max_rows` rows, each KV plane `pages` pages of `page_tokens` tokens."""
        sizes = {"max_rows": max_rows, "max_outputs": max_outputs, "page_tokens": page_tokens, "pages": pages}
        twin = HostTwin(open=self._host, sizes=sizes, fetch=_no_page, failed=self._failed, values=_values)
        recorder = VulkanRecorder(
            backend=self.name,
            gpu=self.gpu,
            precision=self.precision,
            table=self.table,
            tier=self.tier,
            twin=twin,
            limits=Limits(max_rows, max_outputs, pages, page_tokens),
            allowed=self._allowed,
            ready=self._ready,
        )
        self._recorders.append(recorder)
        return recorder

    def sample(self, logits: F32, *, temperature: float, top_p: float, uniform: float) -> int:
        """One token from logits `[vocabulary]`, on the host; argmax at temperature 0 or below."""
        if not self._sampled:
            self.table.select("sample", NO_FORMAT, self.name)
            self.table.announce()
            self._sampled = True
        row = np.ascontiguousarray(logits, dtype=np.float32)
        token: int = _native.sample("auto", row, temperature=temperature, top_p=top_p, uniform=uniform)
        return token

    def isa_of(self, cell: Cell) -> str:
        """What the kernels behind a selected cell run on."""
        return self.isa

    def workspace_bytes(self) -> int:
        """Bytes of host memory that running takes: the buffers are on the device."""
        return 0

    def kv_bytes(self) -> int:
        """Bytes of key-value pages that have been written to so far, on the device."""
        return sum(recorder.kv_bytes() for recorder in self._recorders)

    def vram_used(self) -> int:
        """Bytes of the device that matrices, buffers and pages take; experts are not counted."""
        buffers = sum(recorder.workspace_bytes() + recorder.plane_bytes() for recorder in self._recorders)
        return self._matrices.nbytes + buffers

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

    def _allowed(self, op: str) -> None:
        """Count a call of the device. Raises DeviceFailed for one that is to fail."""
        if self._fail_after is not None and self.calls.total() >= self._fail_after:
            raise DeviceFailed(op)
        self.calls[op] += 1

    def _failed(self, call: str) -> None:
        """Tell the table. Raises UnsupportedKernel under `--strict`."""
        limit = self._fail_after
        self.table.failed(
            self.name,
            call,
            reason=f"PICAFLOR_FAIL_AFTER={limit} lets every call after the first {limit} fail",
            instead=HOST,
            cure="unset PICAFLOR_FAIL_AFTER",
        )

    def _host(self) -> CpuBackend:
        return CpuBackend(threads=self.threads, precision=self.precision)


def _no_page(plane: KVPlane, page: int) -> F32:
    raise RuntimeError(f"page {page} of {plane} was asked for before a recorder was made")


def _values(vector: Vector) -> F32:
    handle: VectorBuffer = vector.handle
    return handle.host


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
