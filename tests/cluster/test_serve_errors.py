"""What is wrong before a cluster starts is said in one sentence, with the right exit code."""

from __future__ import annotations

import json
import socket
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest
from diptych.cluster.cli import app
from diptych.cluster.launch import supervisor
from typer.testing import CliRunner

from tests.support.checkpoints import make
from tests.support.live import BIN, free_port


@pytest.fixture(autouse=True)
def _nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command of this process that is not refused starts no cluster in it."""

    def refuse(*_: object) -> None:
        raise AssertionError("the command was not refused")

    monkeypatch.setattr(supervisor, "supervise", refuse)


class Ended(NamedTuple):
    """How a command ended, and what it said."""

    code: int
    errors: str


def invoke(*words: str, **environment: str) -> Ended:
    """Run a command in this process, as a new one takes a second."""
    done = CliRunner().invoke(app, words, env=environment)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return Ended(done.exit_code, done.stderr)


def serve(*arguments: str, **environment: str) -> Ended:
    return invoke("serve", *arguments, **environment)


def serve_in_a_process(*arguments: str) -> Ended:
    command = [str(BIN / "diptych"), "serve", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "Traceback" not in done.stderr + done.stdout
    return Ended(done.returncode, done.stderr)


def refused(done: Ended, *says: str) -> None:
    assert done.code == 1
    assert done.errors.startswith("diptych: ") and all(s in done.errors for s in says), done.errors


def test_a_missing_folder_is_named() -> None:
    refused(serve("/no/such/model"), "/no/such/model is not a folder", "Hugging Face id")


def test_an_unsupported_architecture_is_named_with_those_that_are(tmp_path: Path) -> None:
    folder = make(tmp_path / "m", "llama")
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["MambaForCausalLM"]
    (folder / "config.json").write_text(json.dumps(config))
    refused(serve(str(folder)), "MambaForCausalLM is not supported", "Qwen3ForCausalLM")


def test_a_folder_without_config_is_not_a_checkpoint(tmp_path: Path) -> None:
    refused(serve(str(tmp_path)), "config.json is missing", "not a checkpoint")


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    folder = make(tmp_path / "m", "llama")
    (folder / "tokenizer.json").unlink()
    refused(serve(str(folder)), "tokenizer.json is missing")


def test_weights_that_are_not_whole_are_named_before_anything_starts(tmp_path: Path) -> None:
    folder = make(tmp_path / "m", "llama")
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1000])
    refused(serve(str(folder)), "model.safetensors is damaged or truncated", "download it again")
    weights.unlink()
    refused(serve(str(folder)), "model.safetensors is missing", "download it again")


def test_a_template_that_is_none_is_named_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text("{{ messages }}\n{% for message in messages %}")
    refused(serve("--chat-template", str(file)), "model.chat_template", "chat.jinja, line 2")


@pytest.mark.parametrize("flag", ["--port", "--grpc-port", "--set"])
def test_a_taken_port_is_named_with_the_way_out(flag: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        others = {"--port": str(free_port()), "--grpc-port": str(free_port())}
        chosen = {flag: f"control.port={port}" if flag == "--set" else port}
        flags = [part for pair in {**others, **chosen}.items() for part in pair]
        key = "control.port" if flag == "--set" else "gateway."
        refused(serve_in_a_process(*flags), f"port {port} on 127.0.0.1", f"--set {key}")


def test_one_port_for_two_servers_is_refused() -> None:
    port = str(free_port())
    refused(serve("--port", port, "--grpc-port", port), "gateway.http_port and", f"both {port}")
    refused(serve("--port", port, "--set", f"control.port={port}"), "--set control.port=PORT")


def test_a_file_of_control_s_that_is_missing_is_named() -> None:
    refused(serve("--set", "control.key_file=/no/such/key"), "control.key_file: /no/such/key")


def test_too_little_memory_is_said_with_the_figures() -> None:
    refused(serve("--set", "pools.decode.engine.kv_mib=99000000"), "too little memory", "kv_mib")


def test_a_wrong_setting_is_named_with_its_value(tmp_path: Path) -> None:
    refused(serve("--set", "router.disaggregate=often"), "router.disaggregate", "'often'")
    refused(serve("--set", "router.speed=9"), "router.speed", "not permitted")
    refused(serve("--set", "nonsense"), "expected KEY=VALUE")
    bad = tmp_path / "cluster.yaml"
    bad.write_text("pools: [1, 2")
    refused(serve("-c", str(bad)), "cannot read", "cluster.yaml")


def test_an_inherited_mode_without_a_token_is_refused_unless_the_configuration_says_so() -> None:
    open_to_all = {"RAY_AUTH_MODE": "disabled"}
    refused(serve(**open_to_all), "RAY_AUTH_MODE=disabled", "run code", "--set ray.auth=disabled")
    refused(serve(RAY_AUTH_MODE="tokens"), "RAY_AUTH_MODE=tokens", "no mode")
    contradicting = serve("--set", "ray.auth=disabled", RAY_AUTH_MODE="token")
    refused(contradicting, "RAY_AUTH_MODE=token", "unset it")
    allowed = serve("/no/such/model", "--set", "ray.auth=disabled", **open_to_all)
    refused(allowed, "/no/such/model is not a folder")


def test_commands_without_a_cluster_say_how_to_start_one() -> None:
    nowhere = "http://127.0.0.1:9"
    for command in (["status", "--admin", nowhere], ["chat", "hi", "--endpoint", nowhere]):
        refused(invoke(*command), f"at {nowhere}", "diptych serve")


def test_a_process_ends_with_the_sentence_and_without_a_trace() -> None:
    done = serve_in_a_process("--set", "pools.decode.engine.kv_mib=99000000")
    refused(done, "too little memory")
