"""`picaflor eval MODEL --text DIR`: mean negative log-likelihood and perplexity of text files.

Must not know how a likelihood is computed; runtime.evaluate does that.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from picaflor import settings as table
from picaflor.cli.model import Progress, open_engine
from picaflor.errors import UsageError
from picaflor.settings import Settings

if TYPE_CHECKING:
    from picaflor.runtime.engine import Engine
    from picaflor.runtime.evaluate import TextScore


@click.command()
@click.argument("model", metavar="MODEL")
@click.option("--text", type=click.Path(path_type=Path), required=True, help="Folder of .txt files, or one file.")
@click.option("--window", type=click.IntRange(min=1), default=1024, help="Tokens per window. Default: 1024.")
@click.option("--limit", type=click.IntRange(min=1), help="Most windows per file; all by default.")
@table.options("eval")
def command(model: str, text: Path, window: int, limit: int | None, settings: Settings) -> None:
    """Score text files with MODEL, a directory.

    Each file is cut into windows that do not overlap; a window is a fresh sequence, without any prefix, and its targets
    are the same tokens shifted by one. What is left behind the last whole window is not scored.
    """
    from picaflor.runtime.evaluate import find_texts, read_text

    texts = [(path, read_text(path)) for path in find_texts(text)]
    if settings.ctx is not None and settings.ctx < window:
        raise UsageError(f"--ctx {settings.ctx} is shorter than --window {window}")
    with open_engine(model, dataclasses.replace(settings, ctx=settings.ctx or window)) as engine:
        scores = [_score(engine, path, content, window, limit) for path, content in texts]
        name = engine.name
    if settings.json:
        files = [score.record() for score in scores]
        print(json.dumps({"model": name, "precision": settings.precision, "window": window, "files": files}))
    else:
        _print(name, scores)


def _score(engine: Engine, path: Path, content: str, window: int, limit: int | None) -> TextScore:
    import numpy as np

    from picaflor.runtime.evaluate import score_tokens

    ids = np.array(engine.tokenizer.encode(content), np.int32)
    progress = _Eta(Progress())
    try:
        return score_tokens(
            engine,
            ids,
            name=path.name,
            nbytes=len(content.encode("utf-8")),
            window=window,
            limit=limit,
            progress=progress,
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


def _print(name: str, scores: list[TextScore]) -> None:
    print(f"{name}, windows of {scores[0].window} tokens")
    width = max(len(score.name) for score in scores)
    print(f"{'':{width}}  {'tokens':>8}  {'mean NLL':>9}  {'perplexity':>10}  {'tokens/s':>8}")
    for score in scores:
        rate = score.tokens / score.seconds if score.seconds else 0.0
        print(f"{score.name:{width}}  {score.tokens:8d}  {score.mean_nll:9.5f}  {score.perplexity:10.4f}  {rate:8.1f}")
    sys.stdout.flush()
