"""Reads that fail or end early, files cut and copies removed while a model runs, disks that are full.

A fault is one line or nothing; no token ever differs; what comes next works. Must not know how experts are cached.
"""

from __future__ import annotations

import ctypes
import errno
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray
from soak_support import PROMPT, TOKENS, Scenario, World, Wrong, limit_files, soak

from picaflor.cli.run import prompt_ids
from picaflor.errors import ReadFailed
from picaflor.runtime import plan as planning
from picaflor.runtime.engine import Engine, EngineOptions, SamplingOptions
from picaflor.store.reader import Pool, native_pool

SAMPLING = SamplingOptions(max_tokens=TOKENS, temperature=0.7, top_p=0.9, seed=7)
RUN_NBYTES, RUN_PLACE = 2, 3
"""Where a run's bytes and its place in the slot stand among a pool's numbers."""


@dataclass
class FaultyPool:
    """A pool whose finished reads fail as `fault` says; what a failed read leaves in its slot is never the file's."""

    pool: Pool
    fault: Callable[[], str]
    failed: int = 0

    def __post_init__(self) -> None:
        self._slots: dict[int, tuple[int, int]] = {}
        self._outcomes: dict[int, Any] = {}

    def submit(
        self, runs: NDArray[np.int64], bounds: NDArray[np.int64], bases: NDArray[np.uint64], *, demand: bool
    ) -> int:
        """As the pool's, remembering where each job's first run goes."""
        first = self.pool.submit(runs, bounds, bases, demand=demand)
        for job, base in enumerate(bases.tolist()):
            run = runs[bounds[job]]
            self._slots[first + job] = (base + int(run[RUN_PLACE]), int(run[RUN_NBYTES]))
        return first

    def wait_any(self, tickets: NDArray[np.uint64], seconds: float) -> Sequence[Any]:
        """As the pool's, some of them failed."""
        return [self._changed(outcome) for outcome in self.pool.wait_any(tickets, seconds)]

    def _changed(self, outcome: Any) -> Any:
        if outcome.ticket not in self._outcomes:
            kind = self.fault() if outcome.status.name == "OK" else ""
            self._outcomes[outcome.ticket] = self._failure(outcome, kind) if kind else outcome
        return self._outcomes[outcome.ticket]

    def _failure(self, outcome: Any, kind: str) -> Any:
        self.failed += 1
        address, nbytes = self._slots[outcome.ticket]
        ctypes.memset(address, 0xFF, nbytes)
        names = ("ticket", "run", "spares", "spare_run", "spare_error", "seconds")
        kept = {name: getattr(outcome, name) for name in names}
        return SimpleNamespace(
            **kept | {"run": 0}, status=SimpleNamespace(name=kind), error=errno.EIO, found=nbytes // 2, nbytes=0
        )

    def forget(self, ticket: int) -> None:
        """As the pool's."""
        self._outcomes.pop(ticket, None)
        self._slots.pop(ticket, None)
        self.pool.forget(ticket)

    def cancel(self, ticket: int) -> bool:
        """As the pool's."""
        return self.pool.cancel(ticket)

    def promote(self, ticket: int) -> None:
        """As the pool's."""
        self.pool.promote(ticket)

    def busy_seconds(self) -> float:
        """As the pool's."""
        return self.pool.busy_seconds()

    def close(self) -> None:
        """As the pool's."""
        self.pool.close()


@contextmanager
def opened(world: World, draw: random.Random, said: list[str], **options: Any) -> Iterator[Engine]:
    """The world's model with few experts in memory, read in any way."""
    chosen: dict[str, Any] = {
        "expert_slots": draw.choice((1, 2, 5)),
        "direct": draw.choice(("on", "off")),
        "read_engine": draw.choice(("threads", "auto")),
        "prefetch": draw.choice(("on", "off")),
        "policy": draw.choice(("auto", "lru", "heat")),
        "mapped": "off",
    }
    with Engine.open(world.model, EngineOptions(**chosen | options), warn=said.append) as engine:
        yield engine


def text_of(engine: Engine) -> str:
    """The world's text. Raises ReadFailed."""
    return "".join(piece.text for piece in engine.generate(prompt_ids(engine, PROMPT, chat=False), SAMPLING))


def checked(world: World, engine: Engine) -> bool:
    """Whether the text was written, and then it is right; else one line names the file."""
    try:
        found = text_of(engine)
    except ReadFailed as error:
        if str(world.shard) not in str(error) or "\n" in str(error):
            raise Wrong(f"a failed read says {error}") from None
        return False
    world.right(found, "with failing reads")
    return True


def reads(world: World, draw: random.Random) -> None:
    """Reads that fail or come short, at random, and then no more."""
    rate = draw.choice((0.001, 0.01, 0.1, 1.0))
    on = [True]

    def fault() -> str:
        return draw.choice(("ERROR", "SHORT")) if on[0] and draw.random() < rate else ""

    pools: list[FaultyPool] = []

    def pool(*words: Any, **options: Any) -> Pool:
        pools.append(FaultyPool(native_pool(*words, **options), fault))
        return pools[-1]

    with patch.object(planning, "native_pool", pool):
        said: list[str] = []
        try:
            with opened(world, draw, said) as engine:
                wrote = [checked(world, engine) for _ in range(3)]
                on[0] = False
                if not checked(world, engine):
                    raise Wrong("a read failed after the faults were over")
        except ReadFailed as error:  # while experts that stay in memory were read at the start
            if str(world.shard) not in str(error):
                raise Wrong(f"a failed read at the start says {error}") from None
            return
    if rate == 1.0 and any(wrote):
        raise Wrong("text came although no read succeeded")


def cut(world: World, draw: random.Random) -> None:
    """The model's file is cut while it runs, and made whole again."""
    said: list[str] = []
    with opened(world, draw, said, mapped=draw.choice(("on", "off"))) as engine:
        checked(world, engine)
        with world.shard.open("r+b") as file:
            file.truncate(draw.randrange(len(world.bytes)))
        checked(world, engine)
        world.restore()
        if not checked(world, engine):
            raise Wrong("a read failed although the file is whole again")


def replica(world: World, draw: random.Random) -> None:
    """A copy on a second drive is removed or cut while the model runs."""
    folder = world.folder / "copy"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    copy = folder / world.shard.name
    copy.write_bytes(world.bytes)
    said: list[str] = []
    with opened(world, draw, said, mirrors=(folder,)) as engine:
        said.clear()
        if draw.random() < 0.5:
            copy.unlink()
        else:
            with copy.open("r+b") as file:
                file.truncate(draw.randrange(len(world.bytes)))
        for _ in range(2):
            if not checked(world, engine):
                raise Wrong("a read failed although the model's own file is whole")
    if len([line for line in said if str(copy) in line]) > 1:
        raise Wrong(f"a copy that fails is named more than once: {said}")


def full(world: World, draw: random.Random) -> None:
    """No room for the usage history, for routes, for what plan measured; then there is room."""
    shutil.rmtree(world.state, ignore_errors=True)
    routes = world.folder / "routes.bin"
    most = limit_files(draw.choice((0, 10, 100)))
    done = world.run("--expert-slots", "3", before=most).expect(said=1)
    world.right(done.text, "without room for the usage history")
    _names("usage history", done.said)
    done = world.run("--expert-slots", "3", "--usage", "off", "--record-routes", str(routes), before=most).expect(
        said=1
    )
    world.right(done.text, "without room for routes")
    _names(str(routes), done.said)
    done = world.command("plan", str(world.model), "--disk-rate", "1GB", before=most).expect(said=1)
    _names("machine.json", done.said)
    for words in ((), ("--record-routes", str(routes))):
        world.right(world.run("--expert-slots", "3", *words).expect(said=0).text, "with room again")


def full_target(world: World, draw: random.Random) -> None:
    """A conversion that the disk has no more room for, and the same command when it has."""
    out = world.folder / "converted"
    words = ("convert", str(world.model), str(out), *draw.choice((("--relayout",), ())), "--shard-size", "4MB")
    done = world.command(*words, before=limit_files(draw.randrange(3_000_000))).expect(code=1, said=1)
    _names(".converted.partial", done.said)
    if out.exists():
        raise Wrong(f"{out} is there although the disk was full")
    world.command(*words).expect(said=0)
    done = world.command("run", str(out), PROMPT, "-n", str(TOKENS), "--seed", "7", "--json").expect(said=0)
    if "--relayout" in words:
        world.right(done.text, "after a disk that was full")
    shutil.rmtree(out)


def _names(what: str, said: Sequence[str]) -> None:
    if not any(what in line for line in said):
        raise Wrong(f"no line names {what}: {said}")


def tmpfs_allowed() -> bool:
    """Whether this user may mount a small file system of its own."""
    words = ["unshare", "-rm", "mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", "/mnt"]
    try:
        return subprocess.run(words, capture_output=True).returncode == 0
    except OSError:
        return False


def full_drive(world: World, draw: random.Random) -> None:
    """A drive for state that has no byte left."""
    place = world.folder / "drive"
    place.mkdir(exist_ok=True)
    fill = f'mount -t tmpfs -o size=64k tmpfs {place} && (head -c 70000 /dev/zero > {place}/x 2>/dev/null; exec "$@")'
    words = ("run", str(world.model), PROMPT, "-n", str(TOKENS), "--seed", "7", "--json", "--expert-slots", "3")
    before, world.state = world.state, place
    try:
        done = world.command(*words, wrap=("unshare", "-rm", "sh", "-c", fill, "sh")).expect(said=1)
    finally:
        world.state = before
    world.right(done.text, "on a full drive")
    _names("No space left on device", done.said)


SCENARIOS: dict[str, Scenario] = {
    "reads": reads,
    "cut": cut,
    "replica": replica,
    "full": full,
    "full-target": full_target,
    "full-drive": full_drive,
}

if __name__ == "__main__":
    if not tmpfs_allowed():
        del SCENARIOS["full-drive"]
        print("full-drive is left out: this user may not mount a small file system (unshare -rm)", file=sys.stderr)
    sys.exit(soak(SCENARIOS, "Failing reads, files that are cut or removed, disks that are full."))
