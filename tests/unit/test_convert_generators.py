"""The synthetic models of benchmarks/: the figures that they promise, and containers that load."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from picaflor import formats
from picaflor.container.index import Container
from picaflor.convert.plan import PlannedExpert, make_plan
from picaflor.convert.policy import Policy
from picaflor.convert.source import SourceModel
from picaflor.models.base import build_model
from picaflor.models.loading import open_model

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "generate_glm.py"


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_glm", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("name", "layers", "experts", "total", "per_token", "routed"),
    [
        ("glm-mid", 12, 640, 1_852_385_792, 349_221_380, 212_336_640),
        ("glm-big", 24, 2816, 7_737_592_832, 713_675_780, 467_140_608),
    ],
)
def test_the_models_have_the_sizes_of_the_yardstick(
    generator: ModuleType, name: str, layers: int, experts: int, total: int, per_token: int, routed: int
) -> None:
    config = generator.config(name)
    model = build_model(config, generator._Wanted(config["num_hidden_layers"]))
    plan = make_plan(model, Policy())
    found = [item for item in plan.items if isinstance(item, PlannedExpert)]
    assert (len(model.layers), len(found)) == (layers, experts)
    assert {sum(matrix.nbytes for matrix in item.matrices) for item in found} == {2_654_208}
    classes = generator.touched(plan, config["num_experts_per_tok"])
    assert classes["routed experts"] == routed
    assert plan.nbytes == total
    assert sum(classes.values()) == per_token


def test_a_generated_model_loads_and_its_weights_have_the_promised_size(generator: ModuleType, tmp_path: Path) -> None:
    figures = generator.generate("glm-nano", tmp_path / "a", seed=5)
    with Container.open(tmp_path / "a") as container:
        model, index = open_model(container)
        source = SourceModel(container, index)
        assert sum(info.nbytes for info in container.tensors.values()) == figures["bytes"]
        for spec in model.matrices():
            gain = generator.GAINS.get(spec.kind, 1.0) / np.sqrt(1 if spec.kind == "embedding" else spec.cols)
            weights = source.rows(spec.name, 0, spec.rows)
            assert np.sqrt(np.mean(weights.astype(np.float64) ** 2)) == pytest.approx(gain, rel=0.06), spec.name
            assert abs(weights.mean()) < 0.05 * gain, spec.name
        expert = index.experts[2][1].up
        form = formats.get(expert.format)
        codes, scales = source.planes(expert.name)
        assert (form.name, expert.group_size) == ("int4-grouped", 64)
        assert len(np.unique(scales.view(np.float32))) > 200
        assert (codes != source.planes(index.experts[2][0].up.name)[0]).mean() > 0.9
        assert 0 not in (codes & 15)
        assert 0 not in (codes >> 4)
        assert not model.max_positions > json.loads((tmp_path / "a" / "config.json").read_text())["index_topk"]


def test_a_seed_gives_the_same_bytes_and_another_seed_others(generator: ModuleType, tmp_path: Path) -> None:
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        generator.generate("glm-nano", tmp_path / name, seed=seed)
    a, b, c = ((tmp_path / name / "model-00001-of-00001.safetensors").read_bytes() for name in "abc")
    assert a == b
    assert len(a) == len(c)
    assert a != c
