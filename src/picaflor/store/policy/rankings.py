"""Rankings of one layer's experts by how much a slot is worth to each: what policies and their shadows decide by.

Knows expert ids and the requests so far; must not know what is resident, slots, clocks or files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import numpy as np

from picaflor.store.policy.base import DECLINED

HEAT_HALF_LIFE = 16.0
"""Requests after which a use counts half: locality of routes is that short."""
FOLLOW_HALF_LIFE = 70.0
"""Uses of an expert after which what followed it counts half."""
_LARGEST = 1e100
_LARGEST_F32 = 1e20


class Ranking(Protocol):
    """`scores[expert]`: the higher, the more a slot is worth. `greedy`: a newcomer gets a slot whatever its score, but
    not one of an expert with an infinite one."""

    name: str
    greedy: bool
    scores: list[float]

    def asked(self, experts: Sequence[int]) -> None:
        """These distinct experts are requested now."""
        ...


class Recency:
    """Least recently used goes first; within a request, its order counts."""

    greedy: bool = True

    def __init__(self, experts: int) -> None:
        self.name = "lru"
        self.scores: list[float] = [0.0] * experts
        self._clock = 0

    def asked(self, experts: Sequence[int]) -> None:
        """They are the youngest now."""
        for expert in experts:
            self._clock += 1
            self.scores[expert] = self._clock


class Heat:
    """Frequency that decays: a use counts half after `half_life` requests. Admits only what is hotter."""

    greedy: bool = False

    def __init__(self, experts: int, *, half_life: float = HEAT_HALF_LIFE) -> None:
        self.name = f"heat {half_life:g}"
        self.scores: list[float] = [0.0] * experts
        self._growth = 2.0 ** (1.0 / half_life)
        self._unit = 1.0  # grows instead of all scores shrinking

    def asked(self, experts: Sequence[int]) -> None:
        """One use more of each."""
        self._unit *= self._growth
        if self._unit > _LARGEST:
            self.scores[:] = [score / self._unit for score in self.scores]
            self._unit = 1.0
        for expert in experts:
            self.scores[expert] += self._unit


class Forecast:
    """The chance to be asked for next: decayed frequency, plus what followed the experts of this request before.

    A table `[experts + 1, experts]` of float32: how often the column was asked for one request after the row; the last
    row is the frequency. Instead of a row shrinking, the unit that it counts in grows. Requests for more than half of
    the experts (a prompt) teach nothing about what follows what.
    """

    greedy: bool = False

    def __init__(self, experts: int) -> None:
        self.name = "forecast"
        self.scores: list[float] = [0.0] * experts
        self._experts = experts
        self._table = np.zeros((experts + 1, experts), dtype=np.float32)
        self._flat = self._table.reshape(-1).data  # single numbers are changed faster than through numpy
        keep = [2.0 ** (-1.0 / FOLLOW_HALF_LIFE)] * experts + [2.0 ** (-1.0 / HEAT_HALF_LIFE)]
        self._growth = [1.0 / part for part in keep]
        self._parts = [1.0 - part for part in keep]
        self._units = [1.0] * (experts + 1)
        self._before: list[int] = []

    @staticmethod
    def nbytes(experts: int) -> int:
        """Memory of one layer's table."""
        return 4 * experts * (experts + 1)

    def asked(self, experts: Sequence[int]) -> None:
        """Learn from the request, then look one request ahead."""
        heat, units, growth, table = self._experts, self._units, self._growth, self._flat
        now = list(experts)
        prompt = 2 * len(now) > heat
        for row in (heat,) if prompt else (*self._before, heat):
            unit = units[row] * growth[row]
            if unit > _LARGEST_F32:
                self._table[row] /= unit
                unit = 1.0
            units[row] = unit
            first = row * heat
            for expert in now:
                table[first + expert] += unit
        rows = [heat] if prompt else [*now, heat]
        weights = np.array([self._parts[row] / units[row] for row in rows], dtype=np.float32)
        self.scores = weights.dot(self._table.take(rows, axis=0)).tolist()
        self._before = [] if prompt else now


class Pins:
    """The most used experts of a history keep their slots; the others share what is left as least recently used.

    `counts[expert]`: uses in the history; those without any are never pinned. `pins`: how many slots at most.
    """

    greedy: bool = True

    def __init__(self, counts: Sequence[int], *, pins: int, name: str = "pins") -> None:
        self.name = name
        self.pinned = hottest(counts, pins)
        self.scores: list[float] = [0.0] * len(counts)
        for expert in self.pinned:
            self.scores[expert] = math.inf
        self._clock = 0

    def asked(self, experts: Sequence[int]) -> None:
        """The unpinned ones are the youngest now."""
        for expert in experts:
            if self.scores[expert] != math.inf:
                self._clock += 1
                self.scores[expert] = self._clock


class Clairvoyant:
    """Belady's offline optimum, for comparison only: knows all requests of the layer in advance."""

    greedy: bool = False

    def __init__(self, experts: int, requests: Sequence[Sequence[int]]) -> None:
        self.name = "belady"
        self._next: list[Sequence[int]] = []
        coming = [len(requests) + 1] * experts
        for at in range(len(requests) - 1, -1, -1):
            self._next.append([coming[expert] for expert in requests[at]])
            for expert in requests[at]:
                coming[expert] = at
        self.scores: list[float] = [-float(at) for at in coming]

    def asked(self, experts: Sequence[int]) -> None:
        """The sooner an expert is asked for again, the more it is worth."""
        for expert, at in zip(experts, self._next.pop(), strict=True):
            self.scores[expert] = -float(at)


def hottest(counts: Sequence[int], most: int) -> list[int]:
    """Ids with the highest counts, the highest first, equal ones by id; none with a count of 0."""
    order = sorted((expert for expert in range(len(counts)) if counts[expert] > 0), key=lambda e: (-counts[e], e))
    return order[:most]


def choose_victim(
    ranking: Ranking, newcomer: int, admitted: Collection[int], evictable: Callable[[int], bool], *, must: bool = False
) -> int | None:
    """The evictable expert with the lowest score, the first of equals; None where there is none, DECLINED where the
    newcomer is not worth its slot, unless it must have one."""
    scores = ranking.scores
    coldest = _coldest(scores, admitted, evictable)
    if coldest is None or must:
        return coldest
    deserved = scores[coldest] < math.inf if ranking.greedy else scores[newcomer] > scores[coldest]
    return coldest if deserved else DECLINED


def _coldest(scores: Sequence[float], admitted: Collection[int], evictable: Callable[[int], bool]) -> int | None:
    coldest = min(admitted, key=scores.__getitem__, default=None)
    if coldest is not None and not evictable(coldest):
        coldest = min(filter(evictable, admitted), key=scores.__getitem__, default=None)
    return coldest
