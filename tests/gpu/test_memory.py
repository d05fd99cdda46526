"""A device's memory: what other programs hold of it, too little of it, and requests that fail."""

from __future__ import annotations

import re
from typing import Any

import pytest
from device_support import GLM
from gpu_support import opened, torch

from picaflor.backends.cuda import weights
from picaflor.backends.cuda.backend import CudaBackend
from picaflor.backends.cuda.formats import hold
from picaflor.device_memory import DeviceMemory
from picaflor.errors import OutOfBudget
from picaflor.runtime.placement import place
from picaflor.runtime.plan import EngineOptions, load_backend
from picaflor.runtime.residents import Residents
from picaflor.runtime.target import find_target
from picaflor.store.budget import Item


@pytest.mark.parametrize(("vram", "lines"), [(None, 1), (9 << 30, 0), (20 << 30, 1)])
def test_r33_a_run_names_what_others_hold(vram: int | None, lines: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line where experts get less memory by it, or less than was asked for."""
    monkeypatch.setattr(CudaBackend, "memory", lambda self: DeviceMemory("Card", 10 << 30, 80 << 30))
    told: list[str] = []
    load_backend(EngineOptions(backend="cuda", threads=1, vram_bytes=vram), told.append)
    assert [line.partition(":")[0] for line in told] == ["another program holds 70 GiB of the 80 GiB of Card"] * lines


def test_r33_a_plan_for_the_device_names_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """It plans with what is free now, or with what --vram says."""
    monkeypatch.setattr(CudaBackend, "memory", lambda self: DeviceMemory("Card", 10 << 30, 80 << 30))
    told: list[str] = []
    now = find_target("cuda", EngineOptions(backend="cuda", threads=1), told.append)
    asked = find_target("cuda", EngineOptions(backend="cuda", threads=1, vram_bytes=70 << 30), told.append)
    assert [line.partition(":")[0] for line in told] == ["another program holds 70 GiB of the 80 GiB of Card"] * 2
    needs = [Item("resident weights", 1 << 30)]
    placed = [place(t.memory, needs, [1 << 30] * 60, in_ram=0, vram=t.vram).on_device for t in (now, asked)]
    assert placed == [7, 60]


def test_the_interpreter_has_no_memory_of_its_own() -> None:
    found = CudaBackend(threads=1).memory()
    assert found is None or 0 < found.free <= found.total


@pytest.mark.parametrize("count", [1, 7])
def test_r35_an_upload_that_fails_is_one_line_that_names_it(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first and the seventh matrix: there is nothing that could shrink, as experts come last."""
    asked: list[str] = []

    def fails(format_name: str, *words: Any) -> Any:
        asked.append(format_name)
        if len(asked) == count:
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried")
        return hold(format_name, *words)

    monkeypatch.setattr(weights, "hold", fails)
    with pytest.raises(OutOfBudget) as told, opened(GLM, backend="cuda"):
        pass
    assert re.match(
        r"the device gives no memory for (model\.|lm_head)\S+, \S+ KiB beside \S+( KiB| bytes| B)? of other matrices "
        r"\(CUDA out of memory\. Tried\): lower --ctx or --prefill-chunk, or leave the device out$",
        str(told.value),
    ), told.value


def test_buffers_and_cache_that_get_no_memory_name_their_option(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, wanted = torch.zeros, (0, 0)

    def zeros(shape: Any, *words: Any, **options: Any) -> Any:
        if shape == wanted:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return whole(shape, *words, **options)

    monkeypatch.setattr(torch, "zeros", zeros)
    recorder = CudaBackend(threads=1).recorder(max_rows=5, max_outputs=1, page_tokens=16, pages=3)
    wanted = (5, 24)
    with pytest.raises(OutOfBudget, match=r"for a buffer of 5 rows of 24 \(.*\): lower --prefill-chunk$"):
        recorder.rows(24)
    wanted = (48, 8)
    text = r"for a part of the key-value cache of 48 tokens, 8 wide \(.*\): lower --ctx$"
    with pytest.raises(OutOfBudget, match=text):
        recorder.kv_plane(3, "latent", 8)


def test_too_little_memory_is_refused_before_a_weight_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices, buffers, cache and room to work come before any expert; what others hold is named."""
    monkeypatch.setattr(Residents, "read_all", lambda *words: pytest.fail("weights were read"))
    least = "KiB of matrices and 512 MiB to work in are needed on the device before any expert, 0 B are left beside"
    with (
        pytest.raises(OutOfBudget, match=f"^backend cuda: .* {least} .*: raise --vram"),
        opened(GLM, backend="cuda", vram_bytes=1 << 20),
    ):
        pass
    monkeypatch.setattr(CudaBackend, "memory", lambda self: DeviceMemory("Card", 500 << 20, 80 << 30))
    with (
        pytest.raises(OutOfBudget, match=r"460 MiB are left .*; another program holds 79\.5 GiB"),
        opened(GLM, backend="cuda"),
    ):
        pass
