"""Cases of the operations that read neither weights nor cache: norms, rotation, sums, router, choice of tokens.

Knows the contract and the oracle; must not know kernels or devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import numpy as np

from picaflor.backends.api import Recorder, RouterSpec, Rows
from picaflor.backends.table import NO_FORMAT
from picaflor.conformance import oracle
from picaflor.conformance.case import (
    PAGES,
    Case,
    Device,
    Expect,
    Run,
    f32_matrix,
    hold,
    make_batch,
    random,
    run_rows,
)
from picaflor.conformance.check import ROUNDING, Array, Expected
from picaflor.conformance.oracle import Approx
from picaflor.formats.base import F32

F64 = oracle.F64
EPS = 1e-5
POSITIONS = (0, 1, 37, 12, 255, 256, 1000)


def _expected(right: Approx) -> Expected:
    rows = len(right.values)
    values, error, terms = (part.reshape(rows, -1) for part in (right.values, right.error, right.terms))
    return Expected(values, error, terms)


def _simple(op: str, name: str, prepare: Callable[[], tuple[Run, Expect]]) -> Case:
    return Case(op, NO_FORMAT, name, prepare)


def norm_cases() -> Iterator[Case]:
    """Norms of rows so small that eps counts, and of common ones, in one part and in several."""
    for width, heads, size in ((200, 1, 1.0), (13, 1, 2e-3), (40, 5, 2e-3), (48, 3, 30.0), (2048, 1, 1.0)):
        yield _rmsnorm(width, heads, size)
    for width, size in ((200, 1.0), (13, 2e-3), (40, 30.0)):
        yield _layernorm(width, size)


def _rmsnorm(width: int, heads: int, size: float) -> Case:
    name = f"{heads} parts of {width}, values near {size:g}"

    def prepare() -> tuple[Run, Expect]:
        rng = random(f"rmsnorm {name}")
        x = (size * rng.standard_normal((5, heads * width))).astype(np.float32)
        weight = rng.uniform(0.3, 2.0, width).astype(np.float32)

        def run(device: Device) -> list[Array]:
            def record(r: Recorder, b: dict[str, Rows]) -> Sequence[Rows]:
                r.rmsnorm(b["x"], device.vector("norm", weight), b["y"], eps=EPS, heads=heads)
                return (b["y"],)

            return run_rows(device, {"x": x}, {"y": heads * width}, record)

        parts = x.astype(np.float64).reshape(5, heads, width)
        return run, lambda precision: [_expected(oracle.rmsnorm(parts, weight.astype(np.float64), EPS))]

    return _simple("rmsnorm", name, prepare)


def _layernorm(width: int, size: float) -> Case:
    name = f"width {width}, values near {size:g}"

    def prepare() -> tuple[Run, Expect]:
        rng = random(f"layernorm {name}")
        x = (size * (rng.standard_normal((5, width)) + 0.7)).astype(np.float32)
        weight = rng.uniform(0.3, 2.0, width).astype(np.float32)
        bias = rng.standard_normal(width).astype(np.float32)

        def run(device: Device) -> list[Array]:
            def record(r: Recorder, b: dict[str, Rows]) -> Sequence[Rows]:
                r.layernorm(b["x"], device.vector("norm", weight), device.vector("bias", bias), b["y"], eps=EPS)
                return (b["y"],)

            return run_rows(device, {"x": x}, {"y": width}, record)

        given, scale, shift = (array.astype(np.float64) for array in (x, weight, bias))
        return run, lambda precision: [_expected(oracle.layernorm(given, scale, shift, EPS))]

    return _simple("layernorm", name, prepare)


def rope_cases() -> Iterator[Case]:
    """Both styles; part of a head, several heads, positions that are not in order."""
    styles: tuple[Literal["interleaved", "half"], ...] = ("interleaved", "half")
    for style in styles:
        for heads, width, first, dims, theta in ((3, 28, 20, 8, 1e4), (1, 64, 0, 64, 1e6), (2, 20, 0, 12, 1e4)):
            yield _rope(style, heads, width, first, dims, theta)


def _rope(style: Literal["interleaved", "half"], heads: int, width: int, first: int, dims: int, theta: float) -> Case:
    name = f"{style}, {dims} from {first} of {heads} x {width}"

    def prepare() -> tuple[Run, Expect]:
        x = random(f"rope {name}").standard_normal((len(POSITIONS), heads * width)).astype(np.float32)

        def run(device: Device) -> list[Array]:
            def record(r: Recorder, b: dict[str, Rows]) -> Sequence[Rows]:
                r.rope(b["x"], heads=heads, head_width=width, start=first, dims=dims, theta=theta, style=style)
                return (b["x"],)

            count = len(POSITIONS)
            pages = np.zeros((count, PAGES), np.int32)
            batch = make_batch(POSITIONS, sequences=range(count), pages=pages)
            return run_rows(device, {"x": x}, {}, record, batch=batch)

        parts = x.astype(np.float64).reshape(len(POSITIONS), heads, width)
        return run, lambda precision: [_expected(oracle.rope(parts, POSITIONS, first, dims, theta, style))]

    return _simple("rope", name, prepare)


def sum_cases() -> Iterator[Case]:
    """Addition, the gate of an MLP, and the choice of rows."""
    yield _add()
    for size in (1.0, 12.0, 60.0):
        yield _silu_mul(size)
    yield _outputs([4, 1, 6], 7)
    yield _outputs([0], 1)


def _add() -> Case:
    def prepare() -> tuple[Run, Expect]:
        rng = random("add")
        x, y = (rng.standard_normal((6, 41)).astype(np.float32) for _ in range(2))

        def run(device: Device) -> list[Array]:
            def record(r: Recorder, b: dict[str, Rows]) -> Sequence[Rows]:
                r.add(b["x"], b["y"])
                return b["x"], b["y"]

            return run_rows(device, {"x": x, "y": y}, {}, record)

        return run, lambda precision: [Expected(x + y), Expected(y)]

    return _simple("add", "rows of 41", prepare)


def _silu_mul(size: float) -> Case:
    name = f"values near {size:g}"

    def prepare() -> tuple[Run, Expect]:
        rng = random(f"silu {name}")
        gate = (size * rng.standard_normal((5, 201))).astype(np.float32)
        up = rng.standard_normal((5, 201)).astype(np.float32)

        def run(device: Device) -> list[Array]:
            def record(r: Recorder, b: dict[str, Rows]) -> Sequence[Rows]:
                r.silu_mul(b["gate"], b["up"], b["y"])
                return (b["y"],)

            return run_rows(device, {"gate": gate, "up": up}, {"y": 201}, record)

        def expect(precision: str) -> list[Expected]:
            right = oracle.gated(*(oracle.exactly(array.astype(np.float64)) for array in (gate, up)))
            return [_expected(right)]

        return run, expect

    return _simple("silu_mul", name, prepare)


def _outputs(wanted: list[int], count: int) -> Case:
    name = f"rows {wanted} of {count}"

    def prepare() -> tuple[Run, Expect]:
        rng = random(f"outputs {name}")
        x = rng.standard_normal((count, 24)).astype(np.float32)
        head = f32_matrix(np.eye(24, dtype=np.float32)[::-1])

        def run(device: Device) -> list[Array]:
            def record(r: Recorder, b: dict[str, Rows]) -> Sequence[Rows]:
                r.select_outputs(b["x"], b["picked"])
                r.matmul(b["picked"], hold(device, head), b["y"])
                return b["picked"], b["y"]

            batch = make_batch(range(count), outputs=wanted)
            found = run_rows(device, {"x": x}, {"picked": 24, "y": 24}, record, batch=batch)
            return [array[: len(wanted)] for array in found]

        return run, lambda precision: [Expected(x[wanted]), Expected(x[wanted][:, ::-1])]

    return _simple("select_outputs", name, prepare)


ROUTERS = (
    ("sigmoid with bias, normalised, scaled", RouterSpec("sigmoid", 16, 4, True, 2.5), True),
    ("sigmoid, not normalised", RouterSpec("sigmoid", 10, 3, False, 1.5), True),
    ("softmax", RouterSpec("softmax", 17, 4, True, 1.0), False),
    ("softmax, not normalised", RouterSpec("softmax", 12, 2, False, 1.0), False),
    ("2 of 4 groups", RouterSpec("sigmoid", 16, 4, True, 2.5, 4, 2), True),
)


def router_cases() -> Iterator[Case]:
    """Both scores, biases that change the choice, groups, and equal logits, where the lower number comes first."""
    for name, spec, biased in ROUTERS:
        yield _router(name, spec, biased, ties=False)
    yield _router("ties", RouterSpec("softmax", 12, 4, True, 1.0), False, ties=True)


def _router(name: str, spec: RouterSpec, biased: bool, *, ties: bool) -> Case:
    def prepare() -> tuple[Run, Expect]:
        rng = random(f"router {name}")
        logits = (2 * rng.standard_normal((13, spec.experts))).astype(np.float32)
        if ties:
            logits = np.round(logits).astype(np.float32)
        bias = (0.3 * rng.standard_normal(spec.experts)).astype(np.float32)

        def run(device: Device) -> list[Array]:
            def record(r: Recorder, b: dict[str, Rows]) -> Sequence[Rows]:
                vector = device.vector("bias", bias) if biased else None
                r.router(b["logits"], vector, b["chosen_ids"], b["w"], spec=spec)
                return b["chosen_ids"], b["w"]

            return run_rows(device, {"logits": logits}, {"chosen_ids": spec.top_k, "w": spec.top_k}, record)

        def expect(precision: str) -> list[Expected]:
            given = bias.astype(np.float64) if biased else np.zeros(spec.experts)
            rows = [route(row.astype(np.float64), given, spec) for row in logits]
            weights = np.stack([row[1] for row in rows])
            return [Expected(np.stack([row[0] for row in rows])), Expected(weights, 40 * ROUNDING * weights, weights)]

        return run, expect

    return _simple("router", name, prepare)


def route(logits: F64, bias: F64, spec: RouterSpec) -> tuple[Array, F64]:
    """Experts in routing order, and their weights."""
    scores = oracle.sigmoid(logits) if spec.score == "sigmoid" else oracle.softmax(logits)
    choice = scores + bias
    allowed = list(range(spec.experts))
    if spec.groups > 1:
        size = spec.experts // spec.groups
        best = {g: sum(sorted(choice[g * size : (g + 1) * size])[-2:]) for g in range(spec.groups)}
        kept = sorted(best, key=lambda g: (-best[g], g))[: spec.top_groups]
        allowed = [e for e in allowed if e // size in kept]
    ids = sorted(allowed, key=lambda e: (-choice[e], e))[: spec.top_k]
    weights = scores[ids]
    if spec.normalise:
        weights = weights / (weights.sum() + 1e-20)
    return np.array(ids), weights * spec.scale


SAMPLERS = ((0.0, 1.0), (1.0, 1.0), (0.7, 0.9), (1.5, 0.5), (0.3, 0.05))


def sample_cases() -> Iterator[Case]:
    """Greedy with ties and NaN; temperatures and top-p over a grid of random numbers; long rows."""
    for temperature, top_p in SAMPLERS:
        yield _sample(temperature, top_p)
    for temperature, top_p in ((0.0, 1.0), (1.0, 0.9), (2.0, 1.0)):
        yield _sample_long(temperature, top_p)


def _sample(temperature: float, top_p: float) -> Case:
    name = f"temperature {temperature:g}, top-p {top_p:g}"

    def prepare() -> tuple[Run, Expect]:
        rng = random(f"sample {name}")
        logits = (2.5 * rng.standard_normal((3, 50))).astype(np.float32)
        logits[1, [7, 31]] = logits[1].max() + 1
        logits[2, 5] = np.nan
        grid = [(row, float(u)) for row in logits for u in (np.arange(40) + 0.37) / 40]
        if temperature == 0:
            grid = [(row, 0.5) for row in logits]
        certain = [pair for pair in grid if draw(*pair, temperature, top_p)[1]]

        def run(device: Device) -> list[Array]:
            found = [device.sample(row, temperature=temperature, top_p=top_p, uniform=u) for row, u in certain]
            return [np.array([found], dtype=np.int32)]

        def expect(precision: str) -> list[Expected]:
            return [Expected(np.array([[draw(row, u, temperature, top_p)[0] for row, u in certain]]))]

        return run, expect

    return _simple("sample", name, prepare)


LONG_ROW = 9000


def _sample_long(temperature: float, top_p: float) -> Case:
    name = f"{LONG_ROW} logits, temperature {temperature:g}, top-p {top_p:g}"

    def prepare() -> tuple[Run, Expect]:
        rng = random(f"sample {name}")
        logits = (3 * rng.standard_normal(LONG_ROW)).astype(np.float32)
        logits[[1500, 4200, 8999]] = logits.max() + np.float32(0.5)  # equals in different blocks
        logits[[0, 5000]] = np.nan, -np.inf
        grid = [(float(k) + 0.37) / 8 for k in range(8)] if temperature else [0.5]
        drawn = [(u, *draw(logits, u, temperature, top_p)) for u in grid]
        certain = [(u, token) for u, token, known in drawn if known]

        def run(device: Device) -> list[Array]:
            found = [device.sample(logits, temperature=temperature, top_p=top_p, uniform=u) for u, _ in certain]
            return [np.array([found], dtype=np.int32)]

        def expect(precision: str) -> list[Expected]:
            return [Expected(np.array([[token for _, token in certain]]))]

        return run, expect

    return _simple("sample", name, prepare)


def draw(logits: F32, uniform: float, temperature: float, top_p: float) -> tuple[int, bool]:
    """The token, and whether float32 cannot change it."""
    values = np.where(np.isfinite(logits), logits.astype(np.float64), -np.inf)
    if temperature == 0:
        return int(np.argmax(values)), True
    weights = oracle.softmax(values / temperature)
    order = sorted(range(len(values)), key=lambda t: (-weights[t], t))
    kept, total, certain = [], 0.0, True
    for token in order:
        kept.append(token)
        total += weights[token]
        certain = certain and abs(total - top_p) > 1e-5
        if total >= top_p:
            break
    reached, token = 0.0, -1
    for token in sorted(kept):
        reached += weights[token] / total
        certain = certain and abs(reached - uniform) > 1e-5
        if uniform < reached:
            break
    return token, certain or (top_p == 1.0 and abs(reached - uniform) > 1e-5)


def plain_cases() -> Iterator[Case]:
    """All of the above."""
    yield from norm_cases()
    yield from rope_cases()
    yield from sum_cases()
    yield from router_cases()
    yield from sample_cases()
