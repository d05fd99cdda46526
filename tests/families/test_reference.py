"""The reference backend's operations against values worked out by hand or by another formula.

Must not know families.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from picaflor.backends.api import GQA, MLA, Batch, RouterSpec
from picaflor.backends.reference import ReferenceBackend, ReferenceRecorder, choose, rotate, route, sample
from picaflor.errors import UnsupportedKernel
from picaflor.formats.e8_iq3 import rotate as rotate_float32

BACKEND = ReferenceBackend()


def batch(positions: list[int], pages: list[list[int]], sequences: list[int] | None = None) -> Batch:
    """A batch of rows without tokens; every row is an output."""
    count = len(positions)
    return Batch(
        tokens=np.zeros(count, dtype=np.int32),
        sequences=np.array(sequences or [0] * count, dtype=np.int32),
        positions=np.array(positions, dtype=np.int32),
        pages=np.array(pages, dtype=np.int32),
        outputs=np.arange(count, dtype=np.int32),
    )


def recorder(max_rows: int = 8) -> ReferenceRecorder:
    """Pages of four tokens."""
    return BACKEND.recorder(max_rows=max_rows, max_outputs=max_rows, page_tokens=4, pages=6)


def unary(values: np.ndarray, record: Callable[..., None], positions: list[int] | None = None) -> np.ndarray:
    """Run one operation `record(recorder, x, out)`."""
    made = recorder(len(values))
    x, out = made.rows(values.shape[1]), made.rows(values.shape[1])
    record(made, x, out)
    program = made.finish()
    program.write(x, values.astype(np.float32))
    program.run(batch(positions or list(range(len(values))), [[0, 1, 2]]))
    return program.view(out, len(values))


def test_rotation_agrees_with_the_formats_and_keeps_lengths() -> None:
    x = np.random.default_rng(1).standard_normal((3, 12))
    assert np.abs(rotate(x) - rotate_float32(x.astype(np.float32))).max() < 1e-5
    assert np.allclose(np.linalg.norm(rotate(x), axis=1), np.linalg.norm(x, axis=1))
    first = rotate(np.array([1.0, 2, 3, 4, 5, 6, 7, 8]))
    assert abs(first[0] - 6.36396074) < 1e-6
    assert abs(first[3] - 4.94974756) < 1e-6


def test_norms() -> None:
    x = np.array([[3.0, 4.0, 0.0, 12.0]])
    weight = BACKEND.vector("w", np.array([1.0, 2.0], dtype=np.float32))
    out = unary(x, lambda made, x, out: made.rmsnorm(x, weight, out, eps=0.5, heads=2))
    assert np.allclose(out, [[3 / np.sqrt(13), 8 / np.sqrt(13), 0.0, 24 / np.sqrt(72.5)]])
    weight = BACKEND.vector("w", np.array([1.0, 2.0, 3.0, 4.0], dtype=np.float32))
    bias = BACKEND.vector("b", np.array([0.0, 0.0, 1.0, 0.0], dtype=np.float32))
    out = unary(x, lambda made, x, out: made.layernorm(x, weight, bias, out, eps=0.0625))
    deviation = np.sqrt(np.var(x) + 0.0625)
    assert np.allclose(out, [[(3 - 4.75) / deviation, -1.5 / deviation, 1 - 14.25 / deviation, 29 / deviation]])


def test_rope_styles_differ_in_their_pairs_and_give_halves() -> None:
    x = np.array([[9.0, 1.0, 2.0, 3.0, 4.0]])
    cos, sin = np.cos([5.0, 0.05]), np.sin([5.0, 0.05])

    def rotated(style: str) -> np.ndarray:
        def record(made: ReferenceRecorder, x: object, out: object) -> None:
            made.rope(x, heads=1, head_width=5, start=1, dims=4, theta=1e4, style=style)  # type: ignore[arg-type]
            made.select_outputs(x, out)  # type: ignore[arg-type]

        return unary(x, record, positions=[5])[0]

    low, high = 1 * cos[0] - 2 * sin[0], 2 * cos[0] + 1 * sin[0]
    assert np.allclose(rotated("interleaved")[[0, 1, 3]], [9, low, high])
    assert np.allclose(
        rotated("half")[1:],
        [
            1 * cos[0] - 3 * sin[0],
            2 * cos[1] - 4 * sin[1],
            3 * cos[0] + 1 * sin[0],
            4 * cos[1] + 2 * sin[1],
        ],
    )


def test_router_chooses_by_bias_and_weighs_without_it() -> None:
    logits, bias = np.array([0.0, 1.0, -1.0, 1.0]), np.array([9.0, 0.0, 0.0, 0.0])
    ids, weights = route(logits, bias, RouterSpec("sigmoid", 4, 3, True, 2.5))
    assert ids.tolist() == [0, 1, 3]
    scores = 1 / (1 + np.exp(-logits[[0, 1, 3]]))
    assert np.allclose(weights, 2.5 * scores / scores.sum())
    ids, weights = route(logits, None, RouterSpec("softmax", 4, 2, False, 1.0))
    assert ids.tolist() == [1, 3]
    assert np.allclose(weights, np.exp(1) / np.exp(logits).sum())


def test_router_groups_are_ranked_by_their_two_best() -> None:
    logits = np.array([5.0, -9.0, 1.0, 1.0, 0.5, 0.4])
    spec = RouterSpec("sigmoid", 6, 2, False, 1.0, groups=3, top_groups=1)
    assert route(logits, None, spec)[0].tolist() == [2, 3]


def test_choice_of_keys_breaks_ties_by_position_and_puts_nan_last() -> None:
    scores = np.array([1.0, 3.0, np.nan, 1.0, 2.0, 1.0])
    assert choose(scores, 3).tolist() == [0, 1, 4]
    assert choose(scores, 4).tolist() == [0, 1, 3, 4]
    assert choose(np.array([np.nan, -5.0, np.nan]), 2).tolist() == [0, 1]


def test_attention_reads_its_own_pages_only() -> None:
    made = recorder()
    key, value = made.kv_plane(0, "key", 2), made.kv_plane(0, "value", 2)
    q, k, v, out = (made.rows(2) for _ in range(4))
    made.kv_write(k, key)
    made.kv_write(v, value)
    made.attention(q, out, kind=GQA(key, value, heads=1, kv_heads=1, head_dim=2, scale=0.5))
    program = made.finish()
    rows = np.random.default_rng(2).standard_normal((6, 3, 2)).astype(np.float32)
    for buffer, part in ((q, 0), (k, 1), (v, 2)):
        program.write(buffer, rows[:, part])
    table = [[5, 2], [0, 3]]
    program.run(batch([0, 0, 1, 2, 3, 4], table, sequences=[0, 1, 1, 1, 1, 1]))
    got = program.view(out, 6)
    assert np.allclose(got[0], rows[0, 2])
    scores = rows[1:, 1].astype(np.float64) @ rows[5, 0] * 0.5
    weights = np.exp(scores) / np.exp(scores).sum()
    assert np.allclose(got[5], weights @ rows[1:, 2])
    assert np.isnan(key.handle[1]).all()


def test_latent_attention_equals_the_expanded_form() -> None:
    heads, nope, rope, value, rank = 2, 3, 2, 4, 5
    random = np.random.default_rng(3)
    weights = random.standard_normal((heads * (nope + value), rank)).astype(np.float32)
    kv_b = BACKEND.weight("kv_b", "f32", weights.shape, 0, [weights])
    made = recorder()
    latent, rope_key = made.kv_plane(0, "latent", rank), made.kv_plane(0, "rope_key", rope)
    q, c, r, out = made.rows(heads * (nope + rope)), made.rows(rank), made.rows(rope), made.rows(heads * value)
    made.kv_write(c, latent)
    made.kv_write(r, rope_key)
    made.attention(q, out, kind=MLA(kv_b, latent, rope_key, heads, nope, rope, value, 0.7))
    program = made.finish()
    data = {buffer.width: random.standard_normal((6, buffer.width)).astype(np.float32) for buffer in (q, c, r)}
    for buffer in (q, c, r):
        program.write(buffer, data[buffer.width])
    program.run(batch([0, 1, 2, 3, 4, 5], [[4, 1]]))
    expanded = (data[rank].astype(np.float64) @ weights.T.astype(np.float64)).reshape(6, heads, nope + value)
    query = data[heads * (nope + rope)].reshape(6, heads, nope + rope)[5].astype(np.float64)
    for head in range(heads):
        scores = expanded[:, head, :nope] @ query[head, :nope] + data[rope] @ query[head, nope:]
        weight = np.exp(0.7 * scores) / np.exp(0.7 * scores).sum()
        assert np.allclose(program.view(out, 6)[5].reshape(heads, value)[head], weight @ expanded[:, head, nope:])


def test_what_was_never_written_is_nan() -> None:
    made = recorder()
    key = made.kv_plane(0, "key", 2)
    q, out = made.rows(2), made.rows(2)
    made.attention(q, out, kind=GQA(key, key, heads=1, kv_heads=1, head_dim=2, scale=1.0))
    program = made.finish()
    program.write(q, np.ones((1, 2), dtype=np.float32))
    program.run(batch([1], [[0]]))
    assert np.isnan(program.view(out, 1)).all()


def test_recorder_refuses_what_does_not_fit() -> None:
    made = recorder()
    x, y = made.rows(4), made.rows(6)
    weight = BACKEND.weight("w", "f32", (4, 4), 0, [np.zeros((4, 4), dtype=np.float32)])
    with pytest.raises(ValueError, match="aliases"):
        made.matmul(x, weight, x)
    with pytest.raises(ValueError, match="4 to 6"):
        made.matmul(x, weight, y)
    made.kv_plane(0, "k", 4)
    with pytest.raises(ValueError, match="plane k of layer 0 is 4 wide"):
        made.kv_plane(0, "k", 5)
    with pytest.raises(UnsupportedKernel, match="int5"):
        BACKEND.weight("w", "int5", (4, 4), 0, [])


def test_rotated_matrices_are_refused_where_single_rows_are_needed() -> None:
    planes = [np.zeros(256 * 98, dtype=np.uint8), np.full(1, 6.0, dtype=np.float32)]
    weight = BACKEND.weight("kv_b", "e8-iq3-lattice", (256, 256), 0, planes)
    made = recorder()
    wide = made.rows(256)
    with pytest.raises(UnsupportedKernel, match="embed with kv_b in e8-iq3-lattice; accepted: f32, bf16"):
        made.embed(weight, wide)
    latent, rope_key = made.kv_plane(0, "latent", 256), made.kv_plane(0, "rope_key", 2)
    kind = MLA(weight, latent, rope_key, heads=16, nope=8, rope=2, value=8, scale=1.0)
    with pytest.raises(UnsupportedKernel, match="absorbed attention with kv_b in e8-iq3-lattice"):
        made.attention(made.rows(160), made.rows(128), kind=kind)


def test_sampling_rules() -> None:
    logits = np.log(np.array([0.1, 0.5, 0.1, 0.3], dtype=np.float32))

    def pick(uniform: float, top_p: float = 1.0, temperature: float = 1.0) -> int:
        return sample(logits, temperature=temperature, top_p=top_p, uniform=uniform)

    assert [pick(u) for u in (0.0, 0.0999, 0.11, 0.59, 0.61, 0.69, 0.71, 0.9999)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [pick(u, top_p=0.75) for u in (0.0, 0.62, 0.63)] == [1, 1, 3]
    assert [pick(u, top_p=0.45) for u in (0.0, 0.9999)] == [1, 1]
    assert pick(0.99, temperature=0.0) == 1
    ties = np.array([np.nan, 2.0, np.inf, 2.0, -np.inf], dtype=np.float32)
    assert sample(ties, temperature=0.0, top_p=1.0, uniform=0.5) == 1
    assert sample(ties, temperature=1.0, top_p=1.0, uniform=0.51) == 3
    assert sample(np.full(3, np.nan, dtype=np.float32), temperature=1.0, top_p=0.9, uniform=0.5) == 0
