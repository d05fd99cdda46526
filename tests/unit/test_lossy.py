"""Lossy modes: what they take away exactly, that prompts lose nothing, and that each is named with its damage."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from picaflor import settings
from picaflor.backends.api import Reduction
from picaflor.backends.reduction import reduce_choices
from picaflor.cli.app import run_command_line
from picaflor.runtime import builtin
from picaflor.runtime.engine import Engine, EngineOptions, SamplingOptions
from picaflor.runtime.kvcache import Sequence
from picaflor.runtime.lossy import Lossy
from picaflor.runtime.runner import Work
from picaflor.settings import Settings
from picaflor.telemetry.report import rows as report_rows

IDS = np.random.default_rng(9).integers(0, 4084, 40).astype(np.int32)


def reduced(
    ids: list[list[int]], weights: list[list[float]], rows: list[bool], **modes: object
) -> tuple[list[list[int]], np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
    choice, values = np.array(ids, np.int32), np.array(weights, np.float32)
    reduction = Reduction(np.array(rows), **modes)  # type: ignore[arg-type]
    reduce_choices(choice, values, reduction.rows, 3, reduction)
    return choice.tolist(), values


def test_top_p_keeps_the_smallest_prefix_that_reaches_it() -> None:
    ids = [[5, 2, 9, 1], [4, 3, 2, 1], [8, 7, 6, 5]]
    weights = [[1.0, 0.5, 0.25, 0.25], [0.1, 0.1, 0.1, 1.7], [1.0, 0.5, 0.25, 0.25]]
    found, values = reduced(ids, weights, [True, True, False], top_p=0.75)
    assert found == [[5, 2, -1, -1], [4, 3, 2, 1], [8, 7, 6, 5]]
    assert values.tolist()[0] == pytest.approx([4 / 3, 2 / 3, 0, 0], rel=1e-6)
    assert (values[1:] == np.array(weights, np.float32)[1:]).all()


def test_the_budget_keeps_residents_and_the_heaviest_of_the_others() -> None:
    ids = [[5, 2, 9], [5, 7, 2], [8, 6, 4], [6, 0, 1]]
    weights = [[0.5, 0.3, 0.2], [0.6, 0.3, 0.1], [0.5, 0.3, 0.2], [0.4, 0.3, 0.3]]
    asked: list[int] = []

    def resident(layer: int) -> list[int]:
        asked.append(layer)
        return [9]

    found, values = reduced(ids, weights, [True, True, True, False], loads=1, resident=resident)
    # Wanted and neither resident nor another row's: 5 (1.1), 8 (0.5), 2 (0.4), 7, 4; the third row keeps 6, which a row
    # that loses nothing reads anyway.
    assert found == [[5, -1, 9], [5, -1, -1], [-1, 6, -1], [6, 0, 1]]
    assert asked == [3]
    assert values.sum(axis=1).tolist() == pytest.approx([1.0] * 4, rel=1e-6)
    assert values[0].tolist() == pytest.approx([0.5 / 0.7, 0, 0.2 / 0.7], rel=1e-6)


def test_no_row_is_left_without_an_expert() -> None:
    found, values = reduced([[5, 2]], [[0.5, 0.5]], [True], loads=0)
    assert found == [[5, -1]]
    assert values.tolist() == [[1.0, 0.0]]


def test_the_budget_is_off_and_its_switch_says_that_it_is_an_experiment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Settings().experimental_expert_budget is None
    assert not Lossy().active
    assert [name for name in settings.TABLE if "budget" in name] == ["experimental_expert_budget"]
    for variable in ("EXPERT_BUDGET", "EXPERT_BUDGET_EXPERIMENTAL"):
        monkeypatch.setenv(variable, "1")
    assert settings.load("run", {"compat_env": True}).experimental_expert_budget is None


def logits(options: EngineOptions, *, decoded: bool) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    with Engine.open(None, options) as engine:
        sequence = Sequence()
        rows = [engine.runner.prefill(sequence, IDS[:30]).copy()]
        for token in IDS[30:34]:
            rows.append(engine.runner.step([Work(sequence, np.array([token]), decoded=decoded)]).copy())
        return np.concatenate(rows)


def test_prompts_are_exact_and_decoded_tokens_are_not() -> None:
    exact = logits(EngineOptions(context=128), decoded=True)
    for options in (EngineOptions(context=128, router_top_p=0.6), EngineOptions(context=128, router_top_p=1.0)):
        found = logits(options, decoded=True)
        assert (found[0] == exact[0]).all()
        assert (found[1] == exact[1]).all() == (options.router_top_p == 1.0)
        assert (logits(options, decoded=False) == exact).all()


def test_each_mode_is_named_at_the_start_and_in_the_report() -> None:
    said: list[str] = []
    options = EngineOptions(context=128, router_top_p=0.7, expert_budget=1, expert_slots=2)
    with Engine.open(None, options, warn=said.append) as engine:
        assert any("--router-top-p 0.7 is lossy" in text and "mean KL" in text for text in said)
        assert any("--experimental-expert-budget 1 is lossy" in text and "mean KL" in text for text in said)
        assert list(engine.generate(IDS.tolist(), SamplingOptions(max_tokens=4)))
        record = engine.record()
    named = [text for label, text in report_rows(record) if label == "lossy"]
    assert [text.split(":")[0] for text in named] == ["router top-p 0.7", "expert budget 1 (experimental)"]
    assert not any(text.endswith(" 0.0% of the decoded tokens' experts left out") for text in named)
    assert record.to_json()["lossy"] == named


def test_bench_gives_no_speed_without_a_figure_of_quality(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(builtin.folder())
    arguments = ["bench", "decode", folder, "--router-top-p", "0.6", "--tokens", "8", "--repeats", "1", "--ctx", "64"]
    assert run_command_line(arguments) == 2
    assert "no speed of a lossy mode without a figure of its quality" in capsys.readouterr().err
    text = tmp_path / "text.txt"
    text.write_text("A hummingbird drinks from a flower and flies on. " * 20, encoding="utf-8")
    assert run_command_line([*arguments, "--text", str(text), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["lossy_modes"] == ["router top-p 0.6"]
    assert record["quality"]["mean_kl"] > 0
    assert 0.1 < record["quality"]["dropped"] < 0.9
    earlier = tmp_path / "earlier.json"
    earlier.write_text(json.dumps(record), encoding="utf-8")
    assert run_command_line([*arguments, "--quality-record", str(earlier)]) == 0
    assert "LOSSY, router top-p 0.6: mean KL" in capsys.readouterr().out
    other = [word if word != "0.6" else "0.5" for word in arguments]
    assert run_command_line([*other, "--quality-record", str(earlier)]) == 2
    assert "lossy_modes ['router top-p 0.6']; this run has ['router top-p 0.5']" in capsys.readouterr().err
