"""What backends of devices share: memory of the host, planned failures, drawing a token, the CPU that stands by.

Knows the CPU backend and the capability table; must not know any device, family or file.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

import picaflor._native as _native
from picaflor.backends.api import KVPlane, Precision, Vector, Weight
from picaflor.backends.cells import HOST
from picaflor.backends.cpu.backend import CpuBackend
from picaflor.backends.cpu.memory import allocate
from picaflor.backends.cpu.threads import default_threads
from picaflor.backends.held import Matrices
from picaflor.backends.host import HostTwin
from picaflor.backends.programs import DeviceFailed, Guard
from picaflor.backends.table import NO_FORMAT, CapabilityTable, Cell
from picaflor.formats.base import F32


class Recorded(Protocol):
    """A recorder, as far as its memory on the device is asked for."""

    def kv_bytes(self) -> int:
        """Bytes of key-value pages written to so far."""

    def workspace_bytes(self) -> int:
        """Bytes that buffers and tables take."""

    def plane_bytes(self) -> int:
        """Bytes of all planes."""


class DeviceBackend(ABC):
    """One device, one precision. `fail_after`: calls of the device after so many fail, and the host computes on.

    `calls` counts steps that ran on the device, by operation; `counted` are the counters, of other devices too, whose
    sum `fail_after` bounds. A subclass sets `name` and `isa`.
    """

    on_device = True
    name: str
    isa: str

    def __init__(
        self,
        matrices: Matrices[Any],
        table: CapabilityTable,
        *,
        threads: int | None,
        precision: Precision,
        fail_after: int | None,
    ) -> None:
        self.threads = default_threads() if threads is None else threads
        self.precision: Precision = precision
        self.table = table
        self.calls: Counter[str] = Counter()
        self.counted: Sequence[Counter[str]] = (self.calls,)
        self._fail_after = fail_after
        self._matrices = matrices
        self._recorders: list[Recorded] = []
        self._guard = Guard(self._allowed, self._failed)
        self._host: CpuBackend | None = None
        self._sampled = False

    @abstractmethod
    def values(self, vector: Vector) -> F32:
        """A parameter vector, on the host."""

    def allocate(self, nbytes: int) -> NDArray[np.uint8]:
        """Zeroed host memory, untouched until written, with 64 more readable bytes behind it."""
        return allocate(nbytes)

    def weight(
        self, name: str, format_name: str, shape: tuple[int, int], group_size: int, planes: Sequence[NDArray[Any]]
    ) -> Weight:
        """Hold a matrix `[rows, cols]`. The device gets it before the first program runs; its planes stay with the
        host, which computes on where the device fails.

        Raises UnsupportedKernel for a format that this backend does not know, ValueError for planes of the wrong size.
        """
        self.table.cell(self.name, "matmul", format_name)
        handle = self._matrices.bind(name, format_name, shape, group_size, planes)
        return Weight(name, format_name, *shape, group_size, handle)

    def sample(self, logits: F32, *, temperature: float, top_p: float, uniform: float) -> int:
        """One token from logits `[vocabulary]`, on the host; argmax at temperature 0 or below."""
        if not self._sampled:
            self.table.select("sample", NO_FORMAT, self.name)
            self.table.announce()
            self._sampled = True
        return sample_on_host(logits, temperature=temperature, top_p=top_p, uniform=uniform)

    def isa_of(self, cell: Cell) -> str:
        """What the kernels behind a selected cell run on: the device, or the CPU that stands in for it."""
        return self.isa if cell.backend == self.name else DeviceBackend.on_host(self).isa

    def kv_bytes(self) -> int:
        """Bytes of key-value pages that have been written to so far, on the device."""
        return sum(recorder.kv_bytes() for recorder in self._recorders)

    def vram_used(self) -> int:
        """Bytes of the device that matrices, buffers and pages take; experts are not counted."""
        buffers = sum(recorder.workspace_bytes() + recorder.plane_bytes() for recorder in self._recorders)
        return self._matrices.nbytes + buffers

    def twin(self, *, max_rows: int, max_outputs: int, page_tokens: int, pages: int) -> HostTwin:
        """What a recorder of these sizes tells the host."""
        sizes = {"max_rows": max_rows, "max_outputs": max_outputs, "page_tokens": page_tokens, "pages": pages}
        return HostTwin(open=self.on_host, sizes=sizes, fetch=_no_page, failed=_told, values=self.values)

    def on_host(self) -> CpuBackend:
        """The CPU backend, opened when it is first needed."""
        if self._host is None:
            self._host = CpuBackend(threads=self.threads, precision=self.precision)
        return self._host

    def _allowed(self, op: str) -> None:
        """Count a call of the device. Raises DeviceFailed for one that is to fail."""
        limit = self._fail_after
        if limit is not None and sum(calls.total() for calls in self.counted) >= limit:
            reason = f"PICAFLOR_FAIL_AFTER={limit} lets every call after the first {limit} fail"
            raise DeviceFailed(op, reason, "unset PICAFLOR_FAIL_AFTER")
        self.calls[op] += 1

    def _failed(self, failure: DeviceFailed) -> None:
        """Tell the table. Raises UnsupportedKernel under `--strict`."""
        self.table.failed(self.name, failure.call, reason=failure.reason, instead=HOST, cure=failure.cure)


def _no_page(plane: KVPlane, page: int) -> F32:
    raise RuntimeError(f"page {page} of {plane} was asked for before a recorder was made")


def _told(reason: str) -> None:
    """The program's guard has told of it already."""


def sample_on_host(logits: F32, *, temperature: float, top_p: float, uniform: float) -> int:
    """`Backend.sample` of the CPU."""
    row = np.ascontiguousarray(logits, dtype=np.float32)
    token: int = _native.sample("auto", row, temperature=temperature, top_p=top_p, uniform=uniform)
    return token
