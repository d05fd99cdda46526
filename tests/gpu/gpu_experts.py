"""Experts in slots for tests of a device's expert operation, and what the CPU's operation says of them.

Must not know kernels or devices.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from picaflor import _native, formats
from picaflor.backends.api import ExpertLayout, MatrixLayout
from picaflor.backends.cpu import kernels
from picaflor.backends.cpu.memory import allocate
from picaflor.formats.base import F32

Kind = tuple[tuple[str, int], tuple[str, int], tuple[str, int]]


def make_expert(seed: int, kind: Kind, hidden: int, inner: int) -> tuple[ExpertLayout, Any]:
    """gate and up `[inner, hidden]`, down `[hidden, inner]` in one slot; planes at multiples of 16."""
    parts, matrices, at = [], [], 0
    for index, (name, group) in enumerate(kind):
        rows, cols = (hidden, inner) if index == 2 else (inner, hidden)
        form = formats.REGISTRY[name]
        rng = np.random.default_rng([seed, index])
        planes = form.sample(rng, rows, cols, group)
        if name in ("bf16", "f16"):
            assert form.encode is not None
            planes = form.encode(rng.standard_normal((rows, cols)).astype(np.float32), group)
        if name == "fp8-e4m3-b128":
            planes = (planes[0] & 0xBF, *planes[1:])
        offsets = []
        for plane in planes:
            raw = np.ascontiguousarray(plane).reshape(-1).view(np.uint8)
            offsets.append(at)
            parts.append((at, raw))
            at = -(-(at + raw.nbytes) // 16) * 16
        matrices.append(MatrixLayout(name, rows, cols, group, tuple(offsets)))
    slot = allocate(at)
    slot[:] = 0xA5
    for start, raw in parts:
        slot[start : start + raw.nbytes] = raw
    return ExpertLayout(*matrices, at), slot


def on_the_cpu(made: list[tuple[ExpertLayout, Any]], x: F32, ids: Any, weights: F32, planes: int) -> F32:
    """The native operation."""
    hidden, inner = x.shape[1], made[0][0].gate.rows
    ffn = _native.ExpertFfn(_native.Pool(1), "auto", planes, hidden, inner, len(x), ids.shape[1])
    layer = ffn.add_layer(
        [
            [
                (kernels.FORMAT_NUMBERS[m.format], m.rows, m.cols, m.group_size, m.offsets)
                for m in (e.gate, e.up, e.down)
            ]
            for e, _ in made
        ]
    )
    wanted = ffn.begin(layer, x.ctypes.data, x.strides[0] // 4, ids.ctypes.data, len(x))
    ffn.run(wanted, np.array([made[e][1].ctypes.data for e in wanted], np.uint64))
    out = np.empty((len(x), hidden), np.float32)
    ffn.finish(weights.ctypes.data, out.ctypes.data, hidden)
    return out
