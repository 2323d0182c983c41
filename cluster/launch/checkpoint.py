"""Which model to serve: a folder, a Hugging Face id, or the bundled one; checked before start."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from ...engine.demo import CHECKPOINT
from ...engine.errors import EngineError
from ...engine.memory import available_memory, weight_bytes
from ...engine.spec import ModelSpec, read_spec
from ..config import ClusterConfig, ConfigError

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_FILES = ["*.json", "*.safetensors", "*.jinja"]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    folder: Path
    name: str
    spec: ModelSpec


def find(config: ClusterConfig) -> Checkpoint:
    """Resolves the model and checks its files. Raises ConfigError with one sentence."""
    path = config.model.path
    if path is None:
        folder, name = CHECKPOINT, "demo"
    else:
        folder = _local(path) or _download(path)
        name = Path(path).name if _local(path) else path
    try:
        spec = read_spec(folder)
    except EngineError as error:
        raise ConfigError(str(error)) from None
    if not (folder / "tokenizer.json").exists():
        raise ConfigError(f"tokenizer.json is missing in {folder}: export a fast tokenizer")
    return Checkpoint(folder.resolve(), config.model.name or name, spec)


def _local(path: str) -> Path | None:
    folder = Path(path).expanduser()
    return folder if folder.is_dir() else None


def _download(path: str) -> Path:
    if not _HUB_ID.fullmatch(path) or path.startswith((".", "/")):
        raise ConfigError(f"{path} is not a folder; give a checkpoint folder or a Hugging Face id")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path, allow_patterns=_FILES))
    except Exception as error:  # the hub raises dozens of classes, network ones included
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(
            f"{path} is not a folder here and cannot be downloaded from the Hugging Face hub: "
            f"{reason}"
        ) from None


def check_memory(config: ClusterConfig, spec: ModelSpec) -> None:
    """Weights and KV pool of every worker against the memory that is free on this machine.

    Raises ConfigError.
    """
    weights = weight_bytes(spec, config.model.dtype)
    needed = sum(
        pool.replicas * (weights + (pool.engine.kv_mib << 20) + (400 << 20))
        for pool in (config.pools.prefill, config.pools.decode)
    )
    free = available_memory()
    if free is not None and needed > free:
        workers = config.pools.prefill.replicas + config.pools.decode.replicas
        raise ConfigError(
            f"too little memory: {workers} workers need about {needed >> 20} MiB (weights, KV "
            f"pools, 400 MiB each), {free >> 20} MiB are free; lower pools.*.engine.kv_mib or "
            "pools.*.replicas, or take a smaller model"
        )
