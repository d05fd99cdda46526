"""What the tests of the Vulkan backend share: a device, which may be a rasteriser on the CPU, and what is equal on it.

Importing this skips the test module, with the reason, where wgpu or an adapter is missing. Must not know kernels.
"""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("wgpu", reason="the Vulkan backend needs wgpu (pip install picaflor[vulkan])")

from picaflor.backends.vulkan.device import Gpu, open_gpu
from picaflor.errors import UnsupportedKernel
from picaflor.formats.base import F32


def _device() -> Gpu:
    try:
        return open_gpu()
    except UnsupportedKernel as error:
        pytest.skip(str(error), allow_module_level=True)


GPU = _device()
SAME_BITS = GPU.fusion != "plain"
"""Whether products and sums are rounded once here: then bits are the CPU's."""


def same(found: F32, expected: F32) -> bool:
    """Equal as bit patterns where the device rounds as the CPU does, else close."""
    if not np.isfinite(found).all() or found.shape != expected.shape:
        return False
    if SAME_BITS:
        return found.tobytes() == expected.tobytes()
    return float(np.abs(found - expected).max()) <= 1e-3 * float(np.abs(expected).max())
