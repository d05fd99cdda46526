"""The `metal` backend: MLX on Apple silicon, and MLX's CPU device elsewhere, for tests.

Knows devices, capabilities and recorders; must not know families, files or the expert store. Memory is one for host and
device: what MLX takes beside the host's planes is counted as the backend's work, once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import numpy as np

from picaflor.backends.api import ExpertProvider, Precision, Vector
from picaflor.backends.batches import Limits
from picaflor.backends.device import DeviceBackend
from picaflor.backends.metal import capabilities, library
from picaflor.backends.metal.capabilities import BACKEND
from picaflor.backends.metal.experts import MOST_GROWTH, Experts
from picaflor.backends.metal.library import CACHE_BYTES, copied, mx, on_host
from picaflor.backends.metal.recorder import MetalRecorder
from picaflor.backends.metal.weights import Matrices
from picaflor.backends.table import CapabilityTable
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


class MetalBackend(DeviceBackend):
    """One device in float32. Raises UsageError for a precision that there is not."""

    name = BACKEND
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
        declared = capabilities.declare(CapabilityTable()) if table is None else table
        matrices = Matrices(borrows=library.borrows())
        super().__init__(matrices, declared, threads=threads, precision=precision, fail_after=fail_after)
        self.isa = library.architecture()
        self._limit = _limit(vram_bytes)
        self._host_has_experts = False
        self.experts = Experts(self._expert_bytes)
        mx.set_cache_limit(CACHE_BYTES)
        if not library.on_metal() and notice is not None:
            notice(CPU_NOTICE)

    def vector(self, name: str, values: F32) -> Vector:
        """Hold a copy of a parameter vector."""
        return Vector(name, len(values), copied(np.array(values, np.float32)))

    def recorder(self, *, max_rows: int, max_outputs: int, page_tokens: int, pages: int) -> MetalRecorder:
        """Start recording; buffers have `max_rows` rows, each KV plane `pages` pages of `page_tokens` tokens."""
        sizes = {"max_rows": max_rows, "max_outputs": max_outputs, "page_tokens": page_tokens, "pages": pages}
        recorder = MetalRecorder(
            backend=self.name,
            table=self.table,
            twin=self.twin(**sizes),
            limits=Limits(max_rows, max_outputs, pages, page_tokens),
            experts=self.experts,
            host=partial(self.twin, **sizes),
            program={"guard": self._guard, "ready": self._ready},
        )
        self._recorders.append(recorder)
        return recorder

    def values(self, vector: Vector) -> F32:
        """A parameter vector, on the host."""
        values: F32 = on_host(vector.handle)
        return values

    def workspace_bytes(self) -> int:
        """Bytes of memory beside the host's planes: MLX's layouts, buffers and all pages of the cache."""
        return self.vram_used()

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
        self._matrices.copy_all()
        self.experts.prepare(experts)


def _limit(vram_bytes: int | None) -> int:
    """Bytes that MLX may take: what was asked for, at most the working set that Metal recommends."""
    recommended = library.working_set()
    if recommended is None:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return int(memory * CPU_SHARE) if vram_bytes is None else vram_bytes
    limit = recommended if vram_bytes is None else min(recommended, vram_bytes)
    mx.set_memory_limit(limit)
    return limit


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
