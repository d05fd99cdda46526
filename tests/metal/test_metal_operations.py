"""Every cell of the metal backend against the oracle, its streamed experts too, and mutants that must not survive."""

from __future__ import annotations

from collections import Counter
from typing import Any

import metal_support
import numpy as np
import pytest

from picaflor.backends.metal import capabilities
from picaflor.conformance import suite
from picaflor.conformance.case import Prepared, hold, make_batch, make_matrix, random, start
from picaflor.conformance.check import METRIC_BOUND, compare
from picaflor.conformance.mutation import run_mutants
from picaflor.conformance.verify import What, verify
from picaflor.formats import REGISTRY
from picaflor.runtime.plan import EngineOptions, load_backend

assert metal_support.NEAR
OPS = (*capabilities.WEIGHT_OPS, "rows", "row_axpy", *capabilities.FORMAT_FREE_OPS, "moe")


def device(**options: Any) -> Any:
    """A fresh backend."""
    return load_backend(EngineOptions(backend="metal", threads=1, **options), lambda text: None)


def test_all_quick_cases_are_right() -> None:
    report = verify(What(backend="metal", ops=OPS))
    assert [str(failure) for failure in report.failures] == []
    assert report.differing == 0
    assert report.cells == Counter(native=33, composed=18, waived=2, refused=2)
    assert report.precisions == ["standard"]
    products = {key: value for key, value in report.metrics.items() if key[0] in ("matmul", "expert_ffn")}
    assert len(products) == 2 * len(REGISTRY) + 1
    assert max(products.values()) <= METRIC_BOUND["standard"]
    own = [value for (op, name, _), value in products.items() if name not in (capabilities.ROTATED, "-")]
    assert max(own) < 1e-6


@pytest.mark.slow
def test_all_cases_are_right() -> None:
    report = verify(What(backend="metal", full=True))
    assert [str(failure) for failure in report.failures] == []
    assert report.differing == 0


def test_listed_cells_engage_and_nothing_falls_back() -> None:
    for case in suite.pick(suite.all_cases(), ops=OPS):
        backend = device()
        if capabilities.ROTATED in case.format or case.op == "sample" or case.name == "mixed formats":
            continue
        Prepared(case).run(backend)
        assert backend.table.fallbacks == {}, case.label
        assert sum(backend.table.engaged.values()) > 0, case.label
        assert backend.calls.total() > 0, case.label


def test_a_waived_format_is_computed_by_the_host_and_counted() -> None:
    for op in capabilities.WEIGHT_OPS:
        case = suite.pick(suite.all_cases(), ops=(op,), formats=(capabilities.ROTATED,))[0]
        prepared, lines = Prepared(case), []
        backend = load_backend(EngineOptions(backend="metal", threads=1), lines.append)
        found = prepared.run(backend)
        assert compare(found, prepared.expected("standard"), "standard", by_rule=False).fault == ""
        name = f"metal.{op}.{capabilities.ROTATED}"
        assert set(backend.table.fallbacks) == {name}
        told = [line for line in lines if name in line]
        assert len(told) == 1
        assert "is waived to cpu: MLX has no product for lattice codes" in told[0]
        assert backend.table.engaged[f"cpu.{op}.{capabilities.ROTATED}"] > 0


@pytest.mark.parametrize("op", ["matmul", "rows", "rmsnorm", "silu_mul", "router", "expert_ffn", "rope", "add"])
def test_a_disabled_cell_is_computed_by_the_host(op: str) -> None:
    formats = ("int4-grouped",) if op in ("matmul", "rows", "expert_ffn") else ()
    for case in suite.pick(suite.all_cases(), ops=(op,), formats=formats)[:3]:
        backend, prepared = device(disable=(f"metal.{op}",)), Prepared(case)
        assert compare(prepared.run(backend), prepared.expected("standard"), "standard").fault == ""
        assert sum(backend.table.fallbacks.values()) > 0


def test_experts_that_are_taken_from_slots() -> None:
    """With no memory for all experts each call takes what it needs; all formats, and kinds mixed in a layer."""
    for case in suite.pick(suite.all_cases(), ops=("expert_ffn",)):
        backend, prepared = device(), Prepared(case)
        backend.experts.free = lambda: 0
        found = prepared.run(backend)
        assert compare(found, prepared.expected("standard"), "standard", by_rule=False).fault == "", case.label
        on_host = capabilities.ROTATED in case.format or case.name == "mixed formats"
        assert backend.experts.held == on_host  # it has no layer then
        assert (backend.experts.counters.copied == 0) == on_host, case.label


def test_a_layer_of_several_kinds_is_held_in_several_stacks() -> None:
    """Group sizes by tensor and by expert."""
    from picaflor.conformance.case import Slots, run_rows
    from picaflor.conformance.products import expert_sum

    rng = random("several kinds")
    kinds = [(("int4-grouped", 16), ("int4-grouped", 64), ("int4-grouped", 48)),
             (("int8-row", 0), ("mxfp4", 0), ("int3-g64", 0)),
             (("fp8-e4m3-b128", 0), ("int2-row", 0), ("bf16", 0))]  # fmt: skip
    shapes = ((72, 200), (72, 200), (200, 72))
    members: list[Any] = [
        tuple(make_matrix(rng, name, *shape, size) for (name, size), shape in zip(kind, shapes, strict=True))
        for kind in (*kinds, *kinds[::-1])
    ]
    x = rng.standard_normal((9, 200)).astype(np.float32)
    ids = np.stack([rng.permutation(6)[:3] for _ in range(9)]).astype(np.int32)
    weights = rng.uniform(0.2, 1.0, size=(9, 3)).astype(np.float32)
    right = expert_sum(members, x, ids, weights, "standard")
    for free in (1 << 40, 0):
        backend = device()
        backend.experts.free = lambda free=free: free
        slots = Slots(backend, {1: members})

        def record(r: Any, b: Any, slots: Any = slots) -> Any:
            r.experts(b["x"], b["e_ids"], b["w"], b["y"], layer=1, layouts=slots.layouts(1))
            return (b["y"],)

        inputs = {"x": x, "e_ids": ids, "w": weights}
        (found,) = run_rows(backend, inputs, {"y": 200}, record, experts=slots)
        assert (np.abs(found - right.values) <= 1e-5 * right.terms).all()
        assert backend.experts.held == (free > 0)


def test_no_mutant_of_small_products_survives() -> None:
    ops = tuple(op for op in OPS if op != "expert_ffn")
    report = run_mutants(What(backend="metal", ops=ops), lambda text: None)
    assert report.wrong == []
    assert report.count()["killed"] >= 600


@pytest.mark.slow
def test_no_mutant_of_experts_survives() -> None:
    report = run_mutants(What(backend="metal", ops=("expert_ffn",)), lambda text: None)
    assert report.wrong == []
    assert report.count()["killed"] >= 200


@pytest.mark.parametrize(("name", "size"), [("int4-grouped", 64), ("int4-grouped", 48), ("int8-row", 0)])
def test_one_row_of_a_product_has_one_result_beside_any_others(name: str, size: int) -> None:
    """Holds for quantized products on MLX's CPU device."""
    rng = random("beside")
    matrix = make_matrix(rng, name, 33, 520, size)
    x = rng.standard_normal((20, 520)).astype(np.float32)

    def run(rows: Any) -> Any:
        backend = device()
        weight = hold(backend, matrix)
        recorder = start(backend)
        given, out = recorder.rows(520), recorder.rows(33)
        recorder.matmul(given, weight, out)
        program = recorder.finish()
        program.write(given, rows)
        program.run(make_batch(range(len(rows))))
        return program.view(out, len(rows))

    together = run(x)
    for number in (0, 7, 19):
        assert run(x[number : number + 1])[0].tobytes() == together[number].tobytes()


def test_what_a_row_does_not_see_does_not_reach_it() -> None:
    """A key and a value that are not finite, at a later position of the same sequence."""
    from picaflor.backends.api import GQA

    backend = device()
    recorder = start(backend)
    keys, values = recorder.kv_plane(0, "key", 8), recorder.kv_plane(0, "value", 8)
    q, k, v, out = (recorder.rows(8) for _ in range(4))
    recorder.kv_write(k, keys)
    recorder.kv_write(v, values)
    recorder.attention(q, out, kind=GQA(keys, values, 1, 1, 8, 0.5))
    program = recorder.finish()
    rows = np.random.default_rng(3).standard_normal((3, 4, 8)).astype(np.float32)
    rows[1:, 2] = np.nan
    for buffer, given in zip((q, k, v), rows, strict=True):
        program.write(buffer, given)
    program.run(make_batch(range(4)))
    found = program.view(out, 4)
    assert np.isfinite(found[:2]).all()
    assert np.isnan(found[2:]).all()
