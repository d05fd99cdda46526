"""Experts as views into mapped files: right bytes, nothing copied, and a lost file is one line, not a dead process."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from store_harness import Model, ids, make_model, wrong_planes

from picaflor._native import FileMap
from picaflor.errors import BadContainer, ReadFailed
from picaflor.store.direct import file_system
from picaflor.store.mapped import MappedStore, lies_in_memory

PAGE = os.sysconf("SC_PAGESIZE")


@pytest.fixture
def model(tmp_path: Path) -> Iterator[Model]:
    made = make_model(tmp_path)
    with made.container:
        yield made


def check_all(store: MappedStore, model: Model) -> None:
    for layer in (3, 4):
        with store.acquire(layer, ids(5, 0, 3)) as lease:
            for found, addresses in lease.batches():
                assert found.tolist() == [5, 0, 3]
                for expert, address in zip(found.tolist(), addresses.tolist(), strict=True):
                    assert wrong_planes(model, layer, expert, store.layouts(layer)[expert], address) == []


def test_views_have_the_files_bytes_and_no_memory_of_their_own(model: Model) -> None:
    with MappedStore(model.files(), model.experts) as store:
        check_all(store, model)
        total = store.counters.total()
        assert (total.requests, total.pinned, total.loaded, total.read_bytes) == (2, 6, 0, 0)
        assert store.nbytes == 0
        assert store.mapped_bytes == sum(shard.nbytes for shard in model.container.shards)
        assert store.resident(3) == [0, 1, 2, 3, 4, 5]
        again = [store.acquire(3, ids(2))._addresses[0] for _ in range(2)]
        assert again[0] == again[1]
        assert again[0] % 64 == 0
        with pytest.raises(IndexError):
            store.acquire(3, ids(6))
        with pytest.raises(IndexError):
            store.acquire(3, ids(-1))
    with pytest.raises(ReadFailed, match="the expert store was closed"):
        store.acquire(3, ids(0))


def test_a_file_that_is_cut_before_or_while_it_is_used(model: Model) -> None:
    """The cut is inside the last page too, where no bus error tells: its bytes read as zeros."""
    path = model.container.shards[1].path
    whole = path.read_bytes()
    with MappedStore(model.files(), model.experts) as store:
        check_all(store, model)
        os.truncate(path, len(whole) - 1)
        with pytest.raises(
            ReadFailed, match=r"model-00002-of-00002\.safetensors: the file was cut while it was mapped"
        ):
            check_all(store, model)
        path.write_bytes(b"")
        with path.open("r+b") as file:
            file.write(whole)
        check_all(store, model)
        with store.acquire(3, ids(1)) as lease:
            batches = lease.batches()
            _, addresses = next(batches)
            os.truncate(path, 0)
            assert ctypes.string_at(int(addresses[0]), 64) == bytes(64)  # no SIGBUS
            with path.open("r+b") as file:
                file.write(whole)  # whole again before anybody asks: the loss is remembered
            with pytest.raises(ReadFailed, match="pages of a mapped file were lost while they were read"):
                next(batches)
        check_all(store, model)


def test_a_file_shorter_than_its_header_said_is_refused(model: Model) -> None:
    os.truncate(model.container.shards[0].path, 100)
    with pytest.raises(ReadFailed, match="the experts' files cannot be mapped: a file is shorter than it was"):
        MappedStore(model.files(), model.experts)


def test_scales_off_a_multiple_of_four_are_refused_by_name(model: Model) -> None:
    expert = model.experts[3][0]
    weight, scales = expert.gate.spans
    moved = replace(expert, gate=replace(expert.gate, spans=(weight, replace(scales, offset=scales.offset + 1))))
    experts = {**model.experts, 3: [moved, *model.experts[3][1:]]}
    with pytest.raises(BadContainer, match=r"experts\.0\.gate_proj\.weight.: its scales begin at byte .*--mapped off"):
        MappedStore(model.files(), experts)


@pytest.mark.parametrize("nbytes", [0, 1, PAGE - 1, PAGE, PAGE + 1])
def test_64_bytes_are_readable_behind_every_file(tmp_path: Path, nbytes: int) -> None:
    content = bytes(range(1, 256)) * (nbytes // 255 + 1)
    handles = []
    for number in range(2):
        (tmp_path / str(number)).write_bytes(content[:nbytes])
        handles.append(os.open(tmp_path / str(number), os.O_RDONLY))
    mapped = FileMap(handles, [nbytes, nbytes])
    for handle in handles:
        os.close(handle)
    for number in range(2):
        assert ctypes.string_at(mapped.address(number), nbytes + 64) == content[:nbytes] + bytes(64)
    assert mapped.cut() == -1
    assert not mapped.broken


def test_a_bus_error_elsewhere_still_ends_the_process(tmp_path: Path) -> None:
    """The handler minds its own maps only."""
    path = tmp_path / "file"
    path.write_bytes(bytes(2 * PAGE))
    program = f"""
import ctypes, mmap, os
import numpy as np
from picaflor._native import FileMap
handle = os.open({str(path)!r}, os.O_RDONLY)
ours = FileMap([handle], [{2 * PAGE}])
other = np.frombuffer(mmap.mmap(handle, {2 * PAGE}, prot=mmap.PROT_READ), np.uint8)
os.truncate({str(path)!r}, 0)
assert ctypes.string_at(ours.address(0), 4) == bytes(4)
assert ours.broken
print("alive", flush=True)
other.sum()
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.stdout == "alive\n", ended.stderr
    assert ended.returncode == -7


def test_only_files_without_a_drive_lie_in_memory(model: Model) -> None:
    with model.container.handle(0) as handle:
        kind = file_system(handle)
    assert lies_in_memory(model.files()) is (kind in ("tmpfs", "ramfs"))
