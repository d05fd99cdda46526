"""Operations on the Vulkan backend: the right outputs, the CPU's bits, the cell that was asked for, no fallback.

Two cases of each (operation, format) here; all of them in `test_verify.py`, which is slow.
"""

from __future__ import annotations

from typing import Any

import pytest
import vulkan_support

from picaflor.backends.table import NO_FORMAT
from picaflor.backends.vulkan import capabilities
from picaflor.conformance import suite
from picaflor.conformance.case import Case, Prepared
from picaflor.conformance.check import compare, differing
from picaflor.conformance.verify import Variant, What, open_device

EACH = 2
MORE = (
    "attention: MLA, selected",
    "attention: GQA 6 heads of 17 on 3",
    "index_select: ties",
    "index_select: NaN",
    "matmul e8-iq3-lattice: I 2048 O 5 S 4",
    "matmul int4-grouped: gs 48 I 201 O 13 S 13",
    "matmul int4-grouped: gs 128 I 6144 O 3 S 1",
    "expert_ffn int4-grouped: gs 64 hidden 201 inner 65 S 13",
    "expert_ffn: mixed formats",
)


def cases() -> list[Case]:
    """The first cases of each operation and format, and some that walk over keys, tails and tiles."""
    taken: dict[tuple[str, str], int] = {}
    found = []
    for case in suite.offered(suite.pick(suite.all_cases()), capabilities.cells()):
        key = (case.op, case.format)
        taken[key] = taken.get(key, 0) + 1
        if case.op != "container" and (taken[key] <= EACH or case.label in MORE):
            found.append(case)
    return found


def test_the_chosen_cases_exist() -> None:
    labels = {case.label for case in cases()}
    assert labels >= set(MORE)
    covered = {(case.op, case.format) for case in cases()}
    listed = {(cell.op, cell.format) for cell in capabilities.cells() if cell.state in ("native", "composed")}
    assert listed <= covered


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.label)
def test_outputs_are_right_and_of_the_cell_that_was_asked_for(case: Case) -> None:
    prepared = Prepared(case)
    device: Any = open_device(What("vulkan"), Variant("auto", 1), "standard")
    found = prepared.run(device)
    wanted = prepared.run(open_device(What("cpu"), Variant("auto", 1), "standard"))
    assert compare(found, prepared.expected("standard"), "standard").fault == ""
    if vulkan_support.SAME_BITS:
        assert differing(found, wanted) == 0
    name = case.op if case.format == NO_FORMAT else f"{case.op}.{case.format}"
    if (case.op, case.format) in {(cell.op, cell.format) for cell in capabilities.cells()}:
        assert device.table.engaged[f"vulkan.{name}"] > 0
    assert not device.table.fallbacks
    assert case.op == "sample" or device.calls.total() > 0
