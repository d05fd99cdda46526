"""Perplexity arithmetic against a plain float64 computation, with a made-up logit source."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from picaflor.backends.api import I32
from picaflor.errors import PicaflorError, UsageError
from picaflor.formats.base import F32
from picaflor.runtime import evaluate

VOCABULARY = 37


class FakeModel:
    """Logits that depend on the token and its position in the window; remembers what it was asked."""

    def __init__(self, chunk: int, *, extra: int = 0) -> None:
        self.table = np.random.default_rng(5).normal(0, 4, (VOCABULARY, VOCABULARY)).astype(np.float32)
        self.chunk = chunk
        self.extra = extra
        self.asked: list[list[int]] = []

    def logits(self, ids: I32) -> F32:
        scale = 1 + np.arange(len(ids), dtype=np.float32)[:, None] / 64
        return (self.table[ids] * scale).astype(np.float32)

    def forward_logits(self, ids: I32) -> Iterator[F32]:
        self.asked.append(ids.tolist())
        rows = np.concatenate([self.logits(ids), np.zeros((max(0, self.extra), VOCABULARY), np.float32)])
        rows = rows[: len(ids) + self.extra]
        for start in range(0, len(rows), self.chunk):
            yield rows[start : start + self.chunk]


def expected_nll(model: FakeModel, ids: I32, window: int, windows: int) -> float:
    """Term by term with math.log, as the definition says."""
    total = 0.0
    for index in range(windows):
        start = index * window
        rows = model.logits(ids[start : start + window])
        for place in range(window):
            row = [float(value) for value in rows[place]]
            total += math.log(math.fsum(math.exp(value) for value in row)) - row[ids[start + place + 1]]
    return total / (window * windows)


@pytest.mark.parametrize("chunk", [1, 3, 8, 64])
def test_mean_nll_is_the_definition(chunk: int) -> None:
    ids = np.random.default_rng(1).integers(0, VOCABULARY, 42, dtype=np.int32)
    model = FakeModel(chunk)
    score = evaluate.score_tokens(model, ids, name="x", nbytes=126, window=8)
    assert (score.windows, score.tokens, score.window) == (5, 40, 8)
    assert score.mean_nll == pytest.approx(expected_nll(FakeModel(chunk), ids, 8, 5), rel=1e-12)
    assert score.perplexity == pytest.approx(math.exp(score.mean_nll), rel=1e-15)
    assert score.bytes_per_token == 3.0
    assert model.asked == [ids[k * 8 : k * 8 + 8].tolist() for k in range(5)]


def test_a_window_needs_the_token_after_its_last_one() -> None:
    assert evaluate.window_count(1024, 1024) == 0
    assert evaluate.window_count(1025, 1024) == 1
    assert evaluate.window_count(2048, 1024) == 1
    assert evaluate.window_count(2049, 1024) == 2
    assert evaluate.window_count(0, 1024) == 0
    assert evaluate.window_count(10_000, 1024, 3) == 3


def test_limit_takes_the_first_windows() -> None:
    ids = np.random.default_rng(1).integers(0, VOCABULARY, 42, dtype=np.int32)
    seen: list[tuple[str, int, int]] = []
    score = evaluate.score_tokens(
        FakeModel(8), ids, name="x", nbytes=1, window=8, limit=2, progress=lambda *step: seen.append(step)
    )
    assert score.mean_nll == pytest.approx(expected_nll(FakeModel(8), ids, 8, 2), rel=1e-12)
    assert seen == [("x", 0, 2), ("x", 1, 2), ("x", 2, 2)]


@pytest.mark.parametrize("size", [1, 3, 7, 8, 9, 17, 50])
@pytest.mark.parametrize("limit", [None, 1, 4])
def test_pieces_score_as_the_whole(size: int, limit: int | None) -> None:
    ids = np.random.default_rng(1).integers(0, VOCABULARY, 42, dtype=np.int32)
    whole_model, model = FakeModel(8), FakeModel(8)
    seen: list[tuple[int, int]] = []
    taken: list[int] = []

    def pieces() -> Iterator[tuple[list[int], int]]:
        for start in range(0, 42, size):
            piece = ids[start : start + size].tolist()
            taken.extend(piece)
            yield piece, 3 * len(piece)

    whole = evaluate.score_tokens(whole_model, ids, name="x", nbytes=126, window=8, limit=limit)
    score = evaluate.score_pieces(
        model,
        pieces(),
        name="x",
        nbytes=126,
        window=8,
        limit=limit,
        progress=lambda name, done, total: seen.append((done, total)),
    )
    windows = limit or 5
    assert (score.mean_nll, score.windows, score.bytes_per_token) == (whole.mean_nll, windows, 3.0)
    assert model.asked == whole_model.asked
    assert seen == [(done, windows) for done in range(windows + 1)]
    assert len(taken) == min(42, -(-(8 * windows + 1) // size) * size) or limit is None


def test_large_logits_do_not_overflow_and_are_summed_in_float64() -> None:
    logits = np.array([[1000.0, 1000.0, -1000.0], [0.0, 20.0, 0.0]], np.float32)
    losses = evaluate.negative_log_likelihoods(logits, np.array([0, 1], np.int32))
    assert losses[0] == pytest.approx(math.log(2), rel=1e-15)
    assert losses[1] == pytest.approx(math.log1p(2 * math.exp(-20)), rel=1e-6)  # float32 sums to 0 here


def test_blocks_of_rows_do_not_change_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(2)
    logits = rng.normal(0, 5, (11, VOCABULARY)).astype(np.float32)
    targets = rng.integers(0, VOCABULARY, 11, dtype=np.int32)
    whole = evaluate.negative_log_likelihoods(logits, targets)
    monkeypatch.setattr(evaluate, "_BLOCK_VALUES", 2 * VOCABULARY)
    assert (evaluate.negative_log_likelihoods(logits, targets) == whole).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_refused(bad: float) -> None:
    logits = np.zeros((3, 4), np.float32)
    logits[1, 2] = bad
    with pytest.raises(PicaflorError, match=r"row 1 of 3 has logits that are not finite"):
        evaluate.negative_log_likelihoods(logits, np.zeros(3, np.int32))


@pytest.mark.parametrize("target", [-1, 4])
def test_a_target_outside_the_vocabulary_is_refused(target: int) -> None:
    with pytest.raises(PicaflorError, match="one id below 4"):
        evaluate.negative_log_likelihoods(np.zeros((1, 4), np.float32), np.array([target], np.int32))


@pytest.mark.parametrize("extra", [-1, 1])
def test_a_model_that_gives_another_number_of_rows_is_refused(extra: int) -> None:
    ids = np.zeros(9, np.int32)
    with pytest.raises(PicaflorError, match=rf"logits of {8 + extra} positions or more for 8 tokens"):
        evaluate.score_tokens(FakeModel(8, extra=extra), ids, name="x", nbytes=1, window=8)


def test_a_text_shorter_than_one_window_is_refused() -> None:
    with pytest.raises(PicaflorError, match="short: 8 tokens; one window needs 9"):
        evaluate.score_tokens(FakeModel(8), np.zeros(8, np.int32), name="short", nbytes=1, window=8)


def test_texts_are_the_txt_files_of_a_folder_in_name_order(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "README.md"):
        (tmp_path / name).write_text("x")
    (tmp_path / "c.txt").mkdir()
    assert [path.name for path in evaluate.find_texts(tmp_path)] == ["a.txt", "b.txt"]
    assert evaluate.find_texts(tmp_path / "README.md") == [tmp_path / "README.md"]


def test_missing_or_empty_text_folders_are_usage_errors(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nothing: no such file or folder"):
        evaluate.find_texts(tmp_path / "nothing")
    with pytest.raises(UsageError, match=r"holds no \.txt file"):
        evaluate.find_texts(tmp_path)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 64])
def test_texts_in_chunks_are_the_text_and_name_the_bad_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(evaluate, "_READ_BYTES", size)
    path = tmp_path / "a.txt"
    text = "ä\r\n€b🦜\n"
    path.write_bytes(text.encode())
    assert "".join(evaluate.read_chunks(path)) == text
    assert evaluate.text_bytes(path) == len(text.encode())
    for tail, place in ((b"\xff..", 13), (b"\xe2\x82", 13), (b"\xe2\x82x", 13), (b"xy\xf0\x9fz", 15)):
        path.write_bytes(text.encode() + tail)
        with pytest.raises(UsageError, match=rf"a\.txt: byte {place} is not UTF-8"):
            evaluate.text_bytes(path)
    with pytest.raises(UsageError, match="cannot be read"):
        evaluate.text_bytes(tmp_path / "none.txt")
