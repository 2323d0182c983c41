"""What `quantization_config` in a checkpoint's config.json says (pure)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .errors import UnsupportedModel

SUPPORTED = "supported: fp8 and compressed-tensors with 8-bit float weights"
STRATEGIES = ("tensor", "channel", "block")


@dataclass(frozen=True, slots=True)
class Fp8:
    """`block`: rows and columns that share a scale; None where a tensor or a row has one."""

    block: tuple[int, int] | None


def read_quantization(config: dict[str, Any] | None) -> Fp8 | None:
    """Raises UnsupportedModel naming the method, if it is not FP8."""
    if not config:
        return None
    method = config.get("quant_method")
    if method == "fp8":
        size = config.get("weight_block_size")
        return Fp8(None if size is None else (int(size[0]), int(size[1])))
    if method == "compressed-tensors":
        return _compressed(config)
    raise UnsupportedModel(f"quantization_config {method!r} is not supported ({SUPPORTED})")


def _compressed(config: dict[str, Any]) -> Fp8:
    what = "quantization_config 'compressed-tensors'"
    sparsity = (config.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense" or config.get("transform_config"):
        key = "transform_config" if config.get("transform_config") else f"sparsity {sparsity!r}"
        raise UnsupportedModel(f"{what} with {key} is not supported ({SUPPORTED})")
    blocks = set()
    for group in (config.get("config_groups") or {}).values():
        weights = group.get("weights") or {}
        kind, bits, strategy = (weights.get(key) for key in ("type", "num_bits", "strategy"))
        if (kind, bits) != ("float", 8) or strategy not in STRATEGIES:
            what += f" with {bits}-bit {kind} weights, one scale per {strategy}"
            raise UnsupportedModel(f"{what}, is not supported ({SUPPORTED})")
        rows, columns = weights["block_structure"] if strategy == "block" else (0, 0)
        blocks.add((int(rows), int(columns)) if rows else None)
    if len(blocks) != 1:
        raise UnsupportedModel(f"{what} with {len(blocks)} kinds of groups is not supported")
    return Fp8(blocks.pop())
