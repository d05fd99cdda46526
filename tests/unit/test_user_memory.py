"""What users of other engines suffered from with memory and processors (reports R27 to R31 and R70), as tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from picaflor import cli
from picaflor.backends.cpu.backend import CpuBackend
from picaflor.errors import ContextExceeded, OutOfBudget
from picaflor.runtime import plan as planning
from picaflor.runtime.engine import Engine, EngineOptions
from picaflor.runtime.generate import SamplingOptions
from picaflor.runtime.residents import Residents
from picaflor.store import budget
from picaflor.store.budget import process_memory

MIB = 1 << 20
GIB = 1 << 30


@pytest.fixture(autouse=True)
def no_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


def limited(folder: Path, *, limit: int, used: int, pages: int) -> None:
    """A machine with much memory and a group with a small limit, part of whose usage are file pages."""
    files = {
        "proc/meminfo": "MemAvailable: 67108864 kB\n",
        "proc/self/cgroup": "0::/app\n",
        "proc/self/limits": "",
        "proc/self/status": "",
        "group/app/memory.max": str(limit),
        "group/app/memory.current": str(used),
        "group/app/memory.stat": f"inactive_file {pages}\n",
    }
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_r27_a_group_with_a_limit_on_a_bigger_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The limit counts, not the host; pages of files are not used memory; the plan names where each number is from."""
    limited(tmp_path, limit=4 * GIB, used=3 * GIB, pages=2 * GIB)

    def of_the_group(ram: int | None, *, held: int, threads: int = 0, mapped: int = 0) -> tuple[budget.Source, ...]:
        return budget.memory_sources(
            ram, held=held, threads=threads, proc=tmp_path / "proc", cgroup_mount=tmp_path / "group"
        )

    monkeypatch.setattr(planning, "memory_sources", of_the_group)
    assert cli.main(["plan", "--memory-rate", "10GB", "--disk-rate", "1GB"]) == 0
    out = capsys.readouterr().out
    (line,) = [line for line in out.splitlines() if "smallest counts" in line]
    assert line.split()[0] == "cgroup"
    assert f"{tmp_path}/group/app/memory.max: 88% of 4 GiB less 1 GiB used" in line
    limited(tmp_path, limit=60 * MIB, used=50 * MIB, pages=0)
    assert cli.main(["plan"]) == 1
    assert "allowed are cgroup" in capsys.readouterr().err


def test_r28_more_threads_than_granted_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    granted = planning.backend_part("cpu", "threads").grant()
    words = ["run", "The old house", "-n", "2", "--temperature", "0"]
    assert cli.main([*words, "--threads", str(granted.count + 1)]) == 0
    err = capsys.readouterr().err
    assert f"--threads {granted.count + 1}: {granted}; threads beyond {granted.count} hold the others up" in err
    assert cli.main([*words, "--profile"]) == 0
    err = capsys.readouterr().err
    assert "--threads" not in err
    assert f"{granted.count} thread{'s' * (granted.count != 1)} ({granted})" in err


def test_r29_what_does_not_fit_is_refused_before_a_weight_is_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a weight was read")

    monkeypatch.setattr(Residents, "read_all", refuse)
    assert cli.main(["run", "The old house", "--ram", "45MiB"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = [line for line in err.splitlines() if "error" in line]
    assert "allowed are --ram 45 MiB (given): short of " in line
    assert "give --ram " in line
    assert "lower --ctx (key-value cache (4096 tokens))" in line


def test_r30_a_long_session_stays_in_its_budget() -> None:
    """500 tokens through 2 of 24 experts per layer: memory does not grow after the first of them."""
    options = EngineOptions(expert_slots=2, context=1024, ram_bytes=4096 * MIB)
    greedy = SamplingOptions(max_tokens=250, temperature=0.0, stop=())
    with Engine.open(None, options) as engine:
        prompt = engine.tokenizer.encode("The old house")
        held = []
        for _ in range(2):
            list(engine.generate(prompt, greedy))
            memory = process_memory()
            assert memory is not None
            held.append(memory.charged)
        record = engine.record()
        slots = sum(engine.plan.ledger.slots.values()) + engine.plan.ledger.working_slots
    assert record.memory.resident_experts <= slots < record.memory.all_experts
    assert record.decode.loads > 10 * slots  # they were evicted again and again
    assert held[1] - held[0] < 2 * MIB


def test_r31_experts_that_fit_a_device_are_not_all_held_in_memory_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device with room for all of them: they pass through one slot per layer of the host."""
    prompt, greedy = "The old house", SamplingOptions(max_tokens=8, temperature=0.0)
    with Engine.open(None, EngineOptions(context=128)) as engine:
        expected = [piece.token for piece in engine.generate(engine.tokenizer.encode(prompt), greedy)]
    monkeypatch.setattr(CpuBackend, "takes_experts", lambda self, resident_bytes, expert_bytes: True)
    with Engine.open(None, EngineOptions(context=128)) as engine:
        ledger, store = engine.plan.ledger, engine.plan.store
        assert store is not None
        assert set(ledger.slots.values()) == {1}
        (experts,) = [item.nbytes for item in ledger.items if item.name.startswith("expert slots")]
        assert experts < engine.record().memory.all_expert_bytes / 10
        assert [piece.token for piece in engine.generate(engine.tokenizer.encode(prompt), greedy)] == expected


def test_r70_a_conversation_cannot_grow_beyond_its_cache() -> None:
    with Engine.open(None, EngineOptions(context=128, ram_bytes=4096 * MIB)) as engine:
        greedy = SamplingOptions(max_tokens=1000, temperature=0.0)
        pages = engine.plan.pool.pages
        conversation = [5, 6, 7]
        for _ in range(8):
            conversation += [piece.token for piece in engine.generate(conversation[-60:], greedy)]
            assert engine.finish_reason in ("context", "stop")
        assert engine.plan.pool.pages == pages == 2
        with pytest.raises(ContextExceeded, match=r"the prompt has 128 tokens and the context holds 128.*--ctx"):
            list(engine.generate(np.full(128, 5, np.int32), greedy))
    with pytest.raises(OutOfBudget, match=r"key-value cache \(4096 tokens\) .*lower --ctx"):
        Engine.open(None, EngineOptions(context=4096, ram_bytes=60 * MIB))
