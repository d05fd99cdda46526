"""Random products and experts against the scalar kernels, bit for bit, and against the float64 oracle.

A program for scripts/soak, which runs it with the usual module and with one built with sanitizers; tests run a
little of it. Buffers are as large as what was promised and lie at odd addresses. Must not know how a kernel is built.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

PROMISED_BYTES = 64
COUNTS: Counter[str] = Counter()
LAST: list[Path] = []


def use_module(path: Path) -> None:
    """Let `picaflor._native` be this file; before anything imports it."""
    spec = importlib.util.spec_from_file_location("picaflor._native", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["picaflor._native"] = module
    spec.loader.exec_module(module)


if __name__ == "__main__" and "--module" in sys.argv:
    use_module(Path(sys.argv[sys.argv.index("--module") + 1]))

import numpy as np  # noqa: E402
from hypothesis import HealthCheck, Phase, given, seed, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from kernel_harness import CASES, Sample, same_bits, sample  # noqa: E402

from picaflor import _native  # noqa: E402
from picaflor.backends.cpu.kernels import FORMAT_NUMBERS  # noqa: E402
from picaflor.conformance import oracle, products  # noqa: E402
from picaflor.conformance.case import Matrix  # noqa: E402
from picaflor.formats.base import F32  # noqa: E402

ISAS = _native.kernel_isas()
PRECISIONS = {1: "fast", 2: "standard", 3: "exact"}
SEEDS = st.integers(0, 2**32 - 1)
PLANES = st.sampled_from([1, 2, 3])


@st.composite
def product_examples(draw: st.DrawFn) -> dict[str, Any]:
    """One product: a stored matrix, rows of x, where the buffers lie, and how the rows are shared out."""
    rows = draw(st.one_of(st.integers(1, 80), st.integers(1, 600)))
    return {
        "case": draw(st.sampled_from(CASES)),
        "rows": rows,
        "cols": draw(st.one_of(st.integers(1, 300), st.integers(1, 2500))),
        "count": draw(st.one_of(st.integers(1, 9), st.integers(1, 70))),
        "planes": draw(PLANES),
        "isa": draw(st.sampled_from(ISAS)),
        "offsets": draw(st.tuples(st.integers(0, 63), st.integers(0, 63))),
        "cuts": draw(st.lists(st.integers(0, rows), max_size=5)),
        "threads": draw(st.integers(1, 4)),
        "x": draw(st.sampled_from(["normal", "outliers", "sparse", "tiny", "huge"])),
        "seed": draw(SEEDS),
    }


@st.composite
def expert_examples(draw: st.DrawFn) -> dict[str, Any]:
    """One call of the fused operation: experts of mixed formats, rows that chose them, threads and pieces."""
    experts = draw(st.integers(1, 6))
    return {
        "cases": draw(st.lists(st.tuples(*[st.sampled_from(CASES)] * 3), min_size=experts, max_size=experts)),
        "hidden": draw(st.integers(1, 260)),
        "inner": draw(st.integers(1, 200)),
        "count": draw(st.integers(1, 24)),
        "top_k": draw(st.integers(1, experts)),
        "planes": draw(PLANES),
        "isa": draw(st.sampled_from(ISAS)),
        "gaps": draw(st.integers(0, 63)),
        "threads": draw(st.integers(1, 4)),
        "piece": draw(st.integers(1, 6)),
        "seed": draw(SEEDS),
    }


def activations(rng: np.random.Generator, kind: str, count: int, cols: int) -> F32:
    """Rows `[count, cols]` of a kind."""
    x = rng.standard_normal((count, cols)).astype(np.float32)
    match kind:
        case "normal":
            pass
        case "outliers":
            x[rng.random(x.shape) < 0.02] *= 100
        case "sparse":
            x[rng.random(x.shape) < 0.9] = 0
        case "tiny":
            x *= np.float32(1e-20)
        case "huge":
            x *= np.float32(1e15)
        case _:
            raise ValueError(kind)
    return x


def place(parts: list[Any], gaps: list[int]) -> tuple[Any, list[int]]:
    """(a buffer with the bytes of all parts, each behind its gap, and no more behind than was promised; offsets)."""
    raw = [np.ascontiguousarray(part).reshape(-1).view(np.uint8) for part in parts]
    buffer = np.empty(sum(gaps) + sum(part.nbytes for part in raw) + PROMISED_BYTES, np.uint8)
    buffer[:] = 0xA5
    offsets, at = [], 0
    for part, gap in zip(raw, gaps, strict=True):
        at += gap
        offsets.append(at)
        buffer[at : at + part.nbytes] = part
        at += part.nbytes
    return buffer, offsets


def native_weight(data: Sample, example: dict[str, Any]) -> tuple[Any, list[Any]]:
    """(the matrix in buffers of its own, what owns them)."""
    name, group_size = example["case"]
    held = [place([plane], [gap]) for plane, gap in zip(data.planes, example["offsets"], strict=False)]
    sizes = [(buffer.ctypes.data + at[0], plane.nbytes) for (buffer, at), plane in zip(held, data.planes, strict=True)]
    sizes += [(0, 0)]
    weight = _native.Weight(
        FORMAT_NUMBERS[name],
        example["rows"],
        example["cols"],
        group=group_size,
        codes=sizes[0][0],
        codes_bytes=sizes[0][1],
        scales=sizes[1][0],
        scales_bytes=sizes[1][1],
    )
    return weight, held


def check_product(example: dict[str, Any]) -> None:
    """Equal to the scalar kernels, whatever the address, instruction set and threads; near the oracle's product."""
    note(example)
    name, group_size = example["case"]
    rows, cols, planes = example["rows"], example["cols"], example["planes"]
    data = sample(name, group_size, rows, cols, seed=example["seed"], tame=True)
    x = activations(np.random.default_rng(example["seed"]), example["x"], example["count"], cols)
    weight, held = native_weight(data, example)
    cuts = [0, *sorted(example["cuts"]), rows]
    with ThreadPoolExecutor(example["threads"]) as pool:
        parts = list(
            pool.map(
                lambda ends: _native.matmul(example["isa"], weight, planes, x, *ends),
                itertools.pairwise(cuts),
            )
        )
    found = np.concatenate(
        [part[:, begin:end] for part, begin, end in zip(parts, cuts, cuts[1:], strict=False)], axis=1
    )
    expected = data.weight.native
    assert same_bits(found.copy(), _native.matmul("scalar", expected, planes, x, 0, rows)), "other bits than scalar"
    matrix = Matrix(name, rows, cols, group_size, data.planes)
    right = products.apply(oracle.exactly(x.astype(np.float64)), matrix, PRECISIONS[planes])
    beyond = np.abs(found - right.values) - right.error
    assert (beyond <= 1e-36).all(), f"{beyond.max()} beyond the bound"
    if name != "e8-iq3-lattice":
        row = example["seed"] % rows
        decoded = _native.decode_row(example["isa"], weight, row)
        assert same_bits(decoded, _native.decode_row("scalar", weight, row)), "decode_row: other bits than scalar"
        assert np.array_equal(decoded, data.decoded[row], equal_nan=True), "decode_row"
    del held
    COUNTS["products"] += 1


def expert_slots(example: dict[str, Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """(slots, layouts, matrices for the oracle) of all experts."""
    hidden, inner = example["hidden"], example["inner"]
    slots, layouts, members = [], [], []
    for number, cases in enumerate(example["cases"]):
        shapes = [(inner, hidden), (inner, hidden), (hidden, inner)]
        datas = [
            sample(name, size, *shape, seed=example["seed"] + 3 * number + index, tame=True)
            for index, ((name, size), shape) in enumerate(zip(cases, shapes, strict=True))
        ]
        planes = [plane for data in datas for plane in data.planes]
        slot, offsets = place(planes, [example["gaps"]] * len(planes))
        layout = []
        for (name, size), shape, data in zip(cases, shapes, datas, strict=True):
            mine, offsets = offsets[: len(data.planes)], offsets[len(data.planes) :]
            layout.append((FORMAT_NUMBERS[name], *shape, size, mine))
        slots.append(slot)
        layouts.append(layout)
        members.append(
            tuple(
                Matrix(name, *shape, size, data.planes)
                for (name, size), shape, data in zip(cases, shapes, datas, strict=True)
            )
        )
    return slots, layouts, members


def run_experts(example: dict[str, Any], slots: list[Any], layouts: list[Any], **how: Any) -> tuple[F32, Any, Any, Any]:
    """(products, x, ids, weights) of the fused operation."""
    rng = np.random.default_rng(example["seed"])
    count, top_k, hidden = example["count"], example["top_k"], example["hidden"]
    x = rng.standard_normal((count, hidden)).astype(np.float32) / np.float32(hidden**0.5)
    ids = np.stack([rng.permutation(len(slots))[:top_k] for _ in range(count)]).astype(np.int32)
    weights = rng.uniform(0.2, 1.0, size=(count, top_k)).astype(np.float32)
    pool = _native.Pool(how["threads"])
    ffn = _native.ExpertFfn(pool, how["isa"], example["planes"], hidden, example["inner"], count, top_k)
    layer = ffn.add_layer(layouts)
    wanted = ffn.begin(layer, x.ctypes.data, hidden, ids.ctypes.data, count)
    for start in range(0, len(wanted), how["piece"]):
        part = np.ascontiguousarray(wanted[start : start + how["piece"]])
        ffn.run(part, np.array([slots[expert].ctypes.data for expert in part], np.uint64))
    out = np.full((count, hidden), 7, np.float32)
    ffn.finish(weights.ctypes.data, out.ctypes.data, hidden)
    return out, x, ids, weights


def check_experts(example: dict[str, Any]) -> None:
    """Equal to one scalar thread that takes all experts at once; near the oracle's sum."""
    note(example)
    slots, layouts, members = expert_slots(example)
    how = {"isa": example["isa"], "threads": example["threads"], "piece": example["piece"]}
    found, x, ids, weights = run_experts(example, slots, layouts, **how)
    plain, _, _, _ = run_experts(example, slots, layouts, isa="scalar", threads=1, piece=len(slots))
    assert same_bits(found, plain), "other bits than one scalar thread"
    right = products.expert_sum(members, x, ids, weights, PRECISIONS[example["planes"]])
    limit = float(np.finfo(np.float32).max)
    sane = np.isfinite(right.values) & (right.terms < limit / 1e3)
    beyond = np.where(sane, np.abs(found - right.values) - right.error, 0)
    assert (beyond <= 1e-34).all(), f"{beyond.max()} beyond the bound"
    COUNTS["experts"] += 1


def note(example: dict[str, Any]) -> None:
    """Keep the example where a process that was killed cannot lose it."""
    for path in LAST:
        path.write_text(repr(example) + "\n", encoding="utf-8")


def fuzz(number: int, examples: int) -> None:
    """Both checks, each over `examples` random examples of this seed. Raises what a check raises."""
    how = settings(
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )
    for strategy, check in ((product_examples(), check_product), (expert_examples(), check_experts)):
        seed(number)(how(given(strategy)(check)))()


def main() -> int:
    """Until the time is over; prints the counts. A finding is an exception, or the end of the process."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--module", type=Path, help="the native module's file, instead of the installed one")
    parser.add_argument("--last", type=Path, help="file for the example that is running")
    words = parser.parse_args()
    LAST.extend([words.last] if words.last else [])
    end, number = time.monotonic() + 60 * words.minutes, words.seed
    while time.monotonic() < end:
        fuzz(number, 50)
        number += 1
    print(f"{COUNTS['products']} products, {COUNTS['experts']} expert calls, next seed {number}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
