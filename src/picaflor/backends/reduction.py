"""Fewer experts than the router chose: the one definition of the lossy modes, for every backend.

Knows choices and weights as arrays; must not know programs, devices or who asked. docs/lossy.md says what it costs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from picaflor.backends.api import I32, Reduction

NONE = -1


def reduce_choices(ids: I32, weights: NDArray[Any], rows: NDArray[np.bool_], layer: int, reduction: Reduction) -> None:
    """Take choices away in place: ids `[n, k]` become -1 and their weights 0, what is left sums to what all did.

    `rows` `[n]`: the rows that may lose choices. `top_p`: a row keeps the smallest prefix, in routing order, whose
    weights reach that part of their sum. `loads`: of the experts that these rows want, that are not resident and that
    no other row wants, the `loads` with the most weight stay (summed over rows, ties to the lowest id); a row that
    would be left with none keeps its first choice.
    """
    if not rows.any():
        return
    before = weights[rows].astype(np.float64)
    kept = np.ones(before.shape, bool)
    if reduction.top_p < 1.0:
        reached = np.cumsum(before, axis=1) - before >= reduction.top_p * before.sum(axis=1, keepdims=True)
        kept &= ~reached
        kept[:, 0] = True
    if reduction.loads is not None:
        _within_budget(ids, before, kept, rows, layer, reduction)
    reduction.counts.chosen += kept.size
    reduction.counts.dropped += int(kept.size - np.count_nonzero(kept))
    left = np.where(kept, before, 0.0)
    factor = before.sum(axis=1, keepdims=True) / np.maximum(left.sum(axis=1, keepdims=True), np.finfo(np.float64).tiny)
    whole = kept.all(axis=1, keepdims=True)
    weights[rows] = np.where(whole, before, left * factor)
    ids[rows] = np.where(kept, ids[rows], NONE)


def _within_budget(
    ids: I32,
    weights: NDArray[np.float64],
    kept: NDArray[np.bool_],
    rows: NDArray[np.bool_],
    layer: int,
    reduction: Reduction,
) -> None:
    """Drop what would have to be read beyond the budget."""
    chosen = ids[rows]
    free = set(reduction.resident(layer)) | set(ids[~rows].ravel().tolist())
    sums: dict[int, float] = {}
    for expert, weight in zip(chosen[kept].tolist(), weights[kept].tolist(), strict=True):
        if expert not in free:
            sums[expert] = sums.get(expert, 0.0) + weight
    ranked = sorted(sums, key=lambda expert: (-sums[expert], expert))
    kept &= ~np.isin(chosen, ranked[reduction.loads :])
    kept[~kept.any(axis=1), 0] = True
