"""How much of a matrix a program takes: measured on one NVIDIA H200, right on any device.

Knows shapes and formats; must not know kernels. A tile changes speed and no bit.
"""

from __future__ import annotations

from dataclasses import dataclass

from picaflor.backends.cuda import interpret
from picaflor.backends.cuda.formats import group_of
from picaflor.formats.numeric import ceil_div

_WORDS = ("int8-row", "int4-row", "int4-grouped")
_WORD_GROUPS = (64, 128, 256)


FEW_ROWS = 8192
"""Matrices of fewer rows are cut finer: there are not enough programs else."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows and warps of a program. `groups` > 0: words are read, so many groups a step; `steps` > 0 cover a row, and
    all of it is asked for at once. `even`: groups are whole and fill the steps."""

    rows: int
    warps: int
    groups: int = 0
    steps: int = 0
    even: bool = False


def reads_words(format_name: str, group_size: int, *, aligned: bool) -> bool:
    """Whether rows can be read as words whose groups meet the digits' words."""
    return format_name in _WORDS and aligned and group_of(format_name, group_size) in _WORD_GROUPS


def tile_of(format_name: str, rows: int, cols: int, group_size: int, *, aligned: bool) -> Tile:
    """The tile for one row of activations; `aligned`: rows of codes start at multiples of sixteen bytes."""
    if not reads_words(format_name, group_size, aligned=aligned):
        return Tile(64 if interpret.active() else 16, 4)
    group = group_of(format_name, group_size)
    count = ceil_div(cols, group)
    if interpret.active():
        block, warps, groups, steps = 64, 4, 4, 1 if count <= 4 else 0
    elif rows < FEW_ROWS and count in (32, 64, 96):
        block, warps, groups, steps = 4, 4, 32, count // 32
    else:
        block, warps, groups, steps = 32, 4, 4, 0
    return Tile(block, warps, groups, steps, cols % (group * groups) == 0)
