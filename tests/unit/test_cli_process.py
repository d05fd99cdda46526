"""What a command does to its terminal and its pipes: progress, readers that leave, interrupts."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cli_support import (
    child_environment,
    default_interrupt,
)

from picaflor.cli import app
from picaflor.cli.model import DEMO_LINE, Progress, progress_text


def test_progress_is_for_terminals_and_gone_before_text(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

        def fileno(self) -> int:
            return 2

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(os, "get_terminal_size", lambda fd: os.terminal_size((20, 5)))
    monkeypatch.setattr("time.monotonic", iter([0.0, 0.05, 0.2, 0.25]).__next__)
    progress = Progress()
    progress("load", 1, 4)  # too soon
    progress("load a long name", 2, 4)
    assert terminal.getvalue() == "\r\x1b[K50%"
    progress("load", 4, 4)  # too soon for a line, never too soon to take it away
    assert terminal.getvalue().endswith("50%\r\x1b[K")
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setattr("time.monotonic", lambda: 9.0)
    silent = Progress()
    monkeypatch.setattr("time.monotonic", lambda: 99.0)
    silent("load", 2, 4)
    assert sys.stderr.getvalue() == ""  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("stage", "done", "total", "width", "text"),
    [
        ("reading the prompt", 128, 4096, 79, "reading the prompt 128 of 4096 (3%)"),
        ("loading experts", 5 << 20, 2 << 30, 79, "loading experts 5 MiB of 2 GiB (0%)"),
        ("writing", 1 << 30, 4 << 30, 28, "writing 1 GiB of 4 GiB (25%)"),
        ("writing", 1 << 30, 4 << 30, 27, "writing 25%"),
        ("reading", 1 << 30, 4 << 30, 10, "25%"),
        ("loading resident weights", 1, 4, 2, ""),
        ("loading resident weights", 1, 4, -1, ""),
    ],
)
def test_progress_names_sizes_and_cuts_no_number(stage: str, done: int, total: int, width: int, text: str) -> None:
    assert progress_text(stage, done, total, width) == text


def test_progress_tells_the_time_that_is_left_where_there_is_room() -> None:
    assert progress_text("reading the prompt", 500, 2000, 79, 40.4) == "reading the prompt 500 of 2000 (25%), 40 s left"
    assert progress_text("reading the prompt", 500, 2000, 40, 40.4) == "reading the prompt 500 of 2000 (25%)"
    assert progress_text("repeat", 1, 2, 79, 200) == "repeat 1 of 2 (50%), 3 min left"
    assert progress_text("repeat", 1, 2, 79, 7500) == "repeat 1 of 2 (50%), 2 h 5 min left"


FAKED = """
import sys, time
sys.path.insert(0, {tests!r})
import cli_support, types
engine = types.ModuleType("picaflor.runtime.engine")
engine.Engine, engine.EngineOptions = cli_support.FakeEngine, cli_support.EngineOptions
generate = types.ModuleType("picaflor.runtime.generate")
generate.SamplingOptions = cli_support.FakeSampling
sys.modules |= {{"picaflor.runtime.engine": engine, "picaflor.runtime.generate": generate}}
cli_support.FakeEngine.script = {script}
from picaflor.cli import main
sys.exit(main({words!r}))
"""


def spawn(script: str, *words: str, **values: Any) -> subprocess.Popen[bytes]:
    code = FAKED.format(tests=str(Path(__file__).parent), script=script, words=list(words))
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **values}
    return subprocess.Popen(
        [sys.executable, "-c", code], env=child_environment(), preexec_fn=default_interrupt, **pipes
    )


def test_reader_that_leaves_is_no_error() -> None:
    with spawn('(" line of text\\n",) * 200_000', "run", "Hi") as child:
        assert child.stdout is not None
        assert child.stderr is not None
        assert child.stdout.readline() == b" line of text\n"
        child.stdout.close()
        assert child.wait(60) == app.EXIT_BROKEN_PIPE
        assert child.stderr.read().decode().splitlines() == ["picaflor: warning: an odd key", DEMO_LINE]


def test_reader_that_was_never_there_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with spawn('(" short",)', "run", "Hi", "--json", stdout=writing) as child:
        os.close(writing)
        assert child.stderr is not None
        assert child.wait(60) == app.EXIT_BROKEN_PIPE
        assert child.stderr.read().decode().splitlines() == ["picaflor: warning: an odd key", DEMO_LINE]


def test_interrupt_in_a_process() -> None:
    with spawn('(" begin\\n", lambda: time.sleep(60), " late")', "run", "Hi") as child:
        assert child.stdout is not None
        assert child.stderr is not None
        assert child.stdout.readline() == b" begin\n"
        child.send_signal(signal.SIGINT)
        assert child.wait(60) == 130
        assert child.stdout.read() == b""
        assert child.stderr.read().decode().splitlines()[-1] == "picaflor: interrupted"
