"""The reference backend: every operation of the contract in numpy float64, slow and clear.

Knows the operations and the formats' decoders; must not know families, files of a model or any other backend. It says
what a right answer is; buffers and caches start as NaN, so that reading what was never written is seen.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from picaflor.backends.api import (
    GQA,
    I32,
    MLA,
    Batch,
    ExpertLayout,
    ExpertProvider,
    KVPlane,
    MatrixLayout,
    RopeStyle,
    RouterSpec,
    Rows,
    Vector,
    Weight,
)
from picaflor.backends.reduction import NONE, reduce_choices
from picaflor.errors import UnsupportedKernel
from picaflor.formats import REGISTRY
from picaflor.formats.base import F32
from picaflor.formats.e8_iq3 import rotation_blocks, rotation_signs

F64 = NDArray[np.float64]
CLASSES = ("attention", "matmul", "experts", "router", "head", "other")


class _Matrix:
    """A matrix that is decoded when it is first used: its bytes may come after it was bound."""

    def __init__(self, format_name: str, rows: int, cols: int, group_size: int, planes: Sequence[NDArray[Any]]) -> None:
        spec = REGISTRY.get(format_name)
        if spec is None:
            raise UnsupportedKernel(f'reference: format "{format_name}"; accepted: {", ".join(REGISTRY)}')
        self._format = spec
        self._sizes = (rows, cols, group_size)
        self._planes = tuple(planes)
        self.rotated = spec.activation.rotated

    @cached_property
    def values(self) -> F64:
        """The matrix as it is stored: for a rotated format x must be rotated before the product."""
        return self._format.decode(self._planes, *self._sizes).astype(np.float64)

    def apply(self, x: F64) -> F64:
        """x @ W.T."""
        out: F64 = (rotate(x) if self.rotated else x) @ self.values.T
        return out


def rotate(x: F64) -> F64:
    """The signed Walsh-Hadamard rotation of formats.md in float64, over the last axis."""
    out = np.array(x, dtype=np.float64)
    for start, size in rotation_blocks(x.shape[-1]):
        part = out[..., start : start + size] * rotation_signs(size).astype(np.float64)
        stride = 1
        while stride < size:
            pairs = part.reshape(*part.shape[:-1], size // (2 * stride), 2, stride)
            first, second = pairs[..., 0, :], pairs[..., 1, :]
            part = np.stack((first + second, first - second), axis=-2).reshape(part.shape)
            stride *= 2
        out[..., start : start + size] = part / np.sqrt(size)
    return out


def sigmoid(x: F64) -> F64:
    """1 / (1 + exp(-x)) without overflow."""
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1.0, small) / (1.0 + small)


def softmax(x: F64) -> F64:
    """Over the last axis."""
    raised: F64 = np.exp(x - x.max(axis=-1, keepdims=True))
    out: F64 = raised / raised.sum(axis=-1, keepdims=True)
    return out


def route(logits: F64, bias: F64 | None, spec: RouterSpec) -> tuple[I32, F64]:
    """One row's experts in routing order and their weights."""
    scores = sigmoid(logits) if spec.score == "sigmoid" else softmax(logits)
    choice = scores if bias is None else scores + bias
    choice = np.where(np.isnan(choice), -np.inf, choice)
    if spec.groups > 1:
        grouped = choice.reshape(spec.groups, -1)
        best_two = -np.sort(-grouped, axis=1)[:, :2]
        kept = np.argsort(-best_two.sum(axis=1), kind="stable")[: spec.top_groups]
        allowed = np.isin(np.arange(spec.groups), kept)
        choice = np.where(allowed[:, None], grouped, -np.inf).reshape(-1)
    ids = np.argsort(-choice, kind="stable")[: spec.top_k]
    weights = scores[ids]
    if spec.normalise:
        weights = weights / (weights.sum() + 1e-20)
    return ids.astype(np.int32), weights * spec.scale


def choose(scores: F64, top_k: int) -> I32:
    """Positions of the `top_k` largest scores, ascending; equal scores in position order, NaN below everything."""
    ranked = np.where(np.isnan(scores), -np.inf, scores)
    chosen = np.argsort(-ranked, kind="stable")[:top_k]
    return np.sort(chosen).astype(np.int32)


def sample(logits: F32, *, temperature: float, top_p: float, uniform: float) -> int:
    """One token; non-finite logits are never chosen, token 0 where none is finite."""
    values = logits.astype(np.float64)
    values = np.where(np.isfinite(values), values, -np.inf)
    if temperature <= 0 or not np.isfinite(values).any():
        return int(np.argmax(values))
    weights = softmax(values / temperature)
    order = np.argsort(-weights, kind="stable")
    count = int(np.searchsorted(np.cumsum(weights[order]), top_p)) + 1
    kept = np.zeros_like(weights)
    kept[order[:count]] = weights[order[:count]]
    cumulative = np.cumsum(kept)
    return min(int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right")), int(np.flatnonzero(kept)[-1]))


class _Run:
    """One batch being computed: how rows find their keys."""

    def __init__(self, batch: Batch, experts: ExpertProvider | None, page_tokens: int) -> None:
        self.batch = batch
        self.experts = experts
        self.page_tokens = page_tokens

    def slots(self, sequence: int, positions: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        """(page, token in page) of positions of a sequence."""
        pages = self.batch.pages[sequence][positions // self.page_tokens]
        if (pages < 0).any():
            raise ValueError(f"sequence {sequence} has no page for a position up to {positions.max()}")
        return pages, positions % self.page_tokens

    def cached(self, plane: KVPlane, sequence: int, positions: NDArray[Any]) -> F64:
        """Rows `[positions, width]` of a plane."""
        out: F64 = plane.handle[self.slots(sequence, positions)]
        return out

    def row(self, number: int) -> tuple[int, int]:
        """(sequence, position) of a batch row."""
        return int(self.batch.sequences[number]), int(self.batch.positions[number])


Operation = Callable[[_Run, int], None]


def _part(rows: Rows, count: int) -> NDArray[Any]:
    out: NDArray[Any] = rows.handle[:count, rows.start : rows.start + rows.width]
    return out


@dataclass(slots=True)
class ReferenceProgram:
    """A list of operations; each is (class for timing, acts on output rows only, function)."""

    operations: list[tuple[str, bool, Operation]]
    page_tokens: int
    max_rows: int
    max_outputs: int
    _seconds: dict[str, float] = field(default_factory=dict)

    def run(self, batch: Batch, experts: ExpertProvider | None = None) -> None:
        """Compute all rows of the batch."""
        rows, outputs = len(batch.tokens), len(batch.outputs)
        if rows > self.max_rows or outputs > self.max_outputs:
            raise ValueError(f"batch of {rows} rows, {outputs} outputs; at most {self.max_rows}, {self.max_outputs}")
        run = _Run(batch, experts, self.page_tokens)
        for kind, on_outputs, operation in self.operations:
            start = time.perf_counter()
            operation(run, outputs if on_outputs else rows)
            self._seconds[kind] = self._seconds.get(kind, 0.0) + time.perf_counter() - start

    def view(self, rows: Rows, count: int) -> NDArray[Any]:
        """The first rows of a buffer, float64 or int32."""
        return _part(rows, count)

    def write(self, rows: Rows, values: F32) -> None:
        """Fill an input buffer's first rows."""
        _part(rows, len(values))[:] = values

    def seconds(self) -> dict[str, float]:
        """Seconds per class since the last call."""
        taken = {kind: self._seconds.pop(kind, 0.0) for kind in CLASSES}
        return taken


class ReferenceRecorder:
    """Records operations as closures. Raises ValueError where widths do not fit or buffers overlap unlawfully."""

    def __init__(self, *, max_rows: int, max_outputs: int, page_tokens: int, pages: int) -> None:
        self._sizes = (max_rows, max_outputs)
        self._page_tokens = page_tokens
        self._pages = pages
        self._planes: dict[tuple[int, str], KVPlane] = {}
        self._operations: list[tuple[str, bool, Operation]] = []
        self._outputs = False

    def _record(self, kind: str, operation: Operation) -> None:
        self._operations.append((kind, self._outputs, operation))

    def rows(self, width: int, *, dtype: Literal["f32", "i32"] = "f32") -> Rows:
        """A new buffer of NaN (or of -2147483648)."""
        fill: Any = np.nan if dtype == "f32" else np.iinfo(np.int32).min
        array = np.full((max(self._sizes), width), fill, dtype=np.float64 if dtype == "f32" else np.int32)
        return Rows(width, dtype, array)

    def part(self, rows: Rows, start: int, width: int) -> Rows:
        """Columns of a buffer, as a view."""
        _check(start >= 0 and start + width <= rows.width, f"columns {start}+{width} of {rows.width}")
        return Rows(width, rows.dtype, rows.handle, rows.start + start)

    def kv_plane(self, layer: int, name: str, width: int) -> KVPlane:
        """A pool of pages of NaN; the same one for the same (layer, name)."""
        if (layer, name) not in self._planes:
            pool = np.full((self._pages, self._page_tokens, width), np.nan)
            self._planes[layer, name] = KVPlane(layer, name, width, "f32", pool)
        plane = self._planes[layer, name]
        _check(plane.width == width, f"plane {name} of layer {layer} is {plane.width} wide, asked for {width}")
        return plane

    def embed(self, table: Weight, out: Rows) -> None:
        """out = table[token], zeros for a token outside the table."""
        _check(out.width == table.cols, f"{table.name} into {out.width}")
        _refuse_rotated(table, "embed")

        def operation(run: _Run, count: int) -> None:
            values = table.handle.values
            tokens = run.batch.tokens
            known = (tokens >= 0) & (tokens < table.rows)
            _part(out, count)[:] = np.where(known[:, None], values[np.where(known, tokens, 0)], 0.0)

        self._record("other", operation)

    def rmsnorm(self, x: Rows, weight: Vector, out: Rows, *, eps: float, heads: int = 1) -> None:
        """x / sqrt(mean(x^2) + eps) * w, per head."""
        _check(x.width == out.width == weight.length * heads, f"norm {weight.name}: {x.width} and {heads} heads")

        def operation(_: _Run, count: int) -> None:
            parts = _part(x, count).reshape(count, heads, weight.length)
            scale = 1.0 / np.sqrt((parts**2).mean(axis=2, keepdims=True) + eps)
            _part(out, count)[:] = (parts * scale * weight.handle).reshape(count, x.width)

        self._record("other", operation)

    def layernorm(self, x: Rows, weight: Vector, bias: Vector, out: Rows, *, eps: float) -> None:
        """(x - mean) / sqrt(variance + eps) * w + b."""
        _check(x.width == out.width == weight.length == bias.length, f"norm {weight.name}: {x.width}")

        def operation(_: _Run, count: int) -> None:
            values = _part(x, count)
            centred = values - values.mean(axis=1, keepdims=True)
            scale = 1.0 / np.sqrt((centred**2).mean(axis=1, keepdims=True) + eps)
            _part(out, count)[:] = centred * scale * weight.handle + bias.handle

        self._record("other", operation)

    def matmul(self, x: Rows, weight: Weight, out: Rows) -> None:
        """out = x @ W.T."""
        _check(x.width == weight.cols and out.width == weight.rows, f"{weight.name}: {x.width} to {out.width}")
        _check(not _overlap(x, out), f"{weight.name}: out aliases x")

        def operation(_: _Run, count: int) -> None:
            _part(out, count)[:] = weight.handle.apply(_part(x, count))

        self._record("head" if self._outputs else "matmul", operation)

    def rope(
        self, x: Rows, *, heads: int, head_width: int, start: int, dims: int, theta: float, style: RopeStyle
    ) -> None:
        """Rotate in place at the row's position."""
        _check(x.width == heads * head_width and start + dims <= head_width and dims % 2 == 0, f"rope of {x.width}")
        half = dims // 2
        frequencies = theta ** (-2.0 * np.arange(half) / dims)

        def operation(run: _Run, count: int) -> None:
            angles = run.batch.positions[:count, None].astype(np.float64) * frequencies
            cos, sin = np.cos(angles)[:, None, :], np.sin(angles)[:, None, :]
            values = _part(x, count).reshape(count, heads, head_width).copy()
            turned = values[:, :, start : start + dims]
            pairs = (turned[..., 0::2], turned[..., 1::2]) if style == "interleaved" else np.split(turned, 2, axis=2)
            first, second = pairs
            values[:, :, start : start + dims] = np.concatenate(
                (first * cos - second * sin, second * cos + first * sin), axis=2
            )
            _part(x, count)[:] = values.reshape(count, x.width)

        self._record("other", operation)

    def add(self, x: Rows, y: Rows) -> None:
        """x = x + y."""
        _check(x.width == y.width, f"add of {x.width} and {y.width}")

        def operation(_: _Run, count: int) -> None:
            _part(x, count)[:] += _part(y, count)

        self._record("other", operation)

    def silu_mul(self, gate: Rows, up: Rows, out: Rows) -> None:
        """out = gate * sigmoid(gate) * up."""
        _check(gate.width == up.width == out.width, f"silu of {gate.width}, {up.width}, {out.width}")

        def operation(_: _Run, count: int) -> None:
            values = _part(gate, count)
            _part(out, count)[:] = values * sigmoid(values) * _part(up, count)

        self._record("other", operation)

    def kv_write(self, x: Rows, plane: KVPlane) -> None:
        """Store rows in their pages."""
        _check(x.width == plane.width, f"plane {plane.name}: {x.width} into {plane.width}")

        def operation(run: _Run, count: int) -> None:
            for number in range(count):
                sequence, position = run.row(number)
                page, slot = run.slots(sequence, np.array([position]))
                plane.handle[page[0], slot[0]] = _part(x, count)[number]

        self._record("attention", operation)

    def index_select(
        self, q: Rows, weights: Rows, keys: KVPlane, out: Rows, *, heads: int, head_dim: int, top_k: int
    ) -> None:
        """Count and ascending positions of the keys each row attends to; count -1 where all of them."""
        _check(q.width == heads * head_dim and keys.width == head_dim and weights.width == heads, "indexer widths")
        _check(out.width == 1 + top_k and out.dtype == "i32", f"selection of {out.width} for top {top_k}")

        def operation(run: _Run, count: int) -> None:
            result = _part(out, count)
            for number in range(count):
                sequence, position = run.row(number)
                if position + 1 <= top_k:
                    result[number, 0] = -1
                    continue
                cached = run.cached(keys, sequence, np.arange(position + 1))
                query = _part(q, count)[number].reshape(heads, head_dim)
                dots = np.maximum(query @ cached.T / np.sqrt(head_dim), 0.0)
                scores = _part(weights, count)[number] @ dots / np.sqrt(heads)
                chosen = choose(scores, top_k)
                result[number, 0] = len(chosen)
                result[number, 1:] = chosen

        self._record("attention", operation)

    def attention(self, q: Rows, out: Rows, *, kind: MLA | GQA, selection: Rows | None = None) -> None:
        """Causal attention of each row over its own sequence."""
        width = kind.heads * (kind.nope + kind.rope if isinstance(kind, MLA) else kind.head_dim)
        _check(q.width == width, f"attention of {q.width} wide queries, expected {width}")
        _check(not _overlap(q, out), "attention: out aliases q")
        if isinstance(kind, MLA):
            _refuse_rotated(kind.kv_b, "absorbed attention")

        def operation(run: _Run, count: int) -> None:
            result = _part(out, count)
            for number in range(count):
                sequence, position = run.row(number)
                visible: NDArray[Any] = np.arange(position + 1)
                if selection is not None and (chosen := _part(selection, count)[number])[0] != -1:
                    visible = chosen[1 : 1 + chosen[0]]
                query = _part(q, count)[number]
                if isinstance(kind, MLA):
                    result[number] = _mla(run, query, sequence, visible, kind)
                else:
                    result[number] = _gqa(run, query, sequence, visible, kind)

        self._record("attention", operation)

    def router(self, logits: Rows, bias: Vector | None, ids: Rows, weights: Rows, *, spec: RouterSpec) -> None:
        """ids and weights of the chosen experts."""
        _check(logits.width == spec.experts and ids.width == weights.width == spec.top_k, "router widths")

        def operation(_: _Run, count: int) -> None:
            for number in range(count):
                row = route(_part(logits, count)[number], None if bias is None else bias.handle, spec)
                _part(ids, count)[number], _part(weights, count)[number] = row

        self._record("router", operation)

    def experts(
        self,
        x: Rows,
        ids: Rows,
        weights: Rows,
        out: Rows,
        *,
        layer: int,
        layouts: Sequence[ExpertLayout],
        beside: Callable[[], None] | None = None,
    ) -> None:
        """out = the weighted sum of the chosen experts, in routing order."""
        _check(x.width == out.width, f"experts from {x.width} to {out.width}")

        on_outputs = self._outputs

        def operation(run: _Run, count: int) -> None:
            if run.experts is None:
                raise ValueError("the program has experts, and no provider was given")
            chosen = _part(ids, count)
            reduction = run.batch.reduction
            if reduction is not None:
                rows = reduction.rows[run.batch.outputs] if on_outputs else reduction.rows
                reduce_choices(chosen, _part(weights, count), rows, layer, reduction)
            products = np.full((*chosen.shape, out.width), np.nan)
            products[chosen == NONE] = 0.0
            wanted = np.unique(chosen[chosen >= 0]).astype(np.int32)
            with run.experts.acquire(layer, wanted) as lease:
                for numbers, addresses in lease.batches():
                    for expert, address in zip(numbers, addresses, strict=True):
                        where = np.nonzero(chosen == expert)
                        values = _part(x, count)[where[0]]
                        products[where] = _expert(values, int(address), layouts[int(expert)])
            total = np.zeros((count, out.width))
            for slot in range(ids.width):
                total += _part(weights, count)[:, slot : slot + 1] * products[:, slot]
            _part(out, count)[:] = total

        self._record("experts", operation)
        if beside is not None:
            beside()

    def select_outputs(self, x: Rows, out: Rows) -> None:
        """out = the batch's output rows, packed; later operations act on those."""
        _check(x.width == out.width and not _overlap(x, out), "output rows need a buffer of their own")
        max_rows = self._sizes[0]

        def operation(run: _Run, count: int) -> None:
            _part(out, count)[:] = _part(x, max_rows)[run.batch.outputs]

        self._outputs = True
        self._record("other", operation)

    def finish(self) -> ReferenceProgram:
        """The program of what was recorded since the last finish."""
        program = ReferenceProgram(self._operations, self._page_tokens, *self._sizes)
        self._operations, self._outputs = [], False
        return program


def _check(good: bool, what: str) -> None:
    if not good:
        raise ValueError(f"reference recorder: {what}")


def _refuse_rotated(weight: Weight, operation: str) -> None:
    """An operation that takes single rows of a matrix cannot take rotated ones."""
    if weight.handle.rotated:
        accepted = ", ".join(name for name, spec in REGISTRY.items() if not spec.activation.rotated)
        raise UnsupportedKernel(f"reference: {operation} with {weight.name} in {weight.format}; accepted: {accepted}")


def _overlap(first: Rows, second: Rows) -> bool:
    return bool(
        first.handle is second.handle
        and first.start < second.start + second.width
        and second.start < first.start + first.width
    )


def _mla(run: _Run, query: F64, sequence: int, visible: NDArray[Any], kind: MLA) -> F64:
    """Absorbed latent attention of one row, `[heads * value]`."""
    latent = run.cached(kind.latent, sequence, visible)
    rope_keys = run.cached(kind.rope_key, sequence, visible)
    heads = query.reshape(kind.heads, kind.nope + kind.rope)
    kv_b = kind.kv_b.handle.values.reshape(kind.heads, kind.nope + kind.value, kind.latent.width)
    absorbed = np.einsum("hd,hdk->hk", heads[:, : kind.nope], kv_b[:, : kind.nope])
    scores = (absorbed @ latent.T + heads[:, kind.nope :] @ rope_keys.T) * kind.scale
    mixed = softmax(scores) @ latent
    out: F64 = np.einsum("hk,hvk->hv", mixed, kv_b[:, kind.nope :]).reshape(-1)
    return out


def _gqa(run: _Run, query: F64, sequence: int, visible: NDArray[Any], kind: GQA) -> F64:
    """Grouped-query attention of one row, `[heads * head_dim]`."""
    shape = (len(visible), kind.kv_heads, kind.head_dim)
    keys = run.cached(kind.keys, sequence, visible).reshape(shape)
    values = run.cached(kind.values, sequence, visible).reshape(shape)
    heads = query.reshape(kind.kv_heads, kind.heads // kind.kv_heads, kind.head_dim)
    weights = softmax(np.einsum("gnd,tgd->gnt", heads, keys) * kind.scale)
    out: F64 = np.einsum("gnt,tgd->gnd", weights, values).reshape(-1)
    return out


def _expert(x: F64, address: int, layout: ExpertLayout) -> F64:
    """down(silu(gate(x)) * up(x)) with the matrices in the slot at `address`."""
    slot = np.ctypeslib.as_array((ctypes.c_uint8 * layout.nbytes).from_address(address))
    gate, up, down = (_slot_matrix(slot, matrix) for matrix in (layout.gate, layout.up, layout.down))
    gated = gate.apply(x)
    return down.apply(gated * sigmoid(gated) * up.apply(x))


def _slot_matrix(slot: NDArray[np.uint8], layout: MatrixLayout) -> _Matrix:
    spec = REGISTRY[layout.format]
    sizes = (layout.rows, layout.cols, layout.group_size)
    planes = [
        slot[offset : offset + plane.nbytes(*sizes)] for plane, offset in zip(spec.planes, layout.offsets, strict=True)
    ]
    return _Matrix(layout.format, *sizes, planes)


class ReferenceBackend:
    """The device that is numpy."""

    name = "reference"

    def weight(
        self, name: str, format_name: str, shape: tuple[int, int], group_size: int, planes: Sequence[NDArray[Any]]
    ) -> Weight:
        """Hold a matrix, decoded to float64 when it is first used. Raises UnsupportedKernel for an unknown format."""
        rows, cols = shape
        handle = _Matrix(format_name, rows, cols, group_size, planes)
        return Weight(name, format_name, rows, cols, group_size, handle)

    def vector(self, name: str, values: F32) -> Vector:
        """Hold a parameter vector."""
        return Vector(name, len(values), values.astype(np.float64))

    def recorder(self, *, max_rows: int, max_outputs: int, page_tokens: int, pages: int) -> ReferenceRecorder:
        """Start recording."""
        return ReferenceRecorder(max_rows=max_rows, max_outputs=max_outputs, page_tokens=page_tokens, pages=pages)

    def sample(self, logits: F32, *, temperature: float, top_p: float, uniform: float) -> int:
        """One token from logits."""
        return sample(logits, temperature=temperature, top_p=top_p, uniform=uniform)
