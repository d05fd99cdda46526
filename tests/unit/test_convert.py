"""Conversion: every byte against the format's own encoder, and nothing under the final name until it is whole."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import convert_models as tiny
import numpy as np
import pytest
import safetensors
from safetensors.numpy import load_file

from picaflor import formats
from picaflor.cli.app import run_command_line
from picaflor.container import writer as writer_module
from picaflor.container.expert_file import plan_reads
from picaflor.container.index import Container
from picaflor.convert import converter, stored, target
from picaflor.convert.converter import ConvertOptions, convert
from picaflor.convert.policy import Policy, encodable
from picaflor.convert.target import Target
from picaflor.errors import BadContainer, MissingTensor, PicaflorError, UsageError, WriteFailed
from picaflor.formats import e8_iq3
from picaflor.formats.base import F32
from picaflor.formats.resolve import merge_rules
from picaflor.models.loading import open_model

DRAFT = f"model.layers.{tiny.LAYERS}."


@pytest.fixture(scope="module")
def weights() -> dict[str, F32]:
    return tiny.random_weights(tiny.glm_shapes())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, weights: dict[str, F32]) -> Path:
    return tiny.write_checkpoint(tmp_path_factory.mktemp("models") / "glm", tiny.GLM, weights)


def expected_format(name: str) -> tuple[str, int] | None:
    """The table of the container's documentation, written out again by name; None: not in the container."""
    if name.startswith(DRAFT) and ".indexer." in name:
        return None
    if name.endswith(("norm.weight", "bias", "mlp.gate.weight")):
        return ("f32", 0)
    if name.startswith((DRAFT, "lm_head", "model.embed_tokens")) or ".indexer." in name:
        return ("int8-row", 0)
    return ("int4-grouped", 64)


def contents(path: Path) -> dict[str, bytes]:
    """Every tensor's bytes."""
    with Container.open(path) as container:
        return {name: container.read(info).tobytes() for name, info in container.tensors.items()}


def encoded(name: str, values: F32, form: str, group_size: int) -> dict[str, bytes]:
    """What the encoder gives, by tensor name."""
    if values.ndim == 1 or form == "f32":
        return {name: values.astype("<f4").tobytes()}
    item = formats.get(form)
    assert item.encode is not None
    planes = item.encode(values, group_size)
    return {name + plane.suffix: np.asarray(data).tobytes() for plane, data in zip(item.planes, planes, strict=True)}


def test_every_tensor_is_the_encoding_of_its_source(checkpoint: Path, weights: dict[str, F32], tmp_path: Path) -> None:
    report = convert(checkpoint, tmp_path / "out")
    wanted: dict[str, bytes] = {}
    for name, values in weights.items():
        choice = expected_format(name)
        if choice is not None:
            wanted |= encoded(name, values, *choice)
    found = contents(tmp_path / "out")
    assert sorted(found) == sorted(wanted)
    assert [name for name in wanted if found[name] != wanted[name]] == []
    assert sorted(report.skipped) == sorted(name for name in weights if expected_format(name) is None)
    assert report.plan.nbytes == sum(map(len, wanted.values()))


def test_rules_stamps_and_resolution_agree(checkpoint: Path, weights: dict[str, F32], tmp_path: Path) -> None:
    convert(checkpoint, tmp_path / "out", ConvertOptions(shard_bytes=400_000))
    with Container.open(tmp_path / "out") as container:
        assert len(container.shards) > 2
        assert len(container.rules_json) == len(container.shards)
        rules = merge_rules(container.rules_json)
        assert rules is not None
        assert len(rules.rules) < 45
        _, index = open_model(container)
        resolved = dict(index.matrices)
        for expert in (expert for layer in index.experts.values() for expert in layer):
            resolved |= {matrix.name: matrix for matrix in expert.matrices}
        for name, values in weights.items():
            choice = expected_format(name)
            if choice is None or values.ndim == 1:
                continue
            rule = rules.match(name)
            assert rule is not None
            assert (rule.format, rule.group_size) == choice, name
            assert (resolved[name].format, resolved[name].group_size) == choice, name
            coded = choice[0] != "f32" and ".experts." not in name
            assert container.stamps.get(name) == (choice[0] if coded else None), name


def test_an_expert_is_one_read(checkpoint: Path, tmp_path: Path) -> None:
    convert(checkpoint, tmp_path / "out")
    with Container.open(tmp_path / "out") as container:
        _, index = open_model(container)
        for expert in (expert for layer in index.experts.values() for expert in layer):
            (run,) = plan_reads(expert).runs
            assert run.offset % 4096 == 0
            starts = [matrix.spans[0].offset for matrix in (expert.down, expert.gate, expert.up)]
            assert starts == sorted(starts)


@pytest.mark.parametrize("form", encodable())
def test_experts_in_every_format_that_has_an_encoder(
    checkpoint: Path, weights: dict[str, F32], tmp_path: Path, form: str
) -> None:
    convert(checkpoint, tmp_path / "out", ConvertOptions(policy=Policy(experts=form)))
    found = contents(tmp_path / "out")
    size = 64 if form == "int4-grouped" else 0
    for name in (name for name in weights if ".experts." in name and not name.startswith(DRAFT)):
        for key, data in encoded(name, weights[name], form, size).items():
            assert found[key] == data, key
    assert (
        found["lm_head.weight"] == encoded("lm_head.weight", weights["lm_head.weight"], "int8-row", 0)["lm_head.weight"]
    )


@pytest.mark.parametrize("size", [16, 32, 48, 96, 128, 192, 256])
def test_every_group_size_is_written_and_read_back(
    checkpoint: Path, weights: dict[str, F32], tmp_path: Path, size: int
) -> None:
    convert(checkpoint, tmp_path / "out", ConvertOptions(policy=Policy(group_size=size)))
    found = contents(tmp_path / "out")
    for name in ("model.layers.1.mlp.experts.2.down_proj.weight", "model.layers.0.self_attn.o_proj.weight"):
        for key, data in encoded(name, weights[name], "int4-grouped", size).items():
            assert found[key] == data, key


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"group_size": 100}, "--group-size 100: int4-grouped is read in groups of 16, 32"),
        ({"experts": "mxfp4"}, "format 'mxfp4' for routed experts: accepted: f32, "),
        ({"resident": "int5"}, "format 'int5' for resident matrices: accepted: f32, "),
        ({"kv_b": "int5"}, "format 'int5' for kv_b: accepted: f32, "),
        ({"kv_b": "e8-iq3-lattice"}, "format e8-iq3-lattice for kv_b: it is for routed experts only"),
        ({"resident": "e8-iq3-lattice"}, "it is for routed experts only"),
    ],
)
def test_policies_that_cannot_be_written_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Policy(**values)


def test_a_row_length_that_the_format_cannot_hold_is_refused_before_writing(tmp_path: Path) -> None:
    source = tiny.write_checkpoint(tmp_path / "qwen", tiny.QWEN, tiny.random_weights(tiny.qwen_shapes()))
    with pytest.raises(UsageError, match=r"experts\.0\.gate_proj\.weight \[32, 64\]: e8-iq3-lattice"):
        convert(source, tmp_path / "out", ConvertOptions(policy=Policy(experts="e8-iq3-lattice")))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["qwen"]


def test_a_dry_run_writes_nothing_and_tells_the_true_sizes(checkpoint: Path, tmp_path: Path) -> None:
    planned = convert(checkpoint, tmp_path / "deep" / "out", dry_run=True)
    assert list(tmp_path.iterdir()) == []
    assert not planned.written
    assert planned.quality is None
    convert(checkpoint, tmp_path / "out")
    assert planned.plan.nbytes == sum(map(len, contents(tmp_path / "out").values()))
    by_class = {total.group: total for total in planned.plan.totals()}
    experts = by_class["routed experts"]
    assert (experts.format, experts.group_size, experts.tensors) == ("int4-grouped", 64, 9)
    assert experts.nbytes == 9 * (256 * 128 + 256 * 4 * 4)
    assert experts.bits == 4.5


def failing_encoder(monkeypatch: pytest.MonkeyPatch, after: int, error: type[BaseException]) -> list[str]:
    """Makes the conversion stop at its `after`th matrix (-1: never); returns the names that were encoded."""
    seen: list[str] = []
    lock = threading.Lock()
    true: Callable[..., Any] = converter._Job._encode

    def encode(self: converter._Job, planned: Any, quality: Any) -> Any:
        with lock:
            if 0 <= after <= len(seen):
                raise error("stopped by the test")
            seen.append(planned.spec.name)
        return true(self, planned, quality)

    monkeypatch.setattr(converter._Job, "_encode", encode)
    return seen


def test_any_number_of_threads_writes_the_same_files_and_report(checkpoint: Path, tmp_path: Path) -> None:
    reports = []
    for threads in (1, 2, 5):
        options = ConvertOptions(threads=threads, shard_bytes=200_000)
        reports.append(convert(checkpoint, tmp_path / f"out{threads}", options).record())
    names = sorted(path.name for path in (tmp_path / "out1").iterdir())
    for threads in (2, 5):
        assert sorted(path.name for path in (tmp_path / f"out{threads}").iterdir()) == names
        for name in names:
            one, other = (tmp_path / folder / name for folder in ("out1", f"out{threads}"))
            assert one.read_bytes() == other.read_bytes(), name
    assert reports[0]["classes"] == reports[1]["classes"] == reports[2]["classes"]


def test_the_writer_makes_a_bounded_number_of_groups_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "AHEAD_BYTES", 3000)
    writer = writer_module.ContainerWriter(tmp_path / "out", workers=4)
    written = 0
    most_ahead = 0
    begun: list[int] = []
    lock = threading.Lock()

    def produce(number: int) -> dict[str, Any]:
        nonlocal most_ahead
        with lock:
            begun.append(number)
            most_ahead = max(most_ahead, len(begun) - written)
        return {f"t{number}": np.full(1000, number, np.uint8)}

    def progress(done: int, total: int) -> None:
        nonlocal written
        with lock:
            written += 1

    for number in range(20):
        writer.add_group([writer_module.TensorSpec(f"t{number}", "U8", (1000,))], lambda number=number: produce(number))
    (path,) = writer.write(progress=progress)
    assert sorted(begun) == list(range(20))
    assert 2 <= most_ahead <= 4  # three that wait, and the one that is written
    found = load_file(path)
    assert all((found[f"t{number}"] == number).all() for number in range(20))


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_interrupted_run_leaves_nothing_under_the_name_and_the_next_goes_on(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    options = ConvertOptions(shard_bytes=200_000)
    convert(checkpoint, tmp_path / "whole", options)
    with monkeypatch.context() as patch:
        failing_encoder(patch, 20, error)
        with pytest.raises((KeyboardInterrupt, WriteFailed)):
            convert(checkpoint, tmp_path / "out", options)
    assert not (tmp_path / "out").exists()
    kept = (tmp_path / ".out.partial").glob("model-*.safetensors")
    finished = {name for path in kept for name in safetensors.safe_open(path, "np").keys()}  # noqa: SIM118 - no dict
    assert len(finished) > 20
    assert not list((tmp_path / ".out.partial").glob(".*.tmp-*"))
    again = failing_encoder(monkeypatch, -1, error)
    convert(checkpoint, tmp_path / "out", options)
    assert again
    assert not finished & set(again)
    assert not (tmp_path / ".out.partial").exists()
    whole = sorted(path.name for path in (tmp_path / "whole").iterdir())
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == whole
    for name in whole:
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name


def test_what_an_interrupted_run_with_other_options_left_is_not_used(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        failing_encoder(patch, 20, KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt):
            convert(checkpoint, tmp_path / "out", ConvertOptions(shard_bytes=200_000))
    options = ConvertOptions(shard_bytes=200_000, policy=Policy(resident="int8-row"))
    convert(checkpoint, tmp_path / "out", options)
    convert(checkpoint, tmp_path / "whole", options)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert not (tmp_path / "out" / target.STATE).exists()


def test_a_second_conversion_into_the_same_place_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    with Target(tmp_path / "out", [])._locked():
        with pytest.raises(UsageError, match="another conversion is at work there"):
            convert(checkpoint, tmp_path / "out")
        assert [path.name for path in (tmp_path / ".out.partial").iterdir()] == [target.LOCK]
    convert(checkpoint, tmp_path / "out")
    assert not (tmp_path / "out" / target.LOCK).exists()


def test_a_stale_temporary_file_is_cleaned_away(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        failing_encoder(patch, 5, KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt):
            convert(checkpoint, tmp_path / "out")
    for name in (".model-00001-of-00001.safetensors.tmp-1", "half", "generation_config.json"):
        (tmp_path / ".out.partial" / name).write_bytes(b"half")
    convert(checkpoint, tmp_path / "out")
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["chat_template.jinja", "config.json", "model-00001-of-00001.safetensors", "tokenizer.json"]


def test_a_target_that_is_there_is_never_touched(checkpoint: Path, tmp_path: Path) -> None:
    full = tmp_path / "full"
    full.mkdir()
    (full / "x").write_text("mine")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("full", "file", "link"):
        with pytest.raises(UsageError, match=f"{name}: already there; convert never overwrites"):
            convert(checkpoint, tmp_path / name)
    with pytest.raises(UsageError, match="lies inside the source"):
        convert(checkpoint, checkpoint / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "full", "link"]
    (tmp_path / "empty").mkdir()
    convert(checkpoint, tmp_path / "empty")
    assert (tmp_path / "empty" / "config.json").exists()


def test_too_little_room_is_said_before_anything_is_written(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 5, 5))  # type: ignore[attr-defined]
    planned = convert(checkpoint, tmp_path / "out", dry_run=True)
    tensors = planned.nbytes
    assert (planned.needed_bytes, planned.free_bytes, planned.fits) == (tensors + (64 << 20), 5, False)
    with pytest.raises(WriteFailed) as caught:
        convert(checkpoint, tmp_path / "out")
    assert str(caught.value) == (
        f"{tmp_path}/out: {tensors + (64 << 20)} bytes needed ({tensors} of tensors, {64 << 20} in reserve for headers "
        "and side files), 5 bytes free on this disk"
    )
    assert list(tmp_path.iterdir()) == []


def test_unknown_and_missing_tensors_stop_the_conversion_before_writing(
    weights: dict[str, F32], tmp_path: Path
) -> None:
    extra = weights | {"model.layers.0.self_attn.magic.weight": np.ones((4, 4), np.float32)}
    source = tiny.write_checkpoint(tmp_path / "extra", tiny.GLM, extra)
    with pytest.raises(BadContainer, match=r"model\.layers\.0\.self_attn\.magic\.weight"):
        convert(source, tmp_path / "out")
    short = {name: values for name, values in weights.items() if name != "model.layers.1.mlp.experts.1.up_proj.weight"}
    source = tiny.write_checkpoint(tmp_path / "short", tiny.GLM, short)
    with pytest.raises(MissingTensor, match=r"experts\.1\.up_proj\.weight"):
        convert(source, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["extra", "short"]


def test_an_unknown_family_is_refused_by_name(checkpoint: Path, tmp_path: Path) -> None:
    source = shutil.copytree(checkpoint, tmp_path / "other")
    (source / "config.json").write_text(json.dumps(tiny.GLM | {"model_type": "llama9"}))
    with pytest.raises(PicaflorError, match="llama9"):
        convert(source, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other"]


def test_without_the_draft_layer_everything_else_has_the_same_bytes(checkpoint: Path, tmp_path: Path) -> None:
    convert(checkpoint, tmp_path / "with")
    convert(checkpoint, tmp_path / "without", ConvertOptions(draft=False))
    whole, part = contents(tmp_path / "with"), contents(tmp_path / "without")
    assert part == {name: data for name, data in whole.items() if not name.startswith(DRAFT)}
    assert json.loads((tmp_path / "without" / "config.json").read_text())["num_nextn_predict_layers"] == 0
    with Container.open(tmp_path / "without") as container:
        model, _ = open_model(container)
        assert model.draft is None


def test_config_and_side_files(checkpoint: Path, tmp_path: Path) -> None:
    convert(checkpoint, tmp_path / "out")
    wanted = {key: value for key, value in tiny.GLM.items() if key != "quantization_config"}
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == wanted | {"latent_norm_eps": 1e-6}
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["chat_template.jinja", "config.json", "model-00001-of-00001.safetensors", "tokenizer.json"]
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (checkpoint / "tokenizer.json").read_bytes()


def test_a_stated_latent_eps_stays(checkpoint: Path, tmp_path: Path) -> None:
    source = shutil.copytree(checkpoint, tmp_path / "stated")
    (source / "config.json").write_text(json.dumps(tiny.GLM | {"latent_norm_eps": 1e-5}))
    convert(source, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["latent_norm_eps"] == 1e-5


def test_from_a_container_equal_formats_are_copied_and_others_encoded_from_the_decoded(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(checkpoint, tmp_path / "first")
    options = ConvertOptions(policy=Policy(experts="int8-row"))
    report = convert(tmp_path / "first", tmp_path / "second", options)
    first, second = contents(tmp_path / "first"), contents(tmp_path / "second")
    name = "model.layers.1.mlp.experts.0.up_proj.weight"
    planes = tuple(np.frombuffer(first[key], np.uint8) for key in (name, name + ".qs"))
    decoded = formats.get("int4-grouped").decode(planes, 256, 256, 64)
    assert encoded(name, decoded, "int8-row", 0) == {key: second[key] for key in (name, name + ".qs")}
    routed = ".mlp.experts."
    same = {key: data for key, data in first.items() if routed not in key or key.startswith(DRAFT)}
    assert {key: second[key] for key in same} == same
    assert report.quality is not None
    assert set(report.quality.classes) == {"routed experts"}
    assert report.quality.classes["routed experts"].tensors == 9


def test_another_group_size_is_another_format(checkpoint: Path, tmp_path: Path) -> None:
    convert(checkpoint, tmp_path / "first", ConvertOptions(policy=Policy(group_size=32)))
    convert(tmp_path / "first", tmp_path / "second", ConvertOptions(policy=Policy(group_size=128)))
    first, second = contents(tmp_path / "first"), contents(tmp_path / "second")
    name = "model.layers.0.self_attn.q_a_proj.weight"
    planes = tuple(np.frombuffer(first[key], np.uint8) for key in (name, name + ".qs"))
    decoded = formats.get("int4-grouped").decode(planes, 64, 256, 32)
    assert encoded(name, decoded, "int4-grouped", 128) == {key: second[key] for key in (name, name + ".qs")}


@pytest.mark.parametrize("form", ["int8-row", "int4-row", "f32"])
def test_one_class_of_a_container_is_written_again_in_another_format(
    checkpoint: Path, tmp_path: Path, form: str
) -> None:
    """kv_b alone: it is the encoding of what the container held, and no other byte changes."""
    convert(checkpoint, tmp_path / "first")
    words = ["convert", str(tmp_path / "first"), str(tmp_path / "second"), "--kv-b-format", form]
    assert run_command_line(words) == 0
    first, second = contents(tmp_path / "first"), contents(tmp_path / "second")
    names = [f"model.layers.{layer}.self_attn.kv_b_proj.weight" for layer in range(tiny.LAYERS)]
    changed = {key for key in first.keys() | second.keys() if first.get(key) != second.get(key)}
    assert changed == {key for key in first.keys() | second.keys() if key.startswith(tuple(names))}
    for name in names:
        planes = tuple(np.frombuffer(first[key], np.uint8) for key in (name, name + ".qs"))
        decoded = formats.get("int4-grouped").decode(planes, 128, 96, 64)
        wanted = encoded(name, decoded, form, 0)
        assert {key: second[key] for key in second if key.startswith(name)} == wanted
    with Container.open(tmp_path / "second") as container:
        found = open_model(container)[1].matrices
        assert {found[name].format for name in names} == {form}


def test_a_class_that_a_family_has_not_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tiny.write_checkpoint(tmp_path / "qwen", tiny.QWEN, tiny.random_weights(tiny.qwen_shapes()))
    assert run_command_line(["convert", str(source), str(tmp_path / "x"), "--dry-run", "--kv-b-format", "f32"]) == 0
    assert "--kv-b-format f32 has no effect: qwen3_moe has no kv_b_proj" in capsys.readouterr().err
    words = ["convert", str(source), str(tmp_path / "x"), "--relayout", "--kv-b-format", "f32"]
    assert run_command_line(words) == 2
    assert "--kv-b-format does not go with --relayout" in capsys.readouterr().err


def test_e8_is_turned_back_before_it_is_encoded_again(
    checkpoint: Path, weights: dict[str, F32], tmp_path: Path
) -> None:
    coded = convert(checkpoint, tmp_path / "e8", ConvertOptions(policy=Policy(experts="e8-iq3-lattice")))
    assert coded.quality is not None
    assert 0.1 < coded.quality.classes["routed experts"].relative_rms_error < 0.3
    report = convert(tmp_path / "e8", tmp_path / "f32", ConvertOptions(policy=Policy(experts="f32")))
    assert report.quality is not None
    name = "model.layers.1.mlp.experts.1.down_proj.weight"
    back = np.frombuffer(contents(tmp_path / "f32")[name], "<f4").reshape(256, 256)
    true = weights[name]
    assert np.linalg.norm(back - true) < 0.3 * np.linalg.norm(true)
    assert np.linalg.norm(e8_iq3.rotate(back) - true) > np.linalg.norm(true)


def test_stacked_experts_give_the_bytes_of_separate_ones(
    checkpoint: Path, weights: dict[str, F32], tmp_path: Path
) -> None:
    stacked = {name: values for name, values in weights.items() if ".mlp.experts." not in name}
    for layer in (1, 2):
        prefix = f"model.layers.{layer}.mlp.experts."
        parts = [
            [weights[f"{prefix}{expert}.{part}_proj.weight"] for expert in range(tiny.EXPERTS)]
            for part in ("gate", "up", "down")
        ]
        stacked[f"{prefix}gate_up_proj"] = np.concatenate([np.stack(parts[0]), np.stack(parts[1])], axis=1)
        stacked[f"{prefix}down_proj"] = np.stack(parts[2])
    source = tiny.write_checkpoint(tmp_path / "stacked", tiny.GLM, stacked)
    convert(source, tmp_path / "a")
    convert(checkpoint, tmp_path / "b")
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_a_tied_head_is_stored_once(tmp_path: Path) -> None:
    weights = tiny.random_weights(tiny.qwen_shapes())
    source = tiny.write_checkpoint(tmp_path / "qwen", tiny.QWEN, weights)
    convert(source, tmp_path / "out")
    found = contents(tmp_path / "out")
    assert "lm_head.weight" not in found
    assert "latent_norm_eps" not in json.loads((tmp_path / "out" / "config.json").read_text())
    name = "model.layers.1.self_attn.q_proj.weight"
    assert encoded(name, weights[name], "int4-grouped", 64).items() <= found.items()


def test_quality_is_the_relative_error_of_the_stored_weights(
    checkpoint: Path, weights: dict[str, F32], tmp_path: Path
) -> None:
    report = convert(checkpoint, tmp_path / "out")
    assert report.quality is not None
    names = [name for name in weights if ".mlp.experts." in name and not name.startswith(DRAFT)]
    form = formats.get("int4-grouped")
    assert form.encode is not None
    errors, totals, worst = 0.0, 0.0, 0.0
    for name in names:
        true = weights[name].astype(np.float64)
        difference = form.decode(form.encode(weights[name], 64), 256, 256, 64) - true
        errors += float((difference**2).sum())
        totals += float((true**2).sum())
        worst = max(worst, float(np.sqrt((difference**2).sum() / (true**2).sum())))
    found = report.quality.classes["routed experts"]
    assert found.relative_rms_error == pytest.approx(np.sqrt(errors / totals), rel=1e-9)
    assert found.worst_error == pytest.approx(worst, rel=1e-9)
    assert report.quality.classes["router"].relative_rms_error == 0
    assert found.lost_runs == 0


def test_a_matrix_that_loses_one_of_its_halves_is_named(weights: dict[str, F32], tmp_path: Path) -> None:
    uneven = dict(weights)
    name = f"{DRAFT}eh_proj.weight"
    rng = np.random.default_rng(3)
    halves = rng.uniform(-1, 1, (256, 512)).astype(np.float32)
    halves[:, :256] /= 30
    uneven[name] = halves
    source = tiny.write_checkpoint(tmp_path / "uneven", tiny.GLM, uneven)
    lines: list[str] = []
    options = ConvertOptions(policy=Policy(draft="int4-row"))
    convert(source, tmp_path / "row", options, warn=lines.append)
    assert [
        line for line in lines if line.startswith(f"{name}: ") and "of 2048 runs of 64 weights became all zero" in line
    ]
    lines.clear()
    convert(source, tmp_path / "safe", warn=lines.append)
    assert not [line for line in lines if "became all zero" in line]


@pytest.mark.parametrize("form", encodable())
def test_encoding_and_reading_by_blocks_of_rows_gives_the_whole(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "BLOCK_VALUES", 128 * 256)
    rng = np.random.default_rng(11)
    values = rng.standard_normal((300, 256)).astype(np.float32)
    item = formats.get(form)
    assert item.encode is not None
    blocks: list[int] = []
    planes = stored.encode_blocks(
        lambda first, last: values[first:last],
        item,
        300,
        256,
        64 if item.group_sizes else 0,
        check=lambda block, made: blocks.append(len(block)),
    )
    assert blocks == [128, 128, 44]
    whole = item.encode(values, 64 if item.group_sizes else 0)
    assert [plane.tobytes() for plane in planes] == [np.asarray(plane).tobytes() for plane in whole]


def test_the_command_prints_the_record_and_returns_exit_codes(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["convert", str(checkpoint), str(tmp_path / "out"), "--json", "--group-size", "32"]
    assert run_command_line([*arguments, "--dry-run"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["written"] is False
    assert not (tmp_path / "out").exists()
    assert run_command_line(arguments) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["written"] is True
    assert record["bytes"] == planned["bytes"] == sum(map(len, contents(tmp_path / "out").values()))
    experts = next(entry for entry in record["classes"] if entry["class"] == "routed experts")
    assert (experts["format"], experts["group_size"], experts["bits_per_parameter"]) == ("int4-grouped", 32, 5.0)
    assert 0.02 < experts["relative_rms_error"] < 0.2
    assert run_command_line(arguments) == 2
    assert "already there; convert never overwrites" in capsys.readouterr().err
    assert run_command_line(["convert", str(checkpoint), str(tmp_path / "x"), "--format", "int5"]) == 2
    assert "format 'int5' for routed experts: accepted: " in capsys.readouterr().err


def test_the_command_names_options_that_cannot_be_or_do_nothing(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for size in ("0", "many"):
        assert run_command_line(["convert", str(checkpoint), str(tmp_path / "x"), "--shard-size", size]) == 2
        assert f"--shard-size: '{size}' is not accepted; give a size above 0" in capsys.readouterr().err
    words = ["--format", "int8-row", "--resident-format", "int8-row", "--group-size", "32", "--source-group-size", "32"]
    assert run_command_line(["convert", str(checkpoint), str(tmp_path / "x"), "--dry-run", *words]) == 0
    assert [line.removeprefix("picaflor: warning: ") for line in capsys.readouterr().err.splitlines()] == [
        "--group-size 32 has no effect: nothing is written in int4-grouped",
        "--source-group-size 32 has no effect: no tensor is int4-grouped",
    ]


def test_the_command_prints_a_table(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(["convert", str(checkpoint), str(tmp_path / "out"), "--no-mtp"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["class", "format", "tensors"]
    assert any(line.startswith("routed experts") and "int4-grouped 64" in line and "4.500" in line for line in lines)
    assert not any(line.startswith("draft") for line in lines)
    assert f"written to {tmp_path / 'out'}" in "\n".join(lines)
