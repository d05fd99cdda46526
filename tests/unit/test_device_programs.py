"""Programs of devices: what the host is given when the device fails, for buffers that look alike."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
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
