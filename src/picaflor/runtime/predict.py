"""How fast a model would decode, from what a machine measured and where the experts lie.

Pure arithmetic on numbers: must not measure, read files or know a model. A token takes what it takes with all experts
in memory, and in each layer what reading the missing ones adds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

AHEAD_PART = 0.55
"""Part of what the disk idles that reading ahead would fill if all that is expected were missing, as measured. It fills
as much less as more of that is in memory."""

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


def read_time(top_k: int, *, read_s: float, expert_s: float) -> tuple[float, ...]:
    """What a layer takes longer with 0 to `top_k` missing experts, from rates alone.

    `read_s` seconds read an expert, `expert_s` multiply one: what is resident is multiplied meanwhile, and the last
    one to arrive afterwards.
    """
    whole = top_k * expert_s
    return tuple(max(m * read_s + expert_s, whole) - whole if m else 0.0 for m in range(top_k + 1))


def predict(
    misses: Sequence[Misses],
    top_k: Sequence[int],
    *,
    step_s: float,
    experts_s: float,
    extra_s: Sequence[float],
    expert_bytes: int,
    ahead_bytes_per_s: float = 0.0,
) -> Speed:
    """Tokens per second of a model whose MoE layers miss as `misses` says, one entry per layer.

    `step_s`: seconds of a token with all experts in memory, `experts_s` the experts' part of it. `extra_s[m]`: what a
    layer with m missing experts takes longer. `ahead_bytes_per_s`: the disk's rate where experts are read
    ahead, so that it works while the token computes; 0 where they are not.
    """
    chosen = sum(top_k)
    waits = sum(part * extra_s[m] for layer in misses for m, part in layer.items())
    missed = sum(part * m for layer in misses for m, part in layer.items())
    if ahead_bytes_per_s:
        least = max(missed * expert_bytes / ahead_bytes_per_s - step_s, 0.0)
        waits -= AHEAD_PART * missed / chosen * max(waits - least, 0.0)
    seconds = {"reads": waits, "experts": experts_s, "everything else": step_s - experts_s}
    return Speed(
        tokens_per_s=1 / sum(seconds.values()),
        hit_rate=1 - missed / chosen if chosen else 1.0,
        read_bytes=missed * expert_bytes,
        seconds=seconds,
    )
