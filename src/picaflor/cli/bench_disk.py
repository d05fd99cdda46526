"""`picaflor bench disk [MODEL|FILE]`: what a drive gives in the shape in which the engine reads.

Must not know how reads are carried out; runtime.diskbench measures.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from picaflor import settings as table
from picaflor.cli.model import Progress
from picaflor.errors import BadContainer, UsageError
from picaflor.settings import Settings
from picaflor.sizes import format_bytes, parse_bytes

if TYPE_CHECKING:
    from picaflor.runtime.diskbench import DiskBench, DiskFile

RECORD_VERSION = 1
DEFAULT_READ_BYTES = 4 << 20
DEFAULT_SIZE = "2GiB"
DEFAULT_TOTAL = "256MiB"


@click.command()
@click.argument("path", metavar="[MODEL|FILE]", required=False)
@click.option("--folder", type=click.Path(path_type=Path), help="Where the test file is made. Default: here.")
@click.option("--size", default=DEFAULT_SIZE, help=f"Size of the test file. Default: {DEFAULT_SIZE}.")
@click.option("--read-size", help="Bytes of a random read where there is no model. Default: 4MiB.")
@click.option("--per-shape", default=DEFAULT_TOTAL, help=f"Bytes read for one figure. Default: {DEFAULT_TOTAL}.")
@click.option("--repeats", type=click.IntRange(min=1), default=3, help="Rounds over all shapes. Default: 3.")
@click.option("--note", default="", help="A line for the record: machine, storage.")
@table.options("bench disk")
def command(
    path: str | None,
    folder: Path | None,
    size: str,
    read_size: str | None,
    per_shape: str,
    repeats: int,
    note: str,
    settings: Settings,
) -> None:
    """Read a model's experts, or pieces of a FILE, at random and in order, past the page cache and through it (cold).

    Without an argument a test file is made here (--folder, --size) and removed again. Rates are medians over rounds;
    beside them stands what the system says it fetched from storage.
    """
    from picaflor.runtime.diskbench import DiskBench, shapes

    if path is not None and folder is not None:
        raise UsageError("--folder says where a test file is made, and there is none when a model or file is given")
    read_bytes = parse_bytes(read_size) if read_size is not None else DEFAULT_READ_BYTES
    total = parse_bytes(per_shape)
    for name, value in (("--read-size", read_bytes), ("--per-shape", total)):
        if value < 1:
            raise UsageError(f"{name} 0: give a size above 0")
    if path is None and parse_bytes(size) < read_bytes:
        least = format_bytes(read_bytes)
        raise UsageError(f"--size {size}: a test file of at least {least} is needed (--read-size)")
    line = Progress()
    with _disk_file(path, folder, parse_bytes(size), line) as file:
        bench = DiskBench(file, read_bytes=read_bytes, total_bytes=total)
        try:
            wanted = shapes(_engines(settings.read_engine), direct=bool(bench.block))
            results = bench.measure(wanted, repeats=repeats, progress=lambda done, all_: line("measuring", done, all_))
            rows = [result.record() for result in results]
        finally:
            line.clear()
            bench.close()
        record = _record(file, bench, rows, read_bytes, note)
    if settings.json:
        print(json.dumps(record))
    else:
        _print(record)


def _engines(wanted: str) -> tuple[str, ...]:
    """The engines to measure: all that the system allows, or the one that was asked for."""
    from picaflor._native import uring_error

    code = uring_error()
    if wanted == "io_uring" and code:
        raise UsageError(f"--read-engine io_uring: the system refuses it: {os.strerror(code)}")
    if wanted != "auto":
        return (wanted,)
    return ("threads",) if code else ("threads", "io_uring")


@contextmanager
def _disk_file(path: str | None, folder: Path | None, size: int, line: Progress) -> Iterator[DiskFile]:
    """The file to measure with; one that was made here is removed again, however the measurement ends."""
    from picaflor.runtime.diskbench import DiskFile, write_test_file

    if path is not None:
        found = Path(path).expanduser()
        if found.is_dir():
            yield _model_file(found)
        elif found.is_file():
            yield DiskFile(found)
        else:
            what = "neither a file nor a directory" if found.exists() else "no such file or directory"
            raise BadContainer(f"{path}: {what}")
        return
    where = Path.cwd() if folder is None else folder
    if not where.is_dir():
        raise UsageError(f"--folder {where}: no such directory")
    made = Path(tempfile.mktemp(prefix="picaflor-disk-", suffix=".tmp", dir=where))
    try:
        write_test_file(made, size, lambda done, total: line("writing", done, total))
        line.clear()
        yield DiskFile(made)
    finally:
        made.unlink(missing_ok=True)


def _model_file(folder: Path) -> DiskFile:
    """The model's shard with the most bytes of experts, and where these lie."""
    from picaflor.container.index import Container
    from picaflor.models.loading import open_model
    from picaflor.runtime.diskbench import DiskFile
    from picaflor.store.reader import ExpertFiles
    from picaflor.store.types import ExpertKey

    with Container.open(folder) as container:
        _, index = open_model(container)
        if not index.experts:
            raise BadContainer(f"{folder}: the model has no routed experts; give one of its files")
        files = ExpertFiles(container, index.experts)
        spans: dict[int, list[tuple[int, int]]] = {}
        for layer in files.layers:
            for expert in range(files.count(layer)):
                run = max(files.reads(ExpertKey(layer, expert)).runs, key=lambda run: run.nbytes)
                spans.setdefault(run.shard, []).append((run.offset, run.nbytes))
        shard = max(spans, key=lambda number: sum(nbytes for _, nbytes in spans[number]))
        return DiskFile(container.shards[shard].path, tuple(spans[shard]))


def _record(file: DiskFile, bench: DiskBench, rows: list[dict[str, Any]], read_bytes: int, note: str) -> dict[str, Any]:
    sizes = [nbytes for _, nbytes in file.experts] if file.experts is not None else [read_bytes]
    from picaflor.runtime.machine import record_head

    return {
        **record_head("bench disk", version=RECORD_VERSION, note=note),
        "file_system": bench.file_system or None,
        "block_bytes": bench.block or None,
        "direct_refused": bench.refusal or None,
        "experts": file.experts is not None,
        "random_read_bytes": round(sum(sizes) / len(sizes)),
        "shapes": rows,
    }


def _print(record: dict[str, Any]) -> None:
    what = "experts" if record["experts"] else "reads"
    kind = record["file_system"] or "unknown file system"
    print(f"{kind}; random {what} of {format_bytes(record['random_read_bytes'])}; GB/s, median (lowest to highest)")
    print("pattern     mode      engine    depth   GB/s                    from storage")
    for row in record["shapes"]:
        spread = (
            f"{row['bytes_per_s'] / 1e9:.2f} ({row['bytes_per_s_min'] / 1e9:.2f} to {row['bytes_per_s_max'] / 1e9:.2f})"
        )
        share = "unknown" if row["physical"] is None else f"{row['physical']:.2f}"
        print(
            f"{row['pattern']:<10}  {row['mode']:<8}  {row['engine']:<8}  {row['depth']:>5}   {spread:<22}  {share:>12}"
        )
    if record["direct_refused"]:
        print(f"picaflor: not measured past the page cache: {record['direct_refused']}", file=sys.stderr)
