"""`eval` and `bench decode` as commands, with a made-up engine."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from picaflor.backends.api import I32
from picaflor.cli.app import run_command_line
from picaflor.formats.base import F32
from picaflor.runtime import bench
from picaflor.runtime.lossy import Lossy
from picaflor.settings import Settings
from picaflor.telemetry.record import Memory, Phase, Record


class FakeTokenizer:
    """Bytes are tokens. `read` of them were asked for."""

    read = 0

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_pieces(self, chunks: Iterable[str]) -> Iterator[tuple[list[int], int]]:
        for chunk in chunks:
            for byte in chunk.encode():
                self.read += 1
                yield [byte], 1


class FakeEngine:
    """Every token is as likely as any other of 256, but for token 97, which has twice the chance."""

    name = "fake"
    vocabulary = 256
    isa = "scalar"
    threads = 3
    context = 90

    def __init__(self) -> None:
        self.tokenizer = FakeTokenizer()
        self.replays: list[tuple[list[int], list[int]]] = []

    def forward_logits(self, ids: I32) -> Iterator[F32]:
        logits = np.zeros((len(ids), 256), np.float32)
        logits[:, 97] = math.log(2)
        yield logits

    def decode_replay(self, prompt: Sequence[int], tokens: Sequence[int]) -> list[float]:
        self.replays.append((list(prompt), list(tokens)))
        return [0.5] * len(tokens)

    plan = SimpleNamespace(backend=SimpleNamespace(name="cpu", on_device=False), lossy=Lossy(), store=None)

    def memory_probe(self) -> Any:
        return lambda: 40e6

    def disk_limit(self) -> None:
        return None

    def bytes_per_token(self) -> dict[str, int]:
        return {"experts": 3_000_000, "head": 1_000_000}

    def record(self) -> Record:
        return Record(model="fake", threads=3, isa="scalar", decode=Phase(tokens=4, hits_lru=3, loads=1, read_bytes=80))


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    """Stands behind both commands; `opened` has what they asked for."""
    fake = FakeEngine()
    fake.opened = []  # type: ignore[attr-defined]

    @contextmanager
    def open_engine(word: str | None, settings: Settings) -> Iterator[FakeEngine]:
        fake.opened.append((word, settings))  # type: ignore[attr-defined]
        yield fake

    for name in ("eval", "bench_decode"):
        monkeypatch.setattr(importlib.import_module(f"picaflor.cli.{name}"), "open_engine", open_engine)
    return fake


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    (tmp_path / "all-a.txt").write_text("a" * 21)
    (tmp_path / "mixed.txt").write_text("xyz" * 7)
    return tmp_path


def run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert run_command_line(arguments) == 0
    record: dict[str, Any] = json.loads(capsys.readouterr().out)
    return record


def test_eval_as_json(engine: FakeEngine, texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = run(["eval", "m", "--text", str(texts), "--window", "10", "--json"], capsys)
    first, second = record["files"]
    assert (first["name"], first["tokens"], first["windows"]) == ("all-a.txt", 20, 2)
    assert first["mean_nll"] == pytest.approx(math.log(257 / 2), abs=1e-7)
    assert first["perplexity"] == pytest.approx(128.5, rel=1e-6)
    assert second["mean_nll"] == pytest.approx(math.log(257), abs=1e-7)
    assert (record["model"], record["window"], record["precision"]) == ("fake", 10, "standard")
    ((word, settings),) = engine.opened  # type: ignore[attr-defined]
    assert (word, settings.ctx) == ("m", 10)


def test_eval_as_a_table(engine: FakeEngine, texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(["eval", "m", "--text", str(texts / "mixed.txt"), "--window", "4", "--limit", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "fake, windows of 4 tokens"
    assert lines[2].split()[:4] == ["mixed.txt", "8", "5.54908", "257.0000"]
    assert engine.tokenizer.read == 5 + 9  # is there a window; two windows of 4 and the last target: not all 21


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (
            ["--window", "21"],
            1,
            "nothing to score: all-a.txt: 21 tokens; one window needs 22 (--window 21); mixed.txt: 21",
        ),
        (["--window", "10", "--ctx", "9"], 2, "--ctx 9 is shorter than --window 10"),
        (["--window", "0"], 2, "--window"),
    ],
)
def test_eval_refusals(
    engine: FakeEngine,
    texts: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    message: str,
) -> None:
    assert run_command_line(["eval", "m", "--text", str(texts), *arguments]) == code
    assert message in capsys.readouterr().err


def test_eval_skips_what_is_too_short_and_scores_the_rest(
    engine: FakeEngine, texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (texts / "a-short.txt").write_text("abc")
    (texts / "b-none.txt").touch()
    assert run_command_line(["eval", "--text", str(texts), "--window", "10", "--json"]) == 0
    out, err = capsys.readouterr()
    record = json.loads(out)
    assert [entry["name"] for entry in record["files"]] == ["all-a.txt", "mixed.txt"]
    assert record["skipped"] == [
        {"name": "a-short.txt", "tokens": 3, "needed": 11},
        {"name": "b-none.txt", "tokens": 0, "needed": 11},
    ]
    assert err.splitlines() == [
        "picaflor: warning: skipped a-short.txt: 3 tokens; one window needs 11 (--window 10)",
        "picaflor: warning: skipped b-none.txt: the file is empty",
    ]
    assert engine.opened[0][0] is None  # type: ignore[attr-defined]


def test_eval_of_nothing_that_can_be_scored_fails(
    engine: FakeEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in (("a.txt", ""), ("b.txt", "x")):
        (tmp_path / name).write_text(text)
    assert run_command_line(["eval", "m", "--text", str(tmp_path), "--window", "4"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "picaflor: error: nothing to score: a.txt: the file is empty; b.txt: 1 token; one window needs 5 (--window 4)"
    ]


def test_eval_without_texts_names_the_option(engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(["eval", "m"]) == 2
    assert "--text" in capsys.readouterr().err
    assert run_command_line(["eval", "m", "--text", "/nowhere"]) == 2
    assert "--text /nowhere: no such file or folder" in capsys.readouterr().err


def test_bench_decode_as_json(engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "decode", "m", "--tokens", "4", "--prompt-tokens", "3", "--repeats", "2", "--json"]
    record = run([*arguments, "--note", "idle"], capsys)
    assert (record["kind"], record["version"], record["note"]) == ("bench decode", 1, "idle")
    assert record["tokens_per_s"] == 2.0
    assert record["floor_tokens_per_s"] == 10.0
    assert record["of_floor"] == 0.2
    assert record["hit_rate"] == 0.75
    assert record["disk_bytes_per_token"] == 20
    assert (record["tokens"], record["repeats"], record["prompt_tokens"]) == (4, 2, 3)
    ids = bench.fixed_tokens(256, 7, 1).tolist()
    assert engine.replays == [(ids[:3], ids[3:])] * 3


class DeviceEngine(FakeEngine):
    """On a device that has 20 of 64 experts and gives 40 MB/s; the CPU computes the others at 9 MB/s."""

    plan = SimpleNamespace(backend=SimpleNamespace(name="cuda", on_device=True), lossy=Lossy(), store=None)

    def __init__(self) -> None:
        super().__init__()
        self.measured = False

    def measure_memory_limit(self) -> None:
        self.measured = True

    def record(self) -> Record:
        decode = Phase(tokens=4, wall_s=2.0, hits_device=6, on_host=2, on_host_bytes=4_000_000, weight_bytes=16_000_000)
        rates = {"memory_limit_bytes_per_s": 40e6, "host_memory_bytes_per_s": 9e6} if self.measured else {}
        memory = Memory(device_experts=20, all_experts=64)
        return Record(model="fake", backend="cuda", isa="sm_90", decode=decode, memory=memory, **rates)


def test_bench_decode_of_a_device_names_the_place_that_limits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @contextmanager
    def open_engine(word: str | None, settings: Settings) -> Iterator[FakeEngine]:
        yield DeviceEngine()

    monkeypatch.setattr(importlib.import_module("picaflor.cli.bench_decode"), "open_engine", open_engine)
    arguments = ["bench", "decode", "m", "--tokens", "4", "--prompt-tokens", "3", "--repeats", "2"]
    record = run([*arguments, "--json"], capsys)
    assert (record["tokens_per_s"], record["floor_tokens_per_s"]) == (2.0, 10.0)
    assert record["device"] == {
        "experts": 20,
        "all_experts": 64,
        "hits_device": 6,
        "on_host": 2,
        "on_host_bytes": 4_000_000,
        "sent": 0,
        "sent_bytes": 0,
    }
    assert (record["host_memory_bytes_per_s"], record["link_bytes_per_s"]) == (9e6, None)
    assert record["verdict"]["kind"] == "memory-bound"
    assert run_command_line(arguments) == 0
    out = capsys.readouterr().out
    assert "experts on the device: 20 of 64; in 4 tokens 6 were found there, the CPU computed 2, 0 were sent" in out
    assert "device memory copied at 0.0 GB/s: floor 10.0 tokens/s, reached 0.20 of it" in out
    assert "RAM 0.01 GB/s for 1.0 MB -> ceiling 9.0 tok/s by RAM, got 2.0" in out


@pytest.mark.parametrize(
    ("words", "opened", "message"),
    [
        (["--tokens", "75"], 1, "--prompt-tokens 16 and --tokens 75 are 91 tokens and the context holds 90: "),
        (["--tokens", "50", "--ctx", "65"], 0, "are 66 tokens and the context holds 65: "),
        (["--tokens", "4000", "--prompt-tokens", "97"], 0, "are 4097 tokens and the context holds 4096: "),
    ],
    ids=["model", "option", "default"],
)
def test_bench_decode_beyond_the_context_measures_nothing(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str], words: list[str], opened: int, message: str
) -> None:
    assert run_command_line(["bench", "decode", "m", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert len(engine.opened) == opened  # type: ignore[attr-defined]
    assert engine.replays == []
    assert run_command_line(["bench", "decode", "m", "--repeats", "1", "--tokens", "74"]) == 0


def test_bench_decode_feeds_a_text(engine: FakeEngine, texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "decode", "m", "--text", str(texts / "mixed.txt"), "--repeats", "1", "--tokens", "2"]
    assert run_command_line([*arguments, "--prompt-tokens", "1"]) == 0
    assert engine.replays[0] == ([120], [121, 122])
    assert engine.tokenizer.read == 3
    out = capsys.readouterr().out
    assert "fake: 2.00 tokens/s, median of 1 x 2 tokens" in out
    assert "floor 10.0 tokens/s, reached 0.20 of it" in out
    assert run_command_line([*arguments, "--prompt-tokens", "30"]) == 2
    assert "21 tokens; 32 are needed" in capsys.readouterr().err
