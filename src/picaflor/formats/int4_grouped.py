"""Format int4-grouped: int4-row's nibbles, one float32 scale per run of `group_size` inputs of a row.

Must not know files, kernels or devices. docs/formats.md, section int4-grouped.
"""

from __future__ import annotations

import numpy as np

from picaflor.errors import UnknownFormat
from picaflor.formats.base import F32, ActivationGeometry, Format, Plane, Planes, ScaleGeometry
from picaflor.formats.int4_row import BIAS, QMAX
from picaflor.formats.numeric import (
    ceil_div,
    grouped,
    pack_nibbles,
    quantize,
    row_blocks,
    spread_scales,
    take_planes,
    unpack_nibbles,
    wild_bytes,
    wild_scales,
)

NAME = "int4-grouped"
GROUP_SIZES = (16, 32, 48, 64, 96, 128, 192, 256)
PLANES = (
    Plane("codes", np.dtype("u1"), lambda rows, cols, _: (rows, ceil_div(cols, 2))),
    Plane("scales", np.dtype("<f4"), lambda rows, cols, size: (rows, ceil_div(cols, size)), suffix=".qs"),
)


def check_group_size(group_size: int) -> None:
    """Raises UnknownFormat for a group size that readers of this container do not know."""
    if group_size not in GROUP_SIZES:
        raise UnknownFormat(f"int4-grouped: group size {group_size} is none of {', '.join(map(str, GROUP_SIZES))}")


def decode(planes: Planes, rows: int, cols: int, group_size: int) -> F32:
    """`(nibble - 8) * s[row, column // group_size]`, `[rows, cols]`."""
    check_group_size(group_size)
    packed, scales = take_planes(NAME, PLANES, planes, rows, cols, group_size)
    codes = unpack_nibbles(packed, cols).astype(np.float32) - np.float32(BIAS)
    return codes * spread_scales(scales, group_size, cols)


def encode(weights: F32, group_size: int) -> Planes:
    """Symmetric per group: its largest magnitude becomes 7; the padding nibble of odd cols is 8 (zero)."""
    check_group_size(group_size)
    rows, cols = weights.shape
    packed = np.empty((rows, ceil_div(cols, 2)), dtype=np.uint8)
    scales = np.empty((rows, ceil_div(cols, group_size)), dtype="<f4")
    for block in row_blocks(rows, cols):
        values = grouped(np.asarray(weights[block], dtype=np.float32), group_size)
        codes, scales[block] = quantize(values, QMAX, -BIAS)
        packed[block] = pack_nibbles(codes.reshape(values.shape[0], -1)[:, :cols])
    return (packed, scales)


def sample(rng: np.random.Generator, rows: int, cols: int, group_size: int) -> Planes:
    """Nibbles of both extremes, dirty padding nibbles, scales that differ strongly from group to group."""
    check_group_size(group_size)
    return (wild_bytes(rng, (rows, ceil_div(cols, 2))), wild_scales(rng, (rows, ceil_div(cols, group_size))))


FORMAT = Format(
    name=NAME,
    bits_per_weight=lambda cols, group_size: (8.0 * ceil_div(cols, 2) + 32.0 * ceil_div(cols, group_size)) / cols,
    planes=PLANES,
    scale=ScaleGeometry(rows=1, cols=-1, plane=1),
    activation=ActivationGeometry(group=-1),
    decode=decode,
    encode=encode,
    sample=sample,
    group_sizes=GROUP_SIZES,
)
