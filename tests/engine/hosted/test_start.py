"""What is refused before vLLM is started, each with what to do instead."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from diptych.cluster.config import ConfigError, load_config
from diptych.cluster.launch import engine_environment
from diptych.engine.errors import EngineError, UnsupportedModel
from diptych.engine.options import EngineOptions
from diptych.engine.vllm import start


def options(**changes: object) -> EngineOptions:
    return EngineOptions(Path("/nowhere"), **changes)  # type: ignore[arg-type]


def test_a_worker_without_vllm_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise start.PackageNotFoundError(name)

    monkeypatch.setattr(start, "version", missing)
    with pytest.raises(start.VllmUnavailable, match="diptych install-engine vllm"):
        start.start_core(options(), "name")


def test_another_minor_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "version", lambda name: "0.33.1")
    with pytest.raises(start.VllmUnavailable, match=r"0\.33\.1 is installed, and 0\.32\."):
        start.check_version()


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"vllm_arguments": {"max_num_seqs": 4}}, EngineError, "engine.max_running"),
        ({"tensor_parallel": 2}, UnsupportedModel, "tensor_parallel to 1"),
        ({"device": "cuda"}, UnsupportedModel, "engine.kind to diptych"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, object],
    error: type[Exception],
    words: str,
) -> None:
    monkeypatch.setattr(start, "version", lambda name: "0.32.0")
    with pytest.raises(error, match=words):
        start.start_core(options(**changes), "name")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"engine.vllm": {"quantization": "awq"}}, "set it to vllm"),
        ({"engine.kind": "vllm", "engine.vllm": {"block_size": 16}}, "set model.block_tokens"),
        ({"engine.kind": "vllm", "pools.decode.tensor_parallel": 2}, "tensor_parallel 1 only"),
        ({"engine.kind": "vllm", "kv_tiers.memory_mib": 8}, "kv_tiers"),
        ({"engine.kind": "vllm", "kv_transfer.transport": "shm"}, "nixl or tcp"),
        (
            {
                "engine.kind": "vllm",
                "kv_transfer.transport": "nixl",
                "pools.prefill.engine.device": "cuda",
            },
            "(?i)CPUs only",
        ),
        (
            {"engine.kind": "vllm", "engine.vllm": {"enforce_eager": False}},
            "enforce_eager can only be true",
        ),
        *(
            ({"engine.kind": "vllm", "engine.vllm": {name: 1}}, f"(?i)engine.vllm.{name} cannot")
            for name in (
                "distributed_executor_backend",
                "worker_cls",
                "scheduler_cls",
                "kv_offloading_size",
                "kv_offloading_backend",
                "decode_context_parallel_size",
                "max_loras",
            )
        ),
        (
            {"engine.kind": "vllm", "pools.decode.engine.itl_budget_ms": 20},
            "pools.decode.engine.itl_budget_ms.* set pools.decode.engine.max_step_tokens",
        ),
        *(
            (
                {"engine.kind": "vllm", f"pools.{pool}.engine.{name}": value},
                rf"pools\.{pool}\.engine\.{name}.* {instead}",
            )
            for pool in ("prefill", "decode")
            for name, value, instead in (
                ("draft_tokens", 4, "speculation"),
                ("weights", "fp8", r"engine\.vllm\.quantization"),
                ("kv_dtype", "float8_e4m3fn", r"model\.dtype"),
                ("exact", True, "depend on the batch"),
                ("attention", "torch", "kernels of its own"),
            )
        ),
        ({"engine.kind": "sglang"}, "'diptych' or 'vllm'"),
    ],
)
def test_a_configuration_that_vllm_cannot_have_is_refused(
    settings: dict[str, object], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(None, settings)


@pytest.fixture
def some_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "version", lambda name: f"{start.SUPPORTED_VERSION}0")


@pytest.mark.parametrize(
    ("path", "name", "missing"),
    [
        ("collections.Counter", "elements", None),
        ("collections.Counter", "nothing_like_it", "Counter.nothing_like_it"),
        ("collections.NothingLikeIt", "__init__", "collections.NothingLikeIt"),
        (
            "nothing_like_it.core.Engine",
            "step",
            r"nothing_like_it.core.Engine \(No module named 'nothing_like_it'\)",
        ),
    ],
)
def test_a_vllm_without_a_name_is_refused_by_the_name(
    some_vllm: None,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    name: str,
    missing: str | None,
) -> None:
    monkeypatch.setattr(start, "USED_SIGNATURES", {path: {name: ()}})
    if missing is None:
        start.check_signatures()
        return
    with pytest.raises(start.VllmUnavailable, match=f"it lacks {missing}$"):
        start.check_signatures()


def test_a_module_that_breaks_is_refused_with_its_reason(
    some_vllm: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What fails inside of it may be the fault of the environment, not of vLLM's version."""
    (tmp_path / "broken_like_this.py").write_text("import nothing_like_it\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(start, "USED_SIGNATURES", {"broken_like_this.Engine": {"step": ()}})
    with pytest.raises(start.VllmUnavailable, match="No module named 'nothing_like_it'"):
        start.check_signatures()


def test_a_core_without_a_part_is_refused_by_the_part(some_vllm: None) -> None:
    core = SimpleNamespace(
        step_fn=None,
        request_block_hasher=None,
        vllm_config=None,
        scheduler=SimpleNamespace(
            kv_event_publisher=None,
            finished_req_ids=None,
            has_requests=None,
            max_num_scheduled_tokens=None,
            kv_cache_config=None,
        ),
    )
    with pytest.raises(start.VllmUnavailable) as refusal:
        start.check_attributes(core)  # type: ignore[arg-type]
    lacking = str(refusal.value).partition("it lacks ")[2].split(", ")
    assert lacking == ["core.scheduler.kv_cache_manager"]


def test_vllms_arguments_pass_through() -> None:
    config = load_config(None, {"engine.kind": "vllm", "engine.vllm": {"quantization": "awq"}})
    assert config.engine.vllm == {"quantization": "awq"}
    assert config.with_engine_python("/a/python").engine.python == "/a/python"


def test_serve_without_vllm_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(engine_environment, "find_spec", lambda name: None)
    monkeypatch.setattr(engine_environment, "DEFAULT_FOLDER", tmp_path)
    with pytest.raises(ConfigError, match="diptych install-engine vllm"):
        engine_environment.find_python()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    assert engine_environment.find_python() == str(tmp_path / "bin" / "python")
    monkeypatch.setattr(engine_environment, "find_spec", lambda name: object())
    assert engine_environment.find_python() is None


def test_workers_need_what_diptychs_package_demands_without_extras() -> None:
    requirements = engine_environment.worker_requirements()
    assert "llguidance>=1.7" in requirements
    assert any(one.startswith("ray[") and "==" in one for one in requirements)
    assert not any("extra" in one for one in requirements)


def test_a_python_that_cannot_run_workers_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "broken-1.0.dist-info").mkdir()  # which is no reason to refuse it
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(ConfigError, match="No such file"):
        engine_environment.check_python(str(tmp_path / "python"))
    with pytest.raises(ConfigError, match="has no vLLM: run `diptych install-engine vllm`"):
        engine_environment.check_python(sys.executable)


def test_a_failed_installation_shows_the_last_lines(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No module named nothing_like_it"):
        engine_environment._run(["python3", "-m", "nothing_like_it"])
