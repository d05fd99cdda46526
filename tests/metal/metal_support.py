"""What the tests of the metal backend share: MLX's CPU device where there is no Metal, engines, logits.

Importing this skips the test module, with the reason, where MLX is missing. Must not know how anything is computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlx.core", reason="the metal backend needs MLX (pip install 'mlx[cpu]' on Linux)")

from picaflor.formats.base import F32
from picaflor.runtime.engine import Engine, EngineOptions
from picaflor.runtime.kvcache import Sequence
from picaflor.runtime.runner import Work

FAMILIES = Path(__file__).parents[1] / "data" / "families"
IDS = np.array([5, 77, 130, 12, 9, 241, 4, 41], np.int32)


@contextmanager
def opened(name: str | Path, *, warnings: list[str] | None = None, **options: Any) -> Iterator[Engine]:
    """A container on a backend; `name` of a tiny one, or its path."""
    lines = [] if warnings is None else warnings
    chosen = EngineOptions(**{"context": 64, "threads": 1, "sequences": 4, **options})
    with Engine.open(FAMILIES / name, chosen, warn=lines.append) as engine:
        yield engine


def logits(engine: Engine, ids: Any, *, chunk: int = 64) -> F32:
    """Logits of every token of a fresh sequence, in chunks."""
    sequence = Sequence()
    rows = [
        engine.runner.step([Work(sequence, ids[start : start + chunk], "all")]).copy()
        for start in range(0, len(ids), chunk)
    ]
    engine.plan.pool.release(sequence)
    return np.concatenate(rows)


def greedy(engine: Engine, ids: Any, count: int) -> tuple[list[int], float]:
    """The likeliest tokens behind a prompt, one by one, and the smallest gap to the second likeliest, in logits."""
    sequence, tokens, gap = Sequence(), [], np.inf
    given = np.array(ids, np.int32)
    for _ in range(count):
        row = engine.runner.step([Work(sequence, given, "last")])[-1]
        second, first = np.partition(row, -2)[-2:]
        gap = min(gap, float(first - second))
        tokens.append(int(np.argmax(row)))
        given = np.array(tokens[-1:], np.int32)
    engine.plan.pool.release(sequence)
    return tokens, gap
