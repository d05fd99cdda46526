"""All cases, and how many of each cell there must be.

Knows the case makers and the registry; must not know devices.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from picaflor.backends.table import Cell
from picaflor.conformance import attending, blocks, containers, plain, products
from picaflor.conformance.case import Case
from picaflor.errors import UsageError
from picaflor.formats import REGISTRY

Piece = TypeVar("Piece")


def all_cases() -> Iterator[Case]:
    """Every case, the cheap ones of each cell first."""
    for spec in REGISTRY.values():
        yield from products.matmul_cases(spec)
        yield from products.expert_cases(spec)
        yield from products.rows_cases(spec)
        yield from attending.latent_cases(spec)
    yield from products.mixed_cases()
    yield from attending.attention_cases()
    yield from attending.select_cases()
    yield from attending.write_cases()
    yield from plain.plain_cases()
    yield from blocks.block_cases()
    for spec in REGISTRY.values():
        yield from containers.container_cases(spec)


def pick(
    cases: Iterable[Case],
    *,
    ops: Iterable[str] = (),
    formats: Iterable[str] = (),
    group_sizes: Iterable[int] = (),
    full: bool = False,
) -> list[Case]:
    """Cases of these operations, formats and group sizes; an empty list means all. Quick ones unless `full`."""
    wanted_ops, wanted_formats, wanted_sizes = set(ops), set(formats), set(group_sizes)
    return [
        case
        for case in cases
        if (not wanted_ops or case.op in wanted_ops)
        and (not wanted_formats or case.format in wanted_formats)
        and (not wanted_sizes or case.group_size in wanted_sizes)
        and (full or not case.full_only)
    ]


def offered(cases: Iterable[Case], cells: Iterable[Cell]) -> list[Case]:
    """Without the cases of what a backend, whose cells these are, declares refused."""
    refused = {(cell.op, cell.format) for cell in cells if cell.state == "refused"}
    return [case for case in cases if (case.op, case.format) not in refused]


def count(cases: Iterable[Case]) -> Mapping[tuple[str, str], int]:
    """Cases per (operation, format)."""
    return Counter((case.op, case.format) for case in cases)


@dataclass(frozen=True, slots=True)
class Shard:
    """The `number`-th of `count` parts of a choice, so that several processes can share it; together they are all."""

    number: int = 1
    count: int = 1

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    @classmethod
    def parse(cls, text: str) -> Shard:
        """From `I/N`. Raises UsageError."""
        found = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text)
        if found is None or not 1 <= int(found[1]) <= int(found[2]):
            raise UsageError(f"--shard {text}: I/N is needed with 1 <= I <= N, as 2/8 for the second of eight parts")
        return cls(int(found[1]), int(found[2]))

    def of_cases(self, cases: Sequence[Case]) -> list[Case]:
        """Its cases. What has the same operation, format and group size stays together: it needs the same kernels.

        Raises UsageError where a part would be empty.
        """
        sizes = Counter((case.op, case.format, case.group_size) for case in cases)
        self._check(len(sizes), "operations, formats and group sizes")
        loads = [0] * self.count
        place = {}
        for key, size in sizes.most_common():
            place[key] = min(range(self.count), key=lambda number: loads[number])
            loads[place[key]] += size
        return [case for case in cases if place[case.op, case.format, case.group_size] == self.number - 1]

    def of(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Every `count`-th piece. Raises UsageError where a part would be empty."""
        self._check(len(pieces), "mutants")
        return list(pieces[self.number - 1 :: self.count])

    def _check(self, pieces: int, what: str) -> None:
        if pieces < self.count:
            raise UsageError(
                f"--shard {self}: what was chosen has {pieces} {what}, more parts than that would be empty"
            )


WHOLE = Shard()
