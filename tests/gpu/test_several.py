"""A model shared by several devices gives the CPU's bits, wherever the borders are and whichever device fails.

Without GPUs Triton's interpreter plays each device, so few tokens must do; the borders are set by hand.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import convert_models as tiny
import numpy as np
import pytest
from gpu_support import IDS, cpu_logits, logits, opened, same_bits, three_devices, torch, two_devices

from picaflor.backends.api import Chance, draw_rows
from picaflor.backends.cuda import several
from picaflor.backends.cuda.backend import CudaBackend, chosen_devices
from picaflor.backends.cuda.several_recorder import SeveralRecorder
from picaflor.backends.device import sample_on_host
from picaflor.errors import OutOfBudget, UsageError
from picaflor.runtime.engine import Engine, EngineOptions
from picaflor.runtime.kvcache import PAGE_TOKENS, Sequence
from picaflor.runtime.plan import load_backend
from picaflor.runtime.runner import Work
from picaflor.telemetry.report import rows

GLM = "tiny_glm_int4g64"
TWO = {"backend": "cuda", "device": "0,1"}

pytestmark = two_devices


@pytest.fixture(scope="module")
def expected() -> Any:
    """What the CPU says."""
    return cpu_logits(GLM, IDS[:4])


def cut(monkeypatch: pytest.MonkeyPatch, *at: int) -> None:
    """Let layers `at` be the first ones of the second and of later devices."""

    def ranges(needs: Any, rooms: Any, **_: int) -> tuple[range, ...]:
        ends = [0, *at, len(needs)]
        assert len(rooms) == len(ends) - 1
        return tuple(range(ends[number], ends[number + 1]) for number in range(len(rooms)))

    monkeypatch.setattr(several, "spread", ranges)


def devices_of(engine: Engine) -> list[CudaBackend]:
    """The backends of single devices."""
    backend: Any = engine.plan.backend
    return list(backend.backends)


# ---- bits ----


@pytest.mark.parametrize("first", [2, 3])
def test_a_border_before_a_layer(first: int, expected: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cut(monkeypatch, first)
    with opened(GLM, **TWO) as engine:
        assert same_bits(logits(engine, IDS[:2], chunk=2), expected[:2])
        found = devices_of(engine)
        assert [backend.calls["attention"] for backend in found] == [first, 5 - first]
        assert [backend.calls["expert_ffn"] for backend in found] == [max(0, first - 3), 2 - max(0, first - 3)]
        assert [backend.calls["embed"] for backend in found] == [1, 0]
        assert [backend.calls["select_outputs"] for backend in found] == [0, 1]
        program: Any = engine.plan.forward.program
        assert [[border.buffer.width for border in stage.borders] for stage in program.stages] == [[], [128]]


@three_devices
def test_three_devices_in_steps_of_single_tokens(expected: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With borders before the layers that are left."""
    cut(monkeypatch, 1, 4)
    with opened(GLM, backend="cuda", device="2,0,1") as engine:
        assert same_bits(logits(engine, IDS[:2], chunk=1), expected[:2])
        found = devices_of(engine)
        assert [backend.number for backend in found] == [2, 0, 1]
        assert [backend.calls["attention"] for backend in found] == [2 * 1, 2 * 3, 2 * 1]
        assert [backend.tier.experts for backend in found] == [0, 8, 8]
        assert engine.record().memory.device_experts == 16
        assert engine.record().fallbacks == {}
        seconds = engine.plan.forward.program.seconds()
        assert all(seconds[name] > 0 for name in ("attention", "matmul", "experts", "router", "head")), seconds


def test_layers_are_shared_by_their_bytes() -> None:
    """The experts of layers 3 and 4 take more than the dense layers."""
    warnings: list[str] = []
    with opened(GLM, **TWO, warnings=warnings) as engine:
        backend: Any = engine.plan.backend
        assert [backend.layers(place) for place in (0, 1)] == [[0, 1, 2], [3, 4]]
    told = [line for line in warnings if line.startswith("--device")]
    assert told == ["--device 0,1: layers 0 to 2 on device 0, layers 3 to 4 on device 1"]


def test_what_each_device_holds(expected: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cut(monkeypatch, 4)
    chances = [Chance(0.0, 1.0, 0.0), Chance(1.0, 0.9, 0.7)]
    with opened(GLM, **TWO) as engine:
        assert same_bits(logits(engine, IDS[:2], chunk=2), expected[:2])
        backend: Any = engine.plan.backend
        drawn = engine.runner.draw(backend, chances)
        assert drawn == draw_rows(expected[:2], chances, sample_on_host)
        assert [one.calls["sample"] for one in backend.backends] == [0, 1]  # where the logits are
        resident = engine.plan.resident_memory
        assert backend.released == sum(plane.nbytes for plane in resident)  # the host keeps no copy
        assert not any(plane.any() for plane in resident)
        assert backend.vram_used() == sum(one.vram_used() for one in devices_of(engine))
        assert [one.tier.all_here for one in devices_of(engine)] == [True, True]
        page = PAGE_TOKENS * (32 + 8) * 4  # of one layer
        assert [one.kv_bytes() for one in devices_of(engine)] == [4 * page, page]
        assert backend.kv_bytes() == 5 * page
        shares = engine.record().devices
        assert len(shares) == 2
        assert re.fullmatch(r"0: layers 0 to 3; 8 of 8 experts, [0-9.]+ MiB", shares[0]), shares
        assert re.fullmatch(r"1: layer 4; 8 of 8 experts, [0-9.]+ MiB", shares[1]), shares
        assert [text for label, text in rows(engine.record()) if label == "device"] == list(shares)


def checkpoint(path: Path, config: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> Path:
    """A tiny model with random weights, without a tokenizer."""
    tiny.write_checkpoint(path, config, tiny.random_weights(shapes))
    (path / "tokenizer.json").unlink()
    (path / "chat_template.jinja").unlink()
    return path


def test_a_selection_that_is_shared_over_a_border(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second layer uses the first one's selection of 4 positions; there are 7."""
    shapes = {name: shape for name, shape in tiny.glm_shapes().items() if not re.search("layers.(1.*indexer|2)", name)}
    config = {**tiny.GLM, "index_topk": 4, "indexer_types": ["full", "shared"], "num_nextn_predict_layers": 0}
    path = checkpoint(tmp_path, config, shapes)
    ids = np.array([5, 77, 12, 9, 41, 60, 8], np.int32)
    cut(monkeypatch, 1)
    wanted = cpu_logits(path, ids)
    with opened(path, **TWO) as engine:
        assert same_bits(logits(engine, ids, chunk=6), wanted)
        program: Any = engine.plan.forward.program
        kinds = [
            sorted((border.buffer.dtype, border.buffer.width) for border in stage.borders) for stage in program.stages
        ]
        assert kinds == [[], [("f32", 256), ("i32", 5)]]
        assert [backend.calls["index_select"] for backend in devices_of(engine)] == [2, 0]


def test_grouped_queries_and_a_tied_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cut(monkeypatch, 1)
    path = checkpoint(tmp_path, tiny.QWEN, tiny.qwen_shapes())
    ids = np.array([5, 77, 12, 9, 41], np.int32)
    wanted = cpu_logits(path, ids)
    with opened(path, **TWO) as engine:
        assert same_bits(logits(engine, ids, chunk=3), wanted)
        one, other = devices_of(engine)
        table = 96 * 64 * 2
        for backend in (one, other):  # each has its layer and the table that is embedding here and head there
            assert backend._matrices.nbytes == 2 * (64 * 64 * 2 + 2 * 32 * 64 + 3 * 64) + table
        assert (one.calls["embed"], other.calls["embed"], other.calls["select_outputs"]) == (2, 0, 2)


def test_a_draft_head_lies_with_the_last_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = checkpoint(tmp_path, tiny.GLM, tiny.glm_shapes())
    cut(monkeypatch, 1)
    with opened(path, backend="cpu", draft=True) as engine:
        wanted = _drafted(engine)
    with opened(path, **TWO, draft=True) as engine:
        found = _drafted(engine)
        draft: Any = engine.plan.draft
        assert [stage.device for stage in draft.program.stages] == [1]
        assert [backend.calls["embed"] for backend in devices_of(engine)] == [1, 1]
    assert all(same_bits(one, other) for one, other in zip(found, wanted, strict=True))
    with opened(path, **TWO) as engine:  # its vectors are read, its layer lies nowhere
        assert same_bits(logits(engine, IDS[[0, 1, 4]] % 96), wanted[0])


def _drafted(engine: Engine) -> tuple[Any, Any]:
    """Logits of three tokens, and the draft's for the tokens behind them."""
    main, draft, sequence = engine.plan.forward, engine.plan.draft, Sequence()
    assert draft is not None
    first = engine.runner.step([Work(sequence, IDS[[0, 1, 4]] % 96, "all")]).copy()
    hidden = main.program.view(main.hidden, 3).copy()
    draft.program.write(draft.hidden_in, hidden)
    batch = engine.runner._batch([Work(Sequence(), IDS[[1, 4, 5]] % 96, "all")])
    draft.program.run(batch, engine.plan.store)
    return first, draft.program.view(draft.logits, 3).copy()


def test_a_row_has_one_result_beside_any_others(expected: Any) -> None:
    with opened(GLM, **TWO) as engine:
        texts = [IDS[:2], IDS[::-1][:3].copy()]
        together = engine.runner.step([Work(Sequence(), ids, "all") for ids in texts]).copy()
    assert same_bits(together[:2], expected[:2])
    assert not np.array_equal(together[2], expected[0])


def test_few_slots_on_each_device(expected: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cut(monkeypatch, 4)
    with opened(GLM, **TWO) as engine:
        for backend, slots in zip(devices_of(engine), (1, 3), strict=True):
            backend.tier.most_slots = slots
        assert same_bits(logits(engine, IDS[:3], chunk=2), expected[:3])
        assert [backend.tier.slots for backend in devices_of(engine)] == [1, 3]
        assert not any(backend.tier.all_here for backend in devices_of(engine))


# ---- failures ----


@pytest.mark.parametrize(("fail_after", "counts"), [(0, [0, 0]), (100, [81, 19])])
def test_calls_are_counted_over_all_devices(
    fail_after: int, counts: list[int], expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step has 81 calls of the first device; behind the last one allowed, each hands over when its turn comes."""
    warnings: list[str] = []
    cut(monkeypatch, 4)
    with opened(GLM, **TWO, fail_after=fail_after, warnings=warnings) as engine:
        assert same_bits(logits(engine, IDS[:4], chunk=2), expected)
        found = devices_of(engine)
        assert sum(backend.calls.total() for backend in found) == fail_after
        assert [backend.calls.total() for backend in found] == counts
        assert sum(engine.record().fallbacks.values()) == 2
    assert len([line for line in warnings if "PICAFLOR_FAIL_AFTER" in line]) == 1


@pytest.mark.parametrize(("failing", "after"), [(0, 0), (1, 25)])
def test_one_device_fails_and_the_other_goes_on(
    failing: int, after: int, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first step or in a later one, amid its layers: rows that it had changed are brought to the host anew."""
    cut(monkeypatch, 2)
    with opened(GLM, **TWO) as engine:
        found = devices_of(engine)
        backend = found[failing]
        backend._fail_after, backend.counted = after, (backend.calls,)
        assert same_bits(logits(engine, IDS[:4], chunk=2), expected)
        program: Any = engine.plan.forward.program
        assert [stage.program.on_host for stage in program.stages] == [failing == 0, failing == 1]
        assert backend.calls.total() == after
        back = [bool(plane.any()) for plane in engine.plan.resident_memory]  # read again: only what the host needs
        assert any(back)
        assert not all(back)
        assert found[1 - failing].calls["attention"] == 2 * (3 if failing == 0 else 2)


def test_one_device_is_out_of_memory_in_a_run(expected: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It begins again with fewer experts and with the rows that the other device gave; twice is an error."""
    warnings: list[str] = []
    cut(monkeypatch, 4)
    with opened(GLM, **TWO, warnings=warnings) as engine:
        program: Any = engine.plan.forward.program
        part = program.stages[1].program
        guard, failed = part._guard, [0, 0]

        def fails(op: str) -> None:
            failed[1] += 1
            if op == "router" and not failed[0]:
                failed[0] += 1
                raise torch.OutOfMemoryError("out of memory")
            guard.allowed(op)

        monkeypatch.setattr(part, "_guard", replace(guard, allowed=fails))
        assert same_bits(logits(engine, IDS[:2]), expected[:2])
        assert failed[0] == 1
        failed[0] = 0
        with pytest.raises(OutOfBudget, match=r"^device 1: the device is out of memory: out of memory$"):
            logits(engine, IDS[:1])
        assert [backend.tier.slots for backend in devices_of(engine)] == [8, 6]
    told = [line for line in warnings if "out of memory" in line]
    assert len(told) == 1
    assert told[0].startswith("device 1: the device is out of memory: expert slots go from 8 to 6")


def test_memory_that_fits_no_device_by_whole_layers() -> None:
    with (
        pytest.raises(OutOfBudget, match=r"of matrices and cache do not fit the devices by whole layers.*raise --vram"),
        opened(GLM, **TWO, vram_bytes=1 << 20),
    ):
        pass


# ---- choosing devices ----


def test_devices_that_are_not_there_are_refused() -> None:
    count = len(chosen_devices("cuda", "all"))
    assert chosen_devices("cuda", "auto") == [0]
    assert chosen_devices("cuda", "1") == [1]
    assert chosen_devices("cuda", "1,0") == [1, 0]
    text = rf"--device 0,{count}: backend cuda has no device {count}; there are 0 \(\w.*\), 1 \("
    with pytest.raises(UsageError, match=text):
        chosen_devices("cuda", f"0,{count}")


def test_a_backend_without_numbers_refuses_the_option() -> None:
    text = "--device 0,1: backend cpu has no devices to choose from; cuda, rocm have"
    with pytest.raises(UsageError, match=text), opened(GLM, backend="cpu", device="0,1"):
        pass


def test_one_device_by_its_number(expected: Any) -> None:
    with opened(GLM, backend="cuda", device="1") as engine:
        backend: Any = engine.plan.backend
        assert isinstance(backend, CudaBackend)
        assert backend.number == 1
        assert same_bits(logits(engine, IDS[:2]), expected[:2])


# ---- what is recorded wrongly ----


def _recorder(device: str = "0,1") -> tuple[Any, SeveralRecorder]:
    backend: Any = load_backend(EngineOptions(backend="cuda", device=device, threads=1), lambda text: None)
    backend._places = {0: 0, 1: 1, 2: 0}
    return backend, backend.recorder(max_rows=2, max_outputs=2, page_tokens=16, pages=1)


def _norm(backend: Any, layer: int) -> Any:
    return backend.vector(f"model.layers.{layer}.input_layernorm.weight", np.ones(8, np.float32))


@three_devices
def test_rows_come_from_the_device_that_wrote_them_last() -> None:
    """x goes from device to device; y is written on the first one and read on the third."""
    backend, recorder = _recorder("0,1,2")
    backend._places = {0: 0, 1: 1, 2: 2}
    x, y = recorder.rows(8), recorder.rows(8)
    recorder.rmsnorm(x, _norm(backend, 0), y, eps=1e-6)
    recorder.rmsnorm(x, _norm(backend, 1), x, eps=1e-6)
    recorder.rmsnorm(y, _norm(backend, 2), y, eps=1e-6)
    recorder.add(x, y)
    stages = recorder.finish().stages
    borders = [[(border.source, border.buffer) for border in stage.borders] for stage in stages]
    assert borders == [[], [], [(0, y.handle), (1, x.handle)]]
    assert [stage.given for stage in stages] == [{x.handle}, {x.handle}, set()]


def test_layers_out_of_order_are_refused() -> None:
    backend, recorder = _recorder()
    x = recorder.rows(8)
    for layer in (0, 1, 2):
        recorder.rmsnorm(x, _norm(backend, layer), x, eps=1e-6)
    with pytest.raises(ValueError, match=re.escape("layers in the order of devices [0, 1, 0]")):
        recorder.finish()


def test_a_border_behind_select_outputs_is_refused() -> None:
    backend, recorder = _recorder()
    x, y = recorder.rows(8), recorder.rows(8)
    recorder.rmsnorm(x, _norm(backend, 0), x, eps=1e-6)
    recorder.select_outputs(x, y)
    recorder.rmsnorm(y, _norm(backend, 1), y, eps=1e-6)
    with pytest.raises(ValueError, match="rmsnorm of another device behind select_outputs"):
        recorder.finish()


def test_a_layer_that_was_not_placed_is_refused() -> None:
    backend, recorder = _recorder()
    x = recorder.rows(8)
    recorder.rmsnorm(x, _norm(backend, 3), x, eps=1e-6)  # may be held: a draft head may be left out
    with pytest.raises(ValueError, match=re.escape("layer 3 lies on no device; placed are [0, 1, 2]")):
        recorder.finish()
