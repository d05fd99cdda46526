"""Format mxfp4: four-bit floats (e2m1) in nibbles, one power-of-two scale per 32 inputs of a row.

Must not know files, kernels or devices. docs/formats.md, section mxfp4.
"""

from __future__ import annotations

import numpy as np

from picaflor.formats.base import F32, ActivationGeometry, Format, Plane, Planes, ScaleGeometry
from picaflor.formats.numeric import ceil_div, spread_scales, take_planes, unpack_nibbles, wild_bytes

NAME = "mxfp4"
GROUP = 32
# Twice the value of each nibble, so that the codes are integers; nibble 8 is -0.
DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
PLANES = (
    Plane("codes", np.dtype("u1"), lambda rows, cols, _: (rows, ceil_div(cols, 2))),
    Plane("exponents", np.dtype("u1"), lambda rows, cols, _: (rows, ceil_div(cols, GROUP)), suffix=".qs"),
)


def values() -> F32:
    """The sixteen values of a nibble, float32 `[16]`."""
    table = np.array(DOUBLED, dtype=np.float32) / np.float32(2)
    table[8] = np.float32(-0.0)
    return table


def exponent_scales() -> F32:
    """Scale of each UE8M0 byte, float32 `[256]`: exactly 2^(e-127), 0 is the subnormal 2^-127, 255 is NaN."""
    table = np.full(256, np.nan, dtype=np.float32)
    table[:255] = np.ldexp(np.ones(255, dtype=np.float32), np.arange(255, dtype=np.int32) - 127)
    return table


_VALUES = values()
_SCALES = exponent_scales()


def decode(planes: Planes, rows: int, cols: int, group_size: int) -> F32:
    """`value(nibble) * 2^(e-127)`, `[rows, cols]`; a group whose exponent is 255 is NaN."""
    packed, exponents = take_planes(NAME, PLANES, planes, rows, cols, group_size)
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        return _VALUES[unpack_nibbles(packed, cols)] * spread_scales(_SCALES[exponents], GROUP, cols)


def sample(rng: np.random.Generator, rows: int, cols: int, group_size: int) -> Planes:
    """All nibbles, -0 among them, dirty padding, exponents that differ by up to 2^24 between neighbours."""
    exponents = rng.integers(127 - 14, 127 + 11, size=(rows, ceil_div(cols, GROUP)), dtype=np.uint8)
    return (wild_bytes(rng, (rows, ceil_div(cols, 2))), exponents)


FORMAT = Format(
    name=NAME,
    bits_per_weight=lambda cols, group_size: 8.0 * (ceil_div(cols, 2) + ceil_div(cols, GROUP)) / cols,
    planes=PLANES,
    scale=ScaleGeometry(rows=1, cols=GROUP, plane=1),
    activation=ActivationGeometry(group=GROUP),
    decode=decode,
    sample=sample,
    constants={"Mxfp4Group": GROUP},
)
