"""The engine: one loaded model that continues texts and says what it did.

Knows the plan, the token loop and the record; must not know any concrete backend or family, or how a command prints.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from picaflor.backends.api import I32, Chance, DeviceRates, ExpertTraffic
from picaflor.errors import ContextExceeded, UsageError
from picaflor.formats.base import F32
from picaflor.models.blocks.moe import MoE
from picaflor.runtime import builtin
from picaflor.runtime.bench import DiskLimit, MemoryProbe, ReadCount
from picaflor.runtime.damage import Damage, compare
from picaflor.runtime.diskbench import ExpertProbe
from picaflor.runtime.generate import Generation, SamplingOptions, TextPiece
from picaflor.runtime.kvcache import Sequence
from picaflor.runtime.plan import EngineOptions, Plan, build, formats_in_words
from picaflor.runtime.residents import Progress
from picaflor.runtime.runner import Runner, Work, checked_ids
from picaflor.runtime.sampler import Sampling
from picaflor.runtime.sketch import token_bytes
from picaflor.runtime.tokenizer import StopSet, Tokenizer, stop_set
from picaflor.store.budget import process_memory
from picaflor.store.counters import LayerCounters
from picaflor.store.mapped import MappedStore
from picaflor.store.reader import native_pool
from picaflor.store.store import ExpertStore
from picaflor.telemetry.names import TIME_CLASSES
from picaflor.telemetry.process import physical_read_bytes
from picaflor.telemetry.record import Memory, Phase, Record

__all__ = ["Engine", "EngineOptions", "SamplingOptions", "TextPiece"]


@dataclass(slots=True)
class _Counts:
    """Counters at one moment; a phase is the difference of two."""

    seconds: dict[str, float] = field(default_factory=dict)
    store: LayerCounters = field(default_factory=LayerCounters)
    busy_s: float = 0.0
    storage_bytes: int | None = None
    device: ExpertTraffic = field(default_factory=ExpertTraffic)


class Engine:
    """One loaded model. Not for several threads at once; close it, or use it in a `with` block."""

    def __init__(self, plan: Plan, *, name: str, load_s: float, warnings: list[str], progress: Progress) -> None:
        self.plan = plan
        self.name = name
        self.context = plan.context
        self.finish_reason = ""
        self.chat_template = plan.chat_template
        self.runner = Runner(
            plan.forward.program,
            plan.forward.logits,
            plan.pool,
            plan.store,
            max_rows=plan.max_rows,
            max_outputs=plan.max_outputs,
            lossy=plan.lossy,
            resident=plan.store.resident if plan.store is not None else _none_resident,
        )
        self._load_s = load_s
        self._warnings = warnings
        self._progress = progress
        self._tokenizer = plan.tokenizer
        self._stops: StopSet | None = None
        self._cached = Sequence()
        self._cached_tokens: list[int] = []
        self._sampling: SamplingOptions | None = None
        self._prefill = Phase()
        self._decode = Phase()
        self._first_token_s = 0.0
        self._seconds: dict[str, float] = {}
        self._memory_limit: float | None = None
        self._link_rate: float | None = None
        self._host_rate: float | None = None
        self._probes: list[ExpertProbe] = []

    @classmethod
    def open(
        cls,
        path: Path | None,
        options: EngineOptions,
        *,
        progress: Progress = lambda stage, done, total: None,
        warn: Callable[[str], None] = lambda text: None,
    ) -> Engine:
        """Load a model folder, or the built-in model for None. Raises what errors.py names, before anything is read
        where it can be known."""
        start = time.perf_counter()
        warnings: list[str] = []

        def note(text: str) -> None:
            warnings.append(text)
            warn(text)

        folder = path if path is not None else builtin.folder()
        plan = build(folder, options, progress=progress, warn=note)
        try:
            name = builtin.NAME if path is None else folder.resolve().name
            return cls(plan, name=name, load_s=time.perf_counter() - start, warnings=warnings, progress=progress)
        except BaseException:
            plan.close()
            raise

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Free memory and files."""
        for probe in self._probes:
            probe.close()
        self.plan.close()

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises BadTokenizer where the folder has none."""
        if self._tokenizer is None:
            model = self.plan.model
            self._tokenizer = Tokenizer.open(self.plan.path, vocabulary=model.vocabulary, family=model.family)
            self._tokenizer.most_tokens = self.context
        return self._tokenizer

    @property
    def stops(self) -> StopSet:
        """The tokens that end an answer."""
        if self._stops is None:
            self._stops = stop_set(
                self.tokenizer,
                self.plan.container.config(),
                self.plan.container.side_json("generation_config.json"),
                render=self.chat_template.render_turns if self.chat_template is not None else None,
                vocabulary=self.plan.model.vocabulary,
            )
        return self._stops

    @property
    def stop_names(self) -> tuple[str, ...]:
        """The tokens that end an answer, as texts, by id."""
        return tuple(
            self.tokenizer.decode([number], keep_special=True) or f"#{number}" for number in sorted(self.stops.ids)
        )

    @property
    def description(self) -> str:
        """Family, size and formats in words."""
        model = self.plan.model
        return (
            f"{model.family}, {self.parameters / 1e6:.0f} M parameters, {len(model.layers)} layers, "
            f"{formats_in_words(self.plan.index)}"
        )

    @property
    def threads(self) -> int:
        """Threads that multiply."""
        return self.plan.backend.threads

    @property
    def tuned(self) -> str:
        """The options that tune has kept and that this run uses, in words; empty if none."""
        return self.plan.tuned

    @property
    def isa(self) -> str:
        """Instruction set of the kernels."""
        return self.plan.backend.isa

    @property
    def vocabulary(self) -> int:
        """Number of tokens that the model knows."""
        return self.plan.model.vocabulary

    @property
    def parameters(self) -> int:
        """Parameters in all: resident matrices, vectors and experts; a tied head counts once."""
        index = self.plan.index
        distinct = {matrix.spans: matrix.rows * matrix.cols for matrix in index.matrices.values()}
        experts = sum(m.rows * m.cols for layer in index.experts.values() for e in layer for m in e.matrices)
        return sum(distinct.values()) + experts + sum(info.shape[0] for info in index.vectors.values())

    def generate(
        self, prompt: Ordered[int], options: SamplingOptions, *, cancel: threading.Event | None = None
    ) -> Iterator[TextPiece]:
        """Continue a prompt; text comes as it is certain. Afterwards `finish_reason` and `record()` tell the rest.

        What the cache still holds of an earlier call is reused up to the first token that differs; by the exactness
        contract that changes no token. Raises ContextExceeded for a prompt that leaves no room for an answer.
        """
        ids = self._checked(prompt)
        generation = self._begin(ids, options, cancel)
        start_counts = self._counts()
        started = time.perf_counter()
        middle: list[_Counts] = []
        generation.on_prefilled = lambda: middle.append(self._counts())
        before = self._cached.length
        try:
            yield from generation
        finally:
            self.finish_reason = generation.finish_reason
            end_counts = self._counts()
            self._cached_tokens = [*ids.tolist(), *generation.tokens][: self._cached.length]
            prefill_end = middle[0] if middle else end_counts
            clock = generation.clock
            self._first_token_s = clock.first_token_s
            prefill_s = clock.prefill_s or time.perf_counter() - started
            self._prefill = self._phase(start_counts, prefill_end, len(ids) - before, prefill_s, (), 0.0)
            steps = tuple(clock.steps)
            wall = clock.decode_s + clock.sampling_s
            self._decode = self._phase(prefill_end, end_counts, len(steps), wall, steps, clock.sampling_s)

    def _checked(self, prompt: Ordered[int]) -> I32:
        if not len(prompt):
            raise UsageError("the prompt is empty")
        if len(prompt) >= self.context:
            raise ContextExceeded(
                f"the prompt has {len(prompt)} tokens and the context holds {self.context}, answer included: "
                f"shorten it or raise --ctx (this model allows up to {self.plan.model.max_positions})"
            )
        return checked_ids(prompt, self.vocabulary)

    def _begin(self, ids: I32, options: SamplingOptions, cancel: threading.Event | None) -> Generation:
        self._sampling = options
        sampling = Sampling(options.temperature, options.top_p, options.seed)
        self.plan.pool.truncate(self._cached, self._common_prefix(ids))
        return Generation(
            self.runner,
            self._cached,
            ids,
            options,
            draw=lambda position: self.runner.draw(self.plan.backend, [sampling.chance(position)])[0],
            decoder=self.tokenizer.stream(),
            stop_tokens=self.stops.ids,
            context=self.context,
            progress=lambda done, total: self._progress("reading the prompt", done, total),
            cancelled=cancel.is_set if cancel is not None else _never,
        )

    def _common_prefix(self, ids: I32) -> int:
        """Positions of the cache that this prompt shares; the last prompt token is always computed anew."""
        shared = 0
        for mine, cached in zip(ids[:-1].tolist(), self._cached_tokens, strict=False):
            if mine != cached:
                break
            shared += 1
        return min(shared, self._cached.length)

    def new_sequence(self) -> Sequence:
        """An empty sequence for direct use of `runner`; give its pages back with `plan.pool.release`."""
        return Sequence()

    def forward_logits(self, ids: I32) -> Iterator[F32]:
        """Logits of every position of a fresh sequence, float32 `[rows, vocabulary]` at a time.

        Raises ContextExceeded, and UsageError for an id that the model does not know.
        """
        if len(ids) > self.context:
            raise ContextExceeded(f"{len(ids)} tokens and the context holds {self.context}: raise --ctx")
        known = checked_ids(ids, self.vocabulary)
        self._drop_cache()
        sequence = Sequence()
        try:
            yield from self.runner.all_logits(sequence, known)
        finally:
            self.plan.pool.release(sequence)

    def replay_logits(self, prompt: Ordered[int], tokens: Ordered[int], *, exact: bool) -> F32:
        """Logits after each of the tokens that follow a prompt, float32 `[tokens, vocabulary]`.

        Decoded one by one; with `exact` no lossy mode acts. Raises UsageError for an id that the model does not know.
        """
        start_ids, fed = checked_ids(prompt, self.vocabulary), checked_ids(tokens, self.vocabulary)
        self._drop_cache()
        sequence = Sequence()
        rows = np.empty((len(fed), self.vocabulary), np.float32)
        try:
            self.runner.prefill(sequence, start_ids)
            for index in range(len(fed)):
                work = Work(sequence, fed[index : index + 1], decoded=not exact)
                rows[index] = self.runner.step([work])[0]
        finally:
            self.plan.pool.release(sequence)
        return rows

    def measure_damage(self, prompt: Ordered[int], tokens: Ordered[int]) -> Damage:
        """What the active lossy modes do to the logits after these tokens."""
        counts = self.plan.lossy.counts
        true = self.replay_logits(prompt, tokens, exact=True)
        chosen, dropped = counts.chosen, counts.dropped
        found = self.replay_logits(prompt, tokens, exact=False)
        share = (counts.dropped - dropped) / max(1, counts.chosen - chosen)
        return compare(true, found, dropped=share)

    def decode_replay(self, prompt: Ordered[int], tokens: Ordered[int]) -> list[float]:
        """Seconds of each decode step when these tokens follow the prompt, whatever the model would have chosen.

        Every configuration sees the same tokens, so the same experts. Where a device draws tokens a step has its draw,
        of the likeliest. `record()` tells about these steps. Raises UsageError for an id that the model does not know.
        """
        start_ids, fed = checked_ids(prompt, self.vocabulary), checked_ids(tokens, self.vocabulary)
        self._drop_cache()
        sequence = Sequence()
        counts = self._counts()
        steps: list[float] = []
        try:
            start = time.perf_counter()
            self.runner.fill(sequence, start_ids)
            self.runner.wait()
            prefill_s = time.perf_counter() - start
            middle = self._counts()
            for index in range(len(fed)):
                begin = time.perf_counter()
                self.runner.advance([Work(sequence, fed[index : index + 1], decoded=True)])
                if self.runner.draws_there:
                    self.runner.draw(self.plan.backend, [Chance(0.0, 1.0, 0.0)])
                steps.append(time.perf_counter() - begin)
        finally:
            self.plan.pool.release(sequence)
        self._prefill = self._phase(counts, middle, len(prompt), prefill_s, (), 0.0)
        self._decode = self._phase(middle, self._counts(), len(steps), sum(steps), tuple(steps), 0.0)
        self._first_token_s = prefill_s
        self.finish_reason = "length"
        return steps

    def _drop_cache(self) -> None:
        self.plan.pool.release(self._cached)
        self._cached_tokens = []

    def bytes_per_token(self) -> dict[str, int]:
        """Bytes of weights that one decoded token multiplies, by class; of the embedding only a row."""
        return token_bytes(self.plan.model, self.plan.index)

    def weight_memory(self) -> list[NDArray[np.uint8]]:
        """The weights that are in memory now; for measuring: the bytes stay mapped while the model is open."""
        store = self.plan.store
        return [*self.plan.resident_memory, *(store.memory() if store is not None else [])]

    def memory_probe(self) -> Callable[[], float]:
        """How a bench measures memory beside decoding, in bytes per second: a device's own, or what the weights lie in.

        Raises UsageError for a device that does not tell.
        """
        backend = self.plan.backend
        if not backend.on_device:
            return MemoryProbe(self.weight_memory(), isa=self.isa, threads=self.threads)
        measure: Callable[[], DeviceRates] | None = getattr(backend, "measure_rates", None)
        if measure is None:
            raise UsageError(
                f"speed is compared with what memory allows, and backend {backend.name} does not tell the rate of its"
                " device's memory; accepted: cpu, cuda, rocm"
            )
        return lambda: measure().memory

    def disk_limit(self) -> DiskLimit | None:
        """How a bench measures the disk beside decoding, None for a model without experts or with mapped ones.

        A pool of its own reads, with memory for a few experts, until the model is closed.
        """
        store, reading = self.plan.store, self.plan.reading
        if not isinstance(store, ExpertStore):
            return None
        probe = ExpertProbe(
            store.files,
            reading.sources(self.plan.container),
            native_pool(reading.depth, engine=reading.engine),
            depth=reading.depth,
        )
        self._probes.append(probe)
        return DiskLimit(
            rate=probe,
            counted=lambda: ReadCount(store.counters.total().read_bytes, physical_read_bytes()),
            decoded=lambda: self._decode.read_bytes - self._decode.wasted_bytes,
        )

    def _counts(self) -> _Counts:
        store = self.plan.store
        counts = _Counts(store=store.counters.total() if store is not None else LayerCounters())
        for name, seconds in self.plan.forward.program.seconds().items():
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds
        counts.seconds = dict(self._seconds)
        counts.busy_s = store.busy_s() if store is not None else 0.0
        counts.storage_bytes = physical_read_bytes()
        counts.device = self._traffic()
        return counts

    def _traffic(self) -> ExpertTraffic:
        told: Callable[[], ExpertTraffic] | None = getattr(self.plan.backend, "traffic", None)
        return ExpertTraffic() if told is None else told()

    def _phase(
        self, start: _Counts, end: _Counts, tokens: int, wall_s: float, steps: tuple[float, ...], sampling_s: float
    ) -> Phase:
        seconds = {
            name: end.seconds.get(name, 0.0) - start.seconds.get(name, 0.0)
            for name in end.seconds
            if name in TIME_CLASSES
        }
        seconds["read_wait"] = end.store.wait_s - start.store.wait_s
        if self.plan.backend.on_device:  # its clock runs on while it has nothing to do
            seconds["experts"] = max(0.0, seconds.get("experts", 0.0) - seconds["read_wait"])
        seconds["sampling"] = sampling_s
        service_s = end.store.service_s - start.store.service_s
        known = start.storage_bytes is not None and end.storage_bytes is not None
        return Phase(
            tokens=tokens,
            wall_s=wall_s,
            step_s=steps,
            seconds=seconds,
            hits_pinned=end.store.pinned - start.store.pinned,
            hits_lru=end.store.lru - start.store.lru,
            hits_prefetched=end.store.prefetched - start.store.prefetched,
            prefetch_late=end.store.late - start.store.late,
            prefetch_wasted=end.store.wasted - start.store.wasted,
            wasted_bytes=end.store.wasted_bytes - start.store.wasted_bytes,
            hits_device=end.device.hits - start.device.hits,
            on_host=end.device.host - start.device.host,
            on_host_bytes=end.device.host_bytes - start.device.host_bytes,
            sent=end.device.sent - start.device.sent,
            sent_bytes=end.device.sent_bytes - start.device.sent_bytes,
            joined=end.store.joined - start.store.joined,
            loads=end.store.loaded - start.store.loaded,
            read_bytes=end.store.read_bytes - start.store.read_bytes,
            read_service_s=service_s,
            read_busy_s=end.busy_s - start.busy_s,
            weight_bytes=len(steps) * sum(self.bytes_per_token().values()),
            storage_bytes=(end.storage_bytes or 0) - (start.storage_bytes or 0) if known else None,
        )

    def record(self) -> Record:
        """The figures of the last generation."""
        plan, sampling = self.plan, self._sampling
        moe = [layer.mlp for layer in plan.model.layers if isinstance(layer.mlp, MoE)]
        memory = process_memory()
        store = plan.store
        # Pages of mapped files in memory (tmpfs) are shared ones to the system; they are no memory of ours.
        viewed = memory.shared if memory is not None and isinstance(store, MappedStore) else 0
        spared = store.spared_reads if isinstance(store, ExpertStore) else {}
        resident = [len(store.resident(block.layer)) for block in moe] if store is not None else []
        return Record(
            model=self.name,
            description=self.description,
            parameters=self.parameters,
            backend=plan.backend.name,
            isa=plan.backend.isa,
            precision=plan.backend.precision,
            threads=plan.backend.threads,
            threads_source=plan.threads_source,
            context=self.context,
            seed=sampling.seed if sampling is not None else None,
            temperature=sampling.temperature if sampling is not None else None,
            top_p=sampling.top_p if sampling is not None else None,
            finish_reason=self.finish_reason,
            load_s=self._load_s,
            first_token_s=self._first_token_s,
            prefill=self._prefill,
            decode=self._decode,
            memory=Memory(
                budget_bytes=plan.ledger.limit.nbytes,
                budget_source=f"{plan.ledger.limit.name}: {plan.ledger.limit.detail}",
                anonymous_bytes=memory.anonymous - viewed if memory else None,
                locked_bytes=memory.locked if memory else None,
                mapped_bytes=memory.file + viewed if memory else None,
                peak_resident_bytes=memory.peak if memory else None,
                resident_experts=sum(resident),
                resident_expert_bytes=self._expert_bytes(),
                pinned_experts=sum(count for count, block in zip(resident, moe, strict=False) if self._pinned(block)),
                all_experts=sum(block.router.experts for block in moe),
                all_expert_bytes=sum(e.nbytes for block in moe for e in plan.index.experts[block.layer]),
                expert_slots=max(plan.ledger.slots.values(), default=0),
                device_experts=self._traffic().held,
            ),
            moe_layers=len(moe),
            experts_per_token=max((block.router.top_k for block in moe), default=0),
            readers=plan.read_threads if store is not None else 0,
            prefetch=store.prefetch_in_words if isinstance(store, ExpertStore) else "",
            physical_read_bytes=physical_read_bytes(),
            memory_limit_bytes_per_s=self._memory_limit,
            link_bytes_per_s=self._link_rate,
            host_memory_bytes_per_s=self._host_rate,
            kernels=dict(plan.backend.table.engaged),
            fallbacks={**plan.backend.table.fallbacks, **spared},
            lossy=plan.lossy.summary(),
            warnings=tuple(self._warnings),
            devices=self._devices(),
        )

    def _devices(self) -> tuple[str, ...]:
        shares: Callable[[], tuple[str, ...]] | None = getattr(self.plan.backend, "shares", None)
        return () if shares is None else shares()

    def _pinned(self, block: MoE) -> bool:
        store = self.plan.store
        return store is not None and store.slots[block.layer] == block.router.experts

    def measure_memory_limit(self) -> None:
        """Read the weights once with plain loads, so that `record()` can tell arithmetic from memory. A device is asked
        for the rates of its own memory and of the way there; one that does not tell leaves both unmeasured. Where the
        CPU computed experts beside a device, the host's memory is read too."""
        if self.plan.backend.on_device:
            measure: Callable[[], DeviceRates] | None = getattr(self.plan.backend, "measure_rates", None)
            if measure is not None:
                rates = measure()
                self._memory_limit, self._link_rate = rates.memory, rates.link
            if self._traffic().host and self.plan.store is not None:
                self._host_rate = self._read_rate(self.plan.store.memory(), "auto")
        else:
            self._memory_limit = self._read_rate(self.weight_memory(), self.isa)

    def _read_rate(self, memory: Ordered[NDArray[np.uint8]], isa: str) -> float | None:
        probe = MemoryProbe(memory, isa=isa, threads=self.threads)
        return probe() if probe.nbytes else None

    def _expert_bytes(self) -> int:
        store = self.plan.store
        if store is None:
            return 0
        experts = self.plan.index.experts
        return sum(experts[layer][number].nbytes for layer in store.files.layers for number in store.resident(layer))


def _never() -> bool:
    return False


def _none_resident(layer: int) -> tuple[int, ...]:
    return ()
