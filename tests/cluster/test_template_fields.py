"""Fields of messages and of their parts that only the chat template reads."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import jinja2
import pytest
from diptych.cluster.gateway.apis.chat import ChatRequest
from diptych.cluster.gateway.apis.completions import TokenizeRequest
from diptych.cluster.gateway.apis.parameters import ModelLimits
from diptych.cluster.gateway.apis.schema import TEMPLATE_FIELDS_CHARS_MAX, Reading, parse_body
from diptych.cluster.gateway.errors import ApiError
from diptych.cluster.gateway.text.template_reading import template_fields_of
from diptych.cluster.gateway.text.tokenizer import ChatTokenizer
from diptych.engine.demo import CHECKPOINT

from tests.support.standin import checkpoint, standing_in

LIMITS = ModelLimits(max_model_len=4096, stop_ids=(5, 1), temperature=0.0)
#: What matters of a translator's: it reads languages of a part, and a note of a message.
TRANSLATOR = """{%- for message in messages -%}
<{{ message.role }} {{ message.get("note") }}>
{%- if message.content is string %}{{ message.content }}{% else %}
{%- for part in message.content -%}
{{ part["source_lang_code"] }}>{{ part.get("target_lang_code") | tojson }}:{{ part.text }};
{%- endfor %}{% endif %}{% endfor %}"""
#: As TranslateGemma's, it takes the one part of a content by its index.
INDEXING = """{%- set rest = messages[1:] if messages[0].role == "system" else messages %}
{%- for message in rest %}{% set part = message["content"][0] -%}
{{ part["source_lang_code"] }}>{{ part["target_lang_code"] }}:{{ part.text | trim }}{% endfor %}"""
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
LANGUAGES = {"source_lang_code": "en", "target_lang_code": "es"}
PART = {"type": "text", "text": "The fox.", **LANGUAGES}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tokenizer.json").write_bytes((CHECKPOINT / "tokenizer.json").read_bytes())
    return tmp_path


def tokenizer(folder: Path, template: str) -> ChatTokenizer:
    (folder / "chat_template.jinja").write_text(template)
    return ChatTokenizer(folder)


def chat(content: Any, reading: Reading = Reading.LENIENT, **fields: Any) -> ChatRequest:
    message = {"role": "user", "content": content, **fields}
    return parse_body(ChatRequest, json.dumps({"messages": [message]}).encode(), reading)


def rendered(text: ChatTokenizer, body: ChatRequest) -> str:
    body.check(text, LIMITS)
    return text.decode(body.prompt(text).token_ids)


def ignored(body: ChatRequest) -> str:
    return body.ignored_fields.headers().get("x-ignored-fields", "")


@pytest.mark.parametrize("template", [TRANSLATOR, INDEXING], ids=["loop", "index"])
@pytest.mark.parametrize("reading", list(Reading))
def test_a_template_gets_the_fields_of_parts_that_it_reads(
    folder: Path, template: str, reading: Reading
) -> None:
    body = chat([PART], reading)
    said = rendered(tokenizer(folder, template), body)
    assert "en>" in said and "es" in said and ":The fox." in said
    assert ignored(body) == ""


def test_values_reach_the_template_as_they_are_and_all_parts_are_there(folder: Path) -> None:
    odd = {**PART, "target_lang_code": {"x": [1, None]}}
    body = chat([{"type": "text", "text": "A"}, odd], note="hm")
    said = rendered(tokenizer(folder, TRANSLATOR), body)
    assert said == '<user hm>>null:A;en>{"x": [1, null]}:The fox.;'


def test_what_the_template_does_not_read_is_named_and_content_stays_a_text(folder: Path) -> None:
    body = chat([{**PART, "mood": 1}], mood=1, note="hm")
    rendered(tokenizer(folder, TRANSLATOR), body)
    assert ignored(body) == "messages.mood, messages.content.mood"
    plain = chat([PART], mood=1)
    assert rendered(tokenizer(folder, PLAIN), plain) == "<user>The fox."
    names = ("mood", "content.source_lang_code", "content.target_lang_code")
    assert ignored(plain) == ", ".join(f"messages.{name}" for name in names)


def test_a_strict_gateway_refuses_what_the_template_does_not_read(folder: Path) -> None:
    text = tokenizer(folder, PLAIN)
    with pytest.raises(
        ApiError, match=r"messages\.0\.content\.0\.source_lang_code is not supported"
    ):
        rendered(text, chat([PART], Reading.STRICT))
    with pytest.raises(ApiError, match=r"messages\.0\.note is not supported"):
        rendered(text, chat("hi", Reading.STRICT, note="hm"))


def test_a_tool_s_result_stays_a_text_and_documented_fields_have_no_effect(folder: Path) -> None:
    text = tokenizer(folder, TRANSLATOR + "{{ messages[0].content[0].cache_control }}")
    result = chat([PART], role="tool", tool_call_id="c")
    assert rendered(text, result).startswith("<tool None>The fox.")
    assert "messages.content.source_lang_code" in ignored(result)
    cached = chat([{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}])
    assert "ephemeral" not in rendered(text, cached)
    assert ignored(cached) == "messages.content.cache_control"


def test_fields_for_the_template_are_bounded_together(folder: Path) -> None:
    text = tokenizer(folder, TRANSLATOR)
    half = "x" * (TEMPLATE_FIELDS_CHARS_MAX // 2)
    chat([{**PART, "source_lang_code": half}]).check(text, LIMITS)
    with pytest.raises(ApiError, match=f"the limit is {TEMPLATE_FIELDS_CHARS_MAX}") as error:
        chat([{**PART, "source_lang_code": half}], note=half).check(text, LIMITS)
    assert error.value.param == "messages"
    # What the template does not read does not count.
    chat([{**PART, "mood": half * 3}]).check(text, LIMITS)


def test_the_last_message_is_continued_in_its_last_part(folder: Path) -> None:
    text = tokenizer(folder, TRANSLATOR)
    turns = [{"role": "assistant", "content": [PART, {"type": "text", "text": "El z"}]}]
    fields = {"messages": turns, "continue_final_message": True}
    body = parse_body(ChatRequest, json.dumps(fields).encode())
    assert rendered(text, body).endswith(":El z")


def test_tokenize_renders_what_a_chat_renders(folder: Path) -> None:
    text = tokenizer(folder, TRANSLATOR)
    messages = [{"role": "user", "content": [{**PART, "mood": 1}]}]
    body = parse_body(TokenizeRequest, json.dumps({"messages": messages}).encode())
    body.check(text, LIMITS)
    assert "en>" in text.decode(body.token_ids(text))
    assert body.ignored_fields.headers() == {"x-ignored-fields": "messages.content.mood"}


def test_over_http_the_prompt_has_the_fields_and_the_header_names_the_others(folder: Path) -> None:
    model = checkpoint(folder / "demo")
    (model / "chat_template.jinja").write_text(TRANSLATOR)
    body = {"messages": [{"role": "user", "content": [{**PART, "mood": 1}]}], "max_tokens": 1}
    with standing_in(model) as gateway:
        url = f"{gateway.url}/v1/chat/completions"
        answer = httpx.post(url, json={**body, "return_token_ids": True})
        prompt = gateway.model.text.decode(answer.json()["prompt_token_ids"])
    assert 'en>"es":The fox.;' in prompt
    assert answer.headers["x-ignored-fields"] == "messages.content.mood"


@pytest.mark.parametrize(
    ("source", "of_messages", "of_parts"),
    [
        ("{{ messages[-1].a }}{{ (messages | last)['b'] }}", {"a", "b"}, set()),
        ("{% for m in messages | reverse %}{{ m.get('a', 1) }}{{ m.items() }}{% endfor %}", {"a"}, set()),
        ("{% set ns = namespace() %}{% set ns.m = messages[0] %}{{ ns.m.a }}", {"a"}, set()),
        (
            "{% macro show(c) %}{% for p in c %}{{ p.x }}{{ p.text }}{% endfor %}{% endmacro %}"
            "{% for m in messages %}{{ show(m['content']) }}{{ show(c=m.content) }}{% endfor %}",
            {"content"},
            {"text", "x"},
        ),
        (
            "{% for m in messages %}{% set c = m.content if m.content else [] %}"
            "{{ (c | first).text }}{{ c[1:][0]['y'] }}{{ c.z }}{% endfor %}",
            {"content"},
            {"text", "y"},
        ),
        (  # as Mistral's: a content may hold calls, and its text is never taken from parts
            "{% for m in messages %}{% set calls = m.tool_calls or m.content %}"
            "{% for call in calls %}{{ call.id }}{% endfor %}{{ m.content }}{% endfor %}",
            {"content", "tool_calls"},
            set(),
        ),
        ("{{ other[0].a }}{{ messages.a }}{{ messages[0].content.strip() }}", {"content"}, set()),
    ],
)  # fmt: skip
def test_the_fields_that_a_template_reads(
    source: str, of_messages: set[str], of_parts: set[str]
) -> None:
    template_fields = template_fields_of(jinja2.Environment().parse(source))
    assert (template_fields.of_messages, template_fields.of_parts) == (of_messages, of_parts)


def test_a_template_made_to_take_long_is_read_in_bounded_time() -> None:
    names = [f"a{number}" for number in range(2000)]
    chained = "".join(f"{{% set {one} = {other} %}}" for one, other in pairwise(names))
    source = chained + f"{{% set {names[-1]} = messages %}}{{{{ a0[0].x }}}}"
    assert template_fields_of(jinja2.Environment().parse(source)).of_messages == frozenset()
