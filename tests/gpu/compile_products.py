"""Compiles the product kernels for one device: `compile_products.py cuda:90:32`; prints how many it compiled, and how
many of them multiply by the matrix instruction of that device. Another device's is an error, and so is a kernel that
may start early and does not wait for its turn. With `--unknown`: that none compiles for a format that there is not.

Run by test_products_compile.py in a process where Triton is not interpreted.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompilationError

from picaflor.backends.cuda import experts, matmul, prepare
from picaflor.backends.cuda.overlap import take_turn
from picaflor.backends.cuda.vectors import let_the_next_start

POINTERS = {
    "codes": "*u8", "scales": "*u8", "lattice": "*u8", "digits": "*i8", "xs": "*fp32", "sums": "*i32", "tops": "*i32",
    "out": "*fp32", "x": "*fp32", "ids": "*i32", "kind_of": "*i32", "addresses": "*i64", "weights": "*fp32",
    "arrived": "*i32", "expert": "*i32", "start": "*i32", "end": "*i32", "order": "*i32", "pairs": "*fp32",
    "others": "*fp32",
    "blocks": "*i32", "signs": "*fp32", "spare": "*fp32",
}  # fmt: skip
NUMBERS = (
    "kind",
    "width",
    "cols",
    "rows",
    "stride",
    "bytes",
    "groups",
    "plane",
    "length",
    "hidden",
    "inner",
    "count",
    "k",
)
MATRIX_INSTRUCTIONS = ("mma.sync", "wgmma.mma_async", "tcgen05.mma", "v_mfma_i32", "v_wmma_i32")
OF_DEVICE = {
    "cuda:80:32": "mma.sync",
    "cuda:90:32": "wgmma.mma_async",
    "cuda:120:32": "mma.sync",
    "hip:gfx942:64": "v_mfma_i32",
    "hip:gfx1201:32": "v_wmma_i32",
}
WAIT = "griddepcontrol.wait"
GROUPS = {3: 64, 4: 64, 5: 64, 6: 64, 7: 64, 8: 32, 9: 32}
UNKNOWN = 11
"""The number behind the last format's."""
REFUSALS = ("no integer codes", "no scales of groups", "no float format", "no codes in words", "no nibbles")
Case = tuple[Any, dict[str, Any], dict[str, str], int]


def type_of(name: str) -> str:
    """Of an argument by the last part of its name."""
    if name in POINTERS:
        return POINTERS[name]
    last = name.rstrip("_").split("_")[-1]
    if last in POINTERS:
        return POINTERS[last]
    if last not in NUMBERS:
        raise ValueError(f"argument {name} has no type here")
    return "i32"


def overlaps(target: GPUTarget) -> bool:
    """Whether kernels overlap on such a device, as `overlap.overlaps` says it of the current one."""
    return bool(target.backend == "cuda" and target.arch == 90)


def compiled(kernel: Any, constants: dict[str, Any], special: dict[str, str], warps: int, target: GPUTarget) -> str:
    """Code. Aligned addresses, sizes that are multiples of 16 where they are in the launches that matter."""
    if "OVERLAP" in kernel.arg_names:
        constants = {**constants, "OVERLAP": overlaps(target)}
    names = [name for name in kernel.arg_names if name not in constants]
    signature = {name: special.get(name) or type_of(name) for name in names} | dict.fromkeys(constants, "constexpr")
    even = ("cols", "rows", "bytes", "plane", "length", "hidden", "inner", "stride")
    attributes = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(kernel.arg_names)
        if name not in constants and (signature[name][0] == "*" or name.rstrip("_").split("_")[-1] in even)
    }
    source = ASTSource(kernel, {name: signature[name] for name in kernel.arg_names}, constants, attributes)
    found = triton.compile(source, target=target, options={"num_warps": warps, "enable_fp_fusion": False})
    text: str = found.asm["ptx" if target.backend == "cuda" else "amdgcn"]
    if "OVERLAP" in kernel.arg_names:
        fault = turn_fault(text, kernel, overlap=overlaps(target))
        if fault:
            raise ValueError(f"{kernel.__name__} {constants}: {fault}")
    return text


def turn_fault(text: str, kernel: Any, *, overlap: bool) -> str:
    """What is wrong with how a kernel that may start early waits; empty if nothing. Nothing is written before that, and
    but for products, whose weights are constant, nothing read. `_inner` starts in its turn and lets the next one begin;
    programs of `_outer` with work and without wait apart.
    """
    wait = text.find(WAIT)
    if not overlap or kernel is experts._inner:
        return "waits, and is not launched to" if wait >= 0 else ""
    if text.count(WAIT) < (2 if kernel is experts._outer else 1):
        return "never waits"
    before = text[:wait]
    writes = [word for word in ("st.global", "atom.", "red.") if word in before]
    reads = ["ld.global"] if kernel not in (matmul._few_integers, experts._outer) and "ld.global" in before else []
    leaves = ["bra"] if kernel is not experts._outer and re.search(r"\bbra\b|\bret\b", before) else []
    return ", ".join(f"{word} before it waits" for word in writes + reads + leaves)


@triton.jit
def _reads_early(x, out, OVERLAP: tl.constexpr):
    value = tl.load(x + tl.program_id(0))
    take_turn()
    tl.store(out + tl.program_id(0), value)


@triton.jit
def _writes_early(x, out, OVERLAP: tl.constexpr):
    tl.store(out + tl.program_id(0), 0.0)
    take_turn()
    tl.store(out + tl.program_id(0), tl.load(x + tl.program_id(0)))


@triton.jit
def _never_waits(x, out, OVERLAP: tl.constexpr):
    let_the_next_start()
    tl.store(out + tl.program_id(0), tl.load(x + tl.program_id(0)))


@triton.jit
def _may_leave(x, out, OVERLAP: tl.constexpr):
    if tl.program_id(0) == 7:
        return
    take_turn()
    tl.store(out + tl.program_id(0), tl.load(x + tl.program_id(0)))


PLANTED = {
    _reads_early: "ld.global before it waits",
    _writes_early: "st.global before it waits",
    _never_waits: "never waits",
    _may_leave: "bra before it waits",
}
"""Kernels that wait wrongly, and what is to be said of each."""


def see_planted(target: GPUTarget) -> None:
    """Raises ValueError where a kernel that waits wrongly compiles, or is refused for something else."""
    for kernel, fault in PLANTED.items():
        try:
            compiled(kernel, {}, {}, 4, target)
        except ValueError as error:
            if not str(error).endswith(f": {fault}"):
                raise
        else:
            raise ValueError(f"{kernel.__name__} passes")


def row_constants(prefix: str, number: int, groups: int, steps: int) -> dict[str, Any]:
    """What a kernel of single rows takes for one matrix."""
    values = {"FORMAT": number, "GROUP": GROUPS.get(number, 0), "PADDED": 64, "EVEN": True, "N": groups, "STEPS": steps}
    return {prefix + name: value for name, value in values.items()}


def cases(native: bool) -> Iterator[Case]:
    """(kernel, constants, types that differ from the usual, warps)."""
    common = {"PLANES": 2, "NATIVE": native}
    floats = {"scales": "*fp32"}
    for planes, halves in ((1, True), (2, False), (3, True)):
        tile = {"GROUP": 64, "PADDED": 64, "PLANES": planes, "HALVES": halves, "TILE": 8, "WIDTH": 64}
        yield prepare._prepare, tile, floats, 4
    yield prepare._rotate, {"TILE": 1024}, {}, 4
    for number in (3, 4, 6):
        few = {**common, **row_constants("", number, 32, 3), "BO": 2}
        yield matmul._few_integers, few, {}, 1
    yield matmul._few_integers, {**common, **row_constants("", 6, 4, 0), "PLANES": 3, "BO": 32}, {}, 4
    for number in GROUPS:
        few = {**common, **row_constants("", number, 0, 0), "BO": 16}
        yield matmul._few_integers, few, {}, 4
        many = {**common, "FORMAT": number, "GROUP": GROUPS[number], "PADDED": 64, "EVEN": True, "UNROLL": 1}
        yield matmul._many_integers, {**many, "BO": 64, "BS": 16, "PIECE": False}, {}, 4
    for planes, unroll, even in ((1, 1, True), (1, 2, True), (2, 1, True), (2, 2, False)):
        many = {
            "FORMAT": 6,
            "GROUP": 64,
            "PADDED": 64,
            "EVEN": even,
            "UNROLL": unroll,
            "PLANES": planes,
            "NATIVE": native,
        }
        yield matmul._many_integers, {**many, "BO": 64, "BS": 64, "PIECE": True}, {}, 4
    for number in (0, 1, 2, 10):
        yield matmul._floats, {"FORMAT": number, "UNROLL": 8, "EVEN": False, "BO": 16, "BS": 8}, {}, 4
        yield matmul._floats, {"FORMAT": number, "UNROLL": 32, "EVEN": True, "BO": 2, "BS": 1}, {}, 1
    fused = {"D_GROUP": 64, "D_PADDED": 64, "D_HALVES": True, "BOTH": True, "BO": 16}
    both = {**row_constants("G_", 6, 4, 0), **row_constants("U_", 6, 4, 0)}
    yield experts._inner, {**common, **fused, **both}, {}, 4
    outer = {**common, "TOP_K": 8, "SUM": True, "BO": 8}
    yield experts._outer, {**outer, **row_constants("", 6, 16, 2)}, {}, 1
    for number in (0, *GROUPS):
        yield experts._outer, {**outer, **row_constants("", number, 0, 0)}, {}, 4
    shapes = {p + n: v for p in ("G_", "U_", "") for n, v in
              (("FORMAT", 6), ("GROUP", 64), ("PADDED", 64), ("WHOLE", True))}  # fmt: skip
    inner = {name: value for name, value in shapes.items() if name[:2] in ("G_", "U_")}
    yield experts._inner_many, {**common, **inner, "BO": 64, "BS": 16}, {}, 4
    down = {name: value for name, value in shapes.items() if name[:2] not in ("G_", "U_")}
    yield experts._outer_many, {**common, **down, "BO": 64, "BS": 16}, {}, 4
    for two in (False, True):
        yield experts._combine, {"TOP_K": 8, "TWO": two, "B": 256}, {}, 4


def reason(error: BaseException | None) -> str:
    """What the innermost error says: a kernel's own refusal, or why it is no kernel."""
    while error is not None and error.__cause__ is not None:
        error = error.__cause__
    return str(error)


def refuse_unknown(cases: Iterable[Case], target: GPUTarget) -> None:
    """Every kernel that reads weights, for a format that no kernel knows: none may compile."""
    refused = 0
    for kernel, constants, special, warps in cases:
        for name in ("FORMAT", "G_FORMAT", "U_FORMAT"):
            if name not in constants:
                continue
            # Where gate and up are of one kind, gate's format is both's.
            other = {"BOTH": False} if "BOTH" in constants else {}
            other |= {"GROUP": 64} if constants.get("GROUP") == 0 else {}
            wrong = {**constants, **other, name: UNKNOWN}
            try:
                compiled(kernel, wrong, special, warps, target)
            except CompilationError as error:
                if not any(text in reason(error) for text in REFUSALS):
                    raise
                refused += 1
            else:
                raise ValueError(f"{kernel.__name__} takes {name} {UNKNOWN} for a format: {constants}")
    print(refused, "kernels refuse a format that there is not")


def main() -> None:
    """Compiles all; a kernel that does not compile raises."""
    backend, architecture, warp = sys.argv[1].split(":")
    target = GPUTarget(backend, int(architecture) if backend == "cuda" else architecture, int(warp))
    if sys.argv[2:] == ["--unknown"]:
        refuse_unknown(cases(True), target)
        return
    if overlaps(target):
        see_planted(target)
    number = by_matrix = 0
    for kernel, constants, special, warps in cases(backend == "cuda"):
        text = compiled(kernel, constants, special, warps, target)
        number += 1
        used = {name for name in MATRIX_INSTRUCTIONS if name in text}
        if used - {OF_DEVICE[sys.argv[1]]}:
            raise ValueError(f"{kernel.__name__} for {sys.argv[1]} has {', '.join(sorted(used))}")
        by_matrix += bool(used)
    print(number, "kernels for", sys.argv[1], "with matrix instructions", by_matrix)


if __name__ == "__main__":
    main()
