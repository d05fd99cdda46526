"""From experts to read jobs: where each expert lies, descriptors held while a job runs, failures in words.

Knows containers and the native read pool; must not know slots' owners, residency or policies.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Container as Members
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from picaflor.backends.api import ExpertLayout, MatrixLayout
from picaflor.container.expert_file import BLOCK_BYTES, ExpertReads, Offsets, ReadRun, plan_reads
from picaflor.container.strict_json import show, show_path
from picaflor.container.types import Expert, Matrix
from picaflor.errors import ReadFailed
from picaflor.store.arena import SLACK_BYTES
from picaflor.store.files import ShardFiles
from picaflor.store.routes import RoutedLayer
from picaflor.store.sources import IDLE_DESCRIPTORS, Route, Sources
from picaflor.store.types import ExpertKey

LIKE_SIZES = 1 / 32
"""Part of a slot's size that may be left empty."""
RUN_WORDS = 7
"""Numbers per run that a pool takes."""


class ReadOutcome(Protocol):
    """One finished job of a pool (`picaflor._native.ReadResult`)."""

    ticket: int
    status: Any
    error: int
    run: int
    found: int
    nbytes: int
    spares: int
    spare_run: int
    spare_error: int
    seconds: float


class Pool(Protocol):
    """The native read pool, or a fake one (`picaflor._native.ReadPool`)."""

    def submit(
        self, runs: NDArray[np.int64], bounds: NDArray[np.int64], bases: NDArray[np.uint64], *, demand: bool
    ) -> int:
        """Runs `[n, 7]`: descriptor, file offset, bytes, offset in the slot, block size (0: any offset), spare
        descriptor (-1: none), whether any failure leads there (else a refusal). Returns the first job's ticket."""
        ...

    def wait_any(self, tickets: NDArray[np.uint64], seconds: float) -> Sequence[ReadOutcome]:
        """Results of the finished ones; empty after `seconds`, or at once if a ticket is unknown (forgotten)."""
        ...

    def forget(self, ticket: int) -> None:
        """Drop the result of a finished job; until then every wait returns it."""
        ...

    def cancel(self, ticket: int) -> bool:
        """Take back a job that has not begun."""
        ...

    def promote(self, ticket: int) -> None:
        """Let a job that has not begun start with the demand jobs."""
        ...

    def busy_seconds(self) -> float:
        """Wall time with at least one read under way, since the pool was made."""
        ...

    def close(self) -> None:
        """No thread writes to any slot after this."""
        ...


READ_ENGINES = ("auto", "threads", "io_uring")
PIECE_BYTES = 1 << 20
"""Runs are read in pieces of this size, side by side: an expert is complete early while the disk has enough to do."""


def native_pool(depth: int, *, engine: str = "threads", notice: Callable[[str], None] | None = None) -> Pool:
    """A pool that keeps `depth` reads under way, by threads or by an io_uring; it starts with the first read.

    A system that refuses io_uring gets threads, and `notice` a line.
    """
    from picaflor._native import ReadPool, uring_error

    if engine not in READ_ENGINES:
        raise ValueError(f"read engine {engine!r}; expected one of {', '.join(READ_ENGINES)}")
    uring = False
    if engine == "io_uring":
        code = uring_error()
        uring = code == 0
        if code and notice is not None:
            notice(f"--read-engine io_uring: the system refuses it ({os.strerror(code)}): reading with threads")
    pool: Pool = ReadPool(depth, uring=uring, piece_bytes=PIECE_BYTES)
    return pool


class ExpertFiles:
    """Where the routed experts of every MoE layer lie, and how big a slot each layer needs. Allocates no slot.

    `experts` maps a layer to its experts in order of id. Slots have room for whole blocks of the shards in `blocks`.
    Raises ValueError if ids or layers do not match their places.
    """

    def __init__(
        self, container: ShardFiles, experts: Mapping[int, Sequence[Expert]], *, blocks: Members[int] = ()
    ) -> None:
        self.container = container
        self.layers = tuple(sorted(experts))
        self._experts = {layer: tuple(experts[layer]) for layer in self.layers}
        for layer, members in self._experts.items():
            for place, expert in enumerate(members):
                if (expert.layer, expert.expert) != (layer, place):
                    found = f"expert {expert.expert} of layer {expert.layer}"
                    raise ValueError(f"{found} stands at place {place} of layer {layer}")
        self._reads = {
            layer: [plan_reads(expert, blocks=blocks) for expert in self._experts[layer]] for layer in self.layers
        }
        self._layouts = {
            layer: [expert_layout(*pair) for pair in zip(self._experts[layer], self._reads[layer], strict=True)]
            for layer in self.layers
        }

        own = {layer: self._own_slot_nbytes(layer) for layer in self.layers}
        widest = max(own.values(), default=0)
        self._slot_nbytes = {
            layer: widest if widest <= nbytes * (1 + LIKE_SIZES) else nbytes for layer, nbytes in own.items()
        }

    def count(self, layer: int) -> int:
        """How many experts a layer has."""
        return len(self._experts[layer])

    def routed(self) -> tuple[RoutedLayer, ...]:
        """The layers and the bytes of their experts, for a file of recorded routes."""
        return tuple(RoutedLayer(layer, tuple(r.read_nbytes for r in self._reads[layer])) for layer in self.layers)

    def layouts(self, layer: int) -> list[ExpertLayout]:
        """The layout of each expert of a layer, by id."""
        return list(self._layouts[layer])

    def slot_nbytes(self, layer: int) -> int:
        """Bytes of a slot of the layer, slack not included: its widest expert's, or what the widest of all layers needs
        where that is little more, so that layers can share slots.

        With runs in whole blocks, slots of this size lie a multiple of BLOCK_BYTES apart.
        """
        return self._slot_nbytes[layer]

    def _own_slot_nbytes(self, layer: int) -> int:
        widest = max((reads.nbytes for reads in self._reads[layer]), default=0)
        if any(run.blocks for reads in self._reads[layer] for run in reads.runs):
            return -(-(widest + SLACK_BYTES) // BLOCK_BYTES) * BLOCK_BYTES - SLACK_BYTES
        return widest

    def shards(self) -> list[int]:
        """The shards that hold experts, ascending."""
        return sorted(
            {span.shard for members in self._experts.values() for e in members for m in e.matrices for span in m.spans}
        )

    def reads(self, key: ExpertKey) -> ExpertReads:
        """The read plan of one expert."""
        return self._reads[key.layer][key.expert]

    def expert(self, key: ExpertKey) -> Expert:
        """The expert's matrices."""
        return self._experts[key.layer][key.expert]

    def place(self, key: ExpertKey) -> tuple[int, int]:
        """(shard, offset) of the expert's first byte: sorting by it gives file order."""
        first = self._reads[key.layer][key.expert].runs[0]
        return (first.shard, first.offset)


def expert_layout(expert: Expert, reads: ExpertReads) -> ExpertLayout:
    """The slot layout that a backend needs, from the read plan."""

    def matrix_layout(matrix: Matrix, offsets: Offsets) -> MatrixLayout:
        return MatrixLayout(matrix.format, matrix.rows, matrix.cols, matrix.group_size, offsets)

    gate, up, down = (matrix_layout(*pair) for pair in zip(expert.matrices, reads.offsets, strict=True))
    return ExpertLayout(gate, up, down, reads.nbytes)


@dataclass(frozen=True, slots=True)
class Finished:
    """One expert's read that came to its end. `seconds` is the time a thread spent on it."""

    ticket: int
    nbytes: int
    seconds: float
    error: ReadFailed | None


class Reader:
    """Reads experts into addresses. Not locked, but for `wait`, which may run beside everything else.

    `notice` gets one line for each source whose reads went elsewhere.
    """

    def __init__(
        self,
        files: ExpertFiles,
        pool: Pool,
        *,
        sources: Sources | None = None,
        notice: Callable[[str], None] | None = None,
        idle_descriptors: int = IDLE_DESCRIPTORS,
    ) -> None:
        self._files = files
        self._pool = pool
        self._sources = Sources(files.container, idle=idle_descriptors) if sources is None else sources
        self._notice = notice
        self._jobs: dict[int, tuple[ExpertKey, list[Route]]] = {}
        self._spared: dict[int, int] = {}  # by source; 0: the file system refused whole blocks
        self.read_bytes: list[int] = [0] * len(self._sources.files)
        """Bytes read by source, 0 the model's own files."""

    def submit(self, wanted: Sequence[tuple[ExpertKey, int]], *, demand: bool = True) -> list[int]:
        """Start to read each expert into its address; one ticket per expert. Raises ReadFailed: nothing started."""
        rows: list[tuple[int, ...]] = []
        bounds = [0]
        routes: list[list[Route]] = []
        try:
            for key, _ in wanted:
                routes.append([])
                for run in self._files.reads(key).runs:
                    route, missed = self._sources.route(key, run)
                    routes[-1].append(route)
                    if missed is not None:
                        self._tell_missed(key, run, missed)
                    place = (run.offset, run.nbytes, run.slot_offset)
                    rows.append((route.handle, *place, route.block, route.spare, route.spare_any))
                bounds.append(len(rows))
            first = self._pool.submit(
                np.array(rows, dtype=np.int64).reshape(len(rows), RUN_WORDS),
                np.array(bounds, dtype=np.int64),
                np.array([address for _, address in wanted], dtype=np.uint64),
                demand=demand,
            )
        except BaseException:
            for job in routes:
                self._release(job)
            raise
        tickets = list(range(first, first + len(wanted)))
        jobs = zip((key for key, _ in wanted), routes, strict=True)
        self._jobs.update(zip(tickets, jobs, strict=True))
        return tickets

    def wait(self, tickets: Sequence[int], seconds: float) -> Sequence[ReadOutcome]:
        """Wait for the first of them; what comes back goes to `finish`, once. Empty: time is up or another caller
        finished one of them."""
        return self._pool.wait_any(np.array(tickets, dtype=np.uint64), seconds)

    def finish(self, outcome: ReadOutcome) -> Finished:
        """Let go of what a finished job held, and put a failure into words."""
        key, routes = self._jobs.pop(outcome.ticket)
        failed = outcome.status.name != "OK"
        error = ReadFailed(self._explain(key, outcome)) if failed else None
        for route, run in zip(routes, self._files.reads(key).runs, strict=True):
            self.read_bytes[route.source] += 0 if failed else run.nbytes
        if outcome.spares:
            self._tell_spare(key, routes, outcome)
        self._release(routes)
        self._pool.forget(outcome.ticket)
        return Finished(outcome.ticket, outcome.nbytes, outcome.seconds, error)

    def cancel(self, ticket: int) -> bool:
        """Take back a job that has not begun."""
        if not self._pool.cancel(ticket):
            return False
        self._release(self._jobs.pop(ticket)[1])
        return True

    def promote(self, ticket: int) -> None:
        """Somebody waits for a read that was submitted without demand."""
        self._pool.promote(ticket)

    def spared_reads(self) -> dict[str, int]:
        """Experts that were not read as they were meant to be: `reads.direct` through the page cache, `reads.mirror 1`
        not from that replica."""
        return {f"reads.mirror {source}" if source else "reads.direct": n for source, n in sorted(self._spared.items())}

    def busy_s(self) -> float:
        """Wall time with at least one read under way so far."""
        return self._pool.busy_seconds()

    def close(self) -> None:
        """End all reads; after this no slot is written. The container stays open."""
        self._pool.close()
        self._jobs.clear()
        self._sources.close()

    def _release(self, routes: Sequence[Route]) -> None:
        """Give the descriptors of a job back."""
        for route in routes:
            self._sources.release(route)

    def _tell_missed(self, key: ExpertKey, run: ReadRun, error: ReadFailed) -> None:
        """A replica could not even be opened."""
        mirror = self._sources.mirror
        assert mirror is not None
        self._spare(mirror.source(key.layer, key.expert, run.shard), str(error))

    def _tell_spare(self, key: ExpertKey, routes: Sequence[Route], outcome: ReadOutcome) -> None:
        """A run was read from elsewhere than it was sent to: count it, and name the first."""
        run, route = self._files.reads(key).runs[outcome.spare_run], routes[outcome.spare_run]
        path = show_path(self._sources.files[route.source].shards[run.shard].path)
        reason = os.strerror(outcome.spare_error) if outcome.spare_error else "the file ends early"
        if route.source == 0:
            self._sources.without_direct(0, run.shard)
        self._spare(route.source, f"{path}: reading {run.nbytes} bytes at offset {run.offset}: {reason}")

    def _spare(self, source: int, what: str) -> None:
        first = source not in self._spared
        self._spared[source] = self._spared.get(source, 0) + 1
        if first and self._notice is not None:
            instead = "the model's own file is read instead" if source else "it is read through the page cache instead"
            self._notice(f"{what}; {instead}, here and wherever it happens again")

    def _explain(self, key: ExpertKey, outcome: ReadOutcome) -> str:
        """One line for a failed read: file, tensor, expected, found."""
        run = self._files.reads(key).runs[outcome.run]
        shard = self._files.container.shards[run.shard]
        tensor = _tensor_at(self._files.expert(key), run, outcome.found)
        where = f"{show_path(shard.path)}: tensor {show(tensor)} (expert {key.expert} of layer {key.layer})"
        match outcome.status.name:
            case "SHORT":
                return (
                    f"{where}: expected {run.nbytes} bytes at offset {run.offset}, found {outcome.found}: the file had "
                    f"{shard.nbytes} bytes when it was opened and has {self._sources.size(run.shard)} now"
                )
            case "ERROR":
                return (
                    f"{where}: reading {run.nbytes} bytes at offset {run.offset} failed after {outcome.found}: "
                    f"{os.strerror(outcome.error)}"
                )
            case "CANCELLED":
                return f"{where}: the read was cancelled: the expert store was closed"
            case other:
                raise ValueError(f"a read job ended as {other!r}; expected OK, SHORT, ERROR or CANCELLED")


def _tensor_at(expert: Expert, run: ReadRun, found: int) -> str:
    """The weight whose bytes hold the first byte of a run that was not read (the next one if it is in a gap)."""
    first = run.offset + found
    spans = [(span, matrix.name) for matrix in expert.matrices for span in matrix.spans if span.shard == run.shard]
    behind = [(span.offset, name) for span, name in spans if span.offset + span.nbytes > first]
    return min(behind)[1]
