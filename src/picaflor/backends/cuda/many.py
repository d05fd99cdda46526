"""A call of experts of many rows of which only some are on the device: the others are sent for.

Knows slots and the provider's lease; must not know calls of few rows, families or files. Those that are here and those
that find a slot are computed together; where there is no slot left the experts so far are computed first. A lease ends
before the device computes with what it gave: every byte was copied by then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from picaflor.backends.api import ExpertLease, ExpertProvider
from picaflor.backends.cuda.experts import combine, expert_ffn
from picaflor.backends.cuda.prepare import Prepared
from picaflor.backends.cuda.rows import Tensor
from picaflor.backends.cuda.slots import HeldLayer, Slot, Slots


@dataclass(slots=True)
class ManyRows:
    """One call under way. `counts` are zeroed counters for it.

    `pairs`: single results, once it is known that not all experts are here together; `_passing`: slots of those that
    are not kept, free for this call; `_coldest`: slots that may be taken, the coldest last.
    """

    slots: Slots
    precision: str
    held: HeldLayer
    x: Tensor
    ids: Tensor
    weights: Tensor
    out: Tensor
    prepared: Sequence[Prepared]
    counts: Tensor
    pairs: Tensor = None
    _here: dict[int, Slot] = field(default_factory=dict)
    _passing: list[Slot] | None = None
    _coldest: list[tuple[float, Slot]] | None = None

    def run(self, here: Mapping[int, Slot], missing: Sequence[int], provider: ExpertProvider) -> None:
        """Compute with the experts that are here and those that are missing. Raises ReadFailed."""
        self._here = dict(here)
        if missing:
            self.slots.before = self.slots.staging.used()
            with provider.acquire(self.held.layer, np.array(missing, np.int32)) as lease:
                try:
                    for number, address in each(lease, self.slots):
                        self._bring(number, address)
                finally:
                    self.slots.taken()
            self.slots.settle()
        self._compute()
        if self.pairs is not None:
            combine(self.pairs, self.weights, self.out)

    def _bring(self, number: int, address: int) -> None:
        """Send an expert to a slot; where there is none left, those that came before are computed first."""
        slot = self._room(number)
        if slot is not None:
            self.slots.send(self.held, number, address, slot)
            self.slots.keep(self.held, number, slot)
        else:
            if not self._passing:
                if self._passing is not None:
                    self.slots.settle()
                    self.pairs = self._new_pairs() if self.pairs is None else self.pairs
                    self._compute()
                    self._here.clear()
                self._passing = list(self.slots.passing)
            slot = self._passing.pop()
            self.slots.send(self.held, number, address, slot)
        self._here[number] = slot

    def _new_pairs(self) -> Tensor:
        """Room for the results of each row and choice."""
        return torch.empty((*self.ids.shape, self.held.hidden), dtype=torch.float32, device=self.x.device)

    def _compute(self) -> None:
        """The experts that are here: the sum, or their single results where others come later."""
        address: Callable[[Slot], int] = self.slots.address
        table = self.held.maker.make({number: address(slot) for number, slot in self._here.items()})
        expert_ffn(self.x, self.ids, self.weights, table, self.out, self.precision, pairs=self.pairs,
                   prepared=self.prepared, arrived=self.counts)  # fmt: skip
        self.slots.before = self.slots.staging.used()

    def _room(self, number: int) -> Slot | None:
        """A slot to keep an expert in: a free one, or that of a colder expert that this call does not want."""
        slots = self.slots
        if slots.free:
            return slots.free.pop()
        if self._coldest is None:
            self._coldest = self._by_heat()
        if not self._coldest:
            return None
        heat, slot = self._coldest[-1]
        if heat >= self.held.heat[number] and slots.passing:
            return None
        self._coldest.pop()
        slots.drop(slot)
        return slot

    def _by_heat(self) -> list[tuple[float, Slot]]:
        """The coldest of the kept slots, the coldest last, as many as a call can want; without those of this call."""
        heats = self.slots.heats()
        heats[[slot.number for slot in self._here.values()]] = np.inf
        order = np.argsort(heats, kind="stable")[: len(self.held.layouts)][::-1]
        return [(float(heats[n]), self.slots.every[n]) for n in order.tolist() if np.isfinite(heats[n])]


def each(lease: ExpertLease, slots: Slots) -> Iterator[tuple[int, int]]:
    """(expert, address), as they come; what was sent of a batch is taken before the next one is asked for."""
    for numbers, addresses in lease.batches():
        yield from zip(numbers.tolist(), addresses.tolist(), strict=True)
        slots.taken()
