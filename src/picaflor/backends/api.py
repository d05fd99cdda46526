"""The contract between models and devices: recorded programs over rows of (sequence, position).

Knows shapes, formats by name and operations; must not know any concrete device, family or file. No tensor type of any
framework appears here: host arrays are numpy, everything else is a handle that its backend understands.

A family records its forward pass once, at load, through a `Recorder`. Nothing is computed while recording. The result
is a `Program`; running it on a `Batch` computes every row of the batch. Rows know their sequence and position; there is
no "the" KV cache. docs/design/contracts.md states each operation's arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from picaflor.formats.base import F32

I32 = NDArray[np.int32]
Precision = Literal["fast", "standard", "exact"]
RopeStyle = Literal["interleaved", "half"]


@dataclass(frozen=True, slots=True)
class Weight:
    """A matrix `[rows, cols]` that its backend holds; `handle` is the backend's own."""

    name: str
    format: str
    rows: int
    cols: int
    group_size: int
    handle: Any = field(repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Vector:
    """A float32 parameter vector (norm weight, bias) that its backend holds."""

    name: str
    length: int
    handle: Any = field(repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Rows:
    """A buffer with one row of `width` values per batch row; `handle` is the backend's own.

    `start` is the first column inside the underlying buffer: `Recorder.part` makes views.
    """

    width: int
    dtype: Literal["f32", "i32"]
    handle: Any = field(repr=False, compare=False)
    start: int = 0


@dataclass(frozen=True, slots=True)
class KVPlane:
    """One quantity that is cached per token and layer (latent, rope key, index key, key, value).

    `width` values per token. `format` names a `formats.kv` object. Storage is a pool of pages of a fixed number of
    tokens; which pages belong to a sequence comes with each batch.
    """

    layer: int
    name: str
    width: int
    format: str
    handle: Any = field(repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class MLA:
    """Multi-head latent attention, absorbed for every number of rows (glm.md section 2).

    q is `[heads * (nope + rope)]` per row, rope part already rotated; out is `[heads * value]`. `kv_b` is
    `[heads * (nope + value), latent.width]`. `scale` multiplies scores.
    """

    kv_b: Weight
    latent: KVPlane
    rope_key: KVPlane
    heads: int
    nope: int
    rope: int
    value: int
    scale: float


@dataclass(frozen=True, slots=True)
class GQA:
    """Grouped-query attention: q is `[heads * head_dim]`, keys and values `[kv_heads * head_dim]` per token."""

    keys: KVPlane
    values: KVPlane
    heads: int
    kv_heads: int
    head_dim: int
    scale: float


@dataclass(frozen=True, slots=True)
class RouterSpec:
    """The router's choice from its logits (glm.md section 4).

    `score`: sigmoid or softmax over all experts. `groups` > 1: only experts of the `top_groups` best groups (sum of the
    two best biased scores of each) can be chosen. Choice is by score + bias, ties to the lowest id, in descending
    order: the routing order. Weights are the scores without bias, divided by (sum + 1e-20) if `normalise`, times
    `scale`.
    """

    score: Literal["sigmoid", "softmax"]
    experts: int
    top_k: int
    normalise: bool
    scale: float
    groups: int = 1
    top_groups: int = 1


@dataclass(frozen=True, slots=True)
class MatrixLayout:
    """Where one matrix of an expert lies inside its slot; one offset in bytes per plane of the format."""

    format: str
    rows: int
    cols: int
    group_size: int
    offsets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ExpertLayout:
    """One routed expert in one contiguous slot of `nbytes` bytes; 64 more must be readable behind it."""

    gate: MatrixLayout
    up: MatrixLayout
    down: MatrixLayout
    nbytes: int


@dataclass(slots=True)
class ReductionCounts:
    """Choices of experts that a reduction saw, and those that it took away."""

    chosen: int = 0
    dropped: int = 0


def _nothing_resident(layer: int) -> Collection[int]:
    return ()


@dataclass(frozen=True, slots=True)
class Reduction:
    """A lossy mode: rows that get fewer experts than the router chose (backends/reduction.py says which).

    `rows`: bool `[n]`, by batch row. `top_p`: part of a row's weights that its experts must reach. `loads`: most
    experts of a layer that these rows may have read from disk in one step; `resident(layer)` are those that cost none.
    """

    rows: NDArray[np.bool_]
    top_p: float = 1.0
    loads: int | None = None
    resident: Callable[[int], Collection[int]] = _nothing_resident
    counts: ReductionCounts = field(default_factory=ReductionCounts)


@dataclass(slots=True)
class Batch:
    """Rows to compute in one step.

    `tokens`, `sequences`, `positions`: int32 `[n]`; `sequences` index the rows of `pages`, int32
    `[sequences, pages per sequence]`: page numbers in order of position. Rows of one sequence ascend in position; keys
    and values of the batch's own rows are visible to later rows. `outputs`: int32, the rows whose logits are wanted.
    `reduction`: None, or a lossy mode, which the caller knows the backend to have. `layer_done(done, total)` is called
    after each MoE layer where the backend can; what it raises ends the run.
    """

    tokens: I32
    sequences: I32
    positions: I32
    pages: I32
    outputs: I32
    reduction: Reduction | None = None
    layer_done: Callable[[int, int], None] | None = None


class ExpertLease(Protocol):
    """Experts of one layer held in memory until released."""

    def batches(self) -> Iterator[tuple[I32, NDArray[np.uint64]]]:
        """Yield (expert ids, slot addresses), first what is resident, then each as its read succeeds.

        Raises ReadFailed naming the file when a read fails; the lease is then still released cleanly.
        """
        ...


class ExpertProvider(Protocol):
    """What a program asks for experts: the store."""

    def acquire(self, layer: int, experts: I32) -> AbstractContextManager[ExpertLease]:
        """Hold the given distinct experts of a layer. Reads of missing ones start at once."""
        ...


@runtime_checkable
class AheadProvider(ExpertProvider, Protocol):
    """A provider that reads ahead what a program expects to ask for next."""

    def reads_ahead(self, layer: int) -> bool:
        """Whether to tell `expect` about a layer; asked in steps of a few rows only."""
        ...

    def expect(self, layer: int, experts: I32) -> None:
        """Distinct experts that will probably be asked for, the likeliest first. Returns at once; raises nothing."""
        ...


@runtime_checkable
class SharingProvider(ExpertProvider, Protocol):
    """A provider that shares experts with a device's memory, so that no expert need be in both."""

    def elsewhere(self, layer: int, experts: I32) -> None:
        """A device holds these experts now and asks for them no more, unless it drops them. Returns at once."""
        ...


class Program(Protocol):
    """A recorded forward pass."""

    def run(self, batch: Batch, experts: ExpertProvider | None = None) -> None:
        """Compute all rows. Raises ReadFailed; the buffers' contents are undefined then, the KV cache of positions
        before the batch is unharmed."""
        ...

    def view(self, rows: Rows, count: int) -> NDArray[Any]:
        """The first `count` rows of a buffer as a host array `[count, width]`; valid until the next run."""
        ...

    def write(self, rows: Rows, values: F32) -> None:
        """Fill an input buffer's first rows before `run`."""
        ...

    def seconds(self) -> dict[str, float]:
        """Time per class since the last call, in seconds: attention, matmul, experts, router, head, other."""
        ...


@dataclass(frozen=True, slots=True)
class Chance:
    """How one token is drawn, as `Backend.sample` takes it."""

    temperature: float
    top_p: float
    uniform: float


@runtime_checkable
class DrawingProgram(Protocol):
    """A program that draws tokens where the logits lie, so that they need not come to the host."""

    def draw(self, rows: Rows, chances: Sequence[Chance]) -> list[int]:
        """One token from each of a buffer's first rows of logits; NO_TOKEN where none of a row is finite."""
        ...


NO_TOKEN: Final = -1
"""In the place of a token: no logit of the row is finite."""


class Recorder(Protocol):
    """Operations, recorded in order. Each acts on every row of the batch; `out` may not alias an input unless said."""

    def rows(self, width: int, *, dtype: Literal["f32", "i32"] = "f32") -> Rows:
        """A new buffer."""
        ...

    def part(self, rows: Rows, start: int, width: int) -> Rows:
        """Columns `start .. start+width` of a buffer, as a view."""
        ...

    def kv_plane(self, layer: int, name: str, width: int) -> KVPlane:
        """A cached quantity; asking again for the same (layer, name) returns the same plane."""
        ...

    def embed(self, table: Weight, out: Rows) -> None:
        """out = table[token]; a token outside the table gives zeros."""
        ...

    def rmsnorm(self, x: Rows, weight: Vector, out: Rows, *, eps: float, heads: int = 1) -> None:
        """Root-mean-square norm of each of `heads` equal parts of the row; out may be x."""
        ...

    def layernorm(self, x: Rows, weight: Vector, bias: Vector, out: Rows, *, eps: float) -> None:
        """Mean-variance norm; out may be x."""
        ...

    def matmul(self, x: Rows, weight: Weight, out: Rows) -> None:
        """out = x @ W.T."""
        ...

    def rope(
        self, x: Rows, *, heads: int, head_width: int, start: int, dims: int, theta: float, style: RopeStyle
    ) -> None:
        """Rotate `dims` values from `start` of each head in place, at the row's position.

        interleaved: pairs (2j, 2j+1) in, halves out (glm.md section 2.3). half: pairs (j, j + dims/2).
        """
        ...

    def add(self, x: Rows, y: Rows) -> None:
        """x = x + y."""
        ...

    def silu_mul(self, gate: Rows, up: Rows, out: Rows) -> None:
        """out = gate / (1 + exp(-gate)) * up; out may be gate."""
        ...

    def kv_write(self, x: Rows, plane: KVPlane) -> None:
        """Store the row in the sequence's page at the row's position."""
        ...

    def index_select(
        self, q: Rows, weights: Rows, keys: KVPlane, out: Rows, *, heads: int, head_dim: int, top_k: int
    ) -> None:
        """DSA selection (glm.md section 3): out is i32 `[1 + top_k]`: count, then ascending positions; count -1
        (all keys) where position + 1 <= top_k."""
        ...

    def attention(self, q: Rows, out: Rows, *, kind: MLA | GQA, selection: Rows | None = None) -> None:
        """Causal attention over the row's own sequence, or over the selected positions."""
        ...

    def router(self, logits: Rows, bias: Vector | None, ids: Rows, weights: Rows, *, spec: RouterSpec) -> None:
        """ids i32 and weights f32 `[top_k]`, in routing order."""
        ...

    def experts(
        self,
        x: Rows,
        ids: Rows,
        weights: Rows,
        out: Rows,
        *,
        layer: int,
        layouts: Sequence[ExpertLayout],
        beside: Callable[[], None] | None = None,
    ) -> None:
        """out = sum over k, in routing order, of weights[k] * expert[ids[k]](x); `layouts[e]` for each expert.

        `beside` records what neither needs out nor writes to any of these rows: it may run while experts are read.
        """
        ...

    def select_outputs(self, x: Rows, out: Rows) -> None:
        """out = the batch's output rows of x, packed; what is recorded after this acts on those rows only."""
        ...

    def finish(self) -> Program:
        """The program of all that was recorded since the last finish (buffers and planes stay valid)."""
        ...


@dataclass(frozen=True, slots=True)
class ExpertTraffic:
    """What a device with memory of its own was asked for so far: experts wanted that were there, experts and bytes that
    were sent to it, how many experts its memory holds now, and experts and bytes that the host computed with."""

    hits: int = 0
    sent: int = 0
    sent_bytes: int = 0
    held: int = 0
    host: int = 0
    host_bytes: int = 0


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """Bytes per second that a device's memory gives to reads, and that host memory sends to it."""

    memory: float
    link: float


class Backend(Protocol):
    """A device that runs programs."""

    name: str

    def weight(
        self, name: str, format_name: str, shape: tuple[int, int], group_size: int, planes: Sequence[NDArray[Any]]
    ) -> Weight:
        """Hold a matrix. Host planes of the CPU backend are kept, not copied: 64 bytes must be readable behind
        each (`allocate`). Raises UnsupportedKernel."""
        ...

    def vector(self, name: str, values: F32) -> Vector:
        """Hold a parameter vector."""
        ...

    def recorder(self, *, max_rows: int, max_outputs: int, page_tokens: int, pages: int) -> Recorder:
        """Start recording; buffers have `max_rows` rows, each KV plane `pages` pages of `page_tokens` tokens."""
        ...

    def sample(self, logits: F32, *, temperature: float, top_p: float, uniform: float) -> int:
        """One token from logits `[vocabulary]` (glm.md section 6; argmax at temperature 0, lowest id on ties)."""
        ...


def draw_rows(rows: F32, chances: Sequence[Chance], sample: Callable[..., int]) -> list[int]:
    """One token from each row of logits `[rows, vocabulary]` on the host, by `Backend.sample`; NO_TOKEN where no logit
    of a row is finite."""
    return [
        sample(row, temperature=chance.temperature, top_p=chance.top_p, uniform=chance.uniform)
        if np.isfinite(row).any()
        else NO_TOKEN
        for row, chance in zip(rows, chances, strict=True)
    ]
