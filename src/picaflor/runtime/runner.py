"""Runs rows of sequences through a recorded forward pass, one batch at a time.

Knows batches, pages and programs; must not know families, formats or what a token means.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from typing import Literal

import numpy as np

from picaflor.backends.api import (
    I32,
    Backend,
    Batch,
    Chance,
    DrawingProgram,
    ExpertProvider,
    Program,
    Reduction,
    Rows,
    draw_rows,
)
from picaflor.errors import UsageError
from picaflor.formats.base import F32
from picaflor.runtime.kvcache import PagePool, Sequence
from picaflor.runtime.lossy import Lossy

Wanted = Literal["none", "last", "all"]


def checked_ids(ids: Ordered[int] | I32, vocabulary: int) -> I32:
    """Token ids as an int32 array. Raises UsageError naming the first id that is not below `vocabulary`."""
    values = np.asarray(ids)
    if not values.size:
        return np.empty(0, np.int32)
    if values.dtype == np.int32 and values.shape == (1,) and 0 <= values[0] < vocabulary:
        return values  # of a step that decodes
    if values.ndim != 1 or values.dtype.kind not in "iu" or values.min() < 0 or values.max() >= vocabulary:
        found = next((at for at, number in enumerate(ids) if not _is_id(number, vocabulary)), 0)
        raise UsageError(
            f"token {found} of {len(ids)} is {ids[found]!r:.80}; accepted: whole numbers from 0 to {vocabulary - 1}"
        )
    return values.astype(np.int32, copy=False)


def _is_id(number: object, vocabulary: int) -> bool:
    return isinstance(number, int | np.integer) and not isinstance(number, bool) and 0 <= int(number) < vocabulary


@dataclass(frozen=True, slots=True)
class Work:
    """Tokens to append to one sequence, and which of their logits are wanted.

    `decoded`: they are no prompt, so that a lossy mode that was asked for acts on them.
    """

    sequence: Sequence
    tokens: I32
    wanted: Wanted = "last"
    decoded: bool = False


class _Cancelled(Exception):
    """Ends a step between two layers."""


class Runner:
    """The step function: appends tokens to sequences and returns logits.

    A step that raises leaves every sequence as it was: lengths advance only after the program has run, and rows of the
    cache beyond a sequence's length are never read.
    """

    def __init__(
        self,
        program: Program,
        logits: Rows,
        pool: PagePool,
        experts: ExpertProvider | None,
        *,
        max_rows: int,
        max_outputs: int,
        lossy: Lossy | None = None,
        resident: Callable[[int], Collection[int]] = lambda layer: (),
    ) -> None:
        self.program = program
        self.pool = pool
        self.max_rows = max_rows
        self.max_outputs = max_outputs
        self._logits = logits
        self.lossy = lossy
        self._experts = experts
        self._resident = resident
        self._drawing = program if isinstance(program, DrawingProgram) else None
        self._seen: F32 | None = None

    def step(self, work: list[Work], *, layer_done: Callable[[int, int], None] | None = None) -> F32:
        """`advance`, and float32 logits `[outputs, vocabulary]`, valid until the next step."""
        return self._rows(self.advance(work, layer_done=layer_done))

    def advance(self, work: list[Work], *, layer_done: Callable[[int, int], None] | None = None) -> int:
        """Compute all rows of `work` together; how many rows of logits there are then.

        Outputs are in the order of `work`. Where tokens are drawn on a device it may still be at work afterwards.
        `layer_done(done, total)` after each MoE layer; what it raises leaves the sequences as they were. Raises
        ContextExceeded, ReadFailed, and UsageError for an id that the model does not know.
        """
        batch = self._batch(work)
        batch.layer_done = layer_done
        self.program.run(batch, self._experts)
        for item in work:
            item.sequence.length += len(item.tokens)
        self._seen = None if self.draws_there else self.program.view(self._logits, len(batch.outputs))
        return len(batch.outputs)

    @property
    def draws_there(self) -> bool:
        """Whether tokens are drawn on the device, so that `draw` is what ends a step."""
        return self._drawing is not None

    def wait(self) -> None:
        """Until a device has done what it was given."""
        self.program.view(self._logits, 0)

    def _rows(self, count: int) -> F32:
        """The first rows of logits of the last step, on the host."""
        if self._seen is None or len(self._seen) < count:
            self._seen = self.program.view(self._logits, count)
        return self._seen[:count]

    def draw(self, backend: Backend, chances: Ordered[Chance]) -> list[int]:
        """One token from each of the last step's first rows of logits, where they lie if the program can do that.

        NO_TOKEN where no logit of a row is finite.
        """
        if self._drawing is not None:
            return self._drawing.draw(self._logits, chances)
        return draw_rows(self._rows(len(chances)), chances, backend.sample)

    def _batch(self, work: list[Work]) -> Batch:
        rows = sum(len(item.tokens) for item in work)
        if not 0 < rows <= self.max_rows:
            raise ValueError(f"a step takes 1 to {self.max_rows} rows, got {rows}")
        tokens = self._tokens(work)
        for item in work:
            self.pool.reserve(item.sequence, len(item.tokens))
        sequences: list[int] = []
        positions: list[int] = []
        outputs: list[int] = []
        for index, item in enumerate(work):
            start, count, length = len(positions), len(item.tokens), item.sequence.length
            sequences += [index] * count
            positions += range(length, length + count)
            if item.wanted == "last":
                outputs.append(start + count - 1)
            elif item.wanted == "all":
                outputs += range(start, start + count)
        if len(outputs) > self.max_outputs:
            raise ValueError(f"a step gives at most {self.max_outputs} rows of logits, {len(outputs)} wanted")
        table = self.pool.table([item.sequence for item in work])
        told = [np.array(values, np.int32) for values in (sequences, positions, outputs)]
        return Batch(tokens, told[0], told[1], table, told[2], self._reduction(work))

    def _tokens(self, work: list[Work]) -> I32:
        """The tokens of all items, one after the other. Raises UsageError, which names the place in its own item."""
        together = work[0].tokens if len(work) == 1 else np.concatenate([item.tokens for item in work])
        try:
            return checked_ids(together, self._logits.width)
        except UsageError:
            for item in work:
                checked_ids(item.tokens, self._logits.width)
            raise

    def _reduction(self, work: list[Work]) -> Reduction | None:
        if self.lossy is None or not self.lossy.active or not any(item.decoded for item in work):
            return None
        rows = np.repeat([item.decoded for item in work], [len(item.tokens) for item in work])
        return self.lossy.reduction(rows, self._resident)

    def prefill(
        self,
        sequence: Sequence,
        tokens: I32,
        *,
        chunk: int | None = None,
        progress: Callable[[int, int], None] | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> F32:
        """`fill`, and logits `[1, vocabulary]` of the prompt's last token, or `[0, ...]` if cancelled."""
        ready = self.fill(sequence, tokens, chunk=chunk, progress=progress, cancelled=cancelled)
        return self._rows(int(ready))

    def fill(
        self,
        sequence: Sequence,
        tokens: I32,
        *,
        chunk: int | None = None,
        progress: Callable[[int, int], None] | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> bool:
        """Append a prompt in chunks; whether its last token's logits are there: not if cancelled, or without tokens.

        A chunk goes through a layer before the next layer begins, so each expert is read once per chunk.
        `progress(done, total)` in tokens after each layer (a chunk's share of them) and each chunk; `cancelled` is
        asked as often, and the chunk that was under way is then forgotten.
        """
        size = min(chunk or self.max_rows, self.max_rows)
        outputs = 0
        for start in range(0, len(tokens), size):
            stop = min(start + size, len(tokens))
            layer_done = self._between(start, stop, len(tokens), progress, cancelled)
            try:
                layer_done(0, 1)
                wanted: Wanted = "last" if stop == len(tokens) else "none"
                outputs = self.advance([Work(sequence, tokens[start:stop], wanted)], layer_done=layer_done)
            except _Cancelled:
                return False
            if progress is not None:
                progress(stop, len(tokens))
        return outputs > 0

    @staticmethod
    def _between(
        start: int,
        stop: int,
        total: int,
        progress: Callable[[int, int], None] | None,
        cancelled: Callable[[], bool] | None,
    ) -> Callable[[int, int], None]:
        """What happens between two layers of a chunk."""

        def layer_done(done: int, layers: int) -> None:
            if cancelled is not None and cancelled():
                raise _Cancelled
            if progress is not None and 0 < done < layers:
                progress(start + (stop - start) * done // layers, total)

        return layer_done

    def all_logits(self, sequence: Sequence, tokens: I32) -> Iterator[F32]:
        """Append tokens and yield the logits of each, `[rows, vocabulary]` at a time (copies).

        Under a lossy mode the tokens count as decoded, one per step, so that its damage can be measured.
        """
        lossy = self.lossy is not None and self.lossy.active
        size = 1 if lossy else min(self.max_rows, self.max_outputs)
        for start in range(0, len(tokens), size):
            yield self.step([Work(sequence, tokens[start : start + size], "all", decoded=lossy)]).copy()
