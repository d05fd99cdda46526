"""How products are cut up for a device: which lanes of a workgroup share a row, and how many rows it computes.

Knows numbers alone; must not know formats, text of kernels or devices. No choice here changes a bit of a result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from picaflor.backends.vulkan.wgsl import LANES

FLOAT_ROWS: Final = LANES // 16
"""Rows that a workgroup computes where a matrix of it is of floats: sixteen lanes are the chains of one."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """`lanes` share a row; each of the `teams` of a workgroup has `rows` of its own; a lane reads up to `steps` groups
    of inputs before it waits for the first. `twins`: gate and up of an expert are multiplied at once.
    """

    lanes: int = 32
    rows: int = 4
    teams: int = 1
    steps: int = 3
    twins: bool = True


@dataclass(frozen=True, slots=True)
class Tile:
    """What a workgroup computes: `rows` of each of its matrices, with so many lanes."""

    lanes: int
    rows: int


def tile_for(tiling: Tiling, together: int, *, floats: bool) -> Tile:
    """The tile of a kernel for `together` rows of x; `floats`: one of its matrices is of floats."""
    if floats:
        return Tile(LANES, FLOAT_ROWS)
    rows = tiling.rows if together == 1 else min(tiling.rows, 4 if together == 2 else 2)
    rows = min(rows, tiling.lanes // together)  # a lane for each result
    return Tile(tiling.lanes * tiling.teams, rows * tiling.teams)
