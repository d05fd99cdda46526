"""What the tests of the GPU backend share: Triton interpreted where there is no GPU, engines, logits, comparisons.

Importing this skips the test module, with the reason, where torch or Triton is missing. Must not know kernels.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU backends need torch (pip install picaflor[cuda])")
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton", reason="the GPU backends need triton (pip install picaflor[cuda])")

from device_support import IDS, logits, opened  # noqa: E402

from picaflor.formats.base import F32  # noqa: E402

__all__ = ["IDS", "cpu_logits", "logits", "opened", "same_bits", "three_devices", "torch", "two_devices"]


def _needs(count: int) -> pytest.MarkDecorator:
    """Skips where real GPUs are fewer; the interpreter plays any number."""
    few = torch.cuda.is_available() and torch.cuda.device_count() < count
    return pytest.mark.skipif(few, reason=f"this machine has fewer than {count} GPUs")


two_devices, three_devices = _needs(2), _needs(3)


def cpu_logits(name: str, ids: Any, **options: Any) -> F32:
    """The same on the CPU."""
    with opened(name, backend="cpu", **options) as engine:
        return logits(engine, ids)


def same_bits(a: F32, b: F32) -> bool:
    """Equal as bit patterns, and numbers."""
    return bool(np.isfinite(b).all()) and a.shape == b.shape and a.tobytes() == b.tobytes()
