"""What the Metal backend can do: one cell per operation and format.

Knows names only; must not know MLX, models or files. A format that MLX multiplies as it is stored, or after a lossless
change of layout, is native; one whose matrix is written out in float32 for each product is composed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final

from picaflor.backends import cells as devices
from picaflor.backends.cells import HOST, ROTATED, ROW_OPS, WEIGHT_OPS, device_cells
from picaflor.backends.cpu import capabilities as cpu
from picaflor.backends.table import CapabilityTable, Cell, State

__all__ = [
    "BACKEND", "FORMAT_FREE_OPS", "HOST", "PRODUCTS", "ROTATED", "ROW_OPS", "WEIGHT_OPS", "cells",
    "declare",
]  # fmt: skip

BACKEND: Final = "metal"
PRODUCTS: Final[Mapping[str, State]] = MappingProxyType(
    {
        "f32": "native",
        "bf16": "composed",
        "f16": "composed",
        "int8-row": "native",
        "int4-row": "native",
        "int2-row": "native",
        "int4-grouped": "native",
        "int3-g64": "native",
        "mxfp4": "native",
        "fp8-e4m3-b128": "composed",
    }
)
FORMAT_FREE_OPS: Final[Mapping[str, State]] = MappingProxyType(
    {
        **devices.FORMAT_FREE_OPS,
        **dict.fromkeys(("rope", "silu_mul", "index_select", "attention", "router"), "composed"),
    }
)


def cells() -> Iterator[Cell]:
    """Every cell of this backend."""
    yield from device_cells(BACKEND, PRODUCTS, FORMAT_FREE_OPS)
    for op in WEIGHT_OPS:
        yield Cell(
            BACKEND,
            op,
            ROTATED,
            "waived",
            to=HOST,
            reason="MLX has no product for lattice codes",
            cure="--backend cpu, or convert the model to int4-grouped",
        )


def declare(table: CapabilityTable) -> CapabilityTable:
    """Put this backend's cells into a table; the host stands in for a disabled one that it can do."""
    table.declare(cells())
    table.declare(devices.stand_ins(cpu.cells()))
    table.spare(BACKEND, HOST)
    return table
