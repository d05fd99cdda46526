"""Matrices that a GPU backend holds: copied to the device once; the host's memory can then be given back.

Knows host planes and their copies on a device; must not know kernels, operations or files.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from picaflor.backends import held
from picaflor.backends.cpu.memory import release
from picaflor.backends.cuda.formats import DeviceWeight, hold
from picaflor.backends.cuda.memory import needed
from picaflor.sizes import format_bytes

HeldMatrix = held.HeldMatrix[DeviceWeight]


class Matrices(held.Matrices[DeviceWeight]):
    """All matrices of one backend."""

    def __init__(self, device: Any) -> None:
        super().__init__()
        self._device = device
        self.staying: set[tuple[Any, ...]] = set()

    def keep(self, matrix: HeldMatrix) -> None:
        """Leave one to the host, which computes with it."""
        matrix.stays = True
        self.staying.add(matrix.key)

    def made(self, matrix: HeldMatrix) -> DeviceWeight:
        """The planes as they are, on the device. Raises OutOfBudget where that has no memory for them."""
        raw = [plane.reshape(-1).view(np.uint8) for plane in matrix.host]
        size = format_bytes(sum(plane.nbytes for plane in raw))
        what = f"{matrix.name}, {size} beside {format_bytes(self.nbytes)} of other matrices"
        with needed(what, "lower --ctx or --prefill-chunk, or leave the device out"):
            return hold(matrix.format, (matrix.rows, matrix.cols), matrix.group_size, raw, self._device)

    @property
    def addresses(self) -> frozenset[int]:
        """Where planes of what was copied lie in the host's memory."""
        return frozenset(address for *_, addresses in self._copies for address in addresses)

    def take(self, matrix: HeldMatrix) -> int:
        """Copy one whose bytes are there and give the host's memory back; how many bytes that were.

        Those that the host computes with stay there, and so do the bytes of any other that lies on the same.
        """
        if matrix.stays:
            return 0
        _ = matrix.device
        if matrix.key in self.staying:
            return 0
        return sum(release(plane.reshape(-1).view(np.uint8)) for plane in matrix.host)
