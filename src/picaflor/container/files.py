"""Shard files held open in a bounded set, and positional reads from them.

Knows paths, sizes and system calls; must not know tensors. A file that changed or shrank since it was first opened is
an error, never short data.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from picaflor.container.strict_json import show_path
from picaflor.errors import BadContainer, ReadFailed

CHUNK_BYTES = 1 << 30
_SPARE_HANDLES = 64


@dataclass(frozen=True, slots=True)
class FileStamp:
    """What identifies a file's content between two opens: device, inode, bytes, modification time in ns."""

    device: int
    inode: int
    nbytes: int
    modified_ns: int


def handle_limit(wanted: int) -> int:
    """How many files may be held open, after raising the soft limit of open files as far as `wanted` needs it.

    Half of the limit, less 64, is left for duplicates of these handles and everything else in the process; at least 1,
    at most `wanted`.
    """
    try:
        import resource
    except ImportError:
        return min(wanted, 400)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    need = 2 * wanted + _SPARE_HANDLES
    if soft < need:
        target = need if hard == resource.RLIM_INFINITY else min(need, hard)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
            soft = target
        except (ValueError, OSError):
            pass  # the old limit stays, and the set of handles is smaller
    return max(1, min(wanted, (soft - _SPARE_HANDLES) // 2))


def open_regular(path: Path) -> tuple[int, FileStamp]:
    """Open a regular file for reading; symbolic links are followed.

    Raises BadContainer for a dangling link, a directory, a device or a pipe; OSError of `os.open` otherwise.
    """
    try:
        found = os.stat(path)
    except FileNotFoundError:
        if path.is_symlink():
            raise BadContainer(
                f"{show_path(path)}: dangling link: its target {show_path(os.readlink(path))} does not exist"
            ) from None
        raise BadContainer(f"{show_path(path)}: no such file") from None
    if not stat.S_ISREG(found.st_mode):
        kind = "a directory" if stat.S_ISDIR(found.st_mode) else "a device or pipe"
        raise BadContainer(f"{show_path(path)}: expected a regular file, found {kind}")
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0))
    found = os.fstat(handle)
    return handle, FileStamp(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


def read_exactly(handle: int, view: memoryview, offset: int, path: Path, opened_bytes: int) -> None:
    """Fill `view` from `offset` of an open file, in chunks of at most 1 GiB; an interrupted call goes on.

    Raises ReadFailed naming the file, the offset, what was expected and what came.
    """
    wanted = len(view)
    done = 0
    while done < wanted:
        part = view[done : done + CHUNK_BYTES]
        try:
            count = os.preadv(handle, [part], offset + done)
        except InterruptedError:
            continue
        except OSError as error:
            raise ReadFailed(
                f"{show_path(path)}: reading {wanted} bytes at offset {offset} failed after {done}: {error.strerror}"
            ) from error
        if count == 0:
            now = os.fstat(handle).st_size
            reason = (
                f"the file shrank while it was open, from {opened_bytes} to {now} bytes"
                if now < opened_bytes
                else f"the file has {now} bytes"
            )
            raise ReadFailed(f"{show_path(path)}: expected {wanted} bytes at offset {offset}, found {done}: {reason}")
        done += count


class FileSet:
    """Read access to a fixed list of files with at most `limit` of them open; safe for several threads.

    The least recently used idle file is closed when another is needed. A file that is opened again must be the same
    file with the same size and time.
    """

    def __init__(self, paths: list[Path], *, limit: int | None = None) -> None:
        self._paths = paths
        self._limit = handle_limit(len(paths)) if limit is None else max(1, limit)
        self._open: OrderedDict[int, int] = OrderedDict()
        self._users: dict[int, int] = {}
        self._stamps: dict[int, FileStamp] = {}
        self._free = threading.Condition()
        self._closed = False

    @property
    def open_count(self) -> int:
        """Files that are open now."""
        return len(self._open)

    def stamp(self, index: int) -> FileStamp:
        """Identity and size of a file as it was first opened (it is opened if need be)."""
        with self.handle(index):
            return self._stamps[index]

    @contextmanager
    def handle(self, index: int) -> Iterator[int]:
        """The file's descriptor, kept open while the context lasts."""
        with self._free:
            handle = self._acquire(index)
            self._users[index] = self._users.get(index, 0) + 1
        try:
            yield handle
        finally:
            with self._free:
                self._users[index] -= 1
                if self._closed and self._users[index] == 0 and index in self._open:
                    os.close(self._open.pop(index))
                self._free.notify()

    def read(self, index: int, offset: int, view: memoryview) -> None:
        """Fill a writable byte view from `offset`. Raises ReadFailed."""
        with self.handle(index) as handle:
            read_exactly(handle, view, offset, self._paths[index], self._stamps[index].nbytes)

    def close(self) -> None:
        """Close every idle file now and every file in use when its user is done."""
        with self._free:
            self._closed = True
            for index in [i for i in self._open if not self._users.get(i)]:
                os.close(self._open.pop(index))
            self._free.notify_all()

    def _acquire(self, index: int) -> int:
        """The descriptor of a file, opened if need be; the lock is held."""
        while True:
            if self._closed:
                raise ReadFailed(f"{show_path(self._paths[index])}: the container was closed")
            if index in self._open:
                self._open.move_to_end(index)
                return self._open[index]
            if len(self._open) < self._limit or self._close_idle():
                break
            self._free.wait()
        handle, found = self._reopen(index)
        first = self._stamps.setdefault(index, found)
        if first != found:
            os.close(handle)
            raise ReadFailed(
                f"{show_path(self._paths[index])}: the file changed since it was opened: expected {first.nbytes} bytes "
                f"of the same file, found {found.nbytes} bytes"
            )
        self._open[index] = handle
        return handle

    def _close_idle(self) -> bool:
        """Close the least recently used file that nobody reads; False if there is none."""
        for index, handle in self._open.items():
            if not self._users.get(index):
                os.close(handle)
                del self._open[index]
                return True
        return False

    def _reopen(self, index: int) -> tuple[int, FileStamp]:
        """Open a file; when the system has no descriptor left, idle files are closed first."""
        path = self._paths[index]
        while True:
            try:
                return open_regular(path)
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    if self._close_idle():
                        self._limit = max(1, len(self._open) + 1)
                        continue
                    raise ReadFailed(
                        f"{show_path(path)}: too many open files, and none of ours is idle; raise the limit "
                        "(ulimit -n) or stop other programs"
                    ) from error
                raise ReadFailed(f"{show_path(path)}: cannot be opened: {error.strerror}") from error
