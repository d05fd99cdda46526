"""Routed experts: stacks by kind, filled from a provider's slots; gathered products over (row, choice) pairs.

Knows layouts, slots and pairs; must not know families, files or who reads them. Memory is one for host and device.
Where all experts fit beside the rest, they are copied once into stacks that no call leaves; else a call takes what it
needs from the provider's slots, part by part, and is done with a part before the next one comes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from picaflor.backends.api import I32, ExpertLayout, ExpertProvider, MatrixLayout
from picaflor.backends.metal import layout
from picaflor.backends.metal.layout import Held
from picaflor.backends.metal.library import Array, copied, mx, on_host
from picaflor.backends.metal.products import gathered
from picaflor.backends.metal.rows import silu_mul
from picaflor.formats import REGISTRY

U8 = NDArray[np.uint8]
Kind = tuple[tuple[str, int, int, int], ...]
"""Format, rows, columns and group size of gate, up and down."""
MOST_GROWTH = 1.75
"""How much larger than a stored expert MLX's layout of it can be: two passes of group size 48."""


def kind_of(expert: ExpertLayout) -> Kind:
    """What experts of one stack have in common."""
    return tuple((m.format, m.rows, m.cols, m.group_size) for m in (expert.gate, expert.up, expert.down))


@dataclass(frozen=True, slots=True)
class Stack:
    """Experts of one kind; `place` is the number in the stack of each expert of the layer that is in it."""

    gate: Held
    up: Held
    down: Held
    place: dict[int, int]

    def arrays(self) -> list[Array]:
        """All of it."""
        return [array for part in (self.gate, self.up, self.down) for array in layout.arrays(part)]


@dataclass(slots=True, eq=False)
class Layer:
    """One layer's experts: layouts, and stacks of all of them where they are held."""

    number: int
    layouts: tuple[ExpertLayout, ...]
    stacks: list[Stack] = field(default_factory=list)
    straight: bool = False
    """Whether one stack has all, in order: ids are numbers in the stack."""


@dataclass(slots=True)
class ExpertCounters:
    """Experts that were copied, and their bytes."""

    copied: int = 0
    copied_bytes: int = 0


@dataclass(slots=True, eq=False)
class Experts:
    """All layers. `free()`: bytes that experts may take, asked when the first call comes."""

    free: Callable[[], int]
    counters: ExpertCounters = field(default_factory=ExpertCounters)
    held: bool = False
    _layers: dict[int, Layer] = field(default_factory=dict)
    _provider: ExpertProvider | None = None

    def add_layer(self, number: int, layouts: Sequence[ExpertLayout]) -> Layer:
        """A layer as it is recorded."""
        known = self._layers.get(number)
        if known is not None and known.layouts == tuple(layouts):
            return known
        self._layers[number] = Layer(number, tuple(layouts))
        self._provider = None
        return self._layers[number]

    @property
    def stored_bytes(self) -> int:
        """Bytes of all experts as they are stored."""
        return sum(expert.nbytes for known in self._layers.values() for expert in known.layouts)

    @property
    def nbytes(self) -> int:
        """Bytes of all stacks that are held."""
        return sum(
            int(array.nbytes) for known in self._layers.values() for stack in known.stacks for array in stack.arrays()
        )

    def prepare(self, provider: ExpertProvider | None) -> None:
        """Copy all experts where all fit. Called before each run; does nothing the second time."""
        if provider is None or provider is self._provider:
            return
        self._provider = provider
        for known in self._layers.values():
            known.stacks, known.straight = [], False
        self.held = self.stored_bytes * MOST_GROWTH <= self.free()
        if self.held:
            for known in self._layers.values():
                self._hold(known, provider)

    def _hold(self, known: Layer, provider: ExpertProvider) -> None:
        slots: dict[int, U8] = {}
        with provider.acquire(known.number, np.arange(len(known.layouts), dtype=np.int32)) as lease:
            for numbers, addresses in lease.batches():
                for number, address in zip(numbers.tolist(), addresses.tolist(), strict=True):
                    slots[number] = _slot(address, known.layouts[number].nbytes).copy()
        known.stacks = self._stacks(known, slots)
        known.straight = len(known.stacks) == 1
        mx.eval(*(array for stack in known.stacks for array in stack.arrays()))

    def _stacks(self, known: Layer, slots: dict[int, U8]) -> list[Stack]:
        """The experts in `slots`, one stack per kind, in order of their numbers."""
        kinds: dict[Kind, list[int]] = {}
        for number in sorted(slots):
            kinds.setdefault(kind_of(known.layouts[number]), []).append(number)
        self.counters.copied += len(slots)
        self.counters.copied_bytes += sum(known.layouts[number].nbytes for number in slots)
        return [self._stack(known, members, slots) for members in kinds.values()]

    def _stack(self, known: Layer, members: list[int], slots: dict[int, U8]) -> Stack:
        parts: list[Held] = []
        for which in ("gate", "up", "down"):
            layouts: list[MatrixLayout] = [getattr(known.layouts[number], which) for number in members]
            first = layouts[0]
            sizes = (first.rows, first.cols, first.group_size)
            planes = [
                np.stack([
                    slots[number][m.offsets[p] : m.offsets[p] + plane.nbytes(*sizes)]
                    for number, m in zip(members, layouts, strict=True)
                ])
                for p, plane in enumerate(REGISTRY[first.format].planes)
            ]  # fmt: skip
            parts.append(layout.held(first.format, (first.rows, first.cols), first.group_size, planes))
        gate, up, down = parts
        return Stack(gate, up, down, {number: place for place, number in enumerate(members)})

    # ---- calls ----

    def compute(self, known: Layer, x: Array, ids: Array, weights: Array, provider: ExpertProvider) -> Array:
        """sum over k of weights[k] * expert[ids[k]](x), `[rows, hidden]`. Raises ReadFailed."""
        rows, top_k = ids.shape
        if known.straight:
            results = _pairs(known.stacks[0], x, ids.reshape(-1).astype(mx.uint32), _rows_of(rows, top_k))
        else:
            chosen: I32 = on_host(ids)
            if chosen.min() < 0 or chosen.max() >= len(known.layouts):
                raise ValueError(f"a row chose an expert outside 0 to {len(known.layouts) - 1}: {chosen.tolist()}")
            pairs: list[Array] = [None] * chosen.size
            for stack in known.stacks or self._sent(known, chosen, provider):
                self._some(stack, x, chosen, pairs)
            results = mx.stack(pairs)
        return (results.reshape(rows, top_k, -1) * weights[:, :, None]).sum(axis=1)

    def _sent(self, known: Layer, chosen: I32, provider: ExpertProvider) -> Iterable[Stack]:
        """Stacks of what the provider gives, part by part; each is computed before the next one comes."""
        with provider.acquire(known.number, np.unique(chosen).astype(np.int32)) as lease:
            for numbers, addresses in lease.batches():
                slots = {
                    number: _slot(address, known.layouts[number].nbytes)
                    for number, address in zip(numbers.tolist(), addresses.tolist(), strict=True)
                }
                yield from self._stacks(known, slots)

    def _some(self, stack: Stack, x: Array, chosen: I32, pairs: list[Array]) -> None:
        """The pairs whose expert is in a stack."""
        flat = chosen.reshape(-1)
        mine = np.flatnonzero(np.isin(flat, list(stack.place)))
        if not len(mine):
            return
        numbers = copied(np.array([stack.place[number] for number in flat[mine].tolist()], np.uint32))
        results = _pairs(stack, x, numbers, copied((mine // chosen.shape[1]).astype(np.int32)))
        mx.eval(results)
        for place, pair in enumerate(mine.tolist()):
            pairs[pair] = results[place]


def _rows_of(rows: int, top_k: int) -> Array:
    return mx.repeat(mx.arange(rows), top_k)


def _pairs(stack: Stack, x: Array, numbers: Array, rows: Array) -> Array:
    """expert(x) of each pair, `[pairs, hidden]`."""
    given = x[rows]
    hidden = silu_mul(gathered(given, stack.gate, numbers), gathered(given, stack.up, numbers))
    return gathered(hidden, stack.down, numbers)


def _slot(address: int, nbytes: int) -> U8:
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
