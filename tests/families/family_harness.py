"""A model opened on any backend for tests: whole container, all experts in memory, one sequence or several.

Must not know families. A backend is added to `BACKENDS` with the error that its contract allows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from memory_experts import MemoryExperts, allocate
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from picaflor.backends.api import Backend, Batch, Precision, Vector, Weight
from picaflor.backends.cpu.backend import CpuBackend
from picaflor.backends.reference import ReferenceBackend
from picaflor.container.index import Container
from picaflor.models.base import DraftForward, Forward, Scope
from picaflor.models.config import Notices
from picaflor.models.loading import open_model

DATA = Path(__file__).parent.parent / "data" / "families"
PAGE_TOKENS = 16


Tensors = dict[str, NDArray[Any]]


def rewrite(
    source: Path,
    target: Path,
    change: Callable[[Tensors], Tensors],
    *,
    config: Mapping[str, Any] | None = None,
    metadata: dict[str, str] | None = None,
) -> Path:
    """Copy a container with changed tensors and config fields (a field of None is removed) and other metadata."""
    tensors: Tensors = {}
    for shard in sorted(source.glob("*.safetensors")):
        tensors.update(load_file(shard))
    kept_tensors = {name: np.ascontiguousarray(array) for name, array in change(tensors).items()}
    save_file(kept_tensors, target / "a.safetensors", metadata=metadata)
    values = {**json.loads((source / "config.json").read_text()), **(config or {})}
    kept = {name: value for name, value in values.items() if value is not None}
    (target / "config.json").write_text(json.dumps(kept))
    return target


@dataclass(frozen=True)
class BackendCase:
    """A backend and the largest |logit - float64 oracle| that its contract allows on a tiny model."""

    name: str
    make: Callable[[], Backend]
    bound: float
    e8_bound: float
    float32_bound: float

    def __str__(self) -> str:
        return self.name


def _cpu(precision: Precision) -> Callable[[], Backend]:
    return lambda: CpuBackend(threads=2, precision=precision)


BACKENDS = [
    BackendCase("reference", ReferenceBackend, bound=2e-6, e8_bound=2e-6, float32_bound=1e-5),
    BackendCase("cpu-exact", _cpu("exact"), bound=1e-5, e8_bound=1e-5, float32_bound=1e-4),
    BackendCase("cpu-standard", _cpu("standard"), bound=5e-4, e8_bound=1e-3, float32_bound=5e-4),
]


def read_planes(container: Container, spans: Sequence[Any]) -> list[NDArray[np.uint8]]:
    """The bytes of a matrix, 64 readable bytes behind each plane."""
    planes = []
    for span in spans:
        plane = allocate(span.nbytes)
        container.read_into(span, plane.data)
        planes.append(plane)
    return planes


class TestModel:
    """An opened model. `run` computes tokens of one sequence; sequences share the pool of pages."""

    __test__ = False

    def __init__(
        self,
        path: Path,
        backend: Backend,
        *,
        overrides: Mapping[str, Any] | None = None,
        max_rows: int = 64,
        pages: int = 80,
        strict: bool = False,
    ) -> None:
        self.notices = Notices(strict=strict)
        with Container.open(path) as container:
            self.model, self.index = open_model(container, overrides=overrides, notices=self.notices)
            self._weights = {name: self._weight(backend, container, name) for name in self.index.matrices}
            self._vectors = {
                name: backend.vector(name, container.read_float(info.name)) for name, info in self.index.vectors.items()
            }
            self.experts = MemoryExperts(self.index.experts, container.read)
        self.backend = backend
        self.recorder = backend.recorder(max_rows=max_rows, max_outputs=max_rows, page_tokens=PAGE_TOKENS, pages=pages)
        scope = Scope(self.recorder, self)
        self.forward: Forward = self.model.record(scope)
        self.draft: DraftForward | None = self.model.record_draft(scope)
        self.max_rows = max_rows
        self._free = list(np.random.default_rng(7).permutation(pages))
        self._pages: dict[int, list[int]] = {}

    def _weight(self, backend: Backend, container: Container, name: str) -> Weight:
        matrix = self.index.matrices[name]
        planes = read_planes(container, matrix.spans)
        return backend.weight(name, matrix.format, (matrix.rows, matrix.cols), matrix.group_size, planes)

    def matrix(self, name: str) -> Weight:
        """Binder."""
        return self._weights[name]

    def vector(self, name: str) -> Vector:
        """Binder."""
        return self._vectors[name]

    def layouts(self, layer: int) -> Any:
        """Binder."""
        return self.experts.layouts(layer)

    def batch(self, tokens: Sequence[int], start: int, sequence: int, outputs: Sequence[int] | None = None) -> Batch:
        """Rows of one sequence; its pages are taken at random from the pool, so that none are in order."""
        end = start + len(tokens)
        held = self._pages.setdefault(sequence, [])
        while len(held) * PAGE_TOKENS < end:
            held.append(int(self._free.pop()))
        wanted = range(len(tokens)) if outputs is None else outputs
        return Batch(
            tokens=np.asarray(tokens, dtype=np.int32),
            sequences=np.zeros(len(tokens), dtype=np.int32),
            positions=np.arange(start, end, dtype=np.int32),
            pages=np.array([held], dtype=np.int32),
            outputs=np.asarray(wanted, dtype=np.int32),
        )

    def run(self, tokens: Sequence[int], *, start: int = 0, sequence: int = 0, chunk: int = 0) -> NDArray[Any]:
        """Logits `[tokens, vocabulary]` of every token, computed in chunks."""
        step = min(chunk or self.max_rows, self.max_rows)
        out = []
        for first in range(0, len(tokens), step):
            part = tokens[first : first + step]
            self.forward.program.run(self.batch(part, start + first, sequence), self.experts)
            out.append(np.array(self.forward.program.view(self.forward.logits, len(part)), dtype=np.float64))
        return np.concatenate(out)

    def hidden(self, count: int) -> NDArray[Any]:
        """Rows after the final norm of the last chunk."""
        return np.array(self.forward.program.view(self.forward.hidden, count))

    def greedy(self, prompt: Sequence[int], count: int, *, sequence: int = 0) -> list[int]:
        """The most likely next tokens."""
        logits = self.run(prompt, sequence=sequence)[-1]
        made: list[int] = []
        position = len(prompt)
        while len(made) < count:
            made.append(int(np.argmax(logits)))
            if len(made) < count:
                logits = self.run(made[-1:], start=position, sequence=sequence)[-1]
                position += 1
        return made
