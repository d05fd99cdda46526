"""Read plans: every plane lands where `offsets` says, with as few reads as the file's order allows."""

from __future__ import annotations

import random

import pytest

from picaflor.container.expert_file import ExpertReads, ReadRun, plan_reads
from picaflor.container.types import Expert, Matrix, Span

PARTS = ("gate", "up", "down")


def expert(spans: dict[str, tuple[Span, ...]]) -> Expert:
    """An expert whose matrices have the given spans."""
    gate, up, down = (Matrix(name, "any", 1, 1, 0, spans[name]) for name in PARTS)
    return Expert(3, 5, gate, up, down)


def lay(order: list[tuple[str, int]], sizes: dict[tuple[str, int], int], start: int = 0) -> Expert:
    """An expert whose planes (part, plane) lie side by side from `start`, in the given order."""
    spans: dict[str, dict[int, Span]] = {part: {} for part in PARTS}
    for part, plane in order:
        spans[part][plane] = Span(0, start, sizes[part, plane])
        start += sizes[part, plane]
    return expert({part: tuple(spans[part][plane] for plane in sorted(spans[part])) for part in PARTS})


def check(plan: ExpertReads, source: Expert, files: dict[int, bytes]) -> None:
    """Carry out the reads and compare every plane's bytes."""
    slot = bytearray(plan.nbytes)
    filled = 0
    for run in plan.runs:
        assert run.slot_offset % 64 == 0
        assert run.slot_offset >= filled
        filled = run.slot_offset + run.nbytes
        slot[run.slot_offset : filled] = files[run.shard][run.offset : run.offset + run.nbytes]
    assert filled <= len(slot) == plan.nbytes
    assert plan.nbytes % 64 == 0
    for matrix, offsets in zip(source.matrices, plan.offsets, strict=True):
        for plane, (span, offset) in enumerate(zip(matrix.spans, offsets, strict=True)):
            wanted = files[span.shard][span.offset : span.offset + span.nbytes]
            assert slot[offset : offset + span.nbytes] == wanted
            assert plane == 0 or offset % 4 == 0


SIZES = {("gate", 0): 96, ("up", 0): 96, ("down", 0): 160, ("gate", 1): 12, ("up", 1): 12, ("down", 1): 20}
OURS = [("down", 0), ("gate", 0), ("up", 0), ("down", 1), ("gate", 1), ("up", 1)]
BYTES = {0: random.Random(1).randbytes(40_000), 1: random.Random(2).randbytes(40_000)}


def test_our_layout_is_one_read() -> None:
    source = lay(OURS, SIZES, start=4096)
    plan = plan_reads(source)
    assert plan.runs == (ReadRun(0, 4096, 396, 0),)
    assert plan.offsets == ((160, 372), (256, 384), (0, 352))
    assert plan.nbytes == 448
    assert plan.read_nbytes == 396
    check(plan, source, BYTES)


@pytest.mark.parametrize("seed", range(8))
def test_any_order_of_touching_planes_is_one_read(seed: int) -> None:
    order = list(SIZES)
    random.Random(seed).shuffle(order)
    source = lay(order, SIZES, start=40)
    plan = plan_reads(source)
    assert len(plan.runs) == 1
    check(plan, source, BYTES)


def test_scales_far_from_weights_are_two_reads() -> None:
    weights = {"down": Span(0, 20_008, 160), "gate": Span(0, 20_168, 96), "up": Span(0, 20_264, 96)}
    scales = {"down": Span(0, 40, 20), "gate": Span(0, 60, 12), "up": Span(0, 72, 12)}
    source = expert({part: (weights[part], scales[part]) for part in PARTS})
    plan = plan_reads(source)
    assert plan.runs == (ReadRun(0, 40, 44, 0), ReadRun(0, 20_008, 352, 64))
    assert plan.offsets == ((64 + 160, 20), (64 + 256, 32), (64, 0))
    check(plan, source, BYTES)


@pytest.mark.parametrize(("gap", "reads"), [(0, 1), (4096, 1), (4097, 2)])
def test_small_gaps_are_read_over(gap: int, reads: int) -> None:
    source = expert(
        {
            "gate": (Span(0, 1000, 96),),
            "up": (Span(0, 1096 + gap, 96),),
            "down": (Span(0, 1192 + gap, 96),),
        }
    )
    plan = plan_reads(source)
    assert len(plan.runs) == reads
    check(plan, source, BYTES)


def test_a_plane_inside_another_is_covered_once() -> None:
    source = expert({"gate": (Span(0, 64, 200),), "up": (Span(0, 100, 20),), "down": (Span(0, 264, 8),)})
    plan = plan_reads(source)
    assert plan.runs == (ReadRun(0, 64, 208, 0),)
    check(plan, source, BYTES)


def test_the_farthest_end_counts() -> None:
    source = expert({"gate": (Span(0, 64, 200),), "up": (Span(0, 80, 20),), "down": (Span(0, 100, 8),)})
    plan = plan_reads(source)
    assert plan.runs == (ReadRun(0, 64, 200, 0),)
    check(plan, source, BYTES)


def test_shards_are_never_merged() -> None:
    source = expert({"gate": (Span(0, 64, 96),), "up": (Span(1, 160, 96),), "down": (Span(0, 160, 96),)})
    plan = plan_reads(source)
    assert plan.runs == (ReadRun(0, 64, 192, 0), ReadRun(1, 160, 96, 192))
    check(plan, source, BYTES)


def test_scales_that_would_be_misaligned_get_their_own_read() -> None:
    odd = {**SIZES, ("up", 0): 95}
    source = lay(OURS, odd, start=4096)
    plan = plan_reads(source)
    assert [run.offset for run in plan.runs] == [4096, 4096 + 351]
    check(plan, source, BYTES)


def test_an_aligned_weight_stays_aligned() -> None:
    source = expert({"gate": (Span(0, 101, 99),), "up": (Span(0, 200, 8),), "down": (Span(0, 209, 10),)})
    plan = plan_reads(source)
    assert plan.runs == (ReadRun(0, 101, 99, 0), ReadRun(0, 200, 19, 128))
    assert plan.offsets == ((0,), (128,), (137,))
    check(plan, source, BYTES)
