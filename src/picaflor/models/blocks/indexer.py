"""The DSA indexer: which keys the attention of a row may see (glm.md section 3).

Knows one block; must not know families, files or devices.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from picaflor.backends.api import Rows
from picaflor.models.base import MatrixSpec, Part, PlaneSpec, Scope, VectorSpec

NORM_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class Indexer:
    """`prefix` ends in a dot; `rope` of each head's `head_dim` values are rotated."""

    prefix: str
    layer: int
    hidden: int
    q_rank: int
    heads: int
    head_dim: int
    top_k: int
    rope: int
    theta: float

    def parts(self) -> Iterator[Part]:
        """Its four matrices and vectors, and the plane of its keys."""
        yield MatrixSpec.plain(f"{self.prefix}wq_b.weight", self.heads * self.head_dim, self.q_rank, "indexer")
        yield MatrixSpec.plain(f"{self.prefix}wk.weight", self.head_dim, self.hidden, "indexer")
        yield VectorSpec(f"{self.prefix}k_norm.weight", self.head_dim)
        yield VectorSpec(f"{self.prefix}k_norm.bias", self.head_dim)
        yield MatrixSpec.plain(f"{self.prefix}weights_proj.weight", self.heads, self.hidden, "indexer")
        yield PlaneSpec(self.layer, "index_key", self.head_dim)

    def record(self, scope: Scope, x: Rows, q_latent: Rows) -> None:
        """Record the keys of the rows and their selections, and leave these in `scope.selection`.

        `x`: the normed input of the attention, `q_latent`: the normed low-rank query.
        """
        recorder, bind = scope.recorder, scope.bind
        plane = recorder.kv_plane(self.layer, "index_key", self.head_dim)
        key = scope.rows("index_key", self.head_dim)
        scope.matmul(x, f"{self.prefix}wk.weight", key)
        weight, bias = bind.vector(f"{self.prefix}k_norm.weight"), bind.vector(f"{self.prefix}k_norm.bias")
        recorder.layernorm(key, weight, bias, key, eps=NORM_EPS)
        self._rotate(scope, key, heads=1)
        recorder.kv_write(key, plane)

        query = scope.rows("index_query", self.heads * self.head_dim)
        scope.matmul(q_latent, f"{self.prefix}wq_b.weight", query)
        self._rotate(scope, query, heads=self.heads)
        weights = scope.rows("index_weights", self.heads)
        scope.matmul(x, f"{self.prefix}weights_proj.weight", weights)
        selection = scope.rows("selection", 1 + self.top_k, dtype="i32")
        recorder.index_select(
            query, weights, plane, selection, heads=self.heads, head_dim=self.head_dim, top_k=self.top_k
        )
        scope.selection = selection

    def _rotate(self, scope: Scope, x: Rows, *, heads: int) -> None:
        scope.recorder.rope(
            x, heads=heads, head_width=self.head_dim, start=0, dims=self.rope, theta=self.theta, style="interleaved"
        )
