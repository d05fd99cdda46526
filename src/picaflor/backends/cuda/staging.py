"""Bytes of the host on their way to a device: through pinned memory, on a stream of their own.

Knows addresses, streams and events of torch; must not know what the bytes are. A copy that was sent is complete for
whatever the computing stream is given after `settle`, and never before.
"""

from __future__ import annotations

import ctypes
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import torch

Tensor = Any
RING: Final = 8
"""Pinned buffers; as many copies are under way at once."""
COPIERS: Final = 8
"""Threads that fill pinned buffers, one each: one alone does not keep up with the way to the device."""


@lru_cache(maxsize=1)
def _copiers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(COPIERS, thread_name_prefix="picaflor-send")


def fill_later(target: int, source: int, nbytes: int) -> Future[Any]:
    """Copy host memory to host memory meanwhile. Where this raises, nothing is copied any more."""
    job: Future[Any] = Future()
    try:
        _copiers().submit(_fill, job, target, source, nbytes)
    except BaseException:  # it may wait for a thread all the same
        if not job.cancel():
            see_out(job)
        raise
    return job


def _fill(job: Future[Any], target: int, source: int, nbytes: int) -> None:
    if job.set_running_or_notify_cancel():
        ctypes.memmove(target, source, nbytes)
        job.set_result(None)


def see_out(job: Future[Any]) -> None:
    """Wait until a copy has ended, through any interruption: for a caller that has an error to raise already."""
    while not job.done():
        with suppress(KeyboardInterrupt):
            job.result()


class Sent:
    """A copy on its way; `event` of its stream, None where it was made at once."""

    def __init__(self, event: Any) -> None:
        self._event = event

    def done(self) -> bool:
        """Whether all of it is there."""
        return self._event is None or bool(self._event.query())

    def wait(self) -> None:
        """Until all of it is there."""
        if self._event is not None:
            self._event.synchronize()


@dataclass(frozen=True, slots=True)
class _Job:
    """A pinned buffer that is being filled for a target."""

    taken: Future[Any]
    place: int
    pinned: Tensor
    target: Tensor
    after: Any


class Staging:
    """Copies from host addresses to device memory, in order. On a device that is the host nothing waits for a stream,
    and its buffers are not pinned."""

    def __init__(self, device: Any, nbytes: int) -> None:
        self._real = device.type != "cpu"
        self._device = device
        self.nbytes = nbytes
        self._ring = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._real) for _ in range(RING)]
        self._sent: list[Sent | None] = [None] * RING
        self._next = 0
        self._jobs: deque[_Job] = deque()
        if self._real:
            self._stream = torch.cuda.Stream(device)
            self._stream.wait_stream(torch.cuda.current_stream(device))  # the targets were made there

    def send(self, address: int, nbytes: int, target: Tensor, after: Any) -> None:
        """Begin to copy `nbytes` from a host address, which stays as it is until `taken`, to the uint8 tensor `target`.

        `after`: an event of the computing stream, the last use of what `target` held; None if nobody used it.
        """
        if len(self._jobs) == RING:
            self._pass_on()
        place, self._next = self._next, (self._next + 1) % RING
        before = self._sent[place]
        if before is not None:
            before.wait()
        pinned = self._ring[place][:nbytes]
        taken = fill_later(pinned.data_ptr(), address, nbytes)
        self._jobs.append(_Job(taken, place, pinned, target[:nbytes], after))
        while self._jobs and self._jobs[0].taken.done():
            self._pass_on()

    def _pass_on(self) -> None:
        job = self._jobs[0]
        job.taken.result()
        self._sent[job.place] = self.start(job.pinned, job.target, job.after)
        self._jobs.popleft()

    def taken(self) -> None:
        """Until all sources were copied; they may change when this returns or raises. What was not passed on by then
        is passed on later."""
        try:
            while self._jobs:
                self._pass_on()
        except BaseException:
            for job in self._jobs:
                see_out(job.taken)
            raise

    def start(self, pinned: Tensor, target: Tensor, after: Any) -> Sent:
        """Copy pinned host memory to the uint8 tensor `target` behind the event `after`; both stay as they are until it
        is done. The computing stream does not wait for it."""
        if not self._real:
            target.copy_(pinned)
            return Sent(None)
        if after is not None:
            self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):
            target.copy_(pinned, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
        return Sent(event)

    def settle(self) -> None:
        """Let the computing stream wait for all copies that were sent."""
        self.taken()
        if self._real:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def used(self) -> Any:
        """An event after all that the computing stream was given so far; None where there are no streams."""
        if not self._real:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event
