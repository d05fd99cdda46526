"""Attention over pages in Triton, in blocks of 256 positions that are merged ascending, as one row's loop does.

Knows queries, cached planes `[tokens, width]` and page tables; must not know formats, models or recorders. A row's keys
of one block are its visible or selected positions in ascending order, at most 256. Five kernels: which tokens, scores,
softmax, weighted sums, merge. H heads read the same keys; tile sizes change speed and no bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl

from picaflor.backends.cuda import interpret
from picaflor.backends.cuda.arithmetic import exp, tree16
from picaflor.backends.cuda.launches import pieces
from picaflor.backends.cuda.overlap import chained, take_turn
from picaflor.backends.cuda.rows import Tensor, columns

BLOCK_KEYS: Final = 256
SCRATCH_BYTES: Final = 256 << 20
"""Rows of a batch are computed in slices whose scores and sums take about this much."""


@dataclass(frozen=True, slots=True)
class Keys:
    """Where the keys of rows lie: sequences and positions `[rows]`, pages `[sequences, stride]` of 2^shift tokens.

    `selection` is i32 `[rows, 1 + top_k]` (count -1: all keys) or None. `longest`: no row sees more positions.
    """

    sequences: Tensor
    positions: Tensor
    pages: Tensor
    shift: int
    selection: Tensor | None
    longest: int

    @property
    def blocks(self) -> int:
        """Blocks of the longest row."""
        return -(-self.longest // BLOCK_KEYS)

    @property
    def most(self) -> int:
        """Keys that a row meets at most."""
        return self.longest if self.selection is None else min(self.longest, self.selection.shape[1] - 1)

    def rows(self, start: int, stop: int) -> Keys:
        """The keys of some of the rows."""
        chosen = None if self.selection is None else self.selection[start:stop]
        return Keys(
            self.sequences[start:stop], self.positions[start:stop], self.pages, self.shift, chosen, self.longest
        )


@dataclass(frozen=True, slots=True)
class Scores:
    """One part of a score: queries `[rows, heads, width]` by pointer and strides, keys of a plane from a column on.

    Heads of one key-value head lie side by side; `shared` of them. `plane` is `[tokens, plane width]`; the key-value
    head n has columns `n * width` and on.
    """

    q: Tensor
    row_stride: int
    head_stride: int
    plane: Tensor
    width: int


@triton.jit
def _tokens(sequences, positions, pages, pages_stride, selection, selection_stride, counts, tokens, blocks,
            SELECTED: tl.constexpr, TOP: tl.constexpr, T: tl.constexpr, SHIFT: tl.constexpr,
            OVERLAP: tl.constexpr = False):  # fmt: skip
    if OVERLAP:
        take_turn()
    row, block = tl.program_id(0), tl.program_id(1)
    sequence = tl.load(sequences + row)
    visible = tl.load(positions + row) + 1
    first = block * 256
    index = tl.arange(0, 256)
    count = tl.minimum(tl.maximum(visible - first, 0), 256)
    position = first + index
    if SELECTED:
        chosen = tl.load(selection + row * selection_stride)
        before = 0
        upto = 0
        for i in range(0, TOP, T):
            at = i + tl.arange(0, T)
            one = tl.load(selection + row * selection_stride + 1 + at, mask=at < chosen, other=2147483647)
            before += tl.sum((one < first).to(tl.int32), axis=0)
            upto += tl.sum((one < first + 256).to(tl.int32), axis=0)
        picked = tl.load(selection + row * selection_stride + 1 + before + index, mask=index < upto - before, other=0)
        count = tl.where(chosen < 0, count, upto - before)
        position = tl.where(chosen < 0, position, picked)
    real = index < count
    page = tl.load(pages + sequence * pages_stride + (position >> SHIFT), mask=real, other=0)
    token = (page << SHIFT) + (position & ((1 << SHIFT) - 1))
    tl.store(tokens + (row * blocks + block) * 256 + index, token, mask=real)
    tl.store(counts + row * blocks + block, count)


@triton.jit
def behind(acc, values, nothing, U: tl.constexpr):
    """acc, but not before all U values are there: else the compiler saves registers and waits for each load in turn.
    `nothing` is an int32 that is 0, and the compiler must not know."""
    every = values[0].to(tl.int32, bitcast=True)
    for u in tl.static_range(1, U):
        every |= values[u].to(tl.int32, bitcast=True)
    return (acc.to(tl.int32, bitcast=True) | (every & nothing)).to(tl.float32, bitcast=True)


@triton.jit
def _chain(q_at, k_at, nothing, W: tl.constexpr, H: tl.constexpr, K: tl.constexpr, U: tl.constexpr):
    """[H, K]: chain16 of H queries (pointers [H, 1, 1]) with K keys (pointers [1, K, 1]), which all exist."""
    lanes = tl.arange(0, 16)[None, None, :]
    acc = tl.zeros((H, K, 16), tl.float32)
    if W % (16 * U) == 0:  # then no load needs a mask, and all of a step are on their way before the first is met
        for i in range(0, W, 16 * U):
            qs = ()
            ks = ()
            for u in tl.static_range(U):
                col = i + u * 16 + lanes
                qs = qs + (tl.load(q_at + col),)  # type: ignore[assignment]  # noqa: RUF005
                ks = ks + (tl.load(k_at + col),)  # type: ignore[assignment]  # noqa: RUF005
            acc = behind(acc, ks, nothing, U)
            for u in tl.static_range(U):
                acc = tl.fma(qs[u], ks[u], acc)
    else:
        for i in range(0, W, 16):
            col = i + lanes
            q = tl.load(q_at + col, mask=col < W, other=0.0)
            k = tl.load(k_at + col, mask=col < W, other=0.0)
            acc = tl.where(col < W, tl.fma(q, k, acc), acc)
    return tl.reshape(tree16(tl.reshape(acc, (H * K, 16)), H * K), (H, K))


@triton.jit
def _scores(q, q_row, q_head, keys, keys_width, q2, q2_row, q2_head, keys2, keys2_width, counts, tokens, scores, scale,
            from_block, blocks, heads, shared, W: tl.constexpr, W2: tl.constexpr, H: tl.constexpr, K: tl.constexpr,
            U: tl.constexpr, OVERLAP: tl.constexpr = False):  # fmt: skip
    if OVERLAP:
        take_turn()
    row = tl.program_id(0).to(tl.int64)
    block = from_block + tl.program_id(1) // (256 // K)
    index = (tl.program_id(1) % (256 // K)) * K + tl.arange(0, K)
    count = tl.load(counts + row * blocks + block)
    groups = tl.cdiv(shared, H)
    kv_head = tl.program_id(2) // groups
    within = (tl.program_id(2) % groups) * H + tl.arange(0, H)
    head = kv_head * shared + tl.minimum(within, shared - 1)
    if (tl.program_id(1) % (256 // K)) * K < count:
        real = index < count
        token = tl.load(tokens + (row * blocks + block) * 256 + tl.minimum(index, count - 1)).to(tl.int64)
        q_at = (q + row * q_row + head * q_head)[:, None, None]
        k_at = (keys + token * keys_width + kv_head * W)[None, :, None]
        found = _chain(q_at, k_at, blocks >> 31, W, H, K, U)
        if W2 > 0:
            q2_at = (q2 + row * q2_row + head * q2_head)[:, None, None]
            k2_at = (keys2 + token * keys2_width)[None, :, None]
            found = found + _chain(q2_at, k2_at, blocks >> 31, W2, H, K, U if W2 % (16 * U) == 0 else 4)
        at = scores + ((row * heads + head) * blocks + block)[:, None] * 256 + index[None, :]
        tl.store(at, found * scale, mask=real[None, :] & (within < shared)[:, None])


@triton.jit
def _soften(
    scores, weights, counts, stats, from_block, blocks, items, heads, R: tl.constexpr, OVERLAP: tl.constexpr = False
):
    if OVERLAP:
        take_turn()
    item = tl.program_id(0) * R + tl.arange(0, R)  # (row, head)
    block = from_block + tl.program_id(1)
    live = item < items
    count = tl.load(counts + (item // heads) * blocks + block, mask=live, other=0)
    at = (item.to(tl.int64) * blocks + block)[:, None] * 256
    index = tl.arange(0, 256)[None, :]
    s = tl.load(scores + at + index, mask=index < count[:, None], other=float("-inf"))
    m = tl.max(tl.where(s == s, s, float("-inf")), axis=1)
    tl.store(weights + at + index, exp(s - m[:, None]), mask=live[:, None])
    tl.debug_barrier()
    lanes = tl.arange(0, 16)[None, :]
    ps = ()
    for i in tl.static_range(16):  # all of them on their way before the first is met
        if R == 1:
            ps = ps + (tl.load(weights + at + i * 16 + lanes),)  # type: ignore[assignment]  # noqa: RUF005
        else:
            ps = ps + (tl.load(weights + at + i * 16 + lanes, mask=live[:, None], other=0.0),)  # type: ignore[assignment]  # noqa: RUF005
    acc = tl.zeros((R, 16), tl.float32)
    for i in tl.static_range(16):
        acc = tl.where(i * 16 + lanes < count[:, None], acc + ps[i], acc)
    stat = (item.to(tl.int64) * blocks + block) * 2
    tl.store(stats + stat, m, mask=live)
    tl.store(stats + stat + 1, tree16(acc, R), mask=live)


@triton.jit
def _sum_keys(acc, tokens, weights, column, values_width, last, nothing, U: tl.constexpr, ENDS: tl.constexpr,
              FAR: tl.constexpr):  # fmt: skip
    """acc with the next U keys of one row, whose tokens and weights are at these addresses; ENDS: with those up to
    number `last`, which exists. All of them are on their way before the first is met. FAR: more than 2^31 values."""
    places = ()
    for u in tl.static_range(U):
        token = tl.load(tokens + (tl.minimum(u, last) if ENDS else u))
        places = places + (token.to(tl.int64) if FAR else token,)  # type: ignore[assignment]  # noqa: RUF005
    vs = ()
    ps = ()
    for u in tl.static_range(U):
        vs = vs + (tl.load(column + (places[u] * values_width)[:, None, None]),)  # type: ignore[assignment]  # noqa: RUF005
        ps = ps + (tl.load(weights + (tl.minimum(u, last) if ENDS else u)),)  # type: ignore[assignment]  # noqa: RUF005
    acc = behind(acc, vs, nothing, U)
    for u in tl.static_range(U):
        if ENDS:
            acc = tl.where(u <= last, tl.fma(ps[u][:, :, None], vs[u], acc), acc)
        else:
            acc = tl.fma(ps[u][:, :, None], vs[u], acc)
    return acc


@triton.jit
def _weigh(weights, values, values_width, counts, tokens, sums, rows, from_block, blocks, heads, shared,
           W: tl.constexpr, R: tl.constexpr, H: tl.constexpr, B: tl.constexpr, U: tl.constexpr,
           FAR: tl.constexpr, OVERLAP: tl.constexpr = False):  # fmt: skip
    if OVERLAP:
        take_turn()
    row = (tl.program_id(0) * R + tl.arange(0, R)).to(tl.int64)
    block = from_block + tl.program_id(1)
    tiles = tl.cdiv(W, B)
    groups = tl.cdiv(shared, H)
    unit = tl.program_id(2) // tiles
    kv_head = unit // groups
    within = (unit % groups) * H + tl.arange(0, H)
    head = (kv_head * shared + tl.minimum(within, shared - 1))[None, :]
    col = (tl.program_id(2) % tiles) * B + tl.arange(0, B)
    count = tl.load(counts + row * blocks + block, mask=row < rows, other=0)
    most = tl.max(count, axis=0)
    if most > 0:
        at = weights + ((row[:, None] * heads + head) * blocks + block) * 256
        column = (values + kv_head * W + col)[None, None, :]
        acc = tl.zeros((R, H, B), tl.float32)
        place = tokens + (row * blocks + block) * 256
        if R == 1 and W % B == 0:  # then no load needs a mask
            whole = most // U * U
            for i in range(0, whole, U):
                acc = _sum_keys(acc, place + i, at + i, column, values_width, 0, blocks >> 31, U, False, FAR)
            for i in range(whole, most, 16):
                acc = _sum_keys(acc, place + i, at + i, column, values_width, most - 1 - i, blocks >> 31, 16, True, FAR)
        else:
            for t in range(0, most):
                token = tl.load(place + t, mask=t < count, other=0).to(tl.int64)
                real = (t < count)[:, None, None]
                inside = real & (col < W)[None, None, :]
                v = tl.load(column + (token * values_width)[:, None, None], mask=inside, other=0.0)
                p = tl.load(at + t, mask=(t < count)[:, None], other=0.0)[:, :, None]
                acc = tl.where(real, tl.fma(p, v, acc), acc)
        out = sums + (((row[:, None] * heads + head) * blocks + block) * W)[:, :, None] + col[None, None, :]
        live = (count > 0)[:, None, None] & (within < shared)[None, :, None] & (col < W)[None, None, :]
        tl.store(out, acc, mask=live)


@triton.jit
def _merge(sums, stats, counts, out, out_row, out_head, blocks, items, heads, W: tl.constexpr, R: tl.constexpr,
           B: tl.constexpr, OVERLAP: tl.constexpr = False):  # fmt: skip
    if OVERLAP:
        take_turn()
    item = tl.program_id(0) * R + tl.arange(0, R)
    live = item < items
    row = item // heads
    col = tl.program_id(1) * B + tl.arange(0, B)[None, :]
    inside = live[:, None] & (col < W)
    m = tl.zeros((R,), tl.float32)
    l = tl.zeros((R,), tl.float32)  # noqa: E741
    total = tl.zeros((R, B), tl.float32)
    empty = tl.full((R,), 1, tl.int32)
    for b in range(0, blocks):
        has = tl.load(counts + row * blocks + b, mask=live, other=0) > 0
        at = item.to(tl.int64) * blocks + b
        m_b = tl.load(stats + at * 2, mask=live & has, other=0.0)
        l_b = tl.load(stats + at * 2 + 1, mask=live & has, other=0.0)
        part = tl.load(sums + at[:, None] * W + col, mask=inside & has[:, None], other=0.0)
        top = tl.where(m > m_b, m, m_b)
        keep = exp(m - top)
        take = exp(m_b - top)
        l_next = tl.fma(l, keep, l_b * take)
        next_total = tl.fma(total, keep[:, None], part * take[:, None])
        first = empty == 1
        l = tl.where(has, tl.where(first, l_b, l_next), l)  # noqa: E741
        total = tl.where(has[:, None], tl.where(first[:, None], part, next_total), total)
        m = tl.where(has, tl.where(first, m_b, top), m)
        empty = tl.where(has, 0, empty)
    at = out + (row.to(tl.int64) * out_row + (item % heads) * out_head)[:, None] + col
    tl.store(at, tl.div_rn(total, l[:, None]), mask=inside)


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Tiles: heads and keys of scores, heads and columns of sums, rows of the rest, steps in flight of both."""

    score_heads: int
    score_keys: int
    sum_heads: int
    sum_columns: int
    rows: int
    score_unroll: int
    sum_unroll: int


FEW_BLOCKS: Final = 8
"""Up to so many blocks of all rows each head's sums are programs of their own: more of them, with more on the way."""


def _sizes(shared: int, width: int, blocks: int) -> _Sizes:
    """For so many blocks of all rows."""
    if interpret.active():
        heads = min(triton.next_power_of_2(shared), 8)
        return _Sizes(heads, 64, heads, columns(width), 16, 1, 1)
    if blocks <= FEW_BLOCKS:
        return _Sizes(1, 32, 1, columns(width, most=128), 1, 16, 64)
    return _Sizes(1, 32, min(triton.next_power_of_2(shared), 4), columns(width, most=128), 1, 16, 32)


def attend(first: Scores, second: Scores | None, values: Tensor, out: Tensor, out_head: int, keys: Keys, *,
           heads: int, kv_heads: int, width: int, scale: float) -> None:  # fmt: skip
    """out[row][head] = softmax of the row's scores times its values, `width` wide; heads are `out_head` floats apart.

    `second` is added to the score of `first` (MLA's rotated part). `values` is `[tokens, plane width]`.
    """
    rows = keys.positions.shape[0]
    per_row = heads * keys.blocks * (2 * BLOCK_KEYS + width) * 4
    work = heads * keys.most * _operations(first, second, width)
    for start, stop in pieces(rows, work, most=SCRATCH_BYTES // per_row):
        slices = [None if part is None else _slice(part, start, stop) for part in (first, second)]
        assert slices[0] is not None
        _attend(slices[0], slices[1], values, out[start:stop], out_head, keys.rows(start, stop), heads, kv_heads,
                width, scale)  # fmt: skip


def _operations(first: Scores, second: Scores | None, width: int) -> int:
    """Of one query of one head and one key, in the launch that has more of them: scores, or sums of values."""
    return 2 * max(first.width + (0 if second is None else second.width), width)


def _slice(part: Scores, start: int, stop: int) -> Scores:
    return Scores(part.q[start:stop], part.row_stride, part.head_stride, part.plane, part.width)


def _attend(first: Scores, second: Scores | None, values: Tensor, out: Tensor, out_head: int, keys: Keys, heads: int,
            kv_heads: int, width: int, scale: float) -> None:  # fmt: skip
    rows, blocks, shared = keys.positions.shape[0], keys.blocks, heads // kv_heads
    size = _sizes(shared, width, rows * blocks)
    device = values.device
    counts = torch.empty((rows, blocks), dtype=torch.int32, device=device)
    tokens = torch.empty((rows, blocks, BLOCK_KEYS), dtype=torch.int32, device=device)
    scores = torch.empty((rows, heads, blocks, BLOCK_KEYS), dtype=torch.float32, device=device)
    weights = torch.empty_like(scores)
    stats = torch.empty((rows, heads, blocks, 2), dtype=torch.float32, device=device)
    sums = torch.empty((rows, heads, blocks, width), dtype=torch.float32, device=device)
    chosen = keys.positions if keys.selection is None else keys.selection
    top_k = 1 if keys.selection is None else chosen.shape[1] - 1
    _tokens[(rows, blocks)](
        keys.sequences, keys.positions, keys.pages, keys.pages.stride(0), chosen, chosen.stride(0), counts, tokens,
        blocks, SELECTED=keys.selection is not None, TOP=top_k, T=columns(top_k), SHIFT=keys.shift, **chained(),
    )  # fmt: skip
    more = first if second is None else second
    groups = triton.cdiv(shared, size.score_heads) * kv_heads
    sum_groups = triton.cdiv(shared, size.sum_heads) * kv_heads
    items = rows * heads
    for start, stop in pieces(blocks, items * BLOCK_KEYS * _operations(first, second, width)):
        _scores[(rows, (stop - start) * (BLOCK_KEYS // size.score_keys), groups)](
            first.q, first.row_stride, first.head_stride, first.plane, first.plane.stride(0), more.q, more.row_stride,
            more.head_stride, more.plane, more.plane.stride(0), counts, tokens, scores, scale, start, blocks, heads,
            shared, W=first.width, W2=0 if second is None else second.width, H=size.score_heads, K=size.score_keys,
            U=size.score_unroll, **chained(),
        )  # fmt: skip
        _soften[(triton.cdiv(items, size.rows), stop - start)](
            scores, weights, counts, stats, start, blocks, items, heads, R=size.rows, num_warps=1, **chained()
        )
        _weigh[(triton.cdiv(rows, size.rows), stop - start, sum_groups * triton.cdiv(width, size.sum_columns))](
            weights, values, values.stride(0), counts, tokens, sums, rows, start, blocks, heads, shared, W=width,
            R=size.rows, H=size.sum_heads, B=size.sum_columns, U=size.sum_unroll, FAR=values.numel() >= 1 << 31,
            **chained(),
        )  # fmt: skip
    _merge[(triton.cdiv(items, size.rows), triton.cdiv(width, size.sum_columns))](
        sums, stats, counts, out, out.stride(0), out_head, blocks, items, heads, W=width, R=size.rows,
        B=size.sum_columns, **chained(),
    )  # fmt: skip
