"""The policies by name, as `--policy` takes them.

Must not know slots, memory, clocks or files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from picaflor.store.policy.auto import AutoPolicies
from picaflor.store.policy.base import LayerCache, Policy, PolicyFactory
from picaflor.store.policy.ranked import RankedPolicy
from picaflor.store.policy.rankings import Forecast, Heat, Pins, Ranking, Recency

NAMES = ("auto", "forecast", "heat", "lru", "pins")
LONG_HALF_LIFE = 256.0

History = Mapping[int, Sequence[int]]
"""Uses of each expert, by layer."""


def candidates(history: History | None) -> Sequence[str]:
    """Names of the rankings that `auto` tries."""
    return [ranking.name for ranking in _rankings(LayerCache(0, 2, 1), {0: [1]} if history else None)]


def policies(name: str = "auto", history: History | None = None, *, start: str = "") -> PolicyFactory:
    """A factory for one store. `history` gives pins; without one they hold nothing. `start`: the ranking that `auto`
    begins with, if it tries that one. Raises ValueError for a name that there is not, or a history of another model."""
    match name:
        case "auto":
            return AutoPolicies(lambda cache: _rankings(cache, history), start=start)
        case "forecast":
            return lambda cache: RankedPolicy(cache.slots, Forecast(cache.experts))
        case "heat":
            return lambda cache: RankedPolicy(cache.slots, Heat(cache.experts))
        case "lru":
            return lambda cache: RankedPolicy(cache.slots, Recency(cache.experts))
        case "pins":
            return lambda cache: RankedPolicy(cache.slots, Pins(_counts(history, cache), pins=cache.slots))
    raise ValueError(f"policy {name}; accepted: {', '.join(NAMES)}")


def policy_nbytes(name: str, layers: Sequence[LayerCache]) -> int:
    """Memory that a policy of that name takes for these layers; those that fit completely need none."""
    if name not in ("auto", "forecast"):
        return 0
    return sum(Forecast.nbytes(cache.experts) for cache in layers if cache.slots < cache.experts)


def _rankings(cache: LayerCache, history: History | None) -> list[Ranking]:
    experts = cache.experts
    found: list[Ranking] = [
        Forecast(experts),
        Recency(experts),
        Heat(experts),
        Heat(experts, half_life=LONG_HALF_LIFE),
    ]
    if history:
        counts = _counts(history, cache)
        found.append(Pins(counts, pins=cache.slots // 2, name="pins half"))
        found.append(Pins(counts, pins=cache.slots))
    return found


def _counts(history: History | None, cache: LayerCache) -> Sequence[int]:
    """Raises ValueError where the history counts another number of experts."""
    counts = (history or {}).get(cache.layer, [0] * cache.experts)
    if len(counts) != cache.experts:
        raise ValueError(f"the history of layer {cache.layer} counts {len(counts)} experts; it has {cache.experts}")
    return counts


__all__ = ["NAMES", "History", "Policy", "candidates", "policies", "policy_nbytes"]
