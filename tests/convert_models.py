"""Tiny checkpoints with random weights for the conversion tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from picaflor.container.writer import ContainerWriter
from picaflor.formats import bf16
from picaflor.formats.base import F32

HIDDEN = 256
INNER = 256
EXPERTS = 3
LAYERS = 2

GLM: dict[str, Any] = {
    "model_type": "glm_moe_dsa",
    "vocab_size": 96,
    "hidden_size": HIDDEN,
    "intermediate_size": 320,
    "moe_intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "n_shared_experts": 1,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
    "q_lora_rank": 64,
    "kv_lora_rank": 96,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8,
    "v_head_dim": 40,
    "index_topk": 16,
    "index_n_heads": 2,
    "index_head_dim": 32,
    "max_position_embeddings": 64,
    "num_nextn_predict_layers": 1,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "tie_word_embeddings": False,
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3"},
}
QWEN: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "rope_theta": 10000.0,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


def _block(prefix: str) -> dict[str, tuple[int, ...]]:
    """Norms, attention and indexer of one GLM layer."""
    attention = f"{prefix}self_attn."
    return {
        f"{prefix}input_layernorm.weight": (HIDDEN,),
        f"{prefix}post_attention_layernorm.weight": (HIDDEN,),
        f"{attention}q_a_proj.weight": (64, HIDDEN),
        f"{attention}q_a_layernorm.weight": (64,),
        f"{attention}q_b_proj.weight": (2 * 32, 64),
        f"{attention}kv_a_proj_with_mqa.weight": (96 + 8, HIDDEN),
        f"{attention}kv_a_layernorm.weight": (96,),
        f"{attention}kv_b_proj.weight": (2 * (24 + 40), 96),
        f"{attention}o_proj.weight": (HIDDEN, 2 * 40),
        f"{attention}indexer.wq_b.weight": (2 * 32, 64),
        f"{attention}indexer.wk.weight": (32, HIDDEN),
        f"{attention}indexer.weights_proj.weight": (2, HIDDEN),
        f"{attention}indexer.k_norm.weight": (32,),
        f"{attention}indexer.k_norm.bias": (32,),
    }


def _mlp(prefix: str, hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}gate_proj.weight": (inner, hidden),
        f"{prefix}up_proj.weight": (inner, hidden),
        f"{prefix}down_proj.weight": (hidden, inner),
    }


def _moe(prefix: str) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        f"{prefix}mlp.gate.weight": (EXPERTS, HIDDEN),
        f"{prefix}mlp.gate.e_score_correction_bias": (EXPERTS,),
        **_mlp(f"{prefix}mlp.shared_experts.", HIDDEN, INNER),
    }
    for expert in range(EXPERTS):
        shapes |= _mlp(f"{prefix}mlp.experts.{expert}.", HIDDEN, INNER)
    return shapes


def glm_shapes() -> dict[str, tuple[int, ...]]:
    """Every tensor of the tiny GLM: a dense layer, a MoE layer, a draft layer with its unused indexer."""
    draft = f"model.layers.{LAYERS}."
    return {
        "model.embed_tokens.weight": (96, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (96, HIDDEN),
        **_block("model.layers.0."),
        **_mlp("model.layers.0.mlp.", HIDDEN, 320),
        **_block("model.layers.1."),
        **_moe("model.layers.1."),
        **_block(draft),
        **_moe(draft),
        f"{draft}eh_proj.weight": (HIDDEN, 2 * HIDDEN),
        f"{draft}enorm.weight": (HIDDEN,),
        f"{draft}hnorm.weight": (HIDDEN,),
        f"{draft}shared_head.norm.weight": (HIDDEN,),
    }


def qwen_shapes() -> dict[str, tuple[int, ...]]:
    """Every tensor of the tiny Qwen3-MoE; the head is the embedding."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (96, 64), "model.norm.weight": (64,)}
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        attention = f"{prefix}self_attn."
        shapes |= {
            f"{prefix}input_layernorm.weight": (64,),
            f"{prefix}post_attention_layernorm.weight": (64,),
            f"{attention}q_proj.weight": (64, 64),
            f"{attention}k_proj.weight": (32, 64),
            f"{attention}v_proj.weight": (32, 64),
            f"{attention}o_proj.weight": (64, 64),
            f"{attention}q_norm.weight": (32,),
            f"{attention}k_norm.weight": (32,),
            f"{prefix}mlp.gate.weight": (EXPERTS, 64),
        }
        for expert in range(EXPERTS):
            shapes |= _mlp(f"{prefix}mlp.experts.{expert}.", 64, 32)
    return shapes


def random_weights(shapes: dict[str, tuple[int, ...]], seed: int = 7) -> dict[str, F32]:
    """Values that bf16 holds exactly, of another size in every tensor and every row."""
    rng = np.random.default_rng(seed)
    weights = {}
    for name, shape in shapes.items():
        values = (
            rng.standard_normal(shape)
            * rng.uniform(0.01, 2)
            * np.exp(rng.standard_normal(shape[0]))[(slice(None), *[None] * (len(shape) - 1))]
        )
        flat = values.astype(np.float32).reshape(1, -1)
        weights[name] = bf16.decode(bf16.encode(flat), *flat.shape, 0).reshape(shape)
    return weights


def write_checkpoint(path: Path, config: dict[str, Any], weights: dict[str, F32]) -> Path:
    """A bf16 checkpoint in two or more shards; vectors named *bias in float32."""
    writer = ContainerWriter(path, max_shard_bytes=1_000_000)
    for name, values in weights.items():
        if name.endswith("bias"):
            writer.add(name, "F32", values.shape, values)
        else:
            writer.add(name, "BF16", values.shape, bf16.encode(values.reshape(1, -1))[0])
    writer.write()
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (path / "tokenizer.json").write_text('{"a": 1}', encoding="utf-8")
    (path / "chat_template.jinja").write_text("{{ x }}", encoding="utf-8")
    return path
