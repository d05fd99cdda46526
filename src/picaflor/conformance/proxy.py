"""A backend with one planted fault: hands other planes to the kernels, or records other operations than it is told.

Knows the backend contract; must not know any concrete backend or which faults there are.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from picaflor.backends.api import (
    I32,
    Batch,
    ExpertLayout,
    ExpertLease,
    ExpertProvider,
    KVPlane,
    MatrixLayout,
    Precision,
    Program,
    Recorder,
    Rows,
    Vector,
    Weight,
)
from picaflor.conformance.case import Device, Matrix, hold, make_slot
from picaflor.conformance.check import Array
from picaflor.formats import REGISTRY
from picaflor.formats.base import F32

Look = Callable[[Rows], Array]
Host = Callable[[Look], object]
ChangeBatch = Callable[[Batch], Batch]
ChangeOperation = Callable[..., None]
Lease = Iterator[tuple[I32, NDArray[np.uint64]]]


@dataclass(frozen=True)
class Fault:
    """What is planted. `matrix` changes stored matrices. `operations`: by name, called with (recorder, arguments of
    the operation) instead of recording it. `layer`, `batches`, `slot`: of what experts come from. `batch`: of each run.
    """

    matrix: Callable[[Matrix], Matrix] | None = None
    operations: Mapping[str, ChangeOperation] = field(default_factory=dict)
    layer: Callable[[int], int] | None = None
    batches: Callable[[list[tuple[I32, NDArray[np.uint64]]], dict[int, int]], Lease] | None = None
    slot: Callable[[NDArray[np.uint8]], NDArray[np.uint8]] | None = None
    batch: ChangeBatch | None = None
    sample: Callable[..., int] | None = None


class FaultyDevice:
    """A device with a fault. `memory` belongs to the fault: what it saw before."""

    def __init__(self, inner: Device, fault: Fault) -> None:
        self.inner = inner
        self.fault = fault
        self.name = inner.name
        self.precision: Precision = inner.precision
        self.memory: dict[str, Any] = {}
        self.slots_seen: WeakKeyDictionary[ExpertProvider, dict[int, int]] = WeakKeyDictionary()
        self.vectors: dict[int, F32] = {}

    def allocate(self, nbytes: int) -> NDArray[np.uint8]:
        """As the device does."""
        return self.inner.allocate(nbytes)

    def weight(
        self, name: str, format_name: str, shape: tuple[int, int], group_size: int, planes: Sequence[NDArray[Any]]
    ) -> Weight:
        """Hold a matrix, changed where the fault says so."""
        if self.fault.matrix is None:
            return self.inner.weight(name, format_name, shape, group_size, planes)
        changed = self.fault.matrix(Matrix(format_name, *shape, group_size, tuple(planes)))
        return hold(self.inner, changed, name)

    def vector(self, name: str, values: F32) -> Vector:
        """Hold a vector; its values are remembered for faults that need them."""
        vector = self.inner.vector(name, values)
        self.vectors[id(vector.handle)] = values
        self.memory.setdefault("vectors", []).append(vector)
        return vector

    def values(self, vector: Vector) -> F32:
        """The values of a vector that this device made."""
        return self.vectors[id(vector.handle)]

    def recorder(self, *, max_rows: int, max_outputs: int, page_tokens: int, pages: int) -> Any:
        """A recorder with the fault."""
        inner = self.inner.recorder(max_rows=max_rows, max_outputs=max_outputs, page_tokens=page_tokens, pages=pages)
        return FaultyRecorder(self, inner)

    def sample(self, logits: F32, *, temperature: float, top_p: float, uniform: float) -> int:
        """One token."""
        chosen = self.fault.sample
        if chosen is None:
            return self.inner.sample(logits, temperature=temperature, top_p=top_p, uniform=uniform)
        return chosen(self.inner, logits, temperature=temperature, top_p=top_p, uniform=uniform)


@dataclass(frozen=True, slots=True)
class _Segment:
    """A recorded piece with a change of the batch, or a piece of Python in the place of an operation."""

    program: Program | None
    change: ChangeBatch | None
    host: Host | None


class FaultyRecorder:
    """Records what it is told, but for the operations that the fault has an answer for."""

    def __init__(self, device: FaultyDevice, inner: Recorder) -> None:
        self.device = device
        self.inner = inner
        self._segments: list[_Segment] = []
        self._layouts: dict[int, list[ExpertLayout]] = {}
        self.seen: list[str] = []

    def rows(self, width: int, *, dtype: Any = "f32") -> Rows:
        """A new buffer."""
        return self.inner.rows(width, dtype=dtype)

    def part(self, rows: Rows, start: int, width: int) -> Rows:
        """Columns of a buffer."""
        return self.inner.part(rows, start, width)

    def kv_plane(self, layer: int, name: str, width: int) -> KVPlane:
        """A cached quantity."""
        return self.inner.kv_plane(layer, name, width)

    def __getattr__(self, op: str) -> Callable[..., None]:
        if op.startswith("_"):
            raise AttributeError(op)
        change = self.device.fault.operations.get(op)

        def operation(*arguments: Any, **options: Any) -> None:
            if op == "experts":
                options["layouts"] = self._changed_layouts(options["layer"], options["layouts"])
            if change is None:
                getattr(self.inner, op)(*arguments, **options)
            else:
                change(self, *arguments, **options)
            self.seen.append(op)

        return operation

    def host(self, function: Host) -> None:
        """Run Python at this place; it gets a function from a buffer to its rows of this batch."""
        self._cut(None)
        self._segments.append(_Segment(None, None, function))

    def with_batch(self, change: ChangeBatch, op: str, *arguments: Any, **options: Any) -> None:
        """Record an operation that sees another batch than the rest."""
        self._cut(None)
        getattr(self.inner, op)(*arguments, **options)
        self._cut(change)

    def _cut(self, change: ChangeBatch | None) -> None:
        self._segments.append(_Segment(self.inner.finish(), change, None))

    def _changed_layouts(self, layer: int, layouts: Sequence[ExpertLayout]) -> Sequence[ExpertLayout]:
        self._layouts[layer] = list(layouts)
        if self.device.fault.matrix is None:
            return layouts
        changed = []
        for layout in layouts:
            blank = np.zeros(layout.nbytes, np.uint8)
            changed.append(make_slot(self.device.inner, _changed_members(self.device.fault, layout, blank))[0])
        return changed

    def finish(self) -> FaultyProgram:
        """The program."""
        self._cut(None)
        segments, self._segments = self._segments, []
        return FaultyProgram(self.device, segments, dict(self._layouts))


def _changed_members(fault: Fault, layout: ExpertLayout, slot: NDArray[np.uint8]) -> tuple[Matrix, Matrix, Matrix]:
    assert fault.matrix is not None
    gate, up, down = (fault.matrix(_member(slot, part)) for part in (layout.gate, layout.up, layout.down))
    return gate, up, down


def _member(slot: NDArray[np.uint8], layout: MatrixLayout) -> Matrix:
    """A matrix in a slot."""
    sizes = (layout.rows, layout.cols, layout.group_size)
    planes = tuple(
        slot[offset : offset + plane.nbytes(*sizes)]
        for plane, offset in zip(REGISTRY[layout.format].planes, layout.offsets, strict=True)
    )
    return Matrix(layout.format, *sizes, planes)


class FaultyProgram:
    """Segments, run one after the other."""

    def __init__(
        self, device: FaultyDevice, segments: Sequence[_Segment], layouts: Mapping[int, Sequence[ExpertLayout]]
    ) -> None:
        self._device = device
        self._segments = segments
        self._layouts = layouts
        self._any = next(segment.program for segment in segments if segment.program is not None)

    def run(self, batch: Batch, experts: ExpertProvider | None = None) -> None:
        """Compute all rows."""
        fault = self._device.fault
        if fault.batch is not None:
            batch = fault.batch(batch)
        provider = None if experts is None else FaultyExperts(self._device, experts, self._layouts)
        count = len(batch.tokens)
        for segment in self._segments:
            if segment.host is not None:
                self._run_host(segment.host, count)
            elif segment.program is not None:
                segment.program.run(segment.change(batch) if segment.change else batch, provider)

    def _run_host(self, host: Host, count: int) -> None:
        """What the function changes goes back: a device gives it copies."""
        seen: list[tuple[Rows, Array]] = []

        def look(rows: Rows) -> Array:
            seen.append((rows, self.view(rows, count)))
            return seen[-1][1]

        host(look)
        for rows, values in seen:
            self.write(rows, values)

    def view(self, rows: Rows, count: int) -> Array:
        """The first rows of a buffer."""
        return self._any.view(rows, count)

    def write(self, rows: Rows, values: F32) -> None:
        """Fill an input buffer."""
        self._any.write(rows, values)

    def seconds(self) -> dict[str, float]:
        """Nothing is measured here."""
        return {}


class FaultyExperts:
    """Experts from slots that the fault has changed."""

    def __init__(
        self, device: FaultyDevice, inner: ExpertProvider, layouts: Mapping[int, Sequence[ExpertLayout]]
    ) -> None:
        self._device = device
        self._inner = inner
        self._layouts = layouts

    @contextmanager
    def acquire(self, layer: int, experts: I32) -> Iterator[FaultyLease]:
        """Hold experts of a layer, or of another one."""
        change = self._device.fault.layer
        with self._inner.acquire(layer if change is None else change(layer), experts) as lease:
            seen = self._device.slots_seen.setdefault(self._inner, {})
            yield FaultyLease(self._device, lease, self._layouts[layer], seen)


class FaultyLease:
    """What a lease yields, changed; copies live as long as the lease."""

    def __init__(
        self, device: FaultyDevice, inner: ExpertLease, layouts: Sequence[ExpertLayout], seen: dict[int, int]
    ) -> None:
        self._device = device
        self._inner = inner
        self._layouts = layouts
        self._seen = seen
        self._keep: list[NDArray[np.uint8]] = []

    def batches(self) -> Lease:
        """(numbers, slot addresses)."""
        fault = self._device.fault
        given = [(ids, self._changed(ids, addresses)) for ids, addresses in self._inner.batches()]
        yield from given if fault.batches is None else fault.batches(given, self._seen)

    def _changed(self, ids: I32, addresses: NDArray[np.uint64]) -> NDArray[np.uint64]:
        fault = self._device.fault
        if fault.matrix is None and fault.slot is None:
            return addresses
        out = []
        for number, address in zip(ids, addresses, strict=True):
            layout = self._layouts[int(number)]
            slot = np.ctypeslib.as_array((ctypes.c_uint8 * layout.nbytes).from_address(int(address)))
            if fault.matrix is not None:
                _, changed = make_slot(self._device.inner, _changed_members(fault, layout, slot))
            else:
                assert fault.slot is not None
                changed = self._device.inner.allocate(layout.nbytes)
                changed[:] = fault.slot(slot.copy())
            self._keep.append(changed)
            out.append(changed.ctypes.data)
        return np.array(out, dtype=np.uint64)


def changed_batch(batch: Batch, **fields: Array) -> Batch:
    """A batch with other fields."""
    changed: dict[str, Any] = {name: np.ascontiguousarray(values, np.int32) for name, values in fields.items()}
    return replace(batch, **changed)
