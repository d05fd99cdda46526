"""Properties that hold for every format and many shapes: sizes, round trips, scale geometry, refusals."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from picaflor.errors import BadContainer, UnknownFormat
from picaflor.formats import REGISTRY, codegen, e8_iq3, get
from picaflor.formats import kv as kv_formats

ROOT = Path(__file__).resolve().parents[2]
SHAPES = [(1, 1), (3, 2), (2, 13), (5, 33), (4, 64), (2, 65), (130, 140), (3, 257), (1, 600)]
QMAX = {"int8-row": 127, "int4-row": 7, "int4-grouped": 7, "int3-g64": 3, "int2-row": 1}


def every() -> list[Any]:
    return [
        pytest.param(name, size, id=f"{name}-{size}" if size else name)
        for name, known in REGISTRY.items()
        for size in known.group_sizes or (0,)
    ]


def span_of(name: str, rows: int, cols: int, group_size: int) -> Any:
    """For each weight the index of its scale, from `ScaleGeometry` alone."""
    scale = REGISTRY[name].scale
    width = {0: cols, -1: group_size}.get(scale.cols, scale.cols)
    across = -(-cols // width)
    return (np.arange(rows) // scale.rows)[:, None] * across + np.arange(cols) // width


@pytest.mark.parametrize(("name", "size"), every())
@pytest.mark.parametrize("shape", SHAPES)
def test_sample_fits_its_planes_and_decodes(name: str, size: int, shape: tuple[int, int]) -> None:
    known = REGISTRY[name]
    planes = known.sample(np.random.default_rng(7), *shape, size)
    assert [array.nbytes for array in planes] == [plane.nbytes(*shape, size) for plane in known.planes]
    assert sum(array.nbytes for array in planes) == known.nbytes(*shape, size)
    decoded = known.decode(planes, *shape, size)
    assert decoded.dtype == np.float32
    assert decoded.shape == shape
    assert np.isfinite(decoded).all()


@pytest.mark.parametrize(("name", "size"), every())
def test_sample_is_nasty(name: str, size: int) -> None:
    """Scales of one row differ by a factor of 100 and more; codes reach both extremes."""
    known = REGISTRY[name]
    rows, cols = 260, 1024
    planes = known.sample(np.random.default_rng(11), rows, cols, size)
    decoded = known.decode(planes, rows, cols, size)
    magnitudes = np.abs(decoded[decoded != 0])
    assert magnitudes.max() > 1e3 * magnitudes.min()
    assert (decoded < 0).any()
    assert (decoded > 0).any()
    if known.scale.plane >= 0 and name != "mxfp4":
        assert planes[1].max() / planes[1].min() > 100
    if name not in ("f32", "bf16", "f16"):
        assert len(np.unique(planes[0].view(np.uint8))) >= 200


@pytest.mark.parametrize(("name", "size"), every())
def test_each_scale_reaches_exactly_its_weights(name: str, size: int) -> None:
    """Doubling one scale doubles the weights that `ScaleGeometry` says it covers, and no others."""
    known = REGISTRY[name]
    if known.scale.plane < 0:
        assert name in ("f32", "bf16", "f16", "e8-iq3-lattice")
        return
    rows, cols = 131, 2 * max(size, 128) + 5
    planes = known.sample(np.random.default_rng(3), rows, cols, size)
    before = known.decode(planes, rows, cols, size)
    spans = span_of(name, rows, cols, size)
    assert spans.max() + 1 == planes[1].size
    for index in (0, planes[1].size // 2, planes[1].size - 1):
        scales = planes[1].copy()
        flat = scales.reshape(-1)
        flat[index] = flat[index] + 1 if name == "mxfp4" else flat[index] * 2
        after = known.decode((planes[0], scales), rows, cols, size)
        np.testing.assert_array_equal(after, np.where(spans == index, before * 2, before))


@pytest.mark.parametrize("name", sorted(QMAX))
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_integer_round_trip(name: str, data: Any) -> None:
    """The error is at most half a step; each scale is the largest magnitude of its span over qmax."""
    known = REGISTRY[name]
    assert known.encode is not None
    rows = data.draw(st.integers(1, 6))
    cols = data.draw(st.integers(1, 300))
    size = data.draw(st.sampled_from(known.group_sizes)) if known.group_sizes else 0
    seed = data.draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    weights = (rng.standard_normal((rows, cols)) * 10.0 ** rng.integers(-3, 3, (rows, cols))).astype(np.float32)
    planes = known.encode(weights, size)
    decoded = known.decode(planes, rows, cols, size)
    spans = span_of(name, rows, cols, size)
    step = planes[1].reshape(-1)[spans].astype(np.float64)
    assert np.all(np.abs(decoded.astype(np.float64) - weights) <= step * 0.5 * (1 + 1e-5))
    for index in range(planes[1].size):
        largest = np.abs(weights[spans == index]).max()
        assert np.float32(max(largest / np.float32(QMAX[name]), np.float32(1e-8))) == planes[1].reshape(-1)[index]
    codes = np.rint(decoded / step)
    assert codes.min() >= -QMAX[name]
    assert codes.max() <= QMAX[name]


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 300), cols=st.integers(1, 300))
def test_fp8_round_trip(seed: int, rows: int, cols: int) -> None:
    """Relative error of a normal value is at most 2^-4, of a subnormal one half of 2^-9 steps."""
    known = REGISTRY["fp8-e4m3-b128"]
    assert known.encode is not None
    rng = np.random.default_rng(seed)
    weights = (rng.standard_normal((rows, cols)) * 10.0 ** rng.integers(-3, 3, (rows, cols))).astype(np.float32)
    planes = known.encode(weights, 0)
    decoded = known.decode(planes, rows, cols, 0).astype(np.float64)
    step = planes[1].reshape(-1)[span_of("fp8-e4m3-b128", rows, cols, 0)].astype(np.float64)
    bound = np.maximum(np.abs(weights) * 2.0**-4, step * 2.0**-10)
    assert np.all(np.abs(decoded - weights) <= bound * (1 + 1e-5))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 4), blocks=st.integers(1, 3))
def test_e8_round_trip(seed: int, rows: int, blocks: int) -> None:
    """3 bits hold a normal row to about 19 % of its magnitude (29 % is far outside what is ever seen)."""
    rng = np.random.default_rng(seed)
    weights = rng.standard_normal((rows, 256 * blocks)).astype(np.float32)
    planes = e8_iq3.encode(weights)
    rotated = e8_iq3.rotate(weights)
    stored = e8_iq3.decode(planes, rows, 256 * blocks, 0)
    error = np.linalg.norm(stored - rotated, axis=1) / np.linalg.norm(rotated, axis=1)
    assert error.max() < 0.29
    x = rng.standard_normal(256 * blocks).astype(np.float32)
    through_rotation = stored.astype(np.float64) @ e8_iq3.rotate(x)
    directly = e8_iq3.unrotate(stored).astype(np.float64) @ x
    np.testing.assert_allclose(through_rotation, directly, atol=1e-4)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), dim=st.integers(1, 3000))
def test_rotation_keeps_lengths_and_can_be_undone(seed: int, dim: int) -> None:
    x = np.random.default_rng(seed).standard_normal((2, dim)).astype(np.float32)
    rotated = e8_iq3.rotate(x)
    np.testing.assert_allclose(np.linalg.norm(rotated, axis=1), np.linalg.norm(x, axis=1), rtol=1e-5)
    np.testing.assert_allclose(e8_iq3.unrotate(rotated), x, atol=2e-5)
    np.testing.assert_array_equal(e8_iq3.rotate(x[1]), rotated[1])


def test_e8_zero_rows_and_even_signs() -> None:
    planes = e8_iq3.encode(np.zeros((2, 256), dtype=np.float32))
    assert not e8_iq3.decode(planes, 2, 256, 0).any()
    decoded = e8_iq3.decode(e8_iq3.sample(np.random.default_rng(1), 4, 512, 0), 4, 512, 0)
    assert np.all((decoded.reshape(-1, 8) < 0).sum(axis=1) % 2 == 0)


def test_e8_closer_encoder_has_a_smaller_error() -> None:
    weights = np.random.default_rng(8).standard_normal((16, 512)).astype(np.float32)
    rotated = e8_iq3.rotate(weights)
    plain, closer = (
        ((e8_iq3.decode(planes, 16, 512, 0) - rotated) ** 2).sum(axis=1)
        for planes in (e8_iq3.encode(weights), e8_iq3.encode_closer(weights))
    )
    assert np.all(closer < plain)
    assert closer.sum() < 0.95 * plain.sum()


def test_e8_partial_block_is_read_but_not_written() -> None:
    planes = e8_iq3.sample(np.random.default_rng(2), 3, 300, 0)
    whole = e8_iq3.decode(planes, 3, 512, 0)
    np.testing.assert_array_equal(e8_iq3.decode(planes, 3, 300, 0), whole[:, :300])
    with pytest.raises(BadContainer, match=r"rows of 300 weights cannot be encoded, only multiples of 256"):
        e8_iq3.encode(np.zeros((1, 300), dtype=np.float32))


def test_grid_is_the_published_one() -> None:
    digest = "46e35f5a997efdee6c99ce57854c8a0d4f0ff8ca57e5e8a60c0793ea580acf5d"
    assert e8_iq3.GRID.shape == (256, 4)
    assert hashlib.sha256(e8_iq3.GRID.tobytes()).hexdigest() == digest
    rows = [(4, 4, 4, 4), (20, 4, 4, 4), (36, 4, 4, 4), (62, 12, 4, 4), (4, 28, 52, 62)]
    assert [tuple(e8_iq3.GRID[row].tolist()) for row in (0, 1, 2, 5, 255)] == rows


def test_large_matrices_are_encoded_in_pieces() -> None:
    """More rows than one cache block: the pieces give what single rows give."""
    weights = np.random.default_rng(5).standard_normal((700, 1024)).astype(np.float32)
    for name in ("int8-row", "int4-row", "int2-row", "int4-grouped", "int3-g64", "bf16"):
        encoder = REGISTRY[name].encode
        assert encoder is not None
        planes = encoder(weights, 64)
        for row in (0, 255, 256, 257, 699):
            single = encoder(weights[row : row + 1], 64)
            for whole, part in zip(planes, single, strict=True):
                np.testing.assert_array_equal(whole[row], part[0])
    encoder = REGISTRY["fp8-e4m3-b128"].encode
    assert encoder is not None
    codes, scales = encoder(weights, 0)
    part_codes, part_scales = encoder(weights[384:512], 0)
    np.testing.assert_array_equal(codes[384:512], part_codes)
    np.testing.assert_array_equal(scales[3:4], part_scales)


@pytest.mark.parametrize("name", ["int8-row", "int4-row", "int2-row", "int4-grouped", "int3-g64", "fp8-e4m3-b128"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_encoders_refuse_what_is_not_finite(name: str, bad: float) -> None:
    weights = np.ones((3, 70), dtype=np.float32)
    weights[1, 69] = bad
    encoder = REGISTRY[name].encode
    assert encoder is not None
    with pytest.raises(BadContainer, match="NaN or infinity"):
        encoder(weights, 64)


def test_f16_refuses_overflow() -> None:
    encoder = REGISTRY["f16"].encode
    assert encoder is not None
    with pytest.raises(BadContainer, match=r"magnitude 70000 is beyond .* 65504"):
        encoder(np.array([[1.0, -70000.0]], dtype=np.float32), 0)


def test_odd_and_unlisted_group_sizes_are_refused() -> None:
    known = REGISTRY["int4-grouped"]
    assert known.encode is not None
    for size in (0, 1, 17, 63, 100, 512, -64):
        with pytest.raises(UnknownFormat, match=rf"group size {size} is none of 16, 32, 48, 64, 96, 128, 192, 256"):
            known.encode(np.ones((1, 64), dtype=np.float32), size)
        with pytest.raises(UnknownFormat, match="is none of"):
            known.decode((np.zeros(32, np.uint8), np.zeros(1, np.float32)), 1, 64, size)


def test_decode_refuses_planes_of_another_size() -> None:
    known = REGISTRY["int4-row"]
    codes, scales = np.zeros(6, np.uint8), np.zeros(2, np.float32)
    assert known.decode((codes, scales), 2, 5, 0).shape == (2, 5)
    with pytest.raises(BadContainer, match=r"int4-row: plane codes of \[2, 7\] has 6 bytes, expected 8"):
        known.decode((codes, scales), 2, 7, 0)
    with pytest.raises(BadContainer, match="int4-row: 1 planes given, the format has 2"):
        known.decode((codes,), 2, 5, 0)


@pytest.mark.parametrize(
    ("name", "cols", "size", "bits"),
    [
        ("f32", 5, 0, 32),
        ("bf16", 5, 0, 16),
        ("f16", 5, 0, 16),
        ("int8-row", 64, 0, 8.5),
        ("int4-row", 64, 0, 4.5),
        ("int4-row", 5, 0, (24 + 32) / 5),
        ("int2-row", 64, 0, 2.5),
        ("int4-grouped", 6144, 64, 4.5),
        ("int4-grouped", 6144, 128, 4.25),
        ("int3-g64", 6144, 0, 3.5),
        ("e8-iq3-lattice", 6144, 0, 3.0625),
        ("mxfp4", 6144, 0, 4.25),
        ("fp8-e4m3-b128", 6144, 0, 8 + 32 / 16384),
    ],
)
def test_bits_per_weight(name: str, cols: int, size: int, bits: float) -> None:
    assert REGISTRY[name].bits_per_weight(cols, size) == pytest.approx(bits)
    rows = 256
    counted = 8 * REGISTRY[name].planes[0].nbytes(rows, cols, size)
    if name != "e8-iq3-lattice":
        counted = 8 * REGISTRY[name].nbytes(rows, cols, size)
    assert counted / (rows * cols) == pytest.approx(bits)


def test_registry_order_is_that_of_the_native_ids() -> None:
    text = (ROOT / "native" / "cpu" / "weight.h").read_text()
    body = re.search(r"enum class FormatId : int32_t \{(.*?)\}", text, re.S)
    assert body is not None
    ids = re.findall(r"(\w+) = (\d+)", body.group(1))
    assert [int(number) for _, number in ids] == list(range(len(REGISTRY)))
    short = {"e8-iq3-lattice": "e8_iq3", "fp8-e4m3-b128": "fp8_b128"}
    assert [name for name, _ in ids] == [short.get(name, name.replace("-", "_")) for name in REGISTRY]


def test_generated_header_is_current() -> None:
    path = ROOT / "native" / "generated" / "format_constants.h"
    assert codegen.HEADER_PATH.parts[-3:] == path.parts[-3:]
    assert path.read_text() == codegen.header(), "run python -m picaflor.formats.codegen"


def test_get_names_what_is_accepted() -> None:
    assert get("int4-row") is REGISTRY["int4-row"]
    with pytest.raises(UnknownFormat, match=r"'int5-row'; known: f32, bf16, f16, int8-row, .*fp8-e4m3-b128"):
        get("int5-row")


def test_only_e8_is_rotated_and_routed_only() -> None:
    assert [name for name, known in REGISTRY.items() if known.activation.rotated] == ["e8-iq3-lattice"]
    assert [name for name, known in REGISTRY.items() if known.routed_only] == ["e8-iq3-lattice"]
    groups = {name: known.activation.group for name, known in REGISTRY.items()}
    assert groups == {
        "f32": 0,
        "bf16": 0,
        "f16": 0,
        "int8-row": 64,
        "int4-row": 64,
        "int2-row": 64,
        "int4-grouped": -1,
        "int3-g64": 64,
        "e8-iq3-lattice": 32,
        "mxfp4": 32,
        "fp8-e4m3-b128": 0,
    }


def test_cache_page_formats() -> None:
    f32 = kv_formats.get("f32")
    assert (f32.name, f32.dtype, f32.bytes_per_value) == ("f32", np.dtype(np.float32), 4.0)
    with pytest.raises(UnknownFormat, match=r"unknown cache page format 'fp8'; known: f32"):
        kv_formats.get("fp8")


def test_codes_come_from_a_division() -> None:
    """Ties go to even after w / s; multiplying by 1 / s would send some of them elsewhere."""
    encoder = REGISTRY["int4-row"].encode
    assert encoder is not None
    steps = np.arange(1, 200, dtype=np.float32)
    halves = np.array([7, 0.5, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5], dtype=np.float32)
    codes, scales = planes = encoder(steps[:, None] * halves, 0)
    np.testing.assert_array_equal(scales, steps)
    decoded = REGISTRY["int4-row"].decode(planes, 199, 8, 0) / steps[:, None]
    np.testing.assert_array_equal(decoded, np.tile([7, 0, 2, 2, 4, 4, 6, 6], (199, 1)))
    assert codes.shape == (199, 4)


def slow_e8_block(values: Any) -> tuple[list[int], list[int]]:
    """Lattice rows and scale codes of one rotated super-block, by trying everything one by one."""
    grid = e8_iq3.GRID.astype(np.float32) / np.float32(2)
    norms = (grid * grid).sum(axis=1)
    order = np.lexsort((np.arange(256), norms))
    scale = np.float32(np.float16(np.sqrt(np.mean(values * values, dtype=np.float32)) / np.float32(20) + 1e-12))
    indices, codes = [], []
    for part in np.abs(values).reshape(8, 8, 4):
        best: tuple[float, int, list[int]] | None = None
        for code in range(16):
            db = scale * np.float32(0.5 + code) * np.float32(0.5)
            rows = [int(order[np.argmin((db * norms - np.float32(2) * (grid @ m))[order])]) for m in part]
            error = float(((part - db * grid[rows]) ** 2).sum(dtype=np.float64))
            if best is None or error < best[0]:
                best = (error, code, rows)
        assert best is not None
        codes.append(best[1])
        indices += best[2]
    return indices, codes


@pytest.mark.parametrize("kind", ["integers", "ones and a spike", "zeros", "normal"])
def test_e8_encoder_equals_trying_everything(kind: str) -> None:
    """Whole numbers make many lattice rows equally good: the first of the smallest norm is taken."""
    rng = np.random.default_rng(21)
    values = {
        "integers": rng.integers(-3, 4, size=256),
        "ones and a spike": np.concatenate([np.ones(255), [40]]),
        "zeros": np.zeros(256),
        "normal": rng.standard_normal(256),
    }[kind].astype(np.float32)
    block = e8_iq3._encode_blocks(values[None], closer=False)[0]
    indices, codes = slow_e8_block(values)
    assert block[:64].tolist() == indices
    assert (block[64:96].view("<u4") >> 28).tolist() == codes
