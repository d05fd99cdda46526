"""Least recently used: the victim is the admitted expert whose last use is the oldest.

Knows expert ids of one layer; must not know slots, memory, clocks or files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable


class LruPolicy:
    """Always admits. An expert that was admitted and not used yet counts as used when it was admitted."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._order: dict[int, None] = {}  # oldest first

    def used(self, experts: Iterable[int]) -> None:
        """Move the admitted ones among them to the young end, in their order."""
        order = self._order
        for expert in experts:
            if expert in order:
                del order[expert]
                order[expert] = None

    def admitted(self, expert: int) -> None:
        """A new youngest expert. Raises ValueError if all slots are taken: that is a defect of the caller."""
        if expert in self._order or len(self._order) >= self.slots:
            raise ValueError(f"expert {expert} admitted while {list(self._order)} hold {self.slots} slots")
        self._order[expert] = None

    def removed(self, expert: int) -> None:
        """Forget it."""
        del self._order[expert]

    def victim(self, newcomer: int, evictable: Callable[[int], bool]) -> int | None:
        """The oldest evictable expert."""
        return next((expert for expert in self._order if evictable(expert)), None)
