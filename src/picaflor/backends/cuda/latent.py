"""Stored rows one by one in Triton: the embedding, and the two halves of absorbed attention around `attention.attend`.

Knows matrices on a device and their decoding; must not know pages, models or recorders. Rows of kv_b are decoded as
they are met and never stored as floats.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from picaflor.backends.cuda import attention, interpret
from picaflor.backends.cuda.arithmetic import EXACT, tree16
from picaflor.backends.cuda.attention import Keys, Scores, behind
from picaflor.backends.cuda.decode import decoded
from picaflor.backends.cuda.formats import DeviceWeight, group_of, lattice
from picaflor.backends.cuda.launches import pieces
from picaflor.backends.cuda.overlap import chained, take_turn
from picaflor.backends.cuda.rows import Tensor, columns, tiles


@triton.jit
def _embed(codes, scales, grid, tokens, out, out_row, rows, table_rows, cols, row_bytes, FORMAT: tl.constexpr,
           GROUP: tl.constexpr, R: tl.constexpr, B: tl.constexpr):  # fmt: skip
    row = tl.program_id(0) * R + tl.arange(0, R)
    col = tl.program_id(1) * B + tl.arange(0, B)[None, :]
    live = row < rows
    token = tl.load(tokens + row, mask=live, other=-1)
    known = ((token >= 0) & (token < table_rows) & live)[:, None]
    number = tl.where(known, token[:, None], 0)
    inside = known & (col < cols)
    v = decoded(codes, scales, grid, number, col, inside, cols, row_bytes, FORMAT, GROUP)
    v = tl.where(known, v, 0.0)
    tl.store(out + row.to(tl.int64)[:, None] * out_row + col, v, mask=live[:, None] & (col < cols))


@triton.jit
def _absorb(codes, scales, grid, q, q_row, out, rows, heads, nope, rope, value, row_bytes, W: tl.constexpr,
            FORMAT: tl.constexpr, GROUP: tl.constexpr, R: tl.constexpr, B: tl.constexpr, U: tl.constexpr,
            EVEN: tl.constexpr, OVERLAP: tl.constexpr = False):  # fmt: skip
    if OVERLAP:
        take_turn()
    row = (tl.program_id(0) * R + tl.arange(0, R)).to(tl.int64)
    head = tl.program_id(1)
    col = tl.program_id(2) * B + tl.arange(0, B)[None, :]
    live = row < rows
    q_at = q + row * q_row + head * (nope + rope)
    first = head * (nope + value)
    acc = tl.zeros((R, B), tl.float32)
    for begin in range(0, nope, U):
        if EVEN:
            ws = ()
            cs = ()
            for u in tl.static_range(U):  # all of them on their way before the first is met; masks would hold them up
                inside = tl.full((1, B), 1, tl.int1)
                number = tl.full((1, 1), 0, tl.int32) + (first + begin + u)
                ws = ws + (decoded(codes, scales, grid, number, col, inside, W, row_bytes, FORMAT, GROUP),)  # type: ignore[assignment]  # noqa: RUF005
                cs = cs + (tl.load(q_at + begin + u)[:, None],)  # type: ignore[assignment]  # noqa: RUF005
            acc = behind(acc, ws, heads >> 31, U)
            for u in tl.static_range(U):
                acc = tl.fma(cs[u], ws[u], acc)
        else:
            for u in tl.static_range(U):
                d = begin + u
                number = tl.full((1, 1), 0, tl.int32) + (first + d)
                w = decoded(codes, scales, grid, number, col, (col < W) & (d < nope), W, row_bytes, FORMAT, GROUP)
                c = tl.load(q_at + d, mask=live & (d < nope), other=0.0)[:, None]
                acc = tl.where(d < nope, tl.fma(c, w, acc), acc)
    at = out + (row[:, None] * heads + head) * W + col
    tl.store(at, acc, mask=live[:, None] & (col < W))


@triton.jit
def _expand(codes, scales, grid, x, out, out_row, rows, heads, nope, value, row_bytes, W: tl.constexpr,
            FORMAT: tl.constexpr, GROUP: tl.constexpr, R: tl.constexpr, V: tl.constexpr, U: tl.constexpr,
            OVERLAP: tl.constexpr = False):  # fmt: skip
    if OVERLAP:
        take_turn()
    row = (tl.program_id(0) * R + tl.arange(0, R)).to(tl.int64)
    head = tl.program_id(1)
    v = tl.program_id(2) * V + tl.arange(0, V)
    live = row < rows
    number = (head * (nope + value) + nope + tl.minimum(v, value - 1))[:, None]
    x_at = (x + (row * heads + head) * W)[:, None, None]
    lanes = tl.arange(0, 16)[None, :]
    EVEN: tl.constexpr = W % (16 * U) == 0 and R == 1  # then no load needs a mask
    if EVEN:
        acc = tl.zeros((V, 16), tl.float32)
        zero = heads >> 31
        x_row = x + (row[:, None] * heads + head) * W + tl.zeros((V, 1), tl.int32)
        for i in range(0, W, 16 * U):
            ws = ()
            xs = ()
            for u in tl.static_range(U):  # all of them on their way before the first is met
                col = i + u * 16 + lanes
                inside = tl.full((1, 16), 1, tl.int1)
                w = decoded(codes, scales, grid, number, col, inside, W, row_bytes, FORMAT, GROUP)
                ws = ws + (w,)  # type: ignore[assignment]  # noqa: RUF005
                here = col ^ zero  # no neighbours that the compiler knows of: inputs lie in registers as weights do
                xs = xs + (tl.load(x_row + here),)  # type: ignore[assignment]  # noqa: RUF005
            acc = behind(acc, ws, zero, U)
            for u in tl.static_range(U):
                acc = tl.fma(xs[u], ws[u], acc)
        y = tl.reshape(tree16(acc, V), (R, V))
    else:
        acc = tl.zeros((R, V, 16), tl.float32)
        for i in range(0, W, 16 * U):
            for u in tl.static_range(U):
                col = i + u * 16 + lanes
                w = decoded(codes, scales, grid, number, col, col < W, W, row_bytes, FORMAT, GROUP)[None, :, :]
                a = tl.load(x_at + col[None, :, :], mask=live[:, None, None] & (col < W)[None, :, :], other=0.0)
                acc = tl.where((col < W)[None, :, :], tl.fma(a, w, acc), acc)
        y = tl.reshape(tree16(tl.reshape(acc, (R * V, 16)), R * V), (R, V))
    at = out + row[:, None] * out_row + (head * value + v)[None, :]
    tl.store(at, y, mask=live[:, None] & (v < value)[None, :])


def _planes(weight: DeviceWeight) -> tuple[Tensor, Tensor, Tensor]:
    return weight.planes[0], weight.scales, lattice(str(weight.planes[0].device))


def _group(weight: DeviceWeight) -> int:
    return group_of(weight.format, weight.group_size)


def embed(table: DeviceWeight, tokens: Tensor, out: Tensor, *, rows: int) -> None:
    """out = table[token]; zeros for a token outside."""
    tile, wide = tiles(), columns(table.cols)
    _embed[(triton.cdiv(rows, tile.rows), triton.cdiv(table.cols, wide))](
        *_planes(table), tokens, out, out.stride(0), rows, table.rows, table.cols, table.row_bytes,
        FORMAT=table.number, GROUP=_group(table), R=tile.rows, B=wide, **EXACT,
    )  # fmt: skip


def mla(q: Tensor, out: Tensor, kv_b: DeviceWeight, latent: Tensor, rope_key: Tensor, keys: Keys, *, rows: int,
        heads: int, nope: int, rope: int, value: int, scale: float) -> None:  # fmt: skip
    """Absorbed attention of the first `rows` rows; `latent` and `rope_key` are planes `[tokens, width]`."""
    width = kv_b.cols
    parts = pieces(rows, 2 * heads * max(nope, value) * width)
    if len(parts) > 1:
        for start, stop in parts:
            mla(q[start:stop], out[start:stop], kv_b, latent, rope_key, keys.rows(start, stop), rows=stop - start,
                heads=heads, nope=nope, rope=rope, value=value, scale=scale)  # fmt: skip
        return
    interpreted = interpret.active()
    few = 16 if interpreted else 1 if rows < 4 else 4
    absorbed = torch.empty((rows, heads, width), dtype=torch.float32, device=q.device)
    wide = columns(width, most=1024 if interpreted else 64)
    unroll = 1 if interpreted else 16 if few > 1 else 64 if nope % 64 == 0 else 32
    even = few == 1 and nope % unroll == 0 and width % wide == 0
    _absorb[(triton.cdiv(rows, few), heads, triton.cdiv(width, wide))](
        *_planes(kv_b), q, q.stride(0), absorbed, rows, heads, nope, rope, value, kv_b.row_bytes, W=width,
        FORMAT=kv_b.number, GROUP=_group(kv_b), R=few, B=wide, U=unroll, EVEN=even,
        num_warps=4 if interpreted else 2, **chained(),
    )  # fmt: skip
    mixed = torch.empty_like(absorbed)
    first = Scores(absorbed, heads * width, width, latent, width)
    second = Scores(q[:, nope:], q.stride(0), nope + rope, rope_key, rope)
    attention.attend(first, second, latent, mixed, width, keys, heads=heads, kv_heads=1, width=width, scale=scale)
    tall = columns(value) if interpreted else 16
    unroll = 1 if interpreted else 4 if few > 1 else 32 if width % 512 == 0 else 16
    _expand[(triton.cdiv(rows, few), heads, triton.cdiv(value, tall))](
        *_planes(kv_b), mixed, out, out.stride(0), rows, heads, nope, value, kv_b.row_bytes, W=width,
        FORMAT=kv_b.number, GROUP=_group(kv_b), R=few, V=tall, U=unroll, **chained(),
    )  # fmt: skip


def gqa(q: Tensor, out: Tensor, keys_plane: Tensor, values: Tensor, keys: Keys, *, heads: int, kv_heads: int,
        head_dim: int, scale: float) -> None:  # fmt: skip
    """Grouped-query attention of all rows of `keys`."""
    first = Scores(q, q.stride(0), head_dim, keys_plane, head_dim)
    attention.attend(
        first, None, values, out, head_dim, keys, heads=heads, kv_heads=kv_heads, width=head_dim, scale=scale
    )
