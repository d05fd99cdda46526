"""What a run tells of the memory that other programs hold of a device (report of users R33)."""

from __future__ import annotations

import gpu_support
import pytest

from picaflor.backends.cuda.backend import CudaBackend
from picaflor.device_memory import DeviceMemory
from picaflor.runtime.plan import EngineOptions, load_backend

assert gpu_support.torch


@pytest.mark.parametrize(("vram", "lines"), [(None, 1), (9 << 30, 0), (20 << 30, 1)])
def test_r33_a_run_names_what_others_hold(vram: int | None, lines: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line where experts get less memory by it, or less than was asked for."""
    monkeypatch.setattr(CudaBackend, "memory", lambda self: DeviceMemory("Card", 10 << 30, 80 << 30))
    told: list[str] = []
    load_backend(EngineOptions(backend="cuda", threads=1, vram_bytes=vram), told.append)
    assert [line.partition(":")[0] for line in told] == ["another program holds 70 GiB of the 80 GiB of Card"] * lines


def test_the_interpreter_has_no_memory_of_its_own() -> None:
    found = CudaBackend(threads=1).memory()
    assert found is None or 0 < found.free <= found.total
