"""The model's own chat template, rendered in a sandbox.

Knows Jinja and the files that hold templates; must not know tokenizers, models or the HTTP interface. A template comes
with the model and is untrusted: no attribute of Python objects is reachable; its size, loops and output are bounded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from jinja2.exceptions import SecurityError

from picaflor.errors import BadTemplate
from picaflor.runtime import sidefile
from picaflor.runtime.sandbox import Sandbox, TooLong, guarded

MAX_TEMPLATE_CHARS = 1 << 16
MAX_OUTPUT_CHARS = 1 << 24
_MAX_FILE_BYTES = 1 << 22
_SHORT_TALK_BYTES = 1 << 16
_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class ChatTemplate:
    """A compiled template. `where`: the file that it came from. `tokens`: special tokens by their template names."""

    def __init__(self, source: str, *, where: str = "chat template", tokens: Mapping[str, str] | None = None) -> None:
        self.where = where
        self.source = source
        self._tokens = dict(tokens or {})
        self._never_ends: TooLong | None = None
        if len(source) > MAX_TEMPLATE_CHARS:
            raise BadTemplate(f"{where}: {len(source)} characters; at most {MAX_TEMPLATE_CHARS} are read")
        try:
            self._template = Sandbox().from_string(source)
        except Exception as error:  # Jinja, and Python's compiler behind it, raise nearly anything for a bad source
            raise BadTemplate(f"{where}: not a usable template: {_reason(error)}") from error

    @classmethod
    def open(cls, directory: Path) -> ChatTemplate | None:
        """The template of a model folder, None where it has none. Raises BadTemplate.

        chat_template.jinja comes first, then chat_template.json, then `chat_template` of tokenizer_config.json, where
        a list of named templates means the one called "default".
        """
        tokenizer_config = _read_object(directory / "tokenizer_config.json")
        tokens = _special_tokens(tokenizer_config)
        path = directory / "chat_template.jinja"
        source = sidefile.read_text(path, most_bytes=_MAX_FILE_BYTES, error=BadTemplate)
        if source is not None:
            return cls(source, where=str(path), tokens=tokens)
        for name, values in (
            ("chat_template.json", _read_object(directory / "chat_template.json")),
            ("tokenizer_config.json", tokenizer_config),
        ):
            found = values.get("chat_template")
            if found is not None:
                where = f"{directory / name}: chat_template"
                return cls(_pick(found, where), where=where, tokens=tokens)
        return None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text of a talk. `variables`: further names for the template (`enable_thinking`, ...).

        Raises BadTemplate with the template's own reason where it refuses, and where it gives no text at all; there is
        never a partly rendered prompt. A template that did not end for a short talk is not tried again.
        """
        names = {**self._tokens, **(variables or {})}
        names.update(messages=list(messages), tools=list(tools) if tools else None)
        names.update(add_generation_prompt=add_generation_prompt)
        if self._never_ends is not None:
            raise BadTemplate(f"{self.where}: {_reason(self._never_ends)}")
        try:
            text = self._run(names)
        except Exception as error:  # whatever a template makes Python raise is the template's fault
            raise BadTemplate(f"{self.where}: {_reason(error)}") from error
        if not text:
            raise BadTemplate(f"{self.where}: the template gives no text for {len(messages)} messages")
        return text

    def _run(self, names: dict[str, Any]) -> str:
        parts: list[str] = []
        size = 0
        with guarded() as guard:
            nbytes = guard.weigh(names, given=True)[0]
            try:
                for part in self._template.generate({**names, "range": guard.range}):
                    size += len(part)
                    if size > MAX_OUTPUT_CHARS:
                        raise SecurityError(f"more than {MAX_OUTPUT_CHARS} characters of output")
                    parts.append(part)
            except TooLong as error:
                if nbytes < _SHORT_TALK_BYTES:
                    self._never_ends = error
                raise
        text = "".join(parts)
        text.encode()
        return text

    def render_turns(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The turns alone, with no prompt for an answer behind them."""
        return self.render(messages, add_generation_prompt=False)


def _reason(error: BaseException) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, jinja2.TemplateSyntaxError):
        return f"line {error.lineno}: {text}"
    plain = type(error) is jinja2.TemplateError or isinstance(error, SecurityError)
    return text if plain and text else f"{type(error).__name__}: {text}"


def _pick(found: object, where: str) -> str:
    """The text of a `chat_template` value."""
    if isinstance(found, str):
        return found
    named = {
        entry["name"]: entry["template"]
        for entry in (found if isinstance(found, list) else [])
        if isinstance(entry, dict) and isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str)
    }
    if "default" not in named:
        names = f"templates {', '.join(named)}" if named else f"a {type(found).__name__}"
        raise BadTemplate(f'{where} holds {names}; accepted: a text, or a list with a template named "default"')
    return str(named["default"])


def _special_tokens(values: Mapping[str, Any]) -> dict[str, str]:
    tokens = {}
    for name in _TOKEN_NAMES:
        value = values.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            tokens[name] = text
    return tokens


def _read_object(path: Path) -> dict[str, Any]:
    """A JSON object, empty where the file is absent."""
    text = sidefile.read_text(path, most_bytes=_MAX_FILE_BYTES, error=BadTemplate)
    if text is None:
        return {}
    try:
        values = json.loads(text)
    except (RecursionError, ValueError) as error:
        raise BadTemplate(f"{path}: not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise BadTemplate(f"{path}: holds a {type(values).__name__}; an object was expected")
    return values
