"""How much of a matrix a program takes: measured on one NVIDIA H200, right on any device.

Knows shapes and formats; must not know kernels. A tile changes speed and no bit.
"""

from __future__ import annotations

from dataclasses import dataclass

from picaflor.backends.cuda import interpret
from picaflor.backends.cuda.formats import group_of

_WORDS = ("int8-row", "int4-row", "int4-grouped")
_WORD_GROUPS = (64, 128, 256)


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows of a program, groups of a step, steps in flight together, warps; `vectors`: words instead of bytes are read;
    `even`: groups are whole and fill the steps."""

    rows: int
    groups: int
    unroll: int
    warps: int
    vectors: bool
    even: bool


def reads_words(format_name: str, group_size: int, *, aligned: bool) -> bool:
    """Whether rows can be read as words whose groups meet the digits' words."""
    return format_name in _WORDS and aligned and group_of(format_name, group_size) in _WORD_GROUPS


def tile_of(format_name: str, cols: int, group_size: int, *, aligned: bool) -> Tile:
    """The tile for one row of activations; `aligned`: rows of codes start at multiples of sixteen bytes."""
    vectors = reads_words(format_name, group_size, aligned=aligned)
    rows, groups, unroll, warps = (64, 2, 1, 4) if interpret.active() else ((16, 4, 1, 4) if vectors else (16, 1, 1, 4))
    group = group_of(format_name, group_size)
    even = group > 0 and cols % group == 0 and (cols // group) % (groups * unroll) == 0
    return Tile(rows, groups, unroll, warps, vectors, even)
