"""Parts of stored matrices, read and replaced: code bytes, the grid of scales, weights as float32.

Knows formats by their objects and the oracle's reading of them; must not know kernels, devices or what is right.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from picaflor.conformance.case import Matrix, f32_matrix
from picaflor.conformance.check import Array
from picaflor.conformance.oracle_formats import read, unrotate
from picaflor.formats import REGISTRY

F64 = NDArray[np.float64]
U8 = NDArray[np.uint8]


def codes(matrix: Matrix) -> U8:
    """The bytes of the code plane, `[rows, bytes]`."""
    raw = np.ascontiguousarray(matrix.planes[0]).reshape(-1).view(np.uint8)
    return raw.reshape(matrix.rows, -1).copy()


def with_codes(matrix: Matrix, stored: U8) -> Matrix:
    """The matrix with other code bytes."""
    return replace(matrix, planes=(np.ascontiguousarray(stored), *matrix.planes[1:]))


def scales(matrix: Matrix) -> F64:
    """The grid of scales as it is stored: one per block of rows and group of columns."""
    spec = REGISTRY[matrix.format]
    if spec.scale.plane == -1:
        words = np.ascontiguousarray(codes(matrix).reshape(matrix.rows, -1, 98)[:, :, 96:])
        return words.view("<f2")[:, :, 0].astype(np.float64)
    plane = spec.planes[spec.scale.plane]
    raw = np.ascontiguousarray(matrix.planes[spec.scale.plane]).reshape(-1).view(np.uint8).view(plane.dtype)
    grid = raw.reshape(plane.shape(matrix.rows, matrix.cols, matrix.group_size)).astype(np.float64)
    if plane.dtype == np.uint8:
        grid = 2.0 ** (grid - 127)
    return grid.reshape(len(grid), -1)


def with_scales(matrix: Matrix, grid: F64) -> Matrix:
    """The matrix with another grid of scales; float32 weights where the format cannot hold them."""
    spec = REGISTRY[matrix.format]
    if spec.scale.plane == -1:
        stored = codes(matrix).reshape(matrix.rows, -1, 98)
        stored[:, :, 96:] = np.ascontiguousarray(grid.astype("<f2")[:, :, None]).view(np.uint8)
        return with_codes(matrix, stored.reshape(matrix.rows, -1))
    dtype = spec.planes[spec.scale.plane].dtype
    if dtype == np.uint8:
        exponents = np.log2(grid) + 127
        if not np.array_equal(exponents, np.round(exponents)):
            return with_spread(matrix, np.repeat(grid, spec.scale.cols, axis=1)[:, : matrix.cols])
        plane: Array = np.clip(exponents, 0, 254).astype(np.uint8)
    else:
        plane = grid.astype(dtype)
    return replace(matrix, planes=(matrix.planes[0], np.ascontiguousarray(plane)))


def with_spread(matrix: Matrix, spread: F64) -> Matrix:
    """Float32 weights with these scales, one per weight."""
    found = read(matrix.format, matrix.planes, matrix.rows, matrix.cols, matrix.group_size)
    return dense(matrix, found.codes * spread)


def dense(matrix: Matrix, weights: F64) -> Matrix:
    """Stored weights as a float32 matrix that does the same; rotated ones are turned back."""
    true = unrotate(weights) if REGISTRY[matrix.format].activation.rotated else weights
    return f32_matrix(true.astype(np.float32))


def weights(matrix: Matrix) -> F64:
    """The stored weights."""
    return read(matrix.format, matrix.planes, matrix.rows, matrix.cols, matrix.group_size).weights
