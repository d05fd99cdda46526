"""`picaflor verify`: sound kernels pass, planted faults are named, lost cases and other bits are failures."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from picaflor import formats
from picaflor.backends.table import Cell
from picaflor.cli import main
from picaflor.cli import verify as cli_verify
from picaflor.conformance import containers, oracle, suite, verify
from picaflor.conformance.case import Case, Device, Matrix
from picaflor.conformance.check import METRIC_BOUND, Expected, compare, differing
from picaflor.conformance.mutants_ops import operation_mutants
from picaflor.conformance.mutants_stored import stored_mutants
from picaflor.conformance.oracle_formats import read, rotate, unrotate
from picaflor.conformance.products import EVERY_SCALE, LARGE_SCALES, SMALL_SCALES, extremes, scaled_matrix
from picaflor.conformance.proxy import Fault, FaultyDevice
from picaflor.conformance.stored import scales, with_scales
from picaflor.conformance.verify import Variant, What
from picaflor.errors import UsageError
from picaflor.runtime.plan import EngineOptions, load_backend

STORED = [(name, size) for name, form in formats.REGISTRY.items() for size in (form.group_sizes or (0,))]


def scale_off(factor: float) -> Fault:
    """Every scale of int3-g64 is off by a factor."""

    def change(matrix: Matrix) -> Matrix:
        return with_scales(matrix, scales(matrix) * factor) if matrix.format == "int3-g64" else matrix

    return Fault(matrix=change)


def planted(fault: Fault) -> Any:
    """What `What.wrap` takes."""
    return lambda device: FaultyDevice(device, fault)


def test_sound_kernels_pass_and_the_json_has_all_that_tools_need(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["verify", "--format", "int3-g64", "--op", "matmul", "--op", "rows", "--json"])
    result = json.loads(capsys.readouterr().out)
    assert code == 0
    assert result["good"] is True
    assert result["failures"] == []
    assert result["outputs_differing"] == 0
    assert result["outputs_compared"] > 1000
    assert {(row["op"], row["format"]) for row in result["table"]} == {("matmul", "int3-g64"), ("rows", "int3-g64")}
    assert result["cases"] == sum(row["cases"] for row in result["table"]) >= 15
    assert {"standard", "exact"} <= set(result["precisions"])
    assert result["variants"][-1].endswith("x2")
    row = next(row for row in result["table"] if row["op"] == "matmul")
    assert 0 < row["largest_metric"]["exact"] < row["largest_metric"]["standard"]


def test_text_counts_cases_and_cells(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--op", "rope", "--op", "sample", "--isa", "scalar"]) == 0
    out = capsys.readouterr().out
    assert "rope           -                     6" in out
    assert "14 cases" in out
    assert "scalar x1, scalar x2: 0 of" in out
    assert out.endswith("all right\n")


@pytest.mark.parametrize("op", ["matmul", "expert_ffn", "rows", "row_axpy"])
def test_one_percent_of_scale_is_named_in_every_operation(op: str) -> None:
    what = What(isa="scalar", ops=(op,), formats=("int3-g64",), precisions=("standard",), wrap=planted(scale_off(1.01)))
    report = verify.verify(what)
    assert not report.good
    assert report.failures[0].case.startswith(f"{op} int3-g64: ")
    assert "right is" in report.failures[0].fault
    assert report.failures[0].where == "standard, scalar x1"


def kind_of(kind: str, format_name: str) -> Fault:
    """A planted fault by its name; one of operations does not depend on the format."""
    faults = {mutant.kind: mutant.fault for mutant in operation_mutants()}
    stored = {mutant.kind: Fault(matrix=mutant.change) for mutant in stored_mutants(formats.REGISTRY[format_name])}
    return {**faults, **stored}[kind]


BEYOND = [
    ("matmul", "rows behind the 128th forgotten", " S 150"),
    ("matmul", "scales of the first 128 rows for those behind", " S 150"),
    ("matmul", "outputs behind the 1024th forgotten", " O 1100 "),
    ("matmul", "outputs behind the 1024th from the start", " O 1100 "),
    ("expert_ffn", "rows of an expert behind the 128th forgotten", " S 150, one expert in all rows"),
]


@pytest.mark.parametrize("name", list(formats.REGISTRY))
@pytest.mark.parametrize(("op", "kind", "shape"), BEYOND, ids=[kind for _, kind, _ in BEYOND])
def test_faults_behind_a_block_are_seen_in_every_format(op: str, kind: str, shape: str, name: str) -> None:
    """And by the cases for it alone: the others are smaller."""
    what = What(isa="scalar", ops=(op,), formats=(name,), precisions=("exact",), wrap=planted(kind_of(kind, name)))
    failures = verify.verify(what).failures
    assert failures
    assert {failure.case for failure in failures if shape not in failure.case} == set()


@pytest.mark.parametrize("op", ["matmul", "rows"])
@pytest.mark.parametrize(
    ("kind", "case"),
    [("smallest scales read as zero", ", smallest scales"), ("scale NaN read as 2^127", ", every scale code")],
)
def test_the_ends_of_scale_codes_are_seen(op: str, kind: str, case: str) -> None:
    fault = planted(kind_of(kind, "mxfp4"))
    report = verify.verify(What(isa="scalar", ops=(op,), formats=("mxfp4",), precisions=("standard",), wrap=fault))
    assert any(failure.case.endswith(case) for failure in report.failures)


@pytest.mark.parametrize("name", [name for name, spec in formats.REGISTRY.items() if extremes(spec)])
def test_scales_of_unusual_size_are_what_the_case_says(name: str) -> None:
    spec = formats.REGISTRY[name]
    size = spec.group_sizes[0] if spec.group_sizes else 0
    small = scales(scaled_matrix(np.random.default_rng(5), spec, 300, 600, size, SMALL_SCALES))
    large = scales(scaled_matrix(np.random.default_rng(5), spec, 300, 600, size, LARGE_SCALES))
    plain = scales(Matrix(name, 300, 600, size, spec.sample(np.random.default_rng(5), 300, 600, size)))
    assert np.abs(small).max() < np.abs(plain).min()
    assert np.abs(large).max() > np.abs(plain).max()
    if name == "mxfp4":
        assert set(small.reshape(-1)) == {2.0**-127, 2.0**-126, 2.0**-125, 2.0**-124}
        codes = scaled_matrix(np.random.default_rng(5), spec, 300, 600, size, EVERY_SCALE).planes[1]
        assert 255 in codes
        assert len(set(codes.reshape(-1).tolist())) > 100
    else:
        assert (small < 0).any()
        assert (small == 0).any()


def test_a_fault_makes_exit_code_one(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    plain = verify.open_device

    def faulty(what: What, variant: Variant, precision: str) -> Device:
        device: Any = FaultyDevice(plain(what, variant, precision), scale_off(2.0))
        return device

    monkeypatch.setattr(verify, "open_device", faulty)
    assert main(["verify", "--op", "rows", "--format", "int3-g64"]) == 1
    out = capsys.readouterr().out
    assert "FAILED rows int3-g64: [17, 200] (standard, scalar x1)" in out
    assert out.rstrip().endswith("failures")


def test_other_bits_on_one_variant_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = verify.open_device

    def faulty(what: What, variant: Variant, precision: str) -> Device:
        device: Any = plain(what, variant, precision)
        return FaultyDevice(device, scale_off(1 + 2.0**-22)) if variant.threads == 2 else device  # type: ignore[return-value]

    monkeypatch.setattr(verify, "open_device", faulty)
    what = What(isa="scalar", ops=("matmul",), formats=("int3-g64",), precisions=("exact",))
    report = verify.verify(what)
    assert report.differing > 0
    assert any("other bits than scalar x1" in failure.fault for failure in report.failures)


def test_a_choice_of_no_case_is_refused() -> None:
    with pytest.raises(UsageError, match="--op rope --format int4-grouped: no case has all of this"):
        verify.verify(What(ops=("rope",), formats=("int4-grouped",)))


@pytest.mark.parametrize("count", [1, 3, 8])
def test_shards_are_the_whole_and_kernels_stay_together(count: int) -> None:
    cases = suite.pick(suite.all_cases(), ops=("matmul", "rows", "rope"))
    parts = [suite.Shard(number, count).of_cases(cases) for number in range(1, count + 1)]
    assert sorted(case.label for part in parts for case in part) == sorted(case.label for case in cases)
    keys = [{(case.op, case.format, case.group_size) for case in part} for part in parts]
    assert sum(map(len, keys)) == len(set.union(*keys))
    assert max(map(len, parts)) <= len(cases) / count + 20
    assert [piece for number in (1, 2, 3) for piece in suite.Shard(number, 3).of(range(7))] == [0, 3, 6, 1, 4, 2, 5]


def test_a_shard_says_that_it_is_none_of_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["verify", "--op", "rows", "--isa", "scalar"]
    runs = []
    for shard in ("1/2", "2/2"):
        assert main([*words, "--shard", shard, "--json"]) == 0
        runs.append(json.loads(capsys.readouterr().out))
    assert [run["shard"] for run in runs] == ["1/2", "2/2"]
    total = sum(least[False] for (op, _), least in verify.MINIMUM.items() if op == "rows")
    assert [run["cases_of_all_shards"] for run in runs] == [total, total]
    assert sum(run["cases"] for run in runs) == total
    assert sum(row["cases"] for run in runs for row in run["table"]) == total
    assert main([*words, "--shard", "2/2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2:] == [
        f"shard 2/2: {runs[1]['cases']} of {total} cases; the others are no part of this run",
        "all right in shard 2/2",
    ]


def test_a_lost_case_is_seen_in_every_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [case for case in suite.all_cases() if case.op == "rows"]
    assert cases[0].format == "f32"
    monkeypatch.setattr(suite, "all_cases", lambda: iter(cases[1:]))
    for number in (1, 2):
        report = verify.verify(What(isa="scalar", ops=("rows",), precisions=("exact",), shard=suite.Shard(number, 2)))
        assert "rows f32: 3 cases, there were 4: a case was lost" in [str(failure) for failure in report.failures]


def test_one_group_size(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["verify", "--isa", "scalar", "--op", "rows", "--op", "row_axpy", "--json"]
    assert main([*words, "--group-size", "96"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert {row["format"] for row in result["table"]} == {"int4-grouped"}
    known = [case for case in suite.pick(suite.all_cases()) if case.op in ("rows", "row_axpy")]
    assert result["cases"] == len([case for case in known if "gs 96 " in case.name]) == 4


def test_progress_is_lines_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli_verify, "LINES_APART_S", 1e9)
    assert main(["verify", "--op", "add", "--isa", "scalar"]) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(cli_verify, "LINES_APART_S", 0.0)
    assert main(["verify", "--op", "rope", "--isa", "scalar"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 6
    assert re.fullmatch(r" +[0-9]+ s: 5 of 6 cases done, verifying rope: .+", lines[-1])
    assert main(["verify", "--mutants", "--op", "add"]) == 0
    assert re.match(r" +[0-9]+ s: 0 of 3 mutants done, planting [a-z ]+ in add\n", capsys.readouterr().err)


def test_a_fallback_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def disabled(what: What, variant: Variant, precision: str) -> Device:
        device: Any = load_backend(EngineOptions(threads=1, disable=("cpu.matmul.int3-g64",)), lambda text: None)
        return device

    monkeypatch.setattr(verify, "open_device", disabled)
    report = verify.verify(What(ops=("matmul",), formats=("int3-g64",), precisions=("standard",)))
    assert {failure.fault for failure in report.failures} == {"another kernel ran instead of cpu.matmul.int3-g64"}
    assert report.differing == 0


def test_a_lost_case_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [case for case in suite.all_cases() if case.op == "rope"]
    monkeypatch.setattr(suite, "all_cases", lambda: iter(cases[1:]))
    report = verify.verify(What(isa="scalar", ops=("rope",)))
    assert [str(failure) for failure in report.failures] == ["rope: 5 cases, there were 6: a case was lost"]


def test_a_cell_without_a_case_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def some() -> Iterator[Case]:
        return (case for case in cases if (case.op, case.format) != ("rows", "f16"))

    cases = [case for case in suite.all_cases() if case.op == "rows"]
    monkeypatch.setattr(suite, "all_cases", some)
    report = verify.verify(What(isa="scalar", ops=("rows",), precisions=("exact",)))
    assert any(f.case == "cpu.rows.f16" and "has no case" in f.fault for f in report.failures)


def test_a_refused_cell_must_refuse() -> None:
    device = verify.open_device(What(), Variant("scalar", 1), "exact")
    cell = Cell("cpu", "matmul", "int8-row", "refused", reason="for this test")
    assert verify._refusal(cell, device) == "is declared refused, but was recorded"
    disabled = ("cpu.rows.int8-row", "cpu-scalar.rows.int8-row")
    refusing: Any = load_backend(EngineOptions(threads=1, disable=disabled), lambda text: None)
    right = Cell("cpu", "rows", "int8-row", "refused", reason="for this test")
    assert verify._refusal(right, refusing) == ""


def test_cases_of_a_refused_cell_are_left_out_and_its_refusal_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(options: EngineOptions, warn: Any) -> Any:
        device: Any = load_backend(options, warn)
        device.table._cells["cpu", "rows", "int8-row"] = Cell("cpu", "rows", "int8-row", "refused", reason="a test")
        return device

    monkeypatch.setattr(verify, "load_backend", refusing)
    report = verify.verify(What(isa="scalar", ops=("rows",), precisions=("exact",)))
    assert [str(failure) for failure in report.failures] == []
    assert ("rows", "int8-row") not in report.counts
    assert report.cells["refused"] == 1
    assert report.chosen == sum(least[False] for (op, _), least in verify.MINIMUM.items() if op == "rows") - 6
    monkeypatch.setattr(verify, "_refusal", lambda cell, device: f"{cell.name} does not refuse")
    assert not verify.verify(What(isa="scalar", ops=("rows",), formats=("int8-row",))).good


@pytest.mark.parametrize("op", ["rows", "row_axpy"])
@pytest.mark.parametrize(
    "kind", ["rotation missing", "rotation without signs", "rotation not normalised", "signs of the next 32"]
)
def test_rows_of_the_lattice_without_their_rotation_are_seen(op: str, kind: str) -> None:
    fault = planted(kind_of(kind, "e8-iq3-lattice"))
    what = What(isa="scalar", ops=(op,), formats=("e8-iq3-lattice",), precisions=("fast",), wrap=fault)
    report = verify.verify(what)
    assert len({failure.case for failure in report.failures}) == report.chosen


@pytest.mark.parametrize("name", ["int4-row", "mxfp4", "e8-iq3-lattice", "fp8-e4m3-b128", "bf16"])
def test_the_whole_way_through_a_container(name: str) -> None:
    what = What(isa="scalar", ops=("container",), formats=(name,))
    assert [str(failure) for failure in verify.verify(what).failures] == []


def test_another_scale_in_the_file_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies in the container counts, not what was meant to lie there."""

    def other(model: Any) -> Any:
        key = "lm_head.weight"
        matrix = model.matrices[key]
        matrices = {**model.matrices, key: with_scales(matrix, scales(matrix) * 1.01)}
        return plain(replace(model, matrices=matrices))

    plain = containers.write
    monkeypatch.setattr(containers, "write", other)
    report = verify.verify(What(isa="scalar", ops=("container",), formats=("int4-row",), precisions=("exact",)))
    assert report.failures[0].case == "container int4-row: through writer, loader and store"
    assert report.failures[0].fault.startswith("output 1: ")


def test_every_cell_has_at_least_its_recorded_number_of_cases() -> None:
    for full in (False, True):
        found = suite.count(suite.pick(suite.all_cases(), full=full))
        assert {key: found.get(key, 0) for key in verify.MINIMUM} == {
            key: least[full] for key, least in verify.MINIMUM.items()
        }
        assert set(found) == set(verify.MINIMUM)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--format", "int5"], "--format int5: accepted are bf16, "),
        (["--op", "mul"], "--op mul: accepted are add, "),
        (["--group-size", "65"], "--group-size 65: accepted are 16, 32, 48, 64, 96, 128, 192, 256"),
        (["--group-size", "64", "--mutants"], "--group-size with --mutants: a wrong group size is seen by cases of"),
        (["--shard", "0/2"], "--shard 0/2: I/N is needed with 1 <= I <= N, as 2/8"),
        (["--shard", "3/2"], "--shard 3/2: I/N is needed with 1 <= I <= N, as 2/8"),
        (["--shard", "2"], "--shard 2: I/N is needed with 1 <= I <= N, as 2/8"),
        (["--op", "rope", "--shard", "1/2"], "--shard 1/2: what was chosen has 1 operations, formats and group sizes"),
        (["--op", "add", "--mutants", "--shard", "1/9"], "--shard 1/9: what was chosen has 3 mutants, more parts"),
        (["--isa", "vax"], "--isa: 'vax' is not accepted"),
    ],
)
def test_unknown_names_are_wrong_usage(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", *words]) == 2
    assert text in capsys.readouterr().err


# ---- the oracle and the comparison themselves ----


@pytest.mark.parametrize(("name", "size"), STORED)
@pytest.mark.parametrize("shape", [(5, 200), (3, 201), (131, 300), (2, 1)])
def test_two_readings_of_the_same_page_agree(name: str, size: int, shape: tuple[int, int]) -> None:
    """The oracle's formulas and the formats' decoders were written apart; they give the same float32."""
    spec = formats.REGISTRY[name]
    planes = spec.sample(np.random.default_rng(3), *shape, size)
    decoded = spec.decode(planes, *shape, size)
    assert np.array_equal(read(name, planes, *shape, size).weights.astype(np.float32), decoded, equal_nan=True)


def test_examples_of_the_format_page() -> None:
    int4 = (np.array([0x1F, 0x9C, 0x86], np.uint8), np.array([0.1], "<f4"))
    assert read("int4-row", int4, 1, 5, 0).codes.tolist() == [[7, -7, 4, 1, -2]]
    int2 = (np.array([0xA7, 0x02], np.uint8), np.array([1], "<f4"))
    assert read("int2-row", int2, 1, 5, 0).codes.tolist() == [[1, -1, 0, 0, 0]]
    grouped = (np.frombuffer(bytes.fromhex("1032547698badcfe1032"), np.uint8), np.array([0.25, 2], "<f4"))
    weights = read("int4-grouped", grouped, 1, 20, 16).weights[0]
    assert weights[:2].tolist() == [-2, -1.75]
    assert weights[16:].tolist() == [-16, -14, -12, -10]


@pytest.mark.parametrize("cols", [1, 40, 201, 520])
def test_rotation_is_orthogonal(cols: int) -> None:
    rng = np.random.default_rng(2)
    x, w = rng.standard_normal((3, cols)), rng.standard_normal((4, cols))
    assert np.allclose(rotate(x) @ rotate(w).T, x @ w.T)
    assert np.allclose(unrotate(rotate(x)), x)
    assert cols == 1 or not np.allclose(rotate(x), x)


def test_the_oracle_says_unknown_format() -> None:
    with pytest.raises(Exception, match="the oracle has no formula for int5; it has f32, "):
        read("int5", (), 1, 1, 0)


def test_comparison() -> None:
    right = Expected(np.array([[1.0, np.nan]]), np.array([[1e-3, 0.0]]), np.array([[2.0, 1.0]]), plain=True)
    good = compare([np.array([[1.0 + 1e-7, np.nan]], np.float32)], [right], "exact")
    assert good.fault == ""
    assert 4e-8 < good.metric < 8e-8
    assert (
        "[0, 0] is 1.5, right is 1, allowed 0.001"
        in compare([np.array([[1.5, np.nan]], np.float32)], [right], "exact").fault
    )
    assert "[0, 1] is 2" in compare([np.array([[1.0, 2.0]], np.float32)], [right], "exact").fault
    assert "[0, 0] is nan" in compare([np.array([[np.nan, np.nan]], np.float32)], [right], "exact").fault
    metric = compare([np.array([[1.0 + 9e-4, np.nan]], np.float32)], [right], "exact").fault
    assert f"bound {METRIC_BOUND['exact']:g}" in metric
    assert "shape [2], expected [1, 2]" in compare([np.zeros(2, np.float32)], [right], "exact").fault
    assert compare([], [right], "exact").fault == "0 outputs, expected 1"
    assert "must be equal" in compare([np.array([3])], [Expected(np.array([2]))], "exact").fault


def test_differing_bits() -> None:
    one = [np.array([0.0, np.nan, 1.0], np.float32)]
    assert differing(one, [np.array([-0.0, np.nan, 1.0], np.float32)]) == 1
    assert differing(one, [np.array([0.0, -np.nan, 1.0], np.float32)]) == 0
    assert differing([np.array([1, 2], np.int32)], [np.array([1, 3], np.int32)]) == 1


def test_softmax_and_silu_do_not_overflow() -> None:
    assert oracle.silu(np.array([-1e4, 0.0, 1e4])).tolist() == [0.0, 0.0, 1e4]
    assert oracle.softmax(np.array([1e4, 0.0])).tolist() == [1.0, 0.0]


def test_one_percent_of_scale_shows_in_fast_too() -> None:
    """Steps of the activations are coarser than that: only the bound by the rule can see it."""
    what = What(
        isa="scalar", ops=("matmul",), formats=("int3-g64",), precisions=("fast",), wrap=planted(scale_off(1.01))
    )
    assert any(failure.fault.endswith("(activations stored by the rule)") for failure in verify.verify(what).failures)
