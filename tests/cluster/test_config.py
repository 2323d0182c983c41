"""Configuration: one file, overrides, clear errors."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from diptych.cluster.config import ClusterConfig, ConfigError, load_config, parse_overrides
from diptych.cluster.router_service import router_config
from diptych.cluster.worker.core import engine_config
from diptych.engine.options import (
    ComputeSettings,
    EngineOptions,
    SchedulerLimits,
    SchedulerSettings,
)
from diptych.router import SloClass, TenantSlo


def test_defaults_are_one_prefill_and_one_decode_worker_always_disaggregated() -> None:
    config = load_config(None, {})
    assert config.pools.prefill.replicas == config.pools.decode.replicas == 1
    assert config.router.disaggregate == "always"
    assert config.pools.prefill.engine.threads == 1


def test_overrides_win_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("router: {queue_max: 7, queue_ttl_s: 2}\nslo: {ttft_ms: 100}\n")
    config = load_config(file, parse_overrides(["router.queue_max=9", "gateway.http_port=8123"]))
    assert (config.router.queue_max, config.router.queue_ttl_s) == (9, 2.0)
    assert (config.slo.ttft_ms, config.gateway.http_port) == (100, 8123)


def test_a_ttft_target_is_an_expression_or_a_time_and_never_both() -> None:
    def target(**slo: Any) -> str:
        return str(ClusterConfig.model_validate({"slo": slo}).slo.ttft_target)

    assert target() == "2s"
    assert target(ttft_ms=1500) == target(ttft="1500ms") == "1.5s"
    assert target(ttft="max(1s,3x)") == "max(1s, 3x)"
    for wrong, said in (
        ({"slo.ttft": "2s", "slo.ttft_ms": 2000}, "slo: .*ttft and ttft_ms are both set"),
        ({"slo.ttft": "3y"}, "slo.ttft: .*3y is no part of a target like"),
        ({"slo.tenants.acme.ttft": "fast"}, "slo.tenants.acme.ttft: .*no part of a target"),
        ({"router.classes.chat.ttft": "0s"}, "router.classes.chat.ttft: .*more than 0"),
        ({"slo.ttft_ms": 100_000_000}, "slo: .*100000s: a time is at most a day"),
        ({"slo.ttft_ms": float("inf")}, "slo.ttft_ms: .*finite"),
        ({"slo.itl_ms": float("inf")}, "slo.itl_ms: .*finite"),
        ({"slo.tenants.acme.itl_ms": float("nan")}, "slo.tenants.acme.itl_ms: .*finite"),
    ):
        with pytest.raises(ConfigError, match=said):
            load_config(None, wrong)


def test_targets_of_classes_and_tenants_reach_the_router() -> None:
    given = {
        "slo.ttft": "max(1s,3x)",
        "slo.tenants.acme": {"ttft": "500ms", "itl_ms": 30},
        "router.classes": {"chat": {}, "batch": {"ttft": "60s", "itl_ms": 1000, "priority": 1}},
    }
    made = router_config(load_config(None, given))
    assert made.ttft == "max(1s, 3x)" and made.ttft_target.needs_isolated
    assert made.tenants == {"acme": TenantSlo("500ms", 0.03)}
    assert made.classes["batch"] == SloClass(priority=1, ttft="60s", itl_s=1.0)
    assert made.classes["chat"].ttft == ""


def test_a_model_s_own_target_replaces_the_common_one_by_whichever_name() -> None:
    models = {"a": {"slo": {"ttft": "3x"}}, "b": {"slo": {"ttft_ms": 700}}, "c": {"slo": {}}}
    for common in ({"ttft_ms": 1500}, {"ttft": "1500ms"}):
        config = ClusterConfig.model_validate({"slo": {**common, "itl_ms": 40}, "models": models})
        again = ClusterConfig.model_validate(config.model_dump())
        for tree in (config, again):
            found = [str(tree.of_model(name).slo.ttft_target) for name in "abc"]
            assert found == ["3x", "700ms", "1.5s"]
            assert tree.of_model("a").slo.itl_ms == 40


def test_a_step_has_nine_tenths_of_the_itl_target_unless_the_pool_says_otherwise() -> None:
    given = {"slo.itl_ms": 50.0, "pools.prefill.engine.itl_budget_ms": 30.0}
    config = load_config(None, given)
    budgets = [
        engine_config(config, pool, Path("model")).limits.itl_budget_s
        for pool in (config.pools.prefill, config.pools.decode)
    ]
    assert budgets == [pytest.approx(0.030), pytest.approx(0.045)]


def test_no_worker_of_vllm_tells_of_a_budget_that_it_does_not_keep() -> None:
    config = ClusterConfig.model_validate({"engine": {"kind": "vllm"}})
    assert engine_config(config, config.pools.decode, Path("model")).limits.itl_budget_s is None


def test_the_defaults_of_cluster_yaml_are_those_of_the_engine() -> None:
    config = load_config(None, {})
    options = engine_config(config, config.pools.decode, Path("model"))
    started = EngineOptions(Path("model"), rank_program=options.rank_program)
    assert replace(options, limits=SchedulerLimits()) == started
    assert replace(options.limits, itl_budget_s=None) == SchedulerLimits()
    assert options.limits.max_running == 64, "what users get without a setting"


#: A value of each setting that is not its default.
OTHER_VALUES = {
    "max_step_tokens": 1024,
    "max_running": 7,
    "growth_tokens": 99,
    "draft_tokens": 3,
    "threads": 5,
    "share_idle_cores": False,
    "device": "cuda",
    "attention": "triton",
    "exact": True,
    "kv_dtype": "float8_e4m3fn",
    "weights": "fp8",
    "gpu_memory_share": 0.45,
}


@pytest.mark.parametrize("name", [field.name for field in fields(SchedulerSettings)])
def test_a_setting_of_the_scheduler_reaches_it(name: str) -> None:
    assert getattr(engine_with(name).limits, name) == OTHER_VALUES[name]


@pytest.mark.parametrize("name", [field.name for field in fields(ComputeSettings)])
def test_a_setting_of_the_hardware_reaches_the_engine(name: str) -> None:
    assert getattr(engine_with(name), name) == OTHER_VALUES[name]


def test_a_gpu_s_pool_is_sized_by_its_memory_unless_it_is_given() -> None:
    def kv_bytes(**engine: object) -> int | None:
        overrides = {f"pools.decode.engine.{name}": value for name, value in engine.items()}
        config = load_config(None, overrides | {"kv_transfer.transport": "nixl"})
        return engine_config(config, config.pools.decode, Path("model")).kv_bytes

    assert kv_bytes() == 256 << 20
    assert kv_bytes(device="cuda") is None
    assert kv_bytes(device="cuda", kv_mib=1024) == 1 << 30


def engine_with(name: str) -> EngineOptions:
    """The options of a decode pool's engine when cluster.yaml has another value of one setting."""
    overrides: dict[str, Any] = {f"pools.decode.engine.{name}": OTHER_VALUES[name]}
    overrides["kv_transfer.transport"] = "nixl"
    config = load_config(None, overrides)
    return engine_config(config, config.pools.decode, Path("model"))


def test_what_is_wrong_is_said_without_the_secret(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    for wrong in (
        "pools: {prefill: {replicas: 0}}",
        "pools: {decode: {min_replicas: 5, max_replicas: 2}}",
    ):
        file.write_text(f"secret: hunter2\n{wrong}\n")
        with pytest.raises(ConfigError) as error:
            load_config(file, {})
        assert "hunter2" not in str(error.value) and "replicas" in str(error.value)
    for secret in ("[hunter2]", '""'):
        file.write_text(f"secret: {secret}\n")
        with pytest.raises(ConfigError) as error:
            load_config(file, {})
        assert "hunter2" not in str(error.value)


@pytest.mark.parametrize(
    "wrong",
    [
        "gateway: {secret: hunter2}",
        "gatway: {secret: hunter2}",
        "secrets: hunter2",
        "models: [{secret: hunter2}]",
        "models: {a: [{secret: hunter2}]}",
        "slo: {tenants: {secret: hunter2}}",
        "slo: {itl_ms: {secret: hunter2}}",
    ],
)
def test_a_secret_in_a_wrong_place_is_not_repeated(wrong: str, tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(wrong)
    with pytest.raises(ConfigError) as error:
        load_config(file, {})
    assert "hunter2" not in str(error.value) and wrong.partition(":")[0] in str(error.value)


@pytest.mark.parametrize(
    "pair", ["secret=@hunter2", "secret=[hunter2", "secret:hunter2", "=hunter2"]
)
def test_a_pair_that_cannot_be_read_is_refused_without_its_value(pair: str) -> None:
    with pytest.raises(ConfigError, match="--set") as error:
        parse_overrides([pair])
    assert "hunter2" not in str(error.value)


def test_a_mistake_is_told_with_the_names_as_they_were_written() -> None:
    with pytest.raises(ConfigError, match=r"value error, models: the name 'Qwen2' is given twice"):
        load_config(None, {"models": {"Qwen2": None, "b": {"model": {"served_names": ["Qwen2"]}}}})


def test_every_cluster_has_its_own_secret_and_passes_it_on() -> None:
    first, second = load_config(None, {}), load_config(None, {})
    assert first.secret != second.secret
    assert ClusterConfig.model_validate(first.model_dump()).secret == first.secret
    assert first.secret not in repr(first)


def test_an_override_through_a_value_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"silence_s in silence_s\.x is not a section"):
        load_config(None, {"silence_s": 1, "silence_s.x": 2})


@pytest.mark.parametrize("name", ["Qwen2.5-7B", "Qwen2", "Qwen2.5"])
def test_an_override_finds_an_entry_whose_name_has_dots(name: str) -> None:
    def models() -> dict[str, Any]:
        return {entry: {"slo": {"ttft": "3x"}} for entry in ("Qwen2.5-7B", "Qwen2", "Qwen2.5")}

    values = parse_overrides([f"models.{name}.slo.itl_ms=50", "models.new.slo.itl_ms=40"])
    config = load_config(None, {"models": models(), **values})
    itl_ms = {entry: config.of_model(entry).slo.itl_ms for entry in config.models}
    assert itl_ms == {"Qwen2.5-7B": 200, "Qwen2": 200, "Qwen2.5": 200, "new": 40, name: 50}
    config = load_config(None, {"models": models(), f"models.{name}": {"slo": {"itl_ms": 9}}})
    assert config.of_model(name).slo.itl_ms == 9 and len(config.models) == 3


def test_drafts_are_off_unless_asked_for_and_bounded() -> None:
    assert load_config(None, {}).pools.decode.engine.draft_tokens == 0
    key = "pools.decode.engine.draft_tokens"
    assert load_config(None, {key: 4}).pools.decode.engine.draft_tokens == 4
    with pytest.raises(ConfigError, match=r"draft_tokens: .*(got 17)"):
        load_config(None, {key: 17})


def test_a_gpu_needs_a_transport_that_reads_its_memory() -> None:
    gpu = {"pools.decode.engine.device": "cuda"}
    with pytest.raises(ConfigError, match=r"needs kv_transfer\.transport nixl"):
        load_config(None, gpu)
    gpu["kv_transfer.transport"] = "nixl"
    assert load_config(None, gpu).pools.decode.engine.attention == "auto"
    assert load_config(None, gpu | {"pools.prefill.tensor_parallel": 2})
    with pytest.raises(ConfigError, match="does not know kv_tiers"):
        load_config(None, gpu | {"kv_tiers.memory_mib": 64})
    with pytest.raises(ConfigError, match="attention"):
        load_config(None, {"pools.decode.engine.attention": "fa9"})


def test_pools_in_which_nobody_could_serve_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"disaggregate to never, or auto"):
        load_config(None, {"pools.prefill.replicas": 0})
    with pytest.raises(ConfigError, match=r"nobody would answer"):
        load_config(None, {"pools.decode.replicas": 0})
    alone = {"pools.prefill.replicas": 0, "router.disaggregate": "auto"}
    assert load_config(None, alone).pools.prefill.replicas == 0


@pytest.mark.parametrize("folder", ["kv", "./kv"])
def test_a_relative_folder_of_tiers_is_refused_in_words(folder: str) -> None:
    """It would be a folder of wherever each worker happens to run."""
    with pytest.raises(ConfigError, match=r"kv_tiers\.folder must begin with / or ~"):
        load_config(None, {"kv_tiers.memory_mib": 64, "kv_tiers.folder": folder})


@pytest.mark.parametrize("folder", ["/kv", "~/kv"])
def test_a_folder_of_tiers_may_be_in_the_home_folder(folder: str) -> None:
    assert load_config(None, {"kv_tiers.folder": folder}).kv_tiers.folder == folder


@pytest.mark.parametrize(
    "settings",
    [
        {"gateway.api_keys_file": ""},
        {"control.key_file": ""},
        {"control.host": "0.0.0.0", "control.key_file": ""},
        {"gateway.tls_cert": "", "gateway.tls_key": ""},
        {"control.tls_cert": "", "control.tls_key": ""},
    ],
)
def test_an_empty_file_name_is_refused_as_it_would_open_what_the_file_protects(
    settings: dict[str, Any],
) -> None:
    """A template whose variable is not set gives one."""
    with pytest.raises(ConfigError, match=r"\.(api_keys_file|key_file|tls_cert): .*at least 1"):
        load_config(None, settings)


def test_an_override_of_one_model_leaves_another_that_shares_its_section(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(
        "models:\n  a: &shared {pools: {decode: {replicas: 1}}}\n  b: {<<: *shared}\n  c: *shared\n"
    )
    config = load_config(file, parse_overrides(["models.a.pools.decode.replicas=3"]))
    replicas = {name: config.of_model(name).pools.decode.replicas for name in config.models}
    assert replicas == {"a": 3, "b": 1, "c": 1}


def test_an_override_leaves_the_tree_of_the_caller_as_it_was() -> None:
    overrides = {"models": {"a": {"slo": {"itl_ms": 9}}}, "models.a.slo.itl_ms": 50}
    assert load_config(None, overrides).of_model("a").slo.itl_ms == 50
    assert overrides["models"] == {"a": {"slo": {"itl_ms": 9}}}


def test_a_default_class_is_one_of_the_classes() -> None:
    assert load_config(None, {"router": {"default_class": "batch"}}).router.default_class == "batch"
    classes = {"chat": {}, "agent": {}}
    given = {"router": {"classes": classes, "default_class": "agent"}}
    assert load_config(None, given).router.default_class == "agent"
    with pytest.raises(ConfigError, match=r"none of the classes chat, agent"):
        load_config(None, {"router": {"classes": classes, "default_class": "batch"}})
