"""How many quick cases each (operation, format) had when it was last counted; fewer fail `picaflor verify`.

Data only: raise a number when cases are added (`picaflor verify --json` tells the counts).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

MINIMUM: Mapping[tuple[str, str], int] = MappingProxyType(
    {
        ("matmul", "f32"): 12,
        ("matmul", "bf16"): 12,
        ("matmul", "f16"): 12,
        ("matmul", "int8-row"): 12,
        ("matmul", "int4-row"): 12,
        ("matmul", "int2-row"): 12,
        ("matmul", "int4-grouped"): 96,
        ("matmul", "int3-g64"): 12,
        ("matmul", "e8-iq3-lattice"): 12,
        ("matmul", "mxfp4"): 12,
        ("matmul", "fp8-e4m3-b128"): 15,
        ("expert_ffn", "f32"): 4,
        ("expert_ffn", "bf16"): 4,
        ("expert_ffn", "f16"): 4,
        ("expert_ffn", "int8-row"): 4,
        ("expert_ffn", "int4-row"): 4,
        ("expert_ffn", "int2-row"): 4,
        ("expert_ffn", "int4-grouped"): 32,
        ("expert_ffn", "int3-g64"): 4,
        ("expert_ffn", "e8-iq3-lattice"): 4,
        ("expert_ffn", "mxfp4"): 4,
        ("expert_ffn", "fp8-e4m3-b128"): 4,
        ("expert_ffn", "-"): 1,
        ("rows", "f32"): 3,
        ("rows", "bf16"): 3,
        ("rows", "f16"): 3,
        ("rows", "int8-row"): 3,
        ("rows", "int4-row"): 3,
        ("rows", "int2-row"): 3,
        ("rows", "int4-grouped"): 24,
        ("rows", "int3-g64"): 3,
        ("rows", "mxfp4"): 3,
        ("rows", "fp8-e4m3-b128"): 4,
        ("row_axpy", "f32"): 2,
        ("row_axpy", "bf16"): 2,
        ("row_axpy", "f16"): 2,
        ("row_axpy", "int8-row"): 2,
        ("row_axpy", "int4-row"): 2,
        ("row_axpy", "int2-row"): 2,
        ("row_axpy", "int4-grouped"): 10,
        ("row_axpy", "int3-g64"): 2,
        ("row_axpy", "mxfp4"): 2,
        ("row_axpy", "fp8-e4m3-b128"): 2,
        ("attention", "-"): 6,
        ("index_select", "-"): 5,
        ("kv_write", "-"): 2,
        ("rmsnorm", "-"): 5,
        ("layernorm", "-"): 3,
        ("rope", "-"): 6,
        ("add", "-"): 1,
        ("silu_mul", "-"): 3,
        ("select_outputs", "-"): 2,
        ("router", "-"): 6,
        ("sample", "-"): 5,
        ("moe", "-"): 2,
    }
)
