"""How many prompt tokens go through the layers together: the chunk that makes the disk read least.

Knows ledgers, slots and sizes; must not know containers, families or devices. A chunk reads every missing expert once,
so larger chunks read less of a long prompt; their buffers take memory from experts, so that every answer reads more.
docs/design/prefill.md has the arithmetic and what was measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from picaflor.errors import OutOfBudget
from picaflor.store.budget import Ledger

try:
    import resource
except ImportError:  # a system without limits of address space
    resource = None  # type: ignore[assignment]

SMALLEST = 256
LARGEST = 8192
ANSWER_TOKENS = 512
"""The answer that is weighed against a prompt of LARGEST tokens, or of the context where that is shorter."""


class Sized(Protocol):
    """A recorder whose buffers can be made smaller after recording."""

    def row_bytes(self) -> int:
        """Work memory of one row, from SMALLEST rows on."""
        ...

    def limit_rows(self, rows: int) -> None:
        """Give the memory of all further rows back."""
        ...


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """By MoE layer: how many experts, bytes of one, how many a token chooses."""

    counts: Mapping[int, int]
    nbytes: Mapping[int, int]
    chosen: int

    def read_bytes(self, ledger: Ledger, rows: int, prompt: int) -> float:
        """What a prompt in chunks of `rows` and an answer would read if every expert were as likely as any other."""
        missing = {layer: max(0, count - ledger.slots[layer]) for layer, count in self.counts.items()}
        prefill = -(-prompt // rows) * sum(count * self.nbytes[layer] for layer, count in missing.items())
        step = sum(self.chosen * self.nbytes[layer] * count / self.counts[layer] for layer, count in missing.items())
        return prefill + ANSWER_TOKENS * step


def most_rows(wanted: int | None, tokens: int, *, on_device: bool) -> int:
    """Rows to record with: the wanted chunk, else the largest that could be chosen. `tokens`: the cache's size.

    Where address space is limited nothing is reserved for a choice.
    """
    if wanted is None:
        wanted = SMALLEST if on_device or _space_is_limited() else LARGEST
    return max(1, min(wanted, tokens))


def settle(
    recorder: Sized,
    most: int,
    *,
    workspace_bytes: int,
    prompt: int,
    experts: ExpertSizes,
    ledger_at: Callable[[int], Ledger],
) -> int:
    """Limit a recorder to the rows with the least reads, the fewest of those, and return them.

    `most`: the rows that it was recorded with, `workspace_bytes` their work memory; `ledger_at(bytes)` is the ledger
    with so much work memory and raises OutOfBudget where that does not fit.
    """
    best, least = SMALLEST, float("inf")
    for rows in _sizes(most):
        try:
            ledger = ledger_at(workspace_bytes - (most - rows) * recorder.row_bytes())
        except OutOfBudget:
            break
        found = experts.read_bytes(ledger, rows, min(prompt, LARGEST))
        if found < least:
            best, least = rows, found
    recorder.limit_rows(best)
    return best


def _sizes(most: int) -> Iterator[int]:
    """SMALLEST and its doubles below `most`, then `most`."""
    rows = SMALLEST
    while rows < most:
        yield rows
        rows *= 2
    yield most


def _space_is_limited() -> bool:
    return resource is not None and any(
        resource.getrlimit(kind)[0] != resource.RLIM_INFINITY for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA)
    )
