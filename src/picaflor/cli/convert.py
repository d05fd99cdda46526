"""`picaflor convert SRC OUT`: make a container from a checkpoint or another container.

Must not know how weights are encoded; picaflor.convert does that.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from picaflor import option_kinds
from picaflor import settings as table
from picaflor.cli.model import Progress, check_named, counted, split_folders
from picaflor.errors import UsageError
from picaflor.settings import Settings
from picaflor.sizes import format_bytes

if TYPE_CHECKING:
    from picaflor.convert.converter import ConvertReport
    from picaflor.convert.job import JobReport
    from picaflor.convert.policy import Policy
    from picaflor.convert.relayout import RelayoutReport


@click.command()
@click.argument("source_word", metavar="SRC")
@click.argument("out_word", metavar="OUT")
@click.option(
    "--relayout", is_flag=True, help="Copy a container byte for byte into the file order of one read per expert."
)
@click.option("--format", "experts", help="Format of routed experts. Default: int4-grouped.")
@click.option(
    "--resident-format",
    "resident",
    help="Format of attention, dense layers and shared experts. Default: int4-grouped.",
)
@click.option("--kv-b-format", "kv_b", help="Format of kv_b_proj alone. Default: that of the rest of attention.")
@click.option("--source-group-size", type=click.IntRange(min=1), help="Group size of a source that does not state it.")
@click.option("--shard-size", default="5GB", metavar="SIZE", help="Most bytes of a file. Default: 5GB.")
@click.option("--mtp/--no-mtp", default=True, help="Keep the draft layer, in int8-row. Default: keep.")
@click.option("--dry-run", is_flag=True, help="Print what would be written, and write nothing.")
@table.options("convert")
def command(
    source_word: str,
    out_word: str,
    relayout: bool,
    experts: str | None,
    resident: str | None,
    kv_b: str | None,
    source_group_size: int | None,
    shard_size: str,
    mtp: bool,
    dry_run: bool,
    settings: Settings,
) -> int:
    """Convert SRC, a directory, to the new directory OUT.

    OUT appears only when it is complete. An interrupted run leaves `.OUT.partial` beside it; the same command goes on
    from there. Embedding, head, indexer and draft layer are int8-row, routers and norms f32. --group-size is that of
    the int4-grouped tensors that are written, 64 by default. --relayout changes no byte of any tensor, and verifies it.

    Exit code 1 of --dry-run where the disk has no room for it.
    """
    check_named(source_word, "SRC")
    check_named(out_word, "OUT")
    source, out = Path(source_word), Path(out_word)
    line = Progress()
    started = time.monotonic()
    common = {
        "split": split_folders(settings),
        "shard_bytes": _shard_bytes(shard_size),
        "source_group_size": source_group_size,
        "strict": settings.strict,
        "threads": settings.threads,
    }
    try:
        report: RelayoutReport | ConvertReport
        if relayout:
            _check_lossless({"--format": experts, "--resident-format": resident, "--kv-b-format": kv_b}, mtp, settings)
            report = _relayout(source, out, common, dry_run, line)
        else:
            policy = _policy(experts, resident, kv_b, settings, line.warn)
            report = _convert(source, out, common | {"policy": policy, "draft": mtp}, dry_run, line)
    finally:
        line.clear()
    if settings.json:
        print(json.dumps(report.record() | {"seconds": time.monotonic() - started}))
    elif relayout:
        _print_relayout(cast("RelayoutReport", report))
    else:
        _print(cast("ConvertReport", report))
    return 0 if report.fits else 1


def _shard_bytes(text: str) -> int:
    kind = option_kinds.size()
    try:
        nbytes: int = kind.read(text)
    except (ValueError, UsageError):
        raise UsageError(f"--shard-size: {text!r} is not accepted; give {kind.accepts}") from None
    return nbytes


def _convert(source: Path, out: Path, options: Mapping[str, Any], dry_run: bool, line: Progress) -> ConvertReport:
    from picaflor.convert.converter import ConvertOptions, convert

    return convert(source, out, ConvertOptions(**options), dry_run=dry_run, progress=line, warn=line.warn)


def _relayout(source: Path, out: Path, options: Mapping[str, Any], dry_run: bool, line: Progress) -> RelayoutReport:
    from picaflor.convert.job import JobOptions
    from picaflor.convert.relayout import relayout

    return relayout(source, out, JobOptions(**options), dry_run=dry_run, progress=line, warn=line.warn)


def _policy(
    experts: str | None, resident: str | None, kv_b: str | None, settings: Settings, warn: Callable[[str], None]
) -> Policy:
    """The formats that were asked for; one line for a group size that none of them has."""
    from picaflor import formats
    from picaflor.convert.policy import DEFAULT_FORMAT, DEFAULT_GROUP_SIZE, Policy

    policy = Policy(
        experts=experts or DEFAULT_FORMAT,
        resident=resident or DEFAULT_FORMAT,
        kv_b=kv_b,
        group_size=settings.group_size or DEFAULT_GROUP_SIZE,
    )
    written = (policy.experts, policy.resident, policy.kv_b or policy.resident)
    if settings.group_size is not None and not any(formats.get(name).group_sizes for name in written):
        warn(f"--group-size {settings.group_size} has no effect: nothing is written in {DEFAULT_FORMAT}")
    return policy


def _check_lossless(formats: Mapping[str, str | None], mtp: bool, settings: Settings) -> None:
    """Raises UsageError for an option that would change what is copied."""
    given = {
        **{flag: name is not None for flag, name in formats.items()},
        "--no-mtp": not mtp,
        "--group-size": settings.group_size is not None,
    }
    wrong = next((flag for flag, there in given.items() if there), None)
    if wrong is not None:
        raise UsageError(f"{wrong} does not go with --relayout, which changes no byte; leave one of them out")


def _room(report: JobReport) -> str:
    """What the disk has and what is needed of it."""
    from picaflor.convert.target import SPARE_BYTES

    found = f"free there: {format_bytes(report.free_bytes)}"
    if report.fits:
        return found
    needed = format_bytes(report.needed_bytes)
    return f"too little room: {found}, {needed} needed, {format_bytes(SPARE_BYTES)} of that in reserve"


def _print_relayout(report: RelayoutReport) -> None:
    """What was copied, and what became of the reads."""
    size = format_bytes(report.nbytes)
    before = counted(report.reads_before, "read")
    if report.written:
        print(f"{size} in {report.tensors} tensors copied to {report.out}, every byte compared")
        print(f"{report.experts} experts, {before} each before, {counted(report.reads_after or 0, 'read')} now")
    else:
        print(f"{size} in {report.tensors} tensors would be copied to {report.out}")
        print(f"{report.experts} experts, {before} each now, one then")
        print(f"{_room(report)}; nothing was written")
    if report.side_files:
        print(f"side files: {', '.join(report.side_files)}")
    if report.left_out:
        print(f"not copied, because they are no part of a model: {', '.join(report.left_out)}")


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
        print(f"{_room(report)}; nothing was written")
