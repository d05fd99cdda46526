"""JSON that comes from untrusted files, and how such text is shown in one-line messages.

Knows JSON and strings; must not know tensors, shards or configs.
"""

from __future__ import annotations

import json
import reprlib
from pathlib import Path
from typing import Any, NoReturn

from picaflor.errors import BadContainer

_REPR = reprlib.Repr()
_REPR.maxlist = _REPR.maxtuple = 8
_REPR.maxdict = 4
_REPR.maxlevel = 3
_REPR.maxlong = 60
_REPR.maxstring = 80
_REPR.maxother = 80


def show(value: object) -> str:
    """A value of unknown size and content as short printable ASCII without line breaks; strings keep 120 characters."""
    if isinstance(value, str):
        return json.dumps(value if len(value) <= 120 else value[:117] + "...")
    text = repr(value) if isinstance(value, (int, float)) else _REPR.repr(value)
    if len(text) > 60 and isinstance(value, int):
        return f"{text[:20]}... ({len(text)} characters)"
    return text.encode("ascii", "backslashreplace").decode("ascii")


def show_path(path: Path | str) -> str:
    """A path for a message: as it is, but control and undecodable characters escaped."""
    text = str(path)
    return text if text.isprintable() else ascii(text)[1:-1]


class _Duplicate(Exception):
    """A key that stands twice in one object, with both values."""

    def __init__(self, key: str, first: object, second: object) -> None:
        super().__init__(key)
        self.key = key
        self.values = (first, second)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of `pairs`; raises _Duplicate."""
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: dict[str, Any] = {}
        for key, value in pairs:
            if key in seen:
                raise _Duplicate(key, seen[key], value)
            seen[key] = value
    return result


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON value")


def parse_object(data: bytes | str, what: str) -> dict[str, Any]:
    """Parse UTF-8 JSON whose top level is an object with unique keys everywhere.

    `what` names the text in messages ("FILE: header"). Raises BadContainer for anything else: bad UTF-8, bad JSON,
    NaN or Infinity, a key twice in one object, nesting beyond the interpreter's limit, a top level that is no object.
    """
    try:
        text = data.decode("utf-8") if isinstance(data, bytes) else data
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except _Duplicate as found:
        first, second = (show(value) for value in found.values)
        raise BadContainer(
            f"{what}: the name {show(found.key)} stands twice in one object, with {first} and with {second}; "
            "expected each name once"
        ) from None
    except RecursionError:
        raise BadContainer(f"{what}: nested too deeply; expected a few levels") from None
    except UnicodeDecodeError as error:
        raise BadContainer(
            f"{what}: not UTF-8 at byte {error.start} (found 0x{data[error.start]:02x})"
            if isinstance(data, bytes)
            else f"{what}: not UTF-8"
        ) from None
    except ValueError as error:
        reason = str(error).splitlines()[0][:160]
        raise BadContainer(f"{what}: not valid JSON: {reason}") from None
    if not isinstance(value, dict):
        raise BadContainer(f"{what}: expected a JSON object, found {show(value)}")
    return value
