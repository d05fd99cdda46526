"""A cache of ids alone: what the store's slots would hold under a policy. Used by replays and by `auto`.

Knows ids; must not know memory, files or clocks. It takes and evicts exactly as the store does when every read ends at
once; a test holds the two together.
"""

from __future__ import annotations

from collections.abc import Sequence

from picaflor.store.policy.base import DECLINED, LayerCache, Policy
from picaflor.store.policy.working import WorkingSet

_LAYER = 1 << 16  # more than any layer has experts


class Shadow:
    """One layer's slots. Whoever owns it tells the policy of requests and of their end.

    `one_by_one`: experts of one request may push each other out, as in a cache that knows one at a time.
    """

    def __init__(
        self, cache: LayerCache, policy: Policy, working: WorkingSet[int], *, one_by_one: bool = False
    ) -> None:
        self.held: dict[int, None] = {}
        self._slots = cache.slots
        self._working_slots = cache.working_slots
        self._base = cache.layer * _LAYER
        self._policy = policy
        self._working = working
        self._one_by_one = one_by_one

    def serve(self, experts: Sequence[int]) -> list[int]:
        """Take in a request; the ids that had to be read."""
        held, working, base = self.held, self._working, self._base
        hits: list[int] = []
        missing: list[int] = []
        for expert in experts:
            if expert in held:
                hits.append(expert)
            elif base + expert in working:
                working.touch(base + expert)
                hits.append(expert)
            else:
                missing.append(expert)
        if missing:
            self._place_all(hits, missing)
        return missing

    def _place_all(self, hits: Sequence[int], missing: Sequence[int]) -> None:
        """Slots for all, in as many waves as it takes: hits are given back first, then what has arrived."""
        used = set() if self._one_by_one else set(hits)
        released = not hits
        at = 0
        while True:
            while at < len(missing) and self._place(missing[at], used):
                if not self._one_by_one:
                    used.add(missing[at])
                at += 1
            if at == len(missing):
                return
            if not used:
                raise ValueError(f"no slot for expert {missing[at]}: the policy gives no victim")
            used = set() if released else used.difference(hits)
            released = True

    def _place(self, expert: int, used: set[int]) -> bool:
        """A slot for one expert; False if none can be had while those in `used` are."""
        held, policy = self.held, self._policy
        if len(held) == self._slots:
            victim = policy.victim(expert, lambda other: other not in used, must=self._working_slots == 0)
            if victim is None or victim == DECLINED:
                return self._share(expert, used, declined=victim is not None)
            del held[victim]
            policy.removed(victim)
        held[expert] = None
        policy.admitted(expert)
        return True

    def _share(self, expert: int, used: set[int], *, declined: bool) -> bool:
        working, slots, base = self._working, self._working_slots, self._base
        if slots is None:
            return True
        if len(working) >= slots:
            oldest = working.oldest(lambda key: key // _LAYER * _LAYER != base or key - base not in used)
            if oldest is None:
                return False
            working.remove(oldest)
        working.add(base + expert, declined=declined)
        return True
