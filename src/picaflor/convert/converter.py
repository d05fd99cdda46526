"""Conversion: a checkpoint or container of a known family becomes a new container, or nothing at all.

Knows models, plans, the writer and the file system; must not know formats' bytes or the command line. Everything is
classified and checked before the first byte is written; the work happens in `.NAME.partial` beside the target, which
gets its name only when it is complete. A later run with the same source and options goes on where this one stopped.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from picaflor.container.index import Container
from picaflor.container.strict_json import show_path
from picaflor.container.writer import DEFAULT_SHARD_BYTES, ContainerWriter
from picaflor.convert.plan import Plan, PlannedMatrix, make_plan, rules_json
from picaflor.convert.policy import Policy
from picaflor.convert.quality import Quality
from picaflor.convert.source import SourceModel
from picaflor.convert.stored import encode_blocks
from picaflor.convert.target import Target, copy_file, processors, source_state, write_text
from picaflor.errors import BadContainer
from picaflor.models.base import Model
from picaflor.models.config import Notices
from picaflor.models.glm_moe_dsa import LATENT_NORM_EPS
from picaflor.models.loading import ModelIndex, open_model

COPIED = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")
_STATE_VERSION = 1
# Keys that a family's config gets where the source does not state them.
_STATED = {"glm_moe_dsa": {"latent_norm_eps": LATENT_NORM_EPS}}

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """What to make. `source_group_size`: for a source of int4-grouped tensors that does not state it.

    `split`: more directories that hold shards of the source.
    `threads` read and encode, by default one per processor; the bytes are the same for any number.
    """

    policy: Policy = field(default_factory=Policy)
    draft: bool = True
    split: tuple[Path, ...] = ()
    shard_bytes: int = DEFAULT_SHARD_BYTES
    source_group_size: int | None = None
    strict: bool = False
    threads: int | None = None


@dataclass(frozen=True, kw_only=True)
class ConvertReport:
    """What was planned or written. `quality` is None after a dry run; `skipped` are names that were left out."""

    source: Path
    out: Path
    family: str
    plan: Plan
    source_bytes: int
    free_bytes: int
    skipped: tuple[str, ...]
    written: bool
    quality: Quality | None
    warnings: tuple[str, ...]

    def record(self) -> dict[str, Any]:
        """As JSON data."""
        classes = []
        for total in self.plan.totals():
            found = self.quality.classes.get(total.group) if self.quality is not None else None
            classes.append(total.record() | (found.record() if found is not None else {}))
        return {
            "source": str(self.source),
            "out": str(self.out),
            "family": self.family,
            "written": self.written,
            "source_bytes": self.source_bytes,
            "bytes": self.plan.nbytes,
            "free_bytes": self.free_bytes,
            "skipped_tensors": len(self.skipped),
            "classes": classes,
            "warnings": list(self.warnings),
        }


def convert(
    source: Path,
    out: Path,
    options: ConvertOptions | None = None,
    *,
    dry_run: bool = False,
    progress: Progress | None = None,
    warn: Callable[[str], None] = lambda text: None,
) -> ConvertReport:
    """Convert `source` to the new directory `out`; with `dry_run` plan and check only, writing nothing.

    `progress("writing", bytes done, bytes in all)`. Raises UsageError (`out` is there already, options that do not
    go together), BadContainer and its like (a source that is not whole or holds unknown tensors), UnsupportedConfig,
    WriteFailed (disk).
    """
    options = options or ConvertOptions()
    target = Target(out, [source, *options.split])
    warnings: list[str] = []

    def note(text: str) -> None:
        warnings.append(text)
        warn(text)

    with Container.open(source, extra_dirs=options.split) as container:
        notices = Notices(strict=options.strict, warn=note)
        model, index = open_model(container, group_size=options.source_group_size, notices=notices)
        job = _Job(container, model, index, options)
        free = target.free_bytes
        quality = None
        if not dry_run:
            quality = Quality()
            job.write(target, quality, progress)
            for text in quality.warnings:
                note(text)
        return ConvertReport(
            source=source,
            out=out,
            family=model.family,
            plan=job.plan,
            source_bytes=sum(info.nbytes for info in container.tensors.values()),
            free_bytes=free,
            skipped=index.unused,
            written=not dry_run,
            quality=quality,
            warnings=tuple(warnings),
        )


class _Job:
    """One conversion after its source was opened: the plan, and the writing of it."""

    def __init__(self, container: Container, model: Model, index: ModelIndex, options: ConvertOptions) -> None:
        self._container, self._model, self._options = container, model, options
        self._source = SourceModel(container, index)
        head, table = index.matrices["lm_head.weight"], index.matrices["model.embed_tokens.weight"]
        tied = ["lm_head.weight"] if head.spans == table.spans else []
        self.plan = make_plan(model, options.policy, draft=options.draft, skip=tied)

    def write(self, target: Target, quality: Quality, progress: Progress | None) -> None:
        """Write everything beside the target, check it, and give it its name."""
        target.check_room(self.plan.nbytes)
        with target.working(self._state()) as work:
            self._write_into(work, quality, progress)

    def _write_into(self, work: Path, quality: Quality, progress: Progress | None) -> None:
        """Write and check everything in the working directory."""
        writer = ContainerWriter(
            work,
            max_shard_bytes=self._options.shard_bytes,
            metadata={"format": "pt"},
            rules_json=rules_json(self.plan),
            workers=self._options.threads or processors(),
        )
        self.plan.declare(
            writer,
            matrix=lambda planned: self._encode(planned, quality),
            vector=lambda spec: self._source.vector(spec.name),
        )
        writer.write(resume=True, progress=None if progress is None else _named(progress))
        self._write_side_files(work)
        check_formats(work, self.plan)

    def _state(self) -> dict[str, Any]:
        """What must be equal for a later run to go on: the source's files and all that shapes the result."""
        return {
            "version": _STATE_VERSION,
            "source": source_state(self._container.shards),
            "policy": asdict(self._options.policy),
            "draft": self._options.draft,
            "shard_bytes": self._options.shard_bytes,
            "source_group_size": self._options.source_group_size,
        }

    def _encode(self, planned: PlannedMatrix, quality: Quality) -> tuple[NDArray[Any], ...]:
        """One matrix's planes: copied where the source has the very format, else decoded and encoded."""
        spec, choice = planned.spec, planned.choice
        stored = self._source.matrix(spec.name)
        if (stored.format, stored.group_size) == (choice.format, choice.group_size):
            return self._source.planes(spec.name)
        meter = quality.measure(planned)
        planes = encode_blocks(
            partial(self._source.rows, spec.name), planned.form, spec.rows, spec.cols, choice.group_size, check=meter
        )
        meter.done()
        return planes

    def _write_side_files(self, work: Path) -> None:
        """config.json, and copies of what the tokenizer and the template need."""
        values = {key: value for key, value in self._container.config().items() if key != "quantization_config"}
        for key, value in _STATED.get(self._model.family, {}).items():
            values.setdefault(key, value)
        if self._model.draft is not None and not self._options.draft:
            values["num_nextn_predict_layers"] = 0
        write_text(work / "config.json", json.dumps(values, indent=1, ensure_ascii=False) + "\n")
        for path in (self._container.path / name for name in COPIED):
            if path.is_file():
                copy_file(path, work)


def check_formats(directory: Path, plan: Plan) -> None:
    """Open a written container and compare every matrix's format with the plan. Raises BadContainer."""
    with Container.open(directory) as container:
        written = SourceModel(container, open_model(container)[1])
        for planned in plan.matrices():
            found = written.matrix(planned.spec.name)
            if (found.format, found.group_size) != (planned.choice.format, planned.choice.group_size):
                raise BadContainer(
                    f"{show_path(directory)}: tensor {planned.spec.name} reads as {found.format}, group size "
                    f"{found.group_size}; written as {planned.choice.format}, {planned.choice.group_size}"
                )


def _named(progress: Progress) -> Callable[[int, int], None]:
    return lambda done, total: progress("writing", done, total)
