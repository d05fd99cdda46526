"""Whole models on the metal backend beside the CPU: greedy tokens, logits, streaming, failures, what is told."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
from device_support import GLM, IDS, failing, gap_where_they_part, greedy, logits, opened
from metal_support import NEAR, near

from picaflor.backends.metal import library
from picaflor.backends.metal.experts import Experts
from picaflor.conformance import suite
from picaflor.conformance.case import Prepared
from picaflor.errors import OutOfBudget, UnsupportedConfig, UnsupportedKernel
from picaflor.runtime.builtin import folder
from picaflor.runtime.kvcache import Sequence
from picaflor.runtime.plan import EngineOptions, load_backend
from picaflor.runtime.runner import Work

MODELS = (GLM, "tiny_glm_ragged_int4g16", "tiny_glm_dsa_f32", "tiny_glm_fp8_experts", "tiny_glm_e8", "qwen3_moe_tiny")


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_greedy_tokens_beside_the_cpu(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with opened(name, backend="cpu") as engine:
        expected = logits(engine, IDS)
        tokens, gaps = greedy(engine, IDS, 16)
    with opened(name, backend="metal") as engine:
        found, in_chunks = logits(engine, IDS), logits(engine, IDS, chunk=3)
        mine, _ = greedy(engine, IDS, 16)
        backend: Any = engine.plan.backend
        fallbacks = engine.record().fallbacks
        assert backend.calls["attention"] > 0
        assert backend.experts.held or name == "tiny_glm_e8"
    assert near(found, expected)
    assert near(in_chunks, expected)
    gap = gap_where_they_part(mine, tokens, gaps)
    with capsys.disabled():
        if mine != tokens:
            print(f"\n{name}: tokens differ; gap of the two logits there on the CPU {gap:.3g}")
    assert mine == tokens or gap < NEAR * float(np.abs(expected).max())
    assert all("e8-iq3-lattice" in cell for cell in fallbacks)
    assert bool(fallbacks) == (name == "tiny_glm_e8")


def test_the_built_in_model_end_to_end() -> None:
    prompt = np.array([3, 14, 15, 92, 65, 35], np.int32)
    with opened(folder(), backend="cpu", context=128) as engine:
        tokens, gaps = greedy(engine, prompt, 24)
    with opened(folder(), backend="metal", context=128) as engine:
        mine, _ = greedy(engine, prompt, 24)
        assert engine.record().fallbacks == {}
        assert engine.record().kernels["metal.attention"] > 0
    gap = gap_where_they_part(mine, tokens, gaps)
    assert mine == tokens or gap < 1e-3, f"tokens differ where the gap is {gap:.3g}"


def test_experts_that_are_streamed() -> None:
    with opened(GLM, backend="cpu") as engine:
        expected = logits(engine, IDS)
    with opened(GLM, backend="metal") as engine:
        backend: Any = engine.plan.backend
        backend.experts.free = lambda: 0
        assert near(logits(engine, IDS, chunk=3), expected)
        assert not backend.experts.held
        assert backend.experts.counters.copied > 4


def test_host_bytes_do_not_change() -> None:
    with opened(GLM, backend="metal") as engine:
        planes = engine.plan.resident_memory

        def digest() -> str:
            sums = hashlib.sha256()
            for plane in planes:
                sums.update(plane.tobytes())
            return sums.hexdigest()

        before = digest()
        logits(engine, IDS, chunk=3)
        assert len(planes) > 10
        assert digest() == before


@pytest.mark.parametrize(("fail_after", "chunk"), [(0, 8), (150, 2)])
def test_calls_that_fail_are_computed_by_the_host(fail_after: int, chunk: int) -> None:
    """With every call failing, what comes out is the CPU's, bit for bit, and the device has done nothing."""
    with opened(GLM, backend="cpu") as engine:
        expected = logits(engine, IDS)
    found, calls = failing(GLM, "metal", fail_after=fail_after, chunk=chunk)
    assert calls == fail_after
    assert near(found, expected)
    assert (found.tobytes() == expected.tobytes()) == (fail_after == 0)


def test_strict_makes_fallbacks_errors() -> None:
    """Where there is no Metal device, strict refuses that first: the backend is asked without the engine."""
    for case in suite.pick(suite.all_cases(), ops=("matmul",), formats=("e8-iq3-lattice",))[:1]:
        device: Any = load_backend(EngineOptions(backend="metal", threads=1, strict=True), lambda text: None)
        with pytest.raises(UnsupportedKernel, match=r"w: metal\.matmul\.e8-iq3-lattice is waived to cpu: .*--strict"):
            Prepared(case).run(device)
    case = suite.pick(suite.all_cases(), ops=("add",))[0]
    options = EngineOptions(backend="metal", threads=1, strict=True, fail_after=0)
    failing: Any = load_backend(options, lambda text: None)
    with pytest.raises(UnsupportedKernel, match=r"metal\.add failed: PICAFLOR_FAIL_AFTER=0.*--strict"):
        Prepared(case).run(failing)
    if not library.on_metal():
        with (
            pytest.raises(UnsupportedConfig, match="MLX has no Metal device here"),
            opened("qwen3_moe_tiny", backend="metal", strict=True),
        ):
            pass


def test_a_disabled_format_goes_to_the_host_or_is_refused() -> None:
    with opened(GLM, backend="cpu") as engine:
        expected = logits(engine, IDS)
    with opened(GLM, backend="metal", disable=("metal.matmul", "metal.expert_ffn")) as engine:
        assert near(logits(engine, IDS), expected)
        assert {cell.split(".")[1] for cell in engine.record().fallbacks} == {"matmul", "expert_ffn"}
    with (
        pytest.raises(UnsupportedKernel, match=r"metal\.attention is refused: disabled"),
        opened(GLM, backend="metal", disable=("metal.attention",)),
    ):
        pass


def test_less_memory_than_the_model_needs() -> None:
    with opened(GLM, backend="metal", vram_bytes=1 << 10) as engine, pytest.raises(OutOfBudget, match="raise --vram"):
        logits(engine, IDS[:1])


def test_mlx_giving_up_hands_over_or_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(GLM, backend="cpu") as engine:
        expected = logits(engine, IDS[:2])
    warnings: list[str] = []
    with opened(GLM, backend="metal", warnings=warnings) as engine:

        def broken(*_: Any) -> Any:
            raise RuntimeError("[eval] the device was\nlost")

        monkeypatch.setattr(Experts, "compute", broken)
        assert logits(engine, IDS[:2]).tobytes() == expected.tobytes()
    told = [line for line in warnings if "MLX says: [eval] the device was lost; calls of metal are used for " in line]
    assert len(told) == 1
    assert told[0].endswith("; cpu does this and all later such calls; to cure: --backend cpu")
    with opened(GLM, backend="metal") as engine:

        def full(*_: Any) -> Any:
            raise RuntimeError("[malloc] Unable to allocate 4096 bytes.")

        monkeypatch.setattr(Experts, "compute", full)
        with pytest.raises(OutOfBudget, match="MLX is out of memory"):
            logits(engine, IDS[:2])


def test_rows_of_several_sequences() -> None:
    with opened(GLM, backend="cpu") as engine:
        first, second = logits(engine, IDS[:2]), logits(engine, IDS[::-1][:3].copy())
    with opened(GLM, backend="metal") as engine:
        texts = [IDS[:2], IDS[::-1][:3].copy()]
        together = engine.runner.step([Work(Sequence(), ids, "all") for ids in texts]).copy()
    assert near(together[:2], first)
    assert near(together[2:], second)
