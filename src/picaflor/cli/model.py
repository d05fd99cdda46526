"""What the commands share about a model: naming it, telling it from a prompt, opening it with progress on stderr.

Must not know how a model is loaded or run.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from picaflor import settings as table
from picaflor.errors import BadContainer, UsageError
from picaflor.settings import Settings, state_folder
from picaflor.sizes import format_bytes

if TYPE_CHECKING:
    from picaflor.runtime.engine import Engine, EngineOptions

DEMO_LINE = "demo model, 27 M parameters"
STDIN = "-"
MOST_PROMPT = 16 << 20
"""Most characters of a prompt on stdin: more tokens than any context here holds."""
_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
_PATH_START = ("/", "./", "../", "~/")
_PROGRESS_PERIOD_S = 0.1
_SURE_S = 2.0
"""A stage that has taken less says nothing about how long it will take."""
_BYTE_STAGES = frozenset({"loading resident weights", "loading experts", "reading", "writing", "verifying"})
"""Stages whose progress counts bytes."""


def counted(number: int, noun: str) -> str:
    """As "1 file", "2 files"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def looks_like_model(word: str) -> bool:
    """An existing path, a word that can only be one, or `org/name` as a hub writes it."""
    if word == STDIN or not word:
        return False
    if _HUB_ID.fullmatch(word):
        return True
    if word.startswith(_PATH_START) and not re.search(r"\s", word):
        return True
    try:
        return Path(word).exists()
    except (OSError, ValueError):
        return False


def model_and_prompt(words: tuple[str, ...]) -> tuple[str | None, str]:
    """`[MODEL] PROMPT` told apart. Raises UsageError; one word that is a model is never a prompt for the demo."""
    if not words:
        raise UsageError('no prompt given: picaflor run [MODEL] "PROMPT", or - to read it from stdin')
    if len(words) > 2:
        raise UsageError(f"{len(words)} arguments given; run takes [MODEL] PROMPT: put the prompt in quotes")
    if len(words) == 2:
        return words
    if looks_like_model(words[0]):
        raise UsageError(
            f"{words[0]!r} names a model and the prompt is missing: picaflor run MODEL PROMPT"
            " (a prompt that reads like a path goes in by stdin, with -)"
        )
    return None, words[0]


def model_path(word: str | None) -> Path | None:
    """The model's place on disk, None for the built-in one. Raises BadContainer where there is nothing."""
    if word is None:
        return None
    check_named(word)
    path = Path(word).expanduser()
    if not path.exists():
        hub = "; models are not fetched from a hub, download it first" if _HUB_ID.fullmatch(word) else ""
        raise BadContainer(f"model {word}: no such directory{hub}")
    return path


def check_named(word: str, what: str = "model") -> None:
    """Raises UsageError for an empty name, which would mean the current folder (an unset variable of the shell)."""
    if not word:
        raise UsageError(f"{what} '': the name is empty; give a directory, . for the current one")


def read_prompt(word: str) -> str:
    """The prompt, from stdin where `word` is `-`. Raises UsageError unless it is text with something in it."""
    if word == STDIN:
        try:
            word = sys.stdin.read(MOST_PROMPT + 1)
        except UnicodeDecodeError as error:
            raise UsageError(f"prompt on stdin: not UTF-8 at byte {error.start}") from None
        check_length(word, "prompt on stdin")
    if not word:
        raise UsageError("the prompt is empty")
    if any("\ud800" <= letter <= "\udfff" for letter in word):
        raise UsageError("the prompt is not UTF-8 text")
    return word


def check_length(text: str, what: str) -> None:
    """Raises UsageError for what was read from a stream and goes on behind the most that is taken."""
    if len(text) > MOST_PROMPT:
        raise UsageError(
            f"{what}: more than {MOST_PROMPT} characters; accepted: up to that many, and the tokens that --ctx holds"
        )


def ending(engine: Engine) -> str:
    """One line where the last answer ended because nothing more fits, else nothing."""
    if engine.finish_reason != "context":
        return ""
    most = engine.plan.model.max_positions
    cure = f"--ctx takes up to {most}" if engine.context < most else "this model takes no more"
    return f"the context is full, {engine.context} tokens with the prompt: the answer ends here; {cure}"


TUNED_NAME = "tuned.json"


def tuned_file(settings: Settings) -> Path | None:
    """The file of tuned options: the one given, else the machine's own; None without a home."""
    folder = table.state_folder()
    return settings.tuned_file or (folder / TUNED_NAME if folder else None)


def tuned_entries(settings: Settings) -> dict[str, Any]:
    """What tune has kept, by machine and model; nothing where it is not wanted. Raises UsageError for a file that was
    named and is not there."""
    if not settings.tuned:
        return {}
    path = tuned_file(settings)
    if path is None or not path.exists():
        if settings.tuned_file is not None:
            raise UsageError(f"--tuned-file: {path} is no file")
        return {}
    from picaflor.runtime.machine import StateFile

    return StateFile(path, warn=Progress().warn, named=settings.tuned_file is not None).read()


def split_folders(settings: Settings) -> tuple[Path, ...]:
    """More directories with shards of the model."""
    return tuple(Path(folder).expanduser() for folder in settings.split)


def engine_options(settings: Settings) -> EngineOptions:
    """The engine's part of the settings."""
    from picaflor.runtime.engine import EngineOptions

    return EngineOptions(
        ram_bytes=settings.ram,
        expert_slots=settings.expert_slots,
        context=settings.ctx,
        threads=settings.threads,
        backend=settings.backend,
        precision=settings.precision,
        isa=settings.isa,
        prefill_chunk=settings.prefill_chunk,
        router_top_p=settings.router_top_p,
        expert_budget=settings.experimental_expert_budget,
        read_threads=settings.read_threads,
        queue_depth=settings.queue_depth,
        read_engine=settings.read_engine,
        direct=settings.direct,
        mapped=settings.mapped,
        split=split_folders(settings),
        mirrors=tuple(Path(folder).expanduser() for folder in settings.mirror),
        group_size=settings.group_size,
        latent_norm_eps=settings.latent_norm_eps,
        device=settings.device,
        vram_bytes=settings.vram,
        strict=settings.strict,
        disable=settings.disable,
        fail_after=settings.fail_after,
        tuned=tuned_entries(settings),
        policy=settings.policy,
        prefetch=settings.prefetch,
        usage=None if settings.usage in ("auto", "off") else Path(settings.usage).expanduser(),
        state=state_folder() if settings.usage == "auto" else None,
        record_routes=settings.record_routes,
    )


@contextmanager
def open_engine(word: str | None, settings: Settings) -> Iterator[Engine]:
    """Open the model named by `word` (None: the built-in one, said on stderr); warnings and progress go to stderr."""
    path = model_path(word)
    from picaflor.runtime.engine import Engine

    progress = Progress()
    with Engine.open(path, engine_options(settings), progress=progress, warn=progress.warn) as engine:
        progress.clear()
        if path is None:
            print(DEMO_LINE, file=sys.stderr, flush=True)
        if engine.tuned:
            print(f"tuned for this machine and model: {engine.tuned} (--no-tuned leaves it)", file=sys.stderr)
        try:
            yield engine
        finally:
            progress.clear()


def time_left(seconds: float) -> str:
    """As "40 s left", "3 min left", "2 h 5 min left"; empty where there is nothing to go by."""
    if seconds <= 0:
        return ""
    if seconds < 90:
        return f"{seconds:.0f} s left"
    minutes = round(seconds / 60)
    return f"{minutes} min left" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min left"


def progress_text(stage: str, done: int, total: int, width: int, left_s: float = 0.0) -> str:
    """One line of at most `width` columns: it loses words, never a part of a number."""
    share = f"{done / total:.0%}"
    show = format_bytes if stage in _BYTE_STAGES else str
    whole = f"{stage} {show(done)} of {show(total)} ({share})"
    left = time_left(left_s)
    texts = (*([f"{whole}, {left}"] if left else []), whole, f"{stage} {share}", share, "")
    return next(text for text in texts if len(text) <= max(width, 0))


class Progress:
    """One line on stderr that replaces itself; silent unless stderr is a terminal."""

    def __init__(self) -> None:
        self._on = sys.stderr.isatty()
        self._next = time.monotonic() + _PROGRESS_PERIOD_S
        self._shown = False
        self._began = ("", 0, 0.0)  # stage, what was done when it was first told, and when

    def __call__(self, stage: str, done: int, total: int) -> None:
        if done >= total:
            self.clear()  # never held back: text may follow on the same terminal
            return
        now = time.monotonic()
        if self._began[0] != stage or done < self._began[1]:
            self._began = (stage, done, now)
        if not self._on or now < self._next:
            return
        self._next = now + _PROGRESS_PERIOD_S
        columns = os.get_terminal_size(sys.stderr.fileno()).columns or 80
        _, first, began = self._began
        sure = now - began >= _SURE_S and done > first
        left_s = (now - began) * (total - done) / (done - first) if sure else 0.0
        text = progress_text(stage, done, total, columns - 1, left_s)
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
        self._shown = True

    def warn(self, text: str) -> None:
        """A warning on a line of its own."""
        self.clear()
        print(f"picaflor: warning: {text}", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Take the line away."""
        if self._shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
            self._shown = False
