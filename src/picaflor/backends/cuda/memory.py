"""A device that has no memory left, as an error of one line that names what needed it.

Knows torch's error; must not know what is held or who asks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from picaflor.errors import OutOfBudget


@contextmanager
def needed(what: str, cure: str) -> Iterator[None]:
    """Raises OutOfBudget where the device gives no memory for `what` within the block."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        said = " ".join(str(error).split())
        raise OutOfBudget(f"the device gives no memory for {what} ({said}): {cure}") from error


@contextmanager
def all_given() -> Iterator[None]:
    """Raises OutOfBudget where the device has no memory left for what the block does."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfBudget(f"the device is out of memory: {' '.join(str(error).split())}") from error
