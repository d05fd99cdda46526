"""Rows times a held matrix: one quantized product, two where halves of a group have scales of their own, or floats.

Knows layouts and MLX's products; must not know formats by name, models, batches or where matrices come from. Everything
is float32: activations are never rounded to fewer bits.
"""

from __future__ import annotations

import numpy as np

from picaflor.backends.metal import layout
from picaflor.backends.metal.layout import HALF, Dense, Held, Quantized
from picaflor.backends.metal.library import Array, copied, mx, on_host

SORTED_FROM = 64
"""Pairs of (row, expert) from which on they are sorted by expert, so that a matrix is read once."""


def product(x: Array, w: Held) -> Array:
    """x `[..., n, cols]` @ W.T, `[..., n, rows]`; leading dimensions of both go together."""
    if not isinstance(w, Quantized):
        return x @ layout.decoded(w).swapaxes(-1, -2)
    x = _padded(x, w.padded)
    if w.second is None:
        return _multiply(x, w, w.scales, w.biases, transpose=True)
    first, second = _halves(x)
    return _multiply(first, w, w.scales, w.biases, transpose=True) + _multiply(second, w, *w.second, transpose=True)


def rows_sum(x: Array, w: Held) -> Array:
    """x `[..., n, rows]` @ W, `[..., n, cols]`: sums of rows of W."""
    if not isinstance(w, Quantized):
        return x @ layout.decoded(w)
    out = _multiply(x, w, w.scales, w.biases, transpose=False)
    if w.second is not None:
        other = _multiply(x, w, *w.second, transpose=False)
        out = mx.where(_first_halves(w.padded), out, other)
    return out[..., : w.cols]


def gathered(x: Array, w: Held, numbers: Array) -> Array:
    """x `[pairs, cols]`, each times the member of the stack W that `numbers` uint32 names, `[pairs, rows]`."""
    if numbers.size < SORTED_FROM:
        return _gathered(x, w, numbers, in_order=False)
    order = mx.argsort(numbers)
    back = mx.argsort(order)
    return _gathered(x[order], w, numbers[order], in_order=True)[back]


def _gathered(x: Array, w: Held, numbers: Array, *, in_order: bool) -> Array:
    x = x[:, None, :]
    if isinstance(w, Quantized):
        x = _padded(x, w.padded)
        if w.second is None:
            return _gather(x, w, w.scales, w.biases, numbers, in_order)
        first, second = _halves(x)
        out = _gather(first, w, w.scales, w.biases, numbers, in_order)
        return out + _gather(second, w, *w.second, numbers, in_order)
    if not (isinstance(w, Dense) and w.values.dtype == mx.float32):
        # Only members that are wanted are written out.
        wanted, places = np.unique(on_host(numbers), return_inverse=True)
        w = layout.at(w, copied(wanted.astype(np.uint32)))
        numbers = copied(places.reshape(-1).astype(np.uint32))
    values = layout.decoded(w).swapaxes(-1, -2)
    return mx.gather_mm(x, values, rhs_indices=numbers, sorted_indices=in_order)[:, 0]


def _multiply(x: Array, w: Quantized, scales: Array, biases: Array | None, *, transpose: bool) -> Array:
    if w.mode == "mxfp4":
        return mx.quantized_matmul(x, w.codes, scales, transpose=transpose, group_size=w.group, bits=4, mode="mxfp4")
    return mx.quantized_matmul(x, w.codes, scales, biases, transpose=transpose, group_size=w.group, bits=w.bits)


def _gather(x: Array, w: Quantized, scales: Array, biases: Array | None, numbers: Array, in_order: bool) -> Array:
    mode = {"mode": "mxfp4"} if w.mode == "mxfp4" else {}
    out = mx.gather_qmm(
        x, w.codes, scales, biases, rhs_indices=numbers, transpose=True, group_size=w.group, bits=w.bits,
        sorted_indices=in_order, **mode,
    )  # fmt: skip
    return out[:, 0]


def _padded(x: Array, cols: int) -> Array:
    """Zeros behind the last input."""
    missing = cols - x.shape[-1]
    return mx.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]) if missing else x


def _first_halves(cols: int) -> Array:
    """Which inputs are among the first 16 of their 32."""
    return (mx.arange(cols) // HALF) % 2 == 0


def _halves(x: Array) -> tuple[Array, Array]:
    """x with the second, then with the first 16 of each 32 inputs as zeros."""
    here = _first_halves(x.shape[-1])
    zero = mx.zeros((), x.dtype)
    return mx.where(here, x, zero), mx.where(here, zero, x)
