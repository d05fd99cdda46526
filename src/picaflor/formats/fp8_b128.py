"""Format fp8-e4m3-b128: raw e4m3fn bytes, one float32 scale per 128 x 128 block.

Must not know files, kernels or devices. docs/formats.md, section fp8-e4m3-b128.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from picaflor.errors import BadContainer
from picaflor.formats.base import F32, ActivationGeometry, Format, Plane, Planes, ScaleGeometry
from picaflor.formats.numeric import SCALE_FLOOR, ceil_div, row_blocks, take_planes, wild_scales

NAME = "fp8-e4m3-b128"
BLOCK = 128
MAX_CODE = 0x7E
MAX_VALUE = 448
PLANES = (
    Plane("codes", np.dtype("u1"), lambda rows, cols, _: (rows, cols)),
    Plane(
        "scales", np.dtype("<f4"), lambda rows, cols, _: (ceil_div(rows, BLOCK), ceil_div(cols, BLOCK)), suffix=".qs"
    ),
)


def e4m3_values() -> F32:
    """Value of each e4m3fn byte, float32 `[256]`: bias 7, no infinities, mantissa 7 of exponent 15 is NaN."""
    code = np.arange(128)
    exponent, mantissa = code >> 3, code & 7
    subnormal = mantissa * 2.0**-9
    normal = (1.0 + mantissa / 8.0) * 2.0 ** (exponent - 7.0)
    positive = np.where(exponent == 0, subnormal, normal).astype(np.float32)
    positive[127] = np.nan
    return np.concatenate([positive, -positive])


_VALUES = e4m3_values()


def encode_e4m3(values: F32) -> NDArray[np.uint8]:
    """Nearest e4m3fn byte of each float32 value, ties to even; magnitudes beyond 448 become 448, NaN stays NaN."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    bits = values.view(np.uint32)
    magnitude = bits & np.uint32(0x7FFFFFFF)
    kept = (magnitude + (np.uint32(0x7FFFF) + ((magnitude >> np.uint32(20)) & np.uint32(1)))) >> np.uint32(20)
    normal = np.minimum(kept.astype(np.int64) - ((127 - 7) << 3), MAX_CODE)
    absolute = np.abs(values)
    subnormal = np.rint(np.minimum(absolute, np.float32(1)) * np.float32(512))
    nan = np.isnan(values)
    codes: NDArray[np.int64] = np.where(absolute < np.float32(2.0**-6), np.where(nan, 0, subnormal), normal).astype(
        np.int64
    )
    codes = np.where(nan, 0x7F, codes) | ((bits >> np.uint32(31)).astype(np.int64) << 7)
    return (codes & 0xFF).astype(np.uint8)


def _spread(scales: F32, rows: int, cols: int) -> F32:
    """Block scales repeated to one per weight, for a band of `rows` rows that starts on a block."""
    spread: F32 = np.repeat(np.repeat(scales, BLOCK, axis=0)[:rows], BLOCK, axis=1)[:, :cols]
    return spread


def decode(planes: Planes, rows: int, cols: int, group_size: int) -> F32:
    """`e4m3(byte) * s[row // 128, column // 128]`, `[rows, cols]`; NaN bytes stay NaN."""
    codes, scales = take_planes(NAME, PLANES, planes, rows, cols, group_size)
    with np.errstate(invalid="ignore", over="ignore"):
        values: F32 = _VALUES[codes] * _spread(scales, rows, cols)
    return values


def encode(weights: F32, group_size: int = 0) -> Planes:
    """Per block `s = max(amax / 448, 1e-8)`, then the nearest e4m3fn byte of `w / s`.

    The specification copies fp8 bytes from a checkpoint and gives no quantizer; this is the usual absmax rule.
    Raises BadContainer where a value is NaN or infinite.
    """
    rows, cols = weights.shape
    codes = np.empty((rows, cols), dtype=np.uint8)
    scales = np.empty((ceil_div(rows, BLOCK), ceil_div(cols, BLOCK)), dtype="<f4")
    for band in row_blocks(rows, cols, BLOCK):
        values = np.asarray(weights[band], dtype=np.float32)
        by_row = np.maximum.reduceat(np.abs(values), np.arange(0, values.shape[0], BLOCK), axis=0)
        amax = np.maximum.reduceat(by_row, np.arange(0, cols, BLOCK), axis=1)
        if not np.isfinite(amax).all():
            raise BadContainer("weights hold NaN or infinity; fp8-e4m3-b128 encodes finite values only")
        found = np.maximum(amax / np.float32(MAX_VALUE), SCALE_FLOOR)
        first = band.start // BLOCK
        scales[first : first + found.shape[0]] = found
        codes[band] = encode_e4m3(values / _spread(found, values.shape[0], cols))
    return (codes, scales)


def sample(rng: np.random.Generator, rows: int, cols: int, group_size: int) -> Planes:
    """All finite bytes with many subnormals, -0 and +-448; scales that differ strongly from block to block."""
    codes = rng.integers(0, MAX_CODE + 1, size=(rows, cols), dtype=np.uint8)
    special = rng.choice(np.array([0x00, 0x01, 0x07, 0x08, MAX_CODE], dtype=np.uint8), size=(rows, cols))
    codes = np.where(rng.random((rows, cols)) < 0.25, special, codes)
    codes |= rng.integers(0, 2, size=(rows, cols), dtype=np.uint8) << np.uint8(7)
    return (codes, wild_scales(rng, (ceil_div(rows, BLOCK), ceil_div(cols, BLOCK))))


FORMAT = Format(
    name=NAME,
    bits_per_weight=lambda cols, group_size: 8.0 + 32.0 * ceil_div(cols, BLOCK) / (BLOCK * cols),
    planes=PLANES,
    scale=ScaleGeometry(rows=BLOCK, cols=BLOCK, plane=1),
    activation=ActivationGeometry(group=0),
    decode=decode,
    encode=encode,
    sample=sample,
    constants={"Fp8Block": BLOCK},
)
