"""kill -9 at any moment: of a run, a conversion, a relayout, and of whoever writes a file of state.

What is there afterwards is whole, the same command works again, and its result is the one without a kill.
Must not know how files are written.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
from pathlib import Path

from soak_support import PROMPT, WRITE, Scenario, World, Wrong, soak

from picaflor.runtime.machine import StateFile
from picaflor.store.routes import Routes

MOST_KILLS = 8
STATE_WRITER = """
import sys
from pathlib import Path
from picaflor.runtime.machine import StateFile
file = StateFile(Path(sys.argv[1]), warn=print)
for number in range(10**9):
    file.put("entry", {"number": number, "copies": [number] * 4000})
"""


def run(world: World, draw: random.Random) -> None:
    """A run that keeps a usage history and records its routes."""
    routes = world.folder / "routes.bin"
    words = ("--expert-slots", str(draw.choice((2, 4, 12))), "--record-routes", str(routes))
    world.killed("run", str(world.model), PROMPT, *WRITE, *words, after_s=draw.uniform(0.3, 1.1) * world.run_s)
    world.right(world.run("--expert-slots", "4").expect(said=0).text, "after a kill")
    if routes.exists() and routes.stat().st_size:
        found = Routes.read(routes)
        if any(not ids for _, ids in found):
            raise Wrong(f"{routes}: a request without experts")


def state(world: World, draw: random.Random) -> None:
    """A file of state that is replaced again and again."""
    path = world.folder / "state.json"
    path.unlink(missing_ok=True)
    world.killed(str(path), after_s=draw.uniform(0.2, 0.8), code=STATE_WRITER)
    said: list[str] = []
    entry = StateFile(path, warn=said.append).get("entry")
    if said or (path.exists() and (entry is None or set(entry["copies"]) != {entry["number"]})):
        raise Wrong(f"state after a kill: {said or json.dumps(entry)[:80]}")
    if not StateFile(path, warn=said.append).put("next", {"number": 1}):
        raise Wrong(f"state cannot be written after a kill: {said}")
    for left in path.parent.glob(f".{path.name}.*.partial"):
        left.unlink()


def conversion(world: World, draw: random.Random) -> None:
    """A conversion or relayout, killed and started again until it is through."""
    options = draw.choice((("--relayout",), ("--format", "int8-row"), ("--group-size", "32")))
    words = ("convert", str(world.model), "OUT", *options, "--shard-size", "3MB")
    wanted = world.folder / f"wanted{''.join(options)}"
    if not wanted.exists():
        world.command(*(str(wanted) if word == "OUT" else word for word in words)).expect(said=0)
    out = world.folder / "out"
    words = tuple(str(out) if word == "OUT" else word for word in words)
    kills = 0
    while kills < MOST_KILLS and world.killed(*words, after_s=draw.uniform(0.3, 1.5)):
        kills += 1
        if out.exists() and _contents(out) != _contents(wanted):
            raise Wrong(f"{' '.join(words)}: there after a kill, and not whole")
        if out.exists():
            break
    if not out.exists():
        world.command(*words).expect(said=0)
    if _contents(out) != _contents(wanted):
        raise Wrong(f"{' '.join(words)}: other bytes after {kills} kills")
    shutil.rmtree(out)


def _contents(folder: Path) -> dict[str, bytes]:
    """Files by name; what a conversion needs to go on is no part of them."""
    return {
        path.name: path.read_bytes()
        for path in sorted(folder.iterdir())
        if path.name not in ("convert-state.json", "convert-lock")
    }


SCENARIOS: dict[str, Scenario] = {"run": run, "state": state, "conversion": conversion}

if __name__ == "__main__":
    sys.exit(soak(SCENARIOS, "Kill runs, conversions and writers of state at any moment."))
