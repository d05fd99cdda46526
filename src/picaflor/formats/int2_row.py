"""Format int2-row: four codes per byte, one float32 scale per row.

Must not know files, kernels or devices. docs/formats.md, section int2-row.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from picaflor.formats.base import F32, ActivationGeometry, Format, Plane, Planes, ScaleGeometry
from picaflor.formats.int8_row import ROW_GROUP
from picaflor.formats.numeric import ceil_div, grouped, quantize, row_blocks, take_planes, wild_bytes, wild_scales

NAME = "int2-row"
BIAS = 2
QMAX = 1
PLANES = (
    Plane("codes", np.dtype("u1"), lambda rows, cols, _: (rows, ceil_div(cols, 4))),
    Plane("scales", np.dtype("<f4"), lambda rows, cols, _: (rows,), suffix=".qs"),
)


def unpack_crumbs(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Two-bit values `[..., 4 * n]` of bytes `[..., n]`, lowest bits first."""
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8)
    return ((packed[..., None] >> shifts) & np.uint8(3)).reshape(*packed.shape[:-1], -1)


def pack_crumbs(values: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Inverse of `unpack_crumbs`; the last axis is a multiple of 4, values are 0..3."""
    four = values.reshape(*values.shape[:-1], -1, 4)
    packed: NDArray[np.uint8] = (
        four[..., 0] | (four[..., 1] << np.uint8(2)) | (four[..., 2] << np.uint8(4)) | (four[..., 3] << np.uint8(6))
    )
    return packed


def decode(planes: Planes, rows: int, cols: int, group_size: int) -> F32:
    """`(u - 2) * s[row]`, `[rows, cols]`."""
    packed, scales = take_planes(NAME, PLANES, planes, rows, cols, group_size)
    values: F32 = (unpack_crumbs(packed)[:, :cols].astype(np.float32) - np.float32(BIAS)) * scales[:, None]
    return values


def encode(weights: F32, group_size: int = 0) -> Planes:
    """Symmetric: codes -1, 0, 1 times the largest magnitude of the row; unused tail bits are 0."""
    rows, cols = weights.shape
    packed = np.empty((rows, ceil_div(cols, 4)), dtype=np.uint8)
    scales = np.empty(rows, dtype="<f4")
    for block in row_blocks(rows, cols):
        codes, scales[block] = quantize(np.asarray(weights[block], dtype=np.float32), QMAX, -BIAS)
        values = (codes + np.int8(BIAS)).astype(np.uint8)
        packed[block] = pack_crumbs(grouped(values, 4).reshape(values.shape[0], -1))
    return (packed, scales)


def sample(rng: np.random.Generator, rows: int, cols: int, group_size: int) -> Planes:
    """All four codes, dirty tail bits, scales of different magnitude."""
    return (wild_bytes(rng, (rows, ceil_div(cols, 4))), wild_scales(rng, (rows,)))


FORMAT = Format(
    name=NAME,
    bits_per_weight=lambda cols, group_size: (8.0 * ceil_div(cols, 4) + 32.0) / cols,
    planes=PLANES,
    scale=ScaleGeometry(rows=1, cols=0, plane=1),
    activation=ActivationGeometry(group=ROW_GROUP),
    decode=decode,
    encode=encode,
    sample=sample,
    constants={"Int2Bias": BIAS},
)
