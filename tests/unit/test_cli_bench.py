"""`bench kernels` as a command, on a few megabytes: the record's fields, and what is refused."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator

import pytest

from picaflor import __version__, cli
from picaflor.backends.cpu import compare, kernels_bench, rivals

SMALL = ("--shape", "256x512", "--megabytes", "4", "--repeats", "1", "--threads", "1")
STORED_BYTES = 256 * (512 // 2 + 512 // 64 * 4)


@pytest.fixture(autouse=True)
def no_config_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", "/nowhere")
    monkeypatch.setattr(kernels_bench, "CLOCK_ADDS", 10_000)


def test_the_record_says_what_was_measured_on_what(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--isa", "scalar", "--precision", "exact", "--tokens", "2", "--tokens", "1", "--note", "idle", "--json")
    assert cli.main(["bench", "kernels", *SMALL, *words]) == 0
    record = json.loads(capsys.readouterr().out)
    said = {name: record[name] for name in ("kind", "version", "picaflor", "note", "precision", "planes", "repeats")}
    assert said == {
        "kind": "bench kernels",
        "version": 2,
        "picaflor": __version__,
        "note": "idle",
        "precision": "exact",
        "planes": 3,
        "repeats": 1,
    }
    assert record["machine"]
    assert record["system"]
    for tokens, result in zip((1, 2), record["results"], strict=True):
        setting = {name: result[name] for name in ("isa", "format", "rows", "cols", "group_size", "tokens", "threads")}
        assert setting == {
            "isa": "scalar",
            "format": "int4-grouped",
            "rows": 256,
            "cols": 512,
            "group_size": 64,
            "tokens": tokens,
            "threads": 1,
        }
        assert result["prepare_us"] > 0
        assert result["weights_bytes"] % STORED_BYTES == 0
        read, kernel = result["read_gb_per_s"], result["kernel_gb_per_s"]
        assert min(read["min"], kernel["min"]) > 0
        assert result["ratio"] == pytest.approx(kernel["median"] / read["median"])
        macs = kernel["median"] / STORED_BYTES * 256 * 512 * tokens
        assert result["gmac_per_s"] == pytest.approx(macs)
        assert result["of_peak"] == pytest.approx(macs / 64 / result["clock_ghz"])
        assert result["cpu_per_wall"] > 0
    one, two = record["results"]
    assert 0 <= one["weights_bytes"] - 4_000_000 < STORED_BYTES
    assert one["to_one"] == 1
    assert two["to_one"] == pytest.approx(one["kernel_gb_per_s"]["median"] / two["kernel_gb_per_s"]["median"])


def test_formats_group_sizes_and_shapes_are_crossed(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--format", "int8-row", "--format", "int4-grouped", "--group-size", "32", "--group-size", "128")
    assert cli.main(["bench", "kernels", *SMALL, "--shape", "64x128", *words, "--json"]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert [(r["format"], r["group_size"], r["rows"], r["cols"]) for r in results] == [
        (name, size, rows, cols)
        for name, size in (("int8-row", 0), ("int4-grouped", 32), ("int4-grouped", 128))
        for rows, cols in ((256, 512), (64, 128))
    ]


def test_a_table_without_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "kernels", *SMALL, "--format", "int8-row"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "int8-row [256, 512], standard"
    assert lines[2].split()[1:3] == ["1", "1"]


@pytest.mark.parametrize(
    ("passes", "discarded", "counts"),
    [([1.0, 0.5, 0.99, 0.97], 1, True), ([0.5, 0.6, 0.7, 0.8, 0.9, 0.94], 6, False)],
)
def test_a_pass_without_the_processors_is_repeated_and_never_counts(
    monkeypatch: pytest.MonkeyPatch, passes: list[float], discarded: int, counts: bool
) -> None:
    """Process CPU time per wall time of two threads decides; rounds end at three times the repeats."""
    shares: Iterator[float] = iter(passes)
    native = kernels_bench._native

    class Played:
        """The native module, but a product takes a second of each thread in part."""

        def __getattr__(self, name: str) -> object:
            return getattr(native, name)

        def bench_read(self, isa: str, weights: object, threads: int) -> tuple[float, float]:
            return 1.0, 1.0 * threads

        def bench_matmul(self, isa: str, weights: object, planes: int, x: object, threads: int) -> tuple[float, float]:
            share = next(shares)
            return 2.0 + share, (2.0 + share) * threads * share

    monkeypatch.setattr(kernels_bench, "_native", Played())
    shape = kernels_bench.Shape(format="int8-row", rows=8, cols=64, group_size=0)
    repeats = 3 if counts else 2
    job = kernels_bench.Job(shape=shape, threads=(2,), total_bytes=4096, repeats=repeats)
    (result,) = kernels_bench.measure(job)
    assert next(shares, None) is None
    assert (result["discarded"], result["counts"]) == (discarded, counts)
    fastest = 2.0 + (0.97 if counts else 0.5)
    assert result["kernel_gb_per_s"]["max"] == pytest.approx(result["weights_bytes"] / 1e9 / fastest)


def test_experts_by_the_fused_operation() -> None:
    job = kernels_bench.ExpertJob(hidden=128, inner=64, chosen=2, threads=(1,), total_bytes=100_000, repeats=1)
    (result,) = kernels_bench.measure_experts(job)
    matrix = 64 * (128 // 2 + 128 // 64 * 4)
    assert result["weights_bytes"] % (3 * matrix) == 0
    assert result["ratio"] == pytest.approx(result["kernel_gb_per_s"]["median"] / result["read_gb_per_s"]["median"])


def test_rivals_that_are_not_installed_are_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def without(name: str) -> object:
        if name in ("llama_cpp", "onnxruntime", "torch"):
            raise ImportError(f"No module named {name!r}")
        return importlib.import_module(name)

    monkeypatch.setattr(rivals, "import_module", without)
    monkeypatch.setattr(compare, "QUIET_S", 0.0)
    assert cli.main(["bench", "kernels", *SMALL, "--compare", "--json"]) == 0
    compared = json.loads(capsys.readouterr().out)["compared"]
    assert compared["absent"] == [
        "llama-cpp-python: No module named 'llama_cpp'",
        "onnxruntime: No module named 'onnxruntime'",
        "torch: No module named 'torch'",
    ]
    (result,) = compared["results"]
    assert [program["program"] for program in result["programs"]] == [
        "picaflor int4-grouped 64 standard",
        "picaflor int4-grouped 64 fast",
    ]
    assert result["best_rival"] is None


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
        (("--shape", "0x8"), "--shape 0x8: accepted: 1 to 1048576 rows and columns"),
        (("--shape", "8"), "--shape 8: not a shape; accepted: ROWSxCOLS, as 2048x6144"),
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
    def refuse(job: kernels_bench.Job) -> object:
        raise ValueError(f"no {job.isas[0]} here")

    monkeypatch.setattr(kernels_bench, "measure", refuse)
    assert cli.main(["bench", "kernels", *SMALL, "--isa", "avx512"]) == 1
    assert capsys.readouterr().err == "picaflor: error: bench kernels: no avx512 here\n"
