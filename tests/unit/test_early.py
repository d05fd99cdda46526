"""The next layer's router applied early, against the reference's router."""

from __future__ import annotations

import numpy as np
import pytest

from picaflor.backends.api import RouterSpec
from picaflor.backends.cpu.early import EarlyRouter, RouterInputs, early_routers
from picaflor.backends.cpu.kernels import hold
from picaflor.backends.reference import route
from picaflor.formats import REGISTRY

HIDDEN, EXPERTS, TOP = 64, 24, 6
TOLD = 3  # half of them


def spec(score: str, groups: int = 1, top_groups: int = 1) -> RouterSpec:
    assert score in ("sigmoid", "softmax")
    return RouterSpec(score, EXPERTS, TOP, True, 1.0, groups, top_groups)  # type: ignore[arg-type]


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("how", [spec("sigmoid"), spec("softmax"), spec("sigmoid", 6, 2), spec("softmax", 4, 2)])
def test_the_choice_is_the_routers_for_the_input_that_it_will_have(how: RouterSpec, biased: bool) -> None:
    """The residual does not change between the layers here, so that the early input is the true one."""
    rng = np.random.default_rng(8)
    weight = rng.standard_normal((EXPERTS, HIDDEN)).astype(np.float32)
    bias = rng.standard_normal(EXPERTS).astype(np.float32) if biased else None
    here, there = (rng.uniform(0.5, 2.0, HIDDEN).astype(np.float32) for _ in range(2))
    here[7] = there[7] = 0.0  # a norm that lets nothing through
    held = hold("f32", REGISTRY["f32"].encode(weight), EXPERTS, HIDDEN)
    known = [RouterInputs(held.native, norm, bias, how) for norm in (here, there)]
    first, last = early_routers(known, isa="auto", planes=2)
    assert last is None
    assert isinstance(first, EarlyRouter)
    residual = rng.standard_normal((1, HIDDEN))
    wanted, _ = route((residual * there @ weight.T)[0], None if bias is None else bias.astype(np.float64), how)
    found = first.choose((residual * here).astype(np.float32))
    assert found.tolist() == wanted.tolist()[:TOLD]
    assert found.dtype == np.int32


def test_several_rows_give_distinct_ids_the_likeliest_of_each_first() -> None:
    rng = np.random.default_rng(9)
    weight = rng.standard_normal((EXPERTS, HIDDEN)).astype(np.float32)
    held = hold("f32", REGISTRY["f32"].encode(weight), EXPERTS, HIDDEN)
    ones = np.ones(HIDDEN, np.float32)
    early = early_routers([RouterInputs(held.native, ones, None, spec("sigmoid"))] * 2, isa="auto", planes=2)[0]
    assert early is not None
    rows = rng.standard_normal((3, HIDDEN)).astype(np.float32)
    each = [early.choose(row[None]).tolist() for row in rows]
    found = early.choose(rows).tolist()
    assert len(found) == len(set(found))
    assert set(found) == {expert for chosen in each for expert in chosen}
    assert set(found[: len({chosen[0] for chosen in each})]) == {chosen[0] for chosen in each}


def test_what_is_not_known_is_left_out() -> None:
    assert early_routers([None, None], isa="auto", planes=2) == [None, None]
