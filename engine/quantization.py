"""Reads `quantization_config` of a checkpoint's config.json (pure).

Only weights in FP8 (8-bit floats) can be read. Such a weight is stored as a matrix of FP8 numbers
and a few scales; the scale times the stored number is the weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .errors import UnsupportedModel

#: Ends the messages of errors.
SUPPORTED = "supported: fp8 and compressed-tensors with 8-bit float weights"

#: What may share a scale: all of a tensor, a row of it, or a block of rows and columns.
STRATEGIES = ("tensor", "channel", "block")


@dataclass(frozen=True, slots=True)
class Fp8Format:
    """How the FP8 weights (e4m3) of a checkpoint are scaled."""

    #: The rows and columns that share a scale; None where a tensor or a row has a scale.
    block_shape: tuple[int, int] | None


def read_quantization(config: dict[str, Any] | None) -> Fp8Format | None:
    """Return the format of quantized weights, or None if `config` says nothing about one.

    Raises UnsupportedModel, naming the method, if the weights are not FP8.
    """
    if not config:
        return None
    method = config.get("quant_method")
    if method == "fp8":
        shape = config.get("weight_block_size")
        return Fp8Format(None if shape is None else (int(shape[0]), int(shape[1])))
    if method == "compressed-tensors":
        return _read_compressed_tensors(config)
    raise UnsupportedModel(f"quantization_config {method!r} is not supported ({SUPPORTED})")


def _read_compressed_tensors(config: dict[str, Any]) -> Fp8Format:
    """Read a config of the method `compressed-tensors`. Raises UnsupportedModel."""
    method = "quantization_config 'compressed-tensors'"
    sparsity = (config.get("sparsity_config") or {}).get("format", "dense")
    if config.get("transform_config"):
        raise UnsupportedModel(f"{method} with transform_config is not supported ({SUPPORTED})")
    if sparsity != "dense":
        raise UnsupportedModel(
            f"{method} with sparsity {sparsity!r} is not supported ({SUPPORTED})"
        )
    groups = (config.get("config_groups") or {}).values()
    block_shapes = {_block_shape(group.get("weights") or {}, method) for group in groups}
    # layers of different groups may be scaled differently; one format has to fit all weights
    if len(block_shapes) != 1:
        raise UnsupportedModel(
            f"{method} with {len(block_shapes)} kinds of groups is not supported"
        )
    return Fp8Format(block_shapes.pop())


def _block_shape(weights: dict[str, Any], method: str) -> tuple[int, int] | None:
    """Return the rows and columns that share a scale in a group. Raises UnsupportedModel."""
    kind = weights.get("type")
    bits = weights.get("num_bits")
    strategy = weights.get("strategy")
    if kind != "float" or bits != 8 or strategy not in STRATEGIES:
        raise UnsupportedModel(
            f"{method} with {bits}-bit {kind} weights, one scale per {strategy}, "
            f"is not supported ({SUPPORTED})"
        )
    if strategy != "block":
        return None
    rows, columns = weights["block_structure"]
    return (int(rows), int(columns)) if rows else None
