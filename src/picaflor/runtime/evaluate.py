"""Perplexity: mean negative log-likelihood of text files, window by window.

Knows logits and token ids; must not know files' meaning, families or devices. Windows do not overlap: `window` input
tokens of a fresh sequence, the same text shifted by one as targets, no prefix; a file is cut at its last whole window.
"""

from __future__ import annotations

import codecs
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from picaflor.backends.api import I32
from picaflor.container.plain_file import open_plain
from picaflor.errors import PicaflorError, UsageError
from picaflor.formats.base import F32

DEFAULT_WINDOW = 1024
_BLOCK_VALUES = 1 << 20
_READ_BYTES = 1 << 16


class LogitSource(Protocol):
    """What is evaluated: all logits of a fresh sequence, in pieces."""

    def forward_logits(self, ids: I32) -> Iterator[F32]:
        """Logits of every position in order, float32 `[rows, vocabulary]` at a time."""
        ...


@dataclass(frozen=True, slots=True)
class TextScore:
    """The figures of one file. `tokens` are those scored; `bytes_per_token` is of all that was read."""

    name: str
    mean_nll: float
    tokens: int
    window: int
    windows: int
    bytes_per_token: float
    seconds: float

    @property
    def perplexity(self) -> float:
        """exp(mean NLL); infinity where that leaves float64."""
        return math.exp(self.mean_nll) if self.mean_nll < 700 else math.inf

    def record(self) -> dict[str, Any]:
        """As JSON data."""
        return {
            "name": self.name,
            "mean_nll": self.mean_nll,
            "perplexity": self.perplexity,
            "tokens": self.tokens,
            "window": self.window,
            "windows": self.windows,
            "bytes_per_token": self.bytes_per_token,
            "seconds": self.seconds,
        }


Progress = Callable[[str, int, int], None]


def negative_log_likelihoods(logits: F32, targets: I32) -> NDArray[np.float64]:
    """`-log softmax(logits)[target]` of each row in float64: logits `[rows, vocabulary]`, targets `[rows]`.

    Raises PicaflorError where a target is outside the vocabulary or a result is not finite.
    """
    rows, vocabulary = logits.shape
    if targets.shape != (rows,) or (rows and not 0 <= int(targets.min()) <= int(targets.max()) < vocabulary):
        raise PicaflorError(
            f"targets {targets.shape} of logits {logits.shape}: expected one id below {vocabulary} a row"
        )
    losses = np.empty(rows, np.float64)
    step = max(1, _BLOCK_VALUES // vocabulary)
    for start in range(0, rows, step):
        block = logits[start : start + step].astype(np.float64)
        wanted = targets[start : start + step]
        with np.errstate(invalid="ignore", over="ignore"):
            block -= block.max(axis=1, keepdims=True)
            chosen = block[np.arange(len(block)), wanted]
            losses[start : start + step] = np.log(np.exp(block).sum(axis=1)) - chosen
    bad = np.flatnonzero(~np.isfinite(losses))
    if len(bad):
        raise PicaflorError(f"row {bad[0]} of {rows} has logits that are not finite; expected finite numbers")
    return losses


def window_losses(source: LogitSource, ids: I32, targets: I32) -> NDArray[np.float64]:
    """Losses of one window, `[window]`: `ids[i]` is the input at position i, `targets[i]` the token that follows.

    Raises PicaflorError if the source gives another number of rows than it got tokens.
    """
    losses = np.empty(len(ids), np.float64)
    done = 0
    for logits in source.forward_logits(ids):
        stop = done + len(logits)
        if stop > len(ids):
            break
        losses[done:stop] = negative_log_likelihoods(logits, targets[done:stop])
        done = stop
    else:
        if done == len(ids):
            return losses
        stop = done
    raise PicaflorError(f"the model gave logits of {stop} positions or more for {len(ids)} tokens; expected one each")


def score_tokens(
    source: LogitSource,
    ids: I32,
    *,
    name: str,
    nbytes: int,
    window: int = DEFAULT_WINDOW,
    limit: int | None = None,
    progress: Progress | None = None,
) -> TextScore:
    """Score a text's tokens; `nbytes` is its length in bytes. Otherwise as `score_pieces`."""
    return score_pieces(
        source, [(ids, nbytes)], name=name, nbytes=nbytes, window=window, limit=limit, progress=progress
    )


def score_pieces(
    source: LogitSource,
    pieces: Iterable[tuple[Sequence[int] | I32, int]],
    *,
    name: str,
    nbytes: int,
    window: int = DEFAULT_WINDOW,
    limit: int | None = None,
    progress: Progress | None = None,
) -> TextScore:
    """Score a text whose tokens come in pieces (token ids, bytes of their text); `limit` is the most windows.

    Only what a window needs is held, and no piece is asked for once `limit` windows are done. `nbytes`, the length of
    the whole text, serves to estimate the number of windows: `progress(name, windows done, windows in all)` before the
    first and after each window. Raises PicaflorError for a text that holds no whole window.
    """
    held = np.empty(0, np.int32)
    done, read_tokens, read_bytes, total, seconds = 0, 0, 0, 0.0, 0.0
    for ids, length in pieces:
        held = np.concatenate([held, np.asarray(ids, np.int32)])
        read_tokens, read_bytes = read_tokens + len(ids), read_bytes + length
        expected = read_tokens if read_bytes >= nbytes else round(read_tokens * nbytes / max(1, read_bytes))
        count = window_count(expected, window, limit)
        ready = window_count(len(held), window, None if limit is None else limit - done)
        if progress is not None and ready and not done:
            progress(name, 0, count)
        started = time.monotonic()
        for index in range(ready):
            start = index * window
            losses = window_losses(source, held[start : start + window], held[start + 1 : start + window + 1])
            total += float(losses.sum())
            done += 1
            if progress is not None:
                progress(name, done, max(done, count))
        seconds += time.monotonic() - started
        held = held[ready * window :].copy()
        if done == limit:
            break
    if not done:
        raise PicaflorError(f"{name}: {read_tokens} tokens; one window needs {window + 1}; give a smaller --window")
    tokens = done * window
    return TextScore(name, total / tokens, tokens, window, done, read_bytes / read_tokens, seconds)


def window_count(tokens: int, window: int, limit: int | None = None) -> int:
    """Whole windows of a text of `tokens` tokens: each needs the token after its last one as a target."""
    count = max(0, tokens - 1) // window
    return count if limit is None else min(count, limit)


def count_tokens(pieces: Iterable[tuple[Sequence[int] | I32, int]], most: int) -> int:
    """The tokens of a text that comes in pieces, counted until there are at least `most`."""
    count = 0
    for ids, _ in pieces:
        count += len(ids)
        if count >= most:
            break
    return count


def find_texts(path: Path) -> list[Path]:
    """The .txt files of a folder in name order, or the one file that `path` is. Raises UsageError."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise UsageError(f"--text {path}: no such file or folder")
    texts = sorted(entry for entry in path.iterdir() if entry.suffix == ".txt" and entry.is_file())
    if not texts:
        raise UsageError(f"--text {path}: the folder holds no .txt file")
    return texts


def read_chunks(path: Path) -> Iterator[str]:
    """A UTF-8 file a piece at a time, line ends as they are. Raises UsageError naming the file and the fault."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    place = 0
    try:
        with open_plain(path, most_bytes=None, error=UsageError) as file:
            while data := file.read(_READ_BYTES):
                kept = len(decoder.getstate()[0])
                text = decoder.decode(data)
                place += len(data)
                yield text
            kept = len(decoder.getstate()[0])
            yield decoder.decode(b"", True)
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: byte {place - kept + error.start} is not UTF-8; give UTF-8 text") from None


def text_bytes(path: Path) -> int:
    """The length of a UTF-8 file in bytes, read once to know that it is one. Raises UsageError."""
    return sum(len(chunk.encode()) for chunk in read_chunks(path))
