"""Reading containers: names, values, search directories, stamps, handles, and large headers."""

from __future__ import annotations

import json
import os
import resource
import struct
import threading
from pathlib import Path

import numpy as np
import pytest
from hostile_files import GOOD, INDEX, entry, index, many, raw, shard, stamps

from picaflor.container import files
from picaflor.container.index import Container
from picaflor.container.safetensors import ITEM_BYTES, parse_header
from picaflor.container.types import Span
from picaflor.errors import BadContainer, ReadFailed


def test_entries_are_absolute_and_in_file_order() -> None:
    text = json.dumps(
        {
            "__metadata__": {"format": "pt"},
            "late": entry("BF16", [2, 1, 2], 24, 32),
            "early": entry("F32", [], 4, 8),
            "empty": entry("F32", [3, 0], 8, 8),
            "packed": entry("U8", [1, 2], 8, 19),
        }
    ).encode()
    header = parse_header(text, 8 + len(text) + 40, "x", shard=7)
    start = 8 + len(text)
    assert header.data_start == start
    assert header.metadata == {"format": "pt"}
    found = [(t.name, t.dtype, t.shape, t.shard, t.offset - start, t.nbytes) for t in header.tensors]
    assert found == [
        ("early", "F32", (), 7, 4, 4),
        ("empty", "F32", (3, 0), 7, 8, 0),
        ("packed", "U8", (1, 2), 7, 8, 11),
        ("late", "BF16", (2, 1, 2), 7, 24, 8),
    ]


@pytest.mark.parametrize(("dtype", "item"), sorted(ITEM_BYTES.items()))
def test_every_dtype_with_its_size(dtype: str, item: int) -> None:
    text = json.dumps({"w": entry(dtype, [3, 5], 0, 15 * item)}).encode()
    (info,) = parse_header(text, 8 + len(text) + 15 * item, "x").tensors
    assert (info.dtype, info.shape, info.nbytes) == (dtype, (3, 5), 15 * item)


def test_extreme_shapes_that_are_legal() -> None:
    text = json.dumps({"a": entry("F32", [0, (1 << 63) - 1], 0, 0), "b": entry("U8", [(1 << 63) - 1], 0, 0)}).encode()
    shapes = [info.shape for info in parse_header(text, 8 + len(text), "x").tensors]
    assert shapes == [(0, (1 << 63) - 1), ((1 << 63) - 1,)]


def test_values_are_widened_exactly(tmp_path: Path) -> None:
    half = np.array([1.0, -0.0, 65504.0, 6e-8, np.inf], dtype="<f2")
    brain = np.array([0x3F80, 0x8001, 0x7F80, 0x4049], dtype="<u2")
    single = np.array([1.5, -2.25], dtype="<f4")
    data = half.tobytes() + bytes(2) + brain.tobytes() + single.tobytes()
    many(
        {
            "a.safetensors": shard(
                {
                    "half": entry("F16", [5], 0, 10),
                    "brain": entry("BF16", [2, 2], 12, 20),
                    "single": entry("F32", [2], 20, 28),
                },
                data,
            )
        }
    )(tmp_path)
    with Container.open(tmp_path) as container:
        assert container.read_float("half").tolist() == half.astype(np.float64).tolist()
        values = container.read_float("brain", (2, 2))
        assert values.dtype == np.float32
        assert values.view(np.uint32).tolist() == [[0x3F800000, 0x80010000], [0x7F800000, 0x40490000]]
        assert container.read_float("single", [2]).tolist() == [1.5, -2.25]
        assert container.read(container.require("brain")).tobytes() == brain.tobytes()
        view = bytearray(6)
        info = container.require("half")
        container.read_into(Span(info.shard, info.offset + 2, 6), memoryview(view))
        assert view == half.tobytes()[2:8]
        for wrong in (6, 11):
            with pytest.raises(ValueError, match=f"read of 10 bytes into a view of {wrong}"):
                container.read_into(info, memoryview(bytearray(wrong)))
        end = container.shards[0].nbytes
        for offset in (end - 2, end + 10, -4):
            with pytest.raises(BadContainer, match=r"a\.safetensors: bytes \[.*\) are outside the file of \d+ bytes"):
                container.read(Span(0, offset, 4))


def test_padding_is_left_out(tmp_path: Path) -> None:
    many(
        {
            name: shard({"__pad__.0": entry("U8", [8], 0, 8), tensor: entry("U8", [8], 8, 16)})
            for name, tensor in (("a.safetensors", "__pad__.x"), ("b.safetensors", "b"))
        }
    )(tmp_path)
    with Container.open(tmp_path) as container:
        assert sorted(container.tensors) == ["__pad__.x", "b"]
        assert container.padding_nbytes == 16


def test_split_directories_and_links(tmp_path: Path) -> None:
    main, second, blobs = (tmp_path / name for name in ("z-main", "a-second", "blobs"))
    for folder in (main, second, blobs):
        folder.mkdir()
    (blobs / "0123").write_bytes(GOOD)
    (main / "x.safetensors").symlink_to(blobs / "0123")
    (second / "x.safetensors").write_bytes(b"a copy that must not be read")
    (second / "y.safetensors").write_bytes(shard({"v": entry("U8", [4], 0, 4)}, b"abcd"))
    with Container.open(main, extra_dirs=[second]) as container:
        assert [str(s.path) for s in container.shards] == [str(second / "y.safetensors"), str(main / "x.safetensors")]
        assert [s.index for s in container.shards] == [0, 1]
        assert container.require("w").shard == 1
        assert bytes(container.read(container.require("v"))) == b"abcd"


def test_index_may_list_less_than_the_shards_hold(tmp_path: Path) -> None:
    both = shard({"w": entry("U8", [4], 0, 4), "extra": entry("U8", [4], 4, 8)})
    index({"w": "a.safetensors"}, {"a.safetensors": both})(tmp_path)
    with Container.open(tmp_path) as container:
        assert sorted(container.tensors) == ["extra", "w"]
        assert container.notes == (f"{tmp_path / INDEX}: does not list 1 tensors that are in the shards",)


def test_index_of_the_source_checkpoint_beside_converted_shards(tmp_path: Path) -> None:
    index(
        {"w": "model-00001-of-00002.safetensors"},
        {"out-00000.safetensors": GOOD, "out-mtp-00003.safetensors": shard({}), "out-idx-00001.safetensors": shard({})},
    )(tmp_path)
    with Container.open(tmp_path) as container:
        assert container.notes == (f"{tmp_path / INDEX}: ignored: it names none of the shards here",)
        assert "w" in container


def test_missing_shards_of_an_index_can_be_listed(tmp_path: Path) -> None:
    index({"w": "a.safetensors", "v": "b.safetensors"}, {"a.safetensors": GOOD})(tmp_path)
    with Container.open(tmp_path, allow_missing=True) as container:
        assert container.missing_shards == ("b.safetensors",)
        assert list(container.tensors) == ["w"]


def test_an_index_that_is_wrong_is_refused_even_when_shards_may_be_missing(tmp_path: Path) -> None:
    index({"w": "b.safetensors", "v": "a.safetensors"}, {"a.safetensors": GOOD})(tmp_path)
    with pytest.raises(BadContainer, match=r'stale index: tensor "w" should be in b\.safetensors, but it is in a\.'):
        Container.open(tmp_path, allow_missing=True)


def test_stamps_are_merged_and_rules_kept_raw(tmp_path: Path) -> None:
    stamps('{"w": "int8-row", "elsewhere": "new-name"}', '{"w": "int8-row"}', '{"w": "int8-row", "w": "int8-row"}')(
        tmp_path
    )
    rules = shard({}, metadata={"picaflor.formats": "anything", "format": "pt"})
    (tmp_path / "9.safetensors").write_bytes(rules)
    with Container.open(tmp_path) as container:
        assert container.stamps == {"w": "int8-row", "elsewhere": "new-name"}
        ((where, text),) = container.rules_json
        assert (where.path.name, where.index, text) == ("9.safetensors", 3, "anything")


def test_exactly_4096_stamps_are_accepted(tmp_path: Path) -> None:
    stamps(*[json.dumps({f"t{n}": "f32" for n in range(start, start + 2048)}) for start in (0, 2048, 1000)])(tmp_path)
    with Container.open(tmp_path) as container:
        assert len(container.stamps) == 4096


def test_side_files(tmp_path: Path) -> None:
    many({"a.safetensors": GOOD, "config.json": '{"model_type": "x", "n": [1]}'})(tmp_path)
    with Container.open(tmp_path) as container:
        assert container.config() == {"model_type": "x", "n": [1]}
        assert container.side_json("generation_config.json") is None


def test_sixty_thousand_routed_tensors(tmp_path: Path) -> None:
    entries: dict[str, object] = {}
    offset = 0
    for layer in range(40):
        for expert in range(250):
            for part in ("down", "gate", "up"):
                for suffix, dtype, nbytes, shape in (("", "U8", 6, [6]), (".qs", "F32", 4, [1])):
                    name = f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight{suffix}"
                    entries[name] = entry(dtype, shape, offset, offset + nbytes)
                    offset += nbytes
    assert len(entries) == 60_000
    data = np.arange(offset, dtype=np.uint32).astype(np.uint8)
    (tmp_path / "a.safetensors").write_bytes(raw(json.dumps(entries).encode(), data.tobytes()))
    with Container.open(tmp_path) as container:
        assert len(container) == 60_000
        info = container.require("model.layers.39.mlp.experts.249.up_proj.weight.qs")
        assert info.offset + info.nbytes == container.shards[0].nbytes
        assert container.read(info).tolist() == data[-4:].tolist()


def _numbered(folder: Path, count: int) -> None:
    many(
        {f"{n:03d}.safetensors": shard({f"t{n}": entry("U8", [4], 0, 4)}, struct.pack("<I", n)) for n in range(count)}
    )(folder)


def _check_numbers(container: Container, count: int) -> None:
    for n in [*range(count), *reversed(range(count))]:
        assert struct.unpack("<I", container.read(container.require(f"t{n}")).tobytes()) == (n,)


def test_bounded_handles(tmp_path: Path) -> None:
    _numbered(tmp_path, 12)
    with Container.open(tmp_path, max_open_files=3) as container:
        _check_numbers(container, 12)
        assert container._files.open_count == 3
    assert container._files.open_count == 0
    with pytest.raises(ReadFailed, match=r"000\.safetensors: the container was closed"):
        container.read(container.require("t0"))


def test_the_least_recently_used_file_is_closed(tmp_path: Path) -> None:
    _numbered(tmp_path, 3)
    opened = files.FileSet([tmp_path / f"00{n}.safetensors" for n in range(3)], limit=2)
    for number in (0, 1, 0, 2):
        opened.stamp(number)
    assert sorted(opened._open) == [0, 2]
    opened.close()


def test_one_handle_and_many_threads(tmp_path: Path) -> None:
    _numbered(tmp_path, 6)
    failures: list[BaseException] = []
    with Container.open(tmp_path, max_open_files=1) as container:

        def work() -> None:
            try:
                for _ in range(20):
                    _check_numbers(container, 6)
            except BaseException as error:
                failures.append(error)
                raise

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
        assert not any(thread.is_alive() for thread in threads)
        assert container._files.open_count <= 1
    assert failures == []


@pytest.fixture
def few_files() -> object:
    """The soft limit of open files lowered to 128 for one test."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, before[1]))
    yield before[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_more_shards_than_the_soft_limit(tmp_path: Path, few_files: int) -> None:
    _numbered(tmp_path, 140)
    with Container.open(tmp_path) as container:
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= 2 * 140
        _check_numbers(container, 140)


def test_more_shards_than_a_limit_that_cannot_be_raised(
    tmp_path: Path, few_files: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise ValueError("not allowed")

    monkeypatch.setattr(resource, "setrlimit", refuse)
    _numbered(tmp_path, 140)
    with Container.open(tmp_path) as container:
        assert container._files.open_count == (128 - 64) // 2
        _check_numbers(container, 140)
    monkeypatch.undo()


def _take_all(folder: Path) -> list[int]:
    """Open files until the system refuses."""
    handles: list[int] = []
    while True:
        try:
            handles.append(os.open(folder, os.O_RDONLY))
        except OSError:
            return handles


def test_no_descriptor_left(tmp_path: Path, few_files: int) -> None:
    _numbered(tmp_path, 3)
    used: list[int] = []
    with Container.open(tmp_path, max_open_files=2) as container:
        try:
            used = _take_all(tmp_path)
            _check_numbers(container, 3)  # an idle file is closed for each that is opened
            container.close()
            used += _take_all(tmp_path)
            with pytest.raises(ReadFailed, match=r"000\.safetensors: too many open files, and none of ours is idle"):
                files.FileSet([tmp_path / "000.safetensors"], limit=1).stamp(0)
        finally:
            for handle in used:
                os.close(handle)


def test_interrupted_and_short_reads_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = bytes(range(200))
    (tmp_path / "a.safetensors").write_bytes(shard({"w": entry("U8", [200], 0, 200)}, data))
    real = os.preadv
    calls: list[int] = []

    def stutter(handle: int, buffers: list[memoryview], offset: int) -> int:
        calls.append(len(buffers[0]))
        if len(calls) % 3 == 0:
            raise InterruptedError
        return real(handle, [buffers[0][:7]], offset)

    with Container.open(tmp_path) as container:
        monkeypatch.setattr(os, "preadv", stutter)
        monkeypatch.setattr(files, "CHUNK_BYTES", 64)
        assert bytes(container.read(container.require("w"))) == data
        assert max(calls) == 64


def test_disk_errors_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.safetensors").write_bytes(GOOD)

    def broken(*_: object) -> int:
        raise OSError(5, "Input/output error")

    with Container.open(tmp_path) as container:
        monkeypatch.setattr(os, "preadv", broken)
        with pytest.raises(
            ReadFailed, match=r"a\.safetensors: reading 16 bytes at offset 73 failed after 0: Input/output"
        ):
            container.read(container.require("w"))
