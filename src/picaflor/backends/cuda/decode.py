"""Stored bytes to numbers in Triton: codes, scales and decoded values of every format, element by element.

Knows where bits lie (docs/formats.md); must not know products, activations or launches. `FORMAT` is the number of the
format in `formats.REGISTRY` (0 f32, 1 bf16, 2 f16, 3 int8-row, 4 int4-row, 5 int2-row, 6 int4-grouped, 7 int3-g64,
8 e8-iq3-lattice, 9 mxfp4, 10 fp8-e4m3-b128), `GROUP` the inputs with one activation scale. Rows of codes are given by
the address of their first byte. Addresses of planes are `uint8` pointers; scales are at multiples of their own size.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def nibble_code(nibble, FORMAT: tl.constexpr):
    """Signed code of a nibble 0..15, int32: minus 8, or twice the value of an e2m1 float."""
    if FORMAT == 9:
        low = nibble & 1
        high = (nibble >> 2) & 1
        both = high & (nibble >> 1)
        size = (nibble & 7) + (high & low) + 2 * both + 2 * (both & low)
        return tl.where(nibble >= 8, -size, size)
    else:
        tl.static_assert(FORMAT == 4 or FORMAT == 6, "no nibbles")
        return nibble - 8


@triton.jit
def half_float(word):
    """float32 of the 16 bits of an IEEE half, given as int32."""
    return word.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _lattice_code(row, i, mask, lattice):
    block = row + (i // 256) * 98
    place = i % 256
    index = tl.load(block + place // 4, mask=mask, other=0).to(tl.int32)
    size = tl.load(lattice + index * 4 + place % 4, mask=mask, other=0).to(tl.int32)
    word = _lattice_word(block, place // 32, mask)
    signs = (word >> (((place % 32) // 8) * 7)) & 127
    odd = signs ^ (signs >> 4)
    odd = odd ^ (odd >> 2)
    odd = odd ^ (odd >> 1)
    signs = signs | ((odd & 1) << 7)
    return tl.where(((signs >> (place % 8)) & 1) != 0, -size, size)


@triton.jit
def _lattice_word(block, sub, mask):
    """The 32 bits of sub-block `sub` as int32: sign words and the code of the scale."""
    at = block + 64 + sub * 4
    word = tl.load(at, mask=mask, other=0).to(tl.int32)
    word |= tl.load(at + 1, mask=mask, other=0).to(tl.int32) << 8
    word |= tl.load(at + 2, mask=mask, other=0).to(tl.int32) << 16
    return word | (tl.load(at + 3, mask=mask, other=0).to(tl.int32) << 24)


@triton.jit
def code(row, i, mask, lattice, FORMAT: tl.constexpr):
    """Signed code of input i, int32, as contracts.md multiplies it; `row` and `i` broadcast. Integer formats."""
    if FORMAT == 3:
        return tl.load(row + i, mask=mask, other=0).to(tl.int8, bitcast=True).to(tl.int32)
    elif FORMAT == 5:
        byte = tl.load(row + (i >> 2), mask=mask, other=0).to(tl.int32)
        return ((byte >> (2 * (i & 3))) & 3) - 2
    elif FORMAT == 7:
        block = row + (i >> 6) * 24
        k = i & 63
        low = (tl.load(block + (k >> 2), mask=mask, other=0).to(tl.int32) >> (2 * (k & 3))) & 3
        high = (tl.load(block + 16 + (k >> 3), mask=mask, other=0).to(tl.int32) >> (k & 7)) & 1
        return low + 4 * high - 4
    elif FORMAT == 8:
        return _lattice_code(row, i, mask, lattice)
    else:
        tl.static_assert(FORMAT == 4 or FORMAT == 6 or FORMAT == 9, "no integer codes")
        byte = tl.load(row + (i >> 1), mask=mask, other=0).to(tl.int32)
        return nibble_code((byte >> (4 * (i & 1))) & 15, FORMAT)


@triton.jit
def scale(row, scales, number, g, mask, groups, FORMAT: tl.constexpr):
    """float32 scale that meets the codes of activation group g of row `number`; `groups`: of a row. Integer formats."""
    if FORMAT == 3 or FORMAT == 4 or FORMAT == 5:
        return tl.load(scales.to(tl.pointer_type(tl.float32)) + number + g * 0, mask=mask, other=0.0)
    elif FORMAT == 6 or FORMAT == 7:
        return tl.load(scales.to(tl.pointer_type(tl.float32)) + number * groups + g, mask=mask, other=0.0)
    elif FORMAT == 8:
        block = row + (g // 8) * 98
        word = _lattice_word(block, g % 8, mask)
        half = tl.load(block + 96, mask=mask, other=0).to(tl.int32)
        half |= tl.load(block + 97, mask=mask, other=0).to(tl.int32) << 8
        step = ((word >> 28) & 15).to(tl.float32) + 0.5
        return ((half_float(half) * step) * 0.5) * 0.5
    else:
        tl.static_assert(FORMAT == 9, "no scales of groups")
        e = tl.load(scales + number * groups + g, mask=mask, other=1).to(tl.int32)
        bits = tl.where(e >= 2, (e - 1) << 23, 0x200000 << (e & 1))
        return tl.where(e == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def value(row, scales, number, i, mask, cols, FORMAT: tl.constexpr):
    """float32 value of input i of a row. Float formats."""
    if FORMAT == 0:
        return tl.load(row.to(tl.pointer_type(tl.float32)) + i, mask=mask, other=0.0)
    elif FORMAT == 1:
        word = tl.load(row.to(tl.pointer_type(tl.uint16)) + i, mask=mask, other=0)
        return (word.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    elif FORMAT == 2:
        return half_float(tl.load(row.to(tl.pointer_type(tl.uint16)) + i, mask=mask, other=0).to(tl.int32))
    else:
        tl.static_assert(FORMAT == 10, "no float format")
        byte = tl.load(row + i, mask=mask, other=0).to(tl.int32)
        rest = byte & 0x7F
        half = (rest << 7) | ((byte & 0x80) << 8) | tl.where(rest == 0x7F, 0x7E00, 0)
        tile = (number // 128) * ((cols + 127) // 128) + i // 128
        s = tl.load(scales.to(tl.pointer_type(tl.float32)) + tile, mask=mask, other=0.0)
        return (half_float(half) * 256.0) * s


@triton.jit
def decoded(codes, scales, lattice, number, i, mask, cols, row_bytes, FORMAT: tl.constexpr, GROUP: tl.constexpr):
    """decode_row of contracts.md: float32 of input i of row `number`; the two broadcast against each other.

    `codes` and `scales` are the planes' addresses (uint8 pointers), `number` and `i` int32 or int64. For e8 the
    stored, rotated row.
    """
    row = codes + number.to(tl.int64) * row_bytes
    if FORMAT <= 2 or FORMAT == 10:
        return value(row, scales, number, i, mask, cols, FORMAT)
    else:
        groups = (cols + GROUP - 1) // GROUP
        s = scale(row, scales, number, i // GROUP, mask, groups, FORMAT)
        return code(row, i, mask, lattice, FORMAT).to(tl.float32) * s
