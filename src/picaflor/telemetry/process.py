"""What the system says of this process: memory by kind, and bytes that came from storage.

Must not know budgets or models. Linux only; elsewhere every figure is None.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc/self")
_STATUS = {
    "RssAnon": "anonymous_bytes",
    "VmLck": "locked_bytes",
    "RssFile": "mapped_bytes",
    "VmHWM": "peak_resident_bytes",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessFigures:
    """Sizes in bytes, at the time of reading; None where the system does not tell."""

    anonymous_bytes: int | None = None
    locked_bytes: int | None = None
    mapped_bytes: int | None = None
    peak_resident_bytes: int | None = None
    physical_read_bytes: int | None = None


def process_figures(proc: Path = _PROC) -> ProcessFigures:
    """Read `status` and `io` under `proc`; a sandbox that hides one of them leaves its figures None."""
    figures: dict[str, int] = {}
    for line in _lines(proc / "status"):
        key, _, rest = line.partition(":")
        words = rest.split()
        if key in _STATUS and len(words) == 2 and words[1] == "kB":
            figures[_STATUS[key]] = int(words[0]) * 1024
    for line in _lines(proc / "io"):
        key, _, rest = line.partition(":")
        if key == "read_bytes":
            figures["physical_read_bytes"] = int(rest)
    return ProcessFigures(**figures)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii").splitlines()
    except OSError:
        return []
