"""Finds the model to serve, and refuses one that cannot be served, before the cluster starts.

`find_checkpoint` resolves the configured model, which is a folder, a Hugging Face id, or the
bundled one, to a folder with its files; `find_adapters` does so with the model's adapters.
`check_memory` compares what the workers need with what this machine has free.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...engine.adapters import adapter_memory, read_adapter
from ...engine.checkpoint_facts import read_facts
from ...engine.demo import CHECKPOINT
from ...engine.errors import EngineError, WeightsError
from ...engine.memory import available_memory, weight_bytes
from ...engine.spec import ModelSpec, read_json, read_spec
from ...engine.weight_files import INDEX_FILE, SINGLE_FILE, find_tensor_files
from ..config import ClusterConfig, ConfigError, PoolConfig

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
#: What is downloaded: settings and tokenizer, weights, chat templates.
_FILE_PATTERNS = ["*.json", "*.safetensors", "*.jinja"]
#: Memory that each worker process takes beside weights and KV pool, for Python, torch and Ray.
WORKER_OVERHEAD_MIB = 400


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model whose files are on this machine."""

    folder: Path
    #: The model's name in the API.
    name: str
    #: The shape of the model, as its config.json has it. None if vLLM runs the model: only our own
    #: engine needs the shape.
    spec: ModelSpec | None
    #: The folders of the model's adapters, by name.
    adapters: dict[str, Path] = field(default_factory=dict)

    @property
    def adapter_settings(self) -> dict[str, str]:
        """What `model.adapters` is where these folders are meant, and no id that stands for them."""
        return {name: str(folder) for name, folder in self.adapters.items()}


def find_checkpoint(config: ClusterConfig) -> Checkpoint:
    """Find the configured model, download it if need be, and check that it can be served.

    Its adapters are found and checked, too.

    The model's name is the configured one; else `demo` for the bundled model, the folder's name, or
    the Hugging Face id. Raises ConfigError, whose text is one sentence, if the model cannot be
    served.
    """
    path = config.model.path
    if path is None:
        folder = CHECKPOINT
        name = "demo"
    elif (local_folder := _local_folder(path)) is not None:
        folder = local_folder
        # `.` and `..` have no name of their own. Links keep theirs.
        name = Path(os.path.abspath(local_folder)).name
    else:
        folder = _download(path)
        name = path
    spec = None
    try:
        if config.engine.kind == "diptych":
            spec = read_spec(folder)
            find_tensor_files(folder)  # a worker would find damaged files half a minute later
        else:
            read_facts(folder)
    except EngineError as error:
        raise ConfigError(str(error)) from None
    if not (folder / "tokenizer.json").exists():
        raise ConfigError(f"tokenizer.json is missing in {folder}: export a fast tokenizer")
    name = config.model.name or name
    if name in config.model.adapters:
        raise ConfigError(f"model.adapters: an adapter has the model's own name, {name!r}")
    return Checkpoint(folder.resolve(), name, spec, find_adapters(config))


def find_adapters(config: ClusterConfig) -> dict[str, Path]:
    """Find the model's adapters, download them if need be; return their folders by name.

    Raises ConfigError for one that cannot be served.
    """
    folders: dict[str, Path] = {}
    for name, path in config.model.adapters.items():
        try:
            folder = (_local_folder(path) or _download(path)).resolve()
            read_adapter(folder)
        except (ConfigError, EngineError) as error:
            raise ConfigError(f"model.adapters.{name}: {error}") from None
        folders[name] = folder
    return folders


def _local_folder(path: str) -> Path | None:
    """Return the folder that `path` names on this machine, or None if there is none.

    Raises ConfigError if the system refuses to look.
    """
    try:
        folder = Path(path).expanduser()
        return folder if folder.is_dir() else None
    except RuntimeError:  # `~name` of nobody who has an account here
        raise ConfigError(f"{path} names a home folder that is not known here") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be looked up: {error.strerror}") from None


def _download(path: str) -> Path:
    """Return the folder with the files of a Hugging Face id. Raises ConfigError."""
    if not _HUB_ID.fullmatch(path) or path.startswith((".", "/")):
        raise ConfigError(f"{path} is not a folder; give a checkpoint folder or a Hugging Face id")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path, allow_patterns=_FILE_PATTERNS))
    except Exception as error:  # the hub raises dozens of classes, network ones included
        message_lines = str(error).strip().splitlines()
        reason = message_lines[0] if message_lines else type(error).__name__
        raise ConfigError(
            f"{path} is not a folder here and cannot be downloaded from the Hugging Face hub: "
            f"{reason}"
        ) from None


def check_memory(models: Sequence[tuple[ClusterConfig, Checkpoint]]) -> None:
    """Compare what all workers of all models need with the memory that is free on this machine.

    A worker needs the weights, its KV pool, its adapters and `WORKER_OVERHEAD_MIB`. Weights and a pool in a GPU's
    memory do not count. A worker counts as one process: with `tensor_parallel` above 1 it needs
    more than is counted. Raises ConfigError if the workers need more than is free. Nothing is
    checked where the system does not say what is free.
    """
    free_bytes = available_memory()
    if free_bytes is None:  # this system does not say
        return
    needed_bytes = sum(_needed_bytes(config, checkpoint) for config, checkpoint in models)
    if needed_bytes > free_bytes:
        worker_count = sum(
            pool.replicas
            for config, _ in models
            for pool in (config.pools.prefill, config.pools.decode)
        )
        raise ConfigError(
            f"too little memory: {worker_count} workers need about {needed_bytes >> 20} MiB "
            f"(weights, KV pools, {WORKER_OVERHEAD_MIB} MiB each), {free_bytes >> 20} MiB are "
            "free; lower pools.*.engine.kv_mib or pools.*.replicas, or take a smaller model"
        )


def _needed_bytes(config: ClusterConfig, checkpoint: Checkpoint) -> int:
    """Return what the workers of one model need."""
    if checkpoint.spec is not None:
        model_bytes = weight_bytes(checkpoint.spec, config.model.dtype)
    else:
        model_bytes = sum(file.stat().st_size for file in _weight_files(checkpoint.folder))
    pools = (config.pools.prefill, config.pools.decode)
    return sum(
        pool.replicas
        * (
            _host_bytes(pool, model_bytes)
            + adapter_memory(checkpoint.adapters, pool.engine.max_step_tokens)
            + (WORKER_OVERHEAD_MIB << 20)
        )
        for pool in pools
    )


def _weight_files(folder: Path) -> list[Path]:
    """Return the files with the weights: those of the index, else the single one, else all.

    Some folders have all weights twice, as Mistral's, whose `consolidated.safetensors` no index
    names.
    """
    files = list(folder.glob("*.safetensors"))
    names = {SINGLE_FILE}
    if (folder / INDEX_FILE).exists():
        try:
            weight_map = read_json(folder / INDEX_FILE).get("weight_map")
        except WeightsError:  # who loads the files says what is wrong with it
            weight_map = None
        if isinstance(weight_map, dict):
            names = set(map(str, weight_map.values()))
    return [file for file in files if file.name in names] or files


def _host_bytes(pool: PoolConfig, model_bytes: int) -> int:
    """Return the bytes of host memory that a worker's weights and KV pool take.

    They are none if the worker computes on a GPU: a layer is copied there as soon as it is read.
    """
    if pool.engine.device == "cuda":
        return 0
    return model_bytes + (pool.engine.kv_bytes or 0)
