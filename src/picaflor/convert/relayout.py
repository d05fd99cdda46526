"""Relayout: the tensors of a container, byte for byte, in the file order that reads an expert at once.

Knows models, containers and the writer; must not know what any format's bytes mean or the command line. Lossless and
verified: every tensor is hashed while it is copied, and again as it is read back from the new files.
"""

from __future__ import annotations

import hashlib
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from picaflor.container.expert_file import plan_reads
from picaflor.container.index import Container
from picaflor.container.safetensors import ITEM_BYTES
from picaflor.container.shards import INDEX_NAME
from picaflor.container.stamps import RULES_KEY, STAMP_KEY
from picaflor.container.strict_json import show, show_path
from picaflor.container.types import Expert, Matrix, Span, TensorInfo
from picaflor.container.writer import ContainerWriter, TensorSpec
from picaflor.convert.job import JobOptions, JobReport, Opened, Progress, opened, resume_state, staged
from picaflor.convert.plan import draft_names, rules_for
from picaflor.convert.policy import Choice
from picaflor.convert.target import Target, copy_file, processors
from picaflor.errors import BadContainer
from picaflor.formats.rules import FormatRules, merge_rules
from picaflor.models.base import ExpertSpec, Model, PlaneSpec
from picaflor.models.config import Notices
from picaflor.models.loading import ModelIndex, TensorNames, open_model

SIDE_SUFFIXES = (".json", ".jinja", ".txt", ".model", ".md")
SIDE_NAMES = ("LICENSE", "NOTICE")
_HASH_BYTES = 16 << 20
_PACKED = ("U8", "I8")
_ALIASES = {"F8_E4M3FN": "F8_E4M3", "float8_e4m3fn": "F8_E4M3", "F8_E8M0FNU": "F8_E8M0"}


@dataclass(frozen=True, kw_only=True)
class RelayoutReport(JobReport):
    """`reads_before`, `reads_after`: the reads of the expert that needs most of them."""

    tensors: int
    experts: int
    reads_before: int
    reads_after: int | None
    side_files: tuple[str, ...]
    left_out: tuple[str, ...]

    def record(self) -> dict[str, Any]:
        """As JSON data."""
        own = {name: getattr(self, name) for name in ("tensors", "experts", "reads_before", "reads_after")}
        own |= {"side_files": list(self.side_files), "left_out": list(self.left_out)}
        return JobReport.record(self) | own


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor of the result and where its bytes lie in the source."""

    spec: TensorSpec
    span: Span


def relayout(
    source: Path,
    out: Path,
    options: JobOptions | None = None,
    *,
    dry_run: bool = False,
    progress: Progress | None = None,
    warn: Callable[[str], None] = lambda text: None,
) -> RelayoutReport:
    """Copy the container `source` to the new directory `out`; with `dry_run` plan and check only.

    `progress(stage, bytes done, bytes in all)`, stages "writing" and "verifying". Raises UsageError, BadContainer and
    its like, UnsupportedConfig, ReadFailed, WriteFailed. Whatever is raised, nothing has the name `out` then.
    """
    options = options or JobOptions()
    target = Target(out, [source, *options.split])
    with opened(source, options, warn) as found:
        job = _Job(found, options)
        side, left_out = _side_files(found.container.path)
        all_bytes = job.nbytes + sum(path.stat().st_size for path in side)
        free, needed = target.free_bytes, target.needed_bytes(all_bytes)
        reads_after = None
        if not dry_run:
            target.check_room(all_bytes)
            with target.working(resume_state("relayout", found.container, options)) as work:
                job.write(work, progress)
                for path in side:
                    copy_file(path, work)
                reads_after = job.verify(work, progress)
        return RelayoutReport(
            source=source,
            out=out,
            family=found.model.family,
            nbytes=job.nbytes,
            needed_bytes=needed,
            free_bytes=free,
            written=not dry_run,
            warnings=tuple(found.notices.messages),
            tensors=len(job.pieces),
            experts=sum(map(len, found.index.experts.values())),
            reads_before=_most_reads(found.index),
            reads_after=reads_after,
            side_files=tuple(path.name for path in side),
            left_out=left_out,
        )


class _Job:
    """One relayout after its source was opened: the pieces in their new order, and the copying of them."""

    def __init__(self, found: Opened, options: JobOptions) -> None:
        self._container, self._index, self._options = found.container, found.index, options
        self._names = TensorNames(found.container.tensors)
        self._tensors = _BySpan(found.container)
        self._groups: list[tuple[Piece, ...]] = []
        self._experts: dict[int, tuple[tuple[Piece, ...], ...]] = {}  # by place in _groups: down, gate, up
        self._choices: dict[str, Choice] = {}
        self._digests: dict[str, bytes] = {}
        self._add_all(found.model)
        self.pieces = [piece for group in self._groups for piece in group]
        self.nbytes = sum(piece.span.nbytes for piece in self.pieces)

    def write(self, work: Path, progress: Progress | None) -> None:
        """Copy everything to shards in `work`, hashing what is read. Shards of an earlier run stay."""
        writer = ContainerWriter(
            work,
            max_shard_bytes=self._options.shard_bytes,
            metadata=_metadata(self._container),
            rules_json=self._rules().to_json(),
            workers=self._options.threads or processors(),
        )
        for place, group in enumerate(self._groups):
            if place in self._experts:
                down, gate, up = ([piece.spec for piece in part] for part in self._experts[place])
                writer.add_expert(down=down, gate=gate, up=up, produce=self._reader(group))
            else:
                writer.add_group([piece.spec for piece in group], self._reader(group))
        writer.write(resume=True, progress=staged(progress, "writing"))

    def verify(self, work: Path, progress: Progress | None) -> int:
        """Read the new container back: formats as before, every tensor's bytes those of the source.

        Returns the reads of the expert that needs most of them. Raises BadContainer; a shard with wrong bytes is
        removed, so that the next run writes it anew.
        """
        with Container.open(work) as written:
            index = open_model(written, notices=Notices(strict=False, warn=lambda text: None))[1]
            _check_matrices(work, self._index, index)
            _forget_pages(written)
            done = 0
            with ThreadPoolExecutor(self._options.threads or processors()) as pool:
                for piece, good in pool.map(lambda piece: self._compare(written, piece), self.pieces):
                    if not good:
                        pool.shutdown(cancel_futures=True)
                        raise BadContainer(self._broken(written, piece.spec.name))
                    done += piece.span.nbytes
                    if progress is not None:
                        progress("verifying", done, self.nbytes)
            return _most_reads(index)

    def _add_all(self, model: Model) -> None:
        """Residents, experts by layer and number, then the draft layer's in the same order, then what is unused."""
        draft = draft_names(model)
        claimed: set[tuple[int, int]] = set()
        lists: dict[tuple[bool, bool], list[ExpertSpec | str]] = {}
        for part in model.parts():
            if isinstance(part, PlaneSpec):
                continue
            name = part.gate.name if isinstance(part, ExpertSpec) else part.name
            item = part if isinstance(part, ExpertSpec) else name
            lists.setdefault((name in draft, isinstance(part, ExpertSpec)), []).append(item)
        for key in sorted(lists):
            for item in lists[key]:
                if isinstance(item, ExpertSpec):
                    self._add_expert(self._index.experts[item.layer][item.expert])
                    continue
                pieces = self._resident(item)
                places = {(piece.span.shard, piece.span.offset) for piece in pieces if piece.span.nbytes}
                if places and places <= claimed:
                    continue  # a head that is the embedding
                claimed |= places
                self._groups.append(pieces)
        self._groups += [(self._copied(self._container.tensors[name]),) for name in self._index.unused]

    def _add_expert(self, expert: Expert) -> None:
        parts = tuple(self._matrix(matrix, stamped=False) for matrix in (expert.down, expert.gate, expert.up))
        self._experts[len(self._groups)] = parts
        self._groups.append(tuple(piece for part in parts for piece in part))

    def _resident(self, name: str) -> tuple[Piece, ...]:
        vector = self._index.vectors.get(name)
        return (self._copied(vector),) if vector is not None else self._matrix(self._index.matrices[name], stamped=True)

    def _matrix(self, matrix: Matrix, *, stamped: bool) -> tuple[Piece, ...]:
        """A matrix's tensors; one that was cut out of a stacked tensor gets the name of its own."""
        holders = [self._tensors.holder(span) for span in matrix.spans]
        if all(
            (info.offset, info.nbytes) == (s.offset, s.nbytes) for info, s in zip(holders, matrix.spans, strict=True)
        ):
            pieces = tuple(self._copied(info, stamped=stamped) for info in holders)
        else:
            name = self._names.stored(matrix.name)
            suffixes = [info.name.removeprefix(holders[0].name) for info in holders]
            pieces = tuple(
                Piece(TensorSpec(name + suffix, *_cut(matrix, info, span)), span)
                for suffix, info, span in zip(suffixes, holders, matrix.spans, strict=True)
            )
        self._choices[pieces[0].spec.name] = Choice(matrix.format, matrix.group_size)
        return pieces

    def _copied(self, info: TensorInfo, *, stamped: bool = True) -> Piece:
        """A whole tensor with its name, dtype, shape and stamp; packed bytes whose shape is not theirs become flat."""
        dtype = _ALIASES.get(info.dtype, info.dtype)
        spec = TensorSpec(info.name, dtype, info.shape, self._container.stamps.get(info.name) if stamped else None)
        if spec.nbytes != info.nbytes:
            spec = TensorSpec(info.name, dtype, (info.nbytes // ITEM_BYTES[dtype],), spec.stamp)
        return Piece(spec, Span(info.shard, info.offset, info.nbytes))

    def _rules(self) -> FormatRules:
        """Rules for every matrix as it was resolved, then those of the source for names that nothing here uses."""
        made = rules_for(self._choices)
        known = {rule.pattern for rule in made.rules}
        earlier = merge_rules(self._container.rules_json)
        kept = [rule for rule in earlier.rules if rule.pattern not in known] if earlier is not None else []
        return FormatRules((*made.rules, *kept))

    def _reader(self, group: Sequence[Piece]) -> Callable[[], dict[str, NDArray[Any]]]:
        def produce() -> dict[str, NDArray[Any]]:
            arrays: dict[str, NDArray[Any]] = {}
            for piece in group:
                data = self._container.read(piece.span)
                self._digests[piece.spec.name] = hashlib.sha256(data.data).digest()
                arrays[piece.spec.name] = data
            return arrays

        return produce

    def _compare(self, written: Container, piece: Piece) -> tuple[Piece, bool]:
        """Whether a tensor's bytes as they can be read from disk are those that were read from the source."""
        wanted = self._digests.get(piece.spec.name)
        if wanted is None:  # of a shard that an earlier run finished
            wanted = _digest(self._container, piece.span)
        return piece, _digest(written, written.require(piece.spec.name)) == wanted

    def _broken(self, written: Container, name: str) -> str:
        path = written.shards[written.require(name).shard].path
        path.unlink()
        return (
            f"{show_path(path)}: tensor {show(name)} reads back with other bytes than the source has: memory or disk "
            "changed them; the file was removed, and the same command writes it again"
        )


class _BySpan:
    """Which tensor holds a run of bytes."""

    def __init__(self, container: Container) -> None:
        self._by_shard: dict[int, list[TensorInfo]] = {}
        for info in sorted(container.tensors.values(), key=lambda info: (info.shard, info.offset, info.nbytes)):
            if info.nbytes:
                self._by_shard.setdefault(info.shard, []).append(info)
        self._starts = {shard: [info.offset for info in found] for shard, found in self._by_shard.items()}

    def holder(self, span: Span) -> TensorInfo:
        """The tensor whose bytes a matrix's span is part of."""
        return self._by_shard[span.shard][bisect_right(self._starts[span.shard], span.offset) - 1]


def _cut(matrix: Matrix, info: TensorInfo, span: Span) -> tuple[str, tuple[int, ...]]:
    """Dtype and shape of a plane cut out of a stacked tensor: one value per weight keeps rows and columns."""
    dtype = _ALIASES.get(info.dtype, info.dtype)
    count = span.nbytes // ITEM_BYTES[dtype]
    whole = dtype not in _PACKED and count == matrix.rows * matrix.cols
    return dtype, (matrix.rows, matrix.cols) if whole else (count,)


def _metadata(container: Container) -> dict[str, str]:
    """What the source's shards say about themselves where they agree, rules and stamps left out."""
    found: dict[str, set[str]] = {"format": {"pt"}}
    for shard in container.shards:
        for key, value in shard.metadata.items():
            if key not in (RULES_KEY, STAMP_KEY, "format"):
                found.setdefault(key, set()).add(value)
    return {key: values.pop() for key, values in found.items() if len(values) == 1}


def _check_matrices(work: Path, wanted: ModelIndex, found: ModelIndex) -> None:
    """Raises BadContainer where a matrix has another format, group size or shape than in the source."""

    def matrices(index: ModelIndex) -> Iterator[Matrix]:
        yield from index.matrices.values()
        yield from (matrix for layer in index.experts.values() for expert in layer for matrix in expert.matrices)

    for before, after in zip(matrices(wanted), matrices(found), strict=True):
        for name in ("name", "format", "group_size", "rows", "cols"):
            if getattr(before, name) != getattr(after, name):
                raise BadContainer(
                    f"{show_path(work)}: tensor {show(before.name)}: {name} {getattr(after, name)}; the source has "
                    f"{getattr(before, name)}"
                )


def _digest(container: Container, where: Span | TensorInfo) -> bytes:
    """The SHA-256 of a run of bytes, read a few megabytes at a time."""
    found = hashlib.sha256()
    buffer = np.empty(min(where.nbytes, _HASH_BYTES), np.uint8)
    for start in range(0, where.nbytes, _HASH_BYTES):
        count = min(_HASH_BYTES, where.nbytes - start)
        container.read_into(Span(where.shard, where.offset + start, count), buffer[:count].data)
        found.update(buffer[:count].data)
    return found.digest()


def _forget_pages(container: Container) -> None:
    """Let the system drop what it holds of the files, so that reading them back asks the disk."""
    if not hasattr(os, "posix_fadvise"):
        return
    for shard in container.shards:
        with container.handle(shard.index) as handle:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)


def _most_reads(index: ModelIndex) -> int:
    experts = [expert for layer in index.experts.values() for expert in layer]
    return max((len(plan_reads(expert).runs) for expert in experts), default=0)


def _side_files(path: Path) -> tuple[list[Path], tuple[str, ...]]:
    """Files beside the shards that belong to the model, and the names of those that are not copied."""
    copied, left_out = [], []
    for entry in sorted(path.iterdir()):
        if entry.suffix == ".safetensors" or entry.name.startswith(".") or entry.name == INDEX_NAME:
            continue
        known = entry.suffix in SIDE_SUFFIXES or entry.name.startswith(SIDE_NAMES)
        if known and entry.is_file():
            copied.append(entry)
        else:
            left_out.append(entry.name)
    return copied, tuple(left_out)
