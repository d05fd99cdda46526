"""A quick look at a few rows of a batch decides as the full check does, and remembers the same pages."""

from __future__ import annotations

import numpy as np
import pytest

from picaflor.backends import batches
from picaflor.backends.api import Batch
from picaflor.backends.batches import Limits

ROWS, OUTPUTS, PAGES, PAGE_TOKENS = 4, 2, 5, 4


def _verdict(batch: Batch) -> tuple[str, set[int]]:
    limits = Limits(ROWS, OUTPUTS, PAGES, PAGE_TOKENS)
    try:
        limits.check(batch)
    except ValueError as error:
        return str(error), set()
    return "", limits.touched


def _random(rng: np.random.Generator) -> Batch:
    """Mostly right; each part is wrong now and then."""

    def numbers(count: int, below: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
        low, high = (-1, below + 1) if rng.random() < 0.15 else (0, below)
        return rng.integers(low, high, count).astype(np.int32)

    rows, sequences = int(rng.integers(0, 4)), int(rng.integers(1, 3))
    width = int(rng.integers(1, 4))
    pages = numbers(sequences * width, PAGES).reshape(sequences, width)
    odd = int(rng.random() < 0.1)
    outputs = numbers(int(rng.integers(0, 4)), max(rows, 1))
    return Batch(numbers(rows, 9), numbers(rows, sequences), numbers(rows + odd, width * PAGE_TOKENS), pages, outputs)


def test_few_rows_are_judged_as_many_are(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(5)
    cases = [_random(rng) for _ in range(3000)]
    quick = [_verdict(batch) for batch in cases]
    monkeypatch.setattr(batches, "FEW", -1)
    full = [_verdict(batch) for batch in cases]
    assert quick == full
    refused = {text.split(" ")[0] for text, _ in full if text}
    assert {"output", "a", "page", "tokens,"} <= refused
    assert sum(not text for text, _ in full) > 500
