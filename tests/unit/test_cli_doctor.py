"""doctor: each check's answer, one remedy per failure, exit code 1 if one fails."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest

from picaflor import cli
from picaflor.cli import doctor
from picaflor.cli.doctor import Check

TOKENS = {"scalar": (1, 2, 3), "avx2": (1, 2, 3), "avx512": (1, 2, 4)}


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", "/nowhere")
    monkeypatch.setattr(doctor, "_native_isas", lambda: ["scalar", "avx2"])
    monkeypatch.setattr(doctor, "_demo_tokens", lambda isa: TOKENS[isa])


def by_id(*words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Check]]:
    code = cli.main(["doctor", *words, "--json"])
    checks = [Check(**check) for check in json.loads(capsys.readouterr().out)["checks"]]
    assert len({check.id for check in checks}) == len(checks)
    for check in checks:
        assert bool(check.remedy) == (check.status != "ok"), check
    return code, {check.id: check for check in checks}


def test_a_fit_machine(capsys: pytest.CaptureFixture[str]) -> None:
    code, checks = by_id(capsys=capsys)
    assert code == 0
    assert list(checks) == ["python", "native", "threads", "memory", "open-files", "cpu.scalar", "cpu.avx2"]
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
    assert list(checks) == ["python", "native", "threads", "memory", "open-files"]


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
    for number in failed:
        assert lines[number + 1].strip().startswith("-> run picaflor inspect MODEL")
