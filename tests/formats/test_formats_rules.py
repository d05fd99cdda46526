"""The container's own format rules: parsing, matching, merging, and every way to be malformed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from picaflor.container.types import Shard
from picaflor.errors import BadContainer, UnknownFormat
from picaflor.formats.rules import MAX_PATTERNS, FormatRule, FormatRules, merge_rules, parse_stamps

EXPERT = "model.layers.3.mlp.experts.7.up_proj.weight"


def text(*rules: Any, version: Any = 1) -> str:
    return json.dumps({"version": version, "rules": list(rules)})


def rule(pattern: Any, format_name: Any = "int8-row", **more: Any) -> dict[str, Any]:
    return {"pattern": pattern, "format": format_name, **more}


def test_first_pattern_wins_and_exact_names_win_over_patterns() -> None:
    rules = FormatRules.parse(
        text(
            rule("*.experts.*.down_proj.weight", "int3-g64"),
            rule("*.experts.*", "int4-grouped", group_size=64),
            rule("*"),
            rule(EXPERT, "int2-row"),
        )
    )
    found = {name: rules.match(name) for name in (EXPERT, EXPERT.replace("7", "8"), "lm_head.weight")}
    assert found[EXPERT] == FormatRule(EXPERT, "int2-row")
    assert found[EXPERT.replace("7", "8")] == FormatRule("*.experts.*", "int4-grouped", 64)
    assert found["lm_head.weight"] == FormatRule("*", "int8-row")
    down = rules.match("model.layers.3.mlp.experts.7.down_proj.weight")
    assert down is not None
    assert down.format == "int3-g64"


def test_patterns_cover_whole_names_and_case() -> None:
    rules = FormatRules((FormatRule("model.layers.?.mlp.[gu]*.weight", "int8-row"),))
    assert rules.match("model.layers.3.mlp.gate_proj.weight") is not None
    assert rules.match("model.layers.3.mlp.up_proj.weight") is not None
    assert rules.match("model.layers.33.mlp.gate_proj.weight") is None
    assert rules.match("model.layers.3.mlp.down_proj.weight") is None
    assert rules.match("Model.layers.3.mlp.gate_proj.weight") is None
    assert rules.match("xmodel.layers.3.mlp.gate_proj.weight") is None
    assert rules.match("model.layers.3.mlp.gate_proj.weight.qs") is None
    assert FormatRules((FormatRule("a.b", "int8-row"),)).match("aXb") is None


def test_text_round_trip() -> None:
    rules = FormatRules((FormatRule("*.experts.*", "int4-grouped", 96), FormatRule("lm_head.weight", "bf16")))
    written = rules.to_json()
    assert json.loads(written) == {
        "version": 1,
        "rules": [
            {"pattern": "*.experts.*", "format": "int4-grouped", "group_size": 96},
            {"pattern": "lm_head.weight", "format": "bf16"},
        ],
    }
    assert FormatRules.parse(written) == rules


def test_no_rules_match_nothing() -> None:
    assert FormatRules.parse(text()).match(EXPERT) is None


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("", "not valid JSON"),
        ("{", "not valid JSON"),
        ("[]", r"expected a JSON object, found \[\]"),
        ("null", "expected a JSON object, found None"),
        ('{"version": 1, "version": 1, "rules": []}', 'the name "version" stands twice'),
        ('{"rules": []}', "format rules of version None; accepted: 1"),
        (text(version=2), "format rules of version 2; accepted: 1"),
        (text(version="1"), 'format rules of version "1"; accepted: 1'),
        (text(version=True), "format rules of version True; accepted: 1"),
        (text(version=1.0), r"format rules of version 1\.0; accepted: 1"),
        ('{"version": 1}', "rules: expected a list, found None"),
        ('{"version": 1, "rules": {}}', r"rules: expected a list, found \{\}"),
        ('{"version": 1, "rules": [], "extra": 0}', 'unknown key "extra" in format rules; accepted: version, rules'),
        ('{"version": 1, "rules": [NaN]}', "NaN is not a JSON value"),
        (text("x"), r'rules\[0\]: expected an object, found "x"'),
        (text(rule("*"), 5), r"rules\[1\]: expected an object, found 5"),
        (text({"format": "int8-row"}), r"rules\[0\]: pattern: expected a string, found None"),
        (text({"pattern": "*"}), r"rules\[0\]: format: expected a string, found None"),
        (text(rule(5)), r"rules\[0\]: pattern: expected a string, found 5"),
        (text(rule("*", None)), r"rules\[0\]: format: expected a string, found None"),
        (text(rule("*", colour=1)), r'rules\[0\]: unknown key "colour"; accepted: format, group_size, pattern'),
        (text(rule("*", "int4-grouped", group_size="64")), r'group_size: expected an integer, found "64"'),
        (text(rule("*", "int4-grouped", group_size=64.0)), r"group_size: expected an integer, found 64\.0"),
        (text(rule("*", "int4-grouped", group_size=True)), "group_size: expected an integer, found True"),
        (text(rule("*", "int4-grouped", group_size=None)), "group_size: expected an integer, found None"),
        (text(rule("")), r"a pattern has 1 to 512 characters, not 0"),
        (text(rule("a" * 513)), r"a pattern has 1 to 512 characters, not 513"),
        (text(rule("*"), rule("*", "int4-row")), r'"\*" stands twice, with int8-row and with int4-row'),
        (
            text(rule("a", "int4-grouped", group_size=64), rule("a", "int4-grouped", group_size=32)),
            "with int4-grouped at group size 64 and with int4-grouped at group size 32",
        ),
        (text(*(rule(f"*{number}") for number in range(MAX_PATTERNS + 1))), "1025 patterns and 0 exact names"),
        ('{"version":' * 100_000, "nested too deeply|not valid JSON"),
    ],
)
def test_malformed_rules_are_refused(bad: str, message: str) -> None:
    with pytest.raises(BadContainer, match=message) as caught:
        FormatRules.parse(bad, "out-00003.safetensors: picaflor.formats")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (rule("*", "int5-row"), r"rules\[0\]: unknown weight format 'int5-row'; known: f32"),
        (rule("*", "int4-rans256-g0"), "unknown weight format 'int4-rans256-g0'"),
        (rule("*", "int4-grouped"), r'format rule "\*": int4-grouped with group size 0; accepted: 16, 32'),
        (rule("*", "int4-grouped", group_size=63), "int4-grouped with group size 63; accepted: 16, 32"),
        (rule("*", "int4-grouped", group_size=512), "int4-grouped with group size 512; accepted"),
        (rule("*", "int4-grouped", group_size=-64), "int4-grouped with group size -64; accepted"),
        (rule("*", "int4-row", group_size=64), "int4-row has no group size to choose, found 64"),
        (rule("*", "int3-g64", group_size=64), "int3-g64 has no group size to choose, found 64"),
    ],
)
def test_rules_of_unknown_formats_are_refused(bad: dict[str, Any], message: str) -> None:
    with pytest.raises(UnknownFormat, match=message):
        FormatRules.parse(text(bad))


def test_equal_rules_collapse() -> None:
    rules = FormatRules.parse(text(rule("*"), rule("*")))
    assert rules.match("x") == FormatRule("*", "int8-row")


def test_many_exact_names() -> None:
    names = [f"model.layers.{layer}.mlp.experts.{expert}.up_proj.weight" for layer in range(80) for expert in range(64)]
    rules = FormatRules((*(FormatRule(name, "int3-g64") for name in names), FormatRule("*", "int4-row")))
    assert all(found is not None and found.format == "int3-g64" for found in map(rules.match, names))


def shard(number: int) -> Shard:
    return Shard(number, Path(f"out-{number:05}.safetensors"), 0, {})


def test_shards_must_agree() -> None:
    first, second = text(rule("*")), text(rule("*", "int4-row"))
    assert merge_rules([]) is None
    assert merge_rules([(shard(0), first), (shard(1), first + " ")]) == FormatRules.parse(first)
    with pytest.raises(BadContainer, match=r"out-00001.safetensors: picaflor.formats differs from out-00000"):
        merge_rules([(shard(0), first), (shard(1), second)])
    with pytest.raises(BadContainer, match=r"out-00001.safetensors: picaflor.formats: not valid JSON"):
        merge_rules([(shard(0), first), (shard(1), "{")])


def test_stamps_of_one_text() -> None:
    assert parse_stamps('{"a": "int8-row", "b": "int4-row", "a": "int8-row"}') == {"a": "int8-row", "b": "int4-row"}
    for bad in ("{", "[]", '"x"', '{"a": 1}', '{"a": "int8-row", "a": "int4-row"}'):
        with pytest.raises(BadContainer, match=r"colibri\.fmt"):
            parse_stamps(bad)
    many = json.dumps({str(number): "int8-row" for number in range(4097)})
    with pytest.raises(BadContainer, match="4096"):
        parse_stamps(many)
