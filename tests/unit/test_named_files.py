"""Files that a user names: nothing foreign is written over, and only regular files of a bounded size are read."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from picaflor import cli
from picaflor.container.plain_file import read_plain
from picaflor.errors import BadStateFile
from picaflor.runtime import bench, builtin
from picaflor.runtime import tune as tuning
from picaflor.runtime.machine import StateFile
from picaflor.store.routes import MAGIC

RUN = ("-n", "1", "--temperature", "0", "--usage", "off")
LOSSY = ("--router-top-p", "0.5")


@pytest.fixture(autouse=True)
def no_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("something was measured")

    monkeypatch.setattr(bench, "measure_decode", refuse)
    monkeypatch.setattr(tuning, "search", refuse)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(builtin.folder(), folder)
    return folder


def fault(capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    """The one error line of a command that fails."""
    assert cli.main([str(word) for word in words]) in (1, 2)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("picaflor: error: ")]
    return line


def test_recorded_routes_go_over_none_of_the_models_files(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path.name: path.read_bytes() for path in model.iterdir()}
    text = model.parent / "text"
    text.write_text("Once upon a time. " * 40)
    for command in (
        ("run", model, "x", *RUN),
        ("bench", "decode", model, "--tokens", "2"),
        ("eval", model, "--text", text, "--window", "8", "--limit", "1"),
    ):
        for name in before:
            assert f"{name}: routes cannot be written there: " in fault(
                capsys, *command, "--record-routes", model / name
            )
        assert "named so" in fault(capsys, *command, "--record-routes", model / "new.safetensors")
    assert {path.name: path.read_bytes() for path in model.iterdir()} == before
    routes = model.parent / "a.routes"
    for _ in range(2):  # its own file may be written again
        assert cli.main(["run", str(model), "x", *RUN, "--record-routes", str(routes)]) == 0
    assert routes.read_bytes().startswith(MAGIC)


def test_one_file_is_not_for_two_uses(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = model.parent / "both"
    words = ("run", model, "x", "-n", "1", "--usage", file, "--record-routes", file)
    assert "both: given for --usage and --record-routes: give two files" in fault(capsys, *words)
    nowhere = model.parent / "no" / "usage.json"
    assert "its directory does not exist" in fault(capsys, "run", model, "x", "-n", "1", "--usage", nowhere)
    assert not nowhere.parent.exists()


@pytest.mark.parametrize("text", ['{"a": 1}', "x", '{"version": 2, "entries": {}}'])
def test_tuned_options_go_over_no_other_file(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.json"
    file.write_text(text)
    for words in (("tune",), ("run", "x", *RUN)):
        assert "mine.json: no state file of version 1" in fault(capsys, *words, "--tuned-file", file)
    with pytest.raises(BadStateFile, match="no state file"):
        StateFile(file, warn=print, named=True).put("a", {})
    assert file.read_text() == text
    nowhere = tmp_path / "no" / "tuned.json"
    assert "its directory does not exist" in fault(capsys, "tune", "--tuned-file", nowhere)
    assert not nowhere.parent.exists()


READERS: tuple[Callable[[Path], tuple[str | Path, ...]], ...] = (
    lambda file: ("run", "x", *RUN, "--record-routes", file),
    lambda file: ("run", "x", *RUN, "--tuned-file", file),
    lambda file: ("run", "x", "-n", "1", "--usage", file),
    lambda file: ("tune", "--tuned-file", file),
    lambda file: ("plan", "--replay", file),
    lambda file: ("bench", "decode", builtin.folder(), "--text", file),
    lambda file: ("bench", "decode", builtin.folder(), *LOSSY, "--quality-record", file),
)


@pytest.mark.parametrize("words", READERS)
def test_pipes_devices_and_folders_are_refused(
    tmp_path: Path, words: Callable[[Path], tuple[str | Path, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for file, kinds in (
        (pipe, ["is a pipe"]),
        (Path("/dev/zero"), ["is a device"]),
        (tmp_path, ["is a folder", "is a directory"]),
    ):
        line = fault(capsys, *words(file))
        assert str(file) in line
        assert any(kind in line for kind in kinds)


def test_a_size_is_looked_at_before_it_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "long"
    file.write_bytes(b"1234")
    assert read_plain(file, most_bytes=4, error=BadStateFile) == b"1234"
    with pytest.raises(BadStateFile, match="long: 4 bytes; at most 3 are read"):
        read_plain(file, most_bytes=3, error=BadStateFile)
    os.truncate(file, 1 << 40)
    for words in READERS[1:5]:
        assert f"long: {1 << 40} bytes; at most " in fault(capsys, *words(file))
    for last in (READERS[-1](file), ("run", "x", *RUN, "--config", file)):
        assert f"long: {1 << 40} bytes; at most " in fault(capsys, *last)


def test_a_mirror_is_not_the_model_itself(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("run", model, "x", *RUN, "--mapped", "off", "--mirror")
    assert "is the model's own file; give a copy of it" in fault(capsys, *words, model)


def test_entries_of_tune_that_are_none_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from picaflor.models.config import Notices
    from picaflor.runtime.plan import EngineOptions
    from picaflor.runtime.sketch import sketch

    plan = sketch(builtin.folder(), EngineOptions(), Notices())
    plan.close()
    key = tuning.key_of(plan.model, plan.index)
    file = tmp_path / "tuned.json"
    entries: tuple[object, ...] = (3, None, [], {"options": []}, {"options": None}, {"options": "x"}, {"steps": None})
    for entry in entries:
        file.write_text(json.dumps({"version": 1, "entries": {key: entry}}))
        assert cli.main(["run", "x", *RUN, "--tuned-file", str(file), "--backend", "auto"]) == 0
        err = capsys.readouterr().err
        assert err.count(f"picaflor: warning: tuned options: entry {key}: ") == 1
        assert "are no options that tune writes: left out" in err


def test_a_refusal_of_memory_names_options_that_can_be_lowered(capsys: pytest.CaptureFixture[str]) -> None:
    line = fault(capsys, "run", "x", *RUN, "--ram", "1MiB")
    assert "lower --ctx" in line
    assert "--policy" not in line
    assert "lower --prefetch" not in line
