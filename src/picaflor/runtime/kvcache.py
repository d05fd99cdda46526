"""Which pages of the key-value cache belong to which sequence.

Knows page numbers only; must not know what a page holds, nor the device that holds it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from picaflor.errors import ContextExceeded

PAGE_TOKENS = 64


@dataclass(slots=True)
class Sequence:
    """One conversation's tokens whose keys and values are cached; position `length` comes next."""

    pages: list[int] = field(default_factory=list)
    length: int = 0


class PagePool:
    """A fixed number of pages of `page_tokens` tokens, handed to sequences and taken back.

    A page belongs to one sequence at a time. Truncating keeps the pages that still hold tokens.
    """

    def __init__(self, *, pages: int, page_tokens: int = PAGE_TOKENS) -> None:
        self.page_tokens = page_tokens
        self.pages = pages
        self._free = list(range(pages - 1, -1, -1))

    @property
    def free_tokens(self) -> int:
        """Tokens that still fit into pages that nobody owns."""
        return len(self._free) * self.page_tokens

    def reserve(self, sequence: Sequence, tokens: int) -> None:
        """Give `sequence` room for `tokens` more positions. Raises ContextExceeded and changes nothing."""
        needed = -(-(sequence.length + tokens) // self.page_tokens) - len(sequence.pages)
        if needed > len(self._free):
            room = len(sequence.pages) * self.page_tokens - sequence.length + self.free_tokens
            raise ContextExceeded(
                f"the context is full: {tokens} more tokens wanted, room for {room} (--ctx sets the size)"
            )
        sequence.pages.extend(self._free.pop() for _ in range(needed))

    def truncate(self, sequence: Sequence, length: int) -> None:
        """Forget all positions from `length` on and take the pages back that are empty then."""
        if not 0 <= length <= sequence.length:
            raise ValueError(f"truncate to {length} of {sequence.length} positions")
        sequence.length = length
        keep = -(-length // self.page_tokens)
        while len(sequence.pages) > keep:
            self._free.append(sequence.pages.pop())

    def release(self, sequence: Sequence) -> None:
        """Take all pages of a sequence back."""
        self.truncate(sequence, 0)

    def table(self, sequences: list[Sequence]) -> NDArray[np.int32]:
        """The page table int32 `[sequences, pages]` of a batch; missing entries are -1."""
        if len(sequences) == 1 and sequences[0].pages:
            return np.array([sequences[0].pages], np.int32)
        width = max((len(sequence.pages) for sequence in sequences), default=0)
        table = np.full((len(sequences), max(width, 1)), -1, dtype=np.int32)
        for row, sequence in zip(table, sequences, strict=True):
            row[: len(sequence.pages)] = sequence.pages
        return table
