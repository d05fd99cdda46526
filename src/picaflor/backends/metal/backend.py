"""The `metal` backend: MLX on Apple silicon, and MLX's CPU device elsewhere, for tests.

Knows devices, capabilities and recorders; must not know families, files or the expert store. Memory is one for host and
device: what MLX takes beside the host's planes is counted as the backend's work, once.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

import picaflor._native as _native
from picaflor.backends.api import ExpertProvider, Precision, Vector, Weight
from picaflor.backends.batches import Limits
from picaflor.backends.cpu.backend import CpuBackend
from picaflor.backends.cpu.memory import allocate
from picaflor.backends.cpu.threads import default_threads
from picaflor.backends.host import HostTwin
from picaflor.backends.metal import capabilities, library
from picaflor.backends.metal.capabilities import BACKEND, HOST
from picaflor.backends.metal.experts import MOST_GROWTH, Experts
from picaflor.backends.metal.library import CACHE_BYTES, copied, mx, on_host
from picaflor.backends.metal.program import DeviceFailed
from picaflor.backends.metal.recorder import MetalRecorder
from picaflor.backends.metal.weights import Matrices
from picaflor.backends.table import NO_FORMAT, CapabilityTable, Cell
from picaflor.errors import OutOfBudget, UsageError
from picaflor.formats.base import F32
from picaflor.sizes import format_bytes

PRECISIONS: Final = ("standard",)
SCRATCH_BYTES: Final = 512 << 20
"""Left free for scores, products under way and what MLX keeps for later."""
CPU_SHARE: Final = 0.5
"""Part of the memory of a machine without Metal that is used where nothing is asked for."""
CPU_NOTICE: Final = (
    "backend metal: MLX has no Metal device here and computes on its CPU device, which is for tests and slow; "
    "--backend cpu is the backend for this machine"
)


class MetalBackend:
    """One device in float32. `fail_after`: calls of the device after so many fail, and the host computes on.

    `calls` counts steps that ran on the device, by operation. Raises UsageError for a precision that there is not.
    """

    name = BACKEND
    on_device = True
    precisions = PRECISIONS
    stores_activations = False

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
            raise UsageError(
                f"--precision {precision}: backend {BACKEND} multiplies float32 activations and has no other way; "
                f"accepted: {', '.join(PRECISIONS)}"
            )
        self.isa = library.architecture()
        self.threads = default_threads() if threads is None else threads
        self.precision: Precision = precision
        self.table = capabilities.declare(CapabilityTable()) if table is None else table
        self.calls: Counter[str] = Counter()
        self._fail_after = fail_after
        self._limit = _limit(vram_bytes)
        self._matrices = Matrices(borrows=library.borrows())
        self._recorders: list[MetalRecorder] = []
        self._host: CpuBackend | None = None
        self._sampled = False
        self._host_has_experts = False
        self.experts = Experts(self._expert_bytes)
        mx.set_cache_limit(CACHE_BYTES)
        if not library.on_metal() and notice is not None:
            notice(CPU_NOTICE)

    def allocate(self, nbytes: int) -> NDArray[np.uint8]:
        """Zeroed host memory, untouched until written, with 64 more readable bytes behind it."""
        return allocate(nbytes)

    def weight(
        self, name: str, format_name: str, shape: tuple[int, int], group_size: int, planes: Sequence[NDArray[Any]]
    ) -> Weight:
        """Hold a matrix `[rows, cols]`; MLX lays it out before the first program runs.

        Raises UnsupportedKernel for a format that this backend does not know, ValueError for planes of the wrong size.
        """
        self.table.cell(self.name, "matmul", format_name)
        return Weight(
            name, format_name, *shape, group_size, self._matrices.bind(name, format_name, shape, group_size, planes)
        )

    def vector(self, name: str, values: F32) -> Vector:
        """Hold a copy of a parameter vector."""
        return Vector(name, len(values), copied(np.array(values, np.float32)))

    def recorder(self, *, max_rows: int, max_outputs: int, page_tokens: int, pages: int) -> MetalRecorder:
        """Start recording; buffers have `max_rows` rows, each KV plane `pages` pages of `page_tokens` tokens."""
        limits = Limits(max_rows, max_outputs, pages, page_tokens)

        def twin() -> HostTwin:
            sizes = {"max_rows": max_rows, "max_outputs": max_outputs, "page_tokens": page_tokens, "pages": pages}
            return HostTwin(open=self._on_host, sizes=sizes, fetch=_no_page, failed=lambda _: None, values=_values)

        recorder = MetalRecorder(
            backend=self.name,
            table=self.table,
            twin=twin(),
            limits=limits,
            experts=self.experts,
            host=twin,
            program={"allowed": self._allowed, "failed": self._failed, "ready": self._ready},
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
        """The architecture that the kernels behind a selected cell run on."""
        return self.isa if cell.backend == self.name else self._on_host().isa

    def workspace_bytes(self) -> int:
        """Bytes of memory beside the host's planes: MLX's layouts, buffers and all pages of the cache."""
        return self._matrices.nbytes + sum(r.workspace_bytes() + r.plane_bytes() for r in self._recorders)

    def kv_bytes(self) -> int:
        """Bytes of key-value pages that have been written to so far."""
        return sum(recorder.kv_bytes() for recorder in self._recorders)

    def vram_used(self) -> int:
        """Bytes that matrices, buffers and pages take in MLX's memory; experts are not counted."""
        return self.workspace_bytes()

    def takes_experts(self, resident_bytes: int, expert_bytes: int) -> bool:
        """Whether all experts fit into MLX's memory beside all else, so that the host keeps none.

        Where they do not, the host's slots hold them and MLX keeps none: memory is one, and nothing lies there twice.
        """
        self._host_has_experts = resident_bytes + expert_bytes * MOST_GROWTH > self._free_bytes()
        return not self._host_has_experts

    def _expert_bytes(self) -> int:
        return 0 if self._host_has_experts else self._free_bytes()

    def _free_bytes(self) -> int:
        """What is left for experts when all else is there."""
        return max(0, self._limit - self.workspace_bytes() - SCRATCH_BYTES)

    def _ready(self, experts: ExpertProvider | None) -> None:
        """What must be in MLX's memory before a program runs. Raises OutOfBudget beyond the working set."""
        needed = self.workspace_bytes()
        if needed > self._limit:
            raise OutOfBudget(
                f"matrices, buffers and cache need {format_bytes(needed)} of MLX's memory, "
                f"{format_bytes(self._limit)} are granted: raise --vram, or lower --ctx or --prefill-chunk"
            )
        self._matrices.lay_out_all()
        self.experts.prepare(experts)

    def _allowed(self, op: str) -> None:
        """Count a call of the device. Raises DeviceFailed for one that is to fail."""
        limit = self._fail_after
        if limit is not None and self.calls.total() >= limit:
            reason = f"PICAFLOR_FAIL_AFTER={limit} lets every call after the first {limit} fail"
            raise DeviceFailed(op, reason, "unset PICAFLOR_FAIL_AFTER")
        self.calls[op] += 1

    def _failed(self, failure: DeviceFailed) -> None:
        """Tell the table. Raises UnsupportedKernel under `--strict`."""
        self.table.failed(self.name, failure.call, reason=failure.reason, instead=HOST, cure=failure.cure)

    def _on_host(self) -> CpuBackend:
        if self._host is None:
            self._host = CpuBackend(threads=self.threads, precision=self.precision)
        return self._host


def _limit(vram_bytes: int | None) -> int:
    """Bytes that MLX may take: what was asked for, at most the working set that Metal recommends."""
    recommended = library.working_set()
    if recommended is None:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return int(memory * CPU_SHARE) if vram_bytes is None else vram_bytes
    limit = recommended if vram_bytes is None else min(recommended, vram_bytes)
    mx.set_memory_limit(limit)
    return limit


def _no_page(plane: object, page: int) -> F32:
    raise RuntimeError(f"page {page} of {plane} was asked for before a recorder was made")


def _values(vector: Vector) -> F32:
    values: F32 = on_host(vector.handle)
    return values


def open_backend(
    *,
    backend: str = BACKEND,
    threads: int | None = None,
    precision: Precision = "standard",
    isa: str = "auto",
    disable: Sequence[str] = (),
    strict: bool = False,
    notice: Callable[[str], None] | None = None,
    fail_after: int | None = None,
    vram_bytes: int | None = None,
) -> MetalBackend:
    """The backend as options describe it. `isa` names instruction sets of the CPU and changes nothing here.

    Raises UsageError.
    """
    table = capabilities.declare(CapabilityTable(strict=strict, notice=notice))
    table.disable(disable)
    return MetalBackend(
        threads=threads, precision=precision, table=table, fail_after=fail_after, vram_bytes=vram_bytes, notice=notice
    )
