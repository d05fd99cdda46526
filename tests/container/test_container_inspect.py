"""`picaflor inspect`: exact sizes and formats, what is missing, what is rotten, and one line for a hostile file."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hostile_files import CASES, Case
from numpy.typing import NDArray

from picaflor.cli import main
from picaflor.container.index import Container
from picaflor.container.writer import ContainerWriter, TensorSpec
from picaflor.formats import REGISTRY
from picaflor.formats.rules import FormatRule, FormatRules
from picaflor.models.base import ExpertSpec, MatrixSpec, VectorSpec, build_model
from picaflor.runtime import inspection_deep

CONFIG = {
    "model_type": "qwen3_moe",
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "mlp_only_layers": [0],
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 80,
    "intermediate_size": 96,
    "vocab_size": 50,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
FORMATS = {
    "embedding": ("int8-row", 0),
    "attention": ("e8-iq3-lattice", 0),
    "router": ("bf16", 0),
    "dense": ("mxfp4", 0),
    "head": ("fp8-e4m3-b128", 0),
    "expert": ("int4-grouped", 64),
}
FLOATS = {"bf16": "BF16", "f16": "F16", "f32": "F32"}
CODES = {np.dtype("u1"): "U8", np.dtype("i1"): "I8", np.dtype("<f4"): "F32"}
NORM = "model.norm.weight"


def planes(spec: MatrixSpec) -> tuple[list[TensorSpec], dict[str, NDArray[Any]]]:
    """The stored tensors of a matrix in its kind's format, with finite values."""
    name, group = FORMATS[spec.kind]
    known = REGISTRY[name]
    rng = np.random.default_rng(len(spec.name))
    values = rng.standard_normal((spec.rows, spec.cols)).astype(np.float32)
    encoded = known.sample(rng, spec.rows, spec.cols, group) if spec.cols % 256 and "e8" in name else None
    if encoded is None:
        encoded = known.encode(values, group) if known.encode else known.sample(rng, spec.rows, spec.cols, group)
    specs, arrays = [], {}
    for plane, array in zip(known.planes, encoded, strict=True):
        stored = spec.name + plane.suffix
        flat = name not in FLOATS
        dtype = CODES[array.dtype] if flat else FLOATS[name]
        specs.append(TensorSpec(stored, dtype, (array.size,) if flat else (spec.rows, spec.cols)))
        arrays[stored] = array
    return specs, arrays


def write_model(folder: Path, *, max_shard_bytes: int = 10**9, leave_out: str = "") -> None:
    """A small complete model in six formats, with rules."""
    model = build_model(CONFIG, _All())
    names = {
        "attention": "*.self_attn.*",
        "dense": "*.layers.0.mlp.*",
        "expert": "*.experts.*",
        "router": "*.mlp.gate.*",
    }
    names |= {"embedding": "model.embed_tokens.weight", "head": "lm_head.weight"}
    vectors = [spec.name for spec in model.vectors()]
    rules = FormatRules(
        (*(FormatRule(name, "f32") for name in vectors), *(FormatRule(names[k], *FORMATS[k]) for k in names))
    )
    writer = ContainerWriter(folder, rules_json=rules.to_json(), max_shard_bytes=max_shard_bytes)
    for part in model.parts():
        if isinstance(part, VectorSpec) and part.name != leave_out:
            writer.add(part.name, "F32", [part.length], np.ones(part.length, np.float32))
        elif isinstance(part, MatrixSpec):
            specs, arrays = planes(part)
            writer.add_group(specs, lambda arrays=arrays: arrays)
        elif isinstance(part, ExpertSpec):
            made = [planes(matrix) for matrix in part.matrices]
            arrays = made[0][1] | made[1][1] | made[2][1]
            writer.add_expert(gate=made[0][0], up=made[1][0], down=made[2][0], produce=lambda arrays=arrays: arrays)
    writer.write()
    (folder / "config.json").write_text(json.dumps(CONFIG))


class _All:
    """Holds every name that is stored in tensors of its own."""

    def __contains__(self, name: object) -> bool:
        return True


def inspect(folder: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr."""
    code = main(["inspect", str(folder), *flags])
    out, err = capsys.readouterr()
    return code, out, err


def record(folder: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, dict[str, Any]]:
    """Exit code and the parsed answer."""
    code, out, _ = inspect(folder, capsys, "--json", *flags)
    return code, json.loads(out)


def test_every_class_with_its_exact_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_model(tmp_path)
    code, found = record(tmp_path, capsys)
    assert code == 0
    assert found["loads"] is True
    assert found["problems"] == found["notes"] == []
    matrices = {
        "embedding": [(50, 128)],
        "attention": [(64, 128), (32, 128), (32, 128), (128, 64)] * 2,
        "dense mlp": [(96, 128), (96, 128), (128, 96)],
        "router": [(3, 128)],
        "head": [(50, 128)],
        "routed experts": [(80, 128), (80, 128), (128, 80)] * 3,
    }
    kinds = dict(zip(matrices, ("embedding", "attention", "dense", "router", "head", "expert"), strict=True))
    by_class = {row["class"]: row for row in found["classes"]}
    assert by_class.keys() == matrices.keys() | {"norms and biases"}
    for label, shapes in matrices.items():
        name, group = FORMATS[kinds[label]]
        weights = sum(rows * cols for rows, cols in shapes)
        nbytes = sum(REGISTRY[name].nbytes(rows, cols, group) for rows, cols in shapes)
        row = by_class[label]
        assert (row["format"], row["group_size"], row["count"]) == (name, group, len(shapes))
        assert (row["weights"], row["bytes"], row["bits_per_weight"]) == (weights, nbytes, 8 * nbytes / weights)
    # 80 columns at group size 64 have two groups a row: 40 + 2*4 bytes; 128 columns 64 + 2*4.
    assert by_class["routed experts"]["bytes"] == 3 * (2 * 80 * 72 + 128 * 48)
    assert by_class["norms and biases"]["weights"] == 5 * 128 + 2 * 2 * 32
    assert sum(row["bytes"] for row in found["classes"]) == found["tensor_bytes"]


def test_text_and_tensor_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_model(tmp_path, max_shard_bytes=20_000)
    code, out, err = inspect(tmp_path, capsys, "--tensors")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith(f"{tmp_path}: qwen3_moe, ")
    (row,) = [line.split() for line in lines if line.startswith("routed experts")]
    assert row[2:6] == ["int4-grouped", "g64", "9", "92160"]
    assert row[-2] == "4.600"
    assert "missing: tokenizer.json: text cannot be read or written, only token ids" in lines
    (line,) = [line for line in lines if line.startswith("model.layers.1.mlp.experts.2.down_proj.weight.qs")]
    assert "F32" in line
    assert "[256]" in line
    assert "int4-grouped g64" in line
    _, found = record(tmp_path, capsys, "--tensors")
    listed = {entry["name"]: entry for entry in found["tensor_list"]}
    with Container.open(tmp_path) as container:
        assert listed.keys() == container.tensors.keys()
        assert len(container.shards) > 2
        for name, info in container.tensors.items():
            shard = container.shards[info.shard].path.name
            entry = listed[name]
            assert (entry["offset"], entry["bytes"], entry["shard"]) == (info.offset, info.nbytes, shard)
    assert listed["lm_head.weight"]["format"] == "fp8-e4m3-b128"
    assert listed[NORM]["format"] is None


ATTENTION = "model.layers.0.self_attn.q_proj.weight"
ROT = [
    (NORM, 4 * 5, struct.pack("<f", float("inf")), "values are not finite", 5),
    ("model.layers.1.mlp.experts.1.up_proj.weight.qs", 4 * 7, struct.pack("<f", float("nan")), "scales are not", 7),
    ("model.embed_tokens.weight.qs", 4 * 49, struct.pack("<f", float("-inf")), "scales are not finite", 49),
    ("lm_head.weight", 129, b"\xff", "fp8 codes are NaN", 129),
    ("lm_head.weight", 6399, b"\x7f", "fp8 codes are NaN", 6399),
    ("model.layers.0.mlp.up_proj.weight.qs", 11, b"\xff", "scales are NaN", 11),
    (ATTENTION, 98 * 3 + 96, b"\x00\x7c", "scales inside the codes are not finite", 3),
    ("model.layers.1.mlp.gate.weight", 2 * 17, b"\x80\x7f", "weights are not finite", 17),
]


@pytest.mark.parametrize(("name", "at", "data", "text", "number"), ROT)
def test_deep_finds_what_is_rotten(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    at: int,
    data: bytes,
    text: str,
    number: int,
) -> None:
    write_model(tmp_path)
    code, found = record(tmp_path, capsys, "--deep")
    assert (code, found["findings"]) == (0, [])
    with Container.open(tmp_path) as container:
        info = container.require(name)
        path = container.shards[info.shard].path
    with path.open("r+b") as file:
        file.seek(info.offset + at)
        file.write(data)
    code, found = record(tmp_path, capsys, "--deep")
    assert code == 1
    (finding,) = found["findings"]
    assert finding["tensor"] == name
    assert text in finding["finding"]
    assert (finding["count"], finding["first"]) == (1, number)
    code, out, _ = inspect(tmp_path, capsys, "--deep")
    assert code == 1
    assert f"bad: {path}: {name}: 1 " in out
    assert "1 tensor with bad values" in out


def test_deep_counts_over_pieces(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspection_deep, "CHUNK_BYTES", 784)
    write_model(tmp_path)
    with Container.open(tmp_path) as container:
        info = container.require("lm_head.weight")
        path = container.shards[0].path
    with path.open("r+b") as file:
        for at in (1000, 1001, 5000):
            file.seek(info.offset + at)
            file.write(b"\x7f")
    _, found = record(tmp_path, capsys, "--deep")
    (finding,) = found["findings"]
    assert (finding["count"], finding["first"]) == (3, 1000)


def write_stacked(folder: Path) -> None:
    """A float model with a tied head and its experts in two stacked tensors; one weight of an up matrix is NaN."""
    config = {**CONFIG, "tie_word_embeddings": True}
    model = build_model(config, _All())
    writer = ContainerWriter(folder)
    stacks = {
        name: np.zeros((3, rows, cols), np.float32) for name, rows, cols in (("gate_up", 160, 128), ("down", 128, 80))
    }
    for part in model.parts():
        if isinstance(part, VectorSpec):
            writer.add(part.name, "F32", [part.length], np.ones(part.length, np.float32))
        elif isinstance(part, MatrixSpec) and part.kind != "head":
            writer.add(part.name, "F32", [part.rows, part.cols], np.ones((part.rows, part.cols), np.float32))
    stacks["gate_up"][1, 80 + 3, 5] = np.nan
    for name, array in stacks.items():
        writer.add(f"model.layers.1.mlp.experts.{name}_proj", "F32", array.shape, array)
    writer.write()
    (folder / "config.json").write_text(json.dumps(config))


def test_stacked_experts_and_a_tied_head(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_stacked(tmp_path)
    code, found = record(tmp_path, capsys, "--deep", "--tensors")
    assert code == 1
    assert found["loads"] is True
    by_class = {row["class"]: row for row in found["classes"]}
    assert "head" not in by_class
    assert (by_class["embedding"]["count"], by_class["embedding"]["bytes"]) == (1, 50 * 128 * 4)
    assert (by_class["routed experts"]["count"], by_class["routed experts"]["weights"]) == (9, 9 * 80 * 128)
    (finding,) = found["findings"]
    assert finding["tensor"] == (
        "model.layers.1.mlp.experts.gate_up_proj (model.layers.1.mlp.experts.1.up_proj.weight)"
    )
    assert (finding["count"], finding["first"]) == (1, 3 * 128 + 5)
    listed = {entry["name"]: entry["format"] for entry in found["tensor_list"]}
    assert listed["model.layers.1.mlp.experts.down_proj"] == "f32"


def test_missing_shard_is_named_and_the_rest_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_model(tmp_path, max_shard_bytes=20_000)
    gone = sorted(tmp_path.glob("*.safetensors"))[1]
    gone.unlink()
    code, found = record(tmp_path, capsys)
    assert code == 1
    assert found["loads"] is False
    fatal = [gap for gap in found["missing"] if gap["fatal"]]
    assert fatal[0]["name"] == gone.name
    assert fatal[1]["name"].split()[1] in ("tensor", "tensors")
    assert {row["format"] for row in found["classes"]} >= {"int4-grouped", "fp8-e4m3-b128"}
    code, _, err = inspect(tmp_path, capsys)
    assert (code, err.count("\n")) == (1, 1)
    assert f"does not load: missing: {gone.name}" in err


def test_missing_tensor_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_model(tmp_path, leave_out=NORM)
    code, found = record(tmp_path, capsys)
    assert code == 1
    (gap,) = [gap for gap in found["missing"] if gap["fatal"]]
    assert gap == {"name": "1 tensor", "meaning": f'needed: "{NORM}"', "fatal": True}


@pytest.mark.parametrize("config", [None, '{"model_type": "unheard_of"}'])
def test_unknown_family_shows_raw_tensors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], config: str | None
) -> None:
    write_model(tmp_path)
    (tmp_path / "config.json").unlink()
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    code, found = record(tmp_path, capsys, "--deep")
    assert code == 1
    rows = {(row["class"], row["format"]): row["count"] for row in found["classes"]}
    assert rows["model.layers.N.mlp.experts.N.up_proj.weight", "U8"] == 3
    assert rows["model.layers.N.mlp.experts.N.up_proj.weight.qs", "F32"] == 3
    assert found["findings"] == []
    (problem,) = found["problems"]
    assert ("the model's family is unknown until config.json is there" if config is None else "unheard_of") in problem


def test_shards_of_another_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main_dir, other = tmp_path / "main", tmp_path / "other"
    write_model(main_dir, max_shard_bytes=20_000)
    other.mkdir()
    moved = sorted(main_dir.glob("*.safetensors"))[0]
    moved.rename(other / moved.name)
    assert record(main_dir, capsys)[0] == 1
    code, found = record(main_dir, capsys, "--dir", str(other))
    assert (code, found["loads"]) == (0, True)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_hostile_files_give_one_line(case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case.build(tmp_path)
    code, _, err = inspect(tmp_path, capsys)
    assert code == 1
    assert err.startswith("picaflor: error: ")
    assert err.count("\n") == 1
    assert "Traceback" not in err


def test_table_cannot_move_the_cursor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    header = json.dumps({"w\x1b[2J\n": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    code, out, _ = inspect(tmp_path, capsys, "--tensors")
    assert code == 1
    assert "\x1b" not in out
    assert "w\\u001b[2J\\n" in out or "w\\x1b[2J\\n" in out


def test_trained_model_has_its_draft_head_and_indexer(test_data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = record(test_data / "models" / "tiny-glm-dsa", capsys)
    assert code == 0
    by_class = {row["class"]: row for row in found["classes"]}
    assert by_class["routed experts"]["count"] == 504
    assert by_class["draft: routed experts"]["count"] == 72
    assert by_class["indexer"]["count"] == 12
    assert not any(gap["name"] in ("indexer", "draft head (MTP)") for gap in found["missing"])


def test_what_a_small_container_lacks(test_data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = record(test_data / "vectors" / "tiny_glm_int4g64", capsys)
    assert code == 0
    assert "indexer" in {gap["name"] for gap in found["missing"]}
    assert any("also fit int4-grouped at group size 96" in note for note in found["notes"])
    rows = {(row["class"], row["format"], row["group_size"]) for row in found["classes"]}
    assert ("routed experts", "int4-grouped", 64) in rows
    assert ("routed experts", "int4-row", 0) in rows
