"""Compares models that several GPUs share with the CPU's bits and times them beside one GPU: for a machine with two.

    python benchmarks/gpu_several.py builtin MODEL ... --out FILE [--bound 5GiB] [--devices 0 --devices 0,1]

For each model, on each choice of `--device`: logits of a prompt and of single tokens against the CPU's, tokens per
second of one and of eight sequences and of a long prompt, what each device holds. `--bound`: with so much memory of
each device, so that one of them cannot hold the model. Prints a line each and writes them to FILE.
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

from picaflor.runtime.engine import Engine, EngineOptions
from picaflor.runtime.kvcache import Sequence
from picaflor.runtime.machine import record_head
from picaflor.runtime.runner import Work
from picaflor.sizes import parse_bytes

Found = dict[str, Any]
PROMPT = 12
SINGLES = 6
LONG = 2048
ROW_BYTES = 6144 * 4
BLOCK_BYTES = 256 << 20


def _ids(count: int, below: int) -> Any:
    return np.random.default_rng(3).integers(0, below, count).astype(np.int32)


def logits(engine: Engine) -> Any:
    """Of a prompt in one step, of tokens one by one behind it, and of a second sequence beside the first."""
    ids = _ids(PROMPT + SINGLES, min(200, engine.vocabulary))
    sequence, other = Sequence(), Sequence()
    rows = [engine.runner.step([Work(sequence, ids[:PROMPT], "all")]).copy()]
    for number in range(PROMPT, len(ids)):
        work = [Work(sequence, ids[number : number + 1])]
        work += [Work(other, ids[::-1][:3].copy())] if number == PROMPT + 1 else []
        rows.append(engine.runner.step(work).copy())
    for used in (sequence, other):
        engine.plan.pool.release(used)
    return np.concatenate(rows)


def rate(engine: Engine, *, batch: int, steps: int) -> Found:
    """Median time of a decode step behind prompts of 64 tokens, the first third of the steps left out."""
    sequences = [Sequence() for _ in range(batch)]
    for sequence in sequences:
        engine.runner.prefill(sequence, _ids(64, engine.vocabulary))
    tokens = _ids(steps, engine.vocabulary)
    times = []
    for number in range(steps):
        started = time.perf_counter()
        engine.runner.step([Work(sequence, tokens[number : number + 1]) for sequence in sequences])
        times.append(time.perf_counter() - started)
    for sequence in sequences:
        engine.plan.pool.release(sequence)
    step = statistics.median(times[steps // 3 :])
    return {"batch": batch, "step_ms": round(1e3 * step, 3), "tokens_per_s": round(batch / step, 1)}


def prefill(engine: Engine) -> Found:
    """A prompt in chunks, the second time: while one device has a chunk, the other may have the one before."""
    ids = _ids(LONG, engine.vocabulary)
    times = []
    for _ in range(2):
        sequence = Sequence()
        started = time.perf_counter()
        engine.runner.prefill(sequence, ids)
        times.append(time.perf_counter() - started)
        engine.plan.pool.release(sequence)
    return {"tokens": LONG, "seconds": round(times[-1], 4), "tokens_per_s": round(LONG / times[-1])}


def holds(engine: Engine) -> list[Found]:
    """What each device has: layers, experts of all that its layers have, bytes."""
    whole: Any = engine.plan.backend
    backends = getattr(whole, "backends", (whole,))
    return [
        {
            "device": backend.number,
            "layers": whole.layers(place) if len(backends) > 1 else list(range(len(engine.plan.model.layers))),
            "experts": backend.tier.held,
            "of": backend.tier.experts,
            "bytes": backend.vram_used() + backend.tier.slots * backend.tier.stride,
        }
        for place, backend in enumerate(backends)
    ]


def compare(path: Path | None, wanted: Any, options: EngineOptions, *, steps: int) -> Found:
    """One model on the devices that the options name."""
    warnings: list[str] = []
    started = time.perf_counter()
    with Engine.open(path, options, warn=warnings.append) as engine:
        opened = time.perf_counter() - started
        found = logits(engine)
        first = time.perf_counter() - started
        speeds = [rate(engine, batch=batch, steps=steps) for batch in (1, 8)]
        prompt = prefill(engine)
        held = holds(engine)
        fallbacks = dict(engine.record().fallbacks)
    return {
        "model": "builtin" if path is None else path.name,
        "devices": options.device,
        "bound": options.vram_bytes,
        "differ": int((found.view(np.int32) != wanted.view(np.int32)).sum()),
        "of": int(wanted.size),
        "open_s": round(opened, 1),
        "first_logits_s": round(first, 1),
        "speed": speeds,
        "prefill": prompt,
        "held": held,
        "fallbacks": fallbacks,
        "told": [line for line in warnings if line.startswith("--device")],
    }


def between() -> Found:
    """The way from the first device to the second: reachable or not, a row of 6144 floats, and bytes per second."""
    import torch

    def seconds(nbytes: int, repeats: int) -> float:
        source = torch.zeros(nbytes, dtype=torch.uint8, device="cuda:0")
        target = torch.zeros(nbytes, dtype=torch.uint8, device="cuda:1")
        times = []
        for _ in range(repeats):
            torch.cuda.synchronize(0)
            started = time.perf_counter()
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize(1)
            times.append(time.perf_counter() - started)
        return statistics.median(times)

    pattern = torch.arange(1 << 20, dtype=torch.int32, device="cuda:0")
    arrived = pattern.to("cuda:1").cpu()
    return {
        "devices": [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())],
        "peer": bool(torch.cuda.can_device_access_peer(0, 1)),
        "right": bool((arrived == torch.arange(1 << 20, dtype=torch.int32)).all()),
        "row_us": round(1e6 * seconds(ROW_BYTES, 200), 1),
        "bytes_per_s": round(BLOCK_BYTES / seconds(BLOCK_BYTES, 10)),
    }


def main() -> None:
    """Run everything and print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("models", nargs="+", help="builtin, or folders")
    parser.add_argument("--bound", type=parse_bytes)
    parser.add_argument("--devices", action="append")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--note", default="")
    words = parser.parse_args()
    record: Found = {**record_head("several GPUs", note=words.note), "between": _kept(between), "models": []}
    print(json.dumps(record["between"]), flush=True)
    for name in words.models:
        path = None if name == "builtin" else Path(name)
        base = {"context": 2304, "sequences": 8}
        with Engine.open(path, EngineOptions(**base, backend="cpu"), warn=lambda text: None) as engine:
            wanted = logits(engine)
        for devices in words.devices or ["0", "1", "0,1"]:
            options = EngineOptions(**base, backend=words.backend, device=devices, vram_bytes=words.bound)
            line = _kept(
                lambda path=path, wanted=wanted, options=options: compare(  # type: ignore[misc]
                    path, wanted, options, steps=words.steps
                )
            )
            record["models"].append(line)
            print(json.dumps(line), flush=True)
            words.out.write_text(json.dumps(record, indent=1))


def _kept(find: Callable[[], Found]) -> Found:
    try:
        return find()
    except Exception as error:  # noqa: BLE001
        return {"fault": f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"}


if __name__ == "__main__":
    main()
