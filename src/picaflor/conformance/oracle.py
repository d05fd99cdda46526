"""Right answers of the operations in float64, with the error that float32 arithmetic may make.

Must share no code with any kernel, backend or decoder. Sources: docs/formats.md, docs/design/contracts.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from picaflor.conformance.check import LARGEST_DIGIT, ROUNDING
from picaflor.conformance.oracle_formats import Stored, rotate, rotation_spans, unrotate
from picaflor.formats.base import Format

F64 = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Approx:
    """Right values, the largest error of each, and the sum of the magnitudes of its terms."""

    values: F64
    error: F64
    terms: F64


def exactly(values: F64) -> Approx:
    """Values that are given, without any error."""
    return Approx(values, np.zeros(values.shape), np.abs(values))


def rotation_error(x: F64) -> F64:
    """What float32 butterflies add to each value of rows that are rotated or turned back, from a block's spread."""
    error = np.zeros(x.shape)
    for start, size in rotation_spans(x.shape[1]):
        part = slice(start, start + size)
        spread = np.sqrt(np.mean(x[:, part] ** 2, axis=1, keepdims=True))
        error[:, part] = 4 * ROUNDING * (np.log2(size) + 1) * spread
    return error


def _mixed(x: F64) -> F64:
    """The largest that a rotation can make of magnitudes: their sum in a block over the root of its size."""
    out = np.zeros(x.shape)
    for start, size in rotation_spans(x.shape[1]):
        part = slice(start, start + size)
        out[:, part] = x[:, part].sum(axis=1, keepdims=True) / np.sqrt(size)
    return out


def rotated(x: Approx) -> Approx:
    """`rotate` of approximate rows."""
    values = rotate(x.values)
    terms = _mixed(x.terms) if x.error.any() else np.abs(values)
    return Approx(values, rotation_error(x.values) + _mixed(x.error), terms)


def turned_back(x: F64) -> Approx:
    """`unrotate` of stored rows."""
    return Approx(unrotate(x), rotation_error(x), _mixed(np.abs(x)))


def product(x: Approx, matrix: Stored, spec: Format, group_size: int, precision: str) -> Approx:
    """x `[n, cols]` @ W.T, with activations stored as `spec` and the precision say."""
    given = rotated(x) if spec.activation.rotated else x
    weights, sizes = matrix.weights, matrix.sizes
    cols = weights.shape[1]
    group = group_size if spec.activation.group == -1 else spec.activation.group
    terms = np.abs(given.values) @ sizes.T
    if group == 0:
        error = ROUNDING * (cols // 16 + 6) * terms + given.error @ sizes.T
    else:
        steps = given.error + 0.5001 * _steps(np.abs(given.values) + given.error, group, precision)
        error = ROUNDING * (-(-cols // group) + 5) * terms + steps @ sizes.T
    return Approx(given.values @ weights.T, error, given.terms @ sizes.T)


def by_rule(x: F64, matrix: Stored, spec: Format, group_size: int, precision: str) -> tuple[F64, F64] | None:
    """The product of activations that are stored as contracts.md says, and what float32 sums may add to it.

    None where they are not stored at all, or rotated first: then a rounding may move a value by a whole step.
    """
    group = group_size if spec.activation.group == -1 else spec.activation.group
    if group == 0 or spec.activation.rotated:
        return None
    kept = np.zeros(x.shape)
    for start in range(0, x.shape[1], group):
        run = x[:, start : start + group]
        largest = np.abs(run).max(axis=1, keepdims=True)
        whole = np.rint(run * (LARGEST_DIGIT[precision] / largest))
        step = (largest.astype(np.float32) / np.float32(LARGEST_DIGIT[precision])).astype(np.float64)
        kept[:, start : start + group] = np.where(largest == 0, 0.0, whole * step)
    terms = np.abs(kept) @ matrix.sizes.T
    return kept @ matrix.weights.T, ROUNDING * (-(-x.shape[1] // group) + 5) * terms


def _steps(magnitudes: F64, group: int, precision: str) -> F64:
    """The step in which each activation is stored: its run's largest magnitude over Q."""
    steps = np.zeros(magnitudes.shape)
    for start in range(0, magnitudes.shape[1], group):
        run = magnitudes[:, start : start + group]
        steps[:, start : start + group] = run.max(axis=1, keepdims=True) / LARGEST_DIGIT[precision]
    return steps


def silu(x: F64) -> F64:
    """x / (1 + exp(-x)) without overflow."""
    small = np.exp(-np.abs(x))
    out: F64 = x * np.where(x >= 0, 1.0, small) / (1.0 + small)
    return out


def gated(gate: Approx, up: Approx) -> Approx:
    """silu(gate) * up. The slope of silu is at most 1.1; exp is good to eight roundings."""
    active = silu(gate.values)
    values = active * up.values
    slope = 1.1 * gate.error
    error = slope * (np.abs(up.values) + up.error) + np.abs(active) * up.error + 12 * ROUNDING * np.abs(values) + 1e-35
    terms = 1.1 * gate.terms * np.abs(up.values) + np.abs(active) * up.terms
    return Approx(values, error, terms)


def weighted_sum(parts: Sequence[Approx], weights: F64) -> Approx:
    """sum over k of weights[:, k] * parts[k]."""
    total = exactly(np.zeros(parts[0].values.shape))
    for k, part in enumerate(parts):
        w = weights[:, k : k + 1]
        size = np.abs(w)
        total = Approx(
            total.values + w * part.values,
            total.error + size * part.error + 2 * ROUNDING * len(parts) * size * np.abs(part.values),
            total.terms + size * part.terms,
        )
    return total


def rmsnorm(x: F64, weight: F64, eps: float) -> Approx:
    """x / sqrt(mean of squares + eps) * weight over the last axis."""
    values = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight
    error = ROUNDING * (x.shape[-1] // 16 + 10) * np.abs(values)
    return Approx(values, error, np.abs(values))


def layernorm(x: F64, weight: F64, bias: F64, eps: float) -> Approx:
    """(x - mean) / sqrt(variance + eps) * weight + bias."""
    mean = x.mean(axis=-1, keepdims=True)
    centred = x - mean
    scale = weight / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + eps)
    terms = (np.abs(x).max(axis=-1, keepdims=True) + np.abs(centred)) * np.abs(scale) + np.abs(bias)
    return Approx(centred * scale + bias, ROUNDING * (x.shape[-1] // 16 + 14) * terms, terms)


def rope(x: F64, positions: Sequence[int], start: int, dims: int, theta: float, style: str) -> Approx:
    """x `[n, heads, width]` with `dims` values from `start` rotated; interleaved pairs come out as halves."""
    values, terms = x.copy(), np.zeros(x.shape)
    half = dims // 2
    for row, position in enumerate(positions):
        for j in range(half):
            angle = position * theta ** (-2.0 * j / dims)
            a = start + (2 * j if style == "interleaved" else j)
            b = start + (2 * j + 1 if style == "interleaved" else j + half)
            c, s = np.cos(angle), np.sin(angle)
            first, second = x[row, :, a], x[row, :, b]
            values[row, :, start + j] = first * c - second * s
            values[row, :, start + half + j] = second * c + first * s
            both = np.abs(first) + np.abs(second)
            terms[row, :, start + j] = terms[row, :, start + half + j] = both
    return Approx(values, 4 * ROUNDING * terms, terms)


def soft_mix(scores: F64, score_error: float, values: F64) -> Approx:
    """softmax(scores `[t]`) @ values `[t, n]`; an error of a score moves each weight by as much, relatively."""
    weights = np.exp(scores - scores.max())
    weights /= weights.sum()
    terms = weights @ np.abs(values)
    error = (2 * score_error + ROUNDING * (len(scores) + 24)) * terms
    return Approx(weights @ values, error, terms)


def softmax(x: F64) -> F64:
    """Over the last axis."""
    raised = np.exp(x - x.max(axis=-1, keepdims=True))
    out: F64 = raised / raised.sum(axis=-1, keepdims=True)
    return out


def sigmoid(x: F64) -> F64:
    """1 / (1 + exp(-x)) without overflow."""
    small = np.exp(-np.abs(x))
    out: F64 = np.where(x >= 0, 1.0, small) / (1.0 + small)
    return out
