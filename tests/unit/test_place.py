"""Where layers go on several devices: ranges in order, each device pressed as hard as the others."""

from __future__ import annotations

import itertools
import random
import re

import pytest

from picaflor.backends.cuda.place import FITS, LayerNeeds, spread
from picaflor.errors import OutOfBudget

MOE = [LayerNeeds(10, 100)] * 10


def ranges(*found: range) -> list[tuple[int, int]]:
    """First layer and the one behind the last, by device."""
    return [(places.start, places.stop) for places in found]


def test_equal_devices_get_equal_parts() -> None:
    assert ranges(*spread(MOE, [1000, 1000])) == [(0, 5), (5, 10)]
    assert [len(places) for places in spread(MOE, [10_000] * 4)] == [2, 2, 3, 3]


def test_the_larger_device_gets_more() -> None:
    assert ranges(*spread(MOE, [500, 1500])) == [(0, 2), (2, 10)]
    assert ranges(*spread(MOE, [1500, 500])) == [(0, 8), (8, 10)]


def test_experts_count_against_what_is_left_beside_matrices_and_cache() -> None:
    """The layers of the first device are heavy in what must be there: room for fewer experts is left there."""
    layers = [LayerNeeds(60, 100)] * 5 + [LayerNeeds(10, 100)] * 5
    assert ranges(*spread(layers, [400, 400])) == [(0, 4), (4, 10)]  # 400 in 160 and 600 in 290 bytes


def test_embedding_and_head_weigh_on_the_ends() -> None:
    assert ranges(*spread(MOE, [1000, 1000], first=400)) == [(0, 3), (3, 10)]
    assert ranges(*spread(MOE, [1000, 1000], last=400)) == [(0, 7), (7, 10)]


def test_where_all_fits_devices_are_filled_alike() -> None:
    """Fewest bytes of experts per byte left would leave the smaller of two large devices out."""
    layers = [LayerNeeds(40, 0)] * 3 + [LayerNeeds(10, 20)] * 4
    assert ranges(*spread(layers, [1000, 990])) == [(0, 3), (3, 7)]
    assert ranges(*spread(layers, [990, 1000])) == [(0, 3), (3, 7)]


def test_layers_without_experts_are_shared_by_their_bytes() -> None:
    assert ranges(*spread([LayerNeeds(10)] * 9, [100, 50])) == [(0, 6), (6, 9)]


def test_a_device_that_is_better_left_out() -> None:
    assert ranges(*spread(MOE, [5, 2000, 2000])) == [(0, 0), (0, 5), (5, 10)]
    assert ranges(*spread(MOE[:1], [1000, 1000])) == [(0, 1), (1, 1)]


def test_what_fits_in_no_way_is_refused() -> None:
    with pytest.raises(OutOfBudget, match=re.escape("100 B of matrices and cache do not fit the devices")) as caught:
        spread(MOE, [20, 30])
    assert "20 B, 30 B may be used" in str(caught.value)
    with pytest.raises(ValueError, match="0 layers for 2 devices"):
        spread([], [1, 1])


@pytest.mark.parametrize("seed", range(20))
def test_no_other_ranges_are_better(seed: int) -> None:
    """Against every way to cut, for up to seven layers on three devices."""
    draw = random.Random(seed)
    layers = [LayerNeeds(draw.randint(1, 30), draw.randint(0, 90)) for _ in range(draw.randint(1, 7))]
    rooms = [draw.randint(60, 300) for _ in range(3)]
    first, last = draw.randint(0, 20), draw.randint(0, 20)

    def pressure(cuts: tuple[int, ...]) -> float:
        worst = 0.0
        for room, (start, stop) in zip(rooms, itertools.pairwise((0, *cuts, len(layers))), strict=True):
            part = layers[start:stop]
            if part:
                held = sum(layer.fixed for layer in part) + first * (start == 0) + last * (stop == len(layers))
                wanted = sum(layer.experts for layer in part)
                if held > room or (held == room and wanted):
                    return float("inf")
                worst = max(worst, max(FITS, wanted / (room - held)) if wanted else 0.0)
        return worst

    every = itertools.combinations_with_replacement(range(len(layers) + 1), 2)
    least = min(pressure(cuts) for cuts in every)
    if least == float("inf"):
        with pytest.raises(OutOfBudget):
            spread(layers, rooms, first=first, last=last)
        return
    found = spread(layers, rooms, first=first, last=last)
    assert [at for places in found for at in places] == list(range(len(layers)))
    assert pressure((found[0].stop, found[1].stop)) == least
