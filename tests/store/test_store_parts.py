"""The store's small parts: arenas, layouts, counters."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest
from store_harness import make_model

from picaflor.errors import OutOfBudget
from picaflor.store.arena import Arena, arena_bytes, slot_stride
from picaflor.store.counters import LayerCounters, StoreCounters
from picaflor.store.reader import ExpertFiles
from picaflor.store.types import ExpertKey


@pytest.mark.parametrize("nbytes", [1, 64, 100, 4096, 1 << 20])
def test_arena_slots(nbytes: int) -> None:
    arena = Arena(5, nbytes)
    assert arena.base % mmap.PAGESIZE == 0
    assert arena.stride == slot_stride(nbytes) >= nbytes + 64
    assert arena.stride % 64 == 0
    assert arena.stride < nbytes + 128
    assert arena.nbytes == arena_bytes(5, nbytes) >= 5 * arena.stride
    assert arena.nbytes - 5 * arena.stride < mmap.PAGESIZE
    for slot in range(5):
        view = arena.view(slot)
        assert view.ctypes.data == arena.address(slot) == arena.base + slot * arena.stride
        assert view.shape == (nbytes,)
        view[:] = slot + 1
    assert [int(arena.view(slot).min()) for slot in range(5)] == [1, 2, 3, 4, 5]
    for bad in (-1, 5):
        with pytest.raises(IndexError, match=f"slot {bad} of 5"):
            arena.address(bad)
    kept = arena.view(2)
    arena.close()
    assert (kept == 3).all()
    with pytest.raises(IndexError, match="slot 0 of 0"):
        arena.address(0)


def test_arena_is_private_memory() -> None:
    """Shared mappings would count as shared memory and get no large pages."""
    arena = Arena(2, 1 << 20)
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(edge, 16) for edge in line.split()[0].split("-"))
        if first <= arena.base < last:
            assert line.split()[1] == "rw-p"
            assert line.split()[4] == "0"  # no file
            break
    else:
        pytest.fail("the arena is in no mapping")
    arena.close()


def test_empty_and_impossible_arenas() -> None:
    empty = Arena(0, 1 << 20)
    assert (empty.nbytes, empty.base) == (0, 0)
    empty.close()
    with pytest.raises(OutOfBudget, match=r"the system gives no .* bytes for 1000000 expert slots of"):
        Arena(1_000_000, 1 << 40)


def test_layouts_are_the_read_plan(tmp_path: Path) -> None:
    model = make_model(tmp_path, widths=(48, 96), experts=3, shards=1)
    with model.container:
        files = model.files()
        for layer in (3, 4):
            layouts = files.layouts(layer)
            for expert, layout in zip(model.experts[layer], layouts, strict=True):
                reads = files.reads(ExpertKey(layer, expert.expert))
                assert layout.nbytes == reads.nbytes <= files.slot_nbytes(layer)
                assert (layout.gate.offsets, layout.up.offsets, layout.down.offsets) == reads.offsets
                assert len(set(layout.gate.offsets + layout.up.offsets + layout.down.offsets)) == 6
                for matrix, stored in zip((layout.gate, layout.up, layout.down), expert.matrices, strict=True):
                    assert (matrix.format, matrix.rows, matrix.cols) == (stored.format, stored.rows, stored.cols)
        with pytest.raises(ValueError, match="expert 1 of layer 3 stands at place 0 of layer 3"):
            ExpertFiles(model.container, {3: model.experts[3][1:]})
        with pytest.raises(ValueError, match="expert 0 of layer 4 stands at place 0 of layer 3"):
            ExpertFiles(model.container, {3: model.experts[4]})


def test_counters_sum_and_reset_in_place() -> None:
    first = LayerCounters(requests=1, pinned=2, lru=3, joined=4, loaded=5, reads=6, read_bytes=7, service_s=0.5)
    counters = StoreCounters({3: first, 4: LayerCounters(loaded=10, wait_s=0.25)}, preload_bytes=9)
    total = counters.total()
    assert (total.requests, total.loaded, total.service_s, total.wait_s) == (1, 15, 0.5, 0.25)
    assert (total.hits, total.asked) == (5, 24)
    counters.reset()
    assert counters.layers[3] is first
    assert first == LayerCounters()
    assert counters.preload_bytes == 0
    assert np.isclose(counters.total().wait_s, 0)
