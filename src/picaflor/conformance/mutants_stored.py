"""Wrong kernels of stored weights, planted from each format's declared geometry: wrong scales, wrong codes, wrong ends.

Knows formats by their objects and the oracle's reading of them; must not know kernels or devices.

Where the wrong reading has a stored form of its own, the format's kernel gets that; else a float32 kernel gets the
weights that the wrong kernel would have seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from picaflor.conformance.case import Matrix, f32_matrix
from picaflor.conformance.check import Array
from picaflor.conformance.oracle_formats import read, rotation_signs, rotation_spans, unrotate
from picaflor.conformance.stored import codes, dense, scales, weights, with_codes, with_scales, with_spread
from picaflor.formats import REGISTRY
from picaflor.formats.base import Format

F64 = NDArray[np.float64]
U8 = NDArray[np.uint8]
Change = Callable[[Matrix], Matrix]
NIBBLES = ("int4-row", "int4-grouped", "mxfp4")
OFFSETS = {"int4-row": 8, "int4-grouped": 8, "int2-row": 2, "int3-g64": 4}
PADDED = {"int4-row": 2, "int4-grouped": 2, "mxfp4": 2, "int2-row": 4, "int3-g64": 64, "e8-iq3-lattice": 256}
TILE = 8
LANES = 16


@dataclass(frozen=True, slots=True)
class StoredMutant:
    """A kind of wrong kernel for one format. `equivalent`: why it is none, where its outputs must be the same bits.

    `ops`: the operations that it is tried on; empty means all that read weights. `control`: no fault at all, the
    machinery alone; every case must pass.
    """

    kind: str
    format: str
    change: Change
    equivalent: str = ""
    ops: tuple[str, ...] = ()
    control: bool = False


# ---- how changes are made ----


def on_scales(change: Callable[[F64, Matrix], F64]) -> Change:
    """A change of the grid of scales."""
    return lambda matrix: with_scales(matrix, change(scales(matrix), matrix))


def on_codes(change: Callable[[U8], U8]) -> Change:
    """A change of the code bytes."""
    return lambda matrix: with_codes(matrix, change(codes(matrix)))


def on_weights(change: Callable[[F64], F64]) -> Change:
    """A change of the weights themselves."""
    return lambda matrix: dense(matrix, change(weights(matrix).copy()))


def indexed(index: Callable[[Array, Array, int, int], Array]) -> Change:
    """Scales taken at another flat index, of (row, group, rows, groups) of the grid; clamped to the grid."""

    def change(grid: F64, matrix: Matrix) -> F64:
        r, g = np.arange(grid.shape[0])[:, None], np.arange(grid.shape[1])[None, :]
        place = np.clip(index(r, g, *grid.shape), 0, grid.size - 1)
        out: F64 = grid.reshape(-1)[np.broadcast_to(place, grid.shape)]
        return out

    return on_scales(change)


# ---- scales ----


def scale_mutants(spec: Format) -> Iterator[StoredMutant]:
    """Wrong index, wrong size, wrong use of scales."""

    def mutant(kind: str, change: Change) -> StoredMutant:
        return StoredMutant(kind, spec.name, change)

    yield mutant("scale of the next row", indexed(lambda r, g, rows, groups: np.minimum(r + 1, rows - 1) * groups + g))
    yield mutant("scales of the first row", indexed(lambda r, g, rows, groups: 0 * r + g))
    yield mutant("one scale for all", indexed(lambda r, g, rows, groups: 0 * r + 0 * g))
    yield mutant("scale missing", on_scales(lambda grid, _: np.ones(grid.shape)))
    yield mutant("scale doubled", on_scales(lambda grid, _: grid * 2))
    yield mutant("scale applied twice", on_scales(lambda grid, _: grid * grid))
    yield mutant("scale 1 % off", on_scales(lambda grid, _: grid * 1.01))
    yield mutant("scale 1 % off in the last row", on_scales(_last_row_off))
    if spec.scale.cols == 0:
        return
    yield mutant(
        "scale of the next group", indexed(lambda r, g, rows, groups: r * groups + np.minimum(g + 1, groups - 1))
    )
    yield mutant("scale of the group before", indexed(lambda r, g, rows, groups: r * groups + np.maximum(g - 1, 0)))
    yield mutant("one scale per row", indexed(lambda r, g, rows, groups: r * groups + 0 * g))
    yield mutant("scales transposed", indexed(lambda r, g, rows, groups: g * rows + r))
    yield mutant("groups counted by floor", on_scales(_floor_groups))
    yield mutant("tail with the scale before", indexed(_tail_before))
    if spec.scale.rows > 1:
        yield mutant("scale block of one row", _block_of_one_row)
        yield mutant("scale block half as wide", _block_half_as_wide)
    if spec.group_sizes:
        yield mutant("group size always 64", _group_size(lambda size: 64))
        yield mutant("group size always 128", _group_size(lambda size: 128))
        yield mutant("group size halved", _group_size(lambda size: size // 2))
        yield mutant("group size doubled", _group_size(lambda size: size * 2))


def _last_row_off(grid: F64, matrix: Matrix) -> F64:
    grid = grid.copy()
    grid[-1] *= 1.01
    return grid


def _next_group(r: Array, g: Array, rows: int, groups: int) -> Array:
    place: Array = r * groups + np.minimum(g + 1, groups - 1)
    return place


def _tail_before(r: Array, g: Array, rows: int, groups: int) -> Array:
    place: Array = r * groups + np.where(g == groups - 1, np.maximum(g - 1, 0), g)
    return place


def _floor_groups(grid: F64, matrix: Matrix) -> F64:
    spec = REGISTRY[matrix.format]
    span = matrix.group_size if spec.scale.cols == -1 else (256 if spec.scale.plane == -1 else spec.scale.cols)
    count = max(1, matrix.cols // span)
    r, g = np.arange(grid.shape[0])[:, None], np.arange(grid.shape[1])[None, :]
    out: F64 = grid.reshape(-1)[np.minimum(r * count + g, grid.size - 1)]
    return out


def _block_of_one_row(matrix: Matrix) -> Matrix:
    grid, spec = scales(matrix), REGISTRY[matrix.format]
    r, i = np.arange(matrix.rows)[:, None], np.arange(matrix.cols)[None, :]
    return with_spread(matrix, grid[np.minimum(r, len(grid) - 1), i // spec.scale.cols])


def _block_half_as_wide(matrix: Matrix) -> Matrix:
    grid, spec = scales(matrix), REGISTRY[matrix.format]
    r, i = np.arange(matrix.rows)[:, None], np.arange(matrix.cols)[None, :]
    column = np.minimum(i // (spec.scale.cols // 2), grid.shape[1] - 1)
    return with_spread(matrix, grid[r // spec.scale.rows, column])


def _group_size(choose: Callable[[int], int]) -> Change:
    """The kernel believes in another group size; scales behind the end are the last one."""

    def change(matrix: Matrix) -> Matrix:
        flat, size = scales(matrix).reshape(-1), choose(matrix.group_size)
        r, i = np.arange(matrix.rows)[:, None], np.arange(matrix.cols)[None, :]
        place = np.minimum(r * -(-matrix.cols // size) + i // size, flat.size - 1)
        return with_spread(matrix, flat[place])

    return change


# ---- codes ----


def code_mutants(spec: Format) -> Iterator[StoredMutant]:
    """Wrong reading of codes, by format."""

    def mutant(kind: str, change: Change) -> StoredMutant:
        return StoredMutant(kind, spec.name, change)

    name = spec.name
    if name in NIBBLES:
        yield mutant("nibbles swapped", on_codes(lambda c: (c << np.uint8(4)) | (c >> np.uint8(4))))
    if name in OFFSETS:
        yield mutant("offset one less", _offset_less)
    if name in ("int4-row", "int4-grouped"):
        yield mutant("two's complement", on_codes(lambda c: c ^ np.uint8(0x88)))
    if name == "mxfp4":
        yield mutant("two's complement", _mxfp4_integers)
        yield mutant("sign forgotten", on_codes(lambda c: c & np.uint8(0x77)))
        yield mutant("one half read as zero", on_codes(_half_as_zero))
        for kind, change in (
            ("smallest scales read as zero", _tiny_as_zero),
            ("scale NaN read as 2^127", _nan_as_last),
        ):
            yield StoredMutant(kind, name, change, ops=("matmul", "rows"))
    if name == "int8-row":
        yield mutant("offset binary", on_codes(lambda c: c ^ np.uint8(0x80)))
        yield mutant("lower nibble forgotten", on_codes(lambda c: c & np.uint8(0xF0)))
    if name == "int2-row":
        yield mutant("two's complement", on_codes(lambda c: c ^ np.uint8(0xAA)))
        yield mutant("pairs of bits from the top", on_codes(_reverse_crumbs))
    if name == "int3-g64":
        yield mutant("two's complement", _int3(lambda c: _parts(c[..., :16], c[..., 16:] ^ np.uint8(0xFF))))
        yield mutant("high bits forgotten", _int3(lambda c: _parts(c[..., :16], 0 * c[..., 16:])))
        yield mutant("bit planes exchanged", _int3(lambda c: _parts(c[..., 8:], c[..., :8])))
        yield mutant("pairs of bits from the top", _int3(lambda c: _parts(_reverse_crumbs(c[..., :16]), c[..., 16:])))
    if name == "fp8-e4m3-b128":
        yield mutant("sign forgotten", on_codes(lambda c: c & np.uint8(0x7F)))
        yield mutant("subnormals read as zero", on_codes(_subnormal_as_zero))
        yield mutant("read as e5m2", _e5m2)
    if name == "e8-iq3-lattice":
        yield from _lattice_mutants()
    if name in ("bf16", "f16"):
        other = "f16" if name == "bf16" else "bf16"
        yield mutant(f"read as {other}", lambda matrix: replace(matrix, format=other))
    if name == "f32":
        yield mutant("lower half forgotten", on_codes(_upper_half))
    if name in ("f32", "bf16", "f16"):
        yield mutant("bytes in the other order", _other_order)


def _offset_less(matrix: Matrix) -> Matrix:
    found = read(matrix.format, matrix.planes, matrix.rows, matrix.cols, matrix.group_size)
    return dense(matrix, (found.codes + 1) * found.scales)


def _mxfp4_integers(matrix: Matrix) -> Matrix:
    found = read(matrix.format, matrix.planes, matrix.rows, matrix.cols, matrix.group_size)
    plain = Matrix("int4-row", matrix.rows, matrix.cols, 0, (matrix.planes[0], np.ones(matrix.rows, "<f4")))
    nibbles = read(plain.format, plain.planes, plain.rows, plain.cols, 0).codes + 8
    return dense(matrix, np.where(nibbles > 7, nibbles - 16, nibbles) * found.scales)


def _half_as_zero(c: U8) -> U8:
    low, high = c & np.uint8(15), c >> np.uint8(4)
    low, high = (np.where(part & 7 == 1, part & np.uint8(8), part) for part in (low, high))
    return (low | (high << np.uint8(4))).astype(np.uint8)


def _tiny_as_zero(matrix: Matrix) -> Matrix:
    spread = np.repeat(scales(matrix), REGISTRY[matrix.format].scale.cols, axis=1)[:, : matrix.cols]
    return dense(matrix, np.where(spread <= 2.0**-126, 0.0, weights(matrix)))


def _nan_as_last(matrix: Matrix) -> Matrix:
    return replace(matrix, planes=(matrix.planes[0], np.minimum(matrix.planes[1], np.uint8(254))))


def _reverse_crumbs(c: U8) -> U8:
    parts = [(c >> np.uint8(2 * k)) & np.uint8(3) for k in range(4)]
    turned: U8 = parts[0] << np.uint8(6) | parts[1] << np.uint8(4) | parts[2] << np.uint8(2) | parts[3]
    return turned


def _int3(change: Callable[[U8], U8]) -> Change:
    def on_blocks(c: U8) -> U8:
        return change(c.reshape(len(c), -1, 24)).reshape(len(c), -1)

    return on_codes(on_blocks)


def _parts(low: U8, high: U8) -> U8:
    return np.concatenate([low, high], axis=-1).astype(np.uint8)


def _subnormal_as_zero(c: U8) -> U8:
    return np.where(c & np.uint8(0x78), c, c & np.uint8(0x80)).astype(np.uint8)


def _e5m2(matrix: Matrix) -> Matrix:
    found = read(matrix.format, matrix.planes, matrix.rows, matrix.cols, matrix.group_size)
    values = (codes(matrix).astype(np.uint16) << np.uint16(8)).view(np.float16).astype(np.float64)
    return dense(matrix, np.where(np.isfinite(values), values, 57344.0) * found.scales)


def _upper_half(c: U8) -> U8:
    return (c.view("<u4") & np.uint32(0xFFFF0000)).view(np.uint8)


def _other_order(matrix: Matrix) -> Matrix:
    stored = np.ascontiguousarray(matrix.planes[0]).reshape(-1).view(np.uint8)
    size = REGISTRY[matrix.format].planes[0].dtype.itemsize
    return replace(matrix, planes=(np.ascontiguousarray(stored.reshape(-1, size)[:, ::-1]),))


def _lattice_mutants() -> Iterator[StoredMutant]:
    """What only the lattice has: signs, sub-scales, rotation."""

    def mutant(kind: str, change: Change) -> StoredMutant:
        return StoredMutant(kind, "e8-iq3-lattice", change)

    def words(change: Callable[[NDArray[np.uint32]], NDArray[np.uint32]]) -> Change:
        def on_blocks(c: U8) -> U8:
            c = c.reshape(len(c), -1, 98)
            stored = np.ascontiguousarray(c[:, :, 64:96]).view("<u4")
            c[:, :, 64:96] = np.ascontiguousarray(change(stored).astype("<u4")).view(np.uint8)
            return c.reshape(len(c), -1)

        return on_codes(on_blocks)

    top = np.uint32(0xF0000000)
    yield mutant("signs forgotten", words(lambda w: w & top))
    yield mutant("sub-scale of the next 32", words(lambda w: (w & ~top) | (np.roll(w, -1, axis=2) & top)))
    yield mutant("sub-scale forgotten", words(lambda w: w & ~top))
    yield mutant("signs of the next 32", words(lambda w: (w & top) | (np.roll(w, -1, axis=2) & ~top)))
    yield mutant("eighth sign always plus", _eighth_plus)
    yield mutant("half of the sub-scale forgotten", _half_forgotten)
    yield mutant("lattice row of the next four", on_codes(_next_four))
    yield mutant("sign of the super-scale forgotten", on_scales(lambda grid, _: np.abs(grid)))
    yield mutant("rotation missing", lambda matrix: f32_matrix(weights(matrix).astype(np.float32)))
    yield mutant("rotation without signs", _unsigned_rotation)
    yield mutant("rotation not normalised", _unnormalised)


def _next_four(c: U8) -> U8:
    c = c.reshape(len(c), -1, 98)
    c[:, :, :64] = np.roll(c[:, :, :64], -1, axis=2)
    return c.reshape(len(c), -1)


def _eighth_plus(matrix: Matrix) -> Matrix:
    found = weights(matrix)
    grid = np.repeat(scales(matrix), 256, axis=1)[:, : matrix.cols]
    eighth = np.arange(matrix.cols) % 8 == 7
    return dense(matrix, np.where(eighth, np.abs(found) * np.sign(grid), found))


def _half_forgotten(matrix: Matrix) -> Matrix:
    found = read(matrix.format, matrix.planes, matrix.rows, matrix.cols, 0)
    d = np.repeat(scales(matrix), 256, axis=1)[:, : matrix.cols]
    return dense(matrix, found.codes * (found.scales - 0.25 * d))


def _signs_of(cols: int) -> F64:
    return np.concatenate([rotation_signs(size) for _, size in rotation_spans(cols)])


def _unsigned_rotation(matrix: Matrix) -> Matrix:
    return f32_matrix((unrotate(weights(matrix)) * _signs_of(matrix.cols)).astype(np.float32))


def _unnormalised(matrix: Matrix) -> Matrix:
    root = np.concatenate([np.full(size, np.sqrt(size)) for _, size in rotation_spans(matrix.cols)])
    return f32_matrix(unrotate(weights(matrix) * root).astype(np.float32))


# ---- ends of rows, rows, padding ----


def end_mutants(spec: Format) -> Iterator[StoredMutant]:
    """Tails, rows and padding: for every format."""

    def mutant(kind: str, change: Change) -> StoredMutant:
        return StoredMutant(kind, spec.name, change)

    yield mutant("columns behind the last sixteen dropped", on_weights(_tail_dropped))
    yield mutant("last column dropped", on_weights(lambda w: np.where(np.arange(w.shape[1]) == w.shape[1] - 1, 0, w)))
    yield mutant("rows beside the tile dropped", on_weights(_rows_dropped))
    yield mutant("codes of the next row", on_codes(lambda c: np.roll(c, -1, axis=0)))
    yield mutant("columns shifted by one", on_weights(lambda w: np.roll(w, 1, axis=1)))
    yield mutant("last group of activations taken for the first", on_weights(_wrapped))
    if spec.name in PADDED:
        yield mutant("padding used", _padding_used)
        yield StoredMutant(
            "padding changed", spec.name, _padding_changed, equivalent="padding meets no activation", ops=()
        )
    if spec.name == "e8-iq3-lattice":
        yield StoredMutant(
            "tag changed",
            spec.name,
            lambda matrix: replace(matrix, planes=(matrix.planes[0], np.array([7.0], "<f4"))),
            equivalent="nothing depends on the tag",
        )
    if spec.name == "mxfp4":
        yield StoredMutant(
            "-0 stored as 0",
            spec.name,
            on_codes(_plus_zero),
            equivalent="integer codes of a product have no -0",
            ops=("matmul", "expert_ffn"),
        )
    if spec.name == "int4-row":
        yield StoredMutant(
            "kernel of int4-grouped, one group per row",
            spec.name,
            _as_one_group,
            equivalent="the same integers in the same runs of 64 inputs, where the row is no longer",
            ops=("rows",),
        )
    yield StoredMutant("the same weights as float32", spec.name, on_weights(lambda w: w), control=True)


def _tail_dropped(w: F64) -> F64:
    w[:, w.shape[1] // LANES * LANES :] = 0
    return w


def _rows_dropped(w: F64) -> F64:
    w[len(w) // TILE * TILE :] = 0
    return w


def _wrapped(w: F64) -> F64:
    cut = w.shape[1] - LANES
    if cut >= LANES:
        w[:, :LANES] += w[:, cut:]
        w[:, cut:] = 0
    return w


def _padding_used(matrix: Matrix) -> Matrix:
    """What is stored behind the last column meets the last activation once more."""
    unit = PADDED[matrix.format]
    padded = -(-matrix.cols // unit) * unit
    found = read(matrix.format, matrix.planes, matrix.rows, padded, matrix.group_size).weights
    kept = found[:, : matrix.cols].copy()
    kept[:, -1] += found[:, matrix.cols :].sum(axis=1)
    return dense(matrix, kept)


def _padding_changed(matrix: Matrix) -> Matrix:
    stored, cols = codes(matrix), matrix.cols
    if matrix.format in NIBBLES:
        if cols % 2:
            stored[:, -1] ^= np.uint8(0xF0)
    elif matrix.format == "int2-row":
        if cols % 4:
            stored[:, -1] ^= np.uint8(0xFF << (2 * (cols % 4)) & 0xFF)
    elif matrix.format == "int3-g64":
        for j in range(cols % 64 or 64, 64):
            stored[:, len(stored[0]) - 24 + j // 4] ^= np.uint8(3 << (2 * (j % 4)))
            stored[:, len(stored[0]) - 8 + j // 8] ^= np.uint8(1 << (j % 8))
    else:
        first = -(-(cols % 256 or 256) // 4)
        stored[:, len(stored[0]) - 98 + first : len(stored[0]) - 34] ^= np.uint8(0x55)
    return with_codes(matrix, stored)


def _plus_zero(c: U8) -> U8:
    low, high = c & np.uint8(15), c >> np.uint8(4)
    low, high = (np.where(part == 8, np.uint8(0), part) for part in (low, high))
    return (low | (high << np.uint8(4))).astype(np.uint8)


def _as_one_group(matrix: Matrix) -> Matrix:
    return replace(matrix, format="int4-grouped", group_size=256) if matrix.cols <= 256 else matrix


def stored_mutants(spec: Format) -> list[StoredMutant]:
    """All kinds for one format."""
    scaled = spec.scale.plane != -1 or spec.scale.rows > 0
    found = [*(scale_mutants(spec) if scaled else ()), *code_mutants(spec), *end_mutants(spec)]
    return [replace(mutant, change=_only(spec.name, mutant.change)) for mutant in found]


def _only(format_name: str, change: Change) -> Change:
    """The change where a matrix has this format; others stay as they are."""
    return lambda matrix: change(matrix) if matrix.format == format_name else matrix
