"""`picaflor bench kernels`: rates of the matrix kernels beside what plain reads of the same memory give.

Must not know how a product is computed; backends.cpu.kernels_bench and backends.cpu.compare measure.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator
from typing import Any

import click

from picaflor import __version__
from picaflor import settings as table
from picaflor.errors import UnsupportedKernel, UsageError
from picaflor.settings import Settings

RECORD_VERSION = 2
DEFAULT_FORMAT = "int4-grouped"
DEFAULT_GROUP_SIZE = 64
ALL = "all"
MOST = 1 << 20
MOST_TOKENS = 4096
MIN_EXPERTS_MB = 200
HEAD = "isa      threads  rows   read GB/s   kernel GB/s (min..max)   ratio   to one   GMAC/s   of peak   CPU/wall"


def _shape(text: str) -> tuple[int, int]:
    rows, _, cols = text.partition("x")
    if not (rows.isascii() and rows.isdigit() and cols.isascii() and cols.isdigit()):
        raise UsageError(f"--shape {text}: not a shape; accepted: ROWSxCOLS, as 2048x6144")
    if not (1 <= int(rows) <= MOST and 1 <= int(cols) <= MOST):
        raise UsageError(f"--shape {text}: accepted: 1 to {MOST} rows and columns")
    return int(rows), int(cols)


@click.command()
@click.option("--format", "names", multiple=True, help="Weight format, or all. May be repeated. Default: int4-grouped.")
@click.option("--shape", "shapes", multiple=True, metavar="ROWSxCOLS", help="May be repeated. Default: 2048x6144.")
@click.option(
    "--group-size",
    "group_sizes",
    type=click.IntRange(min=1),
    multiple=True,
    help="Weights per scale of int4-grouped. May be repeated. Default: 64.",
)
@click.option(
    "--tokens",
    type=click.IntRange(min=1, max=MOST_TOKENS),
    multiple=True,
    help="Rows of x. May be repeated. Default: 1.",
)
@click.option("--each-isa", is_flag=True, help="Every instruction set of this machine but scalar, not --isa alone.")
@click.option("--experts", is_flag=True, help="Also eight experts of 3 x 2048 x 6144 by the fused operation.")
@click.option("--compare", is_flag=True, help="Also int4 products of llama.cpp, onnxruntime and PyTorch, if installed.")
@click.option("--megabytes", type=click.IntRange(min=1), default=520, help="Weights to rotate over. Default: 520.")
@click.option("--repeats", type=click.IntRange(min=1), default=9, help="Measured repeats. Default: 9.")
@click.option("--note", default="", help="A line for the record: machine, commit.")
@table.options("bench kernels")
def command(
    names: tuple[str, ...],
    shapes: tuple[str, ...],
    group_sizes: tuple[int, ...],
    tokens: tuple[int, ...],
    each_isa: bool,
    experts: bool,
    compare: bool,
    megabytes: int,
    repeats: int,
    note: str,
    settings: Settings,
) -> None:
    """Multiply random matrices that no cache holds, and read the same bytes with plain loads, in turns.

    One line per format, group size, shape, instruction set, number of threads (1 and --threads) and number of rows of
    x. ratio: stored bytes multiplied per second, to bytes read per second in the same rounds. to one: time, relative
    to one row of x. of peak: products, relative to 64 per clock and thread; the clock is measured as well.
    """
    from picaflor.runtime.plan import backend_part

    cases = _cases(names or (DEFAULT_FORMAT,), group_sizes)
    sizes = [_shape(shape) for shape in shapes] or [(2048, 6144)]
    bench, kernels = backend_part("cpu", "kernels_bench"), backend_part("cpu", "kernels")
    most = settings.threads or backend_part("cpu", "threads").default_threads()
    common = {
        "threads": tuple(dict.fromkeys((1, most))),
        "isas": bench.vector_isas() if each_isa else (settings.isa,),
        "planes": kernels.PLANES[settings.precision],
        "repeats": repeats,
    }
    show = (lambda text: None) if settings.json else click.echo
    record = _head(settings, note, common["planes"], repeats)
    try:
        record["results"] = []
        for name, size in cases:
            for rows, cols in sizes:
                shape = bench.Shape(format=name, rows=rows, cols=cols, group_size=size)
                job = bench.Job(
                    shape=shape, tokens=tuple(sorted(set(tokens or (1,)))), total_bytes=megabytes * 1_000_000, **common
                )
                show(f"{_named(name, size)} [{rows}, {cols}], {settings.precision}\n{HEAD}")
                record["results"] += _shown(bench.measure(job), show)
        if experts:
            job = bench.ExpertJob(total_bytes=max(megabytes, MIN_EXPERTS_MB) * 1_000_000, **common)
            show(f"{job.chosen} experts of {job.inner} x {job.hidden}, {settings.precision}\n{HEAD}")
            record["experts"] = _shown(bench.measure_experts(job), show)
        if compare:
            record["compared"] = backend_part("cpu", "compare").compare(
                shapes=sizes,
                tokens=tuple(tokens or (1,)),
                threads=common["threads"],
                megabytes=megabytes,
                repeats=repeats,
                isa=settings.isa,
                show=show,
            )
    except ValueError as error:
        raise UnsupportedKernel(f"bench kernels: {error}") from error
    if settings.json:
        click.echo(json.dumps(record, indent=2))


def _cases(names: tuple[str, ...], group_sizes: tuple[int, ...]) -> list[tuple[str, int]]:
    """(format, group size) to measure. Raises UsageError."""
    from picaflor import formats

    known = formats.REGISTRY
    for name in names:
        if name != ALL and name not in known:
            raise UsageError(f"--format {name}: not a weight format; accepted: {', '.join(known)}, {ALL}")
    chosen = list(known) if ALL in names else list(dict.fromkeys(names))
    for size in group_sizes:
        if not any(size in known[name].group_sizes for name in chosen):
            accepted = sorted({size for name in chosen for size in known[name].group_sizes})
            text = f"accepted: {', '.join(map(str, accepted))}" if accepted else "it has none to choose"
            raise UsageError(f"--group-size {size}: no group size of {', '.join(chosen)}; {text}")
    cases = []
    for name in chosen:
        if known[name].group_sizes:
            cases += [(name, size) for size in group_sizes or (DEFAULT_GROUP_SIZE,)]
        else:
            cases.append((name, 0))
    return cases


def _named(name: str, size: int) -> str:
    return f"{name} {size}" if size else name


def _shown(entries: Iterator[dict[str, Any]], show: Any) -> list[dict[str, Any]]:
    kept = []
    for entry in entries:
        kept.append(entry)
        show(_line(entry))
    return kept


def _line(entry: dict[str, Any]) -> str:
    kernel = entry["kernel_gb_per_s"]
    spread = f"{kernel['median']:.1f} ({kernel['min']:.1f}..{kernel['max']:.1f})"
    to_one = "" if entry.get("to_one") is None else f"{entry['to_one']:.2f}"
    macs = f"{entry['gmac_per_s']:8.1f}   {entry['of_peak']:7.2f}" if "of_peak" in entry else " " * 18
    line = (
        f"{entry['isa']:7s}  {entry['threads']:7d}  {entry.get('tokens', 1):4d}   "
        f"{entry['read_gb_per_s']['median']:9.1f}   {spread:>22s}   {entry['ratio']:5.2f}   {to_one:>6s} {macs}   "
        f"{entry['cpu_per_wall']:8.2f}"
    )
    if entry["discarded"]:
        line += f"   left out, the machine was busy: {entry['discarded']}"
    if not entry["counts"]:
        line += "   DOES NOT COUNT: too few passes had the processors to themselves"
    return line


def _head(settings: Settings, note: str, planes: int, repeats: int) -> dict[str, Any]:
    return {
        "kind": "bench kernels",
        "version": RECORD_VERSION,
        "picaflor": __version__,
        "machine": platform.machine(),
        "system": platform.system(),
        "precision": settings.precision,
        "planes": planes,
        "repeats": repeats,
        "clock": "additions that each wait for the one before, per second and thread",
        "note": note,
    }
