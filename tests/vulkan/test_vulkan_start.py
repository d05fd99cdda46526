"""Which device the Vulkan backend takes, what it says of a rasteriser, and why it may not start."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
from vulkan_support import GPU

from picaflor.backends.vulkan import device
from picaflor.cli.doctor_machine import check_backend
from picaflor.errors import UnsupportedKernel, UsageError
from picaflor.runtime.plan import EngineOptions, load_backend


def adapter(name: str, kind: str, interface: str = "Vulkan") -> Any:
    return SimpleNamespace(info={"device": name, "adapter_type": kind, "backend_type": interface})


def found(monkeypatch: pytest.MonkeyPatch, *every: Any) -> list[str]:
    gpu = SimpleNamespace(enumerate_adapters_sync=lambda: list(every))
    monkeypatch.setattr(device.wgpu, "gpu", gpu)
    return [one.info["device"] for one in device.adapters()]


def test_a_rasteriser_is_the_last_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    rasteriser, built_in, card = (
        adapter("soft", "CPU"),
        adapter("built in", "IntegratedGPU"),
        adapter("card", "DiscreteGPU"),
    )
    assert found(monkeypatch, rasteriser, built_in, card) == ["card", "built in", "soft"]


def test_other_interfaces_are_not_vulkan(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedKernel, match="no adapter of Vulkan"):
        found(monkeypatch, adapter("card", "DiscreteGPU", "OpenGL"))


def test_without_its_library_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("picaflor.backends.vulkan.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "wgpu", None)
    with pytest.raises(UnsupportedKernel, match=r"^backend vulkan cannot start: .*wgpu"):
        load_backend(EngineOptions(backend="vulkan"), lambda text: None)


def test_auto_is_never_this_backend() -> None:
    assert load_backend(EngineOptions(backend="auto"), lambda text: None).name == "cpu"


def test_a_rasteriser_is_named_as_such() -> None:
    told: list[str] = []
    backend: Any = load_backend(EngineOptions(backend="vulkan"), told.append)
    assert (backend.isa == "vulkan-software") == GPU.software
    assert any("software rasteriser" in line for line in told) == GPU.software
    line = check_backend("vulkan")
    assert line.status == "ok"
    assert GPU.name in line.detail
    assert ("software rasteriser" in line.detail) == GPU.software


def test_a_precision_that_there_is_not() -> None:
    with pytest.raises(UsageError, match="this version has fast, standard, exact"):
        load_backend(EngineOptions(backend="vulkan", precision="half"), lambda text: None)


def test_a_disabled_cell_is_refused_by_its_name() -> None:
    backend: Any = load_backend(EngineOptions(backend="vulkan", disable=("vulkan.add",)), lambda text: None)
    recorder = backend.recorder(max_rows=2, max_outputs=2, page_tokens=16, pages=1)
    with pytest.raises(UnsupportedKernel, match=r"vulkan\.add is refused: disabled by --disable"):
        recorder.add(recorder.rows(4), recorder.rows(4))
