"""Sampling: the rule in whole numbers, greedy ties and NaN, top-p edges, the inverse CDF at both ends, equal choices on
every instruction set.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from ops_support import ISAS, backend, exp32

from picaflor.formats.base import F32


def _sample(
    logits: F32, *, temperature: float = 1.0, top_p: float = 1.0, uniform: float = 0.5, isa: str = "auto"
) -> int:
    return backend(isa).sample(logits, temperature=temperature, top_p=top_p, uniform=uniform)


def _oracle(logits: F32, temperature: float, top_p: float, uniform: float) -> int:
    """The rule: float32 weights, counted in whole numbers, sorted."""
    t = np.float32(temperature)
    finite = np.isfinite(logits)
    top = logits[finite].max() / t
    weights = np.where(finite, exp32((np.where(finite, logits, np.float32(0)) / t - top).astype(np.float32)), 0)
    counts = [int(float(weight) * 2**42) for weight in weights]
    order = sorted((i for i in range(len(logits)) if counts[i]), key=lambda i: (-counts[i], i))
    needed = math.ceil(top_p * float(sum(counts)))
    kept: set[int] = set()
    mass = 0
    for i in order:
        if kept and mass >= needed and top_p < 1:
            break
        kept.add(i)
        mass += counts[i]
    passed, reached = int(uniform * float(mass)), 0
    for i in sorted(kept):
        reached += counts[i]
        if reached > passed:
            return i
    return max(kept)


@pytest.mark.parametrize("isa", ISAS)
def test_samples_follow_the_rule(isa: str) -> None:
    rng = np.random.default_rng(2)
    for trial in range(60):
        logits = (rng.uniform(0.5, 6) * rng.normal(size=int(rng.integers(1, 300)))).astype(np.float32)
        temperature, top_p = float(rng.choice([0.3, 0.7, 1.0, 2.0])), float(rng.choice([0.1, 0.5, 0.9, 0.999, 1.0]))
        uniform = float(rng.uniform())
        wanted = _oracle(logits, temperature, top_p, uniform)
        assert _sample(logits, temperature=temperature, top_p=top_p, uniform=uniform, isa=isa) == wanted, trial


@pytest.mark.parametrize("isa", ISAS)
def test_long_rows_with_ties_and_every_top_p_follow_the_rule(isa: str) -> None:
    rng = np.random.default_rng(9)
    for trial in range(40):
        logits = (rng.choice([0.01, 1.0, 8.0]) * rng.normal(size=4000)).astype(np.float32)
        if trial % 2:
            logits = np.round(logits * 4) / np.float32(4)
        options = {
            "temperature": float(rng.choice([1e-3, 0.7, 1.0, 100.0])),
            "top_p": float(rng.choice([1e-9, 0.3, 0.95, 1 - 2.0**-53, 1.0])),
            "uniform": float(rng.choice([0.0, rng.uniform(), 1 - 2.0**-53])),
        }
        wanted = _oracle(logits, **options)
        assert _sample(logits, isa=isa, **options) == wanted, trial


def test_draws_at_the_very_borders() -> None:
    equal = np.zeros(4, np.float32)  # each counts 2^42
    assert [_sample(equal, uniform=k / 4) for k in range(4)] == [0, 1, 2, 3]
    assert [_sample(equal, uniform=k / 4 - 2.0**-53) for k in range(1, 5)] == [0, 1, 2, 3]
    quarter, more = 2.0**-2, 2.0**-2 + 2.0**-46  # more: a sixteenth of one count
    assert {_sample(equal, top_p=quarter, uniform=u) for u in (0.0, 1 - 2.0**-53)} == {0}
    assert {_sample(equal, top_p=more, uniform=u) for u in (0.0, 1 - 2.0**-53)} == {0, 1}


def test_weights_below_one_part_in_2_to_the_42_count_as_none() -> None:
    logits = np.log(np.array([2.5 * 2.0**-42, 1.0, 0.9 * 2.0**-42], np.float32))
    assert {_sample(logits, uniform=u) for u in (0.0, 0.5, 1 - 2.0**-53)} == {0, 1}
    # the first token has two of 2^42 + 2 parts
    assert [_sample(logits, uniform=(k + 0.5) / (2**42 + 2)) for k in range(3)] == [0, 0, 1]


def test_a_row_that_is_too_long_is_refused() -> None:
    _sample(np.zeros(1 << 20, np.float32))
    with pytest.raises(ValueError, match="a row of 1048577 logits; accepted: up to 1048576"):
        _sample(np.zeros((1 << 20) + 1, np.float32))


def test_frequencies_are_the_probabilities() -> None:
    logits = np.log(np.array([0.1, 0.2, 0.3, 0.4], np.float32))
    draws = [_sample(logits, uniform=(i + 0.5) / 1000) for i in range(1000)]
    assert [draws.count(i) for i in range(4)] == [100, 200, 300, 400]
    # temperature 0.5 squares them
    draws = [_sample(logits, temperature=0.5, uniform=(i + 0.5) / 3000) for i in range(3000)]
    assert [draws.count(i) for i in range(4)] == [100, 400, 900, 1600]


def test_greedy_takes_the_largest_lowest_id_and_ignores_nan() -> None:
    nan, inf = np.nan, np.inf
    for values, wanted in (
        ([1, 3, 3, 2], 1),
        ([nan, 3, nan, 4, nan], 3),
        ([nan, -5, -5], 1),
        ([nan, nan], 0),
        ([-inf, -inf], 0),
        ([0, inf, inf], 1),
        ([-0.0, 0.0], 0),
        ([7], 0),
    ):
        assert _sample(np.array(values, np.float32), temperature=0.0) == wanted
        assert _sample(np.array(values, np.float32), temperature=-1.0) == wanted


def test_top_p_keeps_the_smallest_prefix_that_reaches_p() -> None:
    logits = np.log(np.array([0.125, 0.5, 0.25, 0.125], np.float32))
    reach = {
        p: {_sample(logits, top_p=p, uniform=u) for u in np.linspace(0, 1, 201)} for p in (0.0, 0.4, 0.6, 0.8, 1.0)
    }
    assert reach[0.0] == {1}  # never empty
    assert reach[0.4] == {1}
    assert reach[0.6] == {1, 2}
    assert reach[0.8] == {0, 1, 2}  # of the tied ids the lower
    assert reach[1.0] == {0, 1, 2, 3}
    ties = np.zeros(4, np.float32)
    assert {_sample(ties, top_p=0.5, uniform=u) for u in np.linspace(0, 1, 101)} == {0, 1}


def test_uniform_at_both_ends_gives_possible_tokens() -> None:
    logits = np.array([-np.inf, 0.0, -200.0, 1.0, np.nan, np.inf], np.float32)
    assert _sample(logits, uniform=0.0) == 1
    assert _sample(logits, uniform=1.0 - 2.0**-53) == 3
    assert _sample(logits, uniform=1.0) == 3
    assert {_sample(logits, uniform=u) for u in np.linspace(0, 1, 51)} == {1, 3}


def test_no_finite_logit_gives_token_0() -> None:
    for value in (np.nan, np.inf, -np.inf):
        assert _sample(np.full(5, value, np.float32)) == 0


def test_huge_logits_and_small_temperatures_do_not_overflow() -> None:
    logits = np.array([1e30, 3e38, -3e38, 0.0], np.float32)
    assert _sample(logits, uniform=0.999) == 1
    assert _sample(np.array([1.0, 2.0, 2.5], np.float32), temperature=1e-3, uniform=0.999) == 2
    assert _sample(logits, temperature=1e-6, uniform=0.0) == 1
