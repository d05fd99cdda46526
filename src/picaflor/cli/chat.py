"""`picaflor chat [MODEL]`: a conversation in the terminal.

Must not know how text is made. Ctrl-C ends the answer and keeps the conversation; a second one in a row leaves.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING

import click

from picaflor import settings as table
from picaflor.cli.model import MOST_PROMPT, check_length, ending, open_engine, read_prompt
from picaflor.cli.run import chat_ids, end_line, sampling_options
from picaflor.errors import PicaflorError, UsageError
from picaflor.settings import Settings

if TYPE_CHECKING:
    from picaflor.runtime.engine import Engine

PROMPT = "> "
HELP = ":reset forgets the conversation, :help shows this, :quit or Ctrl-D leaves; Ctrl-C ends an answer, twice leaves"


@click.command()
@click.argument("model", required=False)
@table.options("chat")
def command(model: str | None, settings: Settings) -> int:
    """Talk with MODEL, a directory; without it with the built-in one. :help lists the commands inside.

    Lines from a pipe are turns too; then the exit code is 1 if one of them failed.
    """
    with open_engine(model, settings) as engine:
        chat = Chat(engine, settings)
        print(f"{engine.name}, {end_line(engine)}. {HELP}", file=sys.stderr, flush=True)
        chat.loop(input if sys.stdin.isatty() else read_piped)
        if settings.profile:
            from picaflor.telemetry.report import print_report

            engine.measure_memory_limit()
            print_report(engine.record(), sys.stderr)
    return 1 if chat.failed and not sys.stdin.isatty() else 0


class Chat:
    """The conversation: whole turns only. A turn that failed is taken back; one that was cut stays as far as it got.

    `failed`: how many turns were taken back.
    """

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self.messages: list[dict[str, str]] = []
        self.failed = 0
        self._engine = engine
        self._sampling = sampling_options(settings)

    def loop(self, read: Callable[[str], str]) -> None:
        """Read lines until :quit, the end of input, or two Ctrl-C in a row."""
        if sys.stdin.isatty():
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401 - line editing and history for input()
        interrupted = False
        while True:
            try:
                line = read(PROMPT if sys.stdin.isatty() else "").strip()
            except EOFError:
                return
            except KeyboardInterrupt:
                if interrupted:
                    return
                interrupted = True
                print("\n(Ctrl-C once more leaves)", file=sys.stderr, flush=True)
                continue
            interrupted = False
            if line.startswith(":"):
                if not self._command(line):
                    return
            elif line:
                interrupted = self._turn(line)

    def _command(self, line: str) -> bool:
        """Obey one line that starts with a colon; False to leave."""
        if line == ":quit":
            return False
        if line == ":reset":
            self.messages.clear()
            print("(forgotten)", file=sys.stderr, flush=True)
        elif line == ":help":
            print(HELP, file=sys.stderr, flush=True)
        else:
            print(f"(no command {line}; {HELP})", file=sys.stderr, flush=True)
        return True

    def _turn(self, line: str) -> bool:
        """Answer one line; True if Ctrl-C cut the answer."""
        cancel = threading.Event()
        text = ""
        try:
            messages = [*self.messages, {"role": "user", "content": read_line(line)}]
            ids = chat_ids(self._engine, messages)
            with _interrupt_sets(cancel):
                for piece in self._engine.generate(ids, self._sampling, cancel=cancel):
                    text += piece.text
                    print(piece.text, end="", flush=True)
        except BaseException as error:
            if text:
                print(flush=True)
            if not isinstance(error, PicaflorError):
                raise
            self.failed += 1
            print(
                f"picaflor: error: {error} (this turn is taken back; :reset starts anew)", file=sys.stderr, flush=True
            )
            return False
        print(flush=True)
        self.messages = [*messages, {"role": "assistant", "content": text}]
        self._sampling = replace(self._sampling, seed=(self._sampling.seed + 1) % 2**64)
        if cancel.is_set():
            print("(stopped)", file=sys.stderr, flush=True)
        elif self._engine.finish_reason == "length":
            print(f"(cut at {self._sampling.max_tokens} tokens; -n raises that)", file=sys.stderr, flush=True)
        elif line := ending(self._engine):
            print(f"({line}; :reset starts anew)", file=sys.stderr, flush=True)
        return cancel.is_set()


def read_piped(prompt: str = "") -> str:
    """The next line of a pipe. Raises EOFError behind the last one, UsageError for one without an end or not UTF-8."""
    try:
        line = sys.stdin.readline(MOST_PROMPT + 1)
    except UnicodeDecodeError as error:
        raise UsageError(f"line on stdin: not UTF-8 at byte {error.start}") from None
    check_length(line, "line on stdin")
    if not line:
        raise EOFError
    return line


def read_line(line: str) -> str:
    """One typed line as prompt text; `-` is only a dash here. Raises UsageError where it is not text."""
    return line if line == "-" else read_prompt(line)


@contextlib.contextmanager
def _interrupt_sets(cancel: threading.Event) -> Iterator[None]:
    """While active the first Ctrl-C sets `cancel`, the next one raises KeyboardInterrupt."""

    def handle(number: int, frame: FrameType | None) -> None:
        if cancel.is_set():
            raise KeyboardInterrupt
        cancel.set()

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
