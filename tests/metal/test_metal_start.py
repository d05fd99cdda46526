"""The metal backend starts, or says why not; its table of cells is whole and needs no MLX."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from picaflor.backends.metal import capabilities
from picaflor.backends.table import CapabilityTable
from picaflor.errors import UnsupportedKernel, UsageError
from picaflor.formats import REGISTRY
from picaflor.runtime.plan import EngineOptions, load_backend


def load(lines: list[str] | None = None, **options: Any) -> Any:
    """The backend."""
    tell = (lambda text: None) if lines is None else lines.append
    return load_backend(EngineOptions(backend="metal", threads=1, **options), tell)


def test_every_format_has_every_cell() -> None:
    table = CapabilityTable()
    table.declare(capabilities.cells())
    assert table.missing(REGISTRY, (*capabilities.WEIGHT_OPS, *capabilities.ROW_OPS)) == []
    assert len(table.cells()) == 4 * len(REGISTRY) + len(capabilities.FORMAT_FREE_OPS)


def test_the_table_and_the_cpu_backend_import_no_mlx() -> None:
    code = (
        "import sys; import picaflor.backends.metal.capabilities; "
        "from picaflor.runtime.plan import EngineOptions, load_backend; load_backend(EngineOptions(), print); "
        "assert not [name for name in sys.modules if name.startswith('mlx')], 'mlx was imported'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_without_mlx_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("picaflor.backends.metal.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "mlx", None)
    monkeypatch.setitem(sys.modules, "mlx.core", None)
    with pytest.raises(UnsupportedKernel, match=r"backend metal cannot start: .*mlx"):
        load()


def test_other_precisions_are_refused() -> None:
    pytest.importorskip("mlx.core", reason="the metal backend needs MLX")
    for name in ("fast", "exact"):
        with pytest.raises(UsageError, match=f"--precision {name}: .*accepted: standard"):
            load(precision=name)


def test_a_machine_without_metal_is_named() -> None:
    pytest.importorskip("mlx.core", reason="the metal backend needs MLX")
    from picaflor.backends.metal import library

    lines: list[str] = []
    backend = load(lines)
    if library.on_metal():
        assert backend.isa != library.CPU_DEVICE
        assert lines == []
    else:
        assert backend.isa == library.CPU_DEVICE
        assert len(lines) == 1
        assert "MLX has no Metal device here" in lines[0]


def test_products_are_never_rounded_to_fewer_bits() -> None:
    pytest.importorskip("mlx.core", reason="the metal backend needs MLX")
    code = (
        "import ctypes; from picaflor.backends.metal import library; get = ctypes.CDLL(None).getenv; "
        "get.restype = ctypes.c_char_p; print(get(b'MLX_ENABLE_TF32'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "b'0'\n", done


def test_the_working_set_bounds_what_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlx.core", reason="the metal backend needs MLX")
    from picaflor.backends.metal import backend, library

    monkeypatch.setattr(library, "working_set", lambda: 1 << 30)
    limits: list[int] = []
    monkeypatch.setattr(backend.mx, "set_memory_limit", limits.append)
    assert load()._free_bytes() == (1 << 30) - backend.SCRATCH_BYTES
    assert load(vram_bytes=3 << 30)._free_bytes() == (1 << 30) - backend.SCRATCH_BYTES
    assert load(vram_bytes=700 << 20)._free_bytes() == (700 << 20) - backend.SCRATCH_BYTES
    assert limits == [1 << 30, 1 << 30, 700 << 20]


def test_memory_is_one_for_host_and_device() -> None:
    """What the host holds counts against MLX's part, --ram bounds it, and experts lie in one place."""
    pytest.importorskip("mlx.core", reason="the metal backend needs MLX")
    backend = load(ram_bytes=1 << 30)
    room = backend._free_bytes()
    assert room == (512 << 20)
    assert backend.takes_experts(0, int(room / 1.75))
    assert backend.experts.free() == room
    assert not backend.takes_experts(room // 2, int(room / 1.75))
    assert backend.experts.free() == 0
