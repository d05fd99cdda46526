"""The expert operation: equal to the plain sequence of products, however rows, experts and threads are cut.

Must not time anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from kernel_harness import CASES, F64, Sample, fma, inputs, largest_error, same_bits, sample
from numpy.typing import NDArray

from picaflor import _native
from picaflor.backends.cpu import kernels
from picaflor.backends.cpu.memory import allocate
from picaflor.formats.base import F32

ISAS = _native.kernel_isas()
HIDDEN, INNER, EXPERTS, TOP_K, ROWS = 72, 40, 6, 3, 21
MIXED = [
    ("int4-grouped", 16),
    ("int8-row", 0),
    ("int4-grouped", 64),
    ("bf16", 0),
    ("int3-g64", 0),
    ("e8-iq3-lattice", 0),
]


@dataclass(frozen=True)
class Expert:
    """One expert in a slot: address, layout tuples of gate, up and down, and the same matrices alone."""

    slot: NDArray[np.uint8]
    layout: list[tuple[int, int, int, int, tuple[int, ...]]]
    weights: list[kernels.HeldWeight]
    samples: list[Sample]


def make_expert(seed: int, formats_of: list[tuple[str, int]]) -> Expert:
    """gate [INNER, HIDDEN], up, down [HIDDEN, INNER] side by side in one slot, at odd distances."""
    layout, weights, samples, parts, at = [], [], [], [], 0
    for index, (name, group_size) in enumerate(formats_of):
        rows, cols = (HIDDEN, INNER) if index == 2 else (INNER, HIDDEN)
        data = sample(name, group_size, rows, cols, seed=seed * 10 + index, tame=True)
        offsets = []
        for plane in data.weight.keep:
            at += 3
            offsets.append(at)
            parts.append((at, plane))
            at += plane.nbytes
        layout.append((kernels.FORMAT_NUMBERS[name], rows, cols, group_size, tuple(offsets)))
        weights.append(data.weight)
        samples.append(data)
    slot = allocate(at)
    slot[:] = 0xA5
    for start, plane in parts:
        slot[start : start + plane.nbytes] = plane
    return Expert(slot, layout, weights, samples)


@pytest.fixture(scope="module")
def experts() -> list[Expert]:
    """Formats and group sizes differ per expert and projection."""
    return [make_expert(e, [MIXED[e], MIXED[(e + 1) % 6], MIXED[(e + 2) % 6]]) for e in range(EXPERTS)]


def silu_mul(gate: F32, up: F32) -> F32:
    """z / (1 + exp(-z)) * up in float64, rounded once."""
    wide = gate.astype(np.float64)
    return (wide / (1 + np.exp(np.minimum(-wide, 700))) * up).astype(np.float32)


def run(experts: list[Expert], x: F32, ids: NDArray[np.int32], weights: F32, **how: Any) -> F32:
    """The native operation; `how`: threads, isa, planes, order (of expert ids), pieces (ids per run)."""
    isa, planes = how.get("isa", "auto"), how.get("planes", 2)
    ffn = _native.ExpertFfn(
        _native.Pool(how.get("threads", 1)), isa, planes, HIDDEN, INNER, max(ROWS, len(x)), ids.shape[1]
    )
    layer = ffn.add_layer([expert.layout for expert in experts])
    wanted = ffn.begin(layer, x.ctypes.data, x.strides[0] // 4, ids.ctypes.data, len(x))
    order = how.get("order", lambda found: found)(wanted)
    piece = how.get("piece", len(order))
    for start in range(0, len(order), piece):
        part = np.ascontiguousarray(order[start : start + piece])
        ffn.run(part, np.array([experts[e].slot.ctypes.data for e in part], np.uint64))
    out = np.full((len(x), HIDDEN + 5), 7, np.float32)
    ffn.finish(weights.ctypes.data, out.ctypes.data, HIDDEN + 5)
    assert (out[:, HIDDEN:] == 7).all()
    return out[:, :HIDDEN].copy()


@pytest.fixture(scope="module")
def batch() -> tuple[F32, NDArray[np.int32], F32]:
    """x [ROWS, HIDDEN], ids and weights [ROWS, TOP_K]; expert 4 is chosen by one row only."""
    rng = np.random.default_rng(3)
    x = rng.standard_normal((ROWS, HIDDEN)).astype(np.float32)
    ids = np.stack([rng.choice([0, 1, 2, 3, 5], TOP_K, replace=False) for _ in range(ROWS)]).astype(np.int32)
    ids[7, 1] = 4
    return x, ids, rng.random((ROWS, TOP_K), np.float32)


def test_equals_the_products_one_by_one(experts: list[Expert], batch: tuple[F32, NDArray[np.int32], F32]) -> None:
    """gate, up, SiLU, down and the weighted sum in routing order, composed from single products."""
    x, ids, weights = batch
    for planes, bound in ((1, 1e-1), (2, 1e-3), (3, 2e-6)):
        got = run(experts, x, ids, weights, planes=planes)
        for row in range(ROWS):
            expected = np.zeros(HIDDEN)
            magnitude = np.zeros(HIDDEN)
            for k in range(TOP_K):
                gate, up, down = experts[ids[row, k]].weights
                h = silu_mul(
                    kernels.matmul(gate, x[row : row + 1], planes=planes),
                    kernels.matmul(up, x[row : row + 1], planes=planes),
                )
                y = kernels.matmul(down, h, planes=planes)[0]
                expected += weights[row, k] * y.astype(np.float64)
                magnitude += np.abs(y)
            assert (np.abs(got[row] - expected) <= bound * magnitude.max()).all(), (planes, row)


@pytest.mark.parametrize("planes", [1, 2, 3])
def test_every_format_in_every_projection_is_near_float64(planes: int) -> None:
    """One layer whose experts mix all formats and group sizes, against float64 products of the decoded matrices.

    Each product may be off by what its format and precision allow; h comes from products so checked.
    """
    count = len(CASES)
    cases = [[CASES[(e + shift) % count] for shift in (0, 5, 11)] for e in range(count)]
    experts = [make_expert(50 + e, cases[e]) for e in range(count)]
    rng = np.random.default_rng(21)
    x = rng.standard_normal((count, HIDDEN)).astype(np.float32)
    ids = np.array([[e, (e + 7) % count] for e in range(count)], np.int32)
    weights = rng.random((count, 2), np.float32)

    def product(e: int, index: int, values: F32) -> tuple[F64, F64, F64]:
        name, group_size = cases[e][index]
        data = experts[e].samples[index]
        exact = inputs(name, values) @ data.decoded.astype(np.float64).T
        terms = np.abs(inputs(name, values)) @ np.abs(data.decoded.astype(np.float64)).T
        return exact[0], largest_error(name, group_size, data, values, planes)[0], terms[0]

    for isa in ISAS:
        got = run(experts, x, ids, weights, planes=planes, isa=isa, threads=2)
        for row in range(count):
            total, allowed = np.zeros(HIDDEN), np.zeros(HIDDEN)
            for k, e in enumerate(ids[row].tolist()):
                near = []
                for index in (0, 1):
                    exact, bound, _ = product(e, index, x[row : row + 1])
                    near.append(kernels.matmul(experts[e].weights[index], x[row : row + 1], planes=planes, isa=isa))
                    assert (np.abs(near[index][0] - exact) <= bound).all(), (isa, cases[e][index])
                exact, bound, terms = product(e, 2, silu_mul(*near))
                total += weights[row, k] * exact
                allowed += weights[row, k] * (bound + 2e-6 * terms)
            assert (np.abs(got[row] - total) <= allowed).all(), (isa, row, [cases[e] for e in ids[row]])


def test_sum_is_fma_in_routing_order(experts: list[Expert], batch: tuple[F32, NDArray[np.int32], F32]) -> None:
    """The row's bits are those of fma over its own experts' outputs, each taken from a call of its own."""
    x, ids, weights = batch
    one = np.ones((1, 1), np.float32)
    got = run(experts, x, ids, weights)
    for row in (0, 7, 20):
        parts = [run(experts, x[row : row + 1], ids[row : row + 1, k : k + 1].copy(), one)[0] for k in range(TOP_K)]
        for column in (0, 1, HIDDEN - 1):
            total = np.float32(0)
            for k in range(TOP_K):
                total = fma(weights[row, k], parts[k][column], total)
            assert total == got[row, column]


def test_same_bits_however_it_is_cut(experts: list[Expert], batch: tuple[F32, NDArray[np.int32], F32]) -> None:
    """Threads, instruction sets, order of experts, experts one at a time, rows alone: one result."""
    x, ids, weights = batch
    for planes in (1, 2, 3):
        expected = run(experts, x, ids, weights, planes=planes)
        for isa in ISAS:
            for threads in (1, 2, 3):
                assert same_bits(run(experts, x, ids, weights, planes=planes, isa=isa, threads=threads), expected)
        late = run(experts, x, ids, weights, planes=planes, order=lambda found: found[::-1], piece=1, threads=2)
        assert same_bits(late, expected)
        for row in (0, 7, 20):
            part = slice(row, row + 1)
            assert same_bits(run(experts, x[part], ids[part], weights[part], planes=planes), expected[part].copy())


@pytest.mark.parametrize("threads", [1, 3])
def test_single_results_add_up_to_the_sum(
    threads: int, experts: list[Expert], batch: tuple[F32, NDArray[np.int32], F32]
) -> None:
    """`pairs`: rows of chosen pairs only; those of two calls, added in routing order, are what `finish` gives."""
    x, ids, weights = batch
    ffn = _native.ExpertFfn(_native.Pool(threads), "auto", 2, HIDDEN, INNER, ROWS, TOP_K)
    layer = ffn.add_layer([expert.layout for expert in experts])
    single = np.full((ROWS, TOP_K, HIDDEN), 7, np.float32)
    done = np.zeros_like(ids, bool)
    for here in (lambda e: e % 2 == 0, lambda e: e % 2 == 1):
        part = np.where(here(ids), ids, -1).astype(np.int32)
        wanted = ffn.begin(layer, x.ctypes.data, HIDDEN, part.ctypes.data, ROWS)
        assert set(wanted.tolist()) == set(part[part >= 0].tolist())
        with pytest.raises(ValueError, match=f"expert {wanted[0]} was not computed"):
            ffn.pairs(single.ctypes.data)
        ffn.run(wanted, np.array([experts[e].slot.ctypes.data for e in wanted], np.uint64))
        ffn.pairs(single.ctypes.data)
        done |= here(ids)
        assert (single[~done] == 7).all()
        assert not (single[done] == 7).all(axis=-1).any()
    with pytest.raises(ValueError, match="before a call was begun"):
        ffn.pairs(single.ctypes.data)
    expected = run(experts, x, ids, weights)
    for row in (0, 7, 20):
        found = np.zeros(HIDDEN, np.float32)
        for k in range(TOP_K):
            terms = zip(single[row, k], found, strict=True)
            found = np.array([fma(weights[row, k], y, total) for y, total in terms], np.float32)
        assert same_bits(found, expected[row].copy())


def test_long_batches_go_in_parts(experts: list[Expert]) -> None:
    """More pairs than one part holds, rows far apart and more rows than are gathered at once."""
    rng = np.random.default_rng(4)
    rows = 300
    x = rng.standard_normal((rows, HIDDEN)).astype(np.float32)
    ids = np.stack([rng.choice(EXPERTS, 2, replace=False) for _ in range(rows)]).astype(np.int32)
    weights = rng.random((rows, 2), np.float32)
    got = run(experts, x, ids, weights, threads=2)
    for part in (slice(0, 1), slice(128, 150), slice(299, 300)):
        assert same_bits(run(experts, x[part], ids[part], weights[part]), got[part].copy())
    ids[:] = ids[0]  # every row at the same two experts: more rows of one expert than are gathered at once
    got = run(experts, x, ids, weights, threads=2)
    for row in (0, 127, 128, 200, 299):
        part = slice(row, row + 1)
        assert same_bits(run(experts, x[part], ids[part], weights[part]), got[part].copy()), row


def test_first_use_order_and_refusals(experts: list[Expert]) -> None:
    """begin lists experts as rows meet them; wrong ids, missing experts and wrong layouts are named."""
    ffn = _native.ExpertFfn(_native.Pool(1), "auto", 2, HIDDEN, INNER, ROWS, 2)
    layer = ffn.add_layer([expert.layout for expert in experts])
    x = np.zeros((2, HIDDEN), np.float32)
    ids = np.array([[3, 1], [1, 0]], np.int32)
    begun = (layer, x.ctypes.data, HIDDEN, ids.ctypes.data, 2)
    assert ffn.begin(*begun).tolist() == [3, 1, 0]
    out = np.zeros((2, HIDDEN), np.float32)
    with pytest.raises(ValueError, match="expert 3 was not computed"):
        ffn.finish(np.ones((2, 2), np.float32).ctypes.data, out.ctypes.data, HIDDEN)
    with pytest.raises(ValueError, match="expert 5 was not asked for"):
        ffn.run(np.array([5], np.int32), np.array([experts[5].slot.ctypes.data], np.uint64))
    ids[1, 1] = EXPERTS
    with pytest.raises(ValueError, match="row 1 chose expert 6 of 6"):
        ffn.begin(*begun)
    with pytest.raises(ValueError, match="22 rows, at most 21"):
        ffn.begin(layer, x.ctypes.data, HIDDEN, ids.ctypes.data, ROWS + 1)
    ids[:] = [[2, 2], [2, 0]]
    with pytest.raises(ValueError, match="a row chose expert 2 twice"):
        ffn.begin(*begun)
    number, rows, cols, group, offsets = experts[0].layout[2]
    wrong = [*experts[0].layout[:2], (number, rows, cols - 1, group, offsets)]
    with pytest.raises(ValueError, match=r"expert matrix down is \[72, 39\]"):
        ffn.add_layer([wrong])
    assert ffn.workspace_bytes > 0
