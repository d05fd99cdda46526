"""Programs with experts: segments, leases in any order, sums in routing order, failures of a provider."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest
from numpy.typing import NDArray
from ops_support import VARIANTS, backend, batch, f32_weight, ints, recorder, same_bits

from picaflor.backends.api import I32, ExpertLayout, MatrixLayout, Program, RouterSpec, Rows
from picaflor.backends.cpu.backend import CpuBackend
from picaflor.errors import ReadFailed
from picaflor.formats.base import F32

HIDDEN, INNER, EXPERTS, TOP_K = 48, 20, 6, 3


@dataclass
class Provider:
    """Experts in memory, leased one by one in a given order; expert `broken` fails."""

    slots: list[NDArray[np.uint8]]
    order: int = 1
    broken: int = -1
    held: int = 0
    asked: list[tuple[int, list[int]]] = field(default_factory=list)

    @contextmanager
    def acquire(self, layer: int, experts: I32) -> Iterator[Provider]:
        self.asked.append((layer, experts.tolist()))
        self.held += 1
        self._wanted = sorted(experts.tolist())[:: self.order]
        try:
            yield self
        finally:
            self.held -= 1

    def batches(self) -> Iterator[tuple[I32, NDArray[np.uint64]]]:
        for expert in self._wanted:
            if expert == self.broken:
                raise ReadFailed(f"experts.bin: expert {expert} could not be read")
            yield ints([expert]), np.array([self.slots[expert].ctypes.data], np.uint64)


def _experts(device: CpuBackend, matrices: list[tuple[F32, F32, F32]]) -> tuple[list[ExpertLayout], Provider]:
    layouts, slots = [], []
    size = HIDDEN * INNER * 4
    for gate, up, down in matrices:
        slot = device.allocate(3 * size)
        for place, matrix in enumerate((down, gate, up)):
            slot[place * size : (place + 1) * size] = matrix.reshape(-1).view(np.uint8)
        inner = MatrixLayout("f32", INNER, HIDDEN, 0, (size,))
        layouts.append(
            ExpertLayout(
                gate=inner,
                up=MatrixLayout("f32", INNER, HIDDEN, 0, (2 * size,)),
                down=MatrixLayout("f32", HIDDEN, INNER, 0, (0,)),
                nbytes=3 * size,
            )
        )
        slots.append(slot)
    return layouts, Provider(slots)


@dataclass
class Model:
    """x = x + experts(x), then a norm; twice the same MoE under two layer numbers."""

    program: Program
    provider: Provider
    x: Rows
    out: Rows
    matrices: list[tuple[F32, F32, F32]]
    router: F32


def _model(device: CpuBackend) -> Model:
    rng = np.random.default_rng(6)
    shapes = ((INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER))
    matrices = [tuple((rng.normal(size=s) / 4).astype(np.float32) for s in shapes) for _ in range(EXPERTS)]
    router = rng.normal(size=(EXPERTS, HIDDEN)).astype(np.float32)
    layouts, provider = _experts(device, matrices)  # type: ignore[arg-type]
    r = recorder(device)
    x, moe, logits = r.rows(HIDDEN), r.rows(HIDDEN), r.rows(EXPERTS)
    ids, weights, out = r.rows(TOP_K, dtype="i32"), r.rows(TOP_K), r.rows(HIDDEN)
    spec = RouterSpec("sigmoid", EXPERTS, TOP_K, normalise=True, scale=2.5)
    weight = f32_weight(device, router)
    for layer in (3, 7):
        r.matmul(x, weight, logits)
        r.router(logits, None, ids, weights, spec=spec)
        r.experts(x, ids, weights, moe, layer=layer, layouts=layouts)
        r.add(x, moe)
    r.rmsnorm(x, device.vector("n", np.ones(HIDDEN, np.float32)), out, eps=1e-6)
    return Model(r.finish(), provider, x, out, matrices, router)  # type: ignore[arg-type]


def _run(model: Model, x: F32) -> F32:
    model.program.write(model.x, x)
    model.program.run(batch(range(len(x))), model.provider)
    result: F32 = model.program.view(model.out, len(x)).copy()
    return result


def _oracle(model: Model, x: F32) -> NDArray[np.float64]:
    wide = x.astype(np.float64)
    for _ in range(2):
        scores = 1 / (1 + np.exp(-(wide @ model.router.T)))
        added = np.zeros_like(wide)
        for row in range(len(wide)):
            ids = np.argsort(-scores[row], kind="stable")[:TOP_K]
            chosen = 2.5 * scores[row, ids] / scores[row, ids].sum()
            for expert, factor in zip(ids, chosen, strict=True):
                gate, up, down = (m.astype(np.float64) for m in model.matrices[expert])
                g = gate @ wide[row]
                added[row] += factor * (down @ (g / (1 + np.exp(-g)) * (up @ wide[row])))
        wide = wide + added
    out: NDArray[np.float64] = wide / np.sqrt((wide**2).mean(1, keepdims=True) + 1e-6)
    return out


def test_experts_are_near_float64_and_the_same_bits_for_every_way_to_run_them() -> None:
    x = np.random.default_rng(0).normal(size=(9, HIDDEN)).astype(np.float32)
    first = _model(backend(*VARIANTS[0]))
    wanted = _run(first, x)
    assert np.allclose(wanted, _oracle(first, x), rtol=2e-5, atol=2e-5)
    assert [layer for layer, _ in first.provider.asked] == [3, 7]
    for isa, threads in VARIANTS:
        model = _model(backend(isa, threads))
        assert same_bits(_run(model, x), wanted)
        model.provider.order = -1
        assert same_bits(_run(model, x), wanted)
        alone = np.concatenate([_run(model, x[row : row + 1]) for row in range(len(x))])
        assert same_bits(alone, wanted)


def test_a_failed_read_comes_out_and_the_program_lives_on() -> None:
    x = np.random.default_rng(0).normal(size=(4, HIDDEN)).astype(np.float32)
    model = _model(backend("auto", 2))
    wanted = _run(model, x)
    asked = model.provider.asked[0][1]
    model.provider.broken = asked[-1]
    with pytest.raises(ReadFailed, match=rf"experts\.bin: expert {asked[-1]} could not be read"):
        _run(model, x)
    assert model.provider.held == 0
    model.provider.broken = -1
    assert same_bits(_run(model, x), wanted)


def test_a_program_with_experts_needs_a_provider() -> None:
    model = _model(backend("auto", 1))
    with pytest.raises(ValueError, match="no provider was given"):
        model.program.run(batch([0]))


def test_time_is_told_by_class_once() -> None:
    model = _model(backend("auto", 1))
    _run(model, np.ones((2, HIDDEN), np.float32))
    seconds = model.program.seconds()
    assert set(seconds) == {"attention", "matmul", "experts", "router", "head", "other"}
    assert seconds["experts"] > 0
    assert seconds["matmul"] > 0
    assert seconds["attention"] == seconds["head"] == 0
    assert all(value == 0 for value in model.program.seconds().values())
