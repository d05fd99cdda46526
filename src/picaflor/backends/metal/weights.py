"""Matrices that the Metal backend holds, laid out for MLX when first used.

Knows host planes and MLX's layouts; must not know operations or files.
"""

from __future__ import annotations

import numpy as np

from picaflor.backends import held
from picaflor.backends.held import Planes, check_planes
from picaflor.backends.metal import layout
from picaflor.backends.metal.library import mx

HeldMatrix = held.HeldMatrix[layout.Held]


class Matrices(held.Matrices[layout.Held]):
    """All matrices of one backend. `nbytes` counts all that were bound, laid out or not; planes that MLX uses where
    they lie (`borrows`) do not count."""

    def __init__(self, *, borrows: bool) -> None:
        super().__init__()
        self._borrows = borrows

    def bind(self, name: str, format_name: str, shape: tuple[int, int], group_size: int, planes: Planes) -> HeldMatrix:
        """A handle; one of a format that MLX does not multiply stays with the host. Raises ValueError for planes of the
        wrong size."""
        if format_name not in layout.FORMATS:
            check_planes(name, format_name, shape, group_size, planes)
            return self.handle(name, format_name, shape, group_size, planes)
        bound = super().bind(name, format_name, shape, group_size, planes)
        self._sizes[bound.key] = layout.nbytes(format_name, shape, group_size, borrows=self._borrows)
        return bound

    def made(self, matrix: HeldMatrix) -> layout.Held:
        """MLX's arrays of a matrix."""
        raw = [plane.reshape(-1).view(np.uint8) for plane in matrix.host]
        laid_out = layout.held(matrix.format, (matrix.rows, matrix.cols), matrix.group_size, raw)
        mx.eval(*layout.arrays(laid_out))
        return laid_out
