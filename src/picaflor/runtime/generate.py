"""The token loop: prompt in, text pieces out, stopping where it should.

Knows a runner, a sampler and a decoder; must not know devices, families or who reads the text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from picaflor.backends.api import I32, NO_TOKEN
from picaflor.errors import NoFiniteLogit
from picaflor.runtime.kvcache import Sequence
from picaflor.runtime.runner import Runner, Work

FinishReason = Literal["stop", "length", "context", "cancelled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """How tokens are chosen. `temperature` 0 is greedy; `stop` are texts before which the answer ends."""

    max_tokens: int = 256
    temperature: float = 0.7
    top_p: float = 0.9
    seed: int = 0
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Text that is certain now, and the token whose arrival made it so. Text may be empty."""

    text: str
    token: int


class Decoder(Protocol):
    """Tokens to text, one at a time, never half a character."""

    def push(self, token: int) -> str:
        """Text that this token completes."""
        ...

    def finish(self) -> str:
        """What is left."""
        ...


Draw = Callable[[int], int]
"""The token at a position, from the row of logits of the last step; NO_TOKEN where none of them is finite."""


class StopText:
    """Holds text back as long as it could be the beginning of a stop text."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """(text that is certain, a stop text has come); nothing of the stop text is ever returned."""
        self._held += text
        cut = min((at for stop in self._stops if (at := self._held.find(stop)) >= 0), default=-1)
        if cut >= 0:
            certain, self._held = self._held[:cut], ""
            return certain, True
        keep = max((self._overlap(stop) for stop in self._stops), default=0)
        certain, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return certain, False

    def flush(self) -> str:
        """What was held back, when nothing more will come."""
        held, self._held = self._held, ""
        return held

    def _overlap(self, stop: str) -> int:
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(stop[:n])), 0)


@dataclass(slots=True)
class Clock:
    """Times that the loop leaves for the report, in seconds. `steps` has one entry per decode step; where a device
    draws, with the drawing of its token: it is done when its token is here.
    """

    prefill_s: float = 0.0
    first_token_s: float = 0.0
    sampling_s: float = 0.0
    decode_s: float = 0.0
    steps: list[float] = field(default_factory=list)


class Generation:
    """One answer: iterate over it, then read `finish_reason` and `tokens`.

    `sequence` holds the prompt's first `reused` tokens already. The token at position p depends on (seed, p) alone.
    """

    def __init__(
        self,
        runner: Runner,
        sequence: Sequence,
        prompt: I32,
        options: SamplingOptions,
        *,
        draw: Draw,
        decoder: Decoder,
        stop_tokens: frozenset[int],
        context: int,
        prefill_chunk: int | None = None,
        progress: Callable[[int, int], None] | None = None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        self.finish_reason: FinishReason = "cancelled"
        self.tokens: list[int] = []
        self.clock = Clock()
        self.on_prefilled: Callable[[], None] = lambda: None
        self._runner, self._sequence, self._prompt, self._options = runner, sequence, prompt, options
        self._draw, self._decoder, self._stop_tokens = draw, decoder, stop_tokens
        self._context, self._chunk, self._progress = context, prefill_chunk, progress
        self._cancelled = cancelled

    def __iter__(self) -> Iterator[TextPiece]:
        start = time.perf_counter()
        fresh = self._prompt[self._sequence.length :]
        ready = self._runner.fill(
            self._sequence, fresh, chunk=self._chunk, progress=self._progress, cancelled=self._cancelled
        )
        self._runner.wait()
        self.clock.prefill_s = time.perf_counter() - start
        self.on_prefilled()
        if not ready:
            return
        text = StopText(self._options.stop)
        while True:
            token = self._choose()
            if not self.tokens:
                self.clock.first_token_s = time.perf_counter() - start
            if token in self._stop_tokens:
                self.finish_reason = "stop"
                break
            self.tokens.append(token)
            certain, stopped = text.push(self._decoder.push(token))
            yield TextPiece(certain, token)
            if stopped:
                self.finish_reason = "stop"
                return
            if self._ended():
                break
            self._step(token)
        rest, stopped = text.push(self._decoder.finish())
        if stopped:
            self.finish_reason = "stop"
        rest += text.flush()
        if rest:
            yield TextPiece(rest, self.tokens[-1])

    def _ended(self) -> bool:
        if self._cancelled():
            self.finish_reason = "cancelled"
        elif len(self.tokens) >= self._options.max_tokens:
            self.finish_reason = "length"
        elif self._sequence.length >= self._context:
            self.finish_reason = "context"
        else:
            return False
        return True

    def _choose(self) -> int:
        start = time.perf_counter()
        token = self._draw(self._sequence.length)
        if token == NO_TOKEN:
            raise NoFiniteLogit(
                f"no logit at position {self._sequence.length} is finite: weights are NaN or infinite "
                "(picaflor inspect MODEL --deep finds those), or finite ones are so large that products overflow"
            )
        elapsed = time.perf_counter() - start
        if self._runner.draws_there and self.clock.steps:
            self.clock.steps[-1] += elapsed
            self.clock.decode_s += elapsed
        else:
            self.clock.sampling_s += elapsed
        return token

    def _step(self, token: int) -> None:
        start = time.perf_counter()
        self._runner.advance([Work(self._sequence, np.array([token], np.int32), decoded=True)])
        elapsed = time.perf_counter() - start
        self.clock.decode_s += elapsed
        self.clock.steps.append(elapsed)
