"""What a right answer is and how far off a result may be: the metric, the bounds, the comparison.

Knows numbers; must not know operations, formats by name or devices. docs/verify.md states and justifies the bounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]
Array = NDArray[Any]

ROUNDING = 2.0**-24
"""Half a unit in the last place of float32, relative."""
LARGEST_DIGIT = {"fast": 127, "standard": 127 * 256 + 127, "exact": 127 * 65536}
"""Q of each precision: a run of activations with largest magnitude m is stored in steps of m / Q."""
METRIC_BOUND = {"fast": 2e-2, "standard": 1e-4, "exact": 1e-6}
"""Most that |delta| / sum |terms| may come to for a product of activations without outliers."""


@dataclass(frozen=True, slots=True)
class Expected:
    """One right output. `allowed`: per element, None where it must be equal. `terms`: sum |terms| per element.

    `plain`: activations without outliers, so that `METRIC_BOUND` holds as well. `by_rule`: what comes out where
    activations are stored as the precision says, and how far float32 sums may be from that.
    """

    values: Array
    allowed: F64 | None = None
    terms: F64 | None = None
    plain: bool = False
    by_rule: tuple[F64, F64] | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """A comparison: the metric's largest value (0 without terms), and what is wrong, empty if nothing."""

    metric: float
    fault: str


def compare(found: Sequence[Array], expected: Sequence[Expected], precision: str, *, by_rule: bool = True) -> Outcome:
    """Compare all outputs of one case; the first fault is told.

    Without `by_rule` a kernel that does not store activations passes too: a stand-in in float32.
    """
    if len(found) != len(expected):
        return Outcome(0.0, f"{len(found)} outputs, expected {len(expected)}")
    largest = 0.0
    for number, (array, right) in enumerate(zip(found, expected, strict=True)):
        outcome = _compare(array, right, precision, by_rule)
        largest = max(largest, outcome.metric)
        if outcome.fault:
            return Outcome(largest, f"output {number}: {outcome.fault}" if len(found) > 1 else outcome.fault)
    return Outcome(largest, "")


def _compare(array: Array, right: Expected, precision: str, by_rule: bool) -> Outcome:
    if array.shape != right.values.shape:
        return Outcome(0.0, f"shape {list(array.shape)}, expected {list(right.values.shape)}")
    values = right.values.astype(np.float64)
    with np.errstate(invalid="ignore"):
        found = array.astype(np.float64)
    delta = _distance(found, values)
    metric = _metric(delta, right.terms)
    fault = _beyond(found, values, delta, right.allowed)
    if by_rule and not fault and right.by_rule is not None:
        ruled, allowed = right.by_rule
        fault = _beyond(found, ruled, _distance(found, ruled), allowed)
        fault = f"{fault} (activations stored by the rule)" if fault else ""
    if fault:
        return Outcome(metric, fault)
    limit = METRIC_BOUND[precision]
    if right.plain and metric > limit:
        return Outcome(metric, f"largest |delta| / sum |terms| is {metric:.3g}, bound {limit:g}")
    return Outcome(metric, "")


def _distance(found: F64, values: F64) -> F64:
    """|found - values|; 0 where both are NaN or the same infinity, infinite where one is NaN."""
    with np.errstate(invalid="ignore"):
        delta = np.abs(found - values)
    same = (found == values) | (np.isnan(found) & np.isnan(values))
    return np.where(same, 0.0, np.where(np.isnan(delta), np.inf, delta))


def _beyond(found: F64, values: F64, delta: F64, allowed: F64 | None) -> str:
    """The element that is furthest beyond what is allowed, in words; empty if none is."""
    bounds = np.zeros(values.shape) if allowed is None else np.nan_to_num(allowed, nan=0.0)
    with np.errstate(invalid="ignore"):
        over = np.nan_to_num(delta - bounds, nan=0.0)
    worst = np.unravel_index(int(np.argmax(over)), delta.shape)
    if not delta[worst] > bounds[worst]:
        return ""
    place = ", ".join(map(str, worst))
    bound = f"allowed {bounds[worst]:.3g}" if allowed is not None else "must be equal"
    return f"[{place}] is {found[worst]:.9g}, right is {values[worst]:.9g}, {bound}"


def _metric(delta: F64, terms: F64 | None) -> float:
    if terms is None:
        return 0.0
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(delta == 0, 0.0, delta / terms)
    return float(np.max(ratio, initial=0.0))


def differing(first: Sequence[Array], second: Sequence[Array]) -> int:
    """How many output values differ in their bits; one NaN is as good as another."""
    count = 0
    for a, b in zip(first, second, strict=True):
        bits = np.ascontiguousarray(a).view(np.uint32) != np.ascontiguousarray(b).view(np.uint32)
        if a.dtype.kind == "f":
            bits &= ~(np.isnan(a) & np.isnan(b))
        count += int(bits.sum())
    return count
