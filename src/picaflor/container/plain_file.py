"""Opening and reading files that a user names: regular files only, and never more bytes than the caller allows.

Must not know what the files mean. Devices, pipes, sockets and folders are refused by name before a byte is read.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from picaflor.container.strict_json import show_path
from picaflor.errors import PicaflorError

_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)
# A pipe that nobody writes to must not block: the kind is looked at on the open file, before any read.
OPEN_FLAGS = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)

PIECE_BYTES = 1 << 20


def kind_fault(mode: int) -> str:
    """What a file is where it is no regular one, else nothing. `mode`: `st_mode`."""
    if stat.S_ISREG(mode):
        return ""
    kind = next((words for test, words in _KINDS if test(mode)), "no file")
    return f"is {kind}; a regular file was expected"


@contextmanager
def open_plain(path: Path, *, most_bytes: int | None, error: type[PicaflorError], what: str = "") -> Iterator[BinaryIO]:
    """A regular file of at most `most_bytes` (None: of any size), opened to be read. Raises `error`.

    `what` goes before the path in messages, as `--option `.
    """
    where = f"{what}{show_path(path)}"
    try:
        handle = os.open(path, os.O_RDONLY | OPEN_FLAGS)
    except OSError as fault:
        raise error(f"{where}: {_open_fault(path, fault)}") from fault
    try:
        status = os.fstat(handle)
        if fault_text := kind_fault(status.st_mode):
            raise error(f"{where}: {fault_text}")
        if most_bytes is not None and status.st_size > most_bytes:
            raise error(f"{where}: {status.st_size} bytes; at most {most_bytes} are read")
        with os.fdopen(handle, "rb", closefd=False) as file:
            yield file
    except OSError as fault:
        raise error(f"{where}: cannot be read: {fault.strerror}") from fault
    finally:
        os.close(handle)


def read_plain(path: Path, *, most_bytes: int, error: type[PicaflorError], what: str = "") -> bytes:
    """All of a regular file of at most `most_bytes`. Raises `error`."""
    with open_plain(path, most_bytes=most_bytes, error=error, what=what) as file:
        pieces, left = [], most_bytes + 1
        while piece := file.read(min(left, PIECE_BYTES)):  # asking for all at once would set that much aside
            pieces.append(piece)
            left -= len(piece)
    data = b"".join(pieces)
    if len(data) > most_bytes:
        raise error(f"{what}{show_path(path)}: more than {most_bytes} bytes; at most {most_bytes} are read")
    return data


def _open_fault(path: Path, fault: OSError) -> str:
    if isinstance(fault, FileNotFoundError) and path.is_symlink():
        return f"is a link to {show_path(path.readlink())}, which does not exist"
    try:
        text = kind_fault(path.stat().st_mode)  # a socket or a folder may refuse to be opened
    except OSError:
        text = ""
    return text or f"cannot be read: {fault.strerror}"
