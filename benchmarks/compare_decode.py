"""Decoding of glm-mid by Picaflor and of an equally shaped GGUF by llama.cpp: shares of the memory floor, in turns.

Needs `llama-cpp-python`, and `gguf` to write the model (`--write`). Both models have random weights; each side is fed
the same number of fixed tokens, one at a time, after the same prompt, with an empty cache before. Between the repeats
memory is read with plain loads. Must not know how a token is computed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from generate_glm import config
from numpy.typing import NDArray

from picaflor import __version__
from picaflor.runtime.bench import MemoryProbe, fixed_tokens
from picaflor.runtime.engine import Engine, EngineOptions

PROMPT_TOKENS = 16
QUIET_S = 0.1
Q4_0 = (32, 18)  # weights and bytes of a block
Q8_0 = (32, 34)
RMS = {Q4_0: 4.61, Q8_0: 73.9}  # of uniform codes


def blocks(kind: tuple[int, int], rows: int, cols: int, seed: int) -> NDArray[np.uint8]:
    """Random blocks `[rows, bytes of a row]` whose values have a root mean square of 1 / sqrt(cols)."""
    weights, size = kind
    rng = np.random.Generator(np.random.SFC64(seed))
    count = rows * cols // weights
    data = np.frombuffer(rng.bytes(count * size), np.uint8).reshape(count, size).copy()
    scales = (0.75 + rng.random(count) / 2) / (RMS[kind] * cols**0.5)
    data[:, :2] = scales.astype(np.float16)[:, None].view(np.uint8)
    return data.reshape(rows, -1)


def matrices(values: dict[str, Any]) -> Iterator[tuple[str, int, int, int]]:
    """(name, matrices in it, rows, cols) of every matrix of a deepseek2 GGUF in Q4_0."""
    hidden, heads, latent = values["hidden_size"], values["num_attention_heads"], values["kv_lora_rank"]
    nope, rope, value = values["qk_nope_head_dim"], values["qk_rope_head_dim"], values["v_head_dim"]
    rank, dense, inner = values["q_lora_rank"], values["intermediate_size"], values["moe_intermediate_size"]
    experts, shared = values["n_routed_experts"], values["n_shared_experts"] * inner
    for layer in range(values["num_hidden_layers"]):
        yield f"blk.{layer}.attn_q_a.weight", 1, rank, hidden
        yield f"blk.{layer}.attn_q_b.weight", 1, heads * (nope + rope), rank
        yield f"blk.{layer}.attn_kv_a_mqa.weight", 1, latent + rope, hidden
        yield f"blk.{layer}.attn_k_b.weight", heads, latent, nope
        yield f"blk.{layer}.attn_v_b.weight", heads, value, latent
        yield f"blk.{layer}.attn_output.weight", 1, hidden, heads * value
        if layer < values["first_k_dense_replace"]:
            parts = [("", 1, dense)]
        else:
            parts = [("_exps", experts, inner), ("_shexp", 1, shared)]
        for suffix, count, width in parts:
            yield f"blk.{layer}.ffn_gate{suffix}.weight", count, width, hidden
            yield f"blk.{layer}.ffn_up{suffix}.weight", count, width, hidden
            yield f"blk.{layer}.ffn_down{suffix}.weight", count, hidden, width


def write(path: Path, name: str) -> None:
    """The GGUF: every matrix Q4_0, embedding and head Q8_0, router and norms float32, as glm-mid has them."""
    import gguf

    values = config(name)
    out = gguf.GGUFWriter(path, "deepseek2")
    _parameters(out, values)
    hidden, vocabulary = values["hidden_size"], values["vocab_size"]
    rng = np.random.default_rng(1)
    kinds = gguf.GGMLQuantizationType
    for seed, tensor in enumerate(("token_embd.weight", "output.weight")):
        out.add_tensor(tensor, blocks(Q8_0, vocabulary, hidden, seed), raw_dtype=kinds.Q8_0)
    out.add_tensor("output_norm.weight", np.ones(hidden, np.float32))
    for layer in range(values["num_hidden_layers"]):
        for norm, size in (
            ("attn_norm", hidden),
            ("ffn_norm", hidden),
            ("attn_q_a_norm", values["q_lora_rank"]),
            ("attn_kv_a_norm", values["kv_lora_rank"]),
        ):
            out.add_tensor(f"blk.{layer}.{norm}.weight", np.ones(size, np.float32))
        if layer >= values["first_k_dense_replace"]:
            router = rng.standard_normal((values["n_routed_experts"], hidden), dtype=np.float32)
            out.add_tensor(f"blk.{layer}.ffn_gate_inp.weight", router * np.float32(1.5 / hidden**0.5))
            bias = rng.standard_normal(values["n_routed_experts"], dtype=np.float32)
            out.add_tensor(f"blk.{layer}.exp_probs_b.bias", bias * np.float32(0.01))
    for seed, (tensor, count, rows, cols) in enumerate(matrices(values), 10):
        data = blocks(Q4_0, count * rows, cols, seed)
        out.add_tensor(tensor, data if count == 1 else data.reshape(count, rows, -1), raw_dtype=kinds.Q4_0)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def _parameters(out: Any, values: dict[str, Any]) -> None:
    import gguf

    latent, rope = values["kv_lora_rank"], values["qk_rope_head_dim"]
    out.add_vocab_size(values["vocab_size"])
    out.add_tokenizer_model("none")
    out.add_context_length(values["max_position_embeddings"])
    out.add_embedding_length(values["hidden_size"])
    out.add_block_count(values["num_hidden_layers"])
    out.add_feed_forward_length(values["intermediate_size"])
    out.add_head_count(values["num_attention_heads"])
    out.add_head_count_kv(1)
    out.add_layer_norm_rms_eps(values["rms_norm_eps"])
    out.add_rope_freq_base(values["rope_parameters"]["rope_theta"])
    out.add_rope_dimension_count(rope)
    out.add_q_lora_rank(values["q_lora_rank"])
    out.add_kv_lora_rank(latent)
    out.add_key_length(latent + rope)
    out.add_value_length(latent)
    out.add_key_length_mla(values["qk_nope_head_dim"] + rope)
    out.add_value_length_mla(values["v_head_dim"])
    out.add_leading_dense_block_count(values["first_k_dense_replace"])
    out.add_expert_count(values["n_routed_experts"])
    out.add_expert_used_count(values["num_experts_per_tok"])
    out.add_expert_shared_count(values["n_shared_experts"])
    out.add_expert_feed_forward_length(values["moe_intermediate_size"])
    out.add_expert_weights_scale(values["routed_scaling_factor"])
    out.add_expert_weights_norm(values["norm_topk_prob"])
    out.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def touched(values: dict[str, Any]) -> int:
    """Bytes of the GGUF that one token needs: every matrix once, of the routed experts the chosen ones."""
    total = values["vocab_size"] * values["hidden_size"] // Q8_0[0] * Q8_0[1]
    for name, count, rows, cols in matrices(values):
        used = values["num_experts_per_tok"] if "_exps" in name else count
        total += used * rows * cols // Q4_0[0] * Q4_0[1]
    sparse = values["num_hidden_layers"] - values["first_k_dense_replace"]
    return total + 4 * sparse * values["n_routed_experts"] * values["hidden_size"]


class Llama:
    """llama.cpp through llama-cpp-python's plain functions. `repack`: its CPU form of the weights, its default."""

    def __init__(self, path: Path, *, threads: int, repack: bool) -> None:
        from llama_cpp import llama_cpp as api

        self._api = api
        self.name = "llama.cpp Q4_0" + (" repacked" if repack else "")
        self._quiet = api.llama_log_callback(lambda level, text, user: None)
        api.llama_log_set(self._quiet, None)
        api.llama_backend_init()
        options = api.llama_model_default_params()
        options.n_gpu_layers = 0
        options.use_extra_bufts = repack
        self._model = api.llama_model_load_from_file(str(path).encode(), options)
        if not self._model:
            raise SystemExit(f"{path}: llama.cpp could not load it")
        context = api.llama_context_default_params()
        context.n_ctx = 512
        context.n_batch = context.n_ubatch = 64
        context.n_threads = context.n_threads_batch = threads
        self._context = api.llama_init_from_model(self._model, context)

    def decode(self, prompt: Sequence[int], tokens: Sequence[int]) -> float:
        """Seconds for `tokens`, one by one, after the prompt in an empty cache."""
        api = self._api
        api.llama_memory_clear(api.llama_get_memory(self._context), True)
        self._feed(prompt)
        start = time.perf_counter()
        for token in tokens:
            self._feed([token])
            api.llama_get_logits(self._context)
        return time.perf_counter() - start

    def _feed(self, ids: Sequence[int]) -> None:
        api = self._api
        array = (api.llama_token * len(ids))(*ids)
        if api.llama_decode(self._context, api.llama_batch_get_one(array, len(ids))) != 0:
            raise SystemExit("llama.cpp could not decode")


def measure(words: argparse.Namespace) -> dict[str, Any]:
    """The record: tokens per second of each side, the floors of both and what each reached of its own."""
    values = config(words.name)
    with Engine.open(words.model, EngineOptions(threads=words.threads, precision=words.precision)) as engine:
        ids = fixed_tokens(values["vocab_size"], PROMPT_TOKENS + words.tokens, 1).tolist()
        prompt, following = ids[:PROMPT_TOKENS], ids[PROMPT_TOKENS:]
        threads = engine.threads
        probe = MemoryProbe(engine.weight_memory(), isa=engine.isa, threads=threads)
        sides: dict[str, tuple[Any, int]] = {
            f"picaflor {words.precision}": (
                lambda: sum(engine.decode_replay(prompt, following)),
                sum(engine.bytes_per_token().values()),
            )
        }
        for repack in (True, False):
            other = Llama(words.gguf, threads=threads, repack=repack)
            sides[other.name] = ((lambda other=other: other.decode(prompt, following)), touched(values))
        reads: list[float] = []
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        cpu: dict[str, list[float]] = {name: [] for name in sides}
        for turn in range(words.repeats + 1):
            for name, (decode, _) in sides.items():
                time.sleep(QUIET_S)
                before = time.process_time(), time.perf_counter()
                passed = decode()
                share = (time.process_time() - before[0]) / (threads * (time.perf_counter() - before[1]))
                if turn:  # the first turn warms up
                    seconds[name].append(passed)
                    cpu[name].append(share)
            time.sleep(QUIET_S)
            reads.append(probe())
    return _record(words, threads, sides, reads, seconds, cpu)


def _record(
    words: argparse.Namespace,
    threads: int,
    sides: dict[str, tuple[Any, int]],
    reads: list[float],
    seconds: dict[str, list[float]],
    cpu: dict[str, list[float]],
) -> dict[str, Any]:
    read = statistics.median(reads)
    results = {}
    for name, (_, nbytes) in sides.items():
        rates = [words.tokens / passed for passed in seconds[name]]
        results[name] = {
            "tokens_per_s": statistics.median(rates),
            "tokens_per_s_min": min(rates),
            "tokens_per_s_max": max(rates),
            "bytes_per_token": nbytes,
            "floor_tokens_per_s": read / nbytes,
            "of_floor": statistics.median(rates) * nbytes / read,
            "cpu_per_wall": statistics.median(cpu[name]),
        }
    return {
        "benchmark": "compare decode",
        "picaflor": __version__,
        "shape": words.name,
        "threads": threads,
        "tokens": words.tokens,
        "repeats": words.repeats,
        "read_bytes_per_s": read,
        "read_bytes_per_s_each": reads,
        "note": words.note,
        "results": results,
    }


def main() -> None:
    """Write the GGUF, or measure and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("gguf", type=Path)
    parser.add_argument("model", nargs="?", type=Path, help="the container of the same shape")
    parser.add_argument("--write", action="store_true", help="write the GGUF first")
    parser.add_argument("--name", default="glm-mid", help="the shape, of those of generate_glm.py")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--precision", default="standard")
    parser.add_argument("--note", default="")
    words = parser.parse_args()
    if words.write:
        write(words.gguf, words.name)
    if words.model is not None:
        print(json.dumps(measure(words), indent=1))


if __name__ == "__main__":
    main()
