"""What is in a model directory, by class of tensor, and what is missing: the content of `picaflor inspect`.

Knows containers, families and formats; must not know the command line or how anything is printed or run.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from picaflor.container.index import Container
from picaflor.container.strict_json import show, show_path
from picaflor.container.types import Matrix, TensorInfo
from picaflor.errors import BadContainer, PicaflorError
from picaflor.models.base import ExpertSpec, MatrixSpec, Model, Part, VectorSpec, build_model, missing
from picaflor.models.config import Notices
from picaflor.models.loading import ModelIndex, TensorNames, load_index
from picaflor.runtime.checks import check_end_tokens

SIDE_FILES = {
    "tokenizer.json": "text cannot be read or written, only token ids",
    "generation_config.json": "end-of-text ids come from config.json alone",
}
TEMPLATE_FILES = ("chat_template.jinja", "tokenizer_config.json")
_LABELS = {"expert": "routed experts", "shared": "shared experts", "draft": "mixing matrix", "dense": "dense mlp"}
_NUMBER = re.compile(r"\.\d+(?=\.|$)")


@dataclass(frozen=True, slots=True)
class ClassRow:
    """All tensors of one class in one format. `count`: matrices or vectors; `weights`: numbers in them.

    `format` is a format's name, or a header dtype where no format was settled. `nbytes` counts every plane.
    """

    label: str
    format: str
    group_size: int
    count: int
    weights: int
    nbytes: int
    shards: tuple[int, ...]

    @property
    def bits_per_weight(self) -> float | None:
        """True storage per number, scales and padding of rows included; None where the numbers are not known."""
        return 8.0 * self.nbytes / self.weights if self.weights else None


@dataclass(frozen=True, slots=True)
class Gap:
    """Something that is not there, and what that means. `fatal`: the model does not load without it."""

    name: str
    meaning: str
    fatal: bool


@dataclass(frozen=True, slots=True)
class Inspection:
    """The whole answer. `formats` maps stored tensor names to format names; `index` is None where none was settled.

    `notes` are remarks, `problems` reasons why the model does not load; each is one line.
    """

    container: Container
    model_type: str | None
    index: ModelIndex | None
    rows: tuple[ClassRow, ...]
    gaps: tuple[Gap, ...]
    notes: tuple[str, ...]
    problems: tuple[str, ...]
    formats: Mapping[str, str] = field(repr=False)

    @property
    def loads(self) -> bool:
        """Whether nothing that was found keeps the model from loading."""
        return not self.problems and not any(gap.fatal for gap in self.gaps)

    @property
    def file_nbytes(self) -> int:
        """Bytes of all shards."""
        return sum(shard.nbytes for shard in self.container.shards)

    @property
    def tensor_nbytes(self) -> int:
        """Bytes of all tensors, padding left out."""
        return sum(info.nbytes for info in self.container.tensors.values())

    def record(self) -> dict[str, Any]:
        """The answer as JSON values."""
        shards = [show_path(shard.path) for shard in self.container.shards]
        return {
            "model": show_path(self.container.path),
            "model_type": self.model_type,
            "loads": self.loads,
            "shards": shards,
            "file_bytes": self.file_nbytes,
            "tensor_bytes": self.tensor_nbytes,
            "padding_bytes": self.container.padding_nbytes,
            "tensors": len(self.container.tensors),
            "classes": [_row_record(row, shards) for row in self.rows],
            "missing": [{"name": gap.name, "meaning": gap.meaning, "fatal": gap.fatal} for gap in self.gaps],
            "notes": list(self.notes),
            "problems": list(self.problems),
        }

    def tensor_records(self) -> Iterator[dict[str, Any]]:
        """One JSON object per stored tensor, in the order of the files."""
        for info in in_file_order(self.container):
            yield {
                "name": info.name,
                "dtype": info.dtype,
                "shape": list(info.shape),
                "bytes": info.nbytes,
                "format": self.formats.get(info.name),
                "shard": show_path(self.container.shards[info.shard].path.name),
                "offset": info.offset,
            }


def in_file_order(container: Container) -> list[TensorInfo]:
    """All tensors by shard and place."""
    return sorted(container.tensors.values(), key=lambda info: (info.shard, info.offset))


def inspect_container(container: Container, *, group_size: int | None = None, strict: bool = False) -> Inspection:
    """Describe an open container (opened with `allow_missing`). What keeps it from loading is listed, not raised."""
    notes = list(container.notes)
    problems: list[str] = []
    gaps = [Gap(show_path(name), "a shard that names or index declare", True) for name in container.missing_shards]
    model: Model | None = None
    index: ModelIndex | None = None
    values: dict[str, Any] = {}
    try:
        values = container.config()
        names = TensorNames(container.tensors)
        notices = Notices(strict=strict, warn=notes.append)
        where = show_path(container.path / "config.json")
        model = build_model(values, names, where=where, notices=notices)
        absent = missing(model.parts(), names.__contains__)
        gaps += _absent_tensors(absent)
        kept = _Some.of(model, names) if absent else model
        index = load_index(container, kept, group_size=group_size, notices=notices)
        check_end_tokens(container, model)
    except PicaflorError as error:
        problems.append(str(error))
    rows = _settled_rows(container, model, index) if model is not None and index is not None else _raw_rows(container)
    if model is not None:
        gaps += _optional_parts(model, values)
    gaps += _side_files(container)
    model_type = values.get("model_type")
    return Inspection(
        container=container,
        model_type=model_type if isinstance(model_type, str) else None,
        index=index,
        rows=tuple(rows),
        gaps=tuple(gaps),
        notes=tuple(notes),
        problems=tuple(problems),
        formats=_formats(container, index),
    )


@dataclass(frozen=True)
class _Some(Model):
    """A model of which only some tensors are there: what is left over cannot be told from what is foreign."""

    kept: tuple[Part, ...] = ()

    @classmethod
    def of(cls, model: Model, names: TensorNames) -> _Some:
        """The parts of `model` that are complete."""
        kept = tuple(part for part in model.parts() if not missing(iter((part,)), names.__contains__))
        return cls(**{entry.name: getattr(model, entry.name) for entry in fields(model)}, kept=kept)

    def parts(self) -> Iterator[Part]:
        """What is there."""
        return iter(self.kept)

    def ignorable(self, name: str) -> bool:
        """Every name."""
        return True


def _absent_tensors(absent: Sequence[str]) -> list[Gap]:
    """One entry for all tensors that the model needs and no shard has."""
    if not absent:
        return []
    more = f" and {len(absent) - 3} more" if len(absent) > 3 else ""
    count = f"{len(absent)} tensor{'' if len(absent) == 1 else 's'}"
    return [Gap(count, f"needed: {', '.join(map(show, absent[:3]))}{more}", True)]


def _optional_parts(model: Model, values: Mapping[str, Any]) -> list[Gap]:
    """Parts that the config speaks of and the model does without."""
    gaps: list[Gap] = []
    if model.draft is None and values.get("num_nextn_predict_layers"):
        gaps.append(Gap("draft head (MTP)", "no tokens are drafted by the model itself", False))
    if values.get("index_topk") and not any(spec.kind == "indexer" for spec in model.matrices()):
        top = show(values["index_topk"])
        meaning = (
            f"the part that picks {top} tokens for attention; without it every token is used, which gives the model's "
            f"own results up to {top} tokens of context and other ones beyond"
        )
        gaps.append(Gap("indexer", meaning, False))
    return gaps


def _side_files(container: Container) -> list[Gap]:
    """Small files that are not there."""
    folder = container.path
    gaps = [Gap(name, meaning, False) for name, meaning in SIDE_FILES.items() if not (folder / name).is_file()]
    if not (folder / "config.json").is_file():
        gaps.insert(0, Gap("config.json", "the family is unknown until it is there", True))
    if not any((folder / name).is_file() for name in TEMPLATE_FILES):
        gaps.append(Gap(" or ".join(TEMPLATE_FILES), "no chat template", False))
    return gaps


class _Tally:
    """Sums per (class, format, group size), in order of first sight."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, str, int], list[int]] = {}
        self._shards: dict[tuple[str, str, int], set[int]] = {}

    def add(self, key: tuple[str, str, int], *, count: int, weights: int, nbytes: int, shards: Iterable[int]) -> None:
        """Count something."""
        sums = self._sums.setdefault(key, [0, 0, 0])
        for place, value in enumerate((count, weights, nbytes)):
            sums[place] += value
        self._shards.setdefault(key, set()).update(shards)

    def add_matrix(self, label: str, matrix: Matrix) -> None:
        """Count a matrix."""
        self.add(
            (label, matrix.format, matrix.group_size),
            count=1,
            weights=matrix.rows * matrix.cols,
            nbytes=matrix.nbytes,
            shards=(span.shard for span in matrix.spans),
        )

    def rows(self) -> Iterator[ClassRow]:
        """The table."""
        for key, (count, weights, nbytes) in self._sums.items():
            yield ClassRow(*key, count, weights, nbytes, tuple(sorted(self._shards[key])))


def _settled_rows(container: Container, model: Model, index: ModelIndex) -> list[ClassRow]:
    """The table of a model whose formats are known."""
    drafted = {_key(part) for part in model.draft.parts()} if model.draft is not None else set()
    tally = _Tally()
    seen: set[tuple[int, int]] = set()
    tally_vectors = _Tally()
    for part in model.parts():
        prefix = "draft: " if _key(part) in drafted else ""
        if isinstance(part, MatrixSpec) and part.name in index.matrices:
            matrix = index.matrices[part.name]
            place = (matrix.spans[0].shard, matrix.spans[0].offset)
            if place not in seen:  # a tied head is the embedding
                seen.add(place)
                tally.add_matrix(prefix + _LABELS.get(part.kind, part.kind), matrix)
        elif isinstance(part, VectorSpec) and part.name in index.vectors:
            info = index.vectors[part.name]
            key = (f"{prefix}norms and biases", info.dtype, 0)
            tally_vectors.add(key, count=1, weights=part.length, nbytes=info.nbytes, shards=(info.shard,))
    draft_layers = {part.layer for part in model.draft.parts() if isinstance(part, ExpertSpec)} if model.draft else ()
    for layer, experts in index.experts.items():
        label = ("draft: " if layer in draft_layers else "") + _LABELS["expert"]
        for matrix in (matrix for expert in experts for matrix in expert.matrices):
            tally.add_matrix(label, matrix)
    for name in index.unused:
        info = container.tensors[name]
        key = ("not used", info.dtype, 0)
        tally_vectors.add(key, count=1, weights=0, nbytes=info.nbytes, shards=(info.shard,))
    return [*tally.rows(), *tally_vectors.rows()]


def _key(part: Part) -> tuple[str, object]:
    """What tells a part from all others."""
    if isinstance(part, ExpertSpec):
        return ("expert", (part.layer, part.expert))
    return (type(part).__name__, part.name)


def _raw_rows(container: Container) -> list[ClassRow]:
    """The table where no family or format is known: one row per name pattern and dtype."""
    tally = _Tally()
    for info in in_file_order(container):
        label = show(_NUMBER.sub(".N", info.name))[1:-1]
        tally.add((label, info.dtype, 0), count=1, weights=0, nbytes=info.nbytes, shards=(info.shard,))
    return list(tally.rows())


def matrices_of(index: ModelIndex) -> Iterator[Matrix]:
    """Every matrix, resident and routed."""
    yield from index.matrices.values()
    for experts in index.experts.values():
        for expert in experts:
            yield from expert.matrices


def _formats(container: Container, index: ModelIndex | None) -> dict[str, str]:
    """Format by stored tensor name; a stacked tensor has its first matrix's."""
    if index is None:
        return {}
    starts: dict[tuple[int, int], str] = {}
    for matrix in matrices_of(index):
        label = f"{matrix.format} g{matrix.group_size}" if matrix.group_size else matrix.format
        for span in matrix.spans:
            starts.setdefault((span.shard, span.offset), label)
    found = {name: starts.get((info.shard, info.offset)) for name, info in container.tensors.items() if info.nbytes}
    return {name: label for name, label in found.items() if label is not None}


def _row_record(row: ClassRow, shards: Sequence[str]) -> dict[str, Any]:
    """A table row as JSON values."""
    return {
        "class": row.label,
        "format": row.format,
        "group_size": row.group_size,
        "count": row.count,
        "weights": row.weights or None,
        "bytes": row.nbytes,
        "bits_per_weight": row.bits_per_weight,
        "shards": [shards[number] for number in row.shards],
    }


def refuse(inspection: Inspection) -> None:
    """Raise BadContainer with the first reason why the model does not load, if there is one."""
    fatal = [f"missing: {gap.name}: {gap.meaning}" for gap in inspection.gaps if gap.fatal]
    reasons = [*inspection.problems, *fatal]
    if reasons:
        more = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
        raise BadContainer(f"{show_path(inspection.container.path)}: does not load: {reasons[0]}{more}")
