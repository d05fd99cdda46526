"""chat: the conversation, its commands, Ctrl-C and turns that fail; against an engine made of words."""

from __future__ import annotations

import io
import signal
import sys
from typing import Any

import pytest
from cli_support import (
    FakeEngine,
    Run,
    installed,
    runner,
)

from picaflor import cli
from picaflor.errors import ContextExceeded


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeEngine]:
    return installed(monkeypatch)


@pytest.fixture
def picaflor(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    return runner(capsys, monkeypatch)


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
    monkeypatch.setattr("picaflor.cli.chat.read_piped", read)


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


def test_chat_says_why_an_answer_ends_early(
    picaflor: Run, fake: type[FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    for reason, line in (
        ("length", "(cut at 2 tokens; -n raises that)"),
        (
            "context",
            "(the context is full, 64 tokens with the prompt: the answer ends here; this model takes no more; ",
        ),
        ("stop", ""),
    ):
        monkeypatch.setattr(fake, "finish_reason", reason)
        code, out, err = picaflor("chat", "-n", "2", stdin="Hi\n")
        assert (code, out) == (0, " there was\n")
        rest = err.splitlines()[3:]
        assert len(rest) == bool(line)
        assert all(text.startswith(line) for text in rest)


def test_chat_takes_lines_of_a_pipe_that_end(
    picaflor: Run, fake: type[FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("picaflor.cli.model.MOST_PROMPT", 8)
    monkeypatch.setattr("picaflor.cli.chat.MOST_PROMPT", 8)
    code, out, err = picaflor("chat", stdin="Hi\nMore")
    assert (code, out.count(" there was\n")) == (0, 2)
    code, out, err = picaflor("chat", stdin="Hi\n" + "x" * 9)
    assert (code, out.count(" there was\n")) == (2, 1)
    assert err.splitlines()[-1].startswith("picaflor: error: line on stdin: more than 8 characters; accepted: ")
