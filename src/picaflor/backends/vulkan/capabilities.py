"""What the backend `vulkan` can do: one cell per operation and format.

Knows names only; must not know kernels' insides, models or files, and does not import wgpu.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final

from picaflor.backends.table import NO_FORMAT, CapabilityTable, Cell, State

NAME: Final = "vulkan"
HOST: Final = "cpu"
"""What computes after a call of the device has failed."""
WEIGHT_OPS: Final = ("matmul", "expert_ffn")
ROW_OPS: Final = ("rows", "row_axpy")
FORMAT_FREE_OPS: Final[Mapping[str, State]] = MappingProxyType(
    {
        "rmsnorm": "native",
        "layernorm": "native",
        "rope": "native",
        "add": "native",
        "silu_mul": "native",
        "kv_write": "native",
        "index_select": "native",
        "attention": "native",
        "router": "native",
        "select_outputs": "native",
        "sample": "composed",  # the host draws, from the row of logits that comes back anyway
    }
)
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
ROTATED: Final[Mapping[str, str]] = MappingProxyType(
    {"e8-iq3-lattice": "its rows are stored rotated, a single row is not the weight's"}
)
"""Formats without row operations, and why."""


def cells() -> Iterator[Cell]:
    """Every cell."""
    for name, state in PRODUCTS.items():
        for op in WEIGHT_OPS:
            yield Cell(NAME, op, name, state)
        for op in ROW_OPS:
            refused = ROTATED.get(name)
            if refused is None:
                yield Cell(NAME, op, name, "native")
            else:
                yield Cell(NAME, op, name, "refused", reason=refused)
    for op, state in FORMAT_FREE_OPS.items():
        yield Cell(NAME, op, NO_FORMAT, state)


def declare(table: CapabilityTable) -> CapabilityTable:
    """Put the cells into a table. Nothing stands in for a disabled one: it is refused by its name."""
    table.declare(cells())
    return table
