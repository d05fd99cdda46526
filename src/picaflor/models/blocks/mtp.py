"""The multi-token-prediction head: one extra decoder layer that drafts the token after the next (glm.md section 5).

Knows one block; must not know families, files or devices.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from picaflor.models.base import DraftForward, Layer, MatrixSpec, Model, Part, Scope, VectorSpec


@dataclass(frozen=True, slots=True)
class MTPHead:
    """Embedding and head are the main model's. `layer` has the head's own tensors and cached planes."""

    layer: Layer

    def parts(self) -> Iterator[Part]:
        """The two input norms, the mixing matrix, the decoder layer, the last norm."""
        prefix, hidden = self.layer.prefix, self.layer.hidden
        yield VectorSpec(f"{prefix}enorm.weight", hidden)
        yield VectorSpec(f"{prefix}hnorm.weight", hidden)
        yield MatrixSpec.plain(f"{prefix}eh_proj.weight", hidden, 2 * hidden, "draft")
        yield from self.layer.parts()
        yield VectorSpec(f"{prefix}shared_head.norm.weight", hidden)

    def record(self, scope: Scope, model: Model) -> DraftForward:
        """Record one draft step as a program of its own."""
        recorder, prefix, hidden, eps = scope.recorder, self.layer.prefix, self.layer.hidden, self.layer.eps
        hidden_in = scope.rows("draft_in", hidden)
        both = scope.rows("draft_both", 2 * hidden)
        x = scope.rows("x", hidden)
        recorder.embed(scope.bind.matrix("model.embed_tokens.weight"), x)
        scope.rmsnorm(x, f"{prefix}enorm.weight", recorder.part(both, 0, hidden), eps=eps)
        scope.rmsnorm(hidden_in, f"{prefix}hnorm.weight", recorder.part(both, hidden, hidden), eps=eps)
        scope.matmul(both, f"{prefix}eh_proj.weight", x)
        scope.selection = None
        self.layer.record(scope, x)
        normed = scope.rows("draft_hidden", hidden)
        scope.rmsnorm(x, f"{prefix}shared_head.norm.weight", normed, eps=eps)
        logits = model.record_head(scope, normed)
        return DraftForward(recorder.finish(), hidden_in, x, logits)
