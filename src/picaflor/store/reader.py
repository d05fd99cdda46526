"""From experts to read jobs: where each expert lies, descriptors held while a job runs, failures in words.

Knows containers and the native read pool; must not know slots' owners, residency or policies.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from picaflor.backends.api import ExpertLayout, MatrixLayout
from picaflor.container.expert_file import ExpertReads, Offsets, ReadRun, plan_reads
from picaflor.container.strict_json import show, show_path
from picaflor.container.types import Expert, Matrix, Shard
from picaflor.errors import ReadFailed
from picaflor.store.types import ExpertKey

IDLE_DESCRIPTORS = 32
"""Descriptors kept open beyond those in use: a dup per shard is cheap, and other parts need descriptors too."""


class ShardFiles(Protocol):
    """What the reader needs of a container."""

    @property
    def shards(self) -> Sequence[Shard]:
        """The shards, by index."""
        ...

    def handle(self, shard: int) -> AbstractContextManager[int]:
        """The shard's descriptor, open while the context lasts. Raises ReadFailed."""
        ...


class ReadOutcome(Protocol):
    """One finished job of a pool (`picaflor._native.ReadResult`)."""

    ticket: int
    status: Any
    error: int
    run: int
    found: int
    nbytes: int
    seconds: float


class Pool(Protocol):
    """The native read pool, or a fake one (`picaflor._native.ReadPool`)."""

    def submit(
        self, runs: NDArray[np.int64], bounds: NDArray[np.int64], bases: NDArray[np.uint64], *, demand: bool
    ) -> int:
        """Runs `[n, 4]`: descriptor, file offset, bytes, offset in the slot. Returns the first job's ticket."""
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


def native_pool(threads: int) -> Pool:
    """A pool of `threads` native read threads; they start with the first read."""
    from picaflor._native import ReadPool

    pool: Pool = ReadPool(threads)
    return pool


class ExpertFiles:
    """Where the routed experts of every MoE layer lie, and how big a slot each layer needs. Allocates no slot.

    `experts` maps a layer to its experts in order of id. Raises ValueError if ids or layers do not match their places.
    """

    def __init__(self, container: ShardFiles, experts: Mapping[int, Sequence[Expert]]) -> None:
        self.container = container
        self.layers = tuple(sorted(experts))
        self._experts = {layer: tuple(experts[layer]) for layer in self.layers}
        for layer, members in self._experts.items():
            for place, expert in enumerate(members):
                if (expert.layer, expert.expert) != (layer, place):
                    found = f"expert {expert.expert} of layer {expert.layer}"
                    raise ValueError(f"{found} stands at place {place} of layer {layer}")
        self._reads = {layer: [plan_reads(expert) for expert in self._experts[layer]] for layer in self.layers}
        self._layouts = {
            layer: [expert_layout(*pair) for pair in zip(self._experts[layer], self._reads[layer], strict=True)]
            for layer in self.layers
        }

    def count(self, layer: int) -> int:
        """How many experts a layer has."""
        return len(self._experts[layer])

    def layouts(self, layer: int) -> list[ExpertLayout]:
        """The layout of each expert of a layer, by id."""
        return list(self._layouts[layer])

    def slot_nbytes(self, layer: int) -> int:
        """Bytes of the layer's widest expert in its slot, slack not included."""
        return max((reads.nbytes for reads in self._reads[layer]), default=0)

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


class Descriptors:
    """Own duplicates of the container's descriptors, so that no job holds the container's bounded set of files.

    At most `idle` unused ones stay open.
    """

    def __init__(self, container: ShardFiles, *, idle: int = IDLE_DESCRIPTORS) -> None:
        self._container = container
        self._idle_limit = idle
        self._open: dict[int, int] = {}
        self._users: dict[int, int] = {}
        self._idle: dict[int, None] = {}  # shards without users, oldest first

    def acquire(self, shard: int) -> int:
        """A descriptor that stays open until it is released as often. Raises ReadFailed."""
        if shard not in self._open:
            self._open[shard] = self._duplicate(shard)
        self._idle.pop(shard, None)
        self._users[shard] = self._users.get(shard, 0) + 1
        return self._open[shard]

    def release(self, shard: int) -> None:
        """One user less."""
        self._users[shard] -= 1
        if self._users[shard] == 0:
            self._idle[shard] = None
            if len(self._idle) > self._idle_limit:
                self._close_oldest()

    def size(self, shard: int) -> int:
        """Bytes that an open file has now."""
        return os.fstat(self._open[shard]).st_size

    def close(self) -> None:
        """Close all. No job may run."""
        for handle in self._open.values():
            os.close(handle)
        self._open.clear()
        self._users.clear()
        self._idle.clear()

    def _duplicate(self, shard: int) -> int:
        """A new descriptor of the container's open file; idle ones make room if the system has no more."""
        with self._container.handle(shard) as handle:
            while True:
                try:
                    return os.dup(handle)
                except OSError as error:
                    if error.errno in (errno.EMFILE, errno.ENFILE) and self._idle:
                        self._close_oldest()
                        continue
                    path = show_path(self._container.shards[shard].path)
                    raise ReadFailed(f"{path}: no descriptor left to read it: {error.strerror}") from error

    def _close_oldest(self) -> None:
        """Close the descriptor that has been idle for longest."""
        shard = next(iter(self._idle))
        del self._idle[shard]
        os.close(self._open.pop(shard))


@dataclass(frozen=True, slots=True)
class Finished:
    """One expert's read that came to its end. `seconds` is the time a thread spent on it."""

    ticket: int
    nbytes: int
    seconds: float
    error: ReadFailed | None


class Reader:
    """Reads experts into addresses. Not locked, but for `wait`, which may run beside everything else."""

    def __init__(self, files: ExpertFiles, pool: Pool, *, idle_descriptors: int = IDLE_DESCRIPTORS) -> None:
        self._files = files
        self._pool = pool
        self._descriptors = Descriptors(files.container, idle=idle_descriptors)
        self._jobs: dict[int, ExpertKey] = {}

    def submit(self, wanted: Sequence[tuple[ExpertKey, int]], *, demand: bool = True) -> list[int]:
        """Start to read each expert into its address; one ticket per expert. Raises ReadFailed: nothing started."""
        rows: list[tuple[int, int, int, int]] = []
        bounds = [0]
        held: list[int] = []
        try:
            for key, _ in wanted:
                for run in self._files.reads(key).runs:
                    handle = self._descriptors.acquire(run.shard)
                    held.append(run.shard)
                    rows.append((handle, run.offset, run.nbytes, run.slot_offset))
                bounds.append(len(rows))
            first = self._pool.submit(
                np.array(rows, dtype=np.int64).reshape(len(rows), 4),
                np.array(bounds, dtype=np.int64),
                np.array([address for _, address in wanted], dtype=np.uint64),
                demand=demand,
            )
        except BaseException:
            for shard in held:
                self._descriptors.release(shard)
            raise
        tickets = list(range(first, first + len(wanted)))
        self._jobs.update(zip(tickets, (key for key, _ in wanted), strict=True))
        return tickets

    def wait(self, tickets: Sequence[int], seconds: float) -> Sequence[ReadOutcome]:
        """Wait for the first of them; what comes back goes to `finish`, once. Empty: time is up or another caller
        finished one of them."""
        return self._pool.wait_any(np.array(tickets, dtype=np.uint64), seconds)

    def finish(self, outcome: ReadOutcome) -> Finished:
        """Let go of what a finished job held, and put a failure into words."""
        key = self._jobs.pop(outcome.ticket)
        failed = outcome.status.name != "OK"
        error = ReadFailed(self._explain(key, outcome)) if failed else None
        self._release(key)
        self._pool.forget(outcome.ticket)
        return Finished(outcome.ticket, outcome.nbytes, outcome.seconds, error)

    def cancel(self, ticket: int) -> bool:
        """Take back a job that has not begun."""
        if not self._pool.cancel(ticket):
            return False
        self._release(self._jobs.pop(ticket))
        return True

    def promote(self, ticket: int) -> None:
        """Somebody waits for a read that was submitted without demand."""
        self._pool.promote(ticket)

    def busy_s(self) -> float:
        """Wall time with at least one read under way so far."""
        return self._pool.busy_seconds()

    def close(self) -> None:
        """End all reads; after this no slot is written. The container stays open."""
        self._pool.close()
        self._jobs.clear()
        self._descriptors.close()

    def _release(self, key: ExpertKey) -> None:
        """Give the descriptors of a job back."""
        for run in self._files.reads(key).runs:
            self._descriptors.release(run.shard)

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
                    f"{shard.nbytes} bytes when it was opened and has {self._descriptors.size(run.shard)} now"
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
