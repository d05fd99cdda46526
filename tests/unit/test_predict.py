"""Predictions: misses by arithmetic, times worked out by hand, and what a machine has measured kept between runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from picaflor.runtime.machine import StateFile, fingerprint, machine_fingerprint
from picaflor.runtime.predict import independent_misses, predict, read_time, uniform_misses


def test_uniform_misses_are_hypergeometric() -> None:
    assert uniform_misses(4, 2, 2) == {0: pytest.approx(1 / 6), 1: pytest.approx(4 / 6), 2: pytest.approx(1 / 6)}
    assert uniform_misses(8, 8, 3) == {0: 1.0}
    assert uniform_misses(8, 99, 3) == {0: 1.0}
    assert uniform_misses(8, 1, 8) == {7: 1.0}  # the only one in memory is always among the chosen
    for experts, resident, top_k in ((64, 8, 8), (128, 100, 4), (24, 6, 4)):
        misses = uniform_misses(experts, resident, top_k)
        assert sum(misses.values()) == pytest.approx(1)
        mean = sum(m * part for m, part in misses.items())
        assert mean == pytest.approx(top_k * (1 - resident / experts))


def test_independent_misses_are_binomial() -> None:
    assert independent_misses(0.5, 2) == {0: 0.25, 1: 0.5, 2: 0.25}
    assert independent_misses(1.0, 3)[0] == 1.0
    misses = independent_misses(0.7, 8)
    assert sum(misses.values()) == pytest.approx(1)
    assert sum(m * part for m, part in misses.items()) == pytest.approx(2.4)


def test_all_in_memory_is_the_measured_step() -> None:
    found = predict([{0: 1.0}] * 3, [4] * 3, step_s=0.02, experts_s=0.012, extra_s=(0.0,), expert_bytes=10)
    assert found.tokens_per_s == pytest.approx(50)
    assert (found.hit_rate, found.read_bytes) == (1.0, 0.0)
    assert found.seconds["experts"] == pytest.approx(0.012)
    assert found.limit == "experts"


def test_rates_alone_overlap_reads_with_what_is_in_memory_and_the_last_comes_after() -> None:
    """Multiplying one of four takes 1 ms. Reading 3 ms: one missing takes 4 instead of 4, three take 10 of them."""
    assert read_time(4, read_s=0.003, expert_s=0.001) == pytest.approx((0, 0, 0.003, 0.006, 0.009))
    assert read_time(4, read_s=0.0001, expert_s=0.001) == pytest.approx((0, 0, 0, 0, 0))


def test_each_layer_adds_what_its_misses_cost() -> None:
    extra_s = (0.0, 0.0, 0.002, 0.007, 0.011)
    slow = predict([{3: 1.0}], [4], step_s=0.009, experts_s=0.004, extra_s=extra_s, expert_bytes=100)
    assert 1 / slow.tokens_per_s == pytest.approx(0.016)
    assert slow.seconds == {"reads": 0.007, "experts": 0.004, "everything else": pytest.approx(0.005)}
    assert (slow.hit_rate, slow.read_bytes, slow.limit) == (0.25, 300, "reads")
    mixed = predict([{1: 0.5, 3: 0.5}], [4], step_s=0.009, experts_s=0.004, extra_s=extra_s, expert_bytes=100)
    assert 1 / mixed.tokens_per_s == pytest.approx((0.009 + 0.016) / 2)
    assert mixed.read_bytes == 200
    two = predict([{3: 1.0}, {0: 1.0}], [4, 4], step_s=0.013, experts_s=0.008, extra_s=extra_s, expert_bytes=100)
    assert 1 / two.tokens_per_s == pytest.approx(0.020)
    assert two.hit_rate == 0.625


def test_a_model_without_experts() -> None:
    found = predict([], [], step_s=0.5, experts_s=0.0, extra_s=(0.0,), expert_bytes=0)
    assert (found.tokens_per_s, found.hit_rate) == (2.0, 1.0)


def test_state_is_kept_and_what_is_damaged_is_told_and_replaced(tmp_path: Path) -> None:
    told: list[str] = []
    path = tmp_path / "deep" / "machine.json"
    state = StateFile(path, warn=told.append)
    assert (state.read(), state.get("a")) == ({}, None)
    assert state.put("a", {"rate": 1.5})
    assert state.put("b", {"rate": 2})
    assert StateFile(path, warn=told.append).read() == {"a": {"rate": 1.5}, "b": {"rate": 2}}
    assert told == []
    assert [file.name for file in path.parent.iterdir()] == ["machine.json"]
    for text in ("{", "[]", json.dumps({"version": 99, "entries": {}}), json.dumps({"version": 1, "entries": 3})):
        path.write_text(text)
        assert state.get("a") is None
        assert str(path) in told.pop()
    assert state.put("c", {})
    told.clear()
    assert state.read() == {"c": {}}


def test_state_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    told: list[str] = []
    (tmp_path / "file").touch()
    assert not StateFile(tmp_path / "file" / "machine.json", warn=told.append).put("a", {})
    assert "cannot be " in told[-1]
    assert not StateFile(None, warn=told.append).put("a", {})
    assert StateFile(None, warn=told.append).read() == {}


def test_fingerprints_tell_machines_apart(tmp_path: Path) -> None:
    def machine(name: str, kib: int) -> str:
        (tmp_path / "cpuinfo").write_text(f"processor : 0\nmodel name\t: {name}\n")
        (tmp_path / "meminfo").write_text(f"MemTotal:       {kib} kB\n")
        return machine_fingerprint(proc=tmp_path)

    found = {machine("A", 100), machine("B", 100), machine("A", 200)}
    assert len(found) == 3
    assert all(len(text) == 20 for text in found)
    assert machine("A", 100) in found
    assert fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1})


def test_reading_ahead_leaves_a_part_of_what_the_disk_idles() -> None:
    """10 ms wait and 20 compute; 2500 bytes at 100 kB/s are 25 ms, so 5 must wait and 0.45 of the other 5 do; where
    half is in memory, 0.725 of it."""
    told = {"step_s": 0.02, "experts_s": 0.01, "extra_s": (0.0, 0.01), "expert_bytes": 2500}
    assert predict([{1: 1.0}], [1], **told).seconds["reads"] == pytest.approx(0.010)  # type: ignore[arg-type]
    for rate, waits in ((1e5, 0.00725), (1e6, 0.0045), (5e4, 0.010)):
        found = predict([{1: 1.0}], [1], ahead_bytes_per_s=rate, **told)  # type: ignore[arg-type]
        assert found.seconds["reads"] == pytest.approx(waits), rate
    found = predict([{0: 0.5, 1: 0.5}], [1], ahead_bytes_per_s=1e6, **told)  # type: ignore[arg-type]
    assert found.seconds["reads"] == pytest.approx(0.005 * 0.725)
