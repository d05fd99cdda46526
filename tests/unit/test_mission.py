"""docs/mission.md: every row is there once, with a known kind of answer, and every test that it names exists."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "mission.md"
LAST_ROW = 174
ROW = re.compile(r"^\| (\d+) \| (.+?) \| (.+) \|$", re.MULTILINE)
NAMED = re.compile(r"`(tests/[a-z0-9_/]+\.(?:py|cpp))(?:::([a-z0-9_]+))?`")
ANSWERS = ("test: `tests/", "structure: ", "open: waits for ", "not run: ")


def rows() -> list[tuple[int, str]]:
    return [(int(number), answer) for number, _, answer in ROW.findall(PAGE.read_text(encoding="utf-8"))]


@cache
def functions(path: Path) -> frozenset[str]:
    return frozenset(n.name for n in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(n, ast.FunctionDef))


def test_every_row_once_in_order() -> None:
    assert [number for number, _ in rows()] == list(range(1, LAST_ROW + 1))


def test_every_answer_is_of_a_known_kind() -> None:
    assert [answer for _, answer in rows() if not answer.startswith(ANSWERS)] == []


def test_every_named_test_exists() -> None:
    named = NAMED.findall(PAGE.read_text(encoding="utf-8"))
    assert len(named) > 50
    missing = []
    for path, function in named:
        if not (ROOT / path).is_file() or (function and function not in functions(ROOT / path)):
            missing.append(f"{path}::{function}")
    assert missing == []


def test_counts_are_those_of_the_rows() -> None:
    kinds = ("test", "structure", "open", "not run")
    said = re.search(r"^Now: (.+)\.$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert said is not None
    counted = ", ".join(f"{sum(answer.startswith(kind + ':') for _, answer in rows())} {kind}" for kind in kinds)
    assert said[1] == counted
