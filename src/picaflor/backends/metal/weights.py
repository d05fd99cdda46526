"""Matrices that the Metal backend holds: bound while their bytes may still be on disk, laid out when first used.

Knows host planes and MLX's layouts; must not know operations or files. Host planes are read and never written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from picaflor.backends.metal import layout
from picaflor.backends.metal.layout import Held
from picaflor.backends.metal.library import mx
from picaflor.formats import REGISTRY

Planes = Sequence[NDArray[Any]]


class HeldMatrix:
    """A weight's handle. `host` are the planes as they were given; `device` lays them out when first asked for."""

    def __init__(self, held: Matrices, format_name: str, shape: tuple[int, int], group_size: int, host: Planes) -> None:
        self.format = format_name
        self.shape = shape
        self.group_size = group_size
        self.host = tuple(host)
        self._held = held
        self._device: Held | None = None

    @property
    def device(self) -> Held:
        """The matrix as MLX has it."""
        if self._device is None:
            self._device = self._held.lay_out(self)
        return self._device


class Matrices:
    """All matrices of one backend; those that lie on the same bytes (a tied head) share their arrays."""

    def __init__(self, *, borrows: bool) -> None:
        self._borrows = borrows
        self._waiting: list[HeldMatrix] = []
        self._arrays: dict[tuple[Any, ...], Held] = {}
        self._sizes: dict[tuple[Any, ...], int] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of MLX's memory for all that were bound, laid out or not; planes used where they lie do not count."""
        return sum(self._sizes.values())

    def bind(self, name: str, format_name: str, shape: tuple[int, int], group_size: int, planes: Planes) -> HeldMatrix:
        """A handle. Raises ValueError for planes of the wrong size."""
        rows, cols = shape
        expected = [plane.nbytes(rows, cols, group_size) for plane in REGISTRY[format_name].planes]
        found = [plane.nbytes for plane in planes]
        if found != expected or not all(plane.flags.c_contiguous for plane in planes):
            raise ValueError(f"{name}: planes of {found} bytes, {format_name} {rows}x{cols} has {expected}, contiguous")
        made = HeldMatrix(self, format_name, shape, group_size, planes)
        if format_name in layout.FORMATS:
            self._waiting.append(made)
            self._sizes[_key(made)] = layout.nbytes(format_name, shape, group_size, borrows=self._borrows)
        return made

    def lay_out(self, matrix: HeldMatrix) -> Held:
        """MLX's arrays of a matrix, made now if there are none."""
        key = _key(matrix)
        if key not in self._arrays:
            raw = [plane.reshape(-1).view(np.uint8) for plane in matrix.host]
            self._arrays[key] = layout.held(matrix.format, matrix.shape, matrix.group_size, raw)
            mx.eval(*layout.arrays(self._arrays[key]))
        return self._arrays[key]

    def lay_out_all(self) -> None:
        """Lay out what was bound since the last call. Its bytes must be there."""
        for matrix in self._waiting:
            _ = matrix.device
        self._waiting.clear()


def _key(matrix: HeldMatrix) -> tuple[Any, ...]:
    addresses = tuple(plane.ctypes.data for plane in matrix.host)
    return (matrix.format, matrix.shape, matrix.group_size, addresses)
