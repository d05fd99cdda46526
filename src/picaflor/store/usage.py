"""Usage history of a model: how often each expert was asked for, over all runs so far; what pins are chosen by.

Knows counts and the two texts that hold them; must not know where files lie, models or policies.

Own text: JSON `{"format": "picaflor usage", "version": 1, "policy": text, "layers": {"LAYER": [count, ...], ...}}`.
Other text: that of `.coli_usage` (container.md): lines of three numbers, `-1 layers experts`, `-2 1 engine_id`, then
`layer expert count`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from picaflor.container.strict_json import parse_object, show
from picaflor.errors import BadContainer, BadStateFile

FORMAT = "picaflor usage"
VERSION = 1
MOST_COUNT = 1 << 20
"""A layer whose counts sum to more is halved: old habits fade."""
_MOST_READ = 1 << 53

Counts = dict[int, list[int]]


@dataclass(slots=True)
class Usage:
    """Counts by layer, one per expert. `policy`: the ranking that was in force at the end of the last run."""

    layers: Counts = field(default_factory=dict)
    policy: str = ""

    def add(self, counts: Mapping[int, Sequence[int]]) -> None:
        """Take in what a run counted."""
        for layer, found in counts.items():
            old = self.layers.get(layer, [0] * len(found))
            total = [before + now for before, now in zip(old, found, strict=True)]
            while sum(total) > MOST_COUNT:
                total = [count // 2 for count in total]
            self.layers[layer] = total

    def check(self, experts: Mapping[int, int], where: str) -> None:
        """Raises BadStateFile where it counts layers or experts that the model does not have."""
        for layer, counts in self.layers.items():
            if layer not in experts:
                raise BadStateFile(f"{where}: counts experts of layer {layer}; the model has {show(list(experts))}")
            if len(counts) != experts[layer]:
                raise BadStateFile(f"{where}: counts {len(counts)} experts in layer {layer}; it has {experts[layer]}")

    def to_json(self) -> str:
        """The own text."""
        layers = {str(layer): counts for layer, counts in sorted(self.layers.items())}
        value = {"format": FORMAT, "version": VERSION, "policy": self.policy, "layers": layers}
        return json.dumps(value, separators=(",", ":")) + "\n"

    @classmethod
    def from_json(cls, text: str, where: str) -> Usage:
        """Raises BadStateFile."""
        try:
            value = parse_object(text, where)
        except BadContainer as error:
            raise BadStateFile(str(error)) from None
        if value.get("format") != FORMAT or value.get("version") != VERSION:
            raise BadStateFile(
                f"{where}: format {show(value.get('format'))} version {show(value.get('version'))}; "
                f"expected {FORMAT} version {VERSION}"
            )
        layers, policy = value.get("layers"), value.get("policy", "")
        if not isinstance(layers, dict) or not isinstance(policy, str):
            raise BadStateFile(f"{where}: layers is {show(layers)} and policy {show(policy)}")
        found: Counts = {}
        for name, counts in layers.items():
            if not (name.isascii() and name.isdecimal() and len(name) < 8):
                raise BadStateFile(f"{where}: layer {show(name)}; expected a number")
            if not isinstance(counts, list) or not all(map(_is_count, counts)):
                raise BadStateFile(f"{where}: counts of layer {name} are {show(counts)}; expected whole numbers from 0")
            found[int(name)] = counts
        return cls(found, policy)

    def to_coli(self, *, layers: int, family: str) -> str:
        """The other text; empty where nothing was counted. `layers`: of the model, without draft layers."""
        lines = [
            f"{layer} {expert} {count}"
            for layer, counts in sorted(self.layers.items())
            for expert, count in enumerate(counts)
            if count
        ]
        if not lines:
            return ""
        experts = max(map(len, self.layers.values()))
        return "\n".join([f"-1 {layers} {experts}", f"-2 1 {engine_id(family)}", *lines]) + "\n"

    @classmethod
    def from_coli(cls, text: str, where: str, *, layers: int, experts: Mapping[int, int], family: str) -> Usage:
        """Counts for a model of these layers and experts; rows of layers without experts are dropped. Raises
        BadStateFile for another model's, and for another engine's by its number."""
        found: Counts = {}
        for number, line in enumerate(text.splitlines(), 1):
            first, second, third = _three(line, f"{where}: line {number}")
            if first < 0:
                _check_header((first, second, third), where, layers, experts, family)
            elif first in experts:
                if not (0 <= second < experts[first] and _is_count(third)):
                    raise BadStateFile(f"{where}: line {number}: expert {second} of {experts[first]}, count {third}")
                found.setdefault(first, [0] * experts[first])[second] = third
        return cls(found)


def is_coli(text: str) -> bool:
    """Whether a text is of the other kind: it starts with a number, or is empty."""
    return not text.lstrip().startswith("{")


def engine_id(family: str) -> int:
    """FNV-1a, 32 bits, of a family's name."""
    value = 0x811C9DC5
    for byte in family.encode():
        value = (value ^ byte) * 0x01000193 & 0xFFFFFFFF
    return value


def _check_header(row: tuple[int, int, int], where: str, layers: int, experts: Mapping[int, int], family: str) -> None:
    """Records that start with a negative number; unknown ones are skipped, as their rule says."""
    most = max(experts.values(), default=0)
    match row:
        case (-1, found_layers, found_experts) if (found_layers, found_experts) != (layers, most):
            raise BadStateFile(
                f"{where}: for {found_layers} layers of {found_experts} experts; the model has {layers} of {most}"
            )
        case (-2, version, _) if version != 1:
            raise BadStateFile(f"{where}: version {version}; known is 1")
        case (-2, _, found) if found != engine_id(family):
            raise BadStateFile(f"{where}: written for engine {found}; {family} is {engine_id(family)}")


def _three(line: str, where: str) -> tuple[int, int, int]:
    words = line.split()
    try:
        first, second, third = (int(word) for word in words)
    except ValueError:
        raise BadStateFile(f"{where}: {show(line)}; expected three whole numbers") from None
    return first, second, third


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST_READ
