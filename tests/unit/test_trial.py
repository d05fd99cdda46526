"""Trials: what they ask of the store and what they must not touch. No time is asserted, only that there is one."""

from __future__ import annotations

import numpy as np
import pytest

from picaflor.backends.api import ExpertLayout, MatrixLayout
from picaflor.models.blocks.moe import MoE
from picaflor.models.config import Notices
from picaflor.runtime import builtin, trial
from picaflor.runtime import plan as planning
from picaflor.runtime.plan import EngineOptions
from picaflor.runtime.sketch import Sketch, sketch
from picaflor.runtime.trial import Blank, measure_compute, thinned
from picaflor.runtime.trial_reads import LEAST_STEPS, _moves, _Other, _run, measure_reads
from picaflor.store.store import WORKING_SLOTS

MIB = 1 << 20


@pytest.fixture
def plan() -> Sketch:
    return sketch(builtin.folder(), EngineOptions(ram_bytes=4096 * MIB, threads=1), Notices())


def test_a_step_over_blank_memory_reads_no_weight(plan: Sketch, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a weight was read")

    with plan:
        monkeypatch.setattr(plan.container, "read_into", refuse)
        monkeypatch.setattr(plan.container, "handle", refuse)
        found = measure_compute(plan)
    assert 0 < found.experts_s < found.step_s
    assert found.memory_bytes_per_s > 0


def test_large_models_are_tried_with_some_layers_of_each_kind(plan: Sketch, monkeypatch: pytest.MonkeyPatch) -> None:
    with plan:
        assert thinned(plan.model, plan.index) == (plan.model, 1.0)
        monkeypatch.setattr(trial, "RESIDENT_CAP", MIB)
        model, share = thinned(plan.model, plan.index)
    kinds = [isinstance(layer.mlp, MoE) for layer in model.layers]
    assert 0 < len(model.layers) < len(plan.model.layers)
    assert set(kinds) == {isinstance(layer.mlp, MoE) for layer in plan.model.layers}
    assert 0 < share < 1


@pytest.mark.parametrize("misses", [0, 1, 3, 4])
def test_a_step_misses_as_many_experts_as_were_chosen(plan: Sketch, misses: int) -> None:
    with plan:
        blocks = [layer.mlp for layer in plan.model.layers if isinstance(layer.mlp, MoE)]
        blank = Blank(plan, plan.model)
        assert blank.files is not None
        slots = {block.layer: 8 for block in blocks}
        with planning.open_store(blank.files, slots, WORKING_SLOTS, plan.reading, plan.notices) as store:
            experts = _Other(store, blocks)
            runner = blank.runner(experts)
            _run(runner, store, experts, 4, 1)
            _run(runner, store, experts, 4, 1)
            before = store.counters.total()
            steps, seconds = _run(runner, store, experts, misses, LEAST_STEPS)
            after = store.counters.total()
    assert steps == LEAST_STEPS
    assert seconds > 0
    wanted = steps * len(blocks) * misses
    # A few more where the working set, which all layers share, lost an expert between choosing and asking.
    assert wanted <= after.loaded - before.loaded <= wanted + 0.1 * steps * len(blocks) * 4
    assert after.asked - before.asked == steps * len(blocks) * 4


def test_reads_are_tried_from_none_to_all_missing(plan: Sketch) -> None:
    with plan:
        found = measure_reads(plan)
    assert found is not None
    assert len(found.extra_s) == 5
    assert list(found.extra_s) == sorted(found.extra_s)
    assert found.extra_s[4] > 0
    assert found.expert_bytes == 55_296
    assert found.bytes_per_s > 0


def test_without_the_files_nothing_is_tried(plan: Sketch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sketch, "complete", False)
    with plan:
        assert measure_reads(plan) is None


def layout(start: int, *, rows: int = 4, gap: int = 0) -> ExpertLayout:
    parts = [MatrixLayout("int8-row", rows, 8, 0, (start + at, start + at + 32 + gap)) for at in (0, 100, 200)]
    return ExpertLayout(*parts, 300 + start)


def test_experts_stand_for_each_other_only_where_all_planes_are_moved_alike() -> None:
    assert np.array_equal(_moves([layout(0), layout(64), layout(0)]), [0, 64, 0])
    for other in (layout(0, rows=5), layout(0, gap=4)):
        with pytest.raises(ValueError, match="different formats"):
            _moves([layout(0), other])
