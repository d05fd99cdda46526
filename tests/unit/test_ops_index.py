"""The indexer's selection: scores, ties, NaN, the boundary at top_k, and the same result for every way to run it."""

from __future__ import annotations

import numpy as np
import pytest
from ops_support import ISAS, VARIANTS, backend, batch, chain16, fma32, ints

from picaflor.backends.api import I32
from picaflor.backends.cpu.backend import CpuBackend
from picaflor.formats.base import F32

HEADS, DIM = 5, 24


def _select(
    device: CpuBackend,
    keys: F32,
    q: F32,
    weights: F32,
    positions: list[int],
    top_k: int,
    *,
    page_tokens: int = 16,
    order: I32 | None = None,
) -> I32:
    count = -(-len(keys) // page_tokens)
    pages = (np.arange(count, dtype=np.int32) if order is None else order)[None, :]
    r = device.recorder(max_rows=64, max_outputs=1, page_tokens=page_tokens, pages=int(pages.max()) + 1)
    key, query, factor = r.rows(keys.shape[1]), r.rows(q.shape[1]), r.rows(weights.shape[1])
    plane = r.kv_plane(0, "index_key", keys.shape[1])
    r.kv_write(key, plane)
    fill = r.finish()
    out = r.rows(1 + top_k, dtype="i32")
    heads = weights.shape[1]
    r.index_select(query, factor, plane, out, heads=heads, head_dim=q.shape[1] // heads, top_k=top_k)
    program = r.finish()
    for start in range(0, len(keys), 64):
        part = keys[start : start + 64]
        fill.write(key, part)
        fill.run(batch(range(start, start + len(part)), pages=pages))
    program.write(query, q)
    program.write(factor, weights)
    program.run(batch(positions, pages=pages))
    result: I32 = program.view(out, len(positions)).copy()
    return result


def _scores(keys: F32, q: F32, weights: F32) -> F32:
    """I_t of one row in the written sequence."""
    dim = np.float32(1.0) / np.sqrt(np.float32(DIM))
    heads = np.float32(1.0) / np.sqrt(np.float32(HEADS))
    out = []
    for key in keys:
        total = np.float32(0.0)
        for head in range(HEADS):
            z = chain16(q[head * DIM : (head + 1) * DIM], key) * dim
            total = fma32(weights[head], np.float32(0.0) if z < 0 else z, total)[0]
        out.append(total * heads)
    return np.array(out, np.float32)


def _choose(scores: F32, top_k: int) -> list[int]:
    ranked = np.where(np.isnan(scores), -np.inf, scores)
    best = sorted(range(len(scores)), key=lambda t: (not np.isnan(scores[t]), ranked[t], -t), reverse=True)[:top_k]
    return sorted(best)


def test_selection_is_the_largest_scores_for_every_way_to_run_it() -> None:
    rng = np.random.default_rng(3)
    keys, q, weights = (rng.normal(size=s).astype(np.float32) for s in ((1500, DIM), (20, HEADS * DIM), (20, HEADS)))
    positions = sorted(rng.choice(1500, size=19, replace=False).tolist())
    positions = [39, 40, *[p for p in positions if p > 40]][:20]
    q, weights = q[: len(positions)], weights[: len(positions)]
    wanted = _select(backend(ISAS[0], 1), keys, q, weights, positions, 40)
    for row, position in enumerate(positions):
        if position + 1 <= 40:
            assert wanted[row, 0] == -1
            continue
        assert wanted[row, 0] == 40
        scores = _scores(keys[: position + 1], q[row], weights[row]) if row in (1, 2, len(positions) - 1) else None
        if scores is not None:
            assert wanted[row, 1:].tolist() == _choose(scores, 40)
    for isa, threads in VARIANTS:
        assert np.array_equal(_select(backend(isa, threads), keys, q, weights, positions, 40)[:, 0], wanted[:, 0])
        assert np.array_equal(_select(backend(isa, threads), keys, q, weights, positions, 40)[1:], wanted[1:])
    order = ints(rng.permutation(100)[:94])
    moved = _select(backend("auto", 2), keys, q, weights, positions, 40, order=order)
    assert np.array_equal(moved[1:], wanted[1:])
    alone = _select(backend("auto", 2), keys, q[-1:], weights[-1:], positions[-1:], 40)
    assert np.array_equal(alone, wanted[-1:])


def _plain(scores: F32, top_k: int, threads: int = 2) -> I32:
    """Selection where the score of key t is known: one head of one value, weight 1."""
    one = np.ones((1, 1), np.float32)
    return _select(backend("auto", threads), scores[:, None].astype(np.float32), one, one, [len(scores) - 1], top_k)[0]


def test_ties_go_to_the_lower_position() -> None:
    assert _plain(np.array([1, 2, 1, 2, 1, 1], np.float32), 4).tolist() == [4, 0, 1, 2, 3]
    assert _plain(np.full(9, 5, np.float32), 3).tolist() == [3, 0, 1, 2]


def test_negative_scores_and_both_zeros_are_one_value() -> None:
    # relu makes all of these zero, so they tie and position decides
    assert _plain(np.array([-1, -0.0, 0.0, -5, 2], np.float32), 3).tolist() == [3, 0, 1, 4]


def test_nan_ranks_below_everything() -> None:
    assert _plain(np.array([np.nan, -3, np.nan, 1, np.nan, 0], np.float32), 3).tolist() == [3, 1, 3, 5]
    assert _plain(np.array([np.nan, -3, np.nan, 1, np.nan], np.float32), 4).tolist() == [4, 0, 1, 2, 3]


@pytest.mark.parametrize("length", [4, 5, 6])
def test_all_keys_up_to_top_k_and_a_selection_beyond(length: int) -> None:
    chosen = _plain(np.arange(length, dtype=np.float32), 5)
    assert chosen[0] == (-1 if length <= 5 else 5)
    if length > 5:
        assert chosen[1:].tolist() == [1, 2, 3, 4, 5]
