"""Routed experts on a device: slots in banks of its memory, filled from a provider's slots on the host.

Knows layouts, slots and heat; must not know families, files or who reads them. A bank is one buffer, as large as one
binding can be. Where every expert fits, all are copied before the first call; else a call computes the experts that
are here, then those that are sent for. Which ones were here changes no bit. Kernels find a slot only through a table
that was written after the slot.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import wgpu

from picaflor.backends.api import ExpertLayout, ExpertProvider
from picaflor.backends.vulkan.device import SLACK_BYTES, Buffer, Gpu
from picaflor.errors import OutOfBudget
from picaflor.sizes import format_bytes

ALIGN_BYTES: Final = 256
COOLING: Final = 4096
"""Calls after which all heat is halved."""
Key = tuple[int, int]


@dataclass(slots=True, eq=False)
class Slot:
    """Room for one expert."""

    bank: int
    offset: int
    key: Key | None = None


@dataclass(slots=True, eq=False)
class HeldLayer:
    """One layer's experts: layouts, where they are, how often they were wanted. `kinds`: layouts that differ, in the
    order of the experts; `kind_of`: the number of each expert's."""

    layer: int
    layouts: tuple[ExpertLayout, ...]
    slots: dict[int, Slot] = field(default_factory=dict)
    heat: dict[int, float] = field(default_factory=dict)
    kinds: list[ExpertLayout] = field(init=False)
    kind_of: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.kinds = list(dict.fromkeys(self.layouts))
        self.kind_of = [self.kinds.index(layout) for layout in self.layouts]

    @property
    def complete(self) -> bool:
        """Whether every expert is here."""
        return len(self.slots) == len(self.layouts)


@dataclass(slots=True)
class TierCounters:
    """What was found on the device and what was sent, in experts and bytes."""

    hits: int = 0
    sent: int = 0
    sent_bytes: int = 0


class ExpertTier:
    """All slots of one device. `free()` says how many bytes experts may take (asked when the first call comes).
    `version` changes with the memory of the slots. `most_slots` bounds them where it is set before the first call.
    """

    def __init__(self, gpu: Gpu, *, free: Callable[[], int]) -> None:
        self.counters = TierCounters()
        self.version = 0
        self.banks: list[Buffer] = []
        self.most_slots: int | None = None
        self._gpu = gpu
        self._free_bytes = free
        self._layers: dict[int, HeldLayer] = {}
        self._provider: ExpertProvider | None = None
        self._free: list[Slot] = []
        self._kept: dict[Key, Slot] = {}
        self._slots = 0
        self._calls = 0

    def add_layer(self, layer: int, layouts: Sequence[ExpertLayout]) -> HeldLayer:
        """A layer as it is recorded."""
        known = self._layers.get(layer)
        if known is not None and known.layouts == tuple(layouts):
            return known
        held = HeldLayer(layer, tuple(layouts))
        self._layers[layer] = held
        self._forget()
        return held

    @property
    def stride(self) -> int:
        """Bytes of one slot."""
        widest = max((layout.nbytes for held in self._layers.values() for layout in held.layouts), default=0)
        return -(-(widest + SLACK_BYTES) // ALIGN_BYTES) * ALIGN_BYTES

    @property
    def experts(self) -> int:
        """Experts of all layers."""
        return sum(len(held.layouts) for held in self._layers.values())

    @property
    def slots(self) -> int:
        """Slots that were taken, 0 before the first call."""
        return self._slots

    @property
    def all_here(self) -> bool:
        """Whether no call will ask the host."""
        return bool(self._layers) and all(held.complete for held in self._layers.values())

    def prepare(self, provider: ExpertProvider | None) -> None:
        """Take memory, and copy all experts where all fit. Called before each run; does nothing the second time."""
        if provider is None or not self._layers:
            return
        if provider is not self._provider:
            self._forget()
            self._provider = provider
        if not self._slots:
            self._take()
        if self._slots >= self.experts and not self.all_here:
            for held in self._layers.values():
                missing = np.array([e for e in range(len(held.layouts)) if e not in held.slots], np.int32)
                if len(missing):
                    with provider.acquire(held.layer, missing) as lease:
                        for numbers, addresses in lease.batches():
                            for number, address in zip(numbers.tolist(), addresses.tolist(), strict=True):
                                self.send(held, number, address, self._free.pop())

    def _take(self) -> None:
        room, stride = self._free_bytes(), self.stride
        wanted = min(self.experts, room // stride)
        if self.most_slots is not None:
            wanted = min(wanted, self.most_slots)
        if wanted < 1:
            raise OutOfBudget(
                f"one expert needs {format_bytes(stride)} of the device's memory, {format_bytes(room)} are left "
                "for experts: raise --vram, or lower --ctx or --prefill-chunk"
            )
        per_bank = (self._gpu.most_bytes - ALIGN_BYTES) // stride
        if per_bank < 1:
            raise OutOfBudget(
                f"one expert needs {format_bytes(stride)}, one binding of {self._gpu.name} holds "
                f"{format_bytes(self._gpu.most_bytes)}"
            )
        try:
            for first in range(0, wanted, per_bank):
                count = min(per_bank, wanted - first)
                bank = len(self.banks)
                self.banks.append(self._gpu.buffer(count * stride, "experts"))
                self._free += [Slot(bank, number * stride) for number in range(count)]
        except wgpu.GPUOutOfMemoryError as error:
            self._forget()
            raise OutOfBudget(
                f"the device gives no memory for {wanted} expert slots ({format_bytes(wanted * stride)}): lower --vram"
            ) from error
        self._slots = wanted
        self._free.reverse()

    def _forget(self) -> None:
        """Nothing is here any more."""
        self.version += 1
        self.banks, self._free, self._kept, self._provider, self._slots = [], [], {}, None, 0
        for held in self._layers.values():
            held.slots = {}

    def send(self, held: HeldLayer, number: int, address: int, slot: Slot) -> None:
        """Copy an expert to a slot; complete for all that is submitted from now on."""
        nbytes = -(-held.layouts[number].nbytes // 4) * 4
        raw = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
        self._gpu.write(self.banks[slot.bank], slot.offset, raw)
        self.counters.sent += 1
        self.counters.sent_bytes += held.layouts[number].nbytes
        slot.key = (held.layer, number)
        held.slots[number] = slot
        self._kept[slot.key] = slot

    def warm(self, held: HeldLayer, wanted: Sequence[int]) -> None:
        """Remember who was wanted."""
        for number in wanted:
            held.heat[number] = held.heat.get(number, 0.0) + 1.0
        self._calls += 1
        if self._calls % COOLING == 0:
            for other in self._layers.values():
                other.heat = {number: 0.5 * heat for number, heat in other.heat.items()}

    def room(self, busy: set[Key]) -> Slot | None:
        """A slot for an expert: a free one, or that of the coldest that is not busy; None where all are."""
        if self._free:
            return self._free.pop()
        idle = [slot for key, slot in self._kept.items() if key not in busy]
        if not idle:
            return None
        coldest = min(idle, key=self._heat)
        assert coldest.key is not None
        layer, number = coldest.key
        del self._kept[coldest.key]
        del self._layers[layer].slots[number]
        return coldest

    def _heat(self, slot: Slot) -> float:
        assert slot.key is not None
        layer, number = slot.key
        return self._layers[layer].heat.get(number, 0.0)
