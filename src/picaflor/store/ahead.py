"""Reading ahead: what was expected of the next request, and whether reading it early pays.

Knows keys, copies and durations that it is told; must not know files, memory, policies or clocks.

What is read ahead lies in slots of its own, so it takes no slot from any expert that a policy holds: when it is asked
for, the policy decides about it as about any other read, and the slots change owners. A policy therefore decides the
same with and without it.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection

from picaflor.store.types import Copy, ExpertKey

AHEAD_SLOTS = 4
"""Experts that may be read ahead at once."""
MODES = ("auto", "on", "off")

SETTLE_STEPS = 8
"""Steps before the first trial, while the slots fill."""
ON_STEPS, OFF_STEPS, ROUNDS = 8, 4, 3
"""A trial: so many steps with and without, in turns, so many times."""
REST_STEPS = 1024
"""Steps until the next trial."""


class Switch:
    """Whether to read ahead: in turns with and without, and the better median of the steps' seconds stays in force.

    `mode` auto; on and off are never tried.
    """

    def __init__(self, mode: str) -> None:
        if mode not in MODES:
            raise ValueError(f"prefetch {mode}; accepted: {', '.join(MODES)}")
        self._auto = mode == "auto"
        self.enabled = mode != "off"
        self.gain: float | None = None
        """Part of a step's time that reading ahead saved in the last trial; below 0 it cost so much."""
        self.steps_off = 0
        self._in_force = self.enabled
        self._left = SETTLE_STEPS
        self._rounds = 0
        self._fresh = False
        self._times: dict[bool, list[float]] = {True: [], False: []}

    def __str__(self) -> str:
        if not self._auto:
            return "on" if self.enabled else "off"
        if self.gain is None:
            return "auto: on, not tried yet"
        saved = f"saves {self.gain:.1%}" if self.gain > 0 else f"would cost {-self.gain:.1%}"
        return f"auto: {'on' if self._in_force else 'off'}, {saved} of a step"

    def step(self, seconds: float) -> None:
        """A step of the program took so long, with what `enabled` was in it."""
        self.steps_off += not self.enabled
        if not self._auto:
            return
        if self._rounds and not self._fresh:
            self._times[self.enabled].append(seconds)
        self._fresh = False
        self._left -= 1
        if not self._left:
            self._next()

    def _next(self) -> None:
        """The next window of a trial, or its end."""
        if not self._rounds:  # a trial begins
            self._rounds = 2 * ROUNDS
            self._times = {True: [], False: []}
        else:
            self._rounds -= 1
        if not self._rounds:
            on, off = (statistics.median(self._times[state]) for state in (True, False))
            self.gain = 1.0 - on / off
            self._in_force = on < off
        trying = self._rounds % 2 == 0
        wanted = trying if self._rounds else self._in_force
        self._left = (ON_STEPS if trying else OFF_STEPS) if self._rounds else REST_STEPS
        self._fresh = wanted != self.enabled  # the first step of a window still meets what the one before left
        self.enabled = wanted


class Expected:
    """The copies that were read ahead and not asked for yet, the oldest first."""

    def __init__(self) -> None:
        self.copies: dict[ExpertKey, Copy] = {}
        self.stale: set[ExpertKey] = set()
        """Those that their layer's request did not want: they go when their read has ended."""

    def __contains__(self, key: ExpertKey) -> bool:
        return key in self.copies

    def add(self, copy: Copy) -> None:
        """Its read begins."""
        self.copies[copy.key] = copy

    def remove(self, key: ExpertKey) -> None:
        """It was asked for, or it is gone. Raises KeyError if it is not there."""
        del self.copies[key]
        self.stale.discard(key)

    def unwanted(self, layer: int, wanted: Collection[ExpertKey]) -> list[Copy]:
        """Copies of a layer's experts that its request does not want."""
        return [copy for key, copy in self.copies.items() if key.layer == layer and key not in wanted]
