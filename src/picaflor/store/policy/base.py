"""What a cache policy is: events in, a victim out.

Knows expert ids of one layer; must not know slots, memory, clocks or files. Pure: the same events give the same
decisions, so a policy can be replayed over recorded routes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol


class Policy(Protocol):
    """Decisions about one layer's slots. One object per layer."""

    def used(self, experts: Iterable[int]) -> None:
        """These experts were multiplied, in this order, resident in the layer's slots or not."""
        ...

    def admitted(self, expert: int) -> None:
        """The expert got one of the layer's slots."""
        ...

    def removed(self, expert: int) -> None:
        """The expert lost its slot: evicted, or its read failed."""
        ...

    def victim(self, newcomer: int, evictable: Callable[[int], bool]) -> int | None:
        """Which admitted expert gives its slot to `newcomer`; None: the newcomer is not worth a slot, or none of the
        admitted experts is evictable. Asked only when no slot is free."""
        ...


PolicyFactory = Callable[[int], Policy]
"""Makes the policy of one layer from its number of slots."""
