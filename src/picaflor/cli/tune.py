"""`picaflor tune MODEL`: measure which options are fastest here and keep them for this machine and model.

Must not know how options are compared; runtime.tune does that. Nothing that it tries can change a token.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from picaflor import __version__
from picaflor import settings as table
from picaflor.cli.model import DEMO_LINE, Progress, counted, engine_options, model_path, tuned_file
from picaflor.errors import PicaflorError, UsageError
from picaflor.settings import Settings
from picaflor.sizes import format_rate

if TYPE_CHECKING:
    from picaflor.runtime.engine import Engine, EngineOptions
    from picaflor.runtime.tune import Options, Sample, Tuned


@click.command()
@click.argument("model", required=False)
@click.option("--tokens", type=click.IntRange(min=4), default=24, help="Tokens per repeat. Default: 24.")
@click.option("--repeats", type=click.IntRange(min=2), default=3, help="Repeats per measurement. Default: 3.")
@table.options("tune")
def command(model: str | None, tokens: int, repeats: int, settings: Settings) -> None:
    """Find the fastest threads and ways to read for MODEL, a directory; later runs use them and say so.

    Every candidate is measured before and after the best so far; it is kept where it gains 3 % beyond noise both times.
    """
    from picaflor.runtime.devices import usable_devices
    from picaflor.runtime.machine import StateFile
    from picaflor.runtime.tune import axes, key_of, reads_apply, search

    refuse_lossy(settings)
    path = model_path(model)
    if path is None:
        print(DEMO_LINE, file=sys.stderr, flush=True)
    line = Progress()
    where = tuned_file(settings)
    if where is None:
        raise PicaflorError("no folder for state: set XDG_STATE_HOME or HOME, or give --tuned-file")
    if where.is_dir():
        raise UsageError(f"--tuned-file {where}: is a directory; give a file")
    said: list[str] = []
    state = StateFile(where, warn=said.append, named=settings.tuned_file is not None)
    if settings.tuned_file is not None:
        if not where.absolute().parent.is_dir():
            raise UsageError(f"--tuned-file {where}: its directory does not exist")
        state.read()  # refused before anything is measured
    base = engine_options(replace(settings, tuned=False))  # the file is to be written: it need not be there
    with _open(path, base) as engine:
        key = key_of(engine.plan.model, engine.plan.index)
        name, granted = engine.name, engine.threads
        streams = engine.plan.store is not None and not engine.plan.ledger.all_resident
        applies = reads_apply(engine.plan.reading.engine)
        wanted = axes(
            threads=granted,
            streams=streams,
            engines=_engines(),
            readers=engine.plan.read_threads,
            devices=usable_devices(),
        )
    wanted = {option: values for option, values in wanted.items() if getattr(base, option) in (None, "auto")}

    def measure(options: Options) -> Sample:
        changes: dict[str, Any] = dict(options)
        with _open(path, replace(base, **changes)) as engine:
            return _measure(engine, tokens, repeats)

    found = search(wanted, measure, applies=applies, progress=lambda done, total: line("comparing", done, total))
    line.clear()
    entry = _entry(name, found)
    kept = state.put(key, entry)
    if settings.json:
        file = str(where) if kept else None
        print(json.dumps({"kind": "tune", "model": name, "file": file, "key": key, **entry}))
    else:
        _print(name, found, f"in {where}" if kept else "not kept")
    if not kept:
        raise PicaflorError(f"the tuned options are not kept: {'; '.join(said)}")
    for text in said:
        line.warn(text)


def refuse_lossy(settings: Settings) -> None:
    """Raises UsageError where the environment or the config file asks for a lossy mode."""
    from picaflor.runtime.lossy import Lossy

    lossy = Lossy(settings.router_top_p, settings.experimental_expert_budget)
    if lossy.active:
        raise UsageError(f"tune measures no lossy mode; {', '.join(lossy.names())} is set: unset it")


def _open(path: Path | None, options: EngineOptions) -> Engine:
    from picaflor.runtime.engine import Engine

    return Engine.open(path, options)


def _engines() -> list[str]:
    """Read engines that work here."""
    from picaflor import _native

    reason = _native.uring_error()
    return ["threads"] if reason else ["threads", "io_uring"]


def _measure(engine: Engine, tokens: int, repeats: int) -> Sample:
    from picaflor.runtime.bench import fixed_tokens
    from picaflor.runtime.tune import Sample
    from picaflor.telemetry.record import percentile

    ids = [int(token) for token in fixed_tokens(engine.vocabulary, 8 + tokens, 1)]
    engine.decode_replay(ids[:8], ids[8:])
    found = [engine.decode_replay(ids[:8], ids[8:]) for _ in range(repeats)]
    steps = [second for repeat in found for second in repeat]
    return Sample(tuple(len(repeat) / sum(repeat) for repeat in found), percentile(steps, 99))


def _entry(name: str, found: Tuned) -> dict[str, Any]:
    return {
        "model": name,
        "picaflor": __version__,
        "options": dict(found.options),
        "tokens_per_s_before": found.before,
        "tokens_per_s": found.after,
        "steps": [asdict(step) for step in found.steps],
    }


def _print(name: str, found: Tuned, where: str) -> None:
    from picaflor.runtime.tune import in_words

    for step in found.steps:
        gains = " and ".join(f"{gain:+.1%}" for gain in step.gains)
        words = "kept" if step.kept else "not kept"
        print(f"{in_words({step.option: step.value})}: {gains}, noise {step.noise:.1%}: {words}")
    kept = in_words(found.options) or "nothing: the defaults are as fast as anything that was tried"
    print(f"{name}: {counted(len(found.steps), 'candidate')} tried, kept {kept}")
    print(f"{format_rate(found.before)} tokens/s before, {format_rate(found.after)} now; {where}")
