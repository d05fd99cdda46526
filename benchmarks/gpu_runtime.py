"""Compares the GPU backend with the CPU's bits and times it, all in one run: for a machine that is lent for minutes.

    python benchmarks/gpu_runtime.py --workers 10 --out FOLDER [--glm FOLDER] [--large FOLDER] [--tiers FOLDER]

Parts: every quick conformance case; logits of containers over chunks, batches and residency on the device; decoding
speed with and without captured graphs, and the kernels' share of the time; `step`: of that only what is captured;
`small`: formats of kv_b, log-likelihoods,
one row beside 63 others. Prints a table, writes `gpu_runtime.json`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import generate_glm
import numpy as np

from picaflor.convert.policy import Policy
from picaflor.runtime import builtin
from picaflor.runtime.engine import Engine, EngineOptions
from picaflor.runtime.evaluate import window_losses
from picaflor.runtime.kvcache import Sequence
from picaflor.runtime.runner import Work

FAMILIES = Path(__file__).parent.parent / "tests" / "data" / "families"
Found = dict[str, Any]


def tiny_containers(more: Path | None) -> list[tuple[str, Path | None]]:
    """The built-in model and every tiny container, by name."""
    folders = [folder for place in (FAMILIES, more) if place is not None for folder in sorted(place.iterdir())]
    found = {folder.name: folder for folder in folders if (folder / "config.json").is_file()}
    return [("builtin", None), *found.items()]


def _ids(count: int, below: int) -> Any:
    return np.random.default_rng(3).integers(0, below, count).astype(np.int32)


def _differ(a: Any, b: Any) -> int:
    return int((np.ascontiguousarray(a).view(np.int32) != np.ascontiguousarray(b).view(np.int32)).sum())


# ---- conformance ----


def check_cases(backend: str, share: int, shares: int, seconds: float) -> list[Found]:
    """Every `shares`-th quick case: how many values have other bits than the CPU's, and the oracle's verdict."""
    from picaflor.backends.cuda import capabilities
    from picaflor.conformance import suite
    from picaflor.conformance.case import Prepared
    from picaflor.conformance.check import compare, differing
    from picaflor.conformance.verify import Variant, What, open_device

    until = time.monotonic() + seconds
    found: list[Found] = []
    cases = suite.offered(suite.pick(suite.all_cases()), capabilities.cells(backend))
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
        if hasattr(backend, "calls"):
            told["calls"] = backend.calls.total()
        return np.concatenate(rows), told


def check_model(backend: str, name: str, path: Path | None) -> list[Found]:
    """One container: chunk 1 (graphs), 7 and all; several sequences at once, again and again; few slots; fewer slots
    amid replayed steps; a failing device, which does no call more than it may."""
    found: list[Found] = []
    base = EngineOptions(context=1024 if path is None else 128, threads=2, sequences=4, backend="cpu")
    ids = _ids(560 if path is None else 60, 200)
    variants: list[tuple[str, EngineOptions, int, int | None]] = [
        ("chunk 64", base, 64, None),
        ("chunk 1", base, 1, None),
        ("chunk 7", base, 7, None),
        ("5 slots", base, 64, 5),
        ("1 slot", base, 16, 1),
        ("half the slots, chunk 3", base, 3, 28 if path is None else 8),
        ("half the slots, chunk 1", base, 1, 28 if path is None else 8),
        ("fails at once", replace(base, fail_after=0), 64, None),
        ("fails after 50", replace(base, fail_after=50), 16, None),
    ]
    for precision in ("standard", "exact", "fast") if path is not None else ("standard",):
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
    for label, slots, shrinks in (("all here", None, False), ("half the slots", 8, False), ("shrinks", None, True)):
        found += _result(
            lambda slots=slots, shrinks=shrinks: [_check_batch(path, base, backend, slots=slots, shrinks=shrinks)]
        )  # type: ignore[misc]
        found[-1] |= {"model": name, "variant": f"2 and 4 sequences at once, 12 steps, {label}"}
    return found


def _check_batch(path: Path | None, base: EngineOptions, backend: str, *, slots: int | None, shrinks: bool) -> Found:
    """Steps of two and of four sequences, most of them replayed, against the CPU's logits of each alone. `shrinks`:
    experts lose a part of the device's memory half way."""
    texts = [_ids(17 + 3 * n, 200)[::-1].copy() for n in range(4)]
    heads = [5 + 3 * n for n in range(4)]
    with Engine.open(path, base, warn=lambda text: None) as engine:
        alone = [engine.runner.step([Work(Sequence(), ids, "all")]).copy() for ids in texts]
    differ = 0
    with Engine.open(path, replace(base, backend=backend), warn=lambda text: None) as engine:
        device: Any = engine.plan.backend
        device.tier.most_slots = slots
        for many in (2, 4):
            sequences = [Sequence() for _ in range(many)]
            for sequence, ids, head in zip(sequences, texts, heads, strict=False):
                engine.runner.step([Work(sequence, ids[:head], "none")])
            for step in range(12):
                if shrinks and many == 4 and step == 6:
                    assert device.tier.shrink()
                work = [Work(q, texts[n][heads[n] + step :][:1], "last") for n, q in enumerate(sequences)]
                rows = engine.runner.step(work)
                differ += _differ(rows, np.stack([alone[n][heads[n] + step] for n in range(many)]))
            for sequence in sequences:
                engine.plan.pool.release(sequence)
        program: Any = engine.plan.forward.program
        return {"differ": differ, "of": 12 * 6 * int(alone[0].shape[1]), "replays": program.replays}


# ---- speed ----


def time_model(
    path: Path | None, name: str, backend: str, *, graphs: bool, batch: int, slots: int | None, steps: int
) -> Found:
    """`time_steps` of a model that is opened for it, with `slots` experts on the device; RAM has all of them then."""
    options = EngineOptions(context=1024, backend=backend, sequences=max(4, batch))
    if slots is not None:
        options = replace(options, expert_slots=_experts_per_layer(path))
    with Engine.open(path, options, warn=lambda text: None) as engine:
        device: Any = engine.plan.backend
        program: Any = engine.plan.forward.program
        program._batches.captures = graphs
        device.tier.most_slots = slots
        return {"model": name, "graphs": graphs, **time_steps(engine, batch=batch, steps=steps)}


def _experts_per_layer(path: Path | None) -> int:
    config = json.loads(((builtin.folder() if path is None else path) / "config.json").read_text(encoding="utf-8"))
    return int(config.get("n_routed_experts") or config["num_experts"])


def time_steps(engine: Engine, *, batch: int, steps: int) -> Found:
    """Median step time of decoding, tokens per second, time over the floor that the device's memory sets, and the
    kernels' share. `graph_ms`: the whole step's captured graph alone, replayed; `kernel_ms`: time with any kernel at
    work by torch's profiler, which slows kernels that overlap. The share is the graph's where there is one. `top` has
    what kernels wait for each other."""
    import torch

    device: Any = engine.plan.backend
    program: Any = engine.plan.forward.program
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
    with nullcontext({}) if device.tier.all_here else _host_seconds() as shared:
        for number in range(8):
            step(number)
    graph, host = _graph_ms(program, batch), _host_us(program, lambda: step(0))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        started = time.perf_counter()
        for number in range(8):
            step(number)
        torch.cuda.synchronize()
        profiled = time.perf_counter() - started
    for sequence in sequences:
        engine.plan.pool.release(sequence)
    events = profile.key_averages()
    busy = _covered(profile.events())
    best = sorted(events, key=lambda event: -event.self_device_time_total)[:10]
    median = statistics.median(times[steps:])
    nbytes = sum(engine.bytes_per_token().values())
    floor = nbytes / device.measure_rates().memory
    return {
        "batch": batch, "step_ms": round(median * 1e3, 3), "graph_ms": graph, "host_us": host,
        "tokens_per_s": round(batch / median, 1), "kernel_ms": round(busy / 8 * 1e3, 3),
        "kernel_share_profiled": round(busy / profiled, 2),
        "kernel_share": round((busy / 8 if graph is None else graph * 1e-3) / median, 2),
        "shared_ms": {part: round(1e3 * s / 8, 3) for part, s in shared.items()},
        "launches": sum(event.count for event in events) // 8,
        "bytes_per_token": nbytes, "over_byte_floor_of_one_row": round(median / floor, 2), "slots": device.tier.slots,
        "top": [f"{e.key[:40]} {e.self_device_time_total / 8:.0f}us x{e.count // 8}" for e in best],
    }  # fmt: skip


def _covered(events: Any) -> float:
    """Seconds in which at least one of the device's events was at work."""
    spans = sorted(
        (event.time_range.start, event.time_range.end) for event in events if event.device_type.name == "CUDA"
    )
    seconds, until = 0.0, float("-inf")
    for start, end in spans:
        seconds += max(0.0, end - max(start, until)) * 1e-6
        until = max(until, end)
    return seconds


def _host_us(program: Any, step: Callable[[], None]) -> dict[str, float]:
    """Microseconds of a step on the host: `before` the graph is launched, `launch` itself, `behind` it while the device
    computes, `fetch` of the logits, which waits for them, `after` that. Where a step is one graph; else nothing."""
    parts = [part for parts in program._graphs.values() for part in parts if part.captured is not None]
    marks: list[float] = []

    class Timed:
        def __init__(self, graph: Any) -> None:
            self.graph = graph

        def replay(self) -> None:
            marks.append(time.perf_counter())
            self.graph.replay()
            marks.append(time.perf_counter())

    def view(*arguments: Any) -> Any:
        marks.append(time.perf_counter())
        found = type(program).view(program, *arguments)
        marks.append(time.perf_counter())
        return found

    rows = []
    for part in parts:
        part.captured = Timed(part.captured)
    program.view = view
    for _ in range(30):
        marks.clear()
        started = time.perf_counter()
        step()
        if len(marks) >= 4:
            rows.append(np.diff([started, *marks[:2], *marks[-2:], time.perf_counter()]) * 1e6)
    del program.view
    for part in parts:
        part.captured = part.captured.graph
    if not rows:
        return {}
    medians = np.median(rows, axis=0).round(1).tolist()
    return dict(zip(("before", "launch", "behind", "fetch", "after"), medians, strict=True))


def _graph_ms(program: Any, batch: int) -> float | None:
    """Milliseconds of the last captured graphs of so many rows, None where the host computes between them."""
    import torch

    found = [parts for key, parts in program._graphs.items() if key[:2] == (batch, batch)]
    known = [parts for parts in found if all(part.captured is not None for part in parts)]
    if not known or not program._tier.all_here:
        return None
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(20):
        for part in known[-1]:
            part.captured.replay()
    end.record()
    end.synchronize()
    return round(float(start.elapsed_time(end)) / 20, 3)


def check_large(path: Path, backend: str, *, steps: int) -> Found:
    """A model that lies on the device as a whole: its load, its bits beside the CPU's, one row and eight."""
    ids = _ids(8, 200)
    started = time.perf_counter()
    options = EngineOptions(context=1024, backend=backend, sequences=8)
    with Engine.open(path, options, warn=lambda text: None) as engine:
        device: Any = engine.plan.backend
        found: Found = {"model": path.name, "open_s": round(time.perf_counter() - started, 1)}
        rows = engine.runner.step([Work(Sequence(), ids, "all")]).copy()
        found["first_step_s"] = round(time.perf_counter() - started, 1)
        found["all_on_device"] = device.tier.all_here
        found["device_bytes"] = device.vram_used() + device.tier.slots * device.tier.stride
        found["speed"] = [time_steps(engine, batch=batch, steps=steps) for batch in (1, 8)]
    with Engine.open(path, replace(options, backend="cpu"), warn=lambda text: None) as engine:
        wanted = engine.runner.step([Work(Sequence(), ids, "all")]).copy()
    return {**found, "differ": _differ(rows, wanted), "of": int(wanted.size)}


@contextmanager
def _host_seconds() -> Iterator[dict[str, float]]:
    """Seconds that the host spends in the parts of steps of which the device has not all experts. `serve` holds `_wait`
    (for the device), `found` and `_compute`; that holds `begin`, `run`, `pairs`, `_expect`, `__exit__` of a lease and
    its wait for reads. `_again` launches graphs, `turn` moves experts between steps."""
    from picaflor.backends.cuda import exchange, program, promote, tier
    from picaflor.store import lease

    spent: dict[str, float] = {}
    parts: tuple[tuple[Any, str], ...] = (
        (exchange.Exchange, "serve"), (exchange.Exchange, "_wait"), (exchange.Exchange, "_compute"),
        (exchange.Exchange, "_expect"), (exchange.HostExperts, "begin"), (exchange.HostExperts, "run"),
        (exchange.HostExperts, "pairs"), (promote.Promotions, "turn"), (promote.Promotions, "_take"),
        (tier.ExpertTier, "found"), (program.CudaProgram, "_again"), (lease.Lease, "__enter__"),
        (lease.Lease, "__exit__"),
    )  # fmt: skip
    real = [(owner, name, getattr(owner, name)) for owner, name in parts]

    def timed(name: str, call: Any) -> Any:
        def run(*arguments: Any, **words: Any) -> Any:
            started = time.perf_counter()
            try:
                return call(*arguments, **words)
            finally:
                spent[name] = spent.get(name, 0.0) + time.perf_counter() - started

        return run

    for owner, name, call in real:
        setattr(owner, name, timed(name, call))
    try:
        yield spent
    finally:
        for owner, name, call in real:
            setattr(owner, name, call)


def check_tiers(path: Path, backend: str, *, part: float, steps: int) -> Found:
    """A part of the experts on the device, as many in RAM, the rest on disk, beside the CPU with the same RAM."""
    from picaflor.telemetry.report import rows as report_rows

    found: Found = {"model": path.name, "part": part}
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    experts = _experts_per_layer(path)
    layers = config["num_hidden_layers"] - config["first_k_dense_replace"]
    prompt = _ids(16, config["vocab_size"]).tolist()
    tokens = _ids(2 * steps, config["vocab_size"])[::-1].tolist()
    logits = []
    for label, name in ((backend, backend), ("cpu", "cpu"), ("again", backend)):
        slots = int(part * experts)
        options = EngineOptions(context=512, backend=name, expert_slots=slots, direct="on", mapped="off")
        with Engine.open(path, options, warn=lambda text: None) as engine:
            if name != "cpu":
                tier: Any = engine.plan.backend
                tier.tier.most_slots = slots * layers
            logits.append(engine.replay_logits(prompt, tokens[: steps // 4 + 1], exact=True))
            engine.decode_replay(prompt, tokens[:steps])
            with _host_seconds() if name != "cpu" else nullcontext({}) as spent:
                times = engine.decode_replay(prompt, tokens[steps:])
            engine.measure_memory_limit()
            record = engine.record()
        found[label] = {
            "tokens_per_s": round(1 / statistics.median(times), 2),
            "slots_per_layer": record.memory.expert_slots,
            "experts_on_device": record.memory.device_experts,
            "host_ms_per_token": {part: round(1e3 * s / steps, 2) for part, s in spent.items()},
            "report": dict(report_rows(record)),
        }
    differ = sum(_differ(logits[1], other) for other in (logits[0], logits[2]))
    return {**found, "differ": differ, "of": 2 * int(logits[0].size)}


def check_border(path: Path, backend: str, *, part: float) -> list[Found]:
    """Milliseconds of steps of some rows, all experts in RAM and a part of them on the device: the others computed by
    the host, and sent for. Says up to how many rows the host should compute."""
    from picaflor.backends.cuda import exchange, tier

    found = []
    usual = exchange.HOST_ROWS
    for label, most in (("host", 64), ("sent", 0)):
        exchange.HOST_ROWS = tier.HOST_ROWS = most  # type: ignore[misc]
        options = EngineOptions(context=1024, backend=backend, sequences=4, expert_slots=_experts_per_layer(path))
        with Engine.open(path, options, warn=lambda text: None) as engine:
            device: Any = engine.plan.backend
            experts = sum(len(layer) for layer in engine.plan.index.experts.values())
            device.tier.most_slots = int(part * experts)
            ids = _ids(4096, engine.vocabulary)
            for rows in (64, 1, 4, 8, 12, 16, 24, 32, 48, 64):
                times = []
                for number in range(8):
                    sequence = Sequence()
                    started = time.perf_counter()
                    engine.runner.step([Work(sequence, ids[number * rows : (number + 1) * rows])])
                    times.append(time.perf_counter() - started)
                    engine.plan.pool.release(sequence)
                found.append({"by": label, "rows": rows, "ms": round(1e3 * statistics.median(times[2:]), 2)})
    exchange.HOST_ROWS = tier.HOST_ROWS = usual  # type: ignore[misc]
    return found


def check_ahead(path: Path, backend: str, *, part: float, steps: int) -> list[Found]:
    """Tokens per second by how much of the next layer's choices is told early, each twice in turn; three places."""
    from picaflor.backends.cpu import early

    found: list[Found] = []
    usual, experts = early.LIKELY, _experts_per_layer(path)
    prompt, tokens = _ids(16, 200).tolist(), _ids(2 * steps, 200)[::-1].tolist()
    for likely in (0.5, 0.75, 1.0) * 2:
        early.LIKELY = likely  # type: ignore[misc]
        slots = int(part * experts)
        options = EngineOptions(context=512, backend=backend, expert_slots=slots, direct="on", mapped="off")
        with Engine.open(path, options, warn=lambda text: None) as engine:
            device: Any = engine.plan.backend
            device.tier.most_slots = int(part * sum(len(layer) for layer in engine.plan.index.experts.values()))
            engine.decode_replay(prompt, tokens[:steps])
            times = engine.decode_replay(prompt, tokens[steps:])
            phase = engine.record().decode
        found.append({
            "likely": likely, "tokens_per_s": round(1 / statistics.median(times), 2), "loads": phase.loads,
            "ahead": phase.hits_prefetched, "late": phase.prefetch_late, "wasted": phase.prefetch_wasted,
            "GB_per_s": round(phase.read_bytes_per_s / 1e9, 2), "busy": round(phase.read_busy_s / phase.wall_s, 2),
        })  # fmt: skip
    early.LIKELY = usual  # type: ignore[misc]
    return found


# ---- what is small ----


def check_kv_b(backend: str) -> list[Found]:
    """Containers whose attention has each format: the device computes it, with the CPU's bits."""
    found = []
    for name, group in (("int8-row", 64), ("int4-row", 64), ("int4-grouped", 64), ("int4-grouped", 128)):
        policy = Policy(resident=name, group_size=group)
        with tempfile.TemporaryDirectory() as folder:
            generate_glm.generate("glm-nano", Path(folder), seed=1, policy=policy)
            logits = []
            for chosen in ("cpu", backend):
                options = EngineOptions(context=128, backend=chosen, threads=2)
                with Engine.open(Path(folder), options, warn=lambda text: None) as engine:
                    logits.append(np.concatenate(list(engine.forward_logits(_ids(20, 512)))))
                    told = engine.record()
        kernels = {key: count for key, count in told.kernels.items() if ".row" in key and key.endswith(name)}
        line = {"kv_b": name, "group": group, "differ": _differ(*logits), "of": int(logits[0].size)}
        found.append({**line, "kernels": kernels, "fallbacks": dict(told.fallbacks)})
    return found


def check_likelihoods(backend: str) -> list[Found]:
    """Log-likelihoods of 1 and 401 tokens of the built-in model."""
    found = []
    for count in (1, 401):
        losses = []
        for chosen in ("cpu", backend):
            with Engine.open(None, EngineOptions(context=512, backend=chosen), warn=lambda text: None) as engine:
                ids = _ids(count + 1, engine.vocabulary)
                losses.append(window_losses(engine, ids[:-1], ids[1:]))
        line = {"tokens": count, "nats": [float(loss.sum()) for loss in losses]}
        found.append({**line, "differ": int((losses[0] != losses[1]).sum())})
    return found


def check_rows(backend: str) -> list[Found]:
    """Products of 64 rows and the experts of 64 rows against each row alone; names the device."""
    import gpu_products as products
    import torch

    from picaflor.backends.cuda import experts, formats, matmul

    found = []
    x = torch.randn(64, products.HIDDEN, device=products.DEVICE)
    for precision in products.PRECISIONS:
        planes = products.random_planes(np.random.default_rng(1), products.INNER, products.HIDDEN)
        shape = (products.INNER, products.HIDDEN)
        weight = formats.hold("int4-grouped", shape, products.GROUP, planes, products.DEVICE)
        together = torch.empty(64, products.INNER, device=products.DEVICE)
        matmul.matmul(x, weight, together, precision)
        alone = torch.empty_like(together)
        for row in range(64):
            matmul.matmul(x[row : row + 1], weight, alone[row : row + 1], precision)
        found.append({"op": "matmul", "precision": precision, "differ": int((alone != together).sum())})
    table, _ = products.expert_tables()[0]
    ids = torch.stack([torch.randperm(products.EXPERTS) for _ in range(64)]).to(torch.int32).to(products.DEVICE)
    weights = torch.rand(64, products.EXPERTS, device=products.DEVICE)
    together, alone = torch.empty_like(x), torch.empty_like(x)
    experts.expert_ffn(x, ids, weights, table, together, "standard")
    for row in range(64):
        part = slice(row, row + 1)
        experts.expert_ffn(x[part], ids[part], weights[part], table, alone[part], "standard")
    found.append({"op": "expert_ffn", "precision": "standard", "differ": int((alone != together).sum())})
    return [{**line, "device": torch.cuda.get_device_name()} for line in found]


# ---- all of it ----


def main() -> None:
    """Run everything and print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=150)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--containers", type=Path, help="a folder with more tiny containers")
    parser.add_argument("--glm", type=Path)
    parser.add_argument("--large", type=Path, help="a model that fits the device as a whole")
    parser.add_argument("--tiers", type=Path, help="a model on a drive, a quarter of it on the device")
    parser.add_argument("--parts", default="models,cases,speed")
    parser.add_argument("--steps", type=int, default=40)
    words = parser.parse_args()
    parts = words.parts.split(",")
    containers = tiny_containers(words.containers)
    record: dict[str, list[Found]] = {}
    context = multiprocessing.get_context("spawn")
    started = time.monotonic()
    with context.Pool(words.workers) as pool:
        jobs: list[tuple[str, Any]] = []
        if "models" in parts:
            jobs += [("models", pool.apply_async(check_model, (words.backend, *which))) for which in containers]
        if "cases" in parts:
            shares = max(1, words.workers - (len(containers) if "models" in parts else 0) // 2)
            for share in range(shares):
                arguments = (words.backend, share, shares, words.seconds)
                jobs.append(("cases", pool.apply_async(check_cases, arguments)))
        for part, job in jobs:
            record.setdefault(part, []).extend(_result(job.get))
            _save(words.out, record)
    print(f"compared in {time.monotonic() - started:.0f} s", flush=True)
    _tell(record)
    if "speed" in parts or "quarter" in parts:
        models = [(None, "builtin")] + ([(words.glm, "glm-mid")] if words.glm is not None else [])
        for path, name in models:
            quarter = 42 if path is None else 160
            variants = ((True, 1, None), (False, 1, None), (True, 8, None), (True, 1, quarter), (True, 8, quarter))
            for graphs, batch, slots in variants if "speed" in parts else variants[3:]:

                def timed(
                    path: Path | None = path, name: str = name, graphs: bool = graphs, batch: int = batch,
                    slots: int | None = slots,
                ) -> list[Found]:  # fmt: skip
                    made = time_model(
                        path, name, words.backend, graphs=graphs, batch=batch, slots=slots, steps=words.steps
                    )
                    return [made]

                line = _result(timed)
                record.setdefault("speed", []).extend(line)
                print(json.dumps(line[0]), flush=True)
                _save(words.out, record)
    if "step" in parts:
        for path, name in [(None, "builtin")] + ([(words.glm, "glm-mid")] if words.glm is not None else []):
            for batch in (1, 8):

                def stepped(path: Path | None = path, name: str = name, batch: int = batch) -> list[Found]:
                    return [
                        time_model(path, name, words.backend, graphs=True, batch=batch, slots=None, steps=words.steps)
                    ]

                line = _result(stepped)
                record.setdefault("step", []).extend(line)
                print(json.dumps(line[0]), flush=True)
                _save(words.out, record)
    if "small" in parts:
        for key, check in (("kv_b", check_kv_b), ("likelihoods", check_likelihoods), ("rows", check_rows)):
            record[key] = _result(lambda check=check: check(words.backend))  # type: ignore[misc]
            print(json.dumps(record[key]), flush=True)
            _save(words.out, record)
    if "border" in parts:
        record["border"] = _result(lambda: check_border(words.glm, words.backend, part=0.25))
        print(json.dumps(record["border"]), flush=True)
        _save(words.out, record)
    if "ahead" in parts:
        record["ahead"] = _result(lambda: check_ahead(words.tiers, words.backend, part=0.25, steps=words.steps))
        print(json.dumps(record["ahead"]), flush=True)
        _save(words.out, record)
    if words.large is not None:
        line = _result(lambda: [check_large(words.large, words.backend, steps=words.steps)])
        print(json.dumps(line[0]), flush=True)
        record["large"] = line
        _save(words.out, record)
    if words.tiers is not None and "ahead" not in parts:
        line = _result(lambda: [check_tiers(words.tiers, words.backend, part=0.25, steps=words.steps)])
        print(json.dumps(line[0]), flush=True)
        record["tiers"] = line
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
