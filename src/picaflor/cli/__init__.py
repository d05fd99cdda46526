"""The command line: one file per command, errors turned into one line in one place (app.py)."""

from __future__ import annotations

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0 good, 1 refused or failed, 2 usage."""
    from picaflor.cli.app import run_command_line

    return run_command_line(arguments)
