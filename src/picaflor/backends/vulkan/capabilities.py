"""What the backend `vulkan` can do: one cell per operation and format.

Knows names only; must not know kernels' insides, models or files, and does not import wgpu.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final

from picaflor.backends.cells import FORMAT_FREE_OPS, HOST, ROW_OPS, WEIGHT_OPS, device_cells
from picaflor.backends.table import CapabilityTable, Cell, State

__all__ = ["FORMAT_FREE_OPS", "HOST", "NAME", "PRODUCTS", "ROW_OPS", "WEIGHT_OPS", "cells", "declare"]

NAME: Final = "vulkan"
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


def cells() -> Iterator[Cell]:
    """Every cell."""
    return device_cells(NAME, PRODUCTS, FORMAT_FREE_OPS)


def declare(table: CapabilityTable) -> CapabilityTable:
    """Put the cells into a table. Nothing stands in for a disabled one: it is refused by its name."""
    table.declare(cells())
    return table
