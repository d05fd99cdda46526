"""Slots for experts in anonymous memory: one mapping per pool, so that the number of mappings stays small.

Knows bytes and addresses; must not know experts, files or policies.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from picaflor.errors import OutOfBudget

SLACK_BYTES = 64
"""Readable bytes behind every slot: kernels load whole vectors."""
ALIGN_BYTES = 64
PAGE_BYTES = mmap.PAGESIZE


def slot_stride(nbytes: int) -> int:
    """Bytes from one slot to the next, for contents of `nbytes`: slack included, rounded up to 64."""
    return -(-(nbytes + SLACK_BYTES) // ALIGN_BYTES) * ALIGN_BYTES


def arena_bytes(slots: int, nbytes: int) -> int:
    """Memory that an arena takes: `slots` slots for `nbytes` each, in whole pages; 0 for no slot."""
    return -(-slots * slot_stride(nbytes) // PAGE_BYTES) * PAGE_BYTES


class Arena:
    """`slots` slots of `slot_nbytes` bytes in one private mapping that starts at a page, large pages advised.

    Pages count against the process when they are first written. Raises OutOfBudget if the system refuses the mapping.
    """

    def __init__(self, slots: int, slot_nbytes: int) -> None:
        self.slots = slots
        self.slot_nbytes = slot_nbytes
        self.stride = slot_stride(slot_nbytes)
        self.nbytes = arena_bytes(slots, slot_nbytes)
        self._map: mmap.mmap | None = None
        self._bytes: NDArray[np.uint8] = np.empty(0, dtype=np.uint8)
        if self.nbytes:
            try:
                self._map = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            except (OSError, OverflowError, ValueError) as error:
                raise OutOfBudget(
                    f"the system gives no {self.nbytes} bytes for {slots} expert slots of {self.stride}: {error}"
                ) from error
            if hasattr(mmap, "MADV_HUGEPAGE"):
                self._advise(mmap.MADV_HUGEPAGE)
            self._bytes = np.frombuffer(self._map, dtype=np.uint8)
        self.base: int = self._bytes.ctypes.data if self.nbytes else 0

    def address(self, slot: int) -> int:
        """Where a slot starts. Raises IndexError for a slot that does not exist."""
        if not 0 <= slot < self.slots:
            raise IndexError(f"slot {slot} of {self.slots}")
        return self.base + slot * self.stride

    def view(self, slot: int) -> NDArray[np.uint8]:
        """A slot's bytes `[slot_nbytes]`, writable."""
        start = self.address(slot) - self.base
        return self._bytes[start : start + self.slot_nbytes]

    def close(self) -> None:
        """Give the memory back now. Views that are still held keep it until they die; the arena has no slots then."""
        self._bytes = np.empty(0, dtype=np.uint8)
        self.slots = 0
        mapping, self._map = self._map, None
        if mapping is not None:
            with contextlib.suppress(BufferError):  # a view is alive; the mapping dies with it
                mapping.close()

    def _advise(self, advice: int) -> None:
        """Ask for large pages; a system without them is no error."""
        assert self._map is not None
        with contextlib.suppress(OSError):  # a hint only: kernels built without large pages answer EINVAL
            self._map.madvise(advice)


class SlotTable:
    """Where each pool's slots are. Slots of equal size may change pools."""

    def __init__(self, arenas: Mapping[str, Arena]) -> None:
        self._arenas = dict(arenas)
        self._places = {name: [(name, slot) for slot in range(arena.slots)] for name, arena in arenas.items()}
        self._addresses = {name: [arena.address(slot) for slot in range(arena.slots)] for name, arena in arenas.items()}

    def address(self, pool: str, slot: int) -> int:
        """Where a slot starts."""
        return self._addresses[pool][slot]

    def view(self, pool: str, slot: int) -> NDArray[np.uint8]:
        """A slot's bytes, writable."""
        name, place = self._places[pool][slot]
        return self._arenas[name].view(place)

    def swap(self, pool: str, slot: int, other_pool: str, other_slot: int) -> None:
        """Two slots change places: the memory of one goes by the name of the other."""
        places, addresses = self._places, self._addresses
        places[pool][slot], places[other_pool][other_slot] = places[other_pool][other_slot], places[pool][slot]
        mine, other = addresses[pool], addresses[other_pool]
        mine[slot], other[other_slot] = other[other_slot], mine[slot]
