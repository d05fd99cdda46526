"""Config values: read with a range, refused by name, reported when unknown; for both families.

Must not know files or devices.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from picaflor.errors import UnsupportedConfig
from picaflor.models.base import Model, PlaneSpec, build_model, families, missing
from picaflor.models.config import Config, Notices, rope_theta

DATA = Path(__file__).parent.parent / "data" / "families"
GLM: dict[str, Any] = json.loads((DATA / "tiny_glm_dsa_f32" / "config.json").read_text())
QWEN: dict[str, Any] = json.loads((DATA / "qwen3_moe_tiny" / "config.json").read_text())


STACKS = r"\.experts\.(gate_up|down)_proj"


class Everything:
    """A container that has every tensor but those whose name matches."""

    def __init__(self, absent: str = "$^") -> None:
        self._absent = re.compile(absent)

    def __contains__(self, name: object) -> bool:
        return self._absent.search(str(name)) is None


NO_DRAFT = Everything(r"layers\.4\.|" + STACKS)


def build(values: dict[str, Any], tensors: Any = NO_DRAFT, **options: Any) -> Model:
    """A model without a draft head."""
    return build_model(values, tensors, **options)


def changed(base: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A config with other values; `...` takes a field out."""
    return {name: value for name, value in {**base, **fields}.items() if value is not ...}


def test_families_are_found_by_file_name() -> None:
    assert families() == ["glm_moe_dsa", "qwen3_moe"]


def test_configs_are_known_to_the_last_key() -> None:
    for values in (GLM, QWEN):
        notices = Notices(strict=True)
        build(values, notices=notices)
        assert notices.messages == []


def test_unknown_keys_are_one_notice_and_an_error_under_strict() -> None:
    for base in (GLM, QWEN):
        values = changed(base, final_logit_softcapping=30.0, a_new_key=1)
        seen: list[str] = []
        build(values, notices=Notices(warn=seen.append))
        assert seen == ["config.json: unknown keys are not used: a_new_key, final_logit_softcapping"]
        with pytest.raises(UnsupportedConfig, match=r"a_new_key, final_logit_softcapping .*--strict"):
            build(values, notices=Notices(strict=True))


GLM_FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"hidden_size": ...}, "hidden_size is missing; accepted: an integer from 1 to 1048576"),
    ({"hidden_size": "128"}, 'hidden_size is "128"; accepted: an integer from 1'),
    ({"hidden_size": 128.0}, "hidden_size is 128.0; accepted: an integer"),
    ({"num_hidden_layers": True}, "num_hidden_layers is true; accepted: an integer from 1 to 1024"),
    ({"num_hidden_layers": 0}, "num_hidden_layers is 0;"),
    ({"vocab_size": -1}, "vocab_size is -1;"),
    ({"vocab_size": 2**40}, "vocab_size is 1099511627776;"),
    ({"qk_rope_head_dim": 7}, "qk_rope_head_dim is 7; accepted: an even integer"),
    ({"qk_rope_head_dim": 24, "qk_head_dim": 48, "head_dim": 24}, "index_head_dim is 16; accepted: 0, or qk_rope_"),
    ({"qk_rope_head_dim": 40}, "qk_head_dim is 32; accepted: 64"),
    ({"head_dim": 64}, "head_dim is 64; accepted: 8 or 32"),
    ({"num_key_value_heads": 2}, "num_key_value_heads is 2; accepted: 4"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps is NaN; accepted: a number from 0 to 0.01"),
    ({"latent_norm_eps": -1e-6}, "latent_norm_eps is -1e-06; accepted"),
    ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9; accepted: an integer from 1 to 8"),
    ({"n_group": 3}, "n_group is 3; accepted: a divisor of n_routed_experts (8)"),
    ({"n_group": 8}, "n_group is 8; accepted: a divisor"),
    ({"topk_group": 2}, "topk_group is 2; accepted: an integer from 1 to 1"),
    ({"num_local_experts": 16}, "num_local_experts is 16; accepted: the same value as n_routed_experts (8)"),
    ({"hidden_act": "gelu"}, 'hidden_act is "gelu"; accepted: "silu"'),
    ({"attention_bias": True}, "attention_bias is true; accepted: false"),
    ({"mlp_bias": True}, "mlp_bias is true; accepted: false"),
    ({"scoring_func": "softmax"}, 'scoring_func is "softmax"; accepted: "sigmoid"'),
    ({"topk_method": "greedy"}, 'topk_method is "greedy"; accepted: "noaux_tc"'),
    ({"moe_layer_freq": 2}, "moe_layer_freq is 2; accepted: 1"),
    ({"rope_interleave": False}, "rope_interleave is false; accepted: true"),
    ({"indexer_rope_interleave": False}, "indexer_rope_interleave is false; accepted: true"),
    ({"norm_topk_prob": 1}, "norm_topk_prob is 1; accepted: true or false"),
    ({"layer_types": ["full_attention"] * 4}, "layer_types is"),
    ({"mlp_layer_types": ["dense"] * 4}, "agrees with first_k_dense_replace (1)"),
    ({"mlp_layer_types": ["dense", "moe", "moe", "moe"]}, "a list of 4 of dense, sparse"),
    ({"mlp_layer_types": ..., "first_k_dense_replace": ...}, "first_k_dense_replace is missing"),
    ({"indexer_types": ["full"] * 3}, "indexer_types is"),
    ({"indexer_types": ["shared", "full", "full", "full"]}, "accepted: a list whose first layer is full"),
    ({"q_lora_rank": None}, "q_lora_rank is null; accepted: an integer"),
    ({"quantization_config": {"quant_method": "gptq"}}, 'quant_method is "gptq"; accepted: "fp8" or "mxfp4"'),
    ({"quantization_config": {}}, "quant_method is missing; accepted: fp8 or mxfp4"),
    ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}}, "weight_block_size is [64, 64]"),
    ({"tie_word_embeddings": "no"}, 'tie_word_embeddings is "no"; accepted: true or false'),
]


@pytest.mark.parametrize(("fields", "message"), GLM_FAULTS, ids=[text[:40] for _, text in GLM_FAULTS])
def test_glm_refuses_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedConfig, match=re.escape(message)) as caught:
        build(changed(GLM, **fields))
    assert str(caught.value).startswith("config.json: ")
    assert "\n" not in str(caught.value)


QWEN_FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"attention_bias": True}, "attention_bias is true; accepted: false"),
    ({"use_sliding_window": True}, "use_sliding_window is true; accepted: false"),
    ({"num_key_value_heads": 3}, "num_key_value_heads is 3; accepted: a divisor of num_attention_heads (4)"),
    ({"head_dim": 23}, "head_dim is 23; accepted: an even integer"),
    ({"mlp_only_layers": [3]}, "mlp_only_layers is [3]; accepted: a list of integers from 0 to 2"),
    ({"decoder_sparse_step": 0}, "decoder_sparse_step is 0; accepted: an integer from 1"),
    ({"num_local_experts": ...}, "num_experts is missing; accepted: an integer from 1 to 65536"),
    ({"num_experts": 4}, "num_local_experts is 8; accepted: the same value as num_experts (4)"),
    ({"layer_types": ["sliding_attention"] * 3}, "layer_types is"),
]


@pytest.mark.parametrize(("fields", "message"), QWEN_FAULTS, ids=[text[:40] for _, text in QWEN_FAULTS])
def test_qwen3_moe_refuses_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedConfig, match=re.escape(message)):
        build(changed(QWEN, **fields))


@pytest.mark.parametrize(
    ("values", "theta"),
    [
        ({"rope_theta": 5e5}, 5e5),
        ({"rope_parameters": {"rope_theta": 8000000, "rope_type": "default"}}, 8e6),
        ({"rope_parameters": {"rope_theta": 1e4}, "rope_theta": 10000}, 1e4),
        ({"rope_theta": 1e4, "rope_scaling": None}, 1e4),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "default"}}, 1e4),
    ],
)
def test_theta_in_every_spelling(values: dict[str, Any], theta: float) -> None:
    assert rope_theta(Config(values)) == theta


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "rope_theta is missing; accepted: rope_parameters.rope_theta or a top-level rope_theta"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_theta is missing"),
        (
            {"rope_parameters": {"rope_theta": 1e6}, "rope_theta": 1e4},
            "rope_theta is 10000, rope_parameters.rope_theta is 1e+06; accepted: one value, or the same one",
        ),
        (
            {"rope_theta": 1e4, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            'config.json: rope_scaling: rope_type is "yarn"; accepted: "default"',
        ),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2}}, 'type is "linear"; accepted: "default"'),
        ({"rope_theta": 1e4, "rope_scaling": {"factor": 2}}, "factor is 2; accepted: 1 or 1.0"),
        ({"rope_parameters": [1]}, "rope_parameters is [1]; accepted: an object"),
        ({"rope_theta": 0}, "rope_theta is 0; accepted: a number from 1"),
        ({"rope_theta": 1e4, "rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
    ],
)
def test_theta_is_never_guessed(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedConfig, match=re.escape(message)):
        rope_theta(Config(values))


def index_layers(values: dict[str, Any], notices: Notices | None = None) -> list[int]:
    """The layers that have an indexer."""
    planes = build(changed(values, layer_types=...), notices=notices).planes()
    return [plane.layer for plane in planes if plane.name == "index_key"]


def test_indexer_layers_by_every_spelling() -> None:
    bare = changed(GLM, indexer_types=...)
    assert index_layers(bare) == [0, 1, 2, 3]
    assert index_layers(changed(bare, index_topk_freq=2, index_skip_topk_offset=2)) == [0, 1, 3]
    assert index_layers(changed(bare, index_topk_freq=4, index_skip_topk_offset=1)) == [0]
    assert index_layers(changed(bare, index_topk_pattern="FSSF")) == [0, 3]
    types = ["full", "shared", "full", "shared"]
    assert index_layers(changed(bare, indexer_types=types)) == [0, 2]
    notices = Notices()
    assert index_layers(changed(bare, indexer_types=types, index_topk_freq=1), notices) == [0, 2]
    assert notices.messages == ["config.json: indexer_types is used; index_topk_freq and its offset say otherwise"]


def test_glm_52_indexer_rule() -> None:
    rule = {"index_topk_freq": 4, "index_skip_topk_offset": 3}
    big = changed(
        GLM,
        num_hidden_layers=78,
        mlp_layer_types=...,
        layer_types=...,
        indexer_types=...,
        first_k_dense_replace=3,
        **rule,
    )
    planes = build(big, Everything(r"layers\.78\.")).planes()
    assert [plane.layer for plane in planes if plane.name == "index_key"] == [0, 1, *range(2, 78, 4)]


def test_dense_layers_by_either_spelling() -> None:
    def moe_layers(**fields: Any) -> list[int]:
        return sorted({spec.layer for spec in build(changed(GLM, **fields)).experts()})

    assert moe_layers() == [1, 2, 3]
    assert moe_layers(mlp_layer_types=..., first_k_dense_replace=2) == [2, 3]
    assert moe_layers(first_k_dense_replace=..., mlp_layer_types=["sparse", "dense", "sparse", "dense"]) == [0, 2]


def test_qwen_dense_layers() -> None:
    def moe_layers(**fields: Any) -> list[int]:
        return sorted({spec.layer for spec in build(changed(QWEN, **fields)).experts()})

    assert moe_layers() == [0, 2]
    assert moe_layers(mlp_only_layers=[]) == [0, 1, 2]
    assert moe_layers(mlp_only_layers=[], decoder_sparse_step=2) == [1]


def test_planes_are_the_compressed_cache() -> None:
    planes = list(build(GLM).planes())
    assert planes[:3] == [PlaneSpec(0, "latent", 32), PlaneSpec(0, "rope_key", 8), PlaneSpec(0, "index_key", 16)]
    assert sum(plane.width for plane in planes) == 4 * (32 + 8 + 16)


def test_draft_head_is_used_only_when_complete() -> None:
    stacked = STACKS
    complete = build(GLM, Everything(stacked), notices=Notices(strict=True))
    assert complete.draft is not None
    assert len(list(complete.experts())) == 4 * 8
    assert [plane for plane in complete.planes() if plane.layer == 4] == [
        PlaneSpec(4, "latent", 32),
        PlaneSpec(4, "rope_key", 8),
    ]
    assert complete.ignorable("model.layers.4.self_attn.indexer.wk.weight.qs")
    assert complete.ignorable("model.layers.4.embed_tokens.weight")
    assert not complete.ignorable("model.layers.4.self_attn.sinks")
    assert not complete.ignorable("model.layers.3.self_attn.indexer.wk.bias")

    notices = Notices()
    partial = build(GLM, Everything(stacked + r"|layers\.4\.mlp\.experts\.7\.down"), notices=notices)
    assert partial.draft is None
    assert notices.messages == [
        "the draft head is not used: 1 tensors are missing, the first is model.layers.4.mlp.experts.7.down_proj.weight"
    ]
    assert partial.ignorable("model.layers.4.mlp.experts.0.down_proj.weight")
    assert build(changed(GLM, num_nextn_predict_layers=0), Everything(stacked)).draft is None


def test_missing_names_what_no_source_has() -> None:
    model = build(QWEN)
    absent = Everything(r"layers\.2\.mlp\.experts\.(5\.up_proj|gate_up_proj)|layers\.0\.self_attn\.q_norm")
    assert missing(model.parts(), lambda name: name in absent) == [
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.2.mlp.experts.5.up_proj.weight",
    ]


def test_every_spec_of_glm_has_the_documented_shape() -> None:
    specs = {spec.name: (spec.rows, spec.cols) for spec in build(GLM).matrices()}
    base = "model.layers.1."
    assert specs[f"{base}self_attn.q_b_proj.weight"] == (4 * 32, 64)
    assert specs[f"{base}self_attn.kv_a_proj_with_mqa.weight"] == (40, 128)
    assert specs[f"{base}self_attn.kv_b_proj.weight"] == (4 * 56, 32)
    assert specs[f"{base}self_attn.indexer.wq_b.weight"] == (32 * 16, 64)
    assert specs[f"{base}mlp.shared_experts.down_proj.weight"] == (128, 32)
    shared = {spec.name: spec.rows for spec in build(changed(GLM, n_shared_experts=2)).matrices()}
    assert shared[f"{base}mlp.shared_experts.up_proj.weight"] == 64
    assert not any("shared_experts" in spec.name for spec in build(changed(GLM, n_shared_experts=0)).matrices())
