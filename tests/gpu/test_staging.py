"""Host memory on its way to a device: every byte is there after `settle`, and sources may change after `taken`."""

from __future__ import annotations

import numpy as np
import pytest
from gpu_support import torch

from picaflor.backends.cuda.staging import RING, Staging

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WIDE = 2_654_208


@pytest.mark.parametrize("nbytes", [1, 4097, WIDE])
def test_more_copies_than_buffers_arrive_whole(nbytes: int) -> None:
    count = 2 * RING + 3
    sources = np.random.default_rng(nbytes).integers(0, 256, (count, nbytes), dtype=np.uint8)
    given = sources.copy()
    targets = torch.full((count, nbytes + 64), 0xA5, dtype=torch.uint8, device=DEVICE)
    staging = Staging(DEVICE, nbytes)
    for number in range(count):
        staging.send(given[number].ctypes.data, nbytes, targets[number], staging.used())
    staging.taken()
    given[:] = 0xEE
    staging.settle()
    found = targets.cpu().numpy()
    assert (found[:, :nbytes] == sources).all()
    assert (found[:, nbytes:] == 0xA5).all()


def test_a_copy_of_its_own_is_done_when_it_says_so() -> None:
    staging = Staging(DEVICE, WIDE)
    source = torch.arange(WIDE, dtype=torch.int32).to(torch.uint8)
    pinned = source.pin_memory() if DEVICE.type != "cpu" else source
    target = torch.zeros(WIDE, dtype=torch.uint8, device=DEVICE)
    sent = staging.start(pinned, target, staging.used())
    sent.wait()
    assert sent.done()
    assert (target.cpu() == source).all()
