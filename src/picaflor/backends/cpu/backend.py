"""The CPU backend: holds weights where they lie in memory, records programs, samples.

Knows kernels by format name and the thread pool; must not know families, files or the expert store.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

import picaflor._native as _native
from picaflor.backends.api import Precision, Vector, Weight
from picaflor.backends.cpu import capabilities
from picaflor.backends.cpu.memory import allocate
from picaflor.backends.cpu.program import Faults
from picaflor.backends.cpu.recorder import CpuRecorder
from picaflor.backends.cpu.threads import default_threads
from picaflor.backends.held import check_planes
from picaflor.backends.table import NO_FORMAT, CapabilityTable, Cell
from picaflor.errors import UsageError
from picaflor.formats import REGISTRY
from picaflor.formats.base import F32

PLANES: Final[dict[str, int]] = {"fast": 1, "standard": 2, "exact": 3}
FORMAT_NUMBERS: Final = {name: number for number, name in enumerate(REGISTRY)}


@dataclass(frozen=True, slots=True)
class HeldMatrix:
    """A weight's handle: what the kernels see, and the arrays that must stay alive for it."""

    native: Any
    planes: tuple[NDArray[Any], ...]


class CpuBackend:
    """One pool of threads, one instruction set, one precision.

    `threads` None: all that affinity and quotas allow. `isa`: auto, scalar, avx2, avx512 or neon. Raises UsageError for
    a value that this build or machine does not have. `fail_after`: see `program.Faults`.
    """

    name = capabilities.BACKEND
    on_device = False

    def __init__(
        self,
        *,
        threads: int | None = None,
        precision: Precision = "standard",
        isa: str = "auto",
        table: CapabilityTable | None = None,
        fail_after: int | None = None,
    ) -> None:
        count = default_threads() if threads is None else threads
        if count < 1:
            raise UsageError(f"--threads {count}: at least 1 is needed")
        if precision not in PLANES:
            raise UsageError(f"--precision {precision}: this version has {', '.join(PLANES)}")
        try:
            self.isa: str = _native.check_isa(isa)
        except ValueError as error:
            raise UsageError(f"--isa {isa}: {error}") from error
        self.threads = count
        self.precision: Precision = precision
        self.table = capabilities.declare(CapabilityTable()) if table is None else table
        self._faults = None if fail_after is None else Faults(fail_after, self.table)
        self._sampler_isa = ""
        self._pool = _native.Pool(count)
        self._recorders: list[CpuRecorder] = []

    def allocate(self, nbytes: int) -> NDArray[np.uint8]:
        """Zeroed memory, untouched until written, with 64 more readable bytes behind it."""
        return allocate(nbytes)

    def weight(
        self, name: str, format_name: str, shape: tuple[int, int], group_size: int, planes: Sequence[NDArray[Any]]
    ) -> Weight:
        """Hold a matrix `[rows, cols]` without copying its planes; 64 bytes must be readable behind each.

        Raises UnsupportedKernel for a format that this backend does not know, ValueError for planes of the wrong size.
        Whether an operation on it is possible is asked when one is recorded.
        """
        self.table.cell(self.name, "matmul", format_name)
        rows, cols = shape
        check_planes(name, format_name, shape, group_size, planes)
        addresses = [plane.ctypes.data for plane in planes] + [0]
        native = _native.Weight(
            FORMAT_NUMBERS[format_name],
            rows,
            cols,
            group=group_size,
            codes=addresses[0],
            codes_bytes=planes[0].nbytes,
            scales=addresses[1],
            scales_bytes=planes[1].nbytes if len(planes) > 1 else 0,
        )
        return Weight(name, format_name, rows, cols, group_size, HeldMatrix(native, tuple(planes)))

    def vector(self, name: str, values: F32) -> Vector:
        """Hold a copy of a parameter vector."""
        memory = allocate(values.size * 4).view(np.float32)
        memory[:] = values
        return Vector(name, len(memory), memory)

    def recorder(self, *, max_rows: int, max_outputs: int, page_tokens: int, pages: int) -> CpuRecorder:
        """Start recording; buffers have `max_rows` rows, each KV plane `pages` pages of `page_tokens` tokens."""
        recorder = CpuRecorder(
            self._pool,
            isa=self.isa,
            planes=PLANES[self.precision],
            table=self.table,
            faults=self._faults,
            max_rows=max_rows,
            max_outputs=max_outputs,
            page_tokens=page_tokens,
            pages=pages,
        )
        self._recorders.append(recorder)
        return recorder

    def sample(self, logits: F32, *, temperature: float, top_p: float, uniform: float) -> int:
        """One token from logits `[vocabulary]`; argmax at temperature 0 or below."""
        if not self._sampler_isa:
            cell = self.table.select("sample", NO_FORMAT, self.name)
            self._sampler_isa = self.isa_of(cell)
            self.table.announce()
        row = np.ascontiguousarray(logits, dtype=np.float32)
        token: int = _native.sample(self._sampler_isa, row, temperature=temperature, top_p=top_p, uniform=uniform)
        return token

    def isa_of(self, cell: Cell) -> str:
        """The instruction set of the kernels behind a selected cell."""
        return capabilities.SCALAR_ISA if cell.backend == capabilities.SCALAR else self.isa

    def takes_experts(self, resident_bytes: int, expert_bytes: int) -> bool:
        """False: what they would come from is what they would go to."""
        return False

    def workspace_bytes(self) -> int:
        """Bytes that buffers of all recorders so far can come to, key-value planes not counted."""
        return sum(recorder.workspace_bytes() for recorder in self._recorders)

    def kv_bytes(self) -> int:
        """Bytes of key-value pages that have been written to so far."""
        return sum(recorder.kv_bytes() for recorder in self._recorders)


def open_backend(
    *,
    threads: int | None = None,
    precision: Precision = "standard",
    isa: str = "auto",
    disable: Sequence[str] = (),
    strict: bool = False,
    notice: Callable[[str], None] | None = None,
    fail_after: int | None = None,
) -> CpuBackend:
    """The backend as options describe it; of its calls those after the first `fail_after` fail. Raises UsageError."""
    table = capabilities.declare(CapabilityTable(strict=strict, notice=notice))
    table.disable(disable)
    return CpuBackend(threads=threads, precision=precision, isa=isa, table=table, fail_after=fail_after)
