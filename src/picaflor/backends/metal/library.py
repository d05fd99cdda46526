"""MLX as this backend uses it: float32 products stay float32, and the device is known by name.

Knows MLX; must not know formats, operations or models. All other modules of the backend take `mx` from here.
"""

from __future__ import annotations

import os
from typing import Any, Final

# Read by MLX when it first multiplies: where there are matrix units it would round float32 inputs to TF32.
os.putenv("MLX_ENABLE_TF32", "0")

import mlx.core
import numpy as np
from numpy.typing import NDArray

mx: Any = mlx.core

Array = Any
"""An array of MLX. They never change: an operation makes a new one."""

CPU_DEVICE: Final = "mlx-cpu"
"""The `isa` of a backend that runs on MLX's CPU device."""
CACHE_BYTES: Final = 256 << 20
"""Freed memory that MLX may keep for later arrays."""


def on_metal() -> bool:
    """Whether MLX has a Metal device."""
    return bool(mx.metal.is_available())


def architecture() -> str:
    """The device's architecture as Metal names it, or CPU_DEVICE."""
    return str(mx.device_info()["architecture"]) if on_metal() else CPU_DEVICE


def working_set() -> int | None:
    """Bytes that Metal recommends as most for one program; None without Metal."""
    return int(mx.device_info()["max_recommended_working_set_size"]) if on_metal() else None


def borrows() -> bool:
    """Whether MLX can use host memory where it lies: tried with one page of zeros."""
    try:
        mx.asarray(np.zeros(1 << 14, np.uint8), copy=False)
    except (ValueError, RuntimeError, AttributeError):
        return False
    return True


def borrowed(values: NDArray[Any]) -> Array:
    """Host memory as an array, without a copy where MLX can.

    Only for arrays that stay referenced as long as they are read: MLX may give the memory of one that nobody holds to a
    result.
    """
    return mx.asarray(values, copy=None) if hasattr(mx, "asarray") else mx.array(values)


def copied(values: NDArray[Any]) -> Array:
    """A copy of a host array."""
    return mx.array(values)


def on_host(values: Array) -> NDArray[Any]:
    """A copy on the host; waits for the device."""
    return np.array(values)
