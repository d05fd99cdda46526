"""Routes on file, and their replay: the store and the replay agree on every hit, and `auto` is never below LRU."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from store_harness import FakePool, Model, ids, make_model

from picaflor.errors import BadStateFile, WriteFailed
from picaflor.store.policy.choose import NAMES, policies
from picaflor.store.replay import BELADY, replay
from picaflor.store.routes import RoutedLayer, Routes, RoutesWriter
from picaflor.store.store import ExpertStore

SMALL = Path(__file__).parents[1] / "data" / "routes_small.npz"
DOMAINS = ("prose", "code", "docs")
EXPERTS = 24


def routes_of(chosen: NDArray[Any]) -> Routes:
    return Routes.from_tokens(chosen, experts=EXPERTS)


def domains(path: Path, part: slice = slice(None)) -> dict[str, NDArray[Any]]:
    with np.load(path) as file:
        return {name: file[name][part] for name in DOMAINS}


def gap(routes: Routes, slots: int, **options: Any) -> tuple[float, float]:
    """What `auto` closes of the way from LRU to Belady, and its hits by LRU's; one expert at a time."""
    found = {
        policy: replay(routes, slots=slots, policy=policy, working_slots=None, one_by_one=True, **options)
        for policy in ("lru", "auto", BELADY)
    }
    low, mine, high = (found[name].hit_rate for name in ("lru", "auto", BELADY))
    return (mine - low) / (high - low), mine / low


@pytest.fixture
def model(tmp_path: Path) -> Iterator[Model]:
    made = make_model(tmp_path, experts=6, shards=1)
    with made.container:
        yield made


@given(
    slots=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    working=st.integers(0, 9),
    policy=st.sampled_from(NAMES),
    requests=st.lists(
        st.tuples(st.sampled_from((3, 4)), st.lists(st.integers(0, 5), unique=True, min_size=1, max_size=6)),
        max_size=40,
    ),
)
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_store_and_replay_agree(
    model: Model,
    tmp_path: Path,
    slots: tuple[int, int],
    working: int,
    policy: str,
    requests: list[tuple[int, list[int]]],
) -> None:
    """Any policy, any number of slots, requests larger than them too: the same hits and bytes, layer by layer."""
    history = {3: [9, 1, 0, 5, 5, 2], 4: [0, 0, 0, 1, 2, 3]}
    path = tmp_path / "routes"
    store = ExpertStore(
        model.files(),
        slots=dict(zip((3, 4), slots, strict=True)),
        working_slots=working,
        policy=policies(policy, history),
        pool=FakePool(finish=lambda waiting: waiting),
    )
    with store, RoutesWriter(path, "model", 6, store.files.routed()) as writer:
        store.recorder = writer
        for layer, experts in requests:
            with store.acquire(layer, ids(*experts)) as lease:
                for _ in lease.batches():
                    pass
    counters = store.counters
    routes = Routes.read(path)
    assert [(routes.layers[place].layer, found) for place, found in routes] == requests
    found = replay(
        routes,
        slots=dict(zip((3, 4), slots, strict=True)),
        policy=policy,
        history=history,
        working_slots=working,
    )
    for layer in (3, 4):
        mine = counters.layers[layer]
        assert found.by_layer[layer] == (mine.hits, mine.loaded), layer
    assert found.read_bytes == counters.total().read_bytes


@pytest.mark.parametrize(("slots", "least"), [(3, 0.27), (6, 0.22), (12, 0.27)])
def test_auto_on_recorded_routes(slots: int, least: float) -> None:
    parts = domains(SMALL)
    closed, against_lru = gap(routes_of(np.concatenate(list(parts.values()))), slots)
    assert closed >= least
    assert against_lru > 1
    for order in itertools.permutations(DOMAINS):
        routes = routes_of(np.concatenate([parts[name][:300] for name in order]))
        lru, auto = (replay(routes, slots=slots, policy=name) for name in ("lru", "auto"))
        assert auto.hits >= 0.99 * lru.hits, order


@pytest.mark.parametrize(("slots", "least"), [(3, 0.35), (6, 0.33), (12, 0.35)])
def test_auto_on_all_recorded_routes(test_data: Path, slots: int, least: float) -> None:
    """As the policies were compared: first halves are the history, second halves in sequence the test."""
    path = test_data / "vectors" / "routes_tiny_glm.npz"
    history = routes_of(np.concatenate(list(domains(path, slice(4096)).values()))).counts()
    routes = routes_of(np.concatenate(list(domains(path, slice(4096, None)).values())))
    lru = replay(routes, slots=slots, policy="lru", working_slots=None, one_by_one=True)
    assert lru.hit_rate == pytest.approx({3: 0.261, 6: 0.471, 12: 0.746}[slots], abs=0.005)
    assert gap(routes, slots, history=history)[0] >= least


def _adversarial() -> dict[str, NDArray[Any]]:
    rng = np.random.default_rng(3)
    tokens, layers = 1000, 2

    def chosen(scores: NDArray[Any]) -> NDArray[Any]:
        return np.argsort(-scores, axis=2)[..., :4]

    steps = np.arange(tokens)
    at = np.arange(tokens * layers * 4).reshape(tokens, layers, 4)
    topics = [chosen(rng.random((tokens, layers, EXPERTS)) + 3 * (np.arange(EXPERTS) % 4 == k)) for k in range(4)]
    cases = {
        "scan": at % 4 + 4 * (steps[:, None, None] % 6),
        "scan of one more than fits": at % 4 + 4 * (steps[:, None, None] % 4),
        "uniform": chosen(rng.random((tokens, layers, EXPERTS))),
        "one topic": topics[0],
        "always the same": np.broadcast_to(topics[0][:1], topics[0].shape),
    }
    for period in (1, 8, 40, 300):
        cases[f"topics, {period} tokens each"] = np.stack([topics[t // period % 4][t] for t in range(tokens)])
    return cases


@pytest.mark.parametrize("slots", [3, 6, 12])
def test_auto_is_never_below_lru(slots: int) -> None:
    for name, chosen in _adversarial().items():
        if name == "uniform":
            continue  # chance: the next test has several seeds of it
        routes = routes_of(chosen)
        history = {layer: counts[::-1] for layer, counts in routes.counts().items()}
        for options in ({}, {"history": history}):
            lru = replay(routes, slots=slots, policy="lru", **options)
            auto = replay(routes, slots=slots, policy="auto", **options)
            assert auto.hits >= 0.99 * lru.hits, (name, options)


def _uniform(seed: int, tokens: int) -> Routes:
    scores = np.random.default_rng(seed).random((tokens, 2, EXPERTS))
    return routes_of(np.argsort(scores, axis=2)[..., :4])


def _against_lru(routes: Routes, slots: int, **options: Any) -> float:
    lru, auto = (replay(routes, slots=slots, policy=name, **options).hits for name in ("lru", "auto"))
    return auto / lru


@pytest.mark.parametrize("slots", [3, 6, 12])
def test_auto_is_never_below_lru_on_uniform_routes(slots: int) -> None:
    """Nothing can be known of the next expert: a run of 1000 tokens scatters by some percent, so the mean of five."""
    for misled in (False, True):
        ratios = []
        for seed in range(5):
            routes = _uniform(seed, 1000)
            history = {layer: counts[::-1] for layer, counts in routes.counts().items()} if misled else None
            ratios.append(_against_lru(routes, slots, history=history))
        assert float(np.mean(ratios)) >= 0.99, (misled, ratios)


@pytest.mark.parametrize("seed", range(5))
def test_auto_is_never_below_lru_on_long_uniform_routes(seed: int) -> None:
    """4000 tokens, and fewer slots than a request has experts, where there is least to gain: each run by itself."""
    assert _against_lru(_uniform(seed, 4000), 3) >= 0.99


@pytest.mark.parametrize("slots", [3, 6])
def test_auto_is_never_below_lru_where_not_all_layers_are_observed(slots: int) -> None:
    """Eight layers, three of them observed, with routes of other kinds in the others too."""
    cases = _adversarial()
    for kinds in (("scan", "topics, 8 tokens each"), ("topics, 40 tokens each",), ("one topic", "scan")):
        chosen = np.concatenate([cases[kinds[at % len(kinds)]] for at in range(4)], axis=1)
        lru, auto = (replay(routes_of(chosen), slots=slots, policy=name) for name in ("lru", "auto"))
        assert auto.hits >= 0.99 * lru.hits, kinds


def test_auto_is_not_below_lru_where_routes_change_during_a_pause() -> None:
    """4000 tokens of one kind, so that shadows pause, then of another."""
    cases = _adversarial()
    for kinds in (("one topic", "topics, 8 tokens each"), ("uniform", "topics, 1 tokens each")):
        routes = routes_of(np.concatenate([cases[kind] for kind in kinds for _ in range(4)]))
        lru, auto = (replay(routes, slots=3, policy=name) for name in ("lru", "auto"))
        assert auto.hits >= 0.99 * lru.hits, kinds


def test_pins_win_on_a_stable_skew_and_auto_finds_them() -> None:
    rng = np.random.default_rng(5)
    chance = 1 / np.arange(1, EXPERTS + 1) ** 1.2
    order = np.stack([rng.permutation(EXPERTS) for _ in range(3)])

    def routes(tokens: int) -> Routes:
        drawn = np.argsort(-(np.log(chance) + rng.gumbel(size=(tokens, 3, EXPERTS))), axis=2)[..., :4]
        return routes_of(np.take_along_axis(np.broadcast_to(order, (tokens, 3, EXPERTS)), drawn, axis=2))

    history = routes(2000).counts()
    live = routes(3000)
    for slots in (6, 12):
        found = {
            name: replay(live, slots=slots, policy=name, history=history, working_slots=None)
            for name in ("lru", "heat", "forecast", "pins", "auto")
        }
        best = max(("lru", "heat", "forecast", "pins"), key=lambda name: found[name].hits)
        assert best == "pins"
        assert found["auto"].hits >= 0.995 * found["pins"].hits
        assert found["auto"].in_force["pins"] > 0.8 * len(live)


def test_replay_counts_steps_and_bytes() -> None:
    layers = (RoutedLayer(1, (10, 20, 30)), RoutedLayer(5, (1, 2, 4)))
    places, wanted = np.array([0, 1, 0, 1], np.uint16), [[0, 1, 2], [0, 1], [2], [1]]
    starts = np.concatenate([[0], np.cumsum([len(part) for part in wanted])])
    routes = Routes("m", 2, layers, places, starts, np.concatenate(wanted).astype(np.uint16))
    found = replay(routes, slots={1: 3, 5: 1}, policy="lru", working_slots=1)
    assert (found.steps, found.asked, found.hits, found.loads) == (2, 7, 2, 5)
    assert found.read_bytes == 60 + 3
    assert (found.decode.steps, found.decode.asked, found.decode.read_bytes) == (1, 4, 3)
    assert found.by_layer == {1: (1, 3), 5: (1, 2)}
    assert found.decode.read_bytes_per_step == 3
    assert found.hit_rate == 2 / 7
    assert routes.counts() == {1: [1, 1, 2], 5: [1, 2, 0]}
    with pytest.raises(ValueError, match="layer 1 needs 1 expert slot or more, not 0"):
        replay(routes, slots=0)


def test_routes_file(tmp_path: Path) -> None:
    path = tmp_path / "a.routes"
    layers = (RoutedLayer(2, (7, 8)), RoutedLayer(3, (9, 9)))
    with RoutesWriter(path, "tiny", 1, layers) as writer:
        for _ in range(9000):  # more than one buffer
            writer.add(3, [1])
            writer.add(2, [0, 1])
    read = Routes.read(path)
    assert (read.model, read.experts_per_token, read.layers, read.cut) == ("tiny", 1, layers, False)
    assert len(read) == 18000
    assert list(read)[-2:] == [(1, [1]), (0, [0, 1])]
    copy = tmp_path / "b.routes"
    read.write(copy)
    assert copy.read_bytes() == path.read_bytes()
    data = path.read_bytes()
    copy.write_bytes(data[:-3])
    cut = Routes.read(copy)
    assert cut.cut
    assert len(cut) == 17999


def _with(data: bytes, old: bytes, new: bytes) -> bytes:
    assert data.count(old) >= 1
    return data.replace(old, new, 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: b"x" + d[1:], "is no file of routes: expected it to start with PFROUTES"),
        (lambda d: d[:5], "is no file of routes"),
        (lambda d: d[:8] + b"\x02" + d[9:], "routes of version 2; known is 1"),
        (lambda d: d[:12] + b"\xff\xff\xff\x00" + d[16:], r"a header of 16777215 bytes in a file of \d+"),
        (lambda d: _with(d, b'"tiny"', b"123456"), "header: expected model, experts_per_token and layers"),
        (lambda d: _with(d, b'token":1', b'token":0'), "header: experts_per_token is 0"),
        (
            lambda d: _with(d, b"[7,8]", b"[7,0]"),
            r"header: expert_bytes of layer 2 is \[7, 0\]; expected sizes above 0",
        ),
        (lambda d: _with(d, b'"layer":3', b'"layer":2'), "header: a layer stands there twice"),
        (lambda d: d + b"\x05\0\1\0\0\0", "record 1: layer 5 of 2"),
        (lambda d: d + b"\0\0\2\0\1\0\1\0", r"record 1: experts \[1, 1\]; expected distinct ones below 2"),
        (lambda d: d + b"\0\0\1\0\2\0", r"record 1: experts \[2\]; expected distinct ones below 2"),
    ],
)
def test_hostile_routes(tmp_path: Path, change: Callable[[bytes], bytes], message: str) -> None:
    path = tmp_path / "a.routes"
    with RoutesWriter(path, "tiny", 1, (RoutedLayer(2, (7, 8)), RoutedLayer(3, (9, 9)))) as writer:
        writer.add(2, [0])
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(BadStateFile, match=message):
        Routes.read(path)


@pytest.mark.parametrize("start", [b"{}", b"PFROUTEX" + bytes(20), bytes(9)])
def test_routes_go_over_no_other_file(tmp_path: Path, start: bytes) -> None:
    path = tmp_path / "a"
    path.write_bytes(start)
    with pytest.raises(WriteFailed, match="a: routes cannot be written there: it holds something else"):
        RoutesWriter(path, "m", 1, (RoutedLayer(0, (1,)),))
    assert path.read_bytes() == start
    for earlier in (b"", b"PFR", b"PFROUTES" + bytes(5000)):  # nothing, cut off, longer than the new ones
        path.write_bytes(earlier)
        with RoutesWriter(path, "m", 1, (RoutedLayer(0, (1,)),)) as writer:
            writer.add(0, [0])
        found = Routes.read(path)
        assert (len(found), found.cut) == (1, False)


def test_routes_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(WriteFailed, match="routes cannot be written there: No such file or directory"):
        RoutesWriter(tmp_path / "none" / "a", "m", 1, (RoutedLayer(0, (1,)),))
    with pytest.raises(BadStateFile, match="cannot be read: No such file"):
        Routes.read(tmp_path / "none")
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this system has no /dev/full")
    with pytest.raises(WriteFailed, match="written there: it is a device; a regular file was expected"):
        RoutesWriter(full, "m", 1, (RoutedLayer(0, (1,)),))
    with RoutesWriter(tmp_path / "a", "m", 1, (RoutedLayer(0, (1,)),)) as writer, full.open("wb") as target:
        writer._file.close()
        writer._file = target
        for _ in range(40000):
            writer.add(0, [0])
    assert writer.failure is not None
    assert "recording of routes ended here: No space left on device" in str(writer.failure)
