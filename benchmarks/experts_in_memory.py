"""Decoding with a part of the experts in memory: speed, hits, what the disk allows, what `plan` predicted, the logits.

One point per run, added to a record, so that a run stays short; points of one record are of one model. Every point
feeds the same tokens, each replay others, and must give the same logits. Must not know how anything of that is made.

    for slots in 64 32 16 8; do python benchmarks/experts_in_memory.py MODEL --slots $slots --record FILE; done
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from predicted_speed import recorded_routes

from picaflor.errors import PicaflorError
from picaflor.models.config import Notices
from picaflor.runtime.bench import MemoryProbe, fixed_tokens, measure_decode
from picaflor.runtime.engine import Engine, EngineOptions
from picaflor.runtime.forecast import forecast
from picaflor.runtime.machine import StateFile, record_head
from picaflor.runtime.sketch import sketch
from picaflor.store.store import ExpertStore

PROMPT, SEED, CHECKED = 8, 3, 12
MOST_TRIAL_REPLAYS = 8
READS = ("hits_prefetched", "prefetch_late", "prefetch_wasted", "wasted_bytes", "joined", "loads")


def predicted(model: Path, options: EngineOptions) -> tuple[float, float]:
    """Tokens per second and hit rate as `plan` sees them, from routes of other tokens."""
    with tempfile.TemporaryDirectory() as folder:
        routes = recorded_routes(model, options, Path(folder) / "routes")
        state = StateFile(Path(folder) / "machine.json", warn=lambda text: print(text, file=sys.stderr))
        with sketch(model, options, Notices()) as plan:
            speed = forecast(plan, state, routes=routes, fresh=True).speed
    if speed is None:
        raise PicaflorError(f"{model}: the disk could not be measured")
    return speed.tokens_per_s, speed.hit_rate


class Fresh:
    """Other tokens for each replay: a cache that saw them before would hit more."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._seed = SEED

    def decode_replay(self, prompt: Sequence[int], tokens: Sequence[int]) -> list[float]:
        """As many tokens as these, never fed before."""
        self._seed += 1
        ids = [int(t) for t in fixed_tokens(self._engine.vocabulary, len(prompt) + len(tokens), self._seed)]
        return self._engine.decode_replay(ids[: len(prompt)], ids[len(prompt) :])

    def bytes_per_token(self) -> dict[str, int]:
        """The model's."""
        return self._engine.bytes_per_token()


def settled(engine: Engine, fresh: Fresh, ids: Sequence[int]) -> None:
    """Replay until it was tried whether reading ahead pays: half of a trial runs without."""
    store = engine.plan.store
    if not isinstance(store, ExpertStore) or not store.prefetch_in_words.startswith("auto"):
        return
    for _ in range(MOST_TRIAL_REPLAYS):
        if store.prefetch.gain is not None:
            return
        fresh.decode_replay(ids[:PROMPT], ids[PROMPT:])


def point(model: Path, options: EngineOptions, *, tokens: int, repeats: int) -> dict[str, Any]:
    """One row of the record."""
    expected, expected_hits = predicted(model, options)
    with Engine.open(model, options) as engine:
        ids = [int(token) for token in fixed_tokens(engine.vocabulary, PROMPT + tokens, SEED)]
        logits = engine.replay_logits(ids[:PROMPT], ids[PROMPT : PROMPT + CHECKED], exact=True)
        fresh = Fresh(engine)
        settled(engine, fresh, ids)
        bench = measure_decode(
            fresh,
            prompt=ids[:PROMPT],
            tokens=ids[PROMPT:],
            repeats=repeats,
            read_rate=MemoryProbe(engine.weight_memory(), isa=engine.isa, threads=engine.threads),
            disk=engine.disk_limit(),
        )
        run = engine.record().to_json()
    decode, found = run["decode"], bench.record()
    service, busy = decode["read_service_s"], decode["read_busy_s"]
    return {
        "slots": options.expert_slots,
        "experts_in_memory": run["memory"]["resident_experts"] / run["memory"]["all_experts"],
        "tokens_per_s": bench.tokens_per_s,
        "tokens_per_s_each": list(bench.rates),
        "hit_rate": decode["hit_rate"],
        "disk_bytes_per_token": found.get("disk_bytes_per_token", 0.0),
        "disk_bytes_per_s": found.get("disk_bytes_per_s"),
        "of_disk": bench.of_disk,
        "of_memory_floor": bench.of_floor,
        "wait_by_service": decode["read_wait_s"] / service if service else None,
        "wait_by_busy": decode["read_wait_s"] / busy if busy else None,
        "physical_of_logical": bench.physical_of_logical,
        "prefetch": run["prefetch"],
        **{name: decode[name] for name in READS},
        "predicted_tokens_per_s": expected,
        "predicted_hit_rate": expected_hits,
        "predicted_by_measured": expected / bench.tokens_per_s,
        "logits_sha256": hashlib.sha256(logits.tobytes()).hexdigest(),
    }


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="Decoding with a part of the experts in memory.")
    parser.add_argument("model", type=Path)
    parser.add_argument("--slots", type=int, required=True)
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prefetch", default="auto")
    parser.add_argument("--note", default="")
    words = parser.parse_args()
    options = EngineOptions(
        threads=words.threads, direct="on", context=1024, expert_slots=words.slots, prefetch=words.prefetch
    )
    row = point(words.model, options, tokens=words.tokens, repeats=words.repeats)
    record: dict[str, Any] = {
        **record_head("experts in memory", note=words.note),
        "model": words.model.name,
        "threads": words.threads,
        "tokens": words.tokens,
        "repeats": words.repeats,
        "rows": [],
    }
    if words.record.exists():
        record = json.loads(words.record.read_text())
    same = {other["logits_sha256"] for other in record["rows"]} | {row["logits_sha256"]}
    if record["model"] != words.model.name or len(same) > 1:
        raise PicaflorError(f"{words.record}: another model, or other logits: {', '.join(sorted(same))}")
    record["rows"].append(row)
    words.record.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(row))
    return 0


if __name__ == "__main__":
    sys.exit(main())
