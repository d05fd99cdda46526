"""The store under several threads, with real read threads; and the read pool's Python side."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path

import numpy as np
import pytest
from store_harness import ids, make_model, wrong_planes

from picaflor._native import ReadPool, ReadStatus
from picaflor.store.store import ExpertStore
from picaflor.store.types import ExpertKey


@pytest.mark.parametrize(("slots", "working"), [(1, 0), (1, 3), (3, 2), (8, 0)])
def test_threads_share_a_store(tmp_path: Path, slots: int, working: int) -> None:
    model = make_model(tmp_path, experts=8)
    store = ExpertStore(model.files(), slots=slots, working_slots=working, read_threads=3)
    layouts = {layer: store.layouts(layer) for layer in (3, 4)}
    problems: list[object] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for _ in range(40):
                layer = rng.choice((3, 4))
                wanted = rng.sample(range(8), rng.randint(1, 8))
                seen: list[int] = []
                with store.acquire(layer, ids(*wanted)) as lease:
                    for found, addresses in lease.batches():
                        for expert, address in zip(found.tolist(), addresses.tolist(), strict=True):
                            problems.extend(wrong_planes(model, layer, expert, layouts[layer][expert], address))
                        seen += found.tolist()
                        if rng.random() < 0.05:
                            break
                    else:
                        assert sorted(seen) == sorted(wanted)
        except BaseException as error:
            problems.append(error)
            raise

    threads = [threading.Thread(target=work, args=(seed,), daemon=True) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert problems == []
    total = store.counters.total()
    assert total.requests == 160
    assert total.failed == 0
    assert total.reads <= total.loaded
    if slots == 8:
        assert total.pinned > 0
        assert total.reads <= 16
    store.close()
    model.container.close()


def test_preload_by_read_threads(tmp_path: Path) -> None:
    model = make_model(tmp_path, experts=40, widths=(48, 64, 96), shards=3)
    with model.container, ExpertStore(model.files(), slots=40, read_threads=2) as store:
        keys = [ExpertKey(layer, expert) for layer in (3, 4, 5) for expert in range(40)]
        assert store.preload() == sum(store.files.reads(key).read_nbytes for key in keys)
        for layer in (3, 4, 5):
            with store.acquire(layer, np.arange(40, dtype=np.int32)) as lease:
                ((found, addresses),) = lease.batches()
                for expert, address in zip(found.tolist(), addresses.tolist(), strict=True):
                    assert wrong_planes(model, layer, expert, store.layouts(layer)[expert], address) == []
        pool = store._reader._pool
        assert isinstance(pool, ReadPool)
        stats = pool.stats()
        assert (stats.jobs, stats.nbytes) == (120, store.counters.preload_bytes)
        assert 0 < store.busy_s() <= stats.seconds + 0.1
        assert store.busy_s() <= store.counters.preload_s + 0.1


def test_read_pool_from_python(tmp_path: Path) -> None:
    content = np.arange(1000, dtype=np.uint16).tobytes()
    path = tmp_path / "numbers"
    path.write_bytes(content)
    memory = np.zeros(64, dtype=np.uint8)
    base = memory.ctypes.data
    with path.open("rb") as file:
        fd = file.fileno()
        pool = ReadPool(2)
        rest = [0, -1, 0]
        places = [[fd, 100, 10, 3], [fd, 500, 4, 20], [fd, 1990, 20, 40], [1 << 20, 0, 1, 0]]
        runs = np.array([place + rest for place in places], dtype=np.int64)
        bounds = np.array([0, 2, 3, 4], dtype=np.int64)
        bases = np.array([base, base + 1, base], dtype=np.uint64)
        first = pool.submit(runs, bounds, bases, demand=True)
        tickets = np.arange(first, first + 3, dtype=np.uint64)
        for ticket in tickets:
            assert len(pool.wait_any(np.array([ticket]), -1)) == 1
        good, short, closed = pool.wait_any(tickets, 0)
        assert (good.status, good.ticket, good.nbytes) == (ReadStatus.OK, first, 14)
        assert (short.status, short.run, short.found) == (ReadStatus.SHORT, 0, 10)
        assert (closed.status, os.strerror(closed.error)) == (ReadStatus.ERROR, "Bad file descriptor")
        assert memory[3:13].tobytes() == content[100:110]
        assert memory[20:24].tobytes() == content[500:504]
        assert memory[41:51].tobytes() == content[1990:]
        assert memory.sum() == sum(content[100:110]) + sum(content[500:504]) + sum(content[1990:])
        pool.forget(first)
        assert [result.ticket for result in pool.wait_any(tickets, 0)] == [first + 1, first + 2]
        assert not pool.cancel(first + 1)
        for bad in ([fd, -1, 1, 0], [fd, 0, -1, 0], [-1, 0, 1, 0], [1 << 40, 0, 1, 0], [fd, 0, 1, -1]):
            with pytest.raises(ValueError, match=r"read|descriptor|slot"):
                pool.submit(np.array([bad + rest]), np.array([0, 1]), bases[:1], demand=True)
        for bad_bounds in ([0, 2], [0, -1], [1, 1], [0], [0, 1, 1]):
            with pytest.raises(ValueError, match="bound"):
                pool.submit(runs[:1], np.array(bad_bounds), bases[:1], demand=True)
        pool.close()
        with pytest.raises(RuntimeError, match="closed"):
            pool.submit(runs[:1], np.array([0, 1]), bases[:1], demand=True)
