"""Cases of what reads weights: products, rows of an embedding, experts; made from each format's declared geometry.

Knows formats by their objects and the oracle; must not know kernels or devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from picaflor.backends.api import Recorder, Rows
from picaflor.backends.table import NO_FORMAT
from picaflor.conformance import oracle
from picaflor.conformance.case import (
    Case,
    Device,
    Expect,
    Matrix,
    Run,
    Slots,
    hold,
    make_batch,
    make_matrix,
    random,
    run_rows,
)
from picaflor.conformance.check import Array, Expected
from picaflor.conformance.oracle import Approx
from picaflor.conformance.oracle_formats import Stored, read
from picaflor.conformance.stored import scales, with_scales
from picaflor.formats import REGISTRY
from picaflor.formats.base import F32, Format

OUTLIER = 50.0
# (inputs I, outputs O, rows of x S): whole groups, partial tails, odd I, groups longer than the row, O beside the tile.
QUICK_SHAPES = (
    (200, 9, 3),
    (201, 7, 1),
    (520, 9, 2),
    (64, 4, 2),
    (40, 6, 5),
    (2048, 5, 4),
    (201, 13, 13),
    (200, 9, 6),
    (201, 5, 7),
    (40, 11, 8),
)
FULL_SHAPES = (
    (6144, 3, 1),
    (6144, 5, 6),
    (2048, 17, 7),
    (200, 33, 8),
    (201, 12, 64),
    (64, 1, 64),
    (40, 3, 8),
    (256, 16, 16),
    (1, 5, 2),
    (17, 8, 3),
)
BEYOND_SHAPES = ((200, 9, 150), (201, 1100, 2))
"""More rows of x, or more outputs with a tail in a row, than any kernel meets at a time."""
FULL_BEYOND_SHAPES = ((200, 20, 300), (201, 1100, 150), (40, 1030, 3), (1100, 17, 150), (130, 2100, 1))
BLOCK_SHAPES = ((200, 130, 3), (129, 257, 2), (300, 131, 1))
"""More than one scale block in both directions, for formats whose scale covers several rows."""
OUTLIER_SHAPES = ((200, 9, 64), (6144, 3, 2))
FFN_SHAPES = ((64, 40, 4), (520, 300, 2), (200, 72, 1), (201, 65, 13))
FULL_FFN_SHAPES = ((512, 256, 2), (40, 201, 5), (128, 64, 33), (1100, 72, 3), (72, 1100, 2))
CROWD_SHAPE, FULL_CROWD_SHAPE = (200, 72, 150), (201, 65, 300)
"""One expert in every row: more rows of it than a kernel gathers at a time."""
ROWS_SHAPES = ((17, 200), (9, 201), (5, 40))
MANY_ROWS_SHAPE = (1100, 41)
"""A table, and then a batch, of more rows than a kernel meets at a time."""
SMALL_SCALES, LARGE_SCALES, EVERY_SCALE = "smallest scales", "largest scales", "every scale code"
SHOWN_SIZES = (0, 64)
"""Group sizes whose extremes of scales are quick cases; 0 is a format without a choice."""

SHORT, FEW_OUTPUTS = 16, 1000
"""A last group of fewer inputs is short: of more outputs than these the stated bound is then not asked."""
KEPT_MATRICES = 48
"""As many as one case has: each precision asks for all of them."""


def group_sizes(spec: Format) -> tuple[int, ...]:
    """The legal group sizes, (0,) where there is nothing to choose."""
    return spec.group_sizes or (0,)


def matmul_cases(spec: Format) -> Iterator[Case]:
    """Products in every group size and shape, with outliers, with rows of zeros, with NaN."""
    blocks = BLOCK_SHAPES if spec.scale.rows > 1 else ()
    for size in group_sizes(spec):
        for shape in (*QUICK_SHAPES, *BEYOND_SHAPES, *blocks):
            yield _matmul(spec, size, shape, "plain")
        for shape in (*FULL_SHAPES, *FULL_BEYOND_SHAPES):
            yield _matmul(spec, size, shape, "plain", full_only=True)
        for shape in OUTLIER_SHAPES:
            yield _matmul(spec, size, shape, "outlier")
        yield _matmul(spec, size, (200, 9, 5), "zero row")
        yield _matmul(spec, size, (201, 6, 4), "NaN")
        yield _matmul(spec, size, (6144, 3, 1), "plain")
        for kind in extremes(spec):
            yield _matmul(spec, size, (200, 13, 13), kind, full_only=size not in SHOWN_SIZES)
            yield _matmul(spec, size, (201, 9, 1), kind, full_only=True)
        if size in (0, 64, 128):
            yield _matmul(spec, size, (6144, 515, 64), "plain", full_only=True)
        if size == 64:
            yield _matmul(spec, size, (6144, 2048, 64), "plain", full_only=True)


def activations(rng: np.random.Generator, kind: str, rows: int, cols: int) -> F32:
    """Rows of x: plain, with an outlier in the first group, with a row of zeros, or with one NaN."""
    x = rng.standard_normal((rows, cols)).astype(np.float32)
    if kind == "outlier":
        x[:, rng.integers(0, min(16, cols))] = OUTLIER
    elif kind == "zero row":
        x[rows // 2] = 0
    elif kind == "NaN":
        x[1, cols // 2] = np.nan
    elif kind in (SMALL_SCALES, LARGE_SCALES, EVERY_SCALE):
        x *= np.float32(2.0**100 if kind == SMALL_SCALES else 2.0**-80)
    return x


def extremes(spec: Format) -> tuple[str, ...]:
    """The kinds of unusual scales that a format can store."""
    if spec.scale.plane == -1 and not spec.activation.rotated:
        return ()
    return (SMALL_SCALES, LARGE_SCALES, EVERY_SCALE) if powers_of_two(spec) else (SMALL_SCALES, LARGE_SCALES)


def powers_of_two(spec: Format) -> bool:
    """Whether scales are bytes that name an exponent; 255 is NaN."""
    return spec.scale.plane != -1 and spec.planes[spec.scale.plane].dtype == np.uint8


def scaled_matrix(
    rng: np.random.Generator, spec: Format, rows: int, cols: int, size: int, kind: str, *, tame: bool = True
) -> Matrix:
    """As `make_matrix`; where the kind says so with the ends of what its scales may be.

    Half floats: subnormals and the largest ones. Powers of two: codes 0 to 3, the first a subnormal, or the last whose
    weights are finite; or any code, NaN's among them, and where not `tame` those whose weights overflow. Float32: the
    smallest normal ones, zero and negative, or the largest with finite weights.
    """
    matrix = make_matrix(rng, spec.name, rows, cols, size)
    if kind == EVERY_SCALE:
        # Products of weights that overflow are defined by no page; an embedding gives them as they are.
        used = (*range(253), 255) if tame else range(256)
        given = rng.choice(np.array(used, np.uint8), size=matrix.planes[1].shape)
        given.reshape(-1)[::17] = 255
        return replace(matrix, planes=(matrix.planes[0], given))
    if kind not in (SMALL_SCALES, LARGE_SCALES):
        return matrix
    small = kind == SMALL_SCALES
    if spec.activation.rotated:
        steps = [2.0**-24, -(2.0**-23), 2.0**-14, 0.0] if small else [65504.0, -65504.0, 32768.0, 1.0]
    elif powers_of_two(spec):
        steps = [2.0**exponent for exponent in ((-127, -126, -125, -124) if small else (122, 123, 124, 125))]
    else:
        least = -110 if spec.activation.group == 0 else -126  # the former's codes may be small themselves
        tiny = 2.0**least
        steps = [tiny, -tiny, 8 * tiny, 0.0] if small else [2.0**118, -(2.0**118), 2.0**110, 1.0]
    return with_scales(matrix, rng.choice(np.array(steps), size=scales(matrix).shape))


def _matmul(spec: Format, size: int, shape: tuple[int, int, int], kind: str, *, full_only: bool = False) -> Case:
    cols, rows, count = shape
    text = f"gs {size} " if size else ""
    name = f"{text}I {cols} O {rows} S {count}" + ("" if kind == "plain" else f", {kind}")

    def prepare() -> tuple[Run, Expect]:
        rng = random(f"matmul {spec.name} {name}")
        matrix = scaled_matrix(rng, spec, rows, cols, size, kind)
        x = activations(rng, kind, count, cols)

        def run(device: Device) -> list[Array]:
            weight = hold(device, matrix)

            def record(r: Recorder, b: dict[str, Rows]) -> Sequence[Rows]:
                r.matmul(b["x"], weight, b["y"])
                return (b["y"],)

            return run_rows(device, {"x": x}, {"y": rows}, record)

        return run, lambda precision: [_product(matrix, x, precision, plain=kind == "plain")]

    return Case("matmul", spec.name, name, prepare, full_only, size)


def _product(matrix: Matrix, x: F32, precision: str, *, plain: bool) -> Expected:
    spec = REGISTRY[matrix.format]
    right = oracle.product(oracle.exactly(x.astype(np.float64)), stored(matrix), spec, matrix.group_size, precision)
    # A rotation mixes small values with large ones and a row may be short: then only the derived bound is fair.
    # And among many outputs there is one in which a single weight of a short last group prevails.
    group = matrix.group_size if spec.activation.group == -1 else spec.activation.group
    long = bool(group) and (matrix.cols % group == 0 or matrix.cols % group >= SHORT)
    fair = plain and matrix.cols >= SHORT and group != 0 and (long or matrix.rows * len(x) <= FEW_OUTPUTS)
    ruled = oracle.by_rule(x.astype(np.float64), stored(matrix), spec, matrix.group_size, precision)
    return Expected(right.values, right.error, right.terms, plain=fair, by_rule=ruled)


@lru_cache(maxsize=KEPT_MATRICES)
def stored(matrix: Matrix) -> Stored:
    """The matrix as docs/formats.md reads it; kept for the next precision."""
    return read(matrix.format, matrix.planes, matrix.rows, matrix.cols, matrix.group_size)


def rows_cases(spec: Format) -> Iterator[Case]:
    """Rows of an embedding: exactly code times scale (rotated ones turned back); a token outside gives zeros."""
    blocks = ((130, 200),) if spec.scale.rows > 1 else ((9, 520),) if spec.activation.rotated else ()
    for size in group_sizes(spec):
        for rows, cols in (*ROWS_SHAPES, *blocks):
            yield _rows(spec, size, rows, cols, "wild")
        yield _rows(spec, size, *MANY_ROWS_SHAPE, "wild", full_only=size not in SHOWN_SIZES)
        for kind in extremes(spec):
            yield _rows(spec, size, 17, 200, kind, full_only=size not in SHOWN_SIZES)


def _rows(spec: Format, size: int, rows: int, cols: int, kind: str, *, full_only: bool = False) -> Case:
    name = f"gs {size} [{rows}, {cols}]" if size else f"[{rows}, {cols}]"
    name += "" if kind == "wild" else f", {kind}"
    tokens = [0, rows - 1, 3, rows, -1, rows // 2, 3, *range(rows)]
    tokens = tokens[: 150 if rows > 150 else 64]

    def prepare() -> tuple[Run, Expect]:
        rng = random(f"rows {spec.name} {name}")
        if kind == "wild":
            matrix = Matrix(spec.name, rows, cols, size, spec.sample(rng, rows, cols, size))
        else:
            matrix = scaled_matrix(rng, spec, rows, cols, size, kind, tame=False)

        def run(device: Device) -> list[Array]:
            weight = hold(device, matrix)

            def record(r: Recorder, b: dict[str, Rows]) -> Sequence[Rows]:
                r.embed(weight, b["y"])
                return (b["y"],)

            batch = make_batch(range(len(tokens)), tokens=tokens)
            return run_rows(device, {}, {"y": cols}, record, batch=batch)

        def expect(precision: str) -> list[Expected]:
            weights = stored(matrix).weights
            table = oracle.turned_back(weights) if spec.activation.rotated else oracle.exactly(weights)
            values, error, terms = (
                np.array([part[t] if 0 <= t < rows else np.zeros(cols) for t in tokens])
                for part in (table.values, table.error, table.terms)
            )
            return [Expected(values, error, terms) if spec.activation.rotated else Expected(values)]

        return run, expect

    return Case("rows", spec.name, name, prepare, full_only, size)


Member = tuple[Matrix, Matrix, Matrix]
MakeMember = Callable[[np.random.Generator, int], Member]


def expert_cases(spec: Format) -> Iterator[Case]:
    """Routed experts in every group size, and shapes with tails in both widths."""
    for size in group_sizes(spec):
        text = f"gs {size} " if size else ""
        for shapes, full_only in ((FFN_SHAPES, False), (FULL_FFN_SHAPES, True)):
            for hidden, inner, count in shapes:
                name = f"{text}hidden {hidden} inner {inner} S {count}"
                make = _uniform(spec.name, size, hidden, inner)
                yield _experts(spec.name, name, hidden, inner, count, make, full_only, size=size)
        for shape, full_only in ((CROWD_SHAPE, size not in SHOWN_SIZES), (FULL_CROWD_SHAPE, True)):
            hidden, inner, count = shape
            name = f"{text}hidden {hidden} inner {inner} S {count}, one expert in all rows"
            make = _uniform(spec.name, size, hidden, inner)
            yield _experts(spec.name, name, hidden, inner, count, make, full_only, size=size, crowd=True)


def mixed_cases() -> Iterator[Case]:
    """Experts of one layer in different formats and group sizes, matrix by matrix."""
    kinds = [(name, size) for name, spec in REGISTRY.items() for size in group_sizes(spec)]
    hidden, inner = 200, 72

    def make(rng: np.random.Generator, number: int) -> Member:
        picked = [kinds[(3 * number + part) % len(kinds)] for part in range(3)]
        shapes = ((inner, hidden), (inner, hidden), (hidden, inner))
        gate, up, down = (
            make_matrix(rng, name, *shape, size) for (name, size), shape in zip(picked, shapes, strict=True)
        )
        return gate, up, down

    yield _experts(NO_FORMAT, "mixed formats", hidden, inner, 13, make, False)


def _uniform(format_name: str, size: int, hidden: int, inner: int) -> MakeMember:
    def make(rng: np.random.Generator, number: int) -> Member:
        return (
            make_matrix(rng, format_name, inner, hidden, size),
            make_matrix(rng, format_name, inner, hidden, size),
            make_matrix(rng, format_name, hidden, inner, size),
        )

    return make


def _experts(
    format_name: str,
    name: str,
    hidden: int,
    inner: int,
    count: int,
    make: MakeMember,
    full_only: bool,
    *,
    size: int = 0,
    crowd: bool = False,
) -> Case:
    """Two layers of 6 experts, 3 per row; each layer is run, so that layers and slots can be mistaken.

    `crowd`: expert 4 is one of the chosen in every row, in any place.
    """
    experts, top_k = (8 if format_name == NO_FORMAT else 6), 3

    def prepare() -> tuple[Run, Expect]:
        rng = random(f"experts {format_name} {name}")
        members = {layer: [make(rng, number) for number in range(experts)] for layer in (3, 4)}
        x = rng.standard_normal((count, hidden)).astype(np.float32) / np.float32(np.sqrt(hidden))
        ids = np.stack([rng.permutation(experts)[:top_k] for _ in range(count)]).astype(np.int32)
        if crowd:
            for row in ids:
                if 4 not in row:
                    row[rng.integers(top_k)] = 4
        weights = rng.uniform(0.2, 1.0, size=(count, top_k)).astype(np.float32)

        def run(device: Device) -> list[Array]:
            slots = Slots(device, members)

            def record(r: Recorder, b: dict[str, Rows]) -> Sequence[Rows]:
                for layer, out in ((3, "y"), (4, "z")):
                    r.experts(b["x"], b["e_ids"], b["w"], b[out], layer=layer, layouts=slots.layouts(layer))
                return b["y"], b["z"]

            inputs = {"x": x, "e_ids": ids, "w": weights}
            return run_rows(device, inputs, {"y": hidden, "z": hidden}, record, experts=slots)

        def expect(precision: str) -> list[Expected]:
            rights = [expert_sum(members[layer], x, ids, weights, precision) for layer in (3, 4)]
            return [Expected(right.values, right.error, right.terms) for right in rights]

        return run, expect

    return Case("expert_ffn", format_name, name, prepare, full_only, size)


def expert_sum(members: Sequence[Member], x: F32, ids: Array, weights: Array, precision: str) -> Approx:
    """The routed sum of every row."""
    count, top_k = ids.shape
    given = x.astype(np.float64)
    shape = (count, top_k, x.shape[1])
    values, error, terms = np.zeros(shape), np.zeros(shape), np.zeros(shape)
    for number, (gate, up, down) in enumerate(members):
        where = np.nonzero(ids == number)
        if not len(where[0]):
            continue
        rows = oracle.exactly(given[where[0]])
        hidden = oracle.gated(apply(rows, gate, precision), apply(rows, up, precision))
        out = apply(hidden, down, precision)
        values[where], error[where], terms[where] = out.values, out.error, out.terms
    parts = [Approx(values[:, k], error[:, k], terms[:, k]) for k in range(top_k)]
    return oracle.weighted_sum(parts, weights.astype(np.float64))


def apply(x: Approx, matrix: Matrix, precision: str) -> Approx:
    """x times a stored matrix, as the precision says."""
    return oracle.product(x, stored(matrix), REGISTRY[matrix.format], matrix.group_size, precision)
