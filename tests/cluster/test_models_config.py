"""Several models in cluster.yaml: what an entry leaves out, names, and the tree of one model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from diptych.cluster.cli.model import _read_config
from diptych.cluster.config import ClusterConfig, ConfigError, load_config
from diptych.cluster.launch.checkpoint import check_memory
from diptych.cluster.launch.local_cluster import prepare, serve_applications
from diptych.cluster.model_entries import slug_of

TWO = """
models:
  qwen: {model: {path: /models/qwen}, pools: {decode: {replicas: 2}}, slo: {ttft_ms: 1500}}
  tiny: /models/tiny
pools: {prefill: {max_replicas: 5}, decode: {engine: {threads: 3}}}
slo: {itl_ms: 50}
gateway: {http_port: 8123}
"""


def load(text: str, tmp_path: Path, **overrides: Any) -> ClusterConfig:
    file = tmp_path / "cluster.yaml"
    file.write_text(text)
    return load_config(file, overrides)


def test_what_an_entry_leaves_out_is_as_at_the_top_level(tmp_path: Path) -> None:
    config = load(TWO, tmp_path)
    qwen, tiny = config.of_model("qwen"), config.of_model("tiny")
    assert (qwen.slo.ttft_ms, qwen.slo.itl_ms) == (1500, 50)
    assert (tiny.slo.ttft_ms, tiny.slo.itl_ms) == (ClusterConfig().slo.ttft_ms, 50)
    assert (qwen.pools.decode.replicas, tiny.pools.decode.replicas) == (2, 1)
    assert qwen.pools.decode.engine.threads == tiny.pools.decode.engine.threads == 3
    assert qwen.pools.prefill.max_replicas == 5
    assert (tiny.model.path, tiny.model.name) == ("/models/tiny", "tiny")
    assert qwen.gateway.http_port == 8123 and qwen.secret == tiny.secret == config.secret


def test_the_tree_of_one_model_is_that_of_a_cluster_with_only_this_model(tmp_path: Path) -> None:
    text = "{model: {path: /models/tiny, name: tiny}, slo: {itl_ms: 50}, secret: s}"
    alone = load(text, tmp_path)
    one_of = load("{models: {tiny: /models/tiny}, slo: {itl_ms: 50}, secret: s}", tmp_path)
    assert one_of.of_model("tiny") == alone


def test_a_dumped_tree_is_read_as_the_same_one(tmp_path: Path) -> None:
    config = load(TWO, tmp_path)
    assert ClusterConfig.model_validate(config.model_dump()) == config
    as_yaml = yaml.safe_load(yaml.safe_dump(config.model_dump(mode="json")))
    assert ClusterConfig.model_validate(as_yaml) == config


def test_an_override_of_the_top_level_is_a_default_and_one_of_an_entry_is_the_entry_s(
    tmp_path: Path,
) -> None:
    overrides = {"slo.ttft_ms": 7, "models.tiny.slo.itl_ms": 9}
    text = "models: {a: /a, tiny: {model: {path: /t}, slo: {}}}"
    config = load(text, tmp_path, **overrides)
    assert [config.of_model(name).slo.ttft_ms for name in ("a", "tiny")] == [7, 7]
    assert [config.of_model(name).slo.itl_ms for name in ("a", "tiny")] == [200, 9]


def test_models_do_not_share_folders(tmp_path: Path) -> None:
    tiers = "{memory_mib: 1, disk_mib: 8, folder: /kv}"
    text = f"{{models: {{A/b: /a, c: /c}}, kv_tiers: {tiers}, router: {{log_folder: /log}}}}"
    config = load(text, tmp_path)
    trees = [config.of_model(name) for name in ("A/b", "c")]
    assert [tree.kv_tiers.folder for tree in trees] == ["/kv/a-b", "/kv/c"]
    assert [tree.router.log_folder for tree in trees] == ["/log/a-b", "/log/c"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{model: {path: /a}, models: {b: /b}}", "model and models are both set"),
        ("models: {a: {model: {served_names: [b]}}, b: /b}", "the name 'b' is given twice"),
        ("models: {a.b: /a, a/b: /b}", "two names become 'a-b'"),
        ("models: {'/': /a}", "neither a letter nor a digit"),
        ("models: {a: {model: {name: b}}}", "models.a.model.name"),
        ("models: {a: {pools: {decode: {replicas: 0}}}}", r"models\.a: pools\.decode\.replicas"),
        ("models: {a: {router: {classes: {x: {}}}}}", "the whole cluster's"),
        ("models: {a: {gateway: {http_port: 1}}}", r"models\.a\.gateway: extra inputs"),
        ("models: {a: {slo: {ttft_ms: -1}}}", r"models\.a\.slo\.ttft_ms: .*greater than 0"),
        ("models: {a: 7}", r"models\.a: .*valid dictionary"),
        ("models: [a]", r"models: .*valid dictionary"),
    ],
)
def test_wrong_entries_are_refused_by_name(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        load(text, tmp_path)


def test_a_wrong_default_counts_only_where_a_model_has_it(tmp_path: Path) -> None:
    decode = "pools: {decode: {replicas: 1}}"
    text = f"{{models: {{a: {{{decode}}}}}, pools: {{decode: {{replicas: 0}}}}}}"
    assert load(text, tmp_path).of_model("a").pools.decode.replicas == 1


@pytest.mark.parametrize(
    ("name", "slug"), [("demo", "demo"), ("Qwen/Qwen3-0.6B", "qwen-qwen3-0-6b"), ("模型", "")]
)
def test_a_slug_has_letters_digits_and_dashes(name: str, slug: str) -> None:
    assert slug_of(name) == slug


def test_a_cluster_of_one_entry_is_a_cluster_of_that_model(tmp_path: Path) -> None:
    config = load("{models: {mine: }, ray: {auth: disabled}}", tmp_path)
    (model,) = prepare(config, "ray://elsewhere").models
    assert (model.application, model.checkpoint.name) == ("diptych-mine", "mine")
    assert model.config == config.of_model("mine")


def test_each_model_becomes_an_application_of_its_own(tmp_path: Path) -> None:
    config = load("{models: {B/one: , two: }, ray: {auth: disabled}}", tmp_path)
    models = prepare(config, "ray://elsewhere").models
    front, *applications = serve_applications(config, models)
    assert [one["name"] for one in (front, *applications)] == [
        "diptych",
        "diptych-b-one",
        "diptych-two",
    ]
    assert [one["args"]["model"]["name"] for one in applications] == ["B/one", "two"]
    alone = load("{models: {two: }, ray: {auth: disabled}}", tmp_path)
    again = serve_applications(alone, prepare(alone, "ray://elsewhere").models)
    assert again == [front, applications[1]], "a model more or less changes nothing of the others"


def test_the_memory_of_all_models_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pools = "{prefill: {engine: {kv_mib: 64}}, decode: {engine: {kv_mib: 64}}}"
    text = f"{{models: {{a: , b: }}, pools: {pools}, ray: {{auth: disabled}}}}"
    config = load(text, tmp_path)
    models = [(one.config, one.checkpoint) for one in prepare(config, "ray://elsewhere").models]
    limit = 3 * (64 + 400) << 20
    monkeypatch.setattr("diptych.cluster.launch.checkpoint.available_memory", lambda: limit)
    check_memory(models[:1])
    with pytest.raises(ConfigError, match="4 workers need"):
        check_memory(models)


def test_arguments_of_vllm_are_no_default_for_a_model_of_another_engine(tmp_path: Path) -> None:
    text = """
engine: {kind: vllm, vllm: {quantization: awq}}
models:
  theirs: null
  ours: {engine: {kind: diptych}}
  same: {engine: {kind: vllm, vllm: {load_format: dummy}}}
"""
    config = load(text, tmp_path)
    engines = {name: entry.engine for name, entry in config.models.items()}
    assert (engines["ours"].kind, engines["ours"].vllm) == ("diptych", {})
    assert (engines["theirs"].kind, engines["theirs"].vllm) == ("vllm", {"quantization": "awq"})
    assert engines["same"].vllm == {"quantization": "awq", "load_format": "dummy"}
    again = ClusterConfig.model_validate(config.model_dump())
    assert again == config
    with pytest.raises(ConfigError, match=r"engine\.vllm is set"):
        load("models: {a: {engine: {kind: diptych, vllm: {load_format: dummy}}}}", tmp_path)


def test_a_model_of_a_file_is_sent_with_a_path_that_holds_in_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ck").mkdir()
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "cluster.yaml"
    file.write_text("models: {a: {model: {path: ./ck}}, b: org/model}")
    assert _read_config("a", None, file, None)["model"]["path"] == str(tmp_path / "ck")
    assert _read_config("b", None, file, None)["model"]["path"] == "org/model"
    assert _read_config("c", "./ck", None, None)["model"]["path"] == str(tmp_path / "ck")
    hosted = ["engine.kind=vllm", "model.adapters={sql: ck, poems: org/poems}"]
    adapters = _read_config("d", "./ck", None, hosted)["model"]["adapters"]
    assert adapters == {"sql": str(tmp_path / "ck"), "poems": "org/poems"}
