"""Products with stored matrices on a device: few rows by vectors, many by integer tiles, floats by sixteen chains.

Knows contracts.md section 2, decoding and prepared rows; must not know experts, models or recorders. A row has one
result whatever lies beside it: the dot of a group is an exact integer however it is summed, and what follows is one
chain over the groups.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from picaflor.backends.cuda import interpret
from picaflor.backends.cuda.arithmetic import EXACT, tree16
from picaflor.backends.cuda.decode import code, nibble_code, scale, value
from picaflor.backends.cuda.formats import DeviceWeight, Tensor, lattice
from picaflor.backends.cuda.prepare import Prepared, prepare


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
                 WIDTH: tl.constexpr, BO: tl.constexpr):  # fmt: skip
    """Rows `o` int32 `[BO]` of an integer-coded matrix times one prepared row: float32 `[BO]`. Any format.

    `digits` and `xs` are the addresses of the prepared row; `plane` and `half` the strides of its digits.
    """
    row = (codes + o.to(tl.int64) * row_bytes)[:, None]
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
def _few_integers(codes, scales, lattice, rows, cols, row_bytes, groups, digits, plane, half, length, xs, out,
                  out_stride, FORMAT: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr, PLANES: tl.constexpr,
                  WIDTH: tl.constexpr, BO: tl.constexpr):  # fmt: skip
    o = tl.program_id(0) * BO + tl.arange(0, BO)
    s = tl.program_id(1).to(tl.int64)
    y = integer_rows(codes, scales, lattice, o, o < rows, cols, row_bytes, groups, digits + s * length, plane, half,
                     xs + s * groups, FORMAT, GROUP, PADDED, PLANES, WIDTH, BO)  # fmt: skip
    tl.store(out + s * out_stride + o, y, mask=o < rows)


@triton.jit
def _floats(codes, scales, rows, cols, row_bytes, x, x_stride, out, out_stride, count,
            FORMAT: tl.constexpr, UNROLL: tl.constexpr, BO: tl.constexpr, BS: tl.constexpr):  # fmt: skip
    o = tl.program_id(0) * BO + tl.arange(0, BO)
    s = tl.program_id(1) * BS + tl.arange(0, BS)
    row = (codes + o.to(tl.int64) * row_bytes)[None, :, None]
    number = o.to(tl.int64)[None, :, None]
    here = (s < count)[:, None, None]
    live = (o < rows)[None, :, None]
    x_row = (x + s.to(tl.int64) * x_stride)[:, None, None]
    lane = tl.arange(0, 16)[None, None, :]
    acc = tl.zeros((BS, BO, 16), tl.float32)
    for begin in range(0, cols, 16 * UNROLL):
        for u in tl.static_range(UNROLL):
            i = begin + u * 16 + lane
            w = value(row, scales, number, i, (i < cols) & live, cols, FORMAT)
            v = tl.load(x_row + i, mask=(i < cols) & here, other=0.0)
            acc = tl.where(i < cols, tl.fma(w, v, acc), acc)
    y = tl.reshape(tree16(tl.reshape(acc, (BS * BO, 16)), BS * BO), (BS, BO))
    at = out + s.to(tl.int64)[:, None] * out_stride + o[None, :]
    tl.store(at, y, mask=(s < count)[:, None] & (o < rows)[None, :])


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
def _many_integers(codes, scales, lattice, rows, cols, row_bytes, groups, digits, plane, half, length, xs, out,
                   out_stride, count, FORMAT: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr,
                   PLANES: tl.constexpr, BO: tl.constexpr, BS: tl.constexpr):  # fmt: skip
    o = tl.program_id(0) * BO + tl.arange(0, BO)
    s = (tl.program_id(1) * BS + tl.arange(0, BS)).to(tl.int64)
    y = integer_tile(codes, scales, lattice, o, o < rows, cols, row_bytes, groups, digits, plane, half, length, xs, s,
                     s < count, FORMAT, GROUP, PADDED, PLANES, BO, BS)  # fmt: skip
    at = out + s[None, :] * out_stride + o[:, None]
    tl.store(at, y, mask=(s < count)[None, :] & (o < rows)[:, None])


def matmul(x: Tensor, weight: DeviceWeight, out: Tensor, precision: str, *, prepared: Prepared | None = None) -> None:
    """out = x @ W.T: x float32 `[n, cols]`, out float32 `[n, rows]`, columns side by side in both.

    `prepared`: the rows of x for `weight.needs(precision)`, made here where it is not given.
    """
    count = x.shape[0]
    if (x.shape[1], out.shape[0], out.shape[1]) != (weight.cols, count, weight.rows):
        raise ValueError(f"x {tuple(x.shape)}, out {tuple(out.shape)} for a matrix [{weight.rows}, {weight.cols}]")
    needs = weight.needs(precision)
    if needs is None:
        _launch_floats(x, weight, out, count)
        return
    rows = prepare(x, needs) if prepared is None else prepared
    if rows.needs != needs or rows.cols != weight.cols or rows.room < count:
        raise ValueError(f"prepared rows for {rows.needs}, {rows.cols} inputs; the matrix needs {needs}, {weight.cols}")
    if count == 1:
        _launch_few(rows, weight, out, count)
    else:
        _launch_many(rows, weight, out, count)


def _launch_floats(x: Tensor, weight: DeviceWeight, out: Tensor, count: int) -> None:
    tile = min(triton.next_power_of_2(count), 8)
    block, unroll = (64, 1) if interpret.active() else (16, 8)
    _floats[(triton.cdiv(weight.rows, block), triton.cdiv(count, tile))](
        weight.planes[0], weight.scales, weight.rows, weight.cols, weight.row_bytes, x, x.stride(0), out,
        out.stride(0), count, FORMAT=weight.number, UNROLL=unroll, BO=block, BS=tile, num_warps=4, **EXACT,
    )  # fmt: skip


def _common(rows: Prepared, weight: DeviceWeight) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments that all kernels of integer-coded matrices take, and their constants."""
    first = (
        weight.planes[0], weight.scales, lattice(str(rows.digits.device)), weight.rows, weight.cols, weight.row_bytes,
        rows.groups, rows.digits, rows.digits.stride(0), rows.digits.stride(1), rows.length, rows.scales,
    )  # fmt: skip
    needs = rows.needs
    return first, {"FORMAT": weight.number, "GROUP": needs.group, "PADDED": needs.padded, "PLANES": needs.planes}


def _launch_few(rows: Prepared, weight: DeviceWeight, out: Tensor, count: int) -> None:
    first, constants = _common(rows, weight)
    block = 64 if interpret.active() else 16
    _few_integers[(triton.cdiv(weight.rows, block), count)](
        *first, out, out.stride(0), WIDTH=triton.next_power_of_2(rows.needs.padded), BO=block, num_warps=4, **constants,
        **EXACT,
    )  # fmt: skip


def _launch_many(rows: Prepared, weight: DeviceWeight, out: Tensor, count: int) -> None:
    first, constants = _common(rows, weight)
    tile = min(max(triton.next_power_of_2(count), 16), 64)
    _many_integers[(triton.cdiv(weight.rows, 64), triton.cdiv(count, tile))](
        *first, out, out.stride(0), count, BO=64, BS=tile, num_warps=4, **constants, **EXACT
    )
