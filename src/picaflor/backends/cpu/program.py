"""A recorded program of the CPU backend: native segments with calls of experts between them.

Knows segments and the expert provider; must not know families, formats or files.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from picaflor.backends.api import AheadProvider, Batch, ExpertProvider, Reduction, Rows
from picaflor.backends.cpu.capabilities import BACKEND, SCALAR, SCALAR_ISA
from picaflor.backends.cpu.early import MOST_ROWS, EarlyRouter
from picaflor.backends.reduction import reduce_choices
from picaflor.backends.table import CapabilityTable
from picaflor.formats.base import F32

CALLS: Final = ("segment", "expert_ffn")
NATIVE_CLASSES: Final = ("attention", "matmul", "router", "head", "other")


@dataclass(frozen=True, slots=True)
class ExpertCall:
    """One call of experts, after the segment of the same number. Addresses of row 0 and strides in floats.

    `ffn_layer`: the number under which the native operation knows the layer's layouts. `outputs`: acts on output rows.
    `plain`: by the scalar kernels. `choices`: the buffers of ids and weights, `input` that of x. `beside`: the segment
    after this one runs while experts are read.
    """

    layer: int
    ffn_layer: int
    x: tuple[int, int]
    ids: int
    weights: int
    out: tuple[int, int]
    outputs: bool
    plain: bool
    choices: tuple[Rows, Rows]
    input: Rows
    beside: bool


class Faults:
    """Lets accelerated calls fail on purpose: those after the first `after`, for tests of what happens then.

    A call is one segment of a program, or one run of experts; what is recorded as plain, or beside experts, is none.
    Such a call is computed by the scalar kernels instead, which give the same bits.
    """

    def __init__(self, after: int, table: CapabilityTable) -> None:
        self._after = after
        self._table = table
        self._calls = 0

    @property
    def failing(self) -> bool:
        """Whether the next call fails."""
        return self._calls >= self._after

    def next_fails(self, call: str) -> bool:
        """Count a call; True if it fails. Raises UnsupportedKernel for the first that does under `--strict`."""
        failing = self.failing
        self._calls += 1
        if failing:
            self._table.failed(
                BACKEND,
                call,
                reason=f"PICAFLOR_FAIL_AFTER={self._after} lets every call after the first {self._after} fail",
                instead=SCALAR,
                cure="unset PICAFLOR_FAIL_AFTER",
                calls=CALLS,
            )
        return failing


class CpuProgram:
    """backends.api.Program over a native program. `keep`: what must live as long as the program."""

    def __init__(
        self,
        native: Any,
        arena: Any,
        ffn: Any,
        calls: Sequence[ExpertCall],
        *,
        isa: str,
        faults: Faults | None,
        keep: Sequence[object],
        early: Sequence[EarlyRouter | None] = (),
    ) -> None:
        self._early = tuple(early)
        self._native = native
        self._arena = arena
        self._ffn = ffn
        self._isa = isa
        self._faults = faults
        self._calls = tuple(calls)
        self._keep = tuple(keep)
        self._expert_seconds = 0.0

    def run(self, batch: Batch, experts: ExpertProvider | None = None) -> None:
        """Compute all rows. Raises ReadFailed from the provider, ValueError for a batch that does not fit."""
        if self._calls and experts is None:
            raise ValueError("the program has experts, and no provider was given")
        self._arena.set_batch(batch.tokens, batch.sequences, batch.positions, batch.pages, batch.outputs)
        ahead = experts if isinstance(experts, AheadProvider) and len(batch.tokens) <= MOST_ROWS else None
        self._run_segment(0)
        segment = 1
        for index, call in enumerate(self._calls):
            assert experts is not None
            rows = len(batch.outputs) if call.outputs else len(batch.tokens)
            if rows:
                if batch.reduction is not None:
                    self._reduce(call, rows, batch, batch.reduction)
                self._run_experts(index, rows, experts, ahead, segment)
            segment += call.beside
            if batch.layer_done is not None:
                batch.layer_done(index + 1, len(self._calls))
            self._run_segment(segment)
            segment += 1

    def _reduce(self, call: ExpertCall, rows: int, batch: Batch, reduction: Reduction) -> None:
        """A lossy mode: take choices away before anybody asks for the experts."""
        ids, weights = (self.view(part, rows) for part in call.choices)
        reduced = reduction.rows[batch.outputs] if call.outputs else reduction.rows
        reduce_choices(ids, weights, reduced, call.layer, reduction)

    def _run_segment(self, segment: int, *, counted: bool = True) -> None:
        faults = self._faults
        plain = faults is not None and (faults.next_fails("segment") if counted else faults.failing)
        self._native.run_segment(segment, plain)

    def _run_experts(
        self, index: int, rows: int, experts: ExpertProvider, ahead: AheadProvider | None, segment: int
    ) -> None:
        """One MoE layer; time spent waiting for reads is not counted as computing."""
        clock = time.perf_counter
        ffn, call = self._ffn, self._calls[index]
        start = clock()
        wanted = ffn.begin(call.ffn_layer, call.x[0], call.x[1], call.ids, rows)
        self._expert_seconds += clock() - start
        with experts.acquire(call.layer, wanted) as lease:
            if ahead is not None:
                self._expect(index, rows, ahead)
            if call.beside:
                self._run_segment(segment, counted=False)
            for ids, addresses in lease.batches():
                start = clock()
                self._compute(call, ffn.run, ids, addresses)
                self._expert_seconds += clock() - start
        start = clock()
        self._compute(call, ffn.finish, call.weights, *call.out, counted=False)
        self._expert_seconds += clock() - start

    def _expect(self, index: int, rows: int, ahead: AheadProvider) -> None:
        """Tell the provider what the next layer will probably ask for."""
        early = self._early[index]
        if early is not None and ahead.reads_ahead(layer := self._calls[index + 1].layer):
            ahead.expect(layer, early.choose(self.view(self._calls[index].input, rows)))

    def _compute(self, call: ExpertCall, part: Callable[..., None], *words: Any, counted: bool = True) -> None:
        """A part of the expert operation, by the scalar kernels where `call` says so or where it fails."""
        plain, faults = call.plain, self._faults
        if faults is not None and not plain:
            plain = faults.next_fails("expert_ffn") if counted else faults.failing
        if not plain:
            part(*words)
            return
        self._ffn.use(SCALAR_ISA)
        try:
            part(*words)
        finally:
            self._ffn.use(self._isa)

    def view(self, rows: Rows, count: int) -> NDArray[Any]:
        """The first `count` rows `[count, width]`; valid until the next run."""
        native_view, is_float = rows.handle.view(rows), rows.dtype == "f32"
        array: NDArray[Any] = (self._arena.floats if is_float else self._arena.ints)(native_view, count)
        return array

    def write(self, rows: Rows, values: F32) -> None:
        """Fill an input buffer's first rows."""
        self.view(rows, len(values))[:] = np.asarray(values)

    def seconds(self) -> dict[str, float]:
        """Time per class since the last call, in seconds."""
        taken = dict(zip(NATIVE_CLASSES, self._native.take_seconds(), strict=True))
        taken["experts"], self._expert_seconds = self._expert_seconds, 0.0
        return taken
