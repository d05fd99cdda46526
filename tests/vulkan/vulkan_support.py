"""What the tests of the Vulkan backend share: a device, which may be a rasteriser on the CPU, engines, logits.

Importing this skips the test module, with the reason, where wgpu or an adapter is missing. Must not know kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("wgpu", reason="the Vulkan backend needs wgpu (pip install picaflor[vulkan])")

from picaflor.backends.vulkan.device import Gpu, open_gpu
from picaflor.errors import UnsupportedKernel
from picaflor.formats.base import F32
from picaflor.runtime.engine import Engine, EngineOptions
from picaflor.runtime.kvcache import Sequence
from picaflor.runtime.runner import Work

FAMILIES = Path(__file__).parents[1] / "data" / "families"
IDS = np.array([5, 77, 130, 12, 9, 241, 4, 41], np.int32)
METRIC = 1e-4
"""|delta| / sum |terms| where a device's arithmetic is not the CPU's."""


def _device() -> Gpu:
    try:
        return open_gpu()
    except UnsupportedKernel as error:
        pytest.skip(str(error), allow_module_level=True)


GPU = _device()
SAME_BITS = GPU.fusion != "plain"
"""Whether products and sums are rounded once here: then bits are the CPU's."""


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


def same(found: F32, expected: F32) -> bool:
    """Equal as bit patterns where the device rounds as the CPU does, else close."""
    if not np.isfinite(found).all() or found.shape != expected.shape:
        return False
    if SAME_BITS:
        return found.tobytes() == expected.tobytes()
    return float(np.abs(found - expected).max()) <= 1e-3 * float(np.abs(expected).max())
