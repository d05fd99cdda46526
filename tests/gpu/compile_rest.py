"""Compiles the kernels that are no products for one device: `compile_rest.py hip:gfx942:64`; prints how many.

Run by test_products_compile.py in a process where Triton is not interpreted.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from compile_products import Case, compiled, refuse_unknown
from triton.backends.compiler import GPUTarget

from picaflor.backends.cuda import attention, choose, latent, rows, sampling

F32 = [
    "x",
    "y",
    "weight",
    "bias",
    "out",
    "gate",
    "up",
    "cos",
    "sin",
    "plane",
    "q",
    "keys",
    "values",
    "scores",
    "weights",
    "stats",
    "sums",
    "logits",
    "q2",
    "keys2",
]
I32 = ["sequences", "positions", "pages", "numbers", "tokens", "counts", "selection", "ids"]
BYTES = ("codes", "grid")
FLOATS = ("eps", "scale", "inv_dim", "inv_heads")


def types(kernel: Any, constants: dict[str, Any]) -> dict[str, str]:
    """Of every argument, by its name; whole numbers but for those."""
    found = {}
    for name in kernel.arg_names:
        if name not in constants:
            kind = "*fp32" if name in F32 else "*i32" if name in I32 else "*u8" if name in BYTES else "i32"
            found[name] = "fp32" if name in FLOATS else kind
    return found


def cases() -> Iterator[Case]:
    """(kernel, constants, types, warps), as they are launched for sizes of GLM-5.2."""
    made: list[tuple[Any, dict[str, Any], int, dict[str, str]]] = [
        (rows._rmsnorm, {"N": 6144, "R": 1, "U": 64, "B": 8192}, 4, {}),
        (rows._rmsnorm, {"N": 200, "R": 1, "U": 16, "B": 256}, 4, {}),
        (rows._layernorm, {"N": 128, "R": 1, "U": 16, "B": 128}, 4, {}),
        (rows._rope, {"HALF": 32, "INTERLEAVED": True, "R": 1, "B": 32}, 1, {}),
        (rows._kv_write, {"SHIFT": 4, "R": 1, "B": 512}, 4, {}),
        (attention._soften, {"R": 1}, 1, {}),
        (attention._merge, {"W": 512, "R": 1, "B": 128}, 4, {}),
        (attention._weigh, {"W": 512, "R": 1, "H": 4, "B": 128, "U": 32, "FAR": True}, 4, {}),
        (attention._weigh, {"W": 512, "R": 1, "H": 1, "B": 128, "U": 64, "FAR": False}, 4, {}),
        (attention._scores, {"W": 512, "W2": 64, "H": 1, "K": 32, "U": 16}, 4, {}),
        (choose._index_scores, {"W": 128, "K": 32, "U": 4, "SHIFT": 4}, 4, {}),
        (choose._choose_positions, {"TOP": 2048, "B": 4096}, 8, {"out": "*i32"}),
    ]
    for kernel in (rows._add, rows._silu_mul, rows._gather):
        made.append((kernel, {"R": 1, "B": 1024}, 4, {}))
    for selected in (False, True):
        made.append((attention._tokens, {"SELECTED": selected, "TOP": 2048, "T": 1024, "SHIFT": 4}, 4, {}))
    router = {"NORMALISE": True, "TOP": 8, "TOP_GROUPS": 4, "GROUPS": 8, "SIZE": 32, "G": 8, "S": 32, "K": 8}
    for softmax in (False, True):
        made.append((choose._router, {**router, "SOFTMAX": softmax, "BIAS": not softmax}, 1, {}))
    for number, group in ((0, 0), (3, 64), (6, 64)):
        stored = {"FORMAT": number, "GROUP": group, "R": 1}
        special = {"scales": "*fp32" if number == 0 else "*u8"}
        made.append((latent._embed, {**stored, "B": 1024}, 4, special))
        made.append((latent._absorb, {**stored, "W": 512, "B": 64, "U": 64, "EVEN": True}, 2, special))
        made.append((latent._expand, {**stored, "W": 512, "V": 16, "U": 32}, 4, special))
        many = {**stored, "R": 4, "W": 512}
        made.append((latent._absorb, {**many, "B": 64, "U": 16, "EVEN": False}, 2, special))
        made.append((latent._expand, {**many, "V": 16, "U": 4}, 4, special))
    drawing = dict.fromkeys(("best", "finite", "bins", "sums", "parts", "kept"), "*i64")
    drawing |= {"chances": "*fp64", "weights": "*fp32", "out": "*i32"}
    made.append((sampling._best, {"B": 1024}, 4, drawing))
    made.append((sampling._weigh, {"B": 1024, "BLOCKS": 256}, 4, drawing))
    made.append((sampling._keep, {"C": 4096, "BLOCKS": 256}, 8, drawing))
    made.append((sampling._choose, {"C": 4096, "BLOCKS": 256, "PIECES": 64}, 16, drawing))
    for shift in (9, 0):
        made.append((sampling._refine, {"SHIFT": shift, "C": 4096, "BLOCKS": 256}, 8, drawing))
    for kernel, constants, warps, special in made:
        yield kernel, constants, {**types(kernel, constants), **special}, warps


def main() -> None:
    """Compiles all; a kernel that does not compile raises."""
    backend, architecture, warp = sys.argv[1].split(":")
    target = GPUTarget(backend, int(architecture) if backend == "cuda" else architecture, int(warp))
    if sys.argv[2:] == ["--unknown"]:
        refuse_unknown(cases(), target)
        return
    number = 0
    for kernel, constants, special, warps in cases():
        compiled(kernel, constants, special, warps, target)
        number += 1
    print(number, "kernels for", sys.argv[1])


if __name__ == "__main__":
    main()
