"""Times the product kernels on the GPU of this machine: single matrices, the experts of a layer, many rows.

`python benchmarks/gpu_products.py [PROCESSES THAT COMPILE] > record.json`. Medians over replayed CUDA graphs; weights
rotate over more memory than any cache holds; copy bandwidth and the bf16 matrix rate are taken in the same process.
int4-grouped, groups of 64, expert sizes of GLM-5.2; torch's int4 product beside it.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from picaflor.backends.api import ExpertLayout, MatrixLayout
from picaflor.backends.cuda import experts, formats, matmul, prepare

DEVICE = "cuda"
HIDDEN, INNER, EXPERTS, GROUP = 6144, 2048, 8, 64
ROTATE_BYTES = 1_000_000_000
REPEATS = 9
MATRICES = ((2048, 6144), (6144, 2048), (16384, 2048), (6144, 16384), (16384, 6144))
ROW_COUNTS = {
    (2048, 6144): (1, 2, 4, 8, 16, 64, 512),
    (6144, 2048): (1, 512),
    (16384, 2048): (1, 8, 512),
    (16384, 6144): (1, 8, 512),
}
FFN_CALLS = ((1, "standard"), (1, "fast"), (2, "standard"), (8, "standard"), (512, "standard"), (512, "fast"))
"""Rows and precision."""
PRECISIONS = ("standard", "fast")


def microseconds(calls: Sequence[Callable[[], object]]) -> float:
    """Median time of one of `calls`, all captured in one graph."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times)


def copy_rate() -> float:
    """TB/s of the fastest plain copy, bytes read and written."""
    source = torch.rand(1 << 30, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.nbytes / microseconds([lambda: torch.add(source, 0.0, out=target)] * 3) / 1e6


def matrix_rate() -> float:
    """TFLOP/s of a bf16 product of random matrices."""
    a, b = (torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / microseconds([lambda: a @ b] * 5) / 1e6


def stored_bytes(rows: int, cols: int) -> int:
    """Codes and scales."""
    return rows * cols // 2 + rows * (cols // GROUP) * 4


def random_planes(rng: np.random.Generator, rows: int, cols: int) -> tuple[Any, Any]:
    """Codes and scales of a matrix."""
    codes = rng.integers(0, 256, size=(rows, cols // 2), dtype=np.uint8)
    return codes, rng.random((rows, cols // GROUP), dtype=np.float32)


def time_matrices(
    copy: float, rate: float, shapes: Sequence[tuple[int, int]] = MATRICES, precisions: Sequence[str] = PRECISIONS
) -> list[dict[str, Any]]:
    """Each shape, precision and number of rows."""
    results = []
    for rows, cols in shapes:
        nbytes = stored_bytes(rows, cols)
        planes = random_planes(np.random.default_rng(1), rows, cols)
        count = max(3, ROTATE_BYTES // nbytes)
        held = [formats.hold("int4-grouped", (rows, cols), GROUP, planes, DEVICE) for _ in range(count)]
        for precision in precisions:
            needs = formats.needs("int4-grouped", GROUP, precision)
            assert needs is not None
            for tokens in ROW_COUNTS.get((rows, cols), (1,)):
                x = torch.randn(tokens, cols, device=DEVICE)
                out = torch.empty(tokens, rows, device=DEVICE)
                ready = prepare.prepare(x, needs)
                calls = [
                    lambda w=w, x=x, out=out, p=precision, r=ready: matmul.matmul(x, w, out, p, prepared=r)
                    for w in held
                ]
                us = microseconds(calls)
                flops = 2 * rows * cols * tokens / us / 1e6
                results.append(
                    {"rows": rows, "cols": cols, "tokens": tokens, "precision": precision, "us": us,
                     "of_copy": nbytes / us / 1e6 / copy, "of_bf16": flops / rate}
                )  # fmt: skip
    return results


def expert_tables() -> list[Any]:
    """Tables of eight experts each, over more memory than the cache holds, and what keeps the slots."""
    rng = np.random.default_rng(2)
    layouts, slots = [], []
    for _ in range(EXPERTS):
        matrices, raws, at = [], [], 0
        for rows, cols in ((INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER)):
            offsets = []
            for plane in random_planes(rng, rows, cols):
                offsets.append(at)
                raws.append((at, plane.reshape(-1).view(np.uint8)))
                at += plane.nbytes
            matrices.append(MatrixLayout("int4-grouped", rows, cols, GROUP, tuple(offsets)))
        slot = np.empty(at + formats.SLACK_BYTES, np.uint8)
        for start, raw in raws:
            slot[start : start + raw.nbytes] = raw
        layouts.append(ExpertLayout(*matrices, at))
        slots.append(torch.from_numpy(slot).to(DEVICE))
    tables = []
    for _ in range(7):
        copies = [slot.clone() for slot in slots]
        tables.append((experts.table_for(layouts, [slot.data_ptr() for slot in copies], DEVICE), copies))
    return tables


def time_experts(copy: float, rate: float, calls_wanted: Sequence[tuple[int, str]] = FFN_CALLS) -> list[dict[str, Any]]:
    """All rows choose all eight experts: for more than one row the matrices come from the cache again."""
    tables = expert_tables()
    nbytes = EXPERTS * 3 * stored_bytes(INNER, HIDDEN)
    results = []
    for tokens, precision in calls_wanted:
        x, out = torch.randn(tokens, HIDDEN, device=DEVICE), torch.empty(tokens, HIDDEN, device=DEVICE)
        ids = torch.stack([torch.randperm(EXPERTS) for _ in range(tokens)]).to(torch.int32).to(DEVICE)
        weights = torch.rand(tokens, EXPERTS, device=DEVICE)
        counts = experts.counters(tokens * EXPERTS, INNER, HIDDEN)
        arrived = torch.zeros(counts, dtype=torch.int32, device=DEVICE)
        needs = formats.needs("int4-grouped", GROUP, precision)
        assert needs is not None
        ready = [prepare.prepare(x, needs)]
        calls = [
            lambda t=table, x=x, ids=ids, w=weights, out=out, p=precision, r=ready, a=arrived: experts.expert_ffn(
                x, ids, w, t, out, p, prepared=r, arrived=a
            )
            for table, _ in tables
        ]
        us = microseconds(calls[:2] if tokens > 8 else calls)
        flops = 3 * 2 * HIDDEN * INNER * EXPERTS * tokens / us / 1e6
        results.append(
            {"tokens": tokens, "precision": precision, "us": us, "of_copy": nbytes / us / 1e6 / copy,
             "of_bf16": flops / rate}
        )  # fmt: skip
    return results


def time_torch(copy: float) -> list[dict[str, Any]]:
    """torch's own int4 product, groups of 64, one row of bf16; a line with the reason where it does not run."""
    results = []
    for rows, cols in ((2048, 6144), (16384, 2048)):
        try:
            packed = torch.randint(0, 256, (rows, cols // 2), dtype=torch.uint8, device=DEVICE)
            count = max(3, ROTATE_BYTES // packed.nbytes)
            weights = [torch.ops.aten._convert_weight_to_int4pack(packed, 8) for _ in range(count)]
            scales = torch.rand(cols // GROUP, rows, 2, device=DEVICE, dtype=torch.bfloat16)
            x = torch.randn(1, cols, device=DEVICE, dtype=torch.bfloat16)
            us = microseconds(
                [lambda w=w, x=x, s=scales: torch.ops.aten._weight_int4pack_mm(x, w, GROUP, s) for w in weights]
            )
            results.append({"rows": rows, "cols": cols, "us": us, "of_copy": packed.nbytes / us / 1e6 / copy})
        except (RuntimeError, AttributeError, NotImplementedError) as error:
            results.append({"rows": rows, "cols": cols, "reason": str(error)[:200]})
    return results


def _warm(job: tuple[str, Any, Any]) -> None:
    """Compile what one part of the timing needs."""
    what, first, second = job
    if what == "experts":
        time_experts(1.0, 1.0, [(first, second)])
    else:
        time_matrices(1.0, 1.0, [first], [second])


def warm(workers: int) -> None:
    """Compile all of it in parallel; what is compiled is kept on disk."""
    jobs: list[tuple[str, Any, Any]] = [("experts", *call) for call in FFN_CALLS]
    jobs += [("matmul", shape, precision) for shape in MATRICES for precision in PRECISIONS]
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        pool.map(_warm, jobs, chunksize=1)


def main() -> None:
    """Prints the record."""
    if len(sys.argv) > 1:
        warm(int(sys.argv[1]))
    copy, rate = copy_rate(), matrix_rate()
    record = {
        "benchmark": "gpu products",
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "copy_tb_per_s": copy,
        "bf16_tflop_per_s": rate,
        "format": "int4-grouped",
        "group_size": GROUP,
        "matmul": time_matrices(copy, rate),
        "expert_ffn": time_experts(copy, rate),
        "torch_int4": time_torch(copy),
    }
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
