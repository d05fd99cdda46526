"""Cells that backends of devices have alike: operations by name, and what every one of them refuses.

Knows names only; must not know any device, kernels' insides, models or files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Final

from picaflor.backends.table import NO_FORMAT, Cell, State

HOST: Final = "cpu"
"""What computes after a call of a device has failed."""
WEIGHT_OPS: Final = ("matmul", "expert_ffn")
ROW_OPS: Final = ("rows", "row_axpy")
HOST_OPS: Final = ("rmsnorm", "layernorm", "rope", "add", "silu_mul", "router", "sample")
"""Operations without weights that the host can do in the middle of a program or behind it: what needs no keys."""
ROTATED: Final = "e8-iq3-lattice"
"""A format without row operations."""
_ROTATED_REASON: Final = "its rows are stored rotated, a single row is not the weight's"
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
"""Where a device has a kernel for each."""


def device_cells(backend: str, products: Mapping[str, State], plain: Mapping[str, State]) -> Iterator[Cell]:
    """Products by format, rows of the same formats where they are the weight's, and `plain` operations."""
    for name, state in products.items():
        for op in WEIGHT_OPS:
            yield Cell(backend, op, name, state)
    for name, state in products.items():
        if name != ROTATED:
            for op in ROW_OPS:
                yield Cell(backend, op, name, state)
    for op in ROW_OPS:
        yield Cell(backend, op, ROTATED, "refused", reason=_ROTATED_REASON)
    for op, state in plain.items():
        yield Cell(backend, op, NO_FORMAT, state)


def stand_ins(cells: Iterable[Cell]) -> Iterator[Cell]:
    """Of these, the host's that can stand in for a device's: products, rows of an embedding, what acts on one row."""
    for cell in cells:
        if cell.backend == HOST and (cell.op in (*WEIGHT_OPS, "rows") or cell.op in HOST_OPS):
            yield cell
