"""Choices in Triton: the indexer's selected positions and the router's experts, by comparisons that leave no doubt.

Knows scores and ranks; must not know formats, models or recorders. Ties go to the lowest number, NaN is below
everything: integers decide, so the order in which a device compares them does not matter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
import triton
import triton.language as tl

from picaflor.backends.api import RouterSpec
from picaflor.backends.cuda import interpret
from picaflor.backends.cuda.arithmetic import EXACT, exp, rank, sigmoid, tree16
from picaflor.backends.cuda.attention import Keys
from picaflor.backends.cuda.launches import pieces
from picaflor.backends.cuda.overlap import chained, take_turn
from picaflor.backends.cuda.rows import Tensor, columns

SCRATCH_BYTES: Final = 128 << 20
PASSES: Final = 34
"""How often a row's scores are read to choose among them."""


@triton.jit
def _index_scores(q, q_row, weights, weights_row, keys, positions, sequences, pages, pages_stride, scores, longest,
                  top_k, heads, inv_dim, inv_heads, W: tl.constexpr, K: tl.constexpr, U: tl.constexpr,
                  SHIFT: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    visible = tl.load(positions + row) + 1
    begin = tl.program_id(1) * K
    if (visible > top_k) & (begin < visible):
        position = begin + tl.arange(0, K)
        real = position < visible
        sequence = tl.load(sequences + row)
        page = tl.load(pages + sequence * pages_stride + (position >> SHIFT), mask=real, other=0).to(tl.int64)
        token = (page << SHIFT) + (position & ((1 << SHIFT) - 1))
        key_at = (keys + token * W)[:, None]
        lanes = tl.arange(0, 16)[None, :]
        total = tl.zeros((K,), tl.float32)
        for head in range(0, heads):
            acc = tl.zeros((K, 16), tl.float32)
            for i in range(0, W, 16 * U):
                for u in tl.static_range(U):
                    col = i + u * 16 + lanes
                    a = tl.load(q + row * q_row + head * W + col, mask=col < W, other=0.0)
                    k = tl.load(key_at + col, mask=(col < W) & real[:, None], other=0.0)
                    acc = tl.where(col < W, tl.fma(a, k, acc), acc)
            z = tree16(acc, K) * inv_dim
            z = tl.where(z < 0.0, 0.0, z)  # NaN stays
            weight = tl.load(weights + row * weights_row + head)
            total = tl.fma(weight, z, total)
        tl.store(scores + row * longest + position, total * inv_heads, mask=real)


@triton.jit
def _choose_positions(scores, positions, out, out_row, longest, TOP: tl.constexpr, B: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    visible = tl.load(positions + row) + 1
    at = scores + row * longest
    if visible <= TOP:
        tl.store(out + row * out_row, -1)
    else:
        tl.store(out + row * out_row, TOP)
        threshold = tl.full((), 0, tl.int64)  # grows bit by bit to the rank of the TOP-th largest
        for step in range(0, 32):
            tried = threshold | (tl.full((), 1, tl.int64) << (31 - step))
            found = 0
            for i in range(0, visible, B):
                index = i + tl.arange(0, B)
                r = rank(tl.load(at + index, mask=index < visible, other=0.0))
                found += tl.sum(((r >= tried) & (index < visible)).to(tl.int32), axis=0)
            threshold = tl.where(found >= TOP, tried, threshold)
        above = 0
        for i in range(0, visible, B):
            index = i + tl.arange(0, B)
            r = rank(tl.load(at + index, mask=index < visible, other=0.0))
            above += tl.sum(((r > threshold) & (index < visible)).to(tl.int32), axis=0)
        ties = TOP - above
        taken = 0
        equal_before = 0
        for i in range(0, visible, B):
            index = i + tl.arange(0, B)
            r = rank(tl.load(at + index, mask=index < visible, other=0.0))
            over = ((r > threshold) & (index < visible)).to(tl.int32)
            equal = ((r == threshold) & (index < visible)).to(tl.int32)
            turn = equal_before + tl.cumsum(equal, axis=0)  # this one's number among the ties, from 1
            take = over + tl.where(turn <= ties, equal, 0)
            place = taken + tl.cumsum(take, axis=0) - 1
            tl.store(out + row * out_row + 1 + place, index.to(tl.int32), mask=take > 0)
            taken += tl.sum(take, axis=0)
            equal_before += tl.sum(equal, axis=0)


def index_select(q: Tensor, weights: Tensor, plane: Tensor, out: Tensor, keys: Keys, *, heads: int, head_dim: int,
                 top_k: int) -> None:  # fmt: skip
    """out i32 `[rows, 1 + top_k]`: count and ascending positions of each row's best keys; count -1 where all are."""
    rows = keys.positions.shape[0]
    interpreted = interpret.active()
    width, unroll = (columns(keys.longest, most=4096), 1) if interpreted else (32, 4)
    block = columns(keys.longest, most=4096)
    one = np.float32(1.0)
    work = 2 * heads * head_dim * keys.longest, PASSES * 4 * keys.longest
    for start, stop in pieces(rows, *work, most=SCRATCH_BYTES // (4 * keys.longest)):
        part = keys.rows(start, stop)
        count = part.positions.shape[0]
        scores = torch.empty((count, keys.longest), dtype=torch.float32, device=plane.device)
        if keys.longest > top_k:
            _index_scores[(count, triton.cdiv(keys.longest, width))](
                q[start:], q.stride(0), weights[start:], weights.stride(0), plane, part.positions, part.sequences,
                part.pages, part.pages.stride(0), scores, keys.longest, top_k, heads,
                float(one / np.sqrt(np.float32(head_dim))), float(one / np.sqrt(np.float32(heads))), W=head_dim,
                K=width, U=unroll, SHIFT=keys.shift, **EXACT,
            )  # fmt: skip
        _choose_positions[(count,)](
            scores, part.positions, out[start:], out.stride(0), keys.longest, TOP=top_k, B=block,
            num_warps=8 if block >= 2048 else 4, **EXACT,
        )  # fmt: skip


@triton.jit
def _router(logits, logits_row, bias, ids, ids_row, weights, weights_row, scale, SOFTMAX: tl.constexpr,
            BIAS: tl.constexpr, NORMALISE: tl.constexpr, TOP: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr,
            TOP_GROUPS: tl.constexpr, G: tl.constexpr, S: tl.constexpr, K: tl.constexpr,
            OVERLAP: tl.constexpr = False):  # fmt: skip
    if OVERLAP:
        take_turn()
    # A tile [G, S] of all experts, G groups (one where there are none) of S places for SIZE experts.
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, G)[:, None]
    member = tl.arange(0, S)[None, :]
    expert = group * SIZE + member
    real = (group < GROUPS) & (member < SIZE)
    z = tl.load(logits + row * logits_row + expert, mask=real, other=0.0)
    if SOFTMAX:
        n: tl.constexpr = GROUPS * SIZE
        top = tl.max(tl.max(tl.where(real & (z == z), z, float("-inf")), axis=1), axis=0)
        acc = tl.zeros((1, 16), tl.float32)
        for i in range(0, n, 16):
            lane = i + tl.arange(0, 16)[None, :]
            e = exp(tl.load(logits + row * logits_row + lane, mask=lane < n, other=0.0) - top)
            acc = tl.where(lane < n, acc + e, acc)
        total = tl.sum(tree16(acc, 1), axis=0)  # of one element
        score = tl.div_rn(exp(z - top), total)
    else:
        score = sigmoid(z)
    choice = score
    if BIAS:
        choice = score + tl.load(bias + expert, mask=real, other=0.0)
    # Larger is better: the rank, then the lower number; -1 is taken or none.
    order = tl.where(real, rank(choice) * 2147483648 + (2147483647 - expert), -1)
    if GROUPS > 1:
        known = tl.where(real & (choice == choice), choice, float("-inf"))
        best = tl.max(known, axis=1)
        group_score = best
        if SIZE > 1:
            place = tl.argmax(known, axis=1, tie_break_left=True)
            rest = tl.where(member == place[:, None], float("-inf"), known)
            group_score = best + tl.max(rest, axis=1)
        place_of_group = tl.arange(0, G)
        group_rank = rank(group_score) * 2147483648 + (2147483647 - place_of_group)
        group_order = tl.where(place_of_group < GROUPS, group_rank, -1)
        kept = place_of_group < 0
        for _ in range(0, TOP_GROUPS):
            chosen = tl.max(group_order, axis=0)
            kept = kept | (group_order == chosen)
            group_order = tl.where(group_order == chosen, -1, group_order)
        order = tl.where(kept[:, None], order, -1)
    place = tl.arange(0, K)
    picked = tl.zeros((K,), tl.int32)
    weight = tl.zeros((K,), tl.float32)
    total_weight = 0.0
    bits = score.to(tl.int32, bitcast=True)
    for k in range(0, TOP):
        best_order = tl.max(tl.max(order, axis=1), axis=0)
        here = order == best_order
        number = tl.sum(tl.sum(tl.where(here, expert, 0), axis=1), axis=0)
        value = tl.sum(tl.sum(tl.where(here, bits, 0), axis=1), axis=0).to(tl.int32).to(tl.float32, bitcast=True)
        order = tl.where(here, -1, order)
        picked = tl.where(place == k, number, picked)
        weight = tl.where(place == k, value, weight)
        total_weight = total_weight + value
    if NORMALISE:
        weight = tl.div_rn(weight, total_weight + 1e-20)
    tl.store(ids + row * ids_row + place, picked, mask=place < TOP)
    tl.store(weights + row * weights_row + place, weight * scale, mask=place < TOP)


@dataclass(frozen=True, slots=True)
class _Tile:
    groups: int
    size: int


def router(logits: Tensor, bias: Tensor | None, ids: Tensor, weights: Tensor, *, rows: int, spec: RouterSpec) -> None:
    """ids and weights `[rows, top_k]` in routing order."""
    groups = spec.groups if spec.groups > 1 else 1
    tile = _Tile(triton.next_power_of_2(groups), triton.next_power_of_2(spec.experts // groups))
    _router[(rows,)](
        logits, logits.stride(0), logits if bias is None else bias, ids, ids.stride(0), weights, weights.stride(0),
        spec.scale, SOFTMAX=spec.score == "softmax", BIAS=bias is not None, NORMALISE=spec.normalise, TOP=spec.top_k,
        GROUPS=groups, SIZE=spec.experts // groups, TOP_GROUPS=spec.top_groups, G=tile.groups, S=tile.size,
        K=triton.next_power_of_2(spec.top_k), num_warps=1 if tile.groups * tile.size <= 512 else 4, **chained(),
    )  # fmt: skip
