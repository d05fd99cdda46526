"""Experts that come to stay on a device while others are computed: which are worth it, and the way of their bytes.

Knows slots, heat and pinned buffers; must not know calls, families or who reads experts. Bytes are taken while their
lease is held, and sent between two steps, on a stream of their own. A slot is named in its table when its copy is
complete; one that gets another expert is left out of its table first, and written to behind all that may read it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from picaflor.backends.api import I32
from picaflor.backends.cuda.rows import Tensor
from picaflor.backends.cuda.slots import HeldLayer, Key, Slot, Slots
from picaflor.backends.cuda.staging import Sent, fill_later, see_out

PROMOTE_BYTES: Final = 64 << 20
"""Most bytes in pinned buffers: what is taken in one step and what is on its way; one expert at least."""
HOTTER: Final = 1.25
MARGIN: Final = 1.0
"""An expert takes the slot of one that is colder by this factor and by so many calls more: two that are wanted equally
often would else take turns, at the price of a copy each time."""


@dataclass(slots=True, eq=False)
class Offer:
    """An expert's bytes in a pinned buffer: all of them once `taken` is done; None before the copy was begun."""

    key: Key
    pinned: Tensor
    taken: Future[Any] | None = None


@dataclass(frozen=True, slots=True)
class Flight:
    """A copy to a slot as that was at `generation`."""

    offer: Offer
    slot: Slot
    generation: int
    sent: Sent


class Promotions:
    """Offers of one step and copies under way."""

    def __init__(self, slots: Slots, layers: Mapping[int, HeldLayer], device: Any) -> None:
        self._slots = slots
        self._layers = layers
        self._real = device.type != "cpu"
        self._stride = int(slots.memory.shape[1])
        self._most = max(1, PROMOTE_BYTES // self._stride)
        self._buffers: dict[int, Tensor] = {}
        self._idle: list[int] = []
        self._keys: dict[Key, int] = {}
        self._offers: list[Offer] = []
        self._flights: list[Flight] = []
        self._cold: NDArray[np.float64] | None = None

    # ---- while a lease is held ----

    @contextmanager
    def offers(self, held: HeldLayer, numbers: I32, addresses: NDArray[np.uint64]) -> Iterator[None]:
        """Take those that are worth a slot from these addresses, where they stay until this ends. Nothing of a batch
        is kept where this or what is done meanwhile fails."""
        first = len(self._offers)
        try:
            for number, address in zip(numbers.tolist(), addresses.tolist(), strict=True):
                if self._is_worth(held, number):
                    self._take(held, number, address)
            yield
            for offer in self._offers[first:]:
                assert offer.taken is not None
                offer.taken.result()
        except BaseException:
            self._withdraw(first)
            raise

    def _withdraw(self, first: int) -> None:
        """Forget the offers from this one on. Their copies end first: sources and buffers get other bytes then."""
        offers = self._offers[first:]
        del self._offers[first:]
        for offer in offers:
            if offer.taken is not None:
                see_out(offer.taken)
            self._end(offer)

    def _is_worth(self, held: HeldLayer, number: int) -> bool:
        if (held.layer, number) in self._keys or len(self._keys) >= self._most:
            return False
        place = len(self._offers) - len(self._slots.free)
        if place < 0:
            return True
        if self._cold is None:
            heats = self._slots.heats()
            most = min(self._most, len(heats))
            self._cold = np.sort(np.partition(heats, most - 1)[:most])
        return place < len(self._cold) and _hotter(held, number, float(self._cold[place]))

    def _take(self, held: HeldLayer, number: int, address: int) -> None:
        place = self._idle[-1] if self._idle else len(self._buffers)
        if place not in self._buffers:
            self._buffers[place] = torch.empty(self._stride, dtype=torch.uint8, pin_memory=self._real)
            self._idle.append(place)
        pinned = self._buffers[place][: held.layouts[number].nbytes]
        offer = Offer((held.layer, number), pinned)
        self._keys[offer.key] = self._idle.pop()
        self._offers.append(offer)
        offer.taken = fill_later(pinned.data_ptr(), address, len(pinned))

    # ---- between two steps ----

    def turn(self) -> None:
        """Name what has come, send what was taken, and let all that follows see what is where."""
        done = [flight for flight in self._flights if flight.sent.done()]
        self._flights = [flight for flight in self._flights if flight not in done]
        for flight in done:
            self._land(flight)
        offers, self._offers, self._cold = self._offers, [], None
        chosen = [(offer, slot) for offer in offers if (slot := self._room(offer)) is not None]
        self._slots.push()
        after = self._slots.staging.used() if chosen else None
        for offer, slot in chosen:
            sent = self._slots.start(offer.pinned, slot, after)
            self._flights.append(Flight(offer, slot, slot.generation, sent))

    def _land(self, flight: Flight) -> None:
        self._end(flight.offer)
        layer, number = flight.offer.key
        held, slot = self._layers[layer], flight.slot
        if flight.generation == slot.generation and number not in held.slots:
            self._slots.keep(held, number, slot)
        else:  # a call of many rows has sent it meanwhile
            self._slots.free.append(slot)

    def _room(self, offer: Offer) -> Slot | None:
        """A free slot, or that of an expert that is colder by enough; None: what was taken is not sent."""
        slots = self._slots
        layer, number = offer.key
        held = self._layers[layer]
        if number not in held.slots:
            if slots.free:
                return slots.free.pop()
            heats = slots.heats()
            place = int(np.argmin(heats))
            if _hotter(held, number, float(heats[place])):
                slots.drop(slots.every[place])
                return slots.every[place]
        self._end(offer)
        return None

    def _end(self, offer: Offer) -> None:
        self._idle.append(self._keys.pop(offer.key))


def _hotter(held: HeldLayer, number: int, coldest: float) -> bool:
    return float(held.heat[number]) > HOTTER * coldest + MARGIN
