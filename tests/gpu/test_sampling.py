"""Tokens that a GPU backend draws are the CPU's, row by row, and only they come to the host.

Without a GPU Triton's interpreter runs the kernels.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
from gpu_support import torch

from picaflor.backends.api import NO_TOKEN, Chance, draw_rows
from picaflor.backends.cpu.backend import CpuBackend
from picaflor.backends.cuda.backend import CudaBackend, open_backend
from picaflor.backends.cuda.program import CudaProgram
from picaflor.backends.cuda.sampling import MOST_TOKENS, Drawer
from picaflor.backends.device import sample_on_host
from picaflor.errors import UnsupportedKernel
from picaflor.formats.base import F32
from picaflor.runtime.generate import Generation, SamplingOptions
from picaflor.runtime.kvcache import PagePool, Sequence
from picaflor.runtime.runner import Runner, Work
from picaflor.runtime.sampler import Sampling

TEMPERATURES = (0.0, 1e-6, 1e-3, 0.3, 0.7, 1.0, 2.0, 100.0)
TOP_P = (1e-9, 1e-3, 0.05, 0.5, 0.9, 0.999, 1 - 2.0**-53, 1.0)
WIDTHS = (1, 2, 16, 17, 50, 1000, 1024, 1025, 5000)


@pytest.fixture(scope="module")
def backend() -> CudaBackend:
    return CudaBackend()


def some_rows(rng: np.random.Generator, kind: str, rows: int, width: int) -> F32:
    """Logits of one kind."""
    x = (rng.choice([0.01, 0.5, 2.5, 10]) * rng.standard_normal((rows, width))).astype(np.float32)
    if kind == "rounded":
        x = np.round(x * 2) / np.float32(2)
    elif kind == "equal":
        x[:] = x[:, :1]
    elif kind == "not finite":
        for value in (np.nan, -np.inf, np.inf):
            x[rng.random(x.shape) < 0.2] = value
    elif kind == "one alone":
        x[:] = rng.choice([np.nan, -np.inf, np.inf])
        x[0, rng.integers(width)] = 1.0
    elif kind == "huge":
        x *= np.float32(1e37)
    else:
        assert kind == "usual"
    return x


def some_chance(rng: np.random.Generator) -> Chance:
    uniform = float(rng.choice([0.0, rng.random(), rng.random(), 1 - 2.0**-53]))
    return Chance(float(rng.choice(TEMPERATURES)), float(rng.choice(TOP_P)), uniform)


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow")
@pytest.mark.parametrize("kind", ["usual", "rounded", "equal", "not finite", "one alone", "huge"])
def test_rows_of_any_kind_give_the_tokens_of_the_cpu(backend: CudaBackend, kind: str) -> None:
    rng = np.random.default_rng([7, len(kind)])
    drawer = Drawer(backend.device)
    lowest = set()
    for _ in range(20):
        logits = some_rows(rng, kind, int(rng.integers(1, 5)), int(rng.choice(WIDTHS)))
        chances = [some_chance(rng) for _ in logits]
        found = drawer(torch.from_numpy(logits).to(backend.device), chances)
        wanted = draw_rows(logits, chances, sample_on_host)
        tokens = [token if finite else NO_TOKEN for token, finite in found.tolist()]
        assert tokens == wanted, chances
        lowest.add(min(wanted))
    assert (NO_TOKEN in lowest) == (kind in ("not finite", "one alone"))


def test_every_random_number_of_a_grid_gives_the_token_of_the_cpu(backend: CudaBackend) -> None:
    logits = np.round(np.random.default_rng(3).standard_normal((1, 1500)) * 4).astype(np.float32) / 4
    for top_p in (0.95, 1.0):
        chances = [Chance(0.8, top_p, k / 24) for k in range(25)]
        rows = np.repeat(logits, len(chances), axis=0)
        found = Drawer(backend.device)(torch.from_numpy(rows).to(backend.device), chances)
        tokens = draw_rows(rows, chances, sample_on_host)
        assert found[:, 0].tolist() == tokens
        assert len(set(tokens)) > 10


def drawn(backend: CudaBackend, row: F32, chances: list[Chance]) -> list[int]:
    """Tokens of one row, which are those of the CPU."""
    rows = np.repeat(row[None], len(chances), axis=0)
    found: list[int] = Drawer(backend.device)(torch.from_numpy(rows).to(backend.device), chances)[:, 0].tolist()
    assert found == draw_rows(rows, chances, sample_on_host)
    return found


def test_draws_at_the_very_borders(backend: CudaBackend) -> None:
    equal = np.zeros(4, np.float32)  # each counts 2^42
    assert drawn(backend, equal, [Chance(1.0, 1.0, k / 4) for k in range(4)]) == [0, 1, 2, 3]
    assert drawn(backend, np.zeros(8192, np.float32), [Chance(1.0, 1.0, 0.5)]) == [4096]
    last = 1 - 2.0**-53
    quarter, more = 2.0**-2, 2.0**-2 + 2.0**-46  # more: a sixteenth of one count
    assert drawn(backend, equal, [Chance(1.0, p, last) for p in (0.0, quarter, more, last)]) == [0, 0, 1, 3]


@pytest.mark.parametrize(("width", "last"), [(6000, 5800), (10_000, 9000)], ids=["same piece", "piece of its own"])
def test_equals_that_top_p_keeps_in_part_lie_in_several_pieces_of_a_row(
    backend: CudaBackend, width: int, last: int
) -> None:
    """10 equals in front, 10 behind the first 4096; likelier tokens beside both. Two of the latter equals are kept."""
    row = np.full(width, -np.inf, np.float32)
    row[100:110] = row[5000:5010] = 0.0
    row[50] = row[last] = np.log(np.float32(10))
    parts = 2 * 10 + 12  # of 40
    picked = (9, 10, 19, 20, 21, 22, 31)
    tokens = drawn(backend, row, [Chance(1.0, (parts - 0.5) / 40, (k + 0.5) / parts) for k in picked])
    wanted = [50] * 10 + [*range(100, 110), 5000, 5001] + [last] * 10
    assert tokens == [wanted[k] for k in picked]


def test_memory_kept_from_longer_rows_does_not_leak_into_shorter_ones(backend: CudaBackend) -> None:
    rng = np.random.default_rng(4)
    drawer = Drawer(backend.device)
    for rows, width in ((4, 3000), (1, 20), (2, 1500), (4, 3000)):
        logits = some_rows(rng, "usual", rows, width)
        chances = [Chance(1.0, 0.9, float(rng.random())) for _ in range(rows)]
        found = drawer(torch.from_numpy(logits).to(backend.device), chances)
        assert found[:, 0].tolist() == draw_rows(logits, chances, sample_on_host)


def test_part_of_a_wider_buffer_is_drawn_from(backend: CudaBackend) -> None:
    logits = some_rows(np.random.default_rng(5), "usual", 3, 200)
    part = torch.from_numpy(logits).to(backend.device)[:2, 10:110]
    chances = [Chance(1.0, 0.8, 0.4), Chance(0.0, 1.0, 0.0)]
    assert Drawer(backend.device)(part, chances)[:, 0].tolist() == draw_rows(
        np.ascontiguousarray(logits[:2, 10:110]), chances, sample_on_host
    )


def test_a_row_that_is_too_long_is_refused(backend: CudaBackend) -> None:
    with pytest.raises(ValueError, match="a row of 1048577 logits; accepted: up to 1048576"):
        Drawer(backend.device)(torch.zeros((1, MOST_TOKENS + 1), device=backend.device), [Chance(1.0, 1.0, 0.5)])


def test_logits_of_the_host_are_drawn_from_on_the_device_and_counted() -> None:
    device = CudaBackend()
    logits = np.array([1.0, 3.0, 3.0, np.nan], np.float32)
    assert device.sample(logits, temperature=0.0, top_p=1.0, uniform=0.0) == 1
    assert device.sample(np.full(4, np.nan, np.float32), temperature=1.0, top_p=1.0, uniform=0.5) == 0
    assert device.calls["sample"] == 2
    assert dict(device.table.engaged) == {"cuda.sample": 1}


def test_a_call_that_fails_is_drawn_on_the_host_and_told_once() -> None:
    lines: list[str] = []
    device = open_backend(fail_after=1, notice=lines.append)
    logits = np.array([0.5, 2.0, 1.0], np.float32)
    assert [device.sample(logits, temperature=0.0, top_p=1.0, uniform=0.0) for _ in range(3)] == [1, 1, 1]
    assert device.table.fallbacks == {"cuda.sample": 2}
    assert len([line for line in lines if line.startswith("cuda.sample failed: PICAFLOR_FAIL_AFTER=1")]) == 1


def test_strict_refuses_the_host_in_the_place_of_a_failing_call() -> None:
    device = open_backend(fail_after=0, strict=True)
    with pytest.raises(UnsupportedKernel, match=r"cuda\.sample failed: PICAFLOR_FAIL_AFTER=0"):
        device.sample(np.zeros(3, np.float32), temperature=0.0, top_p=1.0, uniform=0.0)


@pytest.mark.parametrize("of_device", [True, False])
def test_drawing_that_is_switched_off_is_the_hosts_counted_and_told_once(of_device: bool) -> None:
    lines: list[str] = []
    device = open_backend(disable=["cuda.sample"], notice=lines.append)
    rows = some_rows(np.random.default_rng(6), "usual", 2, 300)
    chances = [Chance(0.8, 0.9, 0.7), Chance(0.0, 1.0, 0.0)]
    for _ in range(2):
        if of_device:
            found = device._drawing(torch.from_numpy(rows).to(device.device), chances)
        else:
            found = [
                device.sample(row, temperature=chance.temperature, top_p=chance.top_p, uniform=chance.uniform)
                for row, chance in zip(rows, chances, strict=True)
            ]
        assert found == draw_rows(rows, chances, sample_on_host)
    assert lines == [
        "cuda.sample is waived to cpu: disabled by --disable; used for 1 operation; to cure: leave out --disable "
        "cuda.sample"
    ]
    assert (device.table.fallbacks, device.table.engaged) == ({"cuda.sample": 1}, {"cpu.sample": 1})
    assert device.calls["sample"] == 0


@pytest.mark.parametrize(
    ("disable", "strict", "text"),
    [
        (
            ["cuda.sample"],
            True,
            r"cuda\.sample is waived to cpu: disabled by --disable \(an error under --strict; leave",
        ),
        (["cuda.sample", "cpu.sample"], False, r"cpu\.sample is refused: disabled by --disable; nothing can do it"),
    ],
)
def test_drawing_that_nothing_may_do_is_refused_before_a_model_is_recorded(
    disable: list[str], strict: bool, text: str
) -> None:
    with pytest.raises(UnsupportedKernel, match=text):
        small_runner(open_backend(disable=disable, strict=strict))


# ---- answers ----

VOCABULARY, HIDDEN = 70, 8
OPTIONS = SamplingOptions(max_tokens=6, temperature=0.9, top_p=0.95, seed=11)


class Numbers:
    """Tokens as texts."""

    def push(self, token: int) -> str:
        return f"{token} "

    def finish(self) -> str:
        return ""


def small_runner(backend: Any) -> Runner:
    """A model without layers: the logits are products of the last token's row with a head."""
    rng = np.random.default_rng(2)
    recorder = backend.recorder(max_rows=4, max_outputs=4, page_tokens=16, pages=4)
    matrices = []
    for name in ("table", "head"):
        plane = backend.allocate(4 * VOCABULARY * HIDDEN).view(np.float32)
        plane[:] = rng.standard_normal(plane.shape)
        matrices.append(backend.weight(name, "f32", (VOCABULARY, HIDDEN), 0, [plane.view(np.uint8)]))
    x, last, logits = recorder.rows(HIDDEN), recorder.rows(HIDDEN), recorder.rows(VOCABULARY)
    recorder.embed(matrices[0], x)
    recorder.select_outputs(x, last)
    recorder.matmul(last, matrices[1], logits)
    pool = PagePool(pages=4, page_tokens=16)
    return Runner(recorder.finish(), logits, pool, None, max_rows=4, max_outputs=4)


def answer(backend: Any) -> Generation:
    """One answer, in full."""
    runner, sampling = small_runner(backend), Sampling(OPTIONS.temperature, OPTIONS.top_p, OPTIONS.seed)
    generation = Generation(
        runner,
        Sequence(),
        np.array([5, 7, 30], np.int32),
        OPTIONS,
        draw=lambda position: runner.draw(backend, [sampling.chance(position)])[0],
        decoder=Numbers(),
        stop_tokens=frozenset(),
        context=64,
    )
    assert len(list(generation)) == OPTIONS.max_tokens
    return generation


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    """What the CPU answers."""
    found = answer(CpuBackend(threads=1)).tokens
    assert len(set(found)) > 3
    return found


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each buffer that came to the host."""
    seen: list[int] = []
    fetch = CudaProgram.view

    def view(self: CudaProgram, rows: Any, count: int) -> Any:
        seen.append(count)
        return fetch(self, rows, count)

    monkeypatch.setattr(CudaProgram, "view", view)
    return seen


def test_an_answer_has_the_tokens_of_the_cpu_and_its_logits_stay_on_the_device(
    tokens: list[int], fetched: list[int]
) -> None:
    device = CudaBackend()
    generation = answer(device)
    assert generation.tokens == tokens
    assert sum(fetched) == 0
    assert device.calls["sample"] == OPTIONS.max_tokens
    assert device.table.engaged["cuda.sample"] == 1
    assert len(generation.clock.steps) == OPTIONS.max_tokens - 1
    assert sum(generation.clock.steps) == pytest.approx(generation.clock.decode_s)


def test_an_answer_that_the_host_draws_has_the_same_tokens(tokens: list[int], fetched: list[int]) -> None:
    lines: list[str] = []
    device = open_backend(disable=["cuda.sample"], notice=lines.append)
    assert answer(device).tokens == tokens
    assert device.table.fallbacks == {"cuda.sample": 1}
    assert [line.partition(":")[0] for line in lines] == ["cuda.sample is waived to cpu"]


@pytest.mark.parametrize("drawn", [0, 1, 4])
def test_an_answer_goes_on_where_the_device_gives_up(tokens: list[int], drawn: int) -> None:
    """At the draw after so many: a step has three calls, its draw is the fourth."""
    device = CudaBackend(fail_after=4 * drawn + 3)
    assert answer(device).tokens == tokens
    assert device.calls["sample"] == drawn
    assert device.table.fallbacks["cuda.sample"] == 1


def test_rows_of_several_sequences_are_drawn_together() -> None:
    chances = [Chance(1.0, 0.9, 0.3), Chance(0.0, 1.0, 0.0), Chance(0.5, 1.0, 0.99)]
    drawn = []
    for backend in (CpuBackend(threads=1), CudaBackend()):
        runner = small_runner(backend)
        assert runner.advance([Work(Sequence(), np.array([token], np.int32)) for token in (3, 9, 60)]) == 3
        drawn.append(runner.draw(backend, chances))
        assert runner.draws_there == (backend.name == "cuda")
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0])) == 3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="only a GPU is waited for")
def test_a_token_is_waited_for_once() -> None:
    """As torch counts waits, from the token before to this one."""
    device = CudaBackend()
    runner, sequence, token = small_runner(device), Sequence(), 3
    waits = []
    torch.cuda.set_sync_debug_mode("warn")
    try:
        for position in range(8):
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                runner.advance([Work(sequence, np.array([token], np.int32))])
                (token,) = runner.draw(device, [Chance(0.9, 0.9, position / 8)])
            waits.append(sum("synchroniz" in str(warning.message) for warning in seen))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert waits[-4:] == [1, 1, 1, 1], waits
