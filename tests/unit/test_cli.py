"""The command line: what goes where, which exit code, one line per error; against an engine made of words."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import click
import pytest
from cli_support import (
    FakeEngine,
    FakeSampling,
    FakeTemplate,
    Run,
    child_environment,
    error_line,
    installed,
    runner,
)

from picaflor.cli import app, bench, model
from picaflor.cli.lazy import LazyGroup
from picaflor.cli.model import DEMO_LINE, looks_like_model, model_and_prompt
from picaflor.cli.run import prompt_ids
from picaflor.errors import BadTemplate, OutOfBudget, PicaflorError, UsageError
from picaflor.models.config import Notices
from picaflor.runtime.plan import EngineOptions


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeEngine]:
    return installed(monkeypatch)


@pytest.fixture
def picaflor(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    return runner(capsys, monkeypatch)


# run: which word is what


def test_prompt_alone_uses_the_demo_and_says_so(picaflor: Run, fake: type[FakeEngine]) -> None:
    code, out, err = picaflor("run", "Once upon a time", "--seed", "7")
    assert (code, out) == (0, " there was\n")
    assert err == f"picaflor: warning: an odd key\n{DEMO_LINE}\n"
    assert fake.opened == (None, EngineOptions())
    assert fake.calls[0] == ("\x01Once upon a time", FakeSampling(max_tokens=256, temperature=0.7, top_p=0.9, seed=7))
    assert fake.calls[-1] == ("closed", None)


def test_model_and_prompt(picaflor: Run, fake: type[FakeEngine], tmp_path: Path) -> None:
    code, out, err = picaflor("run", str(tmp_path), "Hello")
    assert (code, out) == (0, " there was\n")
    assert DEMO_LINE not in err
    assert fake.opened[0] == tmp_path


@pytest.mark.parametrize("word", ["zai-org/GLM-5", "./missing", "/models/glm", "~/models/glm", "../x"])
def test_one_word_that_is_a_model_is_no_prompt(picaflor: Run, fake: type[FakeEngine], word: str) -> None:
    fake.opened = ()
    code, out, err = picaflor("run", word)
    assert (code, out) == (2, "")
    assert error_line(err).startswith(f"picaflor: error: {word!r} names a model and the prompt is missing: ")
    assert fake.opened == ()


def test_existing_path_is_no_prompt(
    picaflor: Run, fake: type[FakeEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hello world").mkdir()
    assert picaflor("run", "hello world")[0] == 2
    assert picaflor("run", "hello worlds")[0] == 0


@pytest.mark.parametrize(
    "word", ["-", "a/b/c", "either / or", "and/or what", "Once", "x" * 5000, "nul\0byte", "/ is a slash"]
)
def test_words_that_are_no_model(word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert not looks_like_model(word)


def test_model_and_prompt_refusals() -> None:
    with pytest.raises(UsageError, match="no prompt given"):
        model_and_prompt(())
    with pytest.raises(UsageError, match="3 arguments given; run takes"):
        model_and_prompt(("a", "b", "c"))
    assert model_and_prompt(("a", "-")) == ("a", "-")


@pytest.mark.parametrize(("word", "hub"), [("nowhere", False), ("org/name", True)])
def test_missing_model(picaflor: Run, word: str, hub: bool) -> None:
    code, out, err = picaflor("run", word, "Hello")
    assert (code, out) == (1, "")
    assert error_line(err).startswith(f"picaflor: error: model {word}: no such directory")
    assert ("hub" in err) == hub


def test_prompt_from_stdin(picaflor: Run, fake: type[FakeEngine]) -> None:
    assert picaflor("run", "-", stdin="two\nlines\n")[0] == 0
    assert fake.calls[0][0] == "\x01two\nlines\n"


@pytest.mark.parametrize(("words", "stdin", "message"), [
    (("run", ""), "", "the prompt is empty"),
    (("run", "-"), "", "the prompt is empty"),
    (("run", "a\udcffb"), "", "the prompt is not UTF-8 text"),
    (("run",), "", "no prompt given"),
])  # fmt: skip
def test_prompts_refused(picaflor: Run, words: tuple[str, ...], stdin: str, message: str) -> None:
    code, out, err = picaflor(*words, stdin=stdin)
    assert (code, out) == (2, "")
    assert message in error_line(err)


def test_a_prompt_on_stdin_has_an_end(picaflor: Run, fake: type[FakeEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "MOST_PROMPT", 8)
    assert picaflor("run", "-", stdin="x" * 8)[0] == 0
    code, out, err = picaflor("run", "-", stdin="x" * 9)
    assert (code, out) == (2, "")
    assert error_line(err) == (
        "picaflor: error: prompt on stdin: more than 8 characters; accepted: up to that many, and the tokens that --ctx"
        " holds"
    )


# run: options and output


def test_options_reach_the_engine(picaflor: Run, fake: type[FakeEngine]) -> None:
    words = ["run", "Hi", "--ram", "700MiB", "--expert-slots", "1", "--ctx", "64", "--threads", "2", "--backend", "cpu"]
    words += ["--precision", "exact", "--isa", "scalar", "--prefill-chunk", "7", "--read-threads", "3", "--strict"]
    words += ["--group-size", "64", "--latent-norm-eps", "1e-5", "--disable", "cpu.matmul", "--disable", "cpu.rope"]
    words += ["-n", "5", "--temperature", "0", "--top-p", "0.5", "--seed", "3", "--stop", "END", "--stop", "\n\n"]
    assert picaflor(*words)[0] == 0
    assert fake.opened[1] == EngineOptions(
        ram_bytes=700 * 2**20,
        expert_slots=1,
        context=64,
        threads=2,
        backend="cpu",
        precision="exact",
        isa="scalar",
        prefill_chunk=7,
        read_threads=3,
        group_size=64,
        latent_norm_eps=1e-5,
        strict=True,
        disable=("cpu.matmul", "cpu.rope"),
    )
    assert fake.calls[0][1] == FakeSampling(max_tokens=5, temperature=0.0, top_p=0.5, seed=3, stop=("END", "\n\n"))


@pytest.mark.parametrize(
    ("start", "prompt", "text"),
    [
        ("\x01\x02", "Hi", "\x01\x02Hi"),
        ("\x01\x02", "\x01\x02Hi", "\x01\x02Hi"),
        ("\x01You are", "Hi", "Hi"),
        ("", "Hi", "Hi"),
    ],
)
def test_prompt_starts_as_the_model_knows_it(
    picaflor: Run, fake: type[FakeEngine], monkeypatch: pytest.MonkeyPatch, start: str, prompt: str, text: str
) -> None:
    monkeypatch.setattr(FakeTemplate, "start", start)
    assert picaflor("run", prompt)[0] == 0
    assert fake.calls[0][0] == text


def test_a_template_that_fails_is_named_where_it_would_give_the_start() -> None:
    class Failing:
        def render(self, messages: list[dict[str, str]], **_: bool) -> str:
            raise BadTemplate("chat_template.jinja: line 1: no turns")

    notices = Notices()
    tokenizer = types.SimpleNamespace(encode=lambda text: [7, 8])
    engine: Any = types.SimpleNamespace(
        chat_template=Failing(), tokenizer=tokenizer, plan=types.SimpleNamespace(notices=notices)
    )
    assert prompt_ids(engine, "Hi", chat=False) == [7, 8]
    (line,) = notices.messages
    assert "starts without start tokens" in line
    assert "chat_template.jinja: line 1: no turns" in line


def test_chat_flag_renders_the_template(picaflor: Run, fake: type[FakeEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    assert picaflor("run", "Hi", "--chat")[0] == 0
    assert fake.calls[0][0] == "<user>Hi<assistant>"
    monkeypatch.setattr(fake, "chat_template", None)
    code, _, err = picaflor("run", "Hi", "--chat")
    assert code == 1
    assert "model fake has no chat template" in error_line(err)


def test_seed_is_drawn_anew(picaflor: Run, fake: type[FakeEngine]) -> None:
    seeds = set()
    for _ in range(4):
        picaflor("run", "Hi")
        seeds.add(fake.calls[-2][1].seed)
    assert len(seeds) > 1


def test_text_is_written_as_it_comes(picaflor: Run, fake: type[FakeEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(fake, "script", (" one", lambda: seen.append(stream.getvalue()), " two\n"))
    assert picaflor("run", "Hi")[0] == 0
    assert seen == [" one"]
    assert stream.getvalue() == " one two\n"


def test_json_is_one_object(picaflor: Run) -> None:
    code, out, _ = picaflor("run", "Hi", "--json")
    result = json.loads(out)
    assert code == 0
    assert (result["text"], result["finish_reason"]) == (" there was", "length")
    assert result["record"]["decode"]["tokens_per_s"] == 2.0


@pytest.mark.parametrize(("most", "cure"), [(512, "--ctx takes up to 512"), (64, "this model takes no more")])
def test_a_full_context_is_told(
    picaflor: Run, fake: type[FakeEngine], monkeypatch: pytest.MonkeyPatch, most: int, cure: str
) -> None:
    assert "the context is full" not in picaflor("run", "Hi")[2]
    monkeypatch.setattr(fake, "finish_reason", "context")
    monkeypatch.setattr(fake.plan, "model", types.SimpleNamespace(max_positions=most))
    for words in ((), ("--json",)):
        code, _, err = picaflor("run", "Hi", *words)
        assert code == 0
        line = f"the context is full, 64 tokens with the prompt: the answer ends here; {cure}"
        assert err.splitlines()[-1] == line


def test_profile_goes_to_stderr_and_leaves_stdout_alone(picaflor: Run) -> None:
    code, out, err = picaflor("run", "Hi", "--profile")
    assert (code, out) == (0, " there was\n")
    assert err.count("answers end at <end>, <user>\n") == 1
    assert "2 tokens in 1.000 s, 2.0 tok/s" in err
    assert "verdict" in err


def test_the_c_engine_s_model_and_prompt(
    picaflor: Run, fake: type[FakeEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SNAP", str(tmp_path))
    code, _, err = picaflor("run", "Once")
    assert code == 0
    assert "SNAP is set and not used: --compat-env takes the C engine's variables\n" in err
    assert fake.opened[0] is None
    for name, text in (("PROMPT", "Hello"), ("NGEN", "7"), ("MTP", "1"), ("COLI_X", "1")):
        monkeypatch.setenv(name, text)
    code, _, err = picaflor("run", "--compat-env")
    assert code == 0
    assert fake.opened[0] == tmp_path
    (prompt, sampling) = fake.calls[-2] if fake.calls[-1][0] == "closed" else fake.calls[-1]
    assert prompt.endswith("Hello")
    assert sampling.max_tokens == 7
    assert "SNAP is set" not in err
    assert "--compat-env: MTP=1 does nothing: drafts are not in this version\n" in err
    assert "--compat-env: variables of the C engine that are not known here: COLI_X\n" in err
    code, _, err = picaflor("run", "/somewhere/else", "Own words", "--compat-env")
    assert "/somewhere/else" in err


# errors in one place


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (OutOfBudget("needs 3 GiB,\n  has 1"), 1, "needs 3 GiB, has 1"),
        (PicaflorError("x"), 1, "x"),
        (UsageError("y"), 2, "y"),
        (FileNotFoundError(2, "No such file or directory", "a.bin"), 1, "a.bin: No such file or directory"),
        (MemoryError(), 1, "out of memory"),
        (ValueError("odd"), 70, "internal error: ValueError: odd (picaflor --debug COMMAND shows where)"),
    ],
)
def test_errors_are_one_line(
    picaflor: Run, fake: type[FakeEngine], monkeypatch: pytest.MonkeyPatch, error: Exception, code: int, message: str
) -> None:
    monkeypatch.setattr(fake, "script", (error,))
    got, out, err = picaflor("run", "Hi")
    assert (got, out) == (code, "")
    assert error_line(err) == f"picaflor: error: {message}"
    assert fake.calls[-1] == ("closed", type(error))


def test_debug_shows_where(picaflor: Run, fake: type[FakeEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake, "script", (ValueError("odd"),))
    code, _, err = picaflor("--debug", "run", "Hi")
    assert code == 70
    assert "Traceback" in err
    assert "in generate" in err


def test_interrupt_is_clean(picaflor: Run, fake: type[FakeEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake, "script", (" part", KeyboardInterrupt()))
    code, out, err = picaflor("run", "Hi", "--profile")
    assert (code, out) == (130, " part\n")
    assert "verdict" in err
    assert err.endswith("picaflor: interrupted\n")
    assert fake.calls[-1] == ("closed", KeyboardInterrupt)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "no command given"),
        (("rnu", "x"), "no such command: rnu; did you mean run?"),
        (("run", "x", "--temprature", "1"), "no such option: --temprature; did you mean --temperature"),
        (
            ("run", "x", "--temperature"),
            "option '--temperature' requires an argument (picaflor run --help lists what it takes)",
        ),
        (
            ("--debug", "bench", "decode", "x", "--ctx"),
            "option '--ctx' requires an argument (picaflor bench decode --help lists what it takes)",
        ),
        (("inspect", "a", "b"), "got unexpected extra argument (b) (picaflor inspect --help lists what it takes)"),
        (("run", "x", "--stop", ""), "--stop: '' is not accepted; give text that is not empty, or a list"),
        (("run", "x", "--temperature", "9"), "--temperature: '9' is not accepted; give a number from 0 to 2"),
        (
            ("run", "x", "--backend", "npu"),
            "--backend: 'npu' is not accepted; give one of auto, cpu, cuda, rocm, metal, vulkan",
        ),
        (("bench",), "no command given (picaflor bench --help"),
        (("bench", "kernel"), "no such command: kernel; did you mean kernels?"),
    ],
)
def test_usage_errors(picaflor: Run, words: tuple[str, ...], message: str) -> None:
    code, out, err = picaflor(*words)
    assert (code, out) == (2, "")
    lines = [line for line in err.splitlines() if line.startswith("picaflor: error: ")]
    assert len(lines) == 1
    assert lines[0].startswith(f"picaflor: error: {message}")


def test_unknown_variable_is_an_error(picaflor: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PICAFLOR_TEMPRATURE", "1")
    code, _, err = picaflor("run", "Hi")
    assert code == 2
    assert error_line(err).endswith("PICAFLOR_TEMPRATURE is no option; did you mean PICAFLOR_TEMPERATURE?")


def test_no_model_given_names_the_way(picaflor: Run) -> None:
    @click.command("weigh")
    @click.argument("model")
    def weigh(model: str) -> None:
        """Weighs."""

    with pytest.raises(click.MissingParameter) as caught, weigh.make_context("picaflor weigh", []):
        pass
    assert app._explain(caught.value) == (2, "no model given: name its directory, as picaflor weigh DIRECTORY")


def test_exit_code_of_a_command_is_returned(picaflor: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("failing")
    module.command = click.Command("failing", callback=lambda: 1)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "failing", module)
    monkeypatch.setitem(app.group._lazy, "failing", ("failing", "Fails."))
    assert picaflor("failing")[0] == 1


# the table of commands


def test_help_lists_every_command_and_imports_none() -> None:
    code = (
        "import sys; from picaflor.cli import main\n"
        "assert main(['--help']) == 0\n"
        "heavy = {'numpy', 'rich', 'tokenizers', 'jinja2', 'safetensors', 'starlette', 'uvicorn'} & set(sys.modules)\n"
        "commands = [name for name in sys.modules if name in ('picaflor.cli.run', 'picaflor.cli.bench')]\n"
        "assert not heavy and not commands, (heavy, commands)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=child_environment())
    assert result.returncode == 0, result.stderr
    for name, (_, text) in app.COMMANDS.items():
        assert f"  {name}" in result.stdout
        assert text in result.stdout


def test_run_imports_no_numbers_before_it_needs_them() -> None:
    code = "import sys; from picaflor.cli import main; assert main(['run']) == 2; assert 'numpy' not in sys.modules"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=child_environment())
    assert result.returncode == 0, result.stderr


def entries() -> list[tuple[LazyGroup, str]]:
    groups = (app.group, bench.command)
    return [(group, name) for group in groups for name in group.list_commands(click.Context(group))]  # type: ignore[misc]


@pytest.mark.parametrize(("group", "name"), entries(), ids=lambda value: value if isinstance(value, str) else "")
def test_every_command_has_help(group: LazyGroup, name: str) -> None:
    command = group.get_command(click.Context(group), name)
    assert command is not None
    with command.make_context(name, [], resilient_parsing=True) as context:
        assert len(command.get_help(context)) > 50
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            assert parameter.help, f"{name} {parameter.name} has no help"
