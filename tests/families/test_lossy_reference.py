"""Lossy modes on the CPU against float64 logits of the reference backend, whose choices come from a rule of its own.

The rule here is written from docs/lossy.md alone. Must not know how a backend computes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from family_harness import PAGE_TOKENS, TestModel
from numpy.typing import NDArray

from picaflor.backends import reference
from picaflor.backends.api import Batch, Reduction
from picaflor.backends.cpu import program as cpu_program
from picaflor.backends.reduction import reduce_choices
from picaflor.runtime import builtin
from picaflor.runtime.engine import Engine, EngineOptions
from picaflor.runtime.kvcache import Sequence
from picaflor.runtime.runner import Work

F64 = NDArray[np.float64]
BOUNDS = {"exact": 5e-5, "standard": 5e-3}
TIE = 1e-4  # a sum of weights nearer than this to what is asked for may fall either way
STEPS = 3
PROMPTS = [np.random.default_rng(seed).integers(0, 4084, 10).astype(np.int32) for seed in (5, 8)]
FED = np.random.default_rng(7).integers(0, 4084, (STEPS, 4)).astype(np.int32)
BASE = EngineOptions(context=64, sequences=3, expert_slots=4, policy="lru", prefetch="off")
MODES: dict[str, EngineOptions] = {
    "top-p": replace(BASE, router_top_p=0.6),
    "budget": replace(BASE, expert_budget=1),
    "nothing read": replace(BASE, expert_budget=0, expert_slots=1),
    "both": replace(BASE, router_top_p=0.85, expert_budget=2),
}


@dataclass(frozen=True)
class Seen:
    """One call of a reduction: what it found, and what it left of the ids."""

    layer: int
    rows: list[bool]
    resident: frozenset[int]
    left: list[list[int]]


@dataclass(frozen=True)
class Rule:
    """docs/lossy.md, row by row; every field but the default makes it a wrong one."""

    experts_more: int = 0
    scaled: bool = True
    prompts_too: bool = False
    per_row: bool = False
    residents_cost: bool = False
    lightest: bool = False
    rescued: bool = True
    closest: list[float] = field(default_factory=list)

    def __call__(
        self, ids: NDArray[Any], weights: F64, decoded: list[bool], reduction: Reduction, resident: Collection[int]
    ) -> None:
        rows = [row for row, is_decoded in enumerate(decoded) if is_decoded or self.prompts_too]
        total = {row: float(sum(weights[row])) for row in rows}
        kept = {row: self._prefix(weights[row].tolist(), reduction.top_p) for row in rows}
        if reduction.loads is not None:
            free = set() if self.residents_cost else set(resident)
            free |= {int(number) for row in range(len(ids)) if row not in rows for number in ids[row]}
            if self.per_row:
                bought = {row: self._bought({row: kept[row]}, ids, weights, free, reduction.loads) for row in rows}
            else:
                bought = dict.fromkeys(rows, self._bought(kept, ids, weights, free, reduction.loads))
            for row in rows:
                left = [place for place in kept[row] if ids[row, place] in free | bought[row]]
                kept[row] = left or ([kept[row][0]] if self.rescued else [])
        for row in rows:
            sum_kept = sum(float(weights[row, place]) for place in kept[row])
            for place in range(ids.shape[1]):
                if place not in kept[row]:
                    ids[row, place], weights[row, place] = -1, 0.0
                elif self.scaled:
                    weights[row, place] *= total[row] / sum_kept

    def _prefix(self, weights: list[float], top_p: float) -> list[int]:
        places, reached = [], 0.0
        for place, weight in enumerate(weights):
            places.append(place)
            reached += weight
            if top_p < 1.0:
                self.closest.append(abs(reached / sum(weights) - top_p))
            if top_p < 1.0 and reached >= top_p * sum(weights):
                break
        count = max(1, len(places) + (self.experts_more if top_p < 1.0 else 0))
        return list(range(min(count, len(weights))))

    def _bought(
        self, kept: dict[int, list[int]], ids: NDArray[Any], weights: F64, free: set[int], loads: int
    ) -> set[int]:
        heat: dict[int, float] = defaultdict(float)
        for row, places in kept.items():
            for place in places:
                if int(ids[row, place]) not in free:
                    heat[int(ids[row, place])] += float(weights[row, place])
        sign = 1 if self.lightest else -1
        return set(sorted(heat, key=lambda number: (sign * heat[number], number))[:loads])


@cache
def on_cpu(mode: str, precision: str) -> tuple[NDArray[np.float32], tuple[Seen, ...]]:
    """Logits of two prompts, then of steps that decode both and read two tokens of a third one; what was reduced."""
    seen: list[Seen] = []

    def recorded(
        ids: NDArray[Any], weights: NDArray[Any], rows: NDArray[np.bool_], layer: int, reduction: Reduction
    ) -> None:
        resident = frozenset(map(int, reduction.resident(layer)))
        reduce_choices(ids, weights, rows, layer, replace(reduction, resident=lambda _: resident))
        seen.append(Seen(layer, rows.tolist(), resident, ids.tolist()))

    options = replace(MODES[mode], precision=precision)
    with pytest.MonkeyPatch.context() as patch, Engine.open(None, options) as engine:
        patch.setattr(cpu_program, "reduce_choices", recorded)
        first, second, third = Sequence(), Sequence(), Sequence()
        out = [
            engine.runner.prefill(sequence, ids).copy() for sequence, ids in zip((first, second), PROMPTS, strict=True)
        ]
        for row in FED:
            work = [
                Work(first, row[:1], decoded=True),
                Work(third, row[1:3]),
                Work(second, row[3:], decoded=True),
            ]
            out.append(engine.runner.step(work).copy())
    return np.concatenate(out), tuple(seen)


class InFloat64:
    """The same steps on the reference backend."""

    def __init__(self, mode: str, calls: tuple[Seen, ...], rule: Rule) -> None:
        self.seen: list[Seen] = []
        self._left = iter(calls)
        self._rule = rule
        options = MODES[mode]
        self._top_p, self._loads = options.router_top_p, options.expert_budget

    def logits(self) -> F64:
        """As `on_cpu`."""
        model = TestModel(builtin.folder(), reference.ReferenceBackend(), pages=6)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reference, "reduce_choices", self._reduce)
            out = [self._step(model, [(number, ids, 0, False)]) for number, ids in enumerate(PROMPTS)]
            for step, row in enumerate(FED):
                at = len(PROMPTS[0]) + step
                work = [(0, row[:1], at, True), (2, row[1:3], 2 * step, False), (1, row[3:], at, True)]
                out.append(self._step(model, work))
        return np.concatenate(out)

    def _step(self, model: TestModel, work: list[tuple[int, NDArray[np.int32], int, bool]]) -> F64:
        counts = [len(ids) for _, ids, _, _ in work]
        decoded = np.repeat([is_decoded for *_, is_decoded in work], counts)
        batch = Batch(
            tokens=np.concatenate([ids for _, ids, _, _ in work]),
            sequences=np.repeat(np.array([number for number, *_ in work], np.int32), counts),
            positions=np.concatenate([np.arange(at, at + len(ids), dtype=np.int32) for _, ids, at, _ in work]),
            pages=np.array([[4, 1], [0, 5], [2, 3]], np.int32),
            outputs=(np.cumsum(counts) - 1).astype(np.int32),
            reduction=Reduction(decoded, self._top_p, self._loads) if decoded.any() or self._rule.prompts_too else None,
        )
        assert max(int(position) for position in batch.positions) < 2 * PAGE_TOKENS
        model.forward.program.run(batch, model.experts)
        return np.array(model.forward.program.view(model.forward.logits, len(work)), np.float64)

    def _reduce(
        self, ids: NDArray[Any], weights: F64, rows: NDArray[np.bool_], layer: int, reduction: Reduction
    ) -> None:
        on_prompt = not rows.any()
        call = Seen(layer, rows.tolist(), frozenset(), []) if on_prompt else next(self._left)
        assert (call.layer, call.rows) == (layer, rows.tolist())
        self._rule(ids, weights, call.rows, reduction, call.resident)
        self.seen.append(replace(call, left=ids.tolist()))


@pytest.mark.parametrize("precision", BOUNDS)
@pytest.mark.parametrize("mode", MODES)
def test_experts_and_logits_are_those_of_the_definition(mode: str, precision: str) -> None:
    logits, calls = on_cpu(mode, precision)
    rule = Rule()
    run = InFloat64(mode, calls, rule)
    wanted = run.logits()
    assert len(calls) == STEPS * 7
    assert min(rule.closest, default=1.0) > TIE  # else the choice may be either
    assert [call.left for call in run.seen] == [call.left for call in calls]
    dropped = sum(number < 0 for call in calls for row in call.left for number in row)
    assert 0.1 < dropped / (2 * 4 * len(calls)) < 0.9
    assert np.abs(logits - wanted).max() < BOUNDS[precision]


WRONG: dict[str, tuple[str, Rule]] = {
    "one expert more": ("top-p", Rule(experts_more=1)),
    "one expert fewer": ("top-p", Rule(experts_more=-1)),
    "weights not scaled": ("top-p", Rule(scaled=False)),
    "prompts too": ("top-p", Rule(prompts_too=True)),
    "prompts in the budget": ("budget", Rule(prompts_too=True)),
    "a budget per row": ("budget", Rule(per_row=True)),
    "residents cost": ("both", Rule(residents_cost=True)),
    "the lightest": ("budget", Rule(lightest=True)),
    "a row without experts": ("nothing read", Rule(rescued=False)),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_rule_is_seen(name: str) -> None:
    mode, rule = WRONG[name]
    logits, calls = on_cpu(mode, "exact")
    wanted = InFloat64(mode, calls, rule).logits()
    assert np.abs(logits - wanted).max() > 100 * BOUNDS["exact"]
