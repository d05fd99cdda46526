"""Weights that are there for as long as the model is: their memory first, their bytes later, and where they go.

Knows the index of a model, memory that a backend hands out and the container's files; must not know options or plans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from picaflor.backends.api import Backend, ExpertLayout, Precision, Vector, Weight
from picaflor.backends.table import CapabilityTable, Cell
from picaflor.container.index import Container
from picaflor.container.strict_json import show_path
from picaflor.container.types import Matrix, Span
from picaflor.errors import BadContainer
from picaflor.formats import REGISTRY
from picaflor.formats.base import F32
from picaflor.models.loading import ModelIndex

SLACK_BYTES = 64
PAGE_BYTES = 4096
Progress = Callable[[str, int, int], None]
_Fill = tuple[Span, NDArray[np.uint8], str]
"""Where bytes lie, where they go, and the tensor's name where they must be finite floats."""
ROUND_BYTES = 256 << 20
"""Bytes that a device takes at once; its matrices lie in the host's memory for no longer."""


class HostBackend(Backend, Protocol):
    """A backend whose weights stay in host memory that it hands out, or come from there.

    `on_device`: it computes in memory of its own. Pages of the cache are there and cost no host memory, and
    `takes_experts(resident_bytes, expert_bytes)` says whether all experts fit beside such matrices.
    """

    on_device: bool
    isa: str
    threads: int
    precision: Precision
    table: CapabilityTable

    def allocate(self, nbytes: int) -> NDArray[np.uint8]:
        """Zeroed memory that is not touched until it is written; 64 bytes more are readable behind it."""
        ...

    def isa_of(self, cell: Cell) -> str:
        """The instruction set of the kernels behind a selected cell."""
        ...

    def workspace_bytes(self) -> int:
        """Bytes of host memory for buffers of all recorders so far, key-value planes not counted."""
        ...

    def takes_experts(self, resident_bytes: int, expert_bytes: int) -> bool:
        """Whether no expert has to stay in host memory; False for a backend that is the host."""
        ...


class Residents:
    """The resident matrices and vectors: memory first, bytes later. `allocate` gives the memory of a plane."""

    def __init__(
        self,
        index: ModelIndex,
        backend: HostBackend,
        layouts: Callable[[int], Sequence[ExpertLayout]],
        *,
        allocate: Callable[[int], NDArray[np.uint8]] | None = None,
    ) -> None:
        self._index = index
        self._backend = backend
        self._allocate = allocate or backend.allocate
        self._layouts = layouts
        self._weights: dict[str, Weight] = {}
        self._vectors: dict[str, Vector] = {}
        self._planes: dict[tuple[tuple[int, int, int], ...], tuple[NDArray[np.uint8], ...]] = {}
        self._fills: list[_Fill] = []
        self._untaken: set[str] = set()

    @property
    def nbytes(self) -> int:
        """Bytes of memory for every matrix that was bound."""
        return sum(_padded(plane.nbytes) for plane in self.memory())

    @property
    def mapped_nbytes(self) -> int:
        """Address space that these weights take already, touched or not."""
        return self.nbytes if self._allocate == self._backend.allocate else 0

    def matrix(self, name: str) -> Weight:
        """A handle on a matrix whose bytes may still be on disk."""
        if name not in self._weights:
            matrix = self._index.matrices[name]
            self._weights[name] = self._backend.weight(
                name, matrix.format, (matrix.rows, matrix.cols), matrix.group_size, self._memory(matrix)
            )
            self._untaken.add(name)
        return self._weights[name]

    def vector(self, name: str) -> Vector:
        """A handle on a vector; vectors are small and are read at once."""
        return self._vectors[name]

    def layouts(self, layer: int) -> Sequence[ExpertLayout]:
        """The slot layouts of a layer's experts."""
        return self._layouts(layer)

    def read_vectors(self, container: Container) -> None:
        """Read all vectors. Raises as `finite_vectors`."""
        for name, values in finite_vectors(container, self._index):
            self._vectors[name] = self._backend.vector(name, values)

    def blank_vectors(self) -> None:
        """Vectors of ones, for what computes no answer."""
        for name, info in self._index.vectors.items():
            self._vectors[name] = self._backend.vector(name, np.ones(info.shape, np.float32))

    def _memory(self, matrix: Matrix) -> tuple[NDArray[np.uint8], ...]:
        """One array per plane, shared by matrices that lie on the same bytes (a tied head)."""
        key = tuple((span.shard, span.offset, span.nbytes) for span in matrix.spans)
        if key not in self._planes:
            self._planes[key] = tuple(self._allocate(span.nbytes) for span in matrix.spans)
            checked = [matrix.name if plane.dtype == np.float32 else "" for plane in REGISTRY[matrix.format].planes]
            self._fills.extend(zip(matrix.spans, self._planes[key], checked, strict=True))
        return self._planes[key]

    def memory(self) -> list[NDArray[np.uint8]]:
        """Every plane that was bound."""
        return [plane for planes in self._planes.values() for plane in planes]

    @property
    def needed_nbytes(self) -> int:
        """Bytes of memory that are in use at once: where a device takes matrices, those of one round."""
        if self._take is None:
            return self.nbytes
        largest = max((sum(map(len, planes)) for planes in self._planes.values()), default=0)
        staying = {id(plane): plane for weight in self._weights.values() if getattr(weight.handle, "stays", False)
                   for plane in weight.handle.host}  # fmt: skip
        return min(self.nbytes, ROUND_BYTES + largest + sum(_padded(plane.nbytes) for plane in staying.values()))

    @property
    def _take(self) -> Callable[[Sequence[Weight]], None] | None:
        """How the backend takes matrices to memory of its own, for one that does."""
        return getattr(self._backend, "take", None)

    def read_all(self, container: Container, progress: Progress) -> None:
        """Read every matrix that was bound, in file order; scales and float32 weights must be finite.

        A device that takes them gets them round by round, and their memory is given back. One NaN there would change a
        router's choice or a text without a word. Raises ReadFailed, BadContainer.
        """
        fills = sorted(self._fills, key=lambda fill: (fill[0].shard, fill[0].offset))
        total = sum(span.nbytes for span, _, _ in fills)
        done = given = 0
        if self._take is not None:
            cast(Any, self._backend).reload = lambda addresses: _read(
                container, [fill for fill in fills if fill[1].ctypes.data in addresses]
            )
        for span, memory, name in fills:
            _read(container, [(span, memory, name)])
            done += span.nbytes
            progress("loading resident weights", done, total)
            if self._take is not None and done - given >= ROUND_BYTES:
                self._give(fills, span)
                given = done
        if self._take is not None and fills:
            self._give(fills, fills[-1][0])
        self._fills.clear()

    def _give(self, fills: Sequence[_Fill], last: Span) -> None:
        """Let the device take every matrix whose spans have been read up to `last`."""
        end = (last.shard, last.offset)
        waiting = {span for span, _, _ in fills if (span.shard, span.offset) > end}
        ready = [name for name in self._untaken if not waiting & set(self._index.matrices[name].spans)]
        shared = {span for name in self._untaken if name not in ready for span in self._index.matrices[name].spans}
        ready = [name for name in ready if not shared & set(self._index.matrices[name].spans)]
        assert self._take is not None
        self._take([self._weights[name] for name in ready])
        self._untaken -= set(ready)


def finite_vectors(container: Container, index: ModelIndex) -> Iterator[tuple[str, F32]]:
    """Every vector of a model, by the model's name for it. Raises MissingTensor, ReadFailed, BadContainer for one of
    another dtype or shape and for numbers that are NaN or infinite."""
    for name, info in index.vectors.items():
        values = container.read_float(info.name, info.shape)
        _check_finite(info.name, values, container, info.shard)
        yield name, values


def _read(container: Container, fills: Sequence[_Fill]) -> None:
    """Read spans into their memory. Raises ReadFailed, BadContainer."""
    for span, memory, name in fills:
        container.read_into(span, memory.data[: span.nbytes])
        if name:
            _check_finite(name, memory[: span.nbytes].view(np.float32), container, span.shard)


def _check_finite(name: str, values: F32, container: Container, shard: int) -> None:
    """Raises BadContainer where a scale or a float weight is NaN or infinite."""
    if not np.isfinite(values).all():
        bad = values.size - int(np.isfinite(values).sum())
        raise BadContainer(
            f"{name}: {bad} of {values.size} scales or weights are NaN or infinite in "
            f"{show_path(container.shards[shard].path)}; expected finite ones"
        )


def _padded(nbytes: int) -> int:
    return -(-(nbytes + SLACK_BYTES) // PAGE_BYTES) * PAGE_BYTES
