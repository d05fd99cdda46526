"""Whole models on the Vulkan backend beside the CPU: tokens, logits, experts sent for, failures, what is told."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from device_support import GLM, IDS, failing, gap_where_they_part, greedy, logits, opened
from vulkan_support import GPU, same

from picaflor.conformance.case import f32_matrix, hold, make_batch, run_rows
from picaflor.conformance.verify import Variant, What, open_device
from picaflor.errors import OutOfBudget, UnsupportedKernel
from picaflor.runtime.builtin import folder
from picaflor.runtime.plan import EngineOptions, load_backend


@pytest.fixture(scope="module")
def expected() -> Any:
    """What the CPU says."""
    with opened(GLM, backend="cpu") as engine:
        return logits(engine, IDS)


@pytest.mark.parametrize("name", [GLM, "tiny_glm_dsa_f32", "qwen3_moe_tiny"])
def test_logits_and_greedy_tokens_beside_the_cpu(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with opened(name, backend="cpu") as engine:
        wanted = logits(engine, IDS)
        tokens, gaps = greedy(engine, IDS, 12)
    with opened(name, backend="vulkan") as engine:
        whole, chunks = logits(engine, IDS), logits(engine, IDS, chunk=3)
        mine, _ = greedy(engine, IDS, 12)
        assert engine.record().fallbacks == {}
        assert engine.record().kernels["vulkan.attention"] > 0
        backend: Any = engine.plan.backend
        assert backend.tier.all_here
    assert whole.tobytes() == chunks.tobytes()
    assert same(whole, wanted)
    gap = gap_where_they_part(mine, tokens, gaps)
    if mine != tokens:
        with capsys.disabled():
            print(f"\n{name}: tokens differ; gap of the two logits there on the CPU {gap:.3g}")
    assert mine == tokens or (GPU.fusion == "plain" and gap < 1e-3)


def test_the_built_in_model_end_to_end() -> None:
    prompt = np.array([3, 14, 15, 92, 65, 35], np.int32)
    with opened(folder(), backend="cpu", context=128) as engine:
        tokens, gaps = greedy(engine, prompt, 16)
    with opened(folder(), backend="vulkan", context=128) as engine:
        mine, _ = greedy(engine, prompt, 16)
        assert engine.record().fallbacks == {}
    gap = gap_where_they_part(mine, tokens, gaps)
    assert mine == tokens or (GPU.fusion == "plain" and gap < 1e-3), f"tokens differ where the gap is {gap:.3g}"


@pytest.mark.parametrize("slots", [1, 5])
def test_experts_that_are_sent_for(slots: int, expected: Any) -> None:
    with opened(GLM, backend="vulkan") as engine:
        backend: Any = engine.plan.backend
        backend.tier.most_slots = slots
        assert same(logits(engine, IDS[:6], chunk=2), expected[:6])
        assert backend.tier.slots == slots
        assert backend.tier.counters.sent > 4
        assert not backend.tier.all_here


def test_experts_in_several_banks(expected: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(GLM, backend="vulkan") as engine:
        backend: Any = engine.plan.backend
        logits(engine, IDS[:1])
        stride, before = backend.tier.stride, len(backend.tier.banks)
        backend.tier._forget()
        monkeypatch.setattr(GPU, "most_bytes", 3 * stride + 256)
        assert same(logits(engine, IDS, chunk=5), expected)
        assert (before, len(backend.tier.banks)) == (1, 6)


def test_a_matrix_larger_than_a_binding_lies_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(3).standard_normal((300, 40)).astype(np.float32)
    x = np.random.default_rng(4).standard_normal((3, 40)).astype(np.float32)
    found = []
    for parts, most in ((1, GPU.most_bytes), (3, 130 * 160)):
        with monkeypatch.context() as patch:
            device: Any = open_device(What("vulkan"), Variant("auto", 1), "standard")
            weight = hold(device, f32_matrix(values))
            patch.setattr(GPU, "most_bytes", most)
            assert len(weight.handle.parts) == parts

        def record(recorder: Any, buffers: Any, held: Any = weight) -> Any:
            recorder.matmul(buffers["x"], held, buffers["y"])
            return (buffers["y"],)

        found += run_rows(device, {"x": x}, {"y": 300}, record)
    assert found[0].tobytes() == found[1].tobytes()
    assert np.allclose(found[0], x @ values.T, atol=1e-4)


def test_too_little_memory_for_one_expert() -> None:
    with opened(GLM, backend="vulkan", vram_bytes=1 << 10) as engine, pytest.raises(OutOfBudget, match="raise --vram"):
        logits(engine, IDS[:1])


@pytest.mark.parametrize(("fail_after", "chunk"), [(0, 8), (30, 2)])
def test_calls_that_fail_are_computed_by_the_host(fail_after: int, chunk: int, expected: Any) -> None:
    """With every call failing, what comes out is the CPU's, bit for bit, and the device has done nothing."""
    found, calls = failing(GLM, "vulkan", fail_after=fail_after, chunk=chunk)
    assert calls == fail_after
    assert same(found, expected)


def test_strict_makes_a_failing_call_an_error() -> None:
    options = EngineOptions(backend="vulkan", fail_after=0, strict=True)
    backend: Any = load_backend(options, lambda text: None)
    recorder = backend.recorder(max_rows=2, max_outputs=2, page_tokens=16, pages=1)
    recorder.add(recorder.rows(4), recorder.rows(4))
    program = recorder.finish()
    with pytest.raises(UnsupportedKernel, match=r"vulkan\.add failed: PICAFLOR_FAIL_AFTER=0"):
        program.run(make_batch([0], pages=np.zeros((1, 1), np.int32)))


def test_one_submit_per_step_where_every_expert_is_here() -> None:
    with opened(GLM, backend="vulkan") as engine:
        logits(engine, IDS[:1])
        program: Any = engine.plan.forward.program
        before = program.submits
        logits(engine, IDS[:1])
        assert program.submits == before + 1
