"""Matrices that the Vulkan backend holds: copied to the device, in parts of whole rows where one binding is too small.

Knows host planes and buffers; must not know kernels, operations or files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from picaflor.backends import held
from picaflor.backends.held import Planes
from picaflor.backends.vulkan.decode import Reader, Shape, aligned, shape_of, wide
from picaflor.backends.vulkan.device import SLACK_BYTES, Buffer, Gpu
from picaflor.formats import REGISTRY

PART_ROWS: Final = 128
"""Parts begin at multiples of so many rows: those of the blocks that a scale may cover."""


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Rows `first .. first + rows` of a matrix; `scales` is `codes` for a format without a plane of scales."""

    first: int
    rows: int
    codes: Buffer
    scales: Buffer


class HeldMatrix(held.HeldMatrix[list[Part]]):
    """A weight's handle; `device` are its parts."""

    @property
    def shape(self) -> Shape:
        """Numbers that kernels get of it."""
        return shape_of(self.format, self.cols, self.group_size)

    @property
    def parts(self) -> list[Part]:
        """The matrix on the device."""
        return self.device

    def reader(self, *, vectors: bool) -> Reader:
        """Functions that read it, in vectors where asked for and possible."""
        shape = self.shape
        in_vectors = vectors and wide(self.format, shape.group, shape.row_bytes)
        return Reader(self.format, "", "codes", "scales", in_vectors, aligned(self.format, shape.row_bytes), True)


class Matrices(held.Matrices[list[Part]]):
    """All matrices of one backend."""

    def __init__(self, gpu: Gpu) -> None:
        super().__init__()
        self._gpu = gpu

    def handle(self, name: str, format_name: str, shape: tuple[int, int], group_size: int, planes: Planes
               ) -> HeldMatrix:  # fmt: skip
        """A handle with parts."""
        return HeldMatrix(self, name, format_name, shape, group_size, planes)

    def made(self, matrix: held.HeldMatrix[list[Part]]) -> list[Part]:
        """Copies of whole rows, as many as a binding holds."""
        step, row_bytes = matrix.rows, shape_of(matrix.format, matrix.cols, matrix.group_size).row_bytes
        if matrix.rows * row_bytes + SLACK_BYTES > self._gpu.most_bytes:
            step = (self._gpu.most_bytes - SLACK_BYTES) // row_bytes // PART_ROWS * PART_ROWS
        return [self._part(matrix, first, min(step, matrix.rows - first)) for first in range(0, matrix.rows, step)]

    def _part(self, matrix: held.HeldMatrix[list[Part]], first: int, rows: int) -> Part:
        buffers = []
        for plane, values in zip(REGISTRY[matrix.format].planes, matrix.host, strict=True):
            raw = values.reshape(-1).view(np.uint8)
            start = plane.nbytes(first, matrix.cols, matrix.group_size) if first else 0
            stop = plane.nbytes(first + rows, matrix.cols, matrix.group_size)
            buffers.append(self._gpu.filled(raw[min(start, stop) : stop], matrix.name))
        return Part(first, rows, buffers[0], buffers[-1])
