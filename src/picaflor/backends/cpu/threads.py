"""How many threads this process may use: CPU affinity and the quotas of its control groups.

Knows the operating system; must not know pools or kernels.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Grant:
    """Threads that this process may use, at least 1, and who says so.

    `affinity`: processors of its mask; `quotas`: (processors, file) of each control group that sets a limit.
    """

    count: int
    affinity: int
    quotas: tuple[tuple[float, str], ...]

    def __str__(self) -> str:
        mask = f"affinity allows {self.affinity} processor{'s' * (self.affinity != 1)}"
        if not self.quotas:
            return f"{mask}, no quota is set"
        cpus, file = min(self.quotas)
        return f"{mask}, {file} grants {cpus:g}"


def grant(*, root: Path = Path("/"), cpus: int | None = None) -> Grant:
    """What the affinity mask and the control groups' quotas leave.

    `cpus`: the CPUs of the affinity mask (asked from the system if None). `root`: where /proc and /sys lie. A quota
    of 1.5 CPUs gives 1: a thread that is put to sleep holds up all others at the next barrier.
    """
    allowed = _affinity() if cpus is None else cpus
    quotas = tuple(_quotas(root))
    return Grant(max(1, min([allowed, *(int(quota) for quota, _ in quotas)])), allowed, quotas)


def default_threads(*, root: Path = Path("/"), cpus: int | None = None) -> int:
    """Threads to use where the user named no number: at least 1."""
    return grant(root=root, cpus=cpus).count


def _affinity() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _quotas(root: Path) -> Iterator[tuple[float, str]]:
    """(CPUs granted, file) of each control group that holds this process and sets a limit, version 1 and 2."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        base = root / "sys/fs/cgroup"
        if number == "0" and controllers == "":
            unified = base / "unified"
            yield from _each_level(unified if unified.is_dir() else base, path, "cpu.max", _quota_v2)
        elif "cpu" in controllers.split(","):
            for folder in dict.fromkeys((base / "cpu", base / controllers)):
                yield from _each_level(folder, path, "cpu.cfs_quota_us", _quota_v1)


def _each_level(base: Path, path: str, file: str, read: Callable[[Path], float | None]) -> Iterator[tuple[float, str]]:
    """The limit of the group and of all above it; inside a container its own group is often mounted as the root."""
    folder = base / path.strip("/")
    while True:
        quota = read(folder)
        if quota is not None:
            yield quota, str(folder / file)
        if folder == base or base not in folder.parents:
            return
        folder = folder.parent


def _quota_v2(folder: Path) -> float | None:
    words = _text(folder / "cpu.max").split()
    if len(words) != 2 or words[0] == "max":
        return None
    return _ratio(words[0], words[1])


def _quota_v1(folder: Path) -> float | None:
    return _ratio(_text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us"))


def _ratio(quota: str, period: str) -> float | None:
    try:
        micros, per = int(quota), int(period)
    except ValueError:
        return None
    return micros / per if micros > 0 and per > 0 else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
