"""How experts are read decides speed, never a bit: page cache or not, engine, drives, mapped files.

Compared with == on the built-in model, whose experts lie at whole blocks, and on a copy in the C engine's layout, where
they lie anywhere. Must not know how a read is carried out.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from picaflor.errors import BadContainer, ReadFailed
from picaflor.runtime import builtin
from picaflor.runtime.engine import Engine, EngineOptions, SamplingOptions
from picaflor.store.mapped import MappedStore

PROMPT = list(range(7, 40))
BASE = EngineOptions(context=128, threads=2, expert_slots=2, mapped="off")


@pytest.fixture(scope="module")
def scattered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in model written again by the plain safetensors library: scales far from weights, at any offset."""
    folder = tmp_path_factory.mktemp("scattered")
    source = builtin.folder()
    for path in source.iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, folder / path.name)
    (shard,) = source.glob("*.safetensors")
    tensors = {name: array for name, array in load_file(shard).items() if not name.startswith("__pad__")}
    names = sorted(tensors)
    half = len(names) // 2
    for number, members in enumerate((names[:half], names[half:]), 1):
        kept = {name: tensors[name] for name in members}
        kept["__pad__.0" if number == 1 else "__pad__.1"] = np.zeros(13, np.uint8)
        save_file(kept, folder / f"model-{number:05d}-of-00002.safetensors", metadata=_metadata(shard))
    return folder


def _metadata(shard: Path) -> dict[str, str]:
    from safetensors import safe_open

    with safe_open(shard, "numpy") as file:
        return dict(file.metadata() or {})


def logits(path: Path | None, options: EngineOptions) -> NDArray[np.float32]:
    with Engine.open(path, options) as engine:
        return np.concatenate([rows.copy() for rows in engine.forward_logits(np.array(PROMPT, np.int32))])


@pytest.fixture(scope="module")
def expected() -> NDArray[np.float32]:
    return logits(None, replace(BASE, expert_slots=None))


@pytest.mark.parametrize("where", ["built-in", "scattered"])
@pytest.mark.parametrize(
    "change",
    [
        {"direct": "off"},
        {"direct": "on"},
        {"direct": "on", "read_engine": "io_uring", "queue_depth": 3},
        {"read_engine": "io_uring"},
        {"read_threads": 1, "direct": "on"},
        {"mapped": "on"},
    ],
    ids=str,
)
def test_the_same_bits_however_experts_are_read(
    where: str, change: dict[str, object], expected: NDArray[np.float32], scattered: Path
) -> None:
    found = logits(None if where == "built-in" else scattered, replace(BASE, **change))  # type: ignore[arg-type]
    assert found.shape == expected.shape
    assert (found == expected).all()


def test_two_drives_and_a_split_model_give_the_same_bits(
    expected: NDArray[np.float32], scattered: Path, tmp_path: Path
) -> None:
    copy, first, second = (tmp_path / name for name in ("copy", "first", "second"))
    for folder in (copy, second):
        folder.mkdir()
    shutil.copytree(scattered, first)
    for shard in scattered.glob("*.safetensors"):
        shutil.copy(shard, copy / shard.name)
    moved = first / "model-00002-of-00002.safetensors"
    shutil.move(moved, second / moved.name)
    with pytest.raises(BadContainer, match="1 of 2 shards missing"):
        Engine.open(first, BASE)
    told: list[str] = []
    options = replace(BASE, split=(second,), mirrors=(copy,), direct="on")
    with Engine.open(first, options, warn=told.append) as engine:
        found = np.concatenate([rows.copy() for rows in engine.forward_logits(np.array(PROMPT, np.int32))])
        assert engine.plan.store is not None
        assert not isinstance(engine.plan.store, MappedStore)
        assert min(engine.plan.store._reader.read_bytes) > 0
    assert (found == expected).all()
    assert any("mirror: the model" in text and "shared out" in text for text in told)


def test_a_model_in_memory_is_mapped_without_being_asked(expected: NDArray[np.float32], scattered: Path) -> None:
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no /dev/shm to put a model into")
    folder = Path(f"/dev/shm/picaflor-modes-{os.getpid()}")
    shutil.copytree(scattered, folder)
    try:
        told: list[str] = []
        with Engine.open(folder, replace(BASE, mapped="auto"), warn=told.append) as engine:
            assert [text for text in told if "in mapped files, without effect: --expert-slots;" in text]
            assert isinstance(engine.plan.store, MappedStore)
            found = np.concatenate([rows.copy() for rows in engine.forward_logits(np.array(PROMPT, np.int32))])
            record = engine.record()
            assert record.memory.mapped_bytes is not None
            assert record.memory.mapped_bytes > engine.plan.store.mapped_bytes // 4
            assert sum(item.nbytes for item in engine.plan.ledger.items if "expert" in item.name) == 0
        assert (found == expected).all()
    finally:
        shutil.rmtree(folder)


@pytest.mark.parametrize("mapped", ["off", "on"])
def test_a_file_cut_while_running_is_one_error_and_the_next_answer_is_right(
    scattered: Path, tmp_path: Path, mapped: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(scattered, folder)
    sampling = SamplingOptions(max_tokens=6, temperature=0.0)
    options = replace(BASE, mapped=mapped, expert_slots=1)
    with Engine.open(folder, options) as engine:
        before = [piece.token for piece in engine.generate(PROMPT, sampling)]
        path = folder / "model-00001-of-00002.safetensors"
        whole = path.read_bytes()
        os.truncate(path, len(whole) // 8)
        with pytest.raises(ReadFailed, match="model-00001-of-00002"):
            list(engine.generate([*PROMPT[1:], 3], sampling))
        with path.open("r+b") as file:
            file.write(whole)
        assert [piece.token for piece in engine.generate(PROMPT, sampling)] == before
