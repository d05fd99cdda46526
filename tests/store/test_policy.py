"""Cache policies: what each of them evicts and admits, on sequences small enough to follow by hand."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picaflor.store.policy.auto import LOOK, PAUSE, SOON, WARM, WATCH, AutoPolicies, AutoPolicy, Contest
from picaflor.store.policy.base import DECLINED, LayerCache, Policy
from picaflor.store.policy.choose import NAMES, candidates, policies, policy_nbytes
from picaflor.store.policy.ranked import RankedPolicy, lru
from picaflor.store.policy.rankings import Clairvoyant, Forecast, Heat, Pins, hottest
from picaflor.store.policy.shadow import Shadow
from picaflor.store.policy.working import WorkingSet


def always(expert: int) -> bool:
    return True


def serve(policy: Policy, held: set[int], slots: int, *request: int) -> None:
    """Ask as the store does: no expert of the request is a victim."""
    policy.asked(request)
    for expert in request:
        if expert in held:
            continue
        if len(held) == slots:
            victim = policy.victim(expert, lambda other: other not in request)
            if victim is None or victim == DECLINED:
                continue
            policy.removed(victim)
            held.remove(victim)
        policy.admitted(expert)
        held.add(expert)
    policy.rest()


def test_lru_order() -> None:
    policy = lru(LayerCache(0, 3, 100))
    policy.asked([7, 1, 4])
    for expert in (7, 1, 4):
        policy.admitted(expert)
    assert policy.victim(9, always) == 7
    policy.asked([1, 7, 99])  # 99 is in no slot: it does not matter
    assert policy.victim(9, always) == 4
    assert policy.victim(9, lambda expert: expert != 4) == 1
    assert policy.victim(9, lambda expert: False) is None
    policy.removed(4)
    policy.admitted(9)  # never asked for: the oldest
    policy.asked([1])
    assert policy.victim(5, always) == 9
    with pytest.raises(ValueError, match=r"expert 5 admitted while \[7, 1, 9\] hold 3 slots"):
        policy.admitted(5)
    with pytest.raises(KeyError):
        policy.removed(4)


@given(routes=st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True), max_size=40))
def test_lru_replay_equals_last_use(routes: list[list[int]]) -> None:
    """Replay without any store: the victim is always the admitted expert whose last use is the oldest."""
    policy = lru(LayerCache(0, 4, 10))
    admitted: set[int] = set()
    last: dict[int, int] = {}
    clock = 0
    for step in routes:
        policy.asked(step)
        for expert in step:
            clock += 1
            last[expert] = clock
        for expert in step:
            if expert not in admitted:
                if len(admitted) == 4:
                    victim = policy.victim(expert, lambda other, step=step: other not in step)
                    left = admitted.difference(step)
                    assert victim == min(left, key=lambda e: last[e], default=None)
                    if victim is None:
                        continue
                    policy.removed(victim)
                    admitted.remove(victim)
                policy.admitted(expert)
                admitted.add(expert)


def test_heat_admits_only_what_is_hotter() -> None:
    policy = RankedPolicy(2, Heat(6, half_life=2.0))
    held: set[int] = set()
    for _ in range(4):
        serve(policy, held, 2, 0, 1)
    serve(policy, held, 2, 2)  # one use against four: a single visitor changes nothing
    assert held == {0, 1}
    assert policy.victim(2, always) == DECLINED
    assert policy.victim(2, lambda expert: False) is None
    assert policy.victim(2, always, must=True) == 0  # nowhere else to go
    for _ in range(3):
        serve(policy, held, 2, 2, 1)
    assert held == {1, 2}


def test_heat_is_decayed_frequency() -> None:
    """Scores against the definition, over so many requests that the growing unit is renewed."""
    heat = Heat(3, half_life=2.0)
    requests = [[0], [1, 2], [0, 1], [2]] * 200
    wanted = [0.0, 0.0, 0.0]
    for request in requests:
        heat.asked(request)
        wanted = [value * 0.5**0.5 + (expert in request) for expert, value in enumerate(wanted)]
    relative = [score / heat.scores[0] for score in heat.scores]
    assert relative == pytest.approx([value / wanted[0] for value in wanted], rel=1e-9)
    assert max(heat.scores) < 1e101


def test_forecast_knows_what_follows_what() -> None:
    """0 is followed by 1, 2 by 3. Equal heat: after 2, the expert that is about to be asked for stays."""
    ranking = Forecast(8)
    for request in ([0], [1], [2], [3]) * 30:
        ranking.asked(request)
    ranking.asked([0])
    assert max((1, 2, 3), key=ranking.scores.__getitem__) == 1
    ranking.asked([1])
    ranking.asked([2])
    assert max((0, 1, 3), key=ranking.scores.__getitem__) == 3
    before = list(ranking.scores)
    ranking.asked([0, 1, 2, 3, 4])  # a prompt's request: heat only
    ranking.asked([2])
    assert max((0, 1, 3), key=ranking.scores.__getitem__) == 3
    assert ranking.scores[3] == pytest.approx(before[3], abs=0.05)
    assert Forecast.nbytes(8) == ranking._table.nbytes == 288


def test_pins_keep_their_slots() -> None:
    counts = [5, 0, 9, 9, 1, 0]
    assert hottest(counts, 3) == [2, 3, 0]
    assert hottest(counts, 9) == [2, 3, 0, 4]  # never one without a use
    policy = RankedPolicy(3, Pins(counts, pins=2))
    held: set[int] = set()
    serve(policy, held, 3, 0, 1, 4)
    serve(policy, held, 3, 2)
    serve(policy, held, 3, 3)
    assert held == {2, 3, 4}  # 0 and 1 were older than 4
    serve(policy, held, 3, 5)
    assert held == {2, 3, 5}
    full = RankedPolicy(2, Pins(counts, pins=2))
    held = set()
    serve(full, held, 2, 2, 3)
    serve(full, held, 2, 0)
    assert held == {2, 3}
    assert full.victim(0, always, must=True) == 2


def test_clairvoyant_is_belady() -> None:
    requests = [[0], [1], [2], [0], [1], [2], [0]]
    policy = RankedPolicy(2, Clairvoyant(3, requests))
    held: set[int] = set()
    hits = 0
    for request in requests:
        hits += request[0] in held
        serve(policy, held, 2, *request)
    assert hits == 3  # LRU has none


@pytest.mark.parametrize(
    ("working", "hits"), [(None, [0, 1, 2, 0, 2, 0]), (1, [0, 1, 2, 0, 2, 0]), (2, [0, 1, 2, 0, 2, 1])]
)
def test_shadow_takes_as_the_store_does(working: int | None, hits: list[int]) -> None:
    """Two slots; a third expert of a request goes to the working set, where it may be found again."""
    cache = LayerCache(0, 2, 9, working)
    policy = lru(cache)
    shadow = Shadow(cache, policy, WorkingSet())
    found = []
    for request in ([0, 1], [1, 2, 3], [1, 2], [5, 6, 7], [5, 6], [3]):
        policy.asked(request)
        found.append(len(request) - len(shadow.serve(request)))
    assert found == hits


def test_working_set_order() -> None:
    working: WorkingSet[str] = WorkingSet()
    for key, declined in (("a", False), ("b", True), ("c", True), ("d", False)):
        working.add(key, declined=declined)
    assert len(working) == 4
    assert working.oldest(lambda key: True) == "b"
    assert working.oldest(lambda key: key not in "bc") == "a"
    assert working.oldest(lambda key: False) is None
    working.touch("b")
    working.remove("c")
    assert "c" not in working
    assert working.oldest(lambda key: key != "a") == "d"
    with pytest.raises(KeyError):
        working.remove("c")


def test_contest_needs_a_margin() -> None:
    contest = Contest()
    contest.join(["a", "b"])
    with pytest.raises(ValueError, match=r"candidates \['a'\] in one layer, \['a', 'b'\] in others"):
        contest.join(["a"])
    for _ in range(200):
        contest.add([4, 4])
    assert contest.in_force == 0
    for _ in range(8):
        contest.add([0, 1])  # within the head start and the margin
    assert contest.in_force == 0
    for _ in range(40):
        contest.add([0, 4])
    assert (contest.in_force, contest.switches) == (1, 1)
    for _ in range(30):
        contest.add([1, 0])  # not enough to come back
    assert contest.in_force == 1


@pytest.mark.parametrize(
    ("layers", "observed", "working"),
    [(1, [0], 8), (3, [0, 1, 2], 8), (7, [1, 3, 5], 4), (10, [1, 5, 8], 3), (16, [2, 6, 10, 14], 2), (75, 18, 2)],
)
def test_contest_observes_some_layers(layers: int, observed: list[int] | int, working: int) -> None:
    contest = Contest()
    assert [contest.join(["a", "b"]) for _ in range(layers)] == list(range(layers))
    found = sorted(contest.observed)
    assert found == observed if isinstance(observed, list) else len(found) == observed
    assert max(found) < layers
    assert contest.working_slots(8) == working
    assert contest.working_slots(1) == 1
    assert contest.working_slots(0) == 0
    assert contest.working_slots(None) is None


def test_a_layer_without_shadows_follows_and_learns() -> None:
    """Seven layers: the winner in the observed ones decides in all, and knows the requests that it was not told of."""
    factory = policies("auto", start="lru")
    assert isinstance(factory, AutoPolicies)
    made = [factory(LayerCache(layer, 3, 8)) for layer in range(7)]
    held: list[set[int]] = [set() for _ in made]
    step = 0
    while factory.contest.in_force == 1:
        for policy, mine in zip(made, held, strict=True):
            serve(policy, mine, 3, 3 + step % 5)
            serve(policy, mine, 3, (0, 1, 2)[step % 3])
        step += 1
        assert step < 500
    assert {policy.in_force for policy in made} == {made[1].in_force} != {"lru"}
    for policy, mine in zip(made, held, strict=True):
        serve(policy, mine, 3, 0)
    winner = factory.contest.in_force
    assert [bool(policy._shadows) for policy in made] == [False, True, False, True, False, True, False]
    assert made[0]._rankings[winner].scores == pytest.approx(made[1]._rankings[winner].scores, rel=0.05)
    assert made[0]._told[winner] == made[0]._requests
    assert made[0]._told[0 if winner else 2] == 0


def test_auto_drops_nothing_when_it_switches() -> None:
    """A stable set that a long history knows, visited between scans: pins win, and what is held stays held."""
    history = {0: [100, 90, 80, 0, 0, 0, 0, 0]}
    factory = policies("auto", history)
    assert isinstance(factory, AutoPolicies)
    policy = factory(LayerCache(0, 3, 8))
    held: set[int] = set()
    seen: list[tuple[str, frozenset[int]]] = []
    for step in range(400):
        seen.append((policy.in_force, frozenset(held)))
        visitor = 3 + step % 5
        serve(policy, held, 3, visitor)
        serve(policy, held, 3, (0, 1, 2)[step % 3])
    assert factory.contest.switches >= 1
    assert policy.in_force == "pins"
    assert held == {0, 1, 2}
    for (before, old), (after, new) in itertools.pairwise(seen):
        if before != after:
            assert len(old - new) <= 2  # what two requests may evict, and no more


def test_shadows_pause_and_are_woken() -> None:
    """While nothing changes they watch a part of the time; when less is found they look at once, and learn what they
    missed."""
    factory = policies("auto", start="heat 256")
    assert isinstance(factory, AutoPolicies)
    contest = factory.contest

    def watching() -> bool:
        return contest.watching

    policy = factory(LayerCache(0, 4, 24, None))
    assert isinstance(policy, AutoPolicy)
    held: set[int] = set()
    for _ in range(WATCH - 1):
        serve(policy, held, 4, 0, 1, 2, 3)
    assert watching()
    watched = 0
    for _ in range(4 * (PAUSE + LOOK)):
        serve(policy, held, 4, 0, 1, 2, 3)
        watched += watching()
    assert watched == pytest.approx(4 * LOOK, abs=8)
    while watching():
        serve(policy, held, 4, 0, 1, 2, 3)
    assert policy.in_force == "heat 256"
    waited = remembered = 0
    while not watching():  # what was hot is over: other experts, each asked for over a while
        remembered = policy._requests - policy._told[0]
        serve(policy, held, 4, *(4 + (waited // 3 + k) % 20 for k in range(3)))
        waited += 1
    assert 2 < waited < SOON
    assert waited - 1 <= remembered <= waited
    assert contest.switches == 0
    for step in range(WARM + 200):
        serve(policy, held, 4, *(4 + (step // 3 + k) % 20 for k in range(3)))
    assert policy._told == [policy._requests] * 4
    assert policy.in_force in ("lru", "forecast", "heat 16")


def test_names() -> None:
    cache = LayerCache(3, 2, 4)
    for name in NAMES:
        policy = policies(name, {3: [1, 2, 3, 4]})(cache)
        held: set[int] = set()
        serve(policy, held, 2, 0, 1)
        assert held == {0, 1}, name
    with pytest.raises(ValueError, match="policy mru; accepted: auto, forecast, heat, lru, pins"):
        policies("mru")
    with pytest.raises(ValueError, match="the history of layer 3 counts 2 experts; it has 4"):
        policies("pins", {3: [1, 2]})(cache)
    assert candidates(None) == ["forecast", "lru", "heat 16", "heat 256"]
    assert candidates({3: [1]}) == ["forecast", "lru", "heat 16", "heat 256", "pins half", "pins"]
    assert policy_nbytes("auto", [LayerCache(0, 2, 8), LayerCache(1, 8, 8)]) == 288  # a layer that fits needs none
    assert policy_nbytes("lru", [LayerCache(0, 2, 8)]) == 0
