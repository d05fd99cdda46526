"""Support for the tests of the command line: an engine made of words, and running a command with it.

Must not know what a command does.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from picaflor import cli
from picaflor.cli.model import DEMO_LINE
from picaflor.errors import BadTemplate
from picaflor.models.config import Notices
from picaflor.runtime.plan import EngineOptions
from picaflor.telemetry.record import Phase, Record


@dataclass(frozen=True)
class Piece:
    text: str
    token: int


@dataclass(frozen=True, kw_only=True)
class FakeSampling:
    max_tokens: int = 1
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()


class FakeTokenizer:
    special = frozenset({1, 2})

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]


class FakeTemplate:
    start = "\x01"

    def render(self, messages: list[dict[str, str]], *, add_generation_prompt: bool = True) -> str:
        if not messages and not self.start:
            raise BadTemplate("messages[0] is undefined")
        turns = "".join(f"<{m['role']}>{m['content']}" for m in messages)
        return (self.start if not messages else "") + turns + "<assistant>" * add_generation_prompt


class FakeEngine:
    """Answers with the pieces of `script`; an exception in it is raised, a callable called."""

    script: tuple[Any, ...] = (" there", " was")
    opened: tuple[Any, ...] = ()
    calls: list[tuple[str, Any]] = []  # noqa: RUF012 - reset by the fixture
    finish_reason = "length"
    context = 64
    name = "fake"
    tuned = ""
    stop_names = ("<end>", "<user>")
    tokenizer = FakeTokenizer()
    chat_template: FakeTemplate | None = FakeTemplate()
    plan = types.SimpleNamespace(notices=Notices(), model=types.SimpleNamespace(max_positions=64))

    @classmethod
    def open(cls, path: Path | None, options: EngineOptions, *, progress: Any, warn: Any) -> FakeEngine:
        cls.opened = (path, options)
        progress("load", 1, 2)
        warn("an odd key")
        return cls()

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *error: object) -> None:
        self.calls.append(("closed", error[0]))

    def generate(self, ids: list[int], options: FakeSampling, cancel: Any = None) -> Iterator[Piece]:
        self.calls.append(("".join(chr(i) for i in ids), options))
        for at, part in enumerate(self.script):
            if isinstance(part, BaseException):
                raise part
            if callable(part):
                part()
            elif cancel is None or not cancel.is_set():
                yield Piece(part, at)

    def measure_memory_limit(self) -> None:
        return

    def record(self) -> Record:
        return Record(model="fake", decode=Phase(tokens=2, wall_s=1.0))


def installed(monkeypatch: pytest.MonkeyPatch) -> type[FakeEngine]:
    """FakeEngine behind the commands, in an environment without options."""
    engine = types.ModuleType("picaflor.runtime.engine")
    engine.Engine = FakeEngine  # type: ignore[attr-defined]
    engine.EngineOptions = EngineOptions  # type: ignore[attr-defined]
    generate = types.ModuleType("picaflor.runtime.generate")
    generate.SamplingOptions = FakeSampling  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "picaflor.runtime.engine", engine)
    monkeypatch.setitem(sys.modules, "picaflor.runtime.generate", generate)
    monkeypatch.setenv("XDG_CONFIG_HOME", "/nowhere")
    for name in ("HOME", "XDG_STATE_HOME"):  # nothing is kept
        monkeypatch.delenv(name, raising=False)
    for name in [name for name in os.environ if name.startswith("PICAFLOR_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(FakeEngine, "calls", [])
    monkeypatch.setattr(FakeEngine, "script", FakeEngine.script)
    return FakeEngine


Run = Callable[..., tuple[int, str, str]]


def runner(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command line: (exit code, stdout, stderr)."""

    def run(*words: str, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        code = cli.main(words)
        out, err = capsys.readouterr()
        return code, out, err

    return run


def error_line(err: str) -> str:
    """The one line of an error."""
    lines = [line for line in err.splitlines() if not line.startswith("picaflor: warning")]
    lines = [line for line in lines if line != DEMO_LINE]
    assert len(lines) == 1, err
    return lines[0]


def child_environment() -> dict[str, str]:
    environment = {name: text for name, text in os.environ.items() if not name.startswith(("PICAFLOR_", "PYTHON"))}
    return {**environment, "PYTHONPATH": os.pathsep.join(sys.path), "XDG_CONFIG_HOME": "/nowhere"}


def default_interrupt() -> None:
    """For a child: a test run in the background ignores Ctrl-C, and its children would inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
