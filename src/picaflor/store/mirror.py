"""Copies of a model's shards on other drives: which copy serves an expert, and whether a copy is one.

Knows files, bytes and the hash that shares experts out; must not know slots, pools or policies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from picaflor.container.files import FileSet
from picaflor.container.safetensors import header_bytes
from picaflor.container.strict_json import show_path
from picaflor.container.types import Shard
from picaflor.errors import BadContainer, ReadFailed
from picaflor.store.files import ShardFiles

MAX_REPLICAS = 4
BUCKETS = 256
COMPARE_BYTES = 8 << 20
_WORD = 0xFFFFFFFF

Progress = Callable[[str, int, int], None]


def bucket(layer: int, expert: int) -> int:
    """One of 256 buckets of an expert; the same number that the C engine computes."""
    word = (layer * 2654435761 & _WORD) ^ (expert * 0x9E3779B9 & _WORD)
    word ^= word >> 16
    word = word * 0x045D9F3B & _WORD
    word ^= word >> 16
    return word & (BUCKETS - 1)


def cuts(weights: Sequence[float]) -> tuple[int, ...]:
    """Where the buckets of each source end: in proportion to the weights, at least one bucket each."""
    if not weights or min(weights) < 0 or sum(weights) <= 0:
        raise ValueError(f"weights of {list(weights)}: none may be negative, one must be above 0")
    total, sum_so_far = sum(weights), 0.0
    ends: list[int] = []
    for place, weight in enumerate(weights):
        sum_so_far += weight
        lowest = (ends[-1] if ends else 0) + 1
        highest = BUCKETS - (len(weights) - 1 - place)
        ends.append(min(max(int(BUCKETS * sum_so_far / total + 0.5), lowest), highest))
    return tuple(ends)


class Replica:
    """A directory that holds some of the model's shards again. Made by `open_replica`; shards have the model's numbers.

    Its files are watched like the model's: one that changes or shrinks is a ReadFailed.
    """

    def __init__(self, path: Path, shards: Sequence[Shard], files: FileSet, places: dict[int, int]) -> None:
        self.path = path
        self.shards = shards
        self._files = files
        self._places = places

    def __contains__(self, shard: object) -> bool:
        return shard in self._places

    def __len__(self) -> int:
        return len(self._places)

    def handle(self, shard: int) -> AbstractContextManager[int]:
        """A shard's descriptor. Raises ReadFailed."""
        return self._files.handle(self._places[shard])

    def close(self) -> None:
        """Close its files."""
        self._files.close()


def open_replica(container: ShardFiles, path: Path) -> Replica:
    """A replica whose files have the size and the header of the model's. Raises BadContainer naming one that has not.

    Shards are matched by file name; a replica may have only some of them, not none. File contents are not compared:
    `picaflor mirror verify --deep` does that.
    """
    if not path.is_dir():
        raise BadContainer(f"mirror {show_path(path)}: no such directory")
    found = [shard for shard in container.shards if (path / shard.path.name).is_file()]
    if not found:
        some = ", ".join(show_path(shard.path.name) for shard in container.shards[:3])
        raise BadContainer(f"mirror {show_path(path)}: has none of the model's {len(container.shards)} shards ({some})")
    for shard in found:
        if (path / shard.path.name).samefile(shard.path):
            raise BadContainer(
                f"mirror {show_path(path)}: {show_path(shard.path.name)} is the model's own file; give a copy of it"
            )
    files = FileSet([path / shard.path.name for shard in found])
    places = {shard.index: place for place, shard in enumerate(found)}
    shards = tuple(Shard(shard.index, path / shard.path.name, shard.nbytes, {}) for shard in container.shards)
    replica = Replica(path, shards, files, places)
    try:
        for shard in found:
            _compare_headers(container, replica, files, places[shard.index], shard)
    except BaseException:
        files.close()
        raise
    return replica


def _compare_headers(container: ShardFiles, replica: Replica, files: FileSet, place: int, shard: Shard) -> None:
    where = f"mirror {show_path(replica.shards[shard.index].path)}"
    nbytes = files.stamp(place).nbytes
    if nbytes != shard.nbytes:
        raise BadContainer(f"{where}: {nbytes} bytes, expected {shard.nbytes} as in {show_path(shard.path)}")
    with container.handle(shard.index) as mine, files.handle(place) as other:
        prefix = _read(mine, 0, 8, shard)
        length = 8 + header_bytes(prefix, nbytes, show_path(shard.path))
        if _read(mine, 0, length, shard) != _read(other, 0, length, replica.shards[shard.index]):
            raise BadContainer(f"{where}: its header differs from that of {show_path(shard.path)}: it is no copy")


def _read(handle: int, offset: int, nbytes: int, shard: Shard) -> bytes:
    from picaflor.container.files import read_exactly

    data = bytearray(nbytes)
    read_exactly(handle, memoryview(data), offset, shard.path, shard.nbytes)
    return bytes(data)


@dataclass(frozen=True, slots=True)
class Mirror:
    """The model's own files and their replicas, and how experts are shared out. Source 0 is the model itself."""

    replicas: tuple[Replica, ...]
    weights: tuple[float, ...]
    ends: tuple[int, ...]

    @classmethod
    def shared_by(cls, replicas: Sequence[Replica], weights: Sequence[float]) -> Mirror:
        """One weight per source, the model first. Raises ValueError for weights that share nothing out."""
        if len(weights) != len(replicas) + 1:
            raise ValueError(f"{len(weights)} weights for {len(replicas) + 1} sources")
        return cls(tuple(replicas), tuple(weights), cuts(weights))

    def source(self, layer: int, expert: int, shard: int) -> int:
        """Which source serves a shard's part of an expert: 0, or 1 + the replica's number; 0 if it lacks the shard."""
        mine = bucket(layer, expert)
        chosen = next(place for place, end in enumerate(self.ends) if mine < end)
        return chosen if chosen == 0 or shard in self.replicas[chosen - 1] else 0

    def close(self) -> None:
        """Close the replicas' files."""
        for replica in self.replicas:
            replica.close()


@dataclass(frozen=True, slots=True)
class Difference:
    """The first byte in which a file of a replica differs from the model's."""

    path: Path
    offset: int


def compare_bytes(container: ShardFiles, replica: Replica, progress: Progress) -> Difference | None:
    """Read all shards that both have and compare them byte by byte. Raises ReadFailed."""
    shards = [shard for shard in container.shards if shard.index in replica]
    total = sum(shard.nbytes for shard in shards)
    done = 0
    for shard in shards:
        other = replica.shards[shard.index]
        with container.handle(shard.index) as mine, replica.handle(shard.index) as theirs:
            for offset in range(0, shard.nbytes, COMPARE_BYTES):
                nbytes = min(COMPARE_BYTES, shard.nbytes - offset)
                left, right = _read(mine, offset, nbytes, shard), _read(theirs, offset, nbytes, other)
                if left != right:
                    first = next(i for i in range(nbytes) if left[i] != right[i])
                    return Difference(other.path, offset + first)
                done += nbytes
                progress("comparing", done, total)
    return None


def open_replicas(container: ShardFiles, paths: Sequence[Path]) -> list[Replica]:
    """All replicas, or none. Raises BadContainer, also for more than MAX_REPLICAS and for one that is the model."""
    if len(paths) > MAX_REPLICAS:
        raise BadContainer(f"{len(paths)} mirrors; at most {MAX_REPLICAS} are accepted")
    opened: list[Replica] = []
    try:
        for path in paths:
            opened.append(open_replica(container, path))
    except (BadContainer, ReadFailed):
        for replica in opened:
            replica.close()
        raise
    return opened
