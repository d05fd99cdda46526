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
from picaflor.container.writer import ContainerWriter
from picaflor.convert.job import JobOptions, JobReport, Opened, Progress, opened, resume_state, staged
from picaflor.convert.plan import Plan, PlannedMatrix, make_plan, rules_json
from picaflor.convert.policy import Policy
from picaflor.convert.quality import Quality
from picaflor.convert.source import SourceModel
from picaflor.convert.stored import encode_blocks
from picaflor.convert.target import Target, copy_file, processors, write_text
from picaflor.errors import BadContainer
from picaflor.models.glm_moe_dsa import LATENT_NORM_EPS
from picaflor.models.loading import open_model

COPIED = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")
# Keys that a family's config gets where the source does not state them.
_STATED = {"glm_moe_dsa": {"latent_norm_eps": LATENT_NORM_EPS}}


@dataclass(frozen=True, kw_only=True)
class ConvertOptions(JobOptions):
    """What to make: formats by class, and whether the draft layer is kept."""

    policy: Policy = field(default_factory=Policy)
    draft: bool = True


@dataclass(frozen=True, kw_only=True)
class ConvertReport(JobReport):
    """`quality` is None after a dry run; `skipped` are names that were left out."""

    plan: Plan
    source_bytes: int
    skipped: tuple[str, ...]
    quality: Quality | None

    def record(self) -> dict[str, Any]:
        """As JSON data."""
        classes = []
        for total in self.plan.totals():
            found = self.quality.classes.get(total.group) if self.quality is not None else None
            classes.append(total.record() | (found.record() if found is not None else {}))
        own = {"source_bytes": self.source_bytes, "skipped_tensors": len(self.skipped), "classes": classes}
        return JobReport.record(self) | own


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
    with opened(source, options, warn) as found:
        job = _Job(found, options)
        kv_b = options.policy.kv_b
        if kv_b is not None and not any(matrix.spec.kind == "kv_b" for matrix in job.plan.matrices()):
            found.notices.tell(f"--kv-b-format {kv_b} has no effect: {found.model.family} has no kv_b_proj")
        free, needed = target.free_bytes, target.needed_bytes(job.plan.nbytes)
        quality = None
        if not dry_run:
            quality = Quality()
            job.write(target, quality, progress)
            for text in quality.warnings:
                found.notices.tell(text)
        return ConvertReport(
            source=source,
            out=out,
            family=found.model.family,
            nbytes=job.plan.nbytes,
            needed_bytes=needed,
            free_bytes=free,
            written=not dry_run,
            warnings=tuple(found.notices.messages),
            plan=job.plan,
            source_bytes=sum(info.nbytes for info in found.container.tensors.values()),
            skipped=found.index.unused,
            quality=quality,
        )


class _Job:
    """One conversion after its source was opened: the plan, and the writing of it."""

    def __init__(self, found: Opened, options: ConvertOptions) -> None:
        self._container, self._model, self._options = found.container, found.model, options
        index = found.index
        self._source = SourceModel(found.container, index)
        head, table = index.matrices["lm_head.weight"], index.matrices["model.embed_tokens.weight"]
        tied = ["lm_head.weight"] if head.spans == table.spans else []
        self.plan = make_plan(found.model, options.policy, draft=options.draft, skip=tied)

    def write(self, target: Target, quality: Quality, progress: Progress | None) -> None:
        """Write everything beside the target, check it, and give it its name."""
        target.check_room(self.plan.nbytes)
        options = self._options
        state = resume_state("convert", self._container, options, policy=asdict(options.policy), draft=options.draft)
        with target.working(state) as work:
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
        writer.write(resume=True, progress=staged(progress, "writing"))
        self._write_side_files(work)
        check_formats(work, self.plan)

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
