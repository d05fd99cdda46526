"""`picaflor run [MODEL] PROMPT`: continue a text on stdout as it is produced.

Must not know how text is made; the report comes from the engine's record.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import sys
from collections.abc import Generator
from typing import TYPE_CHECKING, cast

import click

from picaflor import settings as table
from picaflor.cli.model import ending, model_and_prompt, open_engine, read_prompt
from picaflor.errors import BadTemplate, PicaflorError
from picaflor.settings import Settings

if TYPE_CHECKING:
    from picaflor.runtime.engine import Engine
    from picaflor.runtime.generate import SamplingOptions, TextPiece


@click.command()
@click.argument("words", nargs=-1, metavar="[MODEL] PROMPT")
@table.options("run")
def command(words: tuple[str, ...], settings: Settings) -> None:
    """Continue PROMPT with MODEL, a directory; without MODEL the built-in one. PROMPT may be - for stdin.

    The continuation goes to stdout as it is produced, everything else to stderr.
    """
    model, prompt_word = model_and_prompt(compat_words(words, settings))
    prompt = read_prompt(prompt_word)
    with open_engine(model, settings) as engine:
        ids = prompt_ids(engine, prompt, chat=settings.chat)
        sampling = sampling_options(settings)
        if settings.profile:
            print(end_line(engine), file=sys.stderr, flush=True)
        try:
            text = _write(engine, ids, sampling, silent=settings.json)
        except KeyboardInterrupt:
            _report(engine, settings)
            raise
        if line := ending(engine):
            print(line, file=sys.stderr, flush=True)
        _report(engine, settings)
        if settings.json:
            from picaflor.telemetry.report import as_json

            print(json.dumps({"text": text, "finish_reason": engine.finish_reason, "record": as_json(engine.record())}))


def compat_words(words: tuple[str, ...], settings: Settings) -> tuple[str, ...]:
    """The words, completed from the C engine's variables under --compat-env; else one line where they look meant."""
    found = table.c_engine()
    if not settings.compat_env:
        if found.model is not None and len(words) < 2:
            print("SNAP is set and not used: --compat-env takes the C engine's variables", file=sys.stderr, flush=True)
        return words
    for line in found.lines:
        print(f"--compat-env: {line}", file=sys.stderr, flush=True)
    if not words and found.prompt is not None:
        words = (found.prompt,)
    if len(words) == 1 and found.model is not None:
        words = (found.model, *words)
    return words


def end_line(engine: Engine) -> str:
    """Which tokens end an answer of this model, as one line."""
    return f"answers end at {', '.join(engine.stop_names) or 'no token'}"


def prompt_ids(engine: Engine, prompt: str, *, chat: bool) -> list[int]:
    """The prompt's tokens; with `chat` it is one user turn in the model's own template."""
    if not chat:
        ids = engine.tokenizer.encode(prompt)
        prefix = _sequence_prefix(engine)
        return ids if ids[: len(prefix)] == prefix else [*prefix, *ids]
    return chat_ids(engine, [{"role": "user", "content": prompt}])


def chat_ids(engine: Engine, messages: list[dict[str, str]]) -> list[int]:
    """Tokens of a conversation in the model's template, up to where the answer begins."""
    if engine.chat_template is None:
        raise PicaflorError(f"model {engine.name} has no chat template; leave --chat out to continue a text")
    return engine.tokenizer.encode(engine.chat_template.render(messages))


def _sequence_prefix(engine: Engine) -> list[int]:
    """The control tokens with which the model's template starts any conversation; none where it has no such start.

    A template that fails without a turn is named: the text then starts without tokens that others would put there.
    """
    if engine.chat_template is None:
        return []
    try:
        ids = engine.tokenizer.encode(engine.chat_template.render([], add_generation_prompt=False))
    except BadTemplate as error:
        engine.plan.notices.tell(f"the prompt starts without start tokens, which the chat template would tell: {error}")
        return []
    return ids if all(number in engine.tokenizer.special for number in ids) else []


def sampling_options(settings: Settings) -> SamplingOptions:
    """The sampler's part of the settings; a seed is drawn where none was given."""
    from picaflor.runtime.generate import SamplingOptions

    return SamplingOptions(
        max_tokens=settings.max_tokens,
        temperature=settings.temperature,
        top_p=settings.top_p,
        seed=secrets.randbits(32) if settings.seed is None else settings.seed,
        stop=settings.stop,
    )


def _report(engine: Engine, settings: Settings) -> None:
    if settings.profile:
        from picaflor.telemetry.report import print_report

        engine.measure_memory_limit()
        print_report(engine.record(), sys.stderr)


def _write(engine: Engine, ids: list[int], sampling: SamplingOptions, *, silent: bool) -> str:
    text = ""
    pieces = cast("Generator[TextPiece, None, None]", engine.generate(ids, sampling))
    try:
        with contextlib.closing(pieces):  # the record is complete only when the loop inside has ended
            for piece in pieces:
                text += piece.text
                if piece.text and not silent:
                    sys.stdout.write(piece.text)
                    sys.stdout.flush()
    finally:
        if text and not silent and not text.endswith("\n"):
            print(flush=True)
    return text
