"""The command line: what goes where, which exit code, one line per error; against an engine made of words."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pytest

from picaflor import cli
from picaflor.cli import app, bench
from picaflor.cli.lazy import LazyGroup
from picaflor.cli.model import DEMO_LINE, Progress, looks_like_model, model_and_prompt, progress_text
from picaflor.cli.run import prompt_ids
from picaflor.errors import BadTemplate, ContextExceeded, OutOfBudget, PicaflorError, UsageError
from picaflor.models.config import Notices
from picaflor.runtime.plan import EngineOptions
from picaflor.telemetry.record import Phase, Record


@dataclass(frozen=True)
class Piece:
    text: str
    token: int


@dataclass(frozen=True, kw_only=True)
class FakeSampling:
    max_tokens: int = 1
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()


class FakeTokenizer:
    special = frozenset({1, 2})

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]


class FakeTemplate:
    start = "\x01"

    def render(self, messages: list[dict[str, str]], *, add_generation_prompt: bool = True) -> str:
        if not messages and not self.start:
            raise BadTemplate("messages[0] is undefined")
        turns = "".join(f"<{m['role']}>{m['content']}" for m in messages)
        return (self.start if not messages else "") + turns + "<assistant>" * add_generation_prompt


class FakeEngine:
    """Answers with the pieces of `script`; an exception in it is raised, a callable called."""

    script: tuple[Any, ...] = (" there", " was")
    opened: tuple[Any, ...] = ()
    calls: list[tuple[str, Any]] = []  # noqa: RUF012 - reset by the fixture
    finish_reason = "length"
    name = "fake"
    tuned = ""
    stop_names = ("<end>", "<user>")
    tokenizer = FakeTokenizer()
    chat_template: FakeTemplate | None = FakeTemplate()
    plan = types.SimpleNamespace(notices=Notices())

    @classmethod
    def open(cls, path: Path | None, options: EngineOptions, *, progress: Any, warn: Any) -> FakeEngine:
        cls.opened = (path, options)
        progress("load", 1, 2)
        warn("an odd key")
        return cls()

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *error: object) -> None:
        self.calls.append(("closed", error[0]))

    def generate(self, ids: list[int], options: FakeSampling, cancel: Any = None) -> Iterator[Piece]:
        self.calls.append(("".join(chr(i) for i in ids), options))
        for at, part in enumerate(self.script):
            if isinstance(part, BaseException):
                raise part
            if callable(part):
                part()
            elif cancel is None or not cancel.is_set():
                yield Piece(part, at)

    def measure_memory_limit(self) -> None:
        return

    def record(self) -> Record:
        return Record(model="fake", decode=Phase(tokens=2, wall_s=1.0))


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeEngine]:
    engine = types.ModuleType("picaflor.runtime.engine")
    engine.Engine = FakeEngine  # type: ignore[attr-defined]
    engine.EngineOptions = EngineOptions  # type: ignore[attr-defined]
    generate = types.ModuleType("picaflor.runtime.generate")
    generate.SamplingOptions = FakeSampling  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "picaflor.runtime.engine", engine)
    monkeypatch.setitem(sys.modules, "picaflor.runtime.generate", generate)
    monkeypatch.setenv("XDG_CONFIG_HOME", "/nowhere")
    for name in ("HOME", "XDG_STATE_HOME"):  # nothing is kept
        monkeypatch.delenv(name, raising=False)
    for name in [name for name in os.environ if name.startswith("PICAFLOR_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(FakeEngine, "calls", [])
    monkeypatch.setattr(FakeEngine, "script", FakeEngine.script)
    return FakeEngine


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def picaflor(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    def run(*words: str, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        code = cli.main(words)
        out, err = capsys.readouterr()
        return code, out, err

    return run


def error_line(err: str) -> str:
    lines = [line for line in err.splitlines() if not line.startswith("picaflor: warning")]
    lines = [line for line in lines if line != DEMO_LINE]
    assert len(lines) == 1, err
    return lines[0]


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


def test_profile_goes_to_stderr_and_leaves_stdout_alone(picaflor: Run) -> None:
    code, out, err = picaflor("run", "Hi", "--profile")
    assert (code, out) == (0, " there was\n")
    assert err.count("answers end at <end>, <user>\n") == 1
    assert "2 tokens in 1.000 s, 2.0 tok/s" in err
    assert "verdict" in err


def test_progress_is_for_terminals_and_gone_before_text(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

        def fileno(self) -> int:
            return 2

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(os, "get_terminal_size", lambda fd: os.terminal_size((20, 5)))
    monkeypatch.setattr("time.monotonic", iter([0.0, 0.05, 0.2, 0.25]).__next__)
    progress = Progress()
    progress("load", 1, 4)  # too soon
    progress("load a long name", 2, 4)
    assert terminal.getvalue() == "\r\x1b[K50%"
    progress("load", 4, 4)  # too soon for a line, never too soon to take it away
    assert terminal.getvalue().endswith("50%\r\x1b[K")
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setattr("time.monotonic", lambda: 9.0)
    silent = Progress()
    monkeypatch.setattr("time.monotonic", lambda: 99.0)
    silent("load", 2, 4)
    assert sys.stderr.getvalue() == ""  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("stage", "done", "total", "width", "text"),
    [
        ("reading the prompt", 128, 4096, 79, "reading the prompt 128 of 4096 (3%)"),
        ("loading experts", 5 << 20, 2 << 30, 79, "loading experts 5 MiB of 2 GiB (0%)"),
        ("writing", 1 << 30, 4 << 30, 28, "writing 1 GiB of 4 GiB (25%)"),
        ("writing", 1 << 30, 4 << 30, 27, "writing 25%"),
        ("reading", 1 << 30, 4 << 30, 10, "25%"),
        ("loading resident weights", 1, 4, 2, ""),
        ("loading resident weights", 1, 4, -1, ""),
    ],
)
def test_progress_names_sizes_and_cuts_no_number(stage: str, done: int, total: int, width: int, text: str) -> None:
    assert progress_text(stage, done, total, width) == text


def test_progress_tells_the_time_that_is_left_where_there_is_room() -> None:
    assert progress_text("reading the prompt", 500, 2000, 79, 40.4) == "reading the prompt 500 of 2000 (25%), 40 s left"
    assert progress_text("reading the prompt", 500, 2000, 40, 40.4) == "reading the prompt 500 of 2000 (25%)"
    assert progress_text("repeat", 1, 2, 79, 200) == "repeat 1 of 2 (50%), 3 min left"
    assert progress_text("repeat", 1, 2, 79, 7500) == "repeat 1 of 2 (50%), 2 h 5 min left"


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


# a process of its own: signals, pipes


def child_environment() -> dict[str, str]:
    environment = {name: text for name, text in os.environ.items() if not name.startswith(("PICAFLOR_", "PYTHON"))}
    return {**environment, "PYTHONPATH": os.pathsep.join(sys.path), "XDG_CONFIG_HOME": "/nowhere"}


def default_interrupt() -> None:
    """For a child: a test run in the background ignores Ctrl-C, and its children would inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


FAKED = """
import sys, time
sys.path.insert(0, {tests!r})
import test_cli, types
engine = types.ModuleType("picaflor.runtime.engine")
engine.Engine, engine.EngineOptions = test_cli.FakeEngine, test_cli.EngineOptions
generate = types.ModuleType("picaflor.runtime.generate")
generate.SamplingOptions = test_cli.FakeSampling
sys.modules |= {{"picaflor.runtime.engine": engine, "picaflor.runtime.generate": generate}}
test_cli.FakeEngine.script = {script}
from picaflor.cli import main
sys.exit(main({words!r}))
"""


def spawn(script: str, *words: str, **values: Any) -> subprocess.Popen[bytes]:
    code = FAKED.format(tests=str(Path(__file__).parent), script=script, words=list(words))
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **values}
    return subprocess.Popen(
        [sys.executable, "-c", code], env=child_environment(), preexec_fn=default_interrupt, **pipes
    )


def test_reader_that_leaves_is_no_error() -> None:
    with spawn('(" line of text\\n",) * 200_000', "run", "Hi") as child:
        assert child.stdout is not None
        assert child.stderr is not None
        assert child.stdout.readline() == b" line of text\n"
        child.stdout.close()
        assert child.wait(60) == app.EXIT_BROKEN_PIPE
        assert child.stderr.read().decode().splitlines() == ["picaflor: warning: an odd key", DEMO_LINE]


def test_reader_that_was_never_there_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with spawn('(" short",)', "run", "Hi", "--json", stdout=writing) as child:
        os.close(writing)
        assert child.stderr is not None
        assert child.wait(60) == app.EXIT_BROKEN_PIPE
        assert child.stderr.read().decode().splitlines() == ["picaflor: warning: an odd key", DEMO_LINE]


def test_interrupt_in_a_process() -> None:
    with spawn('(" begin\\n", lambda: time.sleep(60), " late")', "run", "Hi") as child:
        assert child.stdout is not None
        assert child.stderr is not None
        assert child.stdout.readline() == b" begin\n"
        child.send_signal(signal.SIGINT)
        assert child.wait(60) == 130
        assert child.stdout.read() == b""
        assert child.stderr.read().decode().splitlines()[-1] == "picaflor: interrupted"


# chat


def chat_lines(monkeypatch: pytest.MonkeyPatch, *lines: Any) -> None:
    remaining = list(lines)

    def read(prompt: str = "") -> str:
        if not remaining:
            raise EOFError
        line = remaining.pop(0)
        if isinstance(line, BaseException):
            raise line
        return str(line)

    monkeypatch.setattr("builtins.input", read)


def test_chat_keeps_the_conversation(picaflor: Run, fake: type[FakeEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    chat_lines(monkeypatch, "Hi", "", "More", ":reset", "New", ":quit", "never")
    code, out, err = picaflor("chat", "--seed", "5")
    assert (code, out) == (0, " there was\n" * 3)
    prompts = [text for text, _ in fake.calls if text != "closed"]
    assert prompts == [
        "<user>Hi<assistant>",
        "<user>Hi<assistant> there was<user>More<assistant>",
        "<user>New<assistant>",
    ]
    assert [options.seed for text, options in fake.calls if text != "closed"] == [5, 6, 7]
    assert "fake, answers end at <end>, <user>. :reset forgets the conversation" in err


def test_chat_commands(picaflor: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    chat_lines(monkeypatch, ":help", ":nonsense")
    code, out, err = picaflor("chat")
    assert (code, out) == (0, "")
    assert err.count(":reset forgets the conversation") == 3
    assert "(no command :nonsense; " in err


def test_chat_interrupt_ends_the_answer_only(
    picaflor: Run, fake: type[FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake, "script", (" one", lambda: signal.raise_signal(signal.SIGINT), " two"))
    before = signal.getsignal(signal.SIGINT)
    chat_lines(monkeypatch, "Hi", "More")
    code, out, err = picaflor("chat")
    assert (code, out) == (0, " one\n one\n")
    assert err.count("(stopped)") == 2
    assert fake.calls[1][0] == "<user>Hi<assistant> one<user>More<assistant>"
    assert signal.getsignal(signal.SIGINT) is before


def test_chat_second_interrupt_leaves(picaflor: Run, fake: type[FakeEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    chat_lines(monkeypatch, KeyboardInterrupt(), "Hi", KeyboardInterrupt(), KeyboardInterrupt(), "never")
    code, _, err = picaflor("chat")
    assert code == 0
    assert len(fake.calls) == 2
    assert err.count("(Ctrl-C once more leaves)") == 2
    monkeypatch.setattr(fake, "script", (" one", lambda: signal.raise_signal(signal.SIGINT)))
    chat_lines(monkeypatch, "Hi", KeyboardInterrupt(), "never")
    assert picaflor("chat")[0] == 0
    assert len(fake.calls) == 4
    monkeypatch.setattr(fake, "script", (" one", *(lambda: signal.raise_signal(signal.SIGINT),) * 2))
    chat_lines(monkeypatch, "Hi", "never")
    code, _, err = picaflor("chat")
    assert code == 130
    assert err.endswith("picaflor: interrupted\n")


def test_chat_takes_back_a_turn_that_failed(
    picaflor: Run, fake: type[FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = [ContextExceeded("9 tokens, 8 fit"), None]

    def fail_once() -> None:
        error = errors.pop(0)
        if error:
            raise error

    monkeypatch.setattr(fake, "script", (fail_once, " fine"))
    chat_lines(monkeypatch, "long", "short")
    code, out, err = picaflor("chat")
    assert (code, out) == (1, " fine\n")
    assert "picaflor: error: 9 tokens, 8 fit (this turn is taken back; :reset starts anew)" in err
    assert fake.calls[1][0] == "<user>short<assistant>"


class Typing(io.StringIO):
    """A terminal as stdin; `input` is replaced."""

    def isatty(self) -> bool:
        return True


def test_chat_at_a_terminal_ends_well_whatever_failed(
    fake: type[FakeEngine], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake, "script", (" half", ContextExceeded("9 tokens, 8 fit")))
    monkeypatch.setitem(sys.modules, "readline", None)
    monkeypatch.setattr(sys, "stdin", Typing())
    chat_lines(monkeypatch, "Hi")
    assert cli.main(["chat"]) == 0


@pytest.mark.parametrize(("error", "code"), [(ContextExceeded("9 tokens, 8 fit"), 1), (KeyboardInterrupt(), 130)])
def test_chat_error_after_a_part_of_an_answer_starts_a_line(
    picaflor: Run, fake: type[FakeEngine], monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int
) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(fake, "script", (" half", error))
    chat_lines(monkeypatch, "Hi")
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    assert picaflor("chat")[0] == code
    assert "\n half\npicaflor: " in terminal.getvalue()


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
