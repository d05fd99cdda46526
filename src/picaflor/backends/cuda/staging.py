"""Bytes of the host on their way to a device: through pinned memory, on a stream of their own.

Knows addresses, streams and events of torch; must not know what the bytes are. A copy that was sent is complete for
whatever the computing stream is given after `settle`, and never before.
"""

from __future__ import annotations

import ctypes
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import Any, Final

import numpy as np
import torch

Tensor = Any
RING = 4
"""Pinned buffers; as many copies are under way at once."""
COPIERS: Final = 4
"""Threads that fill a pinned buffer together: one alone does not keep up with the way to the device."""
LEAST_PART: Final = 256 << 10
"""Bytes of a thread's part, at least."""


@lru_cache(maxsize=1)
def _copiers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(COPIERS, thread_name_prefix="picaflor-send")


def fill(target: int, source: int, nbytes: int) -> None:
    """Copy host memory to host memory, large pieces by several threads; all of it is there when this returns."""
    part = max(LEAST_PART, -(-nbytes // COPIERS))
    if nbytes <= part:
        ctypes.memmove(target, source, nbytes)
        return
    starts = range(0, nbytes, part)
    jobs = [
        _copiers().submit(ctypes.memmove, target + start, source + start, min(part, nbytes - start)) for start in starts
    ]
    for job in jobs:
        job.result()


class Sent:
    """A copy on its way; `event` of its stream, None where it was made at once."""

    def __init__(self, event: Any) -> None:
        self._event = event

    def done(self) -> bool:
        """Whether all of it is there."""
        return self._event is None or bool(self._event.query())


def fill_later(target: int, source: int, nbytes: int) -> Future[Any]:
    """Copy host memory to host memory meanwhile."""
    return _copiers().submit(ctypes.memmove, target, source, nbytes)


class Staging:
    """Copies from host addresses to device memory, in order. On a device that is the host they are plain copies."""

    def __init__(self, device: Any, nbytes: int) -> None:
        self._async = device.type != "cpu"
        self._device = device
        self.nbytes = nbytes
        if self._async:
            self._stream = torch.cuda.Stream(device)
            self._stream.wait_stream(torch.cuda.current_stream(device))  # the targets were made there
            self._ring = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(RING)]
            self._sent: list[Any] = [None] * RING
            self._next = 0

    def send(self, address: int, nbytes: int, target: Tensor, after: Any) -> None:
        """Copy `nbytes` from a host address to the uint8 tensor `target`; the source may change when this returns.

        `after`: an event of the computing stream, the last use of what `target` held; None if nobody used it.
        """
        if not self._async:
            source = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
            target[:nbytes].copy_(torch.from_numpy(source))
            return
        place, self._next = self._next, (self._next + 1) % RING
        if self._sent[place] is not None:
            self._sent[place].synchronize()
        pinned = self._ring[place][:nbytes]
        fill(pinned.data_ptr(), address, nbytes)
        if after is not None:
            self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):
            target[:nbytes].copy_(pinned, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
        self._sent[place] = event

    def start(self, pinned: Tensor, target: Tensor, after: Any) -> Sent:
        """Copy pinned host memory to the uint8 tensor `target` behind the event `after`; both stay as they are until it
        is done. The computing stream does not wait for it."""
        if not self._async:
            target.copy_(pinned)
            return Sent(None)
        self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):
            target.copy_(pinned, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
        return Sent(event)

    def settle(self) -> None:
        """Let the computing stream wait for all copies that were sent."""
        if self._async:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def used(self) -> Any:
        """An event after all that the computing stream was given so far; None where there are no streams."""
        if not self._async:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event
