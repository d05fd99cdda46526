"""Kernels that are taken away or fail while running: the same bits from the scalar ones, one line, exact counts."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from cli_support import child_environment
from ops_support import batch

import picaflor._native as _native
from picaflor.backends.cpu.backend import open_backend
from picaflor.errors import UnsupportedKernel
from picaflor.formats import REGISTRY
from picaflor.formats.base import F32
from picaflor.runtime.builtin import folder
from picaflor.runtime.engine import Engine, EngineOptions
from picaflor.runtime.generate import SamplingOptions

PROMPT = "The old house stood"
IDS = np.array([5, 77, 300, 12, 9, 1024, 4, 41, 2, 8], np.int32)
GREEDY = SamplingOptions(max_tokens=6, temperature=0.0)
SEGMENTS = 8
"""Of one pass of the built-in model, with 7 runs of experts between them."""
ATTENTION = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
GATED = ("gate_proj", "up_proj", "down_proj")
INDEXER = ", ".join(f"model.layers.*.self_attn.indexer.{n}.weight in 4 layers" for n in ("wk", "wq_b", "weights_proj"))
GROUPED = [
    *(f"model.layers.*.self_attn.{name}.weight in 8 layers" for name in ATTENTION),
    *(f"model.layers.*.mlp.{name}.weight in 1 layer" for name in GATED),
    "experts of layer * in 7 layers",
    *(f"model.layers.*.mlp.shared_experts.{name}.weight in 7 layers" for name in GATED),
]
TENSORS = (
    f"int8-row (model.embed_tokens.weight, {INDEXER}, lm_head.weight), int4-grouped ({', '.join(GROUPED)}), "
    "f32 (model.layers.*.mlp.gate.weight in 7 layers)"
)
"""Every class of its tensors, by format, with the number of layers that have one."""


@contextmanager
def opened(*, warnings: list[str] | None = None, **options: object) -> Iterator[Engine]:
    lines = [] if warnings is None else warnings
    with Engine.open(None, EngineOptions(threads=2, **options), warn=lines.append) as engine:  # type: ignore[arg-type]
        yield engine


def logits(**options: object) -> F32:
    with opened(**options) as engine:
        return np.concatenate([np.array(part) for part in engine.forward_logits(IDS)])


@pytest.fixture(scope="module")
def scalar_logits() -> F32:
    return logits(isa="scalar")


def same_bits(a: F32, b: F32) -> bool:
    return a.shape == b.shape and a.tobytes() == b.tobytes()


@pytest.mark.parametrize("fail_after", [0, 1, 2, 7, 11])
def test_calls_that_fail_are_computed_by_the_scalar_kernels_to_the_same_bits(
    fail_after: int, scalar_logits: F32
) -> None:
    warnings: list[str] = []
    with opened(fail_after=fail_after, warnings=warnings) as engine:
        found = np.concatenate([np.array(part) for part in engine.forward_logits(IDS)])
        fallbacks = engine.record().fallbacks
    assert same_bits(found, scalar_logits)
    # every expert is in memory: one run per layer
    segments, experts = SEGMENTS - (fail_after + 1) // 2, SEGMENTS - 1 - fail_after // 2
    assert fallbacks == {"cpu.segment": segments, "cpu.expert_ffn": experts}
    assert len(warnings) == 1
    call = "expert_ffn" if fail_after % 2 else "segment"
    assert warnings[0] == (
        f"cpu.{call} failed: PICAFLOR_FAIL_AFTER={fail_after} lets every call after the first {fail_after} fail; "
        f"cpu.segment and cpu.expert_ffn are used for {TENSORS}; "
        "cpu-scalar does this and all later such calls; to cure: unset PICAFLOR_FAIL_AFTER"
    )


def test_without_a_failing_call_nothing_is_counted() -> None:
    warnings: list[str] = []
    with opened(fail_after=1000, warnings=warnings) as engine:
        list(engine.forward_logits(IDS))
        assert engine.record().fallbacks == {}
        assert warnings == []
        assert engine.record().kernels["cpu.expert_ffn.int4-grouped"] == SEGMENTS - 1


def test_failing_calls_with_experts_that_come_one_by_one(scalar_logits: F32) -> None:
    assert same_bits(logits(fail_after=9, expert_slots=1), scalar_logits)


@pytest.mark.parametrize(
    ("disable", "line"),
    [
        (
            "cpu.expert_ffn.int4-grouped",
            "cpu.expert_ffn.int4-grouped is waived to cpu-scalar: disabled by --disable; used for experts of layer * "
            "in 7 layers; to cure: leave out --disable cpu.expert_ffn.int4-grouped",
        ),
        ("cpu.matmul", r"cpu.matmul.int4-grouped is waived"),
        ("cpu.row_axpy.int4-grouped", "used for model.layers.*.self_attn.kv_b_proj.weight in 8 layers; to cure: leave"),
        ("cpu.attention", "cpu.attention is waived to cpu-scalar"),
        ("cpu.rmsnorm", "cpu.rmsnorm is waived to cpu-scalar"),
        ("cpu.router", "cpu.router is waived to cpu-scalar"),
        ("cpu.rope", "cpu.rope is waived to cpu-scalar: disabled by --disable; used for"),
    ],
)
def test_a_disabled_kernel_gives_the_same_bits_and_one_line(disable: str, line: str, scalar_logits: F32) -> None:
    warnings: list[str] = []
    with opened(disable=(disable,), warnings=warnings) as engine:
        found = np.concatenate([np.array(part) for part in engine.forward_logits(IDS)])
        fallbacks, kernels = engine.record().fallbacks, engine.record().kernels
    assert same_bits(found, scalar_logits)
    assert {name: count for name, count in kernels.items() if name.startswith("cpu-scalar")} == {
        name.replace("cpu.", "cpu-scalar.", 1): count for name, count in fallbacks.items()
    }
    assert not set(kernels) & set(fallbacks)
    assert any(line in text for text in warnings), warnings
    assert len(warnings) == len(fallbacks) == (3 if disable == "cpu.matmul" else 1)
    assert all(name.startswith(disable) and count > 0 for name, count in fallbacks.items())


def test_only_experts_whose_kernel_is_disabled_are_plain() -> None:
    with opened(disable=("cpu.matmul", "cpu.expert_ffn")) as engine:
        program = engine.plan.forward.program
        assert [call.plain for call in program._calls] == [True] * (SEGMENTS - 1)  # type: ignore[attr-defined]
    with opened(disable=("cpu.matmul",)) as engine:
        program = engine.plan.forward.program
        assert [call.plain for call in program._calls] == [False] * (SEGMENTS - 1)  # type: ignore[attr-defined]


def test_sampling_can_be_disabled_too() -> None:
    warnings: list[str] = []
    texts = []
    for disable in ((), ("cpu.sample",)):
        with opened(disable=disable, warnings=warnings) as engine:
            options = SamplingOptions(max_tokens=12, temperature=0.8, top_p=0.9, seed=3)
            texts.append([piece.token for piece in engine.generate(engine.tokenizer.encode(PROMPT), options)])
            assert engine.record().fallbacks == ({"cpu.sample": 1} if disable else {})
    assert texts[0] == texts[1]
    assert len(warnings) == 1


def test_strict_refuses_a_disabled_kernel_and_a_failing_call() -> None:
    with pytest.raises(UnsupportedKernel, match=r"cpu\.rope is waived to cpu-scalar: disabled by --disable \(an error"):
        logits(disable=("cpu.rope",), strict=True)
    with (
        opened(fail_after=3, strict=True) as engine,
        pytest.raises(UnsupportedKernel, match=r"cpu\.expert_ffn failed: PICAFLOR_FAIL_AFTER=3 .*\(an error und"),
    ):
        list(engine.forward_logits(IDS))


def test_refused_only_where_nothing_is_left() -> None:
    with pytest.raises(
        UnsupportedKernel, match=r"cpu-scalar\.expert_ffn\.int4-grouped is refused: disabled by --disable; usable: "
    ):
        logits(disable=("cpu.expert_ffn", "cpu-scalar.expert_ffn.int4-grouped"))


# the command line: requested and not there is exit 1 with the reason


def picaflor(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "picaflor", *words]
    environ = {**child_environment(), **environment}
    return subprocess.run(command, capture_output=True, text=True, env=environ, timeout=300)


def test_the_text_is_the_same_and_the_record_tells() -> None:
    words = ("run", PROMPT, "-n", "8", "--temperature", "0", "--json")
    good = json.loads(picaflor(*words, "--isa", "scalar").stdout)
    done = picaflor(*words, PICAFLOR_FAIL_AFTER="5")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["text"] == good["text"]
    assert good["record"]["fallbacks"] == {}
    fallbacks = result["record"]["fallbacks"]
    assert set(fallbacks) == {"cpu.segment", "cpu.expert_ffn"}
    assert sum(fallbacks.values()) == 8 * (2 * SEGMENTS - 1) - 5
    assert [line for line in done.stderr.splitlines() if "warning" in line] == [
        f"picaflor: warning: {text}" for text in result["record"]["warnings"]
    ]
    assert len(result["record"]["warnings"]) == 1
    strict = picaflor(*words, "--strict", PICAFLOR_FAIL_AFTER="5")
    assert (strict.returncode, strict.stdout) == (1, "")
    assert strict.stderr.splitlines()[-1].startswith("picaflor: error: cpu.expert_ffn failed: PICAFLOR_FAIL_AFTER=5")
    wrong = picaflor(*words, PICAFLOR_FAIL_AFTER="-1")
    assert wrong.returncode == 2
    assert "PICAFLOR_FAIL_AFTER: '-1' is not accepted; give a whole number from 0" in wrong.stderr


@pytest.mark.parametrize("backend", ["auto", "cpu"])
def test_a_backend_that_cannot_start_ends_the_program_with_its_reason(backend: str) -> None:
    code = (
        "import sys; sys.modules['picaflor._native'] = None; from picaflor.cli import main; "
        f"sys.exit(main(['capabilities', '--backend', '{backend}']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=child_environment(), timeout=120
    )
    assert (done.returncode, done.stdout) == (1, "")
    [line] = done.stderr.splitlines()
    assert line.startswith("picaflor: error: backend cpu cannot start: ")
    assert "_native" in line


@pytest.mark.parametrize("isa", ["avx2", "avx512"])
def test_an_instruction_set_that_is_asked_for_is_never_replaced(isa: str) -> None:
    done = picaflor("capabilities", str(folder()), "--isa", isa, "--json")
    if isa in _native.isas():
        assert json.loads(done.stdout)["isa"] == isa
    else:
        assert (done.returncode, done.stdout) == (2, "")
        assert f"instruction set {isa} is not available" in done.stderr


# every format on its own


def products(format_name: str, **options: object) -> tuple[F32, dict[str, int]]:
    """`[3, 24]`: a matrix of this format, hard samples for weights, times three rows; and what fell back."""
    form = REGISTRY[format_name]
    group = form.group_sizes[0] if form.group_sizes else 0
    rng = np.random.default_rng(5)
    device = open_backend(threads=2, **options)  # type: ignore[arg-type]
    planes = []
    for plane in form.sample(rng, 24, 160, group):
        raw = np.ascontiguousarray(plane).reshape(-1).view(np.uint8)
        memory = device.allocate(raw.nbytes)
        memory[:] = raw
        planes.append(memory)
    weight = device.weight("w", format_name, (24, 160), group, planes)
    recorder = device.recorder(max_rows=3, max_outputs=3, page_tokens=16, pages=1)
    x, out = recorder.rows(160), recorder.rows(24)
    recorder.matmul(x, weight, out)
    program = recorder.finish()
    program.write(x, rng.standard_normal((3, 160)).astype(np.float32))
    program.run(batch([0, 1, 2]))
    return np.array(program.view(out, 3)), dict(device.table.fallbacks)


@pytest.mark.parametrize("format_name", REGISTRY)
def test_a_fallback_is_right_or_refused_for_every_format(format_name: str) -> None:
    wanted, none = products(format_name)
    assert none == {}
    assert np.abs(wanted).max() > 0
    for options, counts in (
        ({"disable": [f"cpu.matmul.{format_name}"]}, {f"cpu.matmul.{format_name}": 1}),
        ({"disable": ["cpu.matmul"]}, {f"cpu.matmul.{format_name}": 1}),
        ({"fail_after": 0}, {"cpu.segment": 1}),
        ({"isa": "scalar"}, {}),
    ):
        found, fallbacks = products(format_name, **options)
        assert same_bits(found, wanted), options
        assert fallbacks == counts
    with pytest.raises(UnsupportedKernel, match=rf"w: cpu-scalar\.matmul\.{format_name} is refused"):
        products(format_name, disable=["cpu.matmul", "cpu-scalar.matmul"])
    with pytest.raises(UnsupportedKernel, match=rf"w: cpu\.matmul\.{format_name} is waived to cpu-scalar: .*--strict"):
        products(format_name, disable=["cpu.matmul"], strict=True)
