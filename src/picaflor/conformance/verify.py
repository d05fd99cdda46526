"""Runs cases on every variant of a backend, compares them with the oracle and with each other, and reports.

Knows the backend by name through `runtime.plan` and the capability table; must not know kernels or the command line.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from picaflor import settings
from picaflor.backends.table import NO_FORMAT, CapabilityTable, Cell
from picaflor.conformance import attending, suite
from picaflor.conformance.case import Case, Device, Prepared, hold, make_matrix, random, start
from picaflor.conformance.check import LARGEST_DIGIT, Array, compare, differing
from picaflor.conformance.minimum import MINIMUM
from picaflor.errors import PicaflorError, UnsupportedKernel, UsageError
from picaflor.formats import REGISTRY
from picaflor.runtime.plan import EngineOptions, load_backend

Say = Callable[[str], None]
Wrap = Callable[[Any], Device]
READS_WEIGHTS = ("matmul", "expert_ffn", "rows", "row_axpy")
"""The operations of which every backend must say, for each format, whether it has them."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One way in which a backend computes; all must give the same bits."""

    isa: str
    threads: int

    def __str__(self) -> str:
        return f"{self.isa} x{self.threads}"


@dataclass(frozen=True, slots=True)
class Failure:
    """What is wrong, where."""

    case: str
    where: str
    fault: str

    def __str__(self) -> str:
        return f"{self.case} ({self.where}): {self.fault}" if self.where else f"{self.case}: {self.fault}"


@dataclass(slots=True)
class Report:
    """The result of a run. `chosen`: cases of all shards. `counts`: the cases of this one.

    `metrics`: largest |delta| / sum |terms| per (operation, format, precision).
    """

    backend: str
    variants: list[Variant]
    precisions: list[str]
    shard: suite.Shard = suite.WHOLE
    chosen: int = 0
    counts: dict[tuple[str, str], int] = field(default_factory=dict)
    cells: Counter[str] = field(default_factory=Counter)
    metrics: dict[tuple[str, str, str], float] = field(default_factory=dict)
    compared: int = 0
    differing: int = 0
    failures: list[Failure] = field(default_factory=list)

    @property
    def good(self) -> bool:
        """True where nothing failed."""
        return not self.failures and not self.differing


@dataclass(frozen=True, slots=True)
class What:
    """What to verify. Empty means all; `wrap` puts something around each backend (a planted fault)."""

    backend: str = "auto"
    isa: str = "auto"
    ops: tuple[str, ...] = ()
    formats: tuple[str, ...] = ()
    group_sizes: tuple[int, ...] = ()
    full: bool = False
    shard: suite.Shard = suite.WHOLE
    precisions: tuple[str, ...] = ()
    wrap: Wrap | None = None


def variants(backend: str, isa: str) -> list[Variant]:
    """Every instruction set that this machine and build have, on one thread, and the best one on two.

    A backend with memory of its own has one architecture: it runs twice, and its threads are the host's.
    """
    plain = load_backend(EngineOptions(backend=backend, threads=1), _quiet)
    if plain.on_device:
        return [Variant(plain.isa, 1), Variant(plain.isa, 2)]
    names = settings.TABLE["isa"].kind.metavar.split("|") if isa == "auto" else [isa]
    found = [Variant(name, 1) for name in names if name != "auto" and (isa != "auto" or _available(backend, name))]
    return [*found, Variant(found[-1].isa, 2)]


def _available(backend: str, isa: str) -> bool:
    try:
        load_backend(EngineOptions(backend=backend, isa=isa, threads=1), _quiet)
    except UsageError:
        return False
    return True


def _quiet(text: str) -> None:
    """Fallbacks are told by the table; a check of kernels has no use for the notice."""


def open_device(what: What, variant: Variant, precision: str) -> Device:
    """A fresh backend for one case."""
    options = EngineOptions(backend=what.backend, isa=variant.isa, threads=variant.threads, precision=precision)
    device: Any = load_backend(options, _quiet)
    return what.wrap(device) if what.wrap is not None else device


def known_precisions() -> list[str]:
    """The precisions that this version has and the oracle has bounds for."""
    return [name for name in settings.TABLE["precision"].kind.metavar.split("|") if name in LARGEST_DIGIT]


def precisions_of(device: Any) -> list[str]:
    """Those of `known_precisions` that a backend has: all, where it does not say."""
    return [name for name in known_precisions() if name in getattr(device, "precisions", (name,))]


def check_names(what: What, cases: Sequence[Case]) -> None:
    """Raises UsageError for an operation, a format or a group size that no case has."""
    for option, wanted, known in (
        ("--op", what.ops, {case.op for case in cases}),
        ("--format", what.formats, {case.format for case in cases}),
    ):
        for name in wanted:
            if name not in known:
                raise UsageError(f"{option} {name}: accepted are {', '.join(sorted(known - {NO_FORMAT}))}")
    sizes = {case.group_size for case in cases} - {0}
    for size in what.group_sizes:
        if size not in sizes:
            raise UsageError(f"--group-size {size}: accepted are {', '.join(map(str, sorted(sizes)))}")


def verify(what: What, say: Say = _quiet) -> Report:
    """Run every chosen case in every precision on every variant. Raises UsageError for unknown names."""
    every = list(suite.all_cases())
    check_names(what, every)
    chosen = suite.pick(every, ops=what.ops, formats=what.formats, group_sizes=what.group_sizes, full=what.full)
    if not chosen:
        raise UsageError(
            f"{_words(what)}: no case has all of this"
            f"{'' if what.full else ' (with --full there may be)'}; a run of nothing proves nothing"
        )
    plain: Any = load_backend(EngineOptions(backend=what.backend, threads=1), _quiet)
    chosen = offered(plain, chosen)
    cases = what.shard.of_cases(chosen) if chosen else []
    report = Report(plain.name, variants(what.backend, what.isa), list(what.precisions or precisions_of(plain)))
    report.shard, report.chosen = what.shard, len(chosen)
    report.counts = dict(suite.count(cases))
    for number, case in enumerate(cases):
        say(f"{number} of {len(cases)} cases done, verifying {case.label}")
        _check_case(what, Prepared(case), report)
    _check_counts(what, suite.count(suite.pick(every, ops=what.ops, formats=what.formats, full=what.full)), report)
    _check_cells(what, plain, every, report)
    return report


def offered(plain: Any, cases: Iterable[Case]) -> list[Case]:
    """Without those of cells that are refused or missing: `_check_cells` tries the former and names the latter."""
    missing = missing_cells(plain)
    known = (case for case in cases if f"{plain.name}.{case.op}.{case.format}" not in missing)
    return suite.offered(known, (cell for cell in plain.table.cells() if cell.backend == plain.name))


def missing_cells(plain: Any) -> list[str]:
    """Names of the cells that the backend lacks: each registered format needs one per operation that reads weights."""
    return [name for name in plain.table.missing(REGISTRY, READS_WEIGHTS) if name.startswith(f"{plain.name}.")]


def _words(what: What) -> str:
    """The choice as it was given."""
    given = (("--op", what.ops), ("--format", what.formats), ("--group-size", what.group_sizes))
    return " ".join(f"{option} {value}" for option, values in given for value in values)


def _check_case(what: What, case: Prepared, report: Report) -> None:
    for precision in report.precisions:
        first: list[Array] | None = None
        for variant in report.variants:
            where = f"{precision}, {variant}"
            device = open_device(what, variant, precision)
            found = run_case(case, device)
            if isinstance(found, str):
                report.failures.append(Failure(case.case.label, where, found))
                continue
            others = _fallbacks(device)
            if others:
                report.failures.append(Failure(case.case.label, where, f"another kernel ran instead of {others}"))
            stores = getattr(device, "stores_activations", True)
            outcome = compare(found, case.expected(precision), precision, by_rule=stores)
            key = (case.case.op, case.case.format, precision)
            report.metrics[key] = max(report.metrics.get(key, 0.0), outcome.metric)
            if outcome.fault:
                report.failures.append(Failure(case.case.label, where, outcome.fault))
            if first is None:
                first = found
            else:
                _check_bits(case.case, where, first, found, report)


def _fallbacks(device: Any) -> str:
    """Names of the cells that did not run themselves, but for those that the table declares waived.

    What was verified then is not what was asked for.
    """
    table = getattr(device, "table", None)
    return ", ".join(table.surprises()) if isinstance(table, CapabilityTable) else ""


def run_case(case: Prepared, device: Device) -> list[Array] | str:
    """The outputs, or what the device raised, in words."""
    try:
        return case.run(device)
    except (PicaflorError, ValueError) as error:
        return f"raised {type(error).__name__}: {error}"


def _check_bits(case: Case, where: str, first: list[Array], found: list[Array], report: Report) -> None:
    report.compared += sum(array.size for array in found)
    other = differing(first, found)
    if other:
        report.differing += other
        text = f"{other} values have other bits than {report.variants[0]}"
        report.failures.append(Failure(case.label, where, text))


def _check_counts(what: What, counts: Mapping[tuple[str, str], int], report: Report) -> None:
    """A drop of cases below what was once there is a failure, whatever shard or group size is run."""
    for (op, format_name), least in minimum(what).items():
        found = counts.get((op, format_name), 0)
        if found < least:
            text = f"{found} cases, there were {least}: a case was lost"
            report.failures.append(Failure(f"{op} {format_name}".removesuffix(f" {NO_FORMAT}"), "", text))


def minimum(what: What) -> Mapping[tuple[str, str], int]:
    """The recorded counts of what was chosen."""
    return {
        (op, format_name): least[what.full]
        for (op, format_name), least in MINIMUM.items()
        if (not what.ops or op in what.ops) and (not what.formats or format_name in what.formats)
    }


def _check_cells(what: What, plain: Any, cases: Iterable[Case], report: Report) -> None:
    """Every cell of the backend's table that claims to work has cases; a refused one does refuse, by its name."""
    covered = {(case.op, case.format) for case in cases}
    for name in missing_cells(plain):
        _, op, format_name = name.split(".", 2)
        if (not what.ops or op in what.ops) and (not what.formats or format_name in what.formats):
            report.failures.append(Failure(name, "", "is declared neither as a kernel nor as waived or refused"))
    for cell in plain.table.cells():
        wanted = (not what.ops or cell.op in what.ops) and (not what.formats or cell.format in what.formats)
        if cell.backend != plain.name or not wanted:
            continue
        report.cells[cell.state] += 1
        if cell.state == "refused":
            fault = _refusal(cell, open_device(what, report.variants[0], report.precisions[0]))
        else:
            fault = "" if (cell.op, cell.format) in covered else f"is {cell.state} and has no case"
        if fault:
            report.failures.append(Failure(cell.name, "", fault))


def _refusal(cell: Cell, device: Device) -> str:
    """Empty where the operation is refused naming its cell."""
    spec = REGISTRY.get(cell.format)
    if spec is None or cell.op not in ("rows", "row_axpy", "matmul"):
        return "is refused, and nothing here can ask for it"
    weight = hold(device, make_matrix(random(cell.name), cell.format, 44, 200, (spec.group_sizes or (0,))[0]))
    recorder = start(device)
    try:
        if cell.op == "matmul":
            recorder.matmul(recorder.rows(200), weight, recorder.rows(44))
        elif cell.op == "rows":
            recorder.embed(weight, recorder.rows(200))
        else:
            attending.record_latent(recorder, weight)
    except UnsupportedKernel as error:
        return "" if cell.format in str(error) else f"its refusal does not name the format: {error}"
    return "is declared refused, but was recorded"


def table(report: Report) -> list[dict[str, Any]]:
    """One row per (operation, format): cases and the largest metric per precision."""
    return [
        {
            "op": op,
            "format": format_name,
            "cases": count,
            "largest_metric": {
                precision: report.metrics.get((op, format_name, precision), 0.0) for precision in report.precisions
            },
        }
        for (op, format_name), count in report.counts.items()
    ]
