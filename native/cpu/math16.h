// exp, sigmoid and silu on sixteen floats: our own operation sequence, so that no libm decides a bit.
// Must not know operations or formats. tests/unit/test_ops_math.py repeats the sequence in numpy.
#pragma once

#include "cpu/vec16.h"

namespace picaflor {
inline namespace PICAFLOR_ISA {

// exp(x): above 88.5 the value at 88.5; below -87.5 exactly 0; NaN stays NaN. x = n ln2 + r with |r| <= ln2 / 2, and
// 1 + r + r^2 q(r) with the minimax q of degree 4 (relative error 5e-9 before rounding), times 2^n in two exact factors
// (2^128 is no float; a subnormal result is rounded once).
PICAFLOR_INLINE V16 exp(V16 x) {
  const V16 low = set16(-87.5f);
  const V16 high = set16(88.5f);
  const M16 vanishes = lt(x, low);
  const V16 y = max(low, min(high, x));  // NaN passes: both give their second operand
  const V16 n = round(mul(y, set16(0x1.715476p+0f)));
  V16 r = fnma(n, set16(0x1.62e4p-1f), y);
  r = fnma(n, set16(0x1.7f7d1cp-20f), r);
  V16 p = set16(0x1.6a2358p-10f);
  p = fma(p, r, set16(0x1.123a68p-7f));
  p = fma(p, r, set16(0x1.5558f4p-5f));
  p = fma(p, r, set16(0x1.55549p-3f));
  p = fma(p, r, set16(0x1.fffffcp-2f));
  p = fma(p, r, set16(1.0f));
  p = fma(p, r, set16(1.0f));
  const I16 whole = to_int(n);
  const I16 half = ishr<1>(whole);
  const I16 bias = iset16(127);
  const V16 first = from_bits(ishl<23>(iadd(half, bias)));
  const V16 second = from_bits(ishl<23>(iadd(isub(whole, half), bias)));
  p = mul(mul(p, first), second);
  p = select(unordered(x, x), x, p);
  return select(vanishes, zero16(), p);
}

// 1 / (1 + exp(-z))
PICAFLOR_INLINE V16 sigmoid(V16 z) { return div(set16(1.0f), add(set16(1.0f), exp(sub(zero16(), z)))); }

// z / (1 + exp(-z))
PICAFLOR_INLINE V16 silu(V16 z) { return div(z, add(set16(1.0f), exp(sub(zero16(), z)))); }

PICAFLOR_INLINE float exp1(float x) {
#if defined(__AVX512F__)
  return _mm512_cvtss_f32(exp(set16(x)));
#elif defined(__AVX2__) && defined(__FMA__)
  return _mm256_cvtss_f32(exp(set16(x)).lo);
#else
  return exp(set16(x)).v[0];
#endif
}

}  // namespace PICAFLOR_ISA
}  // namespace picaflor
