"""The GLM family against float64 oracles of tiny containers, one per weight format.

Must not know how a backend computes: every test runs on each backend of `family_harness.BACKENDS`.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from family_harness import BACKENDS, DATA, BackendCase, Tensors, TestModel, rewrite

from picaflor.backends.api import Batch

CONTAINERS = [
    "tiny_glm_dsa_f32",
    "tiny_glm_e8",
    "tiny_glm_f32",
    "tiny_glm_fp8",
    "tiny_glm_fp8_experts",
    "tiny_glm_int2row",
    "tiny_glm_int3g64",
    "tiny_glm_int4g32",
    "tiny_glm_int4g64",
    "tiny_glm_int4row",
    "tiny_glm_int8",
    "tiny_glm_ragged_int4g16",
]
every_backend = pytest.mark.parametrize("case", BACKENDS, ids=str)


@pytest.fixture
def container(request: pytest.FixtureRequest) -> Path:
    """The folder of a container: from the tests' own data, else from the folder that PICAFLOR_TEST_DATA names."""
    own = DATA / request.param
    if own.is_dir():
        return own
    found: Path = request.getfixturevalue("test_data") / "vectors" / request.param
    return found


def vectors(path: Path) -> dict[str, np.ndarray]:
    """All arrays of a container's vectors."""
    with np.load(path / "vectors.npz") as file:
        return {name: file[name] for name in file.files}


@every_backend
@pytest.mark.parametrize("container", CONTAINERS, indirect=True)
def test_logits_and_greedy_ids_equal_the_oracle(container: Path, case: BackendCase) -> None:
    known = vectors(container)
    oracle = known["oracle_logits_f64"].astype(np.float64)
    model = TestModel(container, case.make())
    logits = model.run(known["token_ids"].tolist())
    bound = case.e8_bound if container.name.endswith("e8") else case.bound
    assert logits.shape == oracle.shape
    assert np.abs(logits - oracle).max() < bound
    for row in np.flatnonzero(logits.argmax(axis=1) != oracle.argmax(axis=1)):
        best = np.sort(oracle[row])[::-1]
        print(f"{container.name}: position {row} is a near-tie, gap {best[0] - best[1]:.3g}")
        assert best[0] - best[1] < 2 * bound
    if case.bound <= 1e-5:
        prompt = known["prompt_ids"].tolist()
        assert model.greedy(prompt, 20, sequence=1) == known["oracle_greedy_ids"].tolist()[len(prompt) :]


@every_backend
@pytest.mark.parametrize("chunk", [1, 7, 32])
def test_chunks_of_a_prompt_give_the_same_logits(case: BackendCase, chunk: int) -> None:
    path = DATA / "tiny_glm_dsa_f32"
    known = vectors(path)
    logits = TestModel(path, case.make()).run(known["token_ids"].tolist(), chunk=chunk)
    assert np.abs(logits - known["oracle_logits_f64"]).max() < case.bound


@every_backend
@pytest.mark.parametrize("length", [7, 8, 9, 32])
def test_sparse_selection_on_both_sides_of_index_topk(case: BackendCase, length: int) -> None:
    path = DATA / "tiny_glm_dsa_f32"
    known = vectors(path)
    ids, oracle = known["token_ids"].tolist(), known["oracle_logits_f64"]
    model = TestModel(path, case.make())
    prefill = model.run(ids[:length])
    decoded = model.run(ids[:length], sequence=1, chunk=1)
    assert np.abs(prefill - oracle[:length]).max() < case.bound
    assert np.abs(decoded - oracle[:length]).max() < case.bound


@every_backend
def test_selection_changes_what_is_computed_beyond_index_topk_only(case: BackendCase) -> None:
    path = DATA / "tiny_glm_dsa_f32"
    ids = vectors(path)["token_ids"].tolist()
    sparse = TestModel(path, case.make()).run(ids)
    dense = TestModel(path, case.make(), overrides={"index_topk": 4096}).run(ids)
    difference = np.abs(sparse - dense).max(axis=1)
    assert (difference[:8] <= 2 * case.bound).all()
    assert (difference[9:] > 1e-3).all()


@every_backend
def test_shared_layers_use_the_last_selection_and_have_no_indexer(case: BackendCase, tmp_path: Path) -> None:
    path = DATA / "tiny_glm_dsa_f32"
    ids = vectors(path)["token_ids"].tolist()

    def drop(tensors: Tensors) -> Tensors:
        return {name: array for name, array in tensors.items() if not re.search(r"layers\.[13]\..*indexer", name)}

    rewrite(path, tmp_path, drop, config={"indexer_types": ["full", "shared", "full", "shared"]})
    model = TestModel(tmp_path, case.make())
    assert [plane.layer for plane in model.model.planes() if plane.name == "index_key"] == [0, 2]
    changed = np.abs(model.run(ids) - TestModel(path, case.make()).run(ids)).max(axis=1)
    assert (changed[:8] <= 2 * case.bound).all()
    assert changed[9:].max() > 1e-3


@every_backend
def test_latent_norm_eps_is_a_setting_that_can_be_seen(case: BackendCase) -> None:
    if case.bound > 1e-5:
        pytest.skip(f"{case.name}: its own error hides a difference of 4e-5")
    path = DATA / "tiny_glm_dsa_f32"
    known = vectors(path)
    ids = known["token_ids"].tolist()
    other = TestModel(path, case.make(), overrides={"latent_norm_eps": 1e-5}).run(ids)
    assert 2e-5 < np.abs(other - known["oracle_logits_f64"]).max() < 2e-4
    assert np.abs(other - known["peer_logits_prefill_idot0"]).max() < 1e-5


@every_backend
def test_sequences_in_one_batch_do_not_meet(case: BackendCase) -> None:
    path = DATA / "tiny_glm_int4g64"
    known = vectors(path)
    ids, oracle = known["token_ids"], known["oracle_logits_f64"]
    model = TestModel(path, case.make())
    first, second = model.batch(ids[:20], 0, 0), model.batch(ids[:11], 0, 1)
    width = max(first.pages.shape[1], second.pages.shape[1])
    pages = np.full((2, width), -1, dtype=np.int32)
    pages[0, : first.pages.shape[1]], pages[1, : second.pages.shape[1]] = first.pages[0], second.pages[0]
    order = np.argsort(np.concatenate((first.positions, second.positions)), kind="stable")
    which = np.concatenate((np.zeros(20, dtype=np.int32), np.ones(11, dtype=np.int32)))[order]
    positions = np.concatenate((first.positions, second.positions))[order]
    outputs = np.array([len(order) - 1, 3, 0], dtype=np.int32)
    batch = Batch(ids[positions].astype(np.int32), which, positions, pages, outputs)
    model.forward.program.run(batch, model.experts)
    logits = np.array(model.forward.program.view(model.forward.logits, 3))
    assert np.abs(logits - oracle[positions[outputs]]).max() < case.bound
