"""From a container and a model's specs to matrices with settled formats; nothing is read but headers.

Knows containers, format resolution and specs; must not know any family or device.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from picaflor.container.index import Container
from picaflor.container.strict_json import show, show_path
from picaflor.container.types import Expert, Matrix, TensorInfo
from picaflor.errors import BadContainer
from picaflor.formats.resolve import FormatRules, merge_rules, resolve, routed_stamp
from picaflor.models.base import ExpertSpec, MatrixSpec, Model, Source, VectorSpec, build_model
from picaflor.models.config import Notices

PREFIX = "model."
EMBEDDING = "embed_tokens.weight"
_PACKED = ("U8", "I8")
_IN_LAYER = re.compile(r"(^|.*\.)layers\.\d+\.")


@dataclass(frozen=True)
class ModelIndex:
    """Where everything that a model needs lies.

    `matrices` by spec name (a tied head has the spans of the embedding); `vectors` by spec name, float tensors of rank
    1; `experts` by layer, in order of number. `unused`: stored names of tensors that the model may carry.
    """

    matrices: dict[str, Matrix]
    vectors: dict[str, TensorInfo]
    experts: dict[int, tuple[Expert, ...]]
    unused: tuple[str, ...]


class TensorNames:
    """The names that specs use for the names that files use: some checkpoints put a longer prefix for `model.`."""

    def __init__(self, stored: Mapping[str, Any]) -> None:
        self._stored = stored
        self.prefix = _prefix(stored)
        parent = self.prefix.removesuffix(PREFIX)
        self._moved = {} if "lm_head.weight" in stored else {"lm_head.weight": f"{parent}lm_head.weight"}

    def stored(self, name: str) -> str:
        """The name in the files."""
        if name.startswith(PREFIX):
            return self.prefix + name.removeprefix(PREFIX)
        return self._moved.get(name, name)

    def canonical(self, stored: str) -> str:
        """The name in the specs."""
        return PREFIX + stored.removeprefix(self.prefix) if stored.startswith(self.prefix) else stored

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.stored(name) in self._stored


def _prefix(stored: Iterable[str]) -> str:
    """What stands for `model.`, told by where the embedding is."""
    found = [name.removesuffix(EMBEDDING) for name in stored if name.endswith(EMBEDDING) and not _IN_LAYER.match(name)]
    if PREFIX in found or not found:
        return PREFIX
    if len(found) > 1:
        raise BadContainer(f"more than one embedding: {', '.join(show(name + EMBEDDING) for name in sorted(found))}")
    return found[0]


@dataclass
class _Loader:
    """Resolves specs one by one and remembers which tensors they used."""

    container: Container
    names: TensorNames
    rules: FormatRules | None
    group_size: int | None
    claimed: set[str] = field(default_factory=set)
    doubts: dict[str, list[str]] = field(default_factory=dict)

    def matrix(self, spec: MatrixSpec) -> Matrix:
        """The matrix of a spec. Raises MissingTensor, BadContainer, UnknownFormat, AmbiguousFormat."""
        source = next((source for source in spec.sources if source.tensor in self.names), spec.sources[0])
        weight = self.container.require(self.names.stored(source.tensor))
        scale = self._scale(weight.name)
        self.claimed.update(part.name for part in (weight, scale) if part is not None)
        stamp = self.container.stamps.get(weight.name)
        rule = self.rules.match(weight.name) if self.rules is not None else None
        if len(source.shape) > 2:
            if weight.dtype not in _PACKED and weight.shape != source.shape:
                raise BadContainer(f"{weight.name}: shape {list(weight.shape)}; expected {list(source.shape)}")
            weight = _slice(weight, spec, source)
            scale = _slice(scale, spec, source) if scale is not None else None
        return resolve(
            spec.name,
            (spec.rows, spec.cols),
            weight,
            scale,
            stamp=routed_stamp(stamp) if spec.kind == "expert" else stamp,
            rule=rule,
            group_size=self.group_size,
            warn=lambda message: self._doubt(spec.name, message),
        )

    def _scale(self, name: str) -> TensorInfo | None:
        """The tensor that holds a weight's scales."""
        found = [info for info in map(self.container.get, (f"{name}.qs", f"{name}_scale_inv")) if info is not None]
        if len(found) > 1:
            raise BadContainer(f"{name}: two scale tensors, {found[0].name} and {found[1].name}; expected one")
        return found[0] if found else None

    def _doubt(self, name: str, message: str) -> None:
        self.doubts.setdefault(message.removeprefix(name), []).append(name)

    def vector(self, spec: VectorSpec) -> TensorInfo:
        """The tensor of a vector. Raises MissingTensor or BadContainer."""
        info = self.container.require(self.names.stored(spec.name))
        if info.dtype not in ("F32", "BF16", "F16") or info.shape != (spec.length,):
            raise BadContainer(
                f"{info.name}: {info.dtype} of shape {list(info.shape)}; expected F32, BF16 or F16 of [{spec.length}]"
            )
        self.claimed.add(info.name)
        return info

    def expert(self, spec: ExpertSpec) -> Expert:
        """The three matrices of an expert."""
        gate, up, down = (self.matrix(matrix) for matrix in spec.matrices)
        return Expert(spec.layer, spec.expert, gate, up, down)


def _slice(info: TensorInfo, spec: MatrixSpec, source: Source) -> TensorInfo:
    """The rows of one matrix inside a stacked tensor, or their scales (then flat), as a tensor of its own."""
    first, nbytes = info.nbytes * source.start, info.nbytes * spec.rows
    if first % source.rows or nbytes % source.rows:
        raise BadContainer(f"{info.name}: {spec.name} cannot be cut out of {info.nbytes} bytes for {source.rows} rows")
    nbytes //= source.rows
    shape = (spec.rows, spec.cols) if info.shape == source.shape else (nbytes,)
    return replace(info, shape=shape, offset=info.offset + first // source.rows, nbytes=nbytes)


def load_index(
    container: Container, model: Model, *, group_size: int | None = None, notices: Notices | None = None
) -> ModelIndex:
    """Find and check everything that `model` needs.

    A guessed group size that had rivals is one notice per shape. A tensor that nothing needs and that the model does
    not name as ignorable stops the load. Raises MissingTensor, BadContainer, UnknownFormat, AmbiguousFormat.
    """
    loader = _Loader(container, TensorNames(container.tensors), merge_rules(container.rules_json), group_size)
    matrices: dict[str, Matrix] = {}
    vectors: dict[str, TensorInfo] = {}
    experts: dict[int, list[Expert]] = {}
    for part in model.parts():
        if isinstance(part, MatrixSpec):
            matrices[part.name] = loader.matrix(part)
        elif isinstance(part, VectorSpec):
            vectors[part.name] = loader.vector(part)
        elif isinstance(part, ExpertSpec):
            experts.setdefault(part.layer, []).append(loader.expert(part))
    if model.tied and "lm_head.weight" in loader.names:
        (notices or Notices()).note(
            "config.json says that head and embedding are one (tie_word_embeddings) and lm_head.weight is stored too: "
            "the stored head is used"
        )
    unused = _unused(loader, model)
    for message, names in loader.doubts.items():
        more = f" (so are {len(names) - 1} more tensors)" if len(names) > 1 else ""
        (notices or Notices()).note(f"{names[0]}{message}{more}")
    return ModelIndex(matrices, vectors, {layer: tuple(found) for layer, found in experts.items()}, unused)


def _unused(loader: _Loader, model: Model) -> tuple[str, ...]:
    left = [name for name in loader.container.tensors if name not in loader.claimed]
    unknown = sorted(name for name in left if not model.ignorable(loader.names.canonical(name)))
    if unknown:
        shown = ", ".join(show(name) for name in unknown[:3])
        raise BadContainer(
            f"{show_path(loader.container.path)}: {len(unknown)} tensors fit nothing that {model.family} needs with "
            f"this config: {shown}{', ...' if len(unknown) > 3 else ''}"
        )
    return tuple(left)


def open_model(
    container: Container,
    *,
    overrides: Mapping[str, Any] | None = None,
    context: int | None = None,
    group_size: int | None = None,
    notices: Notices | None = None,
) -> tuple[Model, ModelIndex]:
    """The model in a container: its config, with `overrides` put over it, its family, and where its tensors lie."""
    values = {**container.config(), **(overrides or {})}
    where = show_path(container.path / "config.json")
    model = build_model(values, TensorNames(container.tensors), context=context, where=where, notices=notices)
    return model, load_index(container, model, group_size=group_size, notices=notices)
