"""`bench disk` and `mirror verify` as commands: what they print, what they refuse, what they leave behind."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path

import pytest

from picaflor import cli
from picaflor.runtime import builtin, diskbench

SMALL = ("--per-shape", "512KiB", "--repeats", "1")


@pytest.fixture(autouse=True)
def no_config_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", "/nowhere")


def test_a_model_is_measured_in_the_shape_of_its_experts(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "disk", str(builtin.folder()), *SMALL, "--read-engine", "threads", "--json"]
    assert cli.main(words) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["kind"] == "bench disk"
    assert record["experts"] is True
    assert record["random_read_bytes"] > 1000
    shapes = {(row["pattern"], row["mode"], row["depth"]) for row in record["shapes"]}
    modes = {"buffered"} if record["direct_refused"] else {"buffered", "direct"}
    assert {mode for _, mode, _ in shapes} == modes
    assert {depth for pattern, _, depth in shapes if pattern == "random"} == {1, 2, 4, 8, 16}
    for row in record["shapes"]:
        assert row["engine"] == "threads"
        assert 0 < row["bytes_per_s_min"] <= row["bytes_per_s"] <= row["bytes_per_s_max"]
        assert row["read_bytes"] >= 400_000
        if row["mode"] == "direct" and row["physical_bytes"] is not None:
            assert row["physical_bytes"] >= row["read_bytes"]  # whole blocks: never fewer bytes than were asked for


def test_the_test_file_is_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "disk", "--folder", str(tmp_path), "--size", "2MiB", "--read-size", "64KiB", *SMALL]
    assert cli.main(words) == 0
    assert list(tmp_path.iterdir()) == []
    out = capsys.readouterr().out
    assert "random reads of 64 KiB" in out
    assert out.count("sequential") >= 2


def test_an_interrupt_and_a_full_disk_leave_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        assert len(list(tmp_path.iterdir())) == 1
        raise KeyboardInterrupt

    words = ["bench", "disk", "--folder", str(tmp_path), "--size", "1MiB", "--read-size", "64KiB", *SMALL]
    monkeypatch.setattr(diskbench, "timed_reads", interrupt)
    assert cli.main(words) == 130
    assert list(tmp_path.iterdir()) == []

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(diskbench.os, "fsync", full)
    assert cli.main(words) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert "cannot write a test file of 1048576 bytes: No space left on device; give --size" in error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (("/nowhere",), 1, "/nowhere: no such file or directory"),
        (("--folder", "/nowhere"), 2, "--folder /nowhere: no such directory"),
        (("--size", "many"), 2, "many"),
        (("--size", "1MiB"), 2, "--size 1MiB: a test file of at least 4 MiB is needed (--read-size)"),
        (("x", "--folder", "y"), 2, "there is none when a model or file is given"),
    ],
)
def test_what_cannot_be_measured(
    words: tuple[str, ...], code: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "disk", *words]) == code
    assert text in capsys.readouterr().err


def test_a_file_that_is_too_small(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "small").write_bytes(bytes(5000))
    assert cli.main(["bench", "disk", str(tmp_path / "small"), *SMALL]) == 1
    assert "5000 bytes; a file of at least 4194304 is needed" in capsys.readouterr().err


def test_mirror_verify(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = builtin.folder()
    copy = tmp_path / "copy"
    copy.mkdir()
    (shard,) = model.glob("*.safetensors")
    shutil.copy(shard, copy / shard.name)
    assert cli.main(["mirror", "verify", str(model), str(copy)]) == 0
    assert "1 of 1 shard are copies (sizes and headers compared)" in capsys.readouterr().out
    assert cli.main(["mirror", "verify", str(model), str(copy), "--deep", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "shards": 1,
        "copies": 1,
        "bytes": shard.stat().st_size,
        "deep": True,
        "ok": True,
    }
    with (copy / shard.name).open("r+b") as file:
        file.seek(-9, 2)
        byte = file.read(1)
        file.seek(-9, 2)
        file.write(bytes([byte[0] ^ 1]))
    assert cli.main(["mirror", "verify", str(model), str(copy)]) == 0
    assert cli.main(["mirror", "verify", str(model), str(copy), "--deep"]) == 1
    place = shard.stat().st_size - 9
    assert f"{shard.name}: differs from the model's shard at byte {place}: copy it again" in capsys.readouterr().err
    (copy / shard.name).write_bytes(b"short")
    assert cli.main(["mirror", "verify", str(model), str(copy)]) == 1
    assert f"5 bytes, expected {shard.stat().st_size}" in capsys.readouterr().err
