"""A chat template may not reach Python, run for ever, or return a text without end."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from diptych.cluster.gateway.errors import ApiError
from diptych.cluster.gateway.text import sandbox
from diptych.cluster.gateway.text.tokenizer import ChatTokenizer
from diptych.engine.demo import CHECKPOINT

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


def test_a_template_that_outputs_nothing_is_stopped_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "LIMIT_S", 0.05)
    loops = "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3
    with pytest.raises(ApiError, match=r"more than 0\.05 s"):
        text_with(tmp_path, loops).tokenize_chat(ASK)


def test_an_honest_template_renders_as_before(tmp_path: Path) -> None:
    settings = json.loads((CHECKPOINT / "tokenizer_config.json").read_text())
    same = text_with(tmp_path, settings["chat_template"]).tokenize_chat(ASK)
    assert same.token_ids == ChatTokenizer(CHECKPOINT).tokenize_chat(ASK).token_ids
    assert (
        text_with(tmp_path / "b", "{{ 'ab' * 3 }}{{ 2 ** 3 }}").tokenize_chat(ASK).text_end
        == "ababab8"
    )
