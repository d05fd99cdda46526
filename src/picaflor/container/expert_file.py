"""The read plan of one routed expert: few reads, and where each plane lands in the expert's slot.

Knows spans and bytes; must not know formats, backends or how reads are issued. The order of an expert's tensors in the
file is never assumed: spans are sorted by offset.
"""

from __future__ import annotations

from dataclasses import dataclass

from picaflor.container.types import Expert, Span

RUN_ALIGN_BYTES = 64
SCALE_ALIGN_BYTES = 4
MAX_GAP_BYTES = 4096

Offsets = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReadRun:
    """One contiguous read: `nbytes` from `offset` of a shard, to `slot_offset` in the slot (all in bytes)."""

    shard: int
    offset: int
    nbytes: int
    slot_offset: int


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


def plan_reads(expert: Expert, *, max_gap: int = MAX_GAP_BYTES) -> ExpertReads:
    """The fewest runs that hold all planes of `expert`: spans that touch or lie at most `max_gap` bytes apart merge.

    A run starts at a multiple of 64 bytes in the slot. A scale plane (any but a matrix's first) always starts at a
    multiple of 4 there, and so does a first plane that does so in the file: where a merged run would break that, the
    plane starts a run of its own.
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
    return _place(built, [len(weight.spans) for weight in expert.matrices])


def _joins(run: _Run, span: Span, plane: int, max_gap: int) -> bool:
    """Whether a span continues a run."""
    if span.shard != run.shard or span.offset - run.end > max_gap:
        return False
    free = plane == 0 and span.offset % SCALE_ALIGN_BYTES != 0
    return free or (span.offset - run.offset) % SCALE_ALIGN_BYTES == 0


def _place(built: list[_Run], plane_counts: list[int]) -> ExpertReads:
    """Give every run its place in the slot, in file order."""
    offsets = [[0] * count for count in plane_counts]
    runs: list[ReadRun] = []
    place = 0
    for run in built:
        runs.append(ReadRun(run.shard, run.offset, run.end - run.offset, place))
        for span, matrix, plane in run.planes:
            offsets[matrix][plane] = place + span.offset - run.offset
        place = -(-(place + run.end - run.offset) // RUN_ALIGN_BYTES) * RUN_ALIGN_BYTES
    gate, up, down = (tuple(row) for row in offsets)
    return ExpertReads(tuple(runs), (gate, up, down), place)
