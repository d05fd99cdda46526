"""Arithmetic that several weight formats share: rounding rules, bit packing, plane checks.

Knows numpy and the `Plane` description; must not know any single format, files or devices.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from picaflor.errors import BadContainer
from picaflor.formats.base import F32, Plane, Planes

U8 = NDArray[np.uint8]
I8 = NDArray[np.int8]

SCALE_FLOOR = np.float32(1e-8)
_BLOCK_VALUES = 1 << 18


def ceil_div(value: int, by: int) -> int:
    """Smallest integer not below `value / by`."""
    return -(-value // by)


def take_planes(
    name: str, spec: tuple[Plane, ...], arrays: Planes, rows: int, cols: int, group_size: int
) -> tuple[NDArray[Any], ...]:
    """Arrays viewed as the planes of `spec`: any shape and item type is taken, a wrong byte count is not.

    Raises BadContainer naming the format and the plane.
    """
    if len(arrays) != len(spec):
        raise BadContainer(f"{name}: {len(arrays)} planes given, the format has {len(spec)}")
    taken = []
    for plane, array in zip(spec, arrays, strict=True):
        expected = plane.nbytes(rows, cols, group_size)
        if array.nbytes != expected:
            raise BadContainer(
                f"{name}: plane {plane.name} of [{rows}, {cols}] has {array.nbytes} bytes, expected {expected}"
            )
        flat = np.ascontiguousarray(array).reshape(-1)
        taken.append(flat.view(plane.dtype).reshape(plane.shape(rows, cols, group_size)))
    return tuple(taken)


def row_blocks(rows: int, cols: int, multiple: int = 1) -> Iterator[slice]:
    """Slices of rows that stay inside the processor's cache; each but the last is a multiple of `multiple` rows."""
    step = max(1, _BLOCK_VALUES // max(1, cols * multiple)) * multiple
    for start in range(0, rows, step):
        yield slice(start, min(rows, start + step))


def quantize(values: F32, qmax: int, low: int) -> tuple[I8, F32]:
    """Symmetric codes of float32 `values [..., n]` and one scale per run of n.

    `s = max(amax / qmax, 1e-8)`, `q = rne(v / s)` clamped to `low .. qmax`, all in float32 (formats.md, common rule).
    Raises BadContainer where a value is NaN or infinite.
    """
    amax = np.max(np.abs(values), axis=-1, initial=np.float32(0))
    if not np.isfinite(amax).all():
        raise BadContainer("weights hold NaN or infinity; integer formats encode finite values only")
    scales = np.maximum(amax / np.float32(qmax), SCALE_FLOOR)
    codes = np.clip(np.rint(values / scales[..., None]), low, qmax)
    return codes.astype(np.int8), scales


def grouped(values: NDArray[Any], group: int, fill: int = 0) -> NDArray[Any]:
    """`[rows, cols]` as `[rows, ceil(cols / group), group]`, the end of each row padded with `fill`."""
    rows, cols = values.shape
    count = ceil_div(cols, group)
    if count * group != cols:
        padded = np.full((rows, count * group), fill, dtype=values.dtype)
        padded[:, :cols] = values
        values = padded
    return values.reshape(rows, count, group)


def pack_nibbles(codes: I8) -> U8:
    """Codes -8..7 `[rows, cols]` as offset-binary nibbles, even columns low; the padding nibble of odd cols is 8."""
    pairs = grouped(codes, 2).astype(np.uint8) + np.uint8(8)
    packed: U8 = pairs[..., 0] | (pairs[..., 1] << np.uint8(4))
    return packed


def unpack_nibbles(packed: U8, cols: int) -> U8:
    """Nibbles 0..15 `[rows, cols]` of packed rows; a padding nibble is cut off."""
    both = np.empty((*packed.shape, 2), dtype=np.uint8)
    both[..., 0] = packed & np.uint8(15)
    both[..., 1] = packed >> np.uint8(4)
    return both.reshape(packed.shape[0], -1)[:, :cols]


def spread_scales(scales: F32, group: int, cols: int) -> F32:
    """`[rows, groups]` repeated to one scale per weight, `[rows, cols]`."""
    return np.repeat(scales, group, axis=1)[:, :cols]


def wild_scales(rng: np.random.Generator, shape: tuple[int, ...]) -> F32:
    """Positive scales that differ by orders of magnitude from neighbour to neighbour."""
    steps = rng.choice(np.array([1e-4, 3e-3, 0.05, 1.0, 20.0]), size=shape)
    return (steps * rng.uniform(0.5, 2.0, size=shape)).astype(np.float32)


def wild_bytes(rng: np.random.Generator, shape: tuple[int, ...]) -> U8:
    """Bytes, a third of them 0x00, 0xFF, 0x0F, 0xF0, 0x80 or 0x7F, the rest uniform; padding is dirty too."""
    uniform = rng.integers(0, 256, size=shape, dtype=np.uint8)
    extremes = rng.choice(np.array([0x00, 0xFF, 0x0F, 0xF0, 0x80, 0x7F], dtype=np.uint8), size=shape)
    return np.where(rng.random(shape) < 1 / 3, extremes, uniform)
