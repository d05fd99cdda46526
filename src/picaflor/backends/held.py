"""Matrices that a device holds: bound while their bytes may still be on disk, copied when first asked for.

Knows host planes; must not know any device, operation or file. Host planes are read and never written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from numpy.typing import NDArray

from picaflor.formats import REGISTRY

Planes = Sequence[NDArray[Any]]
Copy = TypeVar("Copy")
"""What a device has of a matrix."""


def check_planes(name: str, format_name: str, shape: tuple[int, int], group_size: int, planes: Planes) -> None:
    """Raises ValueError for planes of the wrong size."""
    rows, cols = shape
    expected = [plane.nbytes(rows, cols, group_size) for plane in REGISTRY[format_name].planes]
    found = [plane.nbytes for plane in planes]
    if found != expected or not all(plane.flags.c_contiguous for plane in planes):
        raise ValueError(f"{name}: planes of {found} bytes, {format_name} {rows}x{cols} has {expected}, contiguous")


class HeldMatrix(Generic[Copy]):
    """A weight's handle. `host` are the planes as they were given; `device` copies them when first asked for."""

    def __init__(self, held: Matrices[Copy], name: str, format_name: str, shape: tuple[int, int], group_size: int,
                 host: Planes) -> None:  # fmt: skip
        self.name = name
        self.format = format_name
        self.rows, self.cols = shape
        self.group_size = group_size
        self.host = tuple(host)
        self.stays = False
        """Whether the host computes with it and the device never does."""
        self._held = held
        self._device: Copy | None = None

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for matrices that lie on the same bytes."""
        addresses = tuple(plane.ctypes.data for plane in self.host)
        return (self.format, self.rows, self.cols, self.group_size, addresses)

    @property
    def device(self) -> Copy:
        """The matrix as the device has it."""
        if self._device is None:
            self._device = self._held.copy(self)
        return self._device


class Matrices(Generic[Copy]):
    """All matrices of one backend; those that lie on the same bytes (a tied head) share their copy. A device says how
    one is copied: `made(matrix)`."""

    def __init__(self) -> None:
        self._waiting: list[HeldMatrix[Copy]] = []
        self._copies: dict[tuple[Any, ...], Copy] = {}
        self._sizes: dict[tuple[Any, ...], int] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the device that what was copied takes."""
        return sum(self._sizes.values())

    def handle(self, name: str, format_name: str, shape: tuple[int, int], group_size: int, planes: Planes
               ) -> HeldMatrix[Copy]:  # fmt: skip
        """The kind of handle that the device's operations read."""
        return HeldMatrix(self, name, format_name, shape, group_size, planes)

    def made(self, matrix: HeldMatrix[Copy]) -> Copy:
        """A new copy on the device."""
        raise NotImplementedError

    def bind(self, name: str, format_name: str, shape: tuple[int, int], group_size: int, planes: Planes
             ) -> HeldMatrix[Copy]:  # fmt: skip
        """A handle. Raises ValueError for planes of the wrong size."""
        check_planes(name, format_name, shape, group_size, planes)
        made = self.handle(name, format_name, shape, group_size, planes)
        self._waiting.append(made)
        return made

    def copy(self, matrix: HeldMatrix[Copy]) -> Copy:
        """The copy on the device, made now if there is none."""
        key = matrix.key
        if key not in self._copies:
            self._copies[key] = self.made(matrix)
            self._sizes.setdefault(key, sum(plane.nbytes for plane in matrix.host))
        return self._copies[key]

    def copy_all(self) -> None:
        """Copy what was bound since the last call. Its bytes must be there."""
        for matrix in self._waiting:
            if not matrix.stays:
                _ = matrix.device
        self._waiting.clear()
