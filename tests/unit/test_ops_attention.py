"""Attention over pages, MLA and GQA: against float64, and the same bits for every way to run it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from ops_support import F64, ISAS, VARIANTS, backend, batch, chain16, exp32, f32_weight, fma32, ints, same_bits

from picaflor.backends.api import GQA, I32, MLA
from picaflor.backends.cpu.backend import CpuBackend
from picaflor.formats.base import F32

ROWS = 64
LENGTHS = (1, 255, 256, 257, 700)


@dataclass(frozen=True)
class Case:
    """Queries at positions over one sequence of cached tokens; `mla` or grouped."""

    keys: F32
    values: F32  # MLA: the rope keys
    q: F32
    positions: I32
    heads: int
    kv_heads: int = 1
    kv_b: F32 | None = None
    nope: int = 0
    value: int = 0
    selection: I32 | None = None  # [rows, 1 + k]
    page_tokens: int = 16
    order: I32 = field(default_factory=lambda: np.arange(0, dtype=np.int32))

    @property
    def head_dim(self) -> int:
        return self.keys.shape[1] // self.kv_heads

    @property
    def rope(self) -> int:
        return self.values.shape[1]

    @property
    def scale(self) -> float:
        return float((self.nope + self.rope if self.kv_b is not None else self.head_dim) ** -0.5)


def _mla(
    length: int,
    *,
    heads: int = 5,
    latent: int = 40,
    nope: int = 12,
    rope: int = 8,
    value: int = 9,
    rows: int = 3,
    seed: int = 0,
) -> Case:
    rng = np.random.default_rng(seed + length)

    def normal(*shape: int) -> F32:
        return rng.normal(size=shape).astype(np.float32)

    positions = ints(sorted({length - 1, *rng.integers(0, length, rows - 1).tolist()}))
    return Case(
        keys=normal(length, latent),
        values=normal(length, rope),
        q=normal(len(positions), heads * (nope + rope)),
        positions=positions,
        heads=heads,
        kv_b=normal(heads * (nope + value), latent),
        nope=nope,
        value=value,
    )


def _gqa(length: int, *, heads: int = 6, kv_heads: int = 2, head_dim: int = 24, rows: int = 3, seed: int = 0) -> Case:
    rng = np.random.default_rng(seed + length)
    positions = ints(sorted({length - 1, *rng.integers(0, length, rows - 1).tolist()}))
    shape = (length, kv_heads * head_dim)
    return Case(
        keys=rng.normal(size=shape).astype(np.float32),
        values=rng.normal(size=shape).astype(np.float32),
        q=rng.normal(size=(len(positions), heads * head_dim)).astype(np.float32),
        positions=positions,
        heads=heads,
        kv_heads=kv_heads,
    )


def _run(device: CpuBackend, case: Case, *, rows: slice = slice(None)) -> F32:
    length = len(case.keys)
    count = -(-length // case.page_tokens)
    pages = (case.order if len(case.order) else np.arange(count, dtype=np.int32))[None, :]
    r = device.recorder(max_rows=ROWS, max_outputs=1, page_tokens=case.page_tokens, pages=int(pages.max()) + 1)
    first, second = r.rows(case.keys.shape[1]), r.rows(case.values.shape[1])
    key_plane, value_plane = r.kv_plane(0, "a", first.width), r.kv_plane(0, "b", second.width)
    r.kv_write(first, key_plane)
    r.kv_write(second, value_plane)
    fill = r.finish()
    q = r.rows(case.q.shape[1])
    chosen = None if case.selection is None else r.rows(case.selection.shape[1], dtype="i32")
    kind: MLA | GQA
    if case.kv_b is not None:
        kind = MLA(
            f32_weight(device, case.kv_b),
            key_plane,
            value_plane,
            case.heads,
            case.nope,
            case.rope,
            case.value,
            case.scale,
        )
        out = r.rows(case.heads * case.value)
    else:
        kind = GQA(key_plane, value_plane, case.heads, case.kv_heads, case.head_dim, case.scale)
        out = r.rows(case.heads * case.head_dim)
    r.attention(q, out, kind=kind, selection=chosen)
    program = r.finish()
    for start in range(0, length, ROWS):
        stop = min(start + ROWS, length)
        fill.write(first, case.keys[start:stop])
        fill.write(second, case.values[start:stop])
        fill.run(batch(range(start, stop), pages=pages))
    positions = case.positions[rows]
    program.write(q, case.q[rows])
    if chosen is not None and case.selection is not None:
        program.view(chosen, len(positions))[:] = case.selection[rows]
    program.run(batch(positions.tolist(), pages=pages))
    result: F32 = program.view(out, len(positions)).copy()
    return result


def _visible(case: Case, row: int) -> I32:
    if case.selection is None or case.selection[row, 0] < 0:
        return np.arange(case.positions[row] + 1, dtype=np.int32)
    return case.selection[row, 1 : 1 + case.selection[row, 0]]


def _softmax(scores: F64) -> F64:
    raised = np.exp(scores - scores.max())
    out: F64 = raised / raised.sum()
    return out


def _oracle(case: Case) -> F64:
    """Float64; MLA in the expanded form, which the kernel does not use."""
    out = []
    for row in range(len(case.q)):
        at = _visible(case, row)
        keys, values = case.keys[at].astype(np.float64), case.values[at].astype(np.float64)
        heads = case.q[row].reshape(case.heads, -1).astype(np.float64)
        for head in range(case.heads):
            if case.kv_b is not None:
                w = case.kv_b.astype(np.float64).reshape(case.heads, case.nope + case.value, -1)[head]
                expanded = keys @ w.T
                scores = expanded[:, : case.nope] @ heads[head, : case.nope] + values @ heads[head, case.nope :]
                out.append(_softmax(scores * case.scale) @ expanded[:, case.nope :])
            else:
                cut = slice(head * case.kv_heads // case.heads * case.head_dim, None)
                k, v = keys[:, cut][:, : case.head_dim], values[:, cut][:, : case.head_dim]
                out.append(_softmax(k @ heads[head] * case.scale) @ v)
    return np.concatenate(out).reshape(len(case.q), -1)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("isa", ISAS)
def test_mla_is_near_float64(isa: str, length: int) -> None:
    case = _mla(length)
    assert np.allclose(_run(backend(isa, 2), case), _oracle(case), rtol=3e-5, atol=3e-5)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("isa", ISAS)
def test_gqa_is_near_float64(isa: str, length: int) -> None:
    case = _gqa(length)
    assert np.allclose(_run(backend(isa, 2), case), _oracle(case), rtol=5e-6, atol=5e-6)


def _exact_gqa(case: Case) -> F32:
    """The written sequence of contracts.md for grouped attention, in numpy float32."""
    out = np.zeros((len(case.q), case.heads, case.head_dim), np.float32)
    for row in range(len(case.q)):
        visible = _visible(case, row)
        for head in range(case.heads):
            first = head // (case.heads // case.kv_heads) * case.head_dim
            cut = slice(first, first + case.head_dim)
            q = case.q[row, head * case.head_dim : (head + 1) * case.head_dim]
            total: tuple[np.float32, np.float32, F32] | None = None
            for block in np.unique(visible // 256):
                at = visible[visible // 256 == block]
                scores = np.array([chain16(q, case.keys[t, cut]) * np.float32(case.scale) for t in at], np.float32)
                m_b = scores.max()
                p = exp32(scores - m_b)
                l_b, a_b = chain16(p), np.zeros(case.head_dim, np.float32)
                for t, weight in zip(at, p, strict=True):
                    a_b = fma32(weight, case.values[t, cut], a_b)
                if total is None:
                    total = (m_b, l_b, a_b)
                    continue
                m, l_sum, a = total
                top = max(m, m_b)
                c, c_b = (exp32(np.array([old - top], np.float32)) for old in (m, m_b))
                total = (top, fma32(l_sum, c, l_b * c_b)[0], fma32(a, c, a_b * c_b))
            assert total is not None
            out[row, head] = total[2] / total[1]
    return out.reshape(len(case.q), -1)


@pytest.mark.parametrize("length", [5, 300, 530])
def test_gqa_is_the_written_sequence(length: int) -> None:
    case = _gqa(length, heads=2, kv_heads=1, head_dim=20, rows=2)
    wanted = _exact_gqa(case)
    for isa in ISAS:
        assert same_bits(_run(backend(isa, 1), case), wanted)


def _exact_mla_one_block(case: Case) -> F32:
    """The written sequence of contracts.md for MLA where all keys are in the first block."""
    assert case.kv_b is not None
    w = case.kv_b.reshape(case.heads, case.nope + case.value, -1)
    out = np.zeros((len(case.q), case.heads, case.value), np.float32)
    for row in range(len(case.q)):
        q = case.q[row].reshape(case.heads, -1)
        for head in range(case.heads):
            absorbed = np.zeros(case.keys.shape[1], np.float32)
            for d in range(case.nope):
                absorbed = fma32(q[head, d], w[head, d], absorbed)
            at = range(case.positions[row] + 1)
            rope = q[head, case.nope :]
            sums = [chain16(absorbed, case.keys[t]) + chain16(rope, case.values[t]) for t in at]
            scores = np.array(sums, np.float32) * np.float32(case.scale)
            p = exp32(scores - scores.max())
            a = np.zeros(case.keys.shape[1], np.float32)
            for t in at:
                a = fma32(p[t], case.keys[t], a)
            latent = a / chain16(p)
            out[row, head] = [chain16(w[head, case.nope + v], latent) for v in range(case.value)]
    return out.reshape(len(case.q), -1)


def test_mla_is_the_written_sequence() -> None:
    case = _mla(37, heads=3, rows=2)
    wanted = _exact_mla_one_block(case)
    for isa in ISAS:
        assert same_bits(_run(backend(isa, 1), case), wanted)


def _with(case: Case, **changes: object) -> Case:
    values = {name: getattr(case, name) for name in Case.__dataclass_fields__}
    return Case(**{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [_mla, _gqa])
def test_bits_do_not_depend_on_threads_isa_pages_or_neighbours(make) -> None:  # type: ignore[no-untyped-def]
    case = make(700, rows=19, heads=12)
    wanted = _run(backend(ISAS[0], 1), case)
    for isa, threads in VARIANTS:
        assert same_bits(_run(backend(isa, threads), case), wanted), (isa, threads)
    rng = np.random.default_rng(4)
    for page_tokens in (1, 16, 64, 256):
        count = -(-700 // page_tokens)
        order = ints(rng.permutation(count + 3)[:count])
        moved = _with(case, page_tokens=page_tokens, order=order)
        assert same_bits(_run(backend("auto", 2), moved), wanted), page_tokens
    for row in (0, 7, len(case.q) - 1):
        assert same_bits(_run(backend("auto", 3), case, rows=slice(row, row + 1)), wanted[row : row + 1])


@pytest.mark.parametrize("make", [_mla, _gqa])
def test_a_selection_of_all_keys_is_dense_attention_bit_by_bit(make) -> None:  # type: ignore[no-untyped-def]
    case = make(600)
    selection = np.full((len(case.q), 1 + 600), 599, np.int32)
    for row, position in enumerate(case.positions):
        selection[row, 0] = position + 1
        selection[row, 1 : position + 2] = np.arange(position + 1)
    wanted = _run(backend("auto", 2), case)
    assert same_bits(_run(backend("auto", 2), _with(case, selection=selection)), wanted)
    selection[:, 0] = -1
    assert same_bits(_run(backend("auto", 2), _with(case, selection=selection)), wanted)


@pytest.mark.parametrize("make", [_mla, _gqa])
def test_a_selection_leaves_the_other_keys_out(make) -> None:  # type: ignore[no-untyped-def]
    case = make(800, rows=4)
    rng = np.random.default_rng(8)
    selection = np.zeros((len(case.q), 1 + 40), np.int32)
    for row, position in enumerate(case.positions):
        # none in the second block of 256, several in the others
        allowed = [t for t in range(position + 1) if not 256 <= t < 512]
        chosen = np.sort(rng.choice(allowed, size=min(40, len(allowed)), replace=False))
        selection[row, 0] = len(chosen)
        selection[row, 1 : 1 + len(chosen)] = chosen
    chosen_case = _with(case, selection=selection)
    wanted = _run(backend(ISAS[0], 1), chosen_case)
    assert np.allclose(wanted, _oracle(chosen_case), rtol=3e-5, atol=3e-5)
    for isa, threads in VARIANTS:
        assert same_bits(_run(backend(isa, threads), chosen_case), wanted)
    if make is _gqa:
        assert same_bits(wanted, _exact_gqa(chosen_case))


def test_sequences_do_not_see_each_other() -> None:
    device = backend("auto", 2)
    rng = np.random.default_rng(1)
    r = device.recorder(max_rows=8, max_outputs=1, page_tokens=16, pages=6)
    key, value, q, out = (r.rows(32) for _ in range(4))
    keys, values = r.kv_plane(0, "k", 32), r.kv_plane(0, "v", 32)
    r.kv_write(key, keys)
    r.kv_write(value, values)
    r.attention(q, out, kind=GQA(keys, values, heads=2, kv_heads=1 * 2, head_dim=16, scale=0.25))
    program = r.finish()
    k, v, x = (rng.normal(size=(6, 32)).astype(np.float32) for _ in range(3))
    pages = np.array([[3, 1], [0, 5]], np.int32)
    for name, rows in ((key, k), (value, v), (q, x)):
        program.write(name, rows)
    program.run(batch([0, 0, 1, 1, 2, 2], sequences=[0, 1, 0, 1, 0, 1], pages=pages))
    both = program.view(out, 6).copy()
    for sequence in (0, 1):
        case = Case(
            keys=k[sequence::2], values=v[sequence::2], q=x[sequence::2], positions=ints(range(3)), heads=2, kv_heads=2
        )
        assert same_bits(_run(device, case), both[sequence::2])


@pytest.mark.parametrize("isa", ISAS)
def test_a_nan_or_infinite_score_is_not_hidden(isa: str) -> None:
    case = _gqa(300, rows=1)
    for bad in (np.nan, np.inf):
        keys = case.keys.copy()
        keys[17, :24] = bad  # of the first kv head
        out = _run(backend(isa, 1), _with(case, keys=keys)).reshape(6, 24)
        assert np.isnan(out[:3]).all()
        assert np.isfinite(out[3:]).all()


def test_many_heads_wide_latents_and_large_scores() -> None:
    case = _mla(520, heads=17, latent=130, nope=33, rope=18, value=21, rows=5)
    case = _with(case, q=case.q * np.float32(30))
    wanted = _run(backend(ISAS[0], 1), case)
    assert np.allclose(wanted, _oracle(case), rtol=2e-3, atol=2e-3)
    for isa, threads in VARIANTS[1:]:
        assert same_bits(_run(backend(isa, threads), case), wanted)
