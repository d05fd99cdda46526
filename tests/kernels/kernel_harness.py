"""What the kernel tests share: nasty matrices, an exact product, and the contract's arithmetic step by step.

Written from docs/design/contracts.md section 2; must not know how a kernel is built.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from picaflor import formats
from picaflor.backends.cpu import kernels
from picaflor.formats import e8_iq3
from picaflor.formats.base import F32, Planes

F64 = NDArray[np.float64]
CASES = [(name, size) for name, form in formats.REGISTRY.items() for size in (form.group_sizes or (0,))]
CASE_IDS = [f"{name}-{size}" if size else name for name, size in CASES]
INTEGER_CASES = [case for case in CASES if formats.REGISTRY[case[0]].activation.group != 0]
GROUPS = {"int8-row": 64, "int4-row": 64, "int2-row": 64, "int3-g64": 64, "e8-iq3-lattice": 32, "mxfp4": 32}
LARGEST = {1: 127, 2: 127 * 256 + 127, 3: 127 * 65536}


@dataclass(frozen=True)
class Sample:
    """A matrix in nasty data, what the format's own decoder makes of it, and the kernels' view."""

    planes: Planes
    decoded: F32
    weight: kernels.HeldWeight


def sample(name: str, group_size: int, rows: int, cols: int, *, seed: int = 5, tame: bool = False) -> Sample:
    """Planes of a format's `sample`; `tame` draws finite codes and scales for formats whose bytes hold NaN."""
    form = formats.REGISTRY[name]
    rng = np.random.default_rng(seed)
    planes = form.sample(rng, rows, cols, group_size)
    if tame and name in ("f32", "bf16", "f16"):
        values = rng.standard_normal((rows, cols)).astype(np.float32)
        assert form.encode is not None
        planes = form.encode(values, group_size)
    if tame and name == "fp8-e4m3-b128":
        codes = planes[0].copy()
        codes[(codes & 0x7F) == 0x7F] ^= 1
        planes = (codes, *planes[1:])
    decoded = form.decode(planes, rows, cols, group_size)
    return Sample(planes, decoded, kernels.hold(name, planes, rows, cols, group_size))


def same_bits(a: F32, b: F32) -> bool:
    """Equal as 32-bit words; one NaN is as good as another."""
    return bool(((a.view(np.uint32) == b.view(np.uint32)) | (np.isnan(a) & np.isnan(b))).all())


def inputs(name: str, x: F32) -> F64:
    """What the decoded rows are multiplied with: x, rotated for the lattice."""
    return (e8_iq3.rotate(x) if name == "e8-iq3-lattice" else x).astype(np.float64)


def largest_error(name: str, group_size: int, data: Sample, x: F32, planes: int) -> F64:
    """The most that each output may be off: half a digit step per input, and the float roundings of the sum."""
    weights = np.abs(data.decoded.astype(np.float64))
    values = np.abs(inputs(name, x))
    cols = weights.shape[1]
    group = group_size or GROUPS.get(name, 0)
    roundings = 2.0**-24 * (-(-cols // group) + 4 if group else cols // 16 + 6)
    bound: F64 = roundings * (values @ weights.T)
    if group:
        steps = np.repeat(
            [[run.max() / LARGEST[planes] for run in np.split(row, range(group, cols, group))] for row in values],
            group,
            axis=1,
        )[:, :cols]
        bound += 0.5001 * steps @ weights.T
    return bound


def rounded(value: Fraction) -> np.float32:
    """The float32 next to an exact value, ties to even; normal range only."""
    if value == 0:
        return np.float32(0)
    exponent = 0
    magnitude = abs(value)
    while magnitude >= 1 << 24:
        magnitude /= 2
        exponent += 1
    while magnitude < 1 << 23:
        magnitude *= 2
        exponent -= 1
    whole = round(magnitude)  # Fraction rounds halves to even
    return np.float32(float(np.ldexp(float(whole), exponent)) * (1 if value > 0 else -1))


def fma(a: np.float32, b: np.float32, c: np.float32) -> np.float32:
    """a * b + c, rounded once."""
    return rounded(Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c)))


def digits_of(x: F32, group: int, planes: int) -> tuple[list[list[list[int]]], list[np.float32]]:
    """Per group: the digits of each plane, top first, and the scale."""
    digits, scales = [], []
    largest = LARGEST[planes]
    for start in range(0, len(x), group):
        run = x[start : start + group]
        m = np.max(np.abs(run))
        if m < 1e-30:
            digits.append([[0] * len(run)] * planes)
            scales.append(np.float32(0))
            continue
        ratio = np.float64(largest) / np.float64(m)
        rest = [int(q) for q in np.rint(run.astype(np.float64) * ratio)]
        scales.append(np.float32(m) / np.float32(largest))
        lower = []
        for _ in range(planes - 1):
            low = [((q + 128) & 255) - 128 for q in rest]
            rest = [(q - d) // 256 for q, d in zip(rest, low, strict=True)]
            lower.append(low)
        digits.append([rest, *reversed(lower)])
    return digits, scales


def codes_and_scales(name: str, data: Sample, row: int, group: int) -> tuple[NDArray[Any], list[np.float32]]:
    """Integer codes of a row and the scale that meets them, from the stored planes of the simpler formats."""
    cols = data.decoded.shape[1]
    count = -(-cols // group)
    codes, *rest = data.planes
    if name == "int8-row":
        return codes[row].astype(int), [np.float32(rest[0].reshape(-1)[row])] * count
    if name in ("int4-row", "int4-grouped", "mxfp4"):
        packed = codes[row]
        nibbles = np.stack([packed & 15, packed >> 4], axis=-1).reshape(-1)[:cols].astype(int)
        if name == "mxfp4":
            doubled = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12])
            halves = [np.float32(np.ldexp(1.0, int(e) - 128)) for e in rest[0].reshape(data.decoded.shape[0], -1)[row]]
            return doubled[nibbles], halves
        scales = rest[0].reshape(data.decoded.shape[0], -1)[row]
        return nibbles - 8, [np.float32(scales[0])] * count if name == "int4-row" else list(scales)
    raise AssertionError(f"no step-by-step decode of {name} here")


def contract_product(name: str, group_size: int, data: Sample, x: F32, planes: int) -> F32:
    """y [rows] by the rule: integers inside a group, one fma per group, group after group."""
    group = group_size or GROUPS[name]
    digits, x_scales = digits_of(x, group, planes)
    out = []
    for row in range(data.decoded.shape[0]):
        codes, scales = codes_and_scales(name, data, row, group)
        y = np.float32(0)
        for g, start in enumerate(range(0, len(x), group)):
            run = [int(code) for code in codes[start : start + group]]
            dots = [sum(c * d for c, d in zip(run, plane, strict=True)) for plane in digits[g]]
            if planes == 1:
                dot = np.float32(dots[0])
            elif planes == 2:
                dot = np.float32(dots[0] * 256 + dots[1])
            else:
                dot = fma(np.float32(dots[0]), np.float32(65536), np.float32(dots[1] * 256 + dots[2]))
            y = fma(dot, np.float32(scales[g] * x_scales[g]), y)
        out.append(y)
    return np.array(out, np.float32)


def chain16(a: F32, b: F32) -> np.float32:
    """Sixteen fma chains and the tree of contracts.md."""
    lanes = [np.float32(0)] * 16
    for i in range(len(a)):
        lanes[i % 16] = fma(a[i], b[i], lanes[i % 16])
    t8 = [lanes[j] + lanes[j + 8] for j in range(8)]
    t4 = [t8[j] + t8[j + 4] for j in range(4)]
    t2 = [t4[j] + t4[j + 2] for j in range(2)]
    return np.float32(t2[0] + t2[1])
