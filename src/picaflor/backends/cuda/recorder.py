"""Records operations for a GPU: checks every shape, then keeps a step that launches kernels over rows on the device.

Knows shapes, buffers of torch and the modules that launch; must not know families, files or the expert store.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch

from picaflor.backends.api import (
    GQA,
    MLA,
    Batch,
    ExpertLayout,
    ExpertProvider,
    KVPlane,
    RouterSpec,
    Rows,
    Vector,
    Weight,
)
from picaflor.backends.batches import Limits, rope_lines
from picaflor.backends.cuda import choose, latent, rows
from picaflor.backends.cuda.attention import Keys
from picaflor.backends.cuda.early import EarlyRouter, RouterInputs
from picaflor.backends.cuda.exchange import Exchange
from picaflor.backends.cuda.formats import Needs, needs
from picaflor.backends.cuda.matmul import matmul
from picaflor.backends.cuda.memory import needed
from picaflor.backends.cuda.prepare import Prepared, prepare, room_for
from picaflor.backends.cuda.program import Batches, CudaProgram, Frame, Space
from picaflor.backends.cuda.rows import Tensor
from picaflor.backends.cuda.sampling import Drawing
from picaflor.backends.cuda.slots import HeldLayer
from picaflor.backends.cuda.tier import ExpertTier
from picaflor.backends.cuda.weights import HeldMatrix
from picaflor.backends.host import FINISH, Call, HostTwin
from picaflor.backends.programs import Guard
from picaflor.backends.recording import DeviceRecorder, Run, Step
from picaflor.backends.shapes import FIRST_WRITTEN, check
from picaflor.backends.table import CapabilityTable, Cell
from picaflor.formats.base import F32


@dataclass(frozen=True, slots=True, eq=False)
class Buffer:
    """The handle of Rows: a tensor `[max_rows, width]` on the device."""

    memory: Tensor

    def view(self, part: Rows) -> Tensor:
        """Columns of this buffer."""
        return self.memory[:, part.start : part.start + part.width]


class RopeTable:
    """cos and sin `[capacity, dims / 2]` on the device, filled as positions are reached."""

    def __init__(self, dims: int, theta: float, capacity: int, device: Any) -> None:
        self.cos = torch.zeros((capacity, dims // 2), dtype=torch.float32, device=device)
        self.sin = torch.zeros((capacity, dims // 2), dtype=torch.float32, device=device)
        self._dims, self._theta = dims, theta
        self._filled = 0

    def fill(self, positions: int) -> None:
        """Make the first `positions` lines right."""
        if positions <= self._filled:
            return
        stop = min(max(positions, 2 * self._filled, 256), self.cos.shape[0])
        lines = rope_lines(self._dims, self._theta, self._filled, stop)
        for table, values in zip((self.cos, self.sin), lines, strict=True):
            table[self._filled : stop].copy_(torch.from_numpy(values))
        self._filled = stop

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return 2 * int(self.cos.numel()) * 4


class CudaRecorder(DeviceRecorder):
    """backends.api.Recorder. Every method raises ValueError where widths do not fit together.

    `twin` gets every call as it is made. `precision`: of activations. `ready()` is called before a program runs.
    """

    def __init__(
        self,
        *,
        backend: str,
        device: Any,
        precision: str,
        table: CapabilityTable,
        tier: ExpertTier,
        twin: HostTwin,
        host: Callable[[], HostTwin],
        keep: Callable[[HeldMatrix], None],
        guard: Guard,
        ready: Callable[[ExpertProvider | None], None],
        drawing: Drawing,
        captures: bool,
        max_rows: int,
        max_outputs: int,
        page_tokens: int,
        pages: int,
    ) -> None:
        limits = Limits(max_rows, max_outputs, pages, page_tokens)
        super().__init__(backend=backend, table=table, twin=twin, limits=limits)
        self._device = device
        self._precision = precision
        self._tier = tier
        self._host = host
        self._keep = keep
        self._guard = guard
        self._ready = ready
        self._drawing = drawing
        self._max_rows = max(max_rows, max_outputs)
        self._shift = page_tokens.bit_length() - 1
        self._batches = Batches(limits, device, captures)
        self._ropes: dict[tuple[int, float], RopeTable] = {}
        self._buffers: list[Tensor] = []
        self._rooms: dict[tuple[int, int, int, Needs], Prepared] = {}
        self._prepared: set[tuple[int, int, int, Needs]] = set()
        self._norms: dict[_Place, Vector] = {}
        self._products: dict[_Place, tuple[_Place, Weight]] = {}
        self._choices: dict[_Place, tuple[_Place, Vector | None, RouterSpec]] = {}
        self._last: tuple[HeldLayer, RouterInputs] | None = None
        self._join: Step | None = None
        self._makers: Mapping[str, Callable[..., Run]] = {
            "embed": self._embed,
            "rmsnorm": self._rmsnorm,
            "layernorm": self._layernorm,
            "matmul": self._matmul,
            "rope": self._rope,
            "add": self._add,
            "silu_mul": self._silu_mul,
            "select_outputs": self._select_outputs,
            "kv_write": self._kv_write,
            "index_select": self._index_select,
            "attention": self._attention,
            "router": self._router,
            "experts": self._ffn,
        }
        twin.fetch = self._page

    # ---- buffers ----

    def new_buffer(self, width: int, dtype: str) -> Buffer:
        """Zeros for all rows. Raises OutOfBudget."""
        kind = torch.float32 if dtype == "f32" else torch.int32
        with needed(f"a buffer of {self._max_rows} rows of {width}", "lower --prefill-chunk"):
            memory = torch.zeros((self._max_rows, width), dtype=kind, device=self._device)
        self._buffers.append(memory)
        return Buffer(memory)

    def new_plane(self, width: int) -> Tensor:
        """Zeros for all pages. Raises OutOfBudget."""
        with needed(f"a part of the key-value cache of {self._limits.capacity} tokens, {width} wide", "lower --ctx"):
            return torch.zeros((self._limits.capacity, width), dtype=torch.float32, device=self._device)

    def workspace_bytes(self) -> int:
        """Bytes of buffers and tables on the device, the scratch of attention not counted."""
        buffers = sum(buffer.numel() * 4 for buffer in self._buffers)
        buffers += sum(room.digits.numel() + 12 * room.scales.numel() for room in self._rooms.values())
        return int(buffers) + self._batches.nbytes + sum(table.nbytes for table in self._ropes.values())

    def _page(self, plane: KVPlane, page: int) -> F32:
        tokens = self._limits.page_tokens
        values: F32 = plane.handle[page * tokens : (page + 1) * tokens].cpu().numpy()
        return values

    # ---- operations ----

    def make(self, op: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Run:
        """The function of an operation: `run(frame, space)`."""
        return self._makers[op](*arguments, **options)

    def make_on_host(self, call: Call) -> Run:
        """A program of one operation: rows go to the host, what it wrote comes back. Nothing is captured then."""
        self._batches.captures = False
        given = [word for word in call.arguments if isinstance(word, Rows)]
        written = [word for word in call.arguments[FIRST_WRITTEN[call.name] :] if isinstance(word, Rows)]
        for weight in (word for word in call.arguments if isinstance(word, Weight)):
            self._keep(_matrix(weight))
        for rows_of in written:
            self._norms.pop(_place(rows_of), None)
            self._products.pop(_place(rows_of), None)
            self._choices.pop(_place(rows_of), None)
        twin = self._host()
        buffers = {id(part.handle): _whole(part) for part in given}
        twin.calls = [Call("rows", (part, part.width, part.dtype), {}) for part in buffers.values()]
        twin.calls += [call, Call(FINISH, (), {})]
        pages = np.arange(self._limits.pages, dtype=np.int32)

        def run(frame: Frame, space: Space) -> None:
            if not twin.active:
                twin.take_over("", ())
            for part in given:
                twin.write(0, part, part.handle.view(part)[: space.count].cpu().numpy())
            numbers = np.arange(space.count, dtype=np.int32)  # a sequence each: nothing here looks at other rows
            tokens, positions = (values.cpu().numpy() for values in (space.tokens, space.positions))
            tables = np.tile(pages, (space.count, 1))
            twin.run(0, Batch(tokens, numbers, positions, tables, np.empty(0, np.int32)), frame.experts)
            for part in written:
                values = torch.from_numpy(np.array(twin.view(0, part, space.count)))
                part.handle.view(part)[: space.count].copy_(values)

        return run

    def _embed(self, table: Weight, out: Rows) -> Run:
        held, o = _matrix(table), _view(out)

        def run(_: Frame, space: Space) -> None:
            latent.embed(held.device, space.tokens, o, rows=space.count)

        return run

    def _rmsnorm(self, x: Rows, weight: Vector, out: Rows, *, eps: float, heads: int) -> Run:
        v, o = _view(x), _view(out)
        self._norms[_place(out)] = weight

        def run(_: Frame, space: Space) -> None:
            rows.rmsnorm(v, weight.handle, o, rows=space.count, heads=heads, eps=eps)

        return run

    def _layernorm(self, x: Rows, weight: Vector, bias: Vector, out: Rows, *, eps: float) -> Run:
        v, o = _view(x), _view(out)

        def run(_: Frame, space: Space) -> None:
            rows.layernorm(v, weight.handle, bias.handle, o, rows=space.count, eps=eps)

        return run

    def _matmul(self, x: Rows, weight: Weight, out: Rows) -> Run:
        held, v, o = _matrix(weight), _view(x), _view(out)
        wanted = needs(weight.format, weight.group_size, self._precision)
        made, fresh = (None, False) if wanted is None else self._prepared_rows(x, wanted)
        self._products[_place(out)] = (_place(x), weight)

        def run(_: Frame, space: Space) -> None:
            given = v[: space.count]
            if fresh and wanted is not None:
                prepare(given, wanted, into=made)
            matmul(given, held.device, o[: space.count], self._precision, prepared=made)

        return run

    def _prepared_rows(self, x: Rows, wanted: Needs) -> tuple[Prepared, bool]:
        """Where rows are prepared for matrices with these needs, and whether that is still to be done here."""
        key = (id(x.handle), x.start, x.width, wanted)
        if key not in self._rooms:
            self._rooms[key] = room_for(wanted, x.width, self._max_rows, self._device)
        fresh = key not in self._prepared
        self._prepared.add(key)
        return self._rooms[key], fresh

    def _rope(self, x: Rows, *, heads: int, head_width: int, start: int, dims: int, theta: float, style: str) -> Run:
        key = (dims, theta)
        if key not in self._ropes:
            self._ropes[key] = RopeTable(dims, theta, self._limits.capacity, self._device)
        table, v = self._ropes[key], _view(x)

        def run(frame: Frame, space: Space) -> None:
            table.fill(frame.longest)
            rows.rope(v, space.positions, table.cos, table.sin, rows=space.count, heads=heads, head_width=head_width,
                      start=start, interleaved=style == "interleaved")  # fmt: skip

        return run

    def _add(self, x: Rows, y: Rows) -> Run:
        v, w = _view(x), _view(y)

        def run(_: Frame, space: Space) -> None:
            rows.add(v, w, rows=space.count)

        return run

    def _silu_mul(self, gate: Rows, up: Rows, out: Rows) -> Run:
        g, u, o = _view(gate), _view(up), _view(out)

        def run(_: Frame, space: Space) -> None:
            rows.silu_mul(g, u, o, rows=space.count)

        return run

    def _select_outputs(self, x: Rows, out: Rows) -> Run:
        self._prepared.clear()  # of other rows
        v, o = _view(x), _view(out)

        def run(frame: Frame, space: Space) -> None:
            rows.gather(v, frame.numbers, o, rows=space.count)

        return run

    # ---- keys and values ----

    def _kv_write(self, x: Rows, plane: KVPlane) -> Run:
        v = _view(x)

        def run(frame: Frame, space: Space) -> None:
            rows.kv_write(v, plane.handle, space.sequences, space.positions, frame.pages, rows=space.count,
                          shift=self._shift)  # fmt: skip

        return run

    def _index_select(
        self, q: Rows, weights: Rows, keys: KVPlane, out: Rows, *, heads: int, head_dim: int, top_k: int
    ) -> Run:
        a, w, o = _view(q), _view(weights), _view(out, "i32")

        def run(frame: Frame, space: Space) -> None:
            choose.index_select(a, w, keys.handle, o, self._keys(frame, space, None), heads=heads, head_dim=head_dim,
                                top_k=top_k)  # fmt: skip

        return run

    def _attention(self, q: Rows, out: Rows, *, kind: MLA | GQA, selection: Rows | None) -> Run:
        chosen = None if selection is None else _view(selection, "i32")
        return self._mla(q, out, kind, chosen) if isinstance(kind, MLA) else self._gqa(q, out, kind, chosen)

    def _mla(self, q: Rows, out: Rows, kind: MLA, selection: Tensor | None) -> Run:
        held, a, o = _matrix(kind.kv_b), _view(q), _view(out)

        def run(frame: Frame, space: Space) -> None:
            latent.mla(a, o, held.device, kind.latent.handle, kind.rope_key.handle, self._keys(frame, space, selection),
                       rows=space.count, heads=kind.heads, nope=kind.nope, rope=kind.rope, value=kind.value,
                       scale=kind.scale)  # fmt: skip

        return run

    def _gqa(self, q: Rows, out: Rows, kind: GQA, selection: Tensor | None) -> Run:
        a, o = _view(q), _view(out)

        def run(frame: Frame, space: Space) -> None:
            latent.gqa(a, o, kind.keys.handle, kind.values.handle, self._keys(frame, space, selection),
                       heads=kind.heads, kv_heads=kind.kv_heads, head_dim=kind.head_dim, scale=kind.scale)  # fmt: skip

        return run

    def _keys(self, frame: Frame, space: Space, selection: Tensor | None) -> Keys:
        chosen = None if selection is None else selection[: space.count]
        return Keys(space.sequences, space.positions, frame.pages, self._shift, chosen, frame.longest)

    # ---- experts ----

    def _router(self, logits: Rows, bias: Vector | None, ids: Rows, weights: Rows, *, spec: RouterSpec) -> Run:
        z, i, w = _view(logits), _view(ids, "i32"), _view(weights)
        self._choices[_place(ids)] = (_place(logits), bias, spec)

        def run(_: Frame, space: Space) -> None:
            choose.router(z, None if bias is None else bias.handle, i, w, rows=space.count, spec=spec)

        return run

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
        """out = weighted sum of the chosen experts, in routing order; behind `beside`, what the host computed joins."""
        super().experts(x, ids, weights, out, layer=layer, layouts=layouts, beside=beside)
        if self._join is not None:
            self._steps.append(self._join)
            self._join = None

    def _ffn(self, x: Rows, ids: Rows, weights: Rows, out: Rows, *, layer: int, layouts: Sequence[ExpertLayout]) -> Run:
        held = self._tier.add_layer(layer, layouts, hidden=x.width, top_k=ids.width)
        self._tell_early(held, self._router_inputs(x, ids))
        v, i, w, o = _view(x), _view(ids, "i32"), _view(weights), _view(out)
        kinds = {needs(m.format, m.group_size, self._precision) for e in layouts for m in (e.gate, e.up)}
        rooms = [(wanted, *self._prepared_rows(x, wanted)) for wanted in kinds if wanted is not None]

        def ask(frame: Frame, space: Space) -> None:
            if frame.split:
                self._exchange().ask(held, v[: space.count], i[: space.count])

        def give(frame: Frame, space: Space) -> None:
            given, chosen, factors = (view[: space.count] for view in (v, i, w))
            for wanted, room, fresh in rooms:
                if fresh:
                    prepare(given, wanted, into=room)
            prepared = [room for _, room, _ in rooms]
            if frame.split:
                self._exchange().give(held, given, chosen, factors, prepared)
            else:
                assert frame.experts is not None
                self._tier.compute(held, given, chosen, factors, o[: space.count], frame.experts, prepared)

        def join(frame: Frame, space: Space) -> None:
            if frame.split:
                self._exchange().join(held, i[: space.count], w[: space.count], o[: space.count])

        def serve(frame: Frame, space: Space) -> None:
            assert frame.experts is not None
            self._exchange().serve(held, space.count, frame.experts)

        self._steps.append(Step("", "experts", self._outputs, ask))
        self._join = Step("", "experts", self._outputs, join, host=serve)
        return give

    def _exchange(self) -> Exchange:
        exchange = self._tier.exchange
        assert exchange is not None
        return exchange

    def finish(self) -> CudaProgram:
        """The program of all that was recorded since the last finish; tells what fell back in it."""
        steps, number = self._end()
        self._prepared.clear()
        self._last = None
        return CudaProgram(
            steps, self._batches, self._twin, number, guard=self._guard, ready=self._ready, drawing=self._drawing,
            tier=self._tier,
        )  # fmt: skip

    # ---- helpers ----

    def _router_inputs(self, x: Rows, ids: Rows) -> RouterInputs | None:
        """What chose `ids`, where it is the product of a matrix with the norm that made x; else None."""
        chosen = self._choices.get(_place(ids))
        product = self._products.get(chosen[0]) if chosen is not None else None
        norm = self._norms.get(_place(x))
        if chosen is None or product is None or norm is None or product[0] != _place(x):
            return None
        _, bias, spec = chosen
        return RouterInputs(_matrix(product[1]), norm.handle, None if bias is None else bias.handle, spec)

    def _tell_early(self, held: HeldLayer, inputs: RouterInputs | None) -> None:
        """Let the call of experts before this one know what will probably be wanted here."""
        if self._last is not None and inputs is not None:
            before, there = self._last
            before.early = EarlyRouter(there, inputs, layer=held.layer, precision=self._precision)
        self._last = None if inputs is None else (held, inputs)

    def _record(
        self, op: str, kind: str, cell: Cell, arguments: tuple[Any, ...], options: dict[str, Any] | None = None
    ) -> None:
        """Keep a step as all devices do, and know which prepared rows it leaves."""
        super()._record(op, kind, cell, arguments, options)
        if op == "experts" and self._join is not None:
            self._steps[-1] = replace(self._steps[-1], host=lambda frame, space: self._exchange().mark())
        written = (word for word in arguments[FIRST_WRITTEN[op] :] if isinstance(word, Rows))
        changed = {id(rows.handle) for rows in written}
        self._prepared = {key for key in self._prepared if key[0] not in changed}


_Place = tuple[int, int, int]


def _place(rows: Rows) -> _Place:
    return id(rows.handle), rows.start, rows.width


def _matrix(weight: Weight) -> HeldMatrix:
    held: HeldMatrix = weight.handle
    return held


def _view(part: Rows, dtype: Literal["f32", "i32"] = "f32") -> Tensor:
    check(part.dtype == dtype, f"a buffer of {part.dtype} where {dtype} is needed")
    return part.handle.view(part)


def _whole(part: Rows) -> Rows:
    """All columns of the buffer that a view is of."""
    return Rows(int(part.handle.memory.shape[1]), part.dtype, part.handle)
