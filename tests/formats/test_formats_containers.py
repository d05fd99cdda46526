"""Every quantized tensor of the reference containers resolves to the format that its maker says it has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from picaflor.container.index import Container
from picaflor.formats.resolve import resolve, routed_stamp

# The second number is the one width at which two group sizes fit (32 and 48, 64 and 96): each such matrix is warned of.
CONTAINERS = [
    ("tiny_glm_int8", 0),
    ("tiny_glm_int4row", 0),
    ("tiny_glm_int2row", 0),
    ("tiny_glm_int4g32", 64),
    ("tiny_glm_int4g64", 128),
    ("tiny_glm_int3g64", 0),
    ("tiny_glm_ragged_int4g16", 0),
    ("tiny_glm_e8", 0),
    ("tiny_glm_fp8", 0),
    ("tiny_glm_fp8_experts", 0),
]


def shape_of(name: str, config: dict[str, Any]) -> tuple[int, int]:
    """Rows and columns of a GLM weight from its name and the config."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    q_rank, kv_rank = config["q_lora_rank"], config["kv_lora_rank"]
    inner = config["intermediate_size"]
    if ".mlp.experts." in name:
        inner = config["moe_intermediate_size"]
    elif ".shared_experts." in name:
        inner = config["moe_intermediate_size"] * config["n_shared_experts"]
    return {
        "lm_head": (config["vocab_size"], hidden),
        "embed_tokens": (config["vocab_size"], hidden),
        "q_a_proj": (q_rank, hidden),
        "q_b_proj": (heads * (nope + rope), q_rank),
        "kv_a_proj_with_mqa": (kv_rank + rope, hidden),
        "kv_b_proj": (heads * (nope + value), kv_rank),
        "o_proj": (hidden, heads * value),
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "down_proj": (hidden, inner),
    }[name.split(".")[-2]]


@pytest.mark.parametrize(("folder", "doubtful_cols"), CONTAINERS)
def test_reference_container(test_data: Path, folder: str, doubtful_cols: int) -> None:
    path = test_data / "vectors" / folder
    with np.load(path / "vectors.npz", allow_pickle=False) as file:
        stored = file["tensor_formats"]
        formats = json.loads(stored.tobytes() if stored.dtype == np.uint8 else str(stored))
    warnings: list[str] = []
    doubtful = 0
    with Container.open(path) as container:
        config = container.config()
        for label, names in formats.items():
            format_name, _, size = label.partition(":gs")
            for name in names:
                stamp = container.stamps.get(name)
                matrix = resolve(
                    name,
                    shape_of(name, config),
                    container.require(name),
                    container.get(f"{name}.qs"),
                    stamp=routed_stamp(stamp) if ".mlp.experts." in name else stamp,
                    warn=warnings.append,
                )
                assert (matrix.format, matrix.group_size) == (format_name, int(size or 0)), name
                doubtful += matrix.cols == doubtful_cols and format_name == "int4-grouped"
    assert len(warnings) == doubtful
    assert bool(warnings) == bool(doubtful_cols)
