"""Matrices that the backend holds: bound while their bytes may still be on disk, copied to the device once.

Knows host planes and buffers; must not know kernels, operations or files. A matrix that one binding cannot hold lies in
parts of whole rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from picaflor.backends.vulkan.decode import Reader, Shape, aligned, shape_of, wide
from picaflor.backends.vulkan.device import SLACK_BYTES, Buffer, Gpu
from picaflor.formats import REGISTRY

Planes = Sequence[NDArray[Any]]
PART_ROWS: Final = 128
"""Parts begin at multiples of so many rows: those of the blocks that a scale may cover."""


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Rows `first .. first + rows` of a matrix; `scales` is `codes` for a format without a plane of scales."""

    first: int
    rows: int
    codes: Buffer
    scales: Buffer


class HeldMatrix:
    """A weight's handle. `host` are the planes as they were given; `parts` copies them when first asked for."""

    def __init__(self, held: Matrices, name: str, format_name: str, shape: tuple[int, int], group_size: int,
                 host: Planes) -> None:  # fmt: skip
        self.name = name
        self.format = format_name
        self.rows, self.cols = shape
        self.group_size = group_size
        self.host = tuple(host)
        self.shape: Shape = shape_of(format_name, self.cols, group_size)
        self._held = held
        self._parts: list[Part] | None = None

    @property
    def parts(self) -> list[Part]:
        """The matrix on the device."""
        if self._parts is None:
            self._parts = self._held.copy(self)
        return self._parts

    def reader(self, *, vectors: bool) -> Reader:
        """Functions that read it, in vectors where asked for and possible."""
        in_vectors = vectors and wide(self.format, self.shape.group, self.shape.row_bytes)
        return Reader(self.format, "", "codes", "scales", in_vectors,
                      aligned(self.format, self.shape.row_bytes), True)  # fmt: skip


class Matrices:
    """All matrices of one backend; those that lie on the same bytes (a tied head) share their copy."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._waiting: list[HeldMatrix] = []
        self._copies: dict[tuple[Any, ...], list[Part]] = {}
        self.nbytes = 0

    def bind(self, name: str, format_name: str, shape: tuple[int, int], group_size: int, planes: Planes) -> HeldMatrix:
        """A handle. Raises ValueError for planes of the wrong size."""
        rows, cols = shape
        expected = [plane.nbytes(rows, cols, group_size) for plane in REGISTRY[format_name].planes]
        found = [plane.nbytes for plane in planes]
        if found != expected or not all(plane.flags.c_contiguous for plane in planes):
            raise ValueError(f"{name}: planes of {found} bytes, {format_name} {rows}x{cols} has {expected}, contiguous")
        made = HeldMatrix(self, name, format_name, shape, group_size, planes)
        self._waiting.append(made)
        return made

    def copy(self, matrix: HeldMatrix) -> list[Part]:
        """The copy on the device, made now if there is none."""
        addresses = tuple(plane.ctypes.data for plane in matrix.host)
        key = (matrix.format, matrix.rows, matrix.cols, matrix.group_size, addresses)
        if key not in self._copies:
            self._copies[key] = self._made(matrix)
            self.nbytes += sum(plane.nbytes for plane in matrix.host)
        return self._copies[key]

    def copy_all(self) -> None:
        """Copy what was bound since the last call. Its bytes must be there."""
        for matrix in self._waiting:
            _ = matrix.parts
        self._waiting.clear()

    def _made(self, matrix: HeldMatrix) -> list[Part]:
        step = matrix.rows
        if matrix.rows * matrix.shape.row_bytes + SLACK_BYTES > self._gpu.most_bytes:
            step = (self._gpu.most_bytes - SLACK_BYTES) // matrix.shape.row_bytes // PART_ROWS * PART_ROWS
        return [self._part(matrix, first, min(step, matrix.rows - first)) for first in range(0, matrix.rows, step)]

    def _part(self, matrix: HeldMatrix, first: int, rows: int) -> Part:
        buffers = []
        for plane, values in zip(REGISTRY[matrix.format].planes, matrix.host, strict=True):
            raw = values.reshape(-1).view(np.uint8)
            start = plane.nbytes(first, matrix.cols, matrix.group_size) if first else 0
            stop = plane.nbytes(first + rows, matrix.cols, matrix.group_size)
            buffers.append(self._gpu.filled(raw[min(start, stop) : stop], matrix.name))
        return Part(first, rows, buffers[0], buffers[-1])
