"""Operations on single rows, and the router, in operations of MLX.

Knows arrays `[rows, width]`; must not know formats, batches, models or recorders.
"""

from __future__ import annotations

from picaflor.backends.api import RouterSpec
from picaflor.backends.metal.library import Array, mx

ORDER_BYTES = 64 << 20
"""Memory for the comparisons of one block of rows."""
LN2_HIGH, LN2_LOW = 0.693145751953125, 1.4286067653302e-06
"""ln 2 in two parts; products of the first with numbers up to 256 are exact."""


def rmsnorm(x: Array, weight: Array, *, heads: int, eps: float) -> Array:
    """Each of `heads` equal parts of a row."""
    return mx.fast.rms_norm(x.reshape(x.shape[0], heads, -1), weight, eps).reshape(x.shape)


def layernorm(x: Array, weight: Array, bias: Array, *, eps: float) -> Array:
    """Mean and variance of a row."""
    return mx.fast.layer_norm(x, weight, bias, eps)


def silu_mul(gate: Array, up: Array) -> Array:
    """gate / (1 + exp(-gate)) * up."""
    return gate / (1.0 + exp(-gate)) * up


def exp(x: Array) -> Array:
    """e^x to a few roundings: MLX's CPU device loses about one per unit of x, so x is made small first."""
    x = mx.minimum(mx.maximum(x, -104.0), 89.0)
    n = mx.round(x * 1.4426950408889634)
    rest = (x - n * LN2_HIGH) - n * LN2_LOW
    whole = n.astype(mx.int32)
    half = whole >> 1
    return mx.exp(rest) * _power_of_two(half) * _power_of_two(whole - half)


def _power_of_two(n: Array) -> Array:
    return mx.view((n + 127) << 23, mx.float32)


def rope(x: Array, cos: Array, sin: Array, *, heads: int, start: int, interleaved: bool) -> Array:
    """Rotate 2 * half values of each head from `start`; cos and sin are `[rows, 1, half]`."""
    parts = x.reshape(x.shape[0], heads, -1)
    half = cos.shape[-1]
    turned = parts[..., start : start + 2 * half]
    a, b = (turned[..., 0::2], turned[..., 1::2]) if interleaved else (turned[..., :half], turned[..., half:])
    new = [parts[..., :start], a * cos - b * sin, b * cos + a * sin, parts[..., start + 2 * half :]]
    return mx.concatenate(new, axis=-1).reshape(x.shape)


def route(logits: Array, bias: Array | None, spec: RouterSpec) -> tuple[Array, Array]:
    """int32 ids and float32 weights `[rows, top_k]`, in routing order; equal choices in order of their ids."""
    scores = 1.0 / (1.0 + exp(-logits)) if spec.score == "sigmoid" else mx.softmax(logits, axis=-1, precise=True)
    choice = scores if bias is None else scores + bias
    choice = mx.where(mx.isnan(choice), -mx.inf, choice)
    if spec.groups > 1:
        grouped = choice.reshape(choice.shape[0], spec.groups, -1)
        best_two = mx.sort(grouped, axis=-1)[..., -2:].sum(axis=-1)
        kept = ranks(best_two) < spec.top_groups
        choice = mx.where(kept[..., None], grouped, -mx.inf).reshape(choice.shape)
    ids = mx.argsort(ranks(choice), axis=-1)[:, : spec.top_k]
    weights = mx.take_along_axis(scores, ids, axis=-1)
    if spec.normalise:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
    return ids.astype(mx.int32), weights * spec.scale


def ranks(values: Array) -> Array:
    """How many of a row come before each value: larger ones, and equal ones with a lower number. `[rows, n]`.

    All ranks of a row differ, so that sorting them leaves nothing to MLX's choice.
    """
    rows, n = values.shape
    step = max(1, ORDER_BYTES // (n * n))
    return mx.concatenate([_ranks(values[start : start + step]) for start in range(0, rows, step)])


def _ranks(values: Array) -> Array:
    mine, other = values[:, :, None], values[:, None, :]
    numbers = mx.arange(values.shape[1])
    earlier = (numbers[None, :] < numbers[:, None])[None]
    before = mx.logical_or(other > mine, mx.logical_and(other == mine, earlier))
    return before.astype(mx.int32).sum(axis=-1)
