"""A trial of reads: what a layer takes longer when some of its experts have to be read, as in a run.

Knows sketches, programs and the store; must not judge what it measures. The model's own program runs over blank
weights, a few of its layers, and gets its experts from a real store that is asked for ones it does not hold.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from picaflor.backends.api import I32, ExpertLayout
from picaflor.models.base import Model
from picaflor.models.blocks.moe import MoE
from picaflor.runtime import plan as planning
from picaflor.runtime.kvcache import Sequence as Tokens
from picaflor.runtime.runner import Runner, Work
from picaflor.runtime.sketch import Sketch
from picaflor.runtime.trial import Blank
from picaflor.store.lease import Lease, PinnedLease
from picaflor.store.store import WORKING_SLOTS, ExpertStore
from picaflor.telemetry.process import physical_read_bytes

LAYERS = 8
SECONDS = 0.7
LEAST_STEPS = 4
MOST_STEPS = 32


@dataclass(frozen=True, slots=True)
class Reads:
    """`extra_s[m]`: seconds that a layer takes longer when m of its chosen experts have to be read than when all of the
    model's are in memory for good. `extra_s[0]` is what it costs to ask for experts that might not be there.

    `bytes_per_s`: bytes read by the time with a read under way. `storage_share`: part of the bytes that came from
    storage rather than from the page cache; None if unknown.
    """

    extra_s: tuple[float, ...]
    expert_bytes: int
    bytes_per_s: float
    storage_share: float | None


class _Other:
    """Gives a program other experts than it asks for: chosen so that a number of them has to be read.

    Experts of one layer may lie at different places in their slots; they stand for each other where all planes are
    moved by the same number of bytes.
    """

    def __init__(self, store: ExpertStore, blocks: Sequence[MoE]) -> None:
        self._store = store
        self._layouts = {block.layer: store.layouts(block.layer) for block in blocks}
        self._moves = {layer: _moves(layouts) for layer, layouts in self._layouts.items()}
        self._chosen: dict[int, I32] = {}
        self._rng = np.random.Generator(np.random.PCG64(1))

    def choose(self, misses: int) -> None:
        """For the next step: in each layer so many experts that are not in memory, the others such that are."""
        for layer, layouts in self._layouts.items():
            here = np.array(self._store.resident(layer), np.int32)
            absent = np.setdiff1d(np.arange(len(layouts), dtype=np.int32), here)
            self._chosen[layer] = np.concatenate(
                [
                    self._rng.permutation(absent)[:misses],
                    self._rng.permutation(here),
                    self._rng.permutation(absent)[misses:],
                ]
            )

    def acquire(self, layer: int, experts: I32) -> _OtherLease:
        """As many experts as are asked for, but the chosen ones."""
        real = self._chosen[layer][: len(experts)]
        return _OtherLease(self._store.acquire(layer, real), experts, real, self._moves[layer])


class _OtherLease:
    """The store's lease under other names."""

    def __init__(self, lease: Lease | PinnedLease, experts: I32, real: I32, moves: NDArray[np.int64]) -> None:
        self._lease = lease
        self._names = dict(zip(real.tolist(), experts.tolist(), strict=True))
        self._moves = moves

    def __enter__(self) -> _OtherLease:
        self._lease.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._lease.__exit__(None, None, None)

    def batches(self) -> Iterator[tuple[I32, NDArray[np.uint64]]]:
        """The store's batches, renamed."""
        for real, addresses in self._lease.batches():
            names = np.array([self._names[number] for number in real.tolist()], np.int32)
            moved = addresses.astype(np.int64) + self._moves[real] - self._moves[names]
            yield names, moved.astype(np.uint64)


def _moves(layouts: Sequence[ExpertLayout]) -> NDArray[np.int64]:
    """Where each expert's first plane lies in its slot. Raises ValueError where they do not stand for each other."""
    shapes = {_shape(layout) for layout in layouts}
    if len(shapes) > 1:
        raise ValueError("experts of different formats in one layer")
    return np.array([layout.gate.offsets[0] for layout in layouts], np.int64)


def _shape(layout: ExpertLayout) -> tuple[object, ...]:
    first = layout.gate.offsets[0]
    return tuple(
        (m.format, m.rows, m.cols, m.group_size, tuple(offset - first for offset in m.offsets))
        for m in (layout.gate, layout.up, layout.down)
    )


def measure_reads(plan: Sketch) -> Reads | None:
    """Steps of a few layers with 0 to top-k of each layer's experts missing, at the beginning of a context.

    None where the model has no experts, where its files are not here in full, or where the experts of a layer differ
    in format, which this trial does not cover. Raises ReadFailed.
    """
    if plan.files is None or not plan.moe or not plan.complete:
        return None
    model = _few_layers(plan)
    blocks = [layer.mlp for layer in model.layers if isinstance(layer.mlp, MoE)]
    top_k = max(block.router.top_k for block in blocks)
    blank = Blank(plan, model)
    assert blank.files is not None
    slots = {block.layer: min(block.router.top_k, block.router.experts) for block in blocks}
    still_s = blank.step_s(plan)
    before = physical_read_bytes()
    with planning.open_store(blank.files, slots, WORKING_SLOTS, plan.reading, plan.notices) as store:
        try:
            experts = _Other(store, blocks)
        except ValueError:
            return None
        runner = blank.runner(experts)
        _run(runner, store, experts, top_k, LEAST_STEPS)
        found = [_timed(runner, store, experts, misses) for misses in sorted({0, 1, 2, max(1, top_k // 2), top_k})]
        rate = found[-1].read_bytes / found[-1].busy_s if found[-1].busy_s else 0.0
        total = store.counters.total().read_bytes
    after = physical_read_bytes()
    storage = min(1.0, (after - before) / total) if before is not None and after is not None and total else None
    points = sorted((timed.misses, timed.step_s) for timed in found)
    whole = np.interp(np.arange(top_k + 1), [m for m, _ in points], [seconds for _, seconds in points])
    extra = np.maximum.accumulate(np.maximum(whole - still_s, 0.0)) / len(blocks)
    nbytes = plan.expert_bytes // plan.experts
    return Reads(tuple(float(value) for value in extra), nbytes, rate, storage)


def _few_layers(plan: Sketch) -> Model:
    """The model with at most LAYERS of its MoE layers, fewer where their slots would not fit half of the budget."""
    layers = [layer for layer in plan.model.layers if isinstance(layer.mlp, MoE)]
    assert plan.files is not None
    widest = max(plan.files.slot_nbytes(block.layer) * block.router.top_k for block in plan.moe)
    room = (plan.ledger.limit.nbytes or 0) // 2
    count = max(1, min(LAYERS, len(layers), room // widest))
    step = len(layers) // count
    return replace(plan.model, layers=tuple(layers[:: max(step, 1)][:count]))


@dataclass(frozen=True, slots=True)
class _Timed:
    """`misses` per layer as counted, seconds of a step, bytes read and the time with a read under way."""

    misses: float
    step_s: float
    read_bytes: int
    busy_s: float


def _timed(runner: Runner, store: ExpertStore, experts: _Other, misses: int) -> _Timed:
    before, busy = store.counters.total(), store.busy_s()
    steps, seconds = _run(runner, store, experts, misses, MOST_STEPS)
    after = store.counters.total()
    missed = (after.loaded - before.loaded) / (steps * len(store.files.layers))
    return _Timed(missed, seconds / steps, after.read_bytes - before.read_bytes, store.busy_s() - busy)


def _run(runner: Runner, store: ExpertStore, experts: _Other, misses: int, most: int) -> tuple[int, float]:
    """(steps, their seconds); choosing experts is not part of a step."""
    sequence = Tokens()
    token = np.zeros(1, np.int32)
    steps, seconds = 0, 0.0
    while steps < LEAST_STEPS or (steps < most and seconds < SECONDS):
        experts.choose(misses)
        started = time.perf_counter()
        runner.step([Work(sequence, token)])
        seconds += time.perf_counter() - started
        steps += 1
    runner.pool.release(sequence)
    return steps, seconds
