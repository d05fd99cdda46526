"""Matrices on a device: their planes as they lie on disk, and what each format asks of activations.

Knows the formats' geometry and torch's memory; must not know kernels, operations, models or files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from picaflor.errors import UnsupportedKernel
from picaflor.formats import REGISTRY
from picaflor.formats.e8_grid import load_grid
from picaflor.formats.numeric import ceil_div, take_planes

Tensor = Any
"""A tensor of torch, on the device."""

NUMBERS: Final = {name: number for number, name in enumerate(REGISTRY)}
"""The kernels' number of each format: that of `FormatId` in native/cpu/weight.h."""
PLANES: Final = {"fast": 1, "standard": 2, "exact": 3}
"""int8 planes of a prepared activation for each precision."""
CHUNK: Final = 64
"""Inputs that a kernel takes at a time; prepared groups are padded to a multiple of it."""
SLACK_BYTES: Final = 64
WORD_BYTES: Final = 16
"""Rows and addresses at multiples of this can be read in vectors."""
_NIBBLES: Final = ("int4-row", "int4-grouped", "mxfp4")


@dataclass(frozen=True, slots=True)
class Needs:
    """How activations are prepared for a matrix; matrices with equal needs share prepared rows.

    `halves`: of each 64 inputs the digits of the even ones come first, as they meet the low nibbles of bytes.
    """

    group: int
    planes: int
    rotated: bool
    halves: bool

    @property
    def padded(self) -> int:
        """Inputs of a group as its digits lie."""
        return ceil_div(self.group, CHUNK) * CHUNK


@dataclass(frozen=True, slots=True)
class DeviceWeight:
    """A matrix `[rows, cols]`; `planes` are uint8 tensors with the bytes of the file, 64 more are readable."""

    format: str
    rows: int
    cols: int
    group_size: int
    planes: tuple[Tensor, ...] = field(repr=False, compare=False)

    @property
    def number(self) -> int:
        """The kernels' number of the format."""
        return NUMBERS[self.format]

    @property
    def row_bytes(self) -> int:
        """Distance of two rows of codes in bytes."""
        return row_bytes(self.format, self.cols, self.group_size)

    @property
    def groups(self) -> int:
        """Activation groups of a row; 0 for float formats."""
        group = group_of(self.format, self.group_size)
        return ceil_div(self.cols, group) if group else 0

    @property
    def scales(self) -> Tensor:
        """The second plane, or the first where there is none: kernels take an address and do not read it."""
        return self.planes[-1]

    @property
    def vectors(self) -> bool:
        """Whether rows of codes start at multiples of sixteen bytes."""
        return self.row_bytes % WORD_BYTES == 0 and self.planes[0].data_ptr() % WORD_BYTES == 0

    def needs(self, precision: str) -> Needs | None:
        """What activations the matrix meets; None: float32 as they are."""
        return needs(self.format, self.group_size, precision)


def group_of(format_name: str, group_size: int) -> int:
    """Inputs with one activation scale; 0 for float formats."""
    group = REGISTRY[format_name].activation.group
    return group_size if group == -1 else group


def needs(format_name: str, group_size: int, precision: str) -> Needs | None:
    """What activations a format meets at a precision; None: float32 as they are."""
    group = group_of(format_name, group_size)
    if not group:
        return None
    return Needs(group, PLANES[precision], REGISTRY[format_name].activation.rotated, format_name in _NIBBLES)


def row_bytes(format_name: str, cols: int, group_size: int) -> int:
    """Bytes of one row of the first plane."""
    return REGISTRY[format_name].planes[0].nbytes(1, cols, group_size)


def hold(
    format_name: str, shape: tuple[int, int], group_size: int, planes: Sequence[NDArray[Any]], device: Any
) -> DeviceWeight:
    """Copy a matrix to a device. Raises UnsupportedKernel naming a format that is not known, BadContainer for planes
    that do not fit the shape."""
    import torch

    spec = REGISTRY.get(format_name)
    if spec is None:
        raise UnsupportedKernel(f'cuda: format "{format_name}"; accepted: {", ".join(REGISTRY)}')
    rows, cols = shape
    held = []
    for array in take_planes(format_name, spec.planes, tuple(planes), rows, cols, group_size):
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        memory = torch.zeros(raw.nbytes + SLACK_BYTES, dtype=torch.uint8, device=device)
        memory[: raw.nbytes].copy_(torch.from_numpy(raw.copy()))
        held.append(memory[: raw.nbytes])
    return DeviceWeight(format_name, rows, cols, group_size, tuple(held))


@lru_cache(maxsize=16)
def lattice(device: str) -> Tensor:
    """The grid of e8-iq3-lattice, uint8 `[256, 4]` on the device; kernels of other formats do not read it."""
    import torch

    return torch.from_numpy(np.array(load_grid(), dtype=np.uint8)).to(device)
