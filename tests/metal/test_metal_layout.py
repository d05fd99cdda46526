"""MLX's layouts hold exactly what is stored: every format and group size, odd and short rows, stacks, host bytes."""

from __future__ import annotations

from typing import Any

import metal_support
import numpy as np
import pytest

from picaflor.backends.metal import layout, products
from picaflor.backends.metal.library import copied, mx, on_host
from picaflor.formats import REGISTRY

assert metal_support.NEAR
ROWS = 7
COLS = (1, 13, 17, 40, 63, 64, 200, 201, 255, 256, 520)
KINDS = [(name, size) for name in layout.FORMATS for size in (REGISTRY[name].group_sizes or (0,))]
AFFINE = [(name, size) for name, size in KINDS if name.startswith("int")]


def stored(name: str, size: int, cols: int, rows: int = ROWS, seed: int = 0) -> tuple[list[Any], Any]:
    """Raw bytes of the planes of a nasty matrix, and what the format says its values are."""
    planes = REGISTRY[name].sample(np.random.default_rng([seed, size, cols]), rows, cols, size)
    raw = [np.ascontiguousarray(plane).reshape(-1).view(np.uint8) for plane in planes]
    with np.errstate(invalid="ignore"):
        return raw, REGISTRY[name].decode(planes, rows, cols, size)


def same(found: Any, expected: Any) -> bool:
    """Equal as numbers, NaN in the same places."""
    return found.shape == expected.shape and np.array_equal(found, expected, equal_nan=True)


@pytest.mark.parametrize(("name", "size"), KINDS, ids=lambda value: str(value))
@pytest.mark.parametrize("cols", COLS)
def test_the_values_are_those_of_the_format(name: str, size: int, cols: int) -> None:
    raw, expected = stored(name, size, cols)
    before = [plane.tobytes() for plane in raw]
    held = layout.held(name, (ROWS, cols), size, raw)
    assert same(on_host(layout.decoded(held)), expected)
    numbers = np.array([6, 0, 3, 3], np.int32)
    assert same(on_host(layout.pick(held, copied(numbers))), expected[numbers])
    mx.eval(products.product(mx.ones((2, cols)), held))
    assert [plane.tobytes() for plane in raw] == before


@pytest.mark.parametrize(("name", "size"), AFFINE, ids=lambda value: str(value))
@pytest.mark.parametrize("cols", COLS)
def test_codes_scales_and_biases_alone_give_the_values(name: str, size: int, cols: int) -> None:
    """Read as MLX documents its layout, in float64: rounding to float32 is the only one."""
    raw, expected = stored(name, size, cols)
    held: Any = layout.held(name, (ROWS, cols), size, raw)
    bits = np.unpackbits(on_host(held.codes).view(np.uint8), axis=-1, bitorder="little")
    codes = bits.reshape(ROWS, held.padded, held.bits) @ (1 << np.arange(held.bits))
    passes = [(held.scales, held.biases), *([held.second] if held.second else [])]
    values = [
        codes * np.repeat(on_host(scales).astype(np.float64), held.group, axis=1)
        + np.repeat(on_host(biases).astype(np.float64), held.group, axis=1)
        for scales, biases in passes
    ]
    first_half = np.arange(held.padded) // 16 % 2 == 0
    whole = values[0] if len(values) == 1 else np.where(first_half, values[0], values[1])
    assert same(whole[:, :cols].astype(np.float32), expected)
    assert not whole[:, cols:].any()
    assert len(passes) == (2 if size in (16, 48) else 1)


@pytest.mark.parametrize(("name", "size"), [kind for kind in AFFINE if kind[0] != "int3-g64"], ids=str)
def test_mlx_own_reading_of_the_layout(name: str, size: int) -> None:
    """mx.dequantize rounds a product and a sum, so it is near and no more."""
    raw, expected = stored(name, size, 201)
    held: Any = layout.held(name, (ROWS, 201), size, raw)
    found = [
        on_host(mx.dequantize(held.codes, scales, biases, group_size=held.group, bits=held.bits))
        for scales, biases in [(held.scales, held.biases), *([held.second] if held.second else [])]
    ]
    first_half = np.arange(held.padded) // 16 % 2 == 0
    whole = found[0] if len(found) == 1 else np.where(first_half, found[0], found[1])
    scales = on_host(layout.spread_scales(held))
    assert (np.abs(whole[:, :201] - expected) <= 2.0**-23 * 2**held.bits * np.abs(scales[:, :201])).all()


@pytest.mark.parametrize(("name", "size"), KINDS, ids=lambda value: str(value))
@pytest.mark.parametrize("cols", [64, 201])
def test_products_over_rows_and_over_sums_of_rows(name: str, size: int, cols: int) -> None:
    raw, _ = stored(name, size, cols)
    held = layout.held(name, (ROWS, cols), size, raw)
    w = on_host(layout.decoded(held)).astype(np.float64)
    assert np.isfinite(w).all()
    rng = np.random.default_rng(cols)
    x, y = (rng.standard_normal((3, n)).astype(np.float32) for n in (cols, ROWS))
    for found, right, terms in (
        (products.product(copied(x), held), x @ w.T, np.abs(x) @ np.abs(w).T),
        (products.rows_sum(copied(y), held), y @ w, np.abs(y) @ np.abs(w)),
    ):
        assert (np.abs(on_host(found) - right) <= 1e-5 * terms).all()


@pytest.mark.parametrize(("name", "size"), KINDS, ids=lambda value: str(value))
@pytest.mark.parametrize("pairs", [5, 100])
def test_a_stack_is_its_members(name: str, size: int, pairs: int) -> None:
    """Gathered products, few and sorted ones, are those of the members; bit for bit with one matrix per pair."""
    members = [stored(name, size, 201, seed=seed)[0] for seed in range(4)]
    stack = layout.held(name, (ROWS, 201), size, [np.stack(planes) for planes in zip(*members, strict=True)])
    single = [layout.held(name, (ROWS, 201), size, raw) for raw in members]
    for number, one in enumerate(single):
        picked = layout.at(stack, copied(np.array([number], np.uint32)))
        assert same(on_host(layout.decoded(picked))[0], on_host(layout.decoded(one)))
    rng = np.random.default_rng(pairs)
    numbers = rng.integers(0, 4, pairs).astype(np.uint32)
    x = rng.standard_normal((pairs, 201)).astype(np.float32)
    found = on_host(products.gathered(copied(x), stack, copied(numbers)))
    right = np.concatenate([
        on_host(products.product(copied(x[p : p + 1]), single[number])) for p, number in enumerate(numbers)
    ])  # fmt: skip
    finite = np.isfinite(right)
    scale = np.abs(np.where(finite, right, 0)).max()
    assert (np.isfinite(found) == finite).all()
    assert np.abs(found[finite] - right[finite]).max() <= 1e-6 * scale


def test_an_exponent_that_mlx_lacks_is_written_out() -> None:
    """255 is NaN here and infinity in MLX."""
    planes = [plane.copy() for plane in REGISTRY["mxfp4"].sample(np.random.default_rng(0), ROWS, 64, 0)]
    planes[1][2, 1] = 255
    raw = [plane.reshape(-1).view(np.uint8) for plane in planes]
    held = layout.held("mxfp4", (ROWS, 64), 0, raw)
    assert isinstance(held, layout.Dense)
    assert np.isnan(on_host(layout.decoded(held))[2, 32:]).all()


@pytest.mark.parametrize(("name", "size"), KINDS, ids=lambda value: str(value))
@pytest.mark.parametrize("cols", [64, 200, 201, 256, 384])
def test_the_bytes_that_are_counted_are_those_that_are_taken(name: str, size: int, cols: int) -> None:
    held = layout.held(name, (ROWS, cols), size, stored(name, size, cols)[0])
    taken = sum(int(array.nbytes) for array in layout.arrays(held))
    assert layout.nbytes(name, (ROWS, cols), size, borrows=False) == taken
    assert layout.nbytes(name, (ROWS, cols), size, borrows=True) <= taken
