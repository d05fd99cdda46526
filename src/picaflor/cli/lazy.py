"""A click group whose commands are imported when they are used.

Must not import any command; `picaflor --help` prints from the table that a group is given.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import click


class LazyGroup(click.Group):
    """`lazy` maps a command's name to (module with a `command`, one line of help)."""

    def __init__(self, *args: Any, lazy: Mapping[str, tuple[str, str]], **values: Any) -> None:
        super().__init__(*args, **values)
        self._lazy = dict(lazy)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the table's order."""
        return list(self._lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command, or None where the table does not have it."""
        if cmd_name not in self._lazy:
            return None
        module = importlib.import_module(self._lazy[cmd_name][0])
        command = module.command
        assert isinstance(command, click.Command), f"{module.__name__}.command is no click command"
        command.name = cmd_name
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in self._lazy.items()])
