"""Thin access to the native matrix kernels: one weight, one product, timed passes against the read limit.

Knows formats by name and numpy; must not know models, programs or files.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from picaflor import _native, formats
from picaflor.backends.cpu.memory import HUGE_PAGE_BYTES, allocate
from picaflor.formats.base import F32, Planes

PLANES: Final = {"fast": 1, "standard": 2, "exact": 3}
ALIGN_BYTES: Final = 64
FORMAT_NUMBERS: Final = {name: number for number, name in enumerate(formats.REGISTRY)}


@dataclass(frozen=True, slots=True)
class HeldWeight:
    """A matrix `[rows, cols]` whose planes lie in memory that kernels may read; `keep` owns it."""

    format: str
    rows: int
    cols: int
    group_size: int
    native: Any
    keep: tuple[NDArray[np.uint8], ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all planes that a product reads."""
        return sum(plane.nbytes for plane in self.keep)


def hold(format_name: str, planes: Planes, rows: int, cols: int, group_size: int = 0) -> HeldWeight:
    """Copy the planes of a matrix to where kernels may read them. Raises ValueError for sizes that do not fit."""
    return _placed(format_name, planes, rows, cols, group_size, allocate)


def _placed(
    format_name: str,
    planes: Planes,
    rows: int,
    cols: int,
    group_size: int,
    place: Callable[[int], NDArray[np.uint8]],
) -> HeldWeight:
    keep = []
    for plane in planes:
        raw = np.ascontiguousarray(plane).reshape(-1).view(np.uint8)
        memory = place(raw.nbytes)
        memory[:] = raw
        keep.append(memory)
    sizes = [(memory.ctypes.data, memory.nbytes) for memory in keep] + [(0, 0)]
    native = _native.Weight(
        FORMAT_NUMBERS[format_name],
        rows,
        cols,
        group=group_size,
        codes=sizes[0][0],
        codes_bytes=sizes[0][1],
        scales=sizes[1][0],
        scales_bytes=sizes[1][1],
    )
    return HeldWeight(format_name, rows, cols, group_size, native, tuple(keep))


def matmul(
    weight: HeldWeight, x: F32, *, planes: int, isa: str = "auto", row_begin: int = 0, row_end: int | None = None
) -> F32:
    """x `[n, cols]` times W: float32 `[n, rows]` on one thread; rows outside the range are 0."""
    end = weight.rows if row_end is None else row_end
    product: F32 = _native.matmul(isa, weight.native, planes, np.ascontiguousarray(x, np.float32), row_begin, end)
    return product


def prepare(weight: HeldWeight, x: F32, *, planes: int, isa: str = "auto") -> NDArray[np.uint8]:
    """The prepared bytes of x `[n, cols]`: uint8 `[n, stride]`."""
    prepared: NDArray[np.uint8] = _native.prepare(isa, weight.native, planes, np.ascontiguousarray(x, np.float32))
    return prepared


def decode(weight: HeldWeight, *, isa: str = "auto") -> F32:
    """Every row by decode_row: float32 `[rows, cols]`, for e8 the stored, rotated rows."""
    return np.stack([_native.decode_row(isa, weight.native, row) for row in range(weight.rows)])


@dataclass(frozen=True, slots=True)
class KernelBenchmark:
    """What to time. Weights are random and rotate over `total_bytes`, so that no cache holds them."""

    format: str = "int4-grouped"
    rows: int = 2048
    cols: int = 6144
    group_size: int = 64
    tokens: int = 1
    planes: int = 2
    total_bytes: int = 520_000_000
    repeats: int = 9
    threads: tuple[int, ...] = (1, 2)
    isa: str = "auto"


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def _random_weights(what: KernelBenchmark) -> list[HeldWeight]:
    """Copies of one random matrix, `total_bytes` in all, in one block as the expert store has it (large pages)."""
    form = formats.REGISTRY[what.format]
    planes = form.sample(np.random.default_rng(1), what.rows, what.cols, what.group_size)
    padded = sum(-(-plane.nbytes // ALIGN_BYTES) * ALIGN_BYTES for plane in planes)
    count = -(-what.total_bytes // padded)
    block = allocate(count * padded + HUGE_PAGE_BYTES)
    used = -block.ctypes.data % HUGE_PAGE_BYTES

    def place(nbytes: int) -> NDArray[np.uint8]:
        nonlocal used
        start = used
        used += -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES
        return block[start : start + nbytes]

    return [_placed(what.format, planes, what.rows, what.cols, what.group_size, place) for _ in range(count)]


def run_benchmark(what: KernelBenchmark) -> dict[str, object]:
    """Time products against plain reads of the same bytes, interleaved in each repeat, for each number of threads.

    The record has, per number of threads, GB/s of stored bytes (median, min, max) of the read limit and of the kernel,
    their ratio (of medians), and `cpu_per_wall` of both: process CPU time over threads times wall time. Below 0.95 the
    machine was busy with something else, and the figures say nothing.
    """
    weights = _random_weights(what)
    natives = [weight.native for weight in weights]
    gigabytes = sum(weight.nbytes for weight in weights) / 1e9
    x = np.random.default_rng(2).standard_normal((what.tokens, what.cols)).astype(np.float32)
    isa = _native.check_isa(what.isa)
    results = []
    for threads in what.threads:
        read_s, product_s, read_cpu, product_cpu = [], [], [], []
        for _ in range(what.repeats):
            wall, cpu = _native.bench_read(isa, natives, threads)
            read_s.append(wall)
            read_cpu.append(cpu / (wall * threads))
            wall, cpu = _native.bench_matmul(isa, natives, what.planes, x, threads)
            product_s.append(wall)
            product_cpu.append(cpu / (wall * threads))
        results.append(
            {
                "threads": threads,
                "read_gb_per_s": _spread([gigabytes / s for s in read_s]),
                "kernel_gb_per_s": _spread([gigabytes / s for s in product_s]),
                "ratio": statistics.median(read_s) / statistics.median(product_s),
                "read_cpu_per_wall": statistics.median(read_cpu),
                "kernel_cpu_per_wall": statistics.median(product_cpu),
            }
        )
    prepare_s = _native.bench_prepare(isa, natives[0], what.planes, x[:1], 2000)
    return {
        "benchmark": "kernels",
        "isa": isa,
        "format": what.format,
        "rows": what.rows,
        "cols": what.cols,
        "group_size": what.group_size,
        "tokens": what.tokens,
        "planes": what.planes,
        "repeats": what.repeats,
        "weights_bytes": sum(weight.nbytes for weight in weights),
        "prepare_us": prepare_s * 1e6,
        "results": results,
    }
