"""Calls of routed experts: launches for each kind of layout and each bank, over pairs of a row and a choice.

Knows the tier, kernels and prepared rows; must not know families or files. A pair is a row and one of its choices. Few
rows: pairs go one by one. Many: they are sorted by expert on the device and go in tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from picaflor.backends.api import ExpertLayout, MatrixLayout, Rows
from picaflor.backends.vulkan.decode import Reader, Shape, aligned, needs, shape_of, wide
from picaflor.backends.vulkan.device import Buffer, Gpu, Launch, Stream
from picaflor.backends.vulkan.factors import Factor, factor_for, twins
from picaflor.backends.vulkan.prepared import Prepared, Source
from picaflor.backends.vulkan.products import COMBINE, inner_kernel, outer_kernel, tiles_kernel
from picaflor.backends.vulkan.program import Moment, memory_of, stride_of
from picaflor.backends.vulkan.tier import ALIGN_BYTES, ExpertTier, HeldLayer, Key, Slot
from picaflor.backends.vulkan.tiling import Tile, tile_for
from picaflor.backends.vulkan.wgsl import LANES
from picaflor.formats.numeric import ceil_div

FEW_ROWS: Final = 4
"""Most rows whose pairs are computed one by one."""
Scratch = Callable[[str, int], Buffer]
"""A buffer by its use and size in bytes; the same one for the same words."""


@dataclass(frozen=True, slots=True)
class Work:
    """What all calls of a recorder share."""

    gpu: Gpu
    precision: str
    max_rows: int
    frame: Buffer
    scratch: Scratch
    lattice: Callable[[], Buffer]


@dataclass(slots=True)
class Kind:
    """Launches for experts with one layout: `inner` and `outer` by bank, and what each needs made before it.
    `across`: workgroups of an inner and of an outer launch for one expert.
    """

    before: list[Prepared]
    between: list[Prepared]
    inner: list[Launch]
    outer: list[Launch]
    across: tuple[int, int]


@dataclass(slots=True)
class Ways:
    """All launches of a call for one number of pairs that go together."""

    together: int
    tiled: bool
    kinds: list[Kind]
    tiles: Launch | None


class ExpertCall:
    """One recorded call of a layer's experts."""

    def __init__(self, work: Work, tier: ExpertTier, held: HeldLayer, rows: Sequence[Rows], space: int) -> None:
        self._work = work
        self._tier = tier
        self._held = held
        self._x, self._ids, self._weights, self._out = rows
        self._space = space
        self._top_k = self._ids.width
        self._hidden = self._x.width
        self._ways: dict[tuple[int, bool], Ways] = {}
        self._version = -1
        self._places: Buffer = None
        self._told: dict[int, Slot] | None = None
        self._used: list[tuple[int, int]] = []
        pairs = work.max_rows * self._top_k
        inner = max(layout.gate.rows for layout in held.layouts)
        self._h = work.scratch("h", 4 * pairs * inner)
        self._results = work.scratch("results", 4 * pairs * self._hidden)
        self._combine = Launch(
            COMBINE,
            (self._results, memory_of(self._weights), memory_of(self._ids), memory_of(self._out), work.frame),
            {
                "space": space, "top_k": self._top_k, "experts": len(held.layouts), "width": self._hidden,
                "out_stride": stride_of(self._out), "out_at": self._out.start,
            },
        )  # fmt: skip

    # ---- running ----

    def run(self, moment: Moment) -> None:
        """out = sum over k, in routing order, of weights[k] * expert[ids[k]](x). Raises ReadFailed."""
        if self._held.complete:
            self._tell(self._held.slots)
            self._some(moment)
        else:
            self._ask(moment)
        moment.stream.launch(self._combine, moment.count * ceil_div(self._hidden, LANES))

    def _ask(self, moment: Moment) -> None:
        """Compute the experts that are here, then those that are sent for, as many at a time as there is room."""
        stream, held, tier = moment.stream, self._held, self._tier
        stream.submit()
        raw = self._work.gpu.read(memory_of(self._ids), 0, 4 * moment.count * self._top_k)
        chosen = raw.view(np.int32)
        if chosen.min() < 0 or chosen.max() >= len(held.layouts):
            raise ValueError(f"a row chose an expert outside 0 to {len(held.layouts) - 1}: {chosen.tolist()}")
        wanted = np.unique(chosen).tolist()
        tier.warm(held, wanted)
        here = {number: held.slots[number] for number in wanted if number in held.slots}
        tier.counters.hits += len(here)
        missing = np.array([number for number in wanted if number not in here], np.int32)
        if here:
            self._part(moment, here)
        if not len(missing):
            return
        assert moment.experts is not None
        busy: set[Key] = set()
        part: dict[int, Slot] = {}
        with moment.experts.acquire(held.layer, missing) as lease:
            for numbers, addresses in lease.batches():
                for number, address in zip(numbers.tolist(), addresses.tolist(), strict=True):
                    slot = tier.room(busy)
                    if slot is None:
                        self._part(moment, part)
                        part, busy = {}, set()
                        slot = tier.room(busy)
                        assert slot is not None
                    tier.send(held, number, address, slot)
                    part[number] = slot
                    busy.add((held.layer, number))
        self._part(moment, part)

    def _part(self, moment: Moment, slots: dict[int, Slot]) -> None:
        """The results of these experts' pairs, submitted: slots and table may change afterwards."""
        self._tell(slots)
        self._some(moment)
        moment.stream.submit()

    def _tell(self, slots: dict[int, Slot]) -> None:
        """Write the table of slots where it differs from what the device has."""
        self._renew()
        if self._told == slots:
            return
        banks, experts = len(self._tier.banks), len(self._held.layouts)
        table = np.zeros((len(self._held.kinds), banks, experts), np.uint32)
        for number, slot in slots.items():
            table[self._held.kind_of[number], slot.bank, number] = slot.offset // ALIGN_BYTES + 1
        self._work.gpu.write(self._places, 0, table)
        self._told = dict(slots)
        self._used = sorted({(self._held.kind_of[number], slot.bank) for number, slot in slots.items()})

    def _renew(self) -> None:
        """Launches are bound to banks: make them again where there are others."""
        if self._version != self._tier.version or self._places is None:
            self._ways.clear()
            cells = len(self._held.kinds) * len(self._tier.banks) * len(self._held.layouts)
            self._places = self._work.gpu.buffer(4 * cells, "a table of experts")
            self._version, self._told = self._tier.version, None

    def _some(self, moment: Moment) -> None:
        assert self._told is not None
        ways = self._way(moment.count)
        stream, pairs = moment.stream, moment.count * self._top_k
        units = pairs
        if ways.tiles is not None:
            stream.launch(ways.tiles, 1)
            units = pairs // ways.together + min(len(self._held.layouts), pairs)
        made: set[int] = set()
        for number, kind in enumerate(ways.kinds):
            banks = [bank for found, bank in self._used if found == number]
            if banks:
                self._kind(stream, kind, banks, moment.count, units, made)

    def _kind(self, stream: Stream, kind: Kind, banks: Sequence[int], count: int, units: int, made: set[int]) -> None:
        for prepared in kind.before:
            if id(prepared) not in made:
                prepared.make(stream, count)
                made.add(id(prepared))
        for bank in banks:
            stream.launch(kind.inner[bank], units * kind.across[0])
        for prepared in kind.between:
            prepared.make(stream, count)
        for bank in banks:
            stream.launch(kind.outer[bank], units * kind.across[1])

    # ---- launches ----

    def _way(self, count: int) -> Ways:
        """Pairs one by one for few rows, else in tiles, larger ones where experts have many."""
        tiled = count > FEW_ROWS
        together = (8 if count * self._top_k >= 8 * len(self._held.layouts) else 4) if tiled else 1
        key = (together, tiled)
        if key not in self._ways:
            self._ways[key] = self._made(together, tiled)
        return self._ways[key]

    def _made(self, together: int, tiled: bool) -> Ways:
        work, pairs = self._work, self._work.max_rows * self._top_k
        given: tuple[Buffer, ...] = (memory_of(self._ids),)
        tiles = None
        if tiled:
            experts = len(self._held.layouts)
            most = pairs // together + min(experts, pairs)
            given = (work.scratch("tiles", 4 * (1 + 3 * most)), work.scratch("order", 4 * pairs))
            values = {"space": self._space, "top_k": self._top_k}
            tiles = Launch(tiles_kernel(experts, together), (memory_of(self._ids), *given, work.frame), values)
        shared: dict[Any, Prepared] = {}
        kinds = [
            self._kind_of(number, layout, together, tiled, given, shared)
            for number, layout in enumerate(self._held.kinds)
        ]
        return Ways(together, tiled, kinds, tiles)

    def _kind_of(self, number: int, layout: ExpertLayout, together: int, tiled: bool, given: tuple[Buffer, ...],
                 shared: dict[Any, Prepared]) -> Kind:  # fmt: skip
        inner = layout.gate.rows
        x = Source(memory_of(self._x), stride_of(self._x), self._x.start, self._work.frame, self._space)
        h = Source(self._h, inner, 0, self._work.frame, self._space, self._top_k)
        both = all(_wide(matrix) for matrix in (layout.gate, layout.up))
        tiles = [self._tile(together, layout.gate, layout.up), self._tile(together, layout.down)]
        sides = [
            self._side(matrix, prefix, source, rows, tile, together, vectors, shared)
            for matrix, prefix, source, rows, tile, vectors in (
                (layout.gate, "g_", x, self._work.max_rows, tiles[0], both),
                (layout.up, "u_", x, self._work.max_rows, tiles[0], both),
                (layout.down, "d_", h, self._work.max_rows * self._top_k, tiles[1], _wide(layout.down)),
            )
        ]
        gate, up, down = sides
        twin = twins(self._work.gpu.tiling, gate.factor, up.factor) if gate.shape == up.shape else None
        launches: tuple[list[Launch], list[Launch]] = ([], [])
        for bank, memory in enumerate(self._tier.banks):
            common = {
                "space": self._space, "top_k": self._top_k, "experts": len(self._held.layouts),
                "where_at": (number * len(self._tier.banks) + bank) * len(self._held.layouts),
            }  # fmt: skip
            for which, (parts, out, rows) in enumerate(
                (((gate, up), self._h, inner), ((down,), self._results, self._hidden))
            ):
                if which == 1:
                    kernel = outer_kernel(down.factor, together, tiled)
                elif twin is None:
                    kernel = inner_kernel(gate.factor, up.factor, together, tiled)
                else:
                    kernel = inner_kernel(twin, None, together, tiled)
                read = parts[:1] if twin is not None else parts
                buffers = [buffer for part in read for buffer in part.buffers]
                grids = any(part.factor.reader.format == "e8-iq3-lattice" for part in parts)
                values = {**common, "rows": rows}
                for part in parts:
                    values.update(part.values)
                lattice = (self._work.lattice(),) if grids else ()
                launches[which].append(
                    Launch(kernel, (*buffers, memory, self._places, *given, out, self._work.frame, *lattice), values)
                )
        before = list(dict.fromkeys(part.prepared for part in (gate, up) if part.prepared is not None))
        between = [down.prepared] if down.prepared is not None else []
        across = ceil_div(inner, tiles[0].rows), ceil_div(self._hidden, tiles[1].rows)
        return Kind(before, between, launches[0], launches[1], across)

    def _tile(self, together: int, *matrices: MatrixLayout) -> Tile:
        floats = any(needs(one.format, one.group_size, self._work.precision) is None for one in matrices)
        groups = max(shape_of(one.format, one.cols, one.group_size).groups for one in matrices)
        return tile_for(self._work.gpu.tiling, together, groups, floats=floats)

    def _side(self, matrix: MatrixLayout, prefix: str, source: Source, rows: int, tile: Tile, together: int,
              vectors: bool, shared: dict[Any, Prepared]) -> _Side:  # fmt: skip
        shape = shape_of(matrix.format, matrix.cols, matrix.group_size)
        wanted = needs(matrix.format, matrix.group_size, self._work.precision)
        codes, scales = matrix.offsets[0], matrix.offsets[-1]
        reader = Reader(
            matrix.format,
            prefix,
            "bank",
            "bank",
            vectors,
            aligned(matrix.format, shape.row_bytes, codes),
            scales % 4 == 0,
        )
        planes = 0 if wanted is None else wanted.planes
        factor = factor_for(self._work.gpu.tiling, tile, reader, planes, shape.groups, shape.group, together)
        prepared = None
        if wanted is not None:
            key = (wanted, matrix.cols, id(source.memory))
            if key not in shared:
                use = "x" if source.times == 1 else "h"
                shared[key] = Prepared(
                    self._work.gpu, wanted, matrix.cols, rows, source,
                    lambda nbytes, what: self._work.scratch(f"{what} {use} {wanted}", nbytes),
                )  # fmt: skip
            prepared = shared[key]
        values = {
            **shape.fields(prefix), prefix + "cols": matrix.cols, prefix + "x_stride": source.stride,
            prefix + "x_at": source.start, prefix + "codes_at": codes, prefix + "scales_at": scales,
        }  # fmt: skip
        buffers = (source.memory,) if prepared is None else (prepared.digits, prepared.steps)
        return _Side(factor, shape, prepared, buffers, values)


@dataclass(frozen=True, slots=True)
class _Side:
    """One matrix of a kind: how it is computed, its activations, its part of the uniform."""

    factor: Factor
    shape: Shape
    prepared: Prepared | None
    buffers: tuple[Buffer, ...]
    values: dict[str, int]


def _wide(matrix: MatrixLayout) -> bool:
    shape = shape_of(matrix.format, matrix.cols, matrix.group_size)
    return wide(matrix.format, shape.group, shape.row_bytes, matrix.offsets[0])
