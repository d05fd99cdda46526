"""A policy that follows one ranking.

Knows expert ids of one layer; must not know slots, memory, clocks or files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from picaflor.store.policy.base import LayerCache
from picaflor.store.policy.rankings import Ranking, Recency, choose_victim


class Admitted:
    """Which experts hold a layer's slots, in the order of their admission."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.experts: dict[int, None] = {}

    def add(self, expert: int) -> None:
        """Raises ValueError if it is there or all slots are taken: a defect of the caller."""
        if expert in self.experts or len(self.experts) >= self.slots:
            raise ValueError(f"expert {expert} admitted while {list(self.experts)} hold {self.slots} slots")
        self.experts[expert] = None

    def remove(self, expert: int) -> None:
        """Raises KeyError if it is not there."""
        del self.experts[expert]


class RankedPolicy:
    """Gives the slot of the coldest evictable expert, as its ranking has it."""

    def __init__(self, slots: int, ranking: Ranking) -> None:
        self.ranking = ranking
        self._admitted = Admitted(slots)

    @property
    def in_force(self) -> str:
        """The ranking's name."""
        return self.ranking.name

    def asked(self, experts: Sequence[int]) -> None:
        """Tell the ranking."""
        self.ranking.asked(experts)

    def admitted(self, expert: int) -> None:
        """One slot less. Raises ValueError if there is none."""
        self._admitted.add(expert)

    def removed(self, expert: int) -> None:
        """A slot is free again."""
        self._admitted.remove(expert)

    def victim(self, newcomer: int, evictable: Callable[[int], bool], *, must: bool = False) -> int | None:
        """The coldest evictable expert, if the newcomer is worth more."""
        return choose_victim(self.ranking, newcomer, self._admitted.experts, evictable, must=must)

    def rest(self) -> None:
        """Nothing is left to do."""


def lru(cache: LayerCache) -> RankedPolicy:
    """Least recently used, for one layer."""
    return RankedPolicy(cache.slots, Recency(cache.experts))
