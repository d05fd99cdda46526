"""The Qwen3-MoE family: grouped-query attention with q/k norms, softmax router, no shared expert.

Knows this family's config and tensor names; must not know files, formats or devices.
"""

from __future__ import annotations

from picaflor.backends.api import RouterSpec
from picaflor.models.base import Layer, Model, Present
from picaflor.models.blocks.gqa import GroupedAttention
from picaflor.models.blocks.mlp import MLP
from picaflor.models.blocks.moe import MoE
from picaflor.models.config import INERT, Config, check_stored_form, rope_theta


def build(config: Config, present: Present, *, context: int | None) -> Model:
    """The model for a config. Raises UnsupportedConfig."""
    _expect_known(config)
    count = config.integer("num_hidden_layers", high=1024)
    config.expect("layer_types", ["full_attention"] * count, None)
    hidden = config.integer("hidden_size", high=1 << 20)
    eps = config.number("rms_norm_eps", default=1e-6, low=0.0, high=1e-2)
    sparse = _sparse_layers(config, count)
    attention = _attention(config, hidden, count, eps)
    mlps = _mlps(config, hidden, sparse)
    prefixes = [f"model.layers.{index}." for index in range(count)]
    model = Model(
        family="qwen3_moe",
        hidden=hidden,
        vocabulary=config.integer("vocab_size", high=1 << 24),
        max_positions=config.integer("max_position_embeddings"),
        eps=eps,
        layers=tuple(
            Layer(prefix, hidden, eps, attention[index], mlps[index]) for index, prefix in enumerate(prefixes)
        ),
        tied=config.flag("tie_word_embeddings", default=False),
    )
    config.finish()
    return model


def _expect_known(config: Config) -> None:
    config.ignore(*INERT, "output_router_logits", "router_aux_loss_coef", "max_window_layers", "is_encoder_decoder")
    check_stored_form(config)
    config.expect("hidden_act", "silu")
    config.expect("attention_bias", False)
    if config.has("use_sliding_window") and config.flag("use_sliding_window"):
        raise config.refuse("use_sliding_window", "false")
    config.ignore("sliding_window")


def _sparse_layers(config: Config, count: int) -> tuple[bool, ...]:
    step = config.integer("decoder_sparse_step", default=1)
    dense = config.integers("mlp_only_layers", low=0, high=count - 1)
    return tuple(index not in dense and (index + 1) % step == 0 for index in range(count))


def _attention(config: Config, hidden: int, count: int, eps: float) -> list[GroupedAttention]:
    heads = config.integer("num_attention_heads", high=1024)
    kv_heads = config.integer("num_key_value_heads", default=heads, high=heads)
    if heads % kv_heads:
        raise config.refuse("num_key_value_heads", f"a divisor of num_attention_heads ({heads})")
    head_dim = config.integer("head_dim", default=hidden // heads, low=2, high=4096)
    if head_dim % 2:
        raise config.refuse("head_dim", "an even integer")
    theta = rope_theta(config)
    return [
        GroupedAttention(f"model.layers.{index}.self_attn.", index, hidden, heads, kv_heads, head_dim, theta, eps)
        for index in range(count)
    ]


def _mlps(config: Config, hidden: int, sparse: tuple[bool, ...]) -> list[MLP | MoE]:
    experts = config.integer(config.spelling("num_experts", "num_local_experts"), high=65536)
    router = RouterSpec(
        score="softmax",
        experts=experts,
        top_k=config.integer("num_experts_per_tok", high=min(64, experts)),
        normalise=config.flag("norm_topk_prob", default=False),
        scale=1.0,
    )
    inner = config.integer("moe_intermediate_size", high=1 << 20)
    dense_inner = config.integer("intermediate_size", high=1 << 20)
    blocks: list[MLP | MoE] = []
    for index, is_sparse in enumerate(sparse):
        prefix = f"model.layers.{index}.mlp."
        moe = MoE(prefix, index, hidden, inner, router, bias=False)
        blocks.append(moe if is_sparse else MLP(prefix, hidden, dense_inner))
    return blocks
