"""The table of commands, and the one place where an error becomes a line and an exit code.

Must not know what a command does.
"""

from __future__ import annotations

import difflib
import errno
import os
import sys
import traceback
from collections.abc import Mapping, Sequence

import click

from picaflor import __version__
from picaflor.cli.lazy import LazyGroup
from picaflor.errors import PicaflorError

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERNAL = 70
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Only stdout is written to without a name: all else that is written says which file it is."""

COMMANDS: Mapping[str, tuple[str, str]] = {
    "run": ("picaflor.cli.run", "Continue a text."),
    "chat": ("picaflor.cli.chat", "Talk with a model in the terminal."),
    "inspect": ("picaflor.cli.inspect", "Formats, sizes and gaps of a container."),
    "capabilities": ("picaflor.cli.capabilities", "Which backend runs which operation on which format."),
    "plan": ("picaflor.cli.plan", "Memory, placement and speed of a model before it is loaded."),
    "doctor": ("picaflor.cli.doctor", "Check this machine and one model, with a remedy per failure."),
    "convert": ("picaflor.cli.convert", "Make a container from a checkpoint."),
    "eval": ("picaflor.cli.eval", "Mean negative log-likelihood and perplexity of text files."),
    "verify": ("picaflor.cli.verify", "Every kernel against an independent oracle."),
    "tune": ("picaflor.cli.tune", "Measure which options are fastest here, for one model."),
    "mirror": ("picaflor.cli.mirror", "Copies of a model on a second drive."),
    "bench": ("picaflor.cli.bench", "Measure kernels, decoding and drives."),
}


@click.group(cls=LazyGroup, lazy=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, "-V", "--version", prog_name="picaflor")
@click.option("--debug", is_flag=True, help="On an error show where it arose.")
def group(debug: bool) -> None:
    """Mixture-of-Experts language models larger than memory, on one machine, exactly."""


def run_command_line(arguments: Sequence[str] | None = None) -> int:
    """Run one command; what goes wrong is one line on stderr, with a traceback only under --debug."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = words[:1] == ["--debug"]
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    try:
        code = _invoke(words)
        sys.stdout.flush()
    except BrokenPipeError:
        _drop_stdout()
        return EXIT_BROKEN_PIPE
    except (KeyboardInterrupt, click.Abort):
        _say("picaflor: interrupted")
        return EXIT_INTERRUPTED
    except Exception as error:  # noqa: BLE001 - the outermost frame: every error becomes one line here
        if debug:
            traceback.print_exc()
        code, text = _explain(error, words)
        _say(f"picaflor: error: {text}")
    return code


def _invoke(words: list[str]) -> int:
    try:
        with group.make_context("picaflor", words) as context:
            result = group.invoke(context)
    except click.exceptions.Exit as done:
        return done.exit_code
    return result if isinstance(result, int) else 0


def _explain(error: Exception, words: Sequence[str] = ()) -> tuple[int, str]:
    """(exit code, one line) for an error of the command line `words`."""
    if isinstance(error, PicaflorError):
        return error.exit_code, _one_line(str(error))
    if isinstance(error, click.UsageError):
        return EXIT_USAGE, _usage(error, words)
    if isinstance(error, click.ClickException):
        return error.exit_code, _one_line(error.format_message())
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else "stdout: " * (error.errno in _NO_ROOM)
        return EXIT_FAILED, _one_line(f"{where}{error.strerror or error}")
    if isinstance(error, MemoryError):
        return EXIT_FAILED, "out of memory"
    text = _one_line(f"{type(error).__name__}: {error}")
    return EXIT_INTERNAL, f"internal error: {text} (picaflor --debug COMMAND shows where)"


def _command_path(words: Sequence[str]) -> str:
    """As `picaflor bench decode`: the words that name the command."""
    path = "picaflor"
    command: click.Group = group
    for word in words:
        if word.startswith("-"):
            continue
        found = command.get_command(click.Context(command), word)
        if found is None:
            break
        path = f"{path} {word}"
        if not isinstance(found, click.Group):
            break
        command = found
    return path


def _usage(error: click.UsageError, words: Sequence[str]) -> str:
    path = error.ctx.command_path if error.ctx else _command_path(words)
    hint = f" ({path} --help lists what it takes)"
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        return f"no command given{hint}"
    if isinstance(error, click.exceptions.NoSuchOption):
        return f"no such option: {error.option_name}{_near(error.possibilities)}{hint}"
    if isinstance(error, click.MissingParameter) and error.param is not None and error.param.name == "model":
        return f"no model given: name its directory, as {path} DIRECTORY"
    text = _one_line(error.format_message()).rstrip(".")
    if text.startswith("No such command"):
        name = text.partition("'")[2].partition("'")[0]
        known = (
            error.ctx.command.list_commands(error.ctx) if error.ctx and isinstance(error.ctx.command, LazyGroup) else []
        )
        return f"no such command: {name}{_near(difflib.get_close_matches(name, known, n=1))}{hint}"
    return f"{text[:1].lower()}{text[1:]}{hint}"


def _near(names: Sequence[str] | None) -> str:
    return f"; did you mean {' or '.join(names)}?" if names else ""


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _say(text: str) -> None:
    try:
        print(text, file=sys.stderr, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def _drop_stdout() -> None:
    """Nobody reads stdout any more: keep the interpreter's last flush from saying so."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):
        return
