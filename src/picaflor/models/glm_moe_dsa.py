"""The GLM-5 / GLM-5.2 family: MLA, sparse attention by an indexer, sigmoid router, shared expert, draft head.

Knows this family's config and tensor names; must not know files, formats or devices. The forward pass is glm.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from picaflor.backends.api import RouterSpec
from picaflor.models.base import Layer, Model, Present, missing
from picaflor.models.blocks.indexer import Indexer
from picaflor.models.blocks.mla import LatentAttention
from picaflor.models.blocks.mlp import MLP
from picaflor.models.blocks.moe import MoE
from picaflor.models.blocks.mtp import MTPHead
from picaflor.models.config import INERT, Config, check_stored_form, rope_theta

LATENT_NORM_EPS = 1e-6
INDEXER_TENSORS = ("wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias", "weights_proj.weight")


@dataclass(frozen=True, slots=True)
class GlmConfig:
    """The fields that shape the computation, checked. `sparse_mlp[i]`: layer i is MoE. `full[i]`: it has an indexer."""

    hidden: int
    layers: int
    vocabulary: int
    max_positions: int
    dense_inner: int
    expert_inner: int
    shared_experts: int
    heads: int
    q_rank: int
    kv_rank: int
    nope: int
    rope: int
    value: int
    theta: float
    eps: float
    latent_eps: float
    router: RouterSpec
    sparse_mlp: tuple[bool, ...]
    full: tuple[bool, ...]
    index_heads: int
    index_dim: int
    index_topk: int
    drafts: int
    tied: bool


def build(config: Config, present: Present, *, context: int | None) -> Model:
    """The model for a config and its tensors. Raises UnsupportedConfig."""
    parsed = parse(config)
    sparse, unused = _selection(config, parsed, present, context)
    model = Model(
        family="glm_moe_dsa",
        hidden=parsed.hidden,
        vocabulary=parsed.vocabulary,
        max_positions=parsed.max_positions,
        eps=parsed.eps,
        layers=tuple(_layer(parsed, index, sparse=sparse) for index in range(parsed.layers)),
        tied=parsed.tied,
        ignored=(*unused, rf"model\.layers\.{parsed.layers}\.(self_attn\.indexer|embed_tokens|shared_head\.head)\..*"),
    )
    return _with_draft(config, parsed, model, present)


def parse(config: Config) -> GlmConfig:
    """Read and check every field. Raises UnsupportedConfig naming the first that is wrong."""
    _expect_known(config)
    layers = config.integer("num_hidden_layers", high=1024)
    config.expect("layer_types", ["indexed_attention"] * layers, None)
    heads = config.integer("num_attention_heads", high=1024)
    nope = config.integer("qk_nope_head_dim", high=4096)
    rope = config.integer("qk_rope_head_dim", low=2, high=4096)
    if rope % 2:
        raise config.refuse("qk_rope_head_dim", "an even integer")
    config.expect("qk_head_dim", nope + rope)
    config.expect("head_dim", rope, nope + rope)
    config.expect("num_key_value_heads", heads)
    parsed = GlmConfig(
        hidden=config.integer("hidden_size", high=1 << 20),
        layers=layers,
        vocabulary=config.integer("vocab_size", high=1 << 24),
        max_positions=config.integer("max_position_embeddings"),
        dense_inner=config.integer("intermediate_size", high=1 << 20),
        expert_inner=config.integer("moe_intermediate_size", high=1 << 20),
        shared_experts=config.integer("n_shared_experts", low=0, high=64),
        heads=heads,
        q_rank=config.integer("q_lora_rank", high=1 << 16),
        kv_rank=config.integer("kv_lora_rank", high=1 << 16),
        nope=nope,
        rope=rope,
        value=config.integer("v_head_dim", high=4096),
        theta=rope_theta(config),
        eps=config.number("rms_norm_eps", default=1e-5, low=0.0, high=1e-2),
        latent_eps=config.number("latent_norm_eps", default=LATENT_NORM_EPS, low=0.0, high=1e-2),
        router=_router(config),
        sparse_mlp=_sparse_mlp(config, layers),
        full=_full_layers(config, layers),
        index_heads=config.integer("index_n_heads", low=0, default=0, high=1024),
        index_dim=config.integer("index_head_dim", low=0, default=0, high=256),
        index_topk=config.integer("index_topk", low=0, default=0),
        drafts=config.integer("num_nextn_predict_layers", low=0, default=1, high=8),
        tied=config.flag("tie_word_embeddings", default=False),
    )
    if 0 < parsed.index_dim < rope:
        raise config.refuse("index_head_dim", f"0, or qk_rope_head_dim ({rope}) to 256")
    config.finish()
    return parsed


def _expect_known(config: Config) -> None:
    config.ignore(*INERT, "ep_size", "output_router_logits", "index_share_for_mtp_iteration", "moe_router_dtype")
    config.ignore("is_encoder_decoder", "router_aux_loss_coef", "aux_loss_alpha", "seq_aux")
    check_stored_form(config)
    config.expect("hidden_act", "silu")
    config.expect("attention_bias", False)
    config.expect("mlp_bias", False)
    config.expect("scoring_func", "sigmoid")
    config.expect("topk_method", "noaux_tc")
    config.expect("moe_layer_freq", 1)
    config.expect("rope_interleave", True)
    config.expect("indexer_rope_interleave", True)
    config.expect("sliding_window", None)


def _router(config: Config) -> RouterSpec:
    experts = config.integer(config.spelling("n_routed_experts", "num_local_experts", "num_experts"), high=65536)
    groups = config.integer("n_group", default=1, high=experts)
    if experts % groups or (groups > 1 and experts // groups < 2):
        raise config.refuse("n_group", f"a divisor of n_routed_experts ({experts}) that leaves 2 or more in a group")
    top_groups = config.integer("topk_group", default=1, high=groups)
    return RouterSpec(
        score="sigmoid",
        experts=experts,
        top_k=config.integer("num_experts_per_tok", high=min(64, top_groups * (experts // groups))),
        normalise=config.flag("norm_topk_prob", default=False),
        scale=config.number("routed_scaling_factor", default=1.0, low=0.0, high=1e4),
        groups=groups,
        top_groups=top_groups,
    )


def _sparse_mlp(config: Config, layers: int) -> tuple[bool, ...]:
    """Which layers are MoE: `first_k_dense_replace`, `mlp_layer_types`, or both where they agree."""
    listed = None
    if config.has("mlp_layer_types"):
        words = config.words("mlp_layer_types", length=layers, choices=("dense", "sparse"))
        listed = tuple(word == "sparse" for word in words)
        if not config.has("first_k_dense_replace"):
            return listed
    dense = config.integer("first_k_dense_replace", low=0, high=layers)
    counted = tuple(index >= dense for index in range(layers))
    if listed not in (None, counted):
        raise config.refuse("mlp_layer_types", f"a list that agrees with first_k_dense_replace ({dense})")
    return counted


def _full_layers(config: Config, layers: int) -> tuple[bool, ...]:
    """Which layers make a selection: `indexer_types`, else the pattern, else the rule of frequency and offset."""
    frequency = config.integer("index_topk_freq", default=1)
    offset = config.integer("index_skip_topk_offset", low=0, default=2)
    by_rule = tuple(max(index - offset + 1, 0) % frequency == 0 for index in range(layers))
    name = "indexer_types" if config.has("indexer_types") else "index_topk_pattern"
    config.ignore("index_topk_pattern")
    if not config.has(name):
        return by_rule
    full = tuple(
        word in ("full", "F") for word in config.words(name, length=layers, choices=("full", "shared", "F", "S"))
    )
    if not full[0]:
        raise config.refuse(name, "a list whose first layer is full")
    if config.has("index_topk_freq") and full != by_rule:
        config.notices.note(f"{config.where}: {name} is used; index_topk_freq and its offset say otherwise")
    return full


def _selection(
    config: Config, parsed: GlmConfig, present: Present, context: int | None
) -> tuple[bool, tuple[str, ...]]:
    """(sparse attention is active, patterns of indexer tensors that are then not read)."""
    prefixes = [f"model.layers.{index}.self_attn.indexer." for index, full in enumerate(parsed.full) if full]
    absent = [prefix + name for prefix in prefixes for name in INDEXER_TENSORS if not present(prefix + name)]
    if not absent and parsed.index_topk and parsed.index_heads and parsed.index_dim:
        return True, ()
    longest = parsed.max_positions if context is None else min(context, parsed.max_positions)
    if longest > parsed.index_topk:
        cause = f"{len(absent)} indexer tensors are missing, the first is {absent[0]}" if absent else "index_* are 0"
        config.notices.note(
            f"sparse attention is off ({cause}): beyond {parsed.index_topk} tokens (index_topk) dense attention is "
            f"another function than the model's"
        )
    return False, (r"model\.layers\.\d+\.self_attn\.indexer\..*",)


def _layer(parsed: GlmConfig, index: int, *, sparse: bool) -> Layer:
    prefix = f"model.layers.{index}."
    attention = _attention(parsed, index, prefix, sparse=sparse)
    is_moe = index >= parsed.layers or parsed.sparse_mlp[index]
    mlp = _moe(parsed, index, prefix) if is_moe else MLP(f"{prefix}mlp.", parsed.hidden, parsed.dense_inner)
    return Layer(prefix, parsed.hidden, parsed.eps, attention, mlp)


def _attention(parsed: GlmConfig, index: int, prefix: str, *, sparse: bool) -> LatentAttention:
    attention = LatentAttention(
        prefix=f"{prefix}self_attn.",
        layer=index,
        hidden=parsed.hidden,
        heads=parsed.heads,
        q_rank=parsed.q_rank,
        kv_rank=parsed.kv_rank,
        nope=parsed.nope,
        rope=parsed.rope,
        value=parsed.value,
        theta=parsed.theta,
        latent_eps=parsed.latent_eps,
        sparse=sparse,
    )
    if not sparse or not parsed.full[index]:
        return attention
    sizes = (parsed.hidden, parsed.q_rank, parsed.index_heads, parsed.index_dim, parsed.index_topk, parsed.rope)
    return replace(attention, indexer=Indexer(f"{prefix}self_attn.indexer.", index, *sizes, parsed.theta))


def _moe(parsed: GlmConfig, index: int, prefix: str) -> MoE:
    inner = parsed.expert_inner * parsed.shared_experts
    shared = MLP(f"{prefix}mlp.shared_experts.", parsed.hidden, inner, "shared") if inner else None
    return MoE(f"{prefix}mlp.", index, parsed.hidden, parsed.expert_inner, parsed.router, bias=True, shared=shared)


def _with_draft(config: Config, parsed: GlmConfig, model: Model, present: Present) -> Model:
    """Add the draft head where all of its tensors are there; a part of it is a notice and is not used."""
    head = MTPHead(_layer(parsed, parsed.layers, sparse=False))
    absent = missing(head.parts(), present)
    if not absent and parsed.drafts:
        return replace(model, draft=head)
    if present(f"{head.layer.prefix}eh_proj.weight"):
        cause = f"{len(absent)} tensors are missing, the first is {absent[0]}" if absent else "the config asks for none"
        config.notices.note(f"the draft head is not used: {cause}")
    return replace(model, ignored=(*model.ignored, rf"model\.layers\.{parsed.layers}\..*"))
