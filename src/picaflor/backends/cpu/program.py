"""A recorded program of the CPU backend: native segments with calls of experts between them.

Knows segments and the expert provider; must not know families, formats or files.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from picaflor.backends.api import Batch, ExpertProvider, Rows
from picaflor.formats.base import F32

NATIVE_CLASSES: Final = ("attention", "matmul", "router", "head", "other")


@dataclass(frozen=True, slots=True)
class ExpertCall:
    """One call of experts, after the segment of the same number. Addresses of row 0 and strides in floats.

    `ffn_layer`: the number under which the native operation knows the layer's layouts. `outputs`: acts on output rows.
    """

    layer: int
    ffn_layer: int
    x: tuple[int, int]
    ids: int
    weights: int
    out: tuple[int, int]
    outputs: bool


class CpuProgram:
    """backends.api.Program over a native program. `keep`: what must live as long as the program."""

    def __init__(self, native: Any, arena: Any, ffn: Any, calls: Sequence[ExpertCall], keep: Sequence[object]) -> None:
        self._native = native
        self._arena = arena
        self._ffn = ffn
        self._calls = tuple(calls)
        self._keep = tuple(keep)
        self._expert_seconds = 0.0

    def run(self, batch: Batch, experts: ExpertProvider | None = None) -> None:
        """Compute all rows. Raises ReadFailed from the provider, ValueError for a batch that does not fit."""
        if self._calls and experts is None:
            raise ValueError("the program has experts, and no provider was given")
        self._arena.set_batch(batch.tokens, batch.sequences, batch.positions, batch.pages, batch.outputs)
        run_segment = self._native.run_segment
        run_segment(0)
        for index, call in enumerate(self._calls):
            assert experts is not None
            rows = len(batch.outputs) if call.outputs else len(batch.tokens)
            if rows:
                self._run_experts(call, rows, experts)
            run_segment(index + 1)

    def _run_experts(self, call: ExpertCall, rows: int, experts: ExpertProvider) -> None:
        """One MoE layer; time spent waiting for reads is not counted as computing."""
        clock = time.perf_counter
        ffn = self._ffn
        start = clock()
        wanted = ffn.begin(call.ffn_layer, call.x[0], call.x[1], call.ids, rows)
        self._expert_seconds += clock() - start
        with experts.acquire(call.layer, wanted) as lease:
            for ids, addresses in lease.batches():
                start = clock()
                ffn.run(ids, addresses)
                self._expert_seconds += clock() - start
        start = clock()
        ffn.finish(call.weights, call.out[0], call.out[1])
        self._expert_seconds += clock() - start

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
