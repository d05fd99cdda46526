"""Backends that cannot start say why; the table of cells is whole and needs neither torch nor Triton."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from picaflor.backends import cells as shared
from picaflor.backends.cuda import capabilities
from picaflor.backends.table import CapabilityTable
from picaflor.cli.doctor_machine import check_backend
from picaflor.errors import UnsupportedKernel
from picaflor.formats import REGISTRY
from picaflor.runtime.devices import INSTALL, LINUX, PARTS, WINDOWS, automatic_choice, usable_devices
from picaflor.runtime.plan import BACKENDS, EngineOptions, load_backend


def load(name: str) -> Any:
    """The backend of that name."""
    return load_backend(EngineOptions(backend=name, threads=1), lambda text: None)


def test_every_format_has_every_cell_on_both_backends() -> None:
    operations = (*shared.WEIGHT_OPS, *shared.ROW_OPS)
    for backend in capabilities.BACKENDS:
        table = capabilities.declare(CapabilityTable(), backend)
        assert [name for name in table.missing(REGISTRY, operations) if name.startswith(backend)] == []
        own = [cell for cell in table.cells() if cell.backend == backend]
        assert len(own) == 4 * len(REGISTRY) + len(shared.FORMAT_FREE_OPS)


def test_without_torch_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("picaflor.backends.cuda.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(UnsupportedKernel, match=r"backend cuda cannot start: .*torch"):
        load("cuda")


@pytest.mark.parametrize("name", ["cuda", "rocm", "vulkan", "metal"])
@pytest.mark.parametrize("kind", [OSError, RuntimeError, ImportError])
def test_a_library_that_cannot_be_loaded_is_told(
    name: str, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package is there, and what it loads is broken: packages raise any of these."""

    def fails(module: str) -> None:
        raise kind(f"{module}: libgpu.so.1:\n cannot open shared object file")

    monkeypatch.setattr(importlib, "import_module", fails)
    with pytest.raises(UnsupportedKernel, match=rf"^backend {name} cannot start: .*libgpu\.so\.1: cannot open shared"):
        load(name)


def test_the_cpu_backend_imports_no_torch() -> None:
    code = (
        "import sys; from picaflor.runtime.plan import EngineOptions, load_backend; "
        "load_backend(EngineOptions(), print); "
        "assert not {'torch', 'triton'} & set(sys.modules), 'torch was imported'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_auto_tells_of_a_device_that_it_does_not_use(tmp_path: Path) -> None:
    assert automatic_choice({"cuda": tmp_path / "none"}) == ""
    said = automatic_choice({"cuda": tmp_path / "none", "rocm": tmp_path})
    wanted = "--backend auto is the CPU: no run has measured which is faster (picaflor tune does); "
    assert said.startswith(f"{wanted}--backend rocm uses the GPU")


def test_on_windows_auto_offers_vulkan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no Triton there, and every driver brings Vulkan; it is named, and neither taken nor compared."""
    assert set(WINDOWS) == {"vulkan"}
    assert set(LINUX) == {"cuda", "rocm"}
    found = {"vulkan": tmp_path}
    monkeypatch.setattr("importlib.util.find_spec", lambda part: None)
    said = automatic_choice(found)
    assert said.startswith("--backend auto is the CPU: a token of vulkan may differ")
    assert said.endswith("--backend vulkan uses the GPU once wgpu is installed (pip install picaflor[vulkan])")
    monkeypatch.setattr("importlib.util.find_spec", lambda part: part)
    assert automatic_choice(found).endswith("; --backend vulkan uses the GPU")
    assert usable_devices(found) == []
    assert usable_devices({"rocm": tmp_path, "cuda": tmp_path / "none"}) == ["rocm"]


def test_doctor_names_what_brings_a_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for AMD, whose build of torch comes from an index of its own and from no extra."""
    assert set(INSTALL) == set(BACKENDS) - {"cpu"}
    assert set(PARTS) <= set(INSTALL)
    for name in [name for name in sys.modules if name.startswith("picaflor.backends.cuda.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    check = check_backend("rocm")
    assert check.status == "info"
    assert check.detail.startswith("does not start: backend rocm cannot start: ")
    assert re.search(r"; its software: pip install torch --index-url https://\S+/rocm[0-9.]+$", check.detail)


@pytest.mark.parametrize("name", ["cuda", "rocm"])
def test_without_a_device_the_reason_is_told(name: str) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    pytest.importorskip("triton", reason="triton is not installed")
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    code = (
        "from picaflor.runtime.plan import EngineOptions, load_backend\n"
        f"try:\n    load_backend(EngineOptions(backend='{name}'), print)\n"
        "except Exception as error:\n    print(type(error).__name__, error)"
    )
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120)
    assert done.stdout.startswith(f"UnsupportedKernel backend {name} cannot start: torch "), done


@pytest.mark.parametrize("version", ["3.4.0", "2.3.1"])
def test_a_triton_that_is_too_old_is_told(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton", reason="GPU kernels need triton")
    monkeypatch.setattr(triton, "__version__", version)
    told = (
        rf"^backend cuda cannot start: Triton {re.escape(version)} cannot compile its kernels; accepted: 3\.5 and later"
    )
    with pytest.raises(UnsupportedKernel, match=told):
        load("cuda")
