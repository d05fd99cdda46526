"""Products inside a kernel: rows of any stored matrix times one row, or a tile of rows times a tile of rows.

Knows contracts.md section 2, decoding and how prepared rows lie; must not know launches, experts or memory. A row has
one result whatever lies beside it: the dot of a group is an exact integer however it is summed, and what follows is one
chain over the groups. Numbers of rows are given so that all exist: a program at the edge repeats the last one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from picaflor.backends.cuda.arithmetic import tree16
from picaflor.backends.cuda.decode import code, nibble_code, scale, value
from picaflor.backends.cuda.prepare import digit_place
from picaflor.backends.cuda.vectors import vector_rows, wait_for_the_last


@triton.jit
def small_float(d):
    """float32 of an int32 up to 2^22 in magnitude, exact: the addition shifts it into a float's lowest bits, and the
    accumulators of the next product start from it, so that it costs nothing."""
    return (d + 0x4B400000).to(tl.float32, bitcast=True) - 12582912.0


@triton.jit
def joined(first, second, third, PLANES: tl.constexpr):
    """The float32 of a group's integer dots, top plane first (contracts.md); unused ones are ignored. A group has 256
    codes at most, so one plane's dot is no more than 2^22. Two planes are faster joined as integers (H200)."""
    if PLANES == 1:
        return small_float(first)
    elif PLANES == 2:
        return (first * 256 + second).to(tl.float32)
    else:
        return tl.fma(first.to(tl.float32), 65536.0, (second * 256 + third).to(tl.float32))


@triton.jit
def _plane_dot(codes, digits, inside):
    return tl.sum(codes * tl.load(digits, mask=inside, other=0).to(tl.int32), axis=1)


@triton.jit
def _integer_rows(codes, scales, lattice, o, cols, row_bytes, groups, digits, plane, xs,
                  FORMAT: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr, PLANES: tl.constexpr,
                  BO: tl.constexpr):  # fmt: skip
    """`row_product` of any integer format, code by code."""
    WIDTH: tl.constexpr = 64 if PADDED == 64 else (128 if PADDED == 128 else 256)
    number = o.to(tl.int64)
    row = codes + number * row_bytes
    k = tl.arange(0, WIDTH)[None, :]
    place = digit_place(k) if FORMAT == 4 or FORMAT == 6 or FORMAT == 9 else k
    padded = k < PADDED
    acc = tl.zeros((BO,), tl.float32)
    for g in range(groups):
        i = g * GROUP + k
        c = code(row[:, None], i, (k < GROUP) & (i < cols), lattice, FORMAT)
        at = digits + g * PADDED + place
        first = _plane_dot(c, at, padded)
        second = first
        third = first
        if PLANES >= 2:
            second = _plane_dot(c, at + plane, padded)
        if PLANES == 3:
            third = _plane_dot(c, at + 2 * plane, padded)
        s = scale(row, scales, number, g, o >= 0, groups, FORMAT)
        acc = tl.fma(joined(first, second, third, PLANES), s * tl.load(xs + g), acc)
    return acc


@triton.jit
def _float_rows(codes, scales, o, cols, row_bytes, x, FORMAT: tl.constexpr, UNROLL: tl.constexpr,
                BO: tl.constexpr):  # fmt: skip
    """`row_product` of a float format."""
    number = o.to(tl.int64)[:, None]
    row = codes + number * row_bytes
    lane = tl.arange(0, 16)[None, :]
    acc = tl.zeros((BO, 16), tl.float32)
    for begin in range(0, cols, 16 * UNROLL):
        for u in tl.static_range(UNROLL):
            i = begin + u * 16 + lane
            w = value(row, scales, number, i, i < cols, cols, FORMAT)
            acc = tl.where(i < cols, tl.fma(w, tl.load(x + i, mask=i < cols, other=0.0), acc), acc)
    return tree16(acc, BO)


@triton.jit
def scales_of(scales, o, groups, FORMAT: tl.constexpr):
    """Addresses of the first scale of rows `o` of an int8 or int4 format."""
    factors = scales.to(tl.pointer_type(tl.float32))
    return factors + o.to(tl.int64) * groups if FORMAT == 6 else factors + o


@triton.jit
def row_product(codes, scales, lattice, o, cols, row_bytes, groups, x, digits, plane, xs, sums, tops,
                FORMAT: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr, PLANES: tl.constexpr,
                NATIVE: tl.constexpr, EVEN: tl.constexpr, BO: tl.constexpr, N: tl.constexpr, STEPS: tl.constexpr,
                WAIT: tl.constexpr):  # fmt: skip
    """Rows `o` `[BO]` of any matrix times one row: float32 `[BO]`.

    `x` float32 for float formats; `digits`, `xs`, `sums`, `tops`: addresses of the prepared row for the others, `plane`
    the distance of its planes. N > 0: by `vector_rows`, that many groups a step. WAIT: x comes from the kernel before.
    """
    if WAIT and N == 0:
        wait_for_the_last()
    if FORMAT <= 2 or FORMAT == 10:
        return _float_rows(codes, scales, o, cols, row_bytes, x, FORMAT, 8 if NATIVE else 1, BO)
    elif N > 0:
        row = (codes + o.to(tl.int64) * row_bytes).to(tl.pointer_type(tl.int32))
        return vector_rows(tl.multiple_of(row, 16), scales_of(scales, o, groups, FORMAT), row_bytes // 4, groups,
                           digits.to(tl.pointer_type(tl.int32)), plane // 4, xs, sums, tops, FORMAT, GROUP, PLANES,
                           NATIVE, EVEN, BO, N, STEPS, WAIT)  # fmt: skip
    else:
        return _integer_rows(codes, scales, lattice, o, cols, row_bytes, groups, digits, plane, xs, FORMAT, GROUP,
                             PADDED, PLANES, BO)  # fmt: skip


@triton.jit
def two_products(g_codes, g_scales, u_codes, u_scales, o, row_bytes, groups, digits, plane, xs, sums, tops,
                 FORMAT: tl.constexpr, GROUP: tl.constexpr, PLANES: tl.constexpr, NATIVE: tl.constexpr,
                 EVEN: tl.constexpr, BO: tl.constexpr, N: tl.constexpr, STEPS: tl.constexpr):  # fmt: skip
    """Rows `o` of two matrices of one vector format times the same prepared row: float32 `[BO]` each."""
    both = tl.reshape(tl.join(o, o), (2 * BO,))
    second = tl.arange(0, 2 * BO) % 2 == 1
    codes = tl.where(second, u_codes.to(tl.int64), g_codes.to(tl.int64)) + both.to(tl.int64) * row_bytes
    row = tl.multiple_of(codes.to(tl.pointer_type(tl.int32)), 16)
    scales = tl.where(second, u_scales.to(tl.int64), g_scales.to(tl.int64)).to(tl.pointer_type(tl.uint8))
    y = vector_rows(row, scales_of(scales, both, groups, FORMAT), row_bytes // 4, groups,
                    digits.to(tl.pointer_type(tl.int32)), plane // 4, xs, sums, tops, FORMAT, GROUP, PLANES,
                    NATIVE, EVEN, 2 * BO, N, STEPS, False)  # fmt: skip
    return tl.split(tl.reshape(y, (BO, 2)))


@triton.jit
def _nibble_codes(packed, FORMAT: tl.constexpr, NATIVE: tl.constexpr):
    """Signed int8 codes of the low and the high nibbles of a tile of bytes."""
    if NATIVE and FORMAT != 9:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 t;
            and.b32 $0, $2, 0x0F0F0F0F;
            shr.b32 t, $2, 4;
            and.b32 $1, t, 0x0F0F0F0F;
            add.u32 $0, $0, 0x78787878;
            add.u32 $1, $1, 0x78787878;
            xor.b32 $0, $0, 0x80808080;
            xor.b32 $1, $1, 0x80808080;
            }""",
            "=&r,=&r,r", [packed], dtype=(tl.int8, tl.int8), is_pure=True, pack=4,
        )  # fmt: skip
    else:
        wide = packed.to(tl.int32)
        return nibble_code(wide & 15, FORMAT).to(tl.int8), nibble_code(wide >> 4, FORMAT).to(tl.int8)


@triton.jit
def _tile_codes(row, g, c, cols, row_bytes, lattice, FORMAT: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr,
                NATIVE: tl.constexpr, BO: tl.constexpr):  # fmt: skip
    """int8 `[BO, 64]`: codes of the c-th 64 inputs of group g in the order of digits. Behind the group's last input
    other codes may stand: the digits are zero there."""
    if FORMAT == 4 or FORMAT == 6 or FORMAT == 9:
        byte = g * (GROUP // 2) + c * 32 + tl.arange(0, 32)
        if EVEN:
            packed = tl.load(row + byte[None, :])
        else:
            packed = tl.load(row + byte[None, :], mask=(byte < row_bytes)[None, :], other=0)
        low, high = _nibble_codes(packed, FORMAT, NATIVE)
        return tl.reshape(tl.permute(tl.join(low, high), (0, 2, 1)), (BO, 64))
    else:
        k = c * 64 + tl.arange(0, 64)
        i = g * GROUP + k
        return code(row, i[None, :], ((k < GROUP) & (i < cols))[None, :], lattice, FORMAT).to(tl.int8)


@triton.jit
def _tile_dot(row, x, g, group_length, cols, row_bytes, lattice, plane, FORMAT: tl.constexpr, GROUP: tl.constexpr,
              PADDED: tl.constexpr, PLANES: tl.constexpr, EVEN: tl.constexpr, NATIVE: tl.constexpr, BO: tl.constexpr,
              BS: tl.constexpr):  # fmt: skip
    """float32 `[BO, BS]` of one group's dots: rows of codes `[BO, 1]` times prepared rows `[1, BS]` (addresses)."""
    first = tl.zeros((BO, BS), tl.int32)
    second = first
    third = first
    for c in tl.static_range(PADDED // 64):
        codes = _tile_codes(row, g, c, cols, row_bytes, lattice, FORMAT, GROUP, EVEN, NATIVE, BO)
        at = x + (g * group_length + c * 64 + tl.arange(0, 64))[:, None]
        first = tl.dot(codes, tl.load(at), acc=first, out_dtype=tl.int32)
        if PLANES >= 2:
            second = tl.dot(codes, tl.load(at + plane), acc=second, out_dtype=tl.int32)
        if PLANES == 3:
            third = tl.dot(codes, tl.load(at + 2 * plane), acc=third, out_dtype=tl.int32)
    return joined(first, second, third, PLANES)


@triton.jit
def integer_tile(codes, scales, lattice, o, cols, row_bytes, groups, digits, plane, length, group_length, xs,
                 xs_stride, xs_group_stride, s, places, FORMAT: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr,
                 PLANES: tl.constexpr,
                 EVEN: tl.constexpr, NATIVE: tl.constexpr, BO: tl.constexpr, BS: tl.constexpr,
                 UNROLL: tl.constexpr):  # fmt: skip
    """Rows `o` `[BO]` of an integer-coded matrix times prepared rows `s` int64 `[BS]`: float32 `[BO, BS]`.

    EVEN: all groups are whole. UNROLL divides their number. Digits are `length` apart from row to row and
    `group_length` from group to group, scales of activations in the same way. `places`: whose scales are read, `s`, or
    rows in one piece, the last of which may not exist (`prepare.SLACK`): what they give is of no use.
    """
    number = o.to(tl.int64)
    row = codes + number * row_bytes
    x = (digits + s * length)[None, :]
    steps = xs + places * xs_stride
    acc = tl.zeros((BO, BS), tl.float32)
    for begin in range(0, groups, UNROLL):
        for u in tl.static_range(UNROLL):
            g = begin + u
            dot = _tile_dot(row[:, None], x, g, group_length, cols, row_bytes, lattice, plane, FORMAT, GROUP, PADDED,
                            PLANES, EVEN, NATIVE, BO, BS)  # fmt: skip
            # Behind the product: asked for before it, scales made the tile a sixth slower on an H200.
            w = scale(row, scales, number, g, o >= 0, groups, FORMAT)
            acc = tl.fma(dot, w[:, None] * tl.load(steps + g * xs_group_stride)[None, :], acc)
    return acc


@triton.jit
def float_tile(codes, scales, o, cols, row_bytes, x, FORMAT: tl.constexpr, UNROLL: tl.constexpr, EVEN: tl.constexpr,
               BO: tl.constexpr, BS: tl.constexpr):  # fmt: skip
    """Rows `o` `[BO]` of a float-coded matrix times float32 rows at the addresses `x` `[BS]`: float32 `[BS, BO]`.

    EVEN: steps of 16 * UNROLL inputs fill the row. There are few predicates, so loads under masks do not run ahead.
    """
    number = o.to(tl.int64)[None, :, None]
    row = codes + number * row_bytes
    lane = tl.arange(0, 16)[None, None, :]
    acc = tl.zeros((BS, BO, 16), tl.float32)
    for begin in range(0, cols, 16 * UNROLL):
        ws = ()
        vs = ()
        for u in tl.static_range(UNROLL):  # all of them on their way before the first is met
            i = begin + u * 16 + lane
            inside = tl.full((1, 1, 16), 1, tl.int1) if EVEN else i < cols
            ws = ws + (value(row, scales, number, i, inside, cols, FORMAT),)  # type: ignore[assignment]  # noqa: RUF005
            vs = vs + (tl.load(x[:, None, None] + i, mask=inside, other=0.0),)  # type: ignore[assignment]  # noqa: RUF005
        for u in tl.static_range(UNROLL):
            if EVEN:
                acc = tl.fma(ws[u], vs[u], acc)
            else:
                acc = tl.where(begin + u * 16 + lane < cols, tl.fma(ws[u], vs[u], acc), acc)
    return tl.reshape(tree16(tl.reshape(acc, (BS * BO, 16)), BS * BO), (BS, BO))
