"""Routed experts of a model all held in memory: the simplest ExpertProvider, for tests of whole models.

Knows the contract and where an expert's bytes lie; must not know what a backend computes with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from picaflor.backends.api import I32, ExpertLayout, MatrixLayout
from picaflor.conformance.case import SlotLease
from picaflor.container.expert_file import plan_reads
from picaflor.container.types import Expert, Span

SLACK_BYTES = 64


def allocate(nbytes: int) -> NDArray[np.uint8]:
    """Zeroed bytes at a multiple of 64, with 64 more readable bytes behind them."""
    raw = np.zeros(nbytes + 2 * SLACK_BYTES, dtype=np.uint8)
    start = -raw.ctypes.data % SLACK_BYTES
    return raw[start : start + nbytes]


class MemoryExperts:
    """All routed experts of a model held in memory: the simplest ExpertProvider.

    A lease gives the experts in two parts and in falling order of their numbers, so that no program can rely on the
    order that it asked in.
    """

    def __init__(self, experts: Mapping[int, Sequence[Expert]], read: Callable[[Span], NDArray[np.uint8]]) -> None:
        self._slots: dict[int, list[NDArray[np.uint8]]] = {}
        self._layouts: dict[int, tuple[ExpertLayout, ...]] = {}
        for layer, members in experts.items():
            loaded = [_load_expert(expert, read) for expert in members]
            self._layouts[layer] = tuple(layout for layout, _ in loaded)
            self._slots[layer] = [slot for _, slot in loaded]

    def layouts(self, layer: int) -> Sequence[ExpertLayout]:
        """Where the matrices of each expert lie in its slot."""
        return self._layouts[layer]

    @contextmanager
    def acquire(self, layer: int, experts: I32) -> Iterator[SlotLease]:
        """Hold experts of a layer; they never leave."""
        if len(np.unique(experts)) != len(experts):
            raise ValueError(f"layer {layer}: the same expert was asked for twice")
        yield SlotLease(self._slots[layer], experts)


def _load_expert(expert: Expert, read: Callable[[Span], NDArray[np.uint8]]) -> tuple[ExpertLayout, NDArray[np.uint8]]:
    plan = plan_reads(expert)
    slot = allocate(plan.nbytes)
    for run in plan.runs:
        slot[run.slot_offset : run.slot_offset + run.nbytes] = read(Span(run.shard, run.offset, run.nbytes))
    gate, up, down = (
        MatrixLayout(matrix.format, matrix.rows, matrix.cols, matrix.group_size, offsets)
        for matrix, offsets in zip(expert.matrices, plan.offsets, strict=True)
    )
    return ExpertLayout(gate, up, down, plan.nbytes), slot
