"""How much one launch may compute: a card that draws a display is taken away from who holds it for seconds.

Knows numbers of operations and bytes; must not know kernels. Long work goes in several launches, over rows, keys or
tiles that do not depend on each other, so that a bound changes speed and no bit.
"""

from __future__ import annotations

from typing import Final

from picaflor.formats.numeric import ceil_div

OPERATIONS: Final = 200_000_000_000
"""Of one launch: 40 milliseconds of a card of 5 TFLOP/s."""
BYTES: Final = 4_000_000_000
"""Read and written by one launch: 40 milliseconds of a card of 100 GB/s."""


def pieces(
    count: int, operations: float, nbytes: float = 0.0, *, step: int = 1, most: int | None = None
) -> list[tuple[int, int]]:
    """`count` units, each of so many operations and bytes, cut into ranges (start, stop) that each stay below the
    bounds and have at most `most` units. Starts are multiples of `step`; a piece has one step at least. What fits is
    not cut."""
    share = max(operations / OPERATIONS, nbytes / BYTES)
    fits = count if share * count <= 1.0 else int(1.0 / share)
    units = min(fits, count if most is None else most)
    size = max(1, count if units >= count else max(1, units // step) * step)
    return [(start, min(start + size, count)) for start in range(0, count, size)]


def blocks(start: int, stop: int, size: int) -> int:
    """Programs of `size` units for a piece."""
    return ceil_div(stop - start, size)
