"""All cases, and how many of each cell there must be.

Knows the case makers and the registry; must not know devices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from picaflor.conformance import attending, blocks, containers, plain, products
from picaflor.conformance.case import Case
from picaflor.formats import REGISTRY


def all_cases() -> Iterator[Case]:
    """Every case, the cheap ones of each cell first."""
    for spec in REGISTRY.values():
        yield from products.matmul_cases(spec)
        yield from products.expert_cases(spec)
        if not spec.activation.rotated:
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
    cases: Iterable[Case], *, ops: Iterable[str] = (), formats: Iterable[str] = (), full: bool = False
) -> list[Case]:
    """Cases of these operations and formats; an empty list means all. Quick ones unless `full`."""
    wanted_ops, wanted_formats = set(ops), set(formats)
    return [
        case
        for case in cases
        if (not wanted_ops or case.op in wanted_ops)
        and (not wanted_formats or case.format in wanted_formats)
        and (full or not case.full_only)
    ]


def count(cases: Iterable[Case]) -> Mapping[tuple[str, str], int]:
    """Cases per (operation, format)."""
    return Counter((case.op, case.format) for case in cases)
