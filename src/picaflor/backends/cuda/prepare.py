"""Activations to digits on a device: rotation, one scale per group, one to three int8 planes.

Knows contracts.md section 2, Activations; must not know weights. Digits are stored as `[planes, rows, groups * padded
group]`, the top plane first. Groups are padded with zeros to a multiple of 64 inputs; where the needs say `halves`,
each 64 have the 32 of even inputs first, then those of odd inputs: they meet low and high nibbles of 32 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np
import triton
import triton.language as tl

from picaflor.backends.cuda import interpret
from picaflor.backends.cuda.arithmetic import EXACT
from picaflor.backends.cuda.formats import Needs, Tensor
from picaflor.backends.cuda.overlap import chained, take_turn
from picaflor.formats.e8_iq3 import rotation_blocks, rotation_signs
from picaflor.formats.numeric import ceil_div

LARGEST: Final = {1: 127, 2: 127 * 256 + 127, 3: 127 * 65536}
"""The largest integer that an activation becomes, by number of planes."""
_ROUND = tl.constexpr(6755399441055744.0)  # 1.5 * 2^52: rounds a float64 to the nearest even integer


SLACK: Final = 256
"""Scales behind the last that a tile may read: as many as a tile has rows of activations."""
BY_ROW: Final = 64
"""Up to so many rows of one call lie one after the other; more lie group by group."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """Rows of activations as integer-coded matrices meet them.

    `digits` int8 `[planes, room, length]`, `scales` float32 `[room, groups]` (for more than BY_ROW rows the same memory
    lies by groups, `tile` has the strides), `sums` int32 `[2, room, groups]`: the sum of the values of a group,
    for three planes of the two lower digits and of the top one.
    """

    needs: Needs
    cols: int
    room: int
    digits: Tensor
    scales: Tensor
    sums: Tensor

    @property
    def groups(self) -> int:
        """Groups of a row."""
        return ceil_div(self.cols, self.needs.group)

    @property
    def length(self) -> int:
        """Digits of a row in one plane."""
        return self.groups * self.needs.padded

    def tile(self, count: int, first: int = 0) -> tuple[Tensor, int, int, int, Tensor, int, int]:
        """How `count` rows lie, from row `first` on: digits, their strides of planes, rows and groups, scales, their
        strides of rows and groups. Few rows lie one after the other; of many all rows of a group do, because what a
        tile reads in one step is then one piece."""
        plane = self.digits.stride(0)
        if count <= BY_ROW:
            row, step, scale_row, scale_step = self.length, self.needs.padded, self.groups, 1
        else:
            row, step, scale_row, scale_step = self.needs.padded, self.room * self.needs.padded, 1, self.room
        digits, scales = self.digits.flatten(1)[:, first * row :], self.scales.flatten()[first * scale_row :]
        return digits, plane, row, step, scales, scale_row, scale_step

    def part(self, start: int, stop: int) -> Prepared:
        """Some of a few rows."""
        rows = slice(start, stop)
        return Prepared(
            self.needs, self.cols, stop - start, self.digits[:, rows], self.scales[rows], self.sums[:, rows]
        )


@triton.jit
def digits_of(v, largest_bits, PLANES: tl.constexpr):
    """The integers of float32 values whose group has the largest magnitude `largest_bits` (as int32, broadcast)."""
    largest = largest_bits.to(tl.float32, bitcast=True)
    usable = (largest_bits < 0x7F800000) & (largest >= 1e-30)
    top: tl.constexpr = 127.0 if PLANES == 1 else (32639.0 if PLANES == 2 else 8323072.0)
    safe = tl.where(usable, largest, 1.0).to(tl.float64)
    ratio = tl.full(safe.shape, top, tl.float64) / safe
    whole = (tl.where(usable, v, 0.0).to(tl.float64) * ratio + _ROUND) - _ROUND
    return whole.to(tl.int32)


@triton.jit
def group_scale(largest_bits, PLANES: tl.constexpr):
    """The float32 scale of a group: NaN where a value is not finite, 0 where all are tiny."""
    largest = largest_bits.to(tl.float32, bitcast=True)
    top: tl.constexpr = 127.0 if PLANES == 1 else (32639.0 if PLANES == 2 else 8323072.0)
    step = tl.div_rn(largest, tl.full(largest.shape, top, tl.float32))
    step = tl.where(largest >= 1e-30, step, 0.0)
    return tl.where(largest_bits >= 0x7F800000, float("nan"), step)


@triton.jit
def digit_place(k):
    """Where the digit of input k of a group lies that meets nibbles."""
    return k // 64 * 64 + k % 2 * 32 + k % 64 // 2


@triton.jit
def store_group(v, out, places, k, g, s, plane, length, group_length, scales, scales_stride, scales_group_stride, sums,
                tops, groups, live, PLANES: tl.constexpr, HALVES: tl.constexpr, PADDED: tl.constexpr):  # fmt: skip
    """Quantize tiles v `[groups of the tile, inputs]` (zeros behind the last input) and store what `Prepared` has.

    `k` `[1, inputs]` counts inputs in a group, `g` `[tile, 1]` groups, `s` is the row (int64); `places` masks digits,
    `live` groups. `plane`, `length` and `group_length` are the strides of the digits.
    """
    bits = tl.max(v.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    q = digits_of(v, bits[:, None], PLANES)
    place = digit_place(k) if HALVES else k
    at = out + s * length + g * group_length + place
    rest = q
    for p in tl.static_range(PLANES):
        tl.store(at + (PLANES - 1 - p) * plane, rest.to(tl.int8), mask=places)
        if p < PLANES - 1:
            rest = (rest + 128) >> 8
    group = tl.reshape(g, bits.shape)
    tl.store(scales + s * scales_stride + group * scales_group_stride, group_scale(bits, PLANES), mask=live)
    at_group = s * groups + group
    if PLANES == 3:
        tl.store(sums + at_group, tl.sum(q - (rest << 16), axis=1), mask=live)
        tl.store(tops + at_group, tl.sum(rest, axis=1), mask=live)
    else:
        tl.store(sums + at_group, tl.sum(q, axis=1), mask=live)


@triton.jit
def _prepare(x, x_stride, cols, groups, digits, plane, length, group_length, scales, scales_stride, scales_group_stride,
             sums, tops, GROUP: tl.constexpr, PADDED: tl.constexpr, PLANES: tl.constexpr, HALVES: tl.constexpr,
             TILE: tl.constexpr, WIDTH: tl.constexpr, OVERLAP: tl.constexpr = False):  # fmt: skip
    if OVERLAP:
        take_turn()
    s = tl.program_id(0).to(tl.int64)
    g = tl.program_id(1) * TILE + tl.arange(0, TILE)[:, None]
    k = tl.arange(0, WIDTH)[None, :]
    i = g * GROUP + k
    v = tl.load(x + s * x_stride + i, mask=(k < GROUP) & (i < cols), other=0.0)
    live = tl.program_id(1) * TILE + tl.arange(0, TILE) < groups
    store_group(v, digits, (k < PADDED) & (g < groups), k, g, s, plane, length, group_length, scales, scales_stride,
                scales_group_stride, sums, tops, groups, live, PLANES, HALVES, PADDED)  # fmt: skip


@triton.jit
def _rotate(x, x_stride, blocks, signs, out, spare, cols, TILE: tl.constexpr):
    """One block of the rotation of one row: butterflies between `out` and `spare`, both `[rows, cols]`.

    `blocks` int32 `[count, 2]`: start and size; `signs` float32 `[cols]` for the signs, then the factor of each input.
    """
    s = tl.program_id(0).to(tl.int64)
    start = tl.load(blocks + 2 * tl.program_id(1))
    size = tl.load(blocks + 2 * tl.program_id(1) + 1)
    here = out + s * cols + start
    there = spare + s * cols + start
    for begin in range(0, size, TILE):
        j = begin + tl.arange(0, TILE)
        v = tl.load(x + s * x_stride + start + j, mask=j < size, other=0.0)
        tl.store(here + j, v * tl.load(signs + start + j, mask=j < size, other=1.0), mask=j < size)
    stride = 1
    while stride < size:
        tl.debug_barrier()
        for begin in range(0, size, TILE):
            j = begin + tl.arange(0, TILE)
            mine = tl.load(here + j, mask=j < size, other=0.0)
            other = tl.load(here + (j ^ stride), mask=j < size, other=0.0)
            tl.store(there + j, tl.where((j & stride) != 0, other - mine, mine + other), mask=j < size)
        tl.debug_barrier()
        for begin in range(0, size, TILE):
            j = begin + tl.arange(0, TILE)
            tl.store(here + j, tl.load(there + j, mask=j < size, other=0.0), mask=j < size)
        stride *= 2
    tl.debug_barrier()
    for begin in range(0, size, TILE):
        j = begin + tl.arange(0, TILE)
        factor = tl.load(signs + cols + start + j, mask=j < size, other=1.0)
        tl.store(here + j, tl.load(here + j, mask=j < size, other=0.0) * factor, mask=j < size)


@lru_cache(maxsize=64)
def _rotation(cols: int, device: str) -> tuple[Tensor, Tensor, int]:
    """Blocks int32 `[count, 2]`, signs and factors float32 `[2 * cols]` and the number of blocks."""
    import torch

    blocks = rotation_blocks(cols)
    signs = np.concatenate([rotation_signs(size) for _, size in blocks])
    factors = np.concatenate([np.full(size, np.float32(1) / np.sqrt(np.float32(size))) for _, size in blocks])
    both = torch.from_numpy(np.concatenate([signs, factors]).astype(np.float32)).to(device)
    return torch.tensor(blocks, dtype=torch.int32).to(device), both, len(blocks)


def rotate(x: Tensor) -> Tensor:
    """The signed Walsh-Hadamard rotation of each row (formats.md): float32 `[rows, cols]`, new memory."""
    import torch

    rows, cols = x.shape
    blocks, signs, count = _rotation(cols, str(x.device))
    out, spare = torch.empty((2, rows, cols), dtype=torch.float32, device=x.device)
    tile = 4096 if interpret.active() else 1024
    _rotate[(rows, count)](x, x.stride(0), blocks, signs, out, spare, cols, TILE=tile, num_warps=4, **EXACT)
    return out


def room_for(needs: Needs, cols: int, rows: int, device: Any) -> Prepared:
    """Memory for `rows` prepared rows of `cols` inputs."""
    import torch

    groups = ceil_div(cols, needs.group)
    length = groups * needs.padded
    return Prepared(
        needs,
        cols,
        rows,
        torch.empty((needs.planes, rows, length), dtype=torch.int8, device=device),
        torch.empty(rows * groups + SLACK, dtype=torch.float32, device=device)[: rows * groups].view(rows, groups),
        torch.empty((2, rows, groups), dtype=torch.int32, device=device),
    )


def prepare(x: Tensor, needs: Needs, *, into: Prepared | None = None) -> Prepared:
    """Digits of the rows x float32 `[rows, cols]`, columns side by side. `into` is filled where it is given."""
    rows, cols = x.shape
    out = room_for(needs, cols, rows, x.device) if into is None else into
    if out.needs != needs or out.cols != cols or out.room < rows:
        raise ValueError(
            f"prepared rows for {out.needs}, {out.cols} inputs, {out.room} rows; wanted {needs}, {x.shape}"
        )
    source = rotate(x) if needs.rotated else x
    width = triton.next_power_of_2(needs.padded)
    tile = min(triton.next_power_of_2(out.groups), max(1, (1 << 14 if interpret.active() else 1 << 9) // width))
    _prepare[(rows, triton.cdiv(out.groups, tile))](
        source, source.stride(0), cols, out.groups, *out.tile(rows), out.sums[0], out.sums[1],
        GROUP=needs.group, PADDED=needs.padded, PLANES=needs.planes, HALVES=needs.halves,
        TILE=tile, WIDTH=width, num_warps=4, **chained(),
    )  # fmt: skip
    return out
