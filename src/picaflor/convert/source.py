"""Weights of an opened container, whatever they are stored in, as float32 rows.

Knows containers and formats; must not know families, policies or the writer.
"""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from picaflor import formats
from picaflor.container.index import Container, widen
from picaflor.container.types import Matrix, Span
from picaflor.convert.stored import ROW_BLOCK, plane_slice
from picaflor.formats import e8_iq3
from picaflor.formats.base import F32
from picaflor.models.loading import ModelIndex


class SourceModel:
    """Reads what an index found, by the names of the specs."""

    def __init__(self, container: Container, index: ModelIndex) -> None:
        self._container = container
        self._vectors = index.vectors
        self._matrices = dict(index.matrices)
        for experts in index.experts.values():
            for expert in experts:
                self._matrices |= {matrix.name: matrix for matrix in expert.matrices}

    def matrix(self, name: str) -> Matrix:
        """Where a matrix lies, and its format."""
        return self._matrices[name]

    def rows(self, name: str, first: int, last: int) -> F32:
        """Rows `first .. last` of a matrix, decoded (e8: rotated back). Raises ReadFailed."""
        stored = self._matrices[name]
        form = formats.get(stored.format)
        aligned = first // ROW_BLOCK * ROW_BLOCK
        planes = []
        for plane, span in zip(form.planes, stored.spans, strict=True):
            part = plane_slice(plane, stored.rows, aligned, last, stored.cols, stored.group_size)
            planes.append(self._container.read(Span(span.shard, span.offset + part.start, part.stop - part.start)))
        weights = form.decode(tuple(planes), last - aligned, stored.cols, stored.group_size)[first - aligned :]
        return e8_iq3.unrotate(weights) if form.activation.rotated else weights

    def planes(self, name: str) -> tuple[NDArray[Any], ...]:
        """All bytes of all planes of a matrix, for a copy. Raises ReadFailed."""
        return tuple(self._container.read(span) for span in self._matrices[name].spans)

    def vector(self, name: str) -> F32:
        """A vector's values. Raises ReadFailed."""
        info = self._vectors[name]
        return widen(self._container.read(info), info.dtype)
