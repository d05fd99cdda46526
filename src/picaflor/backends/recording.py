"""What recorders of devices share: every shape is checked, every operation gets its cell, the host hears of it.

Knows shapes, the capability table and the host's twin; must not know any device, family or file. A device says how each
operation is computed: `make(op, arguments, options)` gives the step's function. An operation whose cell went to the
host is computed there, by a small program of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

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
from picaflor.backends.batches import Limits
from picaflor.backends.host import FINISH, Call, HostTwin
from picaflor.backends.shapes import check
from picaflor.backends.table import NO_FORMAT, CapabilityTable, Cell
from picaflor.errors import UnsupportedKernel

Run = Callable[..., None]
"""Called with what a device's programs give it."""


@dataclass(frozen=True, slots=True)
class Step:
    """One operation: its name, the class that its time counts for, whether it acts on the output rows, what runs.

    A part of another one has no name and is not counted. `host`: what the host does before it, on a device that can
    share an operation with it.
    """

    op: str
    kind: str
    outputs: bool
    run: Run
    host: Run | None = None


class DeviceRecorder(ABC):
    """backends.api.Recorder but for buffers and programs. Every method raises ValueError where widths do not fit.

    `twin` gets every call as it is made.
    """

    def __init__(self, *, backend: str, table: CapabilityTable, twin: HostTwin, limits: Limits) -> None:
        if limits.page_tokens < 1 or 256 % limits.page_tokens:
            raise ValueError(f"page_tokens is {limits.page_tokens}, a power of two up to 256 is needed")
        self._backend = backend
        self._table = table
        self._twin = twin
        self._limits = limits
        self._planes: dict[tuple[int, str], KVPlane] = {}
        self._steps: list[Step] = []
        self._outputs = False
        self._finished = 0

    @abstractmethod
    def make(self, op: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Run:
        """The function of an operation of the device."""

    @abstractmethod
    def make_on_host(self, call: Call) -> Run:
        """The function of an operation that the host does instead."""

    @abstractmethod
    def new_buffer(self, width: int, dtype: str) -> Any:
        """The handle of a new buffer of rows."""

    @abstractmethod
    def new_plane(self, width: int) -> Any:
        """The handle of a new plane of all pages."""

    @abstractmethod
    def workspace_bytes(self) -> int:
        """Bytes of the device that buffers and tables take."""

    # ---- buffers ----

    def rows(self, width: int, *, dtype: Literal["f32", "i32"] = "f32") -> Rows:
        """A new buffer."""
        shapes.new_rows(width)
        made = Rows(width, dtype, self.new_buffer(width, dtype))
        self._twin.calls.append(Call("rows", (made, width, dtype), {}))
        return made

    def part(self, rows: Rows, start: int, width: int) -> Rows:
        """Columns of a buffer, as a view."""
        shapes.part(rows, start, width)
        return Rows(width, rows.dtype, rows.handle, rows.start + start)

    def kv_plane(self, layer: int, name: str, width: int) -> KVPlane:
        """A cached quantity; the same plane for the same (layer, name)."""
        key = (layer, name)
        if key not in self._planes:
            self._planes[key] = KVPlane(layer, name, width, "f32", self.new_plane(width))
            self._twin.planes.append(self._planes[key])
        plane = self._planes[key]
        shapes.plane(plane, width)
        return plane

    def plane_bytes(self) -> int:
        """Bytes of all planes."""
        return self._limits.capacity * sum(plane.width for plane in self._planes.values()) * 4

    def kv_bytes(self) -> int:
        """Bytes of key-value pages written to so far."""
        page = self._limits.page_tokens * sum(plane.width for plane in self._planes.values()) * 4
        return page * len(self._limits.touched)

    # ---- row by row ----

    def embed(self, table: Weight, out: Rows) -> None:
        """out = table[token]; zeros for a token outside."""
        shapes.embed(table, out)
        cell = self._select("rows", table.format, table.name)
        self._record("embed", "other", cell, (table, out))

    def rmsnorm(self, x: Rows, weight: Vector, out: Rows, *, eps: float, heads: int = 1) -> None:
        """Root-mean-square norm of each of `heads` equal parts; out may be x."""
        shapes.rmsnorm(x, weight, out, heads)
        cell = self._select("rmsnorm", what=weight.name)
        self._record("rmsnorm", "other", cell, (x, weight, out), {"eps": eps, "heads": heads})

    def layernorm(self, x: Rows, weight: Vector, bias: Vector, out: Rows, *, eps: float) -> None:
        """Mean-variance norm; out may be x."""
        shapes.layernorm(x, weight, bias, out)
        cell = self._select("layernorm", what=weight.name)
        self._record("layernorm", "other", cell, (x, weight, bias, out), {"eps": eps})

    def matmul(self, x: Rows, weight: Weight, out: Rows) -> None:
        """out = x @ W.T."""
        shapes.matmul(x, weight, out)
        cell = self._select("matmul", weight.format, weight.name)
        self._record("matmul", "head" if self._outputs else "matmul", cell, (x, weight, out))

    def rope(
        self, x: Rows, *, heads: int, head_width: int, start: int, dims: int, theta: float, style: RopeStyle
    ) -> None:
        """Rotate `dims` values from `start` of each head in place."""
        shapes.rope(x, heads=heads, head_width=head_width, start=start, dims=dims, style=style)
        cell = self._select("rope")
        options = {"heads": heads, "head_width": head_width, "start": start, "dims": dims, "theta": theta}
        self._record("rope", "other", cell, (x,), {**options, "style": style})

    def add(self, x: Rows, y: Rows) -> None:
        """x = x + y."""
        shapes.add(x, y)
        self._record("add", "other", self._select("add"), (x, y))

    def silu_mul(self, gate: Rows, up: Rows, out: Rows) -> None:
        """out = silu(gate) * up; out may be gate."""
        shapes.silu_mul(gate, up, out)
        self._record("silu_mul", "other", self._select("silu_mul"), (gate, up, out))

    def select_outputs(self, x: Rows, out: Rows) -> None:
        """out = the batch's output rows of x, packed."""
        shapes.select_outputs(x, out, again=self._outputs)
        cell = self._select("select_outputs")
        self._outputs = True
        self._record("select_outputs", "other", cell, (x, out))

    # ---- keys and values ----

    def kv_write(self, x: Rows, plane: KVPlane) -> None:
        """Store the row in its sequence's page."""
        shapes.kv_write(x, plane)
        self._record("kv_write", "attention", self._select("kv_write"), (x, plane))

    def index_select(
        self, q: Rows, weights: Rows, keys: KVPlane, out: Rows, *, heads: int, head_dim: int, top_k: int
    ) -> None:
        """DSA selection: out is i32 `[1 + top_k]`."""
        shapes.index_select(q, weights, keys, out, heads=heads, head_dim=head_dim, top_k=top_k)
        check(out.dtype == "i32", "index_select: positions go into a buffer of i32")
        cell = self._select("index_select")
        options = {"heads": heads, "head_dim": head_dim, "top_k": top_k}
        self._record("index_select", "attention", cell, (q, weights, keys, out), options)

    def attention(self, q: Rows, out: Rows, *, kind: MLA | GQA, selection: Rows | None = None) -> None:
        """Causal attention over the row's sequence, or over the selected positions."""
        shapes.attention(q, out, kind)
        check(selection is None or selection.dtype == "i32", "attention: a selection is a buffer of i32")
        if isinstance(kind, MLA):
            for op in ("rows", "row_axpy"):
                found = self._select(op, kind.kv_b.format, kind.kv_b.name)
                if found.backend != self._backend:  # attention is the device's, so its parts must be
                    raise UnsupportedKernel(
                        f"{kind.kv_b.name}: {self._backend}.{op}.{kind.kv_b.format} is disabled, and nothing stands in "
                        f"for it in attention"
                    )
            cell = self._select("attention", what=kind.kv_b.name)
        else:
            cell = self._select("attention", what=f"attention of layer {kind.keys.layer}")
        self._record("attention", "attention", cell, (q, out), {"kind": kind, "selection": selection})

    # ---- experts ----

    def router(self, logits: Rows, bias: Vector | None, ids: Rows, weights: Rows, *, spec: RouterSpec) -> None:
        """ids i32 and weights f32 `[top_k]`, in routing order."""
        shapes.router(logits, bias, ids, weights, spec)
        check(ids.dtype == "i32", "router: ids go into a buffer of i32")
        self._record("router", "router", self._select("router"), (logits, bias, ids, weights), {"spec": spec})

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
        """out = weighted sum of the chosen experts, in routing order, then what `beside` records. One matrix that the
        host must do takes the whole layer there."""
        shapes.experts(x, ids, weights, out)
        for number, expert in enumerate(layouts):
            inner, hidden = expert.gate.rows, x.width
            given = [(m.rows, m.cols) for m in (expert.gate, expert.up, expert.down)]
            fits = given == [(inner, hidden), (inner, hidden), (hidden, inner)]
            check(fits, f"layer {layer}, expert {number}: gate, up, down are {given} for rows of {hidden}")
        names = sorted({m.format for e in layouts for m in (e.gate, e.up, e.down)})
        cells = [self._select("expert_ffn", name, f"experts of layer {layer}") for name in names]
        cell = next((cell for cell in cells if cell.backend != self._backend), cells[0])
        options = {"layer": layer, "layouts": layouts}
        self._record("experts", "experts", cell, (x, ids, weights, out), options)
        if beside is not None:
            beside()

    # ---- helpers ----

    def _end(self) -> tuple[list[Step], int]:
        """The steps since the last finish, and the number of their program; tells what fell back in them."""
        self._table.announce()
        self._twin.calls.append(Call(FINISH, (), {}))
        steps, self._steps, self._outputs = self._steps, [], False
        number, self._finished = self._finished, self._finished + 1
        return steps, number

    def _record(
        self, op: str, kind: str, cell: Cell, arguments: tuple[Any, ...], options: dict[str, Any] | None = None
    ) -> None:
        call = Call(op, arguments, options or {})
        self._twin.calls.append(call)
        here = cell.backend == self._backend
        run = self.make(op, arguments, call.options) if here else self.make_on_host(call)
        self._steps.append(Step("expert_ffn" if op == "experts" else op, kind, self._outputs, run))

    def _select(self, op: str, format_name: str = NO_FORMAT, what: str = "") -> Cell:
        return self._table.select(op, format_name, self._backend, what=what)
