"""Records operations for a GPU: checks every shape, then keeps a step that launches kernels over rows on the device.

Knows shapes, buffers of torch and the modules that launch; must not know families, files or the expert store.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch

from picaflor.backends.api import (
    GQA,
    MLA,
    ExpertLayout,
    ExpertProvider,
    KVPlane,
    RopeStyle,
    RouterSpec,
    Rows,
    Vector,
    Weight,
)
from picaflor.backends.batches import Limits
from picaflor.backends.cuda import choose, latent, rows
from picaflor.backends.cuda.attention import Keys
from picaflor.backends.cuda.early import EarlyRouter, RouterInputs
from picaflor.backends.cuda.exchange import Exchange
from picaflor.backends.cuda.formats import Needs, needs
from picaflor.backends.cuda.matmul import matmul
from picaflor.backends.cuda.memory import needed
from picaflor.backends.cuda.prepare import Prepared, prepare, room_for
from picaflor.backends.cuda.program import Batches, CudaProgram, Frame, Space, Step
from picaflor.backends.cuda.rows import Tensor
from picaflor.backends.cuda.sampling import Drawing
from picaflor.backends.cuda.slots import HeldLayer
from picaflor.backends.cuda.tier import ExpertTier
from picaflor.backends.cuda.weights import HeldMatrix
from picaflor.backends.host import FINISH, Call, HostTwin
from picaflor.backends.programs import Guard
from picaflor.backends.shapes import FIRST_WRITTEN
from picaflor.backends.table import NO_FORMAT, CapabilityTable
from picaflor.formats.base import F32


@dataclass(frozen=True, slots=True, eq=False)
class Buffer:
    """The handle of Rows: a tensor `[max_rows, width]` on the device."""

    memory: Tensor

    def view(self, part: Rows) -> Tensor:
        """Columns of this buffer."""
        return self.memory[:, part.start : part.start + part.width]


class RopeTable:
    """cos and sin `[capacity, dims / 2]` on the device, filled as positions are reached.

    In long double like the CPU's, so that the rounded float32 depends on no library's choice.
    """

    def __init__(self, dims: int, theta: float, capacity: int, device: Any) -> None:
        half = dims // 2
        self.cos = torch.zeros((capacity, half), dtype=torch.float32, device=device)
        self.sin = torch.zeros((capacity, half), dtype=torch.float32, device=device)
        exponents = np.longdouble(-2.0) * np.arange(half, dtype=np.longdouble) / np.longdouble(dims)
        self._frequencies = np.power(np.longdouble(theta), exponents)
        self._filled = 0

    def fill(self, positions: int) -> None:
        """Make the first `positions` lines right."""
        if positions <= self._filled:
            return
        stop = min(max(positions, 2 * self._filled, 256), self.cos.shape[0])
        angles = np.arange(self._filled, stop, dtype=np.longdouble)[:, None] * self._frequencies
        for table, values in ((self.cos, np.cos(angles)), (self.sin, np.sin(angles))):
            table[self._filled : stop].copy_(torch.from_numpy(values.astype(np.float64).astype(np.float32)))
        self._filled = stop

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return 2 * int(self.cos.numel()) * 4


class CudaRecorder:
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
        guard: Guard,
        ready: Callable[[ExpertProvider | None], None],
        drawing: Drawing,
        captures: bool,
        max_rows: int,
        max_outputs: int,
        page_tokens: int,
        pages: int,
    ) -> None:
        if page_tokens < 1 or 256 % page_tokens:
            raise ValueError(f"page_tokens is {page_tokens}, a power of two up to 256 is needed")
        self._backend = backend
        self._device = device
        self._precision = precision
        self._table = table
        self._tier = tier
        self._twin = twin
        self._guard = guard
        self._ready = ready
        self._drawing = drawing
        self._max_rows = max(max_rows, max_outputs)
        self._shift = page_tokens.bit_length() - 1
        self._limits = Limits(max_rows, max_outputs, pages, page_tokens)
        self._batches = Batches(self._limits, device, captures)
        self._planes: dict[tuple[int, str], KVPlane] = {}
        self._ropes: dict[tuple[int, float], RopeTable] = {}
        self._buffers: list[Tensor] = []
        self._steps: list[Step] = []
        self._outputs = False
        self._rooms: dict[tuple[int, int, int, Needs], Prepared] = {}
        self._prepared: set[tuple[int, int, int, Needs]] = set()
        self._programs = 0
        self._norms: dict[_Place, Vector] = {}
        self._products: dict[_Place, tuple[_Place, Weight]] = {}
        self._choices: dict[_Place, tuple[_Place, Vector | None, RouterSpec]] = {}
        self._last: tuple[HeldLayer, RouterInputs] | None = None
        twin.fetch = self._page

    # ---- buffers ----

    def rows(self, width: int, *, dtype: Literal["f32", "i32"] = "f32") -> Rows:
        """A new buffer."""
        _check(width > 0, f"a buffer of width {width}")
        kind = torch.float32 if dtype == "f32" else torch.int32
        with needed(f"a buffer of {self._max_rows} rows of {width}", "lower --prefill-chunk"):
            memory = torch.zeros((self._max_rows, width), dtype=kind, device=self._device)
        self._buffers.append(memory)
        made = Rows(width, dtype, Buffer(memory))
        self._twin.calls.append(Call("rows", (made, width, dtype), {}))
        return made

    def part(self, rows: Rows, start: int, width: int) -> Rows:
        """Columns of a buffer, as a view."""
        _check(start >= 0 and width > 0 and start + width <= rows.width, f"columns {start}+{width} of {rows.width}")
        return Rows(width, rows.dtype, rows.handle, rows.start + start)

    def kv_plane(self, layer: int, name: str, width: int) -> KVPlane:
        """A cached quantity; the same plane for the same (layer, name)."""
        key = (layer, name)
        if key not in self._planes:
            with needed(f"the key-value cache of {self._limits.capacity} tokens in layer {layer}", "lower --ctx"):
                memory = torch.zeros((self._limits.capacity, width), dtype=torch.float32, device=self._device)
            self._planes[key] = KVPlane(layer, name, width, "f32", memory)
            self._twin.planes.append(self._planes[key])
        plane = self._planes[key]
        _check(plane.width == width, f"plane {name} of layer {layer} is {plane.width} wide, asked for {width}")
        return plane

    def workspace_bytes(self) -> int:
        """Bytes of buffers and tables on the device, the scratch of attention not counted."""
        buffers = sum(buffer.numel() * 4 for buffer in self._buffers)
        buffers += sum(room.digits.numel() + 12 * room.scales.numel() for room in self._rooms.values())
        return int(buffers) + self._batches.nbytes + sum(table.nbytes for table in self._ropes.values())

    def plane_bytes(self) -> int:
        """Bytes of all planes on the device."""
        return self._limits.capacity * sum(plane.width for plane in self._planes.values()) * 4

    def kv_bytes(self) -> int:
        """Bytes of key-value pages written to so far."""
        page = self._limits.page_tokens * sum(plane.width for plane in self._planes.values()) * 4
        return page * len(self._limits.touched)

    def _page(self, plane: KVPlane, page: int) -> F32:
        tokens = self._limits.page_tokens
        values: F32 = plane.handle[page * tokens : (page + 1) * tokens].cpu().numpy()
        return values

    # ---- row by row ----

    def embed(self, table: Weight, out: Rows) -> None:
        """out = table[token]; zeros for a token outside."""
        _check(out.width == table.cols, f"{table.name} has rows of {table.cols}, the buffer {out.width}")
        self._select("rows", table.format, table.name)
        held, o = _matrix(table), _view(out)

        def run(_: Frame, space: Space) -> None:
            latent.embed(held.device, space.tokens, o, rows=space.count)

        self._record("embed", "other", run, (table, out))

    def rmsnorm(self, x: Rows, weight: Vector, out: Rows, *, eps: float, heads: int = 1) -> None:
        """Root-mean-square norm of each of `heads` equal parts; out may be x."""
        _check(x.width == out.width == weight.length * heads, f"{weight.name}: {heads}x{weight.length} on {x.width}")
        self._select("rmsnorm", what=weight.name)
        v, o = _view(x), _view(out)

        def run(_: Frame, space: Space) -> None:
            rows.rmsnorm(v, weight.handle, o, rows=space.count, heads=heads, eps=eps)

        self._record("rmsnorm", "other", run, (x, weight, out), {"eps": eps, "heads": heads})
        self._norms[_place(out)] = weight

    def layernorm(self, x: Rows, weight: Vector, bias: Vector, out: Rows, *, eps: float) -> None:
        """Mean-variance norm; out may be x."""
        fits = x.width == out.width == weight.length == bias.length
        _check(fits, f"{weight.name}: {weight.length}, bias {bias.length}, on {x.width} to {out.width}")
        self._select("layernorm", what=weight.name)
        v, o = _view(x), _view(out)

        def run(_: Frame, space: Space) -> None:
            rows.layernorm(v, weight.handle, bias.handle, o, rows=space.count, eps=eps)

        self._record("layernorm", "other", run, (x, weight, bias, out), {"eps": eps})

    def matmul(self, x: Rows, weight: Weight, out: Rows) -> None:
        """out = x @ W.T."""
        fits = x.width == weight.cols and out.width == weight.rows
        _check(fits, f"{weight.name} [{weight.rows}, {weight.cols}] from {x.width} to {out.width}")
        _check(not _overlap(x, out), f"{weight.name}: out aliases x")
        self._select("matmul", weight.format, weight.name)
        held, v, o = _matrix(weight), _view(x), _view(out)
        wanted = needs(weight.format, weight.group_size, self._precision)
        made, fresh = (None, False) if wanted is None else self._prepared_rows(x, wanted)

        def run(_: Frame, space: Space) -> None:
            given = v[: space.count]
            if fresh and wanted is not None:
                prepare(given, wanted, into=made)
            matmul(given, held.device, o[: space.count], self._precision, prepared=made)

        self._record("matmul", "head" if self._outputs else "matmul", run, (x, weight, out))
        self._products[_place(out)] = (_place(x), weight)

    def _prepared_rows(self, x: Rows, wanted: Needs) -> tuple[Prepared, bool]:
        """Where rows are prepared for matrices with these needs, and whether that is still to be done here."""
        key = (id(x.handle), x.start, x.width, wanted)
        if key not in self._rooms:
            self._rooms[key] = room_for(wanted, x.width, self._max_rows, self._device)
        fresh = key not in self._prepared
        self._prepared.add(key)
        return self._rooms[key], fresh

    def rope(
        self, x: Rows, *, heads: int, head_width: int, start: int, dims: int, theta: float, style: RopeStyle
    ) -> None:
        """Rotate `dims` values from `start` of each head in place."""
        _check(x.width == heads * head_width, f"rope: {heads} heads of {head_width} in {x.width}")
        _check(start >= 0 and dims > 0 and start + dims <= head_width, f"rope: {start}+{dims} of {head_width}")
        _check(dims % 2 == 0, f"rope: {dims} values are no pairs")
        _check(style in ("interleaved", "half"), f"rope style {style}")
        self._select("rope")
        key = (dims, theta)
        if key not in self._ropes:
            self._ropes[key] = RopeTable(dims, theta, self._limits.capacity, self._device)
        table, v = self._ropes[key], _view(x)

        def run(frame: Frame, space: Space) -> None:
            table.fill(frame.longest)
            rows.rope(v, space.positions, table.cos, table.sin, rows=space.count, heads=heads, head_width=head_width,
                      start=start, interleaved=style == "interleaved")  # fmt: skip

        options = {
            "heads": heads,
            "head_width": head_width,
            "start": start,
            "dims": dims,
            "theta": theta,
            "style": style,
        }
        self._record("rope", "other", run, (x,), options)

    def add(self, x: Rows, y: Rows) -> None:
        """x = x + y."""
        _check(x.width == y.width, f"add: {x.width} and {y.width}")
        self._select("add")
        v, w = _view(x), _view(y)

        def run(_: Frame, space: Space) -> None:
            rows.add(v, w, rows=space.count)

        self._record("add", "other", run, (x, y))

    def silu_mul(self, gate: Rows, up: Rows, out: Rows) -> None:
        """out = silu(gate) * up; out may be gate."""
        _check(gate.width == up.width == out.width, f"silu_mul: {gate.width}, {up.width}, {out.width}")
        self._select("silu_mul")
        g, u, o = _view(gate), _view(up), _view(out)

        def run(_: Frame, space: Space) -> None:
            rows.silu_mul(g, u, o, rows=space.count)

        self._record("silu_mul", "other", run, (gate, up, out))

    def select_outputs(self, x: Rows, out: Rows) -> None:
        """out = the batch's output rows of x, packed."""
        _check(x.width == out.width, f"select_outputs: {x.width} to {out.width}")
        _check(not _overlap(x, out), "select_outputs: out aliases x")
        _check(not self._outputs, "select_outputs a second time in one program")
        self._select("select_outputs")
        self._outputs = True
        self._prepared.clear()  # of other rows
        v, o = _view(x), _view(out)

        def run(frame: Frame, space: Space) -> None:
            rows.gather(v, frame.numbers, o, rows=space.count)

        self._record("select_outputs", "other", run, (x, out))

    # ---- keys and values ----

    def kv_write(self, x: Rows, plane: KVPlane) -> None:
        """Store the row in its sequence's page."""
        _check(x.width == plane.width, f"kv_write: {x.width} into plane {plane.name} of {plane.width}")
        self._select("kv_write")
        v = _view(x)

        def run(frame: Frame, space: Space) -> None:
            rows.kv_write(v, plane.handle, space.sequences, space.positions, frame.pages, rows=space.count,
                          shift=self._shift)  # fmt: skip

        self._record("kv_write", "attention", run, (x, plane))

    def index_select(
        self, q: Rows, weights: Rows, keys: KVPlane, out: Rows, *, heads: int, head_dim: int, top_k: int
    ) -> None:
        """DSA selection: out is i32 `[1 + top_k]`."""
        fits = q.width == heads * head_dim and weights.width == heads and keys.width == head_dim
        _check(fits, f"index_select: {heads}x{head_dim}, q {q.width}, weights {weights.width}, keys {keys.width}")
        _check(top_k > 0 and out.width == 1 + top_k, f"index_select: {top_k} positions into {out.width}")
        self._select("index_select")
        a, w, o = _view(q), _view(weights), _view(out, "i32")

        def run(frame: Frame, space: Space) -> None:
            choose.index_select(a, w, keys.handle, o, self._keys(frame, space, None), heads=heads, head_dim=head_dim,
                                top_k=top_k)  # fmt: skip

        options = {"heads": heads, "head_dim": head_dim, "top_k": top_k}
        self._record("index_select", "attention", run, (q, weights, keys, out), options)

    def attention(self, q: Rows, out: Rows, *, kind: MLA | GQA, selection: Rows | None = None) -> None:
        """Causal attention over the row's sequence, or over the selected positions."""
        _check(not _overlap(q, out), "attention: out aliases q")
        chosen = None if selection is None else _view(selection, "i32")
        if isinstance(kind, MLA):
            run = self._mla(q, out, kind, chosen)
        elif isinstance(kind, GQA):
            run = self._gqa(q, out, kind, chosen)
        else:
            raise ValueError(f"attention kind {type(kind).__name__}; accepted: MLA, GQA")
        self._record("attention", "attention", run, (q, out), {"kind": kind, "selection": selection})

    def _mla(self, q: Rows, out: Rows, kind: MLA, selection: Tensor | None) -> Callable[[Frame, Space], None]:
        fits = q.width == kind.heads * (kind.nope + kind.rope) and out.width == kind.heads * kind.value
        _check(fits, f"attention: q {q.width}, out {out.width} for {kind.heads} heads")
        shape = (kind.heads * (kind.nope + kind.value), kind.latent.width)
        _check((kind.kv_b.rows, kind.kv_b.cols) == shape, f"{kind.kv_b.name} is not {shape}")
        _check(kind.rope_key.width == kind.rope, f"rope key plane of {kind.rope_key.width} for {kind.rope}")
        weights = kind.kv_b.format
        self._select("attention", NO_FORMAT, kind.kv_b.name, also=(("rows", weights), ("row_axpy", weights)))
        held, a, o = _matrix(kind.kv_b), _view(q), _view(out)

        def run(frame: Frame, space: Space) -> None:
            latent.mla(a, o, held.device, kind.latent.handle, kind.rope_key.handle, self._keys(frame, space, selection),
                       rows=space.count, heads=kind.heads, nope=kind.nope, rope=kind.rope, value=kind.value,
                       scale=kind.scale)  # fmt: skip

        return run

    def _gqa(self, q: Rows, out: Rows, kind: GQA, selection: Tensor | None) -> Callable[[Frame, Space], None]:
        width = kind.kv_heads * kind.head_dim
        fits = q.width == out.width == kind.heads * kind.head_dim and kind.heads % kind.kv_heads == 0
        _check(fits, f"attention: q {q.width}, out {out.width}, {kind.heads} heads over {kind.kv_heads}")
        _check(kind.keys.width == kind.values.width == width, f"attention: planes are not {width} wide")
        self._select("attention", what=f"attention of layer {kind.keys.layer}")
        a, o = _view(q), _view(out)

        def run(frame: Frame, space: Space) -> None:
            latent.gqa(a, o, kind.keys.handle, kind.values.handle, self._keys(frame, space, selection),
                       heads=kind.heads, kv_heads=kind.kv_heads, head_dim=kind.head_dim, scale=kind.scale)  # fmt: skip

        return run

    def _keys(self, frame: Frame, space: Space, selection: Tensor | None) -> Keys:
        chosen = None if selection is None else selection[: space.count]
        return Keys(space.sequences, space.positions, frame.pages, self._shift, chosen, frame.longest)

    # ---- experts ----

    def router(self, logits: Rows, bias: Vector | None, ids: Rows, weights: Rows, *, spec: RouterSpec) -> None:
        """ids i32 and weights f32 `[top_k]`, in routing order."""
        _check(logits.width == spec.experts, f"router: {logits.width} logits for {spec.experts} experts")
        _check(bias is None or bias.length == spec.experts, "router: bias of another length")
        _check(ids.width == weights.width == spec.top_k, f"router: {ids.width}, {weights.width} for {spec.top_k}")
        _check(spec.score in ("sigmoid", "softmax"), f"router score {spec.score}; accepted: sigmoid, softmax")
        grouped = spec.groups >= 1 and spec.experts % spec.groups == 0 and 1 <= spec.top_groups <= spec.groups
        _check(grouped, f"router: {spec.top_groups} of {spec.groups} groups of {spec.experts} experts")
        reachable = spec.top_groups * (spec.experts // spec.groups) if spec.groups > 1 else spec.experts
        _check(1 <= spec.top_k <= reachable, f"router: top {spec.top_k} of {reachable} experts")
        self._select("router")
        z, i, w = _view(logits), _view(ids, "i32"), _view(weights)

        def run(_: Frame, space: Space) -> None:
            choose.router(z, None if bias is None else bias.handle, i, w, rows=space.count, spec=spec)

        self._record("router", "router", run, (logits, bias, ids, weights), {"spec": spec})
        self._choices[_place(ids)] = (_place(logits), bias, spec)

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
        """out = weighted sum of the chosen experts, in routing order."""
        _check(x.width == out.width, f"experts: {x.width} to {out.width}")
        _check(not _overlap(x, out), "experts: out aliases x")
        whole = ids.start == weights.start == 0 and ids.width == weights.width and ids.dtype == "i32"
        _check(whole, "experts: ids and weights must be whole buffers of the same width")
        for name in sorted({m.format for e in layouts for m in (e.gate, e.up, e.down)}):
            self._select("expert_ffn", name, f"experts of layer {layer}")
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

        options = {"layer": layer, "layouts": layouts}
        self._steps.append(Step("", "experts", self._outputs, ask))
        self._record("expert_ffn", "experts", give, (x, ids, weights, out), options, name="experts")
        self._steps[-1] = replace(self._steps[-1], host=lambda frame, space: self._exchange().mark())
        if beside is not None:
            beside()
        self._steps.append(Step("", "experts", self._outputs, join, host=serve))

    def _exchange(self) -> Exchange:
        exchange = self._tier.exchange
        assert exchange is not None
        return exchange

    def finish(self) -> CudaProgram:
        """The program of all that was recorded since the last finish; tells what fell back in it."""
        self._table.announce()
        self._twin.calls.append(Call(FINISH, (), {}))
        steps, self._steps, self._outputs = self._steps, [], False
        self._prepared.clear()
        self._last = None
        number, self._programs = self._programs, self._programs + 1
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
        self,
        op: str,
        kind: str,
        run: Callable[[Frame, Space], None],
        arguments: tuple[Any, ...],
        options: dict[str, Any] | None = None,
        *,
        name: str = "",
    ) -> None:
        """Keep a step, and for the host the call `name` (that of the operation where it is left out)."""
        self._twin.calls.append(Call(name or op, arguments, options or {}))
        self._steps.append(Step(op, kind, self._outputs, run))
        written = (word for word in arguments[FIRST_WRITTEN[name or op] :] if isinstance(word, Rows))
        changed = {id(rows.handle) for rows in written}
        self._prepared = {key for key in self._prepared if key[0] not in changed}

    def _select(
        self, op: str, format_name: str = NO_FORMAT, what: str = "", *, also: Sequence[tuple[str, str]] = ()
    ) -> None:
        for name, weights in ((op, format_name), *also):
            self._table.select(name, weights, self._backend, what=what)


_Place = tuple[int, int, int]


def _place(rows: Rows) -> _Place:
    return id(rows.handle), rows.start, rows.width


def _matrix(weight: Weight) -> HeldMatrix:
    held: HeldMatrix = weight.handle
    return held


def _view(part: Rows, dtype: Literal["f32", "i32"] = "f32") -> Tensor:
    _check(part.dtype == dtype, f"a buffer of {part.dtype} where {dtype} is needed")
    return part.handle.view(part)


def _overlap(a: Rows, b: Rows) -> bool:
    return bool(a.handle is b.handle and a.start < b.start + b.width and b.start < a.start + a.width)


def _check(right: bool, text: str) -> None:
    if not right:
        raise ValueError(text)
