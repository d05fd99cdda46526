"""`picaflor doctor [MODEL]`: is this machine fit, does every instruction set compute, can this model be opened.

Must not mend anything: each failure comes with one remedy for the user to apply.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Literal

import click

from picaflor import settings as table
from picaflor.cli.model import model_path
from picaflor.errors import PicaflorError
from picaflor.settings import Settings
from picaflor.sizes import format_bytes

Status = Literal["ok", "warn", "fail"]
LEAST_FILES = 1024
SELF_TEST_TOKENS = 8
SELF_TEST_PROMPT = "The old house"


@dataclass(frozen=True, slots=True)
class Check:
    """One answer. `remedy` is empty exactly where `status` is ok."""

    id: str
    status: Status
    detail: str
    remedy: str = ""


@click.command()
@click.argument("model", required=False)
@table.options("doctor")
def command(model: str | None, settings: Settings) -> int:
    """Check this machine, and with MODEL, a directory, that model's files. Exit code 1 if a check fails."""
    checks = []
    for check in run_checks(model):
        checks.append(check)
        if not settings.json:
            print(f"{check.status:<5} {check.id:<16} {check.detail}", flush=True)
            if check.remedy:
                print(f"{'':<5} {'':<16} -> {check.remedy}", flush=True)
    failed = sum(check.status == "fail" for check in checks)
    if settings.json:
        print(json.dumps({"checks": [asdict(check) for check in checks], "failed": failed}))
    return 1 if failed else 0


def run_checks(model: str | None) -> Iterator[Check]:
    """All checks, in order; a check that raises is a failed check, and later ones run all the same."""
    checks: list[tuple[str, Callable[[], Check]]] = [
        ("python", check_python),
        ("native", check_native),
        ("threads", check_threads),
        ("memory", check_memory),
        ("open-files", check_open_files),
    ]
    checks += [(f"cpu.{isa}", partial(check_isa, isa)) for isa in _isas()]
    if model is not None:
        checks += [("model.files", partial(check_files, model)), ("model.tokenizer", partial(check_tokenizer, model))]
    for name, check in checks:
        try:
            yield check()
        except (PicaflorError, OSError, ImportError) as error:
            yield Check(name, "fail", " ".join(str(error).split()), _REMEDIES[name.partition(".")[0]])


_REMEDIES = {
    "python": "install Python 3.11 or later",
    "native": "install Picaflor again with a C++20 compiler present",
    "threads": "grant this process at least one processor",
    "memory": "give --ram with the memory that may be used",
    "open-files": "raise the limit: ulimit -n 4096",
    "cpu": "leave this instruction set out with --isa and report this line",
    "model": "run picaflor inspect MODEL for the whole picture; download the named file again",
}


def check_python() -> Check:
    """The interpreter's version; an older one cannot even import the package."""
    version = ".".join(map(str, sys.version_info[:3]))
    return Check("python", "ok", f"Python {version}")


def check_native() -> Check:
    """The compiled part can be loaded and knows this processor."""
    isas = _native_isas()
    return Check("native", "ok", f"instruction sets here: {', '.join(isas)}; auto takes {isas[-1]}")


def check_threads() -> Check:
    """Processors that this process may run on."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Check("threads", "ok", f"{count} processors granted")


def check_memory() -> Check:
    """The tightest voice on how much memory this process may use."""
    from picaflor.store.budget import memory_sources, tightest

    limit = tightest(memory_sources(None, held=0))
    assert limit.nbytes is not None
    detail = f"{format_bytes(limit.nbytes)} may be used, says the {limit.name}"
    if limit.nbytes < 1 << 30:
        return Check("memory", "warn", detail, "large models will be slow: free memory or raise the limit")
    return Check("memory", "ok", detail)


def check_open_files() -> Check:
    """Many shards need many open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    detail = f"{soft} files may be open ({hard} at most)"
    if soft != resource.RLIM_INFINITY and soft < LEAST_FILES:
        return Check("open-files", "warn", detail, f"models of many shards want more: ulimit -n {4 * LEAST_FILES}")
    return Check("open-files", "ok", detail)


def check_isa(isa: str) -> Check:
    """The built-in model writes the same greedy tokens with this instruction set as with plain code."""
    tokens, expected = _demo_tokens(isa), _demo_tokens("scalar")
    if tokens != expected:
        return Check(
            f"cpu.{isa}", "fail", f"wrote tokens {list(tokens)}, plain code {list(expected)}", _REMEDIES["cpu"]
        )
    return Check(f"cpu.{isa}", "ok", f"the built-in model writes the same {len(tokens)} tokens as with plain code")


def check_files(model: str) -> Check:
    """All shards are there and their headers are sound."""
    from picaflor.container.index import Container

    with Container.open(_directory(model)) as container:
        nbytes = sum(shard.nbytes for shard in container.shards)
        detail = f"{len(container.tensors)} tensors in {len(container.shards)} files, {format_bytes(nbytes)}"
        if container.notes:
            return Check("model.files", "warn", f"{detail}; {'; '.join(container.notes)}", _REMEDIES["model"])
        return Check("model.files", "ok", detail)


def check_tokenizer(model: str) -> Check:
    """The tokenizer and the chat template can be used."""
    from picaflor.runtime.chat import ChatTemplate
    from picaflor.runtime.tokenizer import Tokenizer

    directory = _directory(model)
    Tokenizer.open(directory)
    template = ChatTemplate.open(directory)
    return Check(
        "model.tokenizer", "ok", "tokenizer read, " + ("chat template read" if template else "no chat template")
    )


def _directory(model: str) -> Path:
    path = model_path(model)
    assert path is not None
    return path


def _native_isas() -> list[str]:
    from picaflor import _native

    return list(_native.isas())


def _isas() -> list[str]:
    try:
        return _native_isas()
    except ImportError:
        return []


@cache
def _demo_tokens(isa: str) -> tuple[int, ...]:
    from picaflor.runtime.engine import Engine, EngineOptions
    from picaflor.runtime.generate import SamplingOptions

    sampling = SamplingOptions(max_tokens=SELF_TEST_TOKENS, temperature=0.0)
    with Engine.open(None, EngineOptions(isa=isa)) as engine:
        pieces = engine.generate(engine.tokenizer.encode(SELF_TEST_PROMPT), sampling)
        return tuple(piece.token for piece in pieces)
