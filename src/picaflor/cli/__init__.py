"""The command line: one file per command, errors turned into one line in one place (app.py)."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0 good, 1 refused or failed, 2 usage."""
    closed = _reopen_closed_streams()
    try:
        from picaflor.cli.app import run_command_line
    except KeyboardInterrupt:  # the import is most of the first tenth of a second
        print("picaflor: interrupted", file=sys.stderr, flush=True)
        return 130
    if "stdout" in closed:
        print("picaflor: error: stdout is closed; nothing that is written could be read", file=sys.stderr, flush=True)
        return 1
    return run_command_line(arguments)


def _reopen_closed_streams() -> set[str]:
    """Names of the standard streams that were closed at the start; they read nothing and write nowhere from now on.

    Without this the first file that is opened would become the standard stream of that number.
    """
    closed = set()
    for name, flags, mode in (("stdin", os.O_RDONLY, "r"), ("stdout", os.O_WRONLY, "w"), ("stderr", os.O_WRONLY, "w")):
        if getattr(sys, name) is None:
            closed.add(name)
            setattr(sys, name, os.fdopen(os.open(os.devnull, flags), mode))
    return closed
