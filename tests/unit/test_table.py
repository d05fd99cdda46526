"""The capability table: every format has its cells, one place falls back, refusals name themselves."""

from __future__ import annotations

import pytest

from picaflor.backends.cpu import capabilities
from picaflor.backends.cpu.backend import open_backend
from picaflor.backends.table import NO_FORMAT, CapabilityTable, Cell
from picaflor.errors import UnsupportedKernel, UsageError
from picaflor.formats import REGISTRY


def _table(*, strict: bool = False) -> tuple[CapabilityTable, list[str]]:
    notices: list[str] = []
    table = CapabilityTable(strict=strict, notice=notices.append)
    table.declare(
        [
            Cell("cpu", "matmul", "a", "native"),
            Cell("cpu", "matmul", "b", "composed"),
            Cell("gpu", "matmul", "a", "waived", to="cpu", reason="no kernel yet"),
            Cell("gpu", "matmul", "b", "refused", reason="too wide"),
        ]
    )
    return table, notices


def test_every_format_has_every_weight_operation_on_the_cpu() -> None:
    table = CapabilityTable()
    table.declare(capabilities.cells())
    for name in REGISTRY:
        for op in ("matmul", "expert_ffn"):
            assert table.select(op, name, "cpu").state in ("native", "composed")
        for op in ("rows", "row_axpy"):
            if name == "e8-iq3-lattice":
                with pytest.raises(
                    UnsupportedKernel, match=rf"cpu\.{op}\.e8-iq3-lattice is refused: its rows are stor"
                ):
                    table.select(op, name, "cpu")
            else:
                assert table.select(op, name, "cpu").state == "native"
    assert table.select("attention", NO_FORMAT, "cpu").name == "cpu.attention"
    names = [cell.name for cell in table.cells()]
    assert len(names) == len(set(names)) == 4 * len(REGISTRY) + len(capabilities.FORMAT_FREE_OPS)


def test_a_cell_that_is_not_declared_is_an_error() -> None:
    table, _ = _table()
    with pytest.raises(UnsupportedKernel, match="cpu has no cell for matmul on c; declared: a, b"):
        table.select("matmul", "c", "cpu")
    with pytest.raises(UnsupportedKernel, match="tpu has no cell for matmul on a; it declares none"):
        table.select("matmul", "a", "tpu")


def test_selection_counts_what_runs() -> None:
    table, _ = _table()
    for _ in range(3):
        table.select("matmul", "a", "cpu")
    table.select("matmul", "b", "cpu")
    assert dict(table.engaged) == {("matmul", "a"): 3, ("matmul", "b"): 1}


def test_a_waived_cell_falls_back_counts_and_is_named_once() -> None:
    table, notices = _table()
    for _ in range(3):
        assert table.select("matmul", "a", "gpu", what="q_proj").name == "cpu.matmul.a"
    assert table.fallbacks["gpu.matmul.a"] == 3
    assert notices == ["q_proj: gpu.matmul.a is waived to cpu: no kernel yet"]


def test_strict_makes_a_fallback_an_error() -> None:
    table, notices = _table(strict=True)
    with pytest.raises(
        UnsupportedKernel, match=r"gpu\.matmul\.a is waived to cpu: no kernel yet \(an error under --str"
    ):
        table.select("matmul", "a", "gpu")
    assert not notices
    assert not table.fallbacks


def test_a_refused_cell_names_its_reason_and_what_is_usable() -> None:
    table, _ = _table()
    with pytest.raises(
        UnsupportedKernel, match=r"w: gpu\.matmul\.b is refused: too wide; usable: cpu\.matmul\.a, cpu\."
    ):
        table.select("matmul", "b", "gpu", what="w")


def test_waivers_in_a_circle_end() -> None:
    table = CapabilityTable()
    table.declare(
        [
            Cell("x", "matmul", "a", "waived", to="y", reason="slow"),
            Cell("y", "matmul", "a", "waived", to="x", reason="slow"),
        ]
    )
    with pytest.raises(UnsupportedKernel, match="waived in a circle"):
        table.select("matmul", "a", "x")


def test_disabled_cells_are_refused() -> None:
    table, _ = _table()
    table.disable(["cpu.matmul.b"])
    table.select("matmul", "a", "cpu")
    with pytest.raises(UnsupportedKernel, match=r"cpu\.matmul\.b is refused: disabled by --disable"):
        table.select("matmul", "b", "cpu")
    table.disable(["cpu.matmul"])
    with pytest.raises(UnsupportedKernel, match=r"cpu\.matmul\.a is refused: disabled"):
        table.select("matmul", "a", "cpu")
    for unknown in ("cpu.matmull", "cpu", "cpu.matmul.z", ""):
        with pytest.raises(UsageError, match="there is no such kernel"):
            table.disable([unknown])


def test_a_cell_must_explain_itself() -> None:
    for wrong in (
        {"state": "waived", "to": "cpu"},
        {"state": "waived", "reason": "why"},
        {"state": "refused"},
        {"state": "native", "reason": "why"},
        {"state": "native", "to": "cpu"},
    ):
        with pytest.raises(ValueError, match=r"cell gpu\.matmul\.a"):
            Cell("gpu", "matmul", "a", **wrong)  # type: ignore[arg-type]
    table, _ = _table()
    with pytest.raises(ValueError, match=r"cell cpu\.matmul\.a is declared twice"):
        table.declare([Cell("cpu", "matmul", "a", "native")])


def test_a_backend_opens_with_what_it_is_told() -> None:
    backend = open_backend(threads=2, precision="exact", isa="scalar", disable=["cpu.matmul.int4-row"])
    assert (backend.name, backend.threads, backend.precision, backend.isa) == ("cpu", 2, "exact", "scalar")
    planes = [backend.allocate(32), backend.allocate(8)]
    weight = backend.weight("q_proj", "int4-row", (2, 32), 0, planes)
    recorder = backend.recorder(max_rows=1, max_outputs=1, page_tokens=16, pages=1)
    with pytest.raises(UnsupportedKernel, match=r"q_proj: cpu\.matmul\.int4-row is refused: disabled"):
        recorder.matmul(recorder.rows(32), weight, recorder.rows(2))
    table = recorder.rows(32)
    recorder.embed(weight, table)  # its rows can still be read
    assert dict(backend.table.engaged) == {("rows", "int4-row"): 1}
    with pytest.raises(UnsupportedKernel, match="cpu has no cell for matmul on int5; declared: f32, bf16"):
        backend.weight("w", "int5", (2, 32), 0, planes)
    with pytest.raises(ValueError, match=r"w: planes of \[32, 8\] bytes, int4-row 3x32 has \[48, 12\]"):
        backend.weight("w", "int4-row", (3, 32), 0, planes)
    for wrong, text in (
        ({"threads": 0}, "--threads 0"),
        ({"isa": "sse9"}, "--isa sse9"),
        ({"precision": "fast"}, "--precision fast: this version has standard and exact"),
        ({"disable": ["gpu.matmul"]}, "--disable gpu.matmul"),
    ):
        with pytest.raises(UsageError, match=text):
            open_backend(**wrong)  # type: ignore[arg-type]
