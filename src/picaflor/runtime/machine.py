"""What was measured on this machine, kept between runs: rates for `plan`, tuned options for `run`.

Knows files of state and fingerprints; must not measure. A file that cannot be read counts as empty and one that cannot
be written is a warning: neither ever stops a run. A file that the user named is an error, and is not written over.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import platform
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from picaflor import __version__
from picaflor.container.plain_file import read_plain
from picaflor.container.strict_json import show_path
from picaflor.errors import BadStateFile, WriteFailed
from picaflor.models.base import Model
from picaflor.models.loading import ModelIndex

VERSION = 1
MOST_BYTES = 4 << 20
LEFT_OVER_S = 3600.0
"""Writing takes no second: what is as old as this belongs to nobody."""
_PROC = Path("/proc")


def record_head(kind: str, *, version: int = 1, note: str = "") -> dict[str, Any]:
    """How every record of a measurement begins: what it is, of which version of this program, on what."""
    return {
        "kind": kind,
        "version": version,
        "picaflor": __version__,
        "note": note,
        "machine": {"system": platform.system(), "arch": platform.machine(), "python": platform.python_version()},
    }


def fingerprint(value: object) -> str:
    """20 hexadecimal digits that stand for JSON data."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:20]


def machine_fingerprint(*, proc: Path = _PROC) -> str:
    """Stands for the processor's name, the number of processors and the memory: what rates depend on."""
    name = next(
        (line.partition(":")[2].strip() for line in _lines(proc / "cpuinfo") if line.startswith("model name")), ""
    )
    total = next((line.split()[1] for line in _lines(proc / "meminfo") if line.startswith("MemTotal:")), "")
    return fingerprint([platform.machine(), name or platform.processor(), os.cpu_count(), total])


def model_fingerprint(model: Model, index: ModelIndex) -> str:
    """Stands for a model's sizes and formats: what its speed depends on."""
    matrices = [[m.name, m.format, m.rows, m.cols, m.group_size] for m in index.matrices.values()]
    experts = [
        [layer, len(found), sorted({(m.format, m.rows, m.cols) for expert in found for m in expert.matrices})]
        for layer, found in index.experts.items()
    ]
    return fingerprint([model.family, len(model.layers), matrices, experts])


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


class StateFile:
    """A small JSON file of entries by name; `path` None: nothing is known and nothing is kept.

    `named`: the user named the file; one that is of no use is BadStateFile then, in `read` as in `put`.
    """

    def __init__(self, path: Path | None, *, warn: Callable[[str], None], named: bool = False) -> None:
        self._path = path
        self._named = named
        self._warn = warn

    def read(self) -> dict[str, Any]:
        """All entries; none where the file is missing, of another version or not readable."""
        if self._path is None:
            return {}
        try:
            return _entries(self._path)
        except BadStateFile as error:
            if self._named:
                raise
            self._warn(f"{error}; it is ignored")
            return {}

    def get(self, name: str) -> Mapping[str, Any] | None:
        """One entry."""
        found = self.read().get(name)
        return found if isinstance(found, dict) else None

    def put(self, name: str, entry: Mapping[str, Any]) -> bool:
        """Keep one entry; the file is replaced as a whole. False and a warning where that fails."""
        if self._path is None:
            return False
        entries = {**self.read(), name: dict(entry)}
        try:
            write_json(self._path, {"version": VERSION, "entries": entries})
        except WriteFailed as error:
            self._warn(str(error))
            return False
        return True


def _entries(path: Path) -> dict[str, Any]:
    """None where nothing has that name. Raises BadStateFile for what is no file of state."""
    if not os.path.lexists(path):
        return {}
    data = read_plain(path, most_bytes=MOST_BYTES, error=BadStateFile)
    try:
        value = json.loads(data) if data else {"version": VERSION, "entries": {}}
    except (ValueError, RecursionError) as error:
        raise BadStateFile(f"{show_path(path)}: no state file of version {VERSION}: {error}") from None
    entries = value.get("entries") if isinstance(value, dict) and value.get("version") == VERSION else None
    if not isinstance(entries, dict):
        raise BadStateFile(f"{show_path(path)}: no state file of version {VERSION}")
    return entries


def write_json(path: Path, value: object) -> None:
    """Write a file so that it is there in full or not at all. Raises WriteFailed."""
    write_text(path, json.dumps(value, indent=1) + "\n")


def _remove_left_over(path: Path) -> None:
    """What a process that was killed while it wrote this file has left; others may be writing it now."""
    for partial in path.parent.glob(f".{glob.escape(path.name)}.*.partial"):
        with contextlib.suppress(OSError):
            if time.time() - partial.stat().st_mtime > LEFT_OVER_S:
                partial.unlink()


def write_text(path: Path, text: str) -> None:
    """Write a file so that it is there in full or not at all. Raises WriteFailed."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
        _remove_left_over(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise WriteFailed(f"{show_path(path)}: cannot be written: {error.strerror}") from error
