"""A chat template may not reach Python, run for ever, or return a text without end."""

from __future__ import annotations

import json
import resource
import shutil
import threading
import time
import tracemalloc
from pathlib import Path

import jinja2
import jinja2.meta
import pytest
from diptych.cluster.gateway.errors import ApiError
from diptych.cluster.gateway.text import sandbox, templates
from diptych.cluster.gateway.text.tokenizer import ChatTokenizer
from diptych.engine.demo import CHECKPOINT
from diptych.engine.errors import WeightsError

from tests.support.variants import daily

ASK = [{"role": "user", "content": "hi"}] * 3


def text_with(folder: Path, template: str) -> ChatTokenizer:
    copy = folder / "model"
    shutil.copytree(CHECKPOINT, copy)
    (copy / "chat_template.jinja").write_text(template)
    return ChatTokenizer(copy)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ ''.__class__.__base__ }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10 ** 9) %}x{% endfor %}",
        "{{ 'x' * 10 ** 9 }}",
        "{{ 9 ** (9 ** 9) }}",
        "{% for m in messages * 10 ** 8 %}{% endfor %}",
        "{% for i in range(9999) %}{% for j in range(9999) %}{{ 9 ** 99 }}{% endfor %}{% endfor %}",
        "{{ raise_exception('no') }}",
    ],
)
def test_a_hostile_template_is_refused_in_one_sentence(tmp_path: Path, template: str) -> None:
    with pytest.raises(ApiError) as error:
        text_with(tmp_path, template).tokenize_chat(ASK)
    assert error.value.reason == "invalid_request" and "\n" not in error.value.message


def test_a_template_that_outputs_nothing_is_stopped_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "LIMIT_S", 0.05)
    loops = "{% for i in range(99999) %}" * 3 + "{{ i.x }}" + "{% endfor %}" * 3
    jail = sandbox.TemplateSandbox()
    with pytest.raises(jinja2.TemplateError, match=r"more than 0\.05 s"):
        jail.render(jail.from_string(loops), {})


#: Each takes all memory or all time in one operation, or in operations that no hook sees.
UNBOUNDED = [
    "{{ 'x'.ljust(10 ** 10) }}",
    "{% set a = namespace(t='x') %}{% for i in range(60) %}{% set a.t = a.t ~ a.t %}{% endfor %}",
    "{{ ('a' * 10 ** 6).replace('a', 'b' * 10 ** 6) | length }}",
    "{{ '%99999999999d' % 1 }}",
    "{{ 'a b' | wordwrap(1, wrapstring='x' * 10 ** 7) | wordwrap(1, wrapstring='y' * 10 ** 7) }}",
    "{{ range(99999) | batch(10 ** 10, 'x') | list }}",
    "{{ 'x\t'.expandtabs(2 ** 31 - 1) * 3 | length }}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(1) }}",
    *daily(
        [
            "{{ 'x'.center(10 ** 10) | length }}",
            "{{ 'x' | center(10 ** 10) }}",
            "{{ ('b' * 10 ** 6).join('a' * 10 ** 6) | length }}",
            "{{ (['b'] * 10 ** 6) | join('c' * 10 ** 6) }}",
            "{{ '{:99999999999}'.format('x') }}",
            "{{ lipsum(n=10 ** 9) }}",
            "{{ messages | tojson(indent=10 ** 10) }}",
            "{{ 'x'.zfill(10 ** 11) }}",
        ]
    ),
]


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "LIMIT_S", 1.0)
    monkeypatch.setattr(templates, "KILL_MARGIN_S", 0.0)
    monkeypatch.setattr(templates, "MEMORY_MIB", 128)


@pytest.mark.usefixtures("small_limits")
@pytest.mark.parametrize("template", UNBOUNDED)
def test_a_template_takes_neither_all_memory_nor_all_time(tmp_path: Path, template: str) -> None:
    text = text_with(tmp_path, template)
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began_s = time.monotonic()
    with pytest.raises(ApiError) as error:
        text.tokenize_chat(ASK)
    assert error.value.reason == "invalid_request"
    assert time.monotonic() - began_s < 20  # hours, without a limit
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 256 << 10
    text.close()


#: Jinja computes each when it generates code, if nothing stops it: 256 MiB in one operation.
CONSTANTS = [
    "{{ '%268435456d' % 1 }}",
    "{% set x = '%268435456d' % 1 %}",
    "{{ 'x' | center(268435456) }}",
    "{% if 'x' | center(268435456) %}{% endif %}",
    "{% for x in ['x' | center(268435456)] %}{% endfor %}",
    "{% autoescape 'x' | center(268435456) %}{% endautoescape %}",
]


@pytest.mark.parametrize("template", CONSTANTS)
def test_the_gateway_itself_computes_no_constants(template: str) -> None:
    tracemalloc.start()
    try:
        templates.ChatTemplates(template, "").close()
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


#: Templates whose variables depend on the scope in which a name is set, or on the order.
SCOPES = [
    "{% set foo = 42 %}{{ bar + foo }}",
    "{% if not date is defined %}{% set date = 'today' %}{% endif %}{{ date }}",
    "{% set thinking = thinking if thinking is defined else true %}{{ thinking }}",
    "{% if a %}{% set b = 1 %}{% elif c %}{% set b = 2 %}{% else %}{% set b = 3 %}{% endif %}{{ b }}",
    "{% set b = 1 %}{% if a %}{% set b = 2 %}{% endif %}{{ b }}",
    "{% set ns = namespace(x=0) %}{% for m in ms %}{% set ns.x = m %}{{ loop.index }}{% endfor %}",
    "{% set lost.x = 1 %}",
    "{% for k, v in d if v.x and y %}{{ k }}{{ z }}{% else %}{{ v }}{% endfor %}{{ k }}",
    "{% for m in ms %}{{ later }}{% endfor %}{% set later = 1 %}",
    "{% for m in ms %}{% set inner = m %}{% endfor %}{{ inner }}",
    "{% macro f(a, b=c) %}{{ a ~ b ~ g() ~ f() ~ kwargs ~ varargs ~ caller() }}{% endmacro %}"
    "{% macro g() %}{{ d }}{% endmacro %}{{ a ~ b }}",
    "{% if tools %}{% macro f() %}{% endmacro %}{% endif %}{{ f() }}",
    "{% macro f() %}{% endmacro %}{% call(x) f(y) %}{{ x ~ z }}{% endcall %}{{ x }}",
    "{% filter default(a) %}{{ b }}{% endfilter %}",
    "{% set text %}{{ a }}{% set b = 1 %}{% endset %}{{ text ~ b }}",
    "{% with a = b, c = a %}{{ a ~ c }}{% endwith %}{{ c }}",
    "{% autoescape true %}{% set a = 1 %}{% endautoescape %}{{ a }}",
    "{% set a = 1 %}{% block one %}{{ a ~ self.one() ~ super() ~ b }}{% endblock %}",
    "{% import 'x' as y %}{% from 'x' import z as w, v with context %}{{ y ~ w ~ v ~ z }}",
    "{{ range(3) ~ namespace() ~ raise_exception('') ~ strftime_now('') }}",
    "{% generation %}{{ a }}{% endgeneration %}{% for x in y %}{% break %}{% endfor %}",
]


@pytest.mark.parametrize("template", SCOPES)
def test_a_template_reads_the_variables_that_jinja_finds(template: str) -> None:
    jail = sandbox.TemplateSandbox()
    found = templates.ChatTemplates(template, "").variables
    assert found == jinja2.meta.find_undeclared_variables(jail.parse(template))


@pytest.mark.usefixtures("small_limits")
def test_others_are_served_behind_one_that_was_killed(tmp_path: Path) -> None:
    template = "{% if kill %}{{ 'x'.center(10 ** 10) }}{% endif %}{{ messages[0].content }}"
    text = text_with(tmp_path, template)
    for _ in range(2 * templates.PROCESSES):
        with pytest.raises(ApiError, match="memory"):
            text.tokenize_chat(ASK, template_arguments={"kill": True})
        assert text.tokenize_chat(ASK).text_end == "hi"
    text.close()


def test_a_process_that_renders_inherits_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIPTYCH_SECRET", "hush")
    text = ChatTokenizer(CHECKPOINT)
    text.tokenize_chat(ASK)
    children = Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()
    renderers = [
        pid for pid in children if b"templates" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    assert renderers
    for pid in renderers:
        assert b"hush" not in Path(f"/proc/{pid}/environ").read_bytes()
    text.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in renderers[-1:])


def test_text_of_any_characters_comes_back_whole() -> None:
    text = templates.ChatTemplates("{{ messages }}", "")
    for words in ("\U0001f469\u200d\U0001f4bb", "\ud800 alone", "\x00", "x" * (1 << 20), ""):
        assert text.render({"messages": words}, tools=False) == words
    text.close()


@pytest.mark.parametrize(
    "source",
    ["{{ 'x' | nothing }}", "{{ 1 is nothing }}", "{{ " + "(" * 9999, f"{{{{ {'1' * 5000} }}}}"],
)
def test_what_is_no_template_is_refused_when_it_is_read(tmp_path: Path, source: str) -> None:
    with pytest.raises(WeightsError, match="does not compile"):
        text_with(tmp_path, source)


def test_an_honest_template_renders_as_before(tmp_path: Path) -> None:
    settings = json.loads((CHECKPOINT / "tokenizer_config.json").read_text())
    same = text_with(tmp_path, settings["chat_template"]).tokenize_chat(ASK)
    assert same.token_ids == ChatTokenizer(CHECKPOINT).tokenize_chat(ASK).token_ids
    assert (
        text_with(tmp_path / "b", "{{ 'ab' * 3 }}{{ 2 ** 3 }}").tokenize_chat(ASK).text_end
        == "ababab8"
    )
