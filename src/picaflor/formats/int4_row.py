"""Format int4-row: offset-binary nibbles, one float32 scale per row.

Must not know files, kernels or devices. docs/formats.md, section int4-row.
"""

from __future__ import annotations

import numpy as np

from picaflor.formats.base import F32, ActivationGeometry, Format, Plane, Planes, ScaleGeometry
from picaflor.formats.int8_row import ROW_GROUP
from picaflor.formats.numeric import (
    ceil_div,
    pack_nibbles,
    quantize,
    row_blocks,
    take_planes,
    unpack_nibbles,
    wild_bytes,
    wild_scales,
)

NAME = "int4-row"
BIAS = 8
QMAX = 7
PLANES = (
    Plane("codes", np.dtype("u1"), lambda rows, cols, _: (rows, ceil_div(cols, 2))),
    Plane("scales", np.dtype("<f4"), lambda rows, cols, _: (rows,), suffix=".qs"),
)


def decode(planes: Planes, rows: int, cols: int, group_size: int) -> F32:
    """`(nibble - 8) * s[row]`, `[rows, cols]`."""
    packed, scales = take_planes(NAME, PLANES, planes, rows, cols, group_size)
    values: F32 = (unpack_nibbles(packed, cols).astype(np.float32) - np.float32(BIAS)) * scales[:, None]
    return values


def encode(weights: F32, group_size: int = 0) -> Planes:
    """Symmetric: the largest magnitude of a row becomes 7; the padding nibble of odd cols is 8 (zero)."""
    rows, cols = weights.shape
    packed = np.empty((rows, ceil_div(cols, 2)), dtype=np.uint8)
    scales = np.empty(rows, dtype="<f4")
    for block in row_blocks(rows, cols):
        codes, scales[block] = quantize(np.asarray(weights[block], dtype=np.float32), QMAX, -BIAS)
        packed[block] = pack_nibbles(codes)
    return (packed, scales)


def sample(rng: np.random.Generator, rows: int, cols: int, group_size: int) -> Planes:
    """Nibbles of both extremes, dirty padding nibbles, scales of different magnitude."""
    return (wild_bytes(rng, (rows, ceil_div(cols, 2))), wild_scales(rng, (rows,)))


FORMAT = Format(
    name=NAME,
    bits_per_weight=lambda cols, group_size: (8.0 * ceil_div(cols, 2) + 32.0) / cols,
    planes=PLANES,
    scale=ScaleGeometry(rows=1, cols=0, plane=1),
    activation=ActivationGeometry(group=ROW_GROUP),
    decode=decode,
    encode=encode,
    sample=sample,
    constants={"Int4Bias": BIAS},
)
