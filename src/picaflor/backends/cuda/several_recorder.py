"""Records one pass for several devices: each operation on the device that has its layer.

Knows layers' places, recorders of single devices and which buffers an operation reads and writes; must not know
kernels, models or why a layer lies where. Calls are kept and given to the devices at `finish`, where it is known what
follows: an operation that names no layer stays on the device of those before it, or, at the beginning, of those behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import Any, Literal

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
from picaflor.backends.cuda.recorder import CudaRecorder
from picaflor.backends.cuda.several_program import Border, SeveralProgram, Shared, Stage
from picaflor.backends.host import Call
from picaflor.backends.shapes import FIRST_WRITTEN
from picaflor.backends.shapes import part as check_part
from picaflor.container.names import layer_of

EXPERTS = "experts"


@dataclass(slots=True)
class _Uses:
    """What a stage does to buffers: `needed` are those of which it uses what was there before, `written` by it."""

    needed: list[Shared] = field(default_factory=list)
    written: set[Shared] = field(default_factory=set)

    def add(self, call: Call) -> None:
        """Take one call in."""
        first = FIRST_WRITTEN[call.name]
        read = [*call.arguments[:first], *call.options.values()]
        wrote = [word for word in call.arguments[first:] if isinstance(word, Rows)]
        in_place = first == 0
        for rows in (word for word in (*read, *(wrote if in_place else ())) if isinstance(word, Rows)):
            self._need(rows.handle)
        for rows in wrote:
            if rows.start or rows.width != rows.handle.width:  # the other columns stay
                self._need(rows.handle)
        self.written.update(rows.handle for rows in wrote)

    def _need(self, buffer: Shared) -> None:
        if buffer not in self.written and buffer not in self.needed:
            self.needed.append(buffer)


class SeveralRecorder:
    """backends.api.Recorder. `place(layer)`: the device of a layer; `open(device)`: a recorder there; `held(word,
    device)`: a matrix or vector as that device has it; `names` of the devices."""

    def __init__(
        self,
        *,
        place: Callable[[int], int],
        open: Callable[[int], CudaRecorder],
        held: Callable[[Any, int], Any],
        names: Sequence[str],
    ) -> None:
        self._place = place
        self._open = open
        self._held = held
        self._names = tuple(names)
        self._recorders: dict[int, CudaRecorder] = {}
        self._calls: list[Call] = []

    # ---- buffers ----

    def rows(self, width: int, *, dtype: Literal["f32", "i32"] = "f32") -> Rows:
        """A new buffer, which a device has when an operation there needs it."""
        return Rows(width, dtype, Shared(width, dtype))

    def part(self, rows: Rows, start: int, width: int) -> Rows:
        """Columns of a buffer, as a view."""
        check_part(rows, start, width)
        return Rows(width, rows.dtype, rows.handle, rows.start + start)

    def kv_plane(self, layer: int, name: str, width: int) -> KVPlane:
        """A cached quantity, on the device of its layer."""
        return self._recorder(self._place(layer)).kv_plane(layer, name, width)

    # ---- operations ----

    def embed(self, table: Weight, out: Rows) -> None:
        """out = table[token]."""
        self._keep("embed", table, out)

    def rmsnorm(self, x: Rows, weight: Vector, out: Rows, *, eps: float, heads: int = 1) -> None:
        """Root-mean-square norm of each of `heads` equal parts; out may be x."""
        self._keep("rmsnorm", x, weight, out, eps=eps, heads=heads)

    def layernorm(self, x: Rows, weight: Vector, bias: Vector, out: Rows, *, eps: float) -> None:
        """Mean-variance norm; out may be x."""
        self._keep("layernorm", x, weight, bias, out, eps=eps)

    def matmul(self, x: Rows, weight: Weight, out: Rows) -> None:
        """out = x @ W.T."""
        self._keep("matmul", x, weight, out)

    def rope(
        self, x: Rows, *, heads: int, head_width: int, start: int, dims: int, theta: float, style: RopeStyle
    ) -> None:
        """Rotate `dims` values from `start` of each head in place."""
        self._keep("rope", x, heads=heads, head_width=head_width, start=start, dims=dims, theta=theta, style=style)

    def add(self, x: Rows, y: Rows) -> None:
        """x = x + y."""
        self._keep("add", x, y)

    def silu_mul(self, gate: Rows, up: Rows, out: Rows) -> None:
        """out = silu(gate) * up; out may be gate."""
        self._keep("silu_mul", gate, up, out)

    def select_outputs(self, x: Rows, out: Rows) -> None:
        """out = the batch's output rows of x, packed."""
        self._keep("select_outputs", x, out)

    def kv_write(self, x: Rows, plane: KVPlane) -> None:
        """Store the row in its sequence's page."""
        self._keep("kv_write", x, plane)

    def index_select(
        self, q: Rows, weights: Rows, keys: KVPlane, out: Rows, *, heads: int, head_dim: int, top_k: int
    ) -> None:
        """DSA selection: out is i32 `[1 + top_k]`."""
        self._keep("index_select", q, weights, keys, out, heads=heads, head_dim=head_dim, top_k=top_k)

    def attention(self, q: Rows, out: Rows, *, kind: MLA | GQA, selection: Rows | None = None) -> None:
        """Causal attention over the row's sequence, or over the selected positions."""
        self._keep("attention", q, out, kind=kind, selection=selection)

    def router(self, logits: Rows, bias: Vector | None, ids: Rows, weights: Rows, *, spec: RouterSpec) -> None:
        """ids i32 and weights f32 `[top_k]`, in routing order."""
        self._keep("router", logits, bias, ids, weights, spec=spec)

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
        """out = weighted sum of the chosen experts, in routing order, then what `beside` records."""
        self._keep(EXPERTS, x, ids, weights, out, layer=layer, layouts=layouts)
        if beside is not None:
            beside()

    def finish(self) -> SeveralProgram:
        """The program of all that was recorded since the last finish. Raises ValueError where widths do not fit, for an
        operation of two devices, and for layers whose order is not that of their devices."""
        calls, self._calls = self._calls, []
        devices = self._devices(calls)
        pairs = groupby(zip(devices, calls, strict=True), key=itemgetter(0))
        runs = [(device, [call for _, call in run]) for device, run in pairs] or [(0, [])]
        order = [device for device, _ in runs]
        if len(set(order)) != len(order):
            raise ValueError(f"layers in the order of devices {order}: a device computes its layers in one go")
        writers: dict[Shared, int] = {}
        stages = []
        for number, (device, members) in enumerate(runs):
            uses = _Uses()
            for call in members:
                uses.add(call)
            borders = tuple(Border(writers[buffer], buffer) for buffer in uses.needed if buffer in writers)
            given = frozenset(buffer for buffer in uses.needed if buffer not in writers)
            program = self._give(device, members)
            stages.append(Stage(device, self._names[device], program, borders, given, frozenset(uses.written)))
            writers |= dict.fromkeys(uses.written, number)
        return SeveralProgram(stages, asks=any(call.name == EXPERTS for call in calls))

    # ---- helpers ----

    def _keep(self, name: str, *arguments: Any, **options: Any) -> None:
        self._calls.append(Call(name, arguments, options))

    def _recorder(self, device: int) -> CudaRecorder:
        if device not in self._recorders:
            self._recorders[device] = self._open(device)
        return self._recorders[device]

    def _devices(self, calls: Sequence[Call]) -> list[int]:
        """The device of each call."""
        asked = [self._asked(call) for call in calls]
        here = next((device for device in asked if device is not None), 0)
        found = []
        packed = False
        for call, device in zip(calls, asked, strict=True):
            if packed and device not in (None, here):
                raise ValueError(f"{call.name} of another device behind select_outputs: the output rows are not there")
            here = here if device is None else device
            packed = packed or call.name == "select_outputs"
            found.append(here)
        return found

    def _asked(self, call: Call) -> int | None:
        """The device of the layer that a call names, None where it names none."""
        found = {self._place(layer) for layer in _layers(call)}
        if len(found) > 1:
            raise ValueError(f"{call.name} of layers that lie on devices {sorted(found)}")
        return next(iter(found), None)

    def _give(self, device: int, calls: Sequence[Call]) -> Any:
        """Record calls on a device: its program of them."""
        recorder = self._recorder(device)
        for call in calls:
            arguments = [self._there(word, device) for word in call.arguments]
            options = {name: self._there(word, device) for name, word in call.options.items()}
            getattr(recorder, call.name)(*arguments, **options)
        return recorder.finish()

    def _there(self, word: Any, device: int) -> Any:
        """An argument as the device knows it."""
        if isinstance(word, Rows):
            buffer: Shared = word.handle
            if device not in buffer.parts:
                buffer.parts[device] = self._recorder(device).rows(buffer.width, dtype=buffer.dtype)
            return buffer.on(device, word)
        return self._held(word, device) if isinstance(word, Weight | Vector) else word


def _layers(call: Call) -> Iterator[int]:
    """The layers that a call names: of its matrices, vectors, planes and experts."""
    words = [*call.arguments, *call.options.values()]
    for word in words:
        if isinstance(word, MLA):
            words += [word.kv_b, word.latent, word.rope_key]  # looked at in turn
        elif isinstance(word, GQA):
            words += [word.keys, word.values]
        elif isinstance(word, KVPlane):
            yield word.layer
        elif isinstance(word, Weight | Vector):
            layer = layer_of(word.name)
            if layer is not None:
                yield layer
    if call.name == EXPERTS:
        yield call.options["layer"]
