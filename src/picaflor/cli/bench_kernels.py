"""`picaflor bench kernels`: rates of the matrix kernels beside what plain reads of the same memory give.

Must not know how a product is computed; backends.cpu.kernels measures.
"""

from __future__ import annotations

import json
import platform
from typing import Any

import click

from picaflor import __version__
from picaflor import settings as table
from picaflor.cli.model import counted
from picaflor.errors import UnsupportedKernel, UsageError
from picaflor.settings import Settings

RECORD_VERSION = 1
DEFAULT_GROUP_SIZE = 64


@click.command()
@click.option("--format", "format_name", default="int4-grouped", help="Weight format. Default: int4-grouped.")
@click.option("--rows", type=click.IntRange(min=1, max=1 << 20), default=2048, help="Outputs. Default: 2048.")
@click.option("--cols", type=click.IntRange(min=1, max=1 << 20), default=6144, help="Inputs. Default: 6144.")
@click.option("--group-size", type=click.IntRange(min=1), help="Weights per scale of int4-grouped. Default: 64.")
@click.option("--tokens", type=click.IntRange(min=1, max=4096), default=1, help="Rows of x. Default: 1.")
@click.option("--megabytes", type=click.IntRange(min=1), default=520, help="Weights to rotate over. Default: 520.")
@click.option("--repeats", type=click.IntRange(min=1), default=9, help="Measured repeats. Default: 9.")
@click.option("--note", default="", help="A line for the record: machine, commit.")
@table.options("bench kernels")
def command(
    format_name: str,
    rows: int,
    cols: int,
    group_size: int | None,
    tokens: int,
    megabytes: int,
    repeats: int,
    note: str,
    settings: Settings,
) -> None:
    """Multiply random matrices that no cache holds, and read the same bytes with plain loads, in turns."""
    from picaflor import formats
    from picaflor.runtime.plan import backend_part

    if format_name not in formats.REGISTRY:
        raise UsageError(f"--format {format_name}: not a weight format; accepted: {', '.join(formats.REGISTRY)}")
    kernels = backend_part("cpu", "kernels")
    sizes = formats.REGISTRY[format_name].group_sizes
    if group_size is not None and group_size not in sizes:
        known = f"accepted: {', '.join(map(str, sizes))}" if sizes else "it has none to choose"
        raise UsageError(f"--group-size {group_size}: no group size of {format_name}; {known}")
    most = settings.threads or backend_part("cpu", "threads").default_threads()
    what = kernels.KernelBenchmark(
        format=format_name,
        rows=rows,
        cols=cols,
        group_size=(group_size or DEFAULT_GROUP_SIZE) if sizes else 0,
        tokens=tokens,
        planes=kernels.PLANES[settings.precision],
        total_bytes=megabytes * 1_000_000,
        repeats=repeats,
        threads=tuple(dict.fromkeys((1, most))),
        isa=settings.isa,
    )
    try:
        result = kernels.run_benchmark(what)
    except ValueError as error:
        raise UnsupportedKernel(f"bench kernels: {error}") from error
    record = _record(result, settings, note)
    if settings.json:
        click.echo(json.dumps(record, indent=2))
        return
    click.echo(_table(what, record))


def _record(result: dict[str, Any], settings: Settings, note: str) -> dict[str, Any]:
    return {
        "kind": "bench kernels",
        "version": RECORD_VERSION,
        "picaflor": __version__,
        "machine": platform.machine(),
        "system": platform.system(),
        "precision": settings.precision,
        "note": note,
        **result,
    }


def _table(what: Any, record: dict[str, Any]) -> str:
    size = f" {what.group_size}" if what.group_size else ""
    lines = [
        f"{what.format}{size} [{what.rows}, {what.cols}], {counted(what.tokens, 'row')} of x, {record['precision']}, "
        f"{record['isa']}; x prepared in {record['prepare_us']:.1f} us",
        "threads   read GB/s   kernel GB/s (min..max)   ratio   CPU/wall",
    ]
    for entry in record["results"]:
        kernel = entry["kernel_gb_per_s"]
        lines.append(
            f"{entry['threads']:7d}   {entry['read_gb_per_s']['median']:9.1f}   "
            f"{kernel['median']:11.1f} ({kernel['min']:.1f}..{kernel['max']:.1f})   "
            f"{entry['ratio']:5.2f}   {entry['kernel_cpu_per_wall']:8.2f}"
        )
        if entry["kernel_cpu_per_wall"] < 0.95:
            lines.append("          the machine was busy with something else: this line says little")
    return "\n".join(lines)
