"""A trial of a model's own program over memory without its weights: the time of a token with all experts there.

Knows sketches and programs; must not judge what it measures. Kernels take as long for one value as for another, so
planes hold a constant and no weight is read. What reading experts adds is measured in trial_reads.py.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from picaflor.backends.api import I32, ExpertProvider, Program
from picaflor.container.types import Expert
from picaflor.models.base import Model
from picaflor.models.blocks.moe import MoE
from picaflor.models.loading import ModelIndex
from picaflor.runtime import plan as planning
from picaflor.runtime.bench import MemoryProbe
from picaflor.runtime.kvcache import PagePool
from picaflor.runtime.kvcache import Sequence as Tokens
from picaflor.runtime.residents import Residents
from picaflor.runtime.runner import Runner, Work
from picaflor.runtime.sketch import Sketch, layer_bytes
from picaflor.store.arena import Arena
from picaflor.store.reader import ExpertFiles

RESIDENT_CAP = 768 << 20
EXPERT_CAP = 512 << 20
STEPS = 16
BATCHES = 5
FILL = 0x3C
"""A byte that makes an ordinary number in every format: 0.0115 as float32 and bfloat16, 1.06 as float16."""


@dataclass(frozen=True, slots=True)
class Compute:
    """Seconds of one token with all experts in memory. `experts_s` is the part of the routed experts."""

    step_s: float
    experts_s: float
    memory_bytes_per_s: float


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


class Blank:
    """A recorded program over blank weights, one row at a time."""

    def __init__(self, plan: Sketch, model: Model) -> None:
        index = replace(plan.index, experts=_experts_of(model, plan.index))
        self.model = model
        self.backend = planning.load_backend(plan.options, lambda text: None)
        blocks = plan.reading.direct_shards
        self.files = ExpertFiles(plan.container, index.experts, blocks=blocks) if index.experts else None
        layouts = self.files.layouts if self.files is not None else planning.no_layouts
        self.residents = Residents(index, self.backend, layouts)
        self.residents.blank_vectors()
        self._pool = PagePool(pages=1)
        recorder = self.backend.recorder(max_rows=1, max_outputs=1, page_tokens=self._pool.page_tokens, pages=1)
        self.forward, _ = planning.record_forward(recorder, model, self.residents, replace(plan.options, draft=False))
        for plane in self.residents.memory():
            plane[:] = FILL

    def runner(self, experts: ExpertProvider | None) -> Runner:
        """Steps of the program with these experts."""
        return Runner(self.forward.program, self.forward.logits, self._pool, experts, max_rows=1, max_outputs=1)

    @contextmanager
    def experts(self, plan: Sketch) -> Iterator[tuple[ExpertProvider | None, list[NDArray[np.uint8]]]]:
        """Blank experts for as long as the context lasts, and their memory."""
        arena = _expert_memory(self.files, plan)
        if arena is None:
            yield None, []
            return
        try:
            yield _BlankExperts(arena), [arena.view(slot) for slot in range(arena.slots)]
        finally:
            arena.close()

    def step_s(self, plan: Sketch) -> float:
        """Seconds of a step with all experts in memory."""
        with self.experts(plan) as (provider, _):
            return _steps(self.runner(provider), self.forward.program, self.model.vocabulary)[0]


def measure_compute(plan: Sketch) -> Compute:
    """Time of one token of the model over blank memory, at the beginning of a context.

    A model whose resident weights are larger than RESIDENT_CAP is measured with fewer of its layers, of each kind the
    same part, and the time of the others is added by their bytes.
    """
    model, share = thinned(plan.model, plan.index)
    blank = Blank(plan, model)
    with blank.experts(plan) as (provider, memory):
        runner = blank.runner(provider)
        step_s, seconds = _steps(runner, blank.forward.program, model.vocabulary)
        planes = [*blank.residents.memory(), *memory]
        rate = MemoryProbe(planes, isa=blank.backend.isa, threads=blank.backend.threads)()
        planes.clear()
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


def thinned(model: Model, index: ModelIndex) -> tuple[Model, float]:
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
