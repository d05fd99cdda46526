"""Operations on a GPU backend give the CPU's bits: conformance cases, run on both.

Without a GPU Triton's interpreter runs the kernels: the cases that take it long are left to `picaflor verify`.
"""

from __future__ import annotations

import gpu_support
import numpy as np
import pytest

from picaflor.backends.cuda import capabilities
from picaflor.conformance import suite
from picaflor.conformance.case import Case, Prepared, make_batch
from picaflor.conformance.check import compare, differing
from picaflor.conformance.verify import Variant, What, open_device, variants
from picaflor.runtime.plan import EngineOptions, load_backend

assert gpu_support.torch
ROWS = ("rmsnorm", "layernorm", "rope", "add", "silu_mul", "select_outputs", "router", "kv_write", "sample", "moe")
SOME = (
    "attention: MLA, selected",
    "attention: GQA 6 heads of 17 on 3",
    "index_select: ties",
    "index_select: NaN",
    "row_axpy fp8-e4m3-b128: kv_b rank 201",
    "row_axpy int3-g64: kv_b rank 200",
    "row_axpy int4-grouped: kv_b gs 16 rank 201",
    "row_axpy int4-grouped: kv_b gs 128 rank 200",
    "row_axpy int8-row: kv_b rank 200",
)


def cases() -> list[Case]:
    """All cases of row operations, and some of those that walk over keys."""
    every = suite.offered(suite.pick(suite.all_cases()), capabilities.cells("cuda"))
    return [case for case in every if case.op in ROWS or case.op == "rows" or case.label in SOME]


def test_the_chosen_cases_exist() -> None:
    assert {case.label for case in cases()} >= set(SOME)
    assert len(cases()) > 70


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.label)
def test_the_bits_are_those_of_the_cpu(case: Case) -> None:
    prepared = Prepared(case)
    found = prepared.run(open_device(What("cuda"), Variant("auto", 1), "standard"))
    wanted = prepared.run(open_device(What("cpu"), Variant("auto", 1), "standard"))
    assert compare(found, prepared.expected("standard"), "standard").fault == ""
    assert differing(found, wanted) == 0


def test_a_program_of_nothing() -> None:
    """What a planted fault leaves of a single operation that it drops."""
    recorder = load_backend(EngineOptions(backend="cuda", threads=1), lambda text: None).recorder(
        max_rows=2, max_outputs=2, page_tokens=16, pages=1
    )
    x = recorder.rows(3)
    program = recorder.finish()
    given = np.arange(6, dtype=np.float32).reshape(2, 3)
    for _ in range(3):
        program.write(x, given)
        program.run(make_batch(range(2), pages=np.zeros((1, 1), np.int32)))
        assert np.array_equal(program.view(x, 2), given)


def test_a_device_is_one_variant_that_runs_twice() -> None:
    found = variants("cuda", "auto")
    device = load_backend(EngineOptions(backend="cuda"), lambda text: None)
    assert found == [Variant(device.isa, 1), Variant(device.isa, 2)]
