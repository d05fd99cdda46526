"""Routed experts on a device: memory for them, what is copied there when, and how a call finds them.

Knows layouts and memory; must not know families, files or who reads experts. Where every expert fits, all are copied
before the first call and no call asks the host again. Else a call of few rows leaves what is not here to the host
(exchange.py), and what was wanted often enough comes to stay (promote.py); a call of many rows sends for the others
(many.py). Which ones were here changes no bit. A table names a slot only when its copy comes before the kernels that
are launched from then on: a half-written one is never read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from picaflor.backends.api import I32, ExpertLayout, ExpertProvider, SharingProvider
from picaflor.backends.cuda.exchange import HOST_ROWS, Exchange, HostExperts, exchange_bytes
from picaflor.backends.cuda.experts import FEW_ROWS, TableMaker, counters, expert_ffn
from picaflor.backends.cuda.many import ManyRows, each
from picaflor.backends.cuda.prepare import Prepared
from picaflor.backends.cuda.promote import PROMOTE_BYTES, Promotions
from picaflor.backends.cuda.rows import Tensor
from picaflor.backends.cuda.slots import HeldLayer, Slots, TierCounters
from picaflor.backends.cuda.staging import RING
from picaflor.errors import OutOfBudget
from picaflor.sizes import format_bytes

SLACK_BYTES: Final = 64
ALIGN_BYTES: Final = 256
PASSING: Final = 8
"""Slots, at most, for experts that are computed once and not kept."""


class ExpertTier:
    """All slots of one device. `free()` says how many bytes experts may take (asked when the first call comes);
    `notice` gets a line where that was too much. `host` computes what is not here in calls of few rows. `version`
    changes with the memory of the slots. `most_slots` bounds them where it is set before the first call. `all_here`:
    every expert is, and no call asks the host. `exchange`: what calls of few rows go through where that is not so.
    """

    def __init__(
        self,
        device: Any,
        precision: str,
        *,
        free: Callable[[], int],
        notice: Callable[[str], None],
        host: HostExperts,
    ) -> None:
        self.counters = TierCounters()
        self.version = 0
        self.all_here = False
        self.precision = precision
        self.exchange: Exchange | None = None
        self.most_slots: int | None = None
        self._device = device
        self._host = host
        self._free_bytes = free
        self._notice = notice
        self._layers: dict[int, HeldLayer] = {}
        self._provider: ExpertProvider | None = None
        self._sharing: SharingProvider | None = None
        self._slots: Slots | None = None
        self._promotions: Promotions | None = None
        self._shrunk = False
        self._arrived: Tensor = None
        self._counters_kept: list[Tensor] = []

    # ---- recording ----

    def add_layer(self, layer: int, layouts: Sequence[ExpertLayout], *, hidden: int, top_k: int) -> HeldLayer:
        """A layer as it is recorded. Raises ValueError where shapes do not fit."""
        for number, expert in enumerate(layouts):
            inner = expert.gate.rows
            shapes = [(m.rows, m.cols) for m in (expert.gate, expert.up, expert.down)]
            if shapes != [(inner, hidden), (inner, hidden), (hidden, inner)]:
                raise ValueError(f"layer {layer}, expert {number}: gate, up, down are {shapes} for rows of {hidden}")
        known = self._layers.get(layer)
        if known is not None and (known.layouts, known.top_k) == (tuple(layouts), top_k):
            return known
        held = HeldLayer(layer, tuple(layouts), hidden, top_k, TableMaker(layouts, self._device))
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
        return 0 if self._slots is None else len(self._slots.every)

    @property
    def held(self) -> int:
        """Experts that are on the device now."""
        return 0 if self._slots is None else len(self._slots.kept)

    def host_bytes(self, room: int) -> int:
        """Bytes of the host's memory that calls take where experts may have so many bytes of the device."""
        if self.most_slots is None and room // max(1, self.stride) >= self.experts:
            return 0
        pinned = RING * self.stride + max(PROMOTE_BYTES, self.stride)
        return pinned + exchange_bytes(tuple(self._layers.values()))

    def prepare(self, provider: ExpertProvider | None) -> None:
        """Take memory, and copy all experts where all fit; else let what has come be seen, and send what was taken.
        Called before each run."""
        if provider is None or not self._layers:
            return
        if provider is not self._provider:
            self._forget()
            self._provider = provider
            self._sharing = provider if isinstance(provider, SharingProvider) else None
        slots = self._take() if self._slots is None else self._slots
        if self._promotions is not None:
            slots.settle()  # a call of many rows may have failed between a copy and its end
            self._promotions.turn()
            if self._sharing is not None:
                for layer, numbers in slots.came().items():
                    self._sharing.elsewhere(layer, numbers)
        elif not self.all_here:
            for held in self._layers.values():
                self._bring_all(slots, held, provider)
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

    def _take(self) -> Slots:
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
            memory = torch.empty((wanted, self.stride), dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError as error:
            if self._shrunk:
                raise OutOfBudget(f"the device gives no memory for {wanted} expert slots: {error}") from error
            self._shrunk, self.most_slots = True, max(1, wanted * 3 // 4)
            self._notice(f"the device gives no memory for {wanted} expert slots: {self.most_slots} are taken")
            return self._take()
        passing = 0 if wanted >= self.experts else min(PASSING, max(1, wanted // 4))
        slots = self._slots = Slots(memory, self._layers, self._device, self.counters, passing=passing)
        if wanted < self.experts:
            self._promotions = Promotions(slots, self._layers, self._device)
            self.exchange = Exchange(self, self._host, self._device, tuple(self._layers.values()))
        return slots

    def _forget(self) -> None:
        """Nothing is here any more. Copies under way end before anybody else writes to their memory."""
        if self._slots is not None:
            self._slots.staging.settle()
        self.version += 1
        self.all_here = False
        self._slots, self._promotions, self.exchange, self._provider = None, None, None, None
        for held in self._layers.values():
            held.slots, held.table = {}, None

    def _bring_all(self, slots: Slots, held: HeldLayer, provider: ExpertProvider) -> None:
        missing = np.array([e for e in range(len(held.layouts)) if e not in held.slots], np.int32)
        if len(missing):
            with provider.acquire(held.layer, missing) as lease:
                try:
                    for number, address in each(lease, slots):
                        slot = slots.free.pop()
                        slots.send(held, number, address, slot)
                        slots.keep(held, number, slot)
                finally:
                    slots.taken()
        slots.settle()
        held.live.push()

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
        counts = self.counts(held, ids)
        if self.all_here:
            expert_ffn(x, ids, weights, held.live.there, out, self.precision, prepared=prepared, arrived=counts)
            return
        assert self._slots is not None
        wanted = self._wanted(held, ids.cpu().numpy())
        here = {number: held.slots[number] for number in wanted if number in held.slots}
        self.counters.hits += len(here)
        call = ManyRows(self._slots, self.precision, held, x, ids, weights, out, prepared, counts)
        call.run(here, [number for number in wanted if number not in here], provider)

    def splits(self, rows: int) -> bool:
        """Whether a step of so many rows leaves what is not here to the host. A prompt sends for experts while slots
        are free: it wants many at once, and fills them sooner than steps of few rows do."""
        if self._slots is None or self.exchange is None:
            return False
        return rows <= (FEW_ROWS if self._slots.free else HOST_ROWS)

    def found(self, held: HeldLayer, chosen: I32) -> NDArray[np.bool_]:
        """Which of these choices are on the device, for a call of few rows. They are counted."""
        if held.live.changed:
            raise RuntimeError(f"layer {held.layer}: its table was changed amid a step")
        wanted = self._wanted(held, chosen)
        here = held.live.here
        self.counters.hits += int(np.count_nonzero(here[wanted]))
        return here[chosen]

    def offers(self, held: HeldLayer, numbers: I32, addresses: NDArray[np.uint64]) -> AbstractContextManager[None]:
        """Meanwhile experts that are worth a slot are taken from these addresses."""
        assert self._promotions is not None
        return self._promotions.offers(held, numbers, addresses)

    def computed(self, held: HeldLayer, numbers: I32) -> None:
        """The host computed these."""
        self.counters.host += len(numbers)
        self.counters.host_bytes += sum(held.layouts[number].nbytes for number in numbers.tolist())

    def here(self, layer: int) -> NDArray[np.bool_]:
        """Which experts of a layer are on the device."""
        return self._layers[layer].live.here

    def counts(self, held: HeldLayer, ids: Tensor) -> Tensor:
        """Zeroed counters for one call, shared by all calls: each leaves them as it found them."""
        inner = max(layout.gate.rows for layout in held.layouts)
        needed = counters(ids.shape[0] * ids.shape[1], inner, held.hidden)
        if self._arrived is None or self._arrived.numel() < needed:
            self._arrived = torch.zeros(needed, dtype=torch.int32, device=self._device)
            self._counters_kept.append(self._arrived)  # a captured graph goes on using its own
        return self._arrived

    def _wanted(self, held: HeldLayer, chosen: I32) -> list[int]:
        """The distinct ones of these choices, ascending; their experts get warmer."""
        wanted = sorted(set(chosen.ravel().tolist()))
        if wanted[0] < 0 or wanted[-1] >= len(held.layouts):
            raise ValueError(f"a row chose an expert outside 0 to {len(held.layouts) - 1}: {chosen.tolist()}")
        assert self._slots is not None
        self._slots.warm(held, wanted)
        return wanted
