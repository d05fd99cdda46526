"""Products with stored matrices on a device: few rows by vectors, many by integer tiles, floats by sixteen chains.

Knows contracts.md section 2, decoding and prepared rows; must not know experts, models or recorders. A row has one
result whatever lies beside it: the dot of a group is an exact integer however it is summed, and what follows is one
chain over the groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import triton
import triton.language as tl

from picaflor.backends.cuda import interpret
from picaflor.backends.cuda.arithmetic import EXACT
from picaflor.backends.cuda.formats import DeviceWeight, Tensor, lattice
from picaflor.backends.cuda.launches import blocks, pieces
from picaflor.backends.cuda.overlap import chained, take_turn
from picaflor.backends.cuda.prepare import BY_ROW, Prepared, prepare
from picaflor.backends.cuda.products import float_tile, integer_tile, row_product
from picaflor.backends.cuda.tiles import (
    CACHED_BYTES,
    ROWS_OF_FLOATS,
    ROWS_ONE_BY_ONE,
    ManyTile,
    Tile,
    processors,
    reads_words,
    shared_limit,
    tile_of,
    tile_of_many,
)
from picaflor.backends.cuda.vectors import let_the_next_start


@triton.jit
def _few_integers(codes, scales, lattice, from_rows, rows, cols, row_bytes, groups, digits, plane, length, xs, sums,
                  tops, out, out_stride, FORMAT: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr,
                  PLANES: tl.constexpr, NATIVE: tl.constexpr, EVEN: tl.constexpr, BO: tl.constexpr, N: tl.constexpr,
                  STEPS: tl.constexpr, OVERLAP: tl.constexpr = False):  # fmt: skip
    if OVERLAP:
        let_the_next_start()
    o = from_rows + tl.program_id(0) * BO + tl.arange(0, BO)
    s = tl.program_id(1).to(tl.int64)
    y = row_product(codes, scales, lattice, tl.minimum(o, rows - 1), cols, row_bytes, groups, xs, digits + s * length,
                    plane, xs + s * groups, sums + s * groups, tops + s * groups, FORMAT, GROUP, PADDED, PLANES, NATIVE,
                    EVEN, BO, N, STEPS, OVERLAP)  # fmt: skip
    tl.store(out + s * out_stride + o, y, mask=o < rows)


@triton.jit
def _floats(codes, scales, from_rows, rows, cols, row_bytes, x, x_stride, out, out_stride, count,
            FORMAT: tl.constexpr, UNROLL: tl.constexpr, EVEN: tl.constexpr, BO: tl.constexpr,
            BS: tl.constexpr, OVERLAP: tl.constexpr = False):  # fmt: skip
    if OVERLAP:
        take_turn()
    o = from_rows + tl.program_id(0) * BO + tl.arange(0, BO)
    s = tl.program_id(1) * BS + tl.arange(0, BS)
    x_rows = x + tl.minimum(s, count - 1).to(tl.int64) * x_stride
    y = float_tile(codes, scales, tl.minimum(o, rows - 1), cols, row_bytes, x_rows, FORMAT, UNROLL, EVEN, BO, BS)
    at = out + s.to(tl.int64)[:, None] * out_stride + o[None, :]
    tl.store(at, y, mask=(s < count)[:, None] & (o < rows)[None, :])


@triton.jit
def _many_integers(codes, scales, lattice, from_rows, rows, cols, row_bytes, groups, digits, plane, length,
                   group_length, xs, xs_stride, xs_group_stride, out, out_stride, count, FORMAT: tl.constexpr,
                   GROUP: tl.constexpr, PADDED: tl.constexpr,
                   PLANES: tl.constexpr, EVEN: tl.constexpr, NATIVE: tl.constexpr, BO: tl.constexpr,
                   BS: tl.constexpr, UNROLL: tl.constexpr, PIECE: tl.constexpr):  # fmt: skip
    o = from_rows + tl.program_id(0) * BO + tl.arange(0, BO)
    s = tl.program_id(1) * BS + tl.arange(0, BS)
    row = tl.minimum(o, rows - 1)
    column = tl.minimum(s, count - 1).to(tl.int64)
    places = s if PIECE else column
    y = integer_tile(codes, scales, lattice, row, cols, row_bytes, groups, digits, plane, length, group_length, xs,
                     xs_stride, xs_group_stride, column, places, FORMAT, GROUP, PADDED, PLANES, EVEN, NATIVE, BO, BS,
                     UNROLL)  # fmt: skip
    at = out + s.to(tl.int64)[None, :] * out_stride + o[:, None]
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
    if count == 1 or goes_row_by_row(weight, count):
        launch_few(rows, weight, out, count)
    else:
        launch_many(rows, weight, out, count)


def _launch_floats(x: Tensor, weight: DeviceWeight, out: Tensor, count: int) -> None:
    tile = min(triton.next_power_of_2(count), 8)
    block, unroll, warps = (64, 1, 4) if interpret.active() else (16, 8, 4)
    if count <= ROWS_OF_FLOATS and weight.planes[0].nbytes <= CACHED_BYTES and not interpret.active():
        tile, block, unroll, warps = 1, 2, 32, 1
    for start, stop, first, last in _pieces(weight, count, block, tile):
        _floats[(blocks(start, stop, block), blocks(first, last, tile))](
            weight.planes[0], weight.scales, start, stop, weight.cols, weight.row_bytes, x[first:], x.stride(0),
            out[first:], out.stride(0), last - first, FORMAT=weight.number, UNROLL=unroll,
            EVEN=weight.cols % (16 * unroll) == 0, BO=block, BS=tile, num_warps=warps, **chained(),
        )  # fmt: skip


def _pieces(weight: DeviceWeight, count: int, rows: int, columns: int) -> Iterator[tuple[int, int, int, int]]:
    """Rows (start, stop) of the matrix and (first, last) of activations for one launch each; a program has so many."""
    for start, stop in pieces(weight.rows, 2 * weight.cols * min(count, columns), weight.row_bytes, step=rows):
        for first, last in pieces(count, 2 * weight.cols * (stop - start), step=columns):
            yield start, stop, first, last


def native() -> bool:
    """Whether the device has NVIDIA's four-byte dot product."""
    import torch

    return not interpret.active() and torch.version.hip is None


def _common(rows: Prepared, weight: DeviceWeight, start: int, stop: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments that all kernels of integer-coded matrices take, and their constants: for rows (start, stop)."""
    given = (
        weight.planes[0], weight.scales, lattice(str(rows.digits.device)), start, stop, weight.cols, weight.row_bytes,
        rows.groups,
    )  # fmt: skip
    needs = rows.needs
    return given, {"FORMAT": weight.number, "GROUP": needs.group, "PADDED": needs.padded, "PLANES": needs.planes}


def launch_few(rows: Prepared, weight: DeviceWeight, out: Tensor, count: int, tile: Tile | None = None) -> None:
    """Each of `count` prepared rows by itself; `tile`: another one than the shape's own."""
    tile = tile or tile_of(weight.format, weight.rows, weight.cols, weight.group_size, aligned=weight.vectors)
    for start, stop, first, last in _pieces(weight, count, tile.rows, 1):
        given, constants = _common(rows, weight, start, stop)
        _few_integers[(blocks(start, stop, tile.rows), last - first)](
            *given, rows.digits[:, first:], rows.digits.stride(0), rows.length, rows.scales[first:],
            rows.sums[0, first:], rows.sums[1, first:], out[first:], out.stride(0), NATIVE=native(),
            EVEN=tile.even, BO=tile.rows, N=tile.groups, STEPS=tile.steps, num_warps=tile.warps, **constants,
            **chained(),
        )  # fmt: skip


def goes_row_by_row(weight: DeviceWeight, count: int) -> bool:
    """Whether few rows of a small matrix are faster one by one, the matrix coming from the cache."""
    words = reads_words(weight.format, weight.group_size, aligned=weight.vectors)
    return words and count <= BY_ROW and count * weight.rows <= ROWS_ONE_BY_ONE


def launch_many(rows: Prepared, weight: DeviceWeight, out: Tensor, count: int, tile: ManyTile | None = None) -> None:
    """All of `count` prepared rows in tiles; `tile`: another one than the shape's own."""
    even = weight.cols % rows.needs.group == 0
    tile = tile or tile_of_many(
        count, rows.groups, rows.needs.padded, rows.needs.planes, shared_limit(), rows=weight.rows, room=processors()
    )
    for start, stop, first, last in _pieces(weight, count, tile.rows, tile.columns):
        given, constants = _common(rows, weight, start, stop)
        _many_integers[(blocks(start, stop, tile.rows), blocks(first, last, tile.columns))](
            *given, *rows.tile(count, first), out[first:], out.stride(0), last - first, EVEN=even, NATIVE=native(),
            BO=tile.rows, BS=tile.columns, UNROLL=tile.unroll, PIECE=count > BY_ROW, num_warps=tile.warps,
            num_stages=tile.stages, **constants, **EXACT,
        )  # fmt: skip
