"""Multi-head latent attention, absorbed, with an optional sparse selection (glm.md section 2).

Knows one block; must not know families, files or devices.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from picaflor.backends.api import MLA, Rows
from picaflor.models.base import MatrixSpec, Part, PlaneSpec, Scope, VectorSpec
from picaflor.models.blocks.indexer import Indexer


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """`prefix` ends in a dot. `latent_eps`: of the two latent norms.

    `sparse`: attend only to the selection, made by `indexer` or, without one, by the last layer that has one.
    """

    prefix: str
    layer: int
    hidden: int
    heads: int
    q_rank: int
    kv_rank: int
    nope: int
    rope: int
    value: int
    theta: float
    latent_eps: float
    indexer: Indexer | None = None
    sparse: bool = False

    def parts(self) -> Iterator[Part]:
        """Projections, latent norms, the indexer and the cached planes."""
        head = self.nope + self.rope
        prefix = self.prefix
        yield MatrixSpec.plain(f"{prefix}q_a_proj.weight", self.q_rank, self.hidden, "attention")
        yield VectorSpec(f"{prefix}q_a_layernorm.weight", self.q_rank)
        yield MatrixSpec.plain(f"{prefix}q_b_proj.weight", self.heads * head, self.q_rank, "attention")
        rows = self.kv_rank + self.rope
        yield MatrixSpec.plain(f"{prefix}kv_a_proj_with_mqa.weight", rows, self.hidden, "attention")
        yield VectorSpec(f"{prefix}kv_a_layernorm.weight", self.kv_rank)
        rows = self.heads * (self.nope + self.value)
        yield MatrixSpec.plain(f"{prefix}kv_b_proj.weight", rows, self.kv_rank, "kv_b")
        yield MatrixSpec.plain(f"{prefix}o_proj.weight", self.hidden, self.heads * self.value, "attention")
        yield PlaneSpec(self.layer, "latent", self.kv_rank)
        yield PlaneSpec(self.layer, "rope_key", self.rope)
        if self.indexer is not None:
            yield from self.indexer.parts()

    def record(self, scope: Scope, x: Rows, out: Rows) -> None:
        """Record out = o_proj(attention(x))."""
        recorder = scope.recorder
        q_latent, query = self._record_query(scope, x)
        latent_plane = recorder.kv_plane(self.layer, "latent", self.kv_rank)
        rope_plane = recorder.kv_plane(self.layer, "rope_key", self.rope)
        packed = scope.rows("kv_a", self.kv_rank + self.rope)
        latent = recorder.part(packed, 0, self.kv_rank)
        rope_key = recorder.part(packed, self.kv_rank, self.rope)
        scope.matmul(x, f"{self.prefix}kv_a_proj_with_mqa.weight", packed)
        scope.rmsnorm(latent, f"{self.prefix}kv_a_layernorm.weight", latent, eps=self.latent_eps)
        recorder.rope(
            rope_key, heads=1, head_width=self.rope, start=0, dims=self.rope, theta=self.theta, style="interleaved"
        )
        recorder.kv_write(latent, latent_plane)
        recorder.kv_write(rope_key, rope_plane)
        if self.indexer is not None:
            self.indexer.record(scope, x, q_latent)
        kind = MLA(
            kv_b=scope.bind.matrix(f"{self.prefix}kv_b_proj.weight"),
            latent=latent_plane,
            rope_key=rope_plane,
            heads=self.heads,
            nope=self.nope,
            rope=self.rope,
            value=self.value,
            scale=(self.nope + self.rope) ** -0.5,
        )
        context = scope.rows("attention_out", self.heads * self.value)
        recorder.attention(query, context, kind=kind, selection=scope.selection if self.sparse else None)
        scope.matmul(context, f"{self.prefix}o_proj.weight", out)

    def _record_query(self, scope: Scope, x: Rows) -> tuple[Rows, Rows]:
        head = self.nope + self.rope
        q_latent = scope.rows("q_latent", self.q_rank)
        query = scope.rows("query", self.heads * head)
        scope.matmul(x, f"{self.prefix}q_a_proj.weight", q_latent)
        scope.rmsnorm(q_latent, f"{self.prefix}q_a_layernorm.weight", q_latent, eps=self.latent_eps)
        scope.matmul(q_latent, f"{self.prefix}q_b_proj.weight", query)
        scope.recorder.rope(
            query,
            heads=self.heads,
            head_width=head,
            start=self.nope,
            dims=self.rope,
            theta=self.theta,
            style="interleaved",
        )
        return q_latent, query
