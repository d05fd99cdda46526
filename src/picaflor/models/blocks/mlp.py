"""The dense gated MLP: `down(silu(gate(x)) * up(x))`.

Knows one block; must not know families, files or devices.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from picaflor.backends.api import Rows
from picaflor.models.base import Kind, MatrixSpec, Part, Scope


@dataclass(frozen=True, slots=True)
class MLP:
    """`prefix` ends in a dot; `inner` is the width between. A shared expert is this block too."""

    prefix: str
    hidden: int
    inner: int
    kind: Kind = "dense"

    def parts(self) -> Iterator[Part]:
        """Gate, up, down."""
        yield MatrixSpec.plain(f"{self.prefix}gate_proj.weight", self.inner, self.hidden, self.kind)
        yield MatrixSpec.plain(f"{self.prefix}up_proj.weight", self.inner, self.hidden, self.kind)
        yield MatrixSpec.plain(f"{self.prefix}down_proj.weight", self.hidden, self.inner, self.kind)

    def record(self, scope: Scope, x: Rows, out: Rows) -> None:
        """Record out = down(silu(gate(x)) * up(x))."""
        gate = scope.rows("mlp_gate", self.inner)
        up = scope.rows("mlp_up", self.inner)
        scope.matmul(x, f"{self.prefix}gate_proj.weight", gate)
        scope.matmul(x, f"{self.prefix}up_proj.weight", up)
        scope.recorder.silu_mul(gate, up, gate)
        scope.matmul(gate, f"{self.prefix}down_proj.weight", out)
