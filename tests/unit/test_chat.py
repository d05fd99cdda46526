"""Chat templates: where they are found, what they render, and that a hostile one does nothing and ends.

Must not know tokenizers or models.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from picaflor.errors import BadTemplate
from picaflor.runtime import sandbox
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
        ("chat_template.jinja", "{% import 'os' as os %}" + "x" * (1 << 20), "at most 65536 are read"),
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
    with pytest.raises(BadTemplate, match="more than 16777216 characters of output"):
        ChatTemplate(block).render([])


DOUBLING = "{%% set n = namespace(v=%s) %%}{%% for i in range(99) %%}{%% set n.v = %s %%}{%% endfor %%}{{ n.v|string }}"
LONG = "takes too long"
VALUE = "a value of "
GONE = "is not available in a chat template"
HOSTILE = {
    "{% set s = 'x' * 16000000 %}{% for a in s %}{% for b in s %}{% endfor %}{% endfor %}": LONG,
    DOUBLING % ("3", "n.v * n.v"): "an integer of ",
    "{{ lipsum(n=3000000) }}": "'lipsum' is undefined",
    "{{ cycler() }}": "'cycler' is undefined",
    "{{ joiner() }}": "'joiner' is undefined",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}": LONG,
    "{% macro f(s) %}{{ s }}{{ s }}{% endmacro %}" + DOUBLING % ("'x'", "f(n.v)"): VALUE,
    "{% set a %}{{ 'x' * 9000000 }}{% endset %}{% set b %}{{ a }}{{ a }}{% endset %}": VALUE,
    "{{ 'a'|center(3000000000) }}": "No filter named 'center'",
    "{{ '%2000000000d'|format(1) }}": "No filter named 'format'",
    DOUBLING % ("'x'", "n.v ~ n.v"): VALUE,
    DOUBLING % ("'x'", "[n.v, n.v]|join('')"): VALUE,
    DOUBLING % ("'x'", "n.v + n.v"): VALUE,
    DOUBLING % ("'x'", "n.v|replace('x', 'xx')"): VALUE,
    DOUBLING % ("'x'", "n.v.replace('', 'x')"): VALUE,
    DOUBLING % ("['x']", "[n.v, n.v]"): VALUE,
    DOUBLING % ("['x']", "{'a': n.v, 'b': n.v}"): VALUE,
    DOUBLING % ("['x']", "dict(a=n.v, b=n.v)"): VALUE,
    DOUBLING % ("['x']", "n.v + n.v"): VALUE,
    "{% set n = namespace(t=('x',)) %}{% for i in range(900000) %}{% set n.t = (n.t,) %}{% endfor %}{{ {n.t: 1} }}": (
        "a value of 101 levels; at most 100"
    ),
    "{{ messages|tojson(indent=1000000000) }}": "tojson(indent=1000000000); accepted: 0 to 16",
    "{{ messages|tojson(separators=('x' * 9000000, 'y' * 9000000)) }}": VALUE,
    "{{ 'a'.zfill(3000000000) }}": f"str.zfill {GONE}",
    "{{ 'a'.ljust(3000000000) }}": f"str.ljust {GONE}",
    "{{ 'a'.expandtabs(3000000000) }}": f"str.expandtabs {GONE}",
    "{{ ('a'|attr('rjust'))(3000000000) }}": f"str.rjust {GONE}",
    "{{ '{:>2000000000}'.format(1) }}": f"calling format {GONE}",
    "{{ '%(a)2000000000d' % {'a': 1} }}": GONE,
    "{{ (5).to_bytes(3000000000, 'big') }}": f"calling to_bytes {GONE}",
    "{{ ['a', 'b']|indent(3000000000) }}": VALUE,
    "{{ ('a' * 1000)|wordwrap(1) }}": "No filter named 'wordwrap'",
    "{{ ('x' * 1000000).join(['a'] * 1000000) }}": VALUE,
    "{{ ('x' * 1000000).join(['a'] * 10000) }}": VALUE,
    "{{ (['x' * 100000] * 100000)|sort }}": VALUE,
    "{{ ('x ' * 4000000).split() }}": VALUE,
    "{{ ('x ' * 4000000).split(' ') }}": VALUE,
    "{{ ('\\n' * 8000000).splitlines() }}": VALUE,
    "{{ ('x' * 8000000)|list|length }}": VALUE,
    "{{ 1.5|round(1000000000) }}": "rounded to 1000000000 places",
    "{{ strftime_now('%1000000000Y') }}": "without widths",
    "{% set s = 'x' * 9000000 %}" + "".join(f"{{% set a{i} = s[1:] %}}" for i in range(99)): "makes more than",
    "{{ raise_exception(*('x' * 9000000)) }}": "*arguments and **arguments are not available",
    "{% set s = 'x' * 16000000 %}{% for i in range(1000) %}{% set n = ["
    + "'yy' in s, " * 1000
    + "] %}{% endfor %}": LONG,
    "{{ '\\ud800' }}": "surrogates not allowed",
    "{% if false %}x{% endif %}": "the template gives no text for 1 messages",
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}": "",
    "{% for a in 'a' %}" * 30 + "{% endfor %}" * 30: "",
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("number", range(len(HOSTILE)))
def test_hostile_templates_are_stopped_by_the_bound_meant_for_them(number: int) -> None:
    source, reason = list(HOSTILE.items())[number]
    with pytest.raises(BadTemplate) as caught:
        ChatTemplate(source).render([{"role": "user", "content": "hi"}])
    assert reason in str(caught.value)
    assert "MemoryError" not in str(caught.value)
    assert "\n" not in str(caught.value)
    assert sys.gettrace() is None or "picaflor" not in repr(sys.gettrace())


@pytest.mark.timeout(300)
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="this system has no /proc")
def test_hostile_templates_need_little_memory() -> None:
    program = (
        "import json, sys\n"
        "from picaflor.errors import BadTemplate\n"
        "from picaflor.runtime.chat import ChatTemplate\n"
        "for source in json.load(sys.stdin):\n"
        "    try:\n"
        "        ChatTemplate(source).render([{'role': 'user', 'content': 'hi'}])\n"
        "    except BadTemplate:\n"
        "        pass\n"
        "print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], input=json.dumps(list(HOSTILE)), capture_output=True, text=True, check=True
    )
    assert int(done.stdout) * 1024 < 300e6


def test_the_time_of_a_template_that_does_not_end_is_spent_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_LINES", 2000)
    template = ChatTemplate("{% for i in range(5000) %}{{ messages|length }}{% endfor %}")
    for _ in range(2):
        with pytest.raises(BadTemplate, match=LONG):
            template.render(TALK)
        monkeypatch.setattr(sandbox, "MAX_LINES", 2_000_000)
    long = ChatTemplate("{% for i in range(5000) %}{{ messages|length }}{% endfor %}")
    monkeypatch.setattr(sandbox, "MAX_LINES", 2000)
    with pytest.raises(BadTemplate, match=LONG):
        long.render([{"role": "user", "content": "x" * 100000}])
    monkeypatch.setattr(sandbox, "MAX_LINES", 2_000_000)
    assert long.render(TALK) == "2" * 5000


def test_a_trace_function_that_was_set_is_set_again() -> None:
    def trace(frame: object, event: str, argument: object) -> None:
        return None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        ChatTemplate("x").render([])
        with pytest.raises(BadTemplate):
            ChatTemplate("{{ 1 / 0 }}").render([])
        assert sys.gettrace() is trace
    finally:
        sys.settrace(before)


def test_what_published_templates_use_is_there() -> None:
    source = """{%- macro show(value) %}<{{ value|tojson|trim }}>{% endmacro -%}
{%- set ns = namespace(last=-1, text='') -%}
{%- for m in messages[::-1] %}{% set i = (messages|length - 1) - loop.index0 -%}
{%- if m.role == 'user' and ns.last < 0 %}{% set ns.last = i %}{% endif %}{% endfor -%}
{%- for m in messages %}{% set ns.text = ns.text ~ m['content'].split('</think>')[-1].lstrip('\n') + '|' -%}
{%- endfor -%}
{{ ns.last }}{{ ns.text }}{{ show({'b': [1, true], 'a': none}) }}
{%- for key, value in {'x': 1, 'y': 2}.items() %}{{ key }}={{ value|string }}{{ ',' if not loop.last }}{% endfor -%}
{{ messages|selectattr('role', 'equalto', 'user')|map(attribute='content')|join('+') }}
{%- if messages|selectattr('role', 'equalto', 'none') %} lazy{% endif -%}
{{ messages[0].content is string and messages[0].content|upper }}{{ 7 // 2 }}{{ strftime_now('%-d%%')[-1] }}
{{- loop is defined }}
{{- ('a,b'.split(',')|last).upper() }}{{ messages[0].get('none', 'd') }}{{ 'x'|indent(2, true) }}"""
    assert ChatTemplate(source).render(TALK) == ('0hi|yo|<{"b": [1, true], "a": null}>x=1,y=2hi lazyHI3%FalseBd  x')


@pytest.mark.parametrize("name", ["chat_template.jinja", "chat_template.json", "tokenizer_config.json"])
@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        ("link", "is a link to nowhere, which does not exist"),
        ("loop", "cannot be read: Too many levels of symbolic links"),
        ("folder", "is a folder; a regular file was expected"),
        ("pipe", "is a pipe; a regular file was expected"),
    ],
)
def test_what_cannot_be_read_is_not_taken_for_absent(tmp_path: Path, name: str, kind: str, cause: str) -> None:
    path = tmp_path / name
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("nowhere" if kind == "link" else name)
    with pytest.raises(BadTemplate, match=re.escape(f"{path}: {cause}")):
        ChatTemplate.open(tmp_path)
