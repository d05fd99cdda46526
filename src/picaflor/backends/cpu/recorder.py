"""Records operations for the CPU: checks every shape, then hands plain numbers to the native builder.

Knows shapes and the native builder; must not know families, files or the expert store.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

import picaflor._native as _native
from picaflor.backends import shapes
from picaflor.backends.api import (
    GQA,
    MLA,
    ExpertLayout,
    KVPlane,
    RopeStyle,
    RouterSpec,
    Rows,
    Vector,
    Weight,
)
from picaflor.backends.cpu.capabilities import BACKEND, SCALAR
from picaflor.backends.cpu.early import RouterInputs, early_routers
from picaflor.backends.cpu.experts import Experts
from picaflor.backends.cpu.program import CpuProgram, ExpertCall, Faults
from picaflor.backends.table import NO_FORMAT, CapabilityTable, Cell


@dataclass(frozen=True, slots=True)
class Buffer:
    """The handle of Rows: a native buffer `[max_rows, width]`."""

    storage: int
    max_rows: int

    def view(self, rows: Rows) -> Any:
        """The native view of columns of this buffer."""
        return _native.View(self.storage, rows.start, rows.width)


_Place = tuple[Buffer, int, int]


class CpuRecorder:
    """backends.api.Recorder. Every method raises ValueError where widths do not fit together."""

    def __init__(
        self,
        pool: Any,
        *,
        isa: str,
        planes: int,
        table: CapabilityTable,
        faults: Faults | None,
        max_rows: int,
        max_outputs: int,
        page_tokens: int,
        pages: int,
    ) -> None:
        self._max_rows = max_rows
        self._table = table
        self._isa = isa
        self._faults = faults
        self._arena = _native.Arena(
            pool, isa, max_rows=max_rows, max_outputs=max_outputs, page_tokens=page_tokens, pages=pages
        )
        self._builder = _native.Builder(self._arena, planes)
        self._planes: dict[tuple[int, str], KVPlane] = {}
        self._experts = Experts(pool, isa=isa, planes=planes, max_rows=max_rows)
        self._calls: list[ExpertCall] = []
        self._routers: list[RouterInputs | None] = []
        self._precision_planes = planes
        self._norms: dict[_Place, Vector] = {}  # by what they were last written to
        self._products: dict[_Place, tuple[_Place, Weight]] = {}
        self._choices: dict[_Place, tuple[_Place, Vector | None, RouterSpec]] = {}
        self._keep: list[object] = [pool]

    # ---- buffers ----

    def rows(self, width: int, *, dtype: Literal["f32", "i32"] = "f32") -> Rows:
        """A new buffer."""
        shapes.new_rows(width)
        return Rows(width, dtype, Buffer(self._arena.add_storage(width), self._max_rows))

    def part(self, rows: Rows, start: int, width: int) -> Rows:
        """Columns of a buffer, as a view."""
        shapes.part(rows, start, width)
        return Rows(width, rows.dtype, rows.handle, rows.start + start)

    def kv_plane(self, layer: int, name: str, width: int) -> KVPlane:
        """A cached quantity; the same plane for the same (layer, name)."""
        key = (layer, name)
        if key not in self._planes:
            self._planes[key] = KVPlane(layer, name, width, "f32", self._arena.add_plane(width))
        plane = self._planes[key]
        shapes.plane(plane, width)
        return plane

    def workspace_bytes(self) -> int:
        """Bytes that buffers, prepared activations and scratch can come to."""
        return int(self._arena.workspace_bytes) + self._experts.workspace_bytes()

    def row_bytes(self) -> int:
        """What a row more or less changes in `workspace_bytes`, from 256 rows on."""
        return int(self._arena.row_bytes) + self._experts.row_bytes()

    def limit_rows(self, rows: int) -> None:
        """From now on batches of at most so many rows, fewer than before; the memory of the others is given back."""
        self._arena.limit_rows(rows)
        self._experts.limit_rows(rows)

    def kv_bytes(self) -> int:
        """Bytes of key-value pages written to so far."""
        return int(self._arena.touched_bytes)

    # ---- row by row ----

    def embed(self, table: Weight, out: Rows) -> None:
        """out = table[token]; zeros for a token outside."""
        shapes.embed(table, out)
        self._select("rows", table.format, table.name)
        self._builder.embed(self._matrix(table), _view(out))

    def rmsnorm(self, x: Rows, weight: Vector, out: Rows, *, eps: float, heads: int = 1) -> None:
        """Root-mean-square norm of each of `heads` equal parts; out may be x."""
        shapes.rmsnorm(x, weight, out, heads)
        self._select("rmsnorm", what=weight.name)
        self._builder.rmsnorm(_view(x), self._address(weight), _view(out), eps, heads)
        self._norms[_place(out)] = weight

    def layernorm(self, x: Rows, weight: Vector, bias: Vector, out: Rows, *, eps: float) -> None:
        """Mean-variance norm; out may be x."""
        shapes.layernorm(x, weight, bias, out)
        self._select("layernorm", what=weight.name)
        self._builder.layernorm(_view(x), self._address(weight), self._address(bias), _view(out), eps)

    def matmul(self, x: Rows, weight: Weight, out: Rows) -> None:
        """out = x @ W.T."""
        shapes.matmul(x, weight, out)
        self._select("matmul", weight.format, weight.name)
        self._builder.matmul(_view(x), self._matrix(weight), _view(out))
        self._products[_place(out)] = (_place(x), weight)

    def rope(
        self, x: Rows, *, heads: int, head_width: int, start: int, dims: int, theta: float, style: RopeStyle
    ) -> None:
        """Rotate `dims` values from `start` of each head in place."""
        shapes.rope(x, heads=heads, head_width=head_width, start=start, dims=dims, style=style)
        self._select("rope")
        self._builder.rope(_view(x), heads, head_width, start, dims, theta, style == "interleaved")

    def add(self, x: Rows, y: Rows) -> None:
        """x = x + y."""
        shapes.add(x, y)
        self._select("add")
        self._builder.add(_view(x), _view(y))

    def silu_mul(self, gate: Rows, up: Rows, out: Rows) -> None:
        """out = silu(gate) * up; out may be gate."""
        shapes.silu_mul(gate, up, out)
        self._select("silu_mul")
        self._builder.silu_mul(_view(gate), _view(up), _view(out))

    def select_outputs(self, x: Rows, out: Rows) -> None:
        """out = the batch's output rows of x, packed."""
        shapes.select_outputs(x, out, again=self._builder.after_outputs)
        self._select("select_outputs")
        self._builder.select_outputs(_view(x), _view(out))

    # ---- keys and values ----

    def kv_write(self, x: Rows, plane: KVPlane) -> None:
        """Store the row in its sequence's page."""
        shapes.kv_write(x, plane)
        self._select("kv_write")
        self._builder.kv_write(_view(x), plane.handle)

    def index_select(
        self, q: Rows, weights: Rows, keys: KVPlane, out: Rows, *, heads: int, head_dim: int, top_k: int
    ) -> None:
        """DSA selection: out is i32 `[1 + top_k]`."""
        shapes.index_select(q, weights, keys, out, heads=heads, head_dim=head_dim, top_k=top_k)
        self._select("index_select")
        self._builder.index_select(_view(q), _view(weights), keys.handle, _view(out, "i32"), heads, head_dim, top_k)

    def attention(self, q: Rows, out: Rows, *, kind: MLA | GQA, selection: Rows | None = None) -> None:
        """Causal attention over the row's sequence, or over the selected positions."""
        shapes.attention(q, out, kind)
        chosen = None if selection is None else _view(selection, "i32")
        if isinstance(kind, MLA):
            self._mla(q, out, kind, chosen)
        else:
            self._gqa(q, out, kind, chosen)

    def _mla(self, q: Rows, out: Rows, kind: MLA, selection: Any) -> None:
        weights = kind.kv_b.format
        self._select("attention", NO_FORMAT, kind.kv_b.name, also=(("rows", weights), ("row_axpy", weights)))
        self._builder.mla(
            _view(q),
            _view(out),
            selection,
            kv_b=self._matrix(kind.kv_b),
            latent=kind.latent.handle,
            rope_key=kind.rope_key.handle,
            heads=kind.heads,
            nope=kind.nope,
            rope=kind.rope,
            value=kind.value,
            scale=kind.scale,
        )

    def _gqa(self, q: Rows, out: Rows, kind: GQA, selection: Any) -> None:
        self._select("attention", what=f"attention of layer {kind.keys.layer}")
        self._builder.gqa(
            _view(q),
            _view(out),
            selection,
            keys=kind.keys.handle,
            values=kind.values.handle,
            heads=kind.heads,
            kv_heads=kind.kv_heads,
            head_dim=kind.head_dim,
            scale=kind.scale,
        )

    # ---- experts ----

    def router(self, logits: Rows, bias: Vector | None, ids: Rows, weights: Rows, *, spec: RouterSpec) -> None:
        """ids i32 and weights f32 `[top_k]`, in routing order."""
        shapes.router(logits, bias, ids, weights, spec)
        self._select("router")
        self._builder.router(
            _view(logits),
            0 if bias is None else self._address(bias),
            _view(ids, "i32"),
            _view(weights),
            softmax=spec.score == "softmax",
            experts=spec.experts,
            top_k=spec.top_k,
            normalise=spec.normalise,
            scale=spec.scale,
            groups=spec.groups,
            top_groups=spec.top_groups,
        )
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
        shapes.experts(x, ids, weights, out)
        formats = sorted({m.format for e in layouts for m in (e.gate, e.up, e.down)})
        cells = [self._cell("expert_ffn", name, f"experts of layer {layer}") for name in formats]
        ffn_layer = self._experts.add_layer(layouts, hidden=x.width, top_k=ids.width, layer=layer)
        self._calls.append(
            ExpertCall(
                layer=layer,
                ffn_layer=ffn_layer,
                x=self._arena.address(_view(x)),
                ids=self._arena.address(_view(ids, "i32"))[0],
                weights=self._arena.address(_view(weights))[0],
                out=self._arena.address(_view(out)),
                outputs=self._builder.after_outputs,
                plain=any(cell.backend == SCALAR for cell in cells),
                choices=(ids, weights),
                input=x,
                beside=beside is not None,
            )
        )
        self._routers.append(self._router_inputs(x, ids))
        if beside is not None:
            self._builder.experts(_view(out))
            beside()
        self._builder.experts(_view(out))

    def finish(self) -> CpuProgram:
        """The program of all that was recorded since the last finish; tells what fell back in it."""
        self._table.announce()
        calls, self._calls = self._calls, []
        ffn, numbers = self._experts.native() if calls else (None, [])
        calls = [replace(call, ffn_layer=numbers[call.ffn_layer]) for call in calls]
        routers, self._routers = self._routers, []
        return CpuProgram(
            self._builder.finish(),
            self._arena,
            ffn,
            calls,
            isa=self._isa,
            faults=self._faults,
            keep=self._keep,
            early=early_routers(routers, isa=self._isa, planes=self._precision_planes),
        )

    # ---- helpers ----

    def _router_inputs(self, x: Rows, ids: Rows) -> RouterInputs | None:
        """What chose `ids`, where it is the product of a matrix with the norm that made x; else None."""
        chosen = self._choices.get(_place(ids))
        product = self._products.get(chosen[0]) if chosen is not None else None
        norm = self._norms.get(_place(x))
        if chosen is None or product is None or norm is None or product[0] != _place(x):
            return None
        _, bias, spec = chosen
        return RouterInputs(product[1].handle.native, norm.handle, bias.handle if bias is not None else None, spec)

    def _cell(self, op: str, format_name: str, what: str) -> Cell:
        return self._table.select(op, format_name, BACKEND, what=what)

    def _select(
        self, op: str, format_name: str = NO_FORMAT, what: str = "", *, also: Sequence[tuple[str, str]] = ()
    ) -> None:
        """Choose the kernels of the operation that is recorded next; it is plain if one of its cells is."""
        cells = [self._cell(name, weights, what) for name, weights in ((op, format_name), *also)]
        self._builder.plain = any(cell.backend == SCALAR for cell in cells)

    def _matrix(self, weight: Weight) -> Any:
        self._keep.append(weight.handle)
        return weight.handle.native

    def _address(self, vector: Vector) -> int:
        self._keep.append(vector.handle)
        values: NDArray[np.float32] = vector.handle
        return int(values.ctypes.data)


def _view(rows: Rows, dtype: Literal["f32", "i32"] = "f32") -> Any:
    shapes.check(rows.dtype == dtype, f"a buffer of {rows.dtype} where {dtype} is needed")
    return rows.handle.view(rows)


def _place(rows: Rows) -> _Place:
    return (rows.handle, rows.start, rows.width)
