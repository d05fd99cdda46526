"""Digits and scales of activations on the Vulkan backend are those of float64, also exactly between two integers."""

from __future__ import annotations

import numpy as np
import pytest
import vulkan_support
from numpy.typing import NDArray

from picaflor.backends.vulkan.decode import Needs
from picaflor.backends.vulkan.device import Stream
from picaflor.backends.vulkan.prepared import Prepared, Source
from picaflor.backends.vulkan.quantize import LARGEST
from picaflor.formats.base import F32

GROUP = 64


def on_device(x: F32, planes: int, halves: bool) -> tuple[NDArray[np.int64], F32]:
    """Integers `[rows, cols]` in the order of the inputs, and scales `[rows, groups]`."""
    gpu = vulkan_support.GPU
    rows, cols = x.shape
    frame = gpu.filled(np.array([rows, 0, 0, 0], np.int32), "a batch")
    source = Source(gpu.filled(x, "x"), cols, 0, frame, 0)
    made = Prepared(gpu, Needs(GROUP, planes, False, halves), cols, rows, source, gpu.buffer)
    stream = Stream(gpu)
    made.make(stream, rows)
    stream.submit()
    groups = cols // GROUP
    digits = gpu.read(made.digits, 0, rows * planes * cols).view(np.int8).reshape(rows, planes, groups, GROUP)
    whole = np.zeros((rows, groups, GROUP), np.int64)
    for plane in range(planes):
        whole = whole * 256 + digits[:, plane]
    if halves:
        order = np.arange(GROUP).reshape(-1, 4, 2).transpose(0, 2, 1).reshape(-1)
        back = np.empty_like(whole)
        back[..., order] = whole
        whole = back
    scales = gpu.read(made.steps, 0, 4 * rows * groups).view(np.float32).reshape(rows, groups)
    return whole.reshape(rows, cols), scales.copy()


def on_host(x: F32, planes: int) -> tuple[NDArray[np.int64], F32]:
    """contracts.md, Activations."""
    largest = LARGEST[planes]
    parts = x.reshape(len(x), -1, GROUP)
    most = np.abs(parts).max(axis=-1)
    tiny = most < np.float32(1e-30)
    with np.errstate(all="ignore"):
        ratio = np.float64(largest) / most.astype(np.float64)
        whole = np.rint(np.where(tiny[..., None], 0.0, parts.astype(np.float64) * ratio[..., None]))
        scales = np.where(tiny, np.float32(0), most / np.float32(largest)).astype(np.float32)
    return whole.astype(np.int64).reshape(x.shape), scales


def values(kind: str, planes: int) -> F32:
    """Rows of 64 groups."""
    rng = np.random.default_rng(planes)
    shape = (16, 64 * GROUP)
    if kind == "plain":
        return rng.standard_normal(shape).astype(np.float32)
    if kind == "wide":
        return (rng.standard_normal(shape) * 2.0 ** rng.integers(-30, 20, shape)).astype(np.float32)
    if kind == "small":
        return (rng.standard_normal(shape) * 2.0 ** rng.integers(-140, -90, (16, 1))).astype(np.float32)
    # Exactly between two integers: x = c * (2 k + 1), m = 2 Q c, so that x * Q / m is k + 1/2 for every c.
    largest = LARGEST[planes]
    c = rng.integers(1, 1 << (24 - largest.bit_length()), (16, 64, 1)) if largest < 1 << 22 else np.ones((16, 64, 1))
    k = rng.integers(0, min(largest, 200), (16, 64, GROUP))
    x = c * (2 * k + 1) * rng.choice([-1, 1], k.shape)
    x[..., :1] = c * 2 * largest
    return (x * 2.0**-10).astype(np.float32).reshape(shape)


@pytest.mark.parametrize("kind", ["plain", "wide", "small", "between"])
@pytest.mark.parametrize("planes", [1, 2, 3])
def test_digits_and_scales_are_those_of_float64(kind: str, planes: int) -> None:
    x = values(kind, planes)
    whole, scales = on_host(x, planes)
    found, steps = on_device(x, planes, halves=kind == "plain")
    assert np.array_equal(found, whole)
    assert steps.tobytes() == scales.tobytes()


def test_a_group_with_nan_or_infinity_has_no_digits_and_a_scale_that_is_nan() -> None:
    x = np.ones((1, 4 * GROUP), np.float32)
    x[0, 3], x[0, GROUP + 5] = np.nan, -np.inf
    found, steps = on_device(x, 2, halves=False)
    assert np.isnan(steps[0, :2]).all()
    assert np.isfinite(steps[0, 2:]).all()
    assert not found[0, : 2 * GROUP].any()
    assert (found[0, 2 * GROUP :] == LARGEST[2]).all()
