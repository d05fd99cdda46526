"""The writer: layout on disk, round trips, other readers, and what a failed write leaves behind."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import signal
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import load_file

from picaflor.container.expert_file import plan_reads
from picaflor.container.index import Container
from picaflor.container.safetensors import ITEM_BYTES
from picaflor.container.types import Expert, Matrix, Span
from picaflor.container.writer import WRITTEN_DTYPES, ContainerWriter, TensorSpec
from picaflor.errors import BadContainer, PicaflorError, UsageError, WriteFailed

RNG = np.random.default_rng(7)
PARTS = ("down", "gate", "up")


def expert_arrays(layer: int, number: int, rows: int, cols: int, group: int) -> dict[str, NDArray[Any]]:
    """Random int4-grouped codes and scales of one expert: gate and up [rows, cols], down [cols, rows]."""
    arrays: dict[str, NDArray[Any]] = {}
    for part in PARTS:
        out, width = (cols, rows) if part == "down" else (rows, cols)
        name = f"model.layers.{layer}.mlp.experts.{number}.{part}_proj.weight"
        arrays[name] = RNG.integers(0, 256, out * -(-width // 2), dtype=np.uint8)
        arrays[name + ".qs"] = RNG.random(out * -(-width // group), dtype=np.float32)
    return arrays


def declare_expert(writer: ContainerWriter, arrays: dict[str, NDArray[Any]]) -> None:
    """Declare an expert whose arrays are returned as they are."""
    specs = {
        part: [
            TensorSpec(name, "F32" if name.endswith(".qs") else "U8", array.shape)
            for name, array in arrays.items()
            if f".{part}_proj" in name
        ]
        for part in PARTS
    }
    writer.add_expert(down=specs["down"], gate=specs["gate"], up=specs["up"], produce=lambda: arrays)


def small_writer(folder: Path, **options: Any) -> tuple[ContainerWriter, dict[str, NDArray[Any]]]:
    """A container with residents of several dtypes and three experts, and all its arrays."""
    writer = ContainerWriter(folder, rules_json='{"version":1}', metadata={"made": "here"}, **options)
    arrays: dict[str, NDArray[Any]] = {
        "model.norm.weight": RNG.random(5, dtype=np.float32),
        "half": RNG.random((3, 3)).astype(np.float16),
        "brain": RNG.integers(0, 65536, (2, 7), dtype=np.uint16),
        "empty": np.zeros((0, 4), np.float32),
    }
    for (name, array), dtype in zip(list(arrays.items()), ("F32", "F16", "BF16", "F32"), strict=True):
        writer.add(name, dtype, array.shape, array)
    codes = RNG.integers(0, 256, 33, dtype=np.uint8)
    scales = RNG.random(3, dtype=np.float32)
    specs = [TensorSpec("q.weight", "U8", (33,), stamp="int8-row"), TensorSpec("q.weight.qs", "F32", (3,))]
    writer.add_group(specs, lambda: {"q.weight": codes, "q.weight.qs": scales})
    arrays |= {"q.weight": codes, "q.weight.qs": scales}
    for number in range(3):
        expert = expert_arrays(1, number, 24, 40, 16)
        declare_expert(writer, expert)
        arrays |= expert
    return writer, arrays


def equal(container: Container, arrays: dict[str, NDArray[Any]]) -> None:
    """Every array is in the container, byte for byte, and nothing else is."""
    assert sorted(container.tensors) == sorted(arrays)
    for name, array in arrays.items():
        info = container.require(name)
        assert info.shape == array.shape
        assert container.read(info).tobytes() == array.tobytes()


@pytest.mark.parametrize("shard_bytes", [1, 9000, 10**9])
def test_round_trip(tmp_path: Path, shard_bytes: int) -> None:
    writer, arrays = small_writer(tmp_path / "out", max_shard_bytes=shard_bytes)
    seen: list[tuple[int, int]] = []
    paths = writer.write(progress=lambda done, total: seen.append((done, total)))
    count = {1: 8, 9000: 2, 10**9: 1}[shard_bytes]
    assert [p.name for p in paths] == [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
    assert sorted(os.listdir(tmp_path / "out")) == sorted(p.name for p in paths)
    total = sum(path.stat().st_size for path in paths)
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    with Container.open(tmp_path / "out") as container:
        equal(container, arrays)
        assert container.stamps == {"q.weight": "int8-row"}
        assert [text for _, text in container.rules_json] == ['{"version":1}'] * count
        assert all(s.metadata["made"] == "here" for s in container.shards)


def test_other_readers_read_it(tmp_path: Path) -> None:
    writer, arrays = small_writer(tmp_path, max_shard_bytes=6000)
    pads: list[str] = []
    found: dict[str, NDArray[Any]] = {}
    for path in writer.write():
        with safe_open(path, framework="numpy") as file:
            assert file.metadata()["picaflor.formats"] == '{"version":1}'
            names = list(file.keys())
            pads += [name for name in names if name.startswith("__pad__.")]
            for name in names:
                if name != "brain" and not name.startswith("__pad__."):
                    found[name] = file.get_tensor(name)
    assert len(pads) == len(set(pads)) > 3
    assert found.keys() == arrays.keys() - {"brain"}
    for name, array in found.items():
        assert array.dtype == arrays[name].dtype
        assert np.array_equal(array, arrays[name])


@pytest.mark.parametrize("group", [64, 128])
@pytest.mark.parametrize("width", [80, 160, 192])
def test_widths_that_are_no_multiple_of_the_group(tmp_path: Path, width: int, group: int) -> None:
    writer = ContainerWriter(tmp_path)
    arrays = expert_arrays(0, 0, width, 128, group) | expert_arrays(0, 1, 128, width, group)
    for number in range(2):
        declare_expert(writer, {k: v for k, v in arrays.items() if f"experts.{number}." in k})
    (path,) = writer.write()
    assert arrays["model.layers.0.mlp.experts.0.down_proj.weight.qs"].size == 128 * -(-width // group)
    with Container.open(tmp_path) as container:
        equal(container, arrays)
    loaded = load_file(path)
    assert all(np.array_equal(loaded[name], array) for name, array in arrays.items())


def _expert(container: Container, number: int) -> Expert:
    matrices = {}
    for part in PARTS:
        name = f"model.layers.1.mlp.experts.{number}.{part}_proj.weight"
        infos = [container.require(name), container.require(name + ".qs")]
        spans = tuple(Span(info.shard, info.offset, info.nbytes) for info in infos)
        matrices[part] = Matrix(name, "int4-grouped", 1, 1, 16, spans)
    return Expert(1, number, matrices["gate"], matrices["up"], matrices["down"])


def test_layout(tmp_path: Path) -> None:
    writer, _ = small_writer(tmp_path)
    (path,) = writer.write()
    (length,) = struct.unpack("<Q", path.read_bytes()[:8])
    assert (8 + length) % 4096 == 0
    header = json.loads(path.read_bytes()[8 : 8 + length])
    end = 0
    for name, fields in header.items():
        if name != "__metadata__":
            assert fields["data_offsets"][0] == end
            end = fields["data_offsets"][1]
    assert 8 + length + end == path.stat().st_size
    with Container.open(tmp_path) as container:
        for number in range(3):
            expert = _expert(container, number)
            gate, up, down = (matrix.spans for matrix in expert.matrices)
            assert down[0].offset % 4096 == 0
            assert gate[0].offset == down[0].offset + down[0].nbytes
            assert up[0].offset == gate[0].offset + gate[0].nbytes
            assert down[1].offset == -(-(up[0].offset + up[0].nbytes) // 64) * 64
            assert gate[1].offset == down[1].offset + down[1].nbytes
            assert up[1].offset == gate[1].offset + gate[1].nbytes
            assert len(plan_reads(expert).runs) == 1
        assert all(
            info.offset % 64 == 0 for name, info in container.tensors.items() if "experts" not in name and info.nbytes
        )


def test_a_shard_may_be_exactly_full(tmp_path: Path) -> None:
    writer = ContainerWriter(tmp_path, max_shard_bytes=128)
    for name in "abc":
        writer.add(name, "U8", [64], np.zeros(64, np.uint8))
    assert len(writer.write()) == 2


def test_mixed_dtypes_start_at_their_item_size(tmp_path: Path) -> None:
    dtypes = {"down": ("U8", 5), "gate": ("BF16", 6), "up": ("F32", 8)}
    weights = {part: TensorSpec(part, dtype, (n // ITEM_BYTES[dtype],)) for part, (dtype, n) in dtypes.items()}
    scales = {"down": TensorSpec("down.qs", "U8", (3,)), "up": TensorSpec("up.qs", "F32", (2,))}
    arrays = {spec.name: np.ones(spec.nbytes, np.uint8) for spec in (*weights.values(), *scales.values())}
    writer = ContainerWriter(tmp_path)
    groups = {part: [weights[part], *([scales[part]] if part in scales else [])] for part in PARTS}
    writer.add_expert(down=groups["down"], gate=groups["gate"], up=groups["up"], produce=lambda: arrays)
    writer.write()
    with Container.open(tmp_path) as container:
        starts = {name: info.offset for name, info in container.tensors.items()}
        first = starts["down"]
        assert {name: at - first for name, at in starts.items()} == {
            "down": 0,
            "gate": 6,
            "up": 12,
            "down.qs": 64,
            "up.qs": 68,
        }
        assert all(bytes(container.read(info)) == b"\1" * info.nbytes for info in container.tensors.values())


def test_only_one_group_is_made_at_a_time(tmp_path: Path) -> None:
    order: list[str] = []

    def make(name: str) -> Callable[[], NDArray[Any]]:
        def produce() -> NDArray[Any]:
            order.append(name)
            return np.full(4, len(order), np.uint8)

        return produce

    writer = ContainerWriter(tmp_path, max_shard_bytes=8)
    for name in ("c", "a", "b"):
        writer.add(name, "U8", [4], make(name))
    assert order == []
    writer.write()
    assert order == ["c", "a", "b"]
    with Container.open(tmp_path) as container:
        assert {name: int(container.read(info)[0]) for name, info in container.tensors.items()} == {
            "c": 1,
            "a": 2,
            "b": 3,
        }


def _wrong(writer: ContainerWriter, kind: str) -> None:
    good = np.zeros(4, np.float32)
    match kind:
        case "dtype":
            writer.add("w", "Q4", [4], good)
        case "alias":
            writer.add("w", "F8_E4M3FN", [4], good)
        case "negative":
            writer.add("w", "F32", [-4], good)
        case "reserved":
            writer.add("__pad__.0", "U8", [4], good)
        case "twice":
            writer.add("w", "F32", [4], good)
            writer.add("w", "F32", [4], good)
        case "stamped":
            spec = TensorSpec("w", "F32", (4,), "f32")
            writer.add_expert(down=[spec], gate=[spec], up=[spec], produce=dict)
        case "stamps":
            writer.add_group([TensorSpec(f"t{n}", "U8", (0,), "f32") for n in range(4097)], dict)


@pytest.mark.parametrize(
    ("kind", "part"),
    [
        ("dtype", 'tensor "w": dtype: expected one of BF16'),
        ("alias", 'tensor "w": dtype: expected one of BF16'),
        ("negative", 'tensor "w": shape: expected at most 8 extents of 0 or more, found [-4]'),
        ("reserved", 'tensor "__pad__.0": the name is reserved'),
        ("twice", 'tensor "w": declared twice'),
        ("stamped", 'tensor "w": routed experts are not stamped, found "f32"'),
        ("stamps", "4097 stamped tensors, readers accept at most 4096"),
    ],
)
def test_wrong_declarations(tmp_path: Path, kind: str, part: str) -> None:
    with pytest.raises(BadContainer) as caught:
        _wrong(ContainerWriter(tmp_path), kind)
    assert part in str(caught.value)


def test_metadata_keys_of_our_own_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadContainer, match=r"metadata colibri\.fmt is written by"):
        ContainerWriter(tmp_path, metadata={"colibri.fmt": "{}"})


def test_too_many_shards(tmp_path: Path) -> None:
    writer = ContainerWriter(tmp_path, max_shard_bytes=1)
    for number in range(513):
        writer.add(f"t{number}", "U8", [1], np.zeros(1, np.uint8))
    with pytest.raises(BadContainer, match="513 shards of 1 bytes, readers take at most 512"):
        writer.write()
    assert os.listdir(tmp_path) == []


def _fail(error: BaseException) -> Callable[[], NDArray[Any]]:
    def produce() -> NDArray[Any]:
        raise error

    return produce


@pytest.mark.parametrize("existed", [True, False])
@pytest.mark.parametrize(
    ("last", "error", "part"),
    [
        (
            np.zeros(5, np.uint8),
            BadContainer,
            'tensor "bad": declared U8 [4] = 4 bytes, its producer returned uint8 [5]',
        ),
        (np.zeros(3, np.uint8), BadContainer, "its producer returned uint8 [3] = 3 bytes"),
        (np.zeros(1, np.float32), BadContainer, "its producer returned float32 [1] = 4 bytes"),
        (_fail(OSError(errno.ENOSPC, "No space left on device")), WriteFailed, "writing failed after"),
        (_fail(KeyboardInterrupt()), KeyboardInterrupt, ""),
    ],
    ids=["long", "short", "dtype", "disk-full", "interrupt"],
)
def test_failure_leaves_nothing(tmp_path: Path, existed: bool, last: Any, error: Any, part: str) -> None:
    folder = tmp_path / "out"
    if existed:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
    writer, _ = small_writer(folder, max_shard_bytes=6000)
    writer.add("bad", "U8", [4], last)
    with pytest.raises(error) as caught:
        writer.write()
    assert part in str(caught.value)
    assert (os.listdir(folder) == ["config.json"]) if existed else not folder.exists()


def test_missing_array(tmp_path: Path) -> None:
    writer = ContainerWriter(tmp_path / "out")
    writer.add_group([TensorSpec("w", "U8", (4,)), TensorSpec("v", "U8", (4,))], lambda: {"w": np.zeros(4, np.uint8)})
    with pytest.raises(BadContainer, match='tensor "v": declared, but its producer did not return it'):
        writer.write()


@contextmanager
def small_files() -> Iterator[None]:
    """No file may grow beyond 20 kB: the system refuses writes as it does on a full disk.

    Only around the call under test: what the test run itself prints may go to a longer file.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_refused_write(tmp_path: Path) -> None:
    writer = ContainerWriter(tmp_path / "out", max_shard_bytes=50_000)
    for number in range(4):
        writer.add(f"t{number}", "U8", [12_000], np.ones(12_000, np.uint8))
    with small_files(), pytest.raises(WriteFailed, match=r"out: writing failed after \d+ of \d+ bytes: File too large"):
        writer.write()
    assert not (tmp_path / "out").exists()


def test_full_disk_is_seen_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 5, 5))
    writer, _ = small_writer(tmp_path / "out")
    with pytest.raises(WriteFailed, match=r"out: \d+ bytes to write, 5 bytes free on this disk"):
        writer.write()
    assert not (tmp_path / "out").exists()


def test_unwritable_place(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    writer, _ = small_writer(tmp_path / "file" / "out")
    with pytest.raises(WriteFailed, match="out: writing failed after 0 of"):
        writer.write()


def test_other_shards_are_never_mixed_in(tmp_path: Path) -> None:
    (tmp_path / "old.safetensors").write_bytes(b"old")
    for resume in (False, True):
        with pytest.raises(UsageError, match=r"old\.safetensors: already there"):
            small_writer(tmp_path)[0].write(resume=resume)
    assert os.listdir(tmp_path) == ["old.safetensors"]


def test_resume_keeps_finished_shards(tmp_path: Path) -> None:
    made: list[str] = []

    def writer(fail: bool) -> ContainerWriter:
        result = ContainerWriter(tmp_path, max_shard_bytes=4)
        for name in ("a", "b", "c"):

            def produce(name: str = name) -> NDArray[Any]:
                if fail and name == "c":
                    raise PicaflorError("stop")
                made.append(name)
                return np.full(4, ord(name), np.uint8)

            result.add(name, "U8", [4], produce)
        return result

    with pytest.raises(PicaflorError, match="stop"):
        writer(True).write(resume=True)
    assert sorted(os.listdir(tmp_path)) == [f"model-0000{n}-of-00003.safetensors" for n in (1, 2)]
    (tmp_path / ".model-00003-of-00003.safetensors.tmp-1").write_bytes(b"left by a killed run")
    with pytest.raises(UsageError, match="already there"):
        writer(False).write()
    paths = writer(False).write(resume=True)
    assert made == ["a", "b", "c"]
    assert sorted(os.listdir(tmp_path)) == [path.name for path in paths]
    with Container.open(tmp_path) as container:
        assert {name: bytes(container.read(info)) for name, info in container.tensors.items()} == {
            "a": b"aaaa",
            "b": b"bbbb",
            "c": b"cccc",
        }


def test_several_processes_write_one_directory(tmp_path: Path) -> None:
    """Each writes its share beside files that the others have not finished; together it is what one would write."""

    def writer(folder: Path) -> ContainerWriter:
        result = ContainerWriter(folder, max_shard_bytes=4)
        for number, name in enumerate("abcde"):
            result.add(name, "U8", [4], np.full(4, number, np.uint8))
        return result

    other = tmp_path / "together" / ".model-00002-of-00005.safetensors.tmp-1"
    other.parent.mkdir()
    other.write_bytes(b"another process writes this")
    paths = [writer(tmp_path / "together").write(resume=True, share=(0, 2))]
    assert [path.name[6:11] for path in paths[0]] == ["00001", "00003", "00005"]
    assert other.exists()
    paths.append(writer(tmp_path / "together").write(resume=True, share=(1, 2)))
    assert [path.name[6:11] for path in paths[1]] == ["00002", "00004"]
    alone = writer(tmp_path / "alone").write()
    assert {path.name: path.read_bytes() for path in alone} == {
        path.name: path.read_bytes() for path in (tmp_path / "together").iterdir()
    }


def test_every_written_dtype_is_read_back(tmp_path: Path) -> None:
    writer = ContainerWriter(tmp_path)
    for dtype in WRITTEN_DTYPES:
        writer.add(f"t.{dtype}", dtype, [3], np.arange(3 * ITEM_BYTES[dtype], dtype=np.uint8))
    (path,) = writer.write()
    with Container.open(tmp_path) as container, safe_open(path, framework="numpy") as other:
        for dtype in WRITTEN_DTYPES:
            info = container.require(f"t.{dtype}")
            assert (info.dtype, container.read(info).tolist()) == (dtype, list(range(3 * ITEM_BYTES[dtype])))
            assert other.get_slice(f"t.{dtype}").get_dtype() == dtype
