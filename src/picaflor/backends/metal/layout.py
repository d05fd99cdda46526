"""Stored matrices as MLX multiplies them: the same codes and scales in MLX's own layout, without a rounding.

Knows formats' bytes and MLX's quantized layouts; must not know operations, models or files.

MLX reads codes of 2, 3, 4 or 8 bits from 32-bit words, lowest bits first, and takes `code * scale + bias` with one pair
per 32, 64 or 128 inputs of a row. With `bias = -offset * scale`, a product with a power of two, that is the format's
`(code - offset) * scale`. Group sizes that are multiples of 32 repeat a scale. 16 and 48 are not: their codes are
read twice in groups of 32, once for the first 16 inputs of each 32 and once for the others, each time with the scales
of those. Inputs behind the last are padded with the code of 0. Leading dimensions are a stack of experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from picaflor.backends.metal.library import Array, borrowed, copied, mx
from picaflor.formats import REGISTRY
from picaflor.formats import fp8_b128 as fp8
from picaflor.formats.numeric import ceil_div

GROUPS: Final = (128, 64, 32)
"""Inputs that share a scale in MLX, as many as possible first."""
HALF: Final = 16
"""Two of these share a word's group where a format's group is no multiple of 32."""
Mode = Literal["affine", "mxfp4"]


@dataclass(frozen=True, slots=True)
class Quantized:
    """Codes uint32 `[..., rows, words]` of `bits` each; `scales` and `biases` `[..., rows, padded / group]`.

    `second`: scales and biases of the other halves; `scales` and `biases` are then those of the first 16 of each 32.
    `mode` mxfp4: scales are uint8 exponents, there are no biases.
    """

    rows: int
    cols: int
    padded: int
    group: int
    bits: int
    offset: int
    codes: Array
    scales: Array
    biases: Array | None
    second: tuple[Array, Array] | None = None
    mode: Mode = "affine"


@dataclass(frozen=True, slots=True)
class Dense:
    """Floats `[..., rows, cols]` in their stored type, which float32 holds exactly."""

    rows: int
    cols: int
    values: Array


@dataclass(frozen=True, slots=True)
class Blocks:
    """fp8: bytes `[..., rows, cols]`, float32 scales `[..., blocks, blocks]` of 128 by 128 weights."""

    rows: int
    cols: int
    codes: Array
    scales: Array


Held = Quantized | Dense | Blocks
Shape = tuple[int, int]
Planes = Sequence[NDArray[np.uint8]]


def held(format_name: str, shape: Shape, group_size: int, planes: Planes) -> Held:
    """A matrix of that format. `planes` are its planes' bytes `[..., nbytes]`; KeyError for an unknown format."""
    return _MAKERS[format_name](shape, group_size, planes)


def at(part: Held, numbers: Array) -> Held:
    """Members of a stack, `[count, ...]`."""
    return _mapped(part, lambda values: values[numbers])


def heads(part: Held, count: int) -> Held:
    """Rows `[..., rows, x]` as `[..., count, rows / count, x]`; not for Blocks."""
    if isinstance(part, Blocks):
        return heads(Dense(part.rows, part.cols, decoded(part)), count)
    split = _mapped(part, lambda values: values.reshape(*values.shape[:-2], count, -1, values.shape[-1]))
    return _resized(split, part.rows // count)


def band(part: Held, start: int, stop: int) -> Held:
    """Rows `start .. stop`; not for Blocks, whose scales cover several."""
    if isinstance(part, Blocks):
        raise ValueError("rows of a matrix in blocks are not cut out")
    return _resized(_mapped(part, lambda values: values[..., start:stop, :]), stop - start)


def pick(part: Held, numbers: Array) -> Array:
    """Rows by number, written out: float32 `[count, cols]`, exactly the format's values."""
    if isinstance(part, Blocks):
        scales = part.scales[numbers // fp8.BLOCK]
        return _fp8(part.codes[numbers], mx.repeat(scales, fp8.BLOCK, axis=-1)[..., : part.cols])
    return decoded(_mapped(part, lambda values: values[numbers]))


def _resized(part: Held, rows: int) -> Held:
    if isinstance(part, Quantized):
        return _quantized(part, rows, part.codes, part.scales, part.biases, part.second)
    if isinstance(part, Dense):
        return Dense(rows, part.cols, part.values)
    return Blocks(rows, part.cols, part.codes, part.scales)


def _mapped(part: Held, change: Callable[[Array], Array]) -> Held:
    """The same matrix with another view of each array."""
    if isinstance(part, Quantized):
        second = None if part.second is None else (change(part.second[0]), change(part.second[1]))
        biases = None if part.biases is None else change(part.biases)
        return _quantized(part, part.rows, change(part.codes), change(part.scales), biases, second)
    if isinstance(part, Dense):
        return Dense(part.rows, part.cols, change(part.values))
    return Blocks(part.rows, part.cols, change(part.codes), change(part.scales))


def _quantized(
    like: Quantized, rows: int, codes: Array, scales: Array, biases: Array | None, second: tuple[Array, Array] | None
) -> Quantized:
    return Quantized(
        rows, like.cols, like.padded, like.group, like.bits, like.offset, codes, scales, biases, second, like.mode
    )


def arrays(part: Held) -> list[Array]:
    """All arrays of a matrix."""
    if isinstance(part, Quantized):
        pair = [] if part.second is None else list(part.second)
        return [part.codes, part.scales, *([] if part.biases is None else [part.biases]), *pair]
    return [part.values] if isinstance(part, Dense) else [part.codes, part.scales]


# ---- values ----


def decoded(part: Held) -> Array:
    """The matrix in float32 `[..., rows, cols]`: exactly what `Format.decode` gives."""
    if isinstance(part, Dense):
        return part.values.astype(mx.float32)
    if isinstance(part, Blocks):
        spread = mx.repeat(mx.repeat(part.scales, fp8.BLOCK, axis=-2), fp8.BLOCK, axis=-1)
        return _fp8(part.codes, spread[..., : part.rows, : part.cols])
    if part.mode == "mxfp4":
        values = mx.dequantize(part.codes, part.scales, group_size=part.group, bits=4, mode="mxfp4", dtype=mx.float32)
        return values[..., : part.cols]
    codes = (unpacked(part.codes, part.bits).astype(mx.int32) - part.offset).astype(mx.float32)
    return (codes * spread_scales(part))[..., : part.cols]


def spread_scales(part: Quantized) -> Array:
    """One scale per padded input, `[..., rows, padded]`."""
    if part.second is None:
        return mx.repeat(part.scales, part.group, axis=-1)
    pair = mx.stack([part.scales, part.second[0]], axis=-1)
    return mx.repeat(pair.reshape(*pair.shape[:-2], -1), HALF, axis=-1)


def unpacked(words: Array, bits: int) -> Array:
    """Codes uint32 `[..., n]` from words."""
    if bits == 3:
        triples = mx.view(words, mx.uint8).reshape(*words.shape[:-1], -1, 3).astype(mx.uint32)
        joined = triples[..., 0] | (triples[..., 1] << 8) | (triples[..., 2] << 16)
        codes = (joined[..., None] >> mx.arange(0, 24, 3, dtype=mx.uint32)) & 7
    else:
        codes = (words[..., None] >> mx.arange(0, 32, bits, dtype=mx.uint32)) & ((1 << bits) - 1)
    return codes.reshape(*words.shape[:-1], -1)


def _fp8(codes: Array, scales: Array) -> Array:
    return mx.from_fp8(codes, dtype=mx.float32) * scales


# ---- from stored planes ----


def mlx_group(cols: int) -> int:
    """The group of a format with one scale per row: the least padding, then the largest."""
    return min(GROUPS, key=lambda group: (ceil_div(cols, group) * group, -group))


def _affine(
    shape: Shape, bits: int, group: int, codes: NDArray[np.uint8], scales: Array, *, second: Array | None = None
) -> Quantized:
    """`codes`: bytes of whole groups `[..., rows, padded * bits / 8]`; scales of MLX's groups."""
    offset = 1 << (bits - 1)
    rows, cols = shape
    pair = None if second is None else (second, second * -float(offset))
    return Quantized(
        rows, cols, ceil_div(cols, group) * group, group, bits, offset, borrowed(codes.view("<u4")), scales,
        scales * -float(offset), pair,
    )  # fmt: skip


def _lines(plane: NDArray[np.uint8], rows: int) -> NDArray[np.uint8]:
    """Bytes `[..., rows, bytes of a row]`."""
    return plane.reshape(*plane.shape[:-1], rows, -1)


def _floats(plane: NDArray[np.uint8], rows: int) -> NDArray[np.float32]:
    """float32 `[..., rows, n]`."""
    return np.ascontiguousarray(_lines(plane, rows)).view("<f4")


def _padded_codes(
    codes: NDArray[np.uint8], cols: int, bits: int, padded: int, zero: int, *, flip: int = 0
) -> NDArray[np.uint8]:
    """Whole groups of codes: what lies behind the last input becomes the code of 0. As it is where nothing changes."""
    wanted = padded * bits // 8
    per_byte = 8 // bits
    if codes.shape[-1] == wanted and cols % per_byte == 0 and not flip:
        return codes
    filler = sum(zero << (bits * k) for k in range(per_byte))
    out = np.full((*codes.shape[:-1], wanted), filler, np.uint8)
    out[..., : codes.shape[-1]] = codes ^ np.uint8(flip) if flip else codes
    left = cols % per_byte
    if left:
        keep = (1 << (bits * left)) - 1
        last = out[..., cols // per_byte]
        out[..., cols // per_byte] = (last & np.uint8(keep)) | np.uint8(filler & ~keep & 0xFF)
    return out


def _row_scales(plane: NDArray[np.uint8], rows: int, count: int) -> Array:
    scales = copied(_floats(plane, rows))
    return mx.contiguous(mx.broadcast_to(scales, (*scales.shape[:-1], count)))


def _row_format(bits: int, flip: int = 0) -> Callable[[Shape, int, Planes], Quantized]:
    def make(shape: Shape, _: int, planes: Planes) -> Quantized:
        rows, cols = shape
        group = mlx_group(cols)
        padded = ceil_div(cols, group) * group
        codes = _padded_codes(_lines(planes[0], rows), cols, bits, padded, 1 << (bits - 1), flip=flip)
        return _affine(shape, bits, group, codes, _row_scales(planes[1], rows, padded // group))

    return make


def _int4_grouped(shape: Shape, size: int, planes: Planes) -> Quantized:
    rows, cols = shape
    group = next((g for g in GROUPS if size % g == 0), 2 * HALF)
    padded = ceil_div(cols, group) * group
    codes = _padded_codes(_lines(planes[0], rows), cols, 4, padded, 8)
    scales = _floats(planes[1], rows)
    if size % group == 0:
        if size == group:
            return _affine(shape, 4, group, codes, borrowed(scales))
        repeated = mx.repeat(copied(scales), size // group, axis=-1)[..., : padded // group]
        return _affine(shape, 4, group, codes, mx.contiguous(repeated))
    of_half = np.minimum(np.arange(padded // HALF) * HALF // size, scales.shape[-1] - 1)
    first, second = (copied(scales[..., of_half[start::2]]) for start in (0, 1))
    return _affine(shape, 4, group, codes, first, second=second)


def _int3_g64(shape: Shape, _: int, planes: Planes) -> Quantized:
    """Two bit planes of a block become 64 codes of 3 bits, side by side."""
    rows, cols = shape
    group, low_bytes = 64, 16
    padded = ceil_div(cols, group) * group
    blocks = planes[0].reshape(*planes[0].shape[:-1], rows, padded // group, -1)
    low = (blocks[..., :low_bytes, None] >> np.arange(0, 8, 2, dtype=np.uint8)) & 3
    high = np.unpackbits(blocks[..., low_bytes:], axis=-1, bitorder="little")
    values = (low.reshape(*low.shape[:-2], -1) | (high << 2)).reshape(*blocks.shape[:-2], -1)
    values[..., cols:] = 4
    bits = (values[..., None] >> np.arange(3, dtype=np.uint8)) & 1
    codes = np.packbits(bits.reshape(*values.shape[:-1], -1), axis=-1, bitorder="little")
    return _affine(shape, 3, group, codes, copied(_floats(planes[1], rows)))


def _mxfp4(shape: Shape, _: int, planes: Planes) -> Held:
    """As it is stored; only an exponent of 255, which is NaN, has no counterpart in MLX."""
    rows, cols = shape
    group = 32
    padded = ceil_div(cols, group) * group
    exponents = _lines(planes[1], rows)
    if (exponents == 255).any():
        return _written_out("mxfp4", shape, planes)
    codes = _padded_codes(_lines(planes[0], rows), cols, 4, padded, 0)
    scales = borrowed(np.ascontiguousarray(exponents))
    return Quantized(rows, cols, padded, group, 4, 0, borrowed(codes.view("<u4")), scales, None, None, "mxfp4")


def _written_out(format_name: str, shape: Shape, planes: Planes) -> Dense:
    """Decoded by the format itself."""
    lead = planes[0].shape[:-1]
    flat = [plane.reshape(-1, plane.shape[-1]) for plane in planes]
    values = [REGISTRY[format_name].decode(tuple(one), *shape, 0) for one in zip(*flat, strict=True)]
    return Dense(*shape, copied(np.stack(values).reshape(*lead, *shape)))


def _f32(shape: Shape, _: int, planes: Planes) -> Dense:
    return Dense(*shape, borrowed(_floats(planes[0], shape[0])))


def _f16(shape: Shape, _: int, planes: Planes) -> Dense:
    return Dense(*shape, borrowed(np.ascontiguousarray(_lines(planes[0], shape[0])).view("<f2")))


def _bf16(shape: Shape, _: int, planes: Planes) -> Dense:
    """bfloat16 is not numpy's: the bits go over as integers."""
    words = borrowed(np.ascontiguousarray(_lines(planes[0], shape[0])).view("<u2"))
    return Dense(*shape, mx.view(words, mx.bfloat16))


def _blocks(shape: Shape, _: int, planes: Planes) -> Blocks:
    rows, cols = shape
    scales = copied(_floats(planes[1], ceil_div(rows, fp8.BLOCK)))
    return Blocks(rows, cols, borrowed(np.ascontiguousarray(_lines(planes[0], rows))), scales)


_MAKERS: Final[Mapping[str, Callable[[Shape, int, Planes], Held]]] = MappingProxyType(
    {
        "f32": _f32,
        "bf16": _bf16,
        "f16": _f16,
        "int8-row": _row_format(8, flip=0x80),
        "int4-row": _row_format(4),
        "int2-row": _row_format(2),
        "int4-grouped": _int4_grouped,
        "int3-g64": _int3_g64,
        "mxfp4": _mxfp4,
        "fp8-e4m3-b128": _blocks,
    }
)
FORMATS: Final = tuple(_MAKERS)


def nbytes(format_name: str, shape: Shape, group_size: int, *, borrows: bool) -> int:
    """Bytes of MLX's memory that a matrix takes; with `borrows` those planes do not count that stay where they are."""
    rows, cols = shape
    stored = [plane.nbytes(rows, cols, group_size) for plane in REGISTRY[format_name].planes]
    if format_name in ("f32", "f16", "bf16", "fp8-e4m3-b128"):
        return sum(stored[1:]) if borrows else sum(stored)
    if format_name == "mxfp4":
        return 0 if borrows and cols % 32 == 0 else rows * ceil_div(cols, 32) * 17
    bits = {"int8-row": 8, "int4-row": 4, "int4-grouped": 4, "int2-row": 2, "int3-g64": 3}[format_name]
    group = 64 if bits == 3 else mlx_group(cols)
    passes = 1
    if format_name == "int4-grouped":
        group = next((g for g in GROUPS if group_size % g == 0), 2 * HALF)
        passes = 1 if group_size % group == 0 else 2
    padded = ceil_div(cols, group) * group
    codes = rows * padded * bits // 8
    scales = rows * (padded // group) * 4
    moved = bits in (3, 8) or padded != cols
    kept = (0 if borrows and not moved else codes) + (0 if borrows and group == group_size else scales * passes)
    return kept + scales * passes
