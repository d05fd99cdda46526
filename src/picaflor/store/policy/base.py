"""What a cache policy is: events in, a victim out.

Knows expert ids of one layer; must not know slots, memory, clocks or files. Pure: the same events give the same
decisions, so a policy can be replayed over recorded routes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

DECLINED = -1
"""In place of a victim: the newcomer is not worth a slot."""


class LayerCache(NamedTuple):
    """The cache of one layer: its number in the model, its slots and how many experts it has.

    `working_slots`: slots that all layers share for what is not admitted; None where nothing keeps that.
    """

    layer: int
    slots: int
    experts: int
    working_slots: int | None = None


class Policy(Protocol):
    """Decisions about one layer's slots. One object per layer.

    A request is told by `asked`, then `victim`, `removed` and `admitted` follow for what is missing, then `rest`.
    """

    def asked(self, experts: Sequence[int]) -> None:
        """A request for these distinct experts begins, resident in the layer's slots or not."""
        ...

    def admitted(self, expert: int) -> None:
        """The expert got one of the layer's slots."""
        ...

    def removed(self, expert: int) -> None:
        """The expert lost its slot: evicted, or its read failed."""
        ...

    def victim(self, newcomer: int, evictable: Callable[[int], bool], *, must: bool = False) -> int | None:
        """Which admitted expert gives its slot to `newcomer`. Asked only when no slot is free.

        DECLINED: the newcomer is not worth a slot and is served through the working set. None: none of the admitted
        experts is evictable. With `must` the newcomer has nowhere else to go and is not declined.
        """
        ...

    def rest(self) -> None:
        """The request's reads were started: the time for work that no decision waits for."""
        ...


PolicyFactory = Callable[[LayerCache], Policy]
"""Makes the policies of one store, one for each layer. A factory serves one store: its policies may share what they
learn."""
