"""exp of the kernels: its exact definition, the same bits on every instruction set, its distance to the true value."""

from __future__ import annotations

import numpy as np
import pytest
from ops_support import ISAS, exp32, fma32, same_bits

import picaflor._native as _native
from picaflor.formats.base import F32


def _exp(isa: str, x: F32) -> F32:
    out = np.empty_like(x)
    _native.exp_all(isa, x, out)
    return out


def _values() -> F32:
    rng = np.random.default_rng(7)
    spread = rng.uniform(-90, 90, 20011)
    small = rng.normal(size=5000) * 10.0 ** rng.uniform(-8, 0, 5000)
    edges = [0.0, -0.0, 88.5, -87.5, 88.6, -87.6, np.nextafter(np.float32(-87.5), np.float32(-88)), 1e30, -1e30]
    halves = (np.arange(-120, 120) + 0.5) * np.log(2.0)  # where n changes
    return np.concatenate([spread, small, edges, halves]).astype(np.float32)


@pytest.mark.parametrize("isa", ISAS)
def test_exp_is_the_written_sequence(isa: str) -> None:
    x = _values()
    assert same_bits(_exp(isa, x), exp32(x))


@pytest.mark.parametrize("isa", ISAS)
def test_exp_is_near_the_true_value(isa: str) -> None:
    x = _values()
    x = x[(x > -87) & (x < 88.5)]
    true = np.exp(x.astype(np.float64))
    assert np.max(np.abs(_exp(isa, x) - true) / true) < 1.0e-7


@pytest.mark.parametrize("isa", ISAS)
def test_exp_at_its_limits(isa: str) -> None:
    x = np.array([-np.inf, -87.51, -87.45, np.inf, 89.0, np.nan, 0.0], np.float32)
    out = _exp(isa, x)
    top = _exp(isa, np.array([88.5], np.float32))[0]
    assert out[0] == 0.0
    assert out[1] == 0.0
    assert out[2] == pytest.approx(np.exp(-87.45), rel=1e-5)  # subnormal: fewer bits
    assert out[3] == out[4] == top
    assert np.isnan(out[5])
    assert out[6] == 1.0


def test_fma32_of_this_test_rounds_once() -> None:
    # 1 + 2^-24 + 2^-60: rounding through float64 alone would give the tie and then 1.0
    a, b = np.float32(2.0**-30), np.float32(2.0**-30)
    c = np.float32(1.0)
    tie = fma32(np.float32(1 + 2.0**-12), np.float32(1 + 2.0**-12), np.float32(2.0**-60))
    assert tie[0] == np.float32(1 + 2.0**-11 + 2.0**-23)
    assert fma32(a, b, c)[0] == np.float32(1.0)
