"""The Qwen3-MoE family against transformers' float32 logits.

Must not know how a backend computes.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from family_harness import BACKENDS, DATA, BackendCase, Tensors, TestModel, rewrite

PATH = DATA / "qwen3_moe_tiny"
every_backend = pytest.mark.parametrize("case", BACKENDS, ids=str)


def expected() -> dict[str, np.ndarray]:
    """Token ids, logits and greedy ids."""
    with np.load(PATH / "expected.npz") as file:
        return {name: file[name] for name in file.files}


def test_the_data_can_show_a_forgotten_norm_weight() -> None:
    def unit(tensors: Tensors) -> bool:
        return any(np.ptp(array) < 0.1 for name, array in tensors.items() if name.endswith("norm.weight"))

    from safetensors.numpy import load_file

    assert not unit(load_file(PATH / "model.safetensors"))


@every_backend
@pytest.mark.parametrize("chunk", [1, 40])
def test_logits_equal_transformers(case: BackendCase, chunk: int) -> None:
    known = expected()
    logits = TestModel(PATH, case.make(), strict=True).run(known["ids"].tolist(), chunk=chunk)
    assert np.abs(logits - known["logits"]).max() < case.float32_bound


@every_backend
def test_greedy_ids_equal_transformers(case: BackendCase) -> None:
    known = expected()
    model = TestModel(PATH, case.make(), strict=True)
    assert model.greedy(known["ids"][:12].tolist(), 16) == known["greedy"].tolist()


@every_backend
def test_planes_are_keys_and_values_of_every_layer(case: BackendCase) -> None:
    model = TestModel(PATH, case.make())
    assert [(plane.layer, plane.name, plane.width) for plane in model.model.planes()] == [
        (layer, name, 48) for layer in range(3) for name in ("key", "value")
    ]
    assert model.draft is None


@every_backend
def test_weights_of_the_router_are_the_softmax_where_not_normalised(case: BackendCase, tmp_path: Path) -> None:
    known = expected()
    ids = known["ids"].tolist()
    plain = TestModel(rewrite(PATH, tmp_path, dict, config={"norm_topk_prob": False}), case.make()).run(ids)
    assert np.abs(plain - known["logits"]).max() > 0.1
