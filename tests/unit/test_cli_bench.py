"""`bench kernels` as a command, on a few megabytes: the record's fields, and what is refused."""

from __future__ import annotations

import json

import pytest

from picaflor import __version__, cli
from picaflor.backends.cpu import kernels

SMALL = ("--rows", "256", "--cols", "512", "--megabytes", "4", "--repeats", "1", "--threads", "1")
STORED_BYTES = 256 * (512 // 2 + 512 // 64 * 4)


@pytest.fixture(autouse=True)
def no_config_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", "/nowhere")


def test_the_record_says_what_was_measured_on_what(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--isa", "scalar", "--precision", "exact", "--tokens", "2", "--note", "idle", "--json")
    assert cli.main(["bench", "kernels", *SMALL, *words]) == 0
    record = json.loads(capsys.readouterr().out)
    said = {name: record[name] for name in ("kind", "version", "picaflor", "benchmark", "note", "precision", "planes")}
    assert said == {
        "kind": "bench kernels",
        "version": 1,
        "picaflor": __version__,
        "benchmark": "kernels",
        "note": "idle",
        "precision": "exact",
        "planes": 3,
    }
    shape = {name: record[name] for name in ("isa", "format", "rows", "cols", "group_size", "tokens", "repeats")}
    assert shape == {
        "isa": "scalar",
        "format": "int4-grouped",
        "rows": 256,
        "cols": 512,
        "group_size": 64,
        "tokens": 2,
        "repeats": 1,
    }
    assert record["machine"]
    assert record["system"]
    assert record["prepare_us"] > 0
    assert record["weights_bytes"] % STORED_BYTES == 0
    assert 0 <= record["weights_bytes"] - 4_000_000 < STORED_BYTES
    (result,) = record["results"]
    assert result["threads"] == 1
    read, kernel = result["read_gb_per_s"], result["kernel_gb_per_s"]
    assert read["min"] == read["median"] == read["max"] > 0
    assert result["ratio"] == pytest.approx(kernel["median"] / read["median"])
    assert min(result["read_cpu_per_wall"], result["kernel_cpu_per_wall"]) > 0


def test_a_format_without_groups(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "kernels", *SMALL, "--format", "int8-row"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("int8-row [256, 512], 1 row of x, standard, ")
    assert lines[2].split()[0] == "1"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--format", "int5"), "--format int5: not a weight format; accepted: f32, bf16, "),
        (("--group-size", "7"), "--group-size 7: no group size of int4-grouped; accepted: 16, 32, "),
        (("--group-size", "0"), "--group-size"),
        (
            ("--format", "int8-row", "--group-size", "64"),
            "--group-size 64: no group size of int8-row; it has none to choose",
        ),
        (("--rows", "0"), "--rows"),
        (("--isa", "mmx"), "--isa: 'mmx' is not accepted"),
    ],
    ids=" ".join,
)
def test_what_is_refused(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str) -> None:
    assert cli.main(["bench", "kernels", *SMALL, *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert len(err.splitlines()) == 1


def test_what_the_kernels_refuse_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(what: kernels.KernelBenchmark) -> dict[str, object]:
        raise ValueError(f"no {what.isa} here")

    monkeypatch.setattr(kernels, "run_benchmark", refuse)
    assert cli.main(["bench", "kernels", *SMALL, "--isa", "avx512"]) == 1
    assert capsys.readouterr().err == "picaflor: error: bench kernels: no avx512 here\n"
