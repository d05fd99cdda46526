"""Whole models on a GPU backend give the CPU's bits: over chunks, batches, experts that are here or sent for, failures.

Without a GPU Triton's interpreter runs the kernels, so few tokens must do.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from gpu_support import IDS, cpu_logits, logits, opened, same_bits, torch

from picaflor.backends.cuda import tier
from picaflor.errors import OutOfBudget, UnsupportedKernel
from picaflor.runtime import bench
from picaflor.runtime.kvcache import Sequence
from picaflor.runtime.runner import Work
from picaflor.store.store import ExpertStore
from picaflor.telemetry.verdict import verdict

GLM = "tiny_glm_int4g64"


@pytest.fixture(scope="module")
def expected() -> Any:
    """What the CPU says."""
    return cpu_logits(GLM, IDS)


def test_a_model_that_is_all_on_the_device(expected: Any) -> None:
    with opened(GLM, backend="cuda") as engine:
        assert same_bits(logits(engine, IDS, chunk=5), expected)
        backend: Any = engine.plan.backend
        resident = engine.plan.resident_memory
        assert backend.released == sum(plane.nbytes for plane in resident)  # the host keeps no copy
        assert not any(plane.any() for plane in engine.plan.resident_memory)
        assert backend.tier.all_here
        assert backend.tier.counters.sent == backend.tier.experts == 16
        assert backend.calls["attention"] == 5 * 2
        assert engine.record().fallbacks == {}
        assert engine.record().kernels["cuda.expert_ffn.int4-grouped"] == 2
        assert engine.plan.ledger.slots == dict.fromkeys(engine.plan.ledger.slots, 1)
        seconds = engine.plan.forward.program.seconds()
        assert all(seconds[name] > 0 for name in ("attention", "matmul", "experts", "router", "head")), seconds
        assert not any(engine.plan.forward.program.seconds().values())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="captured graphs need a GPU")
def test_replayed_graphs_tell_their_classes() -> None:
    ids = np.arange(3, 33, dtype=np.int32)
    wanted = cpu_logits(GLM, ids)
    with opened(GLM, backend="cuda") as engine:
        program: Any = engine.plan.forward.program
        for _ in range(4):
            assert same_bits(logits(engine, ids, chunk=1), wanted)
        program.seconds()
        assert same_bits(logits(engine, ids, chunk=1), wanted)
        seconds = program.seconds()
    assert program.replays > 100
    assert all(seconds[name] > 0 for name in ("attention", "matmul", "experts", "router", "head")), seconds


def test_grouped_query_attention() -> None:
    wanted = cpu_logits("qwen3_moe_tiny", IDS[:4])
    with opened("qwen3_moe_tiny", backend="cuda") as engine:
        assert same_bits(logits(engine, IDS[:4]), wanted)


@pytest.mark.parametrize(("slots", "chunk"), [pytest.param(1, 2, marks=pytest.mark.slow), (5, 1), (8, 3)])
def test_experts_that_the_host_computes(slots: int, chunk: int, expected: Any) -> None:
    with opened(GLM, backend="cuda") as engine:
        backend: Any = engine.plan.backend
        backend.tier.most_slots = slots
        assert same_bits(logits(engine, IDS[:3], chunk=chunk), expected[:3])
        counters = backend.tier.counters
        assert backend.tier.slots == slots
        assert counters.host > 4
        assert counters.host_bytes == counters.host * 7168
        assert not backend.tier.all_here
        record = engine.record()
        assert record.kernels["cpu.expert_ffn.int4-grouped"] == record.kernels["cuda.expert_ffn.int4-grouped"] == 2
        assert record.fallbacks == {}


def test_experts_that_are_sent_for(expected: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """More rows than the host computes for."""
    monkeypatch.setattr(tier, "HOST_ROWS", 1)
    monkeypatch.setattr(tier, "FEW_ROWS", 1)
    with opened(GLM, backend="cuda") as engine:
        backend: Any = engine.plan.backend
        backend.tier.most_slots = 5
        assert same_bits(logits(engine, IDS[:3], chunk=2), expected[:3])  # two rows, then one
        counters = backend.tier.counters
        assert counters.sent > 4
        assert counters.sent_bytes == counters.sent * 7168
        assert counters.hits + counters.host > 0


def test_the_report_names_the_rates_of_the_places_that_gave_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some experts on the device, the rest in memory, which is read in pieces that fit them."""
    monkeypatch.setattr(bench, "PROBE_ROW_BYTES", 1024)
    with opened(GLM, backend="cuda", expert_slots=2) as engine:
        backend: Any = engine.plan.backend
        backend.tier.most_slots = 5
        engine.decode_replay(IDS[:2].tolist(), IDS[2:5].tolist())
        engine.measure_memory_limit()
        record = engine.record()
    assert record.memory.device_experts == backend.tier.held == 4
    assert record.decode.on_host_bytes == record.decode.on_host * 7168 > 0
    assert record.decode.hits_device + record.decode.on_host == record.decode.wanted == 12
    assert record.host_memory_bytes_per_s
    text = verdict(record).text
    for name in ("device memory", "RAM"):
        assert re.search(rf"{name} [0-9.]+ GB/s for [0-9.]+ MB", text), text


def test_what_the_next_layer_will_want_is_told_as_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, list[int]]] = []
    monkeypatch.setattr(ExpertStore, "reads_ahead", lambda self, layer: True)
    monkeypatch.setattr(ExpertStore, "expect", lambda self, layer, experts: told.append((layer, experts.tolist())))
    with opened(GLM, backend="cpu", expert_slots=1, mapped="off") as engine:
        logits(engine, IDS[:2], chunk=1)
    wanted, told[:] = list(told), []
    with opened(GLM, backend="cuda", expert_slots=1) as engine:
        backend: Any = engine.plan.backend
        backend.tier.most_slots = 1  # none is kept, so nothing is left out
        logits(engine, IDS[:2], chunk=1)
    assert told == wanted
    assert len(told) == 2
    assert engine.plan.ledger.ahead_slots > 0


def test_less_memory_while_running(expected: Any) -> None:
    warnings: list[str] = []
    with opened(GLM, backend="cuda", warnings=warnings) as engine:
        backend: Any = engine.plan.backend
        logits(engine, IDS[:1])
        assert backend.tier.shrink()
        assert not backend.tier.shrink()
        assert same_bits(logits(engine, IDS[:2]), expected[:2])
        assert backend.tier.slots == 12
    assert any(re.match(r"the device is out of memory: expert slots go from 16 to 12 \(.*--vram", w) for w in warnings)


def test_r35_the_device_gives_no_memory_for_experts(expected: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first request for slots fails as torch lets it fail: fewer are taken, once, and the bits stay."""
    asked: list[int] = []
    whole = torch.empty

    def empty(*words: Any, **options: Any) -> Any:
        if options.get("dtype") is torch.uint8 and isinstance(words[0], tuple) and len(words[0]) == 2:
            asked.append(words[0][0])
            if len(asked) == 1:
                raise torch.OutOfMemoryError("CUDA out of memory")
        return whole(*words, **options)

    warnings: list[str] = []
    with opened(GLM, backend="cuda", warnings=warnings) as engine:
        monkeypatch.setattr(torch, "empty", empty)
        backend: Any = engine.plan.backend
        assert same_bits(logits(engine, IDS[:2]), expected[:2])
        assert backend.tier.slots == 12
        assert not backend.tier.all_here
    assert asked == [16, 12]
    told = [line for line in warnings if "the device" in line]
    assert told == ["the device gives no memory for 16 expert slots: 12 are taken"]


@pytest.mark.parametrize("times", [1, 2])
def test_r35_the_device_is_out_of_memory_in_a_run(times: int, expected: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An allocation fails amid a run: once, with fewer experts again to the same bits; twice, an error of one line."""
    warnings: list[str] = []
    with opened(GLM, backend="cuda", warnings=warnings) as engine:
        logits(engine, IDS[:1])
        program: Any = engine.plan.forward.program
        guard, failed = program._guard, [0, 0]

        def fails(op: str) -> None:
            failed[1] += 1
            if failed[0] < times and failed[1] % 20 == 0:
                failed[0] += 1
                raise torch.OutOfMemoryError("CUDA out of memory")
            guard.allowed(op)

        monkeypatch.setattr(program, "_guard", replace(guard, allowed=fails))
        if times == 1:
            assert same_bits(logits(engine, IDS[:2]), expected[:2])
        else:
            with pytest.raises(OutOfBudget, match="the device is out of memory: CUDA out of memory"):
                logits(engine, IDS[:2])
        backend: Any = engine.plan.backend
        assert failed[0] == times
        assert backend.tier.slots == 12
    told = [line for line in warnings if line.startswith("the device is out of memory: ")]
    assert len(told) == 1
    assert "expert slots go from 16 to 12" in told[0]


def test_too_little_memory_for_one_expert() -> None:
    with opened(GLM, backend="cuda") as engine:
        backend: Any = engine.plan.backend
        backend._vram_bytes = 1 << 20
        with pytest.raises(OutOfBudget, match="for experts: raise --vram"):
            logits(engine, IDS[:1])


@pytest.mark.parametrize(("fail_after", "chunk"), [(0, 8), (30, 2)])
def test_calls_that_fail_are_computed_by_the_host(fail_after: int, chunk: int, expected: Any) -> None:
    """With every call failing, what comes out is the CPU's and the device has done nothing."""
    warnings: list[str] = []
    with opened(GLM, backend="cuda", fail_after=fail_after, warnings=warnings) as engine:
        backend: Any = engine.plan.backend
        assert not any(plane.any() for plane in engine.plan.resident_memory)
        found = logits(engine, IDS, chunk=chunk)
        assert all(plane.any() for plane in engine.plan.resident_memory)  # read again
        assert backend.calls.total() == fail_after
        fallbacks = engine.record().fallbacks
    assert same_bits(found, expected)
    assert sum(fallbacks.values()) == 1
    told = [line for line in warnings if "PICAFLOR_FAIL_AFTER" in line]
    assert len(told) == 1
    assert told[0].endswith("; cpu does this and all later such calls; to cure: unset PICAFLOR_FAIL_AFTER")


def test_strict_makes_a_failing_call_an_error() -> None:
    with (
        opened("qwen3_moe_tiny", backend="cuda", fail_after=0, strict=True) as engine,
        pytest.raises(UnsupportedKernel, match=r"cuda\.embed failed: PICAFLOR_FAIL_AFTER=0"),
    ):
        logits(engine, IDS[:1])


def test_a_row_has_one_result_beside_any_others(expected: Any) -> None:
    with opened(GLM, backend="cuda") as engine:
        texts = [IDS[:2], IDS[::-1][:3].copy()]
        together = engine.runner.step([Work(Sequence(), ids, "all") for ids in texts]).copy()
    assert same_bits(together[:2], expected[:2])
    assert not np.array_equal(together[2], expected[0])
