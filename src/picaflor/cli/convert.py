"""`picaflor convert SRC OUT`: make a container from a checkpoint or another container.

Must not know how weights are encoded; picaflor.convert does that.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from picaflor import settings as table
from picaflor.cli.model import Progress
from picaflor.settings import Settings
from picaflor.sizes import format_bytes, parse_bytes

if TYPE_CHECKING:
    from picaflor.convert.converter import ConvertReport


@click.command()
@click.argument("source", metavar="SRC", type=click.Path(path_type=Path))
@click.argument("out", metavar="OUT", type=click.Path(path_type=Path))
@click.option("--format", "experts", default="int4-grouped", help="Format of routed experts. Default: int4-grouped.")
@click.option(
    "--resident-format",
    "resident",
    default="int4-grouped",
    help="Format of attention, dense layers and shared experts. Default: int4-grouped.",
)
@click.option("--source-group-size", type=click.IntRange(min=1), help="Group size of a source that does not state it.")
@click.option("--shard-size", default="5GB", metavar="SIZE", help="Most bytes of a file. Default: 5GB.")
@click.option("--mtp/--no-mtp", default=True, help="Keep the draft layer, in int8-row. Default: keep.")
@click.option("--dry-run", is_flag=True, help="Print what would be written, and write nothing.")
@table.options("convert")
def command(
    source: Path,
    out: Path,
    experts: str,
    resident: str,
    source_group_size: int | None,
    shard_size: str,
    mtp: bool,
    dry_run: bool,
    settings: Settings,
) -> None:
    """Convert SRC, a directory, to the new directory OUT.

    OUT appears only when it is complete. An interrupted run leaves `.OUT.partial` beside it; the same command goes on
    from there. Embedding, head, indexer and draft layer are int8-row, routers and norms f32. --group-size is that of
    the int4-grouped tensors that are written, 64 by default.
    """
    from picaflor.convert.converter import ConvertOptions, convert
    from picaflor.convert.policy import DEFAULT_GROUP_SIZE, Policy

    policy = Policy(experts=experts, resident=resident, group_size=settings.group_size or DEFAULT_GROUP_SIZE)
    options = ConvertOptions(
        policy=policy,
        draft=mtp,
        shard_bytes=parse_bytes(shard_size),
        source_group_size=source_group_size,
        strict=settings.strict,
        threads=settings.threads,
    )
    line = Progress()
    started = time.monotonic()

    try:
        report = convert(source, out, options, dry_run=dry_run, progress=line, warn=line.warn)
    finally:
        line.clear()
    if settings.json:
        print(json.dumps(report.record() | {"seconds": time.monotonic() - started}))
    else:
        _print(report)


def _print(report: ConvertReport) -> None:
    """The sizes table, and the errors where weights were encoded."""
    header = ("class", "format", "tensors", "parameters", "bits", "size", "rms error", "worst")
    rows = [header]
    for total in report.plan.totals():
        name = f"{total.format} {total.group_size}" if total.group_size else total.format
        found = report.quality.classes.get(total.group) if report.quality is not None else None
        errors = (f"{found.relative_rms_error:.3%}", f"{found.worst_error:.3%}") if found is not None else ("", "")
        sizes = (str(total.tensors), str(total.parameters), f"{total.bits:.3f}", format_bytes(total.nbytes))
        rows.append((total.group, name, *sizes, *errors))
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    for row in rows:
        cells = [
            cell.ljust(width) if index < 2 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())
    verb = "written to" if report.written else "would be written to"
    print(f"{format_bytes(report.plan.nbytes)} {verb} {report.out} (source {format_bytes(report.source_bytes)})")
    if report.skipped:
        print(f"left out, because the model does not use them: {len(report.skipped)} tensors, as {report.skipped[0]}")
    if not report.written:
        print(f"free there: {format_bytes(report.free_bytes)}; nothing was written")
