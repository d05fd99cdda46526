"""Replay of recorded routes against any policy and number of slots, without the model.

Knows ids and bytes; must not know files, memory or clocks. It counts what the store would count if every read ended
at once.

    routes = Routes.read(path)
    found = replay(routes, policy="auto", slots=12)          # or slots={layer: n}, history=counts, working_slots=n
    found.hit_rate, found.read_bytes, found.decode.hit_rate, found.decode.read_bytes_per_step
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from picaflor.store.policy.base import LayerCache, Policy, PolicyFactory
from picaflor.store.policy.choose import History, policies
from picaflor.store.policy.ranked import RankedPolicy
from picaflor.store.policy.rankings import Clairvoyant
from picaflor.store.policy.shadow import Shadow
from picaflor.store.policy.working import WorkingSet
from picaflor.store.routes import Routes
from picaflor.store.store import WORKING_SLOTS

BELADY = "belady"
"""The offline optimum, which may decline to admit: for comparison, not to run with."""


@dataclass(slots=True)
class Tally:
    """Sums over requests; a step is a request to the first layer that was asked for anything."""

    steps: int = 0
    asked: int = 0
    hits: int = 0
    read_bytes: int = 0

    @property
    def loads(self) -> int:
        """Experts that had to be read."""
        return self.asked - self.hits

    @property
    def hit_rate(self) -> float:
        """Share of the experts that were there; 1 where none was asked for."""
        return self.hits / self.asked if self.asked else 1.0

    @property
    def read_bytes_per_step(self) -> float:
        """Bytes read for one step through all layers."""
        return self.read_bytes / self.steps if self.steps else 0.0


@dataclass(slots=True)
class Replayed(Tally):
    """All requests; `decode`: those of single tokens; `by_layer`: hits and loads of each layer; `in_force`: how many
    requests each ranking decided (a policy that is no contest has one)."""

    decode: Tally = field(default_factory=Tally)
    by_layer: dict[int, tuple[int, int]] = field(default_factory=dict)
    in_force: dict[str, int] = field(default_factory=dict)


def replay(
    routes: Routes,
    *,
    slots: int | Mapping[int, int],
    policy: str | PolicyFactory = "auto",
    history: History | None = None,
    working_slots: int | None = WORKING_SLOTS,
    one_by_one: bool = False,
) -> Replayed:
    """What a store with these slots per layer would have read for these requests.

    `history`: uses of each expert by layer, for pins. `working_slots` None: what is not admitted is never kept.
    `one_by_one`: experts of one request may push each other out, as in a cache that knows one at a time. Raises
    ValueError for a policy that there is not, for fewer than 1 slot and for a history of another model.
    """
    cache = _Caches(routes, slots, _factory(routes, policy, history), working_slots, one_by_one)
    found = Replayed()
    hits = [0] * len(routes.layers)
    loads = [0] * len(routes.layers)
    first = int(routes.places[0]) if len(routes) else 0
    for place, ids in routes:
        missing = cache.serve(place, ids)
        hits[place] += len(ids) - len(missing)
        loads[place] += len(missing)
        sizes = routes.layers[place].expert_bytes
        nbytes = sum(sizes[expert] for expert in missing)
        for tally in (found, found.decode) if len(ids) <= routes.experts_per_token else (found,):
            tally.steps += place == first
            tally.asked += len(ids)
            tally.hits += len(ids) - len(missing)
            tally.read_bytes += nbytes
        name = cache.in_force(place)
        found.in_force[name] = found.in_force.get(name, 0) + 1
    found.by_layer = {entry.layer: (hits[at], loads[at]) for at, entry in enumerate(routes.layers)}
    return found


def _factory(routes: Routes, policy: str | PolicyFactory, history: History | None) -> PolicyFactory:
    if not isinstance(policy, str):
        return policy
    if policy != BELADY:
        return policies(policy, history)
    futures: dict[int, list[list[int]]] = {layer.layer: [] for layer in routes.layers}
    for place, ids in routes:
        futures[routes.layers[place].layer].append(ids)
    return lambda cache: RankedPolicy(cache.slots, Clairvoyant(cache.experts, futures[cache.layer]))


class _Caches:
    """The slots of all layers and the working set, as sets of ids."""

    def __init__(
        self,
        routes: Routes,
        slots: int | Mapping[int, int],
        factory: PolicyFactory,
        working_slots: int | None,
        one_by_one: bool,
    ) -> None:
        caches = []
        for layer in routes.layers:
            wanted = slots if isinstance(slots, int) else slots[layer.layer]
            if wanted < 1:
                raise ValueError(f"layer {layer.layer} needs 1 expert slot or more, not {wanted}")
            caches.append(LayerCache(layer.layer, min(wanted, layer.experts), layer.experts, working_slots))
        working: WorkingSet[int] = WorkingSet()
        self._policies: list[Policy | None] = []
        self._shadows: list[Shadow | None] = []
        self._seen: list[set[int]] = [set() for _ in caches]  # of layers that fit: each expert is read once
        for cache in caches:
            whole = cache.slots == cache.experts
            policy = None if whole else factory(cache)
            self._policies.append(policy)
            self._shadows.append(Shadow(cache, policy, working, one_by_one=one_by_one) if policy else None)

    def in_force(self, place: int) -> str:
        """The ranking that decides for this layer now."""
        return str(getattr(self._policies[place], "in_force", "resident"))

    def serve(self, place: int, ids: Sequence[int]) -> list[int]:
        """Take in a request; the ids that had to be read."""
        policy, shadow = self._policies[place], self._shadows[place]
        if policy is None or shadow is None:
            missing = [expert for expert in ids if expert not in self._seen[place]]
            self._seen[place].update(missing)
            return missing
        policy.asked(ids)
        missing = shadow.serve(ids)
        policy.rest()
        return missing
