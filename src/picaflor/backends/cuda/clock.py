"""Seconds by class of work on a device: marks in its stream where the class changes, read when it has come that far.

Knows events of torch and class names; must not know steps or programs.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch


class Clock:
    """`captured`: marks are made while a graph is captured, and read after it was replayed."""

    def __init__(self, device: Any, *, captured: bool = False) -> None:
        self._real = device.type != "cpu"
        self._captured = captured
        self._marks: list[tuple[str, Any]] = []

    def mark(self, kind: str) -> None:
        """What follows is of this class; "" for nothing that counts."""
        if not self._marks or self._marks[-1][0] != kind:
            self._marks.append((kind, self._now()))

    def _now(self) -> Any:
        if not self._real:
            return time.perf_counter()
        words = {"external": True} if self._captured else {}
        event = torch.cuda.Event(enable_timing=True, **words)
        event.record()
        return event

    def take(self) -> Mapping[str, float]:
        """Seconds of each class so far; waits for the device to pass the last mark. Marks begin anew."""
        marks, self._marks = self._marks, []
        found: dict[str, float] = {}
        if marks and self._real:
            marks[-1][1].synchronize()
        for (kind, start), (_, end) in pairwise(marks):
            if kind:
                seconds = start.elapsed_time(end) * 1e-3 if self._real else end - start
                found[kind] = found.get(kind, 0.0) + seconds
        return found


@lru_cache(maxsize=1)
def works_in_graphs() -> bool:
    """Whether marks in a captured graph can be read: tried once, on a graph of two small steps."""
    values = torch.zeros(16, device="cuda")
    graph, clock = torch.cuda.CUDAGraph(), Clock(values.device, captured=True)
    try:
        with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
            clock.mark("first")
            values += 1
            clock.mark("second")
            values += 1
            clock.mark("")
        graph.replay()
        found = clock.take()
    except (RuntimeError, TypeError, ValueError):
        return False
    return set(found) == {"first", "second"} and min(found.values()) >= 0.0
