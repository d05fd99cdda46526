"""Bytes of the host on their way to a device: through pinned memory, on a stream of their own.

Knows addresses, streams and events of torch; must not know what the bytes are. A copy that was sent is complete for
whatever the computing stream is given after `settle`, and never before.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch

Tensor = Any
RING = 4
"""Pinned buffers; as many copies are under way at once."""


class Staging:
    """Copies from host addresses to device memory, in order. On a device that is the host they are plain copies."""

    def __init__(self, device: Any, nbytes: int) -> None:
        self._async = device.type != "cpu"
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
        source = torch.from_numpy(np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address)))
        if not self._async:
            target[:nbytes].copy_(source)
            return
        place, self._next = self._next, (self._next + 1) % RING
        if self._sent[place] is not None:
            self._sent[place].synchronize()
        pinned = self._ring[place][:nbytes]
        pinned.copy_(source)
        if after is not None:
            self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):
            target[:nbytes].copy_(pinned, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
        self._sent[place] = event

    def settle(self) -> None:
        """Let the computing stream wait for all copies that were sent."""
        if self._async:
            torch.cuda.current_stream().wait_stream(self._stream)

    def used(self) -> Any:
        """An event after all that the computing stream was given so far; None where there are no streams."""
        if not self._async:
            return None
        event = torch.cuda.Event()
        event.record()
        return event
