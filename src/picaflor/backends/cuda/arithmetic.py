"""Float arithmetic of the contract in Triton: exp, sigmoid, silu, the tree over sixteen chains, the order of floats.

Knows numbers; must not know operations, formats or memory. docs/design/contracts.md section 2 defines each sequence;
native/cpu/math16.h has the same for the CPU. Every kernel is launched with `EXACT`: a product and a sum are fused where
`tl.fma` says so and nowhere else. `/` is no division by IEEE's rule in Triton; `tl.div_rn` and `tl.sqrt_rn` are.
"""

from __future__ import annotations

from typing import Any, Final

import triton
import triton.language as tl

EXACT: Final[dict[str, Any]] = {"enable_fp_fusion": False}
"""Options of every launch."""

_ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding and taking it away rounds to the nearest even integer
_LOG2_E = tl.constexpr(1.44269502162933349609375)
_LN2_HIGH = tl.constexpr(0.693145751953125)
_LN2_LOW = tl.constexpr(1.42860676533018704503775e-06)
_P6 = tl.constexpr(0.001381447073072195)
_P5 = tl.constexpr(0.008368778973817825)
_P4 = tl.constexpr(0.04166839271783829)
_P3 = tl.constexpr(0.1666651964187622)
_P2 = tl.constexpr(0.4999999403953552)


@triton.jit
def exp(x):
    """exp(x), element by element: 0 below -87.5, the value at 88.5 above it, NaN for NaN."""
    y = tl.where(x > 88.5, 88.5, x)
    y = tl.where(y < -87.5, -87.5, y)
    n = y * _LOG2_E
    n = (n + _ROUND) - _ROUND
    r = tl.fma(-n, _LN2_HIGH, y)
    r = tl.fma(-n, _LN2_LOW, r)
    p = tl.fma(r, _P6, _P5)
    p = tl.fma(p, r, _P4)
    p = tl.fma(p, r, _P3)
    p = tl.fma(p, r, _P2)
    p = tl.fma(p, r, 1.0)
    p = tl.fma(p, r, 1.0)
    n = tl.where(x == x, n, 0.0)
    whole = n.to(tl.int32)
    half = whole >> 1
    first = ((half + 127) << 23).to(tl.float32, bitcast=True)
    second = ((whole - half + 127) << 23).to(tl.float32, bitcast=True)
    p = (p * first) * second
    p = tl.where(x == x, p, x)
    return tl.where(x < -87.5, 0.0, p)


@triton.jit
def sigmoid(z):
    """1 / (1 + exp(-z))."""
    return tl.div_rn(1.0, 1.0 + exp(0.0 - z))


@triton.jit
def silu(z):
    """z / (1 + exp(-z))."""
    return tl.div_rn(z, 1.0 + exp(0.0 - z))


@triton.jit
def tree16(lanes, R: tl.constexpr):
    """[R, 16] -> [R]: t8[j] = l[j] + l[j + 8], t4, t2, then the last sum. Each reduction adds two numbers, so its order
    is none."""
    t8 = tl.sum(tl.reshape(lanes, (R, 2, 8)), axis=1)
    t4 = tl.sum(tl.reshape(t8, (R, 2, 4)), axis=1)
    t2 = tl.sum(tl.reshape(t4, (R, 2, 2)), axis=1)
    return tl.sum(t2, axis=1)


@triton.jit
def rank(x):
    """int64 in the order of the floats, as native/cpu/ops_choose.cpp has it: 0 for NaN, both zeros equal."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    word = bits.to(tl.int64) & 0xFFFFFFFF
    word = tl.where(bits < 0, 0xFFFFFFFF - word, word + 0x80000000)
    return tl.where(x == x, word, 0)
