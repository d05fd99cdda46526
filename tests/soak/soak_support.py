"""What the soaks share: a model to be harmed, commands in processes of their own, and what a command may say.

Must not know how anything is computed: it compares texts, bytes and lines.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from picaflor.runtime import builtin

PROMPT, TOKENS = "And the Lord said unto", 24
WRITE = ("-n", str(TOKENS), "--seed", "7", "--json")
DEMO = "demo model, 27 M parameters"
TIMEOUT_S = 300.0


class Wrong(Exception):
    """What must never happen, with what was found."""


@dataclass(frozen=True)
class Done:
    """A command that ended. `said`: its lines on stderr."""

    words: tuple[str, ...]
    code: int
    out: str
    said: tuple[str, ...]

    @property
    def text(self) -> str:
        """What `run --json` wrote."""
        found: str = json.loads(self.out)["text"]
        return found

    def expect(self, *, code: int = 0, said: int | None = None) -> Done:
        """Raises Wrong for another exit code, a traceback, or more lines than `said`."""
        told = f"{' '.join(self.words)}: exit code {self.code}, said {self.said[-4:]}"
        if self.code != code:
            raise Wrong(f"expected exit code {code}: {told}")
        if any("Traceback" in line or "internal error" in line for line in self.said):
            raise Wrong(told)
        if said is not None and len(self.said) != said:
            raise Wrong(f"expected {said} lines: {told}")
        return self


def limit_files(nbytes: int) -> Callable[[], None]:
    """For a child: no file of it grows beyond this."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, nbytes))

    return limit


class World:
    """A folder with a copy of the built-in model, and what it writes when nothing happens to it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = folder / "model"
        shutil.copytree(builtin.folder(), self.model)
        (self.shard,) = self.model.glob("*.safetensors")
        self.bytes = self.shard.read_bytes()
        self.state = folder / "state"
        start = time.monotonic()
        self.text = self.run().expect(said=0).text
        self.run_s = time.monotonic() - start

    def environment(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        """That of a command: no options but those given, state in this folder."""
        kept = {name: text for name, text in os.environ.items() if not name.startswith(("PICAFLOR_", "XDG_"))}
        path = os.pathsep.join(part for part in sys.path if part)
        own = {"PYTHONPATH": path, "XDG_CONFIG_HOME": str(self.folder / "none"), "XDG_STATE_HOME": str(self.state)}
        return {**kept, **own, **(more or {})}

    def command(
        self,
        *words: str,
        wrap: Sequence[str] = (),
        program: Sequence[str] = (sys.executable, "-m", "picaflor"),
        before: Callable[[], None] | None = None,
    ) -> Done:
        """Run a command line to its end."""
        line = [*wrap, *program, *words]
        done = subprocess.run(
            line, capture_output=True, text=True, env=self.environment(), preexec_fn=before, timeout=TIMEOUT_S
        )
        said = tuple(text for text in done.stderr.splitlines() if text != DEMO)
        return Done(words, done.returncode, done.stdout, said)

    def run(self, *words: str, before: Callable[[], None] | None = None) -> Done:
        """The text of this world, with more options."""
        return self.command("run", str(self.model), PROMPT, *WRITE, *words, before=before)

    def killed(self, *words: str, after_s: float, code: str = "") -> bool:
        """Start a command line (or Python `code`) and kill it after a time; whether that was before its end."""
        line = [sys.executable, "-c", code, *words] if code else [sys.executable, "-m", "picaflor", *words]
        null = subprocess.DEVNULL
        with subprocess.Popen(line, env=self.environment(), stdin=null, stdout=null, stderr=null) as child:
            try:
                child.wait(after_s)
            except subprocess.TimeoutExpired:
                child.send_signal(signal.SIGKILL)
            return child.wait() == -signal.SIGKILL

    def right(self, text: str, what: str) -> None:
        """Raises Wrong for another text."""
        if text != self.text:
            raise Wrong(f"{what}: wrote {text[:80]!r}, expected {self.text[:80]!r}")

    def restore(self) -> None:
        """Give the model's file its bytes back, in place."""
        if self.shard.read_bytes() != self.bytes:
            with self.shard.open("r+b") as file:
                file.write(self.bytes)
                file.truncate()


Scenario = Callable[[World, random.Random], None]


def soak(scenarios: Mapping[str, Scenario], what: str) -> int:
    """The command line of a soak: scenarios in random order until the time is over; prints a line for each fault."""
    parser = argparse.ArgumentParser(description=what)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=sorted(scenarios), help="this one alone")
    arguments = parser.parse_args()
    draw = random.Random(arguments.seed)
    names = [arguments.only] if arguments.only else sorted(scenarios)
    passed, failed = dict.fromkeys(names, 0), 0
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder))
        end = time.monotonic() + 60 * arguments.minutes
        while time.monotonic() < end or not all(passed.values()):
            name = min(names, key=lambda name: (passed[name] > 0, draw.random()))
            try:
                scenarios[name](world, draw)
            except (Wrong, subprocess.TimeoutExpired) as error:
                failed += 1
                passed[name] += 1
                world.restore()
                print(f"{name}: {error}", file=sys.stderr, flush=True)
            else:
                passed[name] += 1
    print(f"{sum(passed.values())} rounds ({', '.join(f'{n} {c}' for n, c in passed.items())}), {failed} failed")
    return 1 if failed else 0
