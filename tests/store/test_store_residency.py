"""The state machine of residency: every sequence of events up to some length, and random longer ones."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from picaflor.store.residency import TRANSITIONS, Event, IllegalTransition, Residency
from picaflor.store.types import RAM, Copy, ExpertKey, State, Tier

VRAM = Tier("vram", 1)
A, B = ExpertKey(3, 0), ExpertKey(3, 1)
POOLS = {"ram": 1, "vram": 2}


class FakeDevice:
    """Plays a device: knows which slots a read still writes to, and what each slot holds."""

    def __init__(self) -> None:
        self.residency = Residency(POOLS)
        self.reads: dict[int, tuple[ExpertKey, Tier, str, str, int]] = {}  # by generation: where a read writes
        self.finished: list[tuple[ExpertKey, Tier, str, int]] = []
        self.content: dict[tuple[str, int], int] = {}  # (pool, slot) -> generation of the last completed read
        self.users: dict[int, int] = {}  # by generation

    def load(self, key: ExpertKey, tier: Tier, pool: str) -> None:
        copy = self.residency.load(key, tier, "disk", pool)
        target = (copy.pool, copy.slot)
        assert target not in {(r[3], r[4]) for r in self.reads.values()}, "two reads into one slot"
        self.reads[copy.generation] = (key, tier, "disk", *target)
        self.users[copy.generation] = 0

    def read_done(self, key: ExpertKey, tier: Tier, *, good: bool) -> None:
        """The oldest running read for that place ends; the residency hears of it."""
        running = [g for g, read in self.reads.items() if read[:2] == (key, tier)]
        if not running:
            raise IllegalTransition("the device runs no such read")
        generation = running[0]
        _, _, layout, pool, slot = self.reads.pop(generation)
        self.finished.append((key, tier, layout, generation))
        if good:
            self.content[pool, slot] = generation
            ready = self.residency.loaded(key, tier, layout, generation)
        else:
            assert self.content.get((pool, slot)) != generation
            ready = self.residency.failed(key, tier, layout, generation) and False
        copy = self.residency.find(key, tier, layout)
        assert ready == (good and copy is not None and copy.generation == generation and copy.state is State.READY)

    def repeat_all_finished(self) -> None:
        """Completions that come twice or late: none may change anything that a newer generation owns."""
        for key, tier, layout, generation in self.finished:
            copy = self.residency.find(key, tier, layout)
            if copy is None or copy.generation != generation:
                before = [(c.key, c.state, c.users) for c in self.residency.all_copies()]
                assert not self.residency.loaded(key, tier, layout, generation)
                assert not self.residency.failed(key, tier, layout, generation)
                assert before == [(c.key, c.state, c.users) for c in self.residency.all_copies()]

    def find(self, key: ExpertKey, tier: Tier) -> Copy:
        copy = self.residency.find(key, tier, "disk")
        if copy is None:
            raise IllegalTransition("no copy")
        return copy

    def acquire(self, key: ExpertKey, tier: Tier) -> None:
        copy = self.find(key, tier)
        self.residency.acquire(copy)
        assert self.content[copy.pool, copy.slot] == copy.generation, "used before its own read succeeded"
        self.users[copy.generation] += 1

    def release(self, key: ExpertKey, tier: Tier) -> None:
        copy = self.find(key, tier)
        self.residency.release(copy)
        self.users[copy.generation] -= 1

    def evict(self, key: ExpertKey, tier: Tier) -> None:
        copy = self.find(key, tier)
        self.residency.evict(copy)
        assert self.users[copy.generation] == 0, "evicted in use"

    def freed(self, key: ExpertKey, tier: Tier) -> None:
        copy = self.find(key, tier)
        self.residency.freed(copy)
        assert copy.generation not in self.reads, "freed while a read writes to it"
        assert copy.state is State.GONE

    def check(self) -> None:
        """What must hold after every event."""
        copies = list(self.residency.all_copies())
        slots = [(c.pool, c.slot) for c in copies]
        assert len(set(slots)) == len(slots), "two copies in one slot"
        assert len({(c.key, c.tier, c.layout) for c in copies}) == len(copies)
        for pool, count in POOLS.items():
            taken = [c for c in copies if c.pool == pool]
            assert len(taken) + self.residency.free_slots(pool) == count
            assert all(0 <= c.slot < count for c in taken)
        for copy in copies:
            assert copy.users == self.users[copy.generation] >= 0
            assert (copy.state is State.IN_USE) == (copy.users > 0)
            assert copy.writing == (copy.generation in self.reads)
            if copy.state in (State.READY, State.IN_USE):
                assert self.content[copy.pool, copy.slot] == copy.generation
        for generation, read in self.reads.items():
            assert any(c.generation == generation and (c.pool, c.slot) == read[3:] for c in copies)


PLACES = [(A, RAM, "ram"), (B, RAM, "ram"), (A, VRAM, "vram")]
ACTIONS = ("load", "good", "bad", "acquire", "release", "evict", "freed")


def apply(device: FakeDevice, action: str, place: int) -> bool:
    """One event; False if it was refused as illegal, and then nothing may have changed."""
    key, tier, pool = PLACES[place]
    before = [(c, c.state, c.users, c.writing) for c in device.residency.all_copies()]
    try:
        match action:
            case "load":
                device.load(key, tier, pool)
            case "good":
                device.read_done(key, tier, good=True)
            case "bad":
                device.read_done(key, tier, good=False)
            case "acquire":
                device.acquire(key, tier)
            case "release":
                device.release(key, tier)
            case "evict":
                device.evict(key, tier)
            case "freed":
                device.freed(key, tier)
    except IllegalTransition:
        assert before == [(c, c.state, c.users, c.writing) for c in device.residency.all_copies()]
        return False
    finally:
        device.check()
    return True


def legal_sequences(depth: int) -> Iterator[tuple[tuple[str, int], ...]]:
    """Every sequence of legal events of that length, by replaying prefixes that were legal."""
    frontier: list[tuple[tuple[str, int], ...]] = [()]
    for _ in range(depth):
        longer = []
        for prefix in frontier:
            for event in itertools.product(ACTIONS, range(len(PLACES))):
                device = FakeDevice()
                for action, place in prefix:
                    assert apply(device, action, place)
                if apply(device, *event):
                    device.repeat_all_finished()
                    longer.append((*prefix, event))
        frontier = longer
        yield from frontier


def test_every_sequence_of_events_keeps_the_invariants() -> None:
    sequences = list(legal_sequences(5))
    seen = {event for sequence in sequences for event in sequence}
    assert len(seen) == len(ACTIONS) * len(PLACES)  # each event was legal somewhere
    assert len(sequences) > 800


def test_transitions_are_exactly_these() -> None:
    """For each state that can be reached, which events are legal and where they lead."""
    reach: dict[tuple[State, bool], list[str]] = {
        (State.LOADING, True): [],
        (State.READY, False): ["good"],
        (State.IN_USE, False): ["good", "acquire"],
        (State.EVICTING, False): ["good", "evict"],
        (State.EVICTING, True): ["evict"],
    }
    legal: dict[tuple[State, bool], dict[str, State | None]] = {
        (State.LOADING, True): {"good": State.READY, "bad": None, "evict": State.EVICTING},
        (State.READY, False): {"acquire": State.IN_USE, "evict": State.EVICTING},
        (State.IN_USE, False): {"acquire": State.IN_USE, "release": State.READY},
        (State.EVICTING, False): {"freed": None},
        (State.EVICTING, True): {"good": None, "bad": None},
    }
    for state, path in reach.items():
        for action in ACTIONS:
            device = FakeDevice()
            for step in ["load", *path]:
                assert apply(device, step, 0)
            went = apply(device, action, 0)
            assert went == (action in legal[state]), (state, action)
            if went:
                copy = device.residency.find(A, RAM, "disk")
                assert (copy.state if copy else None) == legal[state][action]
    assert {state[:2] for state in TRANSITIONS} == set(reach)
    assert {event for _, _, event in TRANSITIONS} == set(Event)


def state_of(copy: Copy) -> State:
    return copy.state


def test_old_generation_never_makes_ready() -> None:
    residency = Residency({"ram": 1})
    first = residency.load(A, RAM, "disk", "ram")
    assert residency.failed(A, RAM, "disk", first.generation)
    second = residency.load(A, RAM, "disk", "ram")
    assert second.slot == first.slot
    assert second.generation > first.generation
    assert not residency.loaded(A, RAM, "disk", first.generation)
    assert state_of(second) is State.LOADING
    assert residency.loaded(A, RAM, "disk", second.generation)
    assert state_of(second) is State.READY
    assert state_of(first) is State.GONE


def test_slot_of_a_given_up_read_is_free_when_the_read_ends() -> None:
    residency = Residency({"ram": 1})
    copy = residency.load(A, RAM, "disk", "ram")
    residency.evict(copy)
    with pytest.raises(IllegalTransition, match="no free slot in ram"):
        residency.load(B, RAM, "disk", "ram")
    with pytest.raises(IllegalTransition, match=r"freed of .* it is evicting with a read running"):
        residency.freed(copy)
    assert not residency.loaded(A, RAM, "disk", copy.generation)
    assert residency.free_slots("ram") == 1
    assert residency.copies(A) == ()


def test_copies_of_one_expert_in_several_tiers() -> None:
    residency = Residency(POOLS)
    ram = residency.load(A, RAM, "disk", "ram")
    vram = residency.load(A, VRAM, "disk", "vram")
    packed = residency.load(A, VRAM, "packed", "vram")
    assert set(residency.copies(A)) == {ram, vram, packed}
    assert residency.loaded(A, VRAM, "packed", packed.generation)
    assert (ram.state, vram.state, packed.state) == (State.LOADING, State.LOADING, State.READY)
    with pytest.raises(IllegalTransition, match="it is loading there"):
        residency.load(A, RAM, "disk", "vram")


class ResidencyMachine(RuleBasedStateMachine):
    """Long random sequences of the same events."""

    def __init__(self) -> None:
        super().__init__()
        self.device = FakeDevice()

    @rule(action=st.sampled_from(ACTIONS), place=st.integers(0, len(PLACES) - 1))
    def event(self, action: str, place: int) -> None:
        apply(self.device, action, place)

    @precondition(lambda self: self.device.finished)
    @rule()
    def late(self) -> None:
        self.device.repeat_all_finished()

    @invariant()
    def holds(self) -> None:
        self.device.check()


ResidencyMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
TestResidencyMachine = ResidencyMachine.TestCase
