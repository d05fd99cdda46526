"""Which layers of a model go to which of several devices: ranges in order, so that each device is pressed as hard.

Knows bytes and layer numbers; must not know devices, models or files.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from picaflor.errors import OutOfBudget
from picaflor.sizes import format_bytes

FITS: Final = 0.9
"""Bytes of experts per byte left for them up to which all fit, slots being a little wider than experts: less is no
better then, and devices are filled alike instead."""
Cost = tuple[float, float, float]
"""Experts' bytes per byte left for them and all bytes per free byte, both of the device where it is highest; the sum of
the squares of the latter, which is lowest where all are pressed alike."""
_NONE: Final[Cost] = (0.0, 0.0, 0.0)
_NEVER: Final[Cost] = (math.inf, math.inf, math.inf)


@dataclass(frozen=True, slots=True)
class LayerNeeds:
    """Bytes of one layer: `fixed` (matrices, pages of the cache) must lie on its device, of `experts` what fits."""

    fixed: int
    experts: int = 0


def spread(layers: Sequence[LayerNeeds], rooms: Sequence[int], *, first: int = 0, last: int = 0) -> tuple[range, ...]:
    """Layers of each device, by place in `layers`; an empty range is that of a device that is better left out.

    `rooms`: free bytes of each device. The device of the first layer also holds `first` bytes, that of the last layer
    `last`. The highest pressure of any device is as low as it can be: bytes of experts per byte that is left for them,
    as far as not all fit; among equal ones, bytes of all kinds per free byte, and the evener ranges. Raises OutOfBudget
    where what is fixed fits in no way.
    """
    if not layers or not rooms:
        raise ValueError(f"{len(layers)} layers for {len(rooms)} devices")
    count = len(layers)
    fixed = [0, *accumulate(layer.fixed for layer in layers)]
    experts = [0, *accumulate(layer.experts for layer in layers)]

    def cost(start: int, stop: int, room: int) -> Cost:
        if start == stop:
            return _NONE
        held = fixed[stop] - fixed[start] + first * (start == 0) + last * (stop == count)
        wanted = experts[stop] - experts[start]
        if held > room or (wanted and held == room):
            return _NEVER
        part = (held + wanted) / room if room else 0.0
        return max(FITS, wanted / (room - held)) if wanted else 0.0, part, part * part

    best: list[Cost] = [_NONE] + [_NEVER] * count  # of the devices so far, by layers that they have
    chosen: list[list[int]] = []
    for room in rooms:
        found = [_best(best, [cost(start, stop, room) for start in range(stop + 1)]) for stop in range(count + 1)]
        chosen.append([start for start, _ in found])
        best = [worst for _, worst in found]
    if best[count] == _NEVER:
        raise OutOfBudget(_too_much(fixed[count] + first + last, rooms))
    ranges: list[range] = []
    stop = count
    for starts in reversed(chosen):
        ranges.append(range(starts[stop], stop))
        stop = starts[stop]
    return tuple(reversed(ranges))


def _best(before: Sequence[Cost], here: Sequence[Cost]) -> tuple[int, Cost]:
    """Where a device's range begins best, and the worst cost of all devices then; the last of equal ones."""
    worst = [(max(a[0], b[0]), max(a[1], b[1]), a[2] + b[2]) for a, b in zip(before, here, strict=False)]
    start = min(range(len(worst)), key=lambda start: (worst[start], -start))
    return start, worst[start]


def _too_much(fixed: int, rooms: Sequence[int]) -> str:
    free = ", ".join(format_bytes(room) for room in rooms)
    return (
        f"{format_bytes(fixed)} of matrices and cache do not fit the devices by whole layers, {free} may be used: "
        "lower --ctx, raise --vram or name more devices with --device"
    )
