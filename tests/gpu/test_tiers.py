"""Experts of which a part is on the device: the host computes the others, and what is wanted often comes to stay.

Calls of single layers over made experts, each against the CPU's operation, bit for bit. The provider gives its experts
in memory that it spoils as soon as it may, and a device's memory holds NaN before anything was copied there.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import pytest
from gpu_experts import make_expert, on_the_cpu
from gpu_support import same_bits, torch

from picaflor.backends.cpu.memory import allocate
from picaflor.backends.cuda import exchange, interpret, many, promote, staging, tier
from picaflor.backends.cuda.exchange import HostExperts
from picaflor.backends.cuda.experts import expert_ffn
from picaflor.backends.cuda.tier import ExpertTier
from picaflor.errors import ReadFailed
from picaflor.formats.base import F32

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HIDDEN, INNER, EXPERTS, TOP_K = 64, 32, 8, 2
G64, G16, I8 = ("int4-grouped", 64), ("int4-grouped", 16), ("int8-row", 0)
KINDS = [(G64, G64, G16)] * 5 + [(I8, I8, I8)] * 3
LAYERS = {3: 0, 4: 100}

if interpret.active():
    interpret.round_once()


@dataclass
class Lease:
    """One batch at a time, last expert first; the memory of the one before is spoiled."""

    provider: Provider
    layer: int
    experts: list[int]
    given: list[Any] = field(default_factory=list)

    def batches(self) -> Iterator[tuple[Any, Any]]:
        """(numbers, addresses)."""
        order, batch = self.experts[::-1], self.provider.batch
        for first in range(0, len(order), batch):
            self.spoil()
            numbers = order[first : first + batch]
            given = [self.copy(number) for number in numbers]
            yield np.array(numbers, np.int32), np.array([copied.ctypes.data for copied in given], np.uint64)

    def copy(self, number: int) -> Any:
        """An expert in memory of this lease."""
        if self.provider.fails == (self.layer, number):
            raise ReadFailed(f"expert {number} of layer {self.layer}")
        slot = self.provider.made[self.layer][number][1]
        copied = allocate(slot.nbytes)
        copied[:] = slot
        self.given.append(copied)
        return copied

    def spoil(self) -> None:
        """What was given is not there any more."""
        for memory in self.given:
            memory[:] = 0xEE


@dataclass
class Provider:
    """All experts, in the memory of the host. `fails`: one that cannot be read; `batch`: so many at once."""

    made: dict[int, list[Any]]
    asked: list[tuple[int, list[int]]] = field(default_factory=list)
    fails: tuple[int, int] | None = None
    left: list[tuple[int, list[int]]] = field(default_factory=list)
    batch: int = 1

    def elsewhere(self, layer: int, experts: Any) -> None:
        """They are on the device."""
        self.left.append((layer, sorted(experts.tolist())))

    @contextmanager
    def acquire(self, layer: int, experts: Any) -> Iterator[Lease]:
        """A lease."""
        self.asked.append((layer, experts.tolist()))
        lease = Lease(self, layer, experts.tolist())
        try:
            yield lease
        finally:
            lease.spoil()


class Rig:
    """A tier of some slots over two layers."""

    def __init__(self, slots: int) -> None:
        self.made = {
            layer: [make_expert(seed + n, kind, HIDDEN, INNER) for n, kind in enumerate(KINDS)]
            for layer, seed in LAYERS.items()
        }
        self.provider = Provider(self.made)
        self.used: list[tuple[int, list[str]]] = []
        host = HostExperts(1, "standard", lambda layer, formats: self.used.append((layer, list(formats))))
        self.tier = ExpertTier(DEVICE, "standard", free=lambda: 1 << 30, notice=lambda text: None, host=host)
        self.tier.most_slots = slots
        self.held = {
            layer: self.tier.add_layer(layer, [layout for layout, _ in made], hidden=HIDDEN, top_k=TOP_K)
            for layer, made in self.made.items()
        }
        self.rng = np.random.default_rng(5)
        self.tier.prepare(self.provider)
        self.tier._slots.memory.fill_(0xFF)  # type: ignore[union-attr]

    def step(self, *choices: Sequence[Sequence[int]]) -> None:
        """A step: for each layer the choices of its rows. Both layers' sums must be right."""
        if DEVICE.type != "cpu":
            torch.cuda.synchronize()  # so that counters can be exact
        self.tier.prepare(self.provider)
        for layer, chosen in zip(self.held, choices, strict=False):
            ids = np.array(chosen, np.int32)
            x = self.rng.standard_normal((len(ids), HIDDEN)).astype(np.float32)
            weights = self.rng.random(ids.shape, np.float32)
            found = self.call(layer, x, ids, weights)
            assert same_bits(found, on_the_cpu(self.made[layer], x, ids, weights, 2)), (layer, chosen)

    def call(self, layer: int, x: F32, ids: Any, weights: F32) -> F32:
        """One layer's sum."""
        held, tier = self.held[layer], self.tier
        rows, chosen, factors = (torch.from_numpy(values).to(DEVICE) for values in (x, ids, weights))
        out = torch.full(x.shape, float("nan"), device=DEVICE)
        if tier.splits(len(x)):
            exchange = tier.exchange
            assert exchange is not None
            exchange.ask(held, rows, chosen)
            exchange.mark()
            exchange.give(held, rows, chosen, factors, ())
            exchange.serve(held, len(x), self.provider)
            exchange.join(held, chosen, factors, out)
        else:
            tier.compute(held, rows, chosen, factors, out, self.provider)
        found: F32 = out.cpu().numpy()
        return found

    def here(self, layer: int = 3) -> list[int]:
        """Experts that a layer's table names, as the device and as the books have it."""
        live = self.held[layer].live
        kinds = live.there.kind_of.cpu().numpy()
        named: list[int] = np.flatnonzero(kinds >= 0).tolist()
        if not live.changed:
            assert named == np.flatnonzero(live.here).tolist() == sorted(self.held[layer].slots)
        return named


def test_what_is_wanted_often_comes_to_stay_and_is_then_computed_there() -> None:
    """Four slots, three of them to keep experts in. One step brings bytes to pinned memory, the next one sends them,
    the third one finds them. A warmer expert takes the slot of the coldest one when it is warmer by enough."""
    rig = Rig(4)
    counters = rig.tier.counters
    rig.step([[0, 1]])
    assert (counters.hits, counters.host, counters.sent, rig.here()) == (0, 2, 0, [])
    rig.step([[1, 0]])
    assert (counters.hits, counters.host, counters.sent, rig.here()) == (0, 4, 2, [])
    rig.step([[0, 1]])
    assert (counters.hits, counters.host, counters.sent, rig.here()) == (2, 4, 2, [0, 1])
    assert rig.provider.asked == [(3, [0, 1]), (3, [1, 0])]
    assert rig.provider.left == [(3, [0, 1])]
    rig.step([[0, 2]])
    rig.step([[0, 2]])
    rig.step([[2, 0]])
    assert (counters.hits, counters.host, counters.sent, rig.here()) == (6, 6, 3, [0, 1, 2])
    for _ in range(4):  # heat 4; those of the others are 6, 3 and 3
        rig.step([[7, 0]])
    assert rig.here() == [0, 1, 2]
    rig.step([[0, 7]])  # heat 5: more than 1.25 times 3 and one
    assert rig.here() == [0, 1, 2]
    assert rig.tier.held == 3
    rig.step([[0, 7]])  # 2 has gone before its slot is written to
    assert rig.here() == [0, 1]
    rig.step([[0, 7]])
    assert rig.here() == [0, 1, 7]
    assert rig.provider.left == [(3, [0, 1]), (3, [2]), (3, [7])]
    sizes = [layout.nbytes for layout, _ in rig.made[3]]
    assert counters.sent_bytes == sizes[0] + sizes[1] + sizes[2] + sizes[7]
    assert (counters.sent, counters.promoted) == (4, 4)
    assert counters.hits + counters.host == 2 * 13
    assert counters.host_bytes == 2 * sizes[0] + 2 * sizes[1] + 2 * sizes[2] + 6 * sizes[7]
    assert rig.used == [(3, ["int4-grouped", "int8-row"])]


class Lazy:
    """Copies when it is waited for, and no sooner: the last moment at which another thread may do it."""

    def __init__(self, *words: int) -> None:
        self._words: tuple[int, ...] | None = words

    def done(self) -> bool:
        """Not before somebody waited."""
        return self._words is None

    def result(self) -> None:
        """Copy."""
        if self._words is not None:
            ctypes.memmove(*self._words)
            self._words = None


@pytest.mark.parametrize(("slots", "most"), [(1, 8), (8, 8), (8, 64)])
def test_random_routes_over_two_layers_give_the_bits_of_the_cpu(
    slots: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few rows and many in turn: slots go from layer to layer, are taken by calls of many rows amid a promotion, or the
    host computes for these too. The host's memory is copied as late as can be."""
    monkeypatch.setattr(tier, "HOST_ROWS", most)
    monkeypatch.setattr(staging, "fill_later", Lazy)
    monkeypatch.setattr(promote, "fill_later", Lazy)
    rig = Rig(slots)
    rng = np.random.default_rng(slots)
    for number in range(8):
        many = number == 4
        rows = 9 if many else int(rng.integers(1, 3))
        count = EXPERTS if number % 2 else 4  # hot ones
        layers = list(LAYERS)[:1] if many else list(LAYERS)
        rig.step(*([rng.permutation(count)[:TOP_K].tolist() for _ in range(rows)] for _ in layers))
    counters = rig.tier.counters
    assert counters.host > 0
    assert rig.tier.held == len(rig.here(3)) + len(rig.here(4)) <= max(0, slots - max(1, slots // 4))


def test_a_copy_that_is_never_complete_is_never_named(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[Any, Any]] = []
    done = [False]

    class Never(staging.Sent):
        def done(self) -> bool:
            return done[0]

    def start(self: Any, pinned: Any, target: Any, after: Any) -> staging.Sent:
        started.append((pinned, target))
        target[: len(pinned) // 2].copy_(pinned[: len(pinned) // 2])
        return Never(None)

    monkeypatch.setattr(staging.Staging, "start", start)
    rig = Rig(4)
    for _ in range(8):
        rig.step([[0, 1]], [[2, 3]])
        assert rig.here(3) == rig.here(4) == []
    assert rig.tier.counters.hits == 0
    assert len(started) == 3  # as many as there are slots: what is on its way keeps its own
    for pinned, target in started:
        target.copy_(pinned)
    done[0] = True
    rig.step([[0, 1]], [[2, 3]])
    assert len(rig.here(3)) + len(rig.here(4)) == 3 == rig.tier.counters.hits


def test_a_prompt_fills_slots_and_is_computed_by_both_when_they_are_full() -> None:
    """Nine rows: sent for while there are slots without an expert."""
    rig = Rig(4)
    counters = rig.tier.counters
    rows = [[0, 1], [1, 2], [2, 0], [0, 1], [1, 2], [2, 0], [0, 1], [1, 2], [3, 0]]
    rig.step(rows)
    assert (counters.host, counters.sent, counters.hits) == (0, 4, 0)
    rig.step(rows[::-1])
    assert (counters.host, counters.sent, counters.hits) == (1, 4, 3)
    assert len(rig.here()) == 3


def test_a_read_that_fails_leaves_all_as_it_was() -> None:
    rig = Rig(8)
    rig.step([[0, 1]])
    many = [[0, 3], [4, 6], [1, 0], [3, 4], [0, 3], [1, 4], [0, 1], [3, 6], [4, 6]]
    for number, chosen in ((2, [[2, 0]]), (6, many)):
        rig.provider.fails = (3, number)
        with pytest.raises(ReadFailed, match=f"expert {number} of layer 3"):
            rig.step(chosen)
        rig.provider.fails = None
        rig.step(chosen)
        rig.step([[0, 1], [2, 3]], [[2, 0]])
    assert rig.tier.counters.hits > 0


def test_less_memory_and_another_provider_amid_promotions() -> None:
    rig = Rig(8)
    rig.step([[0, 1]])
    rig.step([[0, 1]])
    assert rig.tier.shrink()
    rig.step([[0, 1]])
    assert (rig.tier.slots, rig.here()) == (6, [])
    rig.step([[0, 1]])
    rig.provider = Provider(rig.made)
    rig.step([[0, 1]], [[0, 1]])
    assert rig.here() == []
    rig.step([[0, 1]])
    rig.step([[0, 1]])
    assert rig.here() == [0, 1]


def test_choices_outside_the_layer_are_named() -> None:
    rig = Rig(4)
    with pytest.raises(ValueError, match=r"outside 0 to 7: \[\[0, 8\]\]"):
        rig.tier.found(rig.held[3], np.array([[0, 8]], np.int32))


def test_memory_of_the_host_is_counted_where_experts_do_not_all_fit() -> None:
    rig = Rig(4)
    rig.tier.most_slots = None
    needed = rig.tier.experts * rig.tier.stride
    assert rig.tier.host_bytes(needed) == 0
    exchange = rig.tier.exchange
    assert exchange is not None
    found = rig.tier.host_bytes(needed - 1)
    assert found > promote.PROMOTE_BYTES + exchange._x.nbytes + exchange._results.nbytes


class Blocked:
    """Copies in another thread that begins when somebody waits; the first wait of `interrupted` ends without it."""

    every: ClassVar[list[Blocked]] = []

    def __init__(self, words: tuple[int, int, int], interrupted: bool) -> None:
        self._go, self._over, self._interrupted = threading.Event(), threading.Event(), interrupted
        self._thread = threading.Thread(target=self._run, args=words, daemon=True)
        self._thread.start()
        self.every.append(self)

    def _run(self, *words: int) -> None:
        self._go.wait()
        ctypes.memmove(*words)
        self._over.set()

    def done(self) -> bool:
        """Whether all was copied."""
        return self._over.is_set()

    def result(self) -> None:
        """Until all was copied."""
        if self._interrupted:
            self._interrupted = False
            raise KeyboardInterrupt
        self._go.set()
        self._thread.join()


@pytest.mark.parametrize("where", ["start", "host", "wait"])
def test_offers_that_fail_are_waited_for_and_forgotten(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two experts of a batch the second one cannot be started, the host's work fails, or a wait is interrupted.
    Copies that began end while their lease is held, and none of what they copied is ever used."""
    rig = Rig(8)
    rig.provider.batch = 2
    rig.step([[0, 1]])
    promotions = rig.tier._promotions
    assert promotions is not None
    buffers = len(promotions._buffers)
    monkeypatch.setattr(Blocked, "every", [])

    def fill(*words: int) -> Blocked:
        if where == "start" and Blocked.every:
            raise RuntimeError("no thread")
        return Blocked(words, where == "wait" and not Blocked.every)  # type: ignore[arg-type]

    def run(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(promote, "fill_later", fill)
        if where == "host":
            patch.setattr(HostExperts, "run", run)
        with pytest.raises(RuntimeError if where == "start" else KeyboardInterrupt):
            rig.step([[2, 3]])
    assert [job.done() for job in Blocked.every] == [True] * (1 if where == "start" else 2)
    assert promotions._offers == []
    rig.step([[0, 1]])
    assert rig.tier.held == 2
    for _ in range(3):
        rig.step([[2, 3]])
    assert rig.here() == [0, 1, 2, 3]
    assert sorted([*promotions._idle, *promotions._keys.values()]) == list(range(len(promotions._buffers)))
    assert len(promotions._buffers) <= buffers + 2


def test_a_prompt_keeps_what_it_wants_when_it_needs_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six experts are here, two others are warmer by far. A prompt that wants all eight must not put one of the two
    where one is that it has counted on."""
    monkeypatch.setattr(tier, "HOST_ROWS", 8)
    rig = Rig(8)
    rig.step([[0, 1], [2, 3], [4, 5]] * 3)
    for _ in range(3):
        rig.step([[6, 7]])
    assert rig.here() == [0, 1, 2, 3, 4, 5]
    rig.step([[0, 1], [2, 3], [4, 5], [6, 7], [0, 6], [1, 7], [2, 6], [3, 7], [4, 6]])


def test_an_expert_that_came_by_another_way_is_kept_once() -> None:
    """Two are on their way when a prompt sends for them too: the slots of the second copies are free again."""
    rig = Rig(8)
    rig.step([[0, 1]])
    rig.step([[0, 1]] * 9)
    rig.step([[0, 1]])
    assert (rig.tier.held, rig.tier.counters.sent) == (2, 4)
    rig.step([[2, 3], [4, 5], [2, 4]] * 3)  # as many as there are slots without an expert
    rig.step([[0, 1]])
    assert rig.here() == [0, 1, 2, 3, 4, 5]
    for _ in range(5):
        rig.step([[0, 1]], [[6, 7]])  # they take the slots of two others
    assert len(rig.here(3)) + len(rig.here(4)) == rig.tier.held == 6


class Order:
    """Launches that compute with experts, and copies to slots. An event is the number of launches it comes behind."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launched = 0
        self.read: dict[int, int] = {}
        self.written: list[tuple[Any, int]] = []
        self.memory: Any = None
        monkeypatch.setattr(staging.Staging, "used", lambda _: self.launched)
        monkeypatch.setattr(staging.Staging, "start", self.start)
        for module in (exchange, many):
            monkeypatch.setattr(module, "expert_ffn", self.compute)

    def slot(self, address: int) -> int:
        """Which one is there."""
        return int(address - self.memory.data_ptr()) // int(self.memory.shape[1])

    def compute(self, x: Any, ids: Any, weights: Any, table: Any, *others: Any, **options: Any) -> None:
        """The slots of this table are read."""
        self.launched += 1
        for address in table.addresses[table.kind_of >= 0][:, 0].tolist():
            self.read[self.slot(address)] = self.launched
        expert_ffn(x, ids, weights, table, *others, **options)

    def start(self, pinned: Any, target: Any, after: Any) -> staging.Sent:
        """Copy at once: (event, the last launch that read this slot)."""
        self.written.append((after, self.read.get(self.slot(target.data_ptr()), 0)))
        target.copy_(pinned)
        return staging.Sent(None)


def test_a_slot_is_written_to_behind_all_that_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a promotion, and by a prompt whose experts follow each other through the same slots."""
    monkeypatch.setattr(tier, "HOST_ROWS", 8)
    order = Order(monkeypatch)
    rig = Rig(2)
    order.memory = rig.tier._slots.memory  # type: ignore[union-attr]
    for _ in range(3):
        rig.step([[0, 1]])
    for _ in range(7):
        rig.step([[2, 3]])
    assert rig.here() == [3]
    assert [read > 0 for _, read in order.written] == [False, True]
    rig.step([[0, 1], [2, 3], [4, 5]] * 3)
    assert sum(read > 0 for _, read in order.written) > 3
    assert all(after >= read for after, read in order.written), order.written
