"""Support for the tests of CPU operations: backends of every kind, batches, exact float32 arithmetic in numpy.

Knows the CPU backend and the contract; must not know models or files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

import picaflor._native as _native
from picaflor.backends.api import I32, Batch, Program, Rows, Weight
from picaflor.backends.cpu.backend import CpuBackend
from picaflor.backends.cpu.recorder import CpuRecorder
from picaflor.formats.base import F32

F64 = NDArray[np.float64]
ISAS: tuple[str, ...] = tuple(_native.isas())
VARIANTS = [(isa, threads) for isa in ISAS for threads in (1, 2, 3)]


@lru_cache
def backend(isa: str = "auto", threads: int = 1) -> CpuBackend:
    """A backend; pools are shared by all tests."""
    return CpuBackend(threads=threads, isa=isa, precision="exact")


def ints(values: Sequence[int] | NDArray[Any]) -> I32:
    """An int32 array."""
    return np.ascontiguousarray(values, dtype=np.int32)


def batch(
    positions: Sequence[int],
    *,
    sequences: Sequence[int] | None = None,
    tokens: Sequence[int] | None = None,
    pages: NDArray[np.int32] | None = None,
    outputs: Sequence[int] = (),
) -> Batch:
    """A batch; by default of one sequence whose pages are 0, 1, 2, ..."""
    count = len(positions)
    return Batch(
        tokens=ints(tokens if tokens is not None else [0] * count),
        sequences=ints(sequences if sequences is not None else [0] * count),
        positions=ints(positions),
        pages=ints(np.arange(64)[None, :]) if pages is None else ints(pages),
        outputs=ints(outputs),
    )


def recorder(device: CpuBackend, *, rows: int = 16, page_tokens: int = 16, pages: int = 64) -> CpuRecorder:
    """A recorder of a small arena."""
    return device.recorder(max_rows=rows, max_outputs=rows, page_tokens=page_tokens, pages=pages)


def f32_weight(device: CpuBackend, values: F32, name: str = "w") -> Weight:
    """A float32 matrix in memory of the backend."""
    memory = device.allocate(values.nbytes).view(np.float32).reshape(values.shape)
    memory[:] = values
    return device.weight(name, "f32", (values.shape[0], values.shape[1]), 0, (memory,))


@dataclass
class Rig:
    """One program with named inputs and one output."""

    program: Program
    inputs: dict[str, Rows]
    out: Rows

    def run(self, rows: Batch, **values: F32) -> NDArray[Any]:
        """Write inputs, run, and return a copy of the output's rows."""
        for name, value in values.items():
            self.program.write(self.inputs[name], value)
        self.program.run(rows)
        return self.program.view(self.out, len(rows.tokens)).copy()


def rig(device: CpuBackend, widths: dict[str, int], record: Callable[..., Rows], **sizes: int) -> Rig:
    """Record one program: `record(recorder, **buffers)` returns the output buffer."""
    r = recorder(device, **sizes)
    inputs = {name: r.rows(width) for name, width in widths.items()}
    out = record(r, **inputs)
    return Rig(r.finish(), inputs, out)


def same_bits(a: NDArray[Any], b: NDArray[Any]) -> bool:
    """Equal bit for bit, but for the payload of NaN."""
    return a.shape == b.shape and bool(np.all((a.view(np.int32) == b.view(np.int32)) | (np.isnan(a) & np.isnan(b))))


def fma32(a: F32 | float, b: F32 | float, c: F32 | float) -> F32:
    """a * b + c in float32 with one rounding: the float64 sum is rounded to odd before the cast."""
    with np.errstate(all="ignore"):
        product = np.asarray(a, np.float64) * np.asarray(b, np.float64)  # exact: 24 + 24 bits
        addend = np.asarray(c, np.float64)
        total = np.atleast_1d(product + addend)
        back = total - product
        error = (product - (total - back)) + (addend - back)
        even = (total.view(np.int64) & 1) == 0
        moved = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
        use = (error != 0) & even & np.isfinite(total)
        out: F32 = np.where(use, moved, total).astype(np.float32)
    return out


def tree16(lanes: F32) -> np.float32:
    """The fixed pairwise sum of 16 lanes."""
    t8 = lanes[:8] + lanes[8:]
    t4 = t8[:4] + t8[4:]
    t2 = t4[:2] + t4[2:]
    return np.float32(t2[0] + t2[1])


def chain16(a: F32, b: F32 | None = None) -> np.float32:
    """sum of a * b (or of a) in 16 chains; lanes behind the end are not touched."""
    lanes = np.zeros(16, np.float32)
    for start in range(0, len(a), 16):
        part = a[start : start + 16]
        count = len(part)
        if b is None:
            lanes[:count] = lanes[:count] + part
        else:
            lanes[:count] = fma32(part, b[start : start + count], lanes[:count])
    return tree16(lanes)


def exp32(x: F32) -> F32:
    """The exp of contracts.md, operation by operation."""
    f = np.float32
    y = np.where(x < f(88.5), x, f(88.5))
    y = np.where(y > f(-87.5), y, f(-87.5)).astype(np.float32)
    n = np.rint(y * f(np.log2(np.e)))
    r = fma32(n, f(-0.693145751953125), y)
    r = fma32(n, f(-(np.log(2.0) - 0.693145751953125)), r)
    p = np.full_like(r, f(0.001381447073072195))
    for c in (0.008368778973817825, 0.04166839271783829, 0.1666651964187622, 0.4999999403953552, 1.0, 1.0):
        p = fma32(p, r, f(c))
    whole = n.astype(np.int32)
    half = whole >> 1
    p = p * np.ldexp(f(1.0), half) * np.ldexp(f(1.0), whole - half)
    out: F32 = np.where(x < f(-87.5), f(0.0), p).astype(np.float32)
    return out
