"""Products inside a kernel: rows of any stored matrix times one row, or a tile of rows times a tile of rows.

Knows contracts.md section 2, decoding and how prepared rows lie; must not know launches, experts or memory. A row has
one result whatever lies beside it: the dot of a group is an exact integer however it is summed, and what follows is one
chain over the groups.
"""

from __future__ import annotations

import triton
import triton.language as tl

from picaflor.backends.cuda.arithmetic import tree16
from picaflor.backends.cuda.decode import code, nibble_code, scale, value
from picaflor.backends.cuda.vectors import vector_rows


@triton.jit
def joined(first, second, third, PLANES: tl.constexpr):
    """The float32 of a group's integer dots, top plane first (contracts.md); unused ones are ignored."""
    if PLANES == 1:
        return first.to(tl.float32)
    elif PLANES == 2:
        return (first * 256 + second).to(tl.float32)
    else:
        return tl.fma(first.to(tl.float32), 65536.0, (second * 256 + third).to(tl.float32))


@triton.jit
def _plane_dot(codes, x):
    return tl.sum(codes * x.to(tl.int32), axis=1)


@triton.jit
def integer_rows(codes, scales, lattice, o, live, cols, row_bytes, groups, digits, plane, half, xs,
                 FORMAT: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr, PLANES: tl.constexpr,
                 BO: tl.constexpr):  # fmt: skip
    """Rows `o` int32 `[BO]` of an integer-coded matrix times one prepared row: float32 `[BO]`. Any format.

    `digits` and `xs` are the addresses of the prepared row; `plane` and `half` the strides of its digits.
    """
    row = (codes + o.to(tl.int64) * row_bytes)[:, None]
    WIDTH: tl.constexpr = 64 if PADDED == 64 else (128 if PADDED == 128 else 256)
    acc = tl.zeros((BO,), tl.float32)
    k = tl.arange(0, WIDTH)[None, :]
    for g in range(groups):
        i = g * GROUP + k
        mask = (k < GROUP) & (i < cols) & live[:, None]
        c = code(row, i, mask, lattice, FORMAT)
        if FORMAT == 4 or FORMAT == 6 or FORMAT == 9:
            at = digits + (k % 2) * half + g * (PADDED // 2) + k // 2
        else:
            at = digits + g * PADDED + k
        first = _plane_dot(c, tl.load(at, mask=k < PADDED, other=0))
        second = first
        third = first
        if PLANES >= 2:
            second = _plane_dot(c, tl.load(at + plane, mask=k < PADDED, other=0))
        if PLANES == 3:
            third = _plane_dot(c, tl.load(at + 2 * plane, mask=k < PADDED, other=0))
        s = scale(codes + o.to(tl.int64) * row_bytes, scales, o.to(tl.int64), g, live, groups, FORMAT)
        acc = tl.fma(joined(first, second, third, PLANES), s * tl.load(xs + g), acc)
    return acc


@triton.jit
def float_rows(codes, scales, o, live, cols, row_bytes, x, FORMAT: tl.constexpr, UNROLL: tl.constexpr,
               BO: tl.constexpr):  # fmt: skip
    """Rows `o` int32 `[BO]` of a float-coded matrix times one float32 row: float32 `[BO]`."""
    row = (codes + o.to(tl.int64) * row_bytes)[:, None]
    number = o.to(tl.int64)[:, None]
    lane = tl.arange(0, 16)[None, :]
    acc = tl.zeros((BO, 16), tl.float32)
    for begin in range(0, cols, 16 * UNROLL):
        for u in tl.static_range(UNROLL):
            i = begin + u * 16 + lane
            w = value(row, scales, number, i, (i < cols) & live[:, None], cols, FORMAT)
            acc = tl.where(i < cols, tl.fma(w, tl.load(x + i, mask=i < cols, other=0.0), acc), acc)
    return tree16(acc, BO)


@triton.jit
def tile_group(row, live, x, here, g, cols, row_bytes, lattice, plane, half,
               FORMAT: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr, PLANES: tl.constexpr,
               BO: tl.constexpr, BS: tl.constexpr):  # fmt: skip
    """float32 `[BO, BS]` of one group's dots: rows of codes `[BO, 1]` times prepared rows `[1, BS]` (addresses)."""
    first = tl.zeros((BO, BS), tl.int32)
    second = tl.zeros((BO, BS), tl.int32)
    third = tl.zeros((BO, BS), tl.int32)
    for c in tl.static_range(PADDED // 64):
        if FORMAT == 4 or FORMAT == 6 or FORMAT == 9:
            j = tl.arange(0, 32)
            byte = g * (GROUP // 2) + c * 32 + j
            packed = tl.load(row + byte[None, :], mask=(byte < row_bytes)[None, :] & live, other=0).to(tl.int32)
            low = nibble_code(packed & 15, FORMAT).to(tl.int8)
            high = nibble_code(packed >> 4, FORMAT).to(tl.int8)
            at = x + (g * (PADDED // 2) + c * 32 + j)[:, None]
            first = tl.dot(low, tl.load(at, mask=here, other=0), acc=first, out_dtype=tl.int32)
            first = tl.dot(high, tl.load(at + half, mask=here, other=0), acc=first, out_dtype=tl.int32)
            if PLANES >= 2:
                second = tl.dot(low, tl.load(at + plane, mask=here, other=0), acc=second, out_dtype=tl.int32)
                second = tl.dot(high, tl.load(at + plane + half, mask=here, other=0), acc=second, out_dtype=tl.int32)
            if PLANES == 3:
                third = tl.dot(low, tl.load(at + 2 * plane, mask=here, other=0), acc=third, out_dtype=tl.int32)
                third = tl.dot(high, tl.load(at + 2 * plane + half, mask=here, other=0), acc=third, out_dtype=tl.int32)
        else:
            k = c * 64 + tl.arange(0, 64)
            i = g * GROUP + k
            codes = code(row, i[None, :], ((k < GROUP) & (i < cols))[None, :] & live, lattice, FORMAT).to(tl.int8)
            at = x + (g * PADDED + k)[:, None]
            first = tl.dot(codes, tl.load(at, mask=here, other=0), acc=first, out_dtype=tl.int32)
            if PLANES >= 2:
                second = tl.dot(codes, tl.load(at + plane, mask=here, other=0), acc=second, out_dtype=tl.int32)
            if PLANES == 3:
                third = tl.dot(codes, tl.load(at + 2 * plane, mask=here, other=0), acc=third, out_dtype=tl.int32)
    return joined(first, second, third, PLANES)


@triton.jit
def integer_tile(codes, scales, lattice, o, live, cols, row_bytes, groups, digits, plane, half, length, xs, s, here,
                 FORMAT: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr, PLANES: tl.constexpr,
                 BO: tl.constexpr, BS: tl.constexpr):  # fmt: skip
    """Rows `o` `[BO]` of an integer-coded matrix times prepared rows `s` int64 `[BS]`: float32 `[BO, BS]`."""
    number = o.to(tl.int64)
    row = codes + number * row_bytes
    x = (digits + s * length)[None, :]
    acc = tl.zeros((BO, BS), tl.float32)
    for g in range(groups):
        dot = tile_group(row[:, None], live[:, None], x, here[None, :], g, cols, row_bytes, lattice, plane, half,
                         FORMAT, GROUP, PADDED, PLANES, BO, BS)  # fmt: skip
        w = scale(row, scales, number, g, live, groups, FORMAT)
        acc = tl.fma(dot, w[:, None] * tl.load(xs + s * groups + g, mask=here, other=0.0)[None, :], acc)
    return acc


@triton.jit
def float_tile(codes, scales, o, live, cols, row_bytes, x, here, FORMAT: tl.constexpr, UNROLL: tl.constexpr,
               BO: tl.constexpr, BS: tl.constexpr):  # fmt: skip
    """Rows `o` `[BO]` of a float-coded matrix times float32 rows at the addresses `x` `[BS]`: float32 `[BS, BO]`."""
    row = (codes + o.to(tl.int64) * row_bytes)[None, :, None]
    number = o.to(tl.int64)[None, :, None]
    lane = tl.arange(0, 16)[None, None, :]
    acc = tl.zeros((BS, BO, 16), tl.float32)
    for begin in range(0, cols, 16 * UNROLL):
        for u in tl.static_range(UNROLL):
            i = begin + u * 16 + lane
            w = value(row, scales, number, i, (i < cols) & live[None, :, None], cols, FORMAT)
            v = tl.load(x[:, None, None] + i, mask=(i < cols) & here[:, None, None], other=0.0)
            acc = tl.where(i < cols, tl.fma(w, v, acc), acc)
    return tl.reshape(tree16(tl.reshape(acc, (BS * BO, 16)), BS * BO), (BS, BO))


@triton.jit
def row_product(codes, scales, lattice, o, live, cols, row_bytes, groups, x, digits, plane, half, xs, sums, tops,
                FORMAT: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr, PLANES: tl.constexpr,
                VECTORS: tl.constexpr, NATIVE: tl.constexpr, EVEN: tl.constexpr, BO: tl.constexpr,
                CG: tl.constexpr, UNROLL: tl.constexpr):  # fmt: skip
    """Rows `o` `[BO]` of any matrix times one row: float32 `[BO]`.

    `x` float32 for float formats; `digits`, `xs`, `sums`, `tops`: addresses of the prepared row for the others.
    """
    if FORMAT <= 2 or FORMAT == 10:
        return float_rows(codes, scales, o, live, cols, row_bytes, x, FORMAT, UNROLL, BO)
    elif VECTORS:
        row = (codes + o.to(tl.int64) * row_bytes).to(tl.pointer_type(tl.int32))
        factors = scales.to(tl.pointer_type(tl.float32))
        if FORMAT == 6:
            factors = factors + o.to(tl.int64) * groups
        else:
            factors = factors + o
        return vector_rows(tl.multiple_of(row, 16), factors, live, row_bytes // 4, groups,
                           digits.to(tl.pointer_type(tl.int32)), plane // 4, half // 4, xs, sums, tops, FORMAT, GROUP,
                           PLANES, NATIVE, EVEN, BO, CG, UNROLL)  # fmt: skip
    else:
        return integer_rows(codes, scales, lattice, o, live, cols, row_bytes, groups, digits, plane, half, xs,
                            FORMAT, GROUP, PADDED, PLANES, BO)  # fmt: skip
