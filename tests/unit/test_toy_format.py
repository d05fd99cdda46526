"""A format that is added to the registry and nothing else: the table names every kernel that it lacks."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from picaflor.backends.cpu import capabilities
from picaflor.backends.cpu.backend import FORMAT_NUMBERS, open_backend
from picaflor.backends.cuda import capabilities as cuda
from picaflor.backends.metal import capabilities as metal
from picaflor.backends.table import CapabilityTable, Cell
from picaflor.backends.vulkan import capabilities as vulkan
from picaflor.conformance import verify
from picaflor.errors import UnsupportedKernel
from picaflor.formats import REGISTRY, int8_row
from picaflor.formats.base import F32, Format, Planes

OPS = capabilities.WEIGHT_OPS + capabilities.ROW_OPS


def _decode(planes: Planes, rows: int, cols: int, group_size: int) -> F32:
    """Codes are thirds of the scale."""
    values: F32 = int8_row.decode(planes, rows, cols, group_size) / np.float32(3)
    return values


TOY: Format = dataclasses.replace(int8_row.FORMAT, name="toy-thirds", decode=_decode)


def complete(table: CapabilityTable, registry: dict[str, Format]) -> None:
    """What the suite demands of every registered format."""
    missing = table.missing(registry, OPS)
    assert not missing, f"cells without kernel, waiver or refusal: {', '.join(missing)}"


def test_a_toy_format_fails_the_suite_naming_exactly_its_missing_cells() -> None:
    """On every backend: their tables need nothing of what the backends need."""
    table = capabilities.declare(CapabilityTable())
    table.declare([*cuda.cells("cuda"), *cuda.cells("rocm"), *metal.cells(), *vulkan.cells()])
    complete(table, dict(REGISTRY))
    with pytest.raises(AssertionError) as failure:
        complete(table, {**REGISTRY, TOY.name: TOY})
    named = str(failure.value).partition("refusal: ")[2].splitlines()[0].split(", ")
    backends = ("cpu", "cpu-scalar", "cuda", "rocm", "metal", "vulkan")
    assert named == [f"{backend}.{op}.toy-thirds" for backend in backends for op in OPS]


def test_verify_names_exactly_the_missing_cells_of_a_toy_format(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REGISTRY, TOY.name, TOY)  # type: ignore[arg-type]
    what = verify.What(isa="scalar", ops=OPS, formats=(TOY.name, "f32"), precisions=("exact",))
    failures = [str(failure) for failure in verify.verify(what).failures]
    assert failures == [f"cpu.{op}.toy-thirds: is declared neither as a kernel nor as waived or refused" for op in OPS]


def test_every_missing_operation_is_named_and_declared_ones_are_not() -> None:
    table = capabilities.declare(CapabilityTable())
    table.declare(cell for cell in _cells_of_toy() if cell.op != "expert_ffn")
    registry = {**REGISTRY, TOY.name: TOY}
    assert table.missing(registry, OPS) == ["cpu.expert_ffn.toy-thirds", "cpu-scalar.expert_ffn.toy-thirds"]
    table.declare(cell for cell in _cells_of_toy() if cell.op == "expert_ffn")
    complete(table, registry)


def _cells_of_toy() -> list[Cell]:
    cells = list(capabilities.cells())
    return [dataclasses.replace(cell, format=TOY.name) for cell in cells if cell.format == "int8-row"]


def test_a_toy_format_is_refused_by_name_before_anything_runs() -> None:
    backend = open_backend(threads=1)
    with pytest.raises(UnsupportedKernel, match="cpu has no cell for matmul on toy-thirds; declared: f32, bf16"):
        backend.weight("w", TOY.name, (2, 32), 0, TOY.sample(np.random.default_rng(0), 2, 32, 0))
    assert TOY.name not in FORMAT_NUMBERS
