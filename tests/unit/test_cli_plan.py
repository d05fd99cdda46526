"""plan: from headers alone, with given rates worked out by hand; what it refuses, and that it agrees with a run."""

from __future__ import annotations

import json
import struct
from functools import partial
from math import comb
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from picaflor import cli
from picaflor.backends.api import DeviceRates
from picaflor.device_memory import DeviceMemory
from picaflor.errors import UnsupportedKernel
from picaflor.models.config import Notices
from picaflor.runtime import builtin, forecast
from picaflor.runtime import plan as planning
from picaflor.runtime.engine import Engine, EngineOptions
from picaflor.runtime.forecast import int3_share
from picaflor.runtime.sketch import sketch, token_bytes
from picaflor.store import budget
from picaflor.store.routes import Routes

RATES = ("--memory-rate", "10GB", "--disk-rate", "1GB")
MIB = 1 << 20


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path / "state" / "picaflor" / "machine.json"


@pytest.fixture
def headers(tmp_path: Path) -> Path:
    """The built-in model without its weights: config.json, and files that end after their header."""
    folder = tmp_path / "headers"
    folder.mkdir()
    (folder / "config.json").write_bytes((builtin.folder() / "config.json").read_bytes())
    for shard in builtin.folder().glob("*.safetensors"):
        data = shard.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        (folder / shard.name).write_bytes(data[: 8 + length])
    return folder


def planned(*words: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert cli.main(["plan", *words, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert isinstance(record, dict)
    return record


def test_headers_alone_give_the_numbers_of_the_whole_model(headers: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (*RATES, "--expert-slots", "6", "--ram", "4GiB")
    whole = planned(str(builtin.folder()), *words, capsys=capsys)
    bare = planned(str(headers), *words, capsys=capsys)
    for name in ("experts", "expert_bytes", "slots_per_layer", "bytes_per_token", "speed", "all_in_memory"):
        assert bare[name] == whole[name], name
    needs = [{item["name"]: item["bytes"] for item in record["needs"]} for record in (whole, bare)]
    assert needs[0]["resident weights"] == needs[1]["resident weights"]
    assert cli.main(["run", str(headers), "x"]) == 1
    assert "truncated" in capsys.readouterr().err


def test_given_rates_are_worked_out(capsys: pytest.CaptureFixture[str]) -> None:
    """7 layers, top 4 of 24, experts of 55,296 bytes; 60 % of 10 GB/s multiply, 1 GB/s read, 6 of 24 in memory."""
    words = (*RATES, "--expert-slots", "6", "--ram", "4GiB")
    record = planned(*words, "--prefetch", "off", capsys=capsys)
    total = sum(record["bytes_per_token"].values())
    assert record["bytes_per_token"]["experts"] == 7 * 4 * 55_296
    assert record["expert_bytes"] == 7 * 24 * 55_296
    assert record["rates"]["step_s"] == pytest.approx(total / 6e9)
    assert record["all_in_memory"]["tokens_per_s"] == pytest.approx(6e9 / total)
    assert record["speed"]["hit_rate"] == pytest.approx(0.25)
    assert record["speed"]["read_bytes_per_token"] == pytest.approx(7 * 3 * 55_296)
    # Reading is slower than multiplying: a layer takes its reads and the last expert; one that misses none, 4 experts.
    one, read = 55_296 / 6e9, 55_296 / 1e9
    none = 6 * 5 * 4 * 3 / (24 * 23 * 22 * 21)
    experts = 7 * (3 * read + (1 - none) * one + none * 4 * one)
    rest = (total - 7 * 4 * 55_296) / 6e9
    assert 1 / record["speed"]["tokens_per_s"] == pytest.approx(experts + rest)
    assert record["resident_experts"] == 42
    assert record["slots_per_layer"] == [6, 6]
    changes = {change["change"]: change for change in record["changes"]}
    assert changes["16 GiB more RAM"]["speed"] == record["all_in_memory"]
    second = changes["a second drive as fast as this one"]["speed"]["tokens_per_s"]
    step_s = total / 6e9
    assert 1 / second == pytest.approx(step_s + (experts + rest - step_s) / 2)
    # All fits a GPU of 24 GB: 60 % of 936 GB/s multiply, 90 us for each of 8 layers.
    assert changes["a GPU of 24 GB"]["speed"]["tokens_per_s"] == pytest.approx(1 / (total / (0.6 * 936e9) + 8 * 90e-6))
    assert changes["int3-g64 experts"]["speed"]["read_bytes_per_token"] < record["speed"]["read_bytes_per_token"]
    # Read ahead, the disk works while the token computes: 0.55 of what it idled, less the quarter that is in memory.
    ahead = planned(*words, capsys=capsys)["speed"]
    waits, least = experts + rest - step_s, 7 * 3 * read - step_s
    assert 1 / ahead["tokens_per_s"] == pytest.approx(step_s + least + (1 - 0.55 * 0.75) * (waits - least))


def test_a_gpu_that_holds_a_part_of_the_experts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Half of the experts fit it and the machine's memory holds the rest, which its processor multiplies as before."""
    words = (*RATES, "--ram", "4GiB")
    before = planned(*words, capsys=capsys)
    sizes = before["bytes_per_token"]
    resident = sum(nbytes for name, nbytes in sizes.items() if name != "experts")
    monkeypatch.setattr(forecast, "GPU_BYTES", resident + before["expert_bytes"] // 2)
    change = {item["change"]: item for item in planned(*words, capsys=capsys)["changes"]}["a GPU of 0 GB"]
    shared = 7 * (1 - comb(12, 4) / comb(24, 4)) * 400e-6  # layers that want an expert which the GPU has not
    seconds = (resident + sizes["experts"] / 2) / (0.6 * 936e9) + sizes["experts"] / 2 / 6e9 + 8 * 90e-6 + shared
    assert change["speed"]["tokens_per_s"] == pytest.approx(1 / seconds)
    assert change["note"].startswith("assumed")
    monkeypatch.setattr(forecast, "GPU_BYTES", resident - 1)
    small = {item["change"]: item for item in planned(*words, capsys=capsys)["changes"]}["a GPU of 0 GB"]
    assert small["speed"] is None
    assert small["note"].startswith("would need 0.0 GB")


def test_what_is_measured_is_kept_and_used_again(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--expert-slots", "6", "--ram", "4GiB", "--threads", "1")
    first = planned(*words, capsys=capsys)
    assert first["rates"]["from"] == "multiplying: measured now, reads: measured now"
    assert first["speed"]["tokens_per_s"] > 0
    assert len(json.loads(state.read_text())["entries"]) == 2
    again = planned(*words, capsys=capsys)
    assert again["rates"]["from"] == "multiplying: measured earlier, reads: measured earlier"
    assert again["speed"] == first["speed"]
    assert "measured now" in planned(*words, "--fresh", capsys=capsys)["rates"]["from"]


def test_an_unknown_disk_is_unknown_and_not_zero(headers: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--memory-rate", "10GB", "--expert-slots", "6", "--ram", "4GiB")
    record = planned(str(headers), *words, capsys=capsys)
    assert record["speed"] is None
    assert record["rates"]["read_bytes_per_s"] is None
    assert cli.main(["plan", str(headers), *words]) == 0
    text = capsys.readouterr().out
    assert "unknown without the disk's rate (--disk-rate); at most " in text
    fits = planned(str(headers), "--memory-rate", "10GB", "--ram", "4GiB", capsys=capsys)
    assert fits["speed"] == fits["all_in_memory"]


def test_every_number_has_its_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a machine of 64 GiB with a group of 16 and a limit of 8, whatever this one has."""
    files = {
        "proc/meminfo": f"MemAvailable: {64 * MIB} kB\n",
        "proc/self/cgroup": "0::/app\n",
        "proc/self/status": "VmSize: 8192 kB\nVmData: 4096 kB\n",
        "proc/self/limits": f"Max data size {8192 * MIB} {8192 * MIB} bytes\n",
        "group/app/memory.max": f"{16384 * MIB}\n",
        "group/app/memory.current": "0\n",
        "group/app/memory.stat": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    faked = partial(budget.memory_sources, proc=tmp_path / "proc", cgroup_mount=tmp_path / "group")
    monkeypatch.setattr(planning, "memory_sources", faked)
    assert cli.main(["plan", *RATES, "--ram", "4GiB"]) == 0
    out, err = capsys.readouterr()
    assert err == "demo model, 27 M parameters\n"
    memory = [line for line in out.splitlines() if line[10:].lstrip().startswith(("--ram", "host", "cgroup", "ulimit"))]
    assert len(memory) == 4
    assert memory[0].split() == ["memory", "--ram", "4", "GiB", "given", "<-", "the", "smallest", "counts"]
    for line, word in zip(
        memory[1:], ("88% of 64 GiB", "memory.max: 88% of 16 GiB", "ulimit -d: 88% of 8"), strict=True
    ):
        assert word in line
    for part in ("resident weights", "(--ctx)", "in all, ", "threads    ", "168 of 168 in memory (100%)", "tok/s"):
        assert part in out


def test_a_budget_that_does_not_hold_is_refused_with_its_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", *RATES, "--ram", "40MiB"]) == 1
    err = capsys.readouterr().err.splitlines()[-1]
    assert err.startswith("picaflor: error: needs ")
    assert "allowed are --ram 40 MiB (given)" in err


def test_the_plan_is_the_ledger_of_a_run() -> None:
    options = EngineOptions(ram_bytes=4096 * MIB, expert_slots=5, threads=1)
    plan = sketch(builtin.folder(), options, Notices())
    with Engine.open(None, options) as engine:
        run = engine.plan.ledger
        assert engine.bytes_per_token() == token_bytes(plan.model, plan.index)
    plan.close()
    assert plan.ledger.slots == run.slots
    mine = {item.name: item.nbytes for item in plan.ledger.items if item.name != "this program"}
    assert mine == {item.name: item.nbytes for item in run.items if item.name != "this program"}


def test_a_plan_for_a_device_that_tells_no_rate_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--backend", "vulkan"]) == 2
    assert "--backend vulkan: no plan is made for it; accepted: auto, cpu, cuda, rocm" in capsys.readouterr().err


# ---- with a device ----

LAYERS, EXPERTS, EXPERT = 7, 24, 55_296
SCRATCH = 512 * MIB


def no_device(options: EngineOptions, notice: Any) -> Any:
    if options.backend in ("auto", "cpu"):
        return LOAD(options, notice)
    raise UnsupportedKernel(f"backend {options.backend} cannot start: none is here")


LOAD = planning.load_backend


def device(free: int, total: int, rate: float, *, shares_memory: bool = False) -> Any:
    """`load_backend` where a device is here."""
    memory = DeviceMemory("Card", free, total)
    rates = DeviceRates(memory=rate, link=1e9)
    backend = SimpleNamespace(
        isa="sm_90", memory=lambda: memory, measure_rates=lambda: rates, shares_memory=shares_memory
    )

    def load(options: EngineOptions, notice: Any) -> Any:
        return LOAD(options, notice) if options.backend in ("auto", "cpu") else backend

    return load


def needed(record: dict[str, Any]) -> int:
    """Bytes that a device needs before any expert."""
    return sum(item["bytes"] for item in record["device"]["needs"])


def test_a_device_that_is_not_here_is_an_estimate_of_its_size(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(planning, "load_backend", no_device)
    assert cli.main(["plan", *RATES, "--backend", "cuda"]) == 1
    said = "backend cuda cannot start: none is here; --vram SIZE plans for a device that is not here"
    assert capsys.readouterr().err.splitlines()[-1] == f"picaflor: error: {said}"
    words = (*RATES, "--backend", "cuda", "--vram", "1GiB")
    assert cli.main(["plan", *words[:-1], "515MiB"]) == 1
    assert "515 MiB may be used: raise --vram, lower --ctx or --prefill-chunk, or " in capsys.readouterr().err
    record = planned(*words, capsys=capsys)
    found = record["device"]
    assert found["from"].startswith("an estimate for a device that is not here (backend cuda cannot start: none is")
    assert found["experts"] == {"device": LAYERS * EXPERTS, "ram": 0, "disk": 0}
    names = [item["name"] for item in found["needs"]]
    assert names == ["resident weights", "key-value cache (4096 tokens)", "work buffers", "scratch"]
    host = {item["name"]: item["bytes"] for item in record["needs"]}
    assert host["key-value cache (4096 tokens)"] == 0  # on the device
    total = sum(record["bytes_per_token"].values())
    assert record["speed"]["tokens_per_s"] == pytest.approx(1 / (total / (0.6 * 936e9) + 8 * 90e-6))
    assert record["speed"]["limit"] == "device"
    assert cli.main(["plan", *words]) == 0
    out = capsys.readouterr().out
    assert "of 168 experts 168 there" in out
    assert "device 936 GB/s" in out
    assert "tok/s: device 0.73 ms; limited by device" in out


def test_a_device_that_is_here_is_asked_and_shares_with_memory_and_disk(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A half of the experts on the device, 6 of 24 per layer in memory, a quarter on disk."""
    monkeypatch.setattr(planning, "load_backend", device(1 << 30, 1 << 30, 2e12))
    rates = ("--memory-rate", "10GB", "--disk-rate", "100MB")
    words = (*rates, "--backend", "cuda", "--ram", "4GiB", "--expert-slots", "6", "--prefetch", "off")
    whole = planned(*words, capsys=capsys)
    assert (whole["device"]["name"], whole["device"]["from"]) == ("Card", "measured now")
    assert whole["device"]["usable_bytes"] == int(0.92 * (1 << 30))
    slot = whole["device"]["expert_bytes"] // (LAYERS * EXPERTS)
    vram = needed(whole) + LAYERS * EXPERTS // 2 * slot
    record = planned(*words, "--vram", str(vram), capsys=capsys)
    assert record["device"]["experts"] == {"device": 84, "ram": 42, "disk": 42}
    total, experts = sum(record["bytes_per_token"].values()), record["bytes_per_token"]["experts"]
    device_s = (total - experts / 2) / (0.6 * 2e12) + 8 * 90e-6
    ram_s = experts / 2 / 6e9 - experts / 2 / (0.6 * 2e12) + 7 * (1 - comb(12, 4) / comb(24, 4)) * 400e-6
    seconds = record["speed"]["seconds"]
    assert seconds["device"] == pytest.approx(device_s)
    assert seconds["RAM"] == pytest.approx(ram_s)
    assert record["speed"]["hit_rate"] == pytest.approx(0.75)
    assert record["speed"]["limit"] == "disk"
    assert 1 / record["speed"]["tokens_per_s"] == pytest.approx(sum(seconds.values()))
    changes = {change["change"]: change["speed"] for change in record["changes"]}
    assert changes["16 GiB more RAM"]["read_bytes_per_token"] == 0
    assert changes["twice the device's memory"]["tokens_per_s"] == pytest.approx(whole["speed"]["tokens_per_s"])
    assert changes["a second drive as fast as this one"]["seconds"]["disk"] == pytest.approx(seconds["disk"] / 2)


def test_a_device_whose_memory_is_not_enough(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(planning, "load_backend", device(300 * MIB, 1 << 30, 2e12))
    assert cli.main(["plan", *RATES, "--backend", "cuda"]) == 1
    assert "are needed before any expert" in capsys.readouterr().err
    monkeypatch.setattr(planning, "load_backend", device(1 << 30, 1 << 30, 2e12, shares_memory=True))
    assert cli.main(["plan", *RATES, "--backend", "cuda"]) == 1
    assert "backend cuda: Card shares the host's memory, no plan is made for it; --vram" in capsys.readouterr().err
    monkeypatch.setattr(planning, "load_backend", device(300 * MIB, 1 << 30, 2e12))
    # More than it has: a device that is not here.
    record = planned(*RATES, "--backend", "cuda", "--vram", "2GiB", capsys=capsys)
    assert "not here (Card has 1 GiB)" in record["device"]["from"]


def test_routes_of_another_model_and_routes_without_requests_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = np.zeros((0, 7, 4), np.uint8)
    Routes.from_tokens(chosen, experts=24, first_layer=1).write(tmp_path / "empty")
    assert cli.main(["plan", *RATES, "--replay", str(tmp_path / "empty")]) == 2
    assert "--replay: no request to layer 1 is recorded" in capsys.readouterr().err
    chosen = np.tile(np.arange(4, dtype=np.uint8), (1, 3, 1))
    Routes.from_tokens(chosen, experts=64, model="other").write(tmp_path / "other")
    assert cli.main(["plan", *RATES, "--replay", str(tmp_path / "other")]) == 2
    assert "--replay: routes of other: 3 layers of at most 64 experts" in capsys.readouterr().err


def test_replayed_routes_decide_the_hit_rate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same four experts all the time: six slots hold them after the first token."""
    chosen = np.tile(np.arange(4, dtype=np.uint8), (50, 7, 1))
    Routes.from_tokens(chosen, experts=24, expert_bytes=55_296, first_layer=1).write(tmp_path / "routes")
    words = (*RATES, "--expert-slots", "6", "--ram", "4GiB")
    record = planned(*words, "--replay", str(tmp_path / "routes"), capsys=capsys)
    assert record["speed"]["hit_rate"] == pytest.approx(49 / 50)
    assert record["routes"] == "replay of 350 recorded requests"
    assert record["speed"]["tokens_per_s"] > planned(*words, capsys=capsys)["speed"]["tokens_per_s"]


def test_int3_takes_its_share_of_the_bytes() -> None:
    """3.5 bits and a scale per 64 in 28 bytes, against 4 bits and a float32 per 64: 28 of 36 bytes."""
    plan = sketch(builtin.folder(), EngineOptions(ram_bytes=4096 * MIB), Notices())
    plan.close()
    assert int3_share(plan) == pytest.approx(28 / 36)
