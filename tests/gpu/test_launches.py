"""Work that is cut into several launches has the bits of one launch, and no launch is above the bound.

Without a GPU the kernels are interpreted. A wrong cut is seen by the same comparison.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gpu_experts import make_expert
from gpu_support import torch

from picaflor import formats as numbers
from picaflor.backends.cuda import attention, choose, experts, interpret, latent, launches, matmul
from picaflor.backends.cuda.attention import Keys, Scores
from picaflor.backends.cuda.formats import hold

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
USERS = (matmul, attention, choose, experts, latent)

if interpret.active():
    interpret.round_once()


def _values(*shape: int, seed: int = 1) -> Any:
    made = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return torch.from_numpy(made).to(DEVICE)


def _weight(name: str, rows: int, cols: int, group: int) -> Any:
    planes = numbers.REGISTRY[name].sample(np.random.default_rng(2), rows, cols, group)
    return hold(name, (rows, cols), group, planes, DEVICE)


def _product(name: str, group: int, count: int) -> Callable[[], Any]:
    weight, x = _weight(name, 131, 192, group), _values(count, 192)

    def run() -> Any:
        out = torch.full((count, 131), float("nan"), device=DEVICE)
        matmul.matmul(x, weight, out, "standard")
        return out

    return run


def _keys(rows: int, tokens: int, selection: Any = None) -> Keys:
    """One sequence of pages of 64 tokens in an order of their own."""
    pages = np.random.default_rng(3).permutation(tokens // 64).astype(np.int32)[None]
    positions = np.linspace(5, tokens - 1, rows).astype(np.int32)
    there = [torch.from_numpy(v).to(DEVICE) for v in (np.zeros(rows, np.int32), positions, pages)]
    return Keys(*there, 6, selection, tokens)


def _gqa() -> Any:
    rows, heads, width = 3, 2, 16
    q, plane, values = _values(rows, heads * width), _values(768, width), _values(768, width, seed=2)
    out = torch.full((rows, heads * width), float("nan"), device=DEVICE)
    attention.attend(Scores(q, q.stride(0), width, plane, width), None, values, out, width, _keys(rows, 768),
                     heads=heads, kv_heads=1, width=width, scale=0.25)  # fmt: skip
    return out


def _mla() -> Any:
    rows, heads, nope, rope, value, width = 3, 2, 16, 8, 16, 64
    kv_b = _weight("int4-grouped", heads * (nope + value), width, 64)
    q, plane, rotated = _values(rows, heads * (nope + rope)), _values(128, width), _values(128, rope)
    out = torch.full((rows, heads * value), float("nan"), device=DEVICE)
    latent.mla(q, out, kv_b, plane, rotated, _keys(rows, 128), rows=rows, heads=heads, nope=nope, rope=rope,
               value=value, scale=0.25)  # fmt: skip
    return out


def _selection() -> Any:
    rows, heads, width = 4, 2, 16
    out = torch.full((rows, 9), -7, dtype=torch.int32, device=DEVICE)
    choose.index_select(_values(rows, heads * width), _values(rows, heads, seed=4), _values(256, width, seed=5), out,
                        _keys(rows, 256), heads=heads, head_dim=width, top_k=8)  # fmt: skip
    counts = out[:, :1]
    return torch.where((counts < 0) & (torch.arange(9, device=DEVICE) > 0), 0, out)  # the rest is not written


def _experts(count: int) -> Callable[[], Any]:
    hidden, inner, top_k = 128, 64, 2
    made = [make_expert(number, (("int4-grouped", 64),) * 3, hidden, inner) for number in range(4)]
    slots = [torch.from_numpy(np.array(slot)).to(DEVICE) for _, slot in made]
    table = experts.table_for([layout for layout, _ in made], [slot.data_ptr() for slot in slots], DEVICE)
    rng = np.random.default_rng(6)
    x, weights = _values(count, hidden), _values(count, top_k, seed=7)
    ids = torch.from_numpy(np.stack([rng.permutation(4)[:top_k] for _ in range(count)]).astype(np.int32)).to(DEVICE)
    arrived = torch.zeros(experts.counters(count * top_k, inner, hidden), dtype=torch.int32, device=DEVICE)

    def run() -> Any:
        out = torch.full((count, hidden), float("nan"), device=DEVICE)
        experts.expert_ffn(x, ids, weights, table, out, "standard", arrived=arrived)
        assert slots
        assert not arrived.any()
        return out

    return run


CASES: dict[str, tuple[Callable[[], Callable[[], Any]], int]] = {
    "product of one row": (lambda: _product("int4-grouped", 64, 1), 2 * 192 * 70),
    "product of rows, tiles": (lambda: _product("int3-g64", 64, 40), 2 * 192 * 70 * 16),
    "product of floats": (lambda: _product("bf16", 0, 11), 2 * 192 * 70 * 8),
    "product of floats in tiles of a scale": (lambda: _product("fp8-e4m3-b128", 0, 3), 2 * 192 * 70),
    "attention": (lambda: _gqa, 2 * 2 * 16 * 300),
    "absorbed attention": (lambda: _mla, 2 * 2 * 16 * 64 + 1),
    "selection": (lambda: _selection, 2 * 2 * 16 * 256 * 2),
    "experts of few rows": (lambda: _experts(3), 2 * 3 * 2 * 128 * 64),
    "experts of many rows": (lambda: _experts(20), 4 * 16 * 128 * 64 * 3),
}


def _cut_badly(count: int, *rest: Any, **words: Any) -> list[tuple[int, int]]:
    """Forgets the last unit of every piece, or the first piece where they have one each."""
    found = launches.pieces(count, *rest, **words)
    return ([(start, stop - 1) for start, stop in found if stop - start > 1] or found[1:]) if len(found) > 1 else found


@pytest.mark.parametrize("name", CASES)
def test_the_bits_of_one_launch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = torch.empty

    def poisoned(*shape: Any, **words: Any) -> Any:
        """New memory never happens to hold what is right."""
        return plain(*shape, **words).fill_(3)

    monkeypatch.setattr(torch, "empty", poisoned)
    make, bound = CASES[name]
    run = make()
    expected = run().cpu().numpy()
    cut: list[int] = []

    def counted(count: int, operations: float, *rest: Any, **words: Any) -> list[tuple[int, int]]:
        found = launches.pieces(count, operations, *rest, **words)
        assert [stop for _, stop in found] == [*(start for start, _ in found[1:]), count]
        step = words.get("step", 1)
        assert all((stop - start) * operations <= bound or stop - start <= step for start, stop in found)
        cut.append(len(found))
        return found

    monkeypatch.setattr(launches, "OPERATIONS", bound)
    for user in USERS:
        monkeypatch.setattr(user, "pieces", counted)
    assert run().cpu().numpy().tobytes() == expected.tobytes()
    assert max(cut) >= 2, cut
    for user in USERS:
        monkeypatch.setattr(user, "pieces", _cut_badly)
    assert run().cpu().numpy().tobytes() != expected.tobytes()


def test_pieces() -> None:
    assert launches.pieces(10, 1.0) == [(0, 10)]
    assert launches.pieces(0, 1.0) == []
    assert launches.pieces(10, launches.OPERATIONS / 4) == [(0, 4), (4, 8), (8, 10)]
    assert launches.pieces(10, 0, launches.BYTES / 4, step=3) == [(0, 3), (3, 6), (6, 9), (9, 10)]
    assert launches.pieces(4, launches.OPERATIONS * 9, step=2) == [(0, 2), (2, 4)]
    assert launches.pieces(7, 1.0, most=3) == [(0, 3), (3, 6), (6, 7)]
    for count, step in ((300, 128), (131, 64), (11, 8)):
        assert launches.pieces(count, 1.0, step=step) == [(0, count)]
        assert launches.pieces(count, 1.0, step=step, most=count) == [(0, count)]
        bound = launches.OPERATIONS / (count - 1)  # all but one unit
        for operations in (bound, launches.OPERATIONS * 9):
            cut = launches.pieces(count, operations, step=step)
            assert len(cut) > 1
            assert all(start % step == 0 for start, _ in cut)
            assert [stop for _, stop in cut] == [*(start for start, _ in cut[1:]), count]
    assert launches.pieces(2, 1.0, most=0) == [(0, 1), (1, 2)]
