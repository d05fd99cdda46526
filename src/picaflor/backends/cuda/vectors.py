"""Rows of int4 and int8 codes times one prepared row, read as 32-bit words: what decoding of single tokens spends its
time in.

Knows how words meet digits; must not know launches, experts or other formats. The dot of a group is an exact integer
(four products at a time), so that tiles change speed and no bit.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def dot4(a, b, c, NATIVE: tl.constexpr):
    """c + the sum of the four products of signed bytes of the words a and b; int32."""
    if NATIVE:
        return tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        low = ((a << 24) >> 24) * ((b << 24) >> 24) + ((a << 16) >> 24) * ((b << 16) >> 24)
        return c + low + ((a << 8) >> 24) * ((b << 8) >> 24) + (a >> 24) * (b >> 24)


@triton.jit
def word_dot(w, x, half_words, t, c, FORMAT: tl.constexpr, NATIVE: tl.constexpr, mask):
    """c + dots of words of codes w `[R, T]` with the digits of one plane at words `t` `[T]` of x."""
    if FORMAT == 3:
        return dot4(w, tl.load(x + t, mask=mask, other=0)[None, :], c, NATIVE)
    else:
        c = dot4(w & 0x0F0F0F0F, tl.load(x + t, mask=mask, other=0)[None, :], c, NATIVE)
        return dot4((w >> 4) & 0x0F0F0F0F, tl.load(x + half_words + t, mask=mask, other=0)[None, :], c, NATIVE)


@triton.jit
def group_dots(w, x, plane_words, half_words, t, inside, sums, tops, g, g_inside,
               FORMAT: tl.constexpr, PLANES: tl.constexpr, NATIVE: tl.constexpr,
               R: tl.constexpr, CG: tl.constexpr, WG: tl.constexpr):  # fmt: skip
    """float32 `[R, CG]` of the dots of CG groups; w `[R, CG * WG]` words of codes. Unsigned nibbles get their minus 8."""
    zero = tl.zeros((R, CG * WG), tl.int32)
    first = word_dot(w, x, half_words, t, zero, FORMAT, NATIVE, inside)
    if PLANES == 2:
        first = word_dot(w, x + plane_words, half_words, t, first << 8, FORMAT, NATIVE, inside)
    dot = tl.sum(tl.reshape(first, (R, CG, WG)), axis=2)
    if PLANES == 3:
        rest = word_dot(w, x + plane_words, half_words, t, zero, FORMAT, NATIVE, inside)
        rest = word_dot(w, x + 2 * plane_words, half_words, t, rest << 8, FORMAT, NATIVE, inside)
        low = tl.sum(tl.reshape(rest, (R, CG, WG)), axis=2)
        if FORMAT != 3:
            dot -= 8 * tl.load(tops + g, mask=g_inside, other=0)[None, :]
            low -= 8 * tl.load(sums + g, mask=g_inside, other=0)[None, :]
        return tl.fma(dot.to(tl.float32), 65536.0, low.to(tl.float32))
    else:
        if FORMAT != 3:
            dot -= 8 * tl.load(sums + g, mask=g_inside, other=0)[None, :]
        return dot.to(tl.float32)


@triton.jit
def vector_rows(row, scales, live, words, groups, x, plane_words, half_words, xs, sums, tops,
                FORMAT: tl.constexpr, GROUP: tl.constexpr, PLANES: tl.constexpr, NATIVE: tl.constexpr,
                EVEN: tl.constexpr, R: tl.constexpr, CG: tl.constexpr, UNROLL: tl.constexpr):  # fmt: skip
    """float32 `[R]`: rows at the addresses `row` (int32 pointers, `words` words each), scales at `scales`.

    GROUP is a multiple of 64; `x` int32 pointer to the prepared row. EVEN: groups are whole and fill the steps.
    """
    WG: tl.constexpr = GROUP // 4 if FORMAT == 3 else GROUP // 8
    acc = tl.zeros((R,), tl.float32)
    pick = tl.arange(0, CG)
    for begin in range(0, groups, CG * UNROLL):
        for u in tl.static_range(UNROLL):
            g = begin + u * CG + pick
            t = (begin + u * CG) * WG + tl.arange(0, CG * WG)
            if EVEN:
                inside = t >= 0
                g_inside = pick >= 0
                w = tl.load(row[:, None] + t[None, :], mask=live[:, None], other=0)
            else:
                inside = t < words
                g_inside = g < groups
                w = tl.load(row[:, None] + t[None, :], mask=inside[None, :] & live[:, None], other=0)
            dots = group_dots(w, x, plane_words, half_words, t, inside, sums, tops, g, g_inside, FORMAT, PLANES,
                              NATIVE, R, CG, WG)  # fmt: skip
            step = tl.load(xs + g, mask=g_inside, other=0.0)[None, :]
            if FORMAT == 6:
                s = tl.load(scales[:, None] + g[None, :], mask=g_inside[None, :] & live[:, None], other=0.0)
            else:
                s = tl.load(scales, mask=live, other=0.0)[:, None]
            factor = s * step
            if CG == 1:
                acc = tl.fma(tl.reshape(dots, (R,)), tl.reshape(factor, (R,)), acc)
            else:
                for j in tl.static_range(CG):
                    one = (pick == j)[None, :]
                    d = tl.sum(tl.where(one, dots, 0.0), axis=1)
                    f = tl.sum(tl.where(one, factor, 0.0), axis=1)
                    if EVEN:
                        acc = tl.fma(d, f, acc)
                    else:
                        acc = tl.where(begin + u * CG + j < groups, tl.fma(d, f, acc), acc)
    return acc
