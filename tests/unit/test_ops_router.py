"""The router: sigmoid and softmax, bias, groups, ties, NaN, weights in routing order."""

from __future__ import annotations

import numpy as np
import pytest
from ops_support import ISAS, VARIANTS, backend, batch, chain16, exp32, recorder, same_bits

from picaflor.backends.api import I32, RouterSpec
from picaflor.backends.cpu.backend import CpuBackend
from picaflor.formats.base import F32


def _route(device: CpuBackend, logits: F32, bias: F32 | None, spec: RouterSpec) -> tuple[I32, F32]:
    r = recorder(device)
    x = r.rows(spec.experts)
    ids, weights = r.rows(spec.top_k, dtype="i32"), r.rows(spec.top_k)
    r.router(x, None if bias is None else device.vector("bias", bias), ids, weights, spec=spec)
    program = r.finish()
    program.write(x, logits)
    program.run(batch(range(len(logits))))
    return program.view(ids, len(logits)).copy(), program.view(weights, len(logits)).copy()


def _exact(logits: F32, bias: F32 | None, spec: RouterSpec) -> tuple[list[int], F32]:
    """The written sequence for one row; the choice by a plain sort."""
    one = np.float32(1.0)
    if spec.score == "sigmoid":
        scores = one / (one + exp32(-logits))
    else:
        raised = exp32(logits - logits.max())
        scores = raised / chain16(raised)
    choice = scores if bias is None else scores + bias
    size = spec.experts // spec.groups
    best_two = [sum(sorted(choice[g * size : (g + 1) * size].tolist())[-2:]) for g in range(spec.groups)]
    groups = sorted(range(spec.groups), key=lambda g: (-best_two[g], g))[: spec.top_groups]
    allowed = [e for e in range(spec.experts) if spec.groups == 1 or e // size in groups]
    ids = sorted(allowed, key=lambda e: (-choice[e], e))[: spec.top_k]
    weights = scores[ids]
    if spec.normalise:
        total = np.float32(0.0)
        for weight in weights:
            total = total + weight
        weights = weights / (total + np.float32(1e-20))
    return ids, weights * np.float32(spec.scale)


SPECS = [
    RouterSpec("sigmoid", experts=40, top_k=6, normalise=True, scale=2.5),
    RouterSpec("sigmoid", experts=40, top_k=6, normalise=False, scale=1.0),
    RouterSpec("softmax", experts=40, top_k=4, normalise=True, scale=1.0),
    RouterSpec("softmax", experts=37, top_k=37, normalise=False, scale=1.5),
    RouterSpec("sigmoid", experts=40, top_k=6, normalise=True, scale=2.5, groups=8, top_groups=3),
    RouterSpec("softmax", experts=40, top_k=5, normalise=True, scale=1.0, groups=4, top_groups=1),
]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("with_bias", [False, True])
def test_router_is_the_written_sequence_on_every_variant(spec: RouterSpec, with_bias: bool) -> None:
    rng = np.random.default_rng(spec.top_k)
    logits = (3 * rng.normal(size=(9, spec.experts))).astype(np.float32)
    bias = rng.normal(size=spec.experts).astype(np.float32) if with_bias else None
    expected = [_exact(row, bias, spec) for row in logits]
    for isa, threads in VARIANTS:
        ids, weights = _route(backend(isa, threads), logits, bias, spec)
        assert ids.tolist() == [row[0] for row in expected]
        assert same_bits(weights, np.stack([row[1] for row in expected]))


@pytest.mark.parametrize("isa", ISAS)
def test_scores_are_near_float64(isa: str) -> None:
    rng = np.random.default_rng(1)
    logits = (4 * rng.normal(size=(3, 50))).astype(np.float32)
    wide = logits.astype(np.float64)
    true = {"sigmoid": 1 / (1 + np.exp(-wide)), "softmax": np.exp(wide) / np.exp(wide).sum(1, keepdims=True)}
    for score, values in true.items():
        spec = RouterSpec(score, experts=50, top_k=8, normalise=True, scale=2.0)  # type: ignore[arg-type]
        ids, weights = _route(backend(isa, 1), logits, None, spec)
        for row in range(3):
            order = np.argsort(-values[row], kind="stable")[:8]
            assert ids[row].tolist() == order.tolist()
            chosen = values[row, order]
            assert np.allclose(weights[row], 2 * chosen / chosen.sum(), rtol=1e-6)


def test_bias_chooses_but_does_not_weigh() -> None:
    logits = np.array([[0.0, 1.0, 2.0, 3.0]], np.float32)
    bias = np.array([9.0, 0.0, 0.0, 0.0], np.float32)
    spec = RouterSpec("sigmoid", experts=4, top_k=2, normalise=False, scale=1.0)
    ids, weights = _route(backend(), logits, bias, spec)
    assert ids.tolist() == [[0, 3]]
    assert np.allclose(weights, [[0.5, 1 / (1 + np.exp(-3.0))]], rtol=1e-6)


def test_ties_go_to_the_lowest_id_of_experts_and_groups() -> None:
    spec = RouterSpec("sigmoid", experts=8, top_k=3, normalise=True, scale=1.0)
    ids, weights = _route(backend(), np.zeros((1, 8), np.float32), None, spec)
    assert ids.tolist() == [[0, 1, 2]]
    assert np.allclose(weights, 1 / 3)
    grouped = RouterSpec("sigmoid", experts=8, top_k=2, normalise=True, scale=1.0, groups=4, top_groups=1)
    assert _route(backend(), np.zeros((1, 8), np.float32), None, grouped)[0].tolist() == [[0, 1]]


def test_a_group_is_judged_by_its_two_best() -> None:
    # group 1 has the single best expert, group 0 the better pair
    logits = np.array([[2.0, 2.0, -9.0, 3.0, -9.0, -9.0]], np.float32)
    spec = RouterSpec("sigmoid", experts=6, top_k=2, normalise=True, scale=1.0, groups=2, top_groups=1)
    assert _route(backend(), logits, None, spec)[0].tolist() == [[0, 1]]


def test_nan_is_chosen_last_and_ids_stay_distinct() -> None:
    spec = RouterSpec("sigmoid", experts=4, top_k=3, normalise=False, scale=1.0)
    ids, _ = _route(backend(), np.array([[np.nan, -5.0, np.nan, 1.0]], np.float32), None, spec)
    assert ids.tolist() == [[3, 1, 0]]
    ids, weights = _route(backend(), np.full((1, 4), np.nan, np.float32), None, spec)
    assert ids.tolist() == [[0, 1, 2]]
    assert np.isnan(weights).all()


def test_impossible_routers_are_refused() -> None:
    r = recorder(backend())
    for spec, text in (
        (RouterSpec("sigmoid", experts=8, top_k=9, normalise=True, scale=1.0), "top 9 of 8 experts"),
        (RouterSpec("sigmoid", 8, 5, True, 1.0, groups=4, top_groups=2), "top 5 of 4 experts"),
        (RouterSpec("sigmoid", 8, 2, True, 1.0, groups=3, top_groups=2), "2 of 3 groups of 8 experts"),
        (RouterSpec("tanh", 8, 2, True, 1.0), "router score tanh; accepted: sigmoid, softmax"),  # type: ignore[arg-type]
    ):
        with pytest.raises(ValueError, match=text):
            r.router(r.rows(8), None, r.rows(spec.top_k, dtype="i32"), r.rows(spec.top_k), spec=spec)
