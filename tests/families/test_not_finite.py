"""NaN and infinity in a model's numbers: refused at load where they can be seen, an error where they come out.

Must not know how a token is computed.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from picaflor.container.index import Container
from picaflor.errors import BadContainer, NoFiniteLogit
from picaflor.runtime import builtin
from picaflor.runtime.engine import Engine, EngineOptions, SamplingOptions


def spoilt(target: Path, tensor: str, value: float, *, where: int | slice = 3) -> Path:
    """The built-in model with one float32 number of one tensor replaced, or those of a slice."""
    shutil.copytree(builtin.folder(), target)
    shard = next(target.glob("*.safetensors"))
    with Container.open(target) as container:
        metadata = dict(container.shards[0].metadata)
    tensors = load_file(shard)
    tensors[tensor].reshape(-1)[where] = np.float32(value)
    save_file(tensors, shard, metadata=metadata)
    return target


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    "tensor",
    [
        "model.norm.weight",
        "lm_head.weight.qs",
        "model.embed_tokens.weight.qs",
        "model.layers.3.mlp.gate.weight",
        "model.layers.3.mlp.gate.e_score_correction_bias",
        "model.layers.2.self_attn.o_proj.weight.qs",
    ],
)
def test_resident_numbers_are_refused_at_load(tmp_path: Path, tensor: str, value: float) -> None:
    name = tensor.removesuffix(".qs")
    with pytest.raises(BadContainer, match=rf"^{name}: 1 of \d+ scales or weights are NaN or infinite"):
        Engine.open(spoilt(tmp_path / "m", tensor, value), EngineOptions(threads=1))


def test_an_experts_nan_is_an_error_when_the_expert_is_chosen(tmp_path: Path) -> None:
    path = spoilt(tmp_path / "m", "model.layers.1.mlp.experts.0.down_proj.weight.qs", np.nan)
    ids = np.random.default_rng(1).integers(0, 4000, 64).tolist()
    with Engine.open(path, EngineOptions(threads=1)) as engine:
        answer = engine.generate(ids, SamplingOptions(max_tokens=64, temperature=0.0))
        with pytest.raises(
            NoFiniteLogit, match=r"is finite: weights are NaN or infinite \(picaflor inspect MODEL --deep"
        ):
            list(answer)


def test_finite_weights_that_overflow_are_not_said_to_be_anything_else(tmp_path: Path) -> None:
    path = spoilt(tmp_path / "m", "model.norm.weight", 3e38, where=slice(None))
    with Engine.open(path, EngineOptions(threads=1)) as engine:
        answer = engine.generate([1, 2, 3], SamplingOptions(max_tokens=1, temperature=0.0))
        with pytest.raises(NoFiniteLogit, match=r"finds those\), or finite ones are so large that products overflow$"):
            list(answer)
