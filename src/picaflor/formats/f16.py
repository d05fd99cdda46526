"""Format f16: IEEE half precision, one plane.

Must not know files, kernels or devices. docs/formats.md, section f16.
"""

from __future__ import annotations

import numpy as np

from picaflor.errors import BadContainer
from picaflor.formats.base import F32, ActivationGeometry, Format, Plane, Planes, ScaleGeometry
from picaflor.formats.numeric import take_planes

NAME = "f16"
PLANES = (Plane("values", np.dtype("<f2"), lambda rows, cols, _: (rows, cols)),)


def decode(planes: Planes, rows: int, cols: int, group_size: int) -> F32:
    """Widened exactly (subnormals, infinities and NaN included), `[rows, cols]`."""
    (values,) = take_planes(NAME, PLANES, planes, rows, cols, group_size)
    return values.astype(np.float32)


def encode(weights: F32, group_size: int = 0) -> Planes:
    """Round to nearest, ties to even. Raises BadContainer where a finite weight is beyond 65504."""
    with np.errstate(over="ignore"):
        out = np.ascontiguousarray(weights, dtype=np.float32).astype("<f2")
    if bool((np.isinf(out) & np.isfinite(weights)).any()):
        largest = float(np.max(np.abs(weights)))
        raise BadContainer(f"f16: a weight of magnitude {largest:g} is beyond the largest half-precision value 65504")
    return (out,)


def sample(rng: np.random.Generator, rows: int, cols: int, group_size: int) -> Planes:
    """Every finite class: normals of all exponents, subnormals, signed zeros, the largest value."""
    bits = rng.integers(0, 0x7C00, size=(rows, cols), dtype=np.uint16)
    special = rng.choice(np.array([0x0000, 0x0001, 0x03FF, 0x0400, 0x7BFF], dtype=np.uint16), size=(rows, cols))
    sign = rng.integers(0, 2, size=(rows, cols), dtype=np.uint16) << np.uint16(15)
    return ((np.where(rng.random((rows, cols)) < 0.2, special, bits) | sign).astype("<u2").view("<f2"),)


FORMAT = Format(
    name=NAME,
    bits_per_weight=lambda cols, group_size: 16.0,
    planes=PLANES,
    scale=ScaleGeometry(rows=0, cols=0, plane=-1),
    activation=ActivationGeometry(group=0),
    decode=decode,
    encode=encode,
    sample=sample,
)
