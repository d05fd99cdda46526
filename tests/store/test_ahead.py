"""Reading ahead: what is expected, what comes of it, and when it is left."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from store_harness import FakePool, Model, Status, ids, make_model, wrong_planes

from picaflor.errors import ReadFailed
from picaflor.store.ahead import REST_STEPS, SETTLE_STEPS, WINDOW_STEPS, WINDOWS, Switch
from picaflor.store.policy.choose import policies
from picaflor.store.residency import IllegalTransition, Residency
from picaflor.store.store import ExpertStore
from picaflor.store.types import DISK_LAYOUT, RAM, ExpertKey


@pytest.fixture
def model(tmp_path: Path) -> Iterator[Model]:
    """Slots of both layers are of one size, though one layer's gaps between planes are a little wider."""
    made = make_model(tmp_path, widths=(1024, 1024))
    assert made.files().slot_nbytes(3) == made.files().slot_nbytes(4)
    with made.container:
        yield made


def opened(model: Model, pool: FakePool, *, slots: int = 2, policy: str = "lru", prefetch: str = "on") -> ExpertStore:
    return ExpertStore(
        model.files(),
        slots=slots,
        working_slots=2,
        ahead_slots=3,
        prefetch=prefetch,
        policy=policies(policy),
        pool=pool,
    )


def ask(store: ExpertStore, model: Model, layer: int, *experts: int) -> None:
    """A request whose bytes are checked."""
    seen: list[int] = []
    with store.acquire(layer, ids(*experts)) as lease:
        for found, addresses in lease.batches():
            seen += found.tolist()
            for expert, address in zip(found.tolist(), addresses.tolist(), strict=True):
                assert wrong_planes(model, layer, expert, store.layouts(layer)[expert], address) == []
    assert sorted(seen) == sorted(experts)


def test_what_was_read_ahead_is_there_or_joined_and_the_rest_goes(model: Model) -> None:
    pool = FakePool(finish=lambda waiting: waiting)
    with opened(model, pool) as store:
        assert store.reads_ahead(4)
        store.expect(4, ids(5, 1, 3, 0))  # one more than there are slots
        assert [pool.demand[ticket] for ticket in pool.jobs] == [False, False, False]
        places = [store.files.place(ExpertKey(4, expert))[1] for expert in (5, 1)]
        pool._run(1)
        pool._run(2)
        assert [place for place in pool.order if place in places] == places  # the likeliest first
        assert places[0] > places[1]  # and that is not the order of the file
        ask(store, model, 4, 5, 0)
        counters = store.counters.layers[4]
        assert (counters.prefetched, counters.joined, counters.loaded, counters.lru) == (1, 0, 1, 0)
        assert (counters.wasted, counters.wasted_bytes) == (1, store.files.reads(ExpertKey(4, 1)).read_nbytes)
        assert 3 not in pool.jobs  # taken back: nobody pays for it
        assert counters.read_bytes == 3 * counters.wasted_bytes
        store.expect(4, ids(3, 5))  # 5 is there already
        assert len(pool.jobs) == 1
        ask(store, model, 4, 3)
        assert (counters.joined, counters.late, counters.hits) == (1, 1, 1)
        assert pool.demand[max(pool.demand)] is True  # promoted


def test_a_read_that_cannot_be_taken_back_is_thrown_away_at_its_end(model: Model) -> None:
    pool = FakePool(finish=lambda waiting: waiting)
    with opened(model, pool) as store:
        store.expect(4, ids(1, 2))
        pool.running |= {1}
        ask(store, model, 4, 0)
        assert store._residency.free_slots("read ahead") == 2
        assert store.counters.layers[4].wasted == 0
        pool.run_all()
        ask(store, model, 3, 0)  # any request takes in what has ended
        assert store.counters.layers[4].wasted == 1
        assert store._residency.free_slots("read ahead") == 3
        assert store.resident(4) == [0]
        store.expect(4, ids(1))
        pool.running |= set(pool.jobs)
        ask(store, model, 4, 0)
        ask(store, model, 4, 1)  # not wanted before, and wanted before it was gone
        assert (store.counters.layers[4].wasted, store.counters.layers[4].late) == (1, 1)
        assert store.resident(4) == [0, 1]


@pytest.mark.parametrize("policy", ["lru", "heat", "auto"])
def test_no_decision_of_a_policy_changes(model: Model, policy: str) -> None:
    """The same experts lie in the same pools after every request, whatever was expected."""
    draws = np.random.default_rng(3)
    plain_pool, pool = (FakePool(finish=lambda waiting: waiting) for _ in range(2))
    with opened(model, plain_pool, policy=policy, prefetch="off") as plain, opened(model, pool, policy=policy) as store:
        for step in range(120):
            layer = 3 + step % 2
            wanted = draws.choice(6, 2, replace=False, p=[0.4, 0.2, 0.1, 0.1, 0.1, 0.1])
            store.expect(layer, ids(*draws.permutation(6)[:3].tolist()))
            if step % 3:
                pool.run_all()
            for each in (plain, store):
                ask(each, model, layer, *wanted.tolist())
            held = [{(c.key, c.pool) for c in each._residency.all_copies()} for each in (plain, store)]
            assert {place for place in held[1] if place[1] != "read ahead"} == held[0]
        found, total = plain.counters.total(), store.counters.total()
        assert total.lru == found.lru
        assert total.prefetched + total.joined + total.loaded == found.loaded
        assert total.prefetched > 10
        assert total.late > 10
        assert total.wasted > 10
        assert total.read_bytes - total.wasted_bytes == found.read_bytes


def test_a_read_ahead_that_fails_is_told_to_nobody_unless_it_was_joined(model: Model) -> None:
    failing = [True]
    pool = FakePool(
        finish=lambda waiting: waiting,
        fault=lambda fd, offset, nbytes: (Status.ERROR, errno.EIO, 0) if failing[0] else None,
    )
    with opened(model, pool) as store:
        store.expect(4, ids(1, 2))
        pool.run_all()
        failing[0] = False
        ask(store, model, 4, 1)
        assert (store.counters.layers[4].failed, store.counters.layers[4].loaded) == (2, 1)
        store.expect(4, ids(3))
        failing[0] = True
        with pytest.raises(ReadFailed, match="expert 3 of layer 4"):
            ask(store, model, 4, 3)
        failing[0] = False
        ask(store, model, 4, 3)
        assert store._residency.free_slots("read ahead") == 3


def test_layers_with_slots_of_another_size_are_left_alone(tmp_path: Path) -> None:
    made = make_model(tmp_path, widths=(96, 96))
    assert made.files().slot_nbytes(3) > 2 * made.files().slot_nbytes(4)
    with made.container, opened(made, FakePool()) as store:
        assert [store.reads_ahead(layer) for layer in (3, 4)] == [True, False]
        store.expect(4, ids(1, 2))
        assert not store._loads


def test_nothing_is_read_ahead_where_all_have_a_slot(model: Model) -> None:
    with opened(model, FakePool(), slots=6) as store:
        assert not store.reads_ahead(4)
        assert store.prefetch_in_words == ""


def test_more_slots_than_any_request_needs_are_not_needed(model: Model) -> None:
    """One slot and one of the working set: experts come in waves, those that were read ahead too."""
    pool = FakePool(finish=lambda waiting: waiting[:1])
    with opened(model, pool, slots=1) as store:
        for step in range(20):
            store.expect(4, ids(step % 6, (step + 1) % 6, (step + 2) % 6))
            if step % 2:
                pool.run_all()
            ask(store, model, 4, step % 6, (step + 2) % 6, (step + 3) % 6, (step + 5) % 6)


def test_a_copy_that_moves_takes_a_free_slot_and_leaves_its_own() -> None:
    residency = Residency({"a": 1, "b": 2})
    copy = residency.load(ExpertKey(0, 0), RAM, DISK_LAYOUT, "a")
    assert residency.move(copy, "b") == 0
    assert (copy.pool, copy.slot) == ("b", 0)
    assert (residency.free_slots("a"), residency.free_slots("b")) == (1, 1)
    residency.loaded(copy.key, RAM, DISK_LAYOUT, copy.generation)
    residency.load(ExpertKey(0, 1), RAM, DISK_LAYOUT, "a")
    with pytest.raises(IllegalTransition, match="no free slot in a"):
        residency.move(copy, "a")
    residency.acquire(copy)
    with pytest.raises(IllegalTransition, match="it is in use"):
        residency.move(copy, "b")


def steps(switch: Switch, count: int, *, on: float, off: float) -> None:
    for _ in range(count):
        switch.step(on if switch.enabled else off)


def test_the_switch_keeps_what_is_faster() -> None:
    trial = len(WINDOWS) * WINDOW_STEPS
    switch = Switch("auto")
    assert str(switch) == "auto: on, not tried yet"
    steps(switch, SETTLE_STEPS, on=9.0, off=0.1)  # slots fill: counts for nothing
    steps(switch, trial, on=0.9, off=1.0)
    assert (switch.enabled, switch.gain) == (True, pytest.approx(0.1))
    assert switch.steps_off == trial // 2
    assert str(switch) == "auto: on, saves 10.0% of a step"
    steps(switch, REST_STEPS, on=2.0, off=1.0)  # worse meanwhile: found at the next trial
    assert switch.enabled
    steps(switch, trial, on=1.02, off=1.0)
    assert not switch.enabled
    assert str(switch) == "auto: off, it would cost 2.0% of a step"
    steps(switch, REST_STEPS + trial, on=0.5, off=1.0)
    assert switch.enabled


def test_the_switch_is_not_fooled_by_a_pause_or_by_what_the_other_state_left() -> None:
    switch = Switch("auto")
    steps(switch, SETTLE_STEPS, on=1.0, off=1.0)
    before = switch.enabled
    for step in range(len(WINDOWS) * WINDOW_STEPS):
        state = switch.enabled
        switch.step(50.0 if step == 5 or state != before else 0.98 if state else 1.0)
        before = state
    assert switch.enabled
    assert switch.gain == pytest.approx(0.02)


def test_the_switch_is_not_fooled_by_a_drift() -> None:
    """Steps get shorter all the time, while slots fill: with and without meet that alike."""
    for with_it, kept in ((0.97, True), (1.04, False)):
        switch = Switch("auto")
        for step in range(SETTLE_STEPS + len(WINDOWS) * WINDOW_STEPS):
            switch.step((2.0 - step / 100) * (with_it if switch.enabled else 1.0))
        assert switch.enabled == kept
        assert switch.gain == pytest.approx(1 - with_it, abs=0.015)


def test_the_switch_compares_steps_of_equal_need() -> None:
    """What steps need from the disk varies ten times as much as what reading ahead changes, and by chance more with."""
    for with_it, kept in ((0.98, True), (1.03, False)):
        draws = np.random.default_rng(5)
        switch = Switch("auto")
        for step in range(SETTLE_STEPS + len(WINDOWS) * WINDOW_STEPS):
            needed = int(draws.integers(15, 30) + (4 if switch.enabled == kept else 0))
            pause = 3.0 if step % 17 == 0 else 0.0
            switch.step((0.3 + needed / 40) * (with_it if switch.enabled else 1.0) + pause, needed)
        assert switch.enabled == kept
        assert switch.gain == pytest.approx(1 - with_it, abs=0.01)


def test_on_and_off_are_never_tried() -> None:
    for mode, enabled in (("on", True), ("off", False)):
        switch = Switch(mode)
        steps(switch, 3 * REST_STEPS, on=9.0, off=1.0)
        assert (switch.enabled, str(switch)) == (enabled, mode)
    with pytest.raises(ValueError, match="prefetch maybe; accepted: auto, on, off"):
        Switch("maybe")
