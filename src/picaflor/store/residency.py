"""The one state machine of residency: which copies of an expert exist, where, and what may be done with them.

The only writer of `Copy`. Knows slots as numbers; must not know memory, files, clocks or policies. Not locked: its
owner serialises calls.

    none       load -> LOADING
    LOADING    loaded -> READY       failed -> none       evict -> EVICTING, slot taken until loaded or failed -> none
    READY      acquire -> IN_USE     evict -> EVICTING, slot taken until freed -> none
    IN_USE     acquire -> IN_USE     release -> IN_USE, the last one -> READY
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum

from picaflor.store.types import Copy, ExpertKey, State, Tier


class Event(Enum):
    """What can happen to a copy."""

    __hash__ = object.__hash__  # members are looked up many times a token; Enum's own hash is Python code

    LOADED = "loaded"
    FAILED = "failed"
    ACQUIRE = "acquire"
    RELEASE = "release"
    EVICT = "evict"
    FREED = "freed"


# (state, a read still writes to the slot, event) -> next state. What is not here is illegal.
TRANSITIONS: Mapping[tuple[State, bool, Event], State] = {
    (State.LOADING, True, Event.LOADED): State.READY,
    (State.LOADING, True, Event.FAILED): State.GONE,
    (State.LOADING, True, Event.EVICT): State.EVICTING,
    (State.READY, False, Event.ACQUIRE): State.IN_USE,
    (State.READY, False, Event.EVICT): State.EVICTING,
    (State.IN_USE, False, Event.ACQUIRE): State.IN_USE,
    (State.IN_USE, False, Event.RELEASE): State.READY,  # IN_USE while users remain
    (State.EVICTING, False, Event.FREED): State.GONE,
    (State.EVICTING, True, Event.LOADED): State.GONE,
    (State.EVICTING, True, Event.FAILED): State.GONE,
}


class IllegalTransition(RuntimeError):
    """A defect of the caller: an event that the copy's state does not allow, or a slot that does not exist."""


class Residency:
    """Sets of copies per expert, and the free slots of every pool.

    `pools` maps a pool's name to its number of slots; slots are handed out lowest first.
    """

    def __init__(self, pools: Mapping[str, int]) -> None:
        self._free = {name: list(range(slots - 1, -1, -1)) for name, slots in pools.items()}
        self._copies: dict[ExpertKey, dict[tuple[Tier, str], Copy]] = {}
        self._generation = 0

    def find(self, key: ExpertKey, tier: Tier, layout: str) -> Copy | None:
        """The copy in that tier and layout, whatever its state."""
        places = self._copies.get(key)
        return None if places is None else places.get((tier, layout))

    def copies(self, key: ExpertKey) -> tuple[Copy, ...]:
        """All copies of an expert."""
        return tuple(self._copies.get(key, {}).values())

    def all_copies(self) -> Iterator[Copy]:
        """All copies of all experts."""
        for places in self._copies.values():
            yield from places.values()

    def free_slots(self, pool: str) -> int:
        """How many slots of a pool hold no copy."""
        return len(self._free[pool])

    def load(self, key: ExpertKey, tier: Tier, layout: str, pool: str) -> Copy:
        """A new copy, LOADING, in a free slot of `pool`. Illegal if that copy exists already or no slot is free."""
        places = self._copies.setdefault(key, {})
        place = (tier, layout)
        if place in places:
            raise IllegalTransition(f"load of {key} into {tier} as {layout}: it is {places[place].state.value} there")
        if not self._free[pool]:
            raise IllegalTransition(f"load of {key}: no free slot in {pool}")
        self._generation += 1
        copy = Copy(key, tier, layout, pool, self._free[pool].pop(), self._generation)
        places[place] = copy
        return copy

    def loaded(self, key: ExpertKey, tier: Tier, layout: str, generation: int) -> bool:
        """The read of that generation succeeded. True if the copy is READY now; False if nobody wants it any more."""
        return self._read_done(key, tier, layout, generation, Event.LOADED)

    def failed(self, key: ExpertKey, tier: Tier, layout: str, generation: int) -> bool:
        """The read of that generation failed or was cancelled: the slot is free. False if the copy was given up
        before."""
        return self._read_done(key, tier, layout, generation, Event.FAILED)

    def acquire(self, copy: Copy) -> None:
        """One more user. Illegal unless READY or IN_USE."""
        copy.state = self._next(copy, Event.ACQUIRE)
        copy.users += 1

    def release(self, copy: Copy) -> None:
        """One user less; READY after the last."""
        state = self._next(copy, Event.RELEASE)
        copy.users -= 1
        if copy.users == 0:
            copy.state = state

    def evict(self, copy: Copy) -> None:
        """Begin to evict: nobody can acquire it any more. Illegal while in use. While it is loading, the slot is freed
        by `loaded` or `failed`; otherwise by `freed`."""
        copy.state = self._next(copy, Event.EVICT)

    def freed(self, copy: Copy) -> None:
        """Nothing reads the evicted slot any more: it is free."""
        self._drop(copy, self._next(copy, Event.FREED))

    def move(self, copy: Copy, pool: str) -> int:
        """Let a copy count for another pool, in a free slot of it; returns that of its own that it leaves free. Its
        owner exchanges the slots' memory. Illegal while the copy is in use, or if no slot is free."""
        if copy.state not in (State.LOADING, State.READY):
            raise IllegalTransition(f"move of {copy.key} to {pool}: it is {copy.state.value}")
        if not self._free[pool]:
            raise IllegalTransition(f"move of {copy.key}: no free slot in {pool}")
        left = copy.slot
        self._free[copy.pool].append(left)
        copy.pool, copy.slot = pool, self._free[pool].pop()
        return left

    def _read_done(self, key: ExpertKey, tier: Tier, layout: str, generation: int, event: Event) -> bool:
        """The end of a read. An old generation is ignored: its slot was freed by its own end."""
        copy = self.find(key, tier, layout)
        if copy is None or copy.generation != generation:
            return False
        wanted = copy.state is State.LOADING
        state = self._next(copy, event)
        copy.writing = False
        if state is State.GONE:
            self._drop(copy, state)
        else:
            copy.state = state
        return wanted

    def _next(self, copy: Copy, event: Event) -> State:
        """The state that follows. Raises IllegalTransition."""
        state = TRANSITIONS.get((copy.state, copy.writing, event))
        if state is None:
            doing = " with a read running" if copy.writing else ""
            where = f"{copy.key} in {copy.tier} (generation {copy.generation})"
            raise IllegalTransition(f"{event.value} of {where}: it is {copy.state.value}{doing}")
        return state

    def _drop(self, copy: Copy, state: State) -> None:
        """Forget a copy and free its slot."""
        copy.state = state
        places = self._copies[copy.key]
        del places[copy.tier, copy.layout]
        if not places:
            del self._copies[copy.key]
        self._free[copy.pool].append(copy.slot)
