"""What tests of devices share: tiny containers, engines, logits of all tokens, greedy tokens.

Must not know any backend.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from picaflor.formats.base import F32
from picaflor.runtime.engine import Engine, EngineOptions
from picaflor.runtime.kvcache import Sequence
from picaflor.runtime.runner import Work

FAMILIES = Path(__file__).parent / "data" / "families"
IDS = np.array([5, 77, 130, 12, 9, 241, 4, 41], np.int32)
GLM = "tiny_glm_int4g64"
FAIL_NOTICE = "; cpu does this and all later such calls; to cure: unset PICAFLOR_FAIL_AFTER"


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


def greedy(engine: Engine, ids: Any, count: int) -> tuple[list[int], list[float]]:
    """The likeliest tokens behind a prompt, one by one, and the gap of each to the second likeliest, in logits."""
    sequence, tokens, gaps = Sequence(), [], []
    given = np.array(ids, np.int32)
    for _ in range(count):
        row = engine.runner.step([Work(sequence, given, "last")])[-1]
        second, first = np.partition(row, -2)[-2:]
        gaps.append(float(first - second))
        tokens.append(int(np.argmax(row)))
        given = np.array(tokens[-1:], np.int32)
    engine.plan.pool.release(sequence)
    return tokens, gaps


def gap_where_they_part(found: list[int], expected: list[int], gaps: list[float]) -> float:
    """The gap of `expected` at the first token that differs; 0 where all are equal. A near-tie has a small one."""
    assert len(found) == len(expected) == len(gaps)
    return next((gap for a, b, gap in zip(found, expected, gaps, strict=True) if a != b), 0.0)


def failing(name: str, backend: str, *, fail_after: int, chunk: int) -> tuple[F32, int]:
    """Logits where every call of a device after so many fails, and the number of calls that it did: it is told once,
    counted once, and the host computes on."""
    warnings: list[str] = []
    with opened(name, backend=backend, fail_after=fail_after, warnings=warnings) as engine:
        found = logits(engine, IDS, chunk=chunk)
        device: Any = engine.plan.backend
        assert sum(engine.record().fallbacks.values()) == 1
        calls: int = device.calls.total()
    told = [line for line in warnings if "PICAFLOR_FAIL_AFTER" in line]
    assert len(told) == 1
    assert told[0].endswith(FAIL_NOTICE)
    return found, calls
