"""The model's own chat template, rendered in a sandbox.

Knows Jinja and the files that hold templates; must not know tokenizers, models or the HTTP interface. A template comes
with the model and is untrusted: no attribute of Python objects is reachable; its size, loops and output are bounded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from picaflor.errors import BadTemplate

MAX_TEMPLATE_CHARS = 1 << 20
MAX_OUTPUT_CHARS = 1 << 26
MAX_VALUE_ITEMS = 1 << 24
MAX_LOOP_STEPS = 1_000_000
_FAULTS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    MemoryError,
    TypeError,
    ValueError,
)
_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class _Generation(Extension):
    """`{% generation %} ... {% endgeneration %}` marks what a model writes; here it is the text alone."""

    tags = {"generation"}  # noqa: RUF012 (the name and form that Jinja asks for)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The body of the block."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with bounds on what products and sums may build."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])
        self.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
        self.filters["tojson"] = _to_json

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute `left operator right` if the result stays small."""
        if operator == "*" and not _both_numbers(left, right):
            count, items = (left, right) if isinstance(left, int) else (right, left)
            _bound(count * len(items) if isinstance(count, int) and hasattr(items, "__len__") else 0)
        if operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
            _bound(len(left) + len(right))
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            _bound(abs(right) * max(1, left.bit_length()))
        if operator == "%" and isinstance(left, str):
            raise SecurityError("text formatting with % is not available in a chat template")
        return super().call_binop(context, operator, left, right)


class _Loops:
    """The `range` of one rendering; all of its ranges together have a bounded length."""

    def __init__(self) -> None:
        self._steps = 0

    def range(self, *bounds: int) -> range:
        """Python's range."""
        steps = range(*bounds)
        self._steps += len(steps)
        if self._steps > MAX_LOOP_STEPS:
            raise SecurityError(f"more than {MAX_LOOP_STEPS} loop steps")
        return steps


def _both_numbers(left: Any, right: Any) -> bool:
    return isinstance(left, int | float) and isinstance(right, int | float)


def _bound(items: int) -> None:
    if items > MAX_VALUE_ITEMS:
        raise SecurityError(f"a value of {items} items; at most {MAX_VALUE_ITEMS}")


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class ChatTemplate:
    """A compiled template. `where`: the file that it came from. `tokens`: special tokens by their template names."""

    def __init__(self, source: str, *, where: str = "chat template", tokens: Mapping[str, str] | None = None) -> None:
        self.where = where
        self.source = source
        self._tokens = dict(tokens or {})
        if len(source) > MAX_TEMPLATE_CHARS:
            raise BadTemplate(f"{where}: {len(source)} characters; at most {MAX_TEMPLATE_CHARS} are read")
        try:
            self._template = _Sandbox().from_string(source)
        except _FAULTS as error:
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
        if path.is_file():
            return cls(_read_text(path), where=str(path), tokens=tokens)
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

        Raises BadTemplate with the template's own reason where it refuses; there is never a partly rendered prompt.
        """
        names = {**self._tokens, **(variables or {})}
        names.update(messages=list(messages), tools=list(tools) if tools else None)
        names.update(add_generation_prompt=add_generation_prompt, range=_Loops().range)
        parts: list[str] = []
        size = 0
        try:
            for part in self._template.generate(names):
                size += len(part)
                if size > MAX_OUTPUT_CHARS:
                    raise SecurityError(f"more than {MAX_OUTPUT_CHARS} characters of output")
                parts.append(part)
        except _FAULTS as error:
            raise BadTemplate(f"{self.where}: {_reason(error)}") from error
        return "".join(parts)

    def render_turns(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The turns alone, with no prompt for an answer behind them."""
        return self.render(messages, add_generation_prompt=False)


def _reason(error: BaseException) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, jinja2.TemplateSyntaxError):
        return f"line {error.lineno}: {text}"
    return text if type(error) is jinja2.TemplateError and text else f"{type(error).__name__}: {text}"


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


def _read_text(path: Path) -> str:
    size = path.stat().st_size
    if size > 4 * MAX_TEMPLATE_CHARS:
        raise BadTemplate(f"{path}: {size} bytes; at most {4 * MAX_TEMPLATE_CHARS} are read")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadTemplate(f"{path}: cannot be read as UTF-8 text: {error}") from error


def _read_object(path: Path) -> dict[str, Any]:
    """A JSON object, empty where the file is absent."""
    if not path.is_file():
        return {}
    try:
        values = json.loads(_read_text(path))
    except (RecursionError, ValueError) as error:
        raise BadTemplate(f"{path}: not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise BadTemplate(f"{path}: holds a {type(values).__name__}; an object was expected")
    return values
