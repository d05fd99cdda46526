"""`picaflor inspect [MODEL]`: formats, sizes and gaps of a container.

Must not know how a container is examined; runtime.inspection does that.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from picaflor import settings as table
from picaflor.container.strict_json import show_path
from picaflor.settings import Settings
from picaflor.sizes import format_bytes

if TYPE_CHECKING:
    from picaflor.runtime.inspection import ClassRow, Inspection
    from picaflor.runtime.inspection_deep import Finding

_FINDINGS_SHOWN = 20


@click.command()
@click.argument("model", required=False)
@click.option("--tensors", is_flag=True, help="List every tensor: dtype, shape, bytes, format, shard, offset.")
@click.option("--deep", is_flag=True, help="Read everything and look for scales and weights that are not finite.")
@click.option(
    "--dir",
    "extra_dirs",
    multiple=True,
    type=click.Path(path_type=Path),
    help="The same as --split.",
)
@table.options("inspect")
def command(model: str | None, tensors: bool, deep: bool, extra_dirs: tuple[Path, ...], settings: Settings) -> None:
    """Show what is in MODEL, a directory: formats per class of tensor, true bits, sizes, and what is missing.

    Without MODEL it is the built-in one.

    Exit code 1 when the model would not load.
    """
    from picaflor.cli.model import DEMO_LINE, Progress, check_named, split_folders
    from picaflor.container.index import Container
    from picaflor.runtime import builtin
    from picaflor.runtime.inspection import inspect_container, refuse
    from picaflor.runtime.inspection_deep import read_everything

    if model is not None:
        check_named(model)
    path = builtin.folder() if model is None else Path(model).expanduser()
    folders = (*extra_dirs, *split_folders(settings))
    with Container.open(path, extra_dirs=folders, allow_missing=True) as container:
        found = inspect_container(container, group_size=settings.group_size, strict=settings.strict)
        if model is None:
            print(DEMO_LINE, file=sys.stderr, flush=True)
        progress = Progress()
        try:
            findings = read_everything(container, found.index, progress=progress) if deep else None
        finally:
            progress.clear()
        if settings.json:
            _print_json(found, findings, tensors)
        else:
            _print(found, findings, tensors)
    refuse(found)
    if findings:
        raise click.exceptions.Exit(1)


def _print_json(found: Inspection, findings: Sequence[Finding] | None, tensors: bool) -> None:
    record = found.record()
    if tensors:
        record["tensor_list"] = list(found.tensor_records())
    if findings is not None:
        record["findings"] = [finding.record() for finding in findings]
    click.echo(json.dumps(record))


def _print(found: Inspection, findings: Sequence[Finding] | None, tensors: bool) -> None:
    container = found.container
    family = _ascii(found.model_type or "family unknown")
    shards, tensors_here = _count(len(container.shards), "shard"), _count(len(container.tensors), "tensor")
    size = format_bytes(found.file_nbytes)
    click.echo(f"{show_path(container.path)}: {family}, {shards}, {size}, {tensors_here}")
    _columns(
        ("class", "format", "count", "weights", "bytes", "bits/weight", "shards"),
        [*map(_cells, found.rows), _total(found)],
        left=2,
    )
    if tensors:
        rows = [
            (t["name"], t["dtype"], str(t["shape"]), str(t["bytes"]), t["format"] or "-", t["shard"], str(t["offset"]))
            for t in found.tensor_records()
        ]
        _columns(("tensor", "dtype", "shape", "bytes", "format", "shard", "offset"), rows, left=7)
    for gap in found.gaps:
        click.echo(f"missing: {gap.name}: {gap.meaning}")
    for note in found.notes:
        click.echo(f"note: {note}")
    for problem in found.problems:
        click.echo(f"problem: {problem}")
    if findings is not None:
        _print_findings(found, findings)


def _print_findings(found: Inspection, findings: Sequence[Finding]) -> None:
    for finding in findings[:_FINDINGS_SHOWN]:
        number = (
            f"{finding.count} {finding.text}, the first is number {finding.first}" if finding.count else finding.text
        )
        click.echo(f"bad: {finding.shard}: {_ascii(finding.tensor)}: {number}")
    if len(findings) > _FINDINGS_SHOWN:
        click.echo(f"bad: and {len(findings) - _FINDINGS_SHOWN} more tensors")
    bad = _count(len(findings), "tensor") if findings else "no tensor"
    click.echo(f"read {format_bytes(found.tensor_nbytes)}: {bad} with bad values")


def _cells(row: ClassRow) -> tuple[str, ...]:
    bits = row.bits_per_weight
    return (
        row.label,
        f"{row.format} g{row.group_size}" if row.group_size else row.format,
        str(row.count),
        str(row.weights or "-"),
        format_bytes(row.nbytes),
        "-" if bits is None else f"{bits:.3f}",
        str(len(row.shards)),
    )


def _total(found: Inspection) -> tuple[str, ...]:
    known = [row for row in found.rows if row.weights]
    weights = sum(row.weights for row in known)
    bits = f"{8.0 * sum(row.nbytes for row in known) / weights:.3f}" if weights else "-"
    count = str(sum(row.count for row in found.rows))
    size = format_bytes(sum(row.nbytes for row in found.rows))
    return ("total", "", count, str(weights or "-"), size, bits, str(len(found.container.shards)))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _columns(head: Sequence[str], rows: Sequence[Sequence[str]], *, left: int) -> None:
    """Print a table; the first `left` columns start at the left, the others end at the right."""
    lines = [[_ascii(cell) for cell in row] for row in (head, *rows)]
    widths = [max(len(line[place]) for line in lines) for place in range(len(head))]
    for line in lines:
        cells = [
            cell.ljust(width) if place < left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        click.echo("  ".join(cells).rstrip())


def _ascii(text: str) -> str:
    """Text from a file without anything that moves a terminal's cursor."""
    return text if text.isprintable() else text.encode("unicode_escape").decode("ascii")
