"""Compares the GPU backend with the CPU's bits and times it, all in one run: for a machine that is lent for minutes.

    python benchmarks/gpu_runtime.py --workers 10 --out FOLDER [--glm FOLDER] [--backend cuda] [--seconds 150]

Parts: every quick conformance case; logits of containers over chunks, batches and residency on the device; decoding
speed with and without captured graphs, and the kernels' share of the time. Prints a table, writes `gpu_runtime.json`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from picaflor.runtime.engine import Engine, EngineOptions
from picaflor.runtime.kvcache import Sequence
from picaflor.runtime.runner import Work

FAMILIES = Path(__file__).parent.parent / "tests" / "data" / "families"
CONTAINERS = (
    "builtin",
    "tiny_glm_int4g64",
    "tiny_glm_ragged_int4g16",
    "tiny_glm_fp8_experts",
    "tiny_glm_e8",
    "tiny_glm_dsa_f32",
    "qwen3_moe_tiny",
)
Found = dict[str, Any]


def _ids(count: int, below: int) -> Any:
    return np.random.default_rng(3).integers(0, below, count).astype(np.int32)


def _differ(a: Any, b: Any) -> int:
    return int((np.ascontiguousarray(a).view(np.int32) != np.ascontiguousarray(b).view(np.int32)).sum())


# ---- conformance ----


def check_cases(backend: str, share: int, shares: int, seconds: float) -> list[Found]:
    """Every `shares`-th quick case: how many values have other bits than the CPU's, and the oracle's verdict."""
    from picaflor.conformance import suite
    from picaflor.conformance.case import Prepared
    from picaflor.conformance.check import compare, differing
    from picaflor.conformance.verify import Variant, What, open_device

    until = time.monotonic() + seconds
    found: list[Found] = []
    cases = suite.pick(suite.all_cases())
    order = np.random.default_rng(1).permutation(len(cases))[share::shares]
    for number in order:
        case = cases[int(number)]
        if time.monotonic() > until:
            found.append({"case": case.label, "skipped": True})
            continue
        prepared = Prepared(case)
        line: Found = {"case": case.label, "op": case.op, "format": case.format}
        try:
            here = prepared.run(open_device(What(backend), Variant("auto", 1), "standard"))
            there = prepared.run(open_device(What("cpu"), Variant("auto", 1), "standard"))
            line["differ"] = differing(here, there)
            line["fault"] = compare(here, prepared.expected("standard"), "standard").fault
        except Exception as error:  # noqa: BLE001
            line["fault"] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        found.append(line)
    return found


# ---- models ----


def _logits(path: Path | None, options: EngineOptions, ids: Any, chunk: int, *, slots: int | None = None) -> Any:
    """Logits of all positions in chunks, then of two more steps; with what ran where."""
    with Engine.open(path, options, warn=lambda text: None) as engine:
        backend: Any = engine.plan.backend
        if slots is not None:
            backend.tier.most_slots = slots
        sequence = Sequence()
        rows = [
            engine.runner.step([Work(sequence, ids[start : start + chunk], "all")]).copy()
            for start in range(0, len(ids), chunk)
        ]
        program: Any = engine.plan.forward.program
        told = {"replays": getattr(program, "replays", 0), "fallbacks": sum(backend.table.fallbacks.values())}
        return np.concatenate(rows), told


def check_model(backend: str, name: str) -> list[Found]:
    """One container: chunk 1 (graphs), 7 and all; 4 sequences at once; few slots; a failing device."""
    found: list[Found] = []
    path = None if name == "builtin" else FAMILIES / name
    base = EngineOptions(context=1024 if name == "builtin" else 128, threads=2, sequences=4, backend="cpu")
    ids = _ids(560 if name == "builtin" else 60, 200)
    variants: list[tuple[str, EngineOptions, int, int | None]] = [
        ("chunk 64", base, 64, None),
        ("chunk 1", base, 1, None),
        ("chunk 7", base, 7, None),
        ("5 slots", base, 64, 5),
        ("1 slot", base, 16, 1),
        ("half the slots, chunk 3", base, 3, 28 if name == "builtin" else 8),
        ("fails at once", replace(base, fail_after=0), 64, None),
        ("fails after 300", replace(base, fail_after=300), 16, None),
    ]
    for precision in ("standard", "exact", "fast") if name != "builtin" else ("standard",):
        wanted, _ = _logits(path, replace(base, precision=precision), ids, 64)
        for label, options, chunk, slots in variants if precision == "standard" else variants[:2]:
            line: Found = {"model": name, "variant": f"{precision}, {label}"}
            started = time.perf_counter()
            try:
                chosen = replace(options, precision=precision, backend=backend)
                rows, told = _logits(path, chosen, ids, chunk, slots=slots)
                line |= {"differ": _differ(rows, wanted), "of": int(wanted.size), **told}
            except Exception as error:  # noqa: BLE001
                line["fault"] = f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
            line["seconds"] = round(time.perf_counter() - started, 1)
            found.append(line)
    found.append(_check_batch(path, name, base, backend))
    return found


def _check_batch(path: Path | None, name: str, base: EngineOptions, backend: str) -> Found:
    """Four sequences in one step against each alone."""
    with Engine.open(path, replace(base, backend=backend), warn=lambda text: None) as engine:
        texts = [_ids(5 + 3 * n, 200)[::-1].copy() for n in range(4)]
        alone = []
        for ids in texts:
            sequence = Sequence()
            alone.append(engine.runner.step([Work(sequence, ids, "last")])[0].copy())
            engine.plan.pool.release(sequence)
        together = engine.runner.step([Work(Sequence(), ids, "last") for ids in texts]).copy()
    return {"model": name, "variant": "4 sequences at once", "differ": _differ(together, np.stack(alone))}


# ---- speed ----


def time_model(
    path: Path | None, name: str, backend: str, *, graphs: bool, batch: int, slots: int | None, steps: int
) -> Found:
    """Median step time of decoding, tokens per second, and the kernels' share by torch's profiler."""
    import torch

    options = EngineOptions(context=1024, backend=backend, sequences=max(4, batch))
    with Engine.open(path, options, warn=lambda text: None) as engine:
        device: Any = engine.plan.backend
        program: Any = engine.plan.forward.program
        program._batches.captures = graphs
        device.tier.most_slots = slots
        sequences = [Sequence() for _ in range(batch)]
        for sequence in sequences:
            engine.runner.prefill(sequence, _ids(64, engine.vocabulary))
        tokens = _ids(3 * steps, engine.vocabulary)
        times = []

        def step(number: int) -> None:
            one = tokens[number : number + 1]
            engine.runner.step([Work(sequence, one) for sequence in sequences])

        for number in range(2 * steps):
            started = time.perf_counter()
            step(number)
            times.append(time.perf_counter() - started)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            started = time.perf_counter()
            for number in range(8):
                step(number)
            torch.cuda.synchronize()
            profiled = time.perf_counter() - started
        events = profile.key_averages()
        busy = sum(event.self_device_time_total for event in events) * 1e-6
        best = sorted(events, key=lambda event: -event.self_device_time_total)[:10]
        median = statistics.median(times[steps:])
        return {
            "model": name, "graphs": graphs, "batch": batch, "step_ms": round(median * 1e3, 3),
            "tokens_per_s": round(batch / median, 1), "kernel_ms": round(busy / 8 * 1e3, 3),
            "kernel_share_profiled": round(busy / profiled, 2), "kernel_share": round(busy / 8 / median, 2),
            "bytes_per_token": sum(engine.bytes_per_token().values()), "slots": device.tier.slots,
            "top": [f"{e.key[:40]} {e.self_device_time_total / 8:.0f}us x{e.count // 8}" for e in best],
        }  # fmt: skip


# ---- all of it ----


def main() -> None:
    """Run everything and print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=150)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--glm", type=Path)
    parser.add_argument("--parts", default="models,cases,speed")
    words = parser.parse_args()
    parts = words.parts.split(",")
    record: dict[str, list[Found]] = {}
    context = multiprocessing.get_context("spawn")
    started = time.monotonic()
    with context.Pool(words.workers) as pool:
        jobs: list[tuple[str, Any]] = []
        if "models" in parts:
            jobs += [("models", pool.apply_async(check_model, (words.backend, name))) for name in CONTAINERS]
        if "cases" in parts:
            shares = max(1, words.workers - (len(CONTAINERS) if "models" in parts else 0) // 2)
            for share in range(shares):
                arguments = (words.backend, share, shares, words.seconds)
                jobs.append(("cases", pool.apply_async(check_cases, arguments)))
        for part, job in jobs:
            record.setdefault(part, []).extend(_result(job.get))
            _save(words.out, record)
    print(f"compared in {time.monotonic() - started:.0f} s", flush=True)
    _tell(record)
    if "speed" in parts:
        models = [(None, "builtin")] + ([(words.glm, "glm-mid")] if words.glm is not None else [])
        for path, name in models:
            quarter = 42 if path is None else 160
            for graphs, batch, slots in ((True, 1, None), (False, 1, None), (True, 8, None), (True, 1, quarter)):

                def timed(
                    path: Path | None = path, name: str = name, graphs: bool = graphs, batch: int = batch,
                    slots: int | None = slots,
                ) -> list[Found]:  # fmt: skip
                    made = time_model(path, name, words.backend, graphs=graphs, batch=batch, slots=slots, steps=40)
                    return [made]

                line = _result(timed)
                record.setdefault("speed", []).extend(line)
                print(json.dumps(line[0]), flush=True)
                _save(words.out, record)


def _result(get: Callable[[], list[Found]]) -> list[Found]:
    try:
        return get()
    except Exception as error:  # noqa: BLE001
        return [{"fault": f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"}]


def _save(folder: Path, record: dict[str, list[Found]]) -> None:
    (folder / "gpu_runtime.json").write_text(json.dumps(record, indent=1))


def _tell(record: dict[str, list[Found]]) -> None:
    for line in record.get("models", []):
        print(json.dumps(line))
    cases = record.get("cases", [])
    ran = [line for line in cases if "differ" in line]
    print(
        f"cases: {len(ran)} ran, {sum(line['differ'] == 0 for line in ran)} with the CPU's bits, "
        f"{sum(not line['fault'] for line in ran)} right by the oracle, "
        f"{sum('skipped' in line for line in cases)} skipped, {len(cases)} in all"
    )
    for line in [line for line in cases if line.get("fault") or line.get("differ")][:40]:
        print(json.dumps(line))


if __name__ == "__main__":
    main()
