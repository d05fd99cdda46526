"""The lossy modes by name: fewer experts for decoded tokens than the router chose. Off unless asked for.

Knows settings and what was measured; must not know programs or devices. Prompts are always read with all experts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

import numpy as np
from numpy.typing import NDArray

from picaflor.backends.api import Reduction, ReductionCounts

_RECORD = "lossy-modes.json"


@dataclass(frozen=True, slots=True)
class Lossy:
    """What was asked for; `counts` is of this engine's life."""

    top_p: float = 1.0
    loads: int | None = None
    counts: ReductionCounts = field(default_factory=ReductionCounts)

    @property
    def active(self) -> bool:
        """Whether anything is lossy."""
        return self.top_p < 1.0 or self.loads is not None

    def names(self) -> tuple[str, ...]:
        """The active modes, as `router top-p 0.7`."""
        names = (f"router top-p {self.top_p:g}",) if self.top_p < 1.0 else ()
        return names if self.loads is None else (*names, f"expert budget {self.loads} (experimental)")

    def notices(self) -> list[str]:
        """One line per active mode: what it does and the damage that was measured."""
        lines = []
        if self.top_p < 1.0:
            damage = measured("router_top_p", self.top_p)
            lines.append(f"--router-top-p {self.top_p:g} is lossy: experts of low weight are left out; {damage}")
        if self.loads is not None:
            damage = measured("expert_budget", self.loads)
            lines.append(
                f"--experimental-expert-budget {self.loads} is lossy and no way to go faster: experts are left out "
                f"because they are not in memory, so the text depends on what is; {damage}"
            )
        return lines

    def summary(self) -> tuple[str, ...]:
        """For a report: the names, and the share of choices that was dropped so far."""
        share = self.counts.dropped / self.counts.chosen if self.counts.chosen else 0.0
        return tuple(f"{name}: {share:.1%} of the decoded tokens' experts left out" for name in self.names())

    def reduction(self, rows: NDArray[np.bool_], resident: Callable[[int], Collection[int]]) -> Reduction:
        """For a batch whose rows `rows` are decoded ones."""
        return Reduction(rows, self.top_p, self.loads, resident, self.counts)


def measured(mode: str, value: float) -> str:
    """The damage on the built-in model at the nearest setting that was measured and is not milder."""
    record = _measured()
    found = [entry for entry in record["modes"] if entry["mode"] == mode and entry["value"] <= value]
    if not found:
        return "its damage at this setting was not measured; picaflor eval measures it"
    entry = max(found, key=lambda entry: float(entry["value"]))
    return (
        f"measured on the built-in model at {entry['value']:g} ({record['conditions']}): mean KL "
        f"{entry['mean_kl']:.3g}, {entry['same_top']:.1%} of the most likely tokens stay, {entry['dropped']:.1%} of "
        "the experts left out"
    )


@cache
def _measured() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((resources.files("picaflor") / "data" / _RECORD).read_text(encoding="utf-8"))
    return found
