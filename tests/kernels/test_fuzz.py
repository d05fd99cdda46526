"""A little of what scripts/soak runs for minutes: random products and experts, always the same ones."""

from __future__ import annotations

import fuzz_kernels


def test_random_products_and_experts() -> None:
    before = fuzz_kernels.COUNTS.copy()
    fuzz_kernels.fuzz(1, 40)
    found = fuzz_kernels.COUNTS - before
    assert min(found["products"], found["experts"]) >= 40
