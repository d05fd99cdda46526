"""What an option's words may be: each kind reads text or a TOML value, and says what it accepts.

Must not know any option, or where a value comes from.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from picaflor.sizes import parse_bytes


@dataclass(frozen=True, slots=True)
class Kind:
    """How a value is read: `read` takes text or a TOML value and raises ValueError unless it is what `accepts` says."""

    metavar: str
    accepts: str
    read: Callable[[object], Any]


def size() -> Kind:
    """Bytes, with a unit or without."""

    def read(value: object) -> int:
        if isinstance(value, str):
            value = parse_bytes(value)
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise ValueError
        return value

    return Kind("SIZE", "a size above 0, as 16GiB or 700MiB", read)


def count(low: int, high: int | None = None) -> Kind:
    """A whole number in `low .. high`."""

    def read(value: object) -> int:
        if isinstance(value, str):
            value = int(value, 10) if value.strip().isascii() else None
        if not isinstance(value, int) or isinstance(value, bool) or value < low or (high is not None and value > high):
            raise ValueError
        return value

    return Kind("N", f"a whole number from {low}" + (f" to {high}" if high is not None else ""), read)


def one_of(*numbers: int) -> Kind:
    """One of some whole numbers."""
    accepts = f"one of {', '.join(map(str, numbers))}"
    any_number = count(min(numbers))

    def read(value: object) -> int:
        number: int = any_number.read(value)
        if number not in numbers:
            raise ValueError
        return number

    return Kind("N", accepts, read)


def real(low: float, high: float, *, open_low: bool = False) -> Kind:
    """A finite number in `low .. high`, `low` itself left out where `open_low`."""

    def read(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise ValueError
        number = float(value)
        if not math.isfinite(number) or not low <= number <= high or (open_low and number == low):
            raise ValueError
        return number

    return Kind("X", f"a number {'above' if open_low else 'from'} {low:g} to {high:g}", read)


def choice(*names: str) -> Kind:
    """One of some words."""

    def read(value: object) -> str:
        if value not in names:
            raise ValueError
        return str(value)

    return Kind("|".join(names), "one of " + ", ".join(names), read)


def devices() -> Kind:
    """Devices of one backend by number: `auto`, `all`, or numbers with commas between them, as that text."""

    def read(value: object) -> str:
        if isinstance(value, int) and not isinstance(value, bool):
            value = str(value)
        if not isinstance(value, str):
            raise ValueError
        numbers = [part.strip() for part in value.split(",")]
        if value not in ("auto", "all"):
            if not all(part.isascii() and part.isdigit() and len(part) <= _DIGITS for part in numbers):
                raise ValueError
            if len(set(map(int, numbers))) != len(numbers):
                raise ValueError
        return ",".join(str(int(part)) if part.isdigit() else part for part in numbers)

    return Kind("N[,N]|all", "auto, all, or different numbers from 0 as 0 or 0,1", read)


_DIGITS = 3
_WORDS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def switch() -> Kind:
    """Yes or no."""

    def read(value: object) -> bool:
        if isinstance(value, str):
            value = _WORDS.get(value.lower())
        if not isinstance(value, bool):
            raise ValueError
        return value

    return Kind("", "one of true, false, yes, no, on, off, 1, 0", read)


def texts(metavar: str) -> Kind:
    """One text or several."""

    def read(value: object) -> tuple[str, ...]:
        if isinstance(value, str):
            value = tomllib.loads(f"v = {value}")["v"] if value.startswith("[") else [value]
        if not isinstance(value, list | tuple) or not all(isinstance(text, str) and text for text in value):
            raise ValueError
        return tuple(value)

    return Kind(metavar, 'text that is not empty, or a list of such texts as ["a", "b"]', read)


def text(accepts: str) -> Kind:
    """Any text; `accepts` says what it means."""

    def read(value: object) -> str:
        if not isinstance(value, str) or not value or "\0" in value:
            raise ValueError
        return value

    return Kind("TEXT", accepts, read)


def path() -> Kind:
    """A path, `~` resolved."""

    def read(value: object) -> Path:
        if not isinstance(value, str) or not value or "\0" in value:
            raise ValueError
        return Path(value).expanduser()

    return Kind("PATH", "a path", read)
