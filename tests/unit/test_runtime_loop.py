"""Pages, batches and the token loop against a made-up program whose logits are known.

Must not know any backend or family.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from picaflor.backends.api import NO_TOKEN, Batch, Chance, ExpertProvider, Rows
from picaflor.backends.reference import ReferenceBackend
from picaflor.errors import ContextExceeded, NoFiniteLogit, ReadFailed
from picaflor.runtime import generate
from picaflor.runtime.generate import Draw, Generation, SamplingOptions, StopText
from picaflor.runtime.kvcache import PagePool, Sequence
from picaflor.runtime.runner import Runner, Work

VOCABULARY = 50
LOGITS = Rows(VOCABULARY, "f32", None)


class CountingProgram:
    """Says that the next token is (token + position + sequence's first page) mod the vocabulary; keeps its batches."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []
        self.failure: Exception | None = None
        self.logits: NDArray[np.float32] | None = None
        self._out = np.zeros((0, VOCABULARY), np.float32)

    def run(self, batch: Batch, experts: ExpertProvider | None = None) -> None:
        if self.failure is not None:
            raise self.failure
        self.batches.append(batch)
        pages = batch.pages[batch.sequences, 0]
        best = (batch.tokens + batch.positions + pages) % VOCABULARY
        self._out = np.eye(VOCABULARY, dtype=np.float32)[best[batch.outputs]]
        if self.logits is not None:
            self._out = np.broadcast_to(self.logits, self._out.shape)

    def view(self, rows: Rows, count: int) -> NDArray[Any]:
        return self._out[:count]

    def write(self, rows: Rows, values: NDArray[np.float32]) -> None:
        raise AssertionError("nothing is written")

    def seconds(self) -> dict[str, float]:
        return {}


def make_runner(*, pages: int = 8, max_rows: int = 6, max_outputs: int = 4) -> tuple[Runner, CountingProgram]:
    program = CountingProgram()
    pool = PagePool(pages=pages, page_tokens=4)
    return Runner(program, LOGITS, pool, None, max_rows=max_rows, max_outputs=max_outputs), program


def ids(*tokens: int) -> NDArray[np.int32]:
    return np.array(tokens, np.int32)


def test_pages_are_taken_when_needed_and_given_back_when_empty() -> None:
    pool = PagePool(pages=3, page_tokens=4)
    first, second = Sequence(), Sequence()
    pool.reserve(first, 5)
    first.length = 5
    pool.reserve(second, 4)
    second.length = 4
    assert (first.pages, second.pages, pool.free_tokens) == ([0, 1], [2], 0)
    pool.truncate(first, 4)
    assert (first.pages, pool.free_tokens) == ([0], 4)
    pool.reserve(second, 1)
    assert second.pages == [2, 1]
    assert pool.table([first, second]).tolist() == [[0, -1], [2, 1]]
    with pytest.raises(ContextExceeded, match=r"1 more tokens wanted, room for 0 \(--ctx"):
        pool.reserve(first, 1)
    assert first.pages == [0]
    pool.release(second)
    assert pool.free_tokens == 8
    with pytest.raises(ValueError, match="truncate to 5 of 4"):
        pool.truncate(first, 5)


def test_a_step_lays_out_rows_positions_and_outputs_of_several_sequences() -> None:
    runner, program = make_runner()
    first, second = Sequence(), Sequence()
    runner.step([Work(first, ids(10, 11, 12), "none")])
    logits = runner.step([Work(first, ids(13, 14), "all"), Work(second, ids(20, 21), "last")])
    batch = program.batches[-1]
    assert batch.tokens.tolist() == [13, 14, 20, 21]
    assert batch.sequences.tolist() == [0, 0, 1, 1]
    assert batch.positions.tolist() == [3, 4, 0, 1]
    assert batch.outputs.tolist() == [0, 1, 3]
    assert batch.pages.tolist() == [[0, 1], [2, -1]]
    assert logits.argmax(axis=1).tolist() == [13 + 3, 14 + 4, 21 + 1 + 2]
    assert (first.length, second.length) == (5, 2)
    for array in (batch.tokens, batch.sequences, batch.positions, batch.outputs, batch.pages):
        assert array.dtype == np.int32


def test_a_step_that_fails_leaves_sequences_as_they_were() -> None:
    runner, program = make_runner()
    sequence = Sequence()
    runner.step([Work(sequence, ids(1, 2))])
    program.failure = ReadFailed("gone")
    with pytest.raises(ReadFailed):
        runner.step([Work(sequence, ids(3))])
    assert sequence.length == 2
    program.failure = None
    runner.step([Work(sequence, ids(3))])
    assert program.batches[-1].positions.tolist() == [2]


def test_a_step_refuses_more_rows_or_logits_than_there_is_room_for() -> None:
    runner, _ = make_runner()
    with pytest.raises(ValueError, match="1 to 6 rows, got 7"):
        runner.step([Work(Sequence(), ids(*range(7)))])
    with pytest.raises(ValueError, match="1 to 6 rows, got 0"):
        runner.step([Work(Sequence(), ids())])
    with pytest.raises(ValueError, match="at most 4 rows of logits, 5 wanted"):
        runner.step([Work(Sequence(), ids(*range(5)), "all")])


@pytest.mark.parametrize(("chunk", "sizes"), [(None, [6, 4]), (1, [1] * 10), (4, [4, 4, 2]), (99, [6, 4])])
def test_prefill_chunks_and_asks_for_the_last_logits_only(chunk: int | None, sizes: list[int]) -> None:
    runner, program = make_runner()
    seen: list[tuple[int, int]] = []
    logits = runner.prefill(Sequence(), ids(*range(10)), chunk=chunk, progress=lambda *at: seen.append(at))
    assert [len(batch.tokens) for batch in program.batches] == sizes
    assert [len(batch.outputs) for batch in program.batches] == [0] * (len(sizes) - 1) + [1]
    assert logits.argmax(axis=1).tolist() == [18]
    assert seen[-1] == (10, 10)


def test_all_logits_come_in_pieces_that_stay_valid() -> None:
    runner, _ = make_runner()
    pieces = list(runner.all_logits(Sequence(), ids(*range(10))))
    assert [len(piece) for piece in pieces] == [4, 4, 2]
    assert np.concatenate(pieces).argmax(axis=1).tolist() == [2 * n for n in range(10)]


class Letters:
    """Token n is the n-th letter; each is certain one token later, as half characters are."""

    def __init__(self) -> None:
        self._waiting = ""

    def push(self, token: int) -> str:
        out, self._waiting = self._waiting, chr(97 + token % 26)
        return out

    def finish(self) -> str:
        out, self._waiting = self._waiting, ""
        return out


def make_generation(
    options: SamplingOptions,
    *,
    stops: frozenset[int] = frozenset(),
    context: int = 30,
    cancel_after: int = 999,
    draw: Draw | None = None,
) -> Generation:
    runner, program = make_runner()
    return Generation(
        runner,
        Sequence(),
        ids(1, 2),
        options,
        draw=draw or (lambda position: int(runner.draw(ReferenceBackend(), [Chance(0.0, 1.0, 0.0)])[0])),
        decoder=Letters(),
        stop_tokens=stops,
        context=context,
        cancelled=lambda: len(program.batches) > cancel_after,
    )


def greedy(**values: Any) -> SamplingOptions:
    return SamplingOptions(**{"max_tokens": 5, "temperature": 0.0, **values})


def run(generation: Iterator[Any] | Generation) -> str:
    return "".join(piece.text for piece in generation)


def test_tokens_follow_from_the_last_one_and_its_position() -> None:
    generation = make_generation(greedy())
    text = run(generation)
    assert generation.tokens == [3, 5, 8, 12, 17]
    assert text == "dfimr"
    assert generation.finish_reason == "length"
    assert len(generation.clock.steps) == 4


def test_a_stop_token_ends_the_answer_and_is_no_text() -> None:
    generation = make_generation(greedy(), stops=frozenset({12}))
    assert run(generation) == "dfi"
    assert (generation.tokens, generation.finish_reason) == ([3, 5, 8], "stop")


@pytest.mark.parametrize(("stop", "text"), [("im", "df"), ("f", "d"), ("mr", "dfi"), ("zz", "dfimr"), ("rx", "dfimr")])
def test_stop_texts_are_cut_before_their_first_letter(stop: str, text: str) -> None:
    generation = make_generation(greedy(stop=(stop,)))
    assert run(generation) == text
    assert generation.finish_reason == ("length" if text == "dfimr" else "stop")


def test_the_context_and_a_cancel_end_the_answer() -> None:
    full = make_generation(greedy(max_tokens=50), context=5)
    run(full)
    assert (len(full.tokens), full.finish_reason) == (4, "context")
    cut = make_generation(greedy(max_tokens=50), cancel_after=2)
    run(cut)
    assert (len(cut.tokens), cut.finish_reason) == (3, "cancelled")
    never = make_generation(greedy(), cancel_after=-1)
    assert (run(never), never.tokens, never.finish_reason) == ("", [], "cancelled")


@pytest.mark.parametrize("worst", [np.nan, np.inf, -np.inf])
def test_logits_without_a_finite_one_are_an_error_and_one_that_is_enough(worst: float) -> None:
    runner, program = make_runner()
    program.logits = np.full(VOCABULARY, worst, np.float32)
    runner.step([Work(Sequence(), ids(1))])
    chance = Chance(0.0, 1.0, 0.0)
    assert runner.draw(ReferenceBackend(), [chance]) == [NO_TOKEN]
    program.logits[7] = 0.5
    program.logits = np.nan_to_num(program.logits, nan=-1.0, posinf=-1.0, neginf=-1.0)
    runner.step([Work(Sequence(), ids(1))])
    assert runner.draw(ReferenceBackend(), [chance]) == [7]
    with pytest.raises(NoFiniteLogit, match="no logit at position 2 is finite"):
        run(make_generation(greedy(), draw=lambda position: NO_TOKEN))


class Draws(CountingProgram):
    """Draws itself: the token is 10 times the row's number plus the temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.viewed: list[int] = []

    def view(self, rows: Rows, count: int) -> NDArray[Any]:
        self.viewed.append(count)
        return super().view(rows, count)

    def draw(self, rows: Rows, chances: list[Chance]) -> list[int]:
        assert rows is LOGITS
        return [10 * number + int(chance.temperature) for number, chance in enumerate(chances)]


def test_a_program_that_draws_is_asked_and_no_logits_are_fetched() -> None:
    program = Draws()
    runner = Runner(program, LOGITS, PagePool(pages=8, page_tokens=4), None, max_rows=6, max_outputs=4)
    assert runner.draws_there
    assert runner.advance([Work(Sequence(), ids(1)), Work(Sequence(), ids(2, 3))]) == 2
    assert runner.draw(ReferenceBackend(), [Chance(3.0, 1.0, 0.0), Chance(4.0, 1.0, 0.0)]) == [3, 14]
    assert program.viewed == []
    assert runner.step([Work(Sequence(), ids(5))]).argmax() == 7  # token, position 0, page 2
    assert program.viewed == [1]


@pytest.mark.parametrize(("drawing", "steps", "sampling"), [(True, [6.0, 6.0], 5.0), (False, [1.0, 1.0], 15.0)])
def test_where_a_device_draws_a_step_ends_with_its_token(
    monkeypatch: pytest.MonkeyPatch, drawing: bool, steps: list[float], sampling: float
) -> None:
    """A forward pass takes 1 second and a draw 5; the first draw belongs to no step."""
    now = [0.0]
    monkeypatch.setattr(generate, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    program = Draws() if drawing else CountingProgram()
    runner = Runner(program, LOGITS, PagePool(pages=8, page_tokens=4), None, max_rows=6, max_outputs=4)
    forward = program.run

    def timed(batch: Batch, experts: ExpertProvider | None = None) -> None:
        now[0] += 1
        forward(batch, experts)

    def draw(position: int) -> int:
        now[0] += 5
        return runner.draw(ReferenceBackend(), [Chance(float(position) * drawing, 1.0, 0.0)])[0]

    monkeypatch.setattr(program, "run", timed)
    options = greedy(max_tokens=3)
    generation = Generation(
        runner, Sequence(), ids(1, 2), options, draw=draw, decoder=Letters(), stop_tokens=frozenset(), context=30
    )
    run(generation)
    assert generation.tokens == ([2, 3, 4] if drawing else [3, 5, 8])
    assert (generation.clock.prefill_s, generation.clock.steps, generation.clock.sampling_s) == (1.0, steps, sampling)
    assert generation.clock.decode_s == sum(steps)
    if isinstance(program, Draws):
        assert program.viewed == [0]  # waited for the prompt, fetched nothing


def test_where_the_host_draws_the_logits_of_a_step_are_fetched_once() -> None:
    runner, _ = make_runner()
    assert not runner.draws_there
    runner.advance([Work(Sequence(), ids(9)), Work(Sequence(), ids(20))])
    assert runner.draw(ReferenceBackend(), [Chance(0.0, 1.0, 0.0)] * 2) == [9, 21]


@pytest.mark.parametrize("pieces", [["beta gamma"], ["b", "eta ", "gam", "ma"], list("beta gamma")])
def test_nothing_of_a_stop_text_leaks_however_it_is_cut(pieces: list[str]) -> None:
    stop = StopText(("beta gamma", "nothing"))
    out, stopped = "", False
    for piece in ["alpha be ", *pieces, " delta"]:
        if not stopped:
            text, stopped = stop.push(piece)
            out += text
    assert (out, stopped) == ("alpha be ", True)


def test_text_that_only_looked_like_a_stop_is_given_out() -> None:
    stop = StopText(("abc",))
    assert stop.push("xab") == ("x", False)
    assert stop.push("abd") == ("ababd", False)
    assert stop.push("ab") == ("", False)
    assert stop.flush() == "ab"
