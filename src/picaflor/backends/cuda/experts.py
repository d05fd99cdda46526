"""The routed experts of a layer that lie on a device: all rows and all chosen experts in two launches.

Knows where experts lie (a table of addresses), their shapes and formats; must not know who holds them, models or files.
First launch: gate, up, SiLU and the digits that down needs. Second: down and the sum in routing order. Many rows go
expert by expert through tiles instead, with the same bits. docs/design/contracts.md, Experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import triton
import triton.language as tl
from numpy.typing import NDArray

from picaflor.backends.api import ExpertLayout, MatrixLayout
from picaflor.backends.cuda import interpret
from picaflor.backends.cuda.arithmetic import EXACT, silu
from picaflor.backends.cuda.formats import NUMBERS, PLANES, Needs, Tensor, lattice, needs, row_bytes
from picaflor.backends.cuda.launches import pieces
from picaflor.backends.cuda.matmul import native
from picaflor.backends.cuda.overlap import overlaps
from picaflor.backends.cuda.prepare import Prepared, prepare, room_for, store_group
from picaflor.backends.cuda.products import float_tile, integer_tile, row_product, two_products
from picaflor.backends.cuda.tiles import ManyTile, Tile, shared_limit, tile_of_many, tile_of_stack
from picaflor.backends.cuda.vectors import let_the_next_start, wait_for_the_last
from picaflor.formats.numeric import ceil_div

ADDRESSES: Final = 6
"""Of an expert in a table: codes and scales of gate, up and down."""
FEWEST_ROWS: Final = 2
"""Of a matrix in a program, where counters are used."""
FEW_ROWS: Final = 8
"""Up to here each chosen expert is a product of its own; its matrix is read for each of its rows."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """Format and shape of one matrix of an expert; `aligned`: its rows of codes start at multiples of 16 bytes."""

    format: str
    rows: int
    cols: int
    group_size: int
    aligned: bool

    @property
    def row_bytes(self) -> int:
        """Distance of two rows of codes."""
        return row_bytes(self.format, self.cols, self.group_size)

    def needs(self, precision: str) -> Needs | None:
        """What activations it meets."""
        return needs(self.format, self.group_size, precision)

    @property
    def tile(self) -> Tile:
        """What a program takes for one row."""
        return tile_of_stack(self.format, self.cols, self.group_size, aligned=self.aligned)


@dataclass(frozen=True, slots=True)
class ExpertKind:
    """What experts of one kind have in common; they differ in where their planes lie."""

    gate: Matrix
    up: Matrix
    down: Matrix


@dataclass(slots=True)
class ExpertTable:
    """The experts of one layer on a device.

    `addresses` int64 `[experts, 6]` and `kind_of` int32 `[experts]` (-1: not here) lie on the device; kernels read them
    when they run, so that a captured graph sees what was promoted since.
    """

    kinds: tuple[ExpertKind, ...]
    addresses: Tensor = field(repr=False)
    kind_of: Tensor = field(repr=False)


def kind_of_layout(layout: ExpertLayout) -> ExpertKind:
    """The kind of an expert in a slot at a multiple of 16 bytes."""
    return ExpertKind(*(_matrix(m) for m in (layout.gate, layout.up, layout.down)))


def _matrix(m: MatrixLayout) -> Matrix:
    aligned = m.offsets[0] % 16 == 0 and row_bytes(m.format, m.cols, m.group_size) % 16 == 0
    return Matrix(m.format, m.rows, m.cols, m.group_size, aligned)


def plane_addresses(layout: ExpertLayout, slot: int) -> list[int]:
    """A row of the table for an expert whose slot starts at address `slot`."""
    return [slot + m.offsets[p] for m in (layout.gate, layout.up, layout.down) for p in (0, -1)]


class TableMaker:
    """Makes tables of the experts of one layer; what their layouts say is worked out once."""

    def __init__(self, layouts: Sequence[ExpertLayout], device: Any) -> None:
        kinds: dict[ExpertKind, int] = {}
        numbers = [kinds.setdefault(kind_of_layout(layout), len(kinds)) for layout in layouts]
        self._device = device
        self._kinds = tuple(kinds)
        self._numbers = np.array(numbers, np.int32)
        self._offsets = np.array([plane_addresses(layout, 0) for layout in layouts], np.int64)

    @property
    def words(self) -> int:
        """Size of a table in words of 8 bytes."""
        return ADDRESSES * len(self._numbers) + ceil_div(len(self._numbers), 2)

    def put(self, words: NDArray[np.int64], slots: Mapping[int, int]) -> None:
        """Enter experts, by number, in slots at these device addresses, multiples of 16; 0 for one that is not there.

        `words` int64: the memory of a table.
        """
        count = len(self._numbers)
        which = np.fromiter(slots, np.int64, len(slots))
        starts = np.fromiter(slots.values(), np.int64, len(slots))
        words[: ADDRESSES * count].reshape(count, ADDRESSES)[which] = self._offsets[which] + starts[:, None]
        words[ADDRESSES * count :].view(np.int32)[which] = np.where(starts, self._numbers[which], -1)

    def clear(self, words: NDArray[np.int64]) -> None:
        """No expert is there."""
        count = len(self._numbers)
        words[: ADDRESSES * count] = 0
        words[ADDRESSES * count :].view(np.int32)[:] = -1

    def table(self, words: Tensor) -> ExpertTable:
        """The table in words that are on the device."""
        import torch

        count = len(self._numbers)
        kinds = words[ADDRESSES * count :].view(torch.int32)[:count]
        return ExpertTable(self._kinds, words[: ADDRESSES * count].view(count, ADDRESSES), kinds)

    def make(self, slots: Mapping[int, int]) -> ExpertTable:
        """A table of the experts, by number, in slots at these device addresses, multiples of 16; no other is there."""
        import torch

        words = np.empty(self.words, np.int64)
        self.clear(words)
        self.put(words, slots)
        return self.table(torch.from_numpy(words).to(self._device, non_blocking=True))


class LayerTable:
    """The table of one layer that stays where it is, so that captured graphs see what changes.

    `here` bool `[experts]` is what `there` says once it was pushed; nothing may be launched between a change and its
    push. A push goes to the computing stream: work that was launched before sees what was there before.
    """

    def __init__(self, maker: TableMaker, device: Any) -> None:
        import torch

        self._maker = maker
        self._device = device
        self._pinned = torch.empty(maker.words, dtype=torch.int64, pin_memory=device.type != "cpu")
        self._words: NDArray[np.int64] = self._pinned.numpy()
        maker.clear(self._words)
        self._memory = self._pinned.to(device, copy=True)
        self.there = maker.table(self._memory)
        self.here: NDArray[np.bool_] = np.zeros(self.there.kind_of.shape[0], np.bool_)
        self.changed = False
        self._sent: Any = None

    def put(self, number: int, address: int) -> None:
        """The expert is in the slot at this device address, or for 0 nowhere."""
        if self._sent is not None:  # the copy of the last push may not have been made
            self._sent.synchronize()
            self._sent = None
        self._maker.put(self._words, {number: address})
        self.here[number] = address != 0
        self.changed = True

    def push(self) -> None:
        """Let all that is launched from now on see the changes."""
        import torch

        if not self.changed:
            return
        self._memory.copy_(self._pinned, non_blocking=True)
        if self._device.type != "cpu":
            self._sent = torch.cuda.Event()
            self._sent.record(torch.cuda.current_stream(self._device))
        self.changed = False


def table_for(layouts: Sequence[ExpertLayout], slots: Sequence[int], device: Any) -> ExpertTable:
    """A table of experts in slots at the given device addresses, multiples of 16; 0 for one that is not there."""
    return TableMaker(layouts, device).make({number: slot for number, slot in enumerate(slots) if slot})


@triton.jit
def _address(addresses, expert, which: tl.constexpr):
    return tl.load(addresses + expert.to(tl.int64) * 6 + which).to(tl.pointer_type(tl.uint8))


@triton.jit
def _inner(ids, top_k, kind_of, addresses, lattice, kind, inner, hidden, x, x_stride,
           g_digits, g_plane, g_length, g_xs, g_sums, g_tops, g_bytes, g_groups,
           u_digits, u_plane, u_length, u_xs, u_sums, u_tops, u_bytes, u_groups,
           out, arrived, d_digits, d_plane, d_length, d_xs, d_sums, d_tops, d_groups,
           PLANES: tl.constexpr, NATIVE: tl.constexpr, BOTH: tl.constexpr, BO: tl.constexpr,
           G_FORMAT: tl.constexpr, G_GROUP: tl.constexpr, G_PADDED: tl.constexpr, G_EVEN: tl.constexpr,
           G_N: tl.constexpr, G_STEPS: tl.constexpr,
           U_FORMAT: tl.constexpr, U_GROUP: tl.constexpr, U_PADDED: tl.constexpr, U_EVEN: tl.constexpr,
           U_N: tl.constexpr, U_STEPS: tl.constexpr,
           D_GROUP: tl.constexpr, D_PADDED: tl.constexpr, D_HALVES: tl.constexpr,
           OVERLAP: tl.constexpr):  # fmt: skip
    """silu(gate x) * up x of one (row, choice) and BO rows of gate and up; D_GROUP > 0: and the digits of it.

    Who finishes the last rows of one group of down's activations prepares it: which program that is changes no bit.
    """
    if OVERLAP:
        let_the_next_start()
    pair = tl.program_id(1)
    expert = tl.load(ids + pair)
    g_codes, g_scales = _address(addresses, expert, 0), _address(addresses, expert, 1)
    u_codes, u_scales = _address(addresses, expert, 2), _address(addresses, expert, 3)
    if tl.load(kind_of + expert) == kind:
        s = (pair // top_k).to(tl.int64)
        o = tl.program_id(0) * BO + tl.arange(0, BO)
        live = o < inner
        here = tl.minimum(o, inner - 1)
        xf = x + s * x_stride
        if BOTH:
            gate, up = two_products(g_codes, g_scales, u_codes, u_scales, here, g_bytes, g_groups,
                                    g_digits + s * g_length, g_plane, g_xs + s * g_groups,
                                    g_sums + s * g_groups, g_tops + s * g_groups, G_FORMAT, G_GROUP, PLANES, NATIVE,
                                    G_EVEN, BO, G_N, G_STEPS)  # fmt: skip
        else:
            gate = row_product(g_codes, g_scales, lattice, here, hidden, g_bytes, g_groups, xf,
                               g_digits + s * g_length, g_plane, g_xs + s * g_groups, g_sums + s * g_groups,
                               g_tops + s * g_groups, G_FORMAT, G_GROUP, G_PADDED, PLANES, NATIVE, G_EVEN, BO,
                               G_N, G_STEPS, False)  # fmt: skip
            up = row_product(u_codes, u_scales, lattice, here, hidden, u_bytes, u_groups, xf,
                             u_digits + s * u_length, u_plane, u_xs + s * u_groups, u_sums + s * u_groups,
                             u_tops + s * u_groups, U_FORMAT, U_GROUP, U_PADDED, PLANES, NATIVE, U_EVEN, BO,
                             U_N, U_STEPS, False)  # fmt: skip
        h = silu(gate) * up
        row = out + pair.to(tl.int64) * inner
        tl.store(row + o, h, mask=live)
        if D_GROUP > 0:
            SPAN: tl.constexpr = D_GROUP if D_GROUP > BO else BO  # rows that are prepared together
            span = tl.program_id(0) * BO // SPAN
            first = span * SPAN
            expected = (tl.minimum(inner - first, SPAN) + BO - 1) // BO
            tl.debug_barrier()
            count = arrived + pair * ((inner + SPAN - 1) // SPAN) + span
            if tl.atomic_add(count, 1, sem="acq_rel") == expected - 1:
                tl.store(count, 0)
                WIDTH: tl.constexpr = 64 if D_PADDED == 64 else (128 if D_PADDED == 128 else 256)
                TILE: tl.constexpr = SPAN // D_GROUP
                k = tl.arange(0, WIDTH)[None, :]
                g = span * TILE + tl.arange(0, TILE)
                i = g[:, None] * D_GROUP + k
                v = tl.load(row + i, mask=(k < D_GROUP) & (i < inner), other=0.0, cache_modifier=".cg")
                store_group(v, d_digits, (k < D_PADDED) & (g < d_groups)[:, None], k, g[:, None], pair.to(tl.int64),
                            d_plane, d_length, D_PADDED, d_xs, d_groups, 1, d_sums, d_tops, d_groups, g < d_groups,
                            PLANES, D_HALVES,
                            D_PADDED)  # fmt: skip


@triton.jit
def _outer(ids, weights, weights_stride, kind_of, addresses, lattice, kind, hidden, inner, x,
           digits, plane, length, xs, sums, tops, bytes_, groups, pairs, arrived, out, out_stride,
           TOP_K: tl.constexpr, SUM: tl.constexpr, PLANES: tl.constexpr, NATIVE: tl.constexpr,
           BO: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr, EVEN: tl.constexpr,
           N: tl.constexpr, STEPS: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    """pairs[row * TOP_K + k] = down(h_k); SUM: whoever finishes the last k of some rows of down adds them up, in
    routing order: out[row] = sum of weights[k] * pairs[row * TOP_K + k]."""
    pair = tl.program_id(1).to(tl.int64)
    expert = tl.load(ids + pair)
    codes, scales = _address(addresses, expert, 4), _address(addresses, expert, 5)
    if tl.load(kind_of + expert) == kind:
        o = tl.program_id(0) * BO + tl.arange(0, BO)
        live = o < hidden
        here = tl.minimum(o, hidden - 1)
        y = row_product(codes, scales, lattice, here, inner, bytes_, groups, x + pair * inner, digits + pair * length,
                        plane, xs + pair * groups, sums + pair * groups, tops + pair * groups, FORMAT, GROUP, PADDED,
                        PLANES, NATIVE, EVEN, BO, N, STEPS, OVERLAP)  # fmt: skip
        tl.store(pairs + pair * hidden + o, y, mask=live)
        if SUM:
            s = pair // TOP_K
            tl.debug_barrier()
            count = arrived + s * tl.num_programs(0) + tl.program_id(0)
            if tl.atomic_add(count, 1, sem="acq_rel") == TOP_K - 1:
                tl.store(count, 0)
                acc = tl.zeros((BO,), tl.float32)
                for k in tl.static_range(TOP_K):
                    y = tl.load(pairs + (s * TOP_K + k) * hidden + o, mask=live, other=0.0, cache_modifier=".cg")
                    acc = tl.fma(tl.load(weights + s * weights_stride + k), y, acc)
                tl.store(out + s * out_stride + o, acc, mask=live)
    elif OVERLAP:
        wait_for_the_last()  # whoever waits for this kernel waits for the one before it as well


@triton.jit
def _combine(pairs, others, ids, kind_of, weights, weights_stride, out, out_stride, width, TOP_K: tl.constexpr,
             TWO: tl.constexpr, B: tl.constexpr):  # fmt: skip
    s = tl.program_id(0).to(tl.int64)
    o = tl.program_id(1) * B + tl.arange(0, B)
    live = o < width
    acc = tl.zeros((B,), tl.float32)
    for k in tl.static_range(TOP_K):
        place = (s * TOP_K + k) * width
        if TWO:
            here = tl.load(kind_of + tl.load(ids + s * TOP_K + k)) >= 0
            mine = tl.load(pairs + place + o, mask=live & here, other=0.0)
            y = tl.where(here, mine, tl.load(others + place + o, mask=live & (here == 0), other=0.0))
        else:
            y = tl.load(pairs + place + o, mask=live, other=0.0)
        acc = tl.fma(tl.load(weights + s * weights_stride + k), y, acc)
    tl.store(out + s * out_stride + o, acc, mask=live)


def combine(
    pairs: Tensor, weights: Tensor, out: Tensor, *, others: Tensor = None, ids: Tensor = None, kind_of: Tensor = None
) -> None:
    """out[row] = sum over k, in routing order, of weights[row, k] * pairs[row, k]; pairs `[rows, top_k, width]`.

    With `others`, of the same shape, the result of an expert that is not here, by `ids` `[rows, top_k]` and a table's
    `kind_of`, is taken from there.
    """
    rows, top_k, width = pairs.shape
    block = 4096 if interpret.active() else 256
    two = others is not None
    more = (others, ids, kind_of) if two else (pairs, weights, weights)
    _combine[(rows, triton.cdiv(width, block))](
        pairs, *more, weights, weights.stride(0), out, out.stride(0), width, TOP_K=top_k, TWO=two, B=block,
        num_warps=4, **EXACT
    )  # fmt: skip


class _Rows:
    """Prepared rows of x and of h for one call, made once for each need."""

    def __init__(self, x: Tensor, precision: str) -> None:
        self._x = x
        self.precision = precision
        self._made: dict[Needs, Prepared] = {}

    def of(self, matrix: Matrix) -> Prepared | None:
        """x as the matrix needs it; None: as it is."""
        wanted = matrix.needs(self.precision)
        if wanted is None:
            return None
        if wanted not in self._made:
            self._made[wanted] = prepare(self._x, wanted)
        return self._made[wanted]

    def give(self, made: Sequence[Prepared]) -> None:
        """Rows that are there already."""
        self._made.update({rows.needs: rows for rows in made})


def _parts(rows: Prepared | None, x: Tensor) -> tuple[Any, ...]:
    """digits, plane, length, scales, sums, tops: of float formats addresses that are not read."""
    if rows is None:
        return (x, 0, 0, x, x, x)
    d = rows.digits
    return (d, d.stride(0), rows.length, rows.scales, rows.sums[0], rows.sums[1])


def _tile_parts(rows: Prepared | None, x: Tensor, count: int) -> tuple[Any, ...]:
    """What `Prepared.tile` gives; of float formats addresses that are not read."""
    return (x, 0, 0, 0, x, 0, 0) if rows is None else rows.tile(count)


def _constants(matrix: Matrix, rows: Prepared | None, prefix: str) -> dict[str, Any]:
    tile = matrix.tile
    group, padded = (0, 64) if rows is None else (rows.needs.group, rows.needs.padded)
    values = {
        "FORMAT": NUMBERS[matrix.format], "GROUP": group, "PADDED": padded, "EVEN": tile.even,
        "N": tile.groups, "STEPS": tile.steps, "WHOLE": group > 0 and matrix.cols % group == 0,
    }  # fmt: skip
    return {prefix + name: value for name, value in values.items()}


def _row_constants(matrix: Matrix, rows: Prepared | None, prefix: str) -> dict[str, Any]:
    """Those of the kernels that take one row."""
    return {name: value for name, value in _constants(matrix, rows, prefix).items() if not name.endswith("WHOLE")}


def _fuses(wanted: Needs, block: int) -> bool:
    """Whether the first launch can prepare h: whole groups fit a program's rows or the other way round."""
    if wanted.rotated or wanted.group & (wanted.group - 1):
        return False
    return wanted.group % block == 0 or block % wanted.group == 0


def _few(kind: ExpertKind, number: int, table: ExpertTable, x: Tensor, rows: _Rows, ids: Tensor, weights: Tensor,
         pairs: Tensor, out: Tensor | None, arrived: Tensor | None) -> None:  # fmt: skip
    """Both launches for the experts of one kind: results of pairs, and their sum where `out` is given."""
    import torch

    count, top_k = ids.shape
    inner, hidden = kind.gate.rows, kind.gate.cols
    g, u = rows.of(kind.gate), rows.of(kind.up)
    wanted = kind.down.needs(rows.precision)
    h = torch.empty((count * top_k, inner), dtype=torch.float32, device=x.device)
    d = None if wanted is None else room_for(wanted, inner, count * top_k, x.device)
    g_tile, u_tile, d_tile = kind.gate.tile, kind.up.tile, kind.down.tile
    both = g_tile.groups > 0 and (kind.gate.format, kind.gate.group_size, g_tile) == (
        kind.up.format, kind.up.group_size, u_tile
    )  # fmt: skip
    block = min(g_tile.rows, u_tile.rows) // (2 if both else 1)
    fused = arrived is not None and wanted is not None and _fuses(wanted, block)
    overlap = fused and overlaps()
    counters = h if arrived is None else arrived
    grid_table = lattice(str(x.device))
    common = {"PLANES": PLANES[rows.precision], "NATIVE": native(), **EXACT}
    fuse = (wanted.group, wanted.padded, wanted.halves) if fused and wanted is not None else (0, 64, False)
    _inner[(triton.cdiv(inner, block), count * top_k)](
        ids, top_k, table.kind_of, table.addresses, grid_table, number, inner, hidden, x, x.stride(0),
        *_parts(g, x), kind.gate.row_bytes, 0 if g is None else g.groups,
        *_parts(u, x), kind.up.row_bytes, 0 if u is None else u.groups,
        h, counters, *_parts(d, x), 0 if d is None else d.groups,
        BOTH=both, BO=block, **_row_constants(kind.gate, g, "G_"), **_row_constants(kind.up, u, "U_"),
        D_GROUP=fuse[0], D_PADDED=fuse[1], D_HALVES=fuse[2], OVERLAP=overlap, num_warps=g_tile.warps, **common,
    )  # fmt: skip
    if d is not None and wanted is not None and not fused:
        d = prepare(h, wanted, into=d)
    summed = out is not None
    result = pairs if out is None else out
    _outer[(triton.cdiv(hidden, d_tile.rows), count * top_k)](
        ids, weights, weights.stride(0), table.kind_of, table.addresses, grid_table, number, hidden, inner, h,
        *_parts(d, x), kind.down.row_bytes, 0 if d is None else d.groups, pairs, counters, result, result.stride(0),
        TOP_K=top_k, SUM=summed, BO=d_tile.rows, **_row_constants(kind.down, d, ""),
        OVERLAP=overlap, num_warps=d_tile.warps, **common, **({"launch_pdl": True} if overlap else {}),
    )  # fmt: skip


def expert_ffn(
    x: Tensor, ids: Tensor, weights: Tensor, table: ExpertTable, out: Tensor, precision: str, *,
    pairs: Tensor | None = None, prepared: Sequence[Prepared] = (), arrived: Tensor | None = None,
) -> None:  # fmt: skip
    """out[row] = sum over k, in routing order, of weights[row, k] * expert[ids[row, k]](x[row]).

    x float32 `[rows, hidden]`; ids int32 and weights float32 `[rows, top_k]`. All chosen experts must be in the table,
    unless `pairs` float32 `[rows, top_k, hidden]` is given: then the single results of those that are here are written
    there and `out` is left alone: fill in what others computed, then `combine`. `prepared`: rows of x that exist
    already. `arrived`: int32 zeros, at least `counters(rows * top_k, inner, hidden)`, left as zeros; with them all is
    done in two launches, without them the activations of down are prepared and results added up by launches of their
    own.
    """
    import torch

    rows = _Rows(x, precision)
    rows.give(prepared)
    ids = ids.contiguous()
    count, top_k = ids.shape
    results = pairs
    if results is None:
        results = torch.empty((count, top_k, x.shape[1]), dtype=torch.float32, device=x.device)
    parts = _row_parts(table.kinds, count, top_k)
    if len(parts) > 1:
        for start, stop in parts:
            some = [made.part(start, stop) for made in prepared]
            expert_ffn(x[start:stop], ids[start:stop], weights[start:stop], table, out[start:stop], precision,
                       pairs=None if pairs is None else pairs[start:stop], prepared=some, arrived=arrived)  # fmt: skip
        return
    if count <= FEW_ROWS and pairs is None and arrived is not None and len(table.kinds) == 1:
        _few(table.kinds[0], 0, table, x, rows, ids, weights, results, out, arrived)
        return
    for number, kind in enumerate(table.kinds):
        if count <= FEW_ROWS:
            _few(kind, number, table, x, rows, ids, weights, results, None, arrived)
        else:
            _many(kind, number, table, x, rows, ids, results)
    if pairs is None:
        combine(results, weights, out)


def _row_parts(kinds: Sequence[ExpertKind], count: int, top_k: int) -> list[tuple[int, int]]:
    """Rows for one call each: few rows are cut here, many by the tiles of their experts."""
    if count > FEW_ROWS:
        return [(0, count)]
    matrices = [(kind.gate, kind.up, kind.down) for kind in kinds]
    nbytes = max(sum(matrix.rows * matrix.row_bytes for matrix in three) for three in matrices)
    operations = max(sum(2 * matrix.rows * matrix.cols for matrix in three) for three in matrices)
    return pieces(count, top_k * operations, top_k * nbytes)


def counters(pairs: int, inner: int, hidden: int) -> int:
    """How many counters `expert_ffn` may use for up to `pairs` (row, choice) pairs."""
    return pairs * ceil_div(max(inner, hidden), FEWEST_ROWS)


@triton.jit
def _tile(addresses, expert, which: tl.constexpr, lattice, o, cols, row_bytes, groups, x, x_stride, digits, plane,
          length, group_length, xs, xs_stride, xs_group_stride, s, FORMAT: tl.constexpr, GROUP: tl.constexpr,
          PADDED: tl.constexpr, WHOLE: tl.constexpr,
          PLANES: tl.constexpr, NATIVE: tl.constexpr, BO: tl.constexpr, BS: tl.constexpr):  # fmt: skip
    """float32 `[BO, BS]`: rows `o` of a matrix of an expert times rows `s` of x or of its digits."""
    codes = _address(addresses, expert, which)
    scales = _address(addresses, expert, which + 1)
    if FORMAT <= 2 or FORMAT == 10:
        return tl.trans(float_tile(codes, scales, o, cols, row_bytes, x + s * x_stride, FORMAT, 1, False, BO, BS))
    else:
        return integer_tile(codes, scales, lattice, o, cols, row_bytes, groups, digits, plane, length, group_length,
                            xs, xs_stride, xs_group_stride, s, s, FORMAT, GROUP, PADDED, PLANES, WHOLE, NATIVE, BO, BS,
                            1)  # fmt: skip


@triton.jit
def _inner_many(tile_expert, tile_start, tile_end, order, top_k, kind_of, addresses, lattice, kind, inner, hidden,
                x, x_stride,
                g_digits, g_plane, g_length, g_group_length, g_xs, g_xs_stride, g_xs_group_stride, g_bytes, g_groups,
                u_digits, u_plane, u_length, u_group_length, u_xs, u_xs_stride, u_xs_group_stride, u_bytes, u_groups,
                out,
                PLANES: tl.constexpr, NATIVE: tl.constexpr, BO: tl.constexpr, BS: tl.constexpr,
                G_FORMAT: tl.constexpr, G_GROUP: tl.constexpr, G_PADDED: tl.constexpr, G_WHOLE: tl.constexpr,
                U_FORMAT: tl.constexpr, U_GROUP: tl.constexpr, U_PADDED: tl.constexpr,
                U_WHOLE: tl.constexpr):  # fmt: skip
    """As `_inner` for up to BS pairs of one expert."""
    expert = tl.load(tile_expert + tl.program_id(1))
    start = tl.load(tile_start + tl.program_id(1))
    end = tl.load(tile_end + tl.program_id(1))
    if (start < end) & (tl.load(kind_of + expert) == kind):
        place = start + tl.arange(0, BS)
        pair = tl.load(order + tl.minimum(place, end - 1))
        s = (pair // top_k).to(tl.int64)
        o = tl.program_id(0) * BO + tl.arange(0, BO)
        row = tl.minimum(o, inner - 1)
        gate = _tile(addresses, expert, 0, lattice, row, hidden, g_bytes, g_groups, x, x_stride, g_digits, g_plane,
                     g_length, g_group_length, g_xs, g_xs_stride, g_xs_group_stride, s, G_FORMAT, G_GROUP, G_PADDED,
                     G_WHOLE, PLANES, NATIVE, BO, BS)  # fmt: skip
        up = _tile(addresses, expert, 2, lattice, row, hidden, u_bytes, u_groups, x, x_stride, u_digits, u_plane,
                   u_length, u_group_length, u_xs, u_xs_stride, u_xs_group_stride, s, U_FORMAT, U_GROUP, U_PADDED,
                   U_WHOLE, PLANES, NATIVE, BO, BS)  # fmt: skip
        at = out + pair.to(tl.int64)[None, :] * inner + o[:, None]
        tl.store(at, silu(gate) * up, mask=(place < end)[None, :] & (o < inner)[:, None])


@triton.jit
def _outer_many(tile_expert, tile_start, tile_end, order, kind_of, addresses, lattice, kind, hidden, inner, x,
                digits, plane, length, group_length, xs, xs_stride, xs_group_stride, bytes_, groups, out,
                PLANES: tl.constexpr, NATIVE: tl.constexpr, BO: tl.constexpr, BS: tl.constexpr,
                FORMAT: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr, WHOLE: tl.constexpr):  # fmt: skip
    """down of up to BS pairs of one expert, each to its own row."""
    expert = tl.load(tile_expert + tl.program_id(1))
    start = tl.load(tile_start + tl.program_id(1))
    end = tl.load(tile_end + tl.program_id(1))
    if (start < end) & (tl.load(kind_of + expert) == kind):
        place = start + tl.arange(0, BS)
        pair = tl.load(order + tl.minimum(place, end - 1)).to(tl.int64)
        o = tl.program_id(0) * BO + tl.arange(0, BO)
        y = _tile(addresses, expert, 4, lattice, tl.minimum(o, hidden - 1), inner, bytes_, groups, x, inner, digits,
                  plane, length, group_length, xs, xs_stride, xs_group_stride, pair, FORMAT, GROUP, PADDED, WHOLE,
                  PLANES, NATIVE, BO, BS)  # fmt: skip
        at = out + pair[None, :] * hidden + o[:, None]
        tl.store(at, y, mask=(place < end)[None, :] & (o < hidden)[:, None])


def _tiles(ids: Tensor, experts: int, size: int) -> tuple[Tensor, ...]:
    """Pairs sorted by expert, cut into tiles of `size`: expert, start and end of each tile, and the pairs' order.

    The number of tiles does not depend on the choice: those that are not needed are empty.
    """
    import torch

    flat = ids.reshape(-1).to(torch.int64)
    order = torch.argsort(flat, stable=True).to(torch.int32)
    counts = torch.zeros(experts, dtype=torch.int64, device=ids.device)
    counts.scatter_add_(0, flat, torch.ones_like(flat))
    ends = torch.cumsum(counts, 0)
    tile_ends = torch.cumsum((counts + size - 1) // size, 0)
    total = min(ceil_div(flat.numel(), size) + experts, flat.numel())
    number = torch.arange(total, device=ids.device)
    expert = torch.searchsorted(tile_ends, number, right=True).clamp_(max=experts - 1)
    first_tile = tile_ends[expert] - (counts[expert] + size - 1) // size
    start = ends[expert] - counts[expert] + (number - first_tile) * size
    end = torch.minimum(ends[expert], start + size)
    return (*(t.to(torch.int32) for t in (expert, start, end)), order)


def _many_tile(kind: ExpertKind, precision: str, pairs: int, experts: int) -> ManyTile:
    """Rows of a matrix and pairs of a program: more pairs where experts have many."""
    wanted = [matrix.needs(precision) for matrix in (kind.gate, kind.up, kind.down)]
    if None in wanted:
        return ManyTile(64 if interpret.active() else 16, 8, 1, 3)
    padded = max(need.padded for need in wanted if need is not None)
    return tile_of_many(17 if pairs >= 32 * experts else 9, 1, padded, PLANES[precision], shared_limit())


def _many(kind: ExpertKind, number: int, table: ExpertTable, x: Tensor, rows: _Rows, ids: Tensor, out: Tensor) -> None:
    """Tiles of rows for the experts of one kind; results go to `out` `[rows, top_k, hidden]`."""
    import torch

    count, top_k = ids.shape
    inner, hidden = kind.gate.rows, kind.gate.cols
    experts = table.kind_of.shape[0]
    tile = _many_tile(kind, rows.precision, count * top_k, experts)
    tiles = _tiles(ids, experts, tile.columns)
    g, u = rows.of(kind.gate), rows.of(kind.up)
    wanted = kind.down.needs(rows.precision)
    h = torch.empty((count * top_k, inner), dtype=torch.float32, device=x.device)
    grid_table = lattice(str(x.device))
    common = {
        "PLANES": PLANES[rows.precision], "NATIVE": native(), "BO": tile.rows, "BS": tile.columns, "num_warps": 4,
        "num_stages": tile.stages, **EXACT,
    }  # fmt: skip
    shape = ("FORMAT", "GROUP", "PADDED", "WHOLE")
    g_constants, u_constants = (
        {p + n: _constants(m, r, p)[p + n] for n in shape} for m, r, p in ((kind.gate, g, "G_"), (kind.up, u, "U_"))
    )
    *places, order = tiles
    cuts = pieces(len(places[0]), 4 * tile.columns * inner * hidden)
    for start, stop in cuts:
        _inner_many[(triton.cdiv(inner, tile.rows), stop - start)](
            *(place[start:stop] for place in places), order, top_k, table.kind_of, table.addresses, grid_table, number,
            inner, hidden, x, x.stride(0),
            *_tile_parts(g, x, count), kind.gate.row_bytes, 0 if g is None else g.groups,
            *_tile_parts(u, x, count), kind.up.row_bytes, 0 if u is None else u.groups, h, **g_constants,
            **u_constants, **common,
        )  # fmt: skip
    d = None if wanted is None else prepare(h, wanted)
    d_constants = _constants(kind.down, d, "")
    for start, stop in cuts:
        _outer_many[(triton.cdiv(hidden, tile.rows), stop - start)](
            *(place[start:stop] for place in places), order, table.kind_of, table.addresses, grid_table, number, hidden,
            inner, h, *_tile_parts(d, x, count * top_k), kind.down.row_bytes, 0 if d is None else d.groups, out,
            **{n: d_constants[n] for n in shape}, **common,
        )  # fmt: skip
