"""Cases of whole blocks as families record them: what one operation hands to the next.

Knows blocks and the oracle; must not know kernels or devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from picaflor.backends.api import ExpertLayout, RouterSpec, Vector, Weight
from picaflor.backends.table import NO_FORMAT
from picaflor.conformance import oracle, plain
from picaflor.conformance.case import (
    Case,
    Device,
    Expect,
    Matrix,
    Run,
    Slots,
    f32_matrix,
    hold,
    make_batch,
    make_matrix,
    random,
    start,
)
from picaflor.conformance.check import ROUNDING, Array, Expected
from picaflor.conformance.oracle import Approx
from picaflor.conformance.products import apply, expert_sum
from picaflor.formats.base import F32
from picaflor.models.base import Scope
from picaflor.models.blocks.mlp import MLP
from picaflor.models.blocks.moe import MoE

HIDDEN, INNER, SHARED = 72, 40, 48
LAYER = 3
ROUTER = RouterSpec("sigmoid", 6, 3, True, 2.5)


@dataclass(frozen=True)
class _Binder:
    """What a block asks for by name."""

    weights: Mapping[str, Weight]
    vectors: Mapping[str, Vector]
    slots: Slots

    def matrix(self, name: str) -> Weight:
        """The matrix of that name."""
        return self.weights[name]

    def vector(self, name: str) -> Vector:
        """The vector of that name."""
        return self.vectors[name]

    def layouts(self, layer: int) -> Sequence[ExpertLayout]:
        """Where the experts of a layer lie."""
        return self.slots.layouts(layer)


def block_cases() -> Iterator[Case]:
    """A mixture of experts with a shared one, before any norm can hide an error."""
    for count in (1, 7):
        yield _moe(count)


def _moe(count: int) -> Case:
    name = f"block with a shared expert, S {count}"

    def prepare() -> tuple[Run, Expect]:
        rng = random(f"moe {name}")
        x = rng.standard_normal((count, HIDDEN)).astype(np.float32)
        bias = (0.2 * rng.standard_normal(ROUTER.experts)).astype(np.float32)
        gate = f32_matrix((rng.standard_normal((ROUTER.experts, HIDDEN)) / 6).astype(np.float32))
        shapes = ((SHARED, HIDDEN), (SHARED, HIDDEN), (HIDDEN, SHARED))
        shared = [f32_matrix((rng.standard_normal(shape) / 8).astype(np.float32)) for shape in shapes]
        inner = ((INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER))
        members = []
        for _ in range(ROUTER.experts):
            up_gate_down = [make_matrix(rng, "f16", *shape) for shape in inner]
            members.append((up_gate_down[0], up_gate_down[1], up_gate_down[2]))
        matrices = {
            "mlp.gate.weight": gate,
            **{f"shared.{key}_proj.weight": m for key, m in zip(("gate", "up", "down"), shared, strict=True)},
        }

        def run(device: Device) -> list[Array]:
            slots = Slots(device, {LAYER: members})
            weights = {key: hold(device, matrix, key) for key, matrix in matrices.items()}
            binder = _Binder(weights, {"mlp.gate.e_score_correction_bias": device.vector("bias", bias)}, slots)
            scope = Scope(start(device), binder)
            given, out = scope.rows("given", HIDDEN), scope.rows("out", HIDDEN)
            block = MoE("mlp.", LAYER, HIDDEN, INNER, ROUTER, True, MLP("shared.", HIDDEN, SHARED, "shared"))
            block.record(scope, given, out)
            program = scope.recorder.finish()
            program.write(given, x)
            program.run(make_batch(range(count)), slots)
            return [program.view(out, count).copy()]

        def expect(precision: str) -> list[Expected]:
            right = _right(x, gate, bias, members, shared, precision)
            return [Expected(right.values, right.error, right.terms)]

        return run, expect

    return Case("moe", NO_FORMAT, name, prepare)


def _right(
    x: F32,
    gate: Matrix,
    bias: F32,
    members: Sequence[tuple[Matrix, Matrix, Matrix]],
    shared: Sequence[Matrix],
    precision: str,
) -> Approx:
    """The routed sum plus the shared expert."""
    rows = oracle.exactly(x.astype(np.float64))
    logits = apply(rows, gate, precision)
    routed = [plain.route(row, bias.astype(np.float64), ROUTER) for row in logits.values]
    ids, weights = np.stack([row[0] for row in routed]), np.stack([row[1] for row in routed])
    out = expert_sum(members, x, ids, weights, precision)
    off = 2 * float(logits.error.max()) + 40 * ROUNDING
    hidden = oracle.gated(apply(rows, shared[0], precision), apply(rows, shared[1], precision))
    added = apply(hidden, shared[2], precision)
    values = out.values + added.values
    error = out.error + added.error + off * out.terms + ROUNDING * np.abs(values)
    return Approx(values, error, out.terms + added.terms)
