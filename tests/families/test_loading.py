"""Which ways of storing the same model load, and which are refused by name.

Runs on the reference backend: what is compared is where bytes are found, not how they are multiplied.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from family_harness import DATA, Tensors, TestModel, rewrite

from picaflor.backends.reference import ReferenceBackend
from picaflor.container.index import Container
from picaflor.errors import BadContainer, MissingTensor, UnsupportedConfig
from picaflor.models.config import Notices
from picaflor.models.loading import open_model

QWEN = DATA / "qwen3_moe_tiny"
INT4 = DATA / "tiny_glm_int4g64"
FP8 = DATA / "tiny_glm_fp8_experts"
DSA = DATA / "tiny_glm_dsa_f32"
IDS = list(range(3, 30))


def logits(path: Path, **options: object) -> np.ndarray:
    """Logits of fixed tokens."""
    return TestModel(path, ReferenceBackend(), **options).run(IDS)  # type: ignore[arg-type]


def refusal(path: Path) -> str:
    """The message of the MissingTensor, BadContainer or UnsupportedConfig that opening raises."""
    with Container.open(path) as container, pytest.raises((BadContainer, UnsupportedConfig)) as caught:
        open_model(container)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def stack(tensors: Tensors, layers: tuple[int, ...], suffixes: tuple[str, ...]) -> Tensors:
    """The experts of some layers as two stacked tensors each; suffix "" is the weight, ".qs" its scales."""
    out = dict(tensors)
    for layer in layers:
        base = f"model.layers.{layer}.mlp.experts."
        for suffix in suffixes:
            parts: dict[str, list[np.ndarray]] = {"gate": [], "up": [], "down": []}
            for projection, found in parts.items():
                for expert in range(8):
                    found.append(out.pop(f"{base}{expert}.{projection}_proj.weight{suffix}"))
            pairs = [np.concatenate(pair) for pair in zip(parts["gate"], parts["up"], strict=True)]
            out[f"{base}gate_up_proj{suffix}"] = np.stack(pairs)
            out[f"{base}down_proj{suffix}"] = np.stack(parts["down"])
    return out


@pytest.mark.parametrize("layers", [(0, 2), (2,)], ids=["all", "mixed"])
def test_stacked_float_experts_give_the_same_logits(tmp_path: Path, layers: tuple[int, ...]) -> None:
    rewrite(QWEN, tmp_path, lambda tensors: stack(tensors, layers, ("",)))
    assert (logits(tmp_path) == logits(QWEN)).all()


@pytest.mark.parametrize("layers", [(3, 4), (3,)], ids=["all", "mixed"])
def test_stacked_quantized_experts_give_the_same_logits(tmp_path: Path, layers: tuple[int, ...]) -> None:
    rewrite(INT4, tmp_path, lambda tensors: stack(tensors, layers, ("", ".qs")))
    assert (logits(tmp_path) == logits(INT4)).all()


def test_block_scales_under_the_checkpoints_own_name(tmp_path: Path) -> None:
    def rename(tensors: Tensors) -> Tensors:
        return {
            name.replace(".weight.qs", ".weight_scale_inv") if "experts" in name else name: array
            for name, array in tensors.items()
        }

    rewrite(FP8, tmp_path, rename)
    assert (logits(tmp_path) == logits(FP8)).all()
    rewrite(FP8, tmp_path, lambda tensors: {**tensors, **rename(tensors)})
    assert "two scale tensors" in refusal(tmp_path)


def test_a_stack_of_another_shape_is_refused(tmp_path: Path) -> None:
    def swap(tensors: Tensors) -> Tensors:
        out = stack(tensors, (2,), ("",))
        name = "model.layers.2.mlp.experts.down_proj"
        return {**out, name: out[name].transpose(0, 2, 1)}

    rewrite(QWEN, tmp_path, swap)
    message = refusal(tmp_path)
    assert "model.layers.2.mlp.experts.down_proj: shape [8, 16, 64]; expected [8, 64, 16]" in message


def test_experts_stored_twice_stop_the_load(tmp_path: Path) -> None:
    rewrite(QWEN, tmp_path, lambda tensors: {**tensors, **stack(tensors, (2,), ("",))})
    assert "2 tensors fit nothing that qwen3_moe needs with this config" in refusal(tmp_path)
    assert "model.layers.2.mlp.experts.gate_up_proj" in refusal(tmp_path)


def test_an_unknown_tensor_stops_the_load(tmp_path: Path) -> None:
    extra = {"model.layers.1.self_attn.sinks": np.zeros(4, np.float32)}
    rewrite(QWEN, tmp_path, lambda tensors: {**tensors, **extra})
    assert "1 tensors fit nothing" in refusal(tmp_path)
    assert "model.layers.1.self_attn.sinks" in refusal(tmp_path)


def test_known_inert_tensors_are_left_alone(tmp_path: Path) -> None:
    inert = {
        "__pad__.0": np.zeros(5, np.uint8),
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(12, np.float32),
    }
    rewrite(QWEN, tmp_path, lambda tensors: {**tensors, **inert})
    assert (logits(tmp_path) == logits(QWEN)).all()


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    name = "model.layers.2.mlp.experts.5.up_proj.weight"
    rewrite(QWEN, tmp_path, lambda tensors: {key: value for key, value in tensors.items() if key != name})
    with Container.open(tmp_path) as container, pytest.raises(MissingTensor, match=re.escape(name)):
        open_model(container)


@pytest.mark.parametrize("source", [QWEN, DSA, INT4], ids=["qwen3_moe", "glm", "glm-int4"])
def test_a_tied_head_equals_a_copy_of_the_embedding(tmp_path: Path, source: Path) -> None:
    def untied(tensors: Tensors) -> Tensors:
        copies = {f"lm_head.weight{end}": tensors.get(f"model.embed_tokens.weight{end}") for end in ("", ".qs")}
        return {**tensors, **{name: array for name, array in copies.items() if array is not None}}

    def tied(tensors: Tensors) -> Tensors:
        return {name: array for name, array in tensors.items() if not name.startswith("lm_head")}

    for folder in ("copy", "tied", "missing"):
        (tmp_path / folder).mkdir()
    copy = rewrite(source, tmp_path / "copy", untied)
    result = logits(rewrite(source, tmp_path / "tied", tied, config={"tie_word_embeddings": True}))
    assert (result == logits(copy)).all()
    assert np.abs(result - logits(source)).max() > 1e-3
    missing = rewrite(source, tmp_path / "missing", tied)
    assert "lm_head.weight" in refusal(missing)


def test_a_stored_head_beside_a_tie_is_used_and_said(tmp_path: Path) -> None:
    path = rewrite(QWEN, tmp_path, lambda tensors: tensors, config={"tie_word_embeddings": True})
    assert (logits(path) == logits(QWEN)).all()
    notices = Notices()
    with Container.open(path) as container:
        open_model(container, notices=notices)
    assert len(notices.messages) == 1
    assert "lm_head.weight is stored too: the stored head is used" in notices.messages[0]


@pytest.mark.parametrize(
    ("prefix", "head"),
    [("model.language_model.", "lm_head.weight"), ("language_model.model.", "language_model.lm_head.weight")],
)
def test_a_longer_prefix_loads(tmp_path: Path, prefix: str, head: str) -> None:
    def rename(tensors: Tensors) -> Tensors:
        moved = {name: name.replace("lm_head.weight", head) for name in tensors if name.startswith("lm_head.weight")}
        moved |= {name: prefix + name.removeprefix("model.") for name in tensors if name.startswith("model.")}
        return {moved[name]: array for name, array in tensors.items()}

    rewrite(INT4, tmp_path, rename)
    assert (logits(tmp_path) == logits(INT4)).all()


def test_two_embeddings_are_refused(tmp_path: Path) -> None:
    def double(tensors: Tensors) -> Tensors:
        table = tensors.pop("model.embed_tokens.weight")
        return {**tensors, "a.embed_tokens.weight": table, "b.embed_tokens.weight": table}

    rewrite(QWEN, tmp_path, double)
    assert "more than one embedding" in refusal(tmp_path)


def test_both_spellings_of_theta_give_the_same_logits(tmp_path: Path) -> None:
    top = {"rope_parameters": None, "rope_theta": 10000.0}
    rewrite(DSA, tmp_path, dict, config=top)
    assert (logits(tmp_path) == logits(DSA)).all()
    rewrite(DSA, tmp_path, dict, config={"rope_parameters": None, "rope_theta": 500000.0})
    assert np.abs(logits(tmp_path) - logits(DSA)).max() > 1e-3


def test_without_indexer_tensors_long_contexts_are_warned_of(tmp_path: Path) -> None:
    def drop(tensors: Tensors) -> Tensors:
        return {name: array for name, array in tensors.items() if "layers.2.self_attn.indexer.wk" not in name}

    rewrite(DSA, tmp_path, drop)
    with Container.open(tmp_path) as container:
        quiet, loud = Notices(), Notices()
        open_model(container, context=8, notices=quiet)
        model, index = open_model(container, context=9, notices=loud)
        with pytest.raises(UnsupportedConfig, match=r"index_topk.*--strict"):
            open_model(container, context=9, notices=Notices(strict=True))
    assert quiet.messages == []
    assert len(loud.messages) == 1
    assert "model.layers.2.self_attn.indexer.wk.weight" in loud.messages[0]
    assert not any(plane.name == "index_key" for plane in model.planes())
    assert len(index.unused) == 4 * 5 - 1


def test_group_size_guesses_are_one_notice_per_shape() -> None:
    with Container.open(INT4) as container:
        guessed, told = Notices(), Notices()
        open_model(container, notices=guessed)
        _, index = open_model(container, notices=told, group_size=64)
    assert told.messages == []
    assert len(guessed.messages) == 4
    assert all("64" in message and "96" in message for message in guessed.messages)
    assert index.experts[3][0].gate.group_size == 64


def test_stamps_are_witnesses_for_resident_tensors_only(tmp_path: Path) -> None:
    resident, routed = "model.layers.0.self_attn.o_proj.weight", "model.layers.3.mlp.experts.0.up_proj.weight"
    rewrite(INT4, tmp_path, dict, metadata={"colibri.fmt": json.dumps({resident: "int8-row"})})
    assert f"{resident}: stamped int8-row, but read as int4-grouped" in refusal(tmp_path)
    rewrite(INT4, tmp_path, dict, metadata={"colibri.fmt": json.dumps({routed: "int8-row"})})
    assert (logits(tmp_path) == logits(INT4)).all()


def test_format_rules_are_believed_and_checked(tmp_path: Path) -> None:
    def rules(group_size: int) -> dict[str, str]:
        entry = {"pattern": "*.experts.*_proj.weight", "format": "int4-grouped", "group_size": group_size}
        return {"picaflor.formats": json.dumps({"version": 1, "rules": [entry]})}

    rewrite(INT4, tmp_path, dict, metadata=rules(96))
    with Container.open(tmp_path) as container:
        _, index = open_model(container)
    assert index.experts[3][0].gate.group_size == 96
    assert index.matrices["model.layers.3.mlp.shared_experts.gate_proj.weight"].group_size == 64
    rewrite(INT4, tmp_path, dict, metadata=rules(32))
    assert "model.layers.3.mlp.experts.0.gate_proj.weight" in refusal(tmp_path)


def test_config_that_is_missing_names_what_is_needed(tmp_path: Path) -> None:
    rewrite(QWEN, tmp_path, dict)
    (tmp_path / "config.json").unlink()
    assert "the model's family is unknown until config.json is there" in refusal(tmp_path)


def test_unknown_families_list_the_known_ones(tmp_path: Path) -> None:
    rewrite(QWEN, tmp_path, dict, config={"model_type": "../x"})
    assert 'model_type is "../x"; accepted: glm_moe_dsa, qwen3_moe' in refusal(tmp_path)
    rewrite(QWEN, tmp_path, dict, config={"model_type": None})
    assert "model_type is missing" in refusal(tmp_path)
    assert "model_type" not in json.loads((tmp_path / "config.json").read_text())
