"""Flags of `diptych serve` that stand for settings, and what the settings do."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from diptych.cluster.cli import app
from diptych.cluster.config import ClusterConfig, ConfigError, GatewaySettings, load_config
from diptych.cluster.gateway.edge.keys import AccessControl, add_key
from diptych.cluster.gateway.errors import ApiError
from diptych.cluster.gateway.text.tokenizer import ChatTokenizer
from diptych.cluster.launch import local_cluster
from diptych.engine.demo import CHECKPOINT
from diptych.engine.errors import WeightsError
from typer.testing import CliRunner

from tests.support.malformed import ASK
from tests.support.standin import checkpoint, standing_in

CHAT = "/v1/chat/completions"


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def configured(
    monkeypatch: pytest.MonkeyPatch, *flags: str, **environment: str
) -> tuple[ClusterConfig | None, str]:
    """What `diptych serve` with these flags would start, and what it prints."""
    prepared: list[ClusterConfig] = []

    def prepare(config: ClusterConfig, _: Any) -> Any:
        prepared.append(config)
        raise ConfigError("far enough")

    monkeypatch.setattr(local_cluster, "prepare", prepare)
    result = CliRunner().invoke(app, ["serve", *flags], env=environment)
    assert result.exit_code == 1, result.output
    return (prepared[0] if prepared else None), result.output


def test_flags_are_settings_under_the_names_that_vllm_has(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    template = tmp_path / "chat.jinja"
    monkeypatch.chdir(tmp_path)
    config, output = configured(
        monkeypatch,
        *("--host", "0.0.0.0", "--port", "8123", "--max-model-len", "512"),
        *("--served-model-name", "a", "--served-model-name", "org/b"),
        *("--api-key", "secret one", "--api-key", "two", "--chat-template", "chat.jinja"),
    )
    assert config is not None
    assert (config.gateway.host, config.gateway.http_port) == ("0.0.0.0", 8123)
    assert (config.model.name, config.model.served_names) == ("a", ("org/b",))
    assert config.model.max_model_len == 512
    assert config.model.chat_template == str(template)
    assert config.gateway.api_key_hashes == (sha256("secret one"), sha256("two"))
    assert "secret one" not in output + config.model_dump_json(), "only its hash is kept"


def test_adapters_are_given_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    hosted = ("--engine", "vllm", "--set", f"engine.python={sys.executable}")
    config, _ = configured(monkeypatch, *hosted, "--adapter", "a=/x=y", "--lora-modules", "b=org/b")
    assert config is not None
    assert config.model.adapters == {"a": "/x=y", "b": "org/b"}
    for wrong, words in (("a", "expected NAME=FOLDER"), ("=x", "expected NAME=FOLDER")):
        config, output = configured(monkeypatch, *hosted, "--adapter", wrong)
        assert config is None and words in output
    config, output = configured(monkeypatch, *hosted, "--adapter", "a=x", "--adapter", "a=y")
    assert config is None and "given twice" in output


def test_without_flags_nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    config, _ = configured(monkeypatch)
    assert config is not None
    assert config.gateway == GatewaySettings() and config.model == ClusterConfig().model
    config, _ = configured(monkeypatch, DIPTYCH_API_KEYS="one two")
    assert config is not None
    assert config.gateway.api_key_hashes == (sha256("one"), sha256("two"))


def test_a_key_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("", "x" * 201):
        config, output = configured(monkeypatch, "--api-key", key)
        assert config is None and "1 to 200 characters" in output


# ---- keys without a file -------------------------------------------------------------------------


def test_a_gateway_asks_for_the_key_of_the_flag(tmp_path: Path) -> None:
    settings = {"api_key_hashes": [sha256("secret"), sha256("other")]}
    with standing_in(checkpoint(tmp_path / "demo"), gateway=settings) as gateway:
        url = gateway.url + CHAT
        assert httpx.post(url, json={"messages": ASK}).status_code == 401
        for headers in (
            {"authorization": "Bearer secret"},
            {"x-api-key": "other"},
            {"authorization": "bearer other"},
        ):
            assert httpx.post(url, json={"messages": ASK}, headers=headers).status_code == 200
        for wrong in ("secre", "secrets", sha256("secret"), "x" * 300, "dk_00000000_1"):
            headers = {"x-api-key": wrong}
            assert httpx.post(url, json={"messages": ASK}, headers=headers).status_code == 401
        assert httpx.get(f"{gateway.url}/health").status_code == 200


def test_keys_of_the_flag_and_of_the_file_go_together(tmp_path: Path) -> None:
    _, text = add_key(tmp_path / "keys", "acme")
    control = AccessControl(tmp_path / "keys", [sha256("secret")])
    tenants = [control.authenticate(None, key, 0.0) for key in (text, "secret")]
    assert [key.tenant for key in tenants if key] == ["acme", "default"]
    with pytest.raises(ApiError, match="not known"):
        control.authenticate(None, "other", 0.0)
    (given,) = [key for key in tenants if key and key.tenant == "default"]
    with control.admit(given, 0.0), control.admit(given, 0.0):
        pass


def test_a_gateway_with_such_a_key_is_not_open_to_anybody() -> None:
    assert not GatewaySettings(host="0.0.0.0", api_key_hashes=(sha256("a"),)).exposed
    with pytest.raises(ConfigError, match="api_key_hashes"):
        load_config(None, {"gateway.api_key_hashes": ["secret"]})


# ---- templates -----------------------------------------------------------------------------------


def test_a_template_of_the_operator_s_takes_the_checkpoint_s_place(tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<answer>")
    tokenizer = ChatTokenizer(CHECKPOINT, template)
    prompt = tokenizer.tokenize_chat([{"role": "user", "content": "Hi"}])
    assert tokenizer.decode(prompt.token_ids) == "<user>Hi<answer>"
    model = {"chat_template": str(template)}
    with standing_in(checkpoint(tmp_path / "demo"), model=model) as gateway:
        body = {"messages": ASK, "return_token_ids": True}
        told = httpx.post(gateway.url + CHAT, json=body).json()
        shown = tokenizer.decode(told["prompt_token_ids"])
        assert shown == f"<user>{ASK[0]['content']}<answer>"


def test_a_template_that_cannot_be_read_is_said_before_the_start(tmp_path: Path) -> None:
    missing = tmp_path / "no.jinja"
    with pytest.raises(ConfigError, match=r"model\.chat_template.*No such file"):
        local_cluster.check_chat_template(str(missing))
    with pytest.raises(WeightsError, match="cannot read the chat template"):
        ChatTokenizer(CHECKPOINT, missing)
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ConfigError, match="no text"):
        local_cluster.check_chat_template(str(binary))
    local_cluster.check_chat_template(None)
