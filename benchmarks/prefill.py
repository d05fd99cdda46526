"""A long prompt with a part of the experts in memory: bytes read beside those of the distinct missing experts.

Their rate stands beside what the drive gives for reads in order, measured before and after in the same process.

The slots are full of other tokens' experts when the prompt begins. Must not know how a prompt is read.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from picaflor.backends.api import I32
from picaflor.errors import PicaflorError
from picaflor.runtime.bench import fixed_tokens
from picaflor.runtime.diskbench import DiskBench, DiskFile, Shape
from picaflor.runtime.engine import Engine, EngineOptions
from picaflor.runtime.machine import record_head
from picaflor.store.store import ExpertStore
from picaflor.store.types import ExpertKey
from picaflor.telemetry.process import physical_read_bytes

WARM_TOKENS, PROMPT_SEED = 24, 21
SEQUENTIAL_BYTES = 512 << 20


class Asked:
    """Takes a recorder's place: which experts each layer was asked for."""

    def __init__(self) -> None:
        self.experts: dict[int, set[int]] = {}
        self.requests: dict[int, int] = {}

    def add(self, layer: int, experts: Sequence[int]) -> None:
        """One request."""
        self.experts.setdefault(layer, set()).update(experts)
        self.requests[layer] = self.requests.get(layer, 0) + 1


def sequential_rate(store: ExpertStore, depth: int) -> float:
    """Bytes per second of reads in order, past the page cache, of a shard that holds experts."""
    shard = store.files.container.shards[store.files.shards()[0]]
    bench = DiskBench(DiskFile(shard.path), read_bytes=1 << 20, total_bytes=SEQUENTIAL_BYTES)
    try:
        shape = Shape("sequential", bool(bench.block), depth, "threads")
        return next(bench.measure([shape], repeats=1, progress=lambda done, total: None)).rates[0].bytes_per_s
    finally:
        bench.close()


def missing_bytes(store: ExpertStore, asked: Asked, resident: dict[int, set[int]]) -> tuple[int, int]:
    """(experts, bytes) of the distinct experts that were asked for and not in memory at the start."""
    keys = [
        ExpertKey(layer, expert) for layer, experts in asked.experts.items() for expert in experts - resident[layer]
    ]
    return len(keys), sum(store.files.reads(key).read_nbytes for key in keys)


def row(engine: Engine, prompt: I32, depth: int) -> dict[str, Any]:
    """One prompt, with the drive measured before and after."""
    store = engine.plan.store
    if not isinstance(store, ExpertStore):
        raise PicaflorError("the model has no experts that are read into slots")
    warm = [int(token) for token in fixed_tokens(engine.vocabulary, 8 + WARM_TOKENS, PROMPT_SEED + 1)]
    engine.decode_replay(warm[:8], warm[8:])
    drive = [sequential_rate(store, depth)]
    resident = {layer: set(store.resident(layer)) for layer in store.files.layers}
    before, busy, physical = store.counters.total(), store.busy_s(), physical_read_bytes()
    asked = Asked()
    store.recorder = asked  # type: ignore[assignment]
    started = time.perf_counter()
    sequence = engine.new_sequence()
    engine.runner.prefill(sequence, prompt)
    seconds = time.perf_counter() - started
    engine.plan.pool.release(sequence)
    store.recorder = None
    after, busy = store.counters.total(), store.busy_s() - busy
    fetched = physical_read_bytes()
    drive.append(sequential_rate(store, depth))
    experts, nbytes = missing_bytes(store, asked, resident)
    read = after.read_bytes - before.read_bytes
    rate = read / busy if busy else 0.0
    return {
        "missing_experts": experts,
        "missing_bytes": nbytes,
        "read_bytes": read,
        "read_by_missing": read / nbytes if nbytes else None,
        "physical_of_logical": (fetched - physical) / read if read and None not in (fetched, physical) else None,
        "chunks": max(asked.requests.values(), default=0),
        "seconds": seconds,
        "tokens_per_s": len(prompt) / seconds,
        "wait_s": after.wait_s - before.wait_s,
        "busy_s": busy,
        "bytes_per_s_while_reading": rate,
        "sequential_bytes_per_s": drive,
        "of_sequential": rate / statistics.mean(drive),
    }


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="A long prompt with a part of the experts in memory.")
    parser.add_argument("model", type=Path)
    parser.add_argument("--slots", type=int, required=True)
    parser.add_argument("--prompt", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--note", default="")
    words = parser.parse_args()
    options = EngineOptions(
        threads=words.threads, direct="on", context=max(2048, words.prompt + 64), expert_slots=words.slots
    )
    with Engine.open(words.model, options) as engine:
        rows = [
            row(
                engine,
                fixed_tokens(engine.vocabulary, words.prompt, PROMPT_SEED + 2 * number),
                engine.plan.read_threads,
            )
            for number in range(words.repeats)
        ]
        chunk = engine.plan.max_rows
    record = {
        **record_head("prefill", note=words.note),
        "model": words.model.name,
        "threads": words.threads,
        "slots": words.slots,
        "prompt_tokens": words.prompt,
        "chunk": chunk,
        "rows": rows,
    }
    print(json.dumps(record, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
