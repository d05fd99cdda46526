"""Reading a model's config: values that are read, expected or known to be inert.

Knows JSON and field names; must not know families, tensors or devices.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from picaflor.errors import UnsupportedConfig

# Keys of any family that do not change what an inference run computes.
INERT = (
    "_attn_implementation",
    "_from_model_config",
    "_name_or_path",
    "architectures",
    "attention_dropout",
    "auto_map",
    "bos_token_id",
    "chunk_size_feed_forward",
    "dtype",
    "eos_token_id",
    "id2label",
    "initializer_range",
    "label2id",
    "model_type",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "pretraining_tp",
    "problem_type",
    "return_dict",
    "torch_dtype",
    "transformers_version",
    "use_cache",
)

# Ways to store weights that the container's own sizes and names describe fully.
STORED_FORMS = ("fp8", "mxfp4")


class Notices:
    """Things worth one line to the user; under `strict` each is an UnsupportedConfig instead."""

    def __init__(self, *, strict: bool = False, warn: Callable[[str], None] | None = None) -> None:
        self.strict = strict
        self.messages: list[str] = []
        self._warn = warn

    def note(self, message: str) -> None:
        """Record and pass on one message. Raises UnsupportedConfig under strict."""
        if self.strict:
            raise UnsupportedConfig(f"{message} (refused because of --strict)")
        self.tell(message)

    def tell(self, message: str) -> None:
        """Record and pass on what the user asked for but should know; never an error."""
        self.messages.append(message)
        if self._warn is not None:
            self._warn(message)


class Config:
    """Typed access to a config that remembers which keys were looked at.

    Every reader raises UnsupportedConfig naming the field, the value found and what is accepted. `unknown` keys are
    those that nobody read, expected or ignored.
    """

    def __init__(
        self, values: Mapping[str, Any], *, where: str = "config.json", notices: Notices | None = None
    ) -> None:
        self.values = values
        self.where = where
        self.notices = notices if notices is not None else Notices()
        self._seen: set[str] = set()

    def refuse(self, name: str, accepted: str) -> UnsupportedConfig:
        """The error for a field whose value is not accepted."""
        if name not in self.values:
            return UnsupportedConfig(f"{self.where}: {name} is missing; accepted: {accepted}")
        return UnsupportedConfig(f"{self.where}: {name} is {_shown(self.values[name])}; accepted: {accepted}")

    def has(self, name: str) -> bool:
        """True where the key is present with a value other than null; counts as read."""
        self._seen.add(name)
        return self.values.get(name) is not None

    def spelling(self, *names: str) -> str:
        """The one of several names of a field that is used; two of them with different values are refused."""
        used = [name for name in names if self.has(name)]
        for other in used[1:]:
            if self.values[other] != self.values[used[0]]:
                raise self.refuse(other, f"the same value as {used[0]} ({_shown(self.values[used[0]])})")
        return used[0] if used else names[0]

    def integer(self, name: str, *, default: int | None = None, low: int = 1, high: int = 2**31 - 1) -> int:
        """An integer in `low .. high`; `default` stands for an absent or null field."""
        accepted = f"an integer from {low} to {high}"
        value = self.values[name] if self.has(name) else default
        if type(value) is not int or not low <= value <= high:
            raise self.refuse(name, accepted)
        return value

    def number(self, name: str, *, default: float | None = None, low: float, high: float) -> float:
        """A number in `low .. high`; NaN and infinity are in no range."""
        value = self.values[name] if self.has(name) else default
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise self.refuse(name, f"a number from {low:g} to {high:g}")
        return float(value)

    def flag(self, name: str, *, default: bool | None = None) -> bool:
        """true or false."""
        value = self.values[name] if self.has(name) else default
        if type(value) is not bool:
            raise self.refuse(name, "true or false")
        return value

    def words(self, name: str, *, length: int, choices: Sequence[str]) -> tuple[str, ...]:
        """A list of `length` strings, each one of `choices`; a string counts as the list of its letters."""
        value = self.values[name] if self.has(name) else None
        value = list(value) if isinstance(value, str) else value
        if not isinstance(value, list) or len(value) != length or any(word not in choices for word in value):
            raise self.refuse(name, f"a list of {length} of {', '.join(choices)}")
        return tuple(value)

    def integers(self, name: str, *, low: int, high: int) -> tuple[int, ...]:
        """A list of integers in `low .. high`; empty where the field is absent."""
        value = self.values[name] if self.has(name) else []
        if not isinstance(value, list) or any(type(item) is not int or not low <= item <= high for item in value):
            raise self.refuse(name, f"a list of integers from {low} to {high}")
        return tuple(value)

    def section(self, name: str) -> Config | None:
        """A nested object, or None where it is absent or null."""
        if not self.has(name):
            return None
        value = self.values[name]
        if not isinstance(value, dict):
            raise self.refuse(name, "an object")
        return Config(value, where=f"{self.where}: {name}", notices=self.notices)

    def expect(self, name: str, *accepted: Any) -> None:
        """Refuse a value that changes the function and that is not computed here. An absent field passes."""
        self._seen.add(name)
        if name not in self.values:
            return
        value = self.values[name]
        if not any(type(value) is type(want) and value == want for want in accepted):
            raise self.refuse(name, " or ".join(_shown(want) for want in accepted))

    def ignore(self, *names: str) -> None:
        """Fields known to change nothing that is computed here."""
        self._seen.update(names)

    def finish(self) -> None:
        """One notice that names all keys that nobody looked at."""
        unknown = sorted(key for key in self.values if key not in self._seen)
        if unknown:
            self.notices.note(f"{self.where}: unknown keys are not used: {', '.join(unknown)}")


def _shown(value: Any) -> str:
    text = json.dumps(value) if isinstance(value, str | int | float | bool | list | dict | None) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def rope_theta(config: Config) -> float:
    """The base of the rotary angles, from `rope_parameters` or the older top-level spelling.

    Two values that differ and every scaling type but the default one are refused; there is no default.
    """
    found: dict[str, float] = {}
    if config.has("rope_theta"):
        found["rope_theta"] = config.number("rope_theta", low=1.0, high=1e12)
    for name in ("rope_parameters", "rope_scaling"):
        section = config.section(name)
        if section is None:
            continue
        for key in ("rope_type", "type"):
            section.expect(key, "default")
        section.expect("partial_rotary_factor", 1, 1.0)
        section.expect("factor", 1, 1.0)
        if section.has("rope_theta"):
            found[f"{name}.rope_theta"] = section.number("rope_theta", low=1.0, high=1e12)
        section.finish()
    if not found:
        raise UnsupportedConfig(
            f"{config.where}: rope_theta is missing; accepted: rope_parameters.rope_theta or a top-level rope_theta"
        )
    if len(set(found.values())) > 1:
        shown = ", ".join(f"{name} is {value:g}" for name, value in found.items())
        raise UnsupportedConfig(f"{config.where}: {shown}; accepted: one value, or the same one in both places")
    return next(iter(found.values()))


def check_stored_form(config: Config) -> None:
    """Refuse quantized checkpoints whose way to store weights nothing here reads."""
    section = config.section("quantization_config")
    if section is None:
        return
    section.expect("quant_method", *STORED_FORMS)
    section.expect("weight_block_size", [128, 128], None)
    section.expect("fmt", "e4m3")
    section.ignore("activation_scheme", "modules_to_not_convert", "ignored_layers", "scale_fmt", "dequantize")
    if not section.has("quant_method"):
        raise section.refuse("quant_method", " or ".join(STORED_FORMS))
    section.finish()
