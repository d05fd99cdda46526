"""One conformance case, and the small tools with which cases drive a backend through its contract.

Knows the backend contract; must not know any concrete backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from picaflor.backends.api import (
    I32,
    Backend,
    Batch,
    ExpertLayout,
    ExpertProvider,
    MatrixLayout,
    Precision,
    Recorder,
    Rows,
    Weight,
)
from picaflor.backends.table import NO_FORMAT
from picaflor.conformance.check import Array, Expected
from picaflor.formats import REGISTRY
from picaflor.formats.base import F32, Planes

PAGE_TOKENS = 16
PAGES = 64
MAX_ROWS = 64
SLACK_BYTES = 64


class Device(Backend, Protocol):
    """A backend with host memory: what `runtime.plan` loads, or a mutant around it."""

    precision: Precision

    def allocate(self, nbytes: int) -> NDArray[np.uint8]:
        """Zeroed memory with 64 more readable bytes behind it."""
        ...


Run = Callable[[Device], list[Array]]
Expect = Callable[[str], list[Expected]]


@dataclass(frozen=True, slots=True, eq=False)
class Matrix:
    """A matrix in stored form; two are the same only if they are one object."""

    format: str
    rows: int
    cols: int
    group_size: int
    planes: Planes

    @property
    def described(self) -> str:
        """Format, shape and group size."""
        size = f" gs {self.group_size}" if self.group_size else ""
        return f"{self.format}{size} [{self.rows}, {self.cols}]"


@dataclass(frozen=True, slots=True)
class Case:
    """A case of one cell. `prepare()` makes data once and gives (run on a device, right outputs for a precision).

    `group_size`: that of its weights, 0 where its format has no choice of one or formats are mixed.
    """

    op: str
    format: str
    name: str
    prepare: Callable[[], tuple[Run, Expect]] = field(repr=False, compare=False)
    full_only: bool = False
    group_size: int = 0

    @property
    def label(self) -> str:
        """As `matmul int8-row: [9, 200] S 3`."""
        kind = self.op if self.format == NO_FORMAT else f"{self.op} {self.format}"
        return f"{kind}: {self.name}"


class Prepared:
    """A case with its data made once and its right outputs made once per precision."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self._pair: tuple[Run, Expect] | None = None
        self._expected: dict[str, list[Expected]] = {}

    def run(self, device: Device) -> list[Array]:
        """The device's outputs."""
        return self._made()[0](device)

    def expected(self, precision: str) -> list[Expected]:
        """The oracle's outputs."""
        if precision not in self._expected:
            with np.errstate(all="ignore"):
                self._expected[precision] = self._made()[1](precision)
        return self._expected[precision]

    def _made(self) -> tuple[Run, Expect]:
        if self._pair is None:
            with np.errstate(all="ignore"):
                self._pair = self.case.prepare()
        return self._pair


def random(label: str) -> np.random.Generator:
    """Random numbers that depend on a case's label alone."""
    return np.random.default_rng(list(label.encode("utf-8")))


def make_matrix(rng: np.random.Generator, format_name: str, rows: int, cols: int, group_size: int = 0) -> Matrix:
    """Nasty planes of a format; for float formats values that a product does not overflow."""
    spec = REGISTRY[format_name]
    if spec.activation.group == 0 and spec.scale.plane == -1 and spec.encode is not None:
        values = rng.standard_normal((rows, cols)) * 10.0 ** rng.integers(-3, 2, size=(rows, 1))
        planes = spec.encode(values.astype(np.float32), group_size)
    else:
        planes = spec.sample(rng, rows, cols, group_size)
    return Matrix(format_name, rows, cols, group_size, planes)


def f32_matrix(values: F32) -> Matrix:
    """A float32 matrix."""
    return Matrix("f32", values.shape[0], values.shape[1], 0, (np.ascontiguousarray(values, np.float32),))


def hold(device: Device, matrix: Matrix, name: str = "w") -> Weight:
    """Put a matrix into the device's memory."""
    planes = []
    for plane in matrix.planes:
        raw = np.ascontiguousarray(plane).reshape(-1).view(np.uint8)
        memory = device.allocate(raw.nbytes)
        memory[:] = raw
        planes.append(memory)
    return device.weight(name, matrix.format, (matrix.rows, matrix.cols), matrix.group_size, planes)


def start(device: Device, rows: int = MAX_ROWS) -> Recorder:
    """A recorder of the size that all cases use, or of one for more rows."""
    most = max(rows, MAX_ROWS)
    return device.recorder(max_rows=most, max_outputs=most, page_tokens=PAGE_TOKENS, pages=PAGES)


def ints(values: Sequence[int] | NDArray[Any]) -> I32:
    """An int32 array."""
    return np.ascontiguousarray(values, dtype=np.int32)


def make_batch(
    positions: Sequence[int],
    *,
    sequences: Sequence[int] | None = None,
    tokens: Sequence[int] | None = None,
    pages: I32 | None = None,
    outputs: Sequence[int] | None = None,
) -> Batch:
    """A batch, by default of one sequence on pages in falling order, with all rows as outputs."""
    count = len(positions)
    return Batch(
        tokens=ints(tokens if tokens is not None else [0] * count),
        sequences=ints(sequences if sequences is not None else [0] * count),
        positions=ints(positions),
        pages=ints(np.arange(PAGES)[::-1][None, :]) if pages is None else ints(pages),
        outputs=ints(range(count) if outputs is None else outputs),
    )


def run_rows(
    device: Device,
    inputs: Mapping[str, Array],
    widths: Mapping[str, int],
    record: Callable[[Recorder, dict[str, Rows]], Sequence[Rows]],
    *,
    batch: Batch | None = None,
    experts: ExpertProvider | None = None,
) -> list[Array]:
    """Record one program over named buffers (inputs and those of `widths`, ids as `i32` where the name ends in
    `_ids`), run it once and copy the outputs that `record` names."""
    count = len(next(iter(inputs.values()))) if batch is None else len(batch.tokens)
    recorder = start(device, count)
    sizes = {**{name: values.shape[1] for name, values in inputs.items()}, **widths}
    buffers = {
        name: recorder.rows(width, dtype="i32" if name.endswith("_ids") else "f32") for name, width in sizes.items()
    }
    outputs = list(record(recorder, buffers))
    program = recorder.finish()
    for name, values in inputs.items():
        program.write(buffers[name], values)
    program.run(batch if batch is not None else make_batch(range(count)), experts)
    return [program.view(rows, count).copy() for rows in outputs]


class Slots:
    """Experts in memory as a store gives them: one slot each, in two parts and falling order of their numbers.

    `experts[layer]` holds (gate, up, down) per expert; planes lie in the order down, gate, up.
    """

    def __init__(self, device: Device, experts: Mapping[int, Sequence[tuple[Matrix, Matrix, Matrix]]]) -> None:
        self._layouts: dict[int, list[ExpertLayout]] = {}
        self._slots: dict[int, list[NDArray[np.uint8]]] = {}
        # As wide as the widest, so that a slot taken for another's, which mutants do, is wrong and not out of bounds.
        widest = max(slot_bytes(member) for members in experts.values() for member in members)
        for layer, members in experts.items():
            pairs = [make_slot(device, member, least=widest) for member in members]
            self._layouts[layer] = [layout for layout, _ in pairs]
            self._slots[layer] = [slot for _, slot in pairs]

    def layouts(self, layer: int) -> list[ExpertLayout]:
        """Where the matrices lie."""
        return self._layouts[layer]

    @contextmanager
    def acquire(self, layer: int, experts: I32) -> Iterator[SlotLease]:
        """Hold experts of a layer."""
        yield SlotLease(self._slots[layer], experts)


@dataclass(frozen=True, slots=True)
class SlotLease:
    """Experts of one layer; see Slots."""

    slots: Sequence[NDArray[np.uint8]]
    experts: I32

    def batches(self) -> Iterator[tuple[I32, NDArray[np.uint64]]]:
        """(numbers, slot addresses) in two parts."""
        numbers = np.sort(self.experts)[::-1].astype(np.int32)
        for part in np.array_split(numbers, 2):
            if len(part):
                yield part, np.array([self.slots[number].ctypes.data for number in part], dtype=np.uint64)


def _places(member: tuple[Matrix, Matrix, Matrix]) -> tuple[dict[str, tuple[int, ...]], int]:
    """Offset of each plane by matrix, at multiples of 64 in the order down, gate, up, and where the last one ends."""
    gate, up, down = member
    offsets: dict[str, tuple[int, ...]] = {}
    end = 0
    for name, matrix in (("down", down), ("gate", gate), ("up", up)):
        starts = []
        for plane in matrix.planes:
            starts.append(end)
            end = -(-(end + plane.nbytes) // 64) * 64
        offsets[name] = tuple(starts)
    return offsets, end


def slot_bytes(member: tuple[Matrix, Matrix, Matrix]) -> int:
    """Bytes of an expert in its slot."""
    return _places(member)[1]


def make_slot(
    device: Device, member: tuple[Matrix, Matrix, Matrix], *, least: int = 0
) -> tuple[ExpertLayout, NDArray[np.uint8]]:
    """One slot with three matrices, each plane at a multiple of 64 bytes; at least `least` bytes."""
    gate, up, down = member
    offsets, end = _places(member)
    slot = device.allocate(max(end, least))
    layouts = {}
    for name, matrix in (("down", down), ("gate", gate), ("up", up)):
        for plane, offset in zip(matrix.planes, offsets[name], strict=True):
            raw = np.ascontiguousarray(plane).reshape(-1).view(np.uint8)
            slot[offset : offset + raw.nbytes] = raw
        layouts[name] = MatrixLayout(matrix.format, matrix.rows, matrix.cols, matrix.group_size, offsets[name])
    return ExpertLayout(layouts["gate"], layouts["up"], layouts["down"], end), slot
