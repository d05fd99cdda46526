"""Containers and options that reach each path of a GPU backend: kv_b in formats of its own, and cells switched off.

Without a GPU Triton's interpreter runs the kernels, so few tokens must do.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from device_support import FAMILIES, GLM
from gpu_support import IDS, cpu_logits, logits, opened, same_bits, two_devices

from picaflor.convert.converter import ConvertOptions, convert
from picaflor.convert.policy import Policy
from picaflor.errors import UnsupportedKernel
from picaflor.runtime.plan import EngineOptions, load_backend


@pytest.mark.parametrize(("form", "size"), [("int8-row", 64), ("int4-grouped", 16)])
def test_kv_b_in_a_format_of_its_own(form: str, size: int, tmp_path: Path) -> None:
    """Rows of 32 latents: two groups of 16. The container itself has int4-row."""
    policy = Policy(experts="int8-row", resident="int4-row", kv_b=form, group_size=size)
    convert(FAMILIES / GLM, tmp_path / "model", ConvertOptions(policy=policy))
    ids = IDS[:2]
    wanted = cpu_logits(tmp_path / "model", ids)
    assert not same_bits(wanted, cpu_logits(GLM, ids))
    with opened(tmp_path / "model", backend="cuda") as engine:
        assert same_bits(logits(engine, ids), wanted)
        record = engine.record()
    assert record.fallbacks == {}
    assert record.kernels["cuda.attention"] == record.kernels[f"cuda.row_axpy.{form}"] == 5
    assert record.kernels[f"cuda.rows.{form}"] == 5 + (form == "int8-row")  # the embedding has that format, too


@pytest.mark.parametrize(
    "cells",
    [("matmul.int4-grouped", "rows.int8-row", "router"), ("expert_ffn",), ("rmsnorm", "rope", "add", "silu_mul")],
)
def test_what_is_switched_off_is_computed_by_the_host(cells: tuple[str, ...]) -> None:
    """With the same bits, told and counted; the host keeps the matrices that it multiplies, and no other."""
    warnings: list[str] = []
    names = tuple(f"cuda.{cell}" for cell in cells)
    ids = IDS[:2]
    with opened(GLM, backend="cuda", disable=names, warnings=warnings) as engine:
        assert same_bits(logits(engine, ids, chunk=1), cpu_logits(GLM, ids))
        fallbacks, kernels = engine.record().fallbacks, engine.record().kernels
        held = sum(bool(plane.any()) for plane in engine.plan.resident_memory)
        assert engine.plan.backend.calls["attention"] == 2 * 5
    assert {name for name in fallbacks if name.startswith(names)} == set(fallbacks) != set()
    assert all(kernels[f"cpu.{name.removeprefix('cuda.')}"] == count for name, count in fallbacks.items())
    assert sum("is waived to cpu: disabled by --disable; used for " in line for line in warnings) == len(fallbacks)
    assert (held > 0) == ("matmul.int4-grouped" in cells)


@pytest.mark.parametrize("cell", ["row_axpy.int4-row", "rows.int4-row", "attention", "kv_write"])
def test_what_nothing_stands_in_for_is_refused_by_name(cell: str) -> None:
    """Before a weight is read."""
    with (
        pytest.raises(UnsupportedKernel, match=rf"cuda\.{cell} is (refused: disabled by --disable; |disabled, and )"),
        opened(GLM, backend="cuda", disable=(f"cuda.{cell}",)),
    ):
        pass


@pytest.mark.parametrize("device", ["0", pytest.param("0,1", marks=two_devices)])
def test_the_cpu_that_stands_in_has_its_own_instruction_set(device: str) -> None:
    options = EngineOptions(backend="cuda", threads=1, device=device, disable=("cuda.matmul",))
    backend: Any = load_backend(options, lambda text: None)
    route = backend.table.route("matmul", "f32", "cuda")
    assert [cell.backend for cell in route] == ["cuda", "cpu"]
    assert [backend.isa_of(cell) for cell in route] == [backend.isa, load_backend(EngineOptions(), print).isa]


@two_devices
def test_what_is_switched_off_on_several_devices() -> None:
    """Each keeps its layers' matrices for the host."""
    disable = ("cuda.matmul.int4-grouped", "cuda.expert_ffn.int4-row")
    with opened(GLM, backend="cuda", device="0,1", disable=disable) as engine:
        assert same_bits(logits(engine, IDS[:2]), cpu_logits(GLM, IDS[:2]))
        assert set(engine.record().fallbacks) == set(disable)
