"""What every recorder asks of the buffers it is given; each function raises ValueError where widths do not fit.

Knows rows, weights and specs; must not know any backend, kernel or model.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from picaflor.backends.api import GQA, MLA, KVPlane, RopeStyle, RouterSpec, Rows, Vector, Weight

FIRST_WRITTEN: Final[Mapping[str, int]] = MappingProxyType(
    {
        "embed": 1,
        "rmsnorm": 2,
        "layernorm": 3,
        "matmul": 2,
        "rope": 0,
        "add": 0,
        "silu_mul": 2,
        "select_outputs": 1,
        "kv_write": 1,
        "index_select": 3,
        "attention": 1,
        "router": 2,
        "experts": 3,
    }
)
"""By operation of a recorder, the first of its arguments that it writes to; the rows behind it are written too."""


def check(right: bool, text: str) -> None:
    """Raises ValueError."""
    if not right:
        raise ValueError(text)


def overlap(a: Rows, b: Rows) -> bool:
    """Whether two views share columns."""
    return bool(a.handle is b.handle and a.start < b.start + b.width and b.start < a.start + a.width)


def new_rows(width: int) -> None:
    """A new buffer."""
    check(width > 0, f"a buffer of width {width}")


def part(rows: Rows, start: int, width: int) -> None:
    """Columns of a buffer."""
    check(start >= 0 and width > 0 and start + width <= rows.width, f"columns {start}+{width} of {rows.width}")


def plane(known: KVPlane, width: int) -> None:
    """A plane that is asked for again."""
    check(known.width == width, f"plane {known.name} of layer {known.layer} is {known.width} wide, asked for {width}")


def embed(table: Weight, out: Rows) -> None:
    """Rows of a table."""
    check(out.width == table.cols, f"{table.name} has rows of {table.cols}, the buffer {out.width}")


def rmsnorm(x: Rows, weight: Vector, out: Rows, heads: int) -> None:
    """A norm of each of `heads` parts."""
    check(x.width == out.width == weight.length * heads, f"{weight.name}: {heads}x{weight.length} on {x.width}")


def layernorm(x: Rows, weight: Vector, bias: Vector, out: Rows) -> None:
    """A norm with a bias."""
    fits = x.width == out.width == weight.length == bias.length
    check(fits, f"{weight.name}: {weight.length}, bias {bias.length}, on {x.width} to {out.width}")


def matmul(x: Rows, weight: Weight, out: Rows) -> None:
    """out = x @ W.T."""
    fits = x.width == weight.cols and out.width == weight.rows
    check(fits, f"{weight.name} [{weight.rows}, {weight.cols}] from {x.width} to {out.width}")
    check(not overlap(x, out), f"{weight.name}: out aliases x")


def rope(x: Rows, *, heads: int, head_width: int, start: int, dims: int, style: RopeStyle) -> None:
    """A rotation in place."""
    check(x.width == heads * head_width, f"rope: {heads} heads of {head_width} in {x.width}")
    check(start >= 0 and dims > 0 and start + dims <= head_width, f"rope: {start}+{dims} of {head_width}")
    check(dims % 2 == 0, f"rope: {dims} values are no pairs")
    check(style in ("interleaved", "half"), f"rope style {style}")


def add(x: Rows, y: Rows) -> None:
    """x = x + y."""
    check(x.width == y.width, f"add: {x.width} and {y.width}")


def silu_mul(gate: Rows, up: Rows, out: Rows) -> None:
    """out = silu(gate) * up."""
    check(gate.width == up.width == out.width, f"silu_mul: {gate.width}, {up.width}, {out.width}")


def select_outputs(x: Rows, out: Rows, *, again: bool) -> None:
    """The output rows; `again`: the program has them already."""
    check(x.width == out.width, f"select_outputs: {x.width} to {out.width}")
    check(not overlap(x, out), "select_outputs: out aliases x")
    check(not again, "select_outputs a second time in one program")


def kv_write(x: Rows, into: KVPlane) -> None:
    """A row into its page."""
    check(x.width == into.width, f"kv_write: {x.width} into plane {into.name} of {into.width}")


def index_select(q: Rows, weights: Rows, keys: KVPlane, out: Rows, *, heads: int, head_dim: int, top_k: int) -> None:
    """The indexer's positions."""
    fits = q.width == heads * head_dim and weights.width == heads and keys.width == head_dim
    check(fits, f"index_select: {heads}x{head_dim}, q {q.width}, weights {weights.width}, keys {keys.width}")
    check(top_k > 0 and out.width == 1 + top_k, f"index_select: {top_k} positions into {out.width}")


def attention(q: Rows, out: Rows, kind: MLA | GQA) -> None:
    """Either kind."""
    check(not overlap(q, out), "attention: out aliases q")
    if isinstance(kind, MLA):
        _latents(q, out, kind)
    elif isinstance(kind, GQA):
        width = kind.kv_heads * kind.head_dim
        fits = q.width == out.width == kind.heads * kind.head_dim and kind.heads % kind.kv_heads == 0
        check(fits, f"attention: q {q.width}, out {out.width}, {kind.heads} heads over {kind.kv_heads}")
        check(kind.keys.width == kind.values.width == width, f"attention: planes are not {width} wide")
    else:
        raise ValueError(f"attention kind {type(kind).__name__}; accepted: MLA, GQA")


def _latents(q: Rows, out: Rows, kind: MLA) -> None:
    fits = q.width == kind.heads * (kind.nope + kind.rope) and out.width == kind.heads * kind.value
    check(fits, f"attention: q {q.width}, out {out.width} for {kind.heads} heads")
    shape = (kind.heads * (kind.nope + kind.value), kind.latent.width)
    check((kind.kv_b.rows, kind.kv_b.cols) == shape, f"{kind.kv_b.name} is not {shape}")
    check(kind.rope_key.width == kind.rope, f"rope key plane of {kind.rope_key.width} for {kind.rope}")


def router(logits: Rows, bias: Vector | None, ids: Rows, weights: Rows, spec: RouterSpec) -> None:
    """Choices of experts."""
    check(logits.width == spec.experts, f"router: {logits.width} logits for {spec.experts} experts")
    check(bias is None or bias.length == spec.experts, "router: bias of another length")
    check(ids.width == weights.width == spec.top_k, f"router: {ids.width}, {weights.width} for {spec.top_k}")
    check(spec.score in ("sigmoid", "softmax"), f"router score {spec.score}; accepted: sigmoid, softmax")
    grouped = spec.groups >= 1 and spec.experts % spec.groups == 0 and 1 <= spec.top_groups <= spec.groups
    check(grouped, f"router: {spec.top_groups} of {spec.groups} groups of {spec.experts} experts")
    reachable = spec.top_groups * (spec.experts // spec.groups) if spec.groups > 1 else spec.experts
    check(1 <= spec.top_k <= reachable, f"router: top {spec.top_k} of {reachable} experts")


def experts(x: Rows, ids: Rows, weights: Rows, out: Rows) -> None:
    """A weighted sum of experts."""
    check(x.width == out.width, f"experts: {x.width} to {out.width}")
    check(not overlap(x, out), "experts: out aliases x")
    whole = ids.start == weights.start == 0 and ids.width == weights.width and ids.dtype == "i32"
    check(whole, "experts: ids and weights must be whole buffers of the same width")
