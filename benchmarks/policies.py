"""Cache policies on recorded routes: hit rate, share of the gap from LRU to Belady's optimum, microseconds per request.

Must not know models. Takes a .npz of uint8 `[token, layer, expert]` per domain: first halves are the history, second
halves in sequence the test. Prints a JSON record.

    python benchmarks/policies.py ROUTES.npz --experts 24 --slots 3 6 12
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from picaflor.store.policy.choose import NAMES
from picaflor.store.replay import BELADY, replay
from picaflor.store.routes import Routes


def main() -> None:
    """Replay every policy at every number of slots."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("routes", type=Path)
    parser.add_argument("--experts", type=int, required=True)
    parser.add_argument("--slots", type=int, nargs="+", required=True)
    arguments = parser.parse_args()
    with np.load(arguments.routes) as file:
        parts = [file[name] for name in file.files]
    halves = [(part[: len(part) // 2], part[len(part) // 2 :]) for part in parts]
    first, second = (
        Routes.from_tokens(np.concatenate(half), experts=arguments.experts) for half in zip(*halves, strict=True)
    )
    history = first.counts()
    rows: list[dict[str, Any]] = []
    for one_by_one in (True, False):
        for slots in arguments.slots:
            found: dict[str, float] = {}
            for name in ("lru", BELADY, *(name for name in NAMES if name != "lru")):
                start = time.perf_counter()
                played = replay(
                    second, slots=slots, policy=name, history=history, working_slots=None, one_by_one=one_by_one
                )
                seconds = time.perf_counter() - start
                found[name] = played.hit_rate
                rows.append(
                    {
                        "one_by_one": one_by_one,
                        "slots": slots,
                        "policy": name,
                        "hit_rate": played.hit_rate,
                        "gap_closed": (played.hit_rate - found["lru"]) / max(found.get(BELADY, 2) - found["lru"], 1e-9),
                        "us_per_request": 1e6 * seconds / len(second),
                        "in_force": {key: count / len(second) for key, count in played.in_force.items()},
                    }
                )
    print(json.dumps({"kind": "policies", "version": 1, "requests": len(second), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
