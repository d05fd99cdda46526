"""What `plan` predicts beside what `bench decode` measures, with several parts of the experts in memory.

For each number of slots: first the prediction (its trials measured then and there, its routes recorded from other
tokens), then the measurement in the same process. Must not know how either is made.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from picaflor.errors import PicaflorError
from picaflor.models.config import Notices
from picaflor.runtime.bench import fixed_tokens
from picaflor.runtime.engine import Engine, EngineOptions
from picaflor.runtime.forecast import forecast
from picaflor.runtime.machine import StateFile, record_head
from picaflor.runtime.sketch import sketch
from picaflor.store.routes import RoutedLayer, Routes, RoutesWriter
from picaflor.telemetry.report import as_json

PROMPT = 8
ROUTE_TOKENS = 384
ROUTE_SEED = 1
FIRST_SEED = 2


def recorded_routes(model: Path, options: EngineOptions, path: Path) -> Routes:
    """Routes of tokens that are not those of the measurement; one expert per layer is not in memory, since layers that
    are there as a whole record nothing."""
    with sketch(model, options, Notices()) as plan:
        slots = min(block.router.experts for block in plan.moe) - 1
    with Engine.open(model, replace(options, expert_slots=slots, direct="off")) as engine:
        store = engine.plan.store
        if store is None:
            raise PicaflorError(f"{model}: no experts")
        ids = [int(token) for token in fixed_tokens(engine.vocabulary, PROMPT + ROUTE_TOKENS, ROUTE_SEED)]
        top_k = engine.record().experts_per_token
        layers = tuple(
            RoutedLayer(layer, tuple(expert.nbytes for expert in engine.plan.index.experts[layer]))
            for layer in store.files.layers
        )
        with RoutesWriter(path, engine.name, top_k, layers) as writer:
            store.recorder = writer
            engine.decode_replay(ids[:PROMPT], ids[PROMPT:])
            store.recorder = None
    return Routes.read(path)


def compare(
    model: Path, options: EngineOptions, routes: Routes, state: StateFile, *, tokens: int, repeats: int
) -> dict[str, Any]:
    """One row: predicted, then measured."""
    with sketch(model, options, Notices()) as plan:
        found = forecast(plan, state, routes=routes, fresh=True)
        uniform = forecast(plan, state)
    if found.speed is None or uniform.speed is None:
        raise PicaflorError(f"{model}: the disk could not be measured")
    with Engine.open(model, options) as engine:
        rates, reports = [], []
        for number in range(1 + repeats):
            seed = FIRST_SEED + number  # tokens that were never fed before: a cache that saw them would hit more
            ids = [int(token) for token in fixed_tokens(engine.vocabulary, PROMPT + tokens, seed)]
            steps = engine.decode_replay(ids[:PROMPT], ids[PROMPT:])
            if not number:
                continue  # fills the cache
            rates.append(len(steps) / sum(steps))
            reports.append(as_json(engine.record()))
    measured = statistics.median(rates)
    decode = reports[-1]["decode"]
    return {
        "slots": options.expert_slots,
        "predicted_tokens_per_s": found.speed.tokens_per_s,
        "measured_tokens_per_s": measured,
        "measured_each": rates,
        "predicted_by_measured": found.speed.tokens_per_s / measured,
        "predicted_with_uniform_routes": uniform.speed.tokens_per_s,
        "predicted_hit_rate": found.speed.hit_rate,
        "measured_hit_rate": decode["hit_rate"],
        "predicted_read_bytes_per_token": found.speed.read_bytes,
        "measured_read_bytes_per_token": decode["read_bytes_per_token"],
        "measured_read_bytes_per_s": decode["read_bytes_per_s"],
        "measured_cold_read_bytes": decode["cold_read_bytes"],
        "measured_read_bytes": decode["read_bytes"],
        "predicted_seconds": dict(found.speed.seconds),
        "measured_shares": decode["shares"],
        "trial_step_s": found.compute.step_s,
        "trial_experts_s": found.compute.experts_s,
        "trial_memory_bytes_per_s": found.compute.memory_bytes_per_s,
        "trial_read_extra_s": list(found.reads.extra_s) if found.reads else None,
        "trial_read_bytes_per_s": found.reads.bytes_per_s if found.reads else None,
        "verdict": reports[-1]["verdict_text"],
    }


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="Predicted beside measured decoding speed.")
    parser.add_argument("model", type=Path)
    parser.add_argument("--slots", type=int, nargs="+", default=[64, 32, 16, 8])
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--direct", default="on", help="on: experts come from the disk, not from the page cache")
    parser.add_argument("--note", default="")
    words = parser.parse_args()
    base = EngineOptions(threads=words.threads, direct=words.direct, context=1024)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        routes = recorded_routes(words.model, base, Path(folder) / "routes")
        state = StateFile(Path(folder) / "machine.json", warn=lambda text: print(text, file=sys.stderr))
        for slots in words.slots:
            options = replace(base, expert_slots=slots)
            row = compare(words.model, options, routes, state, tokens=words.tokens, repeats=words.repeats)
            rows.append(row)
            print(
                f"{slots} slots: predicted {row['predicted_tokens_per_s']:.2f}, measured "
                f"{row['measured_tokens_per_s']:.2f} tok/s ({row['predicted_by_measured']:.2f}); hit rate "
                f"{row['predicted_hit_rate']:.3f} and {row['measured_hit_rate']:.3f}",
                file=sys.stderr,
            )
    record = {
        **record_head("predicted speed", note=words.note),
        "model": words.model.name,
        "direct": words.direct,
        "rows": rows,
    }
    print(json.dumps(record, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
