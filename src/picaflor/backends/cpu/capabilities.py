"""What the CPU backend can do: one cell per operation and format.

Knows names only; must not know kernels' insides, models or files.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from picaflor.backends.table import NO_FORMAT, Cell, State
from picaflor.formats import REGISTRY

BACKEND: Final = "cpu"
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

# These matrices are unpacked to the integer or float tile of another format before they are multiplied.
UNPACKED: Final = frozenset({"int2-row", "int3-g64", "e8-iq3-lattice"})


def cells() -> Iterator[Cell]:
    """Every cell of the CPU backend."""
    for name, spec in REGISTRY.items():
        state: State = "composed" if name in UNPACKED else "native"
        for op in WEIGHT_OPS:
            yield Cell(BACKEND, op, name, state)
        for op in ROW_OPS:
            if spec.activation.rotated:
                reason = "its rows are stored rotated, a single row is not the weight's"
                yield Cell(BACKEND, op, name, "refused", reason=reason)
            else:
                yield Cell(BACKEND, op, name, "native")
    for op in FORMAT_FREE_OPS:
        yield Cell(BACKEND, op, NO_FORMAT, "native")
