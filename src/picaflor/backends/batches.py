"""What a device checks of a batch before it computes, and positions as keys see them; numpy only.

Knows batches and pages; must not know any device, operation or model.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np

from picaflor.backends.api import I32, Batch
from picaflor.formats.base import F32

FEW: Final = 3
"""Rows, at most, that are looked at one by one: more are faster together."""


@dataclass(slots=True)
class Limits:
    """Sizes that batches must fit. `pages` pages of `page_tokens` tokens; `touched`: pages that were written to."""

    max_rows: int
    max_outputs: int
    pages: int
    page_tokens: int
    touched: set[int] = field(default_factory=set)

    @property
    def capacity(self) -> int:
        """Tokens that all pages hold."""
        return self.pages * self.page_tokens

    def check(self, batch: Batch) -> None:
        """Raises ValueError for a batch that does not fit; remembers the pages that it writes to."""
        if self._few_fit(batch):
            return
        rows, outputs = len(batch.tokens), len(batch.outputs)
        if len(batch.sequences) != rows or len(batch.positions) != rows:
            raise ValueError("tokens, sequences and positions of a batch differ in length")
        if rows > self.max_rows:
            raise ValueError(f"a batch of {rows} rows, at most {self.max_rows} fit")
        if outputs > self.max_outputs:
            raise ValueError(f"a batch with {outputs} outputs, at most {self.max_outputs} fit")
        _inside(batch.outputs, rows, "output row {} of a batch of {} rows")
        _inside(batch.sequences, batch.pages.shape[0], "a row is of sequence {} of {}")
        limit = min(batch.pages.shape[1] * self.page_tokens, self.capacity)
        _inside(batch.positions, limit, "a row is at position {}, the page table has {} positions")
        if rows:
            self._check_pages(batch)

    def _few_fit(self, batch: Batch) -> bool:
        """Whether one look at each of a few rows shows that all is right; then as `check`. False says nothing yet."""
        rows, pages = len(batch.tokens), batch.pages
        if rows > FEW or rows > self.max_rows or len(batch.outputs) > min(FEW, self.max_outputs):
            return False
        if len(batch.sequences) != rows or len(batch.positions) != rows:
            return False
        sequences, limit = len(pages), min(pages.shape[1] * self.page_tokens, self.capacity)
        written = []
        for sequence, position in zip(batch.sequences.tolist(), batch.positions.tolist(), strict=True):
            if not (0 <= sequence < sequences and 0 <= position < limit):
                return False
            used = pages[sequence, : position // self.page_tokens + 1]
            if used.min() < 0 or used.max() >= self.pages:
                return False
            written.append(int(used[-1]))
        if any(not 0 <= number < rows for number in batch.outputs.tolist()):
            return False
        self.touched.update(written)
        return True

    def _check_pages(self, batch: Batch) -> None:
        """Every sequence needs its pages up to that of its last row; what a table has behind them is not looked at."""
        places = batch.positions // self.page_tokens
        tables = batch.pages[: int(batch.sequences.max()) + 1, : int(places.max()) + 1]
        if tables.min() < 0 or tables.max() >= self.pages:  # of a shorter sequence, maybe
            last = np.full(len(tables), -1, np.int32)
            np.maximum.at(last, batch.sequences, places)
            wrong = (np.arange(tables.shape[1]) <= last[:, None]) & ((tables < 0) | (tables >= self.pages))
            if wrong.any():
                sequence, place = np.argwhere(wrong)[0].tolist()
                raise ValueError(f"page {tables[sequence, place]} of sequence {sequence}, there are {self.pages} pages")
        self.touched.update(tables[batch.sequences, places].tolist())

    def tables(self, batch: Batch) -> I32:
        """The page tables of sequences up to the last that has rows, int32 `[sequences, at most pages]`, where a device
        has room for `max_rows` of them. Raises ValueError for more."""
        found: I32 = batch.pages[: int(batch.sequences.max(initial=-1)) + 1, : self.pages]
        if len(found) > self.max_rows:
            raise ValueError(f"rows of {len(found)} sequences, at most {self.max_rows} fit")
        return found

    def places(self, batch: Batch, sequence: int, count: int) -> I32:
        """Where the first `count` tokens of a sequence lie, as tokens counted over all pages, int32 `[count]`."""
        positions = np.arange(count, dtype=np.int32)
        pages = batch.pages[sequence, positions // self.page_tokens]
        found: I32 = (pages * self.page_tokens + positions % self.page_tokens).astype(np.int32)
        return found

    def own_places(self, batch: Batch) -> I32:
        """Where the batch's own rows are stored, int32 `[rows]`."""
        pages = batch.pages[batch.sequences, batch.positions // self.page_tokens]
        found: I32 = (pages * self.page_tokens + batch.positions % self.page_tokens).astype(np.int32)
        return found


def _inside(values: I32, limit: int, text: str) -> None:
    bad = values[(values < 0) | (values >= limit)]
    if len(bad):
        raise ValueError(text.format(int(bad[0]), limit))


def rope_lines(dims: int, theta: float, start: int, stop: int) -> tuple[F32, F32]:
    """cos and sin of positions `start .. stop`, `[stop - start, dims / 2]`.

    In long double like the CPU's, so that the rounded float32 depends on no library's choice.
    """
    half = dims // 2
    exponents = np.longdouble(-2.0) * np.arange(half, dtype=np.longdouble) / np.longdouble(dims)
    angles = np.arange(start, stop, dtype=np.longdouble)[:, None] * np.power(np.longdouble(theta), exponents)
    return np.cos(angles).astype(np.float64).astype(np.float32), np.sin(angles).astype(np.float64).astype(np.float32)
