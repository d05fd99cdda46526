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
from picaflor.cli.model import engine_options, model_path
from picaflor.settings import Settings

if TYPE_CHECKING:
    from picaflor.backends.table import CapabilityTable, Cell

OPERATIONS: Mapping[str, tuple[str, ...]] = {
    "embedding": ("rows",),
    "kv_b": ("rows", "row_axpy"),
    "expert": ("expert_ffn",),
}
"""What is done with matrices of a kind; all others are multiplied."""


@dataclass(frozen=True, slots=True)
class Use:
    """Matrices of one kind and format in a model, and the cell that one operation on them needs."""

    kind: str
    format: str
    count: int
    cell: Cell


@click.command()
@click.argument("model", required=False)
@table_of_options.options("capabilities")
def command(model: str | None, settings: Settings) -> int:
    """Print the table of backend, operation and format; with MODEL, a directory, only what its tensors need.

    A cell is native (a kernel of its own), composed (made of native ones), waived (another backend does it) or refused.
    Exit code 1 if MODEL needs a refused cell.
    """
    from picaflor.runtime.plan import load_backend

    options = engine_options(settings)
    backend: Any = load_backend(options, lambda text: print(f"picaflor: warning: {text}", file=sys.stderr))
    table: CapabilityTable = backend.table
    path = model_path(model)
    if path is None:
        cells = table.cells()
        _print(settings, backend, [_row(cell) for cell in cells])
        return 0
    uses = model_uses(path, table, backend.name, settings)
    _print(settings, backend, [{"kind": use.kind, "matrices": use.count, **_row(use.cell)} for use in uses])
    return 1 if any(use.cell.state == "refused" for use in uses) else 0


def model_uses(path: Path, table: CapabilityTable, backend: str, settings: Settings) -> list[Use]:
    """One entry per kind, format and operation of the model in `path`, from its headers alone."""
    from picaflor.container.index import Container
    from picaflor.models.config import Notices
    from picaflor.models.loading import open_model

    def warn(text: str) -> None:
        print(f"picaflor: warning: {text}", file=sys.stderr)

    counts: Counter[tuple[str, str]] = Counter()
    with Container.open(path) as container:
        notices = Notices(strict=settings.strict, warn=warn)
        model, index = open_model(container, group_size=settings.group_size, notices=notices)
        kinds = {spec.name: spec.kind for spec in model.matrices()}
        for name, matrix in index.matrices.items():
            counts[kinds[name], matrix.format] += 1
        for layer in index.experts.values():
            for expert in layer:
                counts.update(("expert", matrix.format) for matrix in expert.matrices)
    return [
        Use(kind, format_name, count, table.cell(backend, op, format_name))
        for (kind, format_name), count in sorted(counts.items())
        for op in OPERATIONS.get(kind, ("matmul",))
    ]


def _row(cell: Cell) -> dict[str, str]:
    state = f"{cell.state} to {cell.to}" if cell.to else cell.state
    return {"operation": cell.op, "format": cell.format, "state": state, "reason": cell.reason}


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
