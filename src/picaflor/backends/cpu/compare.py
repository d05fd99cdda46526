"""Our int4 products beside those of other programs, in one process, in turns.

Knows passes and their times; must not know how anybody computes. A round is one read of memory and one pass of each
program over its own matrices. Ours is timed as a program runs it: x prepared for every matrix, and the next matrix
waits for the one before.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from picaflor import _native
from picaflor.backends.cpu import kernels_bench, rivals
from picaflor.backends.cpu.kernels import PLANES
from picaflor.formats.base import F32

QUIET_S: Final = 0.03
"""Between two programs: their idle threads look for work before they sleep."""
OURS: Final = ("standard", "fast")


class _Ours:
    """Our matrices under one precision, as a rival."""

    def __init__(self, held: Sequence[Any], precision: str, isa: str) -> None:
        self.name = f"picaflor int4-grouped {rivals.GROUP_SIZE} {precision}"
        self.nbytes = sum(weight.nbytes for weight in held)
        self.count = len(held)
        self._natives = [weight.native for weight in held]
        self._planes, self._isa = PLANES[precision], isa
        self._pools: dict[int, Any] = {}

    def ready(self, x: F32, threads: int) -> None:
        """A pool of its own per number of threads."""
        self._pool = self._pools.setdefault(threads, _native.Pool(threads))

    def run(self, x: F32) -> None:
        """All matrices, one after the other."""
        _native.bench_program(self._isa, self._natives, self._planes, x, self._pool)


def compare(
    *,
    shapes: Sequence[tuple[int, int]],
    tokens: Sequence[int],
    threads: Sequence[int],
    megabytes: int,
    repeats: int,
    isa: str,
    show: Callable[[str], object],
) -> dict[str, Any]:
    """A record: `absent` rivals, and per shape, threads and rows of x milliseconds per matrix of each program."""
    results: list[dict[str, Any]] = []
    absent: list[str] = []
    for rows, cols in shapes:
        shape = kernels_bench.Shape(format="int4-grouped", rows=rows, cols=cols, group_size=rivals.GROUP_SIZE)
        held = kernels_bench.random_weights(shape, megabytes * 1_000_000)
        others, absent = rivals.installed(rows, cols, megabytes * 1_000_000)
        programs = [*(_Ours(held, precision, isa) for precision in OURS), *others]
        for count in threads:
            for number in tokens:
                natives = [weight.native for weight in held]
                found = _rounds(programs, natives, number, cols, count, repeats)
                entry = {"rows": rows, "cols": cols, "threads": count, "tokens": number, **found}
                results.append(entry)
                show(_lines(entry))
        del programs, others, held
    for line in absent:
        show(f"not compared: {line}")
    return {"absent": absent, "results": results}


def _rounds(
    programs: Sequence[Any], natives: list[Any], tokens: int, cols: int, threads: int, repeats: int
) -> dict[str, Any]:
    x = kernels_bench.activations(tokens, cols)
    reads = kernels_bench.Samples()
    seconds: list[list[float]] = [[] for _ in programs]
    shares: list[list[float]] = [[] for _ in programs]
    for turn in range(repeats + 1):
        for index, program in enumerate(programs):
            program.ready(x, threads)
            time.sleep(QUIET_S)
            wall, cpu = time.perf_counter(), time.process_time()
            program.run(x)
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            if turn:  # the first is for warming up
                seconds[index].append(wall / program.count)
                shares[index].append(cpu / (wall * threads))
        time.sleep(QUIET_S)
        reads.add(_native.bench_read("auto", natives, threads), threads)
    good = reads.settle()
    gigabytes = programs[0].nbytes / 1e9
    entries = [
        {
            "program": program.name,
            "matrix_bytes": program.nbytes / program.count,
            "ms": kernels_bench.spread([1e3 * second for second in times]),
            "gb_per_s": program.nbytes / program.count / statistics.median(times) / 1e9,
            "cpu_per_wall": statistics.median(share),
        }
        for program, times, share in zip(programs, seconds, shares, strict=True)
    ]
    best = min(entries[len(OURS) :], key=lambda entry: entry["ms"]["median"], default=None)
    return {
        "read_gb_per_s": kernels_bench.spread([gigabytes / second for second in reads.seconds]),
        "counts": good and all(entry["cpu_per_wall"] >= kernels_bench.LEAST_CPU for entry in entries[: len(OURS)]),
        "programs": entries,
        "best_rival": best and best["program"],
        "speed_to_best_rival": best
        and {
            name: best["ms"]["median"] / entry["ms"]["median"]
            for name, entry in zip(OURS, entries[: len(OURS)], strict=True)
        },
    }


def _lines(entry: dict[str, Any]) -> str:
    lines = [
        f"[{entry['rows']}, {entry['cols']}], {entry['threads']} threads, {entry['tokens']} rows of x; "
        f"memory read at {entry['read_gb_per_s']['median']:.1f} GB/s",
        "program                              MB   ms a matrix (min..max)     GB/s   CPU/wall",
    ]
    for program in entry["programs"]:
        ms = program["ms"]
        spread = f"{ms['median']:.3f} ({ms['min']:.3f}..{ms['max']:.3f})"
        lines.append(
            f"{program['program']:34s} {program['matrix_bytes'] / 1e6:4.2f}   {spread:>22s}   "
            f"{program['gb_per_s']:6.1f}   {program['cpu_per_wall']:8.2f}"
        )
    if entry["speed_to_best_rival"]:
        speeds = ", ".join(f"{name} {value:.2f}" for name, value in entry["speed_to_best_rival"].items())
        lines.append(f"our speed relative to {entry['best_rival']}: {speeds}")
    if not entry["counts"]:
        lines.append("DOES NOT COUNT: the machine was busy with something else")
    return "\n".join(lines)
