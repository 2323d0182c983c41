"""Which folder is the model's and what it is called, and the memory that its workers need."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diptych.cluster.config import ClusterConfig, ConfigError
from diptych.cluster.launch import checkpoint as checkpoint_module
from diptych.cluster.launch.checkpoint import Checkpoint, check_memory, find_checkpoint
from diptych.engine.adapters import adapter_memory, read_adapter
from diptych.engine.demo import CHECKPOINT
from diptych.engine.memory import weight_bytes
from safetensors.torch import load_file, save_file

from tests.support.adapters import make_adapter

MIB = 1 << 20


def config_of(path: str, **sections: Any) -> ClusterConfig:
    return ClusterConfig.model_validate({"model": {"path": path}, **sections})


# ---- the folder and the name -----------------------------------------------------------------


@pytest.fixture
def qwen(tmp_path: Path) -> Path:
    """A folder of a checkpoint, with a folder in it."""
    folder = tmp_path / "qwen"
    folder.mkdir()
    for file in CHECKPOINT.iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "inner").mkdir()
    return folder


@pytest.mark.parametrize(
    ("working_folder", "path"),
    [("qwen", "."), ("qwen", "./"), ("qwen/inner", ".."), (".", "qwen"), (".", "qwen/")],
)
def test_the_model_is_called_as_its_folder_however_the_path_names_it(
    qwen: Path, monkeypatch: pytest.MonkeyPatch, working_folder: str, path: str
) -> None:
    monkeypatch.chdir(qwen.parent / working_folder)
    checkpoint = find_checkpoint(config_of(path))
    assert (checkpoint.name, checkpoint.folder) == ("qwen", qwen)


def test_a_link_to_a_folder_gives_its_own_name(qwen: Path) -> None:
    link = qwen.parent / "qwen3"
    link.symlink_to(qwen)
    assert find_checkpoint(config_of(str(link))).name == "qwen3"


def test_the_home_folder_has_a_name(qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(qwen))
    assert find_checkpoint(config_of("~")).name == "qwen"


@pytest.mark.parametrize("path", ["~nobody-of-this-name/m", "m" * 300, "/tmp/" + "m" * 300])
def test_a_path_that_the_system_refuses_is_a_sentence(path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        find_checkpoint(config_of(path))
    assert "\n" not in str(caught.value) and path in str(caught.value)


# ---- memory ----------------------------------------------------------------------------------


def needed_mib(config: ClusterConfig, folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return the MiB that the check says all workers need, 400 for each process included."""
    monkeypatch.setattr("diptych.cluster.launch.checkpoint.available_memory", lambda: 0)
    with pytest.raises(ConfigError) as caught:
        check_memory([(config, Checkpoint(folder, "m", spec=None))])
    return int(str(caught.value).partition("need about ")[2].partition(" ")[0])


VLLM = {
    "engine": {"kind": "vllm"},
    "pools": {"prefill": {"replicas": 1}, "decode": {"replicas": 1}},
}


def write_weights(folder: Path, *names: str) -> None:
    for name in names:
        with (folder / name).open("wb") as file:
            file.truncate(100 * MIB)


def test_only_the_files_of_the_index_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mistral's folders have all weights twice: in the files of the index, and in one more."""
    config = config_of(str(tmp_path), **VLLM)
    without_weights = needed_mib(config, tmp_path, monkeypatch)
    shards = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    write_weights(tmp_path, *shards, "consolidated.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": shards[0], "b": shards[1], "c": shards[1]}}))
    assert needed_mib(config, tmp_path, monkeypatch) == without_weights + 2 * 200
    index.write_text("{")  # vLLM says what is wrong with it
    assert needed_mib(config, tmp_path, monkeypatch) == without_weights + 2 * 300


def test_only_the_single_file_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(str(tmp_path), **VLLM)
    without_weights = needed_mib(config, tmp_path, monkeypatch)
    write_weights(tmp_path, "consolidated.safetensors")
    assert needed_mib(config, tmp_path, monkeypatch) == without_weights + 2 * 100
    write_weights(tmp_path, "model.safetensors")
    assert needed_mib(config, tmp_path, monkeypatch) == without_weights + 2 * 100


def test_weights_that_end_up_in_a_gpu_take_no_memory_of_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They pass through the host one layer at a time."""
    on_gpus = {"engine": {"device": "cuda"}}
    nixl = {"transport": "nixl"}
    gpus = config_of(
        str(CHECKPOINT), pools={"prefill": on_gpus, "decode": on_gpus}, kv_transfer=nixl
    )
    mixed = config_of(str(CHECKPOINT), pools={"prefill": on_gpus, "decode": {}}, kv_transfer=nixl)
    checkpoint = find_checkpoint(config_of(str(CHECKPOINT)))
    assert checkpoint.spec is not None
    overhead = 2 * 400 * MIB
    monkeypatch.setattr("diptych.cluster.launch.checkpoint.available_memory", lambda: overhead)
    check_memory([(gpus, checkpoint)])
    on_host = weight_bytes(checkpoint.spec, mixed.model.dtype)
    on_host += mixed.pools.decode.engine.kv_bytes or 0
    limit = overhead + on_host
    monkeypatch.setattr("diptych.cluster.launch.checkpoint.available_memory", lambda: limit)
    check_memory([(mixed, checkpoint)])
    monkeypatch.setattr("diptych.cluster.launch.checkpoint.available_memory", lambda: limit - 1)
    with pytest.raises(ConfigError, match="2 workers need"):
        check_memory([(mixed, checkpoint)])


# ---- adapters --------------------------------------------------------------------------------


def with_adapters(**adapters: Path) -> ClusterConfig:
    paths = {name: str(path) for name, path in adapters.items()}
    model = {"path": str(CHECKPOINT), "name": "demo", "adapters": paths}
    return ClusterConfig.model_validate({"model": model, "engine": {"kind": "vllm"}})


def changed_adapter(folder: Path, **settings: Any) -> Path:
    make_adapter(folder, CHECKPOINT)
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    return folder


def test_adapters_are_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_adapter(tmp_path / "sql", CHECKPOINT, rank=12)
    monkeypatch.chdir(tmp_path)
    checkpoint = find_checkpoint(with_adapters(sql=Path("sql")))
    assert checkpoint.adapters == {"sql": tmp_path / "sql"}
    facts = read_adapter(tmp_path / "sql")
    assert (facts.rank, facts.room_rank) == (12, 16) and len(facts.fingerprint) == 16
    make_adapter(tmp_path / "again", CHECKPOINT, rank=12)
    assert read_adapter(tmp_path / "again") == facts
    make_adapter(tmp_path / "other", CHECKPOINT, seed=1, rank=12)
    assert read_adapter(tmp_path / "other") != facts
    changed_adapter(tmp_path / "stronger", r=12, lora_alpha=99)
    assert read_adapter(tmp_path / "stronger") != facts


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"peft_type": "IA3"}, "kind IA3 .*merge it into its model's weights"),
        ({"use_dora": True}, "DoRA"),
        ({"use_qalora": True}, "QALoRA"),
        ({"lora_bias": True}, "lora_bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "changes biases"),
        ({"init_lora_weights": "pissa"}, "own weights .*pissa"),
        ({"target_parameters": ["experts"]}, "target_parameters"),
        ({"r": None}, "has no r"),
        ({"r": 0}, "has no r"),
        ({"target_modules": None}, "has no target_modules"),
        ({"r": "8"}, r"ranks \['8'\]"),
        ({"r": True}, r"ranks \[True\]"),
        ({"rank_pattern": ["q_proj"]}, "rank_pattern is no object"),
        ({"r": 513}, "513.*1 to 512"),
        ({"rank_pattern": {"q_proj": 513}}, "513.*1 to 512"),
    ],
)
def test_an_adapter_that_is_not_computed_is_a_sentence(
    tmp_path: Path, settings: dict[str, Any], words: str
) -> None:
    folder = changed_adapter(tmp_path / "sql", **settings)
    with pytest.raises(ConfigError, match=f"model.adapters.sql: .*{words}"):
        find_checkpoint(with_adapters(sql=folder))


def test_what_an_adapter_leaves_out_or_null_and_unknown_fields_change_nothing(
    tmp_path: Path,
) -> None:
    folder = changed_adapter(
        tmp_path / "sql", peft_type=None, bias=None, rank_pattern=None, a_later_field={"x": 1}
    )
    file = folder / "adapter_model.safetensors"
    save_file(load_file(file) | {"a_number": torch.tensor(1.0)}, file)
    assert find_checkpoint(with_adapters(sql=folder)).adapters == {"sql": folder}


@pytest.mark.parametrize("settings", ["[]", "{", ""])
def test_an_adapters_settings_that_are_no_object_are_a_sentence(
    tmp_path: Path, settings: str
) -> None:
    folder = changed_adapter(tmp_path / "sql")
    (folder / "adapter_config.json").write_text(settings)
    with pytest.raises(ConfigError, match=r"model\.adapters\.sql: .*JSON"):
        find_checkpoint(with_adapters(sql=folder))


@pytest.mark.parametrize("kept_bytes", [0, 100, 5000])
def test_an_adapter_that_is_cut_off_is_a_sentence(tmp_path: Path, kept_bytes: int) -> None:
    folder = changed_adapter(tmp_path / "sql")
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:kept_bytes])
    with pytest.raises(ConfigError, match=r"model\.adapters\.sql: .*damaged or truncated"):
        find_checkpoint(with_adapters(sql=folder))


def test_what_is_as_large_as_the_vocabulary_is_not_copied_for_each_token(tmp_path: Path) -> None:
    """Nor do the model's own weights count, which PEFT may save beside the adapter's."""
    folder = make_adapter(tmp_path / "sql", CHECKPOINT)
    facts = read_adapter(folder)
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    assert facts.weight_bytes == sum(tensor.nbytes for tensor in tensors.values())
    prefix = "base_model.model"
    tensors[f"{prefix}.lm_head.lora_A.weight"] = torch.zeros(8, 64)
    tensors[f"{prefix}.lm_head.lora_B.weight"] = torch.zeros(100_000, 8)
    tensors[f"{prefix}.model.embed_tokens.base_layer.weight"] = torch.zeros(100_000, 64)
    save_file(tensors, file)
    with_head = read_adapter(folder)
    assert with_head.widest == facts.widest
    assert with_head.weight_bytes - facts.weight_bytes == 4 * 8 * (64 + 100_000)


def test_adapters_count_for_the_memory_that_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step with an adapter takes more than the adapter: vLLM copies a matrix for each token."""
    folder = make_adapter(tmp_path / "sql", CHECKPOINT, rank=12)
    facts = read_adapter(folder)
    widest = json.loads((CHECKPOINT / "config.json").read_text())["intermediate_size"]
    assert facts.widest == widest
    needed = adapter_memory({"a": folder, "b": folder}, 512)
    assert needed == 3 * (facts.weight_bytes * 16 // 12) + 512 * 16 * widest * 6
    assert adapter_memory({}, 512) == 0

    config = with_adapters(sql=folder)
    checkpoint = find_checkpoint(config)
    monkeypatch.setattr(checkpoint_module, "available_memory", lambda: 0)
    sizes = []
    for found in (checkpoint, replace(checkpoint, adapters={})):
        with pytest.raises(ConfigError, match="too little memory") as error:
            check_memory([(config, found)])
        sizes.append(int(re.search(r"about (\d+) MiB", str(error.value))[1]))  # type: ignore[index]
    assert sizes[0] - sizes[1] == pytest.approx(
        2 * adapter_memory({"sql": folder}, 512) / MIB, abs=1
    )


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_an_adapter_without_a_file_is_a_sentence(tmp_path: Path, name: str) -> None:
    folder = changed_adapter(tmp_path / "sql")
    (folder / name).unlink()
    with pytest.raises(ConfigError, match=f"model.adapters.sql: {name} is missing"):
        find_checkpoint(with_adapters(sql=folder))


def test_an_adapter_has_a_name_of_its_own(tmp_path: Path) -> None:
    folder = changed_adapter(tmp_path / "demo")
    with pytest.raises(ConfigError, match="the model's own name, 'demo'"):
        find_checkpoint(with_adapters(demo=folder))


def test_our_own_engine_computes_no_adapters(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"set engine\.kind to vllm"):
        config_of(str(CHECKPOINT), model={"adapters": {"sql": "x"}})


def test_no_name_is_a_models_and_an_adapters() -> None:
    model = {"served_names": ["latest"], "adapters": {"latest": "x"}}
    with pytest.raises(ValueError, match="'latest' is given twice"):
        config_of("x", model=model, engine={"kind": "vllm"})
