"""`picaflor capabilities [MODEL]`: which operation runs on which format, and how; with MODEL, for its tensor classes.

Must not decide anything: the backend's table says it, and the same table is asked when a model is loaded.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from picaflor import settings as table_of_options
from picaflor.cli.model import engine_options, model_path, split_folders
from picaflor.settings import Settings

if TYPE_CHECKING:
    from picaflor.backends.table import CapabilityTable, Cell
    from picaflor.container.types import Matrix

OPERATIONS: Mapping[str, tuple[str, ...]] = {
    "embedding": ("rows",),
    "kv_b": ("rows", "row_axpy"),
    "expert": ("expert_ffn",),
}
"""What is done with matrices of a kind; all others are multiplied."""


@dataclass(frozen=True, slots=True)
class Use:
    """Matrices of one kind, format and group size in a model, and the way of cells that one operation on them takes.

    `route`: the cell asked for, then those it is waived to; the last one runs or is refused.
    """

    kind: str
    format: str
    group_size: int
    count: int
    nbytes: int
    route: Sequence[Cell]


@click.command()
@click.argument("model", required=False)
@table_of_options.options("capabilities")
def command(model: str | None, settings: Settings) -> int:
    """Print the table of backend, operation and format; with MODEL, a directory, the kernel of each tensor class.

    A cell is native (a kernel of its own), composed (made of native ones), waived (another one does it) or refused.
    Exit code 1 if MODEL needs a refused cell, or under --strict a waived one.
    """
    from picaflor.runtime.plan import load_backend

    options = engine_options(settings)
    backend: Any = load_backend(options, lambda text: print(f"picaflor: warning: {text}", file=sys.stderr))
    table: CapabilityTable = backend.table
    path = model_path(model)
    if path is None:
        _print(settings, backend, [{"backend": cell.backend, **_row(cell)} for cell in table.cells()])
        return 0
    uses = model_uses(path, table, backend.name, settings)
    _print(settings, backend, [_use_row(use, backend) for use in uses])
    return 1 if any(use.route[-1].state == "refused" or (settings.strict and use.route[1:]) for use in uses) else 0


def model_uses(path: Path, table: CapabilityTable, backend: str, settings: Settings) -> list[Use]:
    """One entry per kind, format, group size and operation of the model in `path`, from its headers alone."""
    from picaflor.container.index import Container
    from picaflor.models.config import Notices
    from picaflor.models.loading import open_model

    def warn(text: str) -> None:
        print(f"picaflor: warning: {text}", file=sys.stderr)

    counts: Counter[tuple[str, str, int]] = Counter()
    nbytes: Counter[tuple[str, str, int]] = Counter()

    def count(kind: str, matrix: Matrix) -> None:
        key = (kind, matrix.format, matrix.group_size)
        counts[key] += 1
        nbytes[key] += matrix.nbytes

    with Container.open(path, extra_dirs=split_folders(settings)) as container:
        notices = Notices(strict=settings.strict, warn=warn)
        model, index = open_model(container, group_size=settings.group_size, notices=notices)
        kinds = {spec.name: spec.kind for spec in model.matrices()}
        for name, matrix in index.matrices.items():
            count(kinds[name], matrix)
        for layer in index.experts.values():
            for expert in layer:
                for matrix in expert.matrices:
                    count("expert", matrix)
    return [
        Use(*key, number, nbytes[key], table.route(op, key[1], backend))
        for key, number in sorted(counts.items())
        for op in OPERATIONS.get(key[0], ("matmul",))
    ]


def _row(cell: Cell) -> dict[str, str]:
    state = f"{cell.state} to {cell.to}" if cell.to else cell.state
    return {"operation": cell.op, "format": cell.format, "state": state, "reason": cell.reason}


def _use_row(use: Use, backend: Any) -> dict[str, str | int]:
    *_, last = use.route
    runs = last.state in ("native", "composed")
    return {
        "kind": use.kind,
        "matrices": use.count,
        "bytes": use.nbytes,
        "group_size": use.group_size,
        **_row(use.route[0]),
        "kernel": last.name if runs else "none",
        "isa": backend.isa_of(last) if runs else "none",
        "reason": use.route[0].reason or last.reason,
    }


def _print(settings: Settings, backend: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    if settings.json:
        print(json.dumps({"backend": backend.name, "isa": backend.isa, "cells": rows}))
        return
    print(f"{backend.name}, {backend.isa}")
    columns = [name for name in rows[0] if name != "reason"]
    lines = [columns, *([str(row[name]) for name in columns] for row in rows)]
    widths = [max(len(line[at]) for line in lines) for at in range(len(columns))]
    reasons = ["", *(str(row["reason"]) for row in rows)]
    for line, reason in zip(lines, reasons, strict=True):
        cells = "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True))
        print(f"{cells}  {reason}".rstrip())
