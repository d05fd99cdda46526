"""The place where a conversion works: a hidden directory beside the target, which gets its name when all is done.

Knows the file system; must not know models, formats or what is written. A process that is killed at any moment leaves
either no target and a working directory from which the next run with the same state goes on, or the whole target.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from picaflor.container.strict_json import show_path
from picaflor.container.types import Shard
from picaflor.container.writer import sync_directory
from picaflor.errors import UsageError, WriteFailed

try:
    import fcntl
except ImportError:  # a system without flock: two conversions into one directory are then not told apart
    fcntl = None  # type: ignore[assignment]

STATE = "convert-state.json"
LOCK = "convert-lock"
SHARDS = "model-*.safetensors"
SPARE_BYTES = 64 << 20
"""Room that the file system needs besides the tensors: headers, padding, side files."""


class Target:
    """The directory `out` to be. Raises UsageError where it is there already or has to do with a `sources` directory:
    lies in one, or would work in one."""

    def __init__(self, out: Path, sources: Iterable[Path]) -> None:
        self.out = out
        self.work = out.parent / f".{out.name}.partial"
        if out.is_symlink() or (out.exists() and not (out.is_dir() and not any(out.iterdir()))):
            raise UsageError(f"{show_path(out)}: already there; convert never overwrites, give a new directory")
        for source in sources:
            found = source.resolve()
            if found in (out.resolve(), *out.resolve().parents):
                raise UsageError(
                    f"{show_path(out)}: lies inside the source {show_path(source)}; give a directory elsewhere"
                )
            if found in (self.work.resolve(), *self.work.resolve().parents) or self.work.resolve() in found.parents:
                raise UsageError(
                    f"{show_path(out)}: its working directory {show_path(self.work)} would be in the way of the source "
                    f"{show_path(source)}; give another name"
                )

    @property
    def free_bytes(self) -> int:
        """Bytes free where the target goes."""
        return shutil.disk_usage(_existing_parent(self.out)).free

    def needed_bytes(self, nbytes: int) -> int:
        """Bytes of the disk that are still to be taken for `nbytes` of tensors, reserve included."""
        return max(0, nbytes + SPARE_BYTES - self._earlier_bytes())

    def check_room(self, nbytes: int) -> None:
        """Raises WriteFailed, before anything is written, where what is still missing of `nbytes` has no room."""
        needed, earlier, free = self.needed_bytes(nbytes), self._earlier_bytes(), self.free_bytes
        if free < needed:
            there = f", {earlier} there from an earlier run" if earlier else ""
            raise WriteFailed(
                f"{show_path(self.out)}: {needed} bytes needed ({nbytes} of tensors, {SPARE_BYTES} in reserve for "
                f"headers and side files{there}), {free} bytes free on this disk"
            )

    def _earlier_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.work.glob(SHARDS))

    @contextmanager
    def working(self, state: Mapping[str, Any]) -> Iterator[Path]:
        """The working directory, held for this process; shards of an earlier run stay if its `state` was the same.

        When the block ends well, the directory is synced and becomes the target. Raises UsageError where another
        conversion is at work there, WriteFailed.
        """
        with self._locked():
            self._prepare(json.dumps(state, sort_keys=True))
            yield self.work
            try:
                sync_directory(self.work)
                os.rename(self.work, self.out)
                for name in (STATE, LOCK):  # after the name: until then they are what a next run goes on from
                    (self.out / name).unlink()
                sync_directory(self.out.absolute().parent)
            except OSError as error:
                raise WriteFailed(
                    f"{show_path(self.out)}: cannot be named: {error.strerror}; it is in {self.work}"
                ) from error

    def _prepare(self, state: str) -> None:
        """Keep the shards of an earlier run with the same state, remove everything else."""
        try:
            keep = _read(self.work / STATE) == state
            for path in self.work.iterdir():
                if path.name != LOCK and not (keep and (path.match(SHARDS) or path.name == STATE)):
                    path.unlink()
            if not keep:
                (self.work / STATE).write_text(state, encoding="utf-8")
        except OSError as error:
            raise WriteFailed(f"{show_path(self.work)}: cannot be written to: {error.strerror}") from error

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Make the working directory and hold it. Raises UsageError where another process holds it."""
        try:
            self.work.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.work / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise WriteFailed(f"{show_path(self.work)}: cannot be written to: {error.strerror}") from error
        try:
            if fcntl is not None:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise UsageError(
                        f"{show_path(self.work)}: another conversion is at work there; wait, or stop it"
                    ) from None
            yield
        finally:
            os.close(handle)


def source_state(shards: Iterable[Shard]) -> list[list[Any]]:
    """What tells a source's files from others, for the state of a conversion: path, size, time."""
    stats = [(shard.path, shard.path.stat()) for shard in shards]
    return [[str(path.resolve()), stat.st_size, stat.st_mtime_ns] for path, stat in stats]


def processors() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def copy_file(source: Path, work: Path) -> None:
    """Copy a side file, synced. Raises WriteFailed."""
    try:
        shutil.copyfile(source, work / source.name)
        _sync_file(work / source.name)
    except OSError as error:
        raise WriteFailed(f"{show_path(work / source.name)}: cannot be written: {error.strerror}") from error


def write_text(path: Path, text: str) -> None:
    """Write a side file, synced. Raises WriteFailed."""
    try:
        path.write_text(text, encoding="utf-8")
        _sync_file(path)
    except OSError as error:
        raise WriteFailed(f"{show_path(path)}: cannot be written: {error.strerror}") from error


def _sync_file(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def _existing_parent(path: Path) -> Path:
    """The nearest directory above a path that exists."""
    parent = path.absolute().parent
    while not parent.exists():
        parent = parent.parent
    return parent


def _read(path: Path) -> str | None:
    """A small text file, None where there is none that can be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
