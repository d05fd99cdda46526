"""The whole way of a weight, per format: written into a container, found, resolved, read, streamed, computed.

Knows the writer, `runtime.plan` and one family's config; must not know kernels.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from picaflor.backends.api import Recorder, RouterSpec, Rows
from picaflor.conformance import oracle, plain
from picaflor.conformance.attending import F64
from picaflor.conformance.case import Case, Device, Expect, Matrix, Run, make_matrix, random, run_rows
from picaflor.conformance.check import Array, Expected
from picaflor.conformance.oracle_formats import rotate
from picaflor.conformance.products import Member, apply, expert_sum, group_sizes, stored
from picaflor.conformance.stored import scales, with_scales
from picaflor.container.writer import ContainerWriter, TensorSpec
from picaflor.formats import REGISTRY
from picaflor.formats.base import F32, Format
from picaflor.runtime.kvcache import Sequence as Tokens
from picaflor.runtime.plan import EngineOptions, build
from picaflor.runtime.runner import Runner, Work

VOCABULARY, HIDDEN, INNER, LAYERS = 40, 200, 72, 2
HEADS, KV_HEADS, HEAD_DIM, EXPERTS, TOP_K, THETA, EPS = 4, 2, 24, 6, 3, 1e4, 1e-6
ROUTER = RouterSpec("softmax", EXPERTS, TOP_K, True, 1.0)
RESIDENT_OF_ROTATED = "int8-row"
FLOAT_DTYPES = {"f32": "F32", "bf16": "BF16", "f16": "F16"}
CHUNKS = (13, 1, 4)
LOGIT_BOUND = {"standard": 1e-3, "exact": 1e-5}
"""Most that a logit of the whole pass may be off, as a part of the largest: a net, not a measure of kernels.

In `fast` near ties of the router turn; there the logits of all variants must only have the same bits."""


@dataclass(frozen=True)
class _Model:
    """A small model in stored form."""

    matrices: Mapping[str, Matrix]
    vectors: Mapping[str, F32]
    experts: Mapping[int, Sequence[Member]]
    folder: tempfile.TemporaryDirectory[str] = field(default_factory=tempfile.TemporaryDirectory)


def container_cases(spec: Format) -> Iterator[Case]:
    """One model per format and group size."""
    for size in group_sizes(spec):
        yield _case(spec, size)


def _case(spec: Format, size: int) -> Case:
    name = f"gs {size}, through writer, loader and store" if size else "through writer, loader and store"

    def prepare() -> tuple[Run, Expect]:
        model = make_model(spec, size)
        write(model)
        rng = random(f"container {spec.name} {name}")
        x = rng.standard_normal((5, HIDDEN)).astype(np.float32)
        ids = np.stack([rng.permutation(EXPERTS)[:TOP_K] for _ in x]).astype(np.int32)
        weights = rng.uniform(0.2, 1.0, ids.shape).astype(np.float32)
        tokens = rng.integers(0, VOCABULARY, sum(CHUNKS)).astype(np.int32)

        def run(device: Device) -> list[Array]:
            return _run(model, device, x, ids, weights, tokens)

        def expect(precision: str) -> list[Expected]:
            found = []
            for key in ("model.layers.0.self_attn.q_proj.weight", "lm_head.weight"):
                right = apply(oracle.exactly(x.astype(np.float64)), model.matrices[key], precision)
                found.append(Expected(right.values, right.error, right.terms))
            for layer in range(LAYERS):
                right = expert_sum(model.experts[layer], x, ids, weights, precision)
                found.append(Expected(right.values, right.error, right.terms))
            logits = forward(model, tokens)
            bound = LOGIT_BOUND.get(precision, np.inf) * np.abs(logits).max() * np.ones(logits.shape)
            return [*found, Expected(logits, bound)]

        return run, expect

    return Case("container", spec.name, name, prepare, group_size=size)


def make_model(spec: Format, size: int) -> _Model:
    """Weights of about 1 / sqrt(cols), their scales within a factor of four."""
    rng = random(f"model {spec.name} {size}")
    resident = RESIDENT_OF_ROTATED if spec.activation.rotated else spec.name
    resident_size = 0 if spec.activation.rotated else size
    width = HEADS * HEAD_DIM
    shapes = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), "lm_head.weight": (VOCABULARY, HIDDEN)}
    vectors = {"model.norm.weight": HIDDEN}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        for key, rows in (("q", width), ("k", KV_HEADS * HEAD_DIM), ("v", KV_HEADS * HEAD_DIM)):
            shapes[f"{prefix}self_attn.{key}_proj.weight"] = (rows, HIDDEN)
        shapes[f"{prefix}self_attn.o_proj.weight"] = (HIDDEN, width)
        shapes[f"{prefix}mlp.gate.weight"] = (EXPERTS, HIDDEN)
        vectors |= {f"{prefix}self_attn.{key}_norm.weight": HEAD_DIM for key in ("q", "k")}
        vectors |= {f"{prefix}{key}_layernorm.weight": HIDDEN for key in ("input", "post_attention")}
    inner = ((INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER))
    experts: dict[int, list[Member]] = {}
    for layer in range(LAYERS):
        experts[layer] = []
        for _ in range(EXPERTS):
            gate, up, down = (tame(rng, spec.name, *shape, size) for shape in inner)
            experts[layer].append((gate, up, down))
    return _Model(
        {name: tame(rng, resident, *shape, resident_size) for name, shape in shapes.items()},
        {name: rng.uniform(0.5, 1.5, length).astype(np.float32) for name, length in vectors.items()},
        experts,
    )


def tame(rng: np.random.Generator, format_name: str, rows: int, cols: int, size: int) -> Matrix:
    """A matrix of a format with weights near 1 / sqrt(cols)."""
    spec = REGISTRY[format_name]
    goal = 1 / np.sqrt(cols)
    if spec.activation.group == 0 and spec.scale.plane == -1 and spec.encode is not None:
        values = goal * rng.standard_normal((rows, cols))
        return Matrix(format_name, rows, cols, size, spec.encode(values.astype(np.float32), size))
    matrix = make_matrix(rng, format_name, rows, cols, size)
    spread = float(np.sqrt(np.mean(stored(matrix).codes ** 2)))
    if spec.scale.plane == -1:
        spread *= 4.0  # the lattice's own sub-scales, between 0.25 and 7.75
    grid = goal / spread * 2.0 ** rng.integers(-1, 2, scales(matrix).shape)
    if spec.scale.plane != -1 and spec.planes[spec.scale.plane].dtype == np.uint8:
        grid = 2.0 ** np.round(np.log2(grid))
    return with_scales(matrix, grid)


# ---- the container ----


def write(model: _Model) -> Path:
    """Write the model as the writer does it, with a rule for every matrix."""
    folder = Path(model.folder.name)
    members = {
        f"model.layers.{layer}.mlp.experts.{number}.{key}_proj.weight": matrix
        for layer, layer_members in model.experts.items()
        for number, member in enumerate(layer_members)
        for key, matrix in zip(("gate", "up", "down"), member, strict=True)
    }
    rules = [
        {"pattern": name, "format": matrix.format, "group_size": matrix.group_size}
        for name, matrix in {**model.matrices, **members}.items()
    ]
    writer = ContainerWriter(folder, rules_json=json.dumps({"version": 1, "rules": rules}), max_shard_bytes=1 << 18)
    for name, vector in model.vectors.items():
        writer.add(name, "F32", vector.shape, vector)
    for name, matrix in model.matrices.items():
        writer.add_group(_specs(name, matrix), _producer(name, matrix))
    for layer, layer_members in model.experts.items():
        for number in range(len(layer_members)):
            prefix = f"model.layers.{layer}.mlp.experts.{number}."
            names = {key: f"{prefix}{key}_proj.weight" for key in ("gate", "up", "down")}
            parts = [_producer(name, members[name]) for name in names.values()]
            writer.add_expert(
                down=_specs(names["down"], members[names["down"]]),
                gate=_specs(names["gate"], members[names["gate"]]),
                up=_specs(names["up"], members[names["up"]]),
                produce=lambda parts=parts: {key: array for part in parts for key, array in part().items()},  # type: ignore[misc]
            )
    writer.write()
    (folder / "config.json").write_text(json.dumps(_config()), encoding="utf-8")
    return folder


def _specs(name: str, matrix: Matrix) -> list[TensorSpec]:
    if matrix.format in FLOAT_DTYPES:
        return [TensorSpec(name, FLOAT_DTYPES[matrix.format], (matrix.rows, matrix.cols))]
    planes = REGISTRY[matrix.format].planes
    sizes = (matrix.rows, matrix.cols, matrix.group_size)
    specs = [TensorSpec(name, "U8", (planes[0].nbytes(*sizes),))]
    for plane in planes[1:]:
        dtype = "U8" if plane.dtype == np.uint8 else "F32"
        specs.append(TensorSpec(name + plane.suffix, dtype, (plane.nbytes(*sizes) // plane.dtype.itemsize,)))
    return specs


def _producer(name: str, matrix: Matrix) -> Any:
    suffixes = [plane.suffix for plane in REGISTRY[matrix.format].planes]

    def produce() -> dict[str, Array]:
        return {name + suffix: plane for suffix, plane in zip(suffixes, matrix.planes, strict=True)}

    return produce


def _config() -> dict[str, Any]:
    return {
        "model_type": "qwen3_moe",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "moe_intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "norm_topk_prob": True,
        "max_position_embeddings": 64,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "hidden_act": "silu",
    }


# ---- running it ----


def _run(model: _Model, device: Any, x: F32, ids: Array, weights: F32, tokens: Array) -> list[Array]:
    """Two products and both layers of experts before any norm, and the logits of all tokens in uneven chunks."""
    options = EngineOptions(
        backend=device.name,
        isa=device.isa,
        threads=device.threads,
        precision=device.precision,
        context=32,
        expert_slots=EXPERTS - 1,
    )
    plan = build(Path(model.folder.name), options, progress=lambda *_: None, warn=lambda _: None)
    try:
        found = [_product(plan, name, x) for name in ("model.layers.0.self_attn.q_proj.weight", "lm_head.weight")]
        found += _expert_sums(plan, x, ids, weights)
        runner = Runner(
            plan.forward.program,
            plan.forward.logits,
            plan.pool,
            plan.store,
            max_rows=plan.max_rows,
            max_outputs=plan.max_outputs,
        )
        sequence, logits, start = Tokens(), [], 0
        for count in CHUNKS:
            logits.append(runner.step([Work(sequence, tokens[start : start + count], "all")]).copy())
            start += count
        return [*found, np.concatenate(logits)]
    finally:
        plan.close()


def _product(plan: Any, name: str, x: F32) -> Array:
    """x times a matrix as the container gives it."""
    matrix = plan.index.matrices[name]
    planes = []
    for span in matrix.spans:
        planes.append(plan.backend.allocate(span.nbytes))
        plan.container.read_into(span, planes[-1].data[: span.nbytes])
    weight = plan.backend.weight(name, matrix.format, (matrix.rows, matrix.cols), matrix.group_size, planes)

    def record(r: Recorder, b: dict[str, Rows]) -> Sequence[Rows]:
        r.matmul(b["x"], weight, b["y"])
        return (b["y"],)

    return run_rows(plan.backend, {"x": x}, {"y": matrix.rows}, record)[0]


def _expert_sums(plan: Any, x: F32, ids: Array, weights: F32) -> list[Array]:
    """Both layers of experts, from the store's slots."""

    def record(r: Recorder, b: dict[str, Rows]) -> Sequence[Rows]:
        for layer in range(LAYERS):
            out, layouts = b[f"y{layer}"], plan.store.layouts(layer)
            r.experts(b["x"], b["e_ids"], b["w"], out, layer=layer, layouts=layouts)
        return [b[f"y{layer}"] for layer in range(LAYERS)]

    inputs = {"x": x, "e_ids": ids, "w": weights}
    return run_rows(plan.backend, inputs, {f"y{n}": HIDDEN for n in range(LAYERS)}, record, experts=plan.store)


# ---- the whole pass in float64 ----


def forward(model: _Model, tokens: Array) -> F64:
    """Logits of all tokens of one sequence, `[tokens, vocabulary]`."""

    @cache
    def matrix(name: str) -> F64:
        return stored(model.matrices[name]).weights

    def norm(values: F64, name: str) -> F64:
        return oracle.rmsnorm(values, model.vectors[name].astype(np.float64), EPS).values

    x = matrix("model.embed_tokens.weight")[tokens]
    positions = range(len(tokens))
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        given = norm(x, f"{prefix}input_layernorm.weight")
        parts = {key: given @ matrix(f"{prefix}self_attn.{key}_proj.weight").T for key in ("q", "k", "v")}
        for key in ("q", "k"):
            heads = norm(parts[key].reshape(len(tokens), -1, HEAD_DIM), f"{prefix}self_attn.{key}_norm.weight")
            parts[key] = oracle.rope(heads, positions, 0, HEAD_DIM, THETA, "half").values
        x = x + _attend(parts) @ matrix(f"{prefix}self_attn.o_proj.weight").T
        given = norm(x, f"{prefix}post_attention_layernorm.weight")
        routed = [plain.route(row, np.zeros(EXPERTS), ROUTER) for row in given @ matrix(f"{prefix}mlp.gate.weight").T]
        x = x + _mixture(model.experts[layer], given, routed)
    return norm(x, "model.norm.weight") @ matrix("lm_head.weight").T


def _attend(parts: Mapping[str, F64]) -> F64:
    count = len(parts["q"])
    values = parts["v"].reshape(count, KV_HEADS, HEAD_DIM)
    out = np.zeros((count, HEADS, HEAD_DIM))
    for t in range(count):
        for head in range(HEADS):
            group = head // (HEADS // KV_HEADS)
            scores = parts["k"][: t + 1, group] @ parts["q"][t, head] / np.sqrt(HEAD_DIM)
            out[t, head] = oracle.soft_mix(scores, 0.0, values[: t + 1, group]).values
    return out.reshape(count, -1)


def _mixture(members: Sequence[Member], given: F64, routed: Sequence[tuple[Array, F64]]) -> F64:
    out = np.zeros(given.shape)
    for row, (ids, weights) in enumerate(routed):
        for number, weight in zip(ids, weights, strict=True):
            gate, up, down = members[number]
            hidden = oracle.silu(_times(given[row], gate)) * _times(given[row], up)
            out[row] += weight * _times(hidden, down)
    return out


def _times(x: F64, matrix: Matrix) -> F64:
    """One row times a stored matrix."""
    turned = rotate(x[None])[0] if REGISTRY[matrix.format].activation.rotated else x
    out: F64 = stored(matrix).weights @ turned
    return out
