"""Relayout: every byte stays, an expert becomes one read, and nothing has the new name until all was compared."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import convert_models as tiny
import numpy as np
import pytest
from safetensors import safe_open

from picaflor.cli.app import run_command_line
from picaflor.container import writer as writer_module
from picaflor.container.expert_file import plan_reads
from picaflor.container.index import Container
from picaflor.convert import relayout as module
from picaflor.convert.converter import ConvertOptions, convert
from picaflor.convert.job import JobOptions
from picaflor.convert.policy import Policy
from picaflor.convert.relayout import relayout
from picaflor.errors import BadContainer, UsageError, WriteFailed
from picaflor.formats import bf16
from picaflor.formats.rules import merge_rules
from picaflor.models.loading import ModelIndex, open_model
from picaflor.runtime.engine import Engine, EngineOptions

FAMILIES = Path(__file__).parents[1] / "data" / "families"
MODELS = [path.name for path in sorted(FAMILIES.iterdir()) if path.is_dir()]
SMALL = JobOptions(shard_bytes=100_000)


def tensors(*paths: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Dtype, shape and bytes of every tensor of containers, padding left out."""
    found = {}
    for path in paths:
        with Container.open(path) as container:
            for name, info in container.tensors.items():
                found[name] = (info.dtype, info.shape, container.read(info).tobytes())
    return found


def opened(path: Path) -> ModelIndex:
    with Container.open(path) as container:
        return open_model(container)[1]


def logits(path: Path) -> np.ndarray[Any, Any]:
    """Logits of a few positions with 1 expert slot per layer, so that experts come from the files again and again."""
    ids = np.arange(1, 13, dtype=np.int32)
    with Engine.open(path, EngineOptions(context=64, threads=1, expert_slots=1)) as engine:
        return np.concatenate([rows.copy() for rows in engine.forward_logits(ids)])


def scattered(path: Path, target: Path) -> Path:
    """A container with its tensors in an order that makes an expert many reads, in two shards, without rules."""
    writer = writer_module.ContainerWriter(target, max_shard_bytes=1_000_000)
    with Container.open(path) as container:
        for name in sorted(container.tensors, key=lambda name: zlib.crc32(name.encode())):
            info = container.tensors[name]
            writer.add(name, info.dtype, info.shape, container.read(info), stamp=container.stamps.get(name))
        writer.write()
    shutil.copyfile(path / "config.json", target / "config.json")
    return target


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A quantized container of several shards with the tensors of an expert far apart, and side files."""
    folder = tmp_path_factory.mktemp("source")
    checkpoint = tiny.write_checkpoint(folder / "ckpt", tiny.GLM, tiny.random_weights(tiny.glm_shapes()))
    convert(checkpoint, folder / "made", ConvertOptions(policy=Policy(group_size=32)))
    path = scattered(folder / "made", folder / "model")
    for name in ("tokenizer.json", "chat_template.jinja", "LICENSE", "weights.bin", ".hidden"):
        (path / name).write_text(f"{name} of the model", encoding="utf-8")
    return path


@pytest.mark.parametrize("name", MODELS)
def test_every_byte_and_every_logit_stays(name: str, tmp_path: Path) -> None:
    report = relayout(FAMILIES / name, tmp_path / "out", SMALL)
    assert tensors(tmp_path / "out") == tensors(FAMILIES / name)
    assert report.reads_after == 1
    before, after = logits(FAMILIES / name), logits(tmp_path / "out")
    assert np.isfinite(before).all()
    assert (before.view(np.uint32) == after.view(np.uint32)).all()


def test_an_expert_that_was_scattered_over_shards_is_one_read(source: Path, tmp_path: Path) -> None:
    report = relayout(source, tmp_path / "out", SMALL)
    assert report.reads_before >= 4
    index = opened(tmp_path / "out")
    reads = [len(plan_reads(expert).runs) for layer in index.experts.values() for expert in layer]
    assert reads == [1] * 6
    assert tensors(tmp_path / "out") == tensors(source)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    for shard in (tmp_path / "out").glob("*.safetensors"):
        with safe_open(shard, "np") as file:
            assert all(file.get_tensor(name) is not None for name in file.keys())  # noqa: SIM118 - no dict


def test_a_container_without_rules_gets_those_of_how_it_was_read(source: Path, tmp_path: Path) -> None:
    with Container.open(source) as container:
        assert not container.rules_json
    relayout(source, tmp_path / "out")
    with Container.open(tmp_path / "out") as container:
        rules = merge_rules(container.rules_json)
    assert rules is not None
    index = opened(source)
    experts = [m for layer in index.experts.values() for e in layer for m in e.matrices]
    assert {(m.format, m.group_size) for m in experts} == {("int4-grouped", 32), ("int8-row", 0)}
    for matrix in (*index.matrices.values(), *experts):
        rule = rules.match(matrix.name)
        assert rule is not None, matrix.name
        assert (rule.format, rule.group_size) == (matrix.format, matrix.group_size), matrix.name


def test_rules_and_stamps_of_the_source_stay(tmp_path: Path) -> None:
    checkpoint = tiny.write_checkpoint(tmp_path / "ckpt", tiny.GLM, tiny.random_weights(tiny.glm_shapes()))
    convert(checkpoint, tmp_path / "made", ConvertOptions(policy=Policy(experts="int3-g64", group_size=16)))
    relayout(tmp_path / "made", tmp_path / "out")
    found = []
    for path in (tmp_path / "made", tmp_path / "out"):
        with Container.open(path) as container:
            rules = merge_rules(container.rules_json)
            assert rules is not None
            found.append((dict(container.stamps), {name: rules.match(name) for name in container.tensors}))
    stamps, said = found[0]
    assert found[1][0] == stamps
    assert stamps
    same = {name: (rule.format, rule.group_size) for name, rule in said.items() if rule and not name.endswith(".qs")}
    for name, choice in same.items():
        rule = found[1][1][name]
        assert rule is not None
        assert (rule.format, rule.group_size) == choice, name


def test_stacked_experts_become_experts_of_their_own(tmp_path: Path) -> None:
    weights = tiny.random_weights(tiny.qwen_shapes())
    stacked = {name: values for name, values in weights.items() if ".experts." not in name}
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp.experts."
        parts = [[weights[f"{prefix}{e}.{m}_proj.weight"] for e in range(3)] for m in ("gate", "up", "down")]
        stacked[f"{prefix}gate_up_proj"] = np.stack([np.concatenate(pair) for pair in zip(*parts[:2], strict=True)])
        stacked[f"{prefix}down_proj"] = np.stack(parts[2])
    path = tiny.write_checkpoint(tmp_path / "stacked", tiny.QWEN, stacked)
    relayout(path, tmp_path / "out")
    found = tensors(tmp_path / "out")
    assert found.keys() == weights.keys()
    for name, values in weights.items():
        assert found[name] == ("BF16", values.shape, bf16.encode(values.reshape(1, -1))[0].tobytes()), name


def test_split_directories_become_one(source: Path, tmp_path: Path) -> None:
    shutil.copytree(source, tmp_path / "one")
    (tmp_path / "two").mkdir()
    (shard,) = (tmp_path / "one").glob("model-00002-of-*.safetensors")
    shard.rename(tmp_path / "two" / shard.name)
    relayout(tmp_path / "one", tmp_path / "out", JobOptions(split=(tmp_path / "two",)))
    assert tensors(tmp_path / "out") == tensors(source)
    with pytest.raises(UsageError, match="lies inside the source"):
        relayout(tmp_path / "one", tmp_path / "two" / "new", JobOptions(split=(tmp_path / "two",)))


def test_side_files_are_copied_and_others_named(source: Path, tmp_path: Path) -> None:
    report = relayout(source, tmp_path / "out")
    names = ("LICENSE", "chat_template.jinja", "config.json", "tokenizer.json")
    assert report.side_files == names
    assert report.left_out == ("weights.bin",)
    for name in names:
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(
        [*names, "model-00001-of-00001.safetensors"]
    )


def test_the_source_is_never_written_to(source: Path, tmp_path: Path) -> None:
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    for out in (source, source / "new"):
        with pytest.raises(UsageError, match=r"already there|lies inside the source"):
            relayout(source, out)
    hidden = shutil.copytree(source, tmp_path / ".x.partial")
    with pytest.raises(UsageError, match="would be in the way of the source"):
        relayout(hidden, tmp_path / "x")
    with pytest.raises(UsageError, match="would be in the way of the source"):
        relayout(shutil.copytree(source, tmp_path / ".y.partial" / "model"), tmp_path / "y")
    assert {path.name: path.read_bytes() for path in source.iterdir()} == before
    assert {path.name for path in hidden.iterdir()} == set(before)


KILLED = """
import os, signal, sys
from pathlib import Path
from picaflor.convert.job import JobOptions
from picaflor.convert.relayout import relayout
count = 0
def progress(stage, done, total):
    global count
    count += 1
    if count == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)
relayout(Path(sys.argv[1]), Path(sys.argv[2]), JobOptions(shard_bytes=100_000), progress=progress)
"""


def killed(source: Path, out: Path, at: int) -> bool:
    """Run a relayout in a process that kills itself at a step; whether it died so."""
    done = subprocess.run([sys.executable, "-c", KILLED, str(source), str(out), str(at)], env=os.environ, check=False)
    assert done.returncode in (0, -9)
    return done.returncode != 0


def test_a_run_that_was_killed_is_resumed(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = relayout(source, tmp_path / "whole", SMALL)
    for at in (1, 30, whole.tensors // 2, whole.tensors - 1):  # the last one near the end of comparing
        assert killed(source, tmp_path / "out", at)
        assert not (tmp_path / "out").exists()
    read: list[str] = []
    true = module._Job._reader

    def reader(self: Any, group: Any) -> Any:
        def produce() -> Any:
            read.append(group[0].spec.name)
            return true(self, group)()

        return produce

    monkeypatch.setattr(module._Job, "_reader", reader)
    relayout(source, tmp_path / "out", SMALL)
    assert not read  # everything was written before the last kill
    names = sorted(path.name for path in (tmp_path / "whole").iterdir())
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == names
    for name in names:
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    assert not (tmp_path / ".out.partial").exists()


def test_a_byte_that_changed_on_the_way_is_found(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    true = writer_module._write_tensor
    name = "model.layers.1.mlp.experts.2.up_proj.weight"

    def flip(file: Any, spec: Any, arrays: Any) -> None:
        if spec.name == name:
            arrays = dict(arrays)
            arrays[name] = arrays[name].copy()
            arrays[name][-1] ^= 1
        true(file, spec, arrays)

    with monkeypatch.context() as patch:
        patch.setattr(writer_module, "_write_tensor", flip)
        with pytest.raises(BadContainer, match=f'tensor "{name}" reads back with other bytes than the source has'):
            relayout(source, tmp_path / "out", SMALL)
    assert not (tmp_path / "out").exists()
    relayout(source, tmp_path / "out", SMALL)
    assert tensors(tmp_path / "out") == tensors(source)


def test_a_byte_that_changed_in_a_shard_of_an_earlier_run_is_found(source: Path, tmp_path: Path) -> None:
    assert killed(source, tmp_path / "out", 60)
    shard = sorted((tmp_path / ".out.partial").glob("model-*.safetensors"))[0]
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(BadContainer, match=f"{shard.name}: tensor .* reads back with other bytes"):
        relayout(source, tmp_path / "out", SMALL)
    assert not shard.exists()
    relayout(source, tmp_path / "out", SMALL)
    assert tensors(tmp_path / "out") == tensors(source)


def test_a_full_disk_is_one_line_and_loses_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = tensors(source)
    arguments = ["convert", str(source), str(tmp_path / "out"), "--relayout", "--shard-size", "100kB"]
    written = 0
    true = writer_module._write_tensor

    def full(file: Any, spec: Any, arrays: Any) -> None:
        nonlocal written
        written += spec.nbytes
        if written > 300_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        true(file, spec, arrays)

    with monkeypatch.context() as patch:
        patch.setattr(writer_module, "_write_tensor", full)
        assert run_command_line(arguments) == 1
    said = capsys.readouterr().err.strip().splitlines()
    assert "writing failed after" in said[-1]
    assert said[-1].endswith("No space left on device; finished files stay, and the same command goes on from them")
    assert not (tmp_path / "out").exists()
    assert tensors(source) == before
    assert run_command_line(arguments) == 0
    assert tensors(tmp_path / "out") == before
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 5, 5))  # type: ignore[attr-defined]
        with pytest.raises(WriteFailed, match=r"bytes needed \(.* in reserve .*\), 5 bytes free on this disk"):
            relayout(source, tmp_path / "other")
        capsys.readouterr()
        assert run_command_line(["convert", str(source), str(tmp_path / "other"), "--relayout", "--dry-run"]) == 1
        (line,) = [line for line in capsys.readouterr().out.splitlines() if "free there" in line]
        assert re.fullmatch(
            r"too little room: free there: 5 B, \S+ MiB needed, 64 MiB of that in reserve; nothing was written", line
        )
    assert not (tmp_path / ".other.partial").exists()


def test_the_command(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["convert", str(source), str(tmp_path / "out"), "--relayout"]
    assert run_command_line([*arguments, "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "would be copied to" in said
    assert "6 experts, 6 reads each now, one then" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == []
    assert run_command_line([*arguments, "--format", "int8-row"]) == 2
    assert "--format does not go with --relayout, which changes no byte" in capsys.readouterr().err
    assert run_command_line([*arguments, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["experts"], record["reads_before"], record["reads_after"], record["written"]) == (6, 6, 1, True)
    assert record["bytes"] == sum(len(data) for _, _, data in tensors(source).values())
    assert run_command_line(arguments) == 2
    assert "already there" in capsys.readouterr().err
