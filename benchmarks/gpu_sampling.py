"""Compares tokens that a GPU draws with the CPU's over many rows, and times both ways to a token.

    python benchmarks/gpu_sampling.py --out FILE [--seconds 40]

The host's way is what other devices do: the rows of logits come over, and the CPU draws. Prints a table, writes JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from picaflor.backends.api import NO_TOKEN, Chance, draw_rows
from picaflor.backends.cuda.backend import find_device
from picaflor.backends.cuda.sampling import Drawer
from picaflor.backends.device import sample_on_host
from picaflor.runtime.machine import record_head

WIDTHS = (17, 1025, 32_000, 151_552)
TEMPERATURES = (0.0, 1e-6, 1e-3, 0.3, 0.7, 1.0, 2.0, 100.0)
TOP_P = (1e-9, 1e-3, 0.05, 0.5, 0.9, 0.999, 1 - 2.0**-53, 1.0)
KINDS = ("usual", "rounded", "equal", "not finite", "one alone", "huge")
TIMED = {
    "greedy": Chance(0.0, 1.0, 0.0),
    "top-p 0.9": Chance(0.7, 0.9, 0.6),
    "top-p 1": Chance(0.7, 1.0, 0.6),
}
REPEATS = 60


def some_rows(rng: np.random.Generator, kind: str, rows: int, width: int) -> Any:
    """Logits of one kind, float32 `[rows, width]`."""
    x = (rng.choice([0.01, 0.5, 2.5, 10]) * rng.standard_normal((rows, width), dtype=np.float32)).astype(np.float32)
    if kind == "rounded":
        x = np.round(x * 2) / np.float32(2)
    elif kind == "equal":
        x[:] = x[:, :1]
    elif kind == "not finite":
        for value in (np.nan, -np.inf, np.inf):
            x[rng.random(x.shape) < 0.2] = value
    elif kind == "one alone":
        x[:] = rng.choice([np.nan, -np.inf, np.inf])
        x[0, rng.integers(width)] = 1.0
    elif kind == "huge":
        x *= np.float32(1e37)
    return x


def some_chance(rng: np.random.Generator) -> Chance:
    """How a token may be drawn."""
    uniform = float(rng.choice([0.0, rng.random(), rng.random(), rng.random(), 1 - 2.0**-53]))
    return Chance(float(rng.choice(TEMPERATURES)), float(rng.choice(TOP_P)), uniform)


def compare(device: Any, seconds: float) -> dict[str, Any]:
    """Rows drawn on both, by width, and those whose tokens differ."""
    rng, drawer = np.random.default_rng(8), Drawer(device)
    until = time.monotonic() + seconds
    rows = dict.fromkeys(map(str, WIDTHS), 0)
    wrong: list[str] = []
    while time.monotonic() < until:
        for width in WIDTHS:
            kind = str(rng.choice(KINDS))
            logits = some_rows(rng, kind, 8, width)
            chances = [some_chance(rng) for _ in logits]
            found = drawer(torch.from_numpy(logits).to(device), chances).tolist()
            wanted = draw_rows(logits, chances, sample_on_host)
            for (token, finite), right, chance in zip(found, wanted, chances, strict=True):
                rows[str(width)] += 1
                if (token if finite else NO_TOKEN) != right:
                    wrong.append(f"{kind}, {width} logits, {chance}: {token}, the CPU has {right}")
    return {"rows": rows, "differ": len(wrong), "first": wrong[:5]}


def _median(device: Any, call: Callable[[], object]) -> float:
    """Seconds of a call, from an idle device to its end."""
    times: list[float] = []
    for _ in range(REPEATS + 5):
        torch.cuda.synchronize(device)
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return statistics.median(times[5:])


def _on_device(device: Any, call: Callable[[], object]) -> float:
    """Seconds that the device has work of a call, from marks in its stream."""
    times: list[float] = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(400_000)  # the host is ahead when the work begins
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e-3)
    return statistics.median(times)


def measure(device: Any, width: int, rows: int, name: str) -> dict[str, Any]:
    """Microseconds of both ways for rows of usual logits."""
    rng, drawer = np.random.default_rng(9), Drawer(device)
    logits = torch.from_numpy((2.5 * rng.standard_normal((rows, width))).astype(np.float32)).to(device)
    chances = [TIMED[name]] * rows
    pinned = torch.empty(logits.shape, dtype=logits.dtype, pin_memory=True)

    def on_host() -> None:
        pinned.copy_(logits, non_blocking=True)
        torch.cuda.synchronize(device)
        draw_rows(pinned.numpy(), chances, sample_on_host)

    return {
        "logits": width,
        "rows": rows,
        "drawn": name,
        "device_us": 1e6 * _on_device(device, lambda: drawer.launch(logits, chances)),
        "wall_us": 1e6 * _median(device, lambda: drawer(logits, chances)),
        "host_way_us": 1e6 * _median(device, on_host),
    }


def main() -> None:
    """Compare, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--seconds", type=float, default=30, help="of comparing")
    parser.add_argument("--note", default="")
    parser.add_argument("--out", type=Path, required=True)
    words = parser.parse_args()
    device, arch = find_device(words.backend, 0)
    record = {**record_head("gpu sampling", note=words.note), "device": torch.cuda.get_device_name(device), "isa": arch}
    record["compared"] = compare(device, words.seconds)
    print(json.dumps(record["compared"]), flush=True)
    record["times"] = []
    for width in (32_000, 151_552):
        for rows in (1, 8):
            for name in TIMED:
                line = measure(device, width, rows, name)
                record["times"].append(line)
                print(" ".join(f"{key}={value if isinstance(value, str | int) else round(value, 1)}" for key, value in
                               line.items()), flush=True)  # fmt: skip
    words.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
