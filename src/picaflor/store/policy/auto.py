"""The policy `auto`: every candidate runs as a shadow on the live requests, and the one with the most hits is in force.

Knows expert ids; must not know slots, memory, clocks or files. A shadow is a set of ids that a cache with that policy
would hold; it costs no memory worth naming and reads nothing. The contest is one for all layers of a store, so that a
few dozen tokens tell. Another policy in force drops nothing: it only chooses the next victims.

Shadows in all layers would take a fifth of a fast token's time, so only some layers have them. Where the same policy
has been in force for long they pause, and are woken from time to time, or when fewer experts are found than while they
watched. A ranking that no shadow needs learns what it missed when it comes into force.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence

from picaflor.store.policy.base import LayerCache
from picaflor.store.policy.ranked import Admitted, RankedPolicy
from picaflor.store.policy.rankings import Ranking, choose_victim
from picaflor.store.policy.shadow import Shadow
from picaflor.store.policy.working import WorkingSet

MEMORY_REQUESTS = 512
"""Requests of a layer after which a shadow's hit counts half."""
MARGIN = 0.005
"""Part of its hits by which a candidate must be better than the one in force."""
HEAD_START = 4.0
"""Hits per layer that it must be better by besides."""
OBSERVED, OBSERVED_PART = 3, 4
"""Layers that have shadows: as many, or one of so many where that is more. Many layers make a slow token."""
WATCH = 1024
"""Requests of a layer without another policy in force after which shadows pause."""
PAUSE = 2048
"""Requests of a layer that they pause for."""
WARM, LOOK = 128, 256
"""Requests of a layer until the hits of shadows that have paused count again; until they pause again."""
FEWER = 0.04
"""Part of the experts asked for that may be found less often than before a pause ends."""
SOON = 64.0
"""Requests of a layer over which that is averaged in a pause."""
REMEMBERED = 256
"""Requests that a ranking learns of after it has missed more."""
_PERIOD = 4  # requests per layer between two looks at the scores
_LARGEST = 1e100

Candidates = Callable[[LayerCache], Sequence[Ranking]]


class Contest:
    """Decayed hits of every candidate over the observed layers, and who is in force. The first candidate starts, or
    `start`. What is counted per layer means observed ones."""

    def __init__(self, start: str = "") -> None:
        self.names: list[str] = []
        self._start = start
        self.in_force = 0
        self.switches = 0
        self.working: list[WorkingSet[int]] = []  # of each candidate
        self.observed: frozenset[int] = frozenset()
        """Layers that have shadows, counted as they joined: evenly spread."""
        self._joined = 0
        self._layers = 0  # that are observed
        self._hits: list[float] = []
        self._growth = 1.0
        self._unit = 1.0  # grows instead of all sums shrinking
        self._until_look = 0
        self.watching = True
        self._left = 0  # requests until watching begins or ends
        self._warm = 0  # requests whose hits do not count yet
        self._usual = self._found = 0.0  # parts of the experts that the real cache had: while watching, and lately

    def join(self, names: Sequence[str]) -> int:
        """One more layer, before any is asked for something; how many joined before it. Raises ValueError where it has
        other candidates."""
        if self._joined and list(names) != self.names:
            raise ValueError(f"candidates {list(names)} in one layer, {self.names} in others")
        if not self._joined:
            self.working = [WorkingSet() for _ in names]
            self.in_force = list(names).index(self._start) if self._start in names else 0
        self.names = list(names)
        self._hits = [0.0] * len(names)
        self._joined += 1
        self._layers = max(min(self._joined, OBSERVED), self._joined // OBSERVED_PART)
        self.observed = frozenset((2 * at + 1) * self._joined // (2 * self._layers) for at in range(self._layers))
        self._growth = 2.0 ** (1.0 / (MEMORY_REQUESTS * self._layers))
        self._left = WATCH * self._layers
        return self._joined - 1

    def working_slots(self, shared: int | None) -> int | None:
        """The observed layers' share of the working set's slots, rounded up: where the last token's experts just
        stay in it, a slot less would make another policy the best."""
        return shared and math.ceil(shared * self._layers / self._joined)

    def asked(self, part: float) -> None:
        """A request in an observed layer, of which the real cache had this part: shadows wake or pause."""
        self._left -= 1
        usual = 1.0 / (LOOK * self._layers)
        if self.watching:
            self._usual += (part - self._usual) * usual
            if self._left <= 0:
                self.watching = False
                self._left, self._found = PAUSE * self._layers, self._usual
            return
        self._found += (part - self._found) / (SOON * self._layers)
        if self._left <= 0 or self._found < self._usual - FEWER:
            self.watching = True
            self._left, self._warm = LOOK * self._layers, WARM * self._layers

    def add(self, hits: Sequence[int]) -> None:
        """The shadows' hits of one request, by candidate; from time to time a new one comes into force."""
        if self._warm:
            self._warm -= 1
            return
        self._unit *= self._growth
        unit, sums = self._unit, self._hits
        for number, count in enumerate(hits):
            sums[number] += count * unit
        self._until_look -= 1
        if self._until_look <= 0:
            self._until_look = _PERIOD * self._layers
            self._look()

    def _look(self) -> None:
        if self._unit > _LARGEST:
            self._hits = [total / self._unit for total in self._hits]
            self._unit = 1.0
        best = max(range(len(self._hits)), key=self._hits.__getitem__)
        needed = self._hits[self.in_force] * (1 + MARGIN) + HEAD_START * self._layers * self._unit
        if self._hits[best] > needed:
            self.in_force = best
            self.switches += 1
            self._left = WATCH * self._layers


class AutoPolicy:
    """One layer's part of a contest. The real cache and every shadow see the same requests."""

    def __init__(self, cache: LayerCache, rankings: Sequence[Ranking], contest: Contest) -> None:
        self._cache = cache
        self._admitted = Admitted(cache.slots)
        self._rankings = list(rankings)
        self._place = contest.join([ranking.name for ranking in rankings])
        self._shadows: list[Shadow] = []
        self._contest = contest
        self._leader = contest.in_force
        self._resting = True
        self._lately: deque[Sequence[int]] = deque(maxlen=REMEMBERED)
        self._requests = 0
        self._told = [0] * len(rankings)  # of how many requests each knows

    @property
    def in_force(self) -> str:
        """The name of the ranking that chooses victims now."""
        return self._contest.names[self._contest.in_force]

    def asked(self, experts: Sequence[int]) -> None:
        """Tell the ranking in force now, the others in `rest` or when they are needed."""
        if not self._resting:
            self.rest()
        self._lately.append(experts)
        self._requests += 1
        self._leader = self._contest.in_force
        self._tell(self._leader)
        if self._place in self._contest.observed:
            self._resting = False
            held, found = self._admitted.experts, 0
            for expert in experts:
                found += expert in held
            self._contest.asked(found / len(experts))

    def admitted(self, expert: int) -> None:
        """One slot less. Raises ValueError if there is none."""
        self._admitted.add(expert)

    def removed(self, expert: int) -> None:
        """A slot is free again."""
        self._admitted.remove(expert)

    def victim(self, newcomer: int, evictable: Callable[[int], bool], *, must: bool = False) -> int | None:
        """As the ranking in force has it."""
        ranking = self._rankings[self._leader]
        return choose_victim(ranking, newcomer, self._admitted.experts, evictable, must=must)

    def rest(self) -> None:
        """Let the shadows, if the layer has any and they do not pause, serve the request."""
        if self._resting:
            return
        self._resting = True
        if not self._contest.watching:
            return
        if not self._shadows:
            self._shadows = self._made_shadows()
        request = self._lately[-1]
        hits = []
        for number, shadow in enumerate(self._shadows):
            self._tell(number)
            hits.append(len(request) - len(shadow.serve(request)))
        self._contest.add(hits)

    def _tell(self, number: int) -> None:
        """Let a ranking learn of the latest requests that it does not know."""
        missed = self._requests - self._told[number]
        if not missed:
            return
        self._told[number] = self._requests
        asked, lately = self._rankings[number].asked, self._lately
        if missed == 1:
            asked(lately[-1])
            return
        for request in itertools.islice(lately, max(0, len(lately) - missed), None):
            asked(request)

    def _made_shadows(self) -> list[Shadow]:
        cache = self._cache._replace(working_slots=self._contest.working_slots(self._cache.working_slots))
        return [
            Shadow(cache, RankedPolicy(cache.slots, ranking), working)
            for ranking, working in zip(self._rankings, self._contest.working, strict=True)
        ]


class AutoPolicies:
    """The factory of one store: `candidates` gives each layer's rankings, in the same order for all layers."""

    def __init__(self, candidates: Candidates, *, start: str = "") -> None:
        self.contest = Contest(start)
        self._candidates = candidates

    def __call__(self, cache: LayerCache) -> AutoPolicy:
        """The policy of one layer."""
        return AutoPolicy(cache, self._candidates(cache), self.contest)
