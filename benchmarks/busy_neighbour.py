"""What another process that spins on one of our processors costs in decode speed.

Decodes the same tokens with and without the neighbour, in turns, and prints the ratio of the medians. Must not know how
anything is computed. A machine that is busy with other things already gives a ratio that is too small: the load
average before the start is part of the result.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from picaflor.runtime.bench import fixed_tokens
from picaflor.runtime.engine import Engine, EngineOptions

SPIN = "import os, sys\nif len(sys.argv) > 1: os.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True: pass"
PROMPT_TOKENS = 8


@contextmanager
def neighbour() -> Iterator[None]:
    """A process that never sleeps, bound to the first processor that we may use where the system can do that."""
    place = [str(min(os.sched_getaffinity(0)))] if hasattr(os, "sched_getaffinity") else []
    with subprocess.Popen([sys.executable, "-c", SPIN, *place]) as other:
        try:
            yield
        finally:
            other.kill()


def measure(model: Path | None, *, threads: int | None, tokens: int, repeats: int) -> dict[str, object]:
    """Seconds per token alone and with the neighbour (medians of all steps), and their ratio."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    alone: list[float] = []
    beside: list[float] = []
    with Engine.open(model, EngineOptions(threads=threads)) as engine:
        ids = fixed_tokens(engine.vocabulary, PROMPT_TOKENS + tokens, 1).tolist()
        prompt, following = ids[:PROMPT_TOKENS], ids[PROMPT_TOKENS:]
        engine.decode_replay(prompt, following)
        for _ in range(repeats):
            alone.append(sum(engine.decode_replay(prompt, following)) / tokens)
            with neighbour():
                beside.append(sum(engine.decode_replay(prompt, following)) / tokens)
        used = engine.threads
        name = engine.name
    return {
        "benchmark": "busy neighbour",
        "model": name,
        "threads": used,
        "processors": os.cpu_count(),
        "tokens": tokens,
        "repeats": repeats,
        "load_before": load,
        "alone_s_per_token": statistics.median(alone),
        "alone_min_max": [min(alone), max(alone)],
        "beside_s_per_token": statistics.median(beside),
        "beside_min_max": [min(beside), max(beside)],
        "ratio": statistics.median(beside) / statistics.median(alone),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", nargs="?", type=Path, help="a model's directory; without it the built-in one")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    words = parser.parse_args()
    result = measure(words.model, threads=words.threads, tokens=words.tokens, repeats=words.repeats)
    if words.json:
        print(json.dumps(result))
        return
    print(
        f"{result['model']}, {result['threads']} threads on {result['processors']} processors: "
        f"{1e3 * float(str(result['alone_s_per_token'])):.2f} ms per token alone, "
        f"{1e3 * float(str(result['beside_s_per_token'])):.2f} ms beside a spinning process, "
        f"{float(str(result['ratio'])):.2f} times (load before: {result['load_before']})"
    )


if __name__ == "__main__":
    main()
