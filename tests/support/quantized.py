"""FP8 copies of checkpoints in the styles found on the hub, and the same weights in fp32."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

MOST = 448.0  # the largest float8_e4m3fn
BLOCK = (64, 48)  # sizes are no multiples of it: the last blocks are cut off


def _compressed(**weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", **weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


#: style -> (quantization_config, name of the scales)
STYLES: dict[str, tuple[dict[str, Any], str]] = {
    "block": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": list(BLOCK)},
        "weight_scale_inv",
    ),
    "tensor": ({"quant_method": "fp8", "activation_scheme": "static"}, "weight_scale"),
    "compressed-tensor": (_compressed(strategy="tensor"), "weight_scale"),
    "compressed-channel": (_compressed(strategy="channel"), "weight_scale"),
    "compressed-block": (
        _compressed(strategy="block", block_structure=list(BLOCK)),
        "weight_scale",
    ),
}


def quantize(source: Path, target: Path, style: str) -> Path:
    """Writes `target` in FP8, and beside it `target`-plain: its weights as fp32. -> the latter."""
    plain = target.with_name(target.name + "-plain")
    config, scale_name = STYLES[style]
    weights = load_file(source / "model.safetensors")
    small, full = dict(weights), dict(weights)
    for name, weight in weights.items():
        if name.endswith(".weight") and weight.dim() == 2 and ".gate." not in name:
            if name.startswith(("lm_head", "model.embed")):
                continue
            scales = _scales(weight, style.split("-")[-1])
            wide = _spread(scales, weight)
            small[name] = (weight / wide).to(torch.float8_e4m3fn)
            full[name] = small[name].float() * wide
            small[name.removesuffix("weight") + scale_name] = scales
            if style in ("tensor", "compressed-tensor"):
                small[name.removesuffix("weight") + "input_scale"] = torch.tensor([0.5])
    for folder, tensors in ((target, small), (plain, full)):
        shutil.copytree(source, folder)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    path = target / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))
    return plain


def _scales(weight: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "tensor":
        return weight.abs().max() / MOST
    if kind == "channel":
        return weight.abs().amax(dim=1, keepdim=True) / MOST
    rows = weight.abs().split(BLOCK[0], dim=0)
    most = [[part.max() for part in row.split(BLOCK[1], dim=1)] for row in rows]
    return torch.tensor(most) / MOST


def _spread(scales: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """One scale per element."""
    if scales.dim() == 2 and scales.shape[1] > 1:
        scales = torch.kron(scales, torch.ones(BLOCK))[: weight.shape[0], : weight.shape[1]]
    return scales.expand(weight.shape)
