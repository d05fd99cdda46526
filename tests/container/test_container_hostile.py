"""Hostile model directories: each is refused by one line that names file, tensor, expected and found."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
from hostile_files import CASES, GOOD, Case, entry, many, raw, shard
from hypothesis import example, given, settings
from hypothesis import strategies as st

from picaflor.container.index import Container
from picaflor.container.safetensors import header_bytes, parse_header
from picaflor.errors import BadContainer, MissingTensor, PicaflorError, ReadFailed


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_refused_by_one_clear_line(case: Case, tmp_path: Path) -> None:
    case.build(tmp_path)
    expected = ReadFailed if case.name == "link-loop" else case.error
    with pytest.raises(PicaflorError) as caught:
        Container.open(tmp_path)
    message = str(caught.value)
    assert type(caught.value) is expected, message
    assert caught.value.exit_code == 1
    for part in case.parts:
        assert part in message, f"{part!r} is not in {message!r}"
    assert str(tmp_path) in message
    assert message.isprintable(), f"not one printable line: {message!r}"
    assert len(message) < 700 + len(str(tmp_path)) * 2


def test_names_are_unique() -> None:
    assert len({case.name for case in CASES}) == len(CASES) > 80


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("gone", "gone: no such directory; expected a model directory"),
        ("a.safetensors", "a.safetensors: is a file, expected a model directory; give its directory"),
        ("link", "link: no such directory (a dangling link)"),
    ],
)
def test_path_that_is_no_directory(name: str, part: str, tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(GOOD)
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(BadContainer) as caught:
        Container.open(tmp_path / name)
    assert part in str(caught.value)


def test_file_that_shrinks_while_open(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(GOOD)
    with Container.open(tmp_path) as container:
        with path.open("r+b") as file:
            file.truncate(len(GOOD) - 4)
        with pytest.raises(ReadFailed) as caught:
            container.read(container.require("w"))
    message = str(caught.value)
    assert f"{path}: expected 16 bytes at offset {len(GOOD) - 16}, found 12" in message
    assert f"shrank while it was open, from {len(GOOD)} to {len(GOOD) - 4} bytes" in message


def test_file_that_is_replaced_between_two_opens(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(GOOD)
    (tmp_path / "b.safetensors").write_bytes(shard({"v": entry("U8", [4], 0, 4)}, b"abcd"))
    with Container.open(tmp_path, max_open_files=1) as container:
        other = tmp_path / "other"
        other.write_bytes(GOOD + b"!")
        other.replace(tmp_path / "a.safetensors")
        assert bytes(container.read(container.require("v"))) == b"abcd"
        with pytest.raises(ReadFailed, match=r"a\.safetensors: the file changed since it was opened"):
            container.read(container.require("w"))


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (
            None,
            "no config.json: the model's family is unknown until config.json is there; 2 shards found, still needed",
        ),
        ("{", "config.json: not valid JSON"),
        ("[]", "config.json: expected a JSON object, found []"),
        ('{"hidden_size": 4, "hidden_size": 8}', 'config.json: the name "hidden_size" stands twice'),
        ('{"rms_norm_eps": NaN}', "config.json: not valid JSON: NaN is not a JSON value"),
        ("{hidden_size: 4}", "config.json: not valid JSON"),
    ],
)
def test_config(text: str | None, part: str, tmp_path: Path) -> None:
    many({"out-00000.safetensors": GOOD, "out-00001.safetensors": shard({})})(tmp_path)
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with Container.open(tmp_path) as container, pytest.raises(BadContainer) as caught:
        container.config()
    assert part in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_config_too_large_is_refused_before_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(GOOD)
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(256_000_001)
    with Container.open(tmp_path) as container, pytest.raises(BadContainer) as caught:
        container.config()
    assert "config.json: 256000001 bytes, at most 256000000 are accepted" in str(caught.value)


def test_header_over_the_cap_is_refused_from_its_length(tmp_path: Path) -> None:
    with (tmp_path / "a.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", (512 << 20) + 1))
        file.truncate(1 << 30)
    with pytest.raises(BadContainer, match="the header claims 536870913 bytes, at most 536870912 are accepted"):
        Container.open(tmp_path)


def test_missing_tensor_counts_shards(tmp_path: Path) -> None:
    many({"model-00001-of-00002.safetensors": GOOD})(tmp_path)
    with Container.open(tmp_path, allow_missing=True) as container:
        assert container.missing_shards == ("model-00002-of-00002.safetensors",)
        with pytest.raises(MissingTensor) as caught:
            container.require("model.norm.weight")
    assert 'tensor "model.norm.weight" is in no shard; 1 of 2 declared shards are here' in str(caught.value)


@pytest.mark.parametrize(
    ("data", "shape", "part"),
    [
        (entry("U8", [64], 0, 64), (64,), 'tensor "w": expected dtype F32, BF16, F16; found U8'),
        (entry("I64", [8], 0, 64), (8,), "expected dtype F32, BF16, F16; found I64"),
        (entry("F32", [4, 4], 0, 64), (16,), "expected shape [16], found [4, 4]"),
    ],
)
def test_read_float_refuses(data: dict[str, object], shape: tuple[int, ...], part: str, tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(shard({"w": data}))
    with Container.open(tmp_path) as container, pytest.raises(BadContainer) as caught:
        container.read_float("w", shape)
    assert part in str(caught.value)


def _check(text: bytes, data: bytes = bytes(32)) -> None:
    """Whatever the bytes are: BadContainer, or entries that lie inside the file and do not overlap."""
    blob = raw(text, data)
    message = "x.safetensors: "
    header = None
    try:
        length = header_bytes(blob[:8], len(blob), "x.safetensors")
        header = parse_header(blob[8 : 8 + length], len(blob), "x.safetensors")
    except BadContainer as error:
        message = str(error)
    assert message.startswith("x.safetensors: ")
    assert message.isprintable()
    if header is None:
        return
    end = 8 + len(text)
    for info in header.tensors:
        assert end <= info.offset <= info.offset + info.nbytes <= len(blob)
        end = info.offset + info.nbytes
    assert all(isinstance(value, str) for value in header.metadata.values())


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes(text: bytes) -> None:
    _check(text)


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.sampled_from(["F32", "U8"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
_DIMS = st.lists(st.integers(-1, 1 << 64) | st.integers(0, 8), max_size=9)
_ENTRY = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "U8", "I8", "F8_E4M3", "I64"]) | _VALUES,
        "shape": _DIMS | _VALUES,
        "data_offsets": st.lists(st.integers(-1, 40), min_size=2, max_size=2) | _VALUES,
    }
)


@settings(max_examples=500, deadline=None)
@given(st.dictionaries(st.text(max_size=4) | st.just("__metadata__"), _ENTRY | _VALUES, max_size=4))
@example({"a": entry("F32", [0], 4, 4), "b": entry("F32", [2], 0, 8)})
def test_any_json(fields: dict[str, object]) -> None:
    _check(json.dumps(fields).encode())


@settings(max_examples=300, deadline=None)
@given(st.integers(0, len(GOOD) - 17), st.integers(0, 255))
def test_one_changed_byte(place: int, value: int) -> None:
    text = bytearray(GOOD[8:-16])
    text[min(place, len(text) - 1)] = value
    _check(bytes(text))
