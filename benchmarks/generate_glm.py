"""Writes glm-mid, glm-big and glm-wide: synthetic GLM containers with random weights, for measuring speed only.

The bytes are made directly (random codes, scales that keep activations near 1), never through a float matrix. The same
name and seed give the same bytes, with any number of `--workers`. No tokenizer: these models are benchmarked with token
ids. glm-wide has layers of GLM-5.2's sizes (24 GB: 16 of them, with 72 experts each).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import zlib
from collections.abc import Container
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from picaflor.container.writer import DEFAULT_SHARD_BYTES, ContainerWriter
from picaflor.convert.plan import Plan, PlannedExpert, PlannedMatrix, PlannedVector, make_plan, rules_json
from picaflor.convert.policy import Policy
from picaflor.errors import PicaflorError
from picaflor.formats.base import F32
from picaflor.models.base import VectorSpec, build_model

MODELS = {
    "glm-mid": {"num_hidden_layers": 12, "n_routed_experts": 64},
    "glm-big": {"num_hidden_layers": 24, "n_routed_experts": 128},
    "glm-wide": {
        "num_hidden_layers": 16,
        "n_routed_experts": 72,
        "hidden_size": 6144,
        "intermediate_size": 12288,
        "moe_intermediate_size": 2048,
        "q_lora_rank": 2048,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "v_head_dim": 256,
        "num_attention_heads": 64,
        "vocab_size": 32768,
    },
    "glm-nano": {
        "num_hidden_layers": 4,
        "n_routed_experts": 8,
        "hidden_size": 256,
        "intermediate_size": 512,
        "moe_intermediate_size": 128,
        "q_lora_rank": 128,
        "kv_lora_rank": 128,
        "num_attention_heads": 4,
        "vocab_size": 512,
    },
}
# Root mean square of uniform codes: nibbles 1..15 with 8 twice, and bytes -127..127.
NIBBLE_RMS = 4.1833
BYTE_RMS = 73.612
LEAST_SHARD_BYTES = 250_000_000
# Gain of the matrices that are not 1: logits spread enough to have a clear winner, and routes that differ.
GAINS = {"head": 3.0, "router": 1.5}
USUAL = Policy()


def config(name: str) -> dict[str, Any]:
    """config.json of a model. Positions equal `index_topk`, so that attention is dense and needs no indexer."""
    values: dict[str, Any] = {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "dtype": "bfloat16",
        "vocab_size": 8192,
        "hidden_size": 2048,
        "intermediate_size": 4096,
        "moe_intermediate_size": 768,
        "num_attention_heads": 16,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 2,
        "q_lora_rank": 768,
        "kv_lora_rank": 256,
        "qk_nope_head_dim": 96,
        "qk_rope_head_dim": 32,
        "v_head_dim": 128,
        "index_topk": 8192,
        "index_n_heads": 16,
        "index_head_dim": 64,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-05,
        "latent_norm_eps": 1e-06,
        "num_nextn_predict_layers": 0,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "hidden_act": "silu",
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "eos_token_id": [0],
    }
    values |= MODELS[name]
    values["num_key_value_heads"] = values["num_attention_heads"]
    return values


class _Wanted(Container[str]):
    """Stands for a checkpoint that has every tensor but the indexers' and the draft layer's."""

    def __init__(self, layers: int) -> None:
        self._draft = f"model.layers.{layers}."

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and ".indexer." not in name and not name.startswith(self._draft)


class RandomWeights:
    """Makes planes: each tensor's bytes depend on the seed and its name only."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        nibbles = np.arange(16, dtype=np.uint8)
        nibbles[0] = 8  # codes -7..7, with zero twice: no mean
        self._bytes = (nibbles[:, None] << 4 | nibbles[None, :]).reshape(256)

    def matrix(self, planned: PlannedMatrix) -> tuple[NDArray[Any], ...]:
        """Planes whose decoded values have a root mean square of gain / sqrt(cols)."""
        spec, form = planned.spec, planned.form
        rng = np.random.Generator(np.random.SFC64([self._seed, zlib.crc32(spec.name.encode())]))
        rms = GAINS.get(spec.kind, 1.0) / np.sqrt(1 if spec.kind == "embedding" else spec.cols)
        sizes = [plane.nbytes(spec.rows, spec.cols, planned.choice.group_size) for plane in form.planes]
        match form.name:
            case "int4-grouped" | "int4-row":
                raw = np.frombuffer(rng.bytes(sizes[0]), np.uint8)
                return (self._bytes[raw], _scales(rng, rms / NIBBLE_RMS, sizes[1] // 4))
            case "int8-row":
                codes = rng.integers(-127, 128, sizes[0], dtype=np.int8)
                return (codes, _scales(rng, rms / BYTE_RMS, sizes[1] // 4))
            case "f32":
                values = rng.standard_normal(sizes[0] // 4, dtype=np.float32) * np.float32(rms)
                return (values,)
        raise PicaflorError(f"{spec.name}: format {form.name} is not made here; int4, int8-row and f32 are")

    def vector(self, spec: VectorSpec) -> F32:
        """Norm weights near 1, the router's bias near 0."""
        rng = np.random.Generator(np.random.SFC64([self._seed, zlib.crc32(spec.name.encode())]))
        noise = rng.standard_normal(spec.length, dtype=np.float32)
        small = spec.name.endswith("bias")
        return noise * np.float32(0.01) if small else np.float32(1) + noise * np.float32(0.05)


def _scales(rng: np.random.Generator, middle: float, count: int) -> F32:
    return (np.float32(middle) * (np.float32(0.75) + rng.random(count, dtype=np.float32) / 2)).astype(np.float32)


def touched(plan: Plan, experts_per_token: int) -> dict[str, int]:
    """Bytes that one decoded token needs, by class: all residents, one row of the embedding, the chosen experts."""
    counts: dict[str, int] = {}
    by_layer: dict[int, list[int]] = {}
    for item in plan.items:
        match item:
            case PlannedExpert():
                by_layer.setdefault(item.spec.layer, []).append(sum(matrix.nbytes for matrix in item.matrices))
            case PlannedVector():
                counts[item.group] = counts.get(item.group, 0) + 4 * item.spec.length
            case PlannedMatrix():
                rows = item.spec.rows if item.spec.kind == "embedding" else 1
                counts[item.group] = counts.get(item.group, 0) + item.nbytes // rows
    counts["routed experts"] = sum(experts_per_token * sizes[0] for sizes in by_layer.values())
    return counts


def _planned(values: dict[str, Any], policy: Policy) -> Plan:
    return make_plan(build_model(values, _Wanted(values["num_hidden_layers"])), policy)


def write_share(name: str, out: Path, seed: int, share: tuple[int, int], policy: Policy) -> None:
    """Write every n-th shard from the i-th on, `share` being (i, n)."""
    plan = _planned(config(name), policy)
    writer = ContainerWriter(
        out,
        rules_json=rules_json(plan),
        metadata={"picaflor.generator": f"{name} seed {seed}"},
        max_shard_bytes=max(DEFAULT_SHARD_BYTES // share[1], LEAST_SHARD_BYTES),
    )
    weights = RandomWeights(seed)
    plan.declare(writer, matrix=weights.matrix, vector=weights.vector)
    writer.write(resume=True, progress=_Progress() if share[1] == 1 else None, share=share)


def generate(name: str, out: Path, *, seed: int, workers: int = 1, policy: Policy = USUAL) -> dict[str, Any]:
    """Write the model to `out` and return its figures. Shards that are complete from an earlier try stay.

    More workers write smaller shards, of the same tensors.
    """
    values = config(name)
    plan = _planned(values, policy)
    if workers == 1:
        write_share(name, out, seed, (0, 1), policy)
    else:
        with multiprocessing.get_context("spawn").Pool(workers) as pool:
            pool.starmap(write_share, [(name, out, seed, (number, workers), policy) for number in range(workers)])
    (out / "config.json").write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    classes = touched(plan, values["num_experts_per_tok"])
    experts = [item for item in plan.items if isinstance(item, PlannedExpert)]
    return {
        "model": name,
        "seed": seed,
        "bytes": plan.nbytes,
        "expert_bytes": sum(matrix.nbytes for matrix in experts[0].matrices),
        "experts": len(experts),
        "bytes_per_token": sum(classes.values()),
        "bytes_per_token_by_class": classes,
    }


class _Progress:
    """One line on stderr per tenth of the file."""

    def __init__(self) -> None:
        self._shown = -1

    def __call__(self, done: int, total: int) -> None:
        tenth = 10 * done // max(total, 1)
        if tenth != self._shown:
            self._shown = tenth
            print(f"{done / 1e9:.2f} of {total / 1e9:.2f} GB", file=sys.stderr, flush=True)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="Write a synthetic GLM container for speed measurements.")
    parser.add_argument("model", choices=list(MODELS))
    parser.add_argument("--out", type=Path, required=True, help="directory to write; must not hold another model")
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--workers", type=int, default=1, help="processes that write, each its own shards")
    options = parser.parse_args()
    try:
        print(json.dumps(generate(options.model, options.out, seed=options.seed, workers=options.workers), indent=1))
    except PicaflorError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
