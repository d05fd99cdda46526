"""Chat templates: where they are found, what they render, and that a hostile one does nothing.

Must not know tokenizers or models.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from picaflor.errors import BadTemplate
from picaflor.runtime.chat import ChatTemplate

TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
SIMPLE = """{% for m in messages %}
  {%- if m.role == 'tool' %}{% continue %}{% endif -%}
  <{{ m.role }}>{{ m.content }}
{% endfor %}
{% if add_generation_prompt %}
<assistant>{% endif %}"""


def test_rendering_with_the_whitespace_rules_of_published_templates() -> None:
    template = ChatTemplate(SIMPLE)
    assert template.render(TALK) == "<user>hi\n<assistant>yo\n<assistant>"
    assert template.render([*TALK, {"role": "tool", "content": "x"}], add_generation_prompt=False) == (
        "<user>hi\n<assistant>yo\n"
    )
    assert template.render_turns(TALK) == "<user>hi\n<assistant>yo\n"


def test_tools_variables_and_json() -> None:
    source = (
        "{{ tools | tojson }}|{{ tools[0] | tojson(indent=1) }}|{{ effort }}|{{ missing is defined }}|{{ bos_token }}"
    )
    template = ChatTemplate(source, tokens={"bos_token": "<s>"})
    text = template.render([], tools=[{"name": "é<"}], variables={"effort": "high"})
    assert text == '[{"name": "é<"}]|{\n "name": "é<"\n}|high|False|<s>'
    assert ChatTemplate("{% if tools %}a{% else %}b{% endif %}").render([], tools=[]) == "b"


def test_generation_blocks_are_their_text() -> None:
    assert ChatTemplate("a{% generation %}b{{ 1 }}{% endgeneration %}c").render([]) == "ab1c"


def test_order_of_the_files(tmp_path: Path) -> None:
    assert ChatTemplate.open(tmp_path) is None
    config = {"chat_template": "config", "eos_token": {"content": "<e>"}, "bos_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert rendered(tmp_path) == "config"
    config["chat_template"] = [
        {"name": "tool_use", "template": "t"},
        {"name": "default", "template": "d{{ eos_token }}"},
    ]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert rendered(tmp_path) == "d<e>"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "json"}))
    assert rendered(tmp_path) == "json"
    (tmp_path / "chat_template.jinja").write_text("jinja")
    assert rendered(tmp_path) == "jinja"


def rendered(folder: Path) -> str:
    """An empty talk by the folder's template."""
    template = ChatTemplate.open(folder)
    assert template is not None
    return template.render([])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer_config.json", '{"chat_template": 3}', "holds a int; accepted: a text, or a list"),
        (
            "tokenizer_config.json",
            '{"chat_template": [{"name": "rag", "template": "x"}]}',
            "holds templates rag; accep",
        ),
        ("tokenizer_config.json", "{", "not valid JSON"),
        ("tokenizer_config.json", "[]", "holds a list; an object was expected"),
        ("chat_template.jinja", "a\n{% if %}", "not a usable template: line 2: "),
        ("chat_template.jinja", "{% import 'os' as os %}" + "x" * (1 << 20), "at most 1048576 are read"),
    ],
)
def test_unusable_files_are_refused_in_one_line(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(BadTemplate, match=re.escape(message)) as caught:
        ChatTemplate.open(tmp_path)
    assert str(caught.value).startswith(str(tmp_path / name))
    assert "\n" not in str(caught.value)


def test_the_templates_own_reason_is_given() -> None:
    source = (
        """{%- if messages[0].role == 'system' %}{{ raise_exception('System role\n not supported') }}{% endif %}ok"""
    )
    template = ChatTemplate(source, where="chat_template.jinja")
    assert template.render(TALK) == "ok"
    with pytest.raises(BadTemplate) as caught:
        template.render([{"role": "system", "content": "x"}])
    assert str(caught.value) == "chat_template.jinja: System role not supported"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content + 1 }}",
        "{{ messages[9].content }}",
        "{{ 1 / 0 }}",
        "{{ nothing.at.all }}",
        "{% include 'other' %}",
        "{{ messages | nofilter }}",
        "{{ raise_exception() }}",
    ],
)
def test_faults_of_a_template_are_bad_templates(source: str) -> None:
    with pytest.raises(BadTemplate):
        ChatTemplate(source).render(TALK)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__ }}{{ messages.__init__.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ self.__init__.__globals__ }}",
        "{{ ('{0.__class__.__mro__}').format(messages) }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ raise_exception.__globals__.os }}",
        "{{ 'x' * 100000000 }}",
        "{{ 100000000 * [1] }}",
        "{{ 7 ** 99999999 }}",
        "{{ '%999999999d' % 1 }}",
        "{% for i in range(999999) %}{% for j in range(999999) %}{% endfor %}{% endfor %}",
        "{% for i in range(5000) %}{% for j in range(5000) %}{% endfor %}{% endfor %}",
        "{% set n = namespace(s='x') %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_hostile_templates_reach_nothing_and_end(source: str) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
    with pytest.raises(BadTemplate) as caught:
        ChatTemplate(source).render(messages)
    assert len(str(caught.value)) < 500
    assert messages == [{"role": "user", "content": "hi"}]


def test_output_is_bounded() -> None:
    block = "{% set a = 'x' * 1000000 %}{% for i in range(100) %}{{ a }}{% endfor %}"
    with pytest.raises(BadTemplate, match="more than 67108864 characters of output"):
        ChatTemplate(block).render([])
