"""The read plan of one routed expert: few reads, and where each plane lands in the expert's slot.

Knows spans and bytes; must not know formats, backends or how reads are issued. The order of an expert's tensors in the
file is never assumed: spans are sorted by offset.
"""

from __future__ import annotations

from collections.abc import Container as Members
from dataclasses import dataclass

from picaflor.container.types import Expert, Span

RUN_ALIGN_BYTES = 64
SCALE_ALIGN_BYTES = 4
MAX_GAP_BYTES = 4096
BLOCK_BYTES = 4096
"""Runs that are read in whole blocks keep their place modulo this; no file system that we read so wants more."""

Offsets = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReadRun:
    """One contiguous read: `nbytes` from `offset` of a shard, to `slot_offset` in the slot (all in bytes).

    `blocks`: offset and slot offset leave the same rest modulo BLOCK_BYTES, and the slot has room for the whole blocks
    around the run.
    """

    shard: int
    offset: int
    nbytes: int
    slot_offset: int
    blocks: bool = False


@dataclass(frozen=True, slots=True)
class ExpertReads:
    """All reads of one expert, ascending in (shard, offset), and the slot that they fill.

    `offsets` holds one tuple per matrix (gate, up, down) with one slot offset per plane. `nbytes` is the slot's size,
    a multiple of 64; gap bytes between two planes may be read into it.
    """

    runs: tuple[ReadRun, ...]
    offsets: tuple[Offsets, Offsets, Offsets]
    nbytes: int

    @property
    def read_nbytes(self) -> int:
        """Bytes read from disk."""
        return sum(run.nbytes for run in self.runs)


@dataclass(slots=True)
class _Run:
    """A run being built: file range and the planes in it, as (span, matrix, plane)."""

    shard: int
    offset: int
    end: int
    planes: list[tuple[Span, int, int]]


def plan_reads(expert: Expert, *, max_gap: int = MAX_GAP_BYTES, blocks: Members[int] = ()) -> ExpertReads:
    """The fewest runs that hold all planes of `expert`: spans that touch or lie at most `max_gap` bytes apart merge.

    A run starts at a multiple of 64 bytes in the slot. A scale plane (any but a matrix's first) always starts at a
    multiple of 4 there, and so does a first plane that does so in the file: where a merged run would break that, the
    plane starts a run of its own.

    Runs of the shards in `blocks` are placed so that whole blocks of the file can be read into a slot that starts at a
    multiple of BLOCK_BYTES and whose size is rounded up to one; a run with a scale plane off a multiple of 4 in the
    file stays as it is.
    """
    planes = [
        (span, matrix, plane)
        for matrix, weight in enumerate(expert.matrices)
        for plane, span in enumerate(weight.spans)
    ]
    planes.sort(key=lambda entry: (entry[0].shard, entry[0].offset))
    built: list[_Run] = []
    for entry in planes:
        span, _, plane = entry
        run = built[-1] if built else None
        if run is not None and _joins(run, span, plane, max_gap):
            run.end = max(run.end, span.offset + span.nbytes)
            run.planes.append(entry)
        else:
            built.append(_Run(span.shard, span.offset, span.offset + span.nbytes, [entry]))
    return _place(built, [len(weight.spans) for weight in expert.matrices], blocks)


def _joins(run: _Run, span: Span, plane: int, max_gap: int) -> bool:
    """Whether a span continues a run."""
    if span.shard != run.shard or span.offset - run.end > max_gap:
        return False
    free = plane == 0 and span.offset % SCALE_ALIGN_BYTES != 0
    return free or (span.offset - run.offset) % SCALE_ALIGN_BYTES == 0


def _place(built: list[_Run], plane_counts: list[int], blocks: Members[int]) -> ExpertReads:
    """Give every run its place in the slot, in file order."""
    offsets = [[0] * count for count in plane_counts]
    runs: list[ReadRun] = []
    place = end = 0
    for run in built:
        whole = run.shard in blocks and all(
            plane == 0 or span.offset % SCALE_ALIGN_BYTES == 0 for span, _, plane in run.planes
        )
        if whole:
            place = _round_up(place, BLOCK_BYTES) + run.offset % BLOCK_BYTES
        nbytes = run.end - run.offset
        runs.append(ReadRun(run.shard, run.offset, nbytes, place, whole))
        for span, matrix, plane in run.planes:
            offsets[matrix][plane] = place + span.offset - run.offset
        end = _round_up(place + nbytes, RUN_ALIGN_BYTES)
        place = _round_up(end, BLOCK_BYTES) if whole else end
    gate, up, down = (tuple(row) for row in offsets)
    return ExpertReads(tuple(runs), (gate, up, down), end)


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
