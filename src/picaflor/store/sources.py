"""Where a run of bytes can be had: the model's files or a replica's, past the page cache or through it.

Knows files and their descriptors; must not know slots, pools or policies.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from picaflor.container.expert_file import ReadRun
from picaflor.container.strict_json import show_path
from picaflor.errors import ReadFailed
from picaflor.store.direct import reopen_direct, reopen_random
from picaflor.store.files import ShardFiles
from picaflor.store.mirror import Mirror
from picaflor.store.types import ExpertKey

IDLE_DESCRIPTORS = 32
"""Descriptors kept open beyond those in use: a dup per shard is cheap, and other parts need descriptors too."""


class Place(NamedTuple):
    """One way to a shard: source 0 is the model's own file, others its replicas."""

    source: int
    shard: int
    direct: bool


@dataclass(frozen=True, slots=True)
class Route:
    """How one run is read: descriptors for the pool, and what must be released when it has ended.

    `block` 0: through the page cache. `spare` -1: none. `spare_any`: after any failure, else after a refusal only.
    """

    handle: int
    block: int
    spare: int
    spare_any: bool
    source: int
    held: tuple[Place, ...]


class Descriptors:
    """Own descriptors of the files, so that no job holds the container's bounded set of them.

    At most `idle` unused ones stay open.
    """

    def __init__(self, sources: Sequence[ShardFiles], *, idle: int = IDLE_DESCRIPTORS) -> None:
        self._sources = sources
        self._idle_limit = idle
        self._open: dict[Place, int] = {}
        self._users: dict[Place, int] = {}
        self._idle: dict[Place, None] = {}  # places without users, oldest first

    def acquire(self, place: Place) -> int:
        """A descriptor that stays open until it is released as often. Raises ReadFailed."""
        if place not in self._open:
            self._open[place] = self._another(place)
        self._idle.pop(place, None)
        self._users[place] = self._users.get(place, 0) + 1
        return self._open[place]

    def release(self, place: Place) -> None:
        """One user less."""
        self._users[place] -= 1
        if self._users[place] == 0:
            self._idle[place] = None
            if len(self._idle) > self._idle_limit:
                self._close_oldest()

    def size(self, place: Place) -> int:
        """Bytes that an open file has now."""
        return os.fstat(self._open[place]).st_size

    def close(self) -> None:
        """Close all. No job may run."""
        for handle in self._open.values():
            os.close(handle)
        self._open.clear()
        self._users.clear()
        self._idle.clear()

    def _another(self, place: Place) -> int:
        """A new descriptor of an open file; idle ones make room if the system has no more."""
        files = self._sources[place.source]
        path = files.shards[place.shard].path
        with files.handle(place.shard) as handle:
            while True:
                try:
                    return reopen_direct(handle, path) if place.direct else reopen_random(handle, path)
                except OSError as error:
                    full = error.errno in (errno.EMFILE, errno.ENFILE)
                    if full and self._idle:
                        self._close_oldest()
                        continue
                    what = "no descriptor left to read it" if full else "cannot be opened again"
                    raise ReadFailed(f"{show_path(path)}: {what}: {error.strerror}") from error

    def _close_oldest(self) -> None:
        """Close the descriptor that has been idle for longest."""
        place = next(iter(self._idle))
        del self._idle[place]
        os.close(self._open.pop(place))


class Sources:
    """Chooses a source for every run. Not locked.

    `blocks`: block size by (source, shard) of the files that are read past the page cache.
    """

    def __init__(
        self,
        container: ShardFiles,
        *,
        blocks: Mapping[tuple[int, int], int] | None = None,
        mirror: Mirror | None = None,
        idle: int = IDLE_DESCRIPTORS,
    ) -> None:
        self.mirror = mirror
        self.files: tuple[ShardFiles, ...] = (container, *(mirror.replicas if mirror is not None else ()))
        self._blocks = dict(blocks or {})
        self._descriptors = Descriptors(self.files, idle=idle)

    @property
    def direct(self) -> bool:
        """Whether any file is read past the page cache."""
        return bool(self._blocks)

    def route(self, key: ExpertKey, run: ReadRun) -> tuple[Route, ReadFailed | None]:
        """The way of one run, and the failure that kept it from a replica. Raises ReadFailed: the model's file is
        gone."""
        source = self.mirror.source(key.layer, key.expert, run.shard) if self.mirror is not None else 0
        if source == 0:
            return self._own(run), None
        try:
            return self._replica(source, run), None
        except ReadFailed as error:
            return self._own(run), error

    def release(self, route: Route) -> None:
        """The run has ended."""
        for place in route.held:
            self._descriptors.release(place)

    def size(self, shard: int) -> int:
        """Bytes that the model's file has now; a run of it must be under way."""
        return self._descriptors.size(Place(0, shard, False))

    def close(self) -> None:
        """Close all descriptors. No job may run."""
        self._descriptors.close()

    def without_direct(self, source: int, shard: int) -> None:
        """The file system refused whole blocks after all: from now on through the page cache."""
        self._blocks.pop((source, shard), None)

    def _own(self, run: ReadRun) -> Route:
        block = self._block(0, run)
        handles, held = self._hold([Place(0, run.shard, False), *([Place(0, run.shard, True)] if block else [])])
        if block:
            return Route(handles[1], block, handles[0], False, 0, held)
        return Route(handles[0], 0, -1, False, 0, held)

    def _replica(self, source: int, run: ReadRun) -> Route:
        block = self._block(source, run)
        handles, held = self._hold([Place(source, run.shard, bool(block)), Place(0, run.shard, False)])
        return Route(handles[0], block, handles[1], True, source, held)

    def _block(self, source: int, run: ReadRun) -> int:
        return self._blocks.get((source, run.shard), 0) if run.blocks else 0

    def _hold(self, places: Sequence[Place]) -> tuple[list[int], tuple[Place, ...]]:
        """Acquire all or none."""
        handles: list[int] = []
        try:
            for place in places:
                handles.append(self._descriptors.acquire(place))
        except BaseException:
            for place in places[: len(handles)]:
                self._descriptors.release(place)
            raise
        return handles, tuple(places)
