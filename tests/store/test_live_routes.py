"""The built-in model through the real store: recorded routes, their replay, the usage history, pins at the start."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from picaflor.errors import BadStateFile, WriteFailed
from picaflor.runtime.engine import Engine, EngineOptions
from picaflor.store.counters import LayerCounters
from picaflor.store.replay import replay
from picaflor.store.routes import Routes

TEXT = "The disk holds what memory cannot. A cache keeps the experts that the next token is likely to need. " * 3


def play(options: EngineOptions, tokens: int = 60) -> tuple[LayerCounters, list[int], list[str]]:
    """Feed a fixed text token by token; what the store counted, the likeliest next tokens, and the warnings."""
    warnings: list[str] = []
    with Engine.open(None, options, warn=warnings.append) as engine:
        ids = engine.tokenizer.encode(TEXT)[:tokens]
        rows = np.concatenate([rows.copy() for rows in engine.forward_logits(np.array(ids, np.int32))])
        store = engine.plan.store
        assert store is not None
        total = store.counters.total()
    return total, rows.argmax(axis=1).tolist(), warnings


@pytest.mark.parametrize("prefetch", ["off", "on"])
@pytest.mark.parametrize("policy", ["auto", "lru"])
@pytest.mark.parametrize("slots", [3, 6, 12])
def test_the_report_is_the_replays_prediction(tmp_path: Path, slots: int, policy: str, prefetch: str) -> None:
    """Requests of one token fit the slots, so nothing depends on when a read ends: equal to the last hit and byte.

    Reading ahead changes when a miss is read, and no decision of a policy: what was in a slot is the same.
    """
    path = tmp_path / "routes"
    options = EngineOptions(expert_slots=slots, policy=policy, prefill_chunk=1, record_routes=path, prefetch=prefetch)
    total, _, _ = play(options)
    routes = Routes.read(path)
    assert (len(routes), routes.experts_per_token, len(routes.layers)) == (60 * 7, 4, 7)
    found = replay(routes, slots=slots, policy=policy)
    missed = total.prefetched + total.joined + total.loaded
    wanted_bytes = total.read_bytes - total.wasted_bytes
    assert (found.hits, found.loads, found.read_bytes) == (total.pinned + total.lru, missed, wanted_bytes)
    assert (total.prefetched + total.late > 0) == (prefetch == "on")
    assert total.joined == total.late
    assert found.steps == found.decode.steps == 60
    assert 0 < found.hits < found.asked


def test_no_policy_changes_a_token(tmp_path: Path) -> None:
    wanted = play(EngineOptions())[1]
    for policy in ("auto", "forecast", "heat", "lru", "pins"):
        assert play(EngineOptions(expert_slots=3, policy=policy))[1] == wanted, policy


def test_reading_ahead_changes_no_token() -> None:
    wanted = play(EngineOptions())[1]
    for slots in (1, 3, 12):
        for prefetch in ("on", "auto"):
            total, found, _ = play(EngineOptions(expert_slots=slots, prefetch=prefetch))
            assert found == wanted, (slots, prefetch)
    one_by_one = play(EngineOptions(expert_slots=3, prefetch="on", prefill_chunk=1))
    assert one_by_one[1] == wanted
    total = one_by_one[0]
    # A trained router is predictable: most of what is read ahead is wanted.
    assert total.wasted < 0.35 * (total.prefetched + total.late + total.wasted)


def test_mapped_experts_record_the_same_routes(tmp_path: Path) -> None:
    found = {}
    for mapped in ("on", "off"):
        path = tmp_path / mapped
        play(EngineOptions(mapped=mapped, prefill_chunk=1, record_routes=path))
        found[mapped] = Routes.read(path)
    assert len(found["on"]) == 60 * 7
    assert list(found["on"]) == list(found["off"])
    assert found["on"].layers == found["off"].layers


def test_usage_history_grows_and_pins_are_read_at_the_start(tmp_path: Path) -> None:
    routes = tmp_path / "routes"
    options = EngineOptions(expert_slots=6, state=tmp_path, prefill_chunk=1, record_routes=routes)
    play(options)
    (file,) = (tmp_path / "usage").iterdir()
    counted = json.loads(file.read_text())
    assert (counted["format"], counted["version"]) == ("picaflor usage", 1)
    assert {int(layer): counts for layer, counts in counted["layers"].items()} == Routes.read(routes).counts()
    play(options)
    twice = json.loads(file.read_text())["layers"]
    assert twice == {layer: [2 * count for count in counts] for layer, counts in counted["layers"].items()}
    counted["policy"] = "pins"
    file.write_text(json.dumps(counted))
    with Engine.open(None, EngineOptions(expert_slots=6, state=tmp_path)) as engine:
        store = engine.plan.store
        assert store is not None
        assert store.policy_in_force == "pins"
        list(engine.forward_logits(np.arange(4, dtype=np.int32)))
        for layer, counts in counted["layers"].items():
            hottest = sorted(range(24), key=lambda e, c=counts: (-c[e], e))[:6]
            assert store._policies[int(layer)]._rankings[-1].pinned == hottest  # type: ignore[attr-defined]
        assert store.counters.preload_bytes > 0


def test_usage_of_the_other_engine(tmp_path: Path) -> None:
    path = tmp_path / ".coli_usage"
    path.write_text("-1 8 24\n-2 1 3815245270\n-9 1 1\n0 3 5\n1 2 40\n7 23 1\n")
    options = EngineOptions(expert_slots=6, usage=path, prefill_chunk=1)
    routes = tmp_path / "routes"
    play(EngineOptions(expert_slots=6, prefill_chunk=1, record_routes=routes))
    play(options)
    counts = Routes.read(routes).counts()
    counts[1][2] += 40
    counts[7][23] += 1
    rows = [f"{layer} {e} {n}" for layer, found in sorted(counts.items()) for e, n in enumerate(found) if n]
    assert path.read_text() == "\n".join(["-1 8 24", "-2 1 3815245270", *rows]) + "\n"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (".coli_usage", "-1 8 64\n", "for 8 layers of 64 experts; the model has 8 of 24"),
        (".coli_usage", "-2 2 3815245270\n", "version 2; known is 1"),
        (".coli_usage", "-2 1 7\n", "written for engine 7; glm_moe_dsa is 3815245270"),
        (".coli_usage", "1 2\n", 'line 1: "1 2"; expected three whole numbers'),
        (".coli_usage", "1 24 5\n", "line 1: expert 24 of 24, count 5"),
        ("u.json", "{", "not valid JSON"),
        ("u.json", '{"format": "x"}', 'format "x" version None; expected picaflor usage version 1'),
        ("u.json", '{"format": "picaflor usage", "version": 1, "layers": {"1": [1]}}', "counts 1 experts in layer 1"),
        ("u.json", '{"format": "picaflor usage", "version": 1, "layers": {"99": []}}', "counts experts of layer 99"),
        (
            "u.json",
            '{"format": "picaflor usage", "version": 1, "layers": {"1": [-1]}}',
            r"layer 1 are \[-1\]",
        ),
        ("u.json", '{"format": "picaflor usage", "version": 1, "layers": {"x": [1]}}', 'layer "x"; expected a number'),
    ],
)
def test_a_named_history_of_no_use_is_refused(tmp_path: Path, name: str, text: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(BadStateFile, match=message):
        play(EngineOptions(expert_slots=6, usage=path))
    assert path.read_text() == text


def test_a_history_that_cannot_be_kept_is_one_notice(tmp_path: Path) -> None:
    blocked = tmp_path / "state"
    blocked.write_text("a file where a folder should be")
    options = EngineOptions(expert_slots=6, state=blocked, prefill_chunk=1)
    total, tokens, warnings = play(options)
    assert total.loaded > 0
    assert tokens == play(EngineOptions(expert_slots=6))[1]
    assert len(warnings) == 1, warnings
    with pytest.raises(WriteFailed, match="routes cannot be written there"):
        play(EngineOptions(expert_slots=6, record_routes=tmp_path / "none" / "routes"))
