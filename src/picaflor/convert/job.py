"""What conversion and relayout share: options, the opened source, the state to go on from, and what both report.

Knows models and containers; must not know policies, encoders or the order of tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from picaflor.container.index import Container
from picaflor.container.writer import DEFAULT_SHARD_BYTES
from picaflor.convert.target import source_state
from picaflor.models.base import Model
from picaflor.models.config import Notices
from picaflor.models.loading import ModelIndex, open_model
from picaflor.runtime.checks import tell_group_size

_STATE_VERSION = 2

Progress = Callable[[str, int, int], None]
"""Called with a stage, the bytes done and the bytes in all."""


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """How the source is read and how the target is cut.

    `split`: more directories that hold shards of the source. `source_group_size`: for a source of int4-grouped tensors
    that does not state it. `threads` read and encode, by default one per processor; the bytes are the same for any.
    """

    split: tuple[Path, ...] = ()
    shard_bytes: int = DEFAULT_SHARD_BYTES
    source_group_size: int | None = None
    strict: bool = False
    threads: int | None = None


@dataclass(frozen=True, kw_only=True)
class JobReport:
    """What was planned or written. `needed_bytes`: of the disk, reserve included, what is there already left out."""

    source: Path
    out: Path
    family: str
    nbytes: int
    needed_bytes: int
    free_bytes: int
    written: bool
    warnings: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Whether there is, or was, room for it."""
        return self.written or self.free_bytes >= self.needed_bytes

    def record(self) -> dict[str, Any]:
        """As JSON data."""
        names = ("family", "needed_bytes", "free_bytes", "written")
        return {
            "source": str(self.source),
            "out": str(self.out),
            "bytes": self.nbytes,
            **{name: getattr(self, name) for name in names},
            "warnings": list(self.warnings),
        }


@dataclass(frozen=True)
class Opened:
    """A source whose headers were read and checked. `notices` collects what is worth a line."""

    container: Container
    model: Model
    index: ModelIndex
    notices: Notices


@contextmanager
def opened(source: Path, options: JobOptions, warn: Callable[[str], None]) -> Iterator[Opened]:
    """Open the source. Raises BadContainer and its like, UnsupportedConfig."""
    with Container.open(source, extra_dirs=options.split) as container:
        notices = Notices(strict=options.strict, warn=warn)
        model, index = open_model(container, group_size=options.source_group_size, notices=notices)
        tell_group_size(options.source_group_size, index, notices, flag="--source-group-size")
        yield Opened(container, model, index, notices)


def resume_state(kind: str, container: Container, options: JobOptions, **more: Any) -> dict[str, Any]:
    """What must be equal for a later run to go on: the source's files and all that shapes the result."""
    return {
        "version": _STATE_VERSION,
        "kind": kind,
        "source": source_state(container.shards),
        "shard_bytes": options.shard_bytes,
        "source_group_size": options.source_group_size,
        **more,
    }


def staged(progress: Progress | None, stage: str) -> Callable[[int, int], None] | None:
    """A progress callback of one stage, for what knows none."""
    return None if progress is None else lambda done, total: progress(stage, done, total)
