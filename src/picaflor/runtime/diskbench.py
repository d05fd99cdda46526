"""What a drive gives in the shape in which the engine reads: whole experts at random places, or a file in order.

Knows files, jobs of the read pool and times; must not know models, programs or policies.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from picaflor.container.expert_file import BLOCK_BYTES
from picaflor.container.strict_json import show_path
from picaflor.errors import PicaflorError, ReadFailed, WriteFailed
from picaflor.store.arena import Arena
from picaflor.store.direct import MEMORY_FILE_SYSTEMS, file_system, reopen_direct
from picaflor.store.reader import PIECE_BYTES, RUN_WORDS, ExpertFiles, Pool, native_pool
from picaflor.store.sources import Route, Sources
from picaflor.store.types import ExpertKey
from picaflor.telemetry.process import physical_read_bytes

DEPTHS = (1, 2, 4, 8, 16)
SEQUENTIAL_BYTES = 8 << 20
"""One read of the sequential shape."""
PROBE_BYTES = 256 << 20
PROBE_SEED = 11

Row = tuple[int, int, int, int, int, int, int]
Job = Sequence[Row]
"""Rows as `Pool.submit` takes them."""


@dataclass(frozen=True, slots=True)
class Rate:
    """One measurement: logical bytes, seconds, and what the system says it fetched from storage (None: unknown)."""

    nbytes: int
    seconds: float
    physical: int | None

    @property
    def bytes_per_s(self) -> float:
        """Logical bytes per second."""
        return self.nbytes / self.seconds


def timed_reads(pool: Pool, jobs: Sequence[Job], *, ahead: int) -> Rate:
    """Carry out all jobs, `ahead` of them submitted at any time, so that the drive never waits for us.

    Raises ReadFailed if one fails.
    """
    widest = max(_room(job) for job in jobs)
    arena = Arena(ahead, widest)
    before = physical_read_bytes()
    waiting = deque(jobs)
    free = list(range(ahead))
    running: dict[int, int] = {}
    nbytes = 0
    started = time.perf_counter()
    try:
        while waiting or running:
            while waiting and free:
                slot = free.pop()
                running[_submit(pool, waiting.popleft(), arena.address(slot))] = slot
            for outcome in pool.wait_any(np.array(list(running), dtype=np.uint64), -1):
                if outcome.status.name != "OK":
                    reason = os.strerror(outcome.error) if outcome.error else outcome.status.name
                    raise ReadFailed(f"a read of the measurement failed after {outcome.found} bytes: {reason}")
                nbytes += outcome.nbytes
                free.append(running.pop(outcome.ticket))
                pool.forget(outcome.ticket)
        seconds = time.perf_counter() - started
    finally:
        if running:
            pool.close()  # nothing may write to the slots any more
        arena.close()
    after = physical_read_bytes()
    return Rate(nbytes, seconds, None if before is None or after is None else after - before)


def _room(job: Job) -> int:
    """Bytes of a slot for a job, in whole blocks so that slots keep their alignment."""
    end = max(place + nbytes for _, _, nbytes, place, *_ in job)
    return -(-(end + BLOCK_BYTES) // BLOCK_BYTES) * BLOCK_BYTES - 64


def _submit(pool: Pool, job: Job, address: int) -> int:
    return pool.submit(
        np.array(job, dtype=np.int64).reshape(len(job), RUN_WORDS),
        np.array([0, len(job)], dtype=np.int64),
        np.array([address], dtype=np.uint64),
        demand=True,
    )


class ExpertProbe:
    """Rates of reads of random experts, as the store reads them: same files, same pool, same pieces.

    One call reads about `nbytes` and gives bytes per second. Takes memory for a few experts while it runs.
    """

    def __init__(self, files: ExpertFiles, sources: Sources, pool: Pool, *, depth: int, nbytes: int = PROBE_BYTES):
        self._files, self._sources, self._pool = files, sources, pool
        self._keys = [ExpertKey(layer, e) for layer in files.layers for e in range(files.count(layer))]
        self._random = random.Random(PROBE_SEED)
        mean = sum(files.reads(key).read_nbytes for key in self._keys) / len(self._keys)
        self._count = max(1, round(nbytes / mean))
        self.ahead = jobs_ahead(depth, mean)

    def __call__(self) -> float:
        """Bytes per second."""
        return self.measure().bytes_per_s

    def measure(self) -> Rate:
        """One measurement. Raises ReadFailed."""
        routes: list[Route] = []
        jobs: list[Job] = []
        try:
            for key in self._picks():
                rows: list[Row] = []
                for run in self._files.reads(key).runs:
                    route, _ = self._sources.route(key, run)
                    routes.append(route)
                    place = (run.offset, run.nbytes, run.slot_offset)
                    rows.append((route.handle, *place, route.block, route.spare, int(route.spare_any)))
                jobs.append(rows)
            return timed_reads(self._pool, jobs, ahead=self.ahead)
        finally:
            for route in routes:
                self._sources.release(route)

    def close(self) -> None:
        """End the pool and close the files."""
        self._pool.close()
        self._sources.close()

    def _picks(self) -> list[ExpertKey]:
        """Experts without repetition while there are enough, so that no cache on the way helps."""
        if self._count <= len(self._keys):
            return self._random.sample(self._keys, self._count)
        return self._random.choices(self._keys, k=self._count)


def jobs_ahead(depth: int, job_bytes: float) -> int:
    """Jobs to keep submitted so that `depth` pieces are always there to begin."""
    return max(2, 1 + round(depth * PIECE_BYTES / max(job_bytes, 1.0)), 2 * depth if job_bytes <= PIECE_BYTES else 0)


@dataclass(frozen=True, slots=True)
class Shape:
    """What is measured: `pattern` random or sequential, `direct` or through the page cache (cold), reads under way."""

    pattern: str
    direct: bool
    depth: int
    engine: str


@dataclass(frozen=True, slots=True)
class DiskFile:
    """A file to measure with, and the jobs of the random shape as (offset, bytes); None: `read_bytes` anywhere."""

    path: Path
    experts: tuple[tuple[int, int], ...] | None = None


def shapes(engines: Sequence[str], *, direct: bool) -> list[Shape]:
    """All combinations that are measured: random at every depth, sequential at the largest two."""
    modes = (True, False) if direct else (False,)
    found = []
    for engine in engines:
        for mode in modes:
            found += [Shape("random", mode, depth, engine) for depth in DEPTHS]
            found += [Shape("sequential", mode, depth, engine) for depth in DEPTHS[-2:]]
    return found


@dataclass(frozen=True, slots=True)
class ShapeResult:
    """Repeats of one shape."""

    shape: Shape
    rates: tuple[Rate, ...]

    def record(self) -> dict[str, Any]:
        """As JSON data. `physical` is the part of the bytes that the system fetched from storage."""
        each = [rate.bytes_per_s for rate in self.rates]
        fetched = [rate.physical / rate.nbytes for rate in self.rates if rate.physical is not None]
        return {
            "pattern": self.shape.pattern,
            "mode": "direct" if self.shape.direct else "buffered",
            "engine": self.shape.engine,
            "depth": self.shape.depth,
            "bytes_per_s": statistics.median(each),
            "bytes_per_s_min": min(each),
            "bytes_per_s_max": max(each),
            "read_bytes": sum(rate.nbytes for rate in self.rates),
            "physical_bytes": sum(rate.physical or 0 for rate in self.rates) if fetched else None,
            "physical": statistics.median(fetched) if fetched else None,
        }


class DiskBench:
    """Measures one file. `read_bytes`: size of a random read where the file has no experts."""

    def __init__(self, file: DiskFile, *, read_bytes: int, total_bytes: int) -> None:
        self._file = file
        self._read_bytes = read_bytes
        self._total = total_bytes
        self._random = random.Random(PROBE_SEED)
        self._plain = _open(file.path)
        os.posix_fadvise(self._plain, 0, 0, os.POSIX_FADV_RANDOM)  # as the store's own descriptors
        self._nbytes = os.fstat(self._plain).st_size
        self.file_system = file_system(self._plain)
        self.block = 0
        self.refusal = ""
        self._direct = self._open_direct()
        if self._nbytes < max(read_bytes, BLOCK_BYTES):
            self.close()
            raise PicaflorError(
                f"{show_path(file.path)}: {self._nbytes} bytes; a file of at least {read_bytes} is needed"
            )

    def measure(
        self, wanted: Sequence[Shape], *, repeats: int, progress: Callable[[int, int], None]
    ) -> Iterator[ShapeResult]:
        """All shapes, `repeats` rounds over them, so that a slow moment of the drive does not meet one shape alone."""
        rates: dict[Shape, list[Rate]] = {shape: [] for shape in wanted}
        for number in range(repeats):
            for place, shape in enumerate(wanted):
                progress(number * len(wanted) + place, repeats * len(wanted))
                rates[shape].append(self._once(shape))
        progress(1, 1)
        for shape in wanted:
            yield ShapeResult(shape, tuple(rates[shape]))

    def close(self) -> None:
        """Close the file."""
        os.close(self._plain)
        if self._direct >= 0:
            os.close(self._direct)

    def _open_direct(self) -> int:
        from picaflor._native import probe_direct

        if self.file_system in MEMORY_FILE_SYSTEMS:
            self.refusal = f"lies in memory ({self.file_system})"
            return -1
        try:
            handle = reopen_direct(self._plain, self._file.path)
        except OSError as error:
            self.refusal = error.strerror or str(error)
            return -1
        self.block, code = probe_direct(handle)
        if not self.block:
            os.close(handle)
            self.refusal = os.strerror(code)
            return -1
        return handle

    def _once(self, shape: Shape) -> Rate:
        if not shape.direct:
            os.posix_fadvise(self._plain, 0, 0, os.POSIX_FADV_DONTNEED)
        spans = self._random_spans() if shape.pattern == "random" else self._sequential_spans()
        handle, block = (self._direct, self.block) if shape.direct else (self._plain, 0)
        jobs = [[(handle, offset, nbytes, offset % BLOCK_BYTES, block, -1, 0)] for offset, nbytes in spans]
        pool = native_pool(shape.depth, engine=shape.engine)
        try:
            mean = sum(nbytes for _, nbytes in spans) / len(spans)
            return timed_reads(pool, jobs, ahead=jobs_ahead(shape.depth, mean))
        finally:
            pool.close()

    def _random_spans(self) -> list[tuple[int, int]]:
        places = self._file.experts
        if places is None:
            count = self._nbytes // self._read_bytes
            places = tuple((number * self._read_bytes, self._read_bytes) for number in range(count))
        mean = sum(nbytes for _, nbytes in places) / len(places)
        wanted = max(1, round(self._total / mean))
        return self._random.sample(places, min(wanted, len(places)))

    def _sequential_spans(self) -> list[tuple[int, int]]:
        total = min(self._total, self._nbytes)
        start = self._random.randrange(0, self._nbytes - total + 1) // BLOCK_BYTES * BLOCK_BYTES
        ends = range(start, start + total, SEQUENTIAL_BYTES)
        return [(offset, min(SEQUENTIAL_BYTES, start + total - offset)) for offset in ends]


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    except OSError as error:
        raise ReadFailed(f"{show_path(path)}: cannot be opened: {error.strerror}") from error


def write_test_file(path: Path, nbytes: int, progress: Callable[[int, int], None]) -> None:
    """A file of random bytes, on the disk when this returns. Removed again if anything goes wrong.

    Raises WriteFailed, one line, where the disk is full or the folder cannot be written.
    """
    chunk = 16 << 20
    noise = np.random.Generator(np.random.PCG64(PROBE_SEED))
    try:
        with path.open("xb") as file:
            try:
                for done in range(0, nbytes, chunk):
                    progress(done, nbytes)
                    file.write(noise.bytes(min(chunk, nbytes - done)))
                file.flush()
                os.fsync(file.fileno())
            except BaseException:
                path.unlink(missing_ok=True)
                raise
    except OSError as error:
        raise WriteFailed(
            f"{show_path(path)}: cannot write a test file of {nbytes} bytes: {error.strerror}; give --size, or a "
            "folder on another drive"
        ) from error
