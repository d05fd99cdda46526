"""What the tests of the GPU backend share: Triton interpreted where there is no GPU, engines, logits, comparisons.

Importing this skips the test module, with the reason, where torch or Triton is missing. Must not know kernels.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU backends need torch (pip install picaflor[cuda])")
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton", reason="the GPU backends need triton (pip install picaflor[cuda])")

from picaflor.formats.base import F32  # noqa: E402
from picaflor.runtime.engine import Engine, EngineOptions  # noqa: E402
from picaflor.runtime.kvcache import Sequence  # noqa: E402
from picaflor.runtime.runner import Work  # noqa: E402

FAMILIES = Path(__file__).parents[1] / "data" / "families"
IDS = np.array([5, 77, 130, 12, 9, 241, 4, 41], np.int32)


@contextmanager
def opened(name: str, *, warnings: list[str] | None = None, **options: Any) -> Iterator[Engine]:
    """A tiny container on a backend."""
    lines = [] if warnings is None else warnings
    chosen = EngineOptions(context=64, threads=1, sequences=4, **options)
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


def cpu_logits(name: str, ids: Any, **options: Any) -> F32:
    """The same on the CPU."""
    with opened(name, backend="cpu", **options) as engine:
        return logits(engine, ids)


def same_bits(a: F32, b: F32) -> bool:
    """Equal as bit patterns, and numbers."""
    return bool(np.isfinite(b).all()) and a.shape == b.shape and a.tobytes() == b.tobytes()
