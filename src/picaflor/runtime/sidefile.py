"""Small text files beside a model's weights: read whole, absent, or refused with the cause.

Must not know what the files mean. Absent is only a name that is not there: a link to nothing is a fault.
"""

from __future__ import annotations

from pathlib import Path

from picaflor.container.plain_file import read_plain
from picaflor.errors import PicaflorError


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
    data = read_plain(path, most_bytes=most_bytes, error=error)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as fault:
        raise error(f"{path}: cannot be read as UTF-8 text: {fault}") from fault
