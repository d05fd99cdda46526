"""The mixture of experts: a router, routed experts and, in some families, a shared one.

Knows one block; must not know families, files or devices.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from picaflor.backends.api import RouterSpec, Rows
from picaflor.models.base import ExpertSpec, MatrixSpec, Part, Scope, Source, VectorSpec
from picaflor.models.blocks.mlp import MLP


@dataclass(frozen=True, slots=True)
class MoE:
    """`prefix` ends in a dot. `bias`: the router has `gate.e_score_correction_bias`. `shared`: added, weight 1.

    An expert's matrices are tensors of their own (`experts.E.gate_proj.weight`, ...) or rows of two stacked ones:
    `experts.gate_up_proj` `[experts, 2*inner, hidden]`, gate first, and `experts.down_proj` `[experts, hidden, inner]`.
    """

    prefix: str
    layer: int
    hidden: int
    inner: int
    router: RouterSpec
    bias: bool
    shared: MLP | None = None

    def parts(self) -> Iterator[Part]:
        """The router, the experts, the shared expert."""
        yield MatrixSpec.plain(f"{self.prefix}gate.weight", self.router.experts, self.hidden, "router")
        if self.bias:
            yield VectorSpec(f"{self.prefix}gate.e_score_correction_bias", self.router.experts)
        for expert in range(self.router.experts):
            yield self._expert(expert)
        if self.shared is not None:
            yield from self.shared.parts()

    def _expert(self, expert: int) -> ExpertSpec:
        count, inner, hidden = self.router.experts, self.inner, self.hidden

        def spec(name: str, rows: int, cols: int, stack: str, stack_rows: int, first: int) -> MatrixSpec:
            own = f"{self.prefix}experts.{expert}.{name}_proj.weight"
            start = expert * stack_rows + first
            stacked = Source(f"{self.prefix}experts.{stack}", (count, stack_rows, cols), start)
            return MatrixSpec(own, rows, cols, "expert", (Source(own, (rows, cols)), stacked))

        return ExpertSpec(
            self.layer,
            expert,
            gate=spec("gate", inner, hidden, "gate_up_proj", 2 * inner, 0),
            up=spec("up", inner, hidden, "gate_up_proj", 2 * inner, inner),
            down=spec("down", hidden, inner, "down_proj", hidden, 0),
        )

    def record(self, scope: Scope, x: Rows, out: Rows) -> None:
        """Record out = sum of weighted chosen experts + shared(x)."""
        recorder = scope.recorder
        logits = scope.rows("router_logits", self.router.experts)
        ids = scope.rows("expert_ids", self.router.top_k, dtype="i32")
        weights = scope.rows("expert_weights", self.router.top_k)
        scope.matmul(x, f"{self.prefix}gate.weight", logits)
        bias = scope.bind.vector(f"{self.prefix}gate.e_score_correction_bias") if self.bias else None
        recorder.router(logits, bias, ids, weights, spec=self.router)
        layouts = scope.bind.layouts(self.layer)
        if self.shared is None:
            recorder.experts(x, ids, weights, out, layer=self.layer, layouts=layouts)
            return
        shared, shared_out = self.shared, scope.rows("shared_out", self.hidden)
        recorder.experts(
            x,
            ids,
            weights,
            out,
            layer=self.layer,
            layouts=layouts,
            beside=lambda: shared.record(scope, x, shared_out),
        )
        recorder.add(out, shared_out)
