"""`picaflor verify`: every kernel of a backend against an independent oracle, and the proof that this can fail.

Must not know what is right; the conformance package decides.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import click

from picaflor import settings as table_of_options
from picaflor.settings import Settings

if TYPE_CHECKING:
    from picaflor.conformance.verify import Report

SHOWN_FAILURES = 20


@click.command()
@click.option("--format", "formats", multiple=True, metavar="F", help="Only this weight format; may be repeated.")
@click.option("--op", "ops", multiple=True, metavar="O", help="Only this operation; may be repeated.")
@click.option("--full", is_flag=True, help="All shapes instead of the quick ones.")
@table_of_options.options("verify")
def command(formats: tuple[str, ...], ops: tuple[str, ...], full: bool, settings: Settings) -> int:
    """Compare every operation on every format with an oracle in float64, and all instruction sets with each other.

    Exit code 0 if all is right, 1 if anything is wrong.
    """
    from picaflor.conformance.verify import What, verify

    what = What(backend=settings.backend, isa=settings.isa, ops=ops, formats=formats, full=full)
    report = verify(what, _say)
    click.echo(json.dumps(as_json(report), indent=2) if settings.json else as_text(report))
    return 0 if report.good else 1


def _say(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


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
        "table": table(report),
        "outputs_compared": report.compared,
        "outputs_differing": report.differing,
        "failures": [
            {"case": failure.case, "where": failure.where, "fault": failure.fault} for failure in report.failures
        ],
    }


def as_text(report: Report) -> str:
    """The report for people."""
    from picaflor.conformance.verify import table

    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
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
    lines += [f"FAILED {failure}" for failure in report.failures[:SHOWN_FAILURES]]
    if len(report.failures) > SHOWN_FAILURES:
        lines.append(f"... and {len(report.failures) - SHOWN_FAILURES} more (--json lists all)")
    lines.append("all right" if report.good else f"{len(report.failures)} failures")
    return "\n".join(lines)
