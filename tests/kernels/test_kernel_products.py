"""Products of every format: near the exact sum, equal to the rule, the same bits everywhere.

Must not time anything.
"""

from __future__ import annotations

import numpy as np
import pytest
from kernel_harness import (
    CASE_IDS,
    CASES,
    INTEGER_CASES,
    chain16,
    contract_product,
    inputs,
    largest_error,
    same_bits,
    sample,
)

from picaflor import _native, formats
from picaflor.backends.cpu import kernels

ISAS = _native.kernel_isas()
SHAPES = [(1, 1), (5, 7), (16, 64), (33, 131), (19, 515), (40, 1000), (17, 1730)]
COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13, 64)


def activations(rng: np.random.Generator, count: int, cols: int) -> np.ndarray:
    """Normal values, one in a hundred thirty times as large."""
    x = rng.standard_normal((count, cols)).astype(np.float32)
    x[rng.random(x.shape) < 0.01] *= 30
    return x


@pytest.mark.parametrize(("name", "group_size"), CASES, ids=CASE_IDS)
def test_near_the_exact_product(name: str, group_size: int) -> None:
    """Every precision stays within half a digit step and the roundings of its sum, on every instruction set."""
    rng = np.random.default_rng(11)
    for rows, cols in SHAPES:
        data = sample(name, group_size, rows, cols, tame=True)
        x = activations(rng, 3, cols)
        exact = inputs(name, x) @ data.decoded.astype(np.float64).T
        for planes in (1, 2, 3):
            bound = largest_error(name, group_size, data, x, planes)
            for isa in ISAS:
                errors = np.abs(kernels.matmul(data.weight, x, planes=planes, isa=isa) - exact)
                assert (errors <= bound).all(), (isa, rows, cols, planes, (errors - bound).max())


@pytest.mark.parametrize(("name", "group_size"), INTEGER_CASES, ids=[f"{n}-{s}" for n, s in INTEGER_CASES])
def test_precisions_are_what_they_promise(name: str, group_size: int) -> None:
    """On long rows with outliers, relative to the sum of |terms|: standard 8e-5, exact 4e-7."""
    rng = np.random.default_rng(19)
    data = sample(name, group_size, 12, 2048, tame=True)
    x = activations(rng, 4, 2048)
    weights, values = data.decoded.astype(np.float64), inputs(name, x)
    magnitude = np.abs(values) @ np.abs(weights).T
    for planes, bound in ((2, 8e-5), (3, 4e-7)):
        errors = np.abs(kernels.matmul(data.weight, x, planes=planes) - values @ weights.T) / magnitude
        assert errors.max() <= bound, (planes, errors.max())


@pytest.mark.parametrize(("name", "group_size"), CASES, ids=CASE_IDS)
def test_same_bits_on_every_instruction_set(name: str, group_size: int) -> None:
    """All tables equal the scalar one, for every number of rows and both loops."""
    rng = np.random.default_rng(12)
    for rows, cols in SHAPES:
        data = sample(name, group_size, rows, cols)
        for planes in (1, 2, 3):
            for count in COUNTS:
                x = activations(rng, count, cols)
                expected = kernels.matmul(data.weight, x, planes=planes, isa="scalar")
                for isa in ISAS:
                    got = kernels.matmul(data.weight, x, planes=planes, isa=isa)
                    assert same_bits(got, expected), (isa, rows, cols, planes, count)


@pytest.mark.parametrize(("name", "group_size"), CASES, ids=CASE_IDS)
def test_sizes_beyond_every_block(name: str, group_size: int) -> None:
    """More rows of x than are met at a time, more rows of weights than an item, more inputs than a chunk."""
    rng = np.random.default_rng(23)
    for rows, cols, count in ((20, 200, 300), (1100, 130, 1), (17, 1100, 150)):
        data = sample(name, group_size, rows, cols, tame=True)
        x = activations(rng, count, cols)
        exact = inputs(name, x) @ data.decoded.astype(np.float64).T
        bound = largest_error(name, group_size, data, x, 2)
        for isa in ISAS[1:]:
            errors = np.abs(kernels.matmul(data.weight, x, planes=2, isa=isa) - exact)
            assert (errors <= bound).all(), (isa, rows, cols, count, (errors - bound).max())


def test_the_smallest_scales_of_mxfp4() -> None:
    """Codes 0 to 3 are 2^-127 to 2^-124: halved, the first two are no normal floats."""
    rng = np.random.default_rng(29)
    codes, scales = formats.REGISTRY["mxfp4"].sample(rng, 20, 128, 0)
    scales[...] = rng.integers(0, 4, scales.shape)
    decoded = formats.REGISTRY["mxfp4"].decode((codes, scales), 20, 128, 0).astype(np.float64)
    weight = kernels.hold("mxfp4", (codes, scales), 20, 128, 0)
    x = (activations(rng, 13, 128) * np.float32(2.0**110)).astype(np.float32)
    for isa in ISAS:
        for count in (1, 3, 13):
            got = kernels.matmul(weight, x[:count], planes=3, isa=isa)
            exact = x[:count].astype(np.float64) @ decoded.T
            magnitude = np.abs(x[:count].astype(np.float64)) @ np.abs(decoded).T
            assert (np.abs(got - exact) <= 1e-6 * magnitude).all(), (isa, count)


@pytest.mark.parametrize(("name", "group_size"), CASES, ids=CASE_IDS)
def test_a_row_does_not_see_its_neighbours(name: str, group_size: int) -> None:
    """Row s of a batch is what row s gives alone; a range of weight rows is that part of all rows."""
    rng = np.random.default_rng(13)
    data = sample(name, group_size, 45, 200)
    x = activations(rng, 40, 200)
    for planes in (1, 2, 3):
        for isa in ISAS:
            whole = kernels.matmul(data.weight, x, planes=planes, isa=isa)
            for s in (0, 7, 39):
                assert same_bits(whole[s : s + 1], kernels.matmul(data.weight, x[s : s + 1], planes=planes, isa=isa))
            for count in (2, 7, 13):
                part = kernels.matmul(data.weight, x[:count], planes=planes, isa=isa, row_begin=3, row_end=41)
                assert same_bits(part[:, 3:41].copy(), whole[:count, 3:41].copy())
                assert not part[:, :3].any()
                assert not part[:, 41:].any()


@pytest.mark.parametrize(
    ("name", "group_size"),
    [("int4-grouped", 16), ("int4-grouped", 48), ("int4-grouped", 256), ("int4-row", 0), ("int8-row", 0), ("mxfp4", 0)],
)
@pytest.mark.parametrize("planes", [1, 2, 3])
def test_scalar_is_the_rule(name: str, group_size: int, planes: int) -> None:
    """The scalar table equals the contract's arithmetic with exact integers and exact fma."""
    rng = np.random.default_rng(14)
    data = sample(name, group_size, 3, 147)
    x = activations(rng, 1, 147)
    x[0, 3] = -x[0].max() * 2
    expected = contract_product(name, group_size, data, x[0], planes)
    assert same_bits(kernels.matmul(data.weight, x, planes=planes, isa="scalar")[0], expected)


@pytest.mark.parametrize("name", ["f32", "bf16", "f16", "fp8-e4m3-b128"])
def test_float_formats_are_sixteen_chains(name: str) -> None:
    """The scalar table equals chain16 of the decoded row."""
    rng = np.random.default_rng(15)
    for cols in (5, 16, 131, 147):
        data = sample(name, 0, 3, cols, tame=True)
        x = activations(rng, 1, cols)
        expected = np.array([chain16(row, x[0]) for row in data.decoded], np.float32)
        assert same_bits(kernels.matmul(data.weight, x, planes=2, isa="scalar")[0], expected)


@pytest.mark.parametrize(("name", "group_size"), CASES, ids=CASE_IDS)
def test_decode_row_is_exact(name: str, group_size: int) -> None:
    """decode_row equals the format's own decode, value for value."""
    for rows, cols in (*SHAPES, (130, 130)):
        data = sample(name, group_size, rows, cols)
        for isa in ISAS:
            np.testing.assert_array_equal(kernels.decode(data.weight, isa=isa), data.decoded)


@pytest.mark.parametrize(("name", "group_size"), INTEGER_CASES, ids=[f"{n}-{s}" for n, s in INTEGER_CASES])
def test_prepared_bytes_are_the_same(name: str, group_size: int) -> None:
    """Every instruction set prepares the same bytes, odd lengths and odd values included."""
    rng = np.random.default_rng(16)
    for cols in (1, 15, 16, 131, 515, 1000):
        data = sample(name, group_size, 1, cols)
        x = activations(rng, 4, cols)
        x[1] = 0
        x[2, cols // 2] = np.inf
        x[3] *= np.float32(1e-33)
        for planes in (1, 2, 3):
            expected = kernels.prepare(data.weight, x, planes=planes, isa="scalar")
            for isa in ISAS:
                np.testing.assert_array_equal(kernels.prepare(data.weight, x, planes=planes, isa=isa), expected)


@pytest.mark.parametrize(("name", "group_size"), INTEGER_CASES, ids=[f"{n}-{s}" for n, s in INTEGER_CASES])
def test_values_that_cannot_be_scaled(name: str, group_size: int) -> None:
    """NaN and infinity give NaN, also at the very end; zero and tiny rows give 0; huge rows stay finite or are inf."""
    cols = 131
    data = sample(name, group_size, 17, cols)
    rng = np.random.default_rng(17)
    for isa in ISAS:
        for planes in (1, 2, 3):
            for bad in (np.nan, np.inf, -np.inf):
                for place in (0, cols - 1):
                    x = rng.standard_normal((2, cols)).astype(np.float32)
                    x[0, place] = bad
                    y = kernels.matmul(data.weight, x, planes=planes, isa=isa)
                    assert np.isnan(y[0]).all()
                    assert np.isfinite(y[1]).all()
            for factor in (0.0, 1e-36):
                x = np.full((1, cols), factor, np.float32)
                assert not kernels.matmul(data.weight, x, planes=planes, isa=isa).any()


@pytest.mark.parametrize("planes", [1, 2, 3])
def test_extremes_do_not_overflow(planes: int) -> None:
    """All codes and all digits at their largest: the integer sums are still exact."""
    for name, group_size in INTEGER_CASES:
        rows, cols = 17, 512
        data = sample(name, group_size, rows, cols)
        planes_of = [plane.copy() for plane in data.planes]
        for fill in (0x00, 0xFF, 0x80, 0x7F):
            if name == "e8-iq3-lattice":
                planes_of[0].reshape(rows, -1, 98)[:, :, :64] = fill
            else:
                planes_of[0].reshape(-1).view(np.uint8)[:] = fill
            form = formats.REGISTRY[name]
            decoded = form.decode(tuple(planes_of), rows, cols, group_size)
            weight = kernels.hold(name, tuple(planes_of), rows, cols, group_size)
            for sign in (1.0, -1.0):
                x = np.full((13, cols), sign, np.float32)
                x[1, ::2] *= -1
                expected = kernels.matmul(weight, x, planes=planes, isa="scalar")
                for isa in ISAS:
                    for count in (1, 2, 8, 13):
                        got = kernels.matmul(weight, x[:count], planes=planes, isa=isa)
                        assert same_bits(got, expected[:count].copy()), (name, isa, fill, count)
                if name != "e8-iq3-lattice":
                    exact = x.astype(np.float64) @ decoded.astype(np.float64).T
                    magnitude = np.abs(x).astype(np.float64) @ np.abs(decoded).astype(np.float64).T
                    assert (np.abs(expected - exact) <= 4e-7 * magnitude).all(), (name, fill)


def test_padding_and_bytes_behind_do_not_matter() -> None:
    """Padding nibbles, padding groups and what lies behind a plane never reach a result."""
    rng = np.random.default_rng(18)
    for name, group_size in INTEGER_CASES:
        rows, cols = 18, 67
        form = formats.REGISTRY[name]
        data = sample(name, group_size, rows, cols)
        x = activations(rng, 13, cols)
        planes_of = [plane.copy() for plane in data.planes]
        codes = planes_of[0].reshape(rows, -1)
        if name in ("int4-row", "int4-grouped", "mxfp4"):
            codes[:, -1] ^= 0xF0
        elif name == "int2-row":
            codes[:, -1] ^= 0xC0
        elif name == "int3-g64":
            codes[:, 24 + 1 : 24 + 16] ^= 0xFF
            codes[:, 24 + 17 :] ^= 0xFF
        np.testing.assert_array_equal(form.decode(tuple(planes_of), rows, cols, group_size), data.decoded)
        other = kernels.hold(name, tuple(planes_of), rows, cols, group_size)
        for isa in ISAS:
            for count in (1, 13):
                a = kernels.matmul(data.weight, x[:count], planes=2, isa=isa)
                assert same_bits(a, kernels.matmul(other, x[:count], planes=2, isa=isa)), (name, isa)


def test_refusals_name_what_was_wrong() -> None:
    """Unknown instruction sets, sizes that do not fit and illegal groups are refused in one line."""
    data = sample("int4-grouped", 64, 4, 64)
    with pytest.raises(ValueError, match=r"instruction set sse9 is not available; .* has: scalar"):
        _native.check_isa("sse9")
    assert _native.check_isa("auto") == ISAS[-1]
    assert all(_native.check_isa(isa) == isa for isa in ISAS)
    if "avx512-base" in ISAS:
        assert _native.check_isa("avx512") == ("avx512" if "avx512" in ISAS else "avx512-base")
    with pytest.raises(ValueError, match="group size 24; legal are 16, 32, 48"):
        kernels.hold("int4-grouped", data.planes, 4, 64, 24)
    with pytest.raises(ValueError, match="plane 0 has 128 bytes, needs 160"):
        kernels.hold("int4-grouped", data.planes, 5, 64, 64)
    with pytest.raises(ValueError, match="rows of 63 values, the weight needs 64"):
        kernels.matmul(data.weight, np.zeros((1, 63), np.float32), planes=2)
    with pytest.raises(ValueError, match="planes is 4, must be 1, 2 or 3"):
        kernels.matmul(data.weight, np.zeros((1, 64), np.float32), planes=4)
    with pytest.raises(ValueError, match="shape \\[0, 64\\]"):
        kernels.hold("int4-grouped", data.planes, 0, 64, 64)
