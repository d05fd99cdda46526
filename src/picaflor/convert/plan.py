"""What a new container will hold: every tensor with its class, format and size, before a byte is read or written.

Knows models, policies and the writer; must not know where weights come from.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from picaflor import formats
from picaflor.container.writer import ContainerWriter, TensorSpec
from picaflor.convert.policy import Choice, Policy
from picaflor.convert.stored import named_arrays, stored_tensors
from picaflor.errors import PicaflorError, UsageError
from picaflor.formats.base import F32, Format
from picaflor.formats.rules import FormatRule, FormatRules
from picaflor.models.base import ExpertSpec, MatrixSpec, Model, PlaneSpec, VectorSpec

VECTORS = "norms and biases"
DRAFT = "draft layer"
_CLASSES: Mapping[str, str] = {
    "embedding": "embedding",
    "head": "head",
    "attention": "attention",
    "kv_b": "attention",
    "indexer": "indexer",
    "router": "router",
    "dense": "dense mlp",
    "shared": "shared expert",
    "expert": "routed experts",
    "draft": "draft input",
}


@dataclass(frozen=True, slots=True)
class PlannedMatrix:
    """One matrix and its tensors; `group` is the class that tables and reports count it under."""

    spec: MatrixSpec
    choice: Choice
    tensors: tuple[TensorSpec, ...]
    group: str

    @property
    def form(self) -> Format:
        """The format object."""
        return formats.get(self.choice.format)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class PlannedExpert:
    """Gate, up and down of one routed expert."""

    spec: ExpertSpec
    matrices: tuple[PlannedMatrix, PlannedMatrix, PlannedMatrix]


@dataclass(frozen=True, slots=True)
class PlannedVector:
    """One float32 vector."""

    spec: VectorSpec
    group: str


Planned = PlannedMatrix | PlannedExpert | PlannedVector
MatrixSource = Callable[[PlannedMatrix], tuple[NDArray[Any], ...]]
VectorSource = Callable[[VectorSpec], F32]


@dataclass(frozen=True, slots=True)
class ClassTotal:
    """One line of the sizes table: what a class has in one format."""

    group: str
    format: str
    group_size: int
    tensors: int
    parameters: int
    nbytes: int

    @property
    def bits(self) -> float:
        """True bits per parameter, scales included."""
        return 8 * self.nbytes / self.parameters

    def record(self) -> dict[str, Any]:
        """As JSON data."""
        return {
            "class": self.group,
            "format": self.format,
            "group_size": self.group_size,
            "tensors": self.tensors,
            "parameters": self.parameters,
            "bytes": self.nbytes,
            "bits_per_parameter": round(self.bits, 4),
        }


@dataclass(frozen=True)
class Plan:
    """A container to be: residents first, then experts by layer and number, then the draft layer in the same order."""

    items: tuple[Planned, ...]

    def matrices(self) -> Iterator[PlannedMatrix]:
        """Every matrix, those of experts too, in the order of the file."""
        for item in self.items:
            if isinstance(item, PlannedMatrix):
                yield item
            elif isinstance(item, PlannedExpert):
                yield from item.matrices

    def vectors(self) -> Iterator[PlannedVector]:
        """Every vector."""
        return (item for item in self.items if isinstance(item, PlannedVector))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, padding and headers not counted."""
        return sum(matrix.nbytes for matrix in self.matrices()) + sum(
            4 * vector.spec.length for vector in self.vectors()
        )

    def totals(self) -> list[ClassTotal]:
        """Sizes by class and format, in the order of first use."""
        counts: dict[tuple[str, str, int], list[int]] = {}
        for matrix in self.matrices():
            key = (matrix.group, matrix.choice.format, matrix.choice.group_size)
            _count(counts.setdefault(key, [0, 0, 0]), matrix.spec.rows * matrix.spec.cols, matrix.nbytes)
        for vector in self.vectors():
            _count(counts.setdefault((vector.group, "f32", 0), [0, 0, 0]), vector.spec.length, 4 * vector.spec.length)
        return [ClassTotal(*key, *count) for key, count in counts.items()]

    def declare(self, writer: ContainerWriter, *, matrix: MatrixSource, vector: VectorSource) -> None:
        """Declare everything to a writer; `matrix` and `vector` make the data when their turn comes."""
        for item in self.items:
            match item:
                case PlannedVector():
                    _declare_vector(writer, item, vector)
                case PlannedMatrix():
                    writer.add_group(item.tensors, _producer((item,), matrix))
                case PlannedExpert():
                    gate, up, down = item.matrices
                    writer.add_expert(
                        down=down.tensors, gate=gate.tensors, up=up.tensors, produce=_producer(item.matrices, matrix)
                    )


def make_plan(model: Model, policy: Policy, *, draft: bool = True, skip: Iterable[str] = ()) -> Plan:
    """Plan everything that `model` needs; `skip` names matrices that are not written (a tied head).

    Raises UsageError where a matrix cannot be stored in its class's format.
    """
    left_out = frozenset(skip)
    encodes: set[tuple[str, int]] = set()
    drafts = draft_names(model)
    lists: dict[tuple[bool, bool], list[Planned]] = {}
    for part in model.parts():
        if isinstance(part, PlaneSpec):
            continue
        name = part.gate.name if isinstance(part, ExpertSpec) else part.name
        is_draft = name in drafts
        if name in left_out or (is_draft and not draft):
            continue
        item = _planned(part, policy, is_draft)
        _check_encodes(item, encodes)
        lists.setdefault((is_draft, isinstance(part, ExpertSpec)), []).append(item)
    return Plan(tuple(item for key in sorted(lists) for item in lists[key]))


def rules_json(plan: Plan) -> str:
    """The text of `picaflor.formats`: one rule per pattern of names, exact names only where no pattern fits."""
    return rules_for({matrix.spec.name: matrix.choice for matrix in plan.matrices()}).to_json()


def rules_for(choices: Mapping[str, Choice]) -> FormatRules:
    """Rules that give every weight of `choices`, by tensor name, its format and group size."""
    rules = FormatRules(tuple(_rule(*item) for item in _patterns(choices)))
    wrong = [_rule(name, choice) for name, choice in choices.items() if not _says(rules.match(name), choice)]
    return FormatRules((*wrong, *rules.rules))


def _says(rule: FormatRule | None, choice: Choice) -> bool:
    return rule is not None and (rule.format, rule.group_size) == (choice.format, choice.group_size)


def _rule(pattern: str, choice: Choice) -> FormatRule:
    return FormatRule(pattern, choice.format, choice.group_size)


def _patterns(choices: Mapping[str, Choice]) -> list[tuple[str, Choice]]:
    """(pattern, choice): first what differs from the rule, by layer, then one pattern over all layers for the rest.

    Few patterns, because a reader tries them one by one for every tensor.
    """
    groups: dict[str, dict[str, Choice]] = {}
    for name, choice in choices.items():
        groups.setdefault(re.sub(r"\.\d+\.", ".*.", name), {})[name] = choice
    usual = {pattern: Counter(members.values()).most_common(1)[0][0] for pattern, members in groups.items()}
    unusual: dict[str, Choice] = {}
    for pattern, members in groups.items():
        for name, choice in members.items():
            if choice != usual[pattern]:
                unusual.setdefault(re.sub(r"experts\.\d+\.", "experts.*.", name), choice)
    return [*unusual.items(), *usual.items()]


def draft_names(model: Model) -> frozenset[str]:
    """Names of the draft head's parts; an expert counts by its gate."""
    if model.draft is None:
        return frozenset()
    parts = model.draft.parts()
    return frozenset(part.gate.name if isinstance(part, ExpertSpec) else part.name for part in parts)


def _planned(part: MatrixSpec | VectorSpec | ExpertSpec, policy: Policy, draft: bool) -> Planned:
    match part:
        case VectorSpec():
            return PlannedVector(part, VECTORS)
        case MatrixSpec():
            return _planned_matrix(part, policy, draft)
        case ExpertSpec():
            gate, up, down = (_planned_matrix(spec, policy, draft) for spec in part.matrices)
            return PlannedExpert(part, (gate, up, down))


def _planned_matrix(spec: MatrixSpec, policy: Policy, draft: bool) -> PlannedMatrix:
    choice = policy.choose(spec.kind, draft=draft)
    form = formats.get(choice.format)
    tensors = stored_tensors(spec.name, form, spec.rows, spec.cols, choice.group_size, resident=spec.kind != "expert")
    return PlannedMatrix(spec, choice, tensors, f"{DRAFT}: {_CLASSES[spec.kind]}" if draft else _CLASSES[spec.kind])


def _check_encodes(item: Planned, seen: set[tuple[str, int]]) -> None:
    """Encode one row of zeros of every new (format, row length): a length that cannot be written is refused early."""
    matrices = item.matrices if isinstance(item, PlannedExpert) else (item,) if isinstance(item, PlannedMatrix) else ()
    for matrix in matrices:
        key = (matrix.choice.format, matrix.spec.cols)
        if key in seen or matrix.form.encode is None:
            continue
        seen.add(key)
        try:
            matrix.form.encode(np.zeros((1, matrix.spec.cols), np.float32), matrix.choice.group_size)
        except PicaflorError as error:
            raise UsageError(f"{matrix.spec.name} [{matrix.spec.rows}, {matrix.spec.cols}]: {error}") from None


def _producer(matrices: tuple[PlannedMatrix, ...], source: MatrixSource) -> Callable[[], dict[str, NDArray[Any]]]:
    def produce() -> dict[str, NDArray[Any]]:
        arrays: dict[str, NDArray[Any]] = {}
        for matrix in matrices:
            arrays |= named_arrays(matrix.tensors, source(matrix))
        return arrays

    return produce


def _declare_vector(writer: ContainerWriter, item: PlannedVector, source: VectorSource) -> None:
    def make() -> NDArray[Any]:
        return np.ascontiguousarray(source(item.spec), dtype="<f4")

    writer.add(item.spec.name, "F32", (item.spec.length,), make)


def _count(count: list[int], parameters: int, nbytes: int) -> None:
    count[0] += 1
    count[1] += parameters
    count[2] += nbytes
