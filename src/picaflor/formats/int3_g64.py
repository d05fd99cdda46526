"""Format int3-g64: blocks of 64 three-bit codes in two bit planes, one float32 scale per block.

Must not know files, kernels or devices. docs/formats.md, section int3-g64.
"""

from __future__ import annotations

import numpy as np

from picaflor.formats.base import F32, ActivationGeometry, Format, Plane, Planes, ScaleGeometry
from picaflor.formats.int2_row import pack_crumbs, unpack_crumbs
from picaflor.formats.numeric import (
    ceil_div,
    grouped,
    quantize,
    row_blocks,
    spread_scales,
    take_planes,
    wild_bytes,
    wild_scales,
)

NAME = "int3-g64"
GROUP = 64
LOW_BYTES = 16
BLOCK_BYTES = 24
BIAS = 4
QMAX = 3
PLANES = (
    Plane("codes", np.dtype("u1"), lambda rows, cols, _: (rows, ceil_div(cols, GROUP), BLOCK_BYTES)),
    Plane("scales", np.dtype("<f4"), lambda rows, cols, _: (rows, ceil_div(cols, GROUP)), suffix=".qs"),
)


def decode(planes: Planes, rows: int, cols: int, group_size: int) -> F32:
    """`(u - 4) * s[row, column // 64]`, `[rows, cols]`."""
    blocks, scales = take_planes(NAME, PLANES, planes, rows, cols, group_size)
    low = unpack_crumbs(blocks[..., :LOW_BYTES])
    high = np.unpackbits(blocks[..., LOW_BYTES:], axis=-1, bitorder="little")
    codes = (low | (high << np.uint8(2))).reshape(rows, -1)[:, :cols].astype(np.float32) - np.float32(BIAS)
    return codes * spread_scales(scales, GROUP, cols)


def encode(weights: F32, group_size: int = 0) -> Planes:
    """Symmetric per block: its largest magnitude becomes 3; padding positions of the last block hold u = 4 (zero)."""
    rows, cols = weights.shape
    blocks = np.empty((rows, ceil_div(cols, GROUP), BLOCK_BYTES), dtype=np.uint8)
    scales = np.empty((rows, ceil_div(cols, GROUP)), dtype="<f4")
    for block in row_blocks(rows, cols):
        codes, scales[block] = quantize(grouped(np.asarray(weights[block], dtype=np.float32), GROUP), QMAX, -BIAS)
        values = (codes + np.int8(BIAS)).astype(np.uint8)
        blocks[block, :, :LOW_BYTES] = pack_crumbs(values & np.uint8(3))
        blocks[block, :, LOW_BYTES:] = np.packbits(values >> np.uint8(2), axis=-1, bitorder="little")
    return (blocks, scales)


def sample(rng: np.random.Generator, rows: int, cols: int, group_size: int) -> Planes:
    """All eight codes, dirty padding in the last block, scales that differ strongly from block to block."""
    count = ceil_div(cols, GROUP)
    return (wild_bytes(rng, (rows, count, BLOCK_BYTES)), wild_scales(rng, (rows, count)))


FORMAT = Format(
    name=NAME,
    bits_per_weight=lambda cols, group_size: (8.0 * BLOCK_BYTES + 32.0) * ceil_div(cols, GROUP) / cols,
    planes=PLANES,
    scale=ScaleGeometry(rows=1, cols=GROUP, plane=1),
    activation=ActivationGeometry(group=GROUP),
    decode=decode,
    encode=encode,
    sample=sample,
    constants={"Int3Group": GROUP, "Int3LowBytes": LOW_BYTES, "Int3BlockBytes": BLOCK_BYTES, "Int3Bias": BIAS},
)
