"""Experts as views into mapped files: nothing is copied, nothing is evicted, the system keeps what it has room for.

For models that lie in memory already (tmpfs), or where it was asked for. Must not know programs, devices or policies.

A file that is cut or fails while it is mapped never ends the process and never gives a wrong token: its lost pages read
as zeros, and what was computed from them is thrown away with a ReadFailed that names the file. When the file is whole
again, so are the experts.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from picaflor.backends.api import I32, ExpertLayout, MatrixLayout
from picaflor.container.expert_file import SCALE_ALIGN_BYTES
from picaflor.container.strict_json import show, show_path
from picaflor.container.types import Expert, Matrix
from picaflor.errors import BadContainer, ReadFailed
from picaflor.store.counters import LayerCounters, StoreCounters
from picaflor.store.direct import MEMORY_FILE_SYSTEMS, file_system
from picaflor.store.reader import ExpertFiles
from picaflor.store.routes import RoutesWriter
from picaflor.store.types import ExpertKey

MAPPED_MODES = ("auto", "on", "off")
VIEW_ALIGN_BYTES = 64

Addresses = NDArray[np.uint64]


def lies_in_memory(files: ExpertFiles) -> bool:
    """Whether every file with experts is on a file system that has no drive. Raises ReadFailed."""
    for shard in files.shards():
        with files.container.handle(shard) as handle:
            if file_system(handle) not in MEMORY_FILE_SYSTEMS:
                return False
    return True


class MappedLease:
    """A request to a layer: one batch, all views; checked again once they were used."""

    __slots__ = ("_addresses", "_experts", "_store")

    def __init__(self, store: MappedStore, experts: I32, addresses: Addresses) -> None:
        self._store = store
        self._experts = experts
        self._addresses = addresses

    def __enter__(self) -> MappedLease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def batches(self) -> Iterator[tuple[I32, Addresses]]:
        """All experts at once. Raises ReadFailed afterwards if a file was lost while they were read."""
        if len(self._experts):
            yield self._experts, self._addresses
            self._store.check()


class MappedStore:
    """Gives programs their experts (`backends.api.ExpertProvider`) from mapped files.

    `layouts` are relative to the last multiple of 64 before each expert's first byte. Raises BadContainer for an
    expert with a scale plane off a multiple of 4 in its file, ReadFailed for a file that cannot be mapped.
    """

    def __init__(self, files: ExpertFiles, experts: Mapping[int, Sequence[Expert]]) -> None:
        self.files = files
        self.counters = StoreCounters({layer: LayerCounters() for layer in files.layers})
        self.slots = {layer: files.count(layer) for layer in files.layers}
        self._shards = files.shards()
        self._map = self._open_map()
        self._starts = {shard: self._map.address(place) for place, shard in enumerate(self._shards)}
        self._layouts: dict[int, list[ExpertLayout]] = {}
        self._tables: dict[int, Addresses] = {}
        for layer in files.layers:
            views = [self._view(expert) for expert in experts[layer]]
            self._layouts[layer] = [layout for layout, _ in views]
            self._tables[layer] = np.array([address for _, address in views], dtype=np.uint64)
        self._lock = threading.Lock()
        self._closed = False
        self.recorder: RoutesWriter | None = None  # told of every request while it is set

    @property
    def nbytes(self) -> int:
        """Memory of slots: there is none."""
        return 0

    @property
    def mapped_bytes(self) -> int:
        """Bytes of the files that are mapped; they count against nobody's budget."""
        return int(self._map.nbytes) if self._map is not None else 0

    def layouts(self, layer: int) -> list[ExpertLayout]:
        """The layout of each expert of a layer behind its address, by id."""
        return list(self._layouts[layer])

    def resident(self, layer: int) -> list[int]:
        """Ids of the layer's experts: all can be used without a read by us."""
        return list(range(self.files.count(layer)))

    def memory(self) -> list[NDArray[np.uint8]]:
        """Nothing: a pass over the files would bring all of them into memory."""
        return []

    def busy_s(self) -> float:
        """No read is ours."""
        return 0.0

    def preload(self, progress: Callable[[int, int], None] | None = None) -> int:
        """Nothing is read ahead."""
        return 0

    def acquire(self, layer: int, experts: I32) -> MappedLease:
        """A lease of distinct experts. Raises IndexError for an id that the layer does not have, ReadFailed for a file
        that was cut or a closed store."""
        self.check()
        addresses = self._tables[layer][experts.astype(np.uint32)]  # unsigned: no id counts from the end
        if self.recorder is not None:
            self.recorder.add(layer, experts.tolist())
        counters = self.counters.layers[layer]
        counters.requests += 1
        counters.pinned += len(experts)
        return MappedLease(self, experts, addresses)

    def check(self) -> None:
        """Raises ReadFailed while a file is cut, and once after pages were lost; the map is whole again then."""
        with self._lock:
            if self._closed or self._map is None:
                raise ReadFailed("the expert store was closed")
            place = self._map.cut()
            if place >= 0:
                path = show_path(self.files.container.shards[self._shards[place]].path)
                raise ReadFailed(f"{path}: the file was cut while it was mapped; put it back, or load the model again")
            if self._map.broken:
                with contextlib.suppress(RuntimeError):  # still broken then, and told again at the next request
                    self._map.renew()
                names = ", ".join(show_path(self.files.container.shards[shard].path) for shard in self._shards[:3])
                raise ReadFailed(f"pages of a mapped file were lost while they were read: one of {names}")

    def close(self) -> None:
        """Unmap the files. No lease may be in use. Later requests raise ReadFailed."""
        with self._lock:
            self._closed = True
            self._map = None

    def __enter__(self) -> MappedStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open_map(self) -> Any:
        from picaflor._native import FileMap

        container = self.files.container
        with contextlib.ExitStack() as held:
            handles = [held.enter_context(container.handle(shard)) for shard in self._shards]
            try:
                return FileMap(handles, [container.shards[shard].nbytes for shard in self._shards])
            except RuntimeError as error:
                path = show_path(container.shards[self._shards[0]].path.parent)
                raise ReadFailed(f"{path}: the experts' files cannot be mapped: {error}") from error

    def _view(self, expert: Expert) -> tuple[ExpertLayout, int]:
        """An expert's layout and the address that it is relative to."""
        first = min(self._address(span.shard, span.offset) for m in expert.matrices for span in m.spans)
        base = first // VIEW_ALIGN_BYTES * VIEW_ALIGN_BYTES
        gate, up, down = (self._matrix(matrix, base) for matrix in expert.matrices)
        reads = self.files.reads(ExpertKey(expert.layer, expert.expert))
        return ExpertLayout(gate, up, down, reads.nbytes), base

    def _matrix(self, matrix: Matrix, base: int) -> MatrixLayout:
        for span in matrix.spans[1:]:
            if span.offset % SCALE_ALIGN_BYTES:
                path = show_path(self.files.container.shards[span.shard].path)
                raise BadContainer(
                    f"{path}: tensor {show(matrix.name)}: its scales begin at byte {span.offset}, which is no multiple "
                    "of 4: give --mapped off"
                )
        offsets = tuple(self._address(span.shard, span.offset) - base for span in matrix.spans)
        return MatrixLayout(matrix.format, matrix.rows, matrix.cols, matrix.group_size, offsets)

    def _address(self, shard: int, offset: int) -> int:
        return int(self._starts[shard]) + offset
