"""The random numbers of sampling: a function of (seed, position) and of nothing else.

Knows integer arithmetic; must not know logits, models or how many numbers were drawn before.

Philox4x32 with 10 rounds: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (2011).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from picaflor.backends.api import Chance
from picaflor.errors import UsageError

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF

Words4 = tuple[int, int, int, int]


def philox(counter: Words4, key: tuple[int, int]) -> Words4:
    """Four 32-bit words from a counter of four and a key of two, lowest word first."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        first, second = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = (second >> 32) ^ c1 ^ k0, second & _WORD, (first >> 32) ^ c3 ^ k1, first & _WORD
        k0, k1 = (k0 + KEY_STEPS[0]) & _WORD, (k1 + KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) of 53 bits for the token at `position`; seed and position count modulo 2^64."""
    counter = (position & _WORD, position >> 32 & _WORD, 0, 0)
    low, high, _, _ = philox(counter, (seed & _WORD, seed >> 32 & _WORD))
    return ((high << 32 | low) >> 11) * 2.0**-53


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen. `temperature` 0 is greedy. Raises UsageError for values out of range."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and 0.0 <= self.temperature <= 100.0):
            raise UsageError(f"temperature is {self.temperature}; accepted: 0 (greedy) to 100")
        if not 0.0 < self.top_p <= 1.0:
            raise UsageError(f"top-p is {self.top_p}; accepted: above 0 and at most 1")

    def chance(self, position: int) -> Chance:
        """How the token at `position` is drawn."""
        if self.temperature == 0.0:
            return Chance(0.0, 1.0, 0.0)
        return Chance(self.temperature, self.top_p, uniform(self.seed, position))
