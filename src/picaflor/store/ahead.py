"""Reading ahead: what was expected of the next request, and whether reading it early pays.

Knows keys, copies and durations that it is told; must not know files, memory, policies or clocks.

What is read ahead lies in slots of its own, so it takes no slot from any expert that a policy holds: when it is asked
for, the policy decides about it as about any other read, and the slots change owners. A policy therefore decides the
same with and without it.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Collection, Sequence

from picaflor.store.types import Copy, ExpertKey

AHEAD_SLOTS = 4
"""Experts that may be read ahead at once."""
MODES = ("auto", "on", "off")

SETTLE_STEPS = 32
"""Steps before the first trial, while the slots fill."""
WINDOW_STEPS = 4
ROUND = (True, False, False, True)
"""Windows with and without, so ordered that a drift of the times meets both alike."""
ROUNDS = 6
WINDOWS = ROUND * ROUNDS
"""A trial."""
REST_STEPS = 1024
"""Steps until the next trial."""
TIE = 0.01
"""Part by which steps may be longer with it before it counts as slower: a trial is that coarse."""


class Switch:
    """Whether to read ahead: in turns with and without, and what makes steps shorter stays in force.

    Steps differ most by how many experts they need from the disk, which is the same with and without: what each of
    those takes is taken off before steps are compared. `mode` auto; on and off are never tried.
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
        self._window = len(WINDOWS)  # no trial is under way
        self._fresh = False
        self._steps: list[list[tuple[float, int]]] = []  # seconds and experts needed, of each window

    def __str__(self) -> str:
        if not self._auto:
            return "on" if self.enabled else "off"
        if self.gain is None:
            return "auto: on, not tried yet"
        if not self._in_force:
            return f"auto: off, it would cost {-self.gain:.1%} of a step"
        return f"auto: on, saves {max(self.gain, 0.0):.1%} of a step"

    def step(self, seconds: float, needed: int = 0) -> None:
        """A step of the program took so long and needed so many experts from the disk, with what `enabled` was."""
        self.steps_off += not self.enabled
        if not self._auto:
            return
        if self._window < len(WINDOWS) and not self._fresh:
            self._steps[self._window].append((seconds, needed))
        self._fresh = False
        self._left -= 1
        if not self._left:
            self._next()

    def _next(self) -> None:
        """The next window of a trial, or its end."""
        if self._window == len(WINDOWS):  # a trial begins
            self._window = 0
            self._steps = [[] for _ in WINDOWS]
        else:
            self._window += 1
        if self._window == len(WINDOWS):
            self.gain = self._measured()
            self._in_force = self.gain > -TIE
            wanted, self._left = self._in_force, REST_STEPS
        else:
            wanted, self._left = WINDOWS[self._window], WINDOW_STEPS
        self._fresh = wanted != self.enabled  # the first step of a window still meets what the one before left
        self.enabled = wanted

    def _measured(self) -> float:
        """The part of a step that was saved: the mean over rounds, of windows' medians; the best and the worst round
        do not count."""
        steps = list(itertools.chain(*self._steps))
        each, usual = _slope(steps), statistics.median(needed for _, needed in steps)
        medians = [statistics.median(sec - each * (n - usual) for sec, n in window) for window in self._steps]
        gains = []
        for first in range(0, len(WINDOWS), len(ROUND)):
            of_round = list(zip(ROUND, medians[first : first + len(ROUND)], strict=True))
            on, off = (sum(median for state, median in of_round if state is wanted) for wanted in (True, False))
            gains.append(1.0 - on / off)
        return statistics.mean(sorted(gains)[1:-1])


def _slope(steps: Sequence[tuple[float, int]]) -> float:
    """Seconds for one expert more, at least 0: the median over all pairs of steps, which no pause moves."""
    pairs = itertools.combinations(steps, 2)
    slopes = [(b - a) / (more - less) for (a, less), (b, more) in pairs if more != less]
    return max(0.0, statistics.median(slopes)) if slopes else 0.0


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
