"""Plants every mutant and asks whether the cases see it: each must be killed, or be the same in every bit.

Knows mutants, cases and how to open a backend; must not know kernels or the command line.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from picaflor.backends.table import NO_FORMAT
from picaflor.conformance import suite
from picaflor.conformance.case import Prepared
from picaflor.conformance.check import compare, differing
from picaflor.conformance.mutants_ops import operation_mutants
from picaflor.conformance.mutants_stored import stored_mutants
from picaflor.conformance.proxy import Fault, FaultyDevice
from picaflor.conformance.verify import (
    Say,
    Variant,
    What,
    check_names,
    offered,
    open_device,
    precisions_of,
    run_case,
    variants,
)
from picaflor.formats import REGISTRY

MIN_KINDS = 20
WHOLE_PATH = "container"
"""Its cases load a backend of their own, without the fault."""


@dataclass(frozen=True, slots=True)
class Planted:
    """One mutant in one operation (and one format). `expects`: killed, equivalent or passes (the control)."""

    kind: str
    op: str
    format: str
    fault: Fault = field(repr=False)
    expects: str = "killed"
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.kind} in {self.op} {self.format}".removesuffix(f" {NO_FORMAT}")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a mutant. `by`: the case and fault that killed it. `fault`: why the verdict is wrong, or empty."""

    planted: Planted
    by: str = ""
    fault: str = ""


@dataclass(slots=True)
class MutationReport:
    """All verdicts of a shard; `chosen`: mutants of all shards. `full`: of everything, so that kinds can be counted."""

    backend: str
    variant: Variant
    verdicts: list[Verdict] = field(default_factory=list)
    full: bool = True
    shard: suite.Shard = suite.WHOLE
    chosen: int = 0

    @property
    def kinds(self) -> dict[str, list[str]]:
        """Kinds that were killed, and the formats (`-`: none) in which."""
        found: dict[str, list[str]] = {}
        for verdict in self.verdicts:
            if verdict.planted.expects == "killed" and not verdict.fault:
                formats = found.setdefault(verdict.planted.kind, [])
                if verdict.planted.format not in formats:
                    formats.append(verdict.planted.format)
        return found

    @property
    def wrong(self) -> list[str]:
        """Survivors, mutants that could not be planted, equivalents that are none; too few kinds."""
        found = [f"{verdict.planted}: {verdict.fault}" for verdict in self.verdicts if verdict.fault]
        if self.full and len(self.kinds) < MIN_KINDS:
            found.append(f"{len(self.kinds)} kinds of mutants, at least {MIN_KINDS} are wanted")
        return found

    def count(self) -> Counter[str]:
        """Mutants by what was expected of them and came true."""
        return Counter(verdict.planted.expects for verdict in self.verdicts if not verdict.fault)


def plant(ops: Sequence[str], formats: Sequence[str], case_keys: Iterable[tuple[str, str]]) -> Iterator[Planted]:
    """Every mutant in every (operation, format) that has cases."""
    keys = list(case_keys)
    for spec in REGISTRY.values():
        if formats and spec.name not in formats:
            continue
        for stored in stored_mutants(spec):
            for op in (op for op, name in keys if name == spec.name and (not stored.ops or op in stored.ops)):
                if not ops or op in ops:
                    expects = "passes" if stored.control else "equivalent" if stored.equivalent else "killed"
                    fault = Fault(matrix=stored.change)
                    yield Planted(stored.kind, op, spec.name, fault, expects, stored.equivalent)
    for mutant in operation_mutants():
        for op in mutant.ops:
            names = [name for key, name in keys if key == op]
            if (ops and op not in ops) or (formats and not set(names) & set(formats)):
                continue
            expects = "equivalent" if mutant.equivalent else "killed"
            yield Planted(mutant.kind, op, NO_FORMAT, mutant.fault, expects, mutant.equivalent)


def run_mutants(what: What, say: Say) -> MutationReport:
    """Plant all and judge. The widest instruction set on one thread computes; `verify` shows that the others agree."""
    cases = [case for case in suite.all_cases() if case.op != WHOLE_PATH]
    check_names(what, cases)
    variant = variants(what.backend, what.isa)[-2]
    plain: Any = open_device(what, variant, "standard")
    chosen = [Prepared(case) for case in offered(plain, suite.pick(cases, full=what.full))]
    by_op: dict[tuple[str, str], list[Prepared]] = {}
    for case in chosen:
        by_op.setdefault((case.case.op, case.case.format), []).append(case)
    judge = _Judge(what, variant, what.precisions or precisions_of(plain))
    report = MutationReport(plain.name, variant)
    every = list(plant(what.ops, what.formats, by_op))
    mine = what.shard.of(every)
    report.full = not what.ops and not what.formats and len(mine) == len(every)
    report.shard, report.chosen = what.shard, len(every)
    for number, planted in enumerate(mine):
        say(f"{number} of {len(mine)} mutants done, planting {planted}")
        report.verdicts.append(judge(planted, _tried(planted, by_op)))
    return report


def _tried(planted: Planted, by_op: Mapping[tuple[str, str], list[Prepared]]) -> list[Prepared]:
    """The cases of a mutant's cell; for one without a format those of its operation, cases without a format first.

    Where those are enough to tell equal bits, they alone.
    """
    if planted.format != NO_FORMAT:
        return by_op[planted.op, planted.format]
    tried = [case for (op, _), some in by_op.items() if op == planted.op for case in some]
    tried.sort(key=lambda case: case.case.format != NO_FORMAT)
    plain = [case for case in tried if case.case.format == NO_FORMAT]
    return plain if plain and planted.expects == "equivalent" else tried


class _Judge:
    """Runs cases on a faulty device until one sees the fault."""

    def __init__(self, what: What, variant: Variant, precisions: Sequence[str]) -> None:
        self._what = what
        self._variant = variant
        self._precisions = sorted(precisions, key=lambda name: name != "exact")

    def __call__(self, planted: Planted, cases: Sequence[Prepared]) -> Verdict:
        """The verdict on one mutant; the first case that sees it is enough."""
        other_bits = 0
        for precision, case in self._order(planted, cases):
            found = run_case(case, FaultyDevice(open_device(self._what, self._variant, precision), planted.fault))
            if isinstance(found, str):
                return Verdict(planted, fault=f"could not be planted, {case.case.label} {found}")
            outcome = compare(found, case.expected(precision), precision, by_rule=False)
            if outcome.fault:
                return self._killed(planted, f"{case.case.label} ({precision}): {outcome.fault}")
            if planted.expects == "equivalent":
                sound = run_case(case, open_device(self._what, self._variant, precision))
                other_bits += 1 if isinstance(sound, str) else differing(sound, found)
        if planted.expects == "killed":
            return Verdict(planted, fault=f"survived {len(cases)} cases")
        if other_bits:
            return Verdict(planted, fault=f"declared equivalent ({planted.reason}), but {other_bits} outputs differ")
        return Verdict(planted)

    def _order(self, planted: Planted, cases: Sequence[Prepared]) -> Iterator[tuple[str, Prepared]]:
        """One that must be killed meets the finest precision first; one that must pass meets a case in all at once, so
        that its stored weights are read once."""
        if planted.expects == "killed":
            return ((precision, case) for precision in self._precisions for case in cases)
        return ((precision, case) for case in cases for precision in self._precisions)

    def _killed(self, planted: Planted, by: str) -> Verdict:
        if planted.expects == "killed":
            return Verdict(planted, by)
        return Verdict(planted, by, fault=f"should have passed ({planted.reason or 'control'}), but {by}")
