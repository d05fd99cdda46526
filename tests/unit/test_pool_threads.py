"""How many threads are used by default: affinity and the quotas of control groups, version 1 and 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from picaflor.backends.cpu.threads import default_threads, grant


def _files(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


V2 = "0::/pod/app\n"
V1 = "5:memory:/a\n4:cpu,cpuacct:/pod\n1:name=systemd:/\n"


@pytest.mark.parametrize(
    ("files", "cpus", "wanted"),
    [
        ({}, 6, 6),
        ({"proc/self/cgroup": V2, "sys/fs/cgroup/pod/app/cpu.max": "max 100000\n"}, 6, 6),
        ({"proc/self/cgroup": V2, "sys/fs/cgroup/pod/app/cpu.max": "300000 100000\n"}, 6, 3),
        ({"proc/self/cgroup": V2, "sys/fs/cgroup/pod/app/cpu.max": "150000 100000\n"}, 6, 1),
        ({"proc/self/cgroup": V2, "sys/fs/cgroup/pod/app/cpu.max": "50000 100000\n"}, 6, 1),
        # the group above counts too, and the mounted root where the own group is hidden
        (
            {"proc/self/cgroup": V2, "sys/fs/cgroup/pod/app/cpu.max": "max 100000", "sys/fs/cgroup/pod/cpu.max": "2 1"},
            6,
            2,
        ),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "400000 100000\n"}, 6, 4),
        ({"proc/self/cgroup": V2, "sys/fs/cgroup/cpu.max": "400000 100000\n"}, 6, 4),
        ({"proc/self/cgroup": V2, "sys/fs/cgroup/pod/app/cpu.max": "400000 100000\n"}, 2, 2),
        (
            {
                "proc/self/cgroup": V1,
                "sys/fs/cgroup/cpu,cpuacct/pod/cpu.cfs_quota_us": "250000\n",
                "sys/fs/cgroup/cpu,cpuacct/pod/cpu.cfs_period_us": "100000\n",
            },
            8,
            2,
        ),
        (
            {
                "proc/self/cgroup": V1,
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            8,
            8,
        ),
        ({"proc/self/cgroup": V2, "sys/fs/cgroup/pod/app/cpu.max": "nonsense\n"}, 5, 5),
    ],
)
def test_the_smallest_limit_wins(tmp_path: Path, files: dict[str, str], cpus: int, wanted: int) -> None:
    assert default_threads(root=_files(tmp_path, files), cpus=cpus) == wanted


def test_the_grant_says_who_set_it(tmp_path: Path) -> None:
    assert str(grant(root=tmp_path, cpus=6)) == "affinity allows 6 processors, no quota is set"
    files = {
        "proc/self/cgroup": V2,
        "sys/fs/cgroup/pod/app/cpu.max": "350000 100000\n",
        "sys/fs/cgroup/pod/cpu.max": "400000 100000\n",
    }
    found = grant(root=_files(tmp_path, files), cpus=6)
    assert (found.count, found.affinity, len(found.quotas)) == (3, 6, 2)
    assert str(found).endswith("/sys/fs/cgroup/pod/app/cpu.max grants 3.5")
    assert grant(root=tmp_path, cpus=1).count == 1


def test_a_hybrid_system_has_its_version_2_groups_apart(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "1:cpu:/\n0::/app\n", "sys/fs/cgroup/unified/app/cpu.max": "200000 100000\n"}
    assert default_threads(root=_files(tmp_path, files), cpus=8) == 2


def test_this_machine_gives_at_least_one_thread() -> None:
    assert default_threads() >= 1
