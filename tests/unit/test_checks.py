"""Options that fit no model or do nothing, end tokens that are none, files that end early: each is one line."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from picaflor import cli
from picaflor.cli.doctor import check_reads
from picaflor.container.index import Container
from picaflor.errors import UsageError
from picaflor.runtime import bench, builtin, checks, trial_reads
from picaflor.runtime.engine import Engine, EngineOptions
from picaflor.runtime.machine import write_text
from picaflor.runtime.trial_reads import Reads
from picaflor.settings import Settings

QWEN = Path(__file__).parent.parent / "data" / "families" / "qwen3_moe_tiny"
RATES = ("--memory-rate", "10GB", "--disk-rate", "1GB")
RUN = ("run", "The old house", "-n", "1", "--temperature", "0")


@pytest.fixture(autouse=True)
def no_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The built-in model's files, to be changed."""
    folder = tmp_path / "model"
    shutil.copytree(builtin.folder(), folder)
    return folder


def warnings(err: str) -> list[str]:
    return [line for line in err.splitlines() if line.startswith("picaflor: warning: ")]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--vram", "8GiB"), "--vram 8 GiB has no effect: the CPU computes, in memory that --ram bounds"),
        (
            ("--queue-depth", "16"),
            "--queue-depth 16 has no effect: threads read, as many as --read-threads says; --read-engine io_uring has "
            "a queue",
        ),
        (
            ("--read-engine", "io_uring", "--read-threads", "3"),
            "--read-threads 3 has no effect: io_uring reads, --queue-depth at once",
        ),
        (
            ("--mapped", "off", "--policy", "lru", "--prefetch", "on"),
            "every expert stays in memory once it was read, without effect: --policy lru, --prefetch on; "
            "--expert-slots or --ram leave fewer there",
        ),
        (
            ("--mapped", "off", "--prefetch", "on"),
            "every expert stays in memory once it was read, without effect: --prefetch on; "
            "--expert-slots or --ram leave fewer there",
        ),
    ],
)
def test_an_option_without_effect_is_told(
    words: tuple[str, ...], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (RUN, ("plan", *RATES)):
        assert cli.main([*command, *words]) == 0
        assert warnings(capsys.readouterr().err) == [f"picaflor: warning: {line}"]


def test_options_that_have_an_effect_are_not_told(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--read-threads", "3", "--group-size", "64", "--latent-norm-eps", "1e-6", "--ram", "4GiB")
    assert cli.main([*RUN, *words]) == 0
    assert warnings(capsys.readouterr().err) == []


def test_options_that_fit_no_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", str(QWEN), *RATES, "--group-size", "64"]) == 0
    assert warnings(capsys.readouterr().err) == [
        "picaflor: warning: --group-size 64 has no effect: no tensor is int4-grouped"
    ]
    assert cli.main(["plan", str(QWEN), *RATES, "--latent-norm-eps", "1e-5"]) == 2
    assert "--latent-norm-eps: qwen3_moe has no latents; leave it out" in capsys.readouterr().err
    with pytest.raises(UsageError, match="--latent-norm-eps: qwen3_moe has no latents"):
        Engine.open(QWEN, EngineOptions(latent_norm_eps=1e-5))


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("value", [4096, "</s>", [1, None], True])
def test_end_tokens_that_are_none(model: Path, file: str, value: object, capsys: pytest.CaptureFixture[str]) -> None:
    path = model / file
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": value}))
    line = f"{file}: eos_token_id is {json.dumps(value)}; accepted: a token id below 4096 or a list"
    for words in (("inspect", str(model)), ("plan", str(model), *RATES), ("run", str(model), "x")):
        assert cli.main(words) == 1
        out, err = capsys.readouterr()
        assert line in err.splitlines()[-1]
        assert words[0] != "inspect" or f"problem: {line}" in out.splitlines()


def test_plan_tells_which_files_end_early(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (shard,) = model.glob("*.safetensors")
    whole = shard.stat().st_size
    assert cli.main(["plan", str(model), *RATES]) == 0
    assert warnings(capsys.readouterr().err) == []
    os.truncate(shard, whole - 1)
    assert cli.main(["plan", str(model), *RATES]) == 0
    (line,) = warnings(capsys.readouterr().err)
    assert line == (
        f"picaflor: warning: {shard}: {whole - 1} bytes are here, its header declares {whole}: the plan is for whole "
        "files, and the disk was not measured"
    )


def test_doctor_reads_a_model_deeply_or_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--deep"]) == 2
    assert "--deep reads a model and none is given: name its directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rate", "share", "line"),
    [
        (2.1e9, 0.98, "experts of 0.06 MB at 2.10 GB/s, 98% of it from storage"),
        (2.1e9, None, "experts of 0.06 MB at 2.10 GB/s"),
        (2.1e9, 0.001, "experts of 0.06 MB at 2.10 GB/s, from the page cache: the drive's rate was not measured"),
        (0.0, 0.0, "experts of 0.06 MB are too little to tell a rate from"),
        (4.9e6, 0.5, "experts of 0.06 MB are too little to tell a rate from"),
    ],
)
def test_doctor_shows_no_zero_for_what_was_not_measured(
    rate: float, share: float | None, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial_reads, "measure_reads", lambda plan: Reads((0.0,), 55_296, rate, share))
    check = check_reads(builtin.folder(), Settings())
    assert (check.id, check.status, check.detail) == ("model.reads", "info", line)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--quality-record", "x.json"), "--quality-record is for a lossy mode and none is active"),
        (("--text", "x.txt", "--token-seed", "1"), "--token-seed is of random tokens and --text feeds those of a file"),
    ],
)
def test_bench_refuses_what_would_do_nothing(
    words: tuple[str, ...], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "decode", str(builtin.folder()), *words]) == 2
    assert line in capsys.readouterr().err


def test_tune_measures_no_lossy_mode(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PICAFLOR_ROUTER_TOP_P", "0.5")
    assert cli.main(["tune"]) == 2
    assert "tune measures no lossy mode; router top-p 0.5 is set: unset it" in capsys.readouterr().err


def test_eval_names_lossy_modes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("A hummingbird drinks from a flower and flies on. " * 4)
    words = ["eval", "--text", str(text), "--window", "16", "--limit", "1", "--router-top-p", "0.5"]
    assert cli.main(words) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "LOSSY" in line]
    assert line.startswith("LOSSY, router top-p 0.5: ")
    assert line.endswith("% of the decoded tokens' experts left out")
    assert cli.main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["lossy"] == [line.removeprefix("LOSSY, ")]


@pytest.mark.parametrize("command", ["inspect", "capabilities", "doctor", "plan"])
def test_commands_on_a_model_whose_shards_lie_elsewhere(
    model: Path, tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (shard,) = model.glob("*.safetensors")
    shard.rename(other / shard.name)
    words = [command, str(model), *(RATES if command == "plan" else ())]
    assert cli.main(words) == 1
    assert "no *.safetensors file here" in "".join(capsys.readouterr())
    assert cli.main([*words, "--split", str(other)]) == 0
    capsys.readouterr()


@pytest.mark.parametrize(
    "words", [("run", "", "x"), ("plan", ""), ("inspect", ""), ("convert", "", "out"), ("convert", "src", "")]
)
def test_an_empty_name_is_not_the_current_folder(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 2
    assert "'': the name is empty; give a directory, . for the current one" in capsys.readouterr().err


def test_what_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a model was opened")

    monkeypatch.setattr(Container, "open", refuse)
    for path, why in ((tmp_path, "it is a directory"), (tmp_path / "no" / "file", "its directory does not exist")):
        assert cli.main([*RUN, "--record-routes", str(path)]) == 1
        assert f"{path}: routes cannot be written there: {why}" in capsys.readouterr().err
    assert cli.main(["tune", "--tuned-file", str(tmp_path)]) == 2
    assert f"--tuned-file {tmp_path}: is a directory; give a file" in capsys.readouterr().err


def test_a_quality_record_is_read_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("something was measured")

    monkeypatch.setattr(bench, "measure_decode", refuse)
    record = tmp_path / "record.json"
    record.write_text('{"model": "tiny-glm"}')
    words = ["bench", "decode", str(builtin.folder()), "--router-top-p", "0.5", "--quality-record", str(record)]
    assert cli.main(words) == 2
    assert f"--quality-record {record}: no figures mean_kl, " in capsys.readouterr().err


def test_plan_counts_all_experts_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PICAFLOR_ROUTER_TOP_P", "0.5")
    assert cli.main(["plan", *RATES]) == 0
    assert warnings(capsys.readouterr().err) == [
        "picaflor: warning: the plan is for all experts that the router chooses, without router top-p 0.5"
    ]


def test_what_a_killed_writer_left_is_removed_by_a_later_one(tmp_path: Path) -> None:
    path = tmp_path / "state[1].json"
    names = [".state[1].json.11.partial", ".state[1].json.12.partial", ".other.json.11.partial"]
    for name in names:
        (tmp_path / name).touch()
    for name in (names[0], names[2]):
        os.utime(tmp_path / name, (1.0, 1.0))
    write_text(path, "{}")
    assert sorted(file.name for file in tmp_path.iterdir() if file.is_file()) == sorted([path.name, *names[1:]])


def test_plan_of_mapped_experts_says_what_it_is_for(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", str(model), *RATES, "--mapped", "on"]) == 0
    assert warnings(capsys.readouterr().err) == [
        "picaflor: warning: a run uses experts where they lie (--mapped on); the plan is for experts in slots, as with "
        "--mapped off"
    ]
    (shard,) = model.glob("*.safetensors")
    os.truncate(shard, shard.stat().st_size - 1)
    assert cli.main(["plan", str(model), *RATES]) == 0
    capsys.readouterr()


def test_devices_where_the_cpu_computes(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Left to the plan it is a line; where the CPU was asked for by name the two contradict each other."""
    monkeypatch.setattr(checks, "_is_the_cpu", lambda backend: True)
    assert cli.main([*RUN, "--device", "0,1"]) == 0
    line = "picaflor: warning: --device 0,1 has no effect: the CPU computes; --backend chooses a GPU"
    assert warnings(capsys.readouterr().err) == [line]
    assert cli.main([*RUN, "--device", "0,1", "--backend", "cpu"]) == 2
    assert "--device 0,1: backend cpu has no devices to choose from; cuda, rocm have" in capsys.readouterr().err
