"""How much of a matrix a program takes: measured on one NVIDIA H200, right on any device.

Knows shapes and formats; must not know kernels. A tile changes speed and no bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from picaflor.backends.cuda import interpret
from picaflor.backends.cuda.formats import group_of
from picaflor.formats.numeric import ceil_div

_WORDS = ("int8-row", "int4-row", "int4-grouped")
_WORD_GROUPS = (64, 128, 256)


FEW_ROWS = 8192
"""Matrices of fewer rows are cut finer: there are not enough programs else."""
SHORT_COLS = 2048
"""Rows up to here are asked for as a whole."""
ROWS_ONE_BY_ONE = 32768
"""Up to so many rows of a matrix times rows of activations, each of the latter is a product of its own."""
SHORT_GROUPS = 32
"""Up to so many groups two are met at a time also in one plane: the start of a row counts."""
ROWS_OF_FLOATS = 8
CACHED_BYTES = 32 << 20
"""Up to so many rows meet a matrix of floats of up to so many bytes (a router) one by one, in small programs: what is
waited for there is a chain of loads."""
_ALL_AT_ONCE = 3  # steps of a row, at most, that are asked for together


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


def _tile(format_name: str, cols: int, group_size: int, block: int, warps: int, groups: int) -> Tile:
    """`groups` of 64 nibbles a step, or fewer of longer ones."""
    group = group_of(format_name, group_size)
    step = max(4, groups * 64 // group // (2 if format_name == "int8-row" else 1))
    steps = ceil_div(ceil_div(cols, group), step)
    at_once = steps if warps == 1 and steps <= _ALL_AT_ONCE else 0
    return Tile(block, warps, step, at_once, cols % (group * step) == 0)


def _plain(format_name: str, group_size: int, *, aligned: bool) -> Tile | None:
    """The tile where codes are read one by one."""
    if reads_words(format_name, group_size, aligned=aligned):
        return None
    return Tile(64 if interpret.active() else 16, 4)


def tile_of(format_name: str, rows: int, cols: int, group_size: int, *, aligned: bool) -> Tile:
    """The tile for one row of activations; `aligned`: rows of codes start at multiples of sixteen bytes."""
    plain = _plain(format_name, group_size, aligned=aligned)
    if plain is not None:
        return plain
    if interpret.active():
        return _tile(format_name, cols, group_size, 64, 4, 4)
    if rows >= FEW_ROWS:
        return _tile(format_name, cols, group_size, 8 if cols <= SHORT_COLS else 4, 1, 16)
    long = SHORT_COLS < cols <= _ALL_AT_ONCE * SHORT_COLS
    return _tile(format_name, cols, group_size, 2 if long else 4, 1, 32)


def tile_of_stack(format_name: str, cols: int, group_size: int, *, aligned: bool) -> Tile:
    """As `tile_of` for the matrices of several experts in one launch."""
    plain = _plain(format_name, group_size, aligned=aligned)
    if plain is not None:
        return plain
    if interpret.active():
        return _tile(format_name, cols, group_size, 64, 1, 4)
    return _tile(format_name, cols, group_size, 64 if cols <= SHORT_COLS else 32, 4, 4)


@dataclass(frozen=True, slots=True)
class ManyTile:
    """Rows of the matrix and of activations of a program, groups of a step, stages of copies under way, warps."""

    rows: int
    columns: int
    unroll: int
    stages: int
    warps: int = 4

    def shared_bytes(self, padded: int, planes: int) -> int:
        """Shared memory that the copies under way take: bytes of codes (one each at most) and digits."""
        return self.stages * self.unroll * padded * (self.rows + self.columns * planes)


def tile_of_many(
    count: int, groups: int, padded: int, planes: int, shared: int, *, rows: int = 1 << 30, room: int = 1
) -> ManyTile:
    """The tile for `count` rows of activations and `rows` of a matrix on a device of `room` processors whose programs
    may have `shared` bytes of shared memory."""
    even = groups % 2 == 0 and (planes == 2 or groups <= SHORT_GROUPS)
    wide = (ManyTile(64, 128, 2, 3),) if even else ()
    if count > 64 and planes < 3 and ceil_div(rows, 64) * ceil_div(count, 128) < 2 * room:
        # One program a processor waits too much: twice as many.
        wide = (ManyTile(64, 64, 2 if planes == 1 and groups % 2 == 0 else 1, 3),)
    tiles = (
        *((*wide, ManyTile(64, 128, 1, 3)) if count > 64 and planes < 3 else ()),
        *((ManyTile(64, 64, 1, 3), ManyTile(64, 64, 1, 2)) if count > 16 else ()),
        *((ManyTile(64, 16, 1, 4),) if count > 8 else ()),
        *((ManyTile(64, 8, 1, 5),) if count <= 8 else ()),
    )
    smallest = ManyTile(32, 16, 1, 2)
    return next((tile for tile in tiles if tile.shared_bytes(padded, planes) <= shared), smallest)


def processors() -> int:
    """Multiprocessors of the current device."""
    if interpret.active():
        return 1
    import torch

    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count)


def shared_limit() -> int:
    """Bytes of shared memory that a program may have on the current device; what is left to it by the compiler's own
    use is an eighth less."""
    if interpret.active():
        return 1 << 20
    import torch

    return _shared_limit(torch.cuda.current_device())


@lru_cache(maxsize=64)
def _shared_limit(device: int) -> int:
    import torch

    found = torch.cuda.get_device_properties(device)
    most = getattr(found, "shared_memory_per_block_optin", 0) or found.shared_memory_per_block
    return int(most) * 7 // 8
