"""Verifies the Vulkan backend on this machine's device, compares it with the CPU and times it, all in one run.

    python benchmarks/vulkan_device.py [--out FILE] [--seconds 240] [--quick]

Prints one JSON object: the device, `verify --backend vulkan` as far as the seconds reach, values that differ in their
bits from the CPU's, the bandwidth of a copy, and bytes of weights per second of products and groups of experts as part
of it. Experts lie in more memory than a cache holds. Times are of many launches submitted at once, the median of
several; the wait for the device is in them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from picaflor.backends.vulkan.backend import VulkanBackend
from picaflor.backends.vulkan.device import Stream, open_gpu
from picaflor.backends.vulkan.program import Moment
from picaflor.conformance import suite
from picaflor.conformance.case import Matrix, Prepared, Slots, hold, make_batch, make_matrix
from picaflor.conformance.check import compare, differing
from picaflor.conformance.verify import Variant, What, open_device

Found = dict[str, Any]
HIDDEN, INNER, TOP_K = 6144, 2048, 8
GROUP = 64


def median_s(run: Callable[[int], None], times: int, repeats: int) -> float:
    """Median seconds of one of `times` that are submitted together."""
    run(2)
    taken = []
    for _ in range(repeats):
        started = time.perf_counter()
        run(times)
        taken.append((time.perf_counter() - started) / times)
    return statistics.median(taken)


def waited(gpu: Any, buffer: Any) -> None:
    """Wait until the device has done all that it was given."""
    gpu.read(buffer, 0, 4)


def copy_bytes_per_s(nbytes: int, repeats: int) -> float:
    """Bytes read and written per second by the device's own copy between buffers."""
    gpu = open_gpu()
    source, target = gpu.buffer(nbytes, "a copy"), gpu.buffer(nbytes, "a copy")

    def run(times: int) -> None:
        encoder = gpu.device.create_command_encoder()
        for _ in range(times):
            encoder.copy_buffer_to_buffer(source, 0, target, 0, nbytes)
        gpu.device.queue.submit([encoder.finish()])
        waited(gpu, target)

    return 2 * nbytes / median_s(run, 20, repeats)


def products(rows: int, cols: int, count: int, copies: int, repeats: int, format_name: str, size: int) -> Found:
    """matmul of `copies` matrices, one after the other, so that none is still in a cache."""
    device = VulkanBackend()
    rng = np.random.default_rng(1)
    matrix = make_matrix(rng, format_name, rows, cols, size)
    weights = [hold(device, matrix, f"w{number}") for number in range(copies)]
    recorder = device.recorder(max_rows=count, max_outputs=1, page_tokens=16, pages=1)
    x, y = recorder.rows(cols), recorder.rows(rows)
    for weight in weights:
        recorder.matmul(x, weight, y)
    program: Any = recorder.finish()
    program.write(x, rng.standard_normal((count, cols)).astype(np.float32))
    batch = make_batch([0] * count, pages=np.zeros((1, 1), np.int32), outputs=[])
    program.run(batch)

    def run(times: int) -> None:
        stream = Stream(device.gpu)
        for _ in range(times):
            for step in program._steps:
                step.run(Moment(stream, count, 1, None))
        stream.submit()
        waited(device.gpu, y.handle.memory)

    seconds = median_s(run, 4, repeats) / copies
    nbytes = sum(plane.nbytes for plane in matrix.planes)
    return {"what": f"{format_name} gs {size} [{rows}, {cols}] S {count}", "us": 1e6 * seconds, "bytes": nbytes,
            "bytes_per_s": nbytes / seconds}  # fmt: skip


def expert_group(count: int, experts: int, hidden: int, inner: int, repeats: int) -> Found:
    """One row's (or a few rows') experts, another choice in each layer."""
    device = VulkanBackend(vram_bytes=64 << 30)
    rng = np.random.default_rng(2)
    shapes = ((inner, hidden), (inner, hidden), (hidden, inner))
    member: tuple[Matrix, ...] = tuple(make_matrix(rng, "int4-grouped", *shape, GROUP) for shape in shapes)
    slots = Slots(device, {0: [member] * experts})  # type: ignore[list-item]
    recorder = device.recorder(max_rows=count, max_outputs=1, page_tokens=16, pages=1)
    x, y = recorder.rows(hidden), recorder.rows(hidden)
    choices = [(recorder.rows(TOP_K, dtype="i32"), recorder.rows(TOP_K)) for _ in range(experts // TOP_K)]
    for ids, weights in choices:
        recorder.experts(x, ids, weights, y, layer=0, layouts=slots.layouts(0))
    program: Any = recorder.finish()
    program.write(x, rng.standard_normal((count, hidden)).astype(np.float32) / 64)
    for number, (ids, weights) in enumerate(choices):
        program.write(ids, np.tile(np.arange(number * TOP_K, (number + 1) * TOP_K, dtype=np.int32), (count, 1)))
        program.write(weights, np.full((count, TOP_K), 0.125, np.float32))
    program.run(make_batch([0] * count, pages=np.zeros((1, 1), np.int32), outputs=[]), slots)

    def run(times: int) -> None:
        stream = Stream(device.gpu)
        for _ in range(times):
            for step in program._steps:
                step.run(Moment(stream, count, 1, slots))
        stream.submit()
        waited(device.gpu, y.handle.memory)

    seconds = median_s(run, 4, repeats) / len(choices)
    nbytes = TOP_K * sum(plane.nbytes for matrix in member for plane in matrix.planes)
    return {"what": f"{TOP_K} experts of {hidden} x {inner}, int4-grouped gs {GROUP}, S {count}",
            "us": 1e6 * seconds, "bytes": nbytes, "bytes_per_s": nbytes / seconds}  # fmt: skip


def verified(seconds: float) -> Found:
    """Every quick case in every precision, twice on the device and once on the CPU, until the time is over."""
    until = time.monotonic() + seconds
    cases = suite.pick(suite.all_cases())
    order = np.random.default_rng(1).permutation(len(cases))
    found: Found = {"cases": len(cases), "run": 0, "values": 0, "other_bits_than_before": 0, "other_bits_than_cpu": 0,
                    "largest_metric": {}, "failures": []}  # fmt: skip
    for number in order:
        if time.monotonic() > until:
            break
        case = Prepared(cases[int(number)])
        for precision in ("standard", "exact", "fast"):
            try:
                here, again = (case.run(open_device(What("vulkan"), Variant("auto", 1), precision)) for _ in range(2))
                there = case.run(open_device(What("cpu"), Variant("auto", 1), precision))
                outcome = compare(here, case.expected(precision), precision)
            except Exception as error:  # noqa: BLE001
                found["failures"].append(f"{case.case.label} {precision}: {type(error).__name__}: {error}"[:300])
                continue
            found["values"] += sum(array.size for array in here)
            found["other_bits_than_before"] += differing(here, again)
            found["other_bits_than_cpu"] += differing(here, there)
            largest = found["largest_metric"]
            largest[precision] = max(largest.get(precision, 0.0), outcome.metric)
            if outcome.fault:
                found["failures"].append(f"{case.case.label} {precision}: {outcome.fault}"[:300])
        found["run"] += 1
    return found


def main() -> int:
    """Run all parts; exit code 1 where something is not right."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--quick", action="store_true", help="small sizes, to try the script itself")
    options = parser.parse_args()
    gpu = open_gpu()
    repeats = 3 if options.quick else 15
    scale = 16 if options.quick else 1
    found: Found = {
        "kind": "vulkan device", "device": gpu.name, "driver": gpu.driver, "software": gpu.software,
        "fusion": gpu.fusion, "binding_bytes": gpu.most_bytes,
    }  # fmt: skip
    copied = copy_bytes_per_s((64 << 20) if options.quick else (1 << 30), repeats)
    found["copy_bytes_per_s"] = copied
    hidden, inner = HIDDEN // scale, INNER // scale
    timed = [products(inner, hidden, count, 96 // scale, repeats, "int4-grouped", GROUP) for count in (1, 2, 8)]
    timed.append(products(hidden, hidden, 1, 32 // scale, repeats, "int4-grouped", GROUP))
    timed.append(products(8 * hidden, hidden, 1, 4, repeats, "int4-grouped", GROUP))
    timed.append(products(hidden, hidden, 1, 32 // scale, repeats, "int8-row", 0))
    timed += [expert_group(count, 96 // (4 if options.quick else 1), hidden, inner, repeats) for count in (1, 8)]
    for line in timed:
        line["part_of_copy"] = line["bytes_per_s"] / copied
    found["timed"] = timed
    found["verify"] = verified(options.seconds)
    text = json.dumps(found, indent=1)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n", encoding="utf-8")
    return 1 if found["verify"]["failures"] or found["verify"]["other_bits_than_before"] else 0


if __name__ == "__main__":
    sys.exit(main())
