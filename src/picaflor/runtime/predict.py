"""How fast a model would decode, from what a machine measured and where the experts lie.

Pure arithmetic on numbers: must not measure, read files or know a model. A layer with m missing of k chosen experts
takes as long as reading m, or as multiplying all k where that is longer; what is resident is multiplied meanwhile, and
the last expert to arrive afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Misses = Mapping[int, float]
"""How often a layer of a token misses m experts: parts that add to 1."""


@dataclass(frozen=True, slots=True)
class Speed:
    """A prediction. `seconds`: parts of one token's time by name; `limit` is the largest of them."""

    tokens_per_s: float
    hit_rate: float
    read_bytes: float
    seconds: Mapping[str, float]

    @property
    def limit(self) -> str:
        """What takes most of the time."""
        return max(self.seconds, key=lambda name: self.seconds[name])


def uniform_misses(experts: int, resident: int, top_k: int) -> Misses:
    """When every expert is wanted equally often and independently: hypergeometric. Real routes miss less."""
    resident = min(resident, experts)
    total = math.comb(experts, top_k)
    return {
        m: math.comb(experts - resident, m) * math.comb(resident, top_k - m) / total
        for m in range(top_k + 1)
        if m <= experts - resident and top_k - m <= resident
    }


def independent_misses(hit_rate: float, top_k: int) -> Misses:
    """When each of a token's experts is there with the same probability, whatever the others are: binomial."""
    miss = 1 - hit_rate
    return {m: math.comb(top_k, m) * miss**m * hit_rate ** (top_k - m) for m in range(top_k + 1)}


def predict(
    misses: Sequence[Misses],
    top_k: Sequence[int],
    *,
    step_s: float,
    experts_s: float,
    read_s: Sequence[float],
    expert_bytes: int,
) -> Speed:
    """Tokens per second of a model whose MoE layers miss as `misses` says, one entry per layer.

    `step_s`: seconds of a token with all experts in memory, `experts_s` the experts' part of it. `read_s[m]`: seconds
    of a request for m missing experts.
    """
    chosen = sum(top_k)
    one = experts_s / chosen if chosen else 0.0
    waits = multiplies = missed = 0.0
    for layer, k in zip(misses, top_k, strict=True):
        for m, part in layer.items():
            multiply = one * k
            taken = max(read_s[m] + one, multiply) if m else multiply
            waits += part * (taken - multiply)
            multiplies += part * multiply
            missed += part * m
    rest = step_s - experts_s
    seconds = {"waiting for reads": waits, "experts": multiplies, "everything else": rest}
    return Speed(
        tokens_per_s=1 / sum(seconds.values()),
        hit_rate=1 - missed / chosen if chosen else 1.0,
        read_bytes=missed * expert_bytes,
        seconds=seconds,
    )
