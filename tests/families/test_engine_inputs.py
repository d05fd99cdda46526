"""What an engine takes: ids of its vocabulary, texts that can fit, and a tokenizer that is part of the memory plan.

Must not know how a token is computed. The model is the built-in one.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from picaflor.errors import BadTemplate, BadTokenizer, ContextExceeded, UsageError
from picaflor.runtime import builtin, plan
from picaflor.runtime.engine import Engine, EngineOptions, SamplingOptions
from picaflor.runtime.tokenizer import Tokenizer

OPTIONS = EngineOptions(threads=1, context=64, sequences=2)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """The built-in model with 64 tokens of context."""
    with Engine.open(None, OPTIONS) as engine:
        yield engine


def prefill(engine: Engine, ids: Any) -> None:
    """The step function without the engine around it."""
    sequence = engine.new_sequence()
    try:
        engine.runner.prefill(sequence, np.asarray(ids))
    finally:
        engine.plan.pool.release(sequence)


CALLS: dict[str, Callable[[Engine, Any], Any]] = {
    "generate": lambda engine, ids: list(engine.generate(ids, SamplingOptions(max_tokens=1))),
    "forward_logits": lambda engine, ids: list(engine.forward_logits(ids)),
    "replayed prompt": lambda engine, ids: engine.decode_replay(ids, [1]),
    "replayed tokens": lambda engine, ids: engine.decode_replay([1], ids),
    "prefill": prefill,
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("bad", [-1, 4096, 1 << 31, 1 << 40, 1.5])
def test_an_id_outside_the_vocabulary_is_named(engine: Engine, call: str, bad: Any) -> None:
    assert engine.vocabulary == 4096
    place = 0 if isinstance(bad, float) and call == "prefill" else 2  # an array has one type for all
    with pytest.raises(
        UsageError, match=rf"token {place} of 4 is .*; accepted: whole numbers from 0 to 4095"
    ) as caught:
        CALLS[call](engine, [1, 4095, bad, 2])
    assert place == 0 or str(bad) in str(caught.value)
    CALLS[call](engine, [1, 4095])


def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded(engine: Engine) -> None:
    with pytest.raises(ContextExceeded, match="4097 characters; a context of 64 tokens takes at most 4096"):
        engine.tokenizer.encode("x" * 4097)


def copy(target: Path) -> Path:
    """The built-in model in a folder of its own."""
    shutil.copytree(builtin.folder(), target)
    return target


def test_the_tokenizer_is_there_before_memory_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            order.append(name)
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(Tokenizer, "open", noted("tokenizer", Tokenizer.open))
    monkeypatch.setattr(plan.ChatTemplate, "open", noted("template", plan.ChatTemplate.open))
    monkeypatch.setattr(plan, "process_memory", noted("memory", plan.process_memory))
    with Engine.open(None, OPTIONS) as engine:
        assert engine.tokenizer.encode("the")
    assert order[:3] == ["tokenizer", "template", "memory"]
    assert order.count("tokenizer") == 1


def test_a_model_without_a_tokenizer_still_computes(tmp_path: Path) -> None:
    folder = copy(tmp_path / "m")
    (folder / "tokenizer.json").unlink()
    with Engine.open(folder, OPTIONS) as engine:
        assert len(engine.decode_replay([1, 2], [3])) == 1
        with pytest.raises(BadTokenizer, match=r"tokenizer\.json is missing"):
            _ = engine.tokenizer


def test_files_that_cannot_be_used_are_refused_when_the_model_is_opened(tmp_path: Path) -> None:
    folder = copy(tmp_path / "m")
    values = json.loads((folder / "tokenizer.json").read_text())
    values["model"]["dropout"] = 0.9
    (folder / "tokenizer.json").write_text(json.dumps(values))
    with pytest.raises(BadTokenizer, match=r"model\.dropout is 0\.9"):
        Engine.open(folder, OPTIONS)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").symlink_to("nowhere")
    with pytest.raises(BadTokenizer, match=r"is a link to nowhere, which does not exist"):
        Engine.open(folder, OPTIONS)
    (folder / "tokenizer.json").unlink()
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    (folder / "chat_template.jinja").symlink_to("nowhere")
    with pytest.raises(BadTemplate, match=r"is a link to nowhere, which does not exist"):
        Engine.open(folder, OPTIONS)
