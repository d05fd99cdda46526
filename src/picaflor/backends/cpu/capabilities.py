"""What the CPU backend can do: one cell per operation and format.

Knows names only; must not know kernels' insides, models or files. Nothing here is derived from the registry of formats:
a format that nobody wrote kernels for has no cells, and `CapabilityTable.missing` says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final

from picaflor.backends.table import NO_FORMAT, CapabilityTable, Cell, State

BACKEND: Final = "cpu"
SCALAR: Final = "cpu-scalar"
"""The plain C++ of the same operations: on every machine, the same bits, slower. What disabled cells fall back to."""

SCALAR_ISA: Final = "scalar"
WEIGHT_OPS: Final = ("matmul", "expert_ffn")
ROW_OPS: Final = ("rows", "row_axpy")
FORMAT_FREE_OPS: Final = (
    "rmsnorm",
    "layernorm",
    "rope",
    "add",
    "silu_mul",
    "kv_write",
    "index_select",
    "attention",
    "router",
    "select_outputs",
    "sample",
)

# How matrices of a format are multiplied: by a decode primitive of their own, or unpacked to the integer tile of
# another format first. The lattice has a loop of its own only where AVX-512 has VBMI and GFNI.
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
        "e8-iq3-lattice": "composed",
        "mxfp4": "native",
        "fp8-e4m3-b128": "native",
    }
)
ROTATED: Final = "e8-iq3-lattice"
"""The format whose rows are stored rotated: a row, or a sum of rows, is turned back after it was decoded."""


def cells() -> Iterator[Cell]:
    """Every cell of the CPU backend, then the same ones of its scalar kernels."""
    for backend in (BACKEND, SCALAR):
        for name, state in PRODUCTS.items():
            for op in WEIGHT_OPS:
                yield Cell(backend, op, name, state)
            for op in ROW_OPS:
                yield Cell(backend, op, name, "composed" if name == ROTATED else "native")
        for op in FORMAT_FREE_OPS:
            yield Cell(backend, op, NO_FORMAT, "native")


def declare(table: CapabilityTable) -> CapabilityTable:
    """Put the CPU's cells into a table, with the scalar kernels as what is left where one is disabled."""
    table.declare(cells())
    table.spare(BACKEND, SCALAR)
    return table
