"""Row operations of the CPU: exact where the contract is short, against float64 elsewhere, on every variant."""

from __future__ import annotations

import numpy as np
import pytest
from ops_support import F64, ISAS, VARIANTS, backend, batch, chain16, exp32, f32_weight, fma32, recorder, rig, same_bits

from picaflor.backends.api import RopeStyle
from picaflor.formats import REGISTRY, e8_iq3
from picaflor.formats.base import F32

RNG = np.random.default_rng(11)


def _normal(*shape: int) -> F32:
    return RNG.normal(size=shape).astype(np.float32)


@pytest.mark.parametrize(("isa", "threads"), VARIANTS)
@pytest.mark.parametrize("width", [1, 16, 40, 256])
def test_rmsnorm_is_the_written_sequence(isa: str, threads: int, width: int) -> None:
    device = backend(isa, threads)
    x, w = np.random.default_rng(width).normal(size=(5, width)).astype(np.float32), _normal(width)
    weight = device.vector("norm", w)
    norm = rig(device, {"x": width}, lambda r, x: r.rmsnorm(x, weight, x, eps=1e-5) or x)
    out = norm.run(batch(range(5)), x=x)
    for row in range(5):
        ms = chain16(x[row], x[row]) / np.float32(width)
        factor = np.float32(1.0) / np.sqrt(ms + np.float32(1e-5))
        assert same_bits(out[row], (x[row] * factor) * w)


@pytest.mark.parametrize("isa", ISAS)
def test_rmsnorm_norms_each_head_by_itself(isa: str) -> None:
    device = backend(isa, 1)
    x, w = _normal(2, 96), _normal(24)
    weight = device.vector("norm", w)
    norm = rig(device, {"x": 96}, lambda r, x: r.rmsnorm(x, weight, x, eps=1e-6, heads=4) or x)
    parts = x.reshape(2, 4, 24).astype(np.float64)
    true = parts / np.sqrt((parts**2).mean(-1, keepdims=True) + 1e-6) * w
    assert np.allclose(norm.run(batch([0, 1]), x=x), true.reshape(2, 96), rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("width", [16, 33, 128])
def test_layernorm_is_the_written_sequence(isa: str, width: int) -> None:
    device = backend(isa, 1)
    x, w, b = _normal(3, width) + np.float32(2.0), _normal(width), _normal(width)
    weight, bias = device.vector("w", w), device.vector("b", b)
    norm = rig(device, {"x": width}, lambda r, x: r.layernorm(x, weight, bias, x, eps=1e-6) or x)
    out = norm.run(batch(range(3)), x=x)
    for row in range(3):
        d = x[row] - chain16(x[row]) / np.float32(width)
        factor = np.float32(1.0) / np.sqrt(chain16(d, d) / np.float32(width) + np.float32(1e-6))
        assert same_bits(out[row], fma32(d * factor, w, b))
    wide = x.astype(np.float64)
    d64 = wide - wide.mean(1, keepdims=True)
    assert np.allclose(out, d64 / np.sqrt((d64**2).mean(1, keepdims=True) + 1e-6) * w + b, rtol=1e-5, atol=1e-5)


def _rope(x: F32, position: int, *, start: int, dims: int, theta: float, style: RopeStyle) -> F64:
    out = x.astype(np.float64)
    angle = position * theta ** (-2.0 * np.arange(dims // 2) / dims)
    c, s = np.cos(angle), np.sin(angle)
    part = x[start : start + dims].astype(np.float64)
    a, b = (part[0::2], part[1::2]) if style == "interleaved" else (part[: dims // 2], part[dims // 2 :])
    out[start : start + dims] = np.concatenate([a * c - b * s, b * c + a * s])
    return out


@pytest.mark.parametrize(("isa", "threads"), VARIANTS)
@pytest.mark.parametrize("style", ["interleaved", "half"])
def test_rope_turns_each_head_at_its_position(isa: str, threads: int, style: RopeStyle) -> None:
    device = backend(isa, threads)
    x = np.random.default_rng(5).normal(size=(4, 3 * 72)).astype(np.float32)
    positions = [0, 1, 77, 1000]

    def record(r, x):  # type: ignore[no-untyped-def]
        r.rope(x, heads=3, head_width=72, start=8, dims=48, theta=10000.0, style=style)
        return x

    out = rig(device, {"x": 216}, record).run(batch(positions), x=x)
    for row, position in enumerate(positions):
        for head in range(3):
            cut = slice(72 * head, 72 * head + 72)
            true = _rope(x[row, cut], position, start=8, dims=48, theta=10000.0, style=style)
            assert np.allclose(out[row, cut], true, rtol=1e-6, atol=5e-7)
            assert same_bits(out[row, cut][:8], x[row, cut][:8])
            assert same_bits(out[row, cut][56:], x[row, cut][56:])
    angle = 77 * 10000.0 ** (-2.0 * np.arange(24) / 48)
    c, s = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    part = x[2, 8:56]
    a, b = (part[0::2], part[1::2]) if style == "interleaved" else (part[:24], part[24:])
    assert same_bits(out[2, 8:32], fma32(a, c, -(b * s)))
    assert same_bits(out[2, 32:56], fma32(b, c, a * s))


@pytest.mark.parametrize("isa", ISAS)
def test_add_and_silu_mul(isa: str) -> None:
    device = backend(isa, 2)
    gate, up = _normal(3, 50) * np.float32(4), _normal(3, 50)
    gate[0, 0], gate[0, 1] = 200.0, -200.0
    out = rig(device, {"g": 50, "u": 50}, lambda r, g, u: r.silu_mul(g, u, g) or g).run(batch(range(3)), g=gate, u=up)
    assert same_bits(out, gate / (np.float32(1.0) + exp32(-gate)) * up)
    wide = gate.astype(np.float64)
    assert np.allclose(out, wide / (1 + np.exp(-wide)) * up, rtol=1e-6, atol=1e-30)
    total = rig(device, {"x": 50, "y": 50}, lambda r, x, y: r.add(x, y) or x).run(batch(range(3)), x=gate, y=up)
    assert same_bits(total, gate + up)


@pytest.mark.parametrize(("isa", "threads"), VARIANTS)
def test_embed_gives_rows_and_zeros_outside(isa: str, threads: int) -> None:
    device = backend(isa, threads)
    table = np.random.default_rng(3).normal(size=(7, 40)).astype(np.float32)
    weight = f32_weight(device, table)

    def record(r):  # type: ignore[no-untyped-def]
        out = r.rows(40)
        r.embed(weight, out)
        return out

    out = rig(device, {}, record).run(batch(range(5), tokens=[6, 0, 7, -1, 3]))
    assert same_bits(out, np.stack([table[6], table[0], np.zeros(40, np.float32), np.zeros(40, np.float32), table[3]]))


@pytest.mark.parametrize(("isa", "threads"), VARIANTS)
@pytest.mark.parametrize("cols", [256, 200, 41])
def test_rows_of_a_rotated_format_are_turned_back(isa: str, threads: int, cols: int) -> None:
    device = backend(isa, threads)
    spec = REGISTRY["e8-iq3-lattice"]
    planes = []
    stored = spec.sample(np.random.default_rng(0), 4, cols, 0)
    for plane in stored:
        memory = device.allocate(plane.nbytes)
        memory[:] = plane.reshape(-1).view(np.uint8)
        planes.append(memory)
    weight = device.weight("embed", "e8-iq3-lattice", (4, cols), 0, planes)

    def record(r):  # type: ignore[no-untyped-def]
        out = r.rows(cols)
        r.embed(weight, out)
        return out

    out = rig(device, {}, record).run(batch(range(3), tokens=[2, 0, 4]))
    rotated = spec.decode(stored, 4, cols, 0)
    right = e8_iq3.unrotate(rotated)
    assert not np.allclose(right, rotated, rtol=1e-2)
    assert np.allclose(out, np.stack([right[2], right[0], np.zeros(cols)]), rtol=1e-5, atol=1e-5 * np.abs(right).max())


@pytest.mark.parametrize(("isa", "threads"), VARIANTS)
def test_matmul_reads_what_was_written_last(isa: str, threads: int) -> None:
    # The second product must not use activations that were prepared before the norm.
    device = backend(isa, threads)
    rng = np.random.default_rng(2)
    x, a, b = (rng.normal(size=s).astype(np.float32) for s in ((6, 64), (300, 64), (20, 64)))
    wa, wb, norm = f32_weight(device, a), f32_weight(device, b), device.vector("n", np.full(64, 3.0, np.float32))

    def record(r, x):  # type: ignore[no-untyped-def]
        out = r.rows(340)
        r.matmul(x, wa, r.part(out, 0, 300))
        r.matmul(x, wb, r.part(out, 300, 20))
        r.rmsnorm(x, norm, x, eps=1e-6)
        r.matmul(x, wb, r.part(out, 320, 20))
        return out

    out = rig(device, {"x": 64}, record).run(batch(range(6)), x=x)
    wide = x.astype(np.float64)
    normed = 3.0 * wide / np.sqrt((wide**2).mean(1, keepdims=True) + 1e-6)
    assert np.allclose(out, np.concatenate([wide @ a.T, wide @ b.T, normed @ b.T], axis=1), rtol=1e-5, atol=2e-5)
    for row in (0, 5):
        assert out[row, 17] == chain16(a[17], x[row])


def test_rows_alone_and_among_others_are_the_same_bits() -> None:
    rng = np.random.default_rng(9)
    x, a = rng.normal(size=(7, 48)).astype(np.float32), rng.normal(size=(33, 48)).astype(np.float32)
    results = []
    for isa, threads in VARIANTS:
        device = backend(isa, threads)
        weight, norm = f32_weight(device, a), device.vector("n", a[0])

        def record(r, x, weight=weight, norm=norm):  # type: ignore[no-untyped-def]
            out = r.rows(33)
            r.rmsnorm(x, norm, x, eps=1e-6)
            r.matmul(x, weight, out)
            r.silu_mul(out, out, out)
            return out

        once = rig(device, {"x": 48}, record)
        together = once.run(batch(range(7)), x=x)
        alone = np.concatenate([once.run(batch([i]), x=x[i : i + 1]) for i in range(7)])
        assert same_bits(together, alone)
        results.append(together)
    assert all(same_bits(results[0], other) for other in results[1:])


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_select_outputs_packs_the_rows_that_are_wanted(threads: int) -> None:
    device = backend("auto", threads)
    r = recorder(device)
    x, picked, normed = r.rows(20), r.rows(20), r.rows(20)
    r.select_outputs(x, picked)
    r.rmsnorm(picked, device.vector("n", np.ones(20, np.float32)), normed, eps=0.0)
    program = r.finish()
    values = _normal(6, 20)
    program.write(x, values)
    for outputs in ([5, 1], [], [0], [0, 1, 2, 3, 4, 5]):
        program.run(batch(range(6), outputs=outputs))
        assert same_bits(program.view(picked, len(outputs)), values[outputs])
        wide = values[outputs].astype(np.float64)
        true = wide / np.sqrt((wide**2).mean(1, keepdims=True)) if outputs else wide
        assert np.allclose(program.view(normed, len(outputs)), true, rtol=1e-5)


def test_threads_wait_only_where_they_must() -> None:
    # Row-wise steps in a row need no barrier, products of the same rows share one preparation and one barrier.
    device = backend("auto", 2)
    r = recorder(device)
    weight = f32_weight(device, _normal(32, 32))
    norm = device.vector("n", np.ones(32, np.float32))
    x, y, z = r.rows(32), r.rows(32), r.rows(32)
    r.rmsnorm(x, norm, x, eps=1e-6)
    r.add(x, x)
    r.matmul(x, weight, y)  # one barrier
    r.matmul(x, weight, z)
    r.add(y, z)  # one barrier
    r.rmsnorm(y, norm, y, eps=1e-6)
    assert r.finish()._native.barriers == 2


def test_a_batch_that_does_not_fit_is_refused() -> None:
    device = backend("auto", 1)
    r = recorder(device, rows=4, page_tokens=16, pages=8)
    r.rows(4)
    program = r.finish()
    two = np.array([[0, 1]], np.int32)
    for wrong, text in (
        (batch(range(5)), "a batch of 5 rows, at most 4 fit"),
        (batch([32], pages=two), "row 0 is at position 32, the page table has 32 positions"),
        (batch([-1], pages=two), "position -1"),
        (batch([0], sequences=[1], pages=two), "sequence 1 of 1"),
        (batch([17], pages=np.array([[0, 8]], np.int32)), "page 8 of sequence 0, there are 8 pages"),
        (batch([17], pages=np.array([[-1, 2]], np.int32)), "page -1 of sequence 0"),
        (batch([0], outputs=[1]), "output row 1 of a batch of 1 rows"),
        (batch([0, 1, 2, 3], outputs=[0, 1, 2, 3, 3]), "5 outputs, at most 4"),
    ):
        with pytest.raises(ValueError, match=text):
            program.run(wrong)


def test_widths_that_do_not_fit_are_refused_while_recording() -> None:
    device = backend("auto", 1)
    r = recorder(device)
    x, y = r.rows(32), r.rows(16)
    weight = f32_weight(device, _normal(16, 32), name="q_proj")
    with pytest.raises(ValueError, match=r"q_proj \[16, 32\] from 16 to 32"):
        r.matmul(y, weight, x)
    with pytest.raises(ValueError, match="out aliases x"):
        r.matmul(x, weight, r.part(x, 0, 16))
    with pytest.raises(ValueError, match="columns 20\\+20 of 32"):
        r.part(x, 20, 20)
    with pytest.raises(ValueError, match="add: 32 and 16"):
        r.add(x, y)
    with pytest.raises(ValueError, match="buffer of f32 where i32"):
        r.index_select(x, y, r.kv_plane(0, "k", 2), r.rows(5), heads=16, head_dim=2, top_k=4)
    with pytest.raises(ValueError, match="plane k of layer 0 is 2 wide, asked for 3"):
        r.kv_plane(0, "k", 3)


def test_touched_cache_and_workspace_are_counted() -> None:
    device = backend("auto", 1)
    r = device.recorder(max_rows=8, max_outputs=2, page_tokens=16, pages=64)
    key = r.rows(100)
    r.kv_write(key, r.kv_plane(0, "k", 100))
    logits = r.rows(1 << 16)
    picked = r.rows(100)
    r.select_outputs(key, picked)
    r.matmul(picked, f32_weight(device, np.zeros((1 << 16, 100), np.float32)), logits)
    program = r.finish()
    assert r.kv_bytes() == 0
    program.run(batch([0, 15, 16]))
    assert r.kv_bytes() == 2 * 16 * 100 * 4
    two_rows = 2 * (1 << 16) * 4
    assert two_rows < r.workspace_bytes() < two_rows + (64 << 10)
