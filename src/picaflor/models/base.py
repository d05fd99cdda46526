"""What a family hands over: the tensors it needs and a way to record its forward pass.

Knows tensor names, shapes and recorder operations; must not know files, formats, devices or any one family.

A family is one file in this folder, named like the config's `model_type`, with one function

    build(config, present, *, context) -> Model

It reads the config, looks at which tensors are there (`present(name)`), and returns a `Model` made of blocks.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from picaflor.backends.api import ExpertLayout, Program, Recorder, Rows, Vector, Weight
from picaflor.errors import UnsupportedConfig
from picaflor.models.config import Config, Notices

Present = Callable[[str], bool]
Kind = Literal["embedding", "head", "attention", "kv_b", "indexer", "router", "dense", "shared", "expert", "draft"]

# Files of this folder that are no families.
_SUPPORT = ("__init__", "base", "config", "loading")

# Tensors that any checkpoint may carry and that hold nothing a forward pass needs.
_INERT = (r"__pad__\..*", r".*\.rotary_emb\.inv_freq")


@dataclass(frozen=True, slots=True)
class Source:
    """Where a matrix lies: all rows of tensor `tensor`, or its rows `start .. start+rows`.

    `shape` is the stored tensor's whole shape; all but its last dimension count as rows.
    """

    tensor: str
    shape: tuple[int, ...]
    start: int = 0

    @property
    def rows(self) -> int:
        """Rows of the stored tensor."""
        count = 1
        for extent in self.shape[:-1]:
            count *= extent
        return count


@dataclass(frozen=True, slots=True)
class MatrixSpec:
    """A matrix `[rows, cols]` that the model needs; the first of `sources` that exists is taken."""

    name: str
    rows: int
    cols: int
    kind: Kind
    sources: tuple[Source, ...]

    @classmethod
    def plain(cls, name: str, rows: int, cols: int, kind: Kind) -> MatrixSpec:
        """A matrix that is stored as a tensor of its own name."""
        return cls(name, rows, cols, kind, (Source(name, (rows, cols)),))


@dataclass(frozen=True, slots=True)
class VectorSpec:
    """A float parameter vector."""

    name: str
    length: int


@dataclass(frozen=True, slots=True)
class ExpertSpec:
    """One routed expert."""

    layer: int
    expert: int
    gate: MatrixSpec
    up: MatrixSpec
    down: MatrixSpec

    @property
    def matrices(self) -> tuple[MatrixSpec, MatrixSpec, MatrixSpec]:
        """Gate, up, down."""
        return (self.gate, self.up, self.down)


@dataclass(frozen=True, slots=True)
class PlaneSpec:
    """A cached quantity: `width` values per token."""

    layer: int
    name: str
    width: int


Part = MatrixSpec | VectorSpec | ExpertSpec | PlaneSpec


class Binder(Protocol):
    """Gives a recording the things that were loaded, by the names of the specs."""

    def matrix(self, name: str) -> Weight:
        """The resident matrix of that name."""
        ...

    def vector(self, name: str) -> Vector:
        """The parameter vector of that name."""
        ...

    def layouts(self, layer: int) -> Sequence[ExpertLayout]:
        """The slot layout of each expert of a layer."""
        ...


class Scope:
    """One recorder with its binder and the buffers that blocks share.

    `selection` is the last DSA selection of this pass: layers that share it read it.
    """

    def __init__(self, recorder: Recorder, bind: Binder) -> None:
        self.recorder = recorder
        self.bind = bind
        self.selection: Rows | None = None
        self._buffers: dict[tuple[str, int, str], Rows] = {}

    def rows(self, name: str, width: int, *, dtype: Literal["f32", "i32"] = "f32") -> Rows:
        """A buffer that every block which asks for the same name and width shares."""
        key = (name, width, dtype)
        if key not in self._buffers:
            self._buffers[key] = self.recorder.rows(width, dtype=dtype)
        return self._buffers[key]

    def matmul(self, x: Rows, name: str, out: Rows) -> None:
        """out = x @ W.T for the matrix of that name."""
        self.recorder.matmul(x, self.bind.matrix(name), out)

    def rmsnorm(self, x: Rows, name: str, out: Rows, *, eps: float, heads: int = 1) -> None:
        """Root-mean-square norm with the vector of that name."""
        self.recorder.rmsnorm(x, self.bind.vector(name), out, eps=eps, heads=heads)


class Block(Protocol):
    """A part of a layer: what it needs and how it is recorded."""

    def parts(self) -> Iterator[Part]:
        """Every tensor and cached plane of the block."""
        ...

    def record(self, scope: Scope, x: Rows, out: Rows) -> None:
        """Record out = block(x); x is already normed and is not changed."""
        ...


@dataclass(frozen=True, slots=True)
class Layer:
    """A pre-norm decoder layer: `x += attention(norm(x))`, then `x += mlp(norm(x))`."""

    prefix: str
    hidden: int
    eps: float
    attention: Block
    mlp: Block

    def parts(self) -> Iterator[Part]:
        """The two norms and everything of the two blocks."""
        yield VectorSpec(f"{self.prefix}input_layernorm.weight", self.hidden)
        yield from self.attention.parts()
        yield VectorSpec(f"{self.prefix}post_attention_layernorm.weight", self.hidden)
        yield from self.mlp.parts()

    def record(self, scope: Scope, x: Rows) -> None:
        """Record the layer; x is changed in place."""
        normed = scope.rows("normed", self.hidden)
        out = scope.rows("block_out", self.hidden)
        for norm, block in (("input_layernorm", self.attention), ("post_attention_layernorm", self.mlp)):
            scope.rmsnorm(x, f"{self.prefix}{norm}.weight", normed, eps=self.eps)
            block.record(scope, normed, out)
            scope.recorder.add(x, out)


@dataclass(frozen=True, slots=True)
class Forward:
    """A recorded main pass. `hidden`: every row after the final norm; `logits`: the output rows only."""

    program: Program
    hidden: Rows
    logits: Rows


@dataclass(frozen=True, slots=True)
class DraftForward:
    """A recorded draft step. Row p gets token p+1 with position p and, in `hidden_in`, the main model's `hidden` of p.

    `hidden`: every row before the draft's last norm, which the next step of a chain takes as `hidden_in`; `logits`:
    the output rows, for token p+2.
    """

    program: Program
    hidden_in: Rows
    hidden: Rows
    logits: Rows


class Draft(Protocol):
    """A draft head: its own tensors, recorded as a second program over the same recorder."""

    def parts(self) -> Iterator[Part]:
        """Every tensor and cached plane of the head."""
        ...

    def record(self, scope: Scope, model: Model) -> DraftForward:
        """Record one draft step."""
        ...


@dataclass(frozen=True)
class Model:
    """A family's answer for one config and one set of tensors: complete and decided.

    `tied`: the head is the embedding where no `lm_head.weight` exists. `ignored`: patterns of tensor names that this
    model may carry and that are not read.
    """

    family: str
    hidden: int
    vocabulary: int
    max_positions: int
    eps: float
    layers: tuple[Layer, ...]
    tied: bool = False
    draft: Draft | None = None
    ignored: tuple[str, ...] = ()

    def parts(self) -> Iterator[Part]:
        """Everything the model needs, in the order of the forward pass, the draft head last."""
        yield MatrixSpec.plain("model.embed_tokens.weight", self.vocabulary, self.hidden, "embedding")
        for layer in self.layers:
            yield from layer.parts()
        yield VectorSpec("model.norm.weight", self.hidden)
        names = ("lm_head.weight", "model.embed_tokens.weight") if self.tied else ("lm_head.weight",)
        sources = tuple(Source(name, (self.vocabulary, self.hidden)) for name in names)
        yield MatrixSpec("lm_head.weight", self.vocabulary, self.hidden, "head", sources)
        if self.draft is not None:
            yield from self.draft.parts()

    def matrices(self) -> Iterator[MatrixSpec]:
        """The resident matrices."""
        return (part for part in self.parts() if isinstance(part, MatrixSpec))

    def vectors(self) -> Iterator[VectorSpec]:
        """The resident vectors."""
        return (part for part in self.parts() if isinstance(part, VectorSpec))

    def experts(self) -> Iterator[ExpertSpec]:
        """The routed experts, by layer and number."""
        return (part for part in self.parts() if isinstance(part, ExpertSpec))

    def planes(self) -> Iterator[PlaneSpec]:
        """The cached quantities."""
        return (part for part in self.parts() if isinstance(part, PlaneSpec))

    def ignorable(self, name: str) -> bool:
        """True for a tensor that this model may carry and does not use."""
        return any(re.fullmatch(pattern, name) for pattern in (*_INERT, *self.ignored))

    def record(self, scope: Scope) -> Forward:
        """Record the main pass: embedding, layers, final norm of every row, head of the output rows."""
        recorder = scope.recorder
        x = scope.rows("x", self.hidden)
        recorder.embed(scope.bind.matrix("model.embed_tokens.weight"), x)
        scope.selection = None
        for layer in self.layers:
            layer.record(scope, x)
        hidden = scope.rows("hidden", self.hidden)
        scope.rmsnorm(x, "model.norm.weight", hidden, eps=self.eps)
        logits = self.record_head(scope, hidden)
        return Forward(recorder.finish(), hidden, logits)

    def record_head(self, scope: Scope, hidden: Rows) -> Rows:
        """Record logits of the batch's output rows; nothing may follow before `finish`."""
        picked = scope.rows("picked", self.hidden)
        scope.recorder.select_outputs(hidden, picked)
        logits = scope.rows("logits", self.vocabulary)  # made here so that it needs no more than `max_outputs` rows
        scope.matmul(picked, "lm_head.weight", logits)
        return logits

    def record_draft(self, scope: Scope) -> DraftForward | None:
        """Record one step of the draft head, or None where the model has none."""
        return None if self.draft is None else self.draft.record(scope, self)


class Family(Protocol):
    """The module of one family."""

    def build(self, config: Config, present: Present, *, context: int | None) -> Model:
        """The model for a config. `context`: the most positions this run will hold, None if not known.

        Raises UnsupportedConfig.
        """
        ...


def missing(parts: Iterator[Part], present: Present) -> list[str]:
    """Names of the tensors among `parts` that are not there."""
    absent: list[str] = []
    for part in parts:
        if isinstance(part, VectorSpec) and not present(part.name):
            absent.append(part.name)
        matrices = part.matrices if isinstance(part, ExpertSpec) else (part,) if isinstance(part, MatrixSpec) else ()
        absent += [spec.name for spec in matrices if not any(present(source.tensor) for source in spec.sources)]
    return absent


def families() -> list[str]:
    """The `model_type`s that load."""
    return sorted(path.stem for path in Path(__file__).parent.glob("*.py") if path.stem not in _SUPPORT)


def find_family(model_type: object, *, where: str = "config.json") -> Family:
    """The module of a family, found by its file name. Raises UnsupportedConfig listing the known ones."""
    known = families()
    if not isinstance(model_type, str):
        raise UnsupportedConfig(f"{where}: model_type is missing; accepted: {', '.join(known)}")
    if model_type not in known:
        raise UnsupportedConfig(f'{where}: model_type is "{model_type[:80]}"; accepted: {", ".join(known)}')
    family: Family = importlib.import_module(f"picaflor.models.{model_type}")
    return family


def build_model(
    values: Mapping[str, Any],
    tensors: Container[str],
    *,
    context: int | None = None,
    where: str = "config.json",
    notices: Notices | None = None,
) -> Model:
    """The model of a config and the names of the tensors that are there.

    Raises UnsupportedConfig; what is only worth a line goes to `notices`.
    """
    config = Config(values, where=where, notices=notices)
    family = find_family(values.get("model_type"), where=where)
    return family.build(config, lambda name: name in tensors, context=context)
