"""The sampler's random numbers against the published test vectors of Philox4x32-10, and what they may depend on.

Must not know models.
"""

from __future__ import annotations

import numpy as np
import pytest

from picaflor.backends.api import draw_rows
from picaflor.backends.reference import ReferenceBackend
from picaflor.errors import UsageError
from picaflor.runtime.sampler import Sampling, philox, uniform

# From the file kat_vectors of Random123: counter, key, result.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN)
def test_published_vectors(
    counter: tuple[int, int, int, int], key: tuple[int, int], result: tuple[int, int, int, int]
) -> None:
    assert philox(counter, key) == result


def test_uniform_is_the_first_53_bits_of_the_first_two_words() -> None:
    assert uniform(0, 0) == (0xE169C58D6627E8D5 >> 11) / 2**53
    seed, position = 0x123456789ABCDEF0, 0x1_0000_0007
    low, high, _, _ = philox((7, 1, 0, 0), (0x9ABCDEF0, 0x12345678))
    assert uniform(seed, position) == ((high << 32 | low) >> 11) / 2**53


def test_seed_and_position_both_count_and_nothing_else_does() -> None:
    numbers = [[uniform(seed, position) for position in range(50)] for seed in range(40)]
    assert len({number for row in numbers for number in row}) == 2000
    assert uniform(3, 7) == numbers[3][7]
    assert uniform(-1, 0) == uniform(2**64 - 1, 0)
    spread = np.histogram(np.ravel(numbers), bins=10, range=(0, 1))[0]
    assert spread.min() > 150
    assert min(map(min, numbers)) >= 0
    assert max(map(max, numbers)) < 1


def test_choice_depends_on_the_position_alone() -> None:
    backend = ReferenceBackend()
    logits = np.zeros(1000, dtype=np.float32)
    sampling = Sampling(temperature=1.0, seed=5)

    def choose(chosen: Sampling, position: int) -> int:
        return draw_rows(logits[None], [chosen.chance(position)], backend.sample)[0]

    forward = [choose(sampling, position) for position in range(20)]
    backward = [choose(sampling, position) for position in reversed(range(20))]
    assert forward == backward[::-1]
    assert forward == [int(uniform(5, position) * 1000) for position in range(20)]
    assert forward != [choose(Sampling(temperature=1.0, seed=6), position) for position in range(20)]
    assert choose(Sampling(temperature=0.0, seed=5), 3) == 0


@pytest.mark.parametrize("temperature", [-0.1, 101.0, float("nan"), float("inf")])
def test_temperature_out_of_range(temperature: float) -> None:
    with pytest.raises(UsageError, match=r"temperature is .*; accepted: 0"):
        Sampling(temperature=temperature)


@pytest.mark.parametrize("top_p", [0.0, 1.01, float("nan")])
def test_top_p_out_of_range(top_p: float) -> None:
    with pytest.raises(UsageError, match=r"top-p is .*; accepted: above 0"):
        Sampling(top_p=top_p)
