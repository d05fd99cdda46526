"""Attention and the choice of keys, in operations of MLX: grouped queries, absorbed latent attention, DSA.

Knows arrays and what a row may see; must not know families, formats by name or where keys lie. Rows are taken in blocks
so that scores never need more than SCORE_BYTES.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from picaflor.backends.metal import layout
from picaflor.backends.metal.layout import Held
from picaflor.backends.metal.library import Array, copied, mx
from picaflor.backends.metal.products import product, rows_sum

SCORE_BYTES = 256 << 20
"""Memory for the scores of one block of rows."""


def blocks(rows: int, heads: int, keys: int) -> Iterator[slice]:
    """Rows in blocks whose scores fit."""
    step = max(1, SCORE_BYTES // (4 * heads * max(keys, 1)))
    for start in range(0, rows, step):
        yield slice(start, min(rows, start + step))


def visible(positions: Array, selection: Array | None, keys: int) -> Array:
    """bool `[rows, keys]`: what each row may see. `selection` int32 `[rows, 1 + top_k]`, as index_select gives it."""
    causal = mx.arange(keys)[None, :] <= positions[:, None]
    if selection is None:
        return causal
    count, chosen = selection[:, :1], selection[:, 1:]
    real = mx.arange(chosen.shape[1])[None, :] < count
    places = mx.where(real, chosen, keys)  # one column more, for what was not chosen
    marks = mx.put_along_axis(mx.zeros((len(positions), keys + 1), mx.int32), places, mx.array(1), axis=1)
    return mx.where(count < 0, causal, marks[:, :keys] > 0)


def mix(scores: Array, seen: Array, mixed: Callable[[Array], Array], values: Array) -> Array:
    """softmax of scores `[heads, rows, keys]` over what is seen, then `mixed(weights)`.

    A value that is not finite touches the rows that see it and no others, though all are multiplied with its weight.
    """
    weights = mx.softmax(mx.where(seen[None], scores, -mx.inf), axis=-1, precise=True)
    bad = mx.logical_not(mx.isfinite(values)).any(axis=-1)
    hit = mx.logical_and(seen, bad[None]).any(axis=-1)
    return mx.where(hit[None, :, None], mx.nan, mixed(weights))


def finite(values: Array) -> Array:
    """Zeros where a value is not finite."""
    return mx.where(mx.isfinite(values), values, 0.0)


def mla(
    q: Array,
    kv_b: Held,
    latent: Array,
    rope_keys: Array,
    positions: np.ndarray,
    selection: Array | None,
    *,
    heads: int,
    nope: int,
    scale: float,
) -> Array:
    """Absorbed attention of rows `[rows, heads * (nope + rope)]` of one sequence: `[rows, heads * value]`.

    `kv_b` holds rows by head: `[heads, nope + value, rank]`.
    """
    keys = latent.shape[0]
    values = finite(latent)
    to_keys, to_values = layout.band(kv_b, 0, nope), layout.band(kv_b, nope, kv_b.rows)
    out = []
    for some in blocks(len(positions), heads, keys):
        count = some.stop - some.start
        per_head = q[some].reshape(count, heads, -1).swapaxes(0, 1)
        absorbed = rows_sum(per_head[..., :nope], to_keys)
        scores = (absorbed @ latent.T + per_head[..., nope:] @ rope_keys.T) * scale
        seen = visible(copied(positions[some]), None if selection is None else selection[some], keys)
        mixed = mix(scores, seen, lambda weights: weights @ values, latent)
        out.append(product(mixed, to_values).swapaxes(0, 1).reshape(count, -1))
    return mx.concatenate(out) if len(out) > 1 else out[0]


def gqa(
    q: Array,
    keys: Array,
    values: Array,
    positions: np.ndarray,
    selection: Array | None,
    *,
    heads: int,
    kv_heads: int,
    scale: float,
) -> Array:
    """Grouped-query attention of rows `[rows, heads * head_dim]` of one sequence over keys
    `[keys, kv_heads * head_dim]`."""
    length, share = keys.shape[0], heads // kv_heads
    by_head = keys.reshape(length, kv_heads, -1).transpose(1, 2, 0)
    given = finite(values).reshape(length, kv_heads, -1).swapaxes(0, 1)
    out = []
    for some in blocks(len(positions), heads, length):
        count = some.stop - some.start
        grouped = q[some].reshape(count, kv_heads, share, -1).transpose(1, 2, 0, 3).reshape(kv_heads, share * count, -1)
        scores = ((grouped @ by_head) * scale).reshape(heads, count, length)
        seen = visible(copied(positions[some]), None if selection is None else selection[some], length)

        def mixed(weights: Array, count: int = count) -> Array:
            return (weights.reshape(kv_heads, share * count, length) @ given).reshape(heads, count, -1)

        out.append(mix(scores, seen, mixed, values).swapaxes(0, 1).reshape(count, -1))
    return mx.concatenate(out) if len(out) > 1 else out[0]


def index_select(q: Array, weights: Array, keys: Array, positions: np.ndarray, *, heads: int, top_k: int) -> Array:
    """int32 `[rows, 1 + top_k]`: -1 where all keys are seen, else top_k and the positions of the largest, ascending."""
    out = [
        _select_block(q[some], weights[some], keys, copied(positions[some]), heads, top_k)
        for some in blocks(len(positions), heads, keys.shape[0])
    ]
    return mx.concatenate(out) if len(out) > 1 else out[0]


def _select_block(q: Array, weights: Array, keys: Array, positions: Array, heads: int, top_k: int) -> Array:
    count, length = q.shape[0], keys.shape[0]
    everything = mx.concatenate([mx.full((count, 1), -1), mx.zeros((count, top_k))], axis=1).astype(mx.int32)
    if length <= top_k:
        return everything
    per_head = q.reshape(count, heads, -1)
    dots = (per_head @ keys.T) * (1.0 / float(np.sqrt(per_head.shape[-1])))
    dots = mx.where(dots < 0, 0.0, dots)  # NaN stays
    scores = (weights[:, :, None] * dots).sum(axis=1) * (1.0 / float(np.sqrt(heads)))
    seen = mx.arange(length)[None, :] <= positions[:, None]
    scores = mx.where(mx.logical_and(seen, mx.logical_not(mx.isnan(scores))), scores, -mx.inf)
    # No order among equals is asked of the sort: it gives the limit alone.
    limit = mx.sort(scores, axis=1)[:, length - top_k : length - top_k + 1]
    above, equal = scores > limit, scores == limit
    left = top_k - above.astype(mx.int32).sum(axis=1, keepdims=True)
    chosen = mx.logical_or(above, mx.logical_and(equal, mx.cumsum(equal.astype(mx.int32), axis=1) <= left))
    places = mx.sort(mx.where(chosen, mx.arange(length)[None, :], length), axis=1)[:, :top_k]
    picked = mx.concatenate([mx.full((count, 1), top_k), places], axis=1).astype(mx.int32)
    return mx.where((positions + 1 <= top_k)[:, None], everything, picked)
