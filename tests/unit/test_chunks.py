"""The chunk of a prompt: what makes the disk read least, what its memory costs, and what happens between layers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from picaflor.errors import OutOfBudget
from picaflor.runtime import chunks
from picaflor.runtime.chunks import ExpertSizes, most_rows, settle
from picaflor.runtime.engine import Engine, EngineOptions, SamplingOptions
from picaflor.runtime.kvcache import Sequence
from picaflor.store.budget import Item, Ledger, Source, fit
from picaflor.store.store import ExpertStore
from picaflor.store.types import ExpertKey

MIB = 1 << 20
PROMPT = np.random.default_rng(5).integers(0, 4084, 300).astype(np.int32)


class Recorder:
    """One MiB of work memory per 64 rows."""

    limited = 0

    def row_bytes(self) -> int:
        return MIB // 64

    def limit_rows(self, rows: int) -> None:
        self.limited = rows


def chosen(ram: int, experts: int, *, wanted: int | None = None, prompt: int = 4096) -> int:
    """The chunk with `ram` MiB for work memory and 4 layers of `experts` experts of 1 MiB, 2 of them per token."""
    layers = range(4)

    def ledger_at(work_bytes: int) -> Ledger:
        sizes = dict.fromkeys(layers, MIB)
        source = Source("--ram", ram * MIB, "given")
        counts = dict.fromkeys(layers, experts)
        return fit([source], [Item("work", work_bytes)], sizes, counts, wanted_slots=wanted, working_slots=2)

    recorder = Recorder()
    sizes = ExpertSizes(dict.fromkeys(layers, experts), dict.fromkeys(layers, MIB), 2)
    rows = settle(recorder, 4096, workspace_bytes=64 * MIB, prompt=prompt, experts=sizes, ledger_at=ledger_at)
    assert recorder.limited == rows
    return rows


def test_where_everything_fits_a_small_chunk_reads_as_little() -> None:
    assert chosen(4000, 64) == 256


def test_where_experts_are_many_the_whole_prompt_is_one_chunk() -> None:
    assert chosen(4000, 4096) == 4096
    assert chosen(4000, 4096, prompt=1000) == 1024


def test_a_chunk_takes_no_memory_that_answers_need_more() -> None:
    # 60 MiB more would hold the last experts: 512 tokens of an answer would read more than the prompt saves.
    assert chosen(4 * 64 + 30, 64) == 256


def test_a_fixed_number_of_slots_leaves_the_rest_to_the_chunk() -> None:
    assert chosen(4000, 64, wanted=16) == 4096
    assert chosen(4 * 16 + 10 + 20, 64, wanted=16) == 1024  # 16 MiB of work memory fit, 32 do not


def test_too_little_memory_is_told_with_the_smallest_chunk() -> None:
    assert chosen(1, 64) == 256


def test_rows_to_record_with() -> None:
    assert most_rows(None, 4096, on_device=False) == 4096
    assert most_rows(None, 100_000, on_device=False) == 8192
    assert most_rows(None, 4096, on_device=True) == 256
    assert most_rows(700, 4096, on_device=False) == 700
    assert most_rows(700, 128, on_device=False) == 128


def test_limited_address_space_is_not_reserved_for_a_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks.resource, "getrlimit", lambda kind: (1 << 30, 1 << 30))
    assert most_rows(None, 4096, on_device=False) == 256


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """The built-in model with 2 of its experts per layer in memory and the chunk left to the plan."""
    with Engine.open(None, EngineOptions(context=1024, expert_slots=2)) as opened:
        yield opened


def test_the_plan_takes_the_whole_context_as_a_chunk_and_charges_for_it(engine: Engine) -> None:
    assert engine.plan.max_rows == 1024
    work = {item.name: item.nbytes for item in engine.plan.ledger.items}["work buffers"]
    with Engine.open(None, EngineOptions(context=1024, expert_slots=2, prefill_chunk=1024)) as wanted:
        same = {item.name: item.nbytes for item in wanted.plan.ledger.items}["work buffers"]
    assert 12 * MIB < same - work < 14 * MIB  # of the logits: 256 rows of them, not 1024
    with Engine.open(None, EngineOptions(context=1024)) as small:
        assert small.plan.max_rows == 256
        assert {item.name: item.nbytes for item in small.plan.ledger.items}["work buffers"] < 0.6 * work


def test_work_memory_stays_within_what_the_ledger_charges(engine: Engine) -> None:
    """A second engine whose buffers were cut down after recording: a full chunk must fit into what is left."""
    with Engine.open(None, EngineOptions(context=1024)) as cut:
        sequence = Sequence()
        whole = cut.runner.prefill(sequence, PROMPT).copy()
        cut.plan.pool.release(sequence)
    sequence = Sequence()
    assert (engine.runner.prefill(sequence, PROMPT).view(np.uint32) == whole.view(np.uint32)).all()
    engine.plan.pool.release(sequence)


def test_a_prompt_reads_each_expert_once(engine: Engine) -> None:
    store = engine.plan.store
    assert store is not None
    layers = [layer for layer in engine.plan.index.experts if layer in engine.plan.ledger.slots]
    sequence = Sequence()
    missing = sum(
        expert.nbytes
        for layer in layers
        for expert in engine.plan.index.experts[layer]
        if expert.expert not in store.resident(layer)
    )
    before = store.counters.total().read_bytes
    engine.runner.prefill(sequence, PROMPT)
    read = store.counters.total().read_bytes - before
    engine.plan.pool.release(sequence)
    assert 0.5 * missing < read <= 1.05 * missing


def test_a_prompt_reads_exactly_what_it_asks_for_and_is_missing() -> None:
    """A quarter of the experts in memory; a prompt that does not ask for all."""
    with Engine.open(None, EngineOptions(context=1024, expert_slots=6)) as quarter:
        store = quarter.plan.store
        assert isinstance(store, ExpertStore)
        quarter.decode_replay(PROMPT[100:104].tolist(), PROMPT[104:120].tolist())  # fills the slots
        asked: list[ExpertKey] = []
        missing: list[ExpertKey] = []

        class Asked:
            def add(self, layer: int, experts: list[int]) -> None:
                asked.extend(ExpertKey(layer, expert) for expert in experts)
                missing.extend(ExpertKey(layer, expert) for expert in set(experts).difference(store.resident(layer)))

        before = store.counters.total()
        store.recorder = Asked()  # type: ignore[assignment]
        sequence = Sequence()
        quarter.runner.prefill(sequence, PROMPT[:6])
        store.recorder = None
        quarter.plan.pool.release(sequence)
        after = store.counters.total()
        assert len(asked) < 0.9 * sum(map(store.files.count, store.files.layers))
        assert after.read_bytes - before.read_bytes == sum(store.files.reads(key).read_nbytes for key in missing)


def test_progress_goes_layer_by_layer(engine: Engine) -> None:
    seen: list[tuple[int, int]] = []
    sequence = Sequence()
    engine.runner.prefill(sequence, PROMPT, chunk=200, progress=lambda done, total: seen.append((done, total)))
    engine.plan.pool.release(sequence)
    layers = len(engine.plan.ledger.slots)
    assert len(seen) == 2 * layers
    assert seen == sorted(seen)
    assert seen[layers - 1] == (200, 300)
    assert seen[-1] == (300, 300)
    assert seen[0] == (200 // layers, 300)


@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_a_prompt_that_was_stopped_between_layers_changes_nothing(
    engine: Engine, error: type[BaseException] | None
) -> None:
    sequence = Sequence()
    wanted = engine.runner.prefill(sequence, PROMPT).copy()
    engine.plan.pool.release(sequence)
    calls = 0

    def stop() -> bool:
        nonlocal calls
        calls += 1
        if calls == 4 and error is not None:
            raise error
        return calls == 4

    engine.runner.prefill(sequence, PROMPT[:100])
    try:
        assert len(engine.runner.prefill(sequence, PROMPT[100:], cancelled=stop)) == 0
        assert error is None
    except KeyboardInterrupt:
        assert error is KeyboardInterrupt
    assert calls == 4
    assert sequence.length == 100
    found = engine.runner.prefill(sequence, PROMPT[100:])
    assert (found.view(np.uint32) == wanted.view(np.uint32)).all()
    engine.plan.pool.release(sequence)


def test_an_answer_that_was_cancelled_in_the_prompt_says_so(engine: Engine) -> None:
    import threading

    cancel = threading.Event()
    cancel.set()
    assert not list(engine.generate(PROMPT.tolist(), SamplingOptions(max_tokens=2), cancel=cancel))
    assert engine.finish_reason == "cancelled"


def test_nothing_is_charged_below_what_one_expert_needs() -> None:
    with pytest.raises(OutOfBudget, match="work buffers"):
        Engine.open(None, EngineOptions(context=1024, ram_bytes=8 * MIB))
