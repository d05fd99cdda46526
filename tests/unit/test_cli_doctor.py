"""doctor: each check's answer, one remedy per failure, exit code 1 if one fails."""

from __future__ import annotations

import json
import os
import resource
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from picaflor import cli
from picaflor.cli import doctor, doctor_machine
from picaflor.cli.doctor_machine import Check
from picaflor.runtime import builtin

MACHINE = (
    "python",
    "native",
    "threads",
    "memory",
    "open-files",
    "locked-memory",
    "huge-pages",
    "io-uring",
    "state",
)
TOKENS = {"scalar": (1, 2, 3), "avx2": (1, 2, 3), "avx512": (1, 2, 4)}


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", "/nowhere")
    monkeypatch.setenv("XDG_STATE_HOME", "/tmp")
    monkeypatch.setattr(doctor, "_other_backends", lambda: ["cuda"])
    monkeypatch.setattr(doctor, "_native_isas", lambda: ["scalar", "avx2"])
    monkeypatch.setattr(doctor, "_demo_tokens", lambda isa: TOKENS[isa])


def by_id(*words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Check]]:
    code = cli.main(["doctor", *words, "--json"])
    checks = [Check(**check) for check in json.loads(capsys.readouterr().out)["checks"]]
    assert len({check.id for check in checks}) == len(checks)
    for check in checks:
        assert bool(check.remedy) == (check.status not in ("ok", "info")), check
    return code, {check.id: check for check in checks}


def test_a_fit_machine(capsys: pytest.CaptureFixture[str]) -> None:
    code, checks = by_id(capsys=capsys)
    assert code == 0
    assert list(checks) == [*MACHINE, "cpu.scalar", "cpu.avx2", "backend.cuda"]
    assert checks["backend.cuda"].status in ("ok", "info")
    assert checks["native"].detail == "instruction sets here: scalar, avx2; auto takes avx2"
    assert checks["cpu.avx2"].detail == "the built-in model writes the same 3 tokens as with plain code"


def test_an_instruction_set_that_computes_something_else_fails(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_native_isas", lambda: ["scalar", "avx512"])
    code, checks = by_id(capsys=capsys)
    assert code == 1
    assert checks["cpu.avx512"].status == "fail"
    assert checks["cpu.avx512"].detail == "wrote tokens [1, 2, 4], plain code [1, 2, 3]"
    assert "--isa" in checks["cpu.avx512"].remedy


def test_missing_extension_fails_and_later_checks_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> list[str]:
        raise ImportError("cannot import name '_native'")

    monkeypatch.setattr(doctor, "_native_isas", missing)
    code, checks = by_id(capsys=capsys)
    assert code == 1
    assert checks["native"] == Check(
        "native", "fail", "cannot import name '_native'", "install Picaflor again with a C++20 compiler present"
    )
    assert list(checks) == [*MACHINE, "backend.cuda"]


def test_few_open_files_are_a_warning(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 4096))
    code, checks = by_id(capsys=capsys)
    assert code == 0
    assert checks["open-files"].status == "warn"
    assert checks["open-files"].remedy.endswith("ulimit -n 4096")


def test_a_model_that_is_not_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, checks = by_id(str(tmp_path / "none"), capsys=capsys)
    assert code == 1
    assert checks["model.files"].status == "fail"
    assert checks["model.files"].detail == f"model {tmp_path / 'none'}: no such directory"
    assert checks["model.files"].remedy.startswith("name an existing directory")
    assert "model.tokenizer" not in checks
    file = tmp_path / "file"
    file.touch()
    code, checks = by_id(str(file), capsys=capsys)
    assert checks["model.files"].detail == f"{file}: is a file, expected a directory"


def test_a_directory_without_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, checks = by_id(str(tmp_path), capsys=capsys)
    assert code == 1
    assert str(tmp_path) in checks["model.files"].detail
    assert "tokenizer.json" in checks["model.tokenizer"].detail


def test_words_for_people(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["doctor", str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("ok    python           Python 3.")
    failed = [number for number, line in enumerate(lines) if line.startswith("fail")]
    assert len(failed) == 2
    assert lines[failed[0] + 1].strip().startswith("-> name an existing directory that holds config.json")
    assert lines[failed[1] + 1].strip().startswith("-> copy tokenizer.json from where")
    assert not any("transformers" in line for line in lines)


Tensors = dict[str, tuple[dict[str, Any], bytes]]


def model_with(
    folder: Path, *, config: Callable[[dict[str, Any]], None] = lambda values: None, change: Callable[[Tensors], None]
) -> Path:
    """The built-in model with other config values and other tensors."""
    for name in ("tokenizer.json", "chat_template.jinja"):
        (folder / name).symlink_to(builtin.folder() / name)
    values = json.loads((builtin.folder() / "config.json").read_text())
    config(values)
    (folder / "config.json").write_text(json.dumps(values))
    shard = "model-00001-of-00001.safetensors"
    data = (builtin.folder() / shard).read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    metadata, body = header.pop("__metadata__"), data[8 + length :]
    tensors = {name: (entry, body[slice(*entry["data_offsets"])]) for name, entry in header.items()}
    change(tensors)
    place, entries = 0, {"__metadata__": metadata}
    for name, (entry, content) in tensors.items():
        entries[name] = entry | {"data_offsets": [place, place + len(content)]}
        place += len(content)
    text = json.dumps(entries).encode()
    (folder / shard).write_bytes(struct.pack("<Q", len(text)) + text + b"".join(part for _, part in tensors.values()))
    return folder


def without_an_expert(tensors: Tensors) -> None:
    for name in [name for name in tensors if ".layers.3.mlp.experts.7." in name]:
        del tensors[name]


def shorter(name: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        entry, content = tensors[name]
        tensors[name] = (entry | {"shape": [entry["shape"][0] - 1]}, content[:-4])

    return change


def with_nan(name: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        entry, content = tensors[name]
        tensors[name] = (entry, content[:-4] + struct.pack("<f", float("nan")))

    return change


def same(tensors: Tensors) -> None:
    return


def test_a_rewritten_model_is_fit(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, checks = by_id(str(model_with(tmp_path, change=same)), capsys=capsys)
    assert code == 0
    detail = checks["model.files"].detail
    assert detail == "glm_moe_dsa, 1390 tensors in 1 file, 17.5 MiB; every tensor it needs is there"
    assert checks["model.tokenizer"].detail == "tokenizer read, chat template read"
    assert checks["model.plan"].detail.startswith("fits ")
    assert checks["model.plan"].detail.endswith("; 168 of 168 experts stay in memory")
    assert "model.weights" not in checks


def test_deep_reads_all_of_the_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = model_with(tmp_path, change=same)
    code, checks = by_id(str(folder), "--deep", capsys=capsys)
    assert code == 0
    assert checks["model.weights"].detail == "16.9 MiB read, no bad value"
    assert checks["model.reads"].detail.startswith("experts of 0.06 MB ")
    (shard,) = folder.glob("*.safetensors")
    data = bytearray(shard.read_bytes())
    (length,) = struct.unpack("<Q", data[:8])
    entry = json.loads(data[8 : 8 + length])["model.norm.weight"]
    at = 8 + length + entry["data_offsets"][0]
    data[at : at + 4] = struct.pack("<f", float("nan"))
    shard.write_bytes(data)
    code, checks = by_id(str(folder), "--deep", capsys=capsys)
    assert code == 1
    assert checks["model.weights"].status == "fail"
    assert "1 tensor with bad values, as model.norm.weight" in checks["model.weights"].detail


def test_a_model_that_does_not_fit_fails_with_its_numbers(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PICAFLOR_RAM", "40MiB")
    code, checks = by_id(str(model_with(tmp_path, change=same)), capsys=capsys)
    assert code == 1
    assert checks["model.plan"].detail.startswith("needs ")
    assert "give --ram" in checks["model.plan"].detail


def test_large_pages_and_drives_as_the_system_tells(tmp_path: Path) -> None:
    enabled = tmp_path / "kernel/mm/transparent_hugepage/enabled"
    assert doctor_machine.check_huge_pages(sys=tmp_path).status == "info"
    enabled.parent.mkdir(parents=True)
    for text, status in (("always [madvise] never\n", "ok"), ("always madvise [never]\n", "warn")):
        enabled.write_text(text)
        assert doctor_machine.check_huge_pages(sys=tmp_path).status == status
    folder = builtin.folder()
    device = folder.stat().st_dev
    assert "drive not told" in doctor_machine.check_storage(folder, sys=tmp_path).detail
    disk = tmp_path / "devices/disk"
    part = disk / "part1"
    part.mkdir(parents=True)
    (disk / "queue").mkdir()
    (disk / "queue/rotational").write_text("0\n")
    (tmp_path / "dev/block").mkdir(parents=True)
    (tmp_path / "dev/block" / f"{os.major(device)}:{os.minor(device)}").symlink_to(part)
    assert ", solid state, " in doctor_machine.check_storage(folder, sys=tmp_path).detail + ", "


def test_a_folder_for_state_that_cannot_be_written_is_a_warning(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(file))
    code, checks = by_id(capsys=capsys)
    assert (code, checks["state"].status) == (0, "warn")
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.delenv("HOME", raising=False)
    assert by_id(capsys=capsys)[1]["state"].remedy == "set XDG_STATE_HOME or HOME"


@pytest.mark.parametrize(
    ("values", "change", "detail", "remedy"),
    [
        ({}, without_an_expert, "model.layers.3.mlp.experts.7.gate_proj.weight", "picaflor inspect MODEL lists"),
        (
            {},
            shorter("model.norm.weight"),
            "F32 of shape [255]; expected F32, BF16 or F16 of [256]",
            "are of different",
        ),
        ({}, shorter("lm_head.weight.qs"), "lm_head.weight", "fetch the file named here again"),
        (
            {},
            with_nan("model.norm.weight"),
            "model.norm.weight: 1 of 256 scales or weights are NaN or infinite in ",
            "fetch the file named here again",
        ),
        ({"model_type": "unheard_of"}, same, "unheard_of", "this version does not run this model"),
        ({"hidden_size": 320}, same, "model.embed_tokens.weight", "are of different models"),
    ],
    ids=["an expert is gone", "short norm", "short scales", "NaN in a norm", "unknown family", "another hidden size"],
)
def test_a_model_that_cannot_load_fails(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    values: dict[str, Any],
    change: Callable[[Tensors], None],
    detail: str,
    remedy: str,
) -> None:
    folder = model_with(tmp_path, config=lambda found: found.update(values), change=change)
    code, checks = by_id(str(folder), capsys=capsys)
    assert code == 1
    assert checks["model.files"].status == "fail"
    assert detail in checks["model.files"].detail
    assert remedy in checks["model.files"].remedy
    assert checks["model.tokenizer"].status == "ok"


def test_a_tokenizer_of_another_kind_has_a_way(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model_with(tmp_path, change=same)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "vocab.json").write_text("{}")
    code, checks = by_id(str(tmp_path), capsys=capsys)
    assert code == 1
    assert checks["model.tokenizer"].detail == f"{tmp_path}: tokenizer.json is missing, found vocab.json"
    assert "AutoTokenizer" in checks["model.tokenizer"].remedy


def test_a_tokenizer_with_more_ids_than_the_model_fails(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model_with(tmp_path, change=same)
    values = json.loads((tmp_path / "tokenizer.json").read_text())
    values["added_tokens"].append({**values["added_tokens"][-1], "id": 4096, "content": "<|one more|>"})
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer.json").write_text(json.dumps(values))
    code, checks = by_id(str(tmp_path), capsys=capsys)
    assert code == 1
    assert "the largest token id is 4096; the model has 4096 ids" in checks["model.tokenizer"].detail
