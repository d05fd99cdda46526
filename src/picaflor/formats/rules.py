"""Rules of the `picaflor.formats` metadata: which name pattern is stored in which format and group size.

Knows JSON text and format names; must not know sizes, shards or families. The text is
`{"version": 1, "rules": [{"pattern": "*.experts.*", "format": "int4-grouped", "group_size": 64}, ...]}`. Sizes are
checked against a rule in `formats.resolve`.
"""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from picaflor.container.stamps import STAMP_KEY, collect_stamps
from picaflor.container.strict_json import parse_object, show, show_path
from picaflor.container.types import Shard
from picaflor.errors import BadContainer, UnknownFormat
from picaflor.formats import get

RULES_VERSION = 1
MAX_TEXT = 16 << 20
MAX_EXACT = 1 << 17
MAX_PATTERNS = 1024
MAX_PATTERN_LENGTH = 512
RANS_STAMP = "int4-rans256-g0"

_WILD = frozenset("*?[")
_RULE_KEYS = frozenset({"pattern", "format", "group_size"})


@dataclass(frozen=True, slots=True)
class FormatRule:
    """Tensors whose whole name matches `pattern` (fnmatch style, case-sensitive) have this format.

    `group_size` is one of the format's listed sizes, or 0 where the format has none to choose. Raises UnknownFormat
    or BadContainer.
    """

    pattern: str
    format: str
    group_size: int = 0

    def __post_init__(self) -> None:
        sizes = get(self.format).group_sizes
        where = f"format rule {show(self.pattern)}"
        if not 0 < len(self.pattern) <= MAX_PATTERN_LENGTH:
            raise BadContainer(f"{where}: a pattern has 1 to {MAX_PATTERN_LENGTH} characters, not {len(self.pattern)}")
        if sizes and self.group_size not in sizes:
            raise UnknownFormat(
                f"{where}: {self.format} with group size {show(self.group_size)}; accepted: "
                f"{', '.join(map(str, sizes))}"
            )
        if not sizes and self.group_size != 0:
            raise UnknownFormat(f"{where}: {self.format} has no group size to choose, found {show(self.group_size)}")

    @property
    def exact(self) -> bool:
        """Whether the pattern is one tensor name."""
        return not _WILD.intersection(self.pattern)


@dataclass(frozen=True)
class FormatRules:
    """The rules of one container. An exact name wins over every pattern; among patterns the first match wins.

    Raises BadContainer for two rules that give one pattern different formats, or for too many rules.
    """

    rules: tuple[FormatRule, ...]
    _exact: dict[str, FormatRule] = field(init=False, repr=False, compare=False)
    _patterns: tuple[tuple[re.Pattern[str], FormatRule], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        seen: dict[str, FormatRule] = {}
        for rule in self.rules:
            if seen.setdefault(rule.pattern, rule) != rule:
                raise BadContainer(
                    f"format rule {show(rule.pattern)} stands twice, with {_words(seen[rule.pattern])} and with "
                    f"{_words(rule)}; expected it once"
                )
        exact = {pattern: rule for pattern, rule in seen.items() if rule.exact}
        patterns = [rule for rule in seen.values() if not rule.exact]
        if len(exact) > MAX_EXACT or len(patterns) > MAX_PATTERNS:
            raise BadContainer(
                f"format rules: {len(patterns)} patterns and {len(exact)} exact names; at most {MAX_PATTERNS} and "
                f"{MAX_EXACT} are accepted"
            )
        object.__setattr__(self, "_exact", exact)
        compiled = tuple((re.compile(fnmatch.translate(rule.pattern)), rule) for rule in patterns)
        object.__setattr__(self, "_patterns", compiled)

    @classmethod
    def parse(cls, text: str, where: str = "picaflor.formats") -> FormatRules:
        """Rules from the metadata text; `where` names the text in messages. Raises BadContainer or UnknownFormat."""
        if len(text) > MAX_TEXT:
            raise BadContainer(f"{where}: {len(text)} characters of format rules, at most {MAX_TEXT} are accepted")
        fields = parse_object(text, where)
        version = fields.get("version")
        if type(version) is not int or version != RULES_VERSION:
            raise BadContainer(f"{where}: format rules of version {show(version)}; accepted: {RULES_VERSION}")
        unknown = sorted(fields.keys() - {"version", "rules"})
        if unknown:
            raise BadContainer(f"{where}: unknown key {show(unknown[0])} in format rules; accepted: version, rules")
        entries = fields.get("rules")
        if not isinstance(entries, list):
            raise BadContainer(f"{where}: rules: expected a list, found {show(entries)}")
        return cls(tuple(_parse_rule(entry, f"{where}: rules[{number}]") for number, entry in enumerate(entries)))

    def match(self, name: str) -> FormatRule | None:
        """The rule of the tensor of that name, None where no rule speaks of it."""
        rule = self._exact.get(name)
        if rule is not None:
            return rule
        return next((rule for pattern, rule in self._patterns if pattern.match(name)), None)

    def to_json(self) -> str:
        """The metadata text; `parse` gives equal rules back."""
        entries = []
        for rule in self.rules:
            entry: dict[str, Any] = {"pattern": rule.pattern, "format": rule.format}
            if rule.group_size:
                entry["group_size"] = rule.group_size
            entries.append(entry)
        return json.dumps({"version": RULES_VERSION, "rules": entries}, separators=(",", ":"))


def _words(rule: FormatRule) -> str:
    """Format and group size of a rule, for messages."""
    return f"{rule.format} at group size {rule.group_size}" if rule.group_size else rule.format


def _parse_rule(entry: object, where: str) -> FormatRule:
    """One entry of the list."""
    if not isinstance(entry, dict):
        raise BadContainer(f"{where}: expected an object, found {show(entry)}")
    unknown = sorted(entry.keys() - _RULE_KEYS)
    if unknown:
        raise BadContainer(f"{where}: unknown key {show(unknown[0])}; accepted: {', '.join(sorted(_RULE_KEYS))}")
    for key in ("pattern", "format"):
        if not isinstance(entry.get(key), str):
            raise BadContainer(f"{where}: {key}: expected a string, found {show(entry.get(key))}")
    group_size = entry.get("group_size", 0)
    if type(group_size) is not int:
        raise BadContainer(f"{where}: group_size: expected an integer, found {show(group_size)}")
    try:
        return FormatRule(entry["pattern"], entry["format"], group_size)
    except (BadContainer, UnknownFormat) as error:
        raise type(error)(f"{where}: {error}") from None


def merge_rules(texts: Iterable[tuple[Shard, str]]) -> FormatRules | None:
    """The container's rules from the texts of its shards (`ContainerIndex.rules_json`), None where no shard has any.

    Every shard that has rules must have the same. Raises BadContainer naming two shards that differ.
    """
    first: tuple[Shard, FormatRules, str] | None = None
    for shard, text in texts:
        where = show_path(shard.path)
        if first is None:
            first = (shard, FormatRules.parse(text, f"{where}: picaflor.formats"), text)
        elif text != first[2] and FormatRules.parse(text, f"{where}: picaflor.formats") != first[1]:
            raise BadContainer(
                f"{where}: picaflor.formats differs from {show_path(first[0].path)}; expected the same rules in "
                "every shard"
            )
    return None if first is None else first[1]


def parse_stamps(text: str, where: str = STAMP_KEY) -> dict[str, str]:
    """Stamps of one `colibri.fmt` text: exact tensor name -> format name. Raises BadContainer.

    A whole container's stamps come from `container.stamps.collect_stamps`.
    """
    return collect_stamps([Shard(0, Path(where), 0, {STAMP_KEY: text})])


def routed_stamp(stamp: str | None) -> str | None:
    """What counts of a routed expert's stamp: nothing, but for a storage that sizes must not be guessed from."""
    return stamp if stamp == RANS_STAMP else None
