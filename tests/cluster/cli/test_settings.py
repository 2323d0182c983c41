"""The settings by name: their page is fresh, their schema holds, and a mistyped one is named."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
from diptych.cluster.cli import app
from diptych.cluster.cli.settings import sections
from diptych.cluster.config import ClusterConfig
from typer.testing import CliRunner

ROOT = Path(__file__).parents[3]


def invoke(*words: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, list(words))
    return done.exit_code, done.stdout, done.stderr


def test_the_page_of_settings_is_fresh() -> None:
    code, said, _ = invoke("config", "reference")
    page = (ROOT / "docs/settings.md").read_text()
    assert code == 0
    assert said == page, "write it again: .venv/bin/diptych config reference > docs/settings.md"


def test_every_value_of_the_configuration_is_a_setting_with_its_default() -> None:
    _, said, _ = invoke("config", "show", "--set", "silence_s=3.0")
    shown = {line.partition(": ")[0] for line in said.splitlines()}
    known = {setting.key for section in sections() for setting in section.settings} - {"secret"}
    assert {key for key in shown if not key.startswith("pools.decode.")} <= known
    by_key = {setting.key: setting for section in sections() for setting in section.settings}
    queue = by_key["router.queue_max"]
    assert (queue.values, queue.default) == ("integer from 1", "`1024`")
    assert queue.meaning == "Requests that may wait for a worker; further ones are refused."
    assert by_key["pools.prefill.engine.threads"].meaning.startswith("CPU threads")
    assert by_key["control.tls_key"].meaning == by_key["control.tls_cert"].meaning != ""
    assert by_key["gateway.http_port"].meaning == "", "that of the host above is another one"
    assert by_key["secret"].default == "random"


def test_the_schema_takes_what_the_loader_takes_and_refuses_unknown_keys() -> None:
    code, said, _ = invoke("config", "schema")
    assert code == 0
    schema = json.loads(said)
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(ClusterConfig().model_dump(mode="json"), schema)
    for wrong in ({"router": {"queue_mx": 1}}, {"router": {"queue_max": 0}}, {"slo": []}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("router.queue_mx", "router.queue_max"),
        ("pools.decode.engine.thread", "pools.decode.engine.threads"),
        ("gateway.ttft_ms", "slo.ttft_ms"),
        ("silence", "silence_s"),
    ],
)
def test_a_mistyped_setting_is_answered_with_the_one_that_was_meant(key: str, meant: str) -> None:
    code, _, error = invoke("config", "show", "--set", f"{key}=1")
    assert code == 1 and f"did you mean {meant}?" in error


def test_mistyped_settings_of_a_file_are_answered_too(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("router: {queue_mx: 1}\nmodel: {naem: x}\n")
    _, _, error = invoke("config", "validate", str(file))
    assert "did you mean router.queue_max?" in error and "did you mean model.name?" in error


def test_what_is_like_no_setting_is_answered_with_where_they_all_are() -> None:
    _, _, error = invoke("config", "show", "--set", "zzz=1")
    assert "all settings: diptych config reference" in error


@pytest.mark.parametrize("command", [("show",), ("validate",)])
def test_broken_yaml_is_told_by_its_line_and_quotes_no_secret(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("pools: {}\nsecret: 'hunter2\n")
    done = CliRunner().invoke(app, ["config", *command, str(file)])
    assert done.exit_code == 1
    assert "no valid YAML at line" in done.output
    assert "hunter2" not in done.output


def test_a_mistyped_setting_of_a_model_is_answered_with_that_models() -> None:
    _, _, error = invoke("config", "show", "--set", "models.a.slo.itl=1")
    assert "did you mean models.a.slo.itl_ms?" in error


def test_both_bounds_of_a_number_are_told() -> None:
    by_key = {setting.key: setting for section in sections() for setting in section.settings}
    share = by_key["pools.prefill.engine.gpu_memory_share"]
    assert share.values == "number above 0, up to 1"
