"""Small text files beside a model's weights: read whole, absent, or refused with the cause.

Must not know what the files mean. Absent is only a name that is not there: a link to nothing is a fault.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from picaflor.errors import PicaflorError

_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def is_absent(path: Path, error: type[PicaflorError]) -> bool:
    """Whether nothing has this name. Raises `error` where that cannot be known."""
    try:
        path.lstat()
    except FileNotFoundError:
        return True
    except OSError as fault:
        raise error(f"{path}: cannot be read: {fault.strerror}") from fault
    return False


def read_text(path: Path, *, most_bytes: int, error: type[PicaflorError]) -> str | None:
    """The UTF-8 text of a regular file of at most `most_bytes`, None where it is absent. Raises `error`."""
    if is_absent(path, error):
        return None
    try:
        # A pipe that nobody writes to must not block: the kind is looked at on the open file, before any read.
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except FileNotFoundError as fault:
        raise error(f"{path}: is a link to {_target(path)}, which does not exist") from fault
    except OSError as fault:
        raise error(f"{path}: cannot be read: {fault.strerror}") from fault
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            kind = next((words for test, words in _KINDS if test(status.st_mode)), "no file")
            raise error(f"{path}: is {kind}; a regular file was expected")
        if status.st_size > most_bytes:
            raise error(f"{path}: {status.st_size} bytes; at most {most_bytes} are read")
        with os.fdopen(handle, "rb", closefd=False) as file:
            data = file.read(most_bytes + 1)
    except OSError as fault:
        raise error(f"{path}: cannot be read: {fault.strerror}") from fault
    finally:
        os.close(handle)
    if len(data) > most_bytes:
        raise error(f"{path}: more than {most_bytes} bytes; at most {most_bytes} are read")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as fault:
        raise error(f"{path}: cannot be read as UTF-8 text: {fault}") from fault


def _target(path: Path) -> str:
    try:
        return str(path.readlink())
    except OSError:
        return "a file"
