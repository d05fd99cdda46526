"""What is checked between a model's headers and its weights: end tokens, options that fit nothing or have no effect.

Knows configs and options; must not know programs, memory or how a line reaches the user.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from picaflor.container.index import Container
from picaflor.container.strict_json import show_path
from picaflor.errors import UsageError, WriteFailed
from picaflor.formats.int4_grouped import NAME as GROUPED
from picaflor.models.base import Model
from picaflor.models.config import Notices
from picaflor.models.loading import ModelIndex
from picaflor.runtime.tokenizer import eos_ids
from picaflor.sizes import format_bytes
from picaflor.store.routes import check_target

if TYPE_CHECKING:
    from picaflor.runtime.plan import EngineOptions

LATENT = "latent"
GENERATION = "generation_config.json"
MODEL_SUFFIXES = (".safetensors", ".json", ".jinja")


def check_end_tokens(container: Container, model: Model) -> None:
    """Raises UnsupportedConfig for an `eos_token_id` that is no token of the model, BadContainer for a broken file."""
    eos_ids(container.config(), container.side_json(GENERATION), vocabulary=model.vocabulary)


def check_latents(options: EngineOptions, model: Model) -> None:
    """Raises UsageError for an eps of latents where the model has none."""
    if options.latent_norm_eps is not None and not any(plane.name == LATENT for plane in model.planes()):
        raise UsageError(f"--latent-norm-eps: {model.family} has no latents; leave it out")


def check_files(path: Path, options: EngineOptions) -> None:
    """The files that a run of the model in folder `path` writes, before anything is opened. Raises WriteFailed."""
    folders = (path, *options.split, *options.mirrors)
    if options.record_routes is not None:
        _check_routes_file(options.record_routes, folders)
    if options.usage is not None and not options.usage.absolute().parent.is_dir():
        raise WriteFailed(f"{show_path(options.usage)}: no usage can be kept there: its directory does not exist")
    if _same(options.usage, options.record_routes):
        raise UsageError(f"{show_path(str(options.usage))}: given for --usage and --record-routes: give two files")


def _same(one: Path | None, other: Path | None) -> bool:
    return one is not None and other is not None and one.resolve() == other.resolve()


def _check_routes_file(path: Path, folders: Sequence[Path]) -> None:
    if path.is_dir():
        raise WriteFailed(f"{show_path(path)}: routes cannot be written there: it is a directory")
    if not path.absolute().parent.is_dir():
        raise WriteFailed(f"{show_path(path)}: routes cannot be written there: its directory does not exist")
    where = path.resolve()
    if where.suffix in MODEL_SUFFIXES and where.parent in [folder.resolve() for folder in folders]:
        raise WriteFailed(
            f"{show_path(path)}: routes cannot be written there: the model has its own files there, named so"
        )
    check_target(path)


def tell_idle(asked: EngineOptions, used: EngineOptions, index: ModelIndex, notices: Notices) -> None:
    """One line for each option that was given and does nothing in this run; `used` has the tuned ones as well."""
    ring = used.read_engine == "io_uring"
    if asked.vram_bytes is not None and _is_the_cpu(used.backend):
        notices.tell(
            f"--vram {format_bytes(asked.vram_bytes)} has no effect: the CPU computes, in memory that --ram bounds"
        )
    if asked.device != "auto" and used.backend == "auto" and _is_the_cpu(used.backend):
        notices.tell(f"--device {asked.device} has no effect: the CPU computes; --backend chooses a GPU")
    if asked.queue_depth is not None and not ring:
        notices.tell(
            f"--queue-depth {asked.queue_depth} has no effect: threads read, as many as --read-threads says; "
            "--read-engine io_uring has a queue"
        )
    if asked.read_threads is not None and ring:
        notices.tell(f"--read-threads {asked.read_threads} has no effect: io_uring reads, --queue-depth at once")
    tell_group_size(asked.group_size, index, notices)


def tell_settled(asked: EngineOptions, notices: Notices) -> None:
    """One line for what was asked for and does nothing where every expert stays in memory."""
    given = {f"--policy {asked.policy}": asked.policy != "auto", "--prefetch on": asked.prefetch == "on"}
    if unused := [flag for flag, is_given in given.items() if is_given]:
        notices.tell(
            f"every expert stays in memory once it was read, without effect: {', '.join(unused)}; "
            "--expert-slots or --ram leave fewer there"
        )


def tell_group_size(asked: int | None, index: ModelIndex, notices: Notices, *, flag: str = "--group-size") -> None:
    """One line for a group size that was given and that no tensor has a use for."""
    if asked is not None and not _grouped(index):
        notices.tell(f"{flag} {asked} has no effect: no tensor is {GROUPED}")


def tell_cut(container: Container, notices: Notices) -> None:
    """One line for files that end before the bytes that their headers declare."""
    cut = [(shard.path, shard.path.stat().st_size, shard.nbytes) for shard in container.shards]
    cut = [(path, found, nbytes) for path, found, nbytes in cut if found < nbytes]
    if cut:
        path, found, nbytes = cut[0]
        more = f", and {len(cut) - 1} more such files" if len(cut) > 1 else ""
        notices.tell(
            f"{show_path(path)}: {found} bytes are here, its header declares {nbytes}{more}: the plan is for whole "
            "files, and the disk was not measured"
        )


def _is_the_cpu(backend: str) -> bool:
    """Whether it is certain; `auto` is anything else only where there is a driver, and is told then."""
    from picaflor.runtime.devices import DEVICE_FILES

    return backend == "cpu" or (backend == "auto" and not any(path.exists() for path in DEVICE_FILES.values()))


def _grouped(index: ModelIndex) -> bool:
    experts = (matrix for layer in index.experts.values() for expert in layer for matrix in expert.matrices)
    return any(matrix.format == GROUPED for matrices in (index.matrices.values(), experts) for matrix in matrices)
