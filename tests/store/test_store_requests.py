"""Requests to the store: the right bytes at the right time, evictions, waves, failures, clean endings."""

from __future__ import annotations

import errno
import gc
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_harness import FakePool, Model, Outcome, Status, ids, make_model, wrong_planes

from picaflor.errors import ReadFailed
from picaflor.store.lease import Lease, PinnedLease
from picaflor.store.policy.ranked import lru
from picaflor.store.sources import Place
from picaflor.store.store import ExpertStore
from picaflor.store.types import ExpertKey


@pytest.fixture
def model(tmp_path: Path) -> Iterator[Model]:
    made = make_model(tmp_path)
    with made.container:
        yield made


def make_store(model: Model, pool: FakePool, **options: Any) -> ExpertStore:
    return ExpertStore(model.files(), pool=pool, policy=lru, **options)


def run(store: ExpertStore, model: Model, layer: int, *experts: int) -> list[list[int]]:
    """Request experts and check each batch's bytes while it is valid; the ids of each batch."""
    layouts = store.layouts(layer)
    batches = []
    with store.acquire(layer, ids(*experts)) as lease:
        for found, addresses in lease.batches():
            assert found.dtype == np.int32
            assert addresses.dtype == np.uint64
            for expert, address in zip(found.tolist(), addresses.tolist(), strict=True):
                assert wrong_planes(model, layer, expert, layouts[expert], address) == []
            batches.append(found.tolist())
    assert sorted(e for batch in batches for e in batch) == sorted(experts)
    return batches


def idle(store: ExpertStore) -> bool:
    """Nobody holds anything and no read runs."""
    with store._changed:
        copies = list(store._residency.all_copies())
    pinned = {layer for layer, table in store._shelves.pinned.items() if table is not None}
    users = [c for c in copies if c.users != (c.key.layer in pinned)]
    return not users and not store._loads and not store._loading and not store._leases


def test_hits_come_first_then_reads_as_they_finish(model: Model) -> None:
    pool = FakePool()
    store = make_store(model, pool, slots=4)
    assert run(store, model, 3, 1, 4) == [[4], [1]]  # 4 lies in the first shard
    pool.finish = lambda waiting: waiting[-2:]
    batches = run(store, model, 3, 0, 1, 2, 4)
    assert batches == [[1, 4], [0, 2]]
    counters = store.counters.layers[3]
    assert (counters.lru, counters.loaded, counters.joined, counters.pinned) == (2, 4, 0, 0)
    assert (counters.requests, counters.reads, counters.evicted) == (2, 4, 0)
    assert counters.read_bytes == sum(model.files().reads(ExpertKey(3, e)).read_nbytes for e in (0, 1, 2, 4))
    assert counters.service_s == 4 * 0.25
    assert counters.wait_s > 0
    assert idle(store)


def test_reads_start_before_anything_is_asked_for(model: Model) -> None:
    pool = FakePool()
    store = make_store(model, pool, slots=4)
    with store.acquire(3, ids(2, 0, 5)):
        assert len(pool.jobs) == 3
        assert all(pool.demand.values())
        first = [job[0][1] for job in pool.jobs.values()]
        shards = [0, 0, 1]  # file order: experts 0 and 2 in the first shard, 5 in the second
        assert first[:2] == sorted(first[:2])
        assert shards == [model.files().place(ExpertKey(3, e))[0] for e in (0, 2, 5)]


def test_what_a_device_holds_gives_its_slot_away(model: Model) -> None:
    """Of two slots one is free then; what is held, read or pinned stays."""
    pool = FakePool()
    store = make_store(model, pool, slots={3: 2, 4: 6}, working_slots=2, ahead_slots=1, prefetch="on")
    run(store, model, 3, 0, 1)
    store.elsewhere(3, ids(0, 5))
    assert store.resident(3) == [1]
    run(store, model, 3, 2)
    assert store.resident(3) == [1, 2]  # 1 is the oldest, and need not go
    assert store.counters.layers[3].evicted == 1
    run(store, model, 4, *range(6))
    store.elsewhere(4, ids(*range(6)))
    assert store.resident(4) == list(range(6))
    with store.acquire(3, ids(1, 4)) as lease:
        store.elsewhere(3, ids(1, 4))
        assert [e for found, _ in lease.batches() for e in found.tolist()] == [1, 4]
    store.expect(3, ids(0))
    pool.run_all()
    store.elsewhere(3, ids(0))
    assert run(store, model, 3, 0) == [[0]]
    assert store.counters.layers[3].prefetched + store.counters.layers[3].late == 1
    assert idle(store)


def test_least_recently_used_goes_first(model: Model) -> None:
    store = make_store(model, FakePool(), slots=3, working_slots=0)
    for expert in (0, 1, 2):
        run(store, model, 3, expert)
    run(store, model, 3, 0)
    run(store, model, 3, 3)
    assert store.resident(3) == [0, 2, 3]
    run(store, model, 3, 2, 4)
    assert store.resident(3) == [2, 3, 4]
    run(store, model, 4, 5)
    assert store.resident(3) == [2, 3, 4]  # layers do not take each other's slots
    assert store.resident(4) == [5]
    assert store.counters.layers[3].evicted == 2
    assert store.counters.total().loaded == 6


def test_experts_of_the_same_request_are_not_victims(model: Model) -> None:
    store = make_store(model, FakePool(), slots=2, working_slots=2)
    run(store, model, 3, 0)
    run(store, model, 3, 1)
    assert run(store, model, 3, 0, 1, 2)[0] == [0, 1]
    assert store.counters.layers[3].loaded == 3
    assert store.counters.layers[3].evicted == 0  # 2 went to the working set
    assert store.resident(3) == [0, 1, 2]


@pytest.mark.parametrize("slots", [1, 2, 5])
@pytest.mark.parametrize("working", [0, 1, 3])
@pytest.mark.parametrize("order", ["first", "last", "all"])
def test_any_number_of_slots_serves_any_request(model: Model, slots: int, working: int, order: str) -> None:
    picks = {"first": slice(0, 1), "last": slice(-1, None), "all": slice(None)}[order]
    pool = FakePool(finish=lambda waiting: waiting[picks])
    store = make_store(model, pool, slots=slots, working_slots=working)
    for _ in range(2):
        for layer in (3, 4):
            batches = run(store, model, layer, 5, 0, 3, 1, 4, 2)
            assert max(map(len, batches)) <= slots + working
    assert len(list(store._residency.all_copies())) <= 2 * slots + working
    assert idle(store)


def test_reads_ahead_while_a_batch_is_computed(model: Model) -> None:
    """With one slot and a working set of three, three reads are under way while the consumer holds one expert."""
    pool = FakePool()
    store = make_store(model, pool, slots=1, working_slots=3)
    with store.acquire(3, ids(0, 1, 2, 3, 4, 5)) as lease:
        batches = lease.batches()
        next(batches)
        assert len(pool.jobs) == 3
        next(batches)
        assert len(pool.jobs) == 3
        assert len(list(batches)) == 4


def test_batch_stays_intact_while_later_reads_run(model: Model) -> None:
    pool = FakePool()
    store = make_store(model, pool, slots=1, working_slots=2)
    layouts = store.layouts(4)
    with store.acquire(4, ids(0, 1, 2, 3, 4, 5)) as lease:
        for found, addresses in lease.batches():
            pool.run_all()
            for expert, address in zip(found.tolist(), addresses.tolist(), strict=True):
                assert wrong_planes(model, 4, expert, layouts[expert], address) == []


def test_preload_pins_and_reads_in_file_order(model: Model) -> None:
    pool = FakePool()
    store = make_store(model, pool, slots={3: 6, 4: 5})
    told: list[tuple[int, int]] = []
    files = model.files()
    total = sum(files.reads(ExpertKey(3, e)).read_nbytes for e in range(6))
    assert store.preload(lambda done, of: told.append((done, of))) == total
    places = [files.place(ExpertKey(3, e)) for e in range(6)]
    first_reads = [offset for _, offset in sorted(places)]
    assert [offset for offset in pool.order if offset in first_reads] == first_reads
    assert told[-1] == (total, total)
    assert [done for done, _ in told] == sorted({done for done, _ in told})
    assert not any(pool.demand.values())
    assert store.resident(3) == [0, 1, 2, 3, 4, 5]
    assert store.resident(4) == []
    assert isinstance(store.acquire(3, ids(1)), PinnedLease)
    assert isinstance(store.acquire(4, ids(1)), Lease)
    assert run(store, model, 3, 5, 0, 2) == [[5, 0, 2]]
    assert run(store, model, 3) == []
    counters = store.counters.layers[3]
    assert (counters.pinned, counters.lru, counters.loaded, counters.read_bytes, counters.hits) == (4, 0, 0, 0, 4)
    assert store.counters.preload_bytes == total
    assert store.preload() == 0


def test_layer_is_pinned_once_all_were_read(model: Model) -> None:
    store = make_store(model, FakePool(), slots=9)
    assert store.slots == {3: 6, 4: 6}
    assert store.working_slots == 0
    run(store, model, 3, 0, 1, 2)
    assert isinstance(store.acquire(3, ids(1)), Lease)
    run(store, model, 3, 5, 4, 3)
    assert isinstance(store.acquire(3, ids(1)), PinnedLease)
    assert run(store, model, 3, 3, 1) == [[3, 1]]


def test_memory_is_exactly_the_arenas(model: Model) -> None:
    files = model.files()
    store = make_store(model, FakePool(), slots={3: 2, 4: 6}, working_slots=3)
    narrow, wide = (files.slot_nbytes(layer) for layer in (3, 4))
    assert 3 * 8 * 48 + 3 * 32 <= narrow < wide < 2 * narrow + 64
    pages = [2 * (narrow + 64), 6 * (wide + 64), 3 * (narrow + 64)]  # layer 4 fits, so the working set is narrow
    assert store.nbytes == sum(-(-nbytes // 4096) * 4096 for nbytes in pages)


def test_bad_requests(model: Model) -> None:
    pool = FakePool()
    store = make_store(model, pool, slots={3: 6, 4: 2})
    store.preload()
    for layer in (3, 4):
        for bad in (6, -1):
            with pytest.raises(IndexError), store.acquire(layer, ids(0, bad)):
                pass
    with pytest.raises(ValueError, match=r"must be distinct: \[2, 2\]"), store.acquire(4, ids(2, 2)):
        pass
    with pytest.raises(ValueError, match="layer 3 needs 1 expert slot or more, not 0"):
        make_store(model, pool, slots=0)
    assert idle(store)


def test_disk_error_names_file_tensor_and_cause(model: Model) -> None:
    bad = model.experts[3][1].up.spans[0]
    run_of_bad = next(
        r for r in model.files().reads(ExpertKey(3, 1)).runs if r.offset <= bad.offset < r.offset + r.nbytes
    )
    found = bad.offset - run_of_bad.offset

    def fault(fd: int, offset: int, nbytes: int) -> tuple[Status, int, int] | None:
        hit = offset == run_of_bad.offset and "model-00002" in os.readlink(f"/proc/self/fd/{fd}")
        return (Status.ERROR, errno.EIO, found) if hit else None

    pool = FakePool(fault=fault)
    store = make_store(model, pool, slots=2, working_slots=1)
    with pytest.raises(ReadFailed) as caught:
        run(store, model, 3, 0, 1, 2, 3)
    name = "model.layers.3.mlp.experts.1.up_proj.weight"
    assert str(caught.value).endswith(
        f'model-00002-of-00002.safetensors: tensor "{name}" (expert 1 of layer 3): reading {run_of_bad.nbytes} bytes '
        f"at offset {run_of_bad.offset} failed after {found}: Input/output error"
    )
    pool.run_all()
    pool.fault = lambda fd, offset, nbytes: None
    assert store.counters.layers[3].failed == 1
    run(store, model, 3, 0, 1, 2, 3)
    assert idle(store)


def test_file_that_shrank_while_open(model: Model) -> None:
    shard = model.container.shards[1]
    last = max((e for e in model.experts[4]), key=lambda e: e.up.spans[0].offset if e.expert % 2 else 0)
    cut = last.up.spans[0].offset + 5
    os.truncate(shard.path, cut)
    store = ExpertStore(model.files(), slots=2, read_threads=2)
    with pytest.raises(ReadFailed) as caught:
        run(store, model, 4, 0, last.expert)
    text = str(caught.value)
    assert f'{shard.path}: tensor "{last.up.name}" (expert {last.expert} of layer 4): expected ' in text
    assert text.endswith(f": the file had {shard.nbytes} bytes when it was opened and has {cut} now")
    assert sum(map(len, run(store, model, 4, 0, 2))) == 2  # the other shard still serves
    store.close()


def test_file_that_was_unlinked_still_serves(model: Model) -> None:
    for shard in model.container.shards:
        shard.path.unlink()
    with ExpertStore(model.files(), slots=2, read_threads=2) as store:
        run(store, model, 3, 0, 1, 2, 3, 4, 5)


def test_consumer_that_fails_gives_everything_back(model: Model) -> None:
    pool = FakePool()
    store = make_store(model, pool, slots=2, working_slots=1)
    run(store, model, 3, 5)

    def consume() -> None:
        with store.acquire(3, ids(5, 0, 1, 2)) as lease:
            pool.running = {min(pool.jobs)}
            for _ in lease.batches():
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        consume()
    assert len(pool.jobs) == 1  # what had not begun was cancelled, what runs goes on
    assert len(store._loads) == 1
    pool.run_all()
    run(store, model, 3, 0, 1, 2, 3, 4, 5)
    assert idle(store)


def test_lease_that_is_never_read(model: Model) -> None:
    pool = FakePool()
    store = make_store(model, pool, slots=2)
    with store.acquire(3, ids(0, 1)):
        pass
    assert pool.jobs == {}
    assert store.resident(3) == []
    assert idle(store)


def test_running_read_of_an_abandoned_request_is_used_by_the_next(model: Model) -> None:
    pool = FakePool()
    store = make_store(model, pool, slots=2)
    with store.acquire(3, ids(0)):
        pool.running = set(pool.jobs)
    assert run(store, model, 3, 0) == [[0]]
    counters = store.counters.layers[3]
    assert (counters.loaded, counters.joined, counters.reads) == (1, 1, 1)


def test_two_leases_share_one_read(model: Model) -> None:
    pool = FakePool()
    store = make_store(model, pool, slots=4)
    with store.acquire(3, ids(0, 1)) as first, store.acquire(3, ids(1, 2)) as second:
        assert len(pool.jobs) == 3
        assert sorted(e for found, _ in second.batches() for e in found.tolist()) == [1, 2]
        assert sorted(e for found, _ in first.batches() for e in found.tolist()) == [0, 1]
        copy = store._residency.copies(ExpertKey(3, 1))[0]
        assert copy.users == 2
    assert idle(store)


def test_failed_read_reaches_all_who_wait_for_it(model: Model) -> None:
    pool = FakePool(fault=lambda fd, offset, nbytes: (Status.ERROR, errno.EIO, 0))
    store = make_store(model, pool, slots=4)
    with store.acquire(3, ids(0)) as first, store.acquire(3, ids(0)) as second:
        for lease in (first, second):
            with pytest.raises(ReadFailed, match="Input/output error"):
                next(lease.batches())
    assert store._residency.free_slots("layer 3") == 4
    assert idle(store)


def test_thread_that_would_wait_for_itself_is_refused(model: Model) -> None:
    store = make_store(model, FakePool(), slots=1, working_slots=0)
    with store.acquire(3, ids(0)) as outer:
        batches = outer.batches()
        next(batches)
        with (
            store.acquire(3, ids(1)) as inner,
            pytest.raises(RuntimeError, match="no slot for an expert of layer 3: the same thread holds 1 other leases"),
        ):
            next(inner.batches())
    assert idle(store)


def test_interrupt_while_waiting_loses_no_read(model: Model) -> None:
    class Interrupted(FakePool):
        pressed = True

        def wait_any(self, tickets: Any, seconds: float) -> list[Outcome]:
            outcomes = super().wait_any(tickets, seconds)
            if seconds and outcomes and self.pressed:
                raise KeyboardInterrupt
            return outcomes

    pool = Interrupted()
    store = make_store(model, pool, slots=2)
    with pytest.raises(KeyboardInterrupt):
        run(store, model, 3, 0, 1)
    pool.pressed = False
    assert run(store, model, 3, 0) == [[0]]
    assert store.counters.layers[3].lru == 1
    assert idle(store)


def test_file_that_cannot_be_opened_takes_no_slot(model: Model) -> None:
    """The first shard is open already; the descriptor of the second is refused in the same request."""
    pool = FakePool()
    store = make_store(model, pool, slots=3)
    run(store, model, 3, 0)
    model.container.close()
    with pytest.raises(ReadFailed, match=r"model-00002.*the container was closed"):
        run(store, model, 3, 2, 1)
    assert pool.jobs == {}
    assert store._residency.free_slots("layer 3") == 2
    assert store._reader._sources._descriptors._users == {Place(0, 0, False): 0}
    assert idle(store)
    run(store, model, 3, 0, 2, 4)


def test_working_set_gives_up_the_least_recently_used(model: Model) -> None:
    store = make_store(model, FakePool(), slots=1, working_slots=3)
    with store.acquire(3, ids(5)) as lease:  # holds the layer's slot, so that the others go to the working set
        list(lease.batches())
        for expert in (0, 1, 2, 0):
            run(store, model, 3, expert)
        run(store, model, 3, 3)
        assert store.resident(3) == [0, 2, 3, 5]
    assert store.counters.layers[3].lru == 1


def test_preload_that_fails(model: Model) -> None:
    place = model.files().place(ExpertKey(4, 4))
    pool = FakePool(fault=lambda fd, offset, nbytes: (Status.SHORT, 0, 3) if offset == place[1] else None)
    store = make_store(model, pool, slots=6)
    with pytest.raises(ReadFailed, match=r"expert 4 of layer 4\): expected .* found 3"):
        store.preload()
    assert pool.jobs == {}
    pool.fault = lambda fd, offset, nbytes: None
    assert store.preload() > 0
    assert idle(store)
    run(store, model, 4, 0, 1, 2, 3, 4, 5)


def test_request_joins_a_preload_and_makes_it_urgent(model: Model) -> None:
    pool = FakePool()
    store = make_store(model, pool, slots=6)
    asked: list[list[list[int]]] = []

    def progress(done: int, total: int) -> None:
        if not asked:
            asked.append(run(store, model, 4, 5))

    store.preload(progress)
    assert asked == [[[5]]]
    assert sorted(pool.demand.values()) == [False] * 11 + [True]
    assert (store.counters.layers[4].joined, store.counters.layers[4].loaded) == (1, 0)


def test_closed_store(model: Model) -> None:
    pool = FakePool()
    store = make_store(model, pool, slots=6)
    store.preload()
    with store.acquire(3, ids(0)) as lease:
        assert len(list(lease.batches())) == 1
        store.close()
    store.close()
    assert pool.closed
    for layer in (3, 4):
        with pytest.raises(ReadFailed, match="the expert store was closed"), store.acquire(layer, ids(0)):
            pass
    with pytest.raises(ReadFailed, match="the expert store was closed"):
        store.preload()


def test_close_under_an_open_lease_keeps_its_slots_until_it_ends(model: Model) -> None:
    pool = FakePool()
    store = make_store(model, pool, slots=2)
    layouts = store.layouts(3)
    with store.acquire(3, ids(0, 1)) as lease:
        batches = lease.batches()
        (expert,), (address,) = next(batches)
        store.close()
        assert wrong_planes(model, 3, int(expert), layouts[expert], int(address)) == []
        with pytest.raises(ReadFailed, match="closed"):
            next(batches)


def test_store_that_is_dropped_ends_its_reads_first(model: Model) -> None:
    pool = FakePool()
    store = make_store(model, pool, slots=2)
    arena = weakref.ref(next(iter(store._shelves.arenas.values())))
    lease = store.acquire(3, ids(0))
    lease.__enter__()
    lease.__exit__(None, None, None)
    del lease, store
    gc.collect()
    assert pool.closed
    assert arena() is None


def test_descriptors_are_bounded_and_given_back(tmp_path: Path) -> None:
    model = make_model(tmp_path, experts=8, shards=8, max_open_files=1)
    before = len(os.listdir("/proc/self/fd"))
    with model.container, ExpertStore(model.files(), slots=2, working_slots=6, read_threads=2) as store:
        store._reader._sources._descriptors._idle_limit = 2
        for layer in (3, 4, 3):
            run(store, model, layer, *range(8))
        assert len(os.listdir("/proc/self/fd")) <= before + 3
    assert len(os.listdir("/proc/self/fd")) <= before


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    slots=st.integers(1, 5),
    requests=st.lists(st.lists(st.integers(0, 5), unique=True, min_size=1, max_size=5), max_size=25),
    picks=st.randoms(use_true_random=False),
)
def test_hits_are_those_of_a_plain_lru_list(model: Model, slots: int, requests: list[list[int]], picks: Any) -> None:
    """Requests that fit the slots behave as a list ordered by last use, whatever order reads finish in."""
    pool = FakePool(finish=lambda waiting: picks.sample(waiting, picks.randint(1, len(waiting))))
    store = make_store(model, pool, slots=slots, working_slots=0)
    by_age: list[int] = []  # oldest first
    for request in requests:
        wanted = request[:slots]
        hits = [expert for expert in wanted if expert in by_age]
        batches = run(store, model, 3, *wanted)
        assert not hits or batches[0] == hits
        others = [expert for expert in by_age if expert not in wanted]
        kept = others[max(0, len(others) + len(wanted) - slots) :]
        by_age = kept + wanted
        assert store.resident(3) == sorted(by_age)
    assert idle(store)
