"""`picaflor bench ...`: the group of measuring commands.

Must not measure anything itself.
"""

from __future__ import annotations

from collections.abc import Mapping

import click

from picaflor.cli.lazy import LazyGroup

BENCHES: Mapping[str, tuple[str, str]] = {
    "kernels": ("picaflor.cli.bench_kernels", "Rates of the kernels beside what memory gives."),
    "disk": ("picaflor.cli.bench_disk", "What a drive gives in the shape of the engine's reads."),
    "decode": ("picaflor.cli.bench_decode", "Decoding speed of a model beside its floor."),
}


@click.group(cls=LazyGroup, lazy=BENCHES)
def command() -> None:
    """Measure kernels, decoding and drives."""
