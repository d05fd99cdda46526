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
from typing import TYPE_CHECKING, Literal

import click

from picaflor import settings as table
from picaflor.cli.model import counted, model_path
from picaflor.errors import (
    AmbiguousFormat,
    BadContainer,
    BadTokenizer,
    MissingTensor,
    PicaflorError,
    UnknownFormat,
    UnsupportedConfig,
)
from picaflor.settings import Settings
from picaflor.sizes import format_bytes

if TYPE_CHECKING:
    from picaflor.models.base import Model

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
    for check in run_checks(model, settings):
        checks.append(check)
        if not settings.json:
            print(f"{check.status:<5} {check.id:<16} {check.detail}", flush=True)
            if check.remedy:
                print(f"{'':<5} {'':<16} -> {check.remedy}", flush=True)
    failed = sum(check.status == "fail" for check in checks)
    if settings.json:
        print(json.dumps({"checks": [asdict(check) for check in checks], "failed": failed}))
    return 1 if failed else 0


def run_checks(model: str | None, settings: Settings) -> Iterator[Check]:
    """All checks, in order; a check that raises is a failed check, and later ones run all the same."""
    checks: list[tuple[str, Callable[[], Check]]] = [
        ("python", check_python),
        ("native", check_native),
        ("threads", check_threads),
        ("memory", check_memory),
        ("open-files", check_open_files),
    ]
    checks += [(f"cpu.{isa}", partial(check_isa, isa)) for isa in _isas()]
    for name, check in checks:
        yield _answer(name, check)
    if model is not None:
        yield from check_model(model, settings)


def check_model(model: str, settings: Settings) -> Iterator[Check]:
    """The model's files, then its tokenizer; where there is no directory, that alone."""
    try:
        path = model_path(model)
        assert path is not None
    except PicaflorError as error:
        yield Check("model.files", "fail", str(error), _REMEDIES["directory"])
        return
    if not path.is_dir():
        yield Check("model.files", "fail", f"{path}: is a file, expected a directory", _REMEDIES["directory"])
        return
    found: list[Model] = []
    if any(path.glob("*.safetensors")):
        yield _answer("model.files", partial(check_files, path, settings, found))
    else:
        yield Check("model.files", "fail", f"{path}: no *.safetensors file here", _REMEDIES["directory"])
    yield _answer("model.tokenizer", partial(check_tokenizer, path, found[0] if found else None))


def _answer(name: str, check: Callable[[], Check]) -> Check:
    try:
        return check()
    except (PicaflorError, OSError, ImportError) as error:
        remedy = next((text for kind, text in _BY_ERROR if isinstance(error, kind)), None)
        return Check(name, "fail", " ".join(str(error).split()), remedy or _REMEDIES[name.partition(".")[0]])


_REMEDIES = {
    "python": "install Python 3.11 or later",
    "native": "install Picaflor again with a C++20 compiler present",
    "threads": "grant this process at least one processor",
    "memory": "give --ram with the memory that may be used",
    "open-files": "raise the limit: ulimit -n 4096",
    "cpu": "leave this instruction set out with --isa and report this line",
    "model": "picaflor inspect MODEL lists what is there; fetch the file named here again",
    "notice": "it loads; see docs/container.md and docs/families.md for what the note means",
    "directory": "name an existing directory that holds config.json, tokenizer.json and *.safetensors files",
}
_BY_ERROR: tuple[tuple[type[Exception], str], ...] = (
    (
        MissingTensor,
        "a part of the model is not there: picaflor inspect MODEL lists all of it; fetch these files again",
    ),
    (
        BadContainer,
        "a file is damaged, or config.json and the weights are of different models: fetch the file named here again",
    ),
    (UnsupportedConfig, "restore config.json if it was edited; else this version does not run this model"),
    (AmbiguousFormat, "say the group size with --group-size, as the model's makers give it"),
    (UnknownFormat, "weights in a format that this version does not read: take another conversion of the model"),
    (BadTokenizer, "fetch tokenizer.json again from where the model's weights came from"),
)


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
    return Check("threads", "ok", f"{counted(count, 'processor')} granted")


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
    detail = f"{counted(soft, 'file')} may be open ({hard} at most)"
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


def check_files(path: Path, settings: Settings, found: list[Model]) -> Check:
    """Every tensor that the config asks for is there, in a known format and of the right size; weights are not read.

    A model that would load is put into `found`.
    """
    from picaflor.container.index import Container
    from picaflor.models.config import Notices
    from picaflor.models.loading import open_model
    from picaflor.runtime.plan import DEFAULT_CONTEXT

    with Container.open(path) as container:
        notices = Notices(strict=settings.strict)
        for text in container.notes:
            notices.note(text)
        model, _ = open_model(
            container, context=settings.ctx or DEFAULT_CONTEXT, group_size=settings.group_size, notices=notices
        )
        found.append(model)
        nbytes = sum(shard.nbytes for shard in container.shards)
        tensors, shards = counted(len(container.tensors), "tensor"), counted(len(container.shards), "file")
        detail = f"{model.family}, {tensors} in {shards}, {format_bytes(nbytes)}; every tensor it needs is there"
    if notices.messages:
        return Check("model.files", "warn", f"{detail}; {'; '.join(notices.messages)}", _REMEDIES["notice"])
    return Check("model.files", "ok", detail)


def check_tokenizer(path: Path, model: Model | None) -> Check:
    """The tokenizer and the chat template can be used, and its ids fit the model where that is known."""
    from picaflor.runtime.chat import ChatTemplate
    from picaflor.runtime.tokenizer import FILE, Tokenizer, missing_file

    if not (path / FILE).is_file():
        return Check("model.tokenizer", "fail", *missing_file(path))
    Tokenizer.open(path, vocabulary=model.vocabulary if model is not None else None)
    template = ChatTemplate.open(path)
    words = "tokenizer read, " + ("chat template read" if template else "no chat template")
    return Check("model.tokenizer", "ok", words)


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
