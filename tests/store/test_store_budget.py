"""The memory ledger: sources from fake /proc and cgroup trees, slots from a budget, refusals with their numbers."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from picaflor.errors import OutOfBudget
from picaflor.store.arena import arena_bytes
from picaflor.store.budget import (
    HOST_SHARE,
    Item,
    Ledger,
    Source,
    fit,
    memory_sources,
    process_memory,
    tightest,
)

MIB = 1 << 20
GIB = 1 << 30
HELD = 50 * MIB


def tree(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def sources(folder: Path, ram: int | None = None) -> dict[str, Source]:
    found = memory_sources(ram, held=HELD, proc=folder / "proc", cgroup_mount=folder / "cg")
    assert [source.name for source in found] == ["--ram", "host", "cgroup", "ulimit"]
    return {source.name: source for source in found}


def share(nbytes: int) -> int:
    return int(nbytes * HOST_SHARE) + HELD


MEMINFO = (
    "MemTotal:       16777216 kB\nMemFree:          100 kB\nMemAvailable:    8388608 kB\nHugePages_Total:       0\n"
)


def test_host_and_ram(tmp_path: Path) -> None:
    tree(tmp_path, {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/\n", "cg/cgroup.controllers": "memory"})
    found = sources(tmp_path, ram=3 * GIB)
    assert found["--ram"] == Source("--ram", 3 * GIB, "given")
    assert found["host"].nbytes == share(8 * GIB)
    assert "88% of 8 GiB available" in str(found["host"])
    assert (found["cgroup"].nbytes, found["cgroup"].unknown) == (None, False)
    assert str(found["cgroup"]) == "cgroup no limit (no memory limit is set)"
    assert tightest(list(found.values())).name == "--ram"
    assert tightest(list(sources(tmp_path).values())).name == "host"
    assert tightest(list(sources(tmp_path, ram=100 * GIB).values())).name == "host"


def test_unknown_is_not_zero_and_not_unlimited(tmp_path: Path) -> None:
    found = sources(tmp_path)
    for name in ("host", "cgroup", "ulimit"):
        assert (found[name].nbytes, found[name].unknown) == (None, True)
        assert str(found[name]).startswith(f"{name} unknown (")
    with pytest.raises(
        OutOfBudget,
        match=r"nothing says how much memory may be used: --ram no limit \(not given\); host unk.*give --ram",
    ):
        tightest(list(found.values()))
    assert tightest(list(sources(tmp_path, ram=5).values())).nbytes == 5
    tree(tmp_path, {"proc/meminfo": "MemTotal: 5 kB\n", "proc/self/cgroup": "0::/a\n", "cg/a/memory.max": "lots"})
    found = sources(tmp_path)
    assert "has no MemAvailable" in str(found["host"])
    assert found["cgroup"].unknown
    assert "lots" in str(found["cgroup"])


def test_cgroup_v2_nested_takes_the_tightest_level(tmp_path: Path) -> None:
    stat = f"anon 1\nactive_file {64 * MIB}\ninactive_file {192 * MIB}\nslab 7\n"
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "0::/user.slice/app\n",
        "cg/user.slice/memory.max": f"{4 * GIB}\n",
        "cg/user.slice/memory.current": f"{3 * GIB}\n",
        "cg/user.slice/memory.stat": stat,
        "cg/user.slice/app/memory.max": "max\n",
        "cg/user.slice/app/memory.current": f"{1 * GIB}\n",
    }
    found = sources(tree(tmp_path, files))["cgroup"]
    assert found.nbytes == share(4 * GIB - (3 * GIB - 256 * MIB))  # file pages are not counted as used
    assert "user.slice/memory.max: 88% of 4 GiB less 2.75 GiB used" in found.detail
    tree(tmp_path, {"cg/user.slice/app/memory.max": f"{2 * GIB}"})
    assert sources(tmp_path)["cgroup"].nbytes == share(1 * GIB)
    tree(tmp_path, {"cg/user.slice/memory.current": f"{4 * GIB}"})  # now the level above is the tightest
    assert sources(tmp_path)["cgroup"].nbytes == share(256 * MIB)
    tree(tmp_path, {"cg/user.slice/app/memory.current": f"{3 * GIB}"})
    assert sources(tmp_path)["cgroup"].nbytes == HELD  # over its limit: nothing is free, but what we hold we hold


def test_cgroup_v1_and_hybrid(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "9:name=systemd:/\n4:cpu,memory:/docker/x\n1:memoryx:/\n0::/\n",
        "cg/memory/docker/x/memory.limit_in_bytes": str(4 * GIB),
        "cg/memory/docker/x/memory.usage_in_bytes": str(2 * GIB),
        "cg/memory/docker/x/memory.stat": f"active_file 5\ntotal_active_file {GIB}\ntotal_inactive_file {MIB}\n",
        "cg/memory/memory.limit_in_bytes": "9223372036854771712",
        "cg/memory/memory.usage_in_bytes": "12345",
        "cg/unified/cgroup.procs": "",
    }
    found = sources(tree(tmp_path, files))["cgroup"]
    assert found.nbytes == share(4 * GIB - (GIB - MIB))
    tree(tmp_path, {"cg/memory/docker/x/memory.limit_in_bytes": "9223372036854771712"})
    assert str(sources(tmp_path)["cgroup"]) == "cgroup no limit (no memory limit is set)"


def test_cgroup_v2_high_and_v1_limit_of_the_groups_above(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/app\n",
        "cg/app/memory.max": f"{4 * GIB}\n",
        "cg/app/memory.high": f"{2 * GIB}\n",
        "cg/app/memory.current": f"{GIB}\n",
    }
    found = sources(tree(tmp_path / "v2", files))["cgroup"]
    assert found.nbytes == share(GIB)
    assert "app/memory.high: 88% of 2 GiB less 1 GiB used" in found.detail
    tree(tmp_path / "v2", {"cg/app/memory.high": "max"})
    assert sources(tmp_path / "v2")["cgroup"].nbytes == share(3 * GIB)
    files = {
        "proc/self/cgroup": "4:memory:/app\n",
        "cg/memory/app/memory.limit_in_bytes": "9223372036854771712",
        "cg/memory/app/memory.usage_in_bytes": str(GIB),
        "cg/memory/app/memory.stat": f"hierarchical_memory_limit {3 * GIB}\ntotal_active_file {MIB}\n",
    }
    found = sources(tree(tmp_path / "v1", files))["cgroup"]
    assert found.nbytes == share(2 * GIB + MIB)
    assert "hierarchical_memory_limit" in found.detail


LIMITS = (
    "Limit                     Soft Limit           Hard Limit           Units     \n"
    "Max data size             {data:<20} unlimited            bytes     \n"
    "Max stack size            8388608              unlimited            bytes     \n"
    "Max address space         {space:<20} unlimited            bytes     \n"
)


def test_limits_of_the_process_count_address_space_and_stacks(tmp_path: Path) -> None:
    status = "VmSize:\t 614400 kB\nVmData:\t 204800 kB\n"
    tree(tmp_path, {"proc/self/status": status, "proc/self/limits": LIMITS.format(data=GIB, space="unlimited")})
    assert sources(tmp_path)["ulimit"].nbytes == share(GIB - 200 * MIB)
    with_stacks = memory_sources(None, held=HELD, threads=10, proc=tmp_path / "proc", cgroup_mount=tmp_path)[3]
    assert with_stacks.nbytes == share(GIB - 280 * MIB)
    assert with_stacks.detail.startswith("ulimit -d: 88% of 1 GiB less 280 MiB of address space")
    planned = memory_sources(None, held=HELD, mapped=150 * MIB, proc=tmp_path / "proc", cgroup_mount=tmp_path)[3]
    assert planned.nbytes == share(GIB - 50 * MIB)  # what is planned for is not taken twice
    tree(tmp_path, {"proc/self/limits": LIMITS.format(data=2 * GIB, space=GIB)})
    assert sources(tmp_path)["ulimit"].nbytes == share(GIB - 600 * MIB)
    tree(tmp_path, {"proc/self/limits": LIMITS.format(data=100 * MIB, space="unlimited")})
    assert sources(tmp_path)["ulimit"].nbytes == HELD
    tree(tmp_path, {"proc/self/limits": LIMITS.format(data="unlimited", space="unlimited")})
    assert str(sources(tmp_path)["ulimit"]) == "ulimit no limit (neither -d nor -v is set)"
    tree(tmp_path, {"proc/self/limits": LIMITS.format(data=GIB, space="unlimited"), "proc/self/status": "VmSize: 1 kB"})
    assert sources(tmp_path)["ulimit"].unknown


def test_cgroup_path_of_the_host_seen_in_a_container(tmp_path: Path) -> None:
    """Without a namespace the path names a folder that is not there; the mount itself is the container's group."""
    files = {
        "proc/self/cgroup": "0::/kubepods/pod1/../../other\n",
        "cg/memory.max": str(GIB),
        "cg/memory.current": "0",
    }
    assert sources(tree(tmp_path, files))["cgroup"].nbytes == share(GIB)


def test_own_memory_is_what_was_touched() -> None:
    code = """
import mmap
from picaflor.store.arena import Arena
from picaflor.store.budget import process_memory
before = process_memory()
arena = Arena(64, 1 << 20)
mapped = process_memory()
for slot in range(64):
    arena.view(slot)[:] = 1
full = process_memory()
arena.close()
after = process_memory()
print(*(found.charged - before.charged for found in (mapped, full, after)), arena.nbytes)
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=dict(os.environ))
    mapped, full, after, nbytes = map(int, out.stdout.split())
    assert nbytes == 64 * (MIB + 64) + (-64 * (MIB + 64)) % mmap.PAGESIZE
    assert mapped < 2 * MIB
    assert nbytes - MIB <= full <= nbytes + 2 * MIB
    assert after < 2 * MIB


def test_process_memory_fields(tmp_path: Path) -> None:
    text = "Name:\tx\nVmHWM:\t  900 kB\nVmLck:\t 700 kB\nRssAnon:\t 400 kB\nRssFile:\t 50 kB\nRssShmem:\t 100 kB\n"
    tree(tmp_path, {"self/status": text})
    found = process_memory(proc=tmp_path)
    assert found is not None
    assert (found.anonymous, found.locked, found.file, found.peak) == (500 * 1024, 700 * 1024, 50 * 1024, 900 * 1024)
    assert found.charged == 700 * 1024
    tree(tmp_path, {"self/status": text.replace("RssAnon", "RssOther")})
    assert process_memory(proc=tmp_path) is None
    assert process_memory(proc=tmp_path / "none") is None


ITEMS = (Item("interpreter", 60 * MIB), Item("resident weights", 300 * MIB), Item("KV cache", 100 * MIB, "--ctx"))
SLOTS = {3: 2 * MIB, 4: 2 * MIB, 9: 4 * MIB}
EXPERTS = {3: 64, 4: 64, 9: 64}


def budget(ram: int, wanted: int | None = None, working: int = 8) -> Ledger:
    return fit([Source("--ram", ram, "given")], ITEMS, SLOTS, EXPERTS, wanted_slots=wanted, working_slots=working)


def test_slots_fill_the_budget_and_never_exceed_it() -> None:
    every = sum(arena_bytes(64, nbytes) for nbytes in SLOTS.values())
    fixed = 460 * MIB
    for room in (20 * MIB, 77 * MIB, 300 * MIB, every - 1, every, every + GIB):
        ledger = budget(fixed + room)
        assert ledger.total_bytes <= fixed + room
        counts = ledger.slots
        used = sum(arena_bytes(counts[layer], nbytes) for layer, nbytes in SLOTS.items())
        assert ledger.all_resident == (room >= every)
        if ledger.all_resident:
            assert counts == EXPERTS
            assert ledger.working_slots == 0
            assert ledger.total_bytes == fixed + every
        else:
            assert ledger.total_bytes == fixed + used + arena_bytes(ledger.working_slots, 4 * MIB)
            assert max(counts.values()) - min(counts.values()) <= 1
            spare = fixed + room - ledger.total_bytes
            smallest = min(counts.values())
            for layer, nbytes in SLOTS.items():
                grows = arena_bytes(counts[layer] + 1, nbytes) - arena_bytes(counts[layer], nbytes)
                assert counts[layer] > smallest or counts[layer] == 64 or grows > spare


def test_working_set_shrinks_before_the_refusal() -> None:
    one_each = sum(arena_bytes(1, nbytes) for nbytes in SLOTS.values())
    for working in (1, 3, 8):
        ledger = budget(460 * MIB + one_each + arena_bytes(working, 4 * MIB))
        assert (ledger.working_slots, set(ledger.slots.values())) == (working, {1})
    with pytest.raises(OutOfBudget):
        budget(460 * MIB + one_each + arena_bytes(1, 4 * MIB) - 1)


def test_fixed_slots() -> None:
    ledger = budget(GIB, wanted=5)
    assert ledger.slots == {3: 5, 4: 5, 9: 5}
    assert [item.name for item in ledger.items[3:]] == [
        "expert slots (5 in each of 3 layers)",
        "working set (8 experts)",
    ]
    assert budget(2 * GIB, wanted=1000).slots == EXPERTS
    uneven = fit([Source("--ram", GIB, "given")], (), {0: MIB, 1: MIB}, {0: 4, 1: 8}, wanted_slots=6, working_slots=2)
    assert uneven.slots == {0: 4, 1: 6}
    assert uneven.working_slots == 2


def test_refusal_has_every_number_and_the_flags() -> None:
    with pytest.raises(OutOfBudget) as caught:
        budget(400 * MIB)
    assert str(caught.value) == (
        "needs 472 MiB: interpreter 60 MiB + resident weights 300 MiB + KV cache 100 MiB + expert slots (1 in each of "
        "3 layers) 8.01 MiB + working set (1 experts) 4 MiB; allowed are --ram 400 MiB (given): short of 72 MiB; "
        "give --ram 473MiB or more, or lower --ctx (KV cache)"
    )
    with pytest.raises(
        OutOfBudget, match=r"give --ram 997MiB or more, or lower --ctx \(KV cache\), or lower --expert-slots"
    ):
        budget(900 * MIB, wanted=63)
    with pytest.raises(
        OutOfBudget, match=r"allowed are host 400 MiB \(88% of 1 GiB\): .*; free memory or raise that limit, or"
    ):
        fit([Source("host", 400 * MIB, "88% of 1 GiB")], ITEMS, SLOTS, EXPERTS, wanted_slots=None, working_slots=8)


def test_model_without_experts() -> None:
    ledger = fit([Source("--ram", GIB, "given")], ITEMS, {}, {}, wanted_slots=None, working_slots=8)
    assert (dict(ledger.slots), ledger.working_slots, ledger.total_bytes) == ({}, 0, 460 * MIB)
