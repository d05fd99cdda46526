"""Wrong operations, planted while a program is recorded, in what experts come from, or in the batch.

Knows the contract and the oracle; must not know kernels or devices. Each mutant names the operations whose cases must
kill it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from picaflor.backends.api import GQA, I32, Batch, RouterSpec, Rows, Vector
from picaflor.conformance import oracle, plain
from picaflor.conformance.check import Array
from picaflor.conformance.proxy import Fault, FaultyRecorder, Lease, changed_batch
from picaflor.formats.base import F32

Change = Callable[..., None]
Batches = list[tuple[I32, NDArray[np.uint64]]]


@dataclass(frozen=True, slots=True)
class OperationMutant:
    """A kind of wrong operation. `ops`: each of them must kill it. `equivalent`: why it is none."""

    kind: str
    ops: tuple[str, ...]
    fault: Fault
    equivalent: str = ""


def operation_mutants() -> Iterator[OperationMutant]:
    """All kinds."""
    yield from _norms()
    yield from _ropes()
    yield from _sums()
    yield from _reads()
    yield from _attention()
    yield from _routers()
    yield from _experts()
    yield from _samples()


def _on(kind: str, op: str, change: Change, *more: str, equivalent: str = "") -> OperationMutant:
    """A change of one operation; `more`: other operations whose cases use it, instead of its own."""
    return OperationMutant(kind, more or (op,), Fault(operations={op: change}), equivalent)


def _with(op: str, **options: Any) -> Change:
    """Record the operation with other options."""

    def change(m: FaultyRecorder, *arguments: Any, **given: Any) -> None:
        getattr(m.inner, op)(*arguments, **{**given, **options})

    return change


def _scaled(op: str, option: str, factor: float) -> Change:
    def change(m: FaultyRecorder, *arguments: Any, **given: Any) -> None:
        getattr(m.inner, op)(*arguments, **{**given, option: given[option] * factor})

    return change


def _dropped(m: FaultyRecorder, *arguments: Any, **given: Any) -> None:
    """Nothing is recorded."""


def _shifted(op: str, by: int, field: str = "positions") -> Change:
    """The operation sees other positions than the rest; none below 0."""

    def moved(batch: Batch) -> Batch:
        return changed_batch(batch, **{field: np.maximum(getattr(batch, field) + by, 0)})

    return _seeing(op, moved)


def _seeing(op: str, view: Callable[[Batch], Batch]) -> Change:
    def change(m: FaultyRecorder, *arguments: Any, **given: Any) -> None:
        m.with_batch(view, op, *arguments, **given)

    return change


def _first_sequence(batch: Batch) -> Batch:
    return changed_batch(batch, sequences=0 * batch.sequences)


def _before(op: str, place: int, function: Callable[[Array], Array]) -> Change:
    """An input of the operation is changed before it."""

    def change(m: FaultyRecorder, *arguments: Any, **given: Any) -> None:
        rows = arguments[place]

        def host(look: Callable[[Rows], Array]) -> None:
            look(rows)[:] = function(look(rows).copy())

        m.host(host)
        getattr(m.inner, op)(*arguments, **given)

    return change


def _after(op: str, place: int, function: Callable[[Array], Array]) -> Change:
    """An output of the operation is changed after it."""

    def change(m: FaultyRecorder, *arguments: Any, **given: Any) -> None:
        getattr(m.inner, op)(*arguments, **given)
        rows = arguments[place]

        def host(look: Callable[[Rows], Array]) -> None:
            look(rows)[:] = function(look(rows).copy())

        m.host(host)

    return change


# ---- norms ----


def _other_vector(m: FaultyRecorder, vector: Vector, function: Callable[[F32], F32]) -> Vector:
    return m.device.vector("changed", function(m.device.values(vector)))


def _norms() -> Iterator[OperationMutant]:
    def weight(function: Callable[[F32], F32]) -> Change:
        def change(m: FaultyRecorder, x: Rows, w: Vector, *rest: Any, **given: Any) -> None:
            op = "layernorm" if isinstance(rest[0], Vector) else "rmsnorm"
            getattr(m.inner, op)(x, _other_vector(m, w, function), *rest, **given)

        return change

    def both(kind: str, change: Change) -> OperationMutant:
        return OperationMutant(
            kind, ("rmsnorm", "layernorm"), Fault(operations={"rmsnorm": change, "layernorm": change})
        )

    yield both("norm weight forgotten", weight(np.ones_like))
    yield both("norm weight plus one", weight(lambda w: w + 1))
    for factor, kind in ((0.0, "eps forgotten"), (10.0, "eps ten times as large")):
        changes = {op: _scaled(op, "eps", factor) for op in ("rmsnorm", "layernorm")}
        yield OperationMutant(kind, ("rmsnorm", "layernorm"), Fault(operations=changes))
    yield _on("norm over all heads", "rmsnorm", _norm_of_all)
    yield _on("norm of the first head only", "rmsnorm", _norm_of_first)
    yield _on("norm bias forgotten", "layernorm", _no_bias)
    yield _on("mean not taken away", "layernorm", _no_mean)


def _norm_of_all(m: FaultyRecorder, x: Rows, w: Vector, out: Rows, *, eps: float, heads: int = 1) -> None:
    m.inner.rmsnorm(x, _other_vector(m, w, lambda values: np.tile(values, heads)), out, eps=eps)


def _norm_of_first(m: FaultyRecorder, x: Rows, w: Vector, out: Rows, *, eps: float, heads: int = 1) -> None:
    first = x.width // heads
    m.inner.rmsnorm(m.part(x, 0, first), w, m.part(out, 0, first), eps=eps)


def _no_bias(m: FaultyRecorder, x: Rows, w: Vector, bias: Vector, out: Rows, *, eps: float) -> None:
    m.inner.layernorm(x, w, _other_vector(m, bias, np.zeros_like), out, eps=eps)


def _no_mean(m: FaultyRecorder, x: Rows, w: Vector, bias: Vector, out: Rows, *, eps: float) -> None:
    m.inner.rmsnorm(x, w, out, eps=eps)
    m.host(lambda look: np.add(look(out), m.device.values(bias), out=look(out)))


# ---- rotation ----


def _ropes() -> Iterator[OperationMutant]:
    yield _on("rope forgotten", "rope", _dropped)
    yield _on("rope style swapped", "rope", _rope_swapped)
    yield _on("rope position one late", "rope", _shifted("rope", 1))
    yield _on("rope position one early", "rope", _shifted("rope", -1))
    yield _on("rope base ten times as large", "rope", _scaled("rope", "theta", 10.0))
    yield _on("rope from the start of the head", "rope", _with("rope", start=0))
    yield _on("rope of the first head only", "rope", _rope_of_first)
    yield _on("rope turned the other way", "rope", _rope_back)


def _rope_swapped(m: FaultyRecorder, x: Rows, *, style: str, **given: Any) -> None:
    m.inner.rope(x, style="half" if style == "interleaved" else "interleaved", **given)


def _rope_of_first(m: FaultyRecorder, x: Rows, *, heads: int, head_width: int, **given: Any) -> None:
    m.inner.rope(m.part(x, 0, head_width), heads=1, head_width=head_width, **given)


def _rope_back(
    m: FaultyRecorder, x: Rows, *, heads: int, head_width: int, start: int, dims: int, theta: float, style: str
) -> None:
    def host(look: Callable[[Rows], Array]) -> None:
        values = look(x).astype(np.float64).reshape(-1, heads, head_width)
        back = [-position for position in plain.POSITIONS[: len(values)]]
        look(x)[:] = oracle.rope(values, back, start, dims, theta, style).values.reshape(len(values), -1)

    m.host(host)


# ---- sums, gates, rows ----


def _sums() -> Iterator[OperationMutant]:
    yield _on("residual dropped", "add", _dropped)
    yield _on("sum replaced", "add", _sum_replaced)
    yield _on("sum doubled", "add", _sum_twice)
    yield _on("silu dropped", "silu_mul", _gate(lambda gate, up: gate * up))
    yield _on("sigmoid for silu", "silu_mul", _gate(lambda gate, up: oracle.sigmoid(gate) * up))
    yield _on("up forgotten", "silu_mul", _gate(lambda gate, up: oracle.silu(gate)))
    yield _on("gelu for silu", "silu_mul", _gate(lambda gate, up: gate * oracle.sigmoid(1.702 * gate) * up))
    yield _on("gate and up exchanged", "silu_mul", lambda m, gate, up, out: m.inner.silu_mul(up, gate, out))
    yield OperationMutant(
        "first rows for the chosen ones",
        ("select_outputs",),
        Fault(batch=lambda batch: changed_batch(batch, outputs=(batch.outputs + 1) % len(batch.tokens))),
    )
    yield _on("shared expert missing", "add", _no_shared, "moe")


def _sum_replaced(m: FaultyRecorder, x: Rows, y: Rows) -> None:
    m.host(lambda look: np.copyto(look(x), look(y)))


def _sum_twice(m: FaultyRecorder, x: Rows, y: Rows) -> None:
    m.inner.add(x, y)
    m.inner.add(x, y)


def _gate(function: Callable[[Array, Array], Array]) -> Change:
    def change(m: FaultyRecorder, gate: Rows, up: Rows, out: Rows) -> None:
        def host(look: Callable[[Rows], Array]) -> None:
            look(out)[:] = function(look(gate).astype(np.float64), look(up).astype(np.float64))

        m.host(host)

    return change


def _no_shared(m: FaultyRecorder, x: Rows, y: Rows) -> None:
    if "experts" not in m.seen:
        m.inner.add(x, y)


# ---- what reads weights ----


def _reads() -> Iterator[OperationMutant]:
    yield _on("rows of the batch exchanged", "matmul", _before("matmul", 0, lambda x: x[::-1]))
    yield _on("rows behind the fourth forgotten", "matmul", _after("matmul", 2, _first_four))
    yield _on("rows behind the 128th forgotten", "matmul", _after("matmul", 2, _first_rows))
    yield _on("scales of the first 128 rows for those behind", "matmul", _before("matmul", 0, _scaled_as_first_rows))
    yield _on("outputs behind the 1024th forgotten", "matmul", _after("matmul", 2, _first_outputs))
    yield _on("outputs behind the 1024th from the start", "matmul", _after("matmul", 2, _outputs_again))
    yield _on("outliers cut off", "matmul", _before("matmul", 0, lambda x: np.clip(x, -8, 8)))
    yield _on("NaN read as zero", "matmul", _before("matmul", 0, lambda x: np.nan_to_num(x, nan=0.0)))
    yield _on("last output forgotten", "matmul", _after("matmul", 2, lambda y: np.pad(y[:, :-1], ((0, 0), (0, 1)))))
    yield OperationMutant(
        "token one late", ("rows",), Fault(batch=lambda batch: changed_batch(batch, tokens=batch.tokens + 1))
    )
    yield _on("token outside takes an end of the table", "embed", _clipped_tokens, "rows")


def _first_four(y: Array) -> Array:
    y[4:] = 0
    return y


def _first_rows(y: Array) -> Array:
    y[128:] = 0
    return y


def _scaled_as_first_rows(x: Array) -> Array:
    """Rows behind the first block with the magnitude of those in it."""
    largest = np.abs(x).max(axis=1, keepdims=True)
    behind = len(x) - 128
    if behind > 0:
        x[128:] *= largest[:behind] / np.where(largest[128:] == 0, 1, largest[128:])
    return x


def _first_outputs(y: Array) -> Array:
    y[:, 1024:] = 0
    return y


def _outputs_again(y: Array) -> Array:
    behind = y.shape[1] - 1024
    if behind > 0:
        y[:, 1024:] = y[:, :behind]
    return y


def _clipped_tokens(m: FaultyRecorder, table: Any, out: Rows) -> None:
    def view(batch: Batch) -> Batch:
        return changed_batch(batch, tokens=np.clip(batch.tokens, 0, table.rows - 1))

    m.with_batch(view, "embed", table, out)


# ---- attention and cache ----


def _attention() -> Iterator[OperationMutant]:
    yield _on("softmax scale 10 % off", "attention", _kind(lambda kind: replace(kind, scale=kind.scale * 0.9)))
    yield _on("softmax scale 1 % off", "attention", _kind(lambda kind: replace(kind, scale=kind.scale * 1.01)))
    yield _on("softmax scale forgotten", "attention", _kind(lambda kind: replace(kind, scale=1.0)))
    yield _on("own key not visible", "attention", _shifted("attention", -1))
    yield _on("key behind the row visible", "attention", _shifted("attention", 1))
    yield _on("keys of another sequence", "attention", _seeing("attention", _first_sequence))
    yield _on("pages in order", "attention", _seeing("attention", _sorted_pages))
    yield _on("selection ignored", "attention", _with("attention", selection=None), "attention", "kv_write")
    yield _on("keys and values exchanged", "attention", _kind(_exchanged))
    yield _on("key heads in turn instead of in blocks", "attention", _heads_in_turn)
    yield _on("queries of the next head", "attention", _before("attention", 0, lambda q: np.roll(q, 17, axis=1)))
    yield _on("write forgotten", "kv_write", _dropped)
    yield _on("write one position late", "kv_write", _shifted("kv_write", 1))
    yield _on("write into another sequence", "kv_write", _seeing("kv_write", _first_sequence))
    yield _on("write cut to the first half", "kv_write", _before("kv_write", 0, _half_width))
    yield _on("all keys selected", "index_select", _after("index_select", 3, _all_keys))
    yield _on("newest keys selected", "index_select", _newest)
    yield _on("head weights of the indexer forgotten", "index_select", _before("index_select", 1, np.ones_like))
    yield _on("own key not selectable", "index_select", _shifted("index_select", -1))
    yield _on("one key fewer selected", "index_select", _after("index_select", 3, _one_fewer))
    yield _on("head weights of the indexer positive", "index_select", _before("index_select", 1, np.abs))
    yield _on(
        "indexer scores doubled",
        "index_select",
        _before("index_select", 0, lambda q: 2 * q),
        equivalent="a factor above 0 changes no order",
    )
    yield OperationMutant(
        "cache in other pages",
        ("attention", "index_select", "kv_write"),
        Fault(batch=lambda batch: changed_batch(batch, pages=batch.pages[:, ::-1].max() - batch.pages)),
        equivalent="where a page lies is not seen by any result",
    )


def _kind(function: Callable[[Any], Any]) -> Change:
    def change(m: FaultyRecorder, q: Rows, out: Rows, *, kind: Any, **given: Any) -> None:
        m.inner.attention(q, out, kind=function(kind), **given)

    return change


def _exchanged(kind: Any) -> Any:
    return replace(kind, keys=kind.values, values=kind.keys) if isinstance(kind, GQA) else kind


def _sorted_pages(batch: Batch) -> Batch:
    return changed_batch(batch, pages=np.sort(batch.pages.reshape(-1)).reshape(batch.pages.shape))


def _heads_in_turn(m: FaultyRecorder, q: Rows, out: Rows, *, kind: Any, **given: Any) -> None:
    """Head h reads key head h mod n instead of h div (heads / n)."""
    if not isinstance(kind, GQA):
        m.inner.attention(q, out, kind=kind, **given)
        return
    order = np.arange(kind.heads).reshape(-1, kind.kv_heads).T.reshape(-1)

    def place(rows: Rows, to: Array) -> Callable[[Callable[[Rows], Array]], None]:
        def host(look: Callable[[Rows], Array]) -> None:
            parts = look(rows).copy().reshape(-1, kind.heads, kind.head_dim)
            look(rows)[:] = parts[:, to].reshape(len(parts), -1)

        return host

    m.host(place(q, order))
    m.inner.attention(q, out, kind=kind, **given)
    m.host(place(out, np.argsort(order)))


def _half_width(x: Array) -> Array:
    x[:, (x.shape[1] + 1) // 2 :] = 0
    return x


def _all_keys(selection: Array) -> Array:
    selection[:, 0] = -1
    return selection


def _one_fewer(selection: Array) -> Array:
    selection[:, 0] = np.where(selection[:, 0] > 0, selection[:, 0] - 1, selection[:, 0])
    return selection


def _newest(m: FaultyRecorder, q: Rows, weights: Rows, keys: Any, out: Rows, *, top_k: int, **given: Any) -> None:
    m.inner.index_select(q, weights, keys, out, top_k=top_k, **given)

    def host(look: Callable[[Rows], Array]) -> None:
        for row in look(out):
            if row[0] > 0:
                last = row[1:].max()
                row[1:] = np.arange(last - top_k + 1, last + 1)

    m.host(host)


# ---- router and experts ----


def _routers() -> Iterator[OperationMutant]:
    def other(kind: str, function: Callable[[RouterSpec], RouterSpec], *more: str) -> OperationMutant:
        def change(m: FaultyRecorder, logits: Rows, bias: Any, ids: Rows, w: Rows, *, spec: RouterSpec) -> None:
            m.inner.router(logits, bias, ids, w, spec=function(spec))

        return _on(kind, "router", change, *more)

    yield _on("bias forgotten", "router", lambda m, x, bias, *rest, **given: m.inner.router(x, None, *rest, **given))
    yield other("normalised where not asked, and the reverse", lambda spec: replace(spec, normalise=not spec.normalise))
    yield other("routing weights not normalised", lambda spec: replace(spec, normalise=False))
    yield other("routing scale forgotten", lambda spec: replace(spec, scale=1.0))
    yield other("softmax for sigmoid", lambda spec: replace(spec, score="softmax"))
    yield other("sigmoid for softmax", lambda spec: replace(spec, score="sigmoid"))
    yield other("groups ignored", lambda spec: replace(spec, groups=1, top_groups=1))
    yield other("one group fewer", lambda spec: replace(spec, top_groups=max(1, spec.top_groups - 1)))
    yield _on("routing order reversed", "router", _order_reversed)
    yield _on("ties to the highest number", "router", _ties_high)
    yield _on("bias in the weights", "router", _bias_in_weights)


def _order_reversed(m: FaultyRecorder, logits: Rows, bias: Any, ids: Rows, w: Rows, *, spec: RouterSpec) -> None:
    m.inner.router(logits, bias, ids, w, spec=spec)

    def host(look: Callable[[Rows], Array]) -> None:
        for rows in (ids, w):
            look(rows)[:] = look(rows)[:, ::-1].copy()

    m.host(host)


def _ties_high(m: FaultyRecorder, logits: Rows, bias: Any, ids: Rows, w: Rows, *, spec: RouterSpec) -> None:
    """The router over the experts in falling order."""
    turned = None if bias is None else _other_vector(m, bias, lambda values: values[::-1].copy())

    def turn(look: Callable[[Rows], Array]) -> None:
        look(logits)[:] = look(logits)[:, ::-1].copy()

    m.host(turn)
    m.inner.router(logits, turned, ids, w, spec=spec)
    m.host(lambda look: np.subtract(spec.experts - 1, look(ids), out=look(ids)))


def _bias_in_weights(m: FaultyRecorder, logits: Rows, bias: Any, ids: Rows, w: Rows, *, spec: RouterSpec) -> None:
    m.inner.router(logits, bias, ids, w, spec=spec)
    if bias is not None:
        values = m.device.values(bias)
        m.host(lambda look: np.add(look(w), values[look(ids)], out=look(w)))


def _experts() -> Iterator[OperationMutant]:
    def weights(kind: str, function: Callable[[Array], Array]) -> OperationMutant:
        return _on(kind, "experts", _restored(2, function), "expert_ffn")

    yield _on("wrong expert", "experts", _restored(1, lambda ids: (ids + 1) % 6), "expert_ffn")
    yield _on(
        "expert numbers of the first row for all", "experts", _restored(1, lambda ids: 0 * ids + ids[:1]), "expert_ffn"
    )
    yield _on("rows of an expert behind the 128th forgotten", "experts", _first_pairs, "expert_ffn")
    yield _on("gate and up of experts exchanged", "experts", _layouts_exchanged, "expert_ffn")
    yield weights("routing weights ignored", np.ones_like)
    yield weights("routing weights in another order", lambda w: w[:, ::-1])
    yield weights("last expert of a row dropped", lambda w: w * (np.arange(w.shape[1]) < w.shape[1] - 1))
    yield weights("routing weights of the next row", lambda w: np.roll(w, 1, axis=0))
    yield weights("routing weights 1 % off", lambda w: w * np.float32(1.01))
    yield OperationMutant("layer exchanged", ("expert_ffn",), Fault(layer=lambda layer: 7 - layer))
    yield OperationMutant("layer and expert exchanged", ("expert_ffn",), Fault(batches=_expert_of_other_number))
    yield OperationMutant("stale slot", ("expert_ffn",), Fault(batches=_stale))
    yield OperationMutant("slot used before its read ended", ("expert_ffn",), Fault(slot=_half_read))
    yield OperationMutant("slot read 64 bytes late", ("expert_ffn",), Fault(slot=lambda slot: np.roll(slot, 64)))
    yield OperationMutant(
        "experts in another order",
        ("expert_ffn",),
        Fault(batches=lambda given, seen: iter(given[::-1])),
        equivalent="which expert is computed first never matters",
    )


def _restored(place: int, function: Callable[[Array], Array]) -> Change:
    """An input of `experts` is changed for this call alone."""

    def change(m: FaultyRecorder, *arguments: Any, **given: Any) -> None:
        rows: Rows = arguments[place]
        kept: list[Array] = []

        def before(look: Callable[[Rows], Array]) -> None:
            kept[:] = [look(rows).copy()]
            look(rows)[:] = function(kept[0].copy())

        m.host(before)
        m.inner.experts(*arguments, **given)
        m.host(lambda look: np.copyto(look(rows), kept[0]))

    return change


def _first_pairs(m: FaultyRecorder, *arguments: Any, **given: Any) -> None:
    """Of the rows that chose an expert, only the first 128 get its output."""
    ids, weights = arguments[1], arguments[2]
    kept: list[Array] = []

    def before(look: Callable[[Rows], Array]) -> None:
        chosen, values = look(ids), look(weights)
        kept[:] = [values.copy()]
        for number in np.unique(chosen):
            places = np.argwhere(chosen == number)[128:]
            values[places[:, 0], places[:, 1]] = 0

    m.host(before)
    m.inner.experts(*arguments, **given)
    m.host(lambda look: np.copyto(look(weights), kept[0]))


def _layouts_exchanged(m: FaultyRecorder, *arguments: Any, layouts: Any, **given: Any) -> None:
    turned = [replace(layout, gate=layout.up, up=layout.gate) for layout in layouts]
    m.inner.experts(*arguments, layouts=turned, **given)


def _stale(given: Batches, first: dict[int, int]) -> Lease:
    """The slots of a provider's first lease, for ever."""
    for ids, addresses in given:
        old = [first.setdefault(int(number), int(at)) for number, at in zip(ids, addresses, strict=True)]
        yield ids, np.array(old, dtype=np.uint64)


def _expert_of_other_number(given: Batches, seen: dict[int, int]) -> Lease:
    """Within a lease the slots are given to the experts in turn."""
    every = np.concatenate([addresses for _, addresses in given])
    yield np.concatenate([ids for ids, _ in given]), np.roll(every, 1)


def _half_read(slot: NDArray[np.uint8]) -> NDArray[np.uint8]:
    slot[len(slot) // 2 :] = 0
    return slot


# ---- choice of tokens ----


def _samples() -> Iterator[OperationMutant]:
    def mutant(kind: str, sample: Callable[..., int]) -> OperationMutant:
        return OperationMutant(kind, ("sample",), Fault(sample=sample))

    def given(**changes: Callable[[float], float]) -> Callable[..., int]:
        def sample(inner: Any, logits: F32, **options: float) -> int:
            changed = {name: changes[name](value) if name in changes else value for name, value in options.items()}
            token: int = inner.sample(logits, **changed)
            return token

        return sample

    yield mutant("temperature forgotten", given(temperature=lambda t: 1.0 if t > 0 else t))
    yield mutant("temperature 5 % off", given(temperature=lambda t: t * 1.05))
    yield mutant("top-p forgotten", given(top_p=lambda p: 1.0))
    yield mutant("top-p 10 % off", given(top_p=lambda p: p * 0.9))
    yield mutant("always greedy", given(temperature=lambda t: 0.0))
    yield mutant("random number turned round", given(uniform=lambda u: 1 - u))
    yield mutant("greedy takes the last of equals", _last_of_equals)
    yield mutant("token of the crossing probability left out", _crossing_left_out)


def _last_of_equals(inner: Any, logits: F32, **options: float) -> int:
    if options["temperature"] > 0:
        token: int = inner.sample(logits, **options)
        return token
    return len(logits) - 1 - int(inner.sample(logits[::-1].copy(), **options))


def _crossing_left_out(inner: Any, logits: F32, **options: float) -> int:
    """Only tokens whose cumulative probability stays below top-p; at least one."""
    temperature, top_p = options["temperature"], options["top_p"]
    if temperature > 0 and top_p < 1:
        values = np.where(np.isfinite(logits), logits.astype(np.float64), -np.inf)
        weights = oracle.softmax(values / temperature)
        order = np.argsort(-weights, kind="stable")
        kept = max(1, int(np.searchsorted(np.cumsum(weights[order]), top_p)))
        logits = np.where(np.isin(np.arange(len(logits)), order[:kept]), logits, -np.inf).astype(np.float32)
        options["top_p"] = 1.0
    token: int = inner.sample(logits, **options)
    return token
