"""`picaflor verify --backend vulkan`: every case in every precision, and planted faults that the cases see."""

from __future__ import annotations

import pytest
import vulkan_support

from picaflor.conformance.mutation import run_mutants
from picaflor.conformance.verify import What, verify

assert vulkan_support.GPU


@pytest.mark.slow
def test_every_case_in_every_precision() -> None:
    report = verify(What("vulkan"))
    assert [str(failure) for failure in report.failures] == []
    assert report.differing == 0
    assert report.cells["native"] > 50
    assert sum(report.counts.values()) > 450
    assert max(value for (_, _, name), value in report.metrics.items() if name == "standard") < 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("format_name", ["int4-grouped", "int3-g64", "mxfp4", "e8-iq3-lattice", "f32"])
def test_planted_faults_are_seen(format_name: str) -> None:
    found = run_mutants(What("vulkan", formats=(format_name,), precisions=("standard",)), lambda text: None)
    assert found.wrong == []
    assert found.count()["killed"] > 10
