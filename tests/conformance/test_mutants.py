"""`picaflor verify --mutants`: wrong kernels are killed, survivors are listed, equivalents are held to their bits."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from picaflor.cli import main
from picaflor.conformance import mutation, suite
from picaflor.conformance.case import Case
from picaflor.conformance.mutants_ops import OperationMutant, operation_mutants
from picaflor.conformance.mutants_stored import StoredMutant, on_scales, stored_mutants
from picaflor.conformance.mutation import run_mutants
from picaflor.conformance.proxy import Fault
from picaflor.conformance.verify import What
from picaflor.formats import REGISTRY


def quiet(text: str) -> None:
    """No progress."""


def test_wrong_products_of_one_format_are_killed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--mutants", "--format", "int3-g64", "--op", "matmul", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["good"] is True
    assert result["wrong"] == []
    kinds = result["kinds"]
    for kind in ("scale of the next group", "groups counted by floor", "two's complement", "padding used"):
        assert kinds[kind] == ["int3-g64"], kind
    killed = next(m for m in result["mutants"] if m["kind"] == "scale 1 % off")
    assert killed["by"].startswith("matmul int3-g64: ")
    assert result["counts"]["equivalent"] >= 1
    assert result["counts"]["passes"] == 1


@pytest.mark.parametrize("op", ["router", "rope", "sample", "index_select", "moe", "add", "silu_mul", "rmsnorm"])
def test_wrong_operations_are_killed(op: str) -> None:
    report = run_mutants(What(ops=(op,)), quiet)
    assert report.wrong == []
    assert report.count()["killed"] >= 1


def test_every_format_with_scales_has_the_kinds_of_its_geometry() -> None:
    for spec in REGISTRY.values():
        kinds = {mutant.kind for mutant in stored_mutants(spec)}
        scaled = spec.scale.plane != -1 or spec.activation.rotated
        assert ("scale missing" in kinds) == scaled, spec.name
        assert ("one scale per row" in kinds) == (scaled and spec.scale.cols != 0), spec.name
        assert ("scale block of one row" in kinds) == (spec.scale.rows > 1), spec.name
        assert ("group size halved" in kinds) == bool(spec.group_sizes), spec.name
        assert ("rotation missing" in kinds) == spec.activation.rotated, spec.name
        assert "the same weights as float32" in kinds


def test_kinds_have_names_of_their_own() -> None:
    kinds = [mutant.kind for mutant in operation_mutants()]
    assert len(set(kinds)) == len(kinds)
    for spec in REGISTRY.values():
        kinds = [mutant.kind for mutant in stored_mutants(spec)]
        assert len(set(kinds)) == len(kinds)


def only(keep: Callable[[Case], bool]) -> list[Case]:
    """Some of the cases."""
    return [case for case in suite.all_cases() if keep(case)]


def test_cases_that_are_too_weak_let_mutants_live(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    weak = only(lambda case: (case.op, case.format, case.name) == ("matmul", "int3-g64", "I 64 O 4 S 2"))
    assert len(weak) == 1
    monkeypatch.setattr(suite, "all_cases", lambda: iter(weak))
    assert main(["verify", "--mutants"]) == 1
    out = capsys.readouterr().out
    assert "FAILED groups counted by floor in matmul int3-g64: survived 1 cases" in out
    assert "FAILED scale of the next group in matmul int3-g64: survived 1 cases" in out
    assert "scale doubled: int3-g64" in out


def plant_one(monkeypatch: pytest.MonkeyPatch, mutant: StoredMutant) -> list[str]:
    """What is wrong where this is the only mutant of products in int3-g64."""
    monkeypatch.setattr(mutation, "stored_mutants", lambda spec: [mutant] if spec.name == mutant.format else [])
    monkeypatch.setattr(mutation, "operation_mutants", lambda: iter(()))
    return run_mutants(What(ops=("matmul",), formats=("int3-g64",)), quiet).wrong


def test_an_equivalent_must_be_one(monkeypatch: pytest.MonkeyPatch) -> None:
    hardly = StoredMutant("hardly", "int3-g64", on_scales(lambda g, _: g * (1 + 2.0**-23)), equivalent="it is said")
    assert "declared equivalent (it is said), but" in plant_one(monkeypatch, hardly)[0]
    clearly = replace(hardly, change=on_scales(lambda g, _: g * 2))
    assert "should have passed (it is said), but matmul int3-g64" in plant_one(monkeypatch, clearly)[0]
    sound = replace(hardly, change=lambda matrix: matrix)
    assert plant_one(monkeypatch, sound) == []


def test_a_control_must_pass_and_a_mutant_must_be_plantable(monkeypatch: pytest.MonkeyPatch) -> None:
    control = StoredMutant("control", "int3-g64", on_scales(lambda g, _: g * 2), control=True)
    assert "should have passed (control)" in plant_one(monkeypatch, control)[0]
    broken = StoredMutant("broken", "int3-g64", lambda matrix: replace(matrix, planes=(matrix.planes[0],) * 2))
    assert "could not be planted" in plant_one(monkeypatch, broken)[0]


def test_too_few_kinds_are_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    few = [OperationMutant("one", ("add",), Fault(batch=lambda batch: batch))]
    monkeypatch.setattr(mutation, "stored_mutants", lambda spec: [])
    monkeypatch.setattr(mutation, "operation_mutants", lambda: iter(few))
    wrong = run_mutants(What(), quiet).wrong
    assert wrong == ["one in add: survived 1 cases", "0 kinds of mutants, at least 20 are wanted"]


@pytest.mark.slow
def test_all_mutants_of_all_formats() -> None:
    report = run_mutants(What(), quiet)
    assert report.wrong == []
    assert len(report.kinds) >= 147
    assert sum(map(len, report.kinds.values())) >= 305
    assert report.count()["killed"] >= 948
