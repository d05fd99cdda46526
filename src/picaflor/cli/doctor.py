"""`picaflor doctor [MODEL]`: is this machine fit, does every instruction set compute, can this model be opened.

Must not mend anything: each failure comes with one remedy for the user to apply.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from picaflor import settings as table
from picaflor.cli.doctor_machine import (
    Check,
    check_backend,
    check_huge_pages,
    check_locked_memory,
    check_memory,
    check_open_files,
    check_state,
    check_storage,
    check_threads,
    check_uring,
)
from picaflor.cli.model import Progress, counted, engine_options, model_path, split_folders
from picaflor.errors import (
    AmbiguousFormat,
    BadContainer,
    BadTokenizer,
    MissingTensor,
    OutOfBudget,
    PicaflorError,
    UnknownFormat,
    UnsupportedConfig,
    UsageError,
)
from picaflor.settings import Settings
from picaflor.sizes import format_bytes

if TYPE_CHECKING:
    from picaflor.models.base import Model
    from picaflor.runtime.sketch import Sketch
    from picaflor.runtime.trial_reads import Reads

LEAST_RATE = 5e6
"""Bytes per second that are not shown as 0.00 GB/s; less is no rate of a drive but a trial that read too little."""
LEAST_SHARE = 0.005
"""Part of the bytes that is not shown as 0 %."""
SELF_TEST_TOKENS = 8
SELF_TEST_PROMPT = "The old house"


@click.command()
@click.argument("model", required=False)
@click.option("--deep", is_flag=True, help="Read all of the model: values that no sound file has, and the disk's rate.")
@table.options("doctor")
def command(model: str | None, deep: bool, settings: Settings) -> int:
    """Check this machine, and with MODEL, a directory, that model's files. Exit code 1 if a check fails."""
    if deep and model is None:
        raise UsageError(
            "--deep reads a model and none is given: name its directory, as picaflor doctor DIRECTORY --deep"
        )
    checks = []
    for check in run_checks(model, settings, deep=deep):
        checks.append(check)
        if not settings.json:
            print(f"{check.status:<5} {check.id:<16} {check.detail}", flush=True)
            if check.remedy:
                print(f"{'':<5} {'':<16} -> {check.remedy}", flush=True)
    failed = sum(check.status == "fail" for check in checks)
    if settings.json:
        print(json.dumps({"checks": [asdict(check) for check in checks], "failed": failed}))
    return 1 if failed else 0


def run_checks(model: str | None, settings: Settings, *, deep: bool = False) -> Iterator[Check]:
    """All checks, in order; a check that raises is a failed check, and later ones run all the same."""
    checks: list[tuple[str, Callable[[], Check]]] = [
        ("python", check_python),
        ("native", check_native),
        ("threads", check_threads),
        ("memory", check_memory),
        ("open-files", check_open_files),
        ("locked-memory", check_locked_memory),
        ("huge-pages", check_huge_pages),
        ("io-uring", check_uring),
        ("state", check_state),
    ]
    checks += [(f"cpu.{isa}", partial(check_isa, isa)) for isa in _isas()]
    checks += [(f"backend.{name}", partial(check_backend, name)) for name in _other_backends()]
    for name, check in checks:
        yield _answer(name, check)
    if model is not None:
        yield from check_model(model, settings, deep=deep)


def _other_backends() -> list[str]:
    from picaflor.runtime.plan import BACKENDS

    return [name for name in BACKENDS if name != "cpu"]


def check_model(model: str, settings: Settings, *, deep: bool = False) -> Iterator[Check]:
    """The model's files, then its tokenizer, then what a run would be; where there is no directory, that alone."""
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
    if any(any(folder.glob("*.safetensors")) for folder in (path, *split_folders(settings))):
        yield _answer("model.files", partial(check_files, path, settings, found))
    else:
        yield Check("model.files", "fail", f"{path}: no *.safetensors file here", _REMEDIES["directory"])
    yield _answer("model.tokenizer", partial(check_tokenizer, path, found[0] if found else None))
    if not found:
        return
    yield _answer("model.storage", partial(check_storage, path, extra_dirs=split_folders(settings)))
    yield _answer("model.plan", partial(check_plan, path, settings))
    for name in _devices():
        yield _answer(f"model.{name}", partial(check_device, name, path, settings))
    if deep:
        yield _answer("model.weights", partial(check_weights, path, settings))
        yield _answer("model.reads", partial(check_reads, path, settings))


def check_plan(path: Path, settings: Settings) -> Check:
    """Whether the model fits the memory that may be used, and how much of it."""
    plan = _sketch(path, settings)
    try:
        slots = sum(min(plan.ledger.slots[block.layer], block.router.experts) for block in plan.moe)
        limit = plan.ledger.limit
        detail = f"fits {limit}; {slots} of {plan.experts} experts stay in memory"
    finally:
        plan.close()
    return Check("model.plan", "ok", detail)


def check_device(name: str, path: Path, settings: Settings) -> Check:
    """Where the weights would lie with a device: what must be there, how many experts, and what others hold of it."""
    from picaflor.device_memory import DeviceMemory
    from picaflor.runtime.placement import place
    from picaflor.runtime.plan import backend_part, package_of

    module = backend_part(package_of(name), "backend")
    memory = DeviceMemory(*module.device_memory(name))
    others = module.other_devices(name)
    beside = f"; --device shares the layers with {others}" * bool(others)
    plan = _sketch(path, settings)
    try:
        held = sum(plan.ledger.slots.values())
        found = place(memory, plan.device_needs, plan.expert_sizes, in_ram=held, vram=settings.vram)
    finally:
        plan.close()
    if told := memory.others():
        remedy = "end the other program, or say with --vram what to plan for"
        return Check(f"model.{name}", "warn", f"{found}; {told}{beside}", remedy)
    return Check(f"model.{name}", "ok", f"{found}{beside}")


def _devices() -> list[str]:
    from picaflor.runtime.devices import usable_devices

    return usable_devices()


def check_weights(path: Path, settings: Settings) -> Check:
    """Every byte can be read and no scale or weight is NaN or infinite."""
    from picaflor.container.index import Container
    from picaflor.runtime.inspection import inspect_container
    from picaflor.runtime.inspection_deep import read_everything

    progress = Progress()
    with Container.open(path, extra_dirs=split_folders(settings), allow_missing=True) as container:
        found = inspect_container(container, group_size=settings.group_size, strict=settings.strict)
        try:
            findings = read_everything(container, found.index, progress=progress)
        finally:
            progress.clear()
        size = format_bytes(found.tensor_nbytes)
    if findings:
        first = findings[0]
        detail = f"{counted(len(findings), 'tensor')} with bad values, as {first.tensor} in {first.shard}: {first.text}"
        return Check(
            "model.weights", "fail", detail, "fetch these files again; picaflor inspect MODEL --deep lists all"
        )
    return Check("model.weights", "ok", f"{size} read, no bad value")


def check_reads(path: Path, settings: Settings) -> Check:
    """The rate at which missing experts come, as in a run."""
    from picaflor.runtime.trial_reads import measure_reads

    plan = _sketch(path, settings)
    try:
        reads = measure_reads(plan)
    finally:
        plan.close()
    if reads is None:
        return Check("model.reads", "info", "the model has no experts to read")
    return Check("model.reads", "info", _reads_text(reads))


def _reads_text(reads: Reads) -> str:
    """What was measured; what is too little to be a rate, or is not of the drive, is said and not rounded to zero."""
    text = f"experts of {reads.expert_bytes / 1e6:.2f} MB"
    share = reads.storage_share
    if reads.bytes_per_s < LEAST_RATE:
        return f"{text} are too little to tell a rate from"
    text += f" at {reads.bytes_per_s / 1e9:.2f} GB/s"
    if share is None:
        return text
    if share < LEAST_SHARE:
        return f"{text}, from the page cache: the drive's rate was not measured"
    return f"{text}, {share:.0%} of it from storage"


def _sketch(path: Path, settings: Settings) -> Sketch:
    from picaflor.models.config import Notices
    from picaflor.runtime.sketch import sketch

    options = replace(engine_options(settings), backend="cpu")  # plans are for the processor
    return sketch(path, options, Notices(strict=settings.strict))


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
    "locked-memory": "report this line",
    "huge-pages": "report this line",
    "io-uring": "install Picaflor again with a C++20 compiler present",
    "state": "set XDG_STATE_HOME to a folder that can be written",
    "backend": "leave it out with --backend cpu",
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
    (OutOfBudget, "do what the line says; picaflor plan MODEL shows every number"),
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


def check_isa(isa: str) -> Check:
    """The built-in model writes the same greedy tokens with this instruction set as with plain code."""
    tokens, expected = _demo_tokens(isa), _demo_tokens("scalar")
    if tokens != expected:
        return Check(
            f"cpu.{isa}", "fail", f"wrote tokens {list(tokens)}, plain code {list(expected)}", _REMEDIES["cpu"]
        )
    return Check(f"cpu.{isa}", "ok", f"the built-in model writes the same {len(tokens)} tokens as with plain code")


def check_files(path: Path, settings: Settings, found: list[Model]) -> Check:
    """Every tensor that the config asks for is there, in a known format and of the right size.

    Of the weights vectors alone are read: their numbers must be finite.

    A model that would load is put into `found`.
    """
    from picaflor.container.index import Container
    from picaflor.models.config import Notices
    from picaflor.models.loading import open_model
    from picaflor.runtime.checks import check_end_tokens
    from picaflor.runtime.plan import DEFAULT_CONTEXT
    from picaflor.runtime.residents import finite_vectors

    with Container.open(path, extra_dirs=split_folders(settings)) as container:
        notices = Notices(strict=settings.strict)
        for text in container.notes:
            notices.note(text)
        model, index = open_model(
            container, context=settings.ctx or DEFAULT_CONTEXT, group_size=settings.group_size, notices=notices
        )
        check_end_tokens(container, model)
        found.append(model)
        for _ in finite_vectors(container, index):
            pass
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
