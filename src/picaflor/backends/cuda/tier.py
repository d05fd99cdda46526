"""Routed experts on a device: slots in its memory, filled from a provider's slots on the host, and calls of a layer.

Knows layouts, slots and heat; must not know families, files or who reads them. Where every expert fits, all are copied
before the first call and no call asks the host again. Else a call computes the experts that are here, then those that
are sent for; which ones were here changes no bit. Kernels find a slot only through a table, and a table names a slot
only when its copy comes before those kernels: a half-written one is never read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from picaflor.backends.api import I32, AheadProvider, ExpertLayout, ExpertLease, ExpertProvider
from picaflor.backends.cpu.early import MOST_ROWS
from picaflor.backends.cuda.early import EarlyRouter
from picaflor.backends.cuda.experts import ExpertTable, TableMaker, combine, counters, expert_ffn
from picaflor.backends.cuda.prepare import Prepared
from picaflor.backends.cuda.rows import Tensor
from picaflor.backends.cuda.staging import Staging
from picaflor.errors import OutOfBudget
from picaflor.sizes import format_bytes

SLACK_BYTES: Final = 64
ALIGN_BYTES: Final = 256
PASSING: Final = 8
"""Slots, at most, for experts that are computed once and not kept."""
COOLING: Final = 4096
"""Calls after which all heat is halved."""
Key = tuple[int, int]


@dataclass(slots=True, eq=False)
class Slot:
    """Room for one expert. `generation` counts what was copied here; `used`: event of the last call that read it."""

    number: int
    key: Key | None = None
    generation: int = 0
    used: Any = None


@dataclass(slots=True, eq=False)
class HeldLayer:
    """One layer's experts: layouts, where they are, how often they were wanted (a part of all layers' heat, which
    begins at `first`). `table` names all of them where all are on the device."""

    layer: int
    layouts: tuple[ExpertLayout, ...]
    hidden: int
    maker: TableMaker
    slots: dict[int, Slot] = field(default_factory=dict)
    heat: NDArray[np.float64] = field(init=False)
    first: int = 0
    early: EarlyRouter | None = None
    table: ExpertTable | None = None

    def __post_init__(self) -> None:
        self.heat = np.zeros(len(self.layouts))


@dataclass(slots=True)
class TierCounters:
    """What was found on the device and what was sent, in experts and bytes."""

    hits: int = 0
    sent: int = 0
    sent_bytes: int = 0
    promoted: int = 0


class ExpertTier:
    """All slots of one device. `free()` says how many bytes experts may take (asked when the first call comes);
    `notice` gets a line where that was too much. `version` changes with the memory of the slots. `most_slots`
    bounds them where it is set before the first call. `all_here`: every expert is, and no call asks the host.
    """

    def __init__(self, device: Any, precision: str, *, free: Callable[[], int], notice: Callable[[str], None]) -> None:
        self.counters = TierCounters()
        self.version = 0
        self.all_here = False
        self._device = device
        self._precision = precision
        self._free_bytes = free
        self._notice = notice
        self._layers: dict[int, HeldLayer] = {}
        self._provider: ExpertProvider | None = None
        self._memory: Tensor = None
        self._free: list[Slot] = []
        self._passing: list[Slot] = []
        self._kept: dict[Key, Slot] = {}
        self._slots: list[Slot] = []
        self._owners: NDArray[np.int64] = np.zeros(0, np.int64)
        self._heats: NDArray[np.float64] = np.zeros(0)
        self._staging: Staging | None = None
        self._calls = 0
        self.most_slots: int | None = None
        self._shrunk = False
        self._arrived: Tensor = None
        self._counters_kept: list[Tensor] = []

    # ---- recording ----

    def add_layer(self, layer: int, layouts: Sequence[ExpertLayout], *, hidden: int) -> HeldLayer:
        """A layer as it is recorded. Raises ValueError where shapes do not fit."""
        for number, expert in enumerate(layouts):
            inner = expert.gate.rows
            shapes = [(m.rows, m.cols) for m in (expert.gate, expert.up, expert.down)]
            if shapes != [(inner, hidden), (inner, hidden), (hidden, inner)]:
                raise ValueError(f"layer {layer}, expert {number}: gate, up, down are {shapes} for rows of {hidden}")
        known = self._layers.get(layer)
        if known is not None and known.layouts == tuple(layouts):
            return known
        held = HeldLayer(layer, tuple(layouts), hidden, TableMaker(layouts, self._device))
        self._layers[layer] = held
        self._forget()
        return held

    # ---- memory ----

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
        return 0 if self._memory is None else int(self._memory.shape[0])

    @property
    def held(self) -> int:
        """Experts that are on the device now."""
        return len(self._kept)

    def prepare(self, provider: ExpertProvider | None) -> None:
        """Take memory, and copy all experts where all fit. Called before each run; does nothing the second time."""
        if provider is None or not self._layers:
            return
        if provider is not self._provider:
            self._forget()
            self._provider = provider
        if self._memory is None:
            self._take()
        if self.slots >= self.experts and not self.all_here:
            for held in self._layers.values():
                self._bring_all(held, provider)
            self.all_here = True

    def shrink(self) -> bool:
        """Give a quarter of the slots back after the device ran out of memory. False where nothing is left to give."""
        slots = self.slots
        if slots <= 1 or self._shrunk:
            return False
        self._shrunk = True
        self.most_slots = max(1, slots * 3 // 4)
        self._forget()
        self._notice(
            f"the device is out of memory: expert slots go from {slots} to {self.most_slots} "
            f"({format_bytes(self.most_slots * self.stride)}); to cure: lower --vram, --ctx or --prefill-chunk"
        )
        return True

    def _take(self) -> None:
        room = self._free_bytes()
        wanted = min(self.experts, room // self.stride)
        if self.most_slots is not None:
            wanted = min(wanted, self.most_slots)
        if wanted < 1:
            raise OutOfBudget(
                f"one expert needs {format_bytes(self.stride)} of the device's memory, {format_bytes(room)} are left "
                "for experts: raise --vram, or lower --ctx or --prefill-chunk"
            )
        try:
            self._memory = torch.empty((wanted, self.stride), dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError as error:
            if self._shrunk:
                raise OutOfBudget(f"the device gives no memory for {wanted} expert slots: {error}") from error
            self._shrunk, self.most_slots = True, max(1, wanted * 3 // 4)
            self._notice(f"the device gives no memory for {wanted} expert slots: {self.most_slots} are taken")
            self._take()
            return
        every = [Slot(number) for number in range(wanted)]
        passing = 0 if wanted >= self.experts else min(PASSING, max(1, wanted // 4))
        self._passing, self._free, self._slots = every[:passing], every[passing:], every
        self._owners = np.full(wanted, -1, np.int64)
        self._heats = np.concatenate([held.heat for held in self._layers.values()])
        first = 0
        for held in self._layers.values():
            held.heat, held.first = self._heats[first : first + len(held.layouts)], first
            first += len(held.layouts)
        self._staging = Staging(self._device, self.stride)

    def _forget(self) -> None:
        """Nothing is here any more."""
        self.version += 1
        self.all_here = False
        self._memory, self._staging, self._free, self._passing, self._kept = None, None, [], [], {}
        self._provider = None
        for held in self._layers.values():
            held.slots, held.table = {}, None

    def _address(self, slot: Slot) -> int:
        return int(self._memory.data_ptr()) + slot.number * self.stride

    # ---- copies ----

    def _bring_all(self, held: HeldLayer, provider: ExpertProvider) -> None:
        missing = np.array([e for e in range(len(held.layouts)) if e not in held.slots], np.int32)
        if not len(missing):
            return
        with provider.acquire(held.layer, missing) as lease:
            for numbers, addresses in lease.batches():
                for number, address in zip(numbers.tolist(), addresses.tolist(), strict=True):
                    slot = self._free.pop()
                    self._send(held, number, address, slot)
                    self._keep(held, number, slot)
        self._settle()
        held.table = held.maker.make({number: self._address(slot) for number, slot in held.slots.items()})

    def _send(self, held: HeldLayer, number: int, address: int, slot: Slot) -> None:
        assert self._staging is not None
        nbytes = held.layouts[number].nbytes
        slot.generation += 1
        self._staging.send(address, nbytes, self._memory[slot.number], slot.used)
        self.counters.sent += 1
        self.counters.sent_bytes += nbytes

    def _settle(self) -> None:
        assert self._staging is not None
        self._staging.settle()

    def _keep(self, held: HeldLayer, number: int, slot: Slot) -> None:
        slot.key = (held.layer, number)
        held.slots[number] = slot
        self._kept[slot.key] = slot
        self._owners[slot.number] = held.first + number
        self.counters.promoted += 1

    def _drop(self, slot: Slot) -> None:
        assert slot.key is not None
        layer, number = slot.key
        del self._kept[slot.key]
        del self._layers[layer].slots[number]
        self._owners[slot.number] = -1
        slot.key = None

    # ---- calls ----

    def compute(
        self,
        held: HeldLayer,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        out: Tensor,
        provider: ExpertProvider,
        prepared: Sequence[Prepared] = (),
    ) -> None:
        """out = sum over k, in routing order, of weights[k] * expert[ids[k]](x). Raises ReadFailed.

        `prepared`: rows of x that exist already.
        """
        if self.all_here:
            assert held.table is not None
            counts = self._counts(held, ids)
            expert_ffn(x, ids, weights, held.table, out, self._precision, prepared=prepared, arrived=counts)
            return
        chosen: I32 = ids.cpu().numpy()
        if chosen.min() < 0 or chosen.max() >= len(held.layouts):
            raise ValueError(f"a row chose an expert outside 0 to {len(held.layouts) - 1}: {chosen.tolist()}")
        wanted = np.unique(chosen).tolist()
        self._warm(held, wanted)
        here = {number: held.slots[number] for number in wanted if number in held.slots}
        missing = np.array([number for number in wanted if number not in here], np.int32)
        self.counters.hits += len(here)
        part = _Part(held, x, ids, weights, out, prepared)
        if len(missing):
            with provider.acquire(held.layer, missing) as lease:
                self._expect(part, provider)
                for number, address in _each(lease):
                    self._bring(part, here, number, address)
            self._settle()
        self._compute(part, here)
        if not len(missing):
            self._expect(part, provider)
        if part.pairs is not None:
            combine(part.pairs, weights, out)

    def _expect(self, part: _Part, provider: ExpertProvider) -> None:
        """Tell a provider that reads ahead what the next call will probably want and the device does not have."""
        early = part.held.early
        if early is None or part.x.shape[0] > MOST_ROWS or not isinstance(provider, AheadProvider):
            return
        if not provider.reads_ahead(early.layer):
            return
        there = self._layers[early.layer].slots
        told = [number for number in early.choose(part.x).tolist() if number not in there]
        if told:
            provider.expect(early.layer, np.array(told, np.int32))

    def _bring(self, part: _Part, here: dict[int, Slot], number: int, address: int) -> None:
        """Send an expert to a slot and put that into `here`; where there is none left, those are computed first."""
        held = part.held
        slot = self._room(part, here, number)
        if slot is not None:
            self._send(held, number, address, slot)
            self._keep(held, number, slot)
        else:
            if part.passing is None or not part.passing:
                if part.passing is not None:
                    self._settle()
                    part.pairs = part.new_pairs() if part.pairs is None else part.pairs
                    self._compute(part, here)
                    here.clear()
                part.passing = list(self._passing)
            slot = part.passing.pop()
            self._send(held, number, address, slot)
        here[number] = slot

    def _compute(self, part: _Part, here: Mapping[int, Slot]) -> None:
        """The experts in these slots: the sum, or their single results where others come from elsewhere."""
        held = part.held
        table = held.maker.make({number: self._address(slot) for number, slot in here.items()})
        counts = self._counts(held, part.ids)
        expert_ffn(part.x, part.ids, part.weights, table, part.out, self._precision, pairs=part.pairs,
                   prepared=part.prepared, arrived=counts)  # fmt: skip
        assert self._staging is not None
        event = self._staging.used()
        for slot in here.values():
            slot.used = event

    def _counts(self, held: HeldLayer, ids: Tensor) -> Tensor:
        """Zeroed counters for one call, shared by all calls: each leaves them as it found them."""
        inner = max(layout.gate.rows for layout in held.layouts)
        needed = counters(ids.shape[0] * ids.shape[1], inner, held.hidden)
        if self._arrived is None or self._arrived.numel() < needed:
            self._arrived = torch.zeros(needed, dtype=torch.int32, device=self._device)
            self._counters_kept.append(self._arrived)  # a captured graph goes on using its own
        return self._arrived

    def _warm(self, held: HeldLayer, wanted: Sequence[int]) -> None:
        held.heat[list(wanted)] += 1.0
        self._calls += 1
        if self._calls % COOLING == 0:
            for other in self._layers.values():
                other.heat *= 0.5

    def _room(self, part: _Part, here: Mapping[int, Slot], number: int) -> Slot | None:
        """A slot to keep an expert in: a free one, or that of a colder expert that this call does not want."""
        if self._free:
            return self._free.pop()
        if part.coldest is None:
            part.coldest = self._by_heat(here)
        if not part.coldest:
            return None
        heat, slot = part.coldest[-1]
        if heat >= part.held.heat[number] and self._passing:
            return None
        part.coldest.pop()
        self._drop(slot)
        return slot

    def _by_heat(self, but: Mapping[int, Slot]) -> list[tuple[float, Slot]]:
        """The coldest of the kept slots, the coldest last, as many as a call can want; without those of `but`."""
        heats = np.full(len(self._slots), np.inf)
        taken = self._owners >= 0
        heats[taken] = self._heats[self._owners[taken]]
        heats[[slot.number for slot in but.values()]] = np.inf
        most = max(len(held.layouts) for held in self._layers.values())
        order = np.argsort(heats, kind="stable")[:most][::-1]
        return [(float(heats[n]), self._slots[n]) for n in order.tolist() if np.isfinite(heats[n])]


@dataclass(slots=True)
class _Part:
    """One call under way. `pairs`: single results, once it is known that not all experts are here together; `passing`:
    slots of those that are not kept, free for this call; `coldest`: slots that may be taken, the coldest last."""

    held: HeldLayer
    x: Tensor
    ids: Tensor
    weights: Tensor
    out: Tensor
    prepared: Sequence[Prepared]
    pairs: Tensor = None
    passing: list[Slot] | None = None
    coldest: list[tuple[float, Slot]] | None = None

    def new_pairs(self) -> Tensor:
        """Room for the results of each row and choice."""
        return torch.empty((*self.ids.shape, self.held.hidden), dtype=torch.float32, device=self.x.device)


def _each(lease: ExpertLease) -> Iterator[tuple[int, int]]:
    """(expert, address), as they come."""
    for numbers, addresses in lease.batches():
        yield from zip(numbers.tolist(), addresses.tolist(), strict=True)
