"""Host memory on its way to a device: every byte is there after `settle`, and sources may change after `taken`."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from gpu_support import torch

from picaflor.backends.cuda import staging as staging_module
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


class Interrupted:
    """A copy whose first wait is interrupted; nothing was copied by then."""

    def __init__(self, *words: int) -> None:
        self._words, self._waits = words, 0

    def done(self) -> bool:
        """After the second wait."""
        return self._waits > 1

    def result(self) -> None:
        """Copy."""
        self._waits += 1
        if self._waits == 1:
            raise KeyboardInterrupt
        if self._waits == 2:
            ctypes.memmove(*self._words)


def test_what_was_sent_arrives_though_the_wait_for_it_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller gives the sources up all the same."""
    monkeypatch.setattr(staging_module, "fill_later", Interrupted)
    sources = np.random.default_rng(3).integers(0, 256, (3, 100), dtype=np.uint8)
    given = sources.copy()
    targets = torch.zeros((3, 100), dtype=torch.uint8, device=DEVICE)
    staging = Staging(DEVICE, 100)
    for number in range(3):
        staging.send(given[number].ctypes.data, 100, targets[number], None)
    with pytest.raises(KeyboardInterrupt):
        staging.taken()
    given[:] = 0xEE
    staging.settle()
    assert (targets.cpu().numpy() == sources).all()


@pytest.mark.parametrize("queued", [False, True])
def test_a_copy_that_cannot_be_started_never_happens(queued: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An executor that gets no new thread raises, and may have queued the work for another one all the same."""
    late: list[Any] = []

    class Full:
        def submit(self, *work: Any) -> None:
            late.append(work)
            if queued:
                work[0](*work[1:])
            raise RuntimeError("no thread")

    monkeypatch.setattr(staging_module, "_copiers", Full)
    source, target = np.full(8, 1, np.uint8), np.zeros(8, np.uint8)
    with pytest.raises(RuntimeError, match="no thread"):
        staging_module.fill_later(target.ctypes.data, source.ctypes.data, 8)
    at_the_end = target.copy()
    source[:] = 2
    if not queued:
        late[0][0](*late[0][1:])
    assert (target == at_the_end).all()
