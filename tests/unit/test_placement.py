"""Where weights lie with a device, worked out with devices that are not there (reports of users R31 to R33)."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from picaflor import cli
from picaflor.cli import doctor
from picaflor.device_memory import DeviceMemory
from picaflor.errors import OutOfBudget
from picaflor.runtime import builtin
from picaflor.runtime import plan as planning
from picaflor.runtime.placement import SCRATCH_BYTES, place
from picaflor.store.budget import Item

GB = 1_000_000_000
NEEDS = [Item("resident weights", 6 * GB), Item("key-value cache (4096 tokens)", 1 * GB, "--ctx")]


def test_r31_a_device_with_more_memory_than_the_host_takes_what_the_host_cannot() -> None:
    found = place(DeviceMemory("Big", 40 * GB, 40 * GB), NEEDS, [20_000_000] * 2000, in_ram=10)
    assert found.usable == int(40 * GB * 0.92)
    assert found.on_device == (found.usable - 7 * GB - SCRATCH_BYTES) // 20_000_000 == 1463
    assert (found.in_ram, found.on_disk) == (10, 2000 - 1463 - 10)
    assert found.device_bytes == 1463 * 20_000_000


def test_r32_what_the_host_keeps_changes_nothing_on_the_device() -> None:
    memory = DeviceMemory("Card", 30 * GB, 32 * GB)
    few, many = (place(memory, NEEDS, [20_000_000] * 3000, in_ram=ram) for ram in (0, 500))
    assert few.on_device == many.on_device > 900
    assert str(few).startswith("Card: 27.9 GiB of 29.8 GiB free, 25.7 GiB usable; resident weights 5.59 GiB, ")
    assert str(few).endswith(
        f"of 3000 experts {few.on_device} there (18.7 GiB), 0 in RAM, {3000 - few.on_device} on disk"
    )
    small = place(memory, NEEDS, [20_000_000] * 100, in_ram=500)
    assert (small.on_device, small.in_ram, small.on_disk) == (100, 0, 0)
    assert str(small).endswith("of 100 experts 100 there (1.86 GiB), that is all")


def test_r33_what_others_hold_is_named_and_can_be_planned_without() -> None:
    memory = DeviceMemory("Card", 10 * GB, 80 * GB)
    assert memory.others() == "another program holds 65.2 GiB of the 74.5 GiB of Card"
    assert DeviceMemory("Card", 79 * GB, 80 * GB).others() == ""
    assert memory.notice(None) == f"{memory.others()}: experts get what is left of it, 9.31 GiB are free"
    assert memory.notice(20 * GB) == f"{memory.others()}: --vram 18.6 GiB is more than the 9.31 GiB that are free"
    assert memory.notice(10 * GB) == DeviceMemory("Card", 79 * GB, 80 * GB).notice(None) == ""
    now = place(memory, NEEDS, [20_000_000] * 3000, in_ram=0)
    asked = place(memory, NEEDS, [20_000_000] * 3000, in_ram=0, vram=70 * GB)
    assert now.on_device < 100
    assert asked.on_device == 3000
    assert place(memory, NEEDS, [], in_ram=0, vram=900 * GB).usable == 80 * GB


def test_needs_that_do_not_fit_are_refused_with_what_holds_the_memory() -> None:
    with pytest.raises(OutOfBudget) as caught:
        place(DeviceMemory("Card", 8 * GB, 80 * GB), NEEDS, [1], in_ram=0)
    assert str(caught.value) == (
        "Card: 7.02 GiB are needed before any expert (resident weights 5.59 GiB), 6.85 GiB may be used; "
        "another program holds 67.1 GiB of the 74.5 GiB of Card: raise --vram, lower --ctx or --prefill-chunk, or "
        "leave the device out"
    )


@pytest.mark.parametrize(("free", "status"), [(75 * GB, "ok"), (20 * GB, "warn"), (1 * GB // 2, "fail")])
def test_doctor_places_a_model_on_the_device(
    free: int, status: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def part(name: str, module: str) -> Any:
        return SimpleNamespace(
            device_memory=lambda backend: (f"A {backend} card", free, 80 * GB),
            other_devices=lambda backend: "1 (Another card)",
        )

    real = planning.backend_part
    monkeypatch.setattr(planning, "backend_part", lambda n, m: part(n, m) if n == "cuda" else real(n, m))
    monkeypatch.setattr(doctor, "_devices", lambda: ["cuda"])
    monkeypatch.setattr(doctor, "_other_backends", list)
    monkeypatch.setattr(doctor, "_isas", list)
    code = cli.main(["doctor", str(builtin.folder()), "--json"])
    checks = {check["id"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    found = checks["model.cuda"]
    assert (found["status"], code) == (status, int(status == "fail")), found
    assert found["detail"].startswith("A cuda card: ")
    if status != "fail":
        assert "of 168 experts 168 there" in found["detail"]
        assert found["detail"].endswith("; --device shares the layers with 1 (Another card)")
    assert ("another program holds" in found["detail"]) == (status != "ok")
