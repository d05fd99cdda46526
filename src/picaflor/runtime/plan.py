"""From a model folder and options to everything that generation needs, decided before a weight is read.

The only module that loads a concrete backend, by name. Order: headers, config, family, formats, buffers, ledger (which
may refuse), and only then the bytes.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from picaflor.backends.api import ExpertLayout, Recorder
from picaflor.container.index import Container
from picaflor.container.types import Expert, Matrix
from picaflor.errors import BadTokenizer, UnsupportedConfig, UnsupportedKernel, UsageError
from picaflor.formats import REGISTRY
from picaflor.formats.kv import get as kv_format
from picaflor.models.base import DraftForward, Forward, Model, Scope
from picaflor.models.blocks.moe import MoE
from picaflor.models.config import Notices
from picaflor.models.loading import ModelIndex, open_model
from picaflor.runtime import checks, sidefile, tune
from picaflor.runtime.chat import ChatTemplate
from picaflor.runtime.chunks import SMALLEST, ExpertSizes, Sized, most_rows, settle
from picaflor.runtime.devices import automatic_choice, usable_devices
from picaflor.runtime.history import History, Learning, history_file
from picaflor.runtime.kvcache import PAGE_TOKENS, PagePool
from picaflor.runtime.lossy import Lossy
from picaflor.runtime.reading import Reading, ReadOptions, decide_reading, room_for
from picaflor.runtime.residents import HostBackend, Progress, Residents
from picaflor.runtime.spread import layer_bytes
from picaflor.runtime.tokenizer import FILE as TOKENIZER_FILE
from picaflor.runtime.tokenizer import Tokenizer
from picaflor.store.ahead import AHEAD_SLOTS
from picaflor.store.budget import Item, Ledger, fit, memory_sources, process_memory
from picaflor.store.mapped import MappedStore, lies_in_memory
from picaflor.store.policy.base import LayerCache, PolicyFactory
from picaflor.store.policy.choose import policy_nbytes
from picaflor.store.reader import ExpertFiles, native_pool
from picaflor.store.store import READ_THREADS, WORKING_SLOTS, ExpertStore

BACKENDS: Mapping[str, str] = {"cpu": "cpu", "cuda": "cuda", "rocm": "cuda", "metal": "metal", "vulkan": "vulkan"}
"""By name, the package under `backends` that has it."""
DEFAULT_CONTEXT = 4096
LOSSY_BACKENDS = ("cpu",)
NUMBERED = ("cuda", "rocm")
"""Backends whose devices have numbers, and that compute on several at once."""
MAX_LOGIT_BYTES = 64 << 20
"""Most memory for one step's logits; a step gives fewer rows of logits where the vocabulary is large."""
RUNTIME_BYTES = 16 << 20
"""For thread stacks, Python objects made while running, and allocator slack."""

FAST_WARNING = (
    "--precision fast: activations in one int8 plane; the built-in model loses 0.0002 nat per token by it (KL 0.0017 "
    "to exact) and another token is likeliest at 2.1 % of positions; another model may lose more: picaflor eval tells"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What a user may choose; None means that the plan decides. Sizes in bytes.

    `policy`: which experts stay in memory (`store.policy.choose`). `usage`: the file of the usage history, else one in
    the folder of `state`; none without either. `record_routes`: file for what was asked of the expert store.
    `sequences` is how many sequences of `context` tokens the key-value cache holds at once. `tuned`: what tune kept, by
    machine and model; it fills in what is left to the plan. `prefetch`: auto, on or off. `device`: auto, all, or
    numbers of devices with commas between them.
    """

    ram_bytes: int | None = None
    expert_slots: int | None = None
    context: int | None = None
    threads: int | None = None
    backend: str = "auto"
    precision: str = "standard"
    isa: str = "auto"
    prefill_chunk: int | None = None
    router_top_p: float = 1.0
    expert_budget: int | None = None
    read_threads: int | None = None
    group_size: int | None = None
    latent_norm_eps: float | None = None
    vram_bytes: int | None = None
    device: str = "auto"
    strict: bool = False
    disable: tuple[str, ...] = ()
    fail_after: int | None = None
    sequences: int = 1
    draft: bool = False
    direct: str = "auto"
    read_engine: str = "auto"
    queue_depth: int | None = None
    mirrors: tuple[Path, ...] = ()
    mapped: str = "auto"
    split: tuple[Path, ...] = ()
    tuned: Mapping[str, Any] = field(default_factory=dict)
    policy: str = "auto"
    usage: Path | None = None
    state: Path | None = None
    record_routes: Path | None = None
    prefetch: str = "auto"


@dataclass(slots=True)
class Plan:
    """A model that is ready to run. Whoever holds it closes the store, then the container.

    `tokenizer` is None only where the folder has no file for one.
    """

    path: Path
    container: Container
    model: Model
    index: ModelIndex
    backend: HostBackend
    forward: Forward
    draft: DraftForward | None
    store: ExpertStore | MappedStore | None
    ledger: Ledger
    pool: PagePool
    context: int
    max_rows: int
    max_outputs: int
    read_threads: int
    reading: Reading
    threads_source: str
    notices: Notices
    tokenizer: Tokenizer | None
    chat_template: ChatTemplate | None
    resident_memory: list[NDArray[np.uint8]]
    learning: Learning
    lossy: Lossy
    tuned: str = ""

    def close(self) -> None:
        """Keep what was learned, free the experts' memory and close all files."""
        if self.store is not None:
            self.learning.end(self.store)
            self.store.close()
        self.reading.close()
        self.container.close()


def load_backend(options: EngineOptions, notice: Callable[[str], None]) -> HostBackend:
    """The backend by name; `notice` gets a line for each fallback. Raises UnsupportedKernel naming what there is."""
    name = "cpu" if options.backend == "auto" else options.backend
    if name not in BACKENDS:
        raise UnsupportedKernel(f"backend {name} is not in this version; accepted: auto, {', '.join(BACKENDS)}")
    try:
        module: Any = importlib.import_module(f"picaflor.backends.{BACKENDS[name]}.backend")
    except (ImportError, OSError, RuntimeError) as error:  # of a library that is missing, or there and not loadable
        raise UnsupportedKernel(f"backend {name} cannot start: {' '.join(str(error).split())}") from error
    device: dict[str, Any] = {} if name == "cpu" else {"backend": name, "vram_bytes": options.vram_bytes}
    if name in NUMBERED:
        device["device"] = options.device
    elif options.device != "auto" and options.backend != "auto":
        have = ", ".join(NUMBERED)
        raise UsageError(f"--device {options.device}: backend {name} has no devices to choose from; {have} have")
    if name == "metal" and options.vram_bytes is None:
        device["vram_bytes"] = options.ram_bytes  # one memory for host and device
    backend: HostBackend = module.open_backend(
        threads=options.threads,
        precision=options.precision,
        isa=options.isa,
        disable=options.disable,
        strict=options.strict,
        notice=notice,
        fail_after=options.fail_after,
        **device,
    )
    return backend


def package_of(backend: str) -> str:
    """The package under `backends` that has a backend."""
    return BACKENDS[backend]


def backend_part(name: str, part: str) -> Any:
    """A module of a backend by name, for what measures the backend itself."""
    return importlib.import_module(f"picaflor.backends.{name}.{part}")


def _started(options: EngineOptions, model: Model, index: ModelIndex, notices: Notices) -> HostBackend:
    """The backend that was asked for. `auto` is what tune found faster, told in one line; one that does not start then
    is told too, and the CPU computes."""
    if options.backend != "auto":
        return load_backend(options, notices.note)
    measured = tune.device_gain(options, model, index)
    wanted = tune.chosen_backend(options, model, index)
    if wanted in usable_devices():
        try:
            backend = load_backend(replace(options, backend=wanted), notices.note)
        except UnsupportedKernel as error:
            notices.tell(f"--backend auto is the CPU: {error}")
            return load_backend(options, notices.note)
        notices.tell(automatic_choice(measured=measured, chosen=wanted))
        return backend
    if choice := automatic_choice(measured=measured):
        notices.tell(choice)
    return load_backend(options, notices.note)


def build(path: Path, options: EngineOptions, *, progress: Progress, warn: Callable[[str], None]) -> Plan:
    """Open, check, plan and load a model. Raises what errors.py names; nothing stays open then."""
    checks.check_files(path, options)
    container = Container.open(path, extra_dirs=options.split)
    store: ExpertStore | MappedStore | None = None
    try:
        notices = Notices(strict=options.strict, warn=warn)
        if options.precision == "fast":
            notices.tell(FAST_WARNING)
        for text in container.notes:
            notices.note(text)
        model, index = open_model(
            container,
            overrides=_overrides(options),
            context=options.context or DEFAULT_CONTEXT,
            group_size=options.group_size,
            notices=notices,
        )
        checks.check_latents(options, model)
        checks.check_end_tokens(container, model)
        asked, (options, tuned) = options, tune.applied(options, model, index, notices)
        checks.tell_idle(asked, options, index, notices)
        plan = _assemble(path, container, model, index, options, notices, progress)
        plan.tuned = tuned
        if options.threads != asked.threads:
            plan.threads_source = "tuned"
        store = plan.store
        if store is not None and plan.ledger.all_resident:
            if isinstance(store, ExpertStore):
                checks.tell_settled(asked, notices)
            store.preload(lambda done, total: progress("loading experts", done, total))
        return plan
    except BaseException:
        if store is not None:
            store.close()
        container.close()
        raise


def _overrides(options: EngineOptions) -> Mapping[str, Any]:
    return {} if options.latent_norm_eps is None else {"latent_norm_eps": options.latent_norm_eps}


def _assemble(
    path: Path,
    container: Container,
    model: Model,
    index: ModelIndex,
    options: EngineOptions,
    notices: Notices,
    progress: Progress,
) -> Plan:
    context = context_of(model, options)
    pool = PagePool(pages=options.sequences * -(-context // PAGE_TOKENS))
    # Before the memory is measured, so that the vocabulary is part of what this program holds.
    tokenizer = open_tokenizer(path, model, context)
    chat_template = ChatTemplate.open(path)
    held = process_memory()
    backend = _started(options, model, index, notices)
    experts = {layer: found for layer, found in index.experts.items() if options.draft or layer < len(model.layers)}
    mapped = open_mapped(container, experts, options, on_host=not backend.on_device)
    if mapped is not None:
        _tell_unused(options, notices)
    streamed = {} if mapped is not None else experts
    reading = read_plan(container, streamed, options, held.charged if held else 0, notices)
    files = ExpertFiles(container, streamed, blocks=reading.direct_shards) if streamed else None
    provider = mapped or files
    residents = Residents(index, backend, provider.layouts if provider is not None else no_layouts)
    if spreads := getattr(backend, "place", None):
        notices.tell(spreads(layer_bytes(model, index, tokens=pool.pages * pool.page_tokens, draft=options.draft)))
    residents.read_vectors(container)
    forward, draft, max_rows, max_outputs, ledger = recorded(
        options, model, backend, residents, files, pool, held.charged if held else 0
    )
    if reserve := getattr(backend, "reserve", None):
        reserve(residents.nbytes)
    store: ExpertStore | MappedStore | None = mapped
    learning = _learning(options, model, index, path, notices)
    if files is not None:
        store = open_store(
            files,
            ledger.slots,
            ledger.working_slots,
            reading,
            notices,
            policy=learning.policies(),
            ahead_slots=ledger.ahead_slots,
            prefetch=options.prefetch,
        )
    try:
        residents.read_all(container, progress)
        if store is not None:
            learning.begin(store, model=path.resolve().name, experts_per_token=_experts_per_token(model))
    except BaseException:
        if store is not None:
            store.close()
        raise
    return Plan(
        path=path,
        container=container,
        model=model,
        index=index,
        backend=backend,
        forward=forward,
        draft=draft,
        store=store,
        ledger=ledger,
        pool=pool,
        context=context,
        max_rows=max_rows,
        max_outputs=max_outputs,
        read_threads=reading.depth,
        reading=reading,
        threads_source=threads_source(options, notices),
        notices=notices,
        tokenizer=tokenizer,
        chat_template=chat_template,
        resident_memory=residents.memory(),
        learning=learning,
        lossy=_lossy(options, backend, notices),
    )


def _lossy(options: EngineOptions, backend: HostBackend, notices: Notices) -> Lossy:
    """The lossy modes that were asked for, each named once. Raises UsageError where the backend has none."""
    lossy = Lossy(options.router_top_p, options.expert_budget)
    if lossy.active and backend.name not in LOSSY_BACKENDS:
        have = ", ".join(LOSSY_BACKENDS)
        raise UsageError(f"{lossy.names()[0]} is not in backend {backend.name}; backends that have it: {have}")
    for text in lossy.notices():
        notices.tell(text)
    return lossy


def _learning(options: EngineOptions, model: Model, index: ModelIndex, path: Path, notices: Notices) -> Learning:
    """The usage history and the recording of routes. Raises BadStateFile for a history that was named."""
    file = options.usage or history_file(options.state, model, index, path)
    named = options.usage is not None
    history = History(file, model, index, folder=path, named=named, warn=notices.tell)
    return Learning(history, options.policy, options.record_routes)


def _experts_per_token(model: Model) -> int:
    return max((layer.mlp.router.top_k for layer in model.layers if isinstance(layer.mlp, MoE)), default=1)


def open_mapped(
    container: Container, experts: Mapping[int, Sequence[Expert]], options: EngineOptions, *, on_host: bool
) -> MappedStore | None:
    """The experts as views into their files, where that was asked for or where the files lie in memory; else None."""
    if not experts or not on_host or options.mapped == "off":
        return None
    files = ExpertFiles(container, experts)
    if options.mapped == "auto" and not lies_in_memory(files):
        return None
    return MappedStore(files, experts)


def _tell_unused(options: EngineOptions, notices: Notices) -> None:
    """One line for what was asked for and has no effect on mapped experts."""
    given = {
        "--expert-slots": options.expert_slots is not None,
        "--direct on": options.direct == "on",
        "--mirror": bool(options.mirrors),
        "--policy": options.policy != "auto",
        "--prefetch on": options.prefetch == "on",
    }
    unused = [flag for flag, is_given in given.items() if is_given]
    if unused:
        notices.note(
            f"experts are used where they lie in mapped files, without effect: {', '.join(unused)}; "
            "--mapped off reads experts into slots"
        )


def read_plan(
    container: Container, experts: Mapping[int, Sequence[Expert]], options: EngineOptions, held: int, notices: Notices
) -> Reading:
    """How the experts are read. Raises BadContainer for a mirror that is no copy."""
    if not experts:
        return Reading()
    return decide_reading(
        container,
        experts,
        ReadOptions(
            direct=options.direct,
            engine=options.read_engine,
            threads=options.read_threads,
            depth=options.queue_depth,
            mirrors=options.mirrors,
        ),
        room_for(experts, memory_sources(options.ram_bytes, held=held), options.expert_slots),
        notices=notices,
    )


def threads_source(options: EngineOptions, notices: Notices) -> str:
    """Who set the number of threads; one line where the user asked for more than the process may use at once."""
    granted = backend_part("cpu", "threads").grant()
    if options.threads is None:
        return str(granted)
    if options.threads > granted.count:
        notices.tell(f"--threads {options.threads}: {granted}; threads beyond {granted.count} hold the others up")
    return "--threads"


def open_store(
    files: ExpertFiles,
    slots: Mapping[int, int],
    working_slots: int,
    reading: Reading,
    notices: Notices,
    *,
    policy: PolicyFactory | None = None,
    ahead_slots: int = 0,
    prefetch: str = "off",
) -> ExpertStore:
    """The store of experts, with slots by layer, that reads as was decided."""
    return ExpertStore(
        files,
        slots=slots,
        working_slots=working_slots,
        ahead_slots=ahead_slots,
        prefetch=prefetch,
        policy=policy,
        pool=native_pool(reading.depth, engine=reading.engine, notice=notices.note),
        sources=reading.sources(files.container),
        notice=notices.tell,
    )


def open_tokenizer(path: Path, model: Model, context: int) -> Tokenizer | None:
    """The tokenizer, None where the folder has no file for one."""
    if sidefile.is_absent(path / TOKENIZER_FILE, BadTokenizer):
        return None
    tokenizer = Tokenizer.open(path, vocabulary=model.vocabulary, family=model.family)
    tokenizer.most_tokens = context
    return tokenizer


def no_layouts(layer: int) -> Sequence[ExpertLayout]:
    """Layouts of a model without experts."""
    raise UnsupportedConfig(f"layer {layer} asks for experts and the container has none")


def context_of(model: Model, options: EngineOptions) -> int:
    """Tokens of prompt and answer together. Raises UsageError beyond what the model is made for."""
    if options.context is None:
        return min(DEFAULT_CONTEXT, model.max_positions)
    if options.context > model.max_positions:
        raise UsageError(
            f"--ctx {options.context}: the model is made for at most {model.max_positions} tokens "
            "(max_position_embeddings in config.json)"
        )
    return options.context


def record_forward(
    recorder: Recorder, model: Model, residents: Residents, options: EngineOptions
) -> tuple[Forward, DraftForward | None]:
    """Record the main pass, and with `options.draft` the draft head's."""
    scope = Scope(recorder, residents)
    forward = model.record(scope)
    return forward, model.record_draft(scope) if options.draft else None


def recorded(
    options: EngineOptions,
    model: Model,
    backend: HostBackend,
    residents: Residents,
    files: ExpertFiles | None,
    pool: PagePool,
    held: int,
) -> tuple[Forward, DraftForward | None, int, int, Ledger]:
    """The recorded passes, most rows and outputs of a step, and the ledger with them. Raises OutOfBudget."""
    context = context_of(model, options)
    rows = most_rows(options.prefill_chunk, context * options.sequences, on_device=backend.on_device)
    outputs = options.prefill_chunk or SMALLEST
    outputs = max(1, min(outputs, rows, MAX_LOGIT_BYTES // (4 * model.vocabulary)))
    recorder = backend.recorder(max_rows=rows, max_outputs=outputs, page_tokens=pool.page_tokens, pages=pool.pages)
    forward, draft = record_forward(recorder, model, residents, options)

    def ledger_at(work_bytes: int) -> Ledger:
        return ledger_of(options, model, backend, residents, files, pool, held, work_bytes=work_bytes)

    if options.prefill_chunk is None and rows > SMALLEST:
        layers = files.layers if files is not None else ()
        sizes = ExpertSizes(
            {layer: files.count(layer) for layer in layers if files},
            {layer: files.slot_nbytes(layer) for layer in layers if files},
            _experts_per_token(model),
        )
        rows = settle(
            cast(Sized, recorder),
            rows,
            workspace_bytes=backend.workspace_bytes(),
            prompt=context,
            experts=sizes,
            ledger_at=ledger_at,
        )
    ledger = ledger_at(backend.workspace_bytes())
    if _shares_memory(backend):
        assert ledger.limit.nbytes is not None
        cast(Any, backend).grant(ledger.limit.nbytes - ledger.total_bytes)
    return forward, draft, rows, outputs, ledger


def _shares_memory(backend: HostBackend) -> bool:
    """Whether what lies on the device lies in the host's memory, so that the ledger has it too."""
    return bool(getattr(backend, "shares_memory", False))


def ahead_slots(options: EngineOptions, *, on_device: bool) -> int:
    """Slots for experts that are read ahead; none for a device that does not tell what it will want."""
    return 0 if on_device or options.prefetch == "off" else AHEAD_SLOTS


def ledger_of(
    options: EngineOptions,
    model: Model,
    backend: HostBackend,
    residents: Residents,
    files: ExpertFiles | None,
    pool: PagePool,
    held: int,
    *,
    work_bytes: int,
) -> Ledger:
    """What is needed and what is left for experts, with `work_bytes` of work buffers. Raises OutOfBudget."""
    kv_bytes = kv_nbytes(options, model, pool)
    items = [
        Item("this program", held),
        Item("resident weights", residents.needed_nbytes),
        Item(
            f"key-value cache ({pool.pages * pool.page_tokens} tokens)", 0 if backend.on_device else kv_bytes, "--ctx"
        ),
        Item("work buffers", work_bytes + RUNTIME_BYTES, "--prefill-chunk"),
    ]
    layers = files.layers if files is not None else ()
    if files is not None:
        learned = policy_nbytes(options.policy, [LayerCache(layer, 0, files.count(layer)) for layer in layers])
        items.append(Item("cache policy", learned))
    shared = _shares_memory(backend)
    if shared:
        items.append(Item("on the device, in the same memory", cast(Any, backend).fixed_bytes(residents.nbytes)))
    wanted_slots = options.expert_slots
    ahead = ahead_slots(options, on_device=backend.on_device and not getattr(backend, "tells_ahead", False))
    if wanted_slots is None and files is not None:
        total = sum(files.slot_nbytes(layer) * files.count(layer) for layer in layers)
        if shared or backend.takes_experts(residents.nbytes, total):
            wanted_slots, ahead = 1, 0  # they pass through the host, and lie there once
    return fit(
        memory_sources(
            options.ram_bytes,
            held=held,
            mapped=residents.mapped_nbytes + (0 if backend.on_device else kv_bytes) + backend.workspace_bytes(),
            threads=2 * (options.read_threads or READ_THREADS),  # the store's, and as many that a bench may start
        ),
        items,
        {layer: files.slot_nbytes(layer) for layer in layers} if files is not None else {},
        {layer: files.count(layer) for layer in layers} if files is not None else {},
        wanted_slots=wanted_slots,
        working_slots=WORKING_SLOTS,
        ahead_slots=ahead,
    )


def kv_nbytes(options: EngineOptions, model: Model, pool: PagePool) -> int:
    """Bytes of the key-value cache."""
    values: int = sum(plane.width for plane in _cached(model, options))
    return pool.pages * pool.page_tokens * values * int(kv_format("f32").bytes_per_value)


def _cached(model: Model, options: EngineOptions) -> Iterator[Any]:
    return (plane for plane in model.planes() if options.draft or plane.layer < len(model.layers))


def formats_in_words(index: ModelIndex) -> str:
    """The formats of the resident matrices and of the experts, as `int4-grouped 64 experts, int8-row ... resident`."""
    residents = sorted({_named(matrix) for matrix in index.matrices.values()})
    experts = sorted({_named(m) for layer in index.experts.values() for expert in layer for m in expert.matrices})
    parts = [f"{' + '.join(experts)} experts"] if experts else []
    return ", ".join([*parts, f"{' + '.join(residents)} resident"])


def _named(matrix: Matrix) -> str:
    return f"{matrix.format} {matrix.group_size}" if REGISTRY[matrix.format].group_sizes else matrix.format
