"""Writes tests/data/families/qwen3_moe_tiny with torch and transformers (made with 2.13.0 and 5.24.0, on a CPU).

Not part of any test run: python tests/families/make_qwen3_moe_tiny.py. All norm weights differ from 1, one layer is
dense, and a head is not hidden / heads wide, so that none of these can be forgotten unseen.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

OUT = Path(__file__).parent.parent / "data" / "families" / "qwen3_moe_tiny"
EXPERTS, INNER = 8, 16


def split_experts(state: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """One tensor per expert and projection instead of the two stacked ones."""
    out: dict[str, np.ndarray] = {}
    for name, tensor in state.items():
        values = tensor.detach().float().numpy()
        if name.endswith("experts.gate_up_proj"):
            base = name.removesuffix("gate_up_proj")
            for expert in range(EXPERTS):
                out[f"{base}{expert}.gate_proj.weight"] = np.ascontiguousarray(values[expert, :INNER])
                out[f"{base}{expert}.up_proj.weight"] = np.ascontiguousarray(values[expert, INNER:])
        elif name.endswith("experts.down_proj"):
            base = name.removesuffix("down_proj")
            for expert in range(EXPERTS):
                out[f"{base}{expert}.down_proj.weight"] = np.ascontiguousarray(values[expert])
        else:
            out[name] = values
    return out


def main() -> None:
    torch.manual_seed(5)
    config = Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=INNER,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        num_experts=EXPERTS,
        num_experts_per_tok=3,
        norm_topk_prob=True,
        mlp_only_layers=[1],
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
        eos_token_id=[1, 2],
    )
    model = Qwen3MoeForCausalLM._from_config(config, attn_implementation="eager", experts_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.copy_(0.5 + torch.rand_like(parameter))
            else:
                parameter.copy_(torch.randn_like(parameter) * (1.0 if "embed" in name else 0.15))
    ids = torch.randint(0, 256, (1, 40))
    with torch.no_grad():
        logits = model(ids).logits[0].numpy()
        greedy = model.generate(ids[:, :12], max_new_tokens=16, do_sample=False, eos_token_id=None)[0].tolist()
    OUT.mkdir(parents=True, exist_ok=True)
    save_file(split_experts(model.state_dict()), OUT / "model.safetensors", metadata={"format": "pt"})
    (OUT / "config.json").write_text(json.dumps({**config.to_dict(), "model_type": "qwen3_moe"}, indent=1) + "\n")
    np.savez_compressed(
        OUT / "expected.npz",
        ids=ids[0].numpy().astype(np.int32),
        logits=logits.astype(np.float32),
        greedy=np.array(greedy[12:], dtype=np.int32),
    )


if __name__ == "__main__":
    main()
