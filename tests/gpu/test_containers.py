"""Containers and options that reach each path of a GPU backend: kv_b in formats of its own, and cells switched off.

Without a GPU Triton's interpreter runs the kernels, so few tokens must do.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from device_support import FAMILIES, GLM
from gpu_support import IDS, cpu_logits, logits, opened, same_bits

from picaflor.convert.converter import ConvertOptions, convert
from picaflor.convert.policy import Policy
from picaflor.errors import UnsupportedKernel


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


@pytest.mark.parametrize("cell", ["matmul.int4-grouped", "row_axpy.int4-row", "expert_ffn.int4-grouped", "attention"])
def test_each_path_can_be_switched_off(cell: str) -> None:
    """Nothing stands in for it on this backend: it is refused by its name, before a weight is read."""
    with (
        pytest.raises(UnsupportedKernel, match=rf"^\S.*: cuda\.{cell} is refused: disabled by --disable; "),
        opened(GLM, backend="cuda", disable=(f"cuda.{cell}",)),
    ):
        pass
