"""Grouped-query attention with norms on queries and keys.

Knows one block; must not know families, files or devices.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from picaflor.backends.api import GQA, Rows
from picaflor.models.base import MatrixSpec, Part, PlaneSpec, Scope, VectorSpec


@dataclass(frozen=True, slots=True)
class GroupedAttention:
    """`prefix` ends in a dot. Each head of q and k is normed, then rotated in halves over its whole width."""

    prefix: str
    layer: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    theta: float
    eps: float

    def parts(self) -> Iterator[Part]:
        """Projections, the two norms, keys and values."""
        kv_width = self.kv_heads * self.head_dim
        yield MatrixSpec.plain(f"{self.prefix}q_proj.weight", self.heads * self.head_dim, self.hidden, "attention")
        yield MatrixSpec.plain(f"{self.prefix}k_proj.weight", kv_width, self.hidden, "attention")
        yield MatrixSpec.plain(f"{self.prefix}v_proj.weight", kv_width, self.hidden, "attention")
        yield VectorSpec(f"{self.prefix}q_norm.weight", self.head_dim)
        yield VectorSpec(f"{self.prefix}k_norm.weight", self.head_dim)
        yield MatrixSpec.plain(f"{self.prefix}o_proj.weight", self.hidden, self.heads * self.head_dim, "attention")
        yield PlaneSpec(self.layer, "key", kv_width)
        yield PlaneSpec(self.layer, "value", kv_width)

    def record(self, scope: Scope, x: Rows, out: Rows) -> None:
        """Record out = o_proj(attention(x))."""
        recorder = scope.recorder
        kv_width = self.kv_heads * self.head_dim
        keys = recorder.kv_plane(self.layer, "key", kv_width)
        values = recorder.kv_plane(self.layer, "value", kv_width)
        query = scope.rows("query", self.heads * self.head_dim)
        key, value = scope.rows("key", kv_width), scope.rows("value", kv_width)
        self._record_rotated(scope, x, query, letter="q", heads=self.heads)
        self._record_rotated(scope, x, key, letter="k", heads=self.kv_heads)
        scope.matmul(x, f"{self.prefix}v_proj.weight", value)
        recorder.kv_write(key, keys)
        recorder.kv_write(value, values)
        kind = GQA(
            keys=keys,
            values=values,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            scale=self.head_dim**-0.5,
        )
        context = scope.rows("attention_out", self.heads * self.head_dim)
        recorder.attention(query, context, kind=kind)
        scope.matmul(context, f"{self.prefix}o_proj.weight", out)

    def _record_rotated(self, scope: Scope, x: Rows, out: Rows, *, letter: str, heads: int) -> None:
        scope.matmul(x, f"{self.prefix}{letter}_proj.weight", out)
        scope.rmsnorm(out, f"{self.prefix}{letter}_norm.weight", out, eps=self.eps, heads=heads)
        scope.recorder.rope(
            out,
            heads=heads,
            head_width=self.head_dim,
            start=0,
            dims=self.head_dim,
            theta=self.theta,
            style="half",
        )
