"""What a weight format is: planes, scale geometry, reference decode.

Knows numpy and arithmetic only; must not know files, kernels or devices. One frozen object per file in this folder
describes one format; everything else (kernels, tests, mutants, documentation) is derived from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
Planes = tuple[NDArray[Any], ...]


@dataclass(frozen=True, slots=True)
class Plane:
    """One array of a stored matrix.

    `shape(rows, cols, group_size)` gives its dimensions; the product times the item size is the plane's exact byte
    count. `suffix` is appended to the weight's tensor name ("" for the codes, ".qs" for the scale sidecar).
    """

    name: str
    dtype: np.dtype[Any]
    shape: Callable[[int, int, int], tuple[int, ...]]
    suffix: str = ""

    def nbytes(self, rows: int, cols: int, group_size: int) -> int:
        """Exact byte count of this plane."""
        count = 1
        for extent in self.shape(rows, cols, group_size):
            count *= extent
        return count * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class ScaleGeometry:
    """What one scale covers: `rows` x `cols` weights.

    `cols` 0 means the whole row, -1 means the matrix's own group size. `plane` is the index of the scale plane, or
    -1 where scales are stored inside the codes (e8) or do not exist (float formats). `plane_cols(cols, group_size)`
    scales lie side by side, row-major.
    """

    rows: int
    cols: int
    plane: int


@dataclass(frozen=True, slots=True)
class ActivationGeometry:
    """How activations meet this format in a kernel (docs/design/contracts.md, section 3).

    `group` 0: the weights are floats, summed in 16 fma chains. Otherwise activations are quantized in runs of `group`
    inputs (-1: the matrix's own group size) and summed as integers inside a run. `rotated`: the signed
    Walsh-Hadamard rotation is applied to x first.
    """

    group: int
    rotated: bool = False


@dataclass(frozen=True)
class Format:
    """One weight format. Source of every field: the format's section in docs/formats.md.

    `name` is the stamp in the file. `group_sizes` lists the legal group sizes (empty: not a parameter). `decode` and
    `encode` work on whole matrices: `decode(planes, rows, cols, group_size) -> float32 [rows, cols]`, for e8 the
    stored, rotated matrix; `encode(weights, group_size) -> planes`, None where the specification gives no quantizer.
    `sample(rng, rows, cols, group_size)` returns adversarial planes: code extremes, scales that differ strongly from
    group to group, dirty padding.
    """

    name: str
    bits_per_weight: Callable[[int, int], float]
    planes: tuple[Plane, ...]
    scale: ScaleGeometry
    activation: ActivationGeometry
    decode: Callable[[Planes, int, int, int], F32]
    sample: Callable[[np.random.Generator, int, int, int], Planes]
    encode: Callable[[F32, int], Planes] | None = None
    group_sizes: tuple[int, ...] = ()
    routed_only: bool = False
    constants: Mapping[str, int] | None = None

    def nbytes(self, rows: int, cols: int, group_size: int = 0) -> int:
        """Exact byte count of all planes."""
        return sum(plane.nbytes(rows, cols, group_size) for plane in self.planes)
