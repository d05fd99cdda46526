"""The capability table: every format has its cells, one place falls back, refusals name themselves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from picaflor.backends.cpu import capabilities
from picaflor.backends.cpu.backend import open_backend
from picaflor.backends.table import NO_FORMAT, CapabilityTable, Cell
from picaflor.errors import UnsupportedKernel, UsageError
from picaflor.formats import REGISTRY

ROOT = Path(__file__).parents[2]


def _table(*, strict: bool = False) -> tuple[CapabilityTable, list[str]]:
    notices: list[str] = []
    table = CapabilityTable(strict=strict, notice=notices.append)
    table.declare(
        [
            Cell("cpu", "matmul", "a", "native"),
            Cell("cpu", "matmul", "b", "composed"),
            Cell("gpu", "matmul", "a", "waived", to="cpu", reason="no kernel yet", cure="--backend cpu"),
            Cell("gpu", "matmul", "b", "refused", reason="too wide"),
        ]
    )
    return table, notices


def test_every_format_has_every_weight_operation_on_the_cpu() -> None:
    table = capabilities.declare(CapabilityTable())
    for name in REGISTRY:
        for op in ("matmul", "expert_ffn"):
            assert table.select(op, name, "cpu").state in ("native", "composed")
        for op in ("rows", "row_axpy"):
            if name == "e8-iq3-lattice":
                assert table.select(op, name, "cpu").state == "composed"
            else:
                assert table.select(op, name, "cpu").state == "native"
    assert table.select("attention", NO_FORMAT, "cpu").name == "cpu.attention"
    names = [cell.name for cell in table.cells()]
    assert len(names) == len(set(names)) == 2 * (4 * len(REGISTRY) + len(capabilities.FORMAT_FREE_OPS))
    assert table.missing(REGISTRY, capabilities.WEIGHT_OPS + capabilities.ROW_OPS) == []
    assert table.missing([NO_FORMAT], capabilities.FORMAT_FREE_OPS) == []


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
    assert dict(table.engaged) == {"cpu.matmul.a": 3, "cpu.matmul.b": 1}


def test_a_waived_cell_falls_back_counts_and_is_named_once() -> None:
    table, notices = _table()
    for layer in range(3):
        for kind in ("q_proj", "o_proj"):
            what = f"model.layers.{layer}.{kind}.weight"
            assert table.select("matmul", "a", "gpu", what=what).name == "cpu.matmul.a"
    table.select("matmul", "a", "gpu", what="lm_head.weight")
    assert notices == []  # told when all is known
    for _ in range(2):
        table.announce()
    assert table.fallbacks == {"gpu.matmul.a": 7}
    assert table.engaged == {"cpu.matmul.a": 7}
    assert notices == [
        "gpu.matmul.a is waived to cpu: no kernel yet; used for model.layers.*.q_proj.weight in 3 layers, "
        "model.layers.*.o_proj.weight in 3 layers, lm_head.weight; to cure: --backend cpu"
    ]
    table.select("matmul", "a", "gpu", what="another")
    table.announce()
    assert (table.fallbacks["gpu.matmul.a"], len(notices)) == (8, 1)


def test_a_notice_stays_one_line_however_many_tensors_there_are() -> None:
    table, notices = _table()
    for number in range(9):
        table.select("matmul", "a", "gpu", what=f"layers.0.w{number}")
    table.announce()
    assert "layers.*.w5 in 1 layer and 3 more; to cure" in notices[0]
    table, notices = _table()
    for _ in range(4):
        table.select("matmul", "a", "gpu")
    table.announce()
    assert "used for 4 operations; to cure" in notices[0]


def test_calls_that_fail_are_counted_told_once_and_strict() -> None:
    table, notices = _table()
    for _ in range(3):
        table.failed("gpu", "segment", reason="out of memory", instead="cpu", cure="--backend cpu")
    assert table.fallbacks == {"gpu.segment": 3}
    assert notices == [
        "gpu.segment failed: out of memory; cpu does this and all later such calls; to cure: --backend cpu"
    ]
    table, notices = _table()
    for layer in (0, 1, 1, 2):
        table.select("matmul", "a", "cpu", what=f"layers.{layer}.q")
    for number in range(8):
        table.select("matmul", "b", "cpu", what=f"w{number}")
    table.failed("cpu", "segment", reason="by request", instead="cpu-scalar", cure="do not ask")
    table.failed("cpu", "matmul", reason="by request", instead="cpu-scalar", cure="do not ask")
    assert notices == [
        "cpu.segment failed: by request; calls of cpu are used for a (layers.*.q in 3 layers), "
        "b (w0, w1, w2, w3, w4, w5, w6, w7); cpu-scalar does this and all later such calls; to cure: do not ask"
    ]
    calls = ("segment", "expert_ffn")
    table.failed("cpu", "segment", reason="all", instead="cpu-scalar", cure="do not ask", calls=calls)
    assert notices[1].startswith(
        "cpu.segment failed: all; cpu.segment and cpu.expert_ffn are used for a (layers.*.q in"
    )
    table, notices = _table(strict=True)
    with pytest.raises(UnsupportedKernel, match=r"gpu\.segment failed: out of memory \(an error under --strict; --b"):
        table.failed("gpu", "segment", reason="out of memory", instead="cpu", cure="--backend cpu")
    assert not notices
    assert not table.fallbacks


def test_strict_makes_a_fallback_an_error() -> None:
    table, notices = _table(strict=True)
    with pytest.raises(
        UnsupportedKernel, match=r"gpu\.matmul\.a is waived to cpu: no kernel yet \(an error under --strict; --backe"
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
            Cell("x", "matmul", "a", "waived", to="y", reason="slow", cure="none"),
            Cell("y", "matmul", "a", "waived", to="x", reason="slow", cure="none"),
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


def test_disabled_cells_of_the_cpu_go_to_its_scalar_kernels_until_nothing_is_left() -> None:
    notices: list[str] = []
    table = capabilities.declare(CapabilityTable(notice=notices.append))
    table.disable(["cpu.matmul.int4-row", "cpu.rope"])
    assert table.cell("cpu", "matmul", "int4-row").state == "waived"
    assert table.select("matmul", "int4-row", "cpu", what="q_proj.weight").name == "cpu-scalar.matmul.int4-row"
    assert table.select("matmul", "int8-row", "cpu").name == "cpu.matmul.int8-row"
    assert table.select("rope", NO_FORMAT, "cpu").name == "cpu-scalar.rope"
    table.announce()
    assert notices == [
        "cpu.matmul.int4-row is waived to cpu-scalar: disabled by --disable; used for q_proj.weight; "
        "to cure: leave out --disable cpu.matmul.int4-row",
        "cpu.rope is waived to cpu-scalar: disabled by --disable; used for 1 operation; "
        "to cure: leave out --disable cpu.rope",
    ]
    assert table.fallbacks == {"cpu.matmul.int4-row": 1, "cpu.rope": 1}
    table.disable(["cpu-scalar.matmul"])
    with pytest.raises(UnsupportedKernel, match=r"cpu-scalar\.matmul\.int4-row is refused: disabled by --disable; usa"):
        table.select("matmul", "int4-row", "cpu")
    table, _ = _table()
    table.disable(["gpu.matmul"])  # what is refused for a reason keeps it
    assert table.cell("gpu", "matmul", "b").reason == "too wide"


def test_a_cell_must_explain_itself() -> None:
    for wrong in (
        {"state": "waived", "to": "cpu", "cure": "x"},
        {"state": "waived", "reason": "why", "cure": "x"},
        {"state": "waived", "to": "cpu", "reason": "why"},
        {"state": "native", "cure": "x"},
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
    backend = open_backend(
        threads=2, precision="exact", isa="scalar", disable=["cpu.matmul.int4-row", "cpu-scalar.matmul"]
    )
    assert (backend.name, backend.threads, backend.precision, backend.isa) == ("cpu", 2, "exact", "scalar")
    planes = [backend.allocate(32), backend.allocate(8)]
    weight = backend.weight("q_proj", "int4-row", (2, 32), 0, planes)
    recorder = backend.recorder(max_rows=1, max_outputs=1, page_tokens=16, pages=1)
    with pytest.raises(UnsupportedKernel, match=r"q_proj: cpu-scalar\.matmul\.int4-row is refused: disabled"):
        recorder.matmul(recorder.rows(32), weight, recorder.rows(2))
    table = recorder.rows(32)
    recorder.embed(weight, table)  # its rows can still be read
    assert dict(backend.table.engaged) == {"cpu.rows.int4-row": 1}
    with pytest.raises(UnsupportedKernel, match="cpu has no cell for matmul on int5; declared: f32, bf16"):
        backend.weight("w", "int5", (2, 32), 0, planes)
    with pytest.raises(ValueError, match=r"w: planes of \[32, 8\] bytes, int4-row 3x32 has \[48, 12\]"):
        backend.weight("w", "int4-row", (3, 32), 0, planes)
    for wrong, text in (
        ({"threads": 0}, "--threads 0"),
        ({"isa": "sse9"}, "--isa sse9"),
        ({"precision": "half"}, "--precision half: this version has fast, standard, exact"),
        ({"disable": ["gpu.matmul"]}, "--disable gpu.matmul"),
    ):
        with pytest.raises(UsageError, match=text):
            open_backend(**wrong)  # type: ignore[arg-type]


def _gen(*words: str, root: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(root / "scripts" / "gen"), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)


def test_the_tables_of_the_documentation_are_current() -> None:
    done = _gen("--check")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_stale_table_is_named_and_written_anew(tmp_path: Path) -> None:
    for name in ("scripts/gen", "docs/backends.md", "docs/commands.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text())
    page = tmp_path / "docs" / "backends.md"
    assert _gen(root=tmp_path).returncode == 0
    right = page.read_text()
    row = "| f32 | native | native |"
    assert right.count(row) >= 4  # cpu, cpu-scalar, cuda and other devices
    page.write_text(right.replace(row, "| f32 | composed | native |", 1))
    done = _gen("--check", root=tmp_path)
    assert (done.returncode, done.stderr) == (
        1,
        "docs/backends.md: capabilities is not current; run scripts/gen\n",
    )
    assert _gen(root=tmp_path).returncode == 0
    assert page.read_text() == right
