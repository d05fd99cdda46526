"""What a run of a model would be: memory, placement and bytes per token, from headers and config alone.

Knows plans and ledgers; must not read a weight, and must not know how fast anything is. The model's program is recorded
over blank memory that is never touched, so that buffers are counted by the same code as in a run.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from picaflor.backends.api import Weight
from picaflor.container.index import Container
from picaflor.errors import BadTokenizer, UsageError
from picaflor.models.base import Layer, MatrixSpec, Model
from picaflor.models.blocks.moe import MoE
from picaflor.models.config import Notices
from picaflor.models.loading import ModelIndex, open_model
from picaflor.runtime import checks, sidefile, tune
from picaflor.runtime import plan as planning
from picaflor.runtime.kvcache import PAGE_TOKENS, PagePool
from picaflor.runtime.lossy import Lossy
from picaflor.runtime.plan import EngineOptions
from picaflor.runtime.reading import Reading
from picaflor.runtime.residents import SLACK_BYTES, HostBackend, Residents
from picaflor.runtime.tokenizer import FILE as TOKENIZER_FILE
from picaflor.store.budget import Item, Ledger, Source, fit, process_memory
from picaflor.store.mapped import lies_in_memory
from picaflor.store.reader import ExpertFiles
from picaflor.store.store import WORKING_SLOTS

DEVICES = ("cuda", "rocm")
"""Backends with memory of their own that a plan can be made for."""


@dataclass(frozen=True, slots=True)
class Sketch:
    """A model that could be run. Close it when done.

    `device`: the backend of a device that is to have what must lie there; `ledger` is then of the host's memory beside
    it, `device_needs` what the device has before any expert. `options` are the host's.
    """

    path: Path
    container: Container
    model: Model
    index: ModelIndex
    files: ExpertFiles | None
    reading: Reading
    options: EngineOptions
    ledger: Ledger
    device_needs: tuple[Item, ...]
    context: int
    isa: str
    threads: int
    threads_source: str
    notices: Notices
    device: str = ""

    @property
    def moe(self) -> tuple[MoE, ...]:
        """The MoE blocks of the main pass, in order."""
        return tuple(layer.mlp for layer in self.model.layers if isinstance(layer.mlp, MoE))

    @property
    def complete(self) -> bool:
        """Whether the files are here in full, not only their headers."""
        return _complete(self.container)

    def __enter__(self) -> Sketch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all files."""
        self.reading.close()
        self.container.close()

    @property
    def experts(self) -> int:
        """Routed experts in all."""
        return sum(block.router.experts for block in self.moe)

    @property
    def expert_bytes(self) -> int:
        """Bytes of all routed experts."""
        return sum(expert.nbytes for block in self.moe for expert in self.index.experts[block.layer])

    @property
    def expert_sizes(self) -> list[int]:
        """Bytes that each routed expert takes in memory."""
        files = self.files
        layers = files.layers if files is not None else ()
        return [files.slot_nbytes(layer) for layer in layers if files for _ in range(files.count(layer))]

    def ledger_with(self, extra: int, *, expert_share: float = 1.0) -> Ledger:
        """The ledger with `extra` bytes of memory more, and experts of `expert_share` of their size.

        Raises OutOfBudget.
        """
        sources = [_raised(source, extra) for source in self.ledger.sources]
        items = [item for item in self.ledger.items if not _of_experts(item)]
        layers = self.files.layers if self.files is not None else ()
        nbytes = {layer: int(self.files.slot_nbytes(layer) * expert_share) for layer in layers if self.files}
        counts = {layer: self.files.count(layer) for layer in layers if self.files}
        wanted = self.options.expert_slots if not extra else None
        return fit(
            sources,
            items,
            nbytes,
            counts,
            wanted_slots=wanted,
            working_slots=WORKING_SLOTS,
            ahead_slots=self.ledger.ahead_slots,
        )


def _complete(container: Container) -> bool:
    return all(shard.path.stat().st_size >= shard.nbytes for shard in container.shards)


def _raised(source: Source, extra: int) -> Source:
    return source if source.nbytes is None else replace(source, nbytes=source.nbytes + extra)


def _of_experts(item: Item) -> bool:
    return item.name.startswith(("expert slots", "working set", "read ahead"))


def sketch(path: Path, options: EngineOptions, notices: Notices) -> Sketch:
    """Plan a run of the model in a folder. Raises what errors.py names; nothing stays open then."""
    if options.backend not in ("auto", "cpu", *DEVICES):
        have = ", ".join(("auto", "cpu", *DEVICES))
        raise UsageError(f"--backend {options.backend}: no plan is made for it; accepted: {have}")
    container = Container.open(path, extra_dirs=options.split, headers_only=True)
    try:
        for text in container.notes:
            notices.note(text)
        model, index = open_model(
            container,
            context=options.context or planning.DEFAULT_CONTEXT,
            group_size=options.group_size,
            notices=notices,
        )
        checks.tell_cut(container, notices)
        checks.check_latents(options, model)
        checks.check_end_tokens(container, model)
        asked, (options, _) = options, tune.applied(options, model, index, notices)
        checks.tell_idle(asked, options, index, notices)
        if names := Lossy(options.router_top_p, options.expert_budget).names():
            notices.tell(f"the plan is for all experts that the router chooses, without {', '.join(names)}")
        plan = _sketch(path, container, model, index, options, notices)
        if plan.files is not None and plan.ledger.all_resident:
            checks.tell_settled(asked, notices)
        return plan
    except BaseException:
        container.close()
        raise


def _sketch(
    path: Path, container: Container, model: Model, index: ModelIndex, options: EngineOptions, notices: Notices
) -> Sketch:
    device = options.backend if options.backend in DEVICES else ""
    options = replace(options, backend="cpu", device="auto") if device else options
    context = planning.context_of(model, options)
    pool = PagePool(pages=options.sequences * -(-context // PAGE_TOKENS))
    if not sidefile.is_absent(path / TOKENIZER_FILE, BadTokenizer):
        planning.open_tokenizer(path, model, context)  # so that it is part of what this program holds, as in a run
    held = process_memory()
    backend = planning.load_backend(options, notices.note)
    experts = {layer: found for layer, found in index.experts.items() if options.draft or layer < len(model.layers)}
    charged = held.charged if held else 0
    reading = planning.read_plan(container, experts, options, charged, notices) if _complete(container) else Reading()
    files = ExpertFiles(container, experts, blocks=reading.direct_shards) if experts else None
    if files is not None and (options.mapped == "on" or (options.mapped == "auto" and lies_in_memory(files))):
        why = "--mapped on" if options.mapped == "on" else "files in memory"
        notices.tell(
            f"a run uses experts where they lie ({why}); the plan is for experts in slots, as with --mapped off"
        )
    layouts = files.layouts if files is not None else planning.no_layouts
    recording: Any = _Beside(backend) if device else backend
    residents = Residents(index, recording, layouts, allocate=_Blank(index))
    residents.blank_vectors()
    *_, ledger = planning.recorded(options, model, recording, residents, files, pool, charged)
    kv_bytes = planning.kv_nbytes(options, model, pool)
    needs = (
        Item("resident weights", residents.nbytes),
        Item(f"key-value cache ({pool.pages * pool.page_tokens} tokens)", kv_bytes, "--ctx"),
        Item("work buffers", backend.workspace_bytes(), "--prefill-chunk"),
    )
    return Sketch(
        path=path,
        container=container,
        model=model,
        index=index,
        files=files,
        reading=reading,
        options=options,
        ledger=ledger,
        device_needs=needs,
        context=context,
        isa=backend.isa,
        threads=backend.threads,
        threads_source=planning.threads_source(options, notices),
        notices=notices,
        device=device,
    )


class _Beside:
    """Stands for a device beside the host: records on the host's backend, has all that need not be in host memory."""

    on_device = True
    tells_ahead = True

    def __init__(self, host: HostBackend) -> None:
        self._host = host

    def __getattr__(self, name: str) -> Any:
        return getattr(self._host, name)

    def take(self, weights: Ordered[Weight]) -> None:
        """Matrices pass through the host's memory in rounds; none is read here."""

    def takes_experts(self, resident_bytes: int, expert_bytes: int) -> bool:
        """Whether all fit is not known here: the host gets what it would have if they did not."""
        return False

    def workspace_bytes(self) -> int:
        """Buffers are on the device."""
        return 0


class _Blank:
    """Stands for the memory of resident weights: one mapping that all share and that nobody reads or writes."""

    def __init__(self, index: ModelIndex) -> None:
        widest = max((span.nbytes for matrix in index.matrices.values() for span in matrix.spans), default=0)
        self._memory = np.frombuffer(mmap.mmap(-1, widest + SLACK_BYTES), np.uint8)

    def __call__(self, nbytes: int) -> NDArray[np.uint8]:
        blank: NDArray[np.uint8] = self._memory[:nbytes]
        return blank


def token_bytes(model: Model, index: ModelIndex) -> dict[str, int]:
    """Bytes of weights that one decoded token multiplies, by class; of the embedding only a row."""
    embedding, head = index.matrices["model.embed_tokens.weight"], index.matrices["lm_head.weight"]
    sizes = {"embedding": embedding.nbytes // embedding.rows, "head": head.nbytes}
    for layer in model.layers:
        for kind, nbytes in layer_bytes(layer, index).items():
            sizes[kind] = sizes.get(kind, 0) + nbytes
    return sizes


def layer_bytes(layer: Layer, index: ModelIndex) -> dict[str, int]:
    """Bytes of weights that one token multiplies in a layer, by class; experts by their mean size."""
    sizes: dict[str, int] = {}
    for part in layer.parts():
        if isinstance(part, MatrixSpec):
            sizes[part.kind] = sizes.get(part.kind, 0) + index.matrices[part.name].nbytes
    if isinstance(layer.mlp, MoE):
        experts = index.experts[layer.mlp.layer]
        sizes["experts"] = layer.mlp.router.top_k * sum(expert.nbytes for expert in experts) // len(experts)
    return sizes
