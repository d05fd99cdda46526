"""What the tests of the metal backend share: MLX's CPU device where there is no Metal, nearness of logits.

Importing this skips the test module, with the reason, where MLX is missing. Must not know how anything is computed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlx.core", reason="the metal backend needs MLX (pip install 'mlx[cpu]' on Linux)")

NEAR = 2e-3
"""Largest difference of a logit, as a part of the largest logit: the CPU stores activations in two digits."""


def near(found: Any, expected: Any) -> bool:
    """Within NEAR."""
    return bool(np.isfinite(found).all()) and float(np.abs(found - expected).max()) <= NEAR * float(
        np.abs(expected).max()
    )
