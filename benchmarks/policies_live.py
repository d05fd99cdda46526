"""Cache policies live: hit rates of the real store while a model reads texts, beside Belady's optimum on its routes.

Each text is fed token by token, in pieces, to one engine per policy and number of slots; nothing is read ahead. With
`--time` also what a policy costs: replays of the same tokens by all policies in turns, experts in the page cache.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from picaflor.errors import PicaflorError
from picaflor.runtime import builtin
from picaflor.runtime.engine import Engine, EngineOptions
from picaflor.runtime.machine import record_head
from picaflor.store.replay import BELADY, replay
from picaflor.store.routes import Routes, RoutesWriter
from picaflor.store.store import WORKING_SLOTS, ExpertStore

PROMPT, PIECE, CHARACTERS = 8, 1000, 6000
TIMED_PIECE = 250
"""Shorter where times are compared, so that what disturbs the machine meets all policies alike."""


def opened(slots: int, policy: str) -> Engine:
    """The built-in model with these slots per layer, experts through the page cache."""
    options = EngineOptions(threads=2, context=4096, expert_slots=slots, prefetch="off", direct="off", policy=policy)
    return Engine.open(builtin.folder(), options)


def store_of(engine: Engine) -> ExpertStore:
    """Its store. Raises PicaflorError where it has none."""
    if not isinstance(engine.plan.store, ExpertStore):
        raise PicaflorError("the model has no experts that are read into slots")
    return engine.plan.store


def pieces_of(paths: Sequence[Path], tokens: int, length: int) -> list[list[int]]:
    """The texts as tokens, cut into pieces."""
    with opened(6, "lru") as engine:
        found: list[int] = []
        for path in paths:
            text = path.read_text(encoding="utf-8")
            for first in range(0, len(text), CHARACTERS):
                found += engine.tokenizer.encode(text[first : first + CHARACTERS])
    if len(found) < tokens:
        raise PicaflorError(f"the texts have {len(found)} tokens; --tokens {tokens} are needed")
    return [found[first : first + length] for first in range(0, tokens, length)]


def fed(engine: Engine, piece: Sequence[int]) -> float:
    """Seconds of its median step."""
    return statistics.median(engine.decode_replay(piece[:PROMPT], piece[PROMPT:]))


def live(pieces: Sequence[Sequence[int]], slots: int) -> list[dict[str, Any]]:
    """Rows of one number of slots."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "routes"
        for policy in ("lru", "auto"):
            with opened(slots, policy) as engine:
                store = store_of(engine)
                with RoutesWriter(path, engine.name, engine.record().experts_per_token, store.files.routed()) as writer:
                    store.recorder = writer
                    for piece in pieces:
                        fed(engine, piece)
                    store.recorder = None
                total = store.counters.total()
                rows.append({"slots": slots, "policy": policy, "hit_rate": total.hits / total.asked})
                rows[-1]["in_force_at_the_end"] = store.policy_in_force
            path.rename(path.with_suffix(f".{policy}"))
        routes = Routes.read(path.with_suffix(".lru"))
        same = routes.ids.tolist() == Routes.read(path.with_suffix(".auto")).ids.tolist()
        played = replay(routes, slots=slots, policy=BELADY, working_slots=WORKING_SLOTS)
    lru, auto = (row["hit_rate"] for row in rows)
    rows[1]["gap_closed"] = (auto - lru) / (played.hit_rate - lru)
    rows.append({"slots": slots, "policy": BELADY, "hit_rate": played.hit_rate, "same_routes": same})
    return rows


def cost(pieces: Sequence[Sequence[int]], slots: int, policies: Sequence[str]) -> list[dict[str, Any]]:
    """Milliseconds per token by policy, and the median over pieces of the ratio to the first one's. A piece has the
    time of its median token: half of the tokens may be disturbed."""
    times: dict[str, list[float]] = {policy: [] for policy in policies}
    with opened(slots, policies[0]) as engine:
        fed(engine, pieces[0])  # the file into the page cache, the processor out of its rest
    with ExitStack() as stack:
        engines = {policy: stack.enter_context(opened(slots, policy)) for policy in policies}
        for number, piece in enumerate(pieces):
            for policy in policies if number % 2 else policies[::-1]:
                times[policy].append(fed(engines[policy], piece))
        hits = {policy: store_of(engine).counters.total() for policy, engine in engines.items()}
    base, early = times[policies[0]], 1000 // TIMED_PIECE
    return [
        {
            "slots": slots,
            "policy": policy,
            "ms_per_token": 1e3 * statistics.median(found),
            "time_by_first": statistics.median(a / b for a, b in zip(found, base, strict=True)),
            "time_by_first_in_first_1000_tokens": statistics.median(
                a / b for a, b in zip(found[:early], base[:early], strict=True)
            ),
            "time_by_first_each": [a / b for a, b in zip(found, base, strict=True)],
            "hit_rate": hits[policy].hits / hits[policy].asked,
        }
        for policy, found in times.items()
    ]


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="Cache policies live, on the built-in model.")
    parser.add_argument("texts", type=Path, nargs="+")
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--slots", type=int, nargs="+", default=[3, 6, 12])
    parser.add_argument("--time", action="store_true", help="measure what policies cost instead")
    parser.add_argument("--note", default="")
    words = parser.parse_args()
    pieces = pieces_of(words.texts, words.tokens, TIMED_PIECE if words.time else PIECE)
    rows: list[dict[str, Any]] = []
    for slots in words.slots:
        rows += cost(pieces, slots, ("lru", "forecast", "auto")) if words.time else live(pieces, slots)
    record = {
        **record_head("cost of policies" if words.time else "policies live", note=words.note),
        "model": "built-in",
        "tokens": words.tokens,
        "rows": rows,
    }
    print(json.dumps(record, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
