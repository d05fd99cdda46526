"""The host's copy of what was recorded on a device: what computes on when a call of the device has failed.

Knows the CPU backend and the recorder contract; must not know any device. Nothing is recorded and no memory is
taken before it is needed. Keys and values come over page by page, through the same `kv_write` as everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from picaflor.backends.api import GQA, MLA, Batch, ExpertProvider, KVPlane, Program, Rows, Vector, Weight
from picaflor.backends.cpu.backend import CpuBackend
from picaflor.formats.base import F32

FINISH = "finish"


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a recorder, as it was made."""

    name: str
    arguments: tuple[Any, ...]
    options: dict[str, Any]


@dataclass(slots=True)
class HostTwin:
    """All programs of one recorder, on the CPU backend.

    `open` makes that backend, `fetch(plane, page)` gives a page's values `[tokens, width]` from the device,
    `values(vector)` those of a vector, `failed` is told the reason of the switch (and may raise). A weight's handle has
    its planes on the host as `host`. After `take_over` all programs run here.
    """

    open: Callable[[], CpuBackend]
    sizes: dict[str, int]
    fetch: Callable[[KVPlane, int], F32]
    failed: Callable[[str], None]
    values: Callable[[Vector], F32]
    calls: list[Call] = field(default_factory=list)
    planes: list[KVPlane] = field(default_factory=list)
    active: bool = False
    _programs: list[Program] = field(default_factory=list)
    _buffers: dict[int, Any] = field(default_factory=dict)
    _kept: list[Any] = field(default_factory=list)
    _backend: CpuBackend | None = None

    def take_over(self, reason: str, pages: Iterable[int]) -> None:
        """Record everything again on the host and bring these pages over."""
        self.failed(reason)
        self._backend = self.open()
        recorder = self._backend.recorder(**self.sizes)
        for call in self.calls:
            if call.name == FINISH:
                self._programs.append(recorder.finish())
            elif call.name == "rows":
                given, width, dtype = call.arguments
                self._buffers[id(given.handle)] = recorder.rows(width, dtype=dtype).handle
            else:
                arguments = [self._translated(recorder, word) for word in call.arguments]
                options = {name: self._translated(recorder, word) for name, word in call.options.items()}
                getattr(recorder, call.name)(*arguments, **options)
        for plane in self.planes:
            self._bring(recorder, plane, sorted(pages))
        self.active = True

    def run(self, number: int, batch: Batch, experts: ExpertProvider | None) -> None:
        """Run program `number` of those that were finished."""
        self._programs[number].run(batch, experts)

    def view(self, number: int, rows: Rows, count: int) -> NDArray[Any]:
        """The host's rows of a buffer of the device."""
        return self._programs[number].view(self._rows(rows), count)

    def write(self, number: int, rows: Rows, values: F32) -> None:
        """Fill the host's buffer."""
        self._programs[number].write(self._rows(rows), values)

    def _rows(self, rows: Rows) -> Rows:
        return Rows(rows.width, rows.dtype, self._buffers[id(rows.handle)], rows.start)

    def _translated(self, recorder: Any, word: Any) -> Any:
        """The host's counterpart of an argument."""
        if isinstance(word, Rows):
            return self._rows(word)
        if isinstance(word, KVPlane):
            return recorder.kv_plane(word.layer, word.name, word.width)
        if isinstance(word, Weight):
            assert self._backend is not None
            shape = (word.rows, word.cols)
            return self._backend.weight(word.name, word.format, shape, word.group_size, word.handle.host)
        if isinstance(word, Vector):
            assert self._backend is not None
            return self._backend.vector(word.name, self.values(word))
        if isinstance(word, MLA):
            parts = {name: self._translated(recorder, getattr(word, name)) for name in ("kv_b", "latent", "rope_key")}
            return MLA(**parts, heads=word.heads, nope=word.nope, rope=word.rope, value=word.value, scale=word.scale)
        if isinstance(word, GQA):
            parts = {name: self._translated(recorder, getattr(word, name)) for name in ("keys", "values")}
            return GQA(**parts, heads=word.heads, kv_heads=word.kv_heads, head_dim=word.head_dim, scale=word.scale)
        return word

    def _bring(self, recorder: Any, plane: KVPlane, pages: Iterable[int]) -> None:
        tokens, most = self.sizes["page_tokens"], self.sizes["max_rows"]
        given = recorder.rows(plane.width)
        recorder.kv_write(given, recorder.kv_plane(plane.layer, plane.name, plane.width))
        program = recorder.finish()
        for page in pages:
            values = self.fetch(plane, page)
            for start in range(0, tokens, most):
                count = min(most, tokens - start)
                program.write(given, values[start : start + count])
                program.run(_batch(page, start, count))
        self._kept.append(program)


def _batch(page: int, start: int, count: int) -> Batch:
    """Rows at positions of a sequence that has one page."""
    zeros = np.zeros(count, np.int32)
    positions = np.arange(start, start + count, dtype=np.int32)
    return Batch(zeros, zeros, positions, np.array([[page]], np.int32), np.empty(0, np.int32))
