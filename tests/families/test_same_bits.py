"""Placement, threads, batch, chunks, cache size and instruction set decide speed, never a bit of the logits.

One parametrized test on the built-in model, compared with ==. The prompt is longer than the model's index_topk (512),
so that sparse selection acts; on plain code, which is slow, it is shorter. Must not know how the CPU backend computes.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from picaflor._native import kernel_isas
from picaflor.runtime.engine import Engine, EngineOptions, SamplingOptions
from picaflor.runtime.kvcache import Sequence
from picaflor.runtime.runner import Work

BASE = EngineOptions(context=1024, threads=2, sequences=4)
LONG, SHORT, DECODED = 540, 70, 6
SAMPLING = SamplingOptions(max_tokens=16, temperature=1.0, top_p=0.95, seed=11)

VARIANTS = {
    "threads-1": replace(BASE, threads=1),
    "threads-3": replace(BASE, threads=3),
    "slots-1": replace(BASE, expert_slots=1),
    "slots-5": replace(BASE, expert_slots=5),
    "chunk-1": replace(BASE, prefill_chunk=1),
    "chunk-7": replace(BASE, prefill_chunk=7),
    "chunk-64": replace(BASE, prefill_chunk=64),
    "chunk-256": replace(BASE, prefill_chunk=256),
    "chunk-all": replace(BASE, prefill_chunk=LONG),
    "chunk-all-slots-1": replace(BASE, prefill_chunk=LONG, expert_slots=1),
    "chunk-auto-slots-2": replace(BASE, expert_slots=2),
    "readers-1": replace(BASE, expert_slots=2, read_threads=1),
    "isa-scalar": replace(BASE, isa="scalar"),
    "isa-avx2": replace(BASE, isa="avx2"),
    "isa-avxvnni": replace(BASE, isa="avxvnni"),
    "isa-avx512-base": replace(BASE, isa="avx512-base"),
    "isa-avx512": replace(BASE, isa="avx512"),
    "scalar-slots-1-chunk-7": replace(BASE, isa="scalar", expert_slots=1, prefill_chunk=7, threads=1),
}


def prompt(count: int) -> NDArray[np.int32]:
    """Tokens that look like nothing in particular, the same every time."""
    return np.random.default_rng(3).integers(0, 4084, count).astype(np.int32)


def logits_and_text(options: EngineOptions, count: int) -> tuple[NDArray[np.float32], list[int]]:
    """Logits of the last prompt token and of some decoded ones, then the tokens of a sampled answer."""
    with Engine.open(None, options) as engine:
        ids = prompt(count)
        sequence = Sequence()
        rows = [engine.runner.prefill(sequence, ids, chunk=options.prefill_chunk)[0].copy()]
        for token in prompt(DECODED)[::-1]:
            rows.append(engine.runner.step([Work(sequence, np.array([token], np.int32))])[0].copy())
        engine.plan.pool.release(sequence)
        tokens = [piece.token for piece in engine.generate(ids.tolist(), SAMPLING)]
    return np.array(rows), tokens


@pytest.fixture(scope="module", params=["fast", "standard", "exact"])
def expected(request: pytest.FixtureRequest) -> tuple[str, dict[int, tuple[NDArray[np.float32], list[int]]]]:
    """The precision, and what the base options give for both prompt lengths."""
    options = replace(BASE, precision=request.param)
    return request.param, {count: logits_and_text(options, count) for count in (LONG, SHORT)}


def assert_same_bits(found: NDArray[np.float32], wanted: NDArray[np.float32]) -> None:
    """Equal as bit patterns: NaN and the sign of zero count."""
    assert np.isfinite(wanted).all()
    assert (found.view(np.uint32) == wanted.view(np.uint32)).all()


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_sampled_tokens_have_the_same_bits(
    variant: str, expected: tuple[str, dict[int, tuple[NDArray[np.float32], list[int]]]]
) -> None:
    precision, known = expected
    options = replace(VARIANTS[variant], precision=precision)
    if options.isa not in ("auto", *kernel_isas()):
        pytest.skip(f"this machine has no {options.isa}: {', '.join(kernel_isas())}")
    count = SHORT if options.isa == "scalar" else LONG
    logits, tokens = logits_and_text(options, count)
    assert_same_bits(logits, known[count][0])
    assert tokens == known[count][1]


def test_a_sequence_alone_and_among_four_has_the_same_bits() -> None:
    with Engine.open(None, BASE) as engine:
        texts = [prompt(30 + 11 * number)[:: -1 if number % 2 else 1].copy() for number in range(4)]
        alone = []
        for ids in texts:
            sequence = Sequence()
            first = engine.runner.prefill(sequence, ids)[0].copy()
            second = engine.runner.step([Work(sequence, np.array([5], np.int32))])[0].copy()
            alone.append((first, second))
            engine.plan.pool.release(sequence)
        sequences = [Sequence() for _ in texts]
        together = engine.runner.step([Work(s, ids) for s, ids in zip(sequences, texts, strict=True)]).copy()
        steps = engine.runner.step([Work(s, np.array([5], np.int32)) for s in reversed(sequences)])[::-1].copy()
        for number in range(4):
            assert_same_bits(together[number], alone[number][0])
            assert_same_bits(steps[number], alone[number][1])


def test_fast_is_coarse_says_so_and_is_no_error() -> None:
    """One plane: 50 to 300 times the error of two; one warning, under strict too."""
    exact, standard, fast = (
        logits_and_text(replace(BASE, precision=name), SHORT)[0] for name in ("exact", "standard", "fast")
    )
    scale = np.abs(exact).max()
    coarse = np.abs(fast - exact).max() / scale
    assert 20 * np.abs(standard - exact).max() / scale < coarse < 0.1
    said: list[str] = []
    with Engine.open(None, replace(BASE, precision="fast", strict=True), warn=said.append) as engine:
        assert engine.record().precision == "fast"
    assert [line for line in said if line.startswith("--precision fast: activations in one int8 plane")] == said != []


def test_the_two_precisions_differ_and_agree_in_what_they_say() -> None:
    rows = [logits_and_text(replace(BASE, precision=name), SHORT)[0] for name in ("standard", "exact")]
    difference = np.abs(rows[0] - rows[1]).max()
    assert 0 < difference < 0.05
    assert (rows[0].argmax(axis=1) == rows[1].argmax(axis=1)).all()


def test_an_answer_after_another_reuses_the_cache_and_has_the_same_bits() -> None:
    first, second = prompt(60).tolist(), [*prompt(40).tolist(), 7, 8, 9]
    with Engine.open(None, BASE) as engine:
        fresh = [piece.token for piece in engine.generate(second, SAMPLING)]
    with Engine.open(None, BASE) as engine:
        list(engine.generate(first, SAMPLING))
        reused = [piece.token for piece in engine.generate(second, SAMPLING)]
        assert engine.record().prefill.tokens == len(second) - 40
    assert reused == fresh
