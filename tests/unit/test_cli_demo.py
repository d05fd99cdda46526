"""The command line on the built-in model, in processes of their own: the same text whatever the machine does."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cli_support import child_environment, default_interrupt
from test_cli_doctor import Tensors, model_with

from picaflor.cli.model import DEMO_LINE
from picaflor.runtime.builtin import folder

PROMPT = "Once upon a time"


def picaflor(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "picaflor", *words]
    return subprocess.run(command, capture_output=True, text=True, env=child_environment(), timeout=300)


def written(*words: str) -> str:
    done = picaflor("run", PROMPT, "--seed", "7", *words)
    assert done.returncode == 0, done.stderr
    assert done.stderr == f"{DEMO_LINE}\n"
    return done.stdout


def test_the_same_seed_writes_the_same_text_and_another_one_another() -> None:
    text = written("-n", "40")
    assert len(text) > 60
    assert written("-n", "40") == text
    assert written("-n", "40", "--seed", "8") != text


def test_a_shorter_answer_is_the_beginning_of_a_longer_one() -> None:
    assert written("-n", "40").startswith(written("-n", "12").rstrip("\n"))


@pytest.mark.parametrize(
    "words",
    [
        ("--expert-slots", "1"),
        ("--threads", "1", "--read-threads", "1"),
        ("--threads", "3", "--prefill-chunk", "1"),
        ("--isa", "scalar"),
        ("--ram", "96MiB"),
        ("--profile",),
    ],
    ids=" ".join,
)
def test_options_of_the_machine_never_change_the_text(words: tuple[str, ...]) -> None:
    done = picaflor("run", PROMPT, "--seed", "7", "-n", "24", *words)
    assert done.returncode == 0, done.stderr
    assert done.stdout == written("-n", "24")


def test_stop_text_ends_before_itself() -> None:
    text = written("-n", "40")
    word = text.split()[5]
    assert written("-n", "40", "--stop", word).rstrip("\n") == text[: text.index(word)].rstrip("\n")


def test_the_record_tells_what_was_read() -> None:
    done = picaflor("run", PROMPT, "--seed", "7", "-n", "24", "--expert-slots", "1", "--json")
    result = json.loads(done.stdout)
    record = result["record"]
    decode, memory = record["decode"], record["memory"]
    assert round(record["parameters"] / 1e6) == 27
    assert f"{round(record['parameters'] / 1e6)} M" in DEMO_LINE
    wanted = sum(decode[name] for name in ("hits_pinned", "hits_lru", "hits_prefetched", "joined", "loads"))
    assert wanted == decode["tokens"] * record["moe_layers"] * record["experts_per_token"]
    assert decode["loads"] > 0
    assert decode["read_bytes"] > 0
    assert memory["expert_slots"] == 1
    assert sum(decode["shares"].values()) == pytest.approx(1.0)
    assert record["fallbacks"] == {}
    assert result["finish_reason"] == "length"


def test_chat_answers() -> None:
    command = [sys.executable, "-m", "picaflor", "chat", "--seed", "3", "-n", "24"]
    done = subprocess.run(
        command, input="What is a ship?\n", capture_output=True, text=True, env=child_environment(), timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout) > 20
    assert "<|" not in done.stdout


def test_interrupt_while_it_writes() -> None:
    command = [sys.executable, "-m", "picaflor", "run", PROMPT, "--seed", "7", "-n", "4000"]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=child_environment(),
        preexec_fn=default_interrupt,
    ) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        assert child.stdout.read(1)
        child.send_signal(signal.SIGINT)
        assert child.wait(60) == 130
        assert child.stderr.read() == f"{DEMO_LINE}\npicaflor: interrupted\n"


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ((PROMPT, "--ram", "20MiB"), 1, "short of"),
        (("word " * 4100,), 1, "tokens and the context holds 4096"),
        ((PROMPT, "--ctx", "100000"), 2, "--ctx 100000: the model is made for at most 4096 tokens"),
        ((PROMPT, "--disable", "cpu.fly"), 2, "--disable cpu.fly: there is no such kernel"),
        ((PROMPT, "--disable", "cpu.rope", "--strict"), 1, "cpu.rope is waived to cpu-scalar: disabled by --disable"),
        (
            (PROMPT, "--disable", "cpu.matmul.int8-row", "--disable", "cpu-scalar.matmul"),
            1,
            "cpu-scalar.matmul.int8-row is refused: disabled by --disable",
        ),
    ],
    ids=["memory", "context", "too much context", "unknown kernel", "disabled kernel, strict", "disabled kernels"],
)
def test_refusals_are_one_line(words: tuple[str, ...], code: int, message: str) -> None:
    done = picaflor("run", *words)
    assert (done.returncode, done.stdout) == (code, "")
    lines = done.stderr.splitlines()
    assert lines[:-1] == [DEMO_LINE] * ("context holds" in message)
    assert lines[-1].startswith("picaflor: error: ")
    assert message in lines[-1]


def test_unknown_model_type(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "model-00001-of-00001.safetensors"):
        (tmp_path / name).symlink_to(folder() / name)
    config = json.loads((folder() / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "unheard_of"}))
    done = picaflor("run", str(tmp_path), PROMPT)
    assert (done.returncode, done.stdout) == (1, "")
    assert "unheard_of" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_inspect_and_eval_without_a_model_take_the_built_in_one(tmp_path: Path) -> None:
    done = picaflor("inspect")
    assert (done.returncode, done.stderr) == (0, f"{DEMO_LINE}\n")
    assert done.stdout.startswith(f"{folder()}: glm_moe_dsa, 1 shard, 17.5 MiB")
    (tmp_path / "a.txt").write_text("And he said unto them, Go ye into all the world.\n" * 3)
    done = picaflor("eval", "--text", str(tmp_path), "--window", "16", "--json")
    assert (done.returncode, done.stderr) == (0, f"{DEMO_LINE}\n")
    (score,) = json.loads(done.stdout)["files"]
    assert 1 < score["perplexity"] < 200


def without_indexer(tensors: Tensors) -> None:
    for name in [name for name in tensors if ".indexer." in name]:
        del tensors[name]


def test_inspect_says_what_a_missing_indexer_means(tmp_path: Path) -> None:
    model_with(tmp_path, change=without_indexer)
    done = picaflor("inspect", str(tmp_path))
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("missing: indexer: ")]
    assert line == (
        "missing: indexer: the part that picks 512 tokens for attention; without it every token is used, which gives "
        "the model's own results up to 512 tokens of context and other ones beyond"
    )


def test_capabilities_of_the_built_in_model() -> None:
    done = picaflor("capabilities", str(folder()), "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["backend"] == "cpu"
    uses = {(cell["kind"], cell["format"], cell["operation"]): cell for cell in result["cells"]}
    experts = uses["expert", "int4-grouped", "expert_ffn"]
    assert (experts["matrices"], experts["kernel"], experts["state"]) == (
        7 * 24 * 3,
        "cpu.expert_ffn.int4-grouped",
        "native",
    )
    assert experts["isa"] == result["isa"]
    assert uses["kv_b", "int4-grouped", "row_axpy"]["matrices"] == 8
    assert uses["embedding", "int8-row", "rows"]["group_size"] == 0
    assert uses["embedding", "int8-row", "rows"]["bytes"] == 4096 * (256 + 4)
    assert experts["bytes"] == experts["matrices"] * 128 * 256 * (1 / 2 + 4 / 64)


def test_capabilities_show_what_is_left_of_a_disabled_kernel() -> None:
    words = ("capabilities", str(folder()), "--disable", "cpu.expert_ffn.int4-grouped")
    done = picaflor(*words)
    assert done.returncode == 0
    line = next(line for line in done.stdout.splitlines() if line.startswith("expert "))
    assert "waived to cpu-scalar  cpu-scalar.expert_ffn.int4-grouped  scalar  disabled by --disable" in line
    assert picaflor(*words, "--strict").returncode == 1
    done = picaflor(*words, "--disable", "cpu-scalar.expert_ffn")
    assert done.returncode == 1
    line = next(line for line in done.stdout.splitlines() if line.startswith("expert "))
    assert line.split()[-5:] == ["none", "none", "disabled", "by", "--disable"]


def test_capabilities_without_a_model_list_every_format() -> None:
    from picaflor.formats import REGISTRY

    done = picaflor("capabilities", "--json")
    cells = {
        (cell["operation"], cell["format"]): cell
        for cell in json.loads(done.stdout)["cells"]
        if cell["backend"] == "cpu"
    }
    for name in REGISTRY:
        assert cells["matmul", name]["state"] in ("native", "composed")
        assert cells["expert_ffn", name]["state"] in ("native", "composed")
        assert cells["rows", name]["state"] in ("native", "composed")
        assert cells["row_axpy", name]["state"] in ("native", "composed")


def test_doctor_finds_this_machine_fit() -> None:
    done = picaflor("doctor", str(folder()), "--json")
    assert done.returncode == 0, done.stdout
    checks = {check["id"]: check for check in json.loads(done.stdout)["checks"]}
    assert {"cpu.scalar", "model.files", "model.tokenizer"} <= set(checks)


@pytest.mark.parametrize(
    ("redirection", "code", "text"),
    [
        ("<&-", 0, ""),
        (">&-", 1, "stdout is closed"),
        ("2>&-", 0, ""),
        ("<&- 2>&-", 0, ""),
    ],
)
def test_closed_standard_streams(redirection: str, code: int, text: str) -> None:
    command = f'"{sys.executable}" -m picaflor run "{PROMPT}" -n 2 --temperature 0 {redirection}'
    done = subprocess.run(
        ["sh", "-c", command], capture_output=True, text=True, env=child_environment(), timeout=300, check=False
    )
    assert done.returncode == code
    assert "Traceback" not in done.stderr
    assert text in done.stderr
    assert bool(done.stdout) == (code == 0)


def test_a_prompt_from_a_closed_stdin_is_empty() -> None:
    command = f'"{sys.executable}" -m picaflor run - <&-'
    done = subprocess.run(
        ["sh", "-c", command], capture_output=True, text=True, env=child_environment(), timeout=300, check=False
    )
    assert (done.returncode, done.stderr) == (2, "picaflor: error: the prompt is empty\n")


@pytest.mark.parametrize("delay_s", [0.01, 0.02, 0.04, 0.06, 0.09])
def test_an_interrupt_at_the_very_start_is_one_line(delay_s: float) -> None:
    code = (
        "import os, signal, sys, threading\n"
        "from picaflor.cli import main\n"
        f"threading.Timer({delay_s}, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        "sys.exit(main(['run', 'x' * 50, '-n', '100000', '--ctx', '4096']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=child_environment(),
        timeout=300,
        check=False,
        preexec_fn=default_interrupt,
    )
    assert done.returncode == 130, done.stderr
    assert done.stderr.splitlines()[-1] == "picaflor: interrupted"
    assert "Traceback" not in done.stderr
