"""Byte counts in words: "16GiB" to a number and back.

Knows units only; nothing of memory, budgets or options.
"""

from __future__ import annotations

import re
from fractions import Fraction

from picaflor.errors import UsageError

_UNITS = {
    "": 1,
    "b": 1,
    **{f"{letter}{tail}": 1024**power for power, letter in enumerate("kmgt", start=1) for tail in ("", "ib")},
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", start=1)},
}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)")
_LIMIT = 2**63
_LETTERS = "KMGTPE"


def parse_bytes(text: str) -> int:
    """Bytes named by `text`: "700MiB", "1.5 GB", "16G" (binary, as GiB) or plain "4096".

    KiB MiB GiB TiB and the bare letters K M G T count in 1024, KB MB GB TB in 1000; case does not matter. A fraction
    of a byte is dropped. Raises UsageError for anything else, also for 2^63 and more.
    """
    match = _SIZE.fullmatch(text.strip())
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise UsageError(f"{text!r} is not a size; give a number with KiB, MiB, GiB, TiB, KB, MB, GB or TB, as 16GiB")
    size = int(Fraction(match[1]) * unit)
    if size >= _LIMIT:
        raise UsageError(f"{text!r} is too large a size; the limit is 8 EiB")
    return size


def format_bytes(size: int) -> str:
    """`size` in bytes with three digits or more and a binary unit: "700 MiB", "1.85 GiB", "12 B"."""
    if size < 1024:
        return f"{size} B"
    value, power = size / 1024, 0
    while value >= 1023.5 and power < len(_LETTERS) - 1:
        value, power = value / 1024, power + 1
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    text = f"{value:.{digits}f}"
    return f"{text.rstrip('0').rstrip('.') if digits else text} {_LETTERS[power]}iB"


def format_rate(per_second: float) -> str:
    """A rate with three digits, or with all before the point: "0.0123", "24.1", "1940"."""
    return f"{per_second:.3g}" if per_second < 999.5 else f"{per_second:.0f}"
