"""Times tiles of the kernel for many rows on the GPU of this machine, to choose from: `python benchmarks/gpu_tiles.py`.

Compiled in parallel, timed one after the other, each compared with the bits of the tile that is used. Prints the best
of each shape; `--out FOLDER` gets all of it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
from pathlib import Path
from typing import Any

import gpu_products as products
import torch
import triton
import triton.language as tl

from picaflor.backends.cuda import formats, matmul, prepare
from picaflor.backends.cuda import products as kernels
from picaflor.backends.cuda.tiles import ManyTile

ROWS = 512
FEW_TILES = 6
"""Of the list below, with `--conversions`."""
SHAPES = ((2048, 6144), (6144, 2048), (16384, 2048), (16384, 6144))
TILES = [
    ManyTile(64, 128, 2, 3), ManyTile(64, 128, 1, 3), ManyTile(64, 64, 2, 3), ManyTile(64, 64, 1, 3),
    ManyTile(64, 64, 1, 4), ManyTile(128, 64, 1, 3), ManyTile(64, 128, 1, 4), ManyTile(64, 32, 1, 3),
    ManyTile(128, 128, 1, 3, 8),
]  # fmt: skip


@triton.jit
def converted(first, second, third, PLANES: tl.constexpr):
    """`joined` by conversions, for comparison."""
    if PLANES == 1:
        return first.to(tl.float32)
    else:
        return (first * 256 + second).to(tl.float32)


def held(rows: int, cols: int, copies: int) -> list[Any]:
    """Matrices of random codes."""
    planes = products.random_planes(products.np.random.default_rng(1), rows, cols)
    return [formats.hold("int4-grouped", (rows, cols), products.GROUP, planes, "cuda") for _ in range(copies)]


def prepared(cols: int, precision: str) -> prepare.Prepared:
    """Rows of activations."""
    needs = formats.needs("int4-grouped", products.GROUP, precision)
    assert needs is not None
    torch.manual_seed(3)
    return prepare.prepare(torch.randn(ROWS, cols, device="cuda"), needs)


def compile_one(job: tuple[int, str, bool]) -> str:
    """Run one tile once, so that its code is kept; the reason where it cannot run."""
    number, precision, conversions = job
    if conversions:
        kernels.joined = converted
    rows, cols = SHAPES[0]
    try:
        out = torch.empty(ROWS, rows, device="cuda")
        matmul.launch_many(prepared(cols, precision), held(rows, cols, 1)[0], out, ROWS, TILES[number])
        torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {str(error)[:100]}"
    return ""


def main() -> None:
    """All shapes, precisions and tiles."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--conversions", action="store_true", help="few tiles, integers converted to floats")
    words = parser.parse_args()
    count = FEW_TILES if words.conversions else len(TILES)
    jobs = [(number, precision, words.conversions) for number in range(count) for precision in ("standard", "fast")]
    with multiprocessing.get_context("spawn").Pool(words.workers) as pool:
        told = pool.map(compile_one, jobs, chunksize=1)
    reasons = {job[:2]: reason for job, reason in zip(jobs, told, strict=True)}
    if words.conversions:
        kernels.joined = converted
    rate = products.matrix_rate()
    lines = []
    for rows, cols in SHAPES:
        matrices = held(rows, cols, 4)
        for precision in ("standard", "fast"):
            x, out = prepared(cols, precision), torch.empty(ROWS, rows, device="cuda")
            matmul.launch_many(x, matrices[0], out, ROWS)
            expected = out.clone()
            found = []
            for number, tile in enumerate(TILES[:count]):
                if reasons[number, precision]:
                    continue
                out.fill_(float("nan"))
                matmul.launch_many(x, matrices[0], out, ROWS, tile)
                same = torch.equal(out, expected)
                calls = [lambda w=w, x=x, o=out, t=tile: matmul.launch_many(x, w, o, ROWS, t) for w in matrices]
                us = statistics.median(products.microseconds(calls) for _ in range(2))
                part = 2 * rows * cols * ROWS / us / 1e6 / rate
                found.append({"tile": str(tile), "us": us, "of_bf16": part, "same_bits": same})
            found.sort(key=lambda line: line["us"])
            lines.append({"rows": rows, "cols": cols, "precision": precision, "tiles": found})
            print(rows, cols, precision, *[f"{f['tile'][8:]} {f['of_bf16']:.3f}{'' if f['same_bits'] else ' WRONG'}"
                                           for f in found[:6]])  # fmt: skip
    reasons_said = {f"{TILES[number]} {precision}": reason for (number, precision), reason in reasons.items() if reason}
    if words.out is not None:
        record = {"bf16_tflop_per_s": rate, "shapes": lines, "not_run": reasons_said}
        (words.out / f"gpu_tiles{'_conversions' * words.conversions}.json").write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
