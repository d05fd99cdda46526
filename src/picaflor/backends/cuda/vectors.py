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
def let_the_next_start():
    """Lets a kernel that was launched to overlap this one start as soon as there is room (NVIDIA, sm_90 and later)."""
    tl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def wait_for_the_last():
    """Waits for all that the kernel before this one writes; the barrier keeps later loads behind it."""
    tl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    tl.debug_barrier()


@triton.jit
def first_dot4(a, b, NATIVE: tl.constexpr):
    """`dot4` from 0."""
    if NATIVE:
        return tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, 0;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        return dot4(a, b, 0, NATIVE)


@triton.jit
def _digit_words(x, t, words, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(x + t)[None, :]
    else:
        return tl.load(x + t, mask=t < words, other=0)[None, :]


@triton.jit
def _word_dots(w, x, plane, first, place, words, FORMAT: tl.constexpr, LOWER: tl.constexpr, NATIVE: tl.constexpr,
               EVEN: tl.constexpr):  # fmt: skip
    """int32 dots of words of codes with the plane at x; LOWER: 256 times that, plus the dots with the next plane."""
    if FORMAT == 3:
        t = first + place
        d = first_dot4(w, _digit_words(x, t, words, EVEN), NATIVE)
        if LOWER:
            d = dot4(w, _digit_words(x + plane, t, words, EVEN), d << 8, NATIVE)
    else:
        tl.static_assert(FORMAT == 4 or FORMAT == 6, "no codes in words")
        low = w & 0x0F0F0F0F
        high = (w >> 4) & 0x0F0F0F0F
        even = first * 2 + (place // 8 * 16 + place % 8)  # 8 words for even inputs, then 8 for odd ones
        d = first_dot4(low, _digit_words(x, even, 2 * words, EVEN), NATIVE)
        d = dot4(high, _digit_words(x + 8, even, 2 * words, EVEN), d, NATIVE)
        if LOWER:
            d = dot4(low, _digit_words(x + plane, even, 2 * words, EVEN), d << 8, NATIVE)
            d = dot4(high, _digit_words(x + plane + 8, even, 2 * words, EVEN), d, NATIVE)
    return d


@triton.jit
def _of_groups(v, g, groups, EVEN: tl.constexpr):
    """Numbers of the groups `g` of the prepared row, 0 behind the last one."""
    if EVEN:
        return tl.load(v + g)[None, :]
    else:
        return tl.load(v + g, mask=g < groups, other=0)[None, :]


@triton.jit
def group_dots(w, x, plane, first, place, words, sums, tops, g, groups,
               FORMAT: tl.constexpr, PLANES: tl.constexpr, NATIVE: tl.constexpr, EVEN: tl.constexpr,
               R: tl.constexpr, CG: tl.constexpr, WG: tl.constexpr):  # fmt: skip
    """float32 `[R, CG]`: dots of CG groups; w `[R, CG * WG]` words of codes from word `first` on. Unsigned nibbles get
    their minus 8."""
    sums_of_words = _word_dots(w, x, plane, first, place, words, FORMAT, PLANES == 2, NATIVE, EVEN)
    dot = tl.sum(tl.reshape(sums_of_words, (R, CG, WG)), axis=2)
    if PLANES == 3:
        rest = _word_dots(w, x + plane, plane, first, place, words, FORMAT, True, NATIVE, EVEN)
        low = tl.sum(tl.reshape(rest, (R, CG, WG)), axis=2)
        if FORMAT != 3:
            dot -= 8 * _of_groups(tops, g, groups, EVEN)
            low -= 8 * _of_groups(sums, g, groups, EVEN)
        return tl.fma(dot.to(tl.float32), 65536.0, low.to(tl.float32))
    else:
        if FORMAT != 3:
            dot -= 8 * _of_groups(sums, g, groups, EVEN)
        return dot.to(tl.float32)


@triton.jit
def chain(acc, dots, factors, R: tl.constexpr, N: tl.constexpr):
    """N links of the chain, groups ascending: acc = fma(dot, factor, acc); both `[R, N]`."""
    if N == 2:
        d0, d1 = tl.split(dots)
        f0, f1 = tl.split(factors)
        return tl.fma(d1, f1, tl.fma(d0, f0, acc))
    else:
        d0, d1 = tl.split(tl.permute(tl.reshape(dots, (R, 2, N // 2)), (0, 2, 1)))
        f0, f1 = tl.split(tl.permute(tl.reshape(factors, (R, 2, N // 2)), (0, 2, 1)))
        return chain(chain(acc, d0, f0, R, N // 2), d1, f1, R, N // 2)


@triton.jit
def _words_at(row, t, words, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(row[:, None] + t[None, :])
    else:
        return tl.load(row[:, None] + t[None, :], mask=(t < words)[None, :], other=0)


@triton.jit
def _scales_at(scales, g, groups, FORMAT: tl.constexpr, EVEN: tl.constexpr):
    if FORMAT != 6:
        return tl.load(scales)[:, None] + tl.zeros_like(g).to(tl.float32)[None, :]
    elif EVEN:
        return tl.load(scales[:, None] + g[None, :])
    else:
        return tl.load(scales[:, None] + g[None, :], mask=(g < groups)[None, :], other=0.0)


@triton.jit
def vector_rows(row, scales, words, groups, x, plane, xs, sums, tops,
                FORMAT: tl.constexpr, GROUP: tl.constexpr, PLANES: tl.constexpr, NATIVE: tl.constexpr,
                EVEN: tl.constexpr, R: tl.constexpr, N: tl.constexpr, STEPS: tl.constexpr,
                WAIT: tl.constexpr):  # fmt: skip
    """float32 `[R]`: rows at the addresses `row` (int32 pointers, `words` words each), scales at `scales`.

    N groups a step. STEPS > 0: that many steps cover the row, and all of it is on its way at once; 0: the next step's
    words are on their way while this one's are multiplied. GROUP is 64, 128 or 256; `x` int32 pointer to the prepared
    row, `plane` in words. EVEN: groups are whole and fill the steps. WAIT: the prepared row comes from the
    kernel before, which may still run while the first words are asked for.
    """
    WG: tl.constexpr = GROUP // 4 if FORMAT == 3 else GROUP // 8
    acc = tl.zeros((R,), tl.float32)
    pick = tl.arange(0, N)
    place = tl.arange(0, N * WG)
    if STEPS > 0:
        coming = ()
        factors = ()
        for i in tl.static_range(STEPS):
            coming = coming + (_words_at(row, i * N * WG + place, words, EVEN),)  # type: ignore[assignment]  # noqa: RUF005
            factors = factors + (_scales_at(scales, i * N + pick, groups, FORMAT, EVEN),)  # type: ignore[assignment]  # noqa: RUF005
        if WAIT:
            wait_for_the_last()
        for i in tl.static_range(STEPS):
            g = i * N + pick
            dots = group_dots(coming[i], x, plane, i * N * WG, place, words, sums, tops, g, groups, FORMAT, PLANES,
                              NATIVE, EVEN, R, N, WG)  # fmt: skip
            acc = chain(acc, dots, factors[i] * _of_groups(xs, g, groups, EVEN), R, N)
    else:
        last = (groups - 1) // N * N
        w = _words_at(row, place, words, EVEN)
        s = _scales_at(scales, pick, groups, FORMAT, EVEN)
        if WAIT:
            wait_for_the_last()
        for begin in range(0, groups, N):
            ahead = tl.minimum(begin + N, last)
            next_w = _words_at(row, ahead * WG + place, words, EVEN)
            next_s = s
            if FORMAT == 6:
                next_s = _scales_at(scales, ahead + pick, groups, FORMAT, EVEN)
            g = begin + pick
            dots = group_dots(w, x, plane, begin * WG, place, words, sums, tops, g, groups, FORMAT, PLANES, NATIVE,
                              EVEN, R, N, WG)  # fmt: skip
            acc = chain(acc, dots, s * _of_groups(xs, g, groups, EVEN), R, N)
            w = next_w
            s = next_s
    return acc
