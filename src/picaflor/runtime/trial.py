"""Trials that measure what a prediction needs: a model's own program over memory without its weights, and its reads.

Knows sketches, programs and the store; must not judge what it measures. No weight is read for the first trial: kernels
take as long for one value as for another, so planes hold a constant. The second one reads experts as a run would.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from picaflor.backends.api import I32, Program
from picaflor.container.types import Expert
from picaflor.models.base import Model
from picaflor.models.blocks.moe import MoE
from picaflor.models.loading import ModelIndex
from picaflor.runtime import plan as planning
from picaflor.runtime.bench import MemoryProbe
from picaflor.runtime.kvcache import PagePool
from picaflor.runtime.kvcache import Sequence as Tokens
from picaflor.runtime.runner import Runner, Work
from picaflor.runtime.sketch import Sketch, layer_bytes
from picaflor.store.arena import Arena
from picaflor.store.reader import ExpertFiles
from picaflor.store.store import WORKING_SLOTS, ExpertStore
from picaflor.telemetry.process import physical_read_bytes

RESIDENT_CAP = 768 << 20
EXPERT_CAP = 512 << 20
STEPS = 16
BATCHES = 5
READ_LAYERS = 8
READ_SECONDS = 0.5
MOST_REQUESTS = 64
FILL = 0x3C
"""A byte that makes an ordinary number in every format: 0.0115 as float32 and bfloat16, 1.06 as float16."""


@dataclass(frozen=True, slots=True)
class Compute:
    """Seconds of one token with all experts in memory. `experts_s` is the part of the routed experts."""

    step_s: float
    experts_s: float
    memory_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Reads:
    """`seconds[m]`: one request of a layer with m missing experts, from asking to the last one's arrival; 0 for m = 0.

    `storage_share`: part of the bytes that came from storage rather than from the page cache; None if unknown.
    """

    seconds: tuple[float, ...]
    expert_bytes: int
    storage_share: float | None

    @property
    def bytes_per_s(self) -> float:
        """Rate of a request that misses all."""
        return (len(self.seconds) - 1) * self.expert_bytes / self.seconds[-1]


class _BlankExperts:
    """Gives a program the next slots of a ring: other memory for each request, as a run would have it."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._next = 0

    def acquire(self, layer: int, experts: I32) -> _BlankLease:
        """Slots for distinct experts."""
        slots = [(self._next + step) % self._arena.slots for step in range(len(experts))]
        self._next += len(experts)
        return _BlankLease(experts, np.array([self._arena.address(slot) for slot in slots], np.uint64))


class _BlankLease:
    """All experts at once."""

    def __init__(self, experts: I32, addresses: NDArray[np.uint64]) -> None:
        self._batch = (experts, addresses)

    def __enter__(self) -> _BlankLease:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def batches(self) -> Iterator[tuple[I32, NDArray[np.uint64]]]:
        """One batch."""
        yield self._batch


def measure_compute(plan: Sketch) -> Compute:
    """Time of one token of the model over blank memory, at the beginning of a context.

    A model whose resident weights are larger than RESIDENT_CAP is measured with fewer of its layers, of each kind the
    same part, and the time of the others is added by their bytes.
    """
    model, share = _thinned(plan.model, plan.index)
    index = replace(plan.index, experts=_experts_of(model, plan.index))
    backend = planning.load_backend(plan.options, lambda text: None)
    files = ExpertFiles(plan.container, index.experts) if index.experts else None
    layouts = files.layouts if files is not None else planning.no_layouts
    residents = planning.Residents(index, backend, layouts)
    residents.blank_vectors()
    pool = PagePool(pages=1)
    recorder = backend.recorder(max_rows=1, max_outputs=1, page_tokens=pool.page_tokens, pages=1)
    forward, _ = planning.record_forward(recorder, model, residents, replace(plan.options, draft=False))
    for plane in residents.memory():
        plane[:] = FILL
    arena = _expert_memory(files, plan)
    try:
        provider = _BlankExperts(arena) if arena is not None else None
        runner = Runner(forward.program, forward.logits, pool, provider, max_rows=1, max_outputs=1)
        step_s, seconds = _steps(runner, forward.program, model.vocabulary)
        memory = [*residents.memory(), *([arena.view(slot) for slot in range(arena.slots)] if arena else [])]
        rate = MemoryProbe(memory, isa=backend.isa, threads=backend.threads)()
    finally:
        if arena is not None:
            arena.close()
    head_s = seconds.get("head", 0.0)
    more = 1 / share
    return Compute(head_s + (step_s - head_s) * more, seconds.get("experts", 0.0) * more, rate)


def _steps(runner: Runner, program: Program, vocabulary: int) -> tuple[float, Mapping[str, float]]:
    """(seconds of a step, of its classes): those of the median of BATCHES batches of steps."""
    found: list[tuple[float, Mapping[str, float]]] = []
    token = np.zeros(1, np.int32)
    for _ in range(1 + BATCHES):
        sequence = Tokens()
        program.seconds()
        started = time.perf_counter()
        for step in range(STEPS):
            token[0] = step * 7919 % vocabulary
            runner.step([Work(sequence, token)])
        elapsed = time.perf_counter() - started
        found.append((elapsed / STEPS, {name: value / STEPS for name, value in program.seconds().items()}))
        runner.pool.release(sequence)
    return sorted(found[1:], key=lambda batch: batch[0])[BATCHES // 2]


def _thinned(model: Model, index: ModelIndex) -> tuple[Model, float]:
    """The model with fewer layers where its resident weights exceed the cap, and the part of all layers' bytes that
    is left."""
    sizes = [sum(layer_bytes(layer, index).values()) for layer in model.layers]
    total = sum(sizes)
    if total <= RESIDENT_CAP:
        return model, 1.0
    step = -(-total // RESIDENT_CAP)
    kinds: dict[bool, list[int]] = {}
    for number, layer in enumerate(model.layers):
        kinds.setdefault(isinstance(layer.mlp, MoE), []).append(number)
    kept = sorted(number for numbers in kinds.values() for number in numbers[::step])
    return replace(model, layers=tuple(model.layers[n] for n in kept)), sum(sizes[n] for n in kept) / total


def _experts_of(model: Model, index: ModelIndex) -> dict[int, tuple[Expert, ...]]:
    return {layer.mlp.layer: index.experts[layer.mlp.layer] for layer in model.layers if isinstance(layer.mlp, MoE)}


def _expert_memory(files: ExpertFiles | None, plan: Sketch) -> Arena | None:
    """Slots for as many experts as the model has, at most EXPERT_CAP bytes of them, filled; None without experts."""
    if files is None or not plan.moe:
        return None
    widest = max(files.slot_nbytes(layer) for layer in files.layers)
    top_k = max(block.router.top_k for block in plan.moe)
    arena = Arena(max(top_k, min(plan.experts, EXPERT_CAP // widest)), widest)
    for slot in range(arena.slots):
        arena.view(slot)[:] = FILL
    return arena


def measure_reads(plan: Sketch) -> Reads | None:
    """Read missing experts as a run would: 1 to top-k of one layer at a time, never one that is in memory.

    None where the model has no experts, or where its files are not here in full. Raises ReadFailed.
    """
    if plan.files is None or not plan.moe or not plan.complete:
        return None
    top_k = max(block.router.top_k for block in plan.moe)
    blocks = plan.moe[:: max(1, len(plan.moe) // READ_LAYERS)]
    experts = {block.layer: plan.index.experts[block.layer] for block in blocks}
    files = ExpertFiles(plan.container, experts, blocks=plan.reading.direct_shards)
    slots = {block.layer: min(top_k, max(1, block.router.experts - top_k)) for block in blocks}
    rng = np.random.Generator(np.random.PCG64(1))
    points = sorted({1, 2, max(1, top_k // 2), top_k})
    before = physical_read_bytes()
    total = 0
    found: dict[int, float] = {0: 0.0}
    with planning.open_store(files, slots, WORKING_SLOTS, plan.reading, plan.notices) as store:
        for count in points:
            times = _requests(store, blocks, count, rng)
            found[count] = sum(times) / len(times)
        total = store.counters.total().read_bytes
    after = physical_read_bytes()
    storage = min(1.0, (after - before) / total) if before is not None and after is not None and total else None
    seconds = np.interp(np.arange(top_k + 1), sorted(found), [found[count] for count in sorted(found)])
    mean = sum(e.nbytes for block in blocks for e in plan.index.experts[block.layer]) // sum(
        block.router.experts for block in blocks
    )
    return Reads(tuple(float(value) for value in seconds), mean, storage)


def _requests(store: ExpertStore, blocks: Sequence[MoE], count: int, rng: np.random.Generator) -> list[float]:
    """Seconds of requests for `count` experts that are not in memory."""
    times: list[float] = []
    end = time.perf_counter() + READ_SECONDS
    while len(times) < len(blocks) or (time.perf_counter() < end and len(times) < MOST_REQUESTS):
        block = blocks[len(times) % len(blocks)]
        absent = np.setdiff1d(np.arange(block.router.experts), store.resident(block.layer))
        wanted = rng.choice(absent, min(count, len(absent)), replace=False).astype(np.int32)
        start = time.perf_counter()
        with store.acquire(block.layer, wanted) as lease:
            for _ in lease.batches():
                pass
        times.append(time.perf_counter() - start)
    return times
