"""What one, two or three int8 planes of activations cost in quality: each precision beside `exact` on the same text.

Mean negative log-likelihood per token, its change, KL divergence of the next-token distributions and how often another
token would be the likeliest. Must not know how anything is computed. Nothing here depends on the machine's speed.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from picaflor import __version__
from picaflor.runtime.engine import Engine, EngineOptions
from picaflor.runtime.evaluate import find_texts, read_chunks

F64 = NDArray[np.float64]
BASE = "exact"
OTHERS = ("standard", "fast")


def log_probabilities(engine: Engine, ids: NDArray[np.int32]) -> F64:
    """log softmax of every position of a fresh sequence: float64 `[len(ids), vocabulary]`."""
    wide = np.concatenate(list(engine.forward_logits(ids))).astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    wide -= np.log(np.exp(wide).sum(axis=1, keepdims=True))
    return wide


def windows(engine: Engine, text: Path, window: int, limit: int) -> Iterator[NDArray[np.int32]]:
    """Tokens of a text, window + 1 at a time, windows that do not overlap; at most `limit`, spread over the text."""
    ids: list[int] = []
    for piece, _ in engine.tokenizer.encode_pieces(read_chunks(text)):
        ids += piece
    count = (len(ids) - 1) // window
    chosen = np.unique(np.linspace(0, count - 1, min(limit, count)).round().astype(int)) if count else []
    for index in chosen:
        yield np.array(ids[index * window : (index + 1) * window + 1], np.int32)


class Sums:
    """Running sums over positions."""

    def __init__(self) -> None:
        self.tokens = 0
        self.nll = self.base_nll = self.kl = 0.0
        self.other_argmax = 0
        self.largest_kl = 0.0

    def add(self, base: F64, other: F64, targets: NDArray[np.int32]) -> None:
        """One window: log probabilities `[rows, vocabulary]` and the tokens that follow."""
        rows = np.arange(len(targets))
        divergence = (np.exp(base) * (base - other)).sum(axis=1)
        self.tokens += len(targets)
        self.nll -= float(other[rows, targets].sum())
        self.base_nll -= float(base[rows, targets].sum())
        self.kl += float(divergence.sum())
        self.largest_kl = max(self.largest_kl, float(divergence.max()))
        self.other_argmax += int((base.argmax(axis=1) != other.argmax(axis=1)).sum())

    def record(self) -> dict[str, float]:
        """Means per token, in nat."""
        return {
            "tokens": self.tokens,
            "mean_nll": self.nll / self.tokens,
            "nll_change": (self.nll - self.base_nll) / self.tokens,
            "mean_kl": self.kl / self.tokens,
            "largest_kl": self.largest_kl,
            "other_argmax": self.other_argmax / self.tokens,
        }


def measure(model: Path | None, texts: list[Path], *, window: int, limit: int, minutes: float) -> dict[str, object]:
    """The record. Ends early, between windows, when the minutes are over; the counts say what was scored."""
    end = time.monotonic() + 60 * minutes
    sums = {(text.stem, name): Sums() for text in texts for name in OTHERS}
    with ExitStack() as stack:
        engines = {
            name: stack.enter_context(Engine.open(model, EngineOptions(precision=name, context=window)))
            for name in (BASE, *OTHERS)
        }
        parts = [(text, windows(engines[BASE], text, window, limit)) for text in texts]
        while parts and time.monotonic() < end:
            for text, part in list(parts):
                ids = next(part, None)
                if ids is None:
                    parts.remove((text, part))
                    continue
                base = log_probabilities(engines[BASE], ids[:-1])
                for name in OTHERS:
                    sums[text.stem, name].add(base, log_probabilities(engines[name], ids[:-1]), ids[1:])
        model_name = engines[BASE].name
    return {
        "benchmark": "precision cost",
        "picaflor": __version__,
        "model": model_name,
        "window": window,
        "against": BASE,
        "texts": {text.stem: {name: sums[text.stem, name].record() for name in OTHERS} for text in texts},
        "all": {name: total([sums[text.stem, name] for text in texts]).record() for name in OTHERS},
    }


def total(parts: list[Sums]) -> Sums:
    """Sums of all texts."""
    whole = Sums()
    for part in parts:
        whole.tokens += part.tokens
        whole.nll += part.nll
        whole.base_nll += part.base_nll
        whole.kl += part.kl
        whole.other_argmax += part.other_argmax
        whole.largest_kl = max(whole.largest_kl, part.largest_kl)
    return whole


def main() -> None:
    """Measure and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", nargs="?", type=Path, help="a model's directory; without it the built-in one")
    parser.add_argument("--text", type=Path, required=True, help="folder of .txt files, or one file")
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--limit", type=int, default=1_000_000, help="most windows per text, spread over it")
    parser.add_argument("--minutes", type=float, default=60.0)
    words = parser.parse_args()
    result = measure(words.model, find_texts(words.text), window=words.window, limit=words.limit, minutes=words.minutes)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
