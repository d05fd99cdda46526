"""Records operations for the backend: each becomes launches that are bound to buffers of the device.

Knows shapes, buffers and kernels; must not know families, files or the expert store. Shapes and cells are checked by
`DeviceRecorder`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from picaflor.backends.api import GQA, MLA, ExpertProvider, KVPlane, RouterSpec, Rows, Vector, Weight
from picaflor.backends.batches import Limits, rope_lines
from picaflor.backends.host import Call, HostTwin
from picaflor.backends.programs import Guard
from picaflor.backends.recording import DeviceRecorder, Run
from picaflor.backends.shapes import FIRST_WRITTEN, check
from picaflor.backends.table import CapabilityTable
from picaflor.backends.vulkan import attention, rows
from picaflor.backends.vulkan.attending import Room, attend_latents, attend_queries, rounded
from picaflor.backends.vulkan.decode import Needs, needs
from picaflor.backends.vulkan.device import Buffer, Gpu, Launch
from picaflor.backends.vulkan.experts import ExpertCall, Work
from picaflor.backends.vulkan.factors import Factor, factor_for
from picaflor.backends.vulkan.prepared import Prepared, Source
from picaflor.backends.vulkan.products import MOST_TOGETHER, matmul_kernel
from picaflor.backends.vulkan.program import (
    FrameBuffer,
    Moment,
    RowBuffer,
    SpaceAt,
    VulkanProgram,
    memory_of,
    stride_of,
    values_of,
    view,
)
from picaflor.backends.vulkan.tier import ExpertTier
from picaflor.backends.vulkan.tiling import tile_for
from picaflor.backends.vulkan.weights import HeldMatrix, Part
from picaflor.backends.vulkan.wgsl import LANES, Kernel
from picaflor.errors import UnsupportedKernel
from picaflor.formats.base import F32
from picaflor.formats.e8_grid import load_grid
from picaflor.formats.numeric import ceil_div

SCRATCH_BYTES: Final = 64 << 20
"""Most memory for one chunk's blocks of attention, or scores of the indexer."""


class RopeTable:
    """cos and sin, side by side, `[capacity, dims / 2, 2]` on the device, filled as positions are reached."""

    def __init__(self, gpu: Gpu, dims: int, theta: float, capacity: int) -> None:
        self.memory = gpu.buffer(8 * capacity * (dims // 2), "a table of rotations")
        self._gpu, self._dims, self._theta, self._capacity = gpu, dims, theta, capacity
        self._filled = 0

    def fill(self, positions: int) -> None:
        """Make the first `positions` lines right."""
        if positions <= self._filled:
            return
        stop = min(max(positions, 2 * self._filled, 256), self._capacity)
        both = np.stack(rope_lines(self._dims, self._theta, self._filled, stop), axis=-1)
        self._gpu.write(self.memory, 8 * self._filled * (self._dims // 2), both)
        self._filled = stop


class VulkanRecorder(DeviceRecorder):
    """backends.api.Recorder. `ready(experts)` is called before a program runs."""

    def __init__(
        self,
        *,
        backend: str,
        gpu: Gpu,
        precision: str,
        table: CapabilityTable,
        tier: ExpertTier,
        twin: HostTwin,
        limits: Limits,
        guard: Guard,
        ready: Callable[[ExpertProvider | None], None],
    ) -> None:
        super().__init__(backend=backend, table=table, twin=twin, limits=limits)
        self._gpu = gpu
        self._precision = precision
        self._tier = tier
        self._guard = guard
        self._ready = ready
        self._max_rows = max(limits.max_rows, limits.max_outputs)
        self._frame = FrameBuffer(gpu, limits)
        self._nbytes = self._frame.nbytes
        self._ropes: dict[tuple[int, float], RopeTable] = {}
        self._scratches: dict[tuple[str, int], Buffer] = {}
        self._prepared: dict[tuple[int, int, int, Needs, int], Prepared] = {}
        self._fresh: set[tuple[int, int, int, Needs, int]] = set()
        self._work = Work(gpu, precision, self._max_rows, self._frame.memory, self._scratch, self._lattice)
        twin.fetch = self._page

    # ---- memory ----

    def new_buffer(self, width: int, dtype: str) -> RowBuffer:
        """The handle of a new buffer of rows."""
        return RowBuffer(self._new(4 * self._max_rows * width, f"{self._max_rows} rows of {width}"), width)

    def new_plane(self, width: int) -> Buffer:
        """The handle of a new plane of all pages."""
        return self._gpu.buffer(4 * self._limits.capacity * width, f"a cache of {self._limits.capacity} tokens")

    def workspace_bytes(self) -> int:
        """Bytes of buffers and tables on the device."""
        return self._nbytes

    def _new(self, nbytes: int, what: str) -> Buffer:
        self._nbytes += nbytes
        return self._gpu.buffer(nbytes, what)

    def _scratch(self, use: str, nbytes: int) -> Buffer:
        key = (use, nbytes)
        if key not in self._scratches:
            self._scratches[key] = self._new(nbytes, use)
        return self._scratches[key]

    def _lattice(self) -> Buffer:
        key = ("lattice", 0)
        if key not in self._scratches:
            grid = np.ascontiguousarray(load_grid()).reshape(-1).view(np.uint32)
            self._scratches[key] = self._gpu.filled(grid, "a lattice")
        return self._scratches[key]

    def _page(self, plane: KVPlane, page: int) -> F32:
        tokens = self._limits.page_tokens
        nbytes = 4 * tokens * plane.width
        return self._gpu.read(plane.handle, page * nbytes, nbytes).view(np.float32).reshape(tokens, plane.width)

    # ---- recording ----

    def make(self, op: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Run:
        """The launches of an operation."""
        run: Run = getattr(self, f"_make_{op}")(*arguments, **options)
        written = {id(word.handle) for word in arguments[FIRST_WRITTEN[op] :] if isinstance(word, Rows)}
        self._fresh = {key for key in self._fresh if key[0] not in written}
        return run

    def make_on_host(self, call: Call) -> Run:
        """No cell of this backend is waived."""
        raise UnsupportedKernel(f"{self._backend}: {call.name} is not done by another backend")

    def finish(self) -> VulkanProgram:
        """The program of all that was recorded since the last finish; tells what fell back in it."""
        steps, number = self._end()
        self._fresh.clear()
        return VulkanProgram(
            steps, self._frame, self._twin, number, gpu=self._gpu, limits=self._limits, guard=self._guard,
            ready=self._prepare,
        )  # fmt: skip

    def _prepare(self, experts: ExpertProvider | None, longest: int) -> None:
        for table in self._ropes.values():
            table.fill(longest)
        self._ready(experts)

    @property
    def _at(self) -> SpaceAt:
        return self._frame.some if self._outputs else self._frame.all

    @property
    def _paging(self) -> dict[str, int]:
        shift = self._limits.page_tokens.bit_length() - 1
        return {
            "sequences": self._at.sequences, "positions": self._at.positions, "pages": self._frame.pages,
            "pages_stride": self._limits.pages, "shift": shift,
        }  # fmt: skip

    def _launch(self, kernel: Kernel, buffers: tuple[Buffer, ...], **values: float) -> Launch:
        return Launch(kernel, buffers, {"space": self._at.space, **values})

    def _each(self, kernel: Kernel, buffers: tuple[Buffer, ...], width: int, **values: float) -> Run:
        """One invocation per value of each row."""
        launch = self._launch(kernel, buffers, width=width, **values)

        def run(moment: Moment) -> None:
            moment.stream.launch(launch, moment.count * ceil_div(width, LANES))

        return run

    # ---- row by row ----

    def _make_embed(self, table: Weight, out: Rows) -> Run:
        held: HeldMatrix = table.handle
        kernel = rows.embed_kernel(held.reader(vectors=False))
        at, frame = self._at, self._frame.memory
        runs: list[Run] = []

        def made(part: Part) -> Run:
            return self._each(
                kernel, (part.codes, part.scales, memory_of(out), frame), table.cols, **held.shape.fields(""),
                space=at.space, tokens=at.tokens, first=part.first, rows=part.rows, table_rows=table.rows,
                **view("o", out),
            )  # fmt: skip

        def run(moment: Moment) -> None:
            if not runs:
                runs.extend(made(part) for part in held.parts)
            for one in runs:
                one(moment)

        return run

    def _make_rmsnorm(self, x: Rows, weight: Vector, out: Rows, *, eps: float, heads: int) -> Run:
        launch = self._launch(
            rows.RMSNORM, (memory_of(x), values_of(weight), memory_of(out), self._frame.memory), heads=heads,
            width=weight.length, eps=eps, **view("x", x), **view("o", out),
        )  # fmt: skip
        return _per_row(launch, heads)

    def _make_layernorm(self, x: Rows, weight: Vector, bias: Vector, out: Rows, *, eps: float) -> Run:
        buffers = (memory_of(x), values_of(weight), values_of(bias), memory_of(out), self._frame.memory)
        launch = self._launch(rows.LAYERNORM, buffers, width=weight.length, eps=eps, **view("x", x), **view("o", out))
        return _per_row(launch, 1)

    def _make_rope(self, x: Rows, *, heads: int, head_width: int, start: int, dims: int, theta: float, style: str
                   ) -> Run:  # fmt: skip
        most = 2 * LANES * rows.MOST_PAIRS
        check(dims <= most, f"rope: {dims} values of a head, {self._backend} rotates at most {most}")
        key = (dims, theta)
        if key not in self._ropes:
            self._ropes[key] = RopeTable(self._gpu, dims, theta, self._limits.capacity)
        launch = self._launch(
            rows.ROPE, (memory_of(x), self._ropes[key].memory, self._frame.memory), positions=self._at.positions,
            heads=heads, head_width=head_width, start=start, pairs=dims // 2, interleaved=style == "interleaved",
            **view("x", x),
        )  # fmt: skip
        return _per_row(launch, heads)

    def _make_add(self, x: Rows, y: Rows) -> Run:
        buffers = (memory_of(x), memory_of(y), self._frame.memory)
        return self._each(rows.ADD, buffers, x.width, **view("x", x), **view("y", y))

    def _make_silu_mul(self, gate: Rows, up: Rows, out: Rows) -> Run:
        buffers = (memory_of(gate), memory_of(up), memory_of(out), self._frame.memory)
        return self._each(rows.SILU_MUL, buffers, gate.width, **view("x", gate), **view("y", up), **view("o", out))

    def _make_select_outputs(self, x: Rows, out: Rows) -> Run:
        self._fresh.clear()  # of other rows
        buffers = (memory_of(x), memory_of(out), self._frame.memory)
        return self._each(rows.GATHER, buffers, x.width, numbers=self._frame.numbers, **view("x", x),
                          **view("o", out))  # fmt: skip

    # ---- products ----

    def _make_matmul(self, x: Rows, weight: Weight, out: Rows) -> Run:
        held: HeldMatrix = weight.handle
        wanted = needs(weight.format, weight.group_size, self._precision)
        prepared, fresh = (None, False) if wanted is None else self._prepared_rows(x, wanted)
        space = self._at.space
        ways: dict[int, tuple[list[Launch], int]] = {}

        def run(moment: Moment) -> None:
            together = next((n for n in (1, 2, 4) if moment.count <= n), MOST_TOGETHER)
            if together not in ways:
                factor = self._factor(held, prepared, together)
                ways[together] = self._products(x, held, out, prepared, factor, together, space), factor.tile.rows
            if fresh and prepared is not None:
                prepared.make(moment.stream, moment.count)
            launches, tile_rows = ways[together]
            columns = ceil_div(moment.count, together)
            for launch, part in zip(launches, held.parts, strict=True):
                moment.stream.launch(launch, columns * ceil_div(part.rows, tile_rows))

        return run

    def _factor(self, held: HeldMatrix, prepared: Prepared | None, together: int) -> Factor:
        tiling, shape = self._gpu.tiling, held.shape
        tile = tile_for(tiling, together, shape.groups, floats=prepared is None)
        planes = 0 if prepared is None else prepared.needs.planes
        return factor_for(tiling, tile, held.reader(vectors=True), planes, shape.groups, shape.group, together)

    def _products(self, x: Rows, held: HeldMatrix, out: Rows, prepared: Prepared | None, factor: Factor, together: int,
                  space: int) -> list[Launch]:  # fmt: skip
        """One launch for each part of a matrix."""
        kernel = matmul_kernel(factor, together)
        given = (memory_of(x),) if prepared is None else (prepared.digits, prepared.steps)
        lattice = (self._lattice(),) if held.format == "e8-iq3-lattice" else ()
        return [
            Launch(
                kernel,
                (*given, part.codes, part.scales, memory_of(out), self._frame.memory, *lattice),
                {
                    **held.shape.fields(""), "cols": held.cols, **view("x", x), "space": space, "rows": part.rows,
                    "out_stride": stride_of(out), "out_at": out.start + part.first,
                },
            )
            for part in held.parts
        ]  # fmt: skip

    def _prepared_rows(self, x: Rows, wanted: Needs) -> tuple[Prepared, bool]:
        """Where rows are prepared for matrices with these needs, and whether that is still to be done here."""
        key = (id(x.handle), x.start, x.width, wanted, self._at.space)
        if key not in self._prepared:
            source = Source(memory_of(x), stride_of(x), x.start, self._frame.memory, self._at.space)
            self._prepared[key] = Prepared(self._gpu, wanted, x.width, self._max_rows, source, self._new)
        fresh = key not in self._fresh
        self._fresh.add(key)
        return self._prepared[key], fresh

    # ---- keys and values ----

    def _make_kv_write(self, x: Rows, plane: KVPlane) -> Run:
        return self._each(
            rows.KV_WRITE, (memory_of(x), plane.handle, self._frame.memory), x.width, **self._paging, **view("x", x)
        )

    def _make_index_select(self, q: Rows, weights: Rows, keys: KVPlane, out: Rows, *, heads: int, head_dim: int,
                           top_k: int) -> Run:  # fmt: skip
        line = self._limits.capacity
        chunk = max(1, min(self._max_rows, SCRATCH_BYTES // (4 * line)))
        scores = self._scratch("scores", 4 * chunk * line)
        at, frame, paging, one = self._at, self._frame.memory, self._paging, np.float32(1)
        launches: dict[tuple[int, int], tuple[Launch, Launch]] = {}

        def made(first: int, across: int) -> tuple[Launch, Launch]:
            common = {"space": at.space, "first": first, "chunk": chunk, "line": line, "top_k": top_k}
            scored = {
                **common, **paging, "keys_across": across, "heads": heads, "width": head_dim,
                "inv_dim": float(one / np.sqrt(np.float32(head_dim))),
                "inv_heads": float(one / np.sqrt(np.float32(heads))), **view("q", q), **view("w", weights),
            }  # fmt: skip
            buffers = (memory_of(q), memory_of(weights), keys.handle, scores, frame)
            chosen = {**common, "positions": at.positions, **view("o", out)}
            return (
                Launch(attention.INDEX_SCORES, buffers, scored),
                Launch(attention.CHOOSE_POSITIONS, (scores, memory_of(out), frame), chosen),
            )

        def run(moment: Moment) -> None:
            across = ceil_div(rounded(moment.longest), 4)
            for first in range(0, moment.count, chunk):
                if (first, across) not in launches:
                    launches[first, across] = made(first, across)
                scored, chosen = launches[first, across]
                count = min(chunk, moment.count - first)
                if moment.longest > top_k:
                    moment.stream.launch(scored, count * across)
                moment.stream.launch(chosen, count)

        return run

    def _make_attention(self, q: Rows, out: Rows, *, kind: MLA | GQA, selection: Rows | None) -> Run:
        room = Room(
            self._frame.memory, self._at, self._paging, self._limits.capacity, self._max_rows, self._gpu.most_bytes,
            self._scratch,
        )  # fmt: skip
        if isinstance(kind, MLA):
            return attend_latents(room, q, out, kind, selection)
        return attend_queries(room, q, out, kind, selection)

    # ---- experts ----

    def _make_router(self, logits: Rows, bias: Vector | None, ids: Rows, weights: Rows, *, spec: RouterSpec) -> Run:
        groups = spec.groups if spec.groups > 1 else 1
        kernel = attention.router_kernel(spec.score, spec.experts, groups, bias is not None, spec.normalise)
        more = () if bias is None else (values_of(bias),)
        launch = self._launch(
            kernel, (memory_of(logits), memory_of(ids), memory_of(weights), self._frame.memory, *more),
            top_k=spec.top_k, top_groups=spec.top_groups, scale=spec.scale, **view("x", logits), **view("ids", ids),
            **view("w", weights),
        )  # fmt: skip
        return _per_row(launch, 1)

    def _make_experts(self, x: Rows, ids: Rows, weights: Rows, out: Rows, *, layer: int, layouts: Any) -> Run:
        whole = ids.width == stride_of(ids) and weights.width == stride_of(weights)
        check(whole, "experts: ids and weights must be whole buffers")
        held = self._tier.add_layer(layer, layouts)
        return ExpertCall(self._work, self._tier, held, (x, ids, weights, out), self._at.space).run


def _per_row(launch: Launch, workgroups: int) -> Run:
    def run(moment: Moment) -> None:
        moment.stream.launch(launch, moment.count * workgroups)

    return run
