"""How a chosen format lies in the container: tensors per matrix, their dtypes, and the encoding by blocks of rows.

Knows formats and header dtypes; must not know families, policies or where weights come from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from picaflor.container.writer import TensorSpec
from picaflor.errors import UsageError
from picaflor.formats.base import F32, Format, Plane, Planes

# Rows are encoded in blocks of this many, or a multiple: no scale block crosses that border.
ROW_BLOCK = 128
# Few enough that what encoding and measuring make of them stays in the processor's cache.
BLOCK_VALUES = 1 << 18

_FLOAT_DTYPES = {"f32": "F32", "bf16": "BF16", "f16": "F16"}
_SIDECAR_DTYPES = {np.dtype("<f4"): "F32", np.dtype("u1"): "U8"}
# The stamp's readers know these names only, and look at tensors with a sidecar only.
_STAMPED = frozenset(
    ("int8-row", "int4-row", "int2-row", "int4-grouped", "int3-g64", "e8-iq3-lattice", "fp8-e4m3-b128")
)


def stored_tensors(
    name: str, form: Format, rows: int, cols: int, group_size: int, *, resident: bool
) -> tuple[TensorSpec, ...]:
    """The tensors of one matrix, plane by plane: floats `[rows, cols]`, codes flat U8, a sidecar flat.

    Resident tensors with a sidecar are stamped.
    """
    if form.name in _FLOAT_DTYPES:
        return (TensorSpec(name, _FLOAT_DTYPES[form.name], (rows, cols)),)
    specs = []
    for index, plane in enumerate(form.planes):
        nbytes = plane.nbytes(rows, cols, group_size)
        if index == 0:
            stamp = form.name if resident and form.name in _STAMPED else None
            specs.append(TensorSpec(name, "U8", (nbytes,), stamp))
        else:
            dtype = _SIDECAR_DTYPES[plane.dtype]
            specs.append(TensorSpec(name + plane.suffix, dtype, (nbytes // plane.dtype.itemsize,)))
    return tuple(specs)


def row_blocks(rows: int, cols: int) -> Iterator[tuple[int, int]]:
    """(first, behind last) row of blocks of about BLOCK_VALUES weights; all but the last are multiples of ROW_BLOCK."""
    step = max(1, BLOCK_VALUES // max(1, cols * ROW_BLOCK)) * ROW_BLOCK
    for start in range(0, rows, step):
        yield start, min(rows, start + step)


def plane_slice(plane: Plane, rows: int, first: int, last: int, cols: int, group_size: int) -> slice:
    """Bytes of a plane that belong to rows `first .. last`, `first` a multiple of ROW_BLOCK.

    A plane whose size does not depend on the rows belongs to every block as a whole.
    """
    whole = plane.nbytes(rows, cols, group_size)
    if plane.nbytes(0, cols, group_size) == whole:
        return slice(0, whole)
    return slice(plane.nbytes(first, cols, group_size), plane.nbytes(last, cols, group_size))


def encode_blocks(
    read: Callable[[int, int], F32],
    form: Format,
    rows: int,
    cols: int,
    group_size: int,
    *,
    check: Callable[[F32, Planes], None],
) -> tuple[NDArray[Any], ...]:
    """Encode a matrix whose rows `read(first, last)` gives; one flat byte array per plane.

    `check(weights, planes)` sees every block. The bytes are those of `form.encode` on the whole matrix. Raises
    UsageError for a format without an encoder.
    """
    if form.encode is None:
        raise UsageError(f"format {form.name} has no encoder; nothing can be written in it")
    out = tuple(np.empty(plane.nbytes(rows, cols, group_size), np.uint8) for plane in form.planes)
    for first, last in row_blocks(rows, cols):
        weights = read(first, last)
        planes = form.encode(weights, group_size)
        check(weights, planes)
        for plane, target, values in zip(form.planes, out, planes, strict=True):
            part = plane_slice(plane, rows, first, last, cols, group_size)
            target[part] = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    return out


def named_arrays(specs: tuple[TensorSpec, ...], planes: tuple[NDArray[Any], ...]) -> dict[str, NDArray[Any]]:
    """Planes by the names of their tensors, as the writer takes them."""
    return {spec.name: plane for spec, plane in zip(specs, planes, strict=True)}
