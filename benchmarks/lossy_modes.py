"""Measures what the lossy modes do to the built-in model and writes the figures that they are announced with.

python benchmarks/lossy_modes.py TEXT... > src/picaflor/data/lossy-modes.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from picaflor.runtime.engine import Engine, EngineOptions

PROMPT, TOKENS, SLOTS = 64, 128, 4
TOP_P = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
BUDGETS = (0, 1, 2, 3, 4)


def measure(options: EngineOptions, texts: list[Path]) -> dict[str, Any]:
    """Means over texts of equal length."""
    found = []
    with Engine.open(None, options) as engine:
        for text in texts:
            ids = engine.tokenizer.encode(text.read_text(encoding="utf-8")[:20_000])[: PROMPT + TOKENS]
            found.append(engine.measure_damage(ids[:PROMPT], ids[PROMPT:]).record())
    return {name: float(np.mean([entry[name] for entry in found])) for name in ("mean_kl", "same_top", "dropped")}


def main() -> int:
    """The command."""
    texts = [Path(name) for name in sys.argv[1:]]
    base = {"context": 1024, "expert_slots": SLOTS}
    modes = []
    for top_p in TOP_P:
        modes.append(
            {"mode": "router_top_p", "value": top_p, **measure(EngineOptions(router_top_p=top_p, **base), texts)}
        )
    for loads in BUDGETS:
        options = EngineOptions(expert_budget=loads, **base)
        modes.append({"mode": "expert_budget", "value": loads, **measure(options, texts)})
    conditions = f"{len(texts)} texts of {TOKENS} tokens, {SLOTS} experts per layer in memory"
    print(json.dumps({"conditions": conditions, "modes": modes}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
