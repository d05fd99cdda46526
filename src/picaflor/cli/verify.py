"""`picaflor verify`: every kernel of a backend against an independent oracle, and the proof that this can fail.

Must not know what is right; the conformance package decides.
"""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Any

import click

from picaflor import settings as table_of_options
from picaflor.errors import UsageError
from picaflor.settings import Settings

if TYPE_CHECKING:
    from picaflor.conformance.mutation import MutationReport
    from picaflor.conformance.suite import Shard
    from picaflor.conformance.verify import Report

SHOWN_FAILURES = 20
LINES_APART_S = 5.0
"""Where stderr is no terminal: a line of progress after so many seconds."""


@click.command()
@click.option("--format", "formats", multiple=True, metavar="F", help="Only this weight format; may be repeated.")
@click.option("--op", "ops", multiple=True, metavar="O", help="Only this operation; may be repeated.")
@click.option(
    "--group-size", "group_sizes", multiple=True, type=int, metavar="N", help="Only this group size; may be repeated."
)
@click.option("--shard", metavar="I/N", help="Only the I-th of N parts, so that processes can share the work.")
@click.option("--full", is_flag=True, help="All shapes instead of the quick ones.")
@click.option("--mutants", is_flag=True, help="Plant wrong kernels instead; every one must be caught.")
@table_of_options.options("verify")
def command(
    formats: tuple[str, ...],
    ops: tuple[str, ...],
    group_sizes: tuple[int, ...],
    shard: str | None,
    full: bool,
    mutants: bool,
    settings: Settings,
) -> int:
    """Compare every operation on every format with an oracle in float64, and all instruction sets with each other.

    Exit code 0 if all is right, 1 if anything is wrong.
    """
    from picaflor.conformance.suite import WHOLE, Shard
    from picaflor.conformance.verify import What, verify

    part = WHOLE if shard is None else Shard.parse(shard)
    what = What(settings.backend, settings.isa, ops, formats, group_sizes, full, part)
    say = _Progress()
    if mutants:
        from picaflor.conformance.mutation import run_mutants

        if group_sizes:
            raise UsageError("--group-size with --mutants: a wrong group size is seen by cases of all; use --shard")
        found = run_mutants(what, say)
        say("")
        _show(mutants_as_json(found) if settings.json else mutants_as_text(found))
        return 1 if found.wrong else 0
    report = verify(what, say)
    say("")
    _show(as_json(report) if settings.json else as_text(report))
    return 0 if report.good else 1


class _Progress:
    """What is being done, on stderr: one line that changes on a terminal, else a new line every few seconds."""

    def __init__(self) -> None:
        self._start = self._told = time.monotonic()

    def __call__(self, text: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
        elif text and time.monotonic() - self._told >= LINES_APART_S:
            self._told = time.monotonic()
            print(f"{self._told - self._start:5.0f} s: {text}", file=sys.stderr, flush=True)


def _show(result: dict[str, Any] | list[str]) -> None:
    click.echo("\n".join(result) if isinstance(result, list) else json.dumps(result, indent=2))


def as_json(report: Report) -> dict[str, Any]:
    """The report for tools."""
    from picaflor.conformance.verify import table

    return {
        "kind": "verify",
        "good": report.good,
        "backend": report.backend,
        "variants": [str(variant) for variant in report.variants],
        "precisions": report.precisions,
        "cells": dict(report.cells),
        "cases": sum(report.counts.values()),
        "shard": str(report.shard),
        "cases_of_all_shards": report.chosen,
        "table": table(report),
        "outputs_compared": report.compared,
        "outputs_differing": report.differing,
        "failures": [
            {"case": failure.case, "where": failure.where, "fault": failure.fault} for failure in report.failures
        ],
    }


def as_text(report: Report) -> list[str]:
    """The report for people, line by line."""
    from picaflor.conformance.verify import table

    lines = [f"{'operation':15s}{'format':17s}{'cases':>6s}   largest |delta| / sum |terms|"]
    for row in table(report):
        metrics = ", ".join(f"{name} {value:.1e}" for name, value in row["largest_metric"].items())
        lines.append(f"{row['op']:15s}{row['format']:17s}{row['cases']:6d}   {metrics}")
    cells = ", ".join(f"{count} {state}" for state, count in sorted(report.cells.items()))
    lines.append(f"cells of {report.backend}: {cells}")
    lines.append(
        f"{sum(report.counts.values())} cases in {' and '.join(report.precisions)} on "
        f"{', '.join(map(str, report.variants))}: {report.differing} of {report.compared} outputs differ in their bits"
    )
    lines += _part(report.shard, sum(report.counts.values()), report.chosen, "cases")
    return [*lines, *_failures([str(failure) for failure in report.failures], report.shard)]


def _part(shard: Shard, run: int, chosen: int, what: str) -> list[str]:
    """Says that a shard is not the whole."""
    return [f"shard {shard}: {run} of {chosen} {what}; the others are no part of this run"] if shard.count > 1 else []


def _failures(texts: list[str], shard: Shard) -> list[str]:
    lines = [f"FAILED {text}" for text in texts[:SHOWN_FAILURES]]
    if len(texts) > SHOWN_FAILURES:
        lines.append(f"... and {len(texts) - SHOWN_FAILURES} more (--json lists all)")
    good = "all right" if shard.count == 1 else f"all right in shard {shard}"
    return [*lines, f"{len(texts)} failures" if texts else good]


def mutants_as_json(report: MutationReport) -> dict[str, Any]:
    """The verdicts for tools."""
    return {
        "kind": "verify --mutants",
        "good": not report.wrong,
        "backend": report.backend,
        "variant": str(report.variant),
        "kinds": report.kinds,
        "counts": dict(report.count()),
        "shard": str(report.shard),
        "mutants_of_all_shards": report.chosen,
        "mutants": [
            {
                "kind": verdict.planted.kind,
                "op": verdict.planted.op,
                "format": verdict.planted.format,
                "expected": verdict.planted.expects,
                "reason": verdict.planted.reason,
                "by": verdict.by,
                "fault": verdict.fault,
            }
            for verdict in report.verdicts
        ],
        "wrong": report.wrong,
    }


def mutants_as_text(report: MutationReport) -> list[str]:
    """The verdicts for people, line by line."""
    kinds, counts = report.kinds, report.count()
    lines = [f"{kind}: {', '.join(formats)}".removesuffix(": -") for kind, formats in kinds.items()]
    for verdict in report.verdicts:
        if verdict.planted.expects == "equivalent" and not verdict.fault:
            lines.append(f"equivalent, same bits: {verdict.planted} ({verdict.planted.reason})")
    lines.append(
        f"{counts['killed']} mutants killed: {len(kinds)} kinds, {sum(map(len, kinds.values()))} kinds x formats; "
        f"{counts['equivalent']} equivalent, {counts['passes']} controls passed, on {report.variant}"
    )
    lines += _part(report.shard, len(report.verdicts), report.chosen, "mutants")
    return [*lines, *_failures(report.wrong, report.shard)]
