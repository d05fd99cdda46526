"""Buffers, planes and the batch that is being computed: what steps read and write.

Knows arrays of MLX and batches; must not know operations, formats or models. A buffer holds the array that was written
to it last; nothing is computed before somebody needs the values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from picaflor.backends.api import I32, Batch, ExpertProvider, KVPlane, Rows
from picaflor.backends.batches import Limits, rope_lines
from picaflor.backends.metal.library import Array, copied, mx


@dataclass(slots=True, eq=False)
class Buffer:
    """The handle of Rows. `values` `[rows, width]`: as many rows as were written last."""

    width: int
    kind: str
    values: Array = None

    def read(self, part: Rows, count: int) -> Array:
        """The first `count` rows of the columns of `part`; zeros where nothing was written."""
        values = self._whole(count)
        return values if part.width == self.width else values[:, part.start : part.start + part.width]

    def _whole(self, count: int) -> Array:
        if self.values is None:
            return mx.zeros((count, self.width), self.type)
        missing = count - self.values.shape[0]
        if missing > 0:
            return mx.concatenate([self.values, mx.zeros((missing, self.width), self.type)])
        return self.values[:count] if missing else self.values

    def write(self, part: Rows, values: Array) -> None:
        """Replace the columns of `part` in as many rows as are given; later rows are forgotten."""
        values = values.astype(self.type)
        if part.width != self.width:
            whole = self._whole(values.shape[0])
            stop = part.start + part.width
            values = mx.concatenate([whole[:, : part.start], values, whole[:, stop:]], axis=1)
        self.values = values

    @property
    def type(self) -> Array:
        """The type of the values."""
        return mx.float32 if self.kind == "f32" else mx.int32


@dataclass(slots=True, eq=False)
class Pool:
    """The handle of a KVPlane: float32 `[tokens of all pages, width]`."""

    values: Array

    def write(self, places: I32, values: Array) -> None:
        """Store one row per place."""
        self.values[span(places)] = values

    def read(self, places: I32) -> Array:
        """Rows by place."""
        return self.values[span(places)]


def span(places: I32) -> slice | Array:
    """Places as a slice where they ascend one by one, which costs no copy, else as an array."""
    if len(places) and (np.diff(places) == 1).all():
        return slice(int(places[0]), int(places[-1]) + 1)
    return copied(places)


@dataclass(frozen=True, slots=True)
class Group:
    """Rows of one sequence: which of the space, at which positions, and where the keys up to the last of them lie."""

    rows: I32
    positions: I32
    places: I32


@dataclass(eq=False)
class Space:
    """Rows that a step acts on: all of the batch, or its output rows."""

    batch: Batch
    limits: Limits
    experts: ExpertProvider | None
    _turns: dict[tuple[int, float], tuple[Array, Array]] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """How many."""
        return len(self.batch.tokens)

    @cached_property
    def groups(self) -> list[Group]:
        """By sequence."""
        found = []
        for sequence in np.unique(self.batch.sequences).tolist():
            rows = np.flatnonzero(self.batch.sequences == sequence).astype(np.int32)
            positions = self.batch.positions[rows]
            places = self.limits.places(self.batch, sequence, int(positions.max()) + 1)
            found.append(Group(rows, positions, places))
        return found

    @cached_property
    def own_places(self) -> I32:
        """Where these rows are cached."""
        return self.limits.own_places(self.batch)

    def turns(self, dims: int, theta: float, lines: Callable[[int, float, int], RopeLines]) -> tuple[Array, Array]:
        """cos and sin `[rows, 1, dims / 2]` of these rows."""
        key = (dims, theta)
        if key not in self._turns:
            table = lines(dims, theta, int(self.batch.positions.max()) + 1)
            cos, sin = table.cos[self.batch.positions], table.sin[self.batch.positions]
            self._turns[key] = (copied(cos)[:, None, :], copied(sin)[:, None, :])
        return self._turns[key]


class RopeLines:
    """cos and sin `[positions, dims / 2]` on the host, made as positions are reached."""

    def __init__(self, dims: int, theta: float) -> None:
        self._dims, self._theta = dims, theta
        self.cos = np.zeros((0, dims // 2), np.float32)
        self.sin = np.zeros((0, dims // 2), np.float32)

    def fill(self, positions: int) -> RopeLines:
        """Make the first `positions` lines right."""
        have = len(self.cos)
        if positions > have:
            cos, sin = rope_lines(self._dims, self._theta, have, max(positions, 2 * have, 256))
            self.cos, self.sin = np.concatenate([self.cos, cos]), np.concatenate([self.sin, sin])
        return self


@dataclass(eq=False)
class Frame:
    """One batch: its rows, and its output rows."""

    rows: Space
    outputs: Space
    numbers: I32

    @classmethod
    def of(cls, batch: Batch, limits: Limits, experts: ExpertProvider | None) -> Frame:
        """Check a batch and make its frame. Raises ValueError for one that does not fit."""
        limits.check(batch)
        chosen = batch.outputs
        some = Batch(
            batch.tokens[chosen], batch.sequences[chosen], batch.positions[chosen], batch.pages,
            np.arange(len(chosen), dtype=np.int32),
        )  # fmt: skip
        return cls(Space(batch, limits, experts), Space(some, limits, experts), chosen)


def read(part: Rows, space: Space) -> Array:
    """The rows of a space."""
    buffer: Buffer = part.handle
    return buffer.read(part, space.count)


def write(part: Rows, values: Array) -> None:
    """Write rows."""
    buffer: Buffer = part.handle
    buffer.write(part, values)


def pool(plane: KVPlane) -> Pool:
    """The memory of a plane."""
    memory: Pool = plane.handle
    return memory


def whole(part: Rows) -> Rows:
    """The buffer that a view is of."""
    buffer: Buffer = part.handle
    return Rows(buffer.width, part.dtype, buffer)


Values = NDArray[np.float32] | NDArray[np.int32]
