"""Thin access to the native matrix kernels: one weight, one product.

Knows formats by name and numpy; must not know models, programs or files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from picaflor import _native, formats
from picaflor.backends.cpu.memory import allocate
from picaflor.formats.base import F32, Planes

PLANES: Final = {"fast": 1, "standard": 2, "exact": 3}
FORMAT_NUMBERS: Final = {name: number for number, name in enumerate(formats.REGISTRY)}


@dataclass(frozen=True, slots=True)
class HeldWeight:
    """A matrix `[rows, cols]` whose planes lie in memory that kernels may read; `keep` owns it."""

    format: str
    rows: int
    cols: int
    group_size: int
    native: Any
    keep: tuple[NDArray[np.uint8], ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all planes that a product reads."""
        return sum(plane.nbytes for plane in self.keep)


def hold(format_name: str, planes: Planes, rows: int, cols: int, group_size: int = 0) -> HeldWeight:
    """Copy the planes of a matrix to where kernels may read them. Raises ValueError for sizes that do not fit."""
    return place_planes(format_name, planes, rows, cols, group_size, allocate)


def place_planes(
    format_name: str,
    planes: Planes,
    rows: int,
    cols: int,
    group_size: int,
    place: Callable[[int], NDArray[np.uint8]],
) -> HeldWeight:
    """Copy the planes to memory that `place(nbytes)` gives. Raises ValueError for sizes that do not fit."""
    keep = []
    for plane in planes:
        raw = np.ascontiguousarray(plane).reshape(-1).view(np.uint8)
        memory = place(raw.nbytes)
        memory[:] = raw
        keep.append(memory)
    sizes = [(memory.ctypes.data, memory.nbytes) for memory in keep] + [(0, 0)]
    native = _native.Weight(
        FORMAT_NUMBERS[format_name],
        rows,
        cols,
        group=group_size,
        codes=sizes[0][0],
        codes_bytes=sizes[0][1],
        scales=sizes[1][0],
        scales_bytes=sizes[1][1],
    )
    return HeldWeight(format_name, rows, cols, group_size, native, tuple(keep))


def matmul(
    weight: HeldWeight, x: F32, *, planes: int, isa: str = "auto", row_begin: int = 0, row_end: int | None = None
) -> F32:
    """x `[n, cols]` times W: float32 `[n, rows]` on one thread; rows outside the range are 0."""
    end = weight.rows if row_end is None else row_end
    product: F32 = _native.matmul(isa, weight.native, planes, np.ascontiguousarray(x, np.float32), row_begin, end)
    return product


def prepare(weight: HeldWeight, x: F32, *, planes: int, isa: str = "auto") -> NDArray[np.uint8]:
    """The prepared bytes of x `[n, cols]`: uint8 `[n, stride]`."""
    prepared: NDArray[np.uint8] = _native.prepare(isa, weight.native, planes, np.ascontiguousarray(x, np.float32))
    return prepared


def decode(weight: HeldWeight, *, isa: str = "auto") -> F32:
    """Every row by decode_row: float32 `[rows, cols]`, for e8 the stored, rotated rows."""
    return np.stack([_native.decode_row(isa, weight.native, row) for row in range(weight.rows)])
