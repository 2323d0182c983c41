"""Safetensors -> `Weights`: streamed tensor by tensor, fused, cast."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from .decoder import Layer, Weights
from .errors import WeightsError
from .linear import Linear
from .spec import ModelSpec, read_json

Progress = Callable[[str, float], None]


class _Files:
    """All tensors of a checkpoint by name, over one or several safetensors files."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self.folder, self.dtype = folder, dtype
        index = folder / "model.safetensors.index.json"
        shards = read_json(index).get("weight_map", {}) if index.exists() else {}
        names = sorted(set(shards.values())) or ["model.safetensors"]
        self._open: dict[str, safe_open] = {}
        for name in names:
            path = folder / name
            if not path.exists():
                raise WeightsError(f"{name} is missing in {folder}: download it again")
            try:
                file = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise WeightsError(f"{path} is damaged or truncated: {error}") from None
            self._open.update(dict.fromkeys(file.keys(), file))

    def take(self, name: str, *shape: int) -> torch.Tensor:
        if name not in self._open:
            raise WeightsError(f"tensor {name} is missing in {self.folder}")
        tensor = self._open[name].get_tensor(name)
        if tuple(tensor.shape) != shape:
            found = list(tensor.shape)
            raise WeightsError(f"tensor {name} is {found}, config.json implies {list(shape)}")
        return tensor.to(self.dtype)


def load(
    folder: Path, spec: ModelSpec, dtype: torch.dtype, progress: Progress | None = None
) -> Weights:
    """Loads a checkpoint. Raises WeightsError when a tensor is missing or has another shape."""
    files = _Files(folder, dtype)
    embedding = files.take("model.embed_tokens.weight", spec.vocab, spec.hidden)
    layers = []
    for index in range(spec.layers):
        layers.append(_layer(files, f"model.layers.{index}.", spec))
        if progress:
            progress(f"layer {index + 1}/{spec.layers}", (index + 1) / spec.layers)
    head = embedding if spec.tied else files.take("lm_head.weight", spec.vocab, spec.hidden)
    norm = files.take("model.norm.weight", spec.hidden)
    return Weights(embedding, layers, norm, Linear(head))


def _layer(files: _Files, prefix: str, spec: ModelSpec) -> Layer:
    attn, mlp = prefix + "self_attn.", prefix + "mlp."
    q, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    parts = (("q_proj", q), ("k_proj", kv), ("v_proj", kv))
    qkv = [files.take(f"{attn}{name}.weight", size, spec.hidden) for name, size in parts]
    bias = [files.take(f"{attn}{name}.bias", size) for name, size in parts if spec.qkv_bias]
    gate_up = [
        files.take(f"{mlp}{name}.weight", spec.intermediate, spec.hidden)
        for name in ("gate_proj", "up_proj")
    ]
    output_bias = files.take(attn + "o_proj.bias", spec.hidden) if spec.output_bias else None
    return Layer(
        norm=files.take(prefix + "input_layernorm.weight", spec.hidden),
        qkv=Linear(torch.cat(qkv), torch.cat(bias) if bias else None),
        q_norm=files.take(attn + "q_norm.weight", spec.head_dim) if spec.qk_norm else None,
        k_norm=files.take(attn + "k_norm.weight", spec.head_dim) if spec.qk_norm else None,
        output=Linear(files.take(attn + "o_proj.weight", spec.hidden, q), output_bias),
        mlp_norm=files.take(prefix + "post_attention_layernorm.weight", spec.hidden),
        gate_up=Linear(torch.cat(gate_up)),
        down=Linear(files.take(mlp + "down_proj.weight", spec.hidden, spec.intermediate)),
    )
