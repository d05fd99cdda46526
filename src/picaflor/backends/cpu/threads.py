"""How many threads this process may use: CPU affinity and the quotas of its control groups.

Knows the operating system; must not know pools or kernels.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path


def default_threads(*, root: Path = Path("/"), cpus: int | None = None) -> int:
    """Threads to use where the user named no number: at least 1.

    `cpus`: the CPUs of the affinity mask (asked from the system if None). `root`: where /proc and /sys lie. A quota
    of 1.5 CPUs gives 1: a thread that is put to sleep holds up all others at the next barrier.
    """
    allowed = _affinity() if cpus is None else cpus
    quotas = [int(quota) for quota in _quotas(root)]
    return max(1, min([allowed, *quotas]))


def _affinity() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _quotas(root: Path) -> Iterator[float]:
    """CPUs granted by each control group that holds this process and sets a limit, version 1 and 2."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        base = root / "sys/fs/cgroup"
        if number == "0" and controllers == "":
            yield from _each_level(base, path, _quota_v2)
        elif "cpu" in controllers.split(","):
            for folder in (base / "cpu", base / controllers):
                yield from _each_level(folder, path, _quota_v1)


def _each_level(base: Path, path: str, read: Callable[[Path], float | None]) -> Iterator[float]:
    """The limit of the group and of all above it; inside a container its own group is often mounted as the root."""
    folder = base / path.strip("/")
    while True:
        quota = read(folder)
        if quota is not None:
            yield quota
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
