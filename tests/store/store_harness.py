"""A small container of fake experts and a read pool without threads, for the tests of the store."""

from __future__ import annotations

import ctypes
import enum
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from picaflor.backends.api import ExpertLayout
from picaflor.container.index import Container
from picaflor.container.types import Expert, Matrix, Span
from picaflor.store.reader import ExpertFiles
from picaflor.store.types import ExpertKey

Planes = dict[tuple[str, str], bytes]
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


@dataclass(repr=False)
class Model:
    """An open container, its experts and the bytes that each plane must have."""

    container: Container
    experts: dict[int, list[Expert]]
    planes: dict[ExpertKey, Planes]

    def files(self) -> ExpertFiles:
        return ExpertFiles(self.container, self.experts)


def make_model(
    folder: Path, *, widths: Sequence[int] = (48, 96), experts: int = 6, shards: int = 2, **options: Any
) -> Model:
    """One layer per width, in layers 3, 4, ...; experts are spread over the shards, so that layers share files."""
    rng = np.random.default_rng(5)
    tensors: list[dict[str, NDArray[Any]]] = [{} for _ in range(shards)]
    for place, width in enumerate(widths):
        for expert in range(experts):
            for projection in PROJECTIONS:
                name = f"model.layers.{place + 3}.mlp.experts.{expert}.{projection}.weight"
                home = tensors[expert % shards]
                home[name] = rng.integers(0, 256, (8, width), dtype=np.uint8)
                home[name + ".qs"] = rng.random((8, 1), dtype=np.float32)
    names = [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
    for name, members in zip(names, tensors, strict=True):
        save_file(members, folder / name)
    every = {name: array for members in tensors for name, array in members.items()}
    container = Container.open(folder, **options)
    found: dict[int, list[Expert]] = {}
    planes: dict[ExpertKey, Planes] = {}
    for place, width in enumerate(widths):
        layer = place + 3
        found[layer] = []
        for expert in range(experts):
            prefix = f"model.layers.{layer}.mlp.experts.{expert}"
            matrices = [_matrix(container, f"{prefix}.{projection}.weight", width) for projection in PROJECTIONS]
            found[layer].append(Expert(layer, expert, *matrices))
            planes[ExpertKey(layer, expert)] = {
                (projection, suffix): every[f"{prefix}.{projection}.weight{suffix}"].tobytes()
                for projection in PROJECTIONS
                for suffix in ("", ".qs")
            }
    return Model(container, found, planes)


def _matrix(container: Container, name: str, width: int) -> Matrix:
    infos = [container.require(name), container.require(name + ".qs")]
    spans = tuple(Span(info.shard, info.offset, info.nbytes) for info in infos)
    return Matrix(name, "int8-row", 8, width, 0, spans)


def wrong_planes(model: Model, layer: int, expert: int, layout: ExpertLayout, address: int) -> list[tuple[str, str]]:
    """Names of the planes whose bytes in the slot at `address` are not the file's."""
    matrices = dict(zip(PROJECTIONS, (layout.gate, layout.up, layout.down), strict=True))
    wrong = []
    for (projection, suffix), wanted in model.planes[ExpertKey(layer, expert)].items():
        offset = matrices[projection].offsets[1 if suffix else 0]
        if ctypes.string_at(address + offset, len(wanted)) != wanted:
            wrong.append((projection, suffix))
    return wrong


def ids(*experts: int) -> NDArray[np.int32]:
    return np.array(experts, dtype=np.int32)


class Status(enum.Enum):
    OK = 0
    ERROR = 1
    SHORT = 2
    CANCELLED = 3


@dataclass
class Outcome:
    """What the native pool calls ReadResult."""

    ticket: int
    status: Status = Status.OK
    error: int = 0
    run: int = 0
    found: int = 0
    nbytes: int = 0
    spares: int = 0
    spare_run: int = -1
    spare_error: int = 0
    seconds: float = 0.25


Fault = Callable[[int, int, int], "tuple[Status, int, int] | None"]


@dataclass
class FakePool:
    """Reads when told to: `finish` picks which of the waiting tickets come to their end in a `wait_any`.

    Every job scribbles over its slot as soon as it is submitted, so that a slot that was given away too early shows.
    `fault(fd, offset, nbytes)` may return (status, errno, found) for a run. `running`: jobs that can no longer be
    cancelled.
    """

    finish: Callable[[list[int]], list[int]] = lambda waiting: waiting[:1]
    fault: Fault = lambda fd, offset, nbytes: None
    running: set[int] = field(default_factory=set)
    jobs: dict[int, list[tuple[int, int, int, int]]] = field(default_factory=dict)
    done: dict[int, Outcome] = field(default_factory=dict)
    order: list[int] = field(default_factory=list)
    demand: dict[int, bool] = field(default_factory=dict)
    waits: int = 0
    closed: bool = False
    next: int = 1

    def submit(
        self, runs: NDArray[np.int64], bounds: NDArray[np.int64], bases: NDArray[np.uint64], *, demand: bool
    ) -> int:
        assert not self.closed
        first = self.next
        for j, base in enumerate(bases.tolist()):
            rows = runs[bounds[j] : bounds[j + 1]].tolist()
            job = [(fd, offset, nbytes, base + place) for fd, offset, nbytes, place, *_ in rows]
            for other in self.jobs.values():
                assert not {run[3] for run in job} & {run[3] for run in other}, "two reads into one slot"
            for (_, offset, nbytes, address), (*_, block, _, _) in zip(job, rows, strict=True):
                head = offset % block if block else 0
                tail = -(offset + nbytes) % block if block else 0
                assert not block or (address - offset) % block == 0
                ctypes.memset(address - head, 0xA5, head + nbytes + tail)
            self.jobs[self.next] = job
            self.demand[self.next] = demand
            self.next += 1
        return first

    def wait_any(self, tickets: NDArray[np.uint64], seconds: float) -> list[Outcome]:
        self.waits += 1
        asked = tickets.tolist()
        known = [t for t in asked if t in self.done]
        if not known and all(t in self.jobs for t in asked) and seconds != 0:
            for ticket in self.finish(asked):
                self._run(ticket)
        return [self.done[t] for t in asked if t in self.done]

    def _run(self, ticket: int) -> None:
        outcome = Outcome(ticket)
        for index, (fd, offset, nbytes, address) in enumerate(self.jobs.pop(ticket)):
            self.order.append(offset)
            fault = self.fault(fd, offset, nbytes)
            if fault is not None:
                outcome.status, outcome.error, outcome.found = fault
                outcome.run = index
                break
            data = os.pread(fd, nbytes, offset)
            ctypes.memmove(address, data, len(data))
            outcome.nbytes += len(data)
        self.running.discard(ticket)
        self.done[ticket] = outcome

    def run_all(self) -> None:
        """Every job comes to its end now, waited for or not."""
        for ticket in list(self.jobs):
            self._run(ticket)

    def forget(self, ticket: int) -> None:
        del self.done[ticket]

    def cancel(self, ticket: int) -> bool:
        if ticket not in self.jobs or ticket in self.running:
            return False
        del self.jobs[ticket]
        return True

    def promote(self, ticket: int) -> None:
        if ticket in self.jobs:
            self.demand[ticket] = True

    def busy_seconds(self) -> float:
        return 0.25 * len(self.order)

    def close(self) -> None:
        self.closed = True
        self.done.update((ticket, Outcome(ticket, Status.CANCELLED)) for ticket in self.jobs)
        self.jobs.clear()
