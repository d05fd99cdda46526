"""What the GPU backends can do: one cell per operation and format, for `cuda` and `rocm` alike (one Triton source).

Knows names only; must not know kernels' insides, models or files, and imports neither torch nor Triton.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final, Literal

from picaflor.backends.cells import FORMAT_FREE_OPS, HOST, device_cells, stand_ins
from picaflor.backends.cpu import capabilities as cpu
from picaflor.backends.table import CapabilityTable, Cell, State

Name = Literal["cuda", "rocm"]
BACKENDS: Final[tuple[Name, ...]] = ("cuda", "rocm")
PRODUCTS: Final[Mapping[str, State]] = MappingProxyType(
    {
        "f32": "native",
        "bf16": "native",
        "f16": "native",
        "int8-row": "native",
        "int4-row": "native",
        "int2-row": "native",
        "int4-grouped": "native",
        "int3-g64": "native",
        "e8-iq3-lattice": "native",
        "mxfp4": "native",
        "fp8-e4m3-b128": "native",
    }
)


def cells(backend: Name) -> Iterator[Cell]:
    """Every cell of one backend."""
    return device_cells(backend, PRODUCTS, {**FORMAT_FREE_OPS, "sample": "native"})


def declare(table: CapabilityTable, backend: Name) -> CapabilityTable:
    """Put one backend's cells into a table; the host stands in for a disabled one that it can do."""
    table.declare(cells(backend))
    table.declare(stand_ins(cpu.cells()))
    table.spare(backend, HOST)
    return table
