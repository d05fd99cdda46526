"""Slots of a device's memory, one expert each: what is where, what may go, and how bytes get there.

Knows layouts, tables, heat and copies; must not know which call wants an expert, or when it comes to stay. Kernels find
a slot only through a table, and `keep` and `drop` change a layer's table and books together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from picaflor.backends.api import I32, ExpertLayout
from picaflor.backends.cuda.early import EarlyRouter
from picaflor.backends.cuda.experts import LayerTable, TableMaker
from picaflor.backends.cuda.rows import Tensor
from picaflor.backends.cuda.staging import Sent, Staging

COOLING: Final = 4096
"""Calls after which all heat is halved."""
Key = tuple[int, int]
"""Layer and number of an expert."""


@dataclass(slots=True, eq=False)
class Slot:
    """Room for one expert. `generation` counts what was copied here."""

    number: int
    key: Key | None = None
    generation: int = 0


@dataclass(slots=True, eq=False)
class HeldLayer:
    """One layer's experts: layouts, where they are, how often they were wanted (a part of all layers' heat, which
    begins at `first`). `table` names those of `slots`, and lives as long as the memory of the slots."""

    layer: int
    layouts: tuple[ExpertLayout, ...]
    hidden: int
    top_k: int
    maker: TableMaker
    slots: dict[int, Slot] = field(default_factory=dict)
    heat: NDArray[np.float64] = field(init=False)
    first: int = 0
    early: EarlyRouter | None = None
    table: LayerTable | None = None

    def __post_init__(self) -> None:
        self.heat = np.zeros(len(self.layouts))

    @property
    def live(self) -> LayerTable:
        """The table, while there is memory."""
        assert self.table is not None
        return self.table


@dataclass(slots=True)
class TierCounters:
    """What was found on the device, what the host computed, what was sent and what came to stay, in experts and
    bytes."""

    hits: int = 0
    host: int = 0
    host_bytes: int = 0
    sent: int = 0
    sent_bytes: int = 0
    promoted: int = 0


class Slots:
    """All slots in `memory`, uint8 `[slots, bytes]`; the first `passing` of them keep nothing.

    `before`: an event of the computing stream behind all that read slots which are written to now.
    """

    def __init__(
        self,
        memory: Tensor,
        layers: Mapping[int, HeldLayer],
        device: Any,
        counters: TierCounters,
        *,
        passing: int,
    ) -> None:
        every = [Slot(number) for number in range(memory.shape[0])]
        self.memory = memory
        self.every = every
        self.passing, self.free = every[:passing], every[passing:]
        self.kept: dict[Key, Slot] = {}
        self.staging = Staging(device, int(memory.shape[1]))
        self.before: Any = None
        self._came: list[Key] = []
        self._layers = layers
        self._counters = counters
        self._owners = np.full(len(every), -1, np.int64)
        self._heats = np.concatenate([held.heat for held in layers.values()])
        self._unsettled = False
        self._calls = 0
        first = 0
        for held in layers.values():
            held.heat, held.first = self._heats[first : first + len(held.layouts)], first
            first += len(held.layouts)
            held.slots, held.table = {}, LayerTable(held.maker, device)

    def address(self, slot: Slot) -> int:
        """Where a slot starts on the device."""
        return int(self.memory.data_ptr()) + slot.number * int(self.memory.shape[1])

    # ---- copies ----

    def send(self, held: HeldLayer, number: int, address: int, slot: Slot) -> None:
        """Copy an expert from the host's memory, which stays as it is until `taken`; complete for what is launched
        after `settle`."""
        slot.generation += 1
        self.staging.send(address, held.layouts[number].nbytes, self.memory[slot.number], self.before)
        self._unsettled = True
        self._count(held.layouts[number].nbytes)

    def taken(self) -> None:
        """Until the host's memory of all that was sent may change."""
        self.staging.taken()

    def start(self, pinned: Tensor, slot: Slot, after: Any) -> Sent:
        """Copy an expert from pinned memory behind the event `after`; nothing waits for it."""
        slot.generation += 1
        self._count(len(pinned))
        return self.staging.start(pinned, self.memory[slot.number][: len(pinned)], after)

    def _count(self, nbytes: int) -> None:
        self._counters.sent += 1
        self._counters.sent_bytes += nbytes

    def settle(self) -> None:
        """What was sent is complete for all that is launched from now on."""
        if self._unsettled:
            self.staging.settle()
            self._unsettled = False

    def push(self) -> None:
        """Let all that is launched from now on see what is where."""
        for held in self._layers.values():
            held.live.push()

    # ---- books ----

    def keep(self, held: HeldLayer, number: int, slot: Slot) -> None:
        """Name a slot in its layer's table."""
        slot.key = (held.layer, number)
        held.slots[number] = slot
        self.kept[slot.key] = slot
        self._owners[slot.number] = held.first + number
        held.live.put(number, self.address(slot))
        self._came.append(slot.key)
        self._counters.promoted += 1

    def drop(self, slot: Slot) -> None:
        """Leave a slot out of its layer's table."""
        assert slot.key is not None
        layer, number = slot.key
        del self.kept[slot.key], self._layers[layer].slots[number]
        self._layers[layer].live.put(number, 0)
        self._owners[slot.number] = -1
        slot.key = None

    def came(self) -> dict[int, I32]:
        """By layer, what was named since the last question and still is."""
        found: dict[int, list[int]] = {}
        for layer, number in self._came:
            if (layer, number) in self.kept:
                found.setdefault(layer, []).append(number)
        self._came.clear()
        return {layer: np.array(numbers, np.int32) for layer, numbers in found.items()}

    def warm(self, held: HeldLayer, wanted: Sequence[int]) -> None:
        """These experts are wanted by a call."""
        held.heat[list(wanted)] += 1.0
        self._calls += 1
        if self._calls % COOLING == 0:
            self._heats *= 0.5

    def heats(self) -> NDArray[np.float64]:
        """By slot, the heat of the expert that is kept there, infinite for a slot without one."""
        found = np.full(len(self.every), np.inf)
        taken = self._owners >= 0
        found[taken] = self._heats[self._owners[taken]]
        return found
