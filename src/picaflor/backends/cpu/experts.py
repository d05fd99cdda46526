"""The routed experts of recorded programs: gathers their layouts and makes the native operation.

Knows layouts and the native operation; must not know families, files or the expert store.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import picaflor._native as _native
from picaflor.backends.api import ExpertLayout, MatrixLayout
from picaflor.formats import REGISTRY

FORMAT_NUMBERS: Final = {name: number for number, name in enumerate(REGISTRY)}


class Experts:
    """Layers are added while recording; `native` hands those since its last call to one native operation."""

    def __init__(self, pool: Any, *, isa: str, planes: int, max_rows: int) -> None:
        self._pool = pool
        self._isa = isa
        self._planes = planes
        self._max_rows = max_rows
        self._added: list[Sequence[ExpertLayout]] = []
        self._hidden = 0
        self._top_k = 0
        self._made: dict[tuple[int, int, int], Any] = {}

    def add_layer(self, layouts: Sequence[ExpertLayout], *, hidden: int, top_k: int, layer: int) -> int:
        """The layer's number among those added since the last `native`. Raises ValueError where shapes do not fit."""
        if self._added and (hidden, top_k) != (self._hidden, self._top_k):
            raise ValueError(f"layer {layer}: {hidden} wide, top {top_k}; others {self._hidden}, top {self._top_k}")
        for number, expert in enumerate(layouts):
            inner = expert.gate.rows
            shapes = [(m.rows, m.cols) for m in (expert.gate, expert.up, expert.down)]
            if shapes != [(inner, hidden), (inner, hidden), (hidden, inner)]:
                raise ValueError(f"layer {layer}, expert {number}: gate, up, down are {shapes} for rows of {hidden}")
        self._hidden, self._top_k = hidden, top_k
        self._added.append(layouts)
        return len(self._added) - 1

    def native(self) -> tuple[Any, list[int]]:
        """The native operation, and in it the numbers of the layers added since the last call.

        Programs with equal sizes share one operation and its buffers: they do not run at the same time.
        """
        inner = max((expert.gate.rows for layouts in self._added for expert in layouts), default=0)
        key = (self._hidden, inner, self._top_k)
        if key not in self._made:
            self._made[key] = _native.ExpertFfn(
                self._pool, self._isa, self._planes, self._hidden, inner, self._max_rows, self._top_k
            )
        ffn = self._made[key]
        numbers = [ffn.add_layer([_expert(layout) for layout in layouts]) for layouts in self._added]
        self._added = []
        return ffn, numbers

    def row_bytes(self) -> int:
        """What a row more or less changes in `workspace_bytes`."""
        return sum(int(ffn.row_bytes) for ffn in self._made.values())

    def limit_rows(self, rows: int) -> None:
        """From now on calls of at most so many rows."""
        for ffn in self._made.values():
            ffn.limit_rows(rows)
        self._max_rows = rows

    def workspace_bytes(self) -> int:
        """Bytes that the operations' buffers can come to."""
        return sum(int(ffn.workspace_bytes) for ffn in self._made.values())


def _expert(layout: ExpertLayout) -> list[tuple[int, int, int, int, tuple[int, ...]]]:
    """(format number, rows, cols, group size, plane offsets in bytes) of gate, up and down."""
    return [_matrix(matrix) for matrix in (layout.gate, layout.up, layout.down)]


def _matrix(matrix: MatrixLayout) -> tuple[int, int, int, int, tuple[int, ...]]:
    number = FORMAT_NUMBERS[matrix.format]
    return (number, matrix.rows, matrix.cols, matrix.group_size, matrix.offsets)
