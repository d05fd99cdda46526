"""The small trained GLM model against its stored float references: logits, draft head, tokens, chat rendering.

Needs the model and its references in the folder that PICAFLOR_TEST_DATA names. Must not know how a backend computes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from family_harness import BACKENDS, BackendCase, TestModel

from picaflor.runtime.chat import ChatTemplate
from picaflor.runtime.tokenizer import StopSet, Tokenizer, stop_set

every_backend = pytest.mark.parametrize("case", BACKENDS, ids=str)
FLOAT32_BOUND = 5e-5  # the stored logits are up to 3.5e-5 from a float64 forward
TIE = 1e-4  # a choice between keys or experts nearer than this may fall either way in float32
SHORT = 24


@pytest.fixture(scope="session")
def models(test_data: Path) -> Path:
    """The folder of models."""
    return test_data / "models"


@pytest.fixture(scope="session")
def known(models: Path) -> dict[str, np.ndarray]:
    """Arrays of reference.npz."""
    with np.load(models / "reference" / "reference.npz") as file:
        return {name: file[name] for name in file.files}


@pytest.fixture(scope="session")
def texts(models: Path) -> dict[str, Any]:
    """reference.json."""
    values: dict[str, Any] = json.loads((models / "reference" / "reference.json").read_text())
    return values


@pytest.fixture(scope="session", params=BACKENDS, ids=str)
def opened(request: pytest.FixtureRequest, models: Path) -> tuple[TestModel, BackendCase]:
    """The model on each backend; `strict`, so its config must be known to the last key."""
    case: BackendCase = request.param
    return TestModel(models / "tiny-glm-dsa", case.make(), max_rows=128, pages=400, strict=True), case


@pytest.mark.parametrize("number", range(4))
def test_logits_and_draft_argmax(
    opened: tuple[TestModel, BackendCase], known: dict[str, np.ndarray], number: int
) -> None:
    model, case = opened
    count = SHORT if case.name == "reference" else 128
    ids = known[f"ids{number}"][:count].tolist()
    logits = model.run(ids, sequence=number)
    assert np.abs(logits - known[f"logits{number}"][:count]).max() < FLOAT32_BOUND
    assert model.draft is not None
    following = known[f"next{number}"][:count].tolist()
    model.draft.program.write(model.draft.hidden_in, model.hidden(count).astype(np.float32))
    model.draft.program.run(model.batch(following, 0, number), model.experts)
    drafts = np.array(model.draft.program.view(model.draft.logits, count)).argmax(axis=1)
    assert drafts.tolist() == known[f"mtp_argmax{number}"][:count].tolist()


def test_greedy_continuation(opened: tuple[TestModel, BackendCase], known: dict[str, np.ndarray]) -> None:
    model, case = opened
    count = 6 if case.name == "reference" else 48
    for number in range(1 if case.name == "reference" else 4):
        ids = known[f"ids{number}"].tolist()
        assert model.greedy(ids, count, sequence=10 + number) == known[f"greedy{number}"][:count].tolist()


@pytest.mark.slow
@every_backend
@pytest.mark.parametrize("number", range(3))
def test_long_context_where_selection_acts(models: Path, case: BackendCase, number: int) -> None:
    with np.load(models / "reference" / "reference_long.npz") as file:
        known = {name.removesuffix(str(number)): file[name] for name in file.files if name.endswith(str(number))}
    positions = [int(at) for at in known["pos"] if case.name != "reference" or at < 577]
    model = TestModel(models / "tiny-glm-dsa", case.make(), max_rows=128)
    logits = model.run(known["ids"][: positions[-1] + 1].tolist())
    bound = 2e-6 if case.name == "reference" else FLOAT32_BOUND
    missed = 0
    for index, position in enumerate(positions):
        gap = min(known["index_gap"][: position + 1].min(), known["router_gap"][: position + 1].min())
        error = np.abs(logits[position] - known["logits"][index]).max()
        if error >= bound:
            print(f"position {position}: error {error:.3g}; the smallest gap of a choice up to there is {gap:.3g}")
            assert gap < TIE
            missed += 1
    assert missed <= (0 if case.name == "reference" else len(positions) // 4)


def test_chat_prompts_and_answers(models: Path, texts: dict[str, Any]) -> None:
    tokenizer = Tokenizer.open(models / "tiny-glm-dsa", vocabulary=4096)
    template = ChatTemplate.open(models / "tiny-glm-dsa")
    assert template is not None
    for talk in texts["chat"]:
        prompt = template.render([{"role": "user", "content": talk["prompt"]}])
        assert tokenizer.encode(prompt) == talk["ids"]
        assert tokenizer.decode(talk["greedy_ids"], keep_special=True) == talk["text"]


def test_texts_and_their_continuations(models: Path, known: dict[str, np.ndarray], texts: dict[str, Any]) -> None:
    tokenizer = Tokenizer.open(models / "tiny-glm-dsa", vocabulary=4096)
    for number, snippet in enumerate(texts["snippets"]):
        assert tokenizer.encode(snippet["text"]) == known[f"ids{number}"].tolist()
        assert tokenizer.decode(known[f"greedy{number}"].tolist()) == snippet["greedy_text"]


def test_template_of_the_config_file_is_the_same(models: Path, tmp_path: Path) -> None:
    folder = models / "tiny-glm-dsa"
    (tmp_path / "tokenizer_config.json").write_bytes((folder / "tokenizer_config.json").read_bytes())
    talk = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}, {"role": "assistant", "content": "c"}]
    one, other = ChatTemplate.open(folder), ChatTemplate.open(tmp_path)
    assert one is not None
    assert other is not None
    assert one.render(talk) == other.render(talk)


def test_stops_are_eos_and_role_markers(models: Path) -> None:
    folder = models / "tiny-glm-dsa"
    tokenizer, template = Tokenizer.open(folder), ChatTemplate.open(folder)
    assert template is not None
    config, generation = ({"eos_token_id": 4084}, {"eos_token_id": [4091, 4093]})
    found = stop_set(tokenizer, config, generation, render=template.render_turns, vocabulary=4096)
    assert found == StopSet(eos=(4084, 4091, 4093), roles=(4090, 4091, 4092, 4093))
    assert tokenizer.token_id("<think>") not in found.ids
