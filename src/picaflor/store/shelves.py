"""Where experts lie: slots of each layer, slots that all share, slots for what is read ahead, and who leaves for whom.

Ties residency, policies and arenas together. Must not know leases, reads or threads: who calls holds the store's lock.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from picaflor.store.ahead import Expected
from picaflor.store.arena import Arena, SlotTable
from picaflor.store.counters import StoreCounters
from picaflor.store.policy.base import DECLINED, LayerCache, Policy, PolicyFactory
from picaflor.store.policy.choose import policies
from picaflor.store.policy.working import WorkingSet
from picaflor.store.reader import ExpertFiles
from picaflor.store.residency import Residency
from picaflor.store.types import DISK_LAYOUT, RAM, Copy, ExpertKey, State

SHARED: Final = "working set"
AHEAD: Final = "read ahead"


class Shelves:
    """All slots and the copies in them; sizes as `ExpertStore` has them. Evictions and waste go to `counters`.

    `policies` has those layers that do not fit completely. `pinned`: by layer, the addresses of all its experts once
    they are there for good. `takes_ahead`: layers whose slots have the size of those for what is read ahead, so that
    the two can change places. Raises OutOfBudget if the system gives no memory.
    """

    def __init__(
        self,
        files: ExpertFiles,
        slots: int | Mapping[int, int],
        *,
        working_slots: int,
        ahead_slots: int,
        policy: PolicyFactory | None,
        counters: StoreCounters,
    ) -> None:
        self._files = files
        self._counters = counters
        self.slots = {layer: _layer_slots(files, layer, slots) for layer in files.layers}
        partial = [layer for layer in files.layers if self.slots[layer] < files.count(layer)]
        widest = max((files.slot_nbytes(layer) for layer in partial), default=0)
        self.working_slots = working_slots if partial else 0
        self.ahead_slots = ahead_slots if partial else 0
        self._pool = {layer: f"layer {layer}" for layer in files.layers}
        self.arenas = {self._pool[layer]: Arena(self.slots[layer], files.slot_nbytes(layer)) for layer in files.layers}
        self.arenas[SHARED] = Arena(self.working_slots, widest)
        self.arenas[AHEAD] = Arena(self.ahead_slots, widest)
        self._slots = SlotTable(self.arenas)
        self.residency = Residency({name: arena.slots for name, arena in self.arenas.items()})
        self.expected = Expected()
        self.takes_ahead = frozenset(layer for layer in partial if files.slot_nbytes(layer) == widest)
        make = policies() if policy is None else policy
        self.policies: dict[int, Policy] = {
            layer: make(LayerCache(layer, self.slots[layer], files.count(layer), self.working_slots))
            for layer in partial
        }
        self._working: WorkingSet[ExpertKey] = WorkingSet()
        self.pinned: dict[int, NDArray[np.uint64] | None] = dict.fromkeys(files.layers)
        self._ready_count = dict.fromkeys(files.layers, 0)  # READY or IN_USE in the layer's own slots

    def find(self, key: ExpertKey) -> Copy | None:
        """The copy of an expert, in any state; None if there is none."""
        return self.residency.find(key, RAM, DISK_LAYOUT)

    def usable(self, layer: int) -> Iterator[Copy]:
        """Copies of a layer that could be used without a read, by expert."""
        for expert in range(self._files.count(layer)):
            copy = self.find(ExpertKey(layer, expert))
            if copy is not None and copy.state in (State.READY, State.IN_USE):
                yield copy

    def address(self, copy: Copy) -> int:
        """Where a copy's slot starts."""
        return self._slots.address(copy.pool, copy.slot)

    def view(self, copy: Copy) -> NDArray[np.uint8]:
        """The bytes of a copy's slot."""
        return self._slots.view(copy.pool, copy.slot)

    def has_room(self, layer: int) -> bool:
        """Whether a layer's own slots are not all taken."""
        return self.residency.free_slots(self._pool[layer]) > 0

    def touch(self, copy: Copy) -> None:
        """A copy is used once more."""
        if copy.pool == SHARED:
            self._working.touch(copy.key)

    def place_ahead(self, key: ExpertKey) -> Copy:
        """A new copy, LOADING, in a free slot for what is read ahead."""
        copy = self.residency.load(key, RAM, DISK_LAYOUT, AHEAD)
        self.expected.add(copy)
        return copy

    def place(self, key: ExpertKey) -> Copy | None:
        """A new copy, LOADING, in a slot of its layer or of the working set; None if no slot can be had."""
        room = self._make_room(key)
        if room is None:
            return None
        copy = self.residency.load(key, RAM, DISK_LAYOUT, room[0])
        self._admit(copy, declined=room[1])
        return copy

    def _make_room(self, key: ExpertKey) -> tuple[str, bool] | None:
        """A pool that has a free slot for an expert now, and whether its policy declined it; None if there is none."""
        residency = self.residency
        pool = self._pool[key.layer]
        if residency.free_slots(pool):
            return pool, False
        policy, must = self.policies[key.layer], self.working_slots == 0
        victim = policy.victim(key.expert, lambda e: self._evictable(ExpertKey(key.layer, e)), must=must)
        if victim is not None and victim != DECLINED:
            self._evict(ExpertKey(key.layer, victim))
            return pool, False
        if residency.free_slots(SHARED) == 0:
            oldest = self._working.oldest(self._evictable)
            if oldest is None:
                return None
            self._evict(oldest)
        return SHARED, victim == DECLINED

    def _admit(self, copy: Copy, *, declined: bool) -> None:
        """Tell those who order copies that one is there."""
        if copy.pool == SHARED:
            self._working.add(copy.key, declined=declined)
        elif copy.key.layer in self.policies:
            self.policies[copy.key.layer].admitted(copy.key.expert)

    def adopt(self, key: ExpertKey) -> bool:
        """What was read ahead is asked for: it gets the slot that it would get if it were read now. False: none."""
        room = self._make_room(key)
        if room is None:
            return False
        copy = self.expected.copies[key]
        self.expected.remove(key)
        left = self.residency.move(copy, room[0])
        self._slots.swap(copy.pool, copy.slot, AHEAD, left)
        self._admit(copy, declined=room[1])
        if copy.state is State.READY:
            self.arrived(copy)
        return True

    def leave(self, key: ExpertKey) -> None:
        """Evict an expert that is there and that nobody uses, unless it was read ahead."""
        copy = self.find(key)
        if copy is not None and copy.state is State.READY and copy.pool != AHEAD:
            self._evict(key)

    def waste(self, copy: Copy) -> None:
        """Drop what was read ahead for nothing."""
        counters = self._counters.layers[copy.key.layer]
        counters.wasted += 1
        counters.wasted_bytes += self._files.reads(copy.key).read_nbytes
        self.residency.evict(copy)
        self.residency.freed(copy)
        self._forget(copy)

    def drop(self, copy: Copy) -> None:
        """The read of a copy failed or never began: free its slot."""
        self.residency.failed(copy.key, copy.tier, copy.layout, copy.generation)
        self._forget(copy)

    def arrived(self, copy: Copy) -> None:
        """A copy is usable. When all of a layer are, in its own slots, the layer is pinned."""
        layer = copy.key.layer
        if copy.pool == SHARED:
            return
        self._ready_count[layer] += 1
        if self._ready_count[layer] == self._files.count(layer):
            copies = list(self.usable(layer))
            for each in copies:
                self.residency.acquire(each)  # the store itself is a user, for good
            self.pinned[layer] = np.array([self.address(each) for each in copies], dtype=np.uint64)

    def unpin(self) -> None:
        """No address is given away any more."""
        self.pinned = dict.fromkeys(self._files.layers)

    def _evictable(self, key: ExpertKey) -> bool:
        copy = self.find(key)
        return copy is not None and copy.state is State.READY

    def _evict(self, key: ExpertKey) -> None:
        copy = self.find(key)
        assert copy is not None
        self.residency.evict(copy)
        self.residency.freed(copy)  # host memory: nobody reads it any more
        self._forget(copy)
        self._counters.layers[key.layer].evicted += 1
        if copy.pool != SHARED:
            self._ready_count[key.layer] -= 1

    def _forget(self, copy: Copy) -> None:
        """Tell those who order copies that one is gone."""
        if copy.pool == SHARED:
            self._working.remove(copy.key)
        elif copy.pool == AHEAD:
            self.expected.remove(copy.key)
        elif copy.key.layer in self.policies:
            self.policies[copy.key.layer].removed(copy.key.expert)


def _layer_slots(files: ExpertFiles, layer: int, slots: int | Mapping[int, int]) -> int:
    """Slots of one layer. Raises ValueError below 1."""
    wanted = slots if isinstance(slots, int) else slots[layer]
    if wanted < 1:
        raise ValueError(f"layer {layer} needs 1 expert slot or more, not {wanted}")
    return min(wanted, files.count(layer))
