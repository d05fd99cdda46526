"""Time from starting a process to its first token, with the model's files in the page cache and without.

Each run is a process of its own. Before a cold one the system is asked to drop the pages of the model's files. The
prompt is fixed tokens, so models without a tokenizer are measured too. Must not know how a model is loaded.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from picaflor.runtime import builtin
from picaflor.runtime.machine import record_head

PROMPT = 16


def drop_pages(model: Path) -> None:
    """Ask the system to forget the pages of a model's files."""
    for path in model.iterdir():
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


def child(model: Path, started: float, slots: int | None) -> None:
    """Load, read the prompt, choose a token; print what took how long, in seconds since `started`."""
    from picaflor.runtime.bench import fixed_tokens
    from picaflor.runtime.engine import Engine, EngineOptions
    from picaflor.telemetry.process import physical_read_bytes

    with Engine.open(model, EngineOptions(expert_slots=slots)) as engine:
        loaded = time.monotonic() - started
        logits = engine.runner.prefill(engine.new_sequence(), fixed_tokens(engine.vocabulary, PROMPT, 1))
        int(logits[0].argmax())
        first = time.monotonic() - started
    print(json.dumps({"loaded_s": loaded, "first_token_s": first, "storage_bytes": physical_read_bytes()}))


def timed(model: Path, slots: int | None, *, cold: bool) -> dict[str, Any]:
    """One process."""
    if cold:
        drop_pages(model)
    words = [sys.executable, __file__, str(model), "--child", str(time.monotonic())]
    words += ["--slots", str(slots)] if slots is not None else []
    found: dict[str, Any] = json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
    return found


def row(model: Path, slots: int | None, repeats: int) -> dict[str, Any]:
    """Cold and warm in turns."""
    runs: dict[str, list[dict[str, Any]]] = {"cold": [], "warm": []}
    timed(model, slots, cold=False)
    for _ in range(repeats):
        for name in runs:
            runs[name].append(timed(model, slots, cold=name == "cold"))
    return {
        "model": "built-in" if model == builtin.folder() else model.name,
        "slots": slots,
        **{
            f"{name}_{key}": statistics.median(run[key] for run in found)
            for name, found in runs.items()
            for key in ("loaded_s", "first_token_s", "storage_bytes")
        },
        "each": {name: [run["first_token_s"] for run in found] for name, found in runs.items()},
    }


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="Time to the first token, cold and warm.")
    parser.add_argument("model", type=Path, nargs="?", help="left out: the built-in one")
    parser.add_argument("--slots", type=int)
    parser.add_argument("--more-slots", type=int, nargs="*", default=[], help="further rows with these many slots")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--note", default="")
    parser.add_argument("--child", type=float, help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.child is not None:
        child(words.model, words.child, words.slots)
        return 0
    rows = [row(builtin.folder(), None, words.repeats)]
    if words.model is not None:
        rows += [row(words.model, slots, words.repeats) for slots in (words.slots, *words.more_slots)]
    record = {
        **record_head("first token", note=words.note),
        "prompt_tokens": PROMPT,
        "rows": rows,
    }
    print(json.dumps(record, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
