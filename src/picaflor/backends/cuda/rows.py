"""Row operations in Triton: norms, rotation, sums, gates, copies. Each row by itself, whatever lies beside it.

Knows float32 and int32 rows `[rows, width]` with a stride; must not know formats, models, batches or recorders. A tile
is R rows (or heads of rows) of sixteen chains or of B columns; R, U and B change speed and no bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import triton
import triton.language as tl

from picaflor.backends.cuda import interpret
from picaflor.backends.cuda.arithmetic import silu, tree16
from picaflor.backends.cuda.overlap import chained, take_turn

Tensor = Any
"""A tensor of torch, on the device. Rows are views `[rows, width]`, their columns side by side."""

WIDEST_TILE: Final = 1024
WHOLE_ROW: Final = 8192
"""Up to there a norm asks for its row at once."""
LONG_ROW: Final = 2048
LONG_UNROLL: Final = 64
"""From rows of that length on, so many steps of a norm's chain are loaded at once."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """Rows per program and steps of a chain whose loads are in flight together."""

    rows: int
    unroll: int


def tiles() -> Tiles:
    """A GPU has programs to spare and waits for memory; the interpreter has one program and pays per operation."""
    return Tiles(rows=16, unroll=1) if interpret.active() else Tiles(rows=1, unroll=16)


def columns(width: int, *, most: int = WIDEST_TILE) -> int:
    """The power of two that covers `width`, at most `most`."""
    return int(min(max(triton.next_power_of_2(width), 16), most))


@triton.jit
def _rmsnorm(x, x_stride, weight, out, out_stride, items, heads, eps, N: tl.constexpr, R: tl.constexpr,
             U: tl.constexpr, B: tl.constexpr, OVERLAP: tl.constexpr = False):  # fmt: skip
    if OVERLAP:
        take_turn()
    item = tl.program_id(0) * R + tl.arange(0, R)
    live = item < items
    row = (item // heads).to(tl.int64)
    start = (item % heads) * N
    x_at = (x + row * x_stride + start)[:, None]
    lanes = tl.arange(0, 16)[None, :]
    EVEN: tl.constexpr = N % (16 * U) == 0 and R == 1  # then no load needs a mask
    WHOLE: tl.constexpr = R == 1 and B >= N  # the row is on its way at once, and the chain finds it in the cache
    if WHOLE:
        every = tl.arange(0, B)[None, :]
        row_of_x = tl.load(x_at + every, mask=every < N, other=0.0)
    acc = tl.zeros((R, 16), tl.float32)
    for i in range(0, N, 16 * U):
        coming = ()
        for u in tl.static_range(U):  # all of them on their way before the first is met
            col = i + u * 16 + lanes
            inside = tl.full((R, 16), 1, tl.int1) if EVEN else (col < N) & live[:, None]
            coming = coming + (tl.load(x_at + col, mask=inside, other=0.0),)  # type: ignore[assignment]  # noqa: RUF005
        for u in tl.static_range(U):
            if EVEN:
                acc = tl.fma(coming[u], coming[u], acc)
            else:
                acc = tl.where(i + u * 16 + lanes < N, tl.fma(coming[u], coming[u], acc), acc)
    mean = tl.div_rn(tree16(acc, R), N * 1.0)
    scale = tl.div_rn(1.0, tl.sqrt_rn(mean + eps))[:, None]
    tl.debug_barrier()  # out may be x
    out_at = (out + row * out_stride + start)[:, None]
    if WHOLE:
        w = tl.load(weight + every, mask=every < N, other=0.0)
        tl.store(out_at + every, (row_of_x * scale) * w, mask=every < N)
    else:
        for j in range(0, N, B):
            col = j + tl.arange(0, B)[None, :]
            inside = (col < N) & live[:, None]
            v = tl.load(x_at + col, mask=inside, other=0.0)
            w = tl.load(weight + col, mask=col < N, other=0.0)
            tl.store(out_at + col, (v * scale) * w, mask=inside)


@triton.jit
def _layernorm(x, x_stride, weight, bias, out, out_stride, rows, eps, N: tl.constexpr, R: tl.constexpr,
               U: tl.constexpr, B: tl.constexpr, OVERLAP: tl.constexpr = False):  # fmt: skip
    if OVERLAP:
        take_turn()
    row = tl.program_id(0) * R + tl.arange(0, R)
    live = row < rows
    x_at = (x + row.to(tl.int64) * x_stride)[:, None]
    lanes = tl.arange(0, 16)[None, :]
    acc = tl.zeros((R, 16), tl.float32)
    for i in range(0, N, 16 * U):
        for u in tl.static_range(U):
            col = i + u * 16 + lanes
            v = tl.load(x_at + col, mask=(col < N) & live[:, None], other=0.0)
            acc = tl.where(col < N, acc + v, acc)
    mean = tl.div_rn(tree16(acc, R), N * 1.0)[:, None]
    acc = tl.zeros((R, 16), tl.float32)
    for i in range(0, N, 16 * U):
        for u in tl.static_range(U):
            col = i + u * 16 + lanes
            d = tl.load(x_at + col, mask=(col < N) & live[:, None], other=0.0) - mean
            acc = tl.where(col < N, tl.fma(d, d, acc), acc)
    variance = tl.div_rn(tree16(acc, R), N * 1.0)
    scale = tl.div_rn(1.0, tl.sqrt_rn(variance + eps))[:, None]
    tl.debug_barrier()  # out may be x
    out_at = (out + row.to(tl.int64) * out_stride)[:, None]
    for j in range(0, N, B):
        col = j + tl.arange(0, B)[None, :]
        inside = (col < N) & live[:, None]
        d = tl.load(x_at + col, mask=inside, other=0.0) - mean
        w = tl.load(weight + col, mask=col < N, other=0.0)
        b = tl.load(bias + col, mask=col < N, other=0.0)
        tl.store(out_at + col, tl.fma(d * scale, w, b), mask=inside)


@triton.jit
def _rope(x, x_stride, positions, cos, sin, items, heads, head_width, start, HALF: tl.constexpr,
          INTERLEAVED: tl.constexpr, R: tl.constexpr, B: tl.constexpr, OVERLAP: tl.constexpr = False):  # fmt: skip
    if OVERLAP:
        take_turn()
    item = tl.program_id(0) * R + tl.arange(0, R)
    live = item < items
    row = item // heads
    at = (x + row.to(tl.int64) * x_stride + (item % heads) * head_width + start)[:, None]
    position = tl.load(positions + row, mask=live, other=0).to(tl.int64)[:, None]
    j = tl.arange(0, B)[None, :]
    inside = (j < HALF) & live[:, None]
    if INTERLEAVED:
        a = tl.load(at + 2 * j, mask=inside, other=0.0)
        b = tl.load(at + 2 * j + 1, mask=inside, other=0.0)
    else:
        a = tl.load(at + j, mask=inside, other=0.0)
        b = tl.load(at + HALF + j, mask=inside, other=0.0)
    c = tl.load(cos + position * HALF + j, mask=inside, other=0.0)
    s = tl.load(sin + position * HALF + j, mask=inside, other=0.0)
    tl.debug_barrier()  # results land on inputs that another thread may still need
    tl.store(at + j, tl.fma(a, c, -(b * s)), mask=inside)
    tl.store(at + HALF + j, tl.fma(b, c, a * s), mask=inside)


@triton.jit
def _add(x, x_stride, y, y_stride, rows, width, R: tl.constexpr, B: tl.constexpr, OVERLAP: tl.constexpr = False):
    if OVERLAP:
        take_turn()
    row = (tl.program_id(0) * R + tl.arange(0, R)).to(tl.int64)[:, None]
    col = tl.program_id(1) * B + tl.arange(0, B)[None, :]
    inside = (row < rows) & (col < width)
    a = tl.load(x + row * x_stride + col, mask=inside, other=0.0)
    b = tl.load(y + row * y_stride + col, mask=inside, other=0.0)
    tl.store(x + row * x_stride + col, a + b, mask=inside)


@triton.jit
def _silu_mul(
    gate,
    gate_stride,
    up,
    up_stride,
    out,
    out_stride,
    rows,
    width,
    R: tl.constexpr,
    B: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):
    if OVERLAP:
        take_turn()
    row = (tl.program_id(0) * R + tl.arange(0, R)).to(tl.int64)[:, None]
    col = tl.program_id(1) * B + tl.arange(0, B)[None, :]
    inside = (row < rows) & (col < width)
    g = tl.load(gate + row * gate_stride + col, mask=inside, other=0.0)
    u = tl.load(up + row * up_stride + col, mask=inside, other=0.0)
    tl.store(out + row * out_stride + col, silu(g) * u, mask=inside)


@triton.jit
def _gather(
    x, x_stride, numbers, out, out_stride, rows, width, R: tl.constexpr, B: tl.constexpr, OVERLAP: tl.constexpr = False
):
    if OVERLAP:
        take_turn()
    row = tl.program_id(0) * R + tl.arange(0, R)
    source = tl.load(numbers + row, mask=row < rows, other=0).to(tl.int64)[:, None]
    col = tl.program_id(1) * B + tl.arange(0, B)[None, :]
    inside = (row < rows)[:, None] & (col < width)
    v = tl.load(x + source * x_stride + col, mask=inside, other=0)
    tl.store(out + row.to(tl.int64)[:, None] * out_stride + col, v, mask=inside)


@triton.jit
def _kv_write(x, x_stride, plane, sequences, positions, pages, pages_stride, rows, width, SHIFT: tl.constexpr,
              R: tl.constexpr, B: tl.constexpr, OVERLAP: tl.constexpr = False):  # fmt: skip
    if OVERLAP:
        take_turn()
    row = tl.program_id(0) * R + tl.arange(0, R)
    live = row < rows
    position = tl.load(positions + row, mask=live, other=0)
    sequence = tl.load(sequences + row, mask=live, other=0)
    page = tl.load(pages + sequence * pages_stride + (position >> SHIFT), mask=live, other=0).to(tl.int64)
    token = (page << SHIFT) + (position & ((1 << SHIFT) - 1))
    col = tl.program_id(1) * B + tl.arange(0, B)[None, :]
    inside = live[:, None] & (col < width)
    v = tl.load(x + row.to(tl.int64)[:, None] * x_stride + col, mask=inside, other=0.0)
    tl.store(plane + token[:, None] * width + col, v, mask=inside)


def rmsnorm(x: Tensor, weight: Tensor, out: Tensor, *, rows: int, heads: int, eps: float) -> None:
    """Each of `heads` parts of the first `rows` rows; out may be x."""
    tile, part = tiles(), x.shape[1] // heads
    unroll = LONG_UNROLL if tile.unroll > 1 and part >= LONG_ROW else tile.unroll
    block = columns(part, most=WHOLE_ROW if tile.rows == 1 else WIDEST_TILE)
    grid = (triton.cdiv(rows * heads, tile.rows),)
    _rmsnorm[grid](x, x.stride(0), weight, out, out.stride(0), rows * heads, heads, eps, N=part, R=tile.rows,
                   U=unroll, B=block, num_warps=4, **chained())  # fmt: skip


def layernorm(x: Tensor, weight: Tensor, bias: Tensor, out: Tensor, *, rows: int, eps: float) -> None:
    """The first `rows` rows; out may be x."""
    tile, width = tiles(), x.shape[1]
    _layernorm[(triton.cdiv(rows, tile.rows),)](
        x, x.stride(0), weight, bias, out, out.stride(0), rows, eps, N=width, R=tile.rows, U=tile.unroll,
        B=columns(width), num_warps=4, **chained(),
    )  # fmt: skip


def rope(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, *, rows: int, heads: int, head_width: int, start: int,
         interleaved: bool) -> None:  # fmt: skip
    """Rotate 2 * half values of each head in place; cos and sin are `[positions, half]`."""
    tile, half = tiles(), cos.shape[1]
    _rope[(triton.cdiv(rows * heads, tile.rows),)](
        x, x.stride(0), positions, cos, sin, rows * heads, heads, head_width, start, HALF=half,
        INTERLEAVED=interleaved, R=tile.rows, B=triton.next_power_of_2(half), num_warps=1, **chained(),
    )  # fmt: skip


def _grid(rows: int, width: int) -> tuple[tuple[int, int], dict[str, Any]]:
    tile, wide = tiles(), columns(width)
    return (triton.cdiv(rows, tile.rows), triton.cdiv(width, wide)), {"R": tile.rows, "B": wide, **chained()}


def add(x: Tensor, y: Tensor, *, rows: int) -> None:
    """x = x + y."""
    width = x.shape[1]
    grid, options = _grid(rows, width)
    _add[grid](x, x.stride(0), y, y.stride(0), rows, width, **options)


def silu_mul(gate: Tensor, up: Tensor, out: Tensor, *, rows: int) -> None:
    """out = silu(gate) * up; out may be gate."""
    width = gate.shape[1]
    grid, options = _grid(rows, width)
    _silu_mul[grid](gate, gate.stride(0), up, up.stride(0), out, out.stride(0), rows, width, **options)


def gather(x: Tensor, numbers: Tensor, out: Tensor, *, rows: int) -> None:
    """out[i] = x[numbers[i]]."""
    width = x.shape[1]
    grid, options = _grid(rows, width)
    _gather[grid](x, x.stride(0), numbers, out, out.stride(0), rows, width, **options)


def kv_write(x: Tensor, plane: Tensor, sequences: Tensor, positions: Tensor, pages: Tensor, *, rows: int,
             shift: int) -> None:  # fmt: skip
    """plane[token of the row] = x; plane is `[tokens, width]`, a page has 2^shift tokens."""
    width = x.shape[1]
    grid, options = _grid(rows, width)
    _kv_write[grid](
        x, x.stride(0), plane, sequences, positions, pages, pages.stride(0), rows, width, SHIFT=shift, **options
    )
