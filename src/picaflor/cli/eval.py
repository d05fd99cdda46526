"""`picaflor eval [MODEL] --text DIR`: mean negative log-likelihood and perplexity of text files.

Must not know how a likelihood is computed; runtime.evaluate does that.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from picaflor import settings as table
from picaflor.cli.model import Progress, counted, open_engine
from picaflor.errors import PicaflorError, UsageError
from picaflor.settings import Settings

if TYPE_CHECKING:
    from picaflor.runtime.engine import Engine
    from picaflor.runtime.evaluate import TextScore


@click.command()
@click.argument("model", required=False)
@click.option("--text", type=click.Path(path_type=Path), required=True, help="Folder of .txt files, or one file.")
@click.option("--window", type=click.IntRange(min=1), default=1024, help="Tokens per window. Default: 1024.")
@click.option("--limit", type=click.IntRange(min=1), help="Most windows per file; all by default.")
@table.options("eval")
def command(model: str | None, text: Path, window: int, limit: int | None, settings: Settings) -> None:
    """Score text files with MODEL, a directory; without it with the built-in one.

    Each file is cut into windows that do not overlap; a window is a fresh sequence, without any prefix, and its targets
    are the same tokens shifted by one. What is left behind the last whole window is not scored. A file too short
    for one window is named and skipped; the exit code is 1 where no file could be scored.
    """
    from picaflor.runtime.evaluate import count_tokens, find_texts, read_chunks, text_bytes

    texts = [(path, text_bytes(path)) for path in find_texts(text)]
    if settings.ctx is not None and settings.ctx < window:
        raise UsageError(f"--ctx {settings.ctx} is shorter than --window {window}")
    with open_engine(model, dataclasses.replace(settings, ctx=settings.ctx or window)) as engine:
        counts = [count_tokens(engine.tokenizer.encode_pieces(read_chunks(path)), window + 1) for path, _ in texts]
        fits = [count > window for count in counts]
        skipped = [
            Skipped(path.name, count, window + 1)
            for (path, _), count, fit in zip(texts, counts, fits, strict=True)
            if not fit
        ]
        if not any(fits):
            raise PicaflorError(f"nothing to score: {'; '.join(map(str, skipped[:3]))}{'; ...' * (len(skipped) > 3)}")
        for entry in skipped:
            print(f"picaflor: warning: skipped {entry}", file=sys.stderr, flush=True)
        scores = [
            _score(engine, path, nbytes, window, limit) for (path, nbytes), fit in zip(texts, fits, strict=True) if fit
        ]
        name, lossy = engine.name, engine.plan.lossy.summary()
    if settings.json:
        record = {"model": name, "precision": settings.precision, "window": window, "lossy": list(lossy)}
        record |= {"files": [score.record() for score in scores]}
        record |= {"skipped": [dataclasses.asdict(entry) for entry in skipped]}
        print(json.dumps(record))
    else:
        _print(name, scores, lossy)


@dataclasses.dataclass(frozen=True, slots=True)
class Skipped:
    """A file with fewer than the `needed` tokens of one window."""

    name: str
    tokens: int
    needed: int

    def __str__(self) -> str:
        if not self.tokens:
            return f"{self.name}: the file is empty"
        return (
            f"{self.name}: {counted(self.tokens, 'token')}; one window needs {self.needed} (--window {self.needed - 1})"
        )


def _score(engine: Engine, path: Path, nbytes: int, window: int, limit: int | None) -> TextScore:
    from picaflor.runtime.evaluate import read_chunks, score_pieces

    progress = _Eta(Progress())
    try:
        pieces = engine.tokenizer.encode_pieces(read_chunks(path))
        return score_pieces(
            engine, pieces, name=path.name, nbytes=nbytes, window=window, limit=limit, progress=progress
        )
    finally:
        progress.line.clear()


class _Eta:
    """Windows done, with the time that the rest will take at the pace so far."""

    def __init__(self, line: Progress) -> None:
        self.line = line
        self._start = time.monotonic()

    def __call__(self, name: str, done: int, total: int) -> None:
        left = (time.monotonic() - self._start) * (total - done) / done if done else None
        self.line(f"{name}: {'' if left is None else f'{left:.0f} s left, '}window", done, total)


def _print(name: str, scores: list[TextScore], lossy: Sequence[str]) -> None:
    print(f"{name}, windows of {scores[0].window} tokens")
    for text in lossy:
        print(f"LOSSY, {text}")
    width = max(len(score.name) for score in scores)
    print(f"{'':{width}}  {'tokens':>8}  {'mean NLL':>9}  {'perplexity':>10}  {'tokens/s':>8}")
    for score in scores:
        rate = score.tokens / score.seconds if score.seconds else 0.0
        print(f"{score.name:{width}}  {score.tokens:8d}  {score.mean_nll:9.5f}  {score.perplexity:10.4f}  {rate:8.1f}")
    sys.stdout.flush()
