"""Where an answer ends: the end tokens of both configs and the template's role markers, on the built-in model.

Must not know how a token is computed.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from picaflor.runtime import builtin
from picaflor.runtime.engine import Engine, EngineOptions, SamplingOptions

GREEDY = SamplingOptions(max_tokens=24, temperature=0.0)
PROMPT = "The history of the"


def copy(target: Path, eos: Any, generation_eos: Any) -> Path:
    """The built-in model with other end tokens; None removes the field."""
    shutil.copytree(builtin.folder(), target)
    for name, value in (("config.json", eos), ("generation_config.json", generation_eos)):
        values = json.loads((target / name).read_text())
        values.pop("eos_token_id", None)
        (target / name).write_text(json.dumps(values if value is None else {**values, "eos_token_id": value}))
    return target


def answer(path: Path, *, question: str | None = None, limit: int = 24) -> tuple[list[int], str]:
    """(tokens, why it ended) of a greedy answer."""
    with Engine.open(path, EngineOptions(threads=1)) as engine:
        if question is None:
            ids = engine.tokenizer.encode(PROMPT)
        else:
            assert engine.chat_template is not None
            ids = engine.tokenizer.encode(engine.chat_template.render([{"role": "user", "content": question}]))
        return [piece.token for piece in engine.generate(ids, replace(GREEDY, max_tokens=limit))], engine.finish_reason


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> list[int]:
    """What the model says where nothing ends it."""
    found, reason = answer(copy(tmp_path_factory.mktemp("free") / "m", None, None))
    assert (len(found), reason) == (24, "length")
    return found


def first(tokens: list[int], *numbers: int) -> int:
    """How many tokens come before the first of these."""
    return min(tokens.index(number) for number in numbers)


@pytest.mark.parametrize(
    ("eos", "generation_eos"), [(2, None), (None, 5), ([5], [2]), ([2, 5], None), (None, [7, 3]), (9, [4])]
)
def test_any_end_token_of_either_file_ends_the_answer(
    tmp_path: Path, tokens: list[int], eos: Any, generation_eos: Any
) -> None:
    def at(value: Any) -> Any:
        return [tokens[index] for index in value] if isinstance(value, list) else value and tokens[value]

    path = copy(tmp_path / "m", at(eos), at(generation_eos))
    flat = [
        index for value in (eos, generation_eos) if value for index in (value if isinstance(value, list) else [value])
    ]
    found, reason = answer(path)
    assert found == tokens[: first(tokens, *(tokens[index] for index in flat))]
    assert reason == "stop"


def test_role_markers_end_an_answer_without_any_end_token(tmp_path: Path) -> None:
    path = copy(tmp_path / "m", None, None)
    with Engine.open(path, EngineOptions(threads=1)) as engine:
        user = engine.tokenizer.token_id("<|user|>")
        end = engine.tokenizer.token_id("<|endoftext|>")
        assert user in engine.stops.ids
        assert end not in engine.stops.ids
        assert engine.stop_names == ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
    question = 'What does "rapid" mean?'
    by_eos, reason = answer(builtin.folder(), question=question, limit=80)
    assert (len(by_eos) < 80, reason) == (True, "stop")
    without, reason = answer(path, question=question, limit=80)
    assert without[: len(by_eos) + 1] == [*by_eos, end]
    assert (len(without) < 80, reason) == (True, "stop")


def test_the_built_in_model_names_what_ends_its_answers() -> None:
    with Engine.open(None, EngineOptions(threads=1)) as engine:
        names = engine.stop_names
    assert names[0] == "<|endoftext|>"
    assert {"<|user|>", "<|observation|>"} <= set(names)
    assert "<think>" not in names
