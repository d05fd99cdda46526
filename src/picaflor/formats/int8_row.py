"""Format int8-row: two's-complement bytes, one float32 scale per row.

Must not know files, kernels or devices. docs/formats.md, section int8-row.
"""

from __future__ import annotations

import numpy as np

from picaflor.formats.base import F32, ActivationGeometry, Format, Plane, Planes, ScaleGeometry
from picaflor.formats.numeric import quantize, row_blocks, take_planes, wild_bytes, wild_scales

NAME = "int8-row"
ROW_GROUP = 64  # inputs per run of quantized activations, for every format with one scale per row
PLANES = (
    Plane("codes", np.dtype("i1"), lambda rows, cols, _: (rows, cols)),
    Plane("scales", np.dtype("<f4"), lambda rows, cols, _: (rows,), suffix=".qs"),
)


def decode(planes: Planes, rows: int, cols: int, group_size: int) -> F32:
    """`q * s[row]`, `[rows, cols]`."""
    codes, scales = take_planes(NAME, PLANES, planes, rows, cols, group_size)
    values: F32 = codes.astype(np.float32) * scales[:, None]
    return values


def encode(weights: F32, group_size: int = 0) -> Planes:
    """Symmetric: the largest magnitude of a row becomes 127."""
    rows, cols = weights.shape
    codes = np.empty((rows, cols), dtype=np.int8)
    scales = np.empty(rows, dtype="<f4")
    for block in row_blocks(rows, cols):
        codes[block], scales[block] = quantize(np.asarray(weights[block], dtype=np.float32), 127, -128)
    return (codes, scales)


def sample(rng: np.random.Generator, rows: int, cols: int, group_size: int) -> Planes:
    """Codes with many -128 and 127, scales of different magnitude."""
    return (wild_bytes(rng, (rows, cols)).view(np.int8), wild_scales(rng, (rows,)))


FORMAT = Format(
    name=NAME,
    bits_per_weight=lambda cols, group_size: 8.0 + 32.0 / cols,
    planes=PLANES,
    scale=ScaleGeometry(rows=1, cols=0, plane=1),
    activation=ActivationGeometry(group=ROW_GROUP),
    decode=decode,
    encode=encode,
    sample=sample,
    constants={"RowGroup": ROW_GROUP},
)
