"""Cases of what reads the cache: attention of both kinds, selection, writing; always at positions above 0.

Knows the contract and the oracle; must not know kernels or devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from picaflor.backends.api import GQA, I32, MLA, Batch, Recorder, Rows, Weight
from picaflor.backends.table import NO_FORMAT
from picaflor.conformance import oracle
from picaflor.conformance.case import (
    PAGES,
    Case,
    Device,
    Expect,
    Matrix,
    Run,
    f32_matrix,
    hold,
    make_batch,
    make_matrix,
    random,
    start,
)
from picaflor.conformance.check import ROUNDING, Array, Expected
from picaflor.conformance.oracle import Approx
from picaflor.conformance.oracle_formats import rotate, unrotate
from picaflor.conformance.products import group_sizes, stored
from picaflor.formats import REGISTRY
from picaflor.formats.base import F32, Format

F64 = oracle.F64
HEADS, NOPE, ROPE, VALUE = 3, 20, 8, 24
NEAR_TIE = 1e-5
# Rows of each step as (sequence, first position, rows): a history, then one row at 37 and four at 12.
STEPS = (((0, 0, 37), (1, 0, 12)), ((0, 37, 1), (1, 12, 4)))
# More than one block of 256 positions, in chunks, then a single row and a few.
LONG_STEPS = (*(((0, first, 60),) for first in range(0, 300, 60)), ((1, 0, 20),), ((0, 300, 1), (1, 20, 3)))
# More rows at once than a kernel meets at a time.
WIDE_STEPS = (((0, 0, 150), (1, 0, 5)), ((0, 150, 1), (1, 5, 3)))
Steps = Sequence[Sequence[tuple[int, int, int]]]


def page_table(rng: np.random.Generator) -> I32:
    """Two sequences on scattered pages."""
    return rng.permutation(PAGES).astype(np.int32).reshape(2, -1)


class History:
    """Random cached rows of two sequences, and queries of every row of all steps."""

    def __init__(self, label: str, steps: Steps, widths: Mapping[str, int], query: Mapping[str, int]) -> None:
        rng = random(label)
        self.steps = steps
        self.pages = page_table(rng)
        ends = [max(first + count for step in steps for s, first, count in step if s == seq) for seq in (0, 1)]
        self.cached = {
            name: [rng.standard_normal((end, width)).astype(np.float32) for end in ends]
            for name, width in widths.items()
        }
        self.queries = {
            name: [rng.standard_normal((end, width)).astype(np.float32) for end in ends]
            for name, width in query.items()
        }
        self.rng = rng

    def places(self, step: Sequence[tuple[int, int, int]]) -> list[tuple[int, int]]:
        """(sequence, position) of the rows of a step."""
        return [(seq, first + i) for seq, first, count in step for i in range(count)]

    def batch(self, step: Sequence[tuple[int, int, int]]) -> Batch:
        """The rows of a step."""
        places = self.places(step)
        return make_batch([p for _, p in places], sequences=[s for s, _ in places], pages=self.pages)

    def inputs(self, step: Sequence[tuple[int, int, int]]) -> dict[str, F32]:
        """Cached quantities and queries of the rows of a step."""
        both = {**self.cached, **self.queries}
        return {name: np.stack([rows[s][p] for s, p in self.places(step)]) for name, rows in both.items()}

    def run(
        self,
        device: Device,
        record: Callable[[Recorder, dict[str, Rows]], Sequence[Rows]],
        extra: Mapping[str, Array] | None = None,
    ) -> list[Array]:
        """Run all steps of one program; the outputs of every step. `extra`: inputs of the last step."""
        recorder = start(device, max(sum(count for _, _, count in step) for step in self.steps))
        widths = {name: rows[0].shape[1] for name, rows in {**self.cached, **self.queries}.items()}
        buffers = {name: recorder.rows(width) for name, width in widths.items()}
        for name, values in (extra or {}).items():
            buffers[name] = recorder.rows(values.shape[1], dtype="i32")
        outputs = list(record(recorder, buffers))
        program = recorder.finish()
        found: list[Array] = []
        for number, step in enumerate(self.steps):
            batch = self.batch(step)
            for name, values in self.inputs(step).items():
                program.write(buffers[name], values)
            for name, values in (extra or {}).items():
                rows = values if number == len(self.steps) - 1 else np.full((len(batch.tokens), 1), -1, np.int32)
                program.write(buffers[name], np.broadcast_to(rows, (len(batch.tokens), values.shape[1])))
            program.run(batch)
            found += [program.view(rows, len(batch.tokens)).copy() for rows in outputs]
        return found

    def each(self, right: Callable[[int, int], Approx]) -> list[Expected]:
        """Right outputs of every step from those of each row."""
        out = []
        for step in self.steps:
            rows = [right(s, p) for s, p in self.places(step)]
            values = np.stack([row.values for row in rows])
            error, terms = np.stack([row.error for row in rows]), np.stack([row.terms for row in rows])
            out.append(Expected(values, error, terms))
        return out


def latent_cases(spec: Format) -> Iterator[Case]:
    """Absorbed attention whose kv_b is in a format: its rows are added up and multiplied one by one."""
    for size in group_sizes(spec):
        wide = (520,) if spec.activation.rotated else ()
        for rank in (200, 201, *wide) if size in (0, 16, 64) else (200,):
            name = f"kv_b gs {size} rank {rank}" if size else f"kv_b rank {rank}"
            yield _latent("row_axpy", spec.name, name, size, rank, selected=False)
        if size in (0, 64):
            name = f"kv_b gs {size} rank 200, 150 rows" if size else "kv_b rank 200, 150 rows"
            yield _latent("row_axpy", spec.name, name, size, 200, selected=False, steps=WIDE_STEPS, full_only=True)


def record_latent(recorder: Recorder, kv_b: Weight) -> None:
    """Record absorbed attention with one head over a kv_b `[44, rank]`."""
    latent, rope_key = recorder.kv_plane(0, "latent", kv_b.cols), recorder.kv_plane(0, "rope_key", ROPE)
    kind = MLA(kv_b, latent, rope_key, 1, NOPE, ROPE, VALUE, 1.0)
    recorder.attention(recorder.rows(NOPE + ROPE), recorder.rows(VALUE), kind=kind)


def attention_cases() -> Iterator[Case]:
    """Both kinds in float32, dense and selected, within a block of positions and beyond."""
    yield _latent("attention", NO_FORMAT, "MLA", 0, 40, selected=False)
    yield _latent("attention", NO_FORMAT, "MLA, selected", 0, 40, selected=True)
    yield _latent("attention", NO_FORMAT, "MLA, 300 positions", 0, 40, selected=False, steps=LONG_STEPS)
    yield _latent("attention", NO_FORMAT, "MLA, 150 rows", 0, 40, selected=False, steps=WIDE_STEPS)
    yield _grouped("GQA, 150 rows", 4, 2, 24, WIDE_STEPS)
    yield _grouped("GQA 4 heads of 24 on 2", 4, 2, 24, STEPS)
    yield _grouped("GQA 6 heads of 17 on 3", 6, 3, 17, STEPS)
    yield _grouped("GQA, 300 positions", 4, 2, 24, LONG_STEPS)


def _latent(
    op: str,
    format_name: str,
    name: str,
    size: int,
    rank: int,
    *,
    selected: bool,
    steps: Steps = STEPS,
    full_only: bool = False,
) -> Case:
    label = f"{op} {format_name} {name}"
    top_k = 8

    def prepare() -> tuple[Run, Expect]:
        widths = {"latent": rank, "rope_key": ROPE, **({"index_key": 12} if selected else {})}
        queries = {"q": HEADS * (NOPE + ROPE), **({"iq": 24, "iw": 2} if selected else {})}
        history = History(label, steps, widths, queries)
        shape = (HEADS * (NOPE + VALUE), rank)
        if format_name == NO_FORMAT:
            kv_b = f32_matrix(history.rng.standard_normal(shape).astype(np.float32))
        else:
            kv_b = make_matrix(history.rng, format_name, *shape, size)
        right = _LatentOracle(history, kv_b, top_k if selected else 0)

        def run(device: Device) -> list[Array]:
            weight = hold(device, kv_b, "kv_b")

            def record(r: Recorder, b: dict[str, Rows]) -> Sequence[Rows]:
                planes = {key: r.kv_plane(1, key, width) for key, width in widths.items()}
                for key, plane in planes.items():
                    r.kv_write(b[key], plane)
                selection = None
                if selected:
                    selection = r.rows(1 + top_k, dtype="i32")
                    keys = planes["index_key"]
                    r.index_select(b["iq"], b["iw"], keys, selection, heads=2, head_dim=12, top_k=top_k)
                out = r.rows(HEADS * VALUE)
                latent, rope_key = planes["latent"], planes["rope_key"]
                kind = MLA(weight, latent, rope_key, HEADS, NOPE, ROPE, VALUE, right.scale)
                r.attention(b["q"], out, kind=kind, selection=selection)
                return (out,)

            return history.run(device, record)

        return run, lambda precision: history.each(right.row)

    return Case(op, format_name, name, prepare, full_only, size)


class _LatentOracle:
    """Absorbed attention of one row, in float64."""

    def __init__(self, history: History, kv_b: Matrix, top_k: int) -> None:
        self._history = history
        shape = (HEADS, NOPE + VALUE, kv_b.cols)
        weights = stored(kv_b).weights
        self._rotated = REGISTRY[kv_b.format].activation.rotated
        self._stored = weights.reshape(shape)
        self._kv_b = (unrotate(weights) if self._rotated else weights).reshape(shape)
        self._top_k = top_k
        self.scale = 1.0
        places = [place for step in history.steps for place in history.places(step)]
        last = [max(p for s, p in places if s == seq) for seq in (0, 1)]
        largest = max(np.abs(self._scores(s, last[s], h)[0]).max() for s in (0, 1) for h in range(HEADS))
        self.scale = float(2.0 ** np.floor(np.log2(4.0 / largest)))

    def _visible(self, sequence: int, position: int) -> Array:
        if not self._top_k:
            return np.arange(position + 1)
        q = self._history.queries
        return chosen(
            q["iq"][sequence][position],
            q["iw"][sequence][position],
            self._history.cached["index_key"][sequence][: position + 1],
            self._top_k,
        )

    def _scores(self, sequence: int, position: int, head: int) -> tuple[F64, F64]:
        """Scores of the visible keys and the largest error of one."""
        visible = self._visible(sequence, position)
        latent = self._history.cached["latent"][sequence][visible].astype(np.float64)
        rope_key = self._history.cached["rope_key"][sequence][visible].astype(np.float64)
        query = self._history.queries["q"][sequence][position].astype(np.float64).reshape(HEADS, NOPE + ROPE)[head]
        weights = self._kv_b[head, :NOPE]
        absorbed = query[:NOPE] @ weights
        sizes = np.abs(query[:NOPE]) @ np.abs(weights)
        scores = latent @ absorbed + rope_key @ query[NOPE:]
        terms = np.abs(latent) @ sizes + np.abs(rope_key) @ np.abs(query[NOPE:])
        error = ROUNDING * (NOPE + latent.shape[1] // 16 + 10) * terms
        if self._rotated:  # summed over rotated rows, then turned back
            sizes = np.abs(query[:NOPE]) @ np.abs(self._stored[head, :NOPE])
            error += ROUNDING * NOPE * (np.abs(rotate(latent)) @ sizes)
            error += np.abs(latent) @ oracle.rotation_error(absorbed[None])[0]
        return scores * self.scale, error * self.scale

    def row(self, sequence: int, position: int) -> Approx:
        """All heads of one row."""
        visible = self._visible(sequence, position)
        latent = self._history.cached["latent"][sequence][visible].astype(np.float64)
        values, error, terms = [], [], []
        for head in range(HEADS):
            scores, score_error = self._scores(sequence, position, head)
            mixed = oracle.soft_mix(scores, float(score_error.max()), latent)
            weights = self._kv_b[head, NOPE:]
            sizes = np.abs(weights)
            values.append(weights @ mixed.values)
            terms.append(sizes @ mixed.terms)
            error.append(sizes @ mixed.error + ROUNDING * (latent.shape[1] // 16 + 6) * terms[-1])
            if self._rotated:  # what is mixed is rotated, then meets rotated rows
                sizes, turned = np.abs(self._stored[head, NOPE:]), np.abs(rotate(mixed.values[None]))[0]
                error[-1] += ROUNDING * (latent.shape[1] // 16 + 6) * (sizes @ turned)
                error[-1] += sizes @ oracle.rotation_error(mixed.values[None])[0]
        return Approx(np.concatenate(values), np.concatenate(error), np.concatenate(terms))


def _grouped(name: str, heads: int, kv_heads: int, head_dim: int, steps: Steps) -> Case:
    scale = 0.75 / float(np.sqrt(head_dim))

    def prepare() -> tuple[Run, Expect]:
        width = kv_heads * head_dim
        history = History(f"attention {name}", steps, {"key": width, "value": width}, {"q": heads * head_dim})

        def run(device: Device) -> list[Array]:
            def record(r: Recorder, b: dict[str, Rows]) -> Sequence[Rows]:
                keys, values = r.kv_plane(2, "key", width), r.kv_plane(2, "value", width)
                r.kv_write(b["key"], keys)
                r.kv_write(b["value"], values)
                out = r.rows(heads * head_dim)
                r.attention(b["q"], out, kind=GQA(keys, values, heads, kv_heads, head_dim, scale))
                return (out,)

            return history.run(device, record)

        def row(sequence: int, position: int) -> Approx:
            shape = (position + 1, kv_heads, head_dim)
            keys = history.cached["key"][sequence][: position + 1].astype(np.float64).reshape(shape)
            values = history.cached["value"][sequence][: position + 1].astype(np.float64).reshape(shape)
            query = history.queries["q"][sequence][position].astype(np.float64).reshape(heads, head_dim)
            parts = []
            for head in range(heads):
                group = head // (heads // kv_heads)
                terms = np.abs(keys[:, group]) @ np.abs(query[head])
                error = ROUNDING * (head_dim // 16 + 8) * float(terms.max()) * scale
                parts.append(oracle.soft_mix(keys[:, group] @ query[head] * scale, error, values[:, group]))
            return Approx(
                np.concatenate([part.values for part in parts]),
                np.concatenate([part.error for part in parts]),
                np.concatenate([part.terms for part in parts]),
            )

        return run, lambda precision: history.each(row)

    return Case("attention", NO_FORMAT, name, prepare)


def chosen(query: F32, weights: F32, keys: F32, top_k: int) -> Array:
    """Positions of the keys that a row attends to, ascending. Raises ValueError where data leave the choice open."""
    count = len(keys)
    if count <= top_k:
        return np.arange(count)
    heads = len(weights)
    parts = query.astype(np.float64).reshape(heads, -1)
    dots = np.maximum(parts @ keys.astype(np.float64).T / np.sqrt(parts.shape[1]), 0.0)
    scores = weights.astype(np.float64) @ dots / np.sqrt(heads)
    ranked = np.where(np.isnan(scores), -np.inf, scores)
    order = sorted(range(count), key=lambda t: (-ranked[t], t))
    last, first_out = ranked[order[top_k - 1]], ranked[order[top_k]]
    if 0 < last - first_out < NEAR_TIE * np.abs(ranked[np.isfinite(ranked)]).max():
        raise ValueError(f"selection of {top_k} of {count}: the data of this case are a near tie")
    return np.array(sorted(order[:top_k]))


def select_cases() -> Iterator[Case]:
    """Selections: more heads, ties in position order, NaN below everything, all keys where there are few."""
    yield _select("3 heads of 20, top 8", 3, 20, 8, "plain")
    yield _select("1 head of 17, top 5", 1, 17, 5, "plain")
    yield _select("ties", 2, 16, 6, "ties")
    yield _select("NaN", 2, 16, 6, "NaN")
    yield _select("negative weights", 2, 16, 6, "negative")


def _select(name: str, heads: int, head_dim: int, top_k: int, kind: str) -> Case:
    def prepare() -> tuple[Run, Expect]:
        history = History(f"index {name}", STEPS, {"key": head_dim}, {"iq": heads * head_dim, "iw": heads})
        keys, weights = history.cached["key"], history.queries["iw"]
        for sequence in (0, 1):
            if kind == "ties":
                count = len(keys[sequence])
                keys[sequence][:] = keys[sequence][: count // 3 + 1].repeat(3, axis=0)[:count]
                weights[sequence][:] = np.abs(weights[sequence])
            elif kind == "NaN":
                keys[sequence][::4] = np.nan
                weights[sequence][:] = np.abs(weights[sequence])
            elif kind == "negative":
                weights[sequence][:, 0] = -np.abs(weights[sequence][:, 0])

        def run(device: Device) -> list[Array]:
            def record(r: Recorder, b: dict[str, Rows]) -> Sequence[Rows]:
                plane = r.kv_plane(5, "index_key", head_dim)
                r.kv_write(b["key"], plane)
                out = r.rows(1 + top_k, dtype="i32")
                r.index_select(b["iq"], b["iw"], plane, out, heads=heads, head_dim=head_dim, top_k=top_k)
                return (out,)

            found = history.run(device, record)
            for array in found:
                array[array[:, 0] < 0, 1:] = 0
            return found

        def expect(precision: str) -> list[Expected]:
            out = []
            for step in history.steps:
                rows = []
                for s, p in history.places(step):
                    row = np.zeros(1 + top_k)
                    row[0] = -1
                    if p + 1 > top_k:
                        row[0] = top_k
                        row[1:] = chosen(history.queries["iq"][s][p], weights[s][p], keys[s][: p + 1], top_k)
                    rows.append(row)
                out.append(Expected(np.stack(rows)))
            return out

        return run, expect

    return Case("index_select", NO_FORMAT, name, prepare)


def write_cases() -> Iterator[Case]:
    """What is written is what is read: attention to one selected key gives that key's value, bit for bit."""
    for count, width in ((60, 24), (17, 7)):
        yield _write(count, width)


def _write(count: int, width: int) -> Case:
    name = f"{count} positions of {width}"

    def prepare() -> tuple[Run, Expect]:
        steps = (((0, 0, count), (1, 0, 3)), ((0, count, 1), (1, 3, 2)))
        history = History(f"kv_write {name}", steps, {"key": width, "value": width}, {"q": width})
        wanted = [(0, count // 3), (1, 0), (1, 2)]
        picks = np.array([[1, position] for _, position in wanted], dtype=np.int32)

        def run(device: Device) -> list[Array]:
            def record(r: Recorder, b: dict[str, Rows]) -> Sequence[Rows]:
                keys, values = r.kv_plane(0, "key", width), r.kv_plane(0, "value", width)
                r.kv_write(b["key"], keys)
                r.kv_write(b["value"], values)
                out = r.rows(width)
                r.attention(b["q"], out, kind=GQA(keys, values, 1, 1, width, 0.1), selection=b["pick_ids"])
                return (out,)

            return history.run(device, record, {"pick_ids": picks})[-1:]

        def expect(precision: str) -> list[Expected]:
            rows = [history.cached["value"][sequence][position] for sequence, position in wanted]
            return [Expected(np.stack(rows))]

        return run, expect

    return Case("kv_write", NO_FORMAT, name, prepare)
