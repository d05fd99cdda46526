"""Format f32: plain little-endian float32, one plane.

Must not know files, kernels or devices. docs/formats.md, section f32.
"""

from __future__ import annotations

import numpy as np

from picaflor.formats.base import F32, ActivationGeometry, Format, Plane, Planes, ScaleGeometry
from picaflor.formats.numeric import take_planes

NAME = "f32"
PLANES = (Plane("values", np.dtype("<f4"), lambda rows, cols, _: (rows, cols)),)


def decode(planes: Planes, rows: int, cols: int, group_size: int) -> F32:
    """The values themselves, `[rows, cols]`."""
    (values,) = take_planes(NAME, PLANES, planes, rows, cols, group_size)
    return values.astype(np.float32)


def encode(weights: F32, group_size: int = 0) -> Planes:
    """The values themselves."""
    return (np.ascontiguousarray(weights, dtype="<f4"),)


def sample(rng: np.random.Generator, rows: int, cols: int, group_size: int) -> Planes:
    """Magnitudes over twelve decades, signed zeros and subnormals."""
    values = rng.standard_normal((rows, cols)) * 10.0 ** rng.integers(-6, 6, size=(rows, cols))
    special = rng.choice(np.array([0.0, -0.0, 1e-40, -1e-40, 1.17549435e-38]), size=(rows, cols))
    return (np.where(rng.random((rows, cols)) < 0.1, special, values).astype("<f4"),)


FORMAT = Format(
    name=NAME,
    bits_per_weight=lambda cols, group_size: 32.0,
    planes=PLANES,
    scale=ScaleGeometry(rows=0, cols=0, plane=-1),
    activation=ActivationGeometry(group=0),
    decode=decode,
    encode=encode,
    sample=sample,
)
