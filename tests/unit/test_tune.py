"""tune: what is kept and what is not, with fake measurements; where tuned options go and who wins over them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from picaflor import cli
from picaflor.errors import UnsupportedKernel
from picaflor.models.config import Notices
from picaflor.runtime import builtin
from picaflor.runtime import plan as planning
from picaflor.runtime.engine import Engine
from picaflor.runtime.plan import EngineOptions
from picaflor.runtime.sketch import sketch
from picaflor.runtime.tune import TUNABLE, Options, Sample, applied, axes, key_of, reads_apply, search


class Machine:
    """Gives each setting a rate; every measurement is noted. `drift` is added with each one."""

    def __init__(self, rates: Mapping[str, float], *, spread: float = 0.0, drift: float = 0.0) -> None:
        self.rates, self.spread, self.drift = rates, spread, drift
        self.seen: list[dict[str, int | str]] = []

    def __call__(self, options: Options) -> Sample:
        self.seen.append(dict(options))
        rate = 10.0 + self.drift * len(self.seen)
        for name, value in options.items():
            rate *= self.rates.get(f"{name}={value}", 1.0)
        return Sample((rate * (1 - self.spread), rate, rate * (1 + self.spread)), 1 / rate)


def test_a_gain_of_three_percent_is_kept_and_less_is_not() -> None:
    found = search({"threads": [1, 2]}, Machine({"threads=1": 1.029, "threads=2": 1.031}))
    assert found.options == {"threads": 2}
    assert [step.kept for step in found.steps] == [False, True]
    assert found.before == 10.0
    assert found.after == pytest.approx(10.31)


def test_noise_is_taken_off_the_gain() -> None:
    assert search({"threads": [1]}, Machine({"threads=1": 1.06}, spread=0.02)).options == {"threads": 1}
    found = search({"threads": [1]}, Machine({"threads=1": 1.06}, spread=0.04))
    assert found.options == {}
    assert found.steps[0].noise == pytest.approx(0.04)
    assert found.after == pytest.approx(found.before)


def test_both_orders_must_gain() -> None:
    """A machine that gets faster all the time makes whatever is measured last look better."""
    machine = Machine({}, drift=1.0)
    found = search({"threads": [1]}, machine)
    assert machine.seen == [{}, {"threads": 1}, {"threads": 1}, {}]
    assert found.steps[0].gains[0] > 0.03 > found.steps[0].gains[1]
    assert found.options == {}


def test_later_candidates_stand_on_what_was_kept() -> None:
    machine = Machine({"threads=1": 1.5, "direct=on": 1.2, "direct=off": 1.25})
    found = search({"threads": [1], "direct": ["on", "off"]}, machine)
    assert found.options == {"threads": 1, "direct": "off"}
    assert machine.seen[4:6] == [{"threads": 1}, {"threads": 1, "direct": "on"}]
    assert found.after == pytest.approx(18.75)


def test_a_longer_tail_is_not_kept() -> None:
    def measure(options: Options) -> Sample:
        return Sample((12.0, 12.0), 0.25) if options else Sample((10.0, 10.0), 0.2)

    found = search({"threads": [1]}, measure)
    assert found.steps[0].tail == pytest.approx(1.25)
    assert found.options == {}


def test_only_what_cannot_change_a_token_is_tried() -> None:
    wanted = axes(threads=8, streams=True, engines=("threads", "io_uring"), readers=8)
    tried = {"threads", "direct", "read_engine", "read_threads", "queue_depth", "prefetch"}
    assert set(wanted) == tried == set(TUNABLE) - {"backend"}
    assert axes(threads=1, streams=False, engines=(), readers=8, devices=["cuda"]) == {"backend": ["cuda"]}
    assert wanted["threads"] == [4, 7]
    assert 8 not in wanted["read_threads"]
    assert axes(threads=1, streams=False, engines=("threads",), readers=8) == {}
    assert "queue_depth" not in axes(threads=2, streams=True, engines=("threads",), readers=8)


def test_depths_of_the_read_engine_that_is_not_in_use_are_not_tried() -> None:
    wanted: dict[str, list[int | str]] = {"read_engine": ["io_uring"], "read_threads": [4], "queue_depth": [16]}
    found = search(wanted, Machine({"read_engine=io_uring": 1.1}), applies=reads_apply("threads"))
    assert [step.option for step in found.steps] == ["read_engine", "queue_depth"]
    found = search(wanted, Machine({}), applies=reads_apply("threads"))
    assert [step.option for step in found.steps] == ["read_engine", "read_threads"]


def test_tuned_options_fill_in_what_the_user_left_open() -> None:
    told: list[str] = []
    notices = Notices(warn=told.append)
    plan = sketch(builtin.folder(), EngineOptions(), notices)
    plan.close()
    key = key_of(plan.model, plan.index)
    entries: dict[str, Any] = {key: {"options": {"threads": 1, "direct": "off", "read_threads": 4}}}
    found, words = applied(EngineOptions(tuned=entries), plan.model, plan.index, notices)
    assert (found.threads, found.direct, found.read_threads) == (1, "off", 4)
    assert words == "threads 1, direct off, read threads 4"
    found, words = applied(EngineOptions(tuned=entries, threads=2, direct="on"), plan.model, plan.index, notices)
    assert (found.threads, found.direct, words) == (2, "on", "read threads 4")
    other, words = applied(EngineOptions(tuned={"another": entries[key]}), plan.model, plan.index, notices)
    assert (other.threads, words) == (None, "")
    assert told == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("precision", "fast"),
        ("threads", 0),
        ("threads", True),
        ("threads", "2"),
        ("direct", "maybe"),
        ("prefetch", True),
        ("backend", "vulkan"),
        ("queue_depth", 1e9),
    ],
)
def test_entries_that_tune_does_not_write_are_told_and_left_out(name: str, value: Any) -> None:
    told: list[str] = []
    notices = Notices(warn=told.append)
    plan = sketch(builtin.folder(), EngineOptions(), notices)
    plan.close()
    entries = {key_of(plan.model, plan.index): {"options": {name: value}}}
    found, words = applied(EngineOptions(tuned=entries), plan.model, plan.index, notices)
    assert words == ""
    assert found == EngineOptions(tuned=entries)
    assert told == [f"tuned options: {name} {value!r:.40} is none that tune writes: left out"]


def test_a_backend_that_was_measured_is_what_auto_takes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A device that pays is started, one that does not is named with its speed, one that does not start gives way."""
    plan = sketch(builtin.folder(), EngineOptions(), Notices(warn=lambda text: None))
    plan.close()
    key = key_of(plan.model, plan.index)
    asked: list[str] = []
    real = planning.load_backend

    def load(options: EngineOptions, notice: Any) -> Any:
        asked.append(options.backend)
        if options.backend == "cuda":
            raise UnsupportedKernel("backend cuda cannot start: no driver")
        return real(options, notice)

    monkeypatch.setattr(planning, "load_backend", load)
    monkeypatch.setattr(planning, "usable_devices", lambda: ["cuda"])
    monkeypatch.setattr(planning.automatic_choice, "__defaults__", ({"cuda": tmp_path},))

    def started(kept: dict[str, Any], gains: list[float]) -> str:
        told: list[str] = []
        asked.clear()
        steps = [{"option": "backend", "value": "cuda", "gains": gains}]
        options = EngineOptions(tuned={key: {"options": kept, "steps": steps}})
        with Engine.open(None, options, warn=told.append) as engine:
            assert engine.plan.backend.name == "cpu"
        return " ".join(line for line in told if "--backend auto" in line)

    said = started({}, [-0.8, -0.79])
    assert said == "--backend auto is the CPU: tune measured cuda at 0.20 times the CPU's speed, the CPU is faster here"
    assert asked == ["auto"]
    said = started({"backend": "cuda"}, [1.5, 1.4])
    assert said == "--backend auto is the CPU: backend cuda cannot start: no driver"
    assert asked == ["cuda", "auto"]
    words = planning.automatic_choice(measured=("cuda", 2.4), chosen="cuda")
    assert words == "--backend auto is cuda: tune measured cuda at 2.40 times the CPU's speed"


def test_the_command_keeps_what_it_found_and_runs_use_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert cli.main(["tune", "--tokens", "4", "--repeats", "2", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    path = tmp_path / "picaflor" / "tuned.json"
    assert record["file"] == str(path)
    assert record["tokens_per_s_before"] > 0
    assert all(min(step["gains"]) - step["noise"] >= 0.03 for step in record["steps"] if step["kept"])
    kept = json.loads(path.read_text())
    assert list(kept["entries"]) == [record["key"]]
    kept["entries"][record["key"]]["options"] = {"threads": 1}
    path.write_text(json.dumps(kept))
    words = ["run", "The old house", "-n", "4", "--temperature", "0"]
    assert cli.main([*words, "--profile"]) == 0
    tuned = capsys.readouterr()
    assert "tuned for this machine and model: threads 1 (--no-tuned leaves it)\n" in tuned.err
    assert "standard, 1 thread (tuned), context" in tuned.err
    assert cli.main([*words, "--no-tuned"]) == 0
    plain = capsys.readouterr()
    assert "tuned" not in plain.err
    assert plain.out == tuned.out
    other = tmp_path / "other.json"
    other.write_text(path.read_text().replace('"threads": 1', '"threads": 2'))
    assert cli.main([*words, "--tuned-file", str(other)]) == 0
    assert "tuned for this machine and model: threads 2 (" in capsys.readouterr().err
    assert cli.main([*words, "--tuned-file", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err == f"picaflor: error: --tuned-file: {tmp_path / 'none'} is no file\n"


def test_a_new_file_is_made_and_what_cannot_be_kept_is_printed_and_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    new = tmp_path / "new.json"
    assert cli.main(["tune", "--tokens", "4", "--repeats", "2", "--tuned-file", str(new)]) == 0
    assert capsys.readouterr().out.endswith(f" now; in {new}\n")
    assert new.exists()
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    where = tmp_path / "file" / "picaflor" / "tuned.json"
    words = ["tune", "--tokens", "4", "--repeats", "2"]
    assert cli.main([*words, "--json"]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["file"] is None
    assert json.loads(out)["tokens_per_s"] > 0
    assert [line for line in err.splitlines() if line.startswith("picaflor")] == [
        f"picaflor: error: the tuned options are not kept: {where}: cannot be written: Not a directory"
    ]
