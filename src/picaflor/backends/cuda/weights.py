"""Matrices that a GPU backend holds: bound while their bytes may still be on disk, copied to the device once.

Knows host planes and their copies on a device; must not know kernels, operations or files.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from picaflor.backends.cpu.memory import release
from picaflor.backends.cuda.formats import DeviceWeight, hold
from picaflor.formats import REGISTRY

Planes = Sequence[NDArray[Any]]


class HeldMatrix:
    """A weight's handle. `host` are the planes as they were given; `device` copies them when it is first asked for."""

    def __init__(self, held: Matrices, format_name: str, shape: tuple[int, int], group_size: int, host: Planes) -> None:
        self.format = format_name
        self.shape = shape
        self.group_size = group_size
        self.host = tuple(host)
        self._held = held
        self._device: DeviceWeight | None = None

    @property
    def copied(self) -> bool:
        """Whether the device has it."""
        return self._device is not None

    @property
    def device(self) -> DeviceWeight:
        """The matrix on the device."""
        if self._device is None:
            self._device = self._held.copy(self)
        return self._device


class Matrices:
    """All matrices of one backend; those that lie on the same bytes (a tied head) share their copy."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._waiting: list[HeldMatrix] = []
        self._copies: dict[tuple[Any, ...], DeviceWeight] = {}
        self.nbytes = 0

    def bind(self, name: str, format_name: str, shape: tuple[int, int], group_size: int, planes: Planes) -> HeldMatrix:
        """A handle. Raises ValueError for planes of the wrong size."""
        rows, cols = shape
        expected = [plane.nbytes(rows, cols, group_size) for plane in REGISTRY[format_name].planes]
        found = [plane.nbytes for plane in planes]
        if found != expected or not all(plane.flags.c_contiguous for plane in planes):
            raise ValueError(f"{name}: planes of {found} bytes, {format_name} {rows}x{cols} has {expected}, contiguous")
        made = HeldMatrix(self, format_name, shape, group_size, planes)
        self._waiting.append(made)
        return made

    def copy(self, matrix: HeldMatrix) -> DeviceWeight:
        """The copy on the device, made now if there is none."""
        addresses = tuple(plane.ctypes.data for plane in matrix.host)
        key = (matrix.format, matrix.shape, matrix.group_size, addresses)
        if key not in self._copies:
            raw = [plane.reshape(-1).view(np.uint8) for plane in matrix.host]
            self._copies[key] = hold(matrix.format, matrix.shape, matrix.group_size, raw, self._device)
            self.nbytes += sum(plane.nbytes for plane in raw)
        return self._copies[key]

    def take(self, matrix: HeldMatrix) -> int:
        """Copy one whose bytes are there and give the host's memory back; how many bytes that were."""
        if not matrix.copied:
            _ = matrix.device
        return sum(release(plane.reshape(-1).view(np.uint8)) for plane in matrix.host)

    def copy_all(self) -> None:
        """Copy what was bound since the last call. Its bytes must be there."""
        for matrix in self._waiting:
            _ = matrix.device
        self._waiting.clear()
