"""Held-out likelihood of the trained model: the checkpoint against its reference, the built-in container against it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from picaflor.runtime.evaluate import read_chunks, score_pieces, text_bytes

pytest.importorskip("picaflor._native", reason="the native part of the package is not built")

from picaflor.runtime.engine import Engine, EngineOptions

DOMAINS = ("prose", "code", "docs")


def likelihoods(model: Path | None, texts: Path) -> dict[str, tuple[float, int]]:
    """Mean NLL and tokens scored per domain."""
    found = {}
    with Engine.open(model, EngineOptions(context=1024)) as engine:
        for domain in DOMAINS:
            path = texts / f"{domain}.txt"
            pieces = engine.tokenizer.encode_pieces(read_chunks(path))
            score = score_pieces(engine, pieces, name=domain, nbytes=text_bytes(path))
            found[domain] = (score.mean_nll, score.tokens)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("model", "low", "high"), [("tiny-glm-dsa", -0.001, 0.001), (None, 0.0, 0.13)])
def test_mean_nll_on_text_that_was_not_trained_on(test_data: Path, model: str | None, low: float, high: float) -> None:
    models = test_data / "models"
    reference = json.loads((models / "reference" / "reference.json").read_text())["nll"]
    found = likelihoods(models / model if model is not None else None, models / "heldout")
    for domain in DOMAINS:
        nll, tokens = found[domain]
        assert tokens == reference[domain]["tokens"]
        assert low <= nll - reference[domain]["mean_nll"] <= high, domain
