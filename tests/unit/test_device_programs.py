"""Programs of devices: batches that do not fit, and what the host is given when the device fails."""

from __future__ import annotations

import re
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from picaflor.backends.api import Batch, ExpertProvider, Rows
from picaflor.backends.batches import Limits
from picaflor.backends.host import HostTwin
from picaflor.backends.programs import DeviceFailed, DeviceProgram, Guard

BATCH = Batch(
    tokens=np.zeros(1, np.int32),
    sequences=np.zeros(1, np.int32),
    positions=np.zeros(1, np.int32),
    pages=np.zeros((1, 1), np.int32),
    outputs=np.zeros(1, np.int32),
)


class Twin:
    """Notes what the host is asked."""

    def __init__(self) -> None:
        self.active = False
        self.written: list[tuple[Any, int, list[float]]] = []

    def take_over(self, reason: str, pages: set[int]) -> None:
        self.active = True

    def write(self, number: int, rows: Rows, values: NDArray[Any]) -> None:
        self.written.append((rows.handle, rows.start, values.ravel().tolist()))

    def run(self, number: int, batch: Batch, experts: ExpertProvider | None) -> None:
        pass


class Failing(DeviceProgram):
    """A device whose first call fails."""

    def compute(self, batch: Batch, experts: ExpertProvider | None) -> None:
        raise DeviceFailed("matmul", "the device is gone", "none")

    def fetch(self, rows: Rows, count: int) -> NDArray[Any]:
        raise AssertionError("not asked")

    def put(self, rows: Rows, values: NDArray[Any]) -> None:
        pass


def test_all_written_buffers_reach_the_host_that_takes_over() -> None:
    """Two buffers of one width and two parts of one: equal as Rows, or nearly, yet four places."""
    twin = Twin()
    program = Failing((), Limits(4, 4, 1, 4), cast(HostTwin, twin), 0, Guard(lambda op: None, lambda failure: None))
    first, second, third = object(), object(), object()
    rows = [Rows(2, "f32", first), Rows(2, "f32", second), Rows(2, "f32", third), Rows(2, "f32", third, start=2)]
    assert rows[0] == rows[1]
    for place, part in enumerate(rows):
        program.write(part, np.array([[place, place + 0.5]], np.float32))
    program.write(rows[1], np.array([[7.0, 8.0]], np.float32))
    program.run(BATCH)
    assert twin.written == [
        (first, 0, [0.0, 0.5]),
        (second, 0, [7.0, 8.0]),
        (third, 0, [2.0, 2.5]),
        (third, 2, [3.0, 3.5]),
    ]


def batch(sequences: list[int], positions: list[int], pages: list[list[int]], outputs: list[int]) -> Batch:
    """Rows of sequences at positions."""
    numbers = [np.array(values, np.int32) for values in (sequences, positions, outputs)]
    return Batch(np.zeros(len(sequences), np.int32), numbers[0], numbers[1], np.array(pages, np.int32), numbers[2])


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (batch([0] * 5, [0, 1, 2, 3, 4], [[0, 1]], [0]), "a batch of 5 rows, at most 4 fit"),
        (batch([0, 0], [0, 1], [[0]], [0, 1, 1]), "a batch with 3 outputs, at most 2 fit"),
        (batch([0], [0], [[0]], [1]), "output row 1 of a batch of 1 rows"),
        (batch([0, 1], [0, 0], [[0]], [0]), "a row is of sequence 1 of 1"),
        (batch([-1], [0], [[0]], [0]), "a row is of sequence -1 of 1"),
        (batch([0], [-1], [[0]], [0]), "a row is at position -1, the page table has 4 positions"),
        (batch([0], [4], [[0]], [0]), "a row is at position 4, the page table has 4 positions"),
        (batch([0], [12], [[0, 1, 2, 0]], [0]), "a row is at position 12, the page table has 12 positions"),
        (batch([1, 0], [5, 2], [[2, -1], [3, 0]], [0]), "page 3 of sequence 1, there are 3 pages"),
        (batch([1, 0], [5, 2], [[2, -1], [0, -1]], [0]), "page -1 of sequence 1, there are 3 pages"),
        (batch([0, 0], [7, 1], [[0, 3]], [0]), "page 3 of sequence 0, there are 3 pages"),
    ],
)
def test_a_batch_that_does_not_fit(given: Batch, text: str) -> None:
    """Every number that a device uses as an index is looked at before."""
    limits = Limits(max_rows=4, max_outputs=2, pages=3, page_tokens=4)
    with pytest.raises(ValueError, match=rf"^{re.escape(text)}$"):
        limits.check(given)
    assert limits.touched == set()


def test_pages_of_a_batch() -> None:
    """What a table has behind a sequence's last row does not matter, nor do tables of sequences without rows."""
    limits = Limits(max_rows=4, max_outputs=2, pages=3, page_tokens=4)
    given = batch([3, 1, 3], [4, 3, 5], [[9, 9], [2, 9], [-1, -1], [1, 0], [9, 9]], [0])
    limits.check(given)
    assert limits.touched == {0, 2}
    assert limits.tables(given).tolist() == [[9, 9], [2, 9], [-1, -1], [1, 0]]
    limits.check(batch([], [], [[9]], []))
    with pytest.raises(ValueError, match=r"^rows of 5 sequences, at most 4 fit$"):
        limits.tables(batch([4], [0], [[0]] * 5, [0]))
