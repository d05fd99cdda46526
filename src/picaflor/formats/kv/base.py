"""What the element type of a cache page is.

Knows numpy only; must not know attention, pages or devices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class KVFormat:
    """One way to store cached values: `dtype` is a page's numpy type, `bytes_per_value` what one value costs."""

    name: str
    dtype: np.dtype[Any]
    bytes_per_value: float
