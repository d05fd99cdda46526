"""The next layer's router applied early: which experts it will probably choose.

Knows the router's weight and both layers' norms; must not know the expert store. What it says changes reads, never a
number: the layer's own router decides later, from its own input.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

import picaflor._native as _native
from picaflor.backends.api import I32, RouterSpec
from picaflor.formats.base import F32

MOST_ROWS: Final = 4
"""Rows of a step for which experts are told early; a prompt chooses nearly all of them anyway."""

LIKELY: Final = 1 / 2
"""Part of a layer's choices that is told: the likeliest are right nine times in ten, the last hardly every second."""


@dataclass(frozen=True, slots=True)
class RouterInputs:
    """What makes a layer's choice: its router's matrix (native) and bias, and the norm whose output both multiply."""

    weight: Any
    norm: NDArray[np.float32]
    bias: NDArray[np.float32] | None
    spec: RouterSpec


class EarlyRouter:
    """The router of the layer after `here`, applied to the input of the router `here`.

    Both inputs are norms of the same residual, but for what lies between, so their ratio is that of the norms' weights.
    """

    def __init__(self, here: RouterInputs, there: RouterInputs, *, isa: str, planes: int) -> None:
        self._here = here
        self._there = there
        self._isa = isa
        self._planes = planes
        self._ratio: F32 | None = None

    def choose(self, x: F32) -> I32:
        """Ids for the rows of x `[rows, hidden]`, the likeliest first."""
        if self._ratio is None:  # weights are read after recording
            here, there = self._here.norm, self._there.norm
            self._ratio = np.divide(there, here, out=np.zeros_like(there), where=here != 0)
        spec = self._there.spec
        rows = np.multiply(x, self._ratio, dtype=np.float32)
        logits = _native.matmul(self._isa, self._there.weight, self._planes, rows, 0, spec.experts)
        return likeliest(logits, self._there.bias, spec)


def likeliest(logits: F32, bias: NDArray[np.float32] | None, spec: RouterSpec) -> I32:
    """What of the choices of rows `[rows, experts]` is worth telling, each expert once, the likeliest first."""
    order = np.argsort(-_choice(logits, bias, spec), axis=1)[:, : math.ceil(LIKELY * spec.top_k)]
    return np.array(list(dict.fromkeys(order.T.reshape(-1).tolist())), dtype=np.int32)


def _choice(logits: F32, bias: NDArray[np.float32] | None, spec: RouterSpec) -> NDArray[Any]:
    """What the router orders experts by, `[rows, experts]`; that of other groups than the best is minus infinity."""
    if bias is None and spec.groups == 1:
        return logits  # both scores rise with the logit
    if spec.score == "sigmoid":
        scores: NDArray[Any] = 1.0 / (1.0 + np.exp(-np.clip(logits, -80, 80)))
    else:
        powers = np.exp(logits - logits.max(axis=1, keepdims=True))
        scores = powers / powers.sum(axis=1, keepdims=True)
    if bias is not None:
        scores = scores + bias
    if spec.groups > 1:
        grouped = scores.reshape(len(scores), spec.groups, -1)
        best = np.sort(grouped, axis=2)[:, :, -2:].sum(axis=2)
        left_out = np.argsort(-best, axis=1)[:, spec.top_groups :]
        for row, groups in zip(grouped, left_out, strict=True):
            row[groups] = -np.inf
    return scores


def early_routers(inputs: Sequence[RouterInputs | None], *, isa: str, planes: int) -> list[EarlyRouter | None]:
    """For each call of experts the early router of the next one; None where what makes its choice is not known."""
    pairs = zip(inputs, [*inputs[1:], None], strict=False)
    return [EarlyRouter(here, there, isa=isa, planes=planes) if here and there else None for here, there in pairs]
