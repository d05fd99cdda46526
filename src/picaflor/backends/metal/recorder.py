"""Records operations for MLX: each becomes a function of a frame that writes new arrays into buffers.

Knows buffers, held matrices and the modules that compute; must not know families, files or the expert store.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from picaflor.backends.api import GQA, MLA, KVPlane, Rows, Vector, Weight
from picaflor.backends.batches import Limits
from picaflor.backends.host import FINISH, Call, HostTwin
from picaflor.backends.metal import attention, layout, rows
from picaflor.backends.metal.experts import Experts
from picaflor.backends.metal.frames import Buffer, Frame, Group, Pool, RopeLines, Space, pool, read, whole, write
from picaflor.backends.metal.library import Array, copied, mx, on_host
from picaflor.backends.metal.products import product
from picaflor.backends.metal.program import MetalProgram
from picaflor.backends.metal.weights import HeldMatrix
from picaflor.backends.recording import DeviceRecorder, Run
from picaflor.backends.shapes import FIRST_WRITTEN
from picaflor.backends.table import CapabilityTable
from picaflor.formats.base import F32


class MetalRecorder(DeviceRecorder):
    """backends.api.Recorder. `host()` gives a twin for one operation that is not computed here; `program` keywords go
    to each program."""

    def __init__(
        self,
        *,
        backend: str,
        table: CapabilityTable,
        twin: HostTwin,
        limits: Limits,
        experts: Experts,
        host: Callable[[], HostTwin],
        program: Mapping[str, Any],
    ) -> None:
        super().__init__(backend=backend, table=table, twin=twin, limits=limits)
        self._experts = experts
        self._host = host
        self._program = program
        self._buffers: list[Buffer] = []
        self._ropes: dict[tuple[int, float], RopeLines] = {}
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

    def make(self, op: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Run:
        """The function of an operation on rows of the batch, or on its output rows behind select_outputs."""
        outputs = self._outputs and op != "select_outputs"
        run = self._makers[op](*arguments, **options)
        return lambda frame: run(frame) if op == "select_outputs" else run(frame.outputs if outputs else frame.rows)

    def new_buffer(self, width: int, dtype: str) -> Buffer:
        """Nothing is taken before rows are written."""
        self._buffers.append(Buffer(width, dtype))
        return self._buffers[-1]

    def new_plane(self, width: int) -> Pool:
        """Zeros for all pages."""
        return Pool(mx.zeros((self._limits.capacity, width), mx.float32))

    def workspace_bytes(self) -> int:
        """Bytes of all buffers when they are full."""
        rows = max(self._limits.max_rows, self._limits.max_outputs)
        return rows * 4 * sum(buffer.width for buffer in self._buffers)

    def finish(self) -> MetalProgram:
        """The program of all that was recorded since the last finish."""
        steps, number = self._end()
        planes = list(self._planes.values())
        return MetalProgram(
            steps, self._limits, self._twin, number, buffers=list(self._buffers), planes=planes, **self._program
        )

    def _page(self, plane: KVPlane, page: int) -> F32:
        tokens = self._limits.page_tokens
        values: F32 = on_host(pool(plane).read(np.arange(page * tokens, (page + 1) * tokens, dtype=np.int32)))
        return values

    # ---- on the host ----

    def make_on_host(self, call: Call) -> Run:
        """A program of one operation: rows go to the host, what it wrote comes back."""
        outputs = self._outputs
        given = [word for word in call.arguments if isinstance(word, Rows)]
        written = [word for word in call.arguments[FIRST_WRITTEN[call.name] :] if isinstance(word, Rows)]
        twin = self._host()
        buffers = {id(part.handle): whole(part) for part in given}
        twin.calls = [Call("rows", (part, part.width, part.dtype), {}) for part in buffers.values()]
        twin.calls += [call, Call(FINISH, (), {})]

        def run(frame: Frame) -> None:
            space = frame.outputs if outputs else frame.rows
            if not twin.active:
                twin.take_over("", ())
            for part in given:
                twin.write(0, part, on_host(read(part, space)))
            twin.run(0, space.batch, space.experts)
            for part in written:
                write(part, copied(np.array(twin.view(0, part, space.count))))

        return run

    # ---- row by row ----

    def _embed(self, table: Weight, out: Rows) -> Run:
        def run(space: Space) -> None:
            tokens = space.batch.tokens
            known = (tokens >= 0) & (tokens < table.rows)
            picked = layout.pick(_held(table), copied(np.where(known, tokens, 0)))
            write(out, mx.where(copied(known)[:, None], picked, 0.0))

        return run

    def _rmsnorm(self, x: Rows, weight: Vector, out: Rows, *, eps: float, heads: int) -> Run:
        return lambda space: write(out, rows.rmsnorm(read(x, space), weight.handle, heads=heads, eps=eps))

    def _layernorm(self, x: Rows, weight: Vector, bias: Vector, out: Rows, *, eps: float) -> Run:
        return lambda space: write(out, rows.layernorm(read(x, space), weight.handle, bias.handle, eps=eps))

    def _matmul(self, x: Rows, weight: Weight, out: Rows) -> Run:
        return lambda space: write(out, product(read(x, space), _held(weight)))

    def _rope(self, x: Rows, *, heads: int, head_width: int, start: int, dims: int, theta: float, style: str) -> Run:
        def run(space: Space) -> None:
            cos, sin = space.turns(dims, theta, self._lines)
            write(x, rows.rope(read(x, space), cos, sin, heads=heads, start=start, interleaved=style == "interleaved"))

        return run

    def _lines(self, dims: int, theta: float, positions: int) -> RopeLines:
        return self._ropes.setdefault((dims, theta), RopeLines(dims, theta)).fill(positions)

    def _add(self, x: Rows, y: Rows) -> Run:
        return lambda space: write(x, read(x, space) + read(y, space))

    def _silu_mul(self, gate: Rows, up: Rows, out: Rows) -> Run:
        return lambda space: write(out, rows.silu_mul(read(gate, space), read(up, space)))

    def _select_outputs(self, x: Rows, out: Rows) -> Run:
        return lambda frame: write(out, read(x, frame.rows)[copied(frame.numbers)])

    # ---- keys and values ----

    def _kv_write(self, x: Rows, plane: KVPlane) -> Run:
        return lambda space: pool(plane).write(space.own_places, read(x, space))

    def _index_select(
        self, q: Rows, weights: Rows, keys: KVPlane, out: Rows, *, heads: int, head_dim: int, top_k: int
    ) -> Run:
        def group(part: Group, picked: Picked) -> Array:
            return attention.index_select(
                picked(q), picked(weights), pool(keys).read(part.places), part.positions, heads=heads, top_k=top_k
            )

        return lambda space: _by_sequence(space, out, group)

    def _attention(self, q: Rows, out: Rows, *, kind: MLA | GQA, selection: Rows | None) -> Run:
        def chosen(picked: Picked) -> Array | None:
            return None if selection is None else picked(selection)

        def latent(part: Group, picked: Picked) -> Array:
            assert isinstance(kind, MLA)
            return attention.mla(
                picked(q), layout.heads(_held(kind.kv_b), kind.heads), pool(kind.latent).read(part.places),
                pool(kind.rope_key).read(part.places), part.positions, chosen(picked), heads=kind.heads,
                nope=kind.nope, scale=kind.scale,
            )  # fmt: skip

        def grouped(part: Group, picked: Picked) -> Array:
            assert isinstance(kind, GQA)
            return attention.gqa(
                picked(q), pool(kind.keys).read(part.places), pool(kind.values).read(part.places), part.positions,
                chosen(picked), heads=kind.heads, kv_heads=kind.kv_heads, scale=kind.scale,
            )  # fmt: skip

        each = latent if isinstance(kind, MLA) else grouped
        return lambda space: _by_sequence(space, out, each)

    # ---- experts ----

    def _router(self, logits: Rows, bias: Vector | None, ids: Rows, weights: Rows, *, spec: Any) -> Run:
        def run(space: Space) -> None:
            chosen, parts = rows.route(read(logits, space), None if bias is None else bias.handle, spec)
            write(ids, chosen)
            write(weights, parts)

        return run

    def _ffn(self, x: Rows, ids: Rows, weights: Rows, out: Rows, *, layer: int, layouts: Any) -> Run:
        known = self._experts.add_layer(layer, layouts)

        def run(space: Space) -> None:
            assert space.experts is not None
            given = (read(x, space), read(ids, space), read(weights, space))
            write(out, self._experts.compute(known, *given, space.experts))

        return run


Picked = Callable[[Rows], Array]


def _by_sequence(space: Space, out: Rows, compute: Callable[[Group, Picked], Array]) -> None:
    """Rows of one sequence at a time; `compute(group, picked)` with `picked(rows)` the group's rows of a buffer."""
    parts = []
    for part in space.groups:
        alone = len(part.rows) == space.count

        def picked(rows: Rows, part: Group = part, alone: bool = alone) -> Array:
            values = read(rows, space)
            return values if alone else values[copied(part.rows)]

        parts.append(compute(part, picked))
    if len(parts) == 1:
        write(out, parts[0])
        return
    order = np.argsort(np.concatenate([part.rows for part in space.groups])).astype(np.int32)
    write(out, mx.concatenate(parts)[copied(order)])


def _held(weight: Weight) -> layout.Held:
    matrix: HeldMatrix = weight.handle
    return matrix.device
