"""Reading ahead on a drive that others use too: steps with `--prefetch auto` beside steps without it, in turns.

Processes of their own read another folder's files, past the page cache, as fast as the drive lets them. Steps are
compared at equal need from the disk, as medians over turns. Must not know how it is decided whether reading ahead pays.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from picaflor.errors import PicaflorError
from picaflor.runtime.bench import fixed_tokens
from picaflor.runtime.engine import Engine, EngineOptions
from picaflor.runtime.machine import record_head
from picaflor.store.ahead import Switch
from picaflor.store.store import ExpertStore

PROMPT, TRIAL_STEPS = 8, 136
PIECE, THREADS = 1 << 20, 8
TURN = ("off", "auto", "auto", "off")


def read_for_ever(folder: Path) -> None:
    """What a reader process does: random pieces of a folder's shards, several at once, past the page cache."""
    import mmap

    paths = sorted(folder.glob("*.safetensors"))

    def reads(seed: int) -> None:
        draws, memory = random.Random(seed), mmap.mmap(-1, PIECE)
        handles = [os.open(path, os.O_RDONLY | os.O_DIRECT) for path in paths]
        pieces = [os.fstat(handle).st_size // PIECE for handle in handles]
        while True:
            which = draws.randrange(len(handles))
            os.preadv(handles[which], [memory], draws.randrange(max(pieces[which], 1)) * PIECE)

    for seed in range(THREADS):
        threading.Thread(target=reads, args=(seed,), daemon=True).start()
    sys.stdin.read()  # until the other end is closed


@contextmanager
def readers(count: int, folder: Path) -> Iterator[None]:
    """So many reader processes for as long as the context lasts."""
    words = [sys.executable, __file__, str(folder), "--reader"]
    running = [subprocess.Popen(words, stdin=subprocess.PIPE) for _ in range(count)]
    try:
        yield
    finally:
        for process in running:
            assert process.stdin is not None
            process.stdin.close()
            process.wait()


def compare(engine: Engine, store: ExpertStore, *, tokens: int, turns: int) -> dict[str, Any]:
    """Turns of replays without and with `auto`, after its first trial."""
    switches = {"auto": Switch("auto"), "off": Switch("off")}
    found: dict[str, list[tuple[int, float, int]]] = {"auto": [], "off": []}
    seed = 100

    def replay(name: str, count: int) -> tuple[float, int]:
        nonlocal seed
        seed += 1
        store.prefetch = switches[name]
        ids = [int(token) for token in fixed_tokens(engine.vocabulary, PROMPT + count, seed)]
        before = store.counters.total()
        steps = engine.decode_replay(ids[:PROMPT], ids[PROMPT:])
        after = store.counters.total()
        needed = sum(getattr(after, kind) - getattr(before, kind) for kind in ("prefetched", "joined", "loaded"))
        return sum(steps), needed

    while switches["auto"].gain is None:
        replay("auto", TRIAL_STEPS)
    for turn in range(turns):
        for name in TURN:
            seconds, needed = replay(name, tokens)
            found[name].append((turn, seconds, needed))
    usual = statistics.mean(needed for rows in found.values() for _, _, needed in rows)
    each = np.polyfit(
        [n for rows in found.values() for *_, n in rows], [s for rows in found.values() for _, s, _ in rows], 1
    )
    slope = max(float(each[0]), 0.0)
    ratios = []
    for turn in range(turns):
        times = {
            name: sum(seconds - slope * (needed - usual) for at, seconds, needed in rows if at == turn)
            for name, rows in found.items()
        }
        ratios.append(times["auto"] / times["off"])
    return {
        "auto": str(switches["auto"]),
        "tokens_per_s": {name: len(rows) * tokens / sum(s for _, s, _ in rows) for name, rows in found.items()},
        "time_of_auto_by_off": statistics.median(ratios),
        "time_of_auto_by_off_each": ratios,
    }


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="Reading ahead on a drive that others use too.")
    parser.add_argument("model", type=Path)
    parser.add_argument("--reader", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--read", type=Path, help="folder whose files the other processes read; default: the model's")
    parser.add_argument("--readers", type=int, nargs="+", default=[0, 3])
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--note", default="")
    words = parser.parse_args()
    if words.reader:
        read_for_ever(words.model)
        return 0
    rows = []
    options = EngineOptions(threads=words.threads, direct="on", context=1024, expert_slots=words.slots)
    for count in words.readers:
        with readers(count, words.read or words.model), Engine.open(words.model, options) as engine:
            store = engine.plan.store
            if not isinstance(store, ExpertStore):
                raise PicaflorError("the model has no experts that are read into slots")
            rows.append({"readers": count, **compare(engine, store, tokens=words.tokens, turns=words.turns)})
    record = {
        **record_head("prefetch on a saturated drive", note=words.note),
        "model": words.model.name,
        "threads": words.threads,
        "slots": words.slots,
        "tokens": words.tokens,
        "rows": rows,
    }
    print(json.dumps(record, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
