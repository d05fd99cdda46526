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
    from picaflor.conformance.mutation import MutationReport
    from picaflor.conformance.verify import Report

SHOWN_FAILURES = 20


@click.command()
@click.option("--format", "formats", multiple=True, metavar="F", help="Only this weight format; may be repeated.")
@click.option("--op", "ops", multiple=True, metavar="O", help="Only this operation; may be repeated.")
@click.option("--full", is_flag=True, help="All shapes instead of the quick ones.")
@click.option("--mutants", is_flag=True, help="Plant wrong kernels instead; every one must be caught.")
@table_of_options.options("verify")
def command(formats: tuple[str, ...], ops: tuple[str, ...], full: bool, mutants: bool, settings: Settings) -> int:
    """Compare every operation on every format with an oracle in float64, and all instruction sets with each other.

    Exit code 0 if all is right, 1 if anything is wrong.
    """
    from picaflor.conformance.verify import What, verify

    what = What(backend=settings.backend, isa=settings.isa, ops=ops, formats=formats, full=full)
    if mutants:
        from picaflor.conformance.mutation import run_mutants

        found = run_mutants(what, _say)
        _show(mutants_as_json(found) if settings.json else mutants_as_text(found))
        return 1 if found.wrong else 0
    report = verify(what, _say)
    _show(as_json(report) if settings.json else as_text(report))
    return 0 if report.good else 1


def _say(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def _show(result: dict[str, Any] | list[str]) -> None:
    _say("")
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
    lines += _failures([str(failure) for failure in report.failures])
    return lines


def _failures(texts: list[str]) -> list[str]:
    lines = [f"FAILED {text}" for text in texts[:SHOWN_FAILURES]]
    if len(texts) > SHOWN_FAILURES:
        lines.append(f"... and {len(texts) - SHOWN_FAILURES} more (--json lists all)")
    return [*lines, f"{len(texts)} failures" if texts else "all right"]


def mutants_as_json(report: MutationReport) -> dict[str, Any]:
    """The verdicts for tools."""
    return {
        "kind": "verify --mutants",
        "good": not report.wrong,
        "backend": report.backend,
        "variant": str(report.variant),
        "kinds": report.kinds,
        "counts": dict(report.count()),
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
    return [*lines, *_failures(report.wrong)]
