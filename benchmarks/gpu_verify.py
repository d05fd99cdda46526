"""Conformance of a device in parallel, for a machine that is lent for minutes: `picaflor verify` cut into pieces.

    python benchmarks/gpu_verify.py --workers 14 --seconds 200 --out FOLDER [--first mutant:f16]

Each case runs three times on the device and once on the CPU, in every precision: bits of the runs, bits beside the
CPU's, the oracle's verdict. Each planted fault is judged as `verify --mutants` does. What there was no time for is
counted. Prints a line per format, writes `gpu_verify.json`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

RUNS = 3
PIECE = 4
"""Cases or faults of a job."""
Found = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Job:
    """Some cases (or planted faults) by number."""

    kind: str
    format: str
    op: str
    numbers: tuple[int, ...]


def _offered(*, full: bool) -> list[Any]:
    """The cases of what the backend has; faults are tried on the quick ones."""
    from picaflor.backends.cuda import capabilities
    from picaflor.conformance import suite

    return suite.offered(suite.pick(suite.all_cases(), full=full), capabilities.cells("cuda"))


def all_jobs(*, full: bool) -> list[Job]:
    """Every quick case (`full`: every case) and every fault, those of one cell in pieces."""
    from picaflor.conformance import mutation

    cells: dict[tuple[str, str, str], list[int]] = {}
    for number, case in enumerate(_offered(full=full)):
        cells.setdefault(("case", case.format, case.op), []).append(number)
    keys = {(case.op, case.format): 0 for case in _offered(full=False) if case.op != mutation.WHOLE_PATH}
    for number, planted in enumerate(mutation.plant((), (), keys)):
        cells.setdefault(("mutant", planted.format, planted.op), []).append(number)
    return [
        Job(*key, tuple(numbers[start : start + PIECE]))
        for key, numbers in cells.items()
        for start in range(0, len(numbers), PIECE)
    ]


def ordered(jobs: Sequence[Job], first: Sequence[str]) -> list[Job]:
    """Formats named first come first; else cases before faults; among them piece by piece of all cells in turn."""
    rank = {name: number for number, name in enumerate(first)}
    piece: Counter[tuple[str, str, str]] = Counter()
    keys = {}
    for job in jobs:
        cell = (job.kind, job.format, job.op)
        keys[job] = (rank.get(f"{job.kind}:{job.format}", len(rank)), job.kind, piece[cell])
        piece[cell] += 1
    return sorted(jobs, key=lambda job: keys[job])


class Worker:
    """Does jobs in a process of its own."""

    def __init__(self, backend: str, *, full: bool) -> None:
        from picaflor.conformance import mutation

        self._backend = backend
        self._cases = _offered(full=full)
        self._quick = [case for case in _offered(full=False) if case.op != mutation.WHOLE_PATH]
        self._by_op: dict[tuple[str, str], list[Any]] = {}
        keys = {(case.op, case.format): 0 for case in self._quick}
        self._planted = list(mutation.plant((), (), keys))
        self._judge: Any = None

    def run(self, job: Job, until: float) -> list[Found]:
        """One line per case or fault; those behind the time limit are missing."""
        found: list[Found] = []
        for number in job.numbers:
            if time.time() > until:
                break
            try:
                found.append(self._case(number) if job.kind == "case" else self._mutant(number))
            except Exception as error:  # noqa: BLE001
                found.append(
                    {"number": number, "fault": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
                )
                if "CUDA" in str(error):
                    break
        return found

    def _case(self, number: int) -> Found:
        from picaflor.conformance.case import Prepared
        from picaflor.conformance.check import compare, differing
        from picaflor.conformance.verify import Variant, What, known_precisions, open_device

        case = self._cases[number]
        prepared = Prepared(case)
        line: Found = {"case": case.label, "unlike_cpu": 0, "unlike_itself": 0, "values": 0, "fault": "", "metric": {}}
        for precision in known_precisions():
            runs = [prepared.run(open_device(What(self._backend), Variant("auto", 1), precision)) for _ in range(RUNS)]
            there = prepared.run(open_device(What("cpu"), Variant("auto", 1), precision))
            line["unlike_cpu"] += differing(runs[0], there)
            line["unlike_itself"] += sum(differing(runs[0], other) for other in runs[1:])
            line["values"] += sum(array.size for array in runs[0])
            outcome = compare(runs[0], prepared.expected(precision), precision)
            line["metric"][precision] = float(outcome.metric)
            line["fault"] = line["fault"] or outcome.fault
        return line

    def _mutant(self, number: int) -> Found:
        from picaflor.conformance import mutation
        from picaflor.conformance.case import Prepared
        from picaflor.conformance.verify import Variant, What, known_precisions

        if not self._by_op:
            for case in self._quick:
                self._by_op.setdefault((case.op, case.format), []).append(Prepared(case))
            self._judge = mutation._Judge(What(self._backend), Variant("auto", 1), known_precisions())
        planted = self._planted[number]
        verdict = self._judge(planted, mutation._tried(planted, self._by_op))
        return {"mutant": str(planted), "kind": planted.kind, "expects": planted.expects, "fault": verdict.fault}


def work(pipe: Connection, backend: str, full: bool, until: float) -> None:
    """A worker's life: jobs come, lines go. It ends where the device can no longer be used."""
    worker = Worker(backend, full=full)
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        found = worker.run(job, until)
        pipe.send(found)
        if any("CUDA" in line["fault"] for line in found):
            os._exit(3)


def spread(
    jobs: Sequence[Job], backend: str, workers: int, until: float, *, full: bool
) -> tuple[list[tuple[Job, list[Found]]], int]:
    """All results, and how many processes were lost."""
    context = multiprocessing.get_context("spawn")
    waiting, done, lost = deque(jobs), [], 0
    busy: dict[Connection, tuple[Any, Job]] = {}

    def start() -> None:
        mine, other = context.Pipe()
        process = context.Process(target=work, args=(other, backend, full, until), daemon=True)
        process.start()
        other.close()
        give(mine, process)

    def give(pipe: Connection, process: Any) -> None:
        if waiting and time.time() < until:
            job = waiting.popleft()
            pipe.send(job)
            busy[pipe] = (process, job)

    for _ in range(workers):
        start()
    while busy and time.time() < until + 15:
        for pipe in wait(list(busy), timeout=1):
            assert isinstance(pipe, Connection)
            process, job = busy.pop(pipe)
            try:
                done.append((job, pipe.recv()))
                give(pipe, process)
            except (EOFError, BrokenPipeError, OSError):
                lost += 1
                if not any(job is other for other, _ in done):
                    done.append((job, [{"number": -1, "fault": f"the process ended in {job.op} {job.numbers}"}]))
                start()
    for process, _ in busy.values():
        process.kill()
    return done, lost


def told(jobs: Sequence[Job], done: Sequence[tuple[Job, list[Found]]]) -> list[Found]:
    """One line per kind and format."""
    lines = []
    for kind, name in dict.fromkeys((job.kind, job.format) for job in jobs):
        total = sum(len(job.numbers) for job in jobs if (job.kind, job.format) == (kind, name))
        found = [line for job, some in done if (job.kind, job.format) == (kind, name) for line in some]
        line: Found = {"kind": kind, "format": name, "of": total, "ran": sum("fault" in f for f in found)}
        line["faults"] = [f for f in found if f["fault"]][:6]
        line["faulty"] = sum(bool(f["fault"]) for f in found)
        if kind == "case":
            line |= {key: sum(f.get(key, 0) for f in found) for key in ("values", "unlike_cpu", "unlike_itself")}
        else:
            line["as_expected"] = dict(Counter(f["expects"] for f in found if not f["fault"]))
        lines.append(line)
    return lines


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=150)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--full", action="store_true", help="the larger cases too")
    parser.add_argument("--first", action="append", default=[], help="case:FORMAT or mutant:FORMAT; may be repeated")
    words = parser.parse_args()
    until = time.time() + words.seconds
    jobs = ordered(all_jobs(full=words.full), words.first)
    done, lost = spread(jobs, words.backend, words.workers, until, full=words.full)
    lines = told(jobs, done)
    for line in lines:
        print(json.dumps({**line, "faults": [str(f)[:240] for f in line["faults"][:3]]}))
    print(f"{lost} processes were lost; {words.seconds - (until - time.time()):.0f} s")
    record = {"benchmark": "gpu_verify", "full": words.full, "lines": lines, "lost": lost, "runs": RUNS}
    record["metrics"] = metrics(done)
    (words.out / "gpu_verify.json").write_text(json.dumps(record, indent=1))
    os._exit(0)


def metrics(done: Sequence[tuple[Job, list[Found]]]) -> dict[str, float]:
    """The largest |delta| / sum |terms| by operation, format and precision."""
    largest: dict[str, float] = {}
    for job, lines in done:
        for line in lines:
            for precision, value in line.get("metric", {}).items():
                key = f"{job.op} {job.format} {precision}"
                largest[key] = max(largest.get(key, 0.0), value)
    return largest


if __name__ == "__main__":
    main()
