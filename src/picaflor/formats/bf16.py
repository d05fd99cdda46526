"""Format bf16: the upper half of a float32, stored as raw uint16.

Must not know files, kernels or devices. docs/formats.md, section bf16.
"""

from __future__ import annotations

import numpy as np

from picaflor.formats import f32
from picaflor.formats.base import F32, ActivationGeometry, Format, Plane, Planes, ScaleGeometry
from picaflor.formats.numeric import row_blocks, take_planes

NAME = "bf16"
PLANES = (Plane("values", np.dtype("<u2"), lambda rows, cols, _: (rows, cols)),)


def decode(planes: Planes, rows: int, cols: int, group_size: int) -> F32:
    """Widened by 16 zero bits: exact, `[rows, cols]`."""
    (values,) = take_planes(NAME, PLANES, planes, rows, cols, group_size)
    return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)


def encode(weights: F32, group_size: int = 0) -> Planes:
    """Round to nearest, ties to even; overflow gives infinity, a NaN stays a (quiet) NaN."""
    rows, cols = weights.shape
    out = np.empty((rows, cols), dtype="<u2")
    for block in row_blocks(rows, cols):
        values = np.ascontiguousarray(weights[block], dtype=np.float32)
        bits = values.view(np.uint32)
        rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
        quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
        out[block] = np.where(np.isnan(values), quiet, rounded)
    return (out,)


def sample(rng: np.random.Generator, rows: int, cols: int, group_size: int) -> Planes:
    """Magnitudes over twelve decades, signed zeros and subnormals."""
    (values,) = f32.sample(rng, rows, cols, 0)
    return encode(values)


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
