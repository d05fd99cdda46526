"""How experts are read: past the page cache or through it, from which drives, with which engine and depth.

Decides from options and a probe of the files; must not know programs, slots or how a read is carried out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from picaflor.container.strict_json import show_path
from picaflor.container.types import Expert
from picaflor.errors import UsageError
from picaflor.models.config import Notices
from picaflor.sizes import format_bytes
from picaflor.store.budget import Source
from picaflor.store.direct import DirectFiles, direct_pays, probe_direct_files
from picaflor.store.files import ShardFiles
from picaflor.store.mirror import Mirror, Replica, open_replicas
from picaflor.store.mirror_probe import measure_sources
from picaflor.store.sources import Sources

READ_DEPTH = 8
"""Reads under way at once: enough for a drive to give its full rate with pieces of 1 MiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """What a user may choose about reads; None: the plan decides. `mirrors`: directories of replicas.

    `threads` is how many reads the engine of that name has under way, `depth` how many an io_uring has.
    """

    direct: str = "auto"
    engine: str = "auto"
    threads: int | None = None
    depth: int | None = None
    mirrors: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Memory in bytes, as far as it is known before slots are given out.

    `experts`: all routed experts. `slots`: what their slots may take. `pages`: what is left to file pages then, None
    where the system does not tell.
    """

    experts: int
    slots: int
    pages: int | None


@dataclass(frozen=True, slots=True)
class Reading:
    """The decision. `blocks`: block size by (source, shard) of the files read past the page cache."""

    blocks: Mapping[tuple[int, int], int] = field(default_factory=dict)
    mirror: Mirror | None = None
    engine: str = "threads"
    depth: int = READ_DEPTH

    @property
    def direct_shards(self) -> frozenset[int]:
        """Shards whose experts need slots with room for whole blocks."""
        return frozenset(shard for _, shard in self.blocks)

    def to_json(self) -> dict[str, Any]:
        """The decision as JSON data."""
        return {
            "mode": "direct" if self.blocks else "buffered",
            "engine": self.engine,
            "depth": self.depth,
            "mirror_weights": list(self.mirror.weights) if self.mirror is not None else None,
        }

    def sources(self, container: ShardFiles) -> Sources:
        """The files as a store's reader wants them; each store has its own."""
        return Sources(container, blocks=self.blocks, mirror=self.mirror)

    def close(self) -> None:
        """Close the mirror's files. No store may read."""
        if self.mirror is not None:
            self.mirror.close()


def decide_reading(
    container: ShardFiles,
    experts: Mapping[int, Sequence[Expert]],
    options: ReadOptions,
    room: Room,
    *,
    notices: Notices,
) -> Reading:
    """Probe the files and decide. Raises BadContainer for a mirror that is no copy, ReadFailed for a file that is gone.

    One line is told where the files refuse what was asked for (an error under strict), one with a mirror's weights.
    """
    shards = sorted({span.shard for all_ in experts.values() for e in all_ for m in e.matrices for span in m.spans})
    replicas = open_replicas(container, options.mirrors)
    try:
        blocks: dict[tuple[int, int], int] = {}
        if _wants_direct(options.direct, room):
            sources: list[ShardFiles] = [container, *replicas]
            for number, files in enumerate(sources):
                here = [shard for shard in shards if number == 0 or shard in replicas[number - 1]]
                found = probe_direct_files(files, here)
                blocks |= {(number, shard): size for shard, size in found.blocks.items()}
                _tell_refused(options.direct, found, notices.note)
        mirror = _mirror(container, replicas, experts, blocks, notices.tell) if replicas else None
    except BaseException:
        for replica in replicas:
            replica.close()
        raise
    engine = "threads" if options.engine == "auto" else options.engine
    depth = options.threads if engine == "threads" else options.depth
    return Reading(blocks, mirror, engine, depth or READ_DEPTH)


def room_for(experts: Mapping[int, Sequence[Expert]], sources: Sequence[Source], slots: int | None) -> Room:
    """Memory for experts and pages from what `store.budget` says; `slots` per layer where the user fixed them.

    What resident weights take is left out: the rule needs no more than the order of things.
    """
    total = sum(expert.nbytes for members in experts.values() for expert in members)
    known = [source.nbytes for source in sources if source.nbytes is not None]
    machine = [source.nbytes for source in sources if source.nbytes is not None and source.name != "--ram"]
    room = min(known, default=0)
    if slots is not None:
        room = sum(slots * max(expert.nbytes for expert in members) for members in experts.values())
    return Room(experts=total, slots=room, pages=min(machine) - min(room, total) if machine else None)


def _wants_direct(mode: str, room: Room) -> bool:
    if mode == "auto":
        streamed = room.experts - min(room.slots, room.experts)
        return direct_pays(streamed_bytes=streamed, spare_bytes=room.pages)
    if mode not in ("on", "off"):
        raise UsageError(f"--direct {mode}: accepted are auto, on and off")
    return mode == "on"


def _tell_refused(mode: str, found: DirectFiles, notice: Callable[[str], None]) -> None:
    """One line for all files that refuse; under `auto` nobody asked for it."""
    if found.refused and mode == "on":
        first = next(iter(found.refused.values()))
        more = f" (and {len(found.refused) - 1} more files)" if len(found.refused) > 1 else ""
        notice(f"--direct on: {first}{more}: read through the page cache")


def _mirror(
    container: ShardFiles,
    replicas: Sequence[Replica],
    experts: Mapping[int, Sequence[Expert]],
    blocks: Mapping[tuple[int, int], int],
    notice: Callable[[str], None],
) -> Mirror:
    """Measure the sources together and share the experts out by what each gave."""
    widest = max(expert.nbytes for members in experts.values() for expert in members)
    rates = measure_sources(container, replicas, nbytes=widest, direct=bool(blocks))
    mirror = Mirror.shared_by(replicas, rates)
    names = ["the model", *(show_path(replica.path) for replica in replicas)]
    parts = [f"{name} {format_bytes(round(rate))}/s" for name, rate in zip(names, rates, strict=True)]
    notice(f"mirror: {', '.join(parts)}; experts are shared out in that proportion")
    return mirror
