"""How products are cut up for a device: which lanes of a workgroup share a row, and how many rows it computes.

Knows numbers alone; must not know formats, text of kernels or devices. No choice here changes a bit of a result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from picaflor.backends.vulkan.wgsl import LANES
from picaflor.formats.numeric import ceil_div

FLOAT_ROWS: Final = LANES // 16
"""Rows that a workgroup computes where a matrix of it is of floats: sixteen lanes are the chains of one."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """`lanes` share a row; each of the `teams` of a workgroup has `rows` of its own; a lane reads up to `steps` groups
    of inputs before it waits for the first. `twins`: gate and up of an expert are multiplied at once. `spread`: a row
    with more groups is shared by up to so many times `lanes`.
    """

    lanes: int = 32
    rows: int = 4
    teams: int = 1
    steps: int = 3
    twins: bool = True
    spread: int = 1


@dataclass(frozen=True, slots=True)
class Tile:
    """What a workgroup computes: `rows` of each of its matrices, with so many lanes, `share` of which share a row."""

    lanes: int
    rows: int
    share: int


def tile_for(tiling: Tiling, together: int, groups: int, *, floats: bool) -> Tile:
    """The tile of a kernel for `together` rows of x, matrices with so many groups side by side; `floats`: one of them
    is of floats."""
    if floats:
        return Tile(LANES, FLOAT_ROWS, min(tiling.lanes, LANES))
    rounds = ceil_div(groups, tiling.lanes)
    share = tiling.lanes * next(number for number in range(tiling.spread, 0, -1) if rounds % number == 0)
    rows = tiling.rows if together == 1 else min(tiling.rows, 4 if together == 2 else 2)
    rows = min(rows, share // together)  # a lane for each result
    return Tile(share * tiling.teams, rows * tiling.teams, share)
