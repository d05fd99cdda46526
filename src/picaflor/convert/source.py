"""Weights of an opened container, whatever they are stored in, as float32 rows.

Knows containers, formats and specs of `models.base`; must not know families, policies or the writer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from numpy.typing import NDArray

from picaflor import formats
from picaflor.container.index import Container
from picaflor.container.types import Matrix, Span, TensorInfo
from picaflor.convert.stored import ROW_BLOCK, plane_slice
from picaflor.errors import BadContainer, MissingTensor
from picaflor.formats import e8_iq3
from picaflor.formats.base import F32
from picaflor.formats.resolve import merge_rules, resolve, routed_stamp
from picaflor.models.base import ExpertSpec, MatrixSpec, Model, Source, VectorSpec

# Scale tensors beside a weight: ours, and that of block-FP8 checkpoints.
SCALE_SUFFIXES = (".qs", "_scale_inv")


class SourceMatrix:
    """A matrix of a spec inside a stored tensor: rows `start ..` of `stored`."""

    def __init__(self, container: Container, stored: Matrix, start: int, rows: int) -> None:
        self.stored = stored
        self._container = container
        self._start = start
        self._rows = rows
        self._form = formats.get(stored.format)

    @property
    def whole(self) -> bool:
        """True where the matrix is all of the stored tensor."""
        return self._start == 0 and self._rows == self.stored.rows

    def read(self, first: int, last: int) -> F32:
        """Rows `first .. last`, decoded (e8: rotated back). Raises ReadFailed."""
        stored = self.stored
        begin, end = self._start + first, self._start + last
        aligned = begin // ROW_BLOCK * ROW_BLOCK
        planes = []
        for plane, span in zip(self._form.planes, stored.spans, strict=True):
            part = plane_slice(plane, stored.rows, aligned, end, stored.cols, stored.group_size)
            planes.append(self._container.read(Span(span.shard, span.offset + part.start, part.stop - part.start)))
        weights = self._form.decode(tuple(planes), end - aligned, stored.cols, stored.group_size)[begin - aligned :]
        return e8_iq3.unrotate(weights) if self._form.activation.rotated else weights

    def planes(self) -> tuple[NDArray[Any], ...]:
        """All bytes of all planes, for a copy."""
        return tuple(self._container.read(span) for span in self.stored.spans)


class SourceModel:
    """Finds each spec's matrix in a container, with its format settled.

    `group_size` replaces the guess of a container without rules; `warn` gets one line per remark.
    """

    def __init__(self, container: Container, *, group_size: int | None, warn: Callable[[str], None]) -> None:
        self._container = container
        self._rules = merge_rules(container.rules_json)
        self._group_size = group_size if self._rules is None else None
        self._warn = warn

    def matrix(self, spec: MatrixSpec) -> SourceMatrix:
        """The matrix of a spec. Raises MissingTensor, BadContainer, UnknownFormat, AmbiguousFormat."""
        container = self._container
        source = self.source(spec)
        info = container.require(source.tensor)
        scales = [source.tensor + suffix for suffix in SCALE_SUFFIXES if self._has(source, suffix)]
        scale = container.require(scales[0]) if scales else None
        stamp = container.stamps.get(source.tensor)
        if len(source.shape) != 2:
            if info.shape != source.shape or scale is not None:
                raise BadContainer(
                    f"{source.tensor}: shape {list(info.shape)}, expected {list(source.shape)} of floats without scales"
                )
            info = _flattened(info, source)
        stored = resolve(
            source.tensor,
            (source.rows, spec.cols),
            info,
            scale,
            stamp=routed_stamp(stamp) if spec.kind == "expert" else stamp,
            rule=self._rules.match(source.tensor) if self._rules is not None else None,
            group_size=self._group_size,
            warn=self._warn,
        )
        if source.start + spec.rows > stored.rows:
            raise BadContainer(
                f"{source.tensor}: {stored.rows} rows, but {spec.name} needs rows {source.start} to "
                f"{source.start + spec.rows - 1}"
            )
        return SourceMatrix(container, stored, source.start, spec.rows)

    def source(self, spec: MatrixSpec) -> Source:
        """The first of a spec's sources that is there. Raises MissingTensor."""
        for source in spec.sources:
            if source.tensor in self._container:
                return source
        self._container.require(spec.sources[0].tensor)
        raise MissingTensor(spec.name)

    def vector(self, spec: VectorSpec) -> F32:
        """A vector's values. Raises MissingTensor, BadContainer."""
        return self._container.read_float(spec.name, (spec.length,))

    def used(self, model: Model) -> set[str]:
        """Names of all tensors that the model reads, scales included."""
        names: set[str] = set()
        for part in model.parts():
            if isinstance(part, VectorSpec):
                names.add(part.name)
            for spec in _matrices(part):
                source = self.source(spec)
                names.add(source.tensor)
                names.update(source.tensor + suffix for suffix in SCALE_SUFFIXES if self._has(source, suffix))
        return names

    def _has(self, source: Source, suffix: str) -> bool:
        return source.tensor + suffix in self._container


def _matrices(part: object) -> Iterator[MatrixSpec]:
    if isinstance(part, MatrixSpec):
        yield part
    elif isinstance(part, ExpertSpec):
        yield from part.matrices


def refuse_unknown(container: Container, model: Model, used: set[str]) -> tuple[str, ...]:
    """Names that the model may carry and does not use. Raises BadContainer for a name that nobody knows."""
    spare = []
    for name in container.tensors:
        if name in used:
            continue
        base = next((name.removesuffix(suffix) for suffix in SCALE_SUFFIXES if name.endswith(suffix)), name)
        if not model.ignorable(name) and not model.ignorable(base):
            shard = container.shards[container.tensors[name].shard].path.name
            raise BadContainer(
                f"{shard}: tensor {name} is no part of a {model.family} model with this config; nothing was written"
            )
        spare.append(name)
    return tuple(spare)


def _flattened(info: TensorInfo, source: Source) -> TensorInfo:
    """The entry of a stacked tensor seen as `[rows, cols]`."""
    return replace(info, shape=(source.rows, source.shape[-1]))
