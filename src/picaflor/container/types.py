"""Names, spans and shapes of what lies on disk.

Knows bytes and names; must not know formats, families or devices.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One entry of a safetensors header.

    `offset` is absolute in the shard file (header included), both numbers in bytes. `dtype` is the header's string
    (`"BF16"`, `"F32"`, `"U8"`, `"F8_E4M3"`, ...). `shape` is checked against `nbytes` for all but U8 and I8.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    shard: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Shard:
    """One safetensors file; `index` is the number that `TensorInfo.shard` and `Span.shard` refer to."""

    index: int
    path: Path
    nbytes: int
    metadata: dict[str, str]


@dataclass(frozen=True, slots=True)
class Span:
    """A run of bytes in one shard, absolute in the file."""

    shard: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight `[rows, cols]` (`y = x @ W.T`) with its format settled: what `formats.resolve` returns.

    `format` is the format's stamp name. `group_size` is the number of inputs that share a scale (0 where the format
    fixes it). `spans` holds one span per plane of the format, in the order of `Format.planes`.
    """

    name: str
    format: str
    rows: int
    cols: int
    group_size: int
    spans: tuple[Span, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all planes."""
        return sum(span.nbytes for span in self.spans)


@dataclass(frozen=True, slots=True)
class Expert:
    """The three matrices of one routed expert: gate and up `[inner, hidden]`, down `[hidden, inner]`."""

    layer: int
    expert: int
    gate: Matrix
    up: Matrix
    down: Matrix

    @property
    def matrices(self) -> tuple[Matrix, Matrix, Matrix]:
        """Gate, up, down: the order in which every interface takes them."""
        return (self.gate, self.up, self.down)

    @property
    def nbytes(self) -> int:
        """Bytes of all planes of the three matrices."""
        return sum(matrix.nbytes for matrix in self.matrices)
