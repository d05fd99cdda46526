"""The arithmetic of `bench decode` with a made-up engine."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from picaflor.backends.api import DeviceRates
from picaflor.errors import PicaflorError, UsageError
from picaflor.runtime.bench import (
    DecodeBench,
    DiskLimit,
    MemoryProbe,
    ReadCount,
    fixed_tokens,
    measure_decode,
)
from picaflor.runtime.engine import Engine


class FakeEngine:
    """Steps of known length; writes down what happened in which order."""

    def __init__(self, events: list[str], steps: list[list[float]]) -> None:
        self.events = events
        self.steps = steps
        self.calls: list[tuple[list[int], list[int]]] = []

    def decode_replay(self, prompt: Sequence[int], tokens: Sequence[int]) -> list[float]:
        self.events.append("replay")
        self.calls.append((list(prompt), list(tokens)))
        return self.steps[len(self.calls) - 1]

    def bytes_per_token(self) -> dict[str, int]:
        return {"experts": 300, "head": 100}


def test_repeats_and_reads_alternate_and_the_first_replay_does_not_count() -> None:
    events: list[str] = []
    engine = FakeEngine(events, [[9.0, 9.0], [0.1, 0.3], [0.2, 0.6], [0.1, 0.1]])
    rates = iter([4000.0, 1000.0, 2000.0, 3000.0])

    def read_rate() -> float:
        events.append("read")
        return next(rates)

    bench = measure_decode(engine, prompt=[5, 6], tokens=[7, 8], repeats=3, read_rate=read_rate)
    assert events == ["replay", "read", "replay", "read", "replay", "read", "replay", "read"]
    assert engine.calls == [([5, 6], [7, 8])] * 4
    assert bench.rates == pytest.approx((5.0, 2.5, 10.0))
    assert bench.tokens_per_s == pytest.approx(5.0)
    assert bench.read_rate == 2500.0
    assert bench.touched_bytes == 400
    assert bench.floor_tokens_per_s == 6.25
    assert bench.of_floor == pytest.approx(0.8)
    record = bench.record()
    assert record["step_p50_s"] == 0.1
    assert record["step_p99_s"] == 0.6
    assert record["weight_bytes_per_s"] == pytest.approx(2000.0)
    assert record["bytes_per_token_by_class"] == {"experts": 300, "head": 100}
    assert (record["tokens_per_s_min"], record["tokens_per_s_max"]) == pytest.approx((2.5, 10.0))


@pytest.mark.parametrize("steps", [[0.1], [0.1, 0.0], [0.1, 0.1, 0.1]])
def test_a_replay_with_wrong_times_is_refused(steps: list[float]) -> None:
    engine = FakeEngine([], [[1.0, 1.0], steps])
    with pytest.raises(PicaflorError, match="a replay of 2 tokens gave"):
        measure_decode(engine, prompt=[1], tokens=[2, 3], repeats=1, read_rate=lambda: 1.0)


def test_fixed_tokens_depend_on_the_arguments_only() -> None:
    first = fixed_tokens(50, 200, 3)
    assert (first == fixed_tokens(50, 200, 3)).all()
    assert (first != fixed_tokens(50, 200, 4)).any()
    assert first.min() >= 0
    assert first.max() < 50
    assert len(set(first.tolist())) > 40


def test_a_bench_of_one_repeat_is_its_own_median() -> None:
    bench = DecodeBench(step_s=((0.5, 0.5),), read_bytes_per_s=(10.0, 30.0), bytes_per_token={"a": 5})
    assert bench.tokens_per_s == 2.0
    assert bench.floor_tokens_per_s == 4.0
    assert bench.of_floor == 0.5


def test_the_probe_reads_the_memory_that_it_is_given() -> None:
    pytest.importorskip("picaflor._native", reason="the native part of the package is not built")
    memory = [np.ones(1 << 20, np.uint8), np.ones(100, np.uint8), np.ones((1 << 15) + 5, np.uint8)]
    probe = MemoryProbe(memory, isa="scalar", threads=2)
    assert probe.nbytes == (1 << 20) + (1 << 15)
    assert probe() > 0


def test_the_disk_is_measured_at_the_same_moments_and_its_share_is_the_median_repeats() -> None:
    events: list[str] = []
    engine = FakeEngine(events, [[1.0, 1.0], [0.5, 0.5], [0.25, 0.25], [1.0, 1.0]])
    rates = iter([100.0, 300.0, 500.0, 300.0])
    physical = iter([0, 95, 100, 190, 200, 295])
    logical = iter([0, 100, 100, 200, 200, 300])
    decoded = iter([7, 100, 160, 240])

    def rate() -> float:
        events.append("disk")
        return next(rates)

    bench = measure_decode(
        engine,
        prompt=[1],
        tokens=[2, 3],
        repeats=3,
        read_rate=lambda: 1.0,
        disk=DiskLimit(rate, lambda: ReadCount(next(logical), next(physical)), lambda: next(decoded)),
    )
    assert events == ["replay", "disk", "replay", "disk", "replay", "disk", "replay", "disk"]
    # 100 B in 1 s at 200 B/s, 160 B in 0.5 s at 400 B/s, 240 B in 2 s at 400 B/s
    assert bench.of_disk == pytest.approx(0.5)
    assert bench.physical_of_logical == pytest.approx((95 + 90 + 95) / 300)
    record = bench.record()
    assert record["disk_bytes_per_token"] == pytest.approx(500 / 6)
    assert record["read_rate_from_disk"] == pytest.approx(500 / 3.5)
    assert record["disk_bytes_per_s"] == 300.0


def test_a_model_in_memory_has_no_share_of_the_disk() -> None:
    engine = FakeEngine([], [[1.0], [1.0]])

    def never() -> float:
        raise AssertionError

    disk = DiskLimit(never, lambda: ReadCount(0, None), lambda: 0)
    bench = measure_decode(engine, prompt=[1], tokens=[2], repeats=1, read_rate=lambda: 1.0, disk=disk)
    assert bench.of_disk is None
    assert bench.physical_of_logical is None
    assert "of_disk" not in bench.record()


def test_memory_is_probed_where_the_weights_are_multiplied() -> None:
    def engine(backend: SimpleNamespace) -> Any:
        return SimpleNamespace(plan=SimpleNamespace(backend=backend))

    told = SimpleNamespace(name="cuda", on_device=True, measure_rates=lambda: DeviceRates(memory=3e12, link=1e9))
    assert Engine.memory_probe(engine(told))() == 3e12
    with pytest.raises(UsageError, match="backend vulkan does not tell the rate of its device's memory; accepted: cpu"):
        Engine.memory_probe(engine(SimpleNamespace(name="vulkan", on_device=True)))
