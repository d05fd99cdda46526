"""Reads past the page cache, from replicas and from files that fail: the same bytes, or one clear line."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_harness import FakePool, Model, Status, ids, make_model, wrong_planes

from picaflor.container.expert_file import BLOCK_BYTES, plan_reads
from picaflor.container.types import Expert, Matrix, Span
from picaflor.errors import BadContainer, ReadFailed
from picaflor.store.direct import direct_pays, file_system, probe_direct_files
from picaflor.store.mirror import Mirror, bucket, compare_bytes, cuts, open_replica, open_replicas
from picaflor.store.mirror_probe import measure_sources
from picaflor.store.reader import ExpertFiles, native_pool
from picaflor.store.sources import Sources
from picaflor.store.store import ExpertStore
from picaflor.store.types import ExpertKey


@pytest.fixture
def model(tmp_path: Path) -> Iterator[Model]:
    folder = tmp_path / "model"
    folder.mkdir()
    made = make_model(folder)
    with made.container:
        yield made


def blocks_of(model: Model) -> dict[int, int]:
    """Block size of each shard; skips where the tests' folder lies on a file system that cannot."""
    found = probe_direct_files(model.container, range(len(model.container.shards)))
    if found.refused:
        pytest.skip(f"reads past the page cache: {next(iter(found.refused.values()))}")
    return dict(found.blocks)


def check_all(store: ExpertStore, model: Model) -> None:
    """Every expert of every layer, twice, has the file's bytes."""
    for layer in (3, 4, 3):
        for expert in range(6):
            with store.acquire(layer, ids(expert)) as lease:
                for found, addresses in lease.batches():
                    assert found.tolist() == [expert]
                    assert wrong_planes(model, layer, expert, store.layouts(layer)[expert], int(addresses[0])) == []


@pytest.mark.parametrize("engine", ["threads", "io_uring"])
@pytest.mark.parametrize("direct", [False, True])
def test_every_way_of_reading_gives_the_files_bytes(model: Model, engine: str, direct: bool) -> None:
    """The harness writes tensors at offsets that are no multiple of a block."""
    blocks = blocks_of(model) if direct else {}
    files = ExpertFiles(model.container, model.experts, blocks=blocks)
    reads = [run for layer in files.layers for e in range(6) for run in files.reads(ExpertKey(layer, e)).runs]
    assert all(run.blocks is direct for run in reads)
    assert any(run.offset % 512 for run in reads)
    told: list[str] = []
    pool = native_pool(3, engine=engine, notice=told.append)
    sources = Sources(model.container, blocks={(0, shard): size for shard, size in blocks.items()})
    with ExpertStore(files, slots=2, working_slots=2, pool=pool, sources=sources, notice=told.append) as store:
        check_all(store, model)
        assert store._reader.read_bytes[0] > 0
        assert store.spared_reads == {}
    assert told == [] or "refuses it" in told[0]


def test_a_file_system_that_refuses_blocks_later_is_read_through_the_page_cache(model: Model) -> None:
    """The fake pool stands for a drive that answers EINVAL: the spare is the same file, named once."""
    told: list[str] = []
    files = ExpertFiles(model.container, model.experts, blocks={0: 512, 1: 512})
    sources = Sources(model.container, blocks={(0, 0): 512, (0, 1): 512})
    pool = RefusingPool()
    with ExpertStore(files, slots=2, working_slots=2, pool=pool, sources=sources, notice=told.append) as store:
        check_all(store, model)
        assert store.spared_reads == {"reads.direct": 2}
    assert len(told) == 1
    assert "Invalid argument; it is read through the page cache instead" in told[0]
    assert pool.refused == 2  # once per shard: after that nobody tries it again


class RefusingPool(FakePool):
    """Every read in blocks is refused and comes from the spare descriptor, as the native pool does it."""

    refused = 0

    def submit(self, runs: Any, bounds: Any, bases: Any, *, demand: bool) -> int:
        spared = [bool(block) for block in runs[:, 4]]
        self.refused += sum(spared)
        plain = runs.copy()
        plain[spared, 0] = plain[spared, 5]
        first = super().submit(plain, bounds, bases, demand=demand)
        for job in range(len(bases)):
            self.spared = {**getattr(self, "spared", {}), first + job: any(spared[bounds[job] : bounds[job + 1]])}
        return first

    def _run(self, ticket: int) -> None:
        super()._run(ticket)
        if self.spared[ticket]:
            self.done[ticket].spares, self.done[ticket].spare_run = 1, 0
            self.done[ticket].spare_error = errno.EINVAL


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_offsets_can_be_read_in_whole_blocks(tmp_path: Path, data: st.DataObject) -> None:
    """Planes at arbitrary places: block runs keep their rest, never overlap, and the native pool fills them right."""
    sizes = data.draw(st.lists(st.integers(1, 6000), min_size=6, max_size=6))
    gaps = data.draw(st.lists(st.integers(0, 9000), min_size=6, max_size=6))
    order = data.draw(st.permutations(range(6)))
    spans: dict[int, Span] = {}
    place = 0
    for plane in order:
        place += gaps[plane]
        spans[plane] = Span(0, place, sizes[plane])
        place += sizes[plane]
    matrices = [Matrix(str(m), "any", 1, 1, 0, (spans[2 * m], spans[2 * m + 1])) for m in range(3)]
    plan = plan_reads(Expert(3, 0, *matrices), blocks={0})
    content = np.random.default_rng(place).integers(0, 256, place + 100, dtype=np.uint8)
    path = tmp_path / "planes"
    content.tofile(path)
    ends = 0
    for run in plan.runs:
        head = run.offset % BLOCK_BYTES if run.blocks else 0
        assert run.slot_offset - head >= ends
        assert not run.blocks or (run.slot_offset - run.offset) % BLOCK_BYTES == 0
        ends = run.slot_offset + run.nbytes
    memory = np.zeros(plan.nbytes + 3 * BLOCK_BYTES, dtype=np.uint8)
    base = -(-memory.ctypes.data // BLOCK_BYTES) * BLOCK_BYTES
    handle = os.open(path, os.O_RDONLY)
    pool = native_pool(2)
    try:
        rows = [(handle, run.offset, run.nbytes, run.slot_offset, 512 if run.blocks else 0, -1, 0) for run in plan.runs]
        bounds = np.array([0, len(rows)], dtype=np.int64)
        bases = np.array([base], dtype=np.uint64)
        ticket = pool.submit(np.array(rows, dtype=np.int64), bounds, bases, demand=True)
        (outcome,) = pool.wait_any(np.array([ticket], dtype=np.uint64), -1)
        assert outcome.status.name == "OK"
    finally:
        pool.close()
        os.close(handle)
    start = base - memory.ctypes.data
    for matrix, offsets in zip(matrices, plan.offsets, strict=True):
        for plane, (span, offset) in enumerate(zip(matrix.spans, offsets, strict=True)):
            found = memory[start + offset : start + offset + span.nbytes]
            assert (found == content[span.offset : span.offset + span.nbytes]).all()
            assert plane == 0 or offset % 4 == 0


def test_slots_for_blocks_keep_their_alignment(model: Model) -> None:
    files = ExpertFiles(model.container, model.experts, blocks={0, 1})
    with ExpertStore(files, slots=3, working_slots=2, pool=FakePool()) as store:
        for arena in store._shelves.arenas.values():
            assert [arena.address(slot) % BLOCK_BYTES for slot in range(arena.slots)] == [0] * arena.slots


def test_when_direct_reads_pay() -> None:
    assert not direct_pays(streamed_bytes=0, spare_bytes=0)
    assert not direct_pays(streamed_bytes=100, spare_bytes=None)
    assert not direct_pays(streamed_bytes=99, spare_bytes=66)
    assert direct_pays(streamed_bytes=99, spare_bytes=65)
    assert direct_pays(streamed_bytes=1, spare_bytes=-5)


def test_files_in_memory_are_no_case_for_direct_reads() -> None:
    shared = Path("/dev/shm")
    if not shared.is_dir() or not os.access(shared, os.W_OK):
        pytest.skip("no /dev/shm to put a file into")
    folder = shared / f"picaflor-test-{os.getpid()}"
    folder.mkdir()
    try:
        with make_model(folder).container as container:
            found = probe_direct_files(container, [0])
            with container.handle(0) as handle:
                kind = file_system(handle)
        assert kind in ("tmpfs", "ramfs")
        assert found.blocks == {}
        assert "lies in memory (tmpfs)" in found.refused[0]
    finally:
        shutil.rmtree(folder)


# ---- replicas ----


def test_the_hash_is_that_of_the_c_engine() -> None:
    assert [bucket(3, 0), bucket(3, 1), bucket(77, 255), bucket(78, 0)] == [241, 88, 88, 218]
    shares = np.bincount([bucket(layer, expert) for layer in range(3, 78) for expert in range(256)], minlength=256)
    assert shares.min() > 0


@pytest.mark.parametrize(
    ("weights", "ends"),
    [
        ((1.0,), (256,)),
        ((1.0, 1.0), (128, 256)),
        ((9.0, 3.0), (192, 256)),
        ((1.0, 1.0, 1.0), (85, 171, 256)),
        ((1000.0, 0.0), (255, 256)),
        ((0.0, 0.0, 5.0), (1, 2, 256)),
    ],
)
def test_cuts_follow_the_weights(weights: tuple[float, ...], ends: tuple[int, ...]) -> None:
    assert cuts(weights) == ends


def test_cuts_refuse_what_shares_nothing_out() -> None:
    for weights in ([], [0.0, 0.0], [1.0, -1.0]):
        with pytest.raises(ValueError, match="weights of"):
            cuts(weights)


def copy_of(model: Model, folder: Path, *names: str) -> Path:
    """A directory with copies of the model's shards, all or those named."""
    folder.mkdir()
    for shard in model.container.shards:
        if not names or shard.path.name in names:
            shutil.copy(shard.path, folder / shard.path.name)
    return folder


def mirrored(model: Model, folder: Path, pool: Any, told: list[str]) -> ExpertStore:
    mirror = Mirror.shared_by([open_replica(model.container, folder)], [1.0, 1.0])
    sources = Sources(model.container, mirror=mirror)
    return ExpertStore(model.files(), slots=2, working_slots=2, pool=pool, sources=sources, notice=told.append)


def test_experts_are_shared_out_between_the_copies(model: Model, tmp_path: Path) -> None:
    told: list[str] = []
    with mirrored(model, copy_of(model, tmp_path / "copy"), native_pool(2), told) as store:
        check_all(store, model)
        sent = [store._reader._sources.mirror.source(layer, e, e % 2) for layer in (3, 4) for e in range(6)]
        assert sent == [0 if bucket(layer, e) < 128 else 1 for layer in (3, 4) for e in range(6)]
        assert set(sent) == {0, 1}
        assert min(store._reader.read_bytes) > 0
    assert told == []


def test_a_copy_that_lacks_a_shard_leaves_it_to_the_model(model: Model, tmp_path: Path) -> None:
    name = model.container.shards[1].path.name
    replica = open_replica(model.container, copy_of(model, tmp_path / "copy", name))
    mirror = Mirror.shared_by([replica], [0.0, 1.0])
    assert {mirror.source(3, expert, 0) for expert in range(6)} == {0}
    assert {mirror.source(3, expert, 1) for expert in range(6)} == {1}
    assert len(replica) == 1
    mirror.close()


def test_a_read_error_of_a_copy_falls_back_to_the_model_counted_and_named_once(model: Model, tmp_path: Path) -> None:
    """The copies are cut short while they are open."""
    told: list[str] = []
    folder = copy_of(model, tmp_path / "copy")
    with mirrored(model, folder, native_pool(2), told) as store:
        for path in folder.iterdir():
            with path.open("r+b") as file:
                file.truncate(300)
        check_all(store, model)
        assert list(store.spared_reads) == ["reads.mirror 1"]
        assert store.spared_reads["reads.mirror 1"] > 1
        assert store.counters.total().failed == 0
    assert len(told) == 1
    assert "the model's own file is read instead" in told[0]
    assert str(folder) in told[0]


def test_a_copy_that_is_removed_while_running(model: Model, tmp_path: Path) -> None:
    told: list[str] = []
    folder = copy_of(model, tmp_path / "copy")
    mirror = Mirror.shared_by([open_replica(model.container, folder)], [0.0, 1.0])
    for replica in mirror.replicas:
        replica.close()  # its descriptors are gone, as after a drive was pulled
    shutil.rmtree(folder)
    sources = Sources(model.container, mirror=mirror)
    files = model.files()
    with ExpertStore(
        files, slots=2, working_slots=2, pool=native_pool(2), sources=sources, notice=told.append
    ) as store:
        check_all(store, model)
    assert len(told) == 1
    assert "the model's own file is read instead" in told[0]


def test_a_disk_error_of_the_only_copy_is_an_error_and_the_next_request_works(model: Model) -> None:
    failing = [True]

    def fault(fd: int, offset: int, nbytes: int) -> tuple[Status, int, int] | None:
        return (Status.ERROR, errno.EIO, 7) if failing[0] else None

    with ExpertStore(model.files(), slots=2, working_slots=2, pool=FakePool(fault=fault)) as store:
        with (
            pytest.raises(ReadFailed, match=r"model-00001-of-00002\.safetensors: tensor .*Input/output error"),
            store.acquire(3, ids(0)) as lease,
        ):
            list(lease.batches())
        failing[0] = False
        check_all(store, model)


@pytest.mark.parametrize("direct", [False, True])
def test_a_file_cut_while_running_is_an_error_and_serves_again_when_it_is_whole(model: Model, direct: bool) -> None:
    blocks = blocks_of(model) if direct else {}
    files = ExpertFiles(model.container, model.experts, blocks=blocks)
    sources = Sources(model.container, blocks={(0, shard): size for shard, size in blocks.items()})
    path = model.container.shards[0].path
    whole = path.read_bytes()
    with ExpertStore(files, slots=2, working_slots=2, pool=native_pool(2), sources=sources) as store:
        check_all(store, model)
        with path.open("r+b") as file:
            file.truncate(len(whole) // 3)
        with pytest.raises(ReadFailed, match=r"model-00001-of-00002\.safetensors: tensor .*the file had .* bytes"):
            check_all(store, model)
        with path.open("r+b") as file:
            file.write(whole)
        check_all(store, model)


def test_what_is_no_copy_is_refused_by_name(model: Model, tmp_path: Path) -> None:
    first, second = model.container.shards
    longer = copy_of(model, tmp_path / "longer")
    with (longer / first.path.name).open("ab") as file:
        file.write(b"x")
    with pytest.raises(BadContainer, match=rf"mirror .*longer/{first.path.name}: {first.nbytes + 1} bytes, expected"):
        open_replica(model.container, longer)
    other = copy_of(model, tmp_path / "other")
    data = bytearray((other / second.path.name).read_bytes())
    place = data.index(b"experts.1")
    data[place : place + 9] = b"experts.9"
    (other / second.path.name).write_bytes(data)
    with pytest.raises(BadContainer, match=rf"mirror .*other/{second.path.name}: its header differs"):
        open_replicas(model.container, [copy_of(model, tmp_path / "good"), other])
    with pytest.raises(BadContainer, match=r"mirror .*nowhere: no such directory"):
        open_replica(model.container, tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadContainer, match="has none of the model's 2 shards"):
        open_replica(model.container, tmp_path / "empty")
    with pytest.raises(BadContainer, match="5 mirrors; at most 4"):
        open_replicas(model.container, [tmp_path / "good"] * 5)


def test_comparing_every_byte_finds_the_one_that_differs(model: Model, tmp_path: Path) -> None:
    folder = copy_of(model, tmp_path / "copy")
    path = folder / model.container.shards[1].path.name
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    replica = open_replica(model.container, folder)
    found = compare_bytes(model.container, replica, lambda stage, done, total: None)
    assert found is not None
    assert (found.path, found.offset) == (path, len(data) - 3)
    replica.close()


def test_a_source_that_cannot_be_read_gets_no_weight(model: Model, tmp_path: Path) -> None:
    replica = open_replica(model.container, copy_of(model, tmp_path / "copy"))
    rates = measure_sources(model.container, [replica], nbytes=500, direct=False)
    assert min(rates) > 0
    replica.close()
    mine, gone = measure_sources(model.container, [replica], nbytes=500, direct=False)
    assert mine > 0
    assert gone == 0
