"""Timed passes of the matrix kernels beside plain reads of the same memory, in one process, in turns.

Knows kernels and formats by name; must not know models, files or how figures are printed.

A pass multiplies every one of many matrices, more than a cache holds, with the same prepared rows. A round is one read
of the same bytes, one measurement of the clock, and one pass per number of rows. A pass whose process got less
processor time than its threads could use says nothing: it is left out and repeated.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from picaflor import _native, formats
from picaflor.backends.cpu.kernels import FORMAT_NUMBERS, HeldWeight, place_planes
from picaflor.backends.cpu.memory import HUGE_PAGE_BYTES, allocate
from picaflor.formats.base import F32

ALIGN_BYTES: Final = 64
LEAST_CPU: Final = 0.95
"""Process CPU time over threads times wall time; below it the machine was busy with something else."""
MOST_ROUNDS: Final = 3
"""Rounds are at most so many times the repeats that are wanted."""
PASS_S: Final = 0.4
CACHE_BYTES: Final = 64_000_000
MACS_PER_CLOCK: Final = 64
"""Products of bytes of one 512-bit dot-product instruction: what a core of today's servers starts per clock."""
CLOCK_ADDS: Final = 20_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Matrices of one kind: format, rows, cols and group size (0 where the format has none)."""

    format: str
    rows: int
    cols: int
    group_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What to time: one shape, by each instruction set, number of threads and number of rows of x."""

    shape: Shape
    tokens: tuple[int, ...] = (1,)
    threads: tuple[int, ...] = (1, 2)
    isas: tuple[str, ...] = ("auto",)
    planes: int = 2
    total_bytes: int = 520_000_000
    repeats: int = 9


@dataclass(slots=True)
class Samples:
    """Wall seconds of the passes that count, and how many did not."""

    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    discarded: int = 0
    spare: list[tuple[float, float]] = field(default_factory=list)
    counts: bool = True

    def add(self, passed: tuple[float, float], threads: int) -> None:
        """One pass: (wall, process CPU) seconds."""
        wall, cpu = passed
        share = cpu / (wall * threads)
        if share < LEAST_CPU:
            self.discarded += 1
            self.spare.append((wall, share))
            return
        self.seconds.append(wall)
        self.cpu.append(share)

    def settle(self) -> bool:
        """Where no pass counts, take those that do not; False says so. After the last pass."""
        if not self.seconds:
            self.seconds = [wall for wall, _ in self.spare]
            self.cpu = [share for _, share in self.spare]
            self.counts = False
        return self.counts


def vector_isas() -> tuple[str, ...]:
    """Every instruction set of this machine but scalar, slowest first; scalar where there is no other."""
    return tuple(name for name in _native.kernel_isas() if name != "scalar") or ("scalar",)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and most."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def random_weights(shape: Shape, total_bytes: int) -> list[HeldWeight]:
    """Copies of one random matrix, `total_bytes` in all, in one block as the expert store has it (large pages)."""
    form = formats.REGISTRY[shape.format]
    planes = form.sample(np.random.default_rng(1), shape.rows, shape.cols, shape.group_size)
    place, count = _block([plane.nbytes for plane in planes], total_bytes)
    return [place_planes(shape.format, planes, shape.rows, shape.cols, shape.group_size, place) for _ in range(count)]


def _block(sizes: Sequence[int], total_bytes: int) -> tuple[Callable[[int], NDArray[np.uint8]], int]:
    """(gives the next piece of one block, number of matrices with planes of these sizes that it holds)."""
    padded = sum(-(-size // ALIGN_BYTES) * ALIGN_BYTES for size in sizes)
    count = -(-total_bytes // padded)
    block = allocate(count * padded + HUGE_PAGE_BYTES)
    used = -block.ctypes.data % HUGE_PAGE_BYTES

    def place(nbytes: int) -> NDArray[np.uint8]:
        nonlocal used
        start = used
        used += -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES
        return block[start : start + nbytes]

    return place, count


def activations(tokens: int, cols: int) -> F32:
    """Normal rows `[tokens, cols]`, always the same."""
    return np.random.default_rng(2).standard_normal((tokens, cols)).astype(np.float32)


def measure(job: Job) -> Iterator[dict[str, Any]]:
    """One record per instruction set, threads and number of rows, in that order.

    Keys: the setting; GB/s of stored bytes (median, min, max) of plain reads and of the kernel, `ratio` of the medians;
    `cpu_per_wall`; `discarded` passes and `counts`, false where too few were good; where one row was timed too,
    `to_one`: time relative to it; `gmac_per_s`, `clock_ghz` per thread, `of_peak`: products to 64 per clock and thread.
    """
    weights = random_weights(job.shape, job.total_bytes)
    for isa in job.isas:
        table = _native.check_isa(isa)
        prepare_s = _native.bench_prepare(table, weights[0].native, job.planes, activations(1, job.shape.cols), 500)
        for threads in job.threads:
            rounds = _rounds(job, [weight.native for weight in weights], table, threads)
            for tokens in rounds.passes:
                yield {
                    "isa": table,
                    "format": job.shape.format,
                    "rows": job.shape.rows,
                    "cols": job.shape.cols,
                    "group_size": job.shape.group_size,
                    "tokens": tokens,
                    "threads": threads,
                    **_figures(rounds, tokens, threads, job, weights[0].nbytes, len(weights)),
                    "prepare_us": 1e6 * prepare_s,
                }


@dataclass(frozen=True, slots=True)
class _Rounds:
    """Times of reads, of additions that each wait for the one before, and of passes by number of rows of x."""

    reads: Samples
    clocks: Samples
    passes: dict[int, Samples]
    matrices: dict[int, int]
    """Matrices of a pass by number of rows of x."""

    def per_matrix(self, tokens: int) -> list[float]:
        """Seconds of each pass over its matrices."""
        return [second / self.matrices[tokens] for second in self.passes[tokens].seconds]


def _figures(rounds: _Rounds, tokens: int, threads: int, job: Job, nbytes: int, count: int) -> dict[str, Any]:
    """The measured keys of `measure`; `nbytes` of one matrix, `count` matrices that a read covers."""
    samples = rounds.passes[tokens]
    good = all([samples.settle(), rounds.reads.settle()])
    rounds.clocks.settle()
    clock = CLOCK_ADDS / statistics.median(rounds.clocks.seconds)
    times = rounds.per_matrix(tokens)
    seconds = statistics.median(times)
    read = [count * nbytes / second / 1e9 for second in rounds.reads.seconds]
    rate = job.shape.rows * job.shape.cols * tokens / seconds
    one = rounds.per_matrix(1) if 1 in rounds.passes else None
    return {
        "weights_bytes": rounds.matrices[tokens] * nbytes,
        "read_gb_per_s": spread(read),
        "kernel_gb_per_s": spread([nbytes / second / 1e9 for second in times]),
        "ratio": nbytes / seconds / statistics.median(read) / 1e9,
        "to_one": one and seconds / statistics.median(one),
        "gmac_per_s": rate / 1e9,
        "clock_ghz": clock / 1e9,
        "of_peak": rate / (threads * MACS_PER_CLOCK * clock),
        "cpu_per_wall": statistics.median(samples.cpu),
        "discarded": samples.discarded,
        "counts": good and len(samples.seconds) >= (job.repeats + 1) // 2,
    }


def _rounds(job: Job, natives: list[Any], table: str, threads: int) -> _Rounds:
    x = {tokens: activations(tokens, job.shape.cols) for tokens in job.tokens}
    counts = {tokens: _matrices(natives, x[tokens], job, table, threads) for tokens in job.tokens}
    reads, clocks, passes = Samples(), Samples(), {tokens: Samples() for tokens in job.tokens}
    for _ in range(MOST_ROUNDS * job.repeats):
        missing = [tokens for tokens in job.tokens if len(passes[tokens].seconds) < job.repeats]
        if not missing and len(reads.seconds) >= (job.repeats + 1) // 2:
            break
        reads.add(_native.bench_read(table, natives, threads), threads)
        clocks.add(_native.bench_clock(CLOCK_ADDS, threads), threads)
        for tokens in missing:
            passed = _native.bench_matmul(table, natives[: counts[tokens]], job.planes, x[tokens], threads)
            passes[tokens].add(passed, threads)
    return _Rounds(reads, clocks, passes, counts)


def _matrices(natives: list[Any], x: F32, job: Job, table: str, threads: int) -> int:
    """Matrices of one pass: all for one row; else as many as fill `PASS_S`, but more than a cache holds."""
    if len(x) == 1:
        return len(natives)
    few = max(1, min(len(natives), threads))
    wall, _ = _native.bench_matmul(table, natives[:few], job.planes, x, threads)
    least = -(-CACHE_BYTES // max(1, job.total_bytes // len(natives)))
    return min(len(natives), max(least, int(PASS_S / (wall / few))))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertJob:
    """Chosen experts of one layer call, gate, up, SiLU and down, by the fused operation; `chosen` of them per call."""

    format: str = "int4-grouped"
    group_size: int = 64
    hidden: int = 6144
    inner: int = 2048
    chosen: int = 8
    threads: tuple[int, ...] = (1, 2)
    isas: tuple[str, ...] = ("auto",)
    planes: int = 2
    total_bytes: int = 570_000_000
    repeats: int = 9


class Experts:
    """Random experts in one block, and the native operation over them for one number of threads."""

    def __init__(self, job: ExpertJob) -> None:
        self.job = job
        form = formats.REGISTRY[job.format]
        rng = np.random.default_rng(3)
        shapes = [(job.inner, job.hidden), (job.inner, job.hidden), (job.hidden, job.inner)]
        matrices = [form.sample(rng, rows, cols, job.group_size) for rows, cols in shapes]
        sizes = [[plane.nbytes for plane in planes] for planes in matrices]
        place, count = _block([size for planes in sizes for size in planes], job.total_bytes)
        self.experts = [
            [
                place_planes(job.format, planes, rows, cols, job.group_size, place)
                for planes, (rows, cols) in zip(matrices, shapes, strict=True)
            ]
            for _ in range(count)
        ]
        self.nbytes = sum(size for planes in sizes for size in planes)
        self.layout, self.addresses = self._layouts(shapes)

    def _layouts(self, shapes: list[tuple[int, int]]) -> tuple[list[Any], NDArray[np.uint64]]:
        first = self.experts[0][0].keep[0].ctypes.data
        layout = []
        for weight, (rows, cols) in zip(self.experts[0], shapes, strict=True):
            offsets = tuple(plane.ctypes.data - first for plane in weight.keep)
            layout.append((FORMAT_NUMBERS[self.job.format], rows, cols, self.job.group_size, offsets))
        return layout, np.array([expert[0].keep[0].ctypes.data for expert in self.experts], np.uint64)

    def natives(self) -> list[Any]:
        """Gate matrices of all experts, then up, then down: what the read limit reads."""
        return [expert[index].native for index in range(3) for expert in self.experts]


def measure_experts(job: ExpertJob) -> Iterator[dict[str, Any]]:
    """One record per instruction set and number of threads; keys as those of `measure`, for one row of x."""
    held = Experts(job)
    calls = len(held.experts) // job.chosen
    if not calls:
        raise ValueError(f"{len(held.experts)} experts in {job.total_bytes} bytes, {job.chosen} are chosen")
    gigabytes = calls * job.chosen * held.nbytes / 1e9
    for isa in job.isas:
        table = _native.check_isa(isa)
        for threads in job.threads:
            one_pass = _expert_pass(held, calls, table, threads)
            reads, passes = Samples(), Samples()
            one_pass()
            for _ in range(MOST_ROUNDS * job.repeats):
                if len(passes.seconds) >= job.repeats and len(reads.seconds) >= (job.repeats + 1) // 2:
                    break
                reads.add(_native.bench_read(table, held.natives(), threads), threads)
                passes.add(one_pass(), threads)
            good = all([reads.settle(), passes.settle()])
            read = [len(held.experts) * held.nbytes / 1e9 / second for second in reads.seconds]
            rate = [gigabytes / second for second in passes.seconds]
            yield {
                "isa": table,
                "format": job.format,
                "group_size": job.group_size,
                "hidden": job.hidden,
                "inner": job.inner,
                "experts": job.chosen,
                "threads": threads,
                "weights_bytes": len(held.experts) * held.nbytes,
                "read_gb_per_s": spread(read),
                "kernel_gb_per_s": spread(rate),
                "ratio": statistics.median(rate) / statistics.median(read),
                "cpu_per_wall": statistics.median(passes.cpu),
                "discarded": passes.discarded,
                "counts": good and len(passes.seconds) >= (job.repeats + 1) // 2,
            }


def _expert_pass(held: Experts, calls: int, table: str, threads: int) -> Callable[[], tuple[float, float]]:
    job = held.job
    pool = _native.Pool(threads)
    ffn = _native.ExpertFfn(pool, table, job.planes, job.hidden, job.inner, 1, job.chosen)
    layer = ffn.add_layer([held.layout] * len(held.experts))
    x = activations(1, job.hidden)
    out = np.zeros_like(x)
    weights = np.full((1, job.chosen), 1 / job.chosen, np.float32)
    chosen = [np.arange(call * job.chosen, (call + 1) * job.chosen, dtype=np.int32) for call in range(calls)]

    def one_pass() -> tuple[float, float]:
        wall, cpu = time.perf_counter(), time.process_time()
        for ids in chosen:
            distinct = ffn.begin(layer, x.ctypes.data, job.hidden, ids.ctypes.data, 1)
            ffn.run(distinct, held.addresses[distinct])
            ffn.finish(weights.ctypes.data, out.ctypes.data, job.hidden)
        return time.perf_counter() - wall, time.process_time() - cpu

    return one_pass
