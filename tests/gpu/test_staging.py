"""Host memory on its way to a device: what several threads copy is all there, byte for byte."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch", reason="the GPU backends need torch")

from picaflor.backends.cuda.staging import LEAST_PART, fill


@pytest.mark.parametrize("nbytes", [1, LEAST_PART, LEAST_PART + 1, 4 * LEAST_PART + 3, 2_654_208])
def test_everything_is_copied_and_nothing_beside_it(nbytes: int) -> None:
    source = np.random.default_rng(nbytes).integers(0, 256, nbytes, dtype=np.uint8)
    target = np.full(nbytes + 64, 0xA5, np.uint8)
    fill(target.ctypes.data, source.ctypes.data, nbytes)
    assert (target[:nbytes] == source).all()
    assert (target[nbytes:] == 0xA5).all()
