"""Rotary frequencies of the kinds of scaling that `spec.Rope` knows, as in transformers."""

from __future__ import annotations

import math

import torch

from .spec import RopeSpec


def rope_frequencies(rope: RopeSpec, head_dim: int) -> torch.Tensor:
    """[head_dim / 2] rotation per position, in radians (float32)."""
    powers = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    base = 1.0 / (rope.theta**powers)
    if rope.kind == "linear":
        return base / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, base)
    if rope.kind == "yarn":
        return _yarn(rope, base, head_dim)
    assert rope.kind == "default", rope
    return base


def _llama3(rope: RopeSpec, base: torch.Tensor) -> torch.Tensor:
    """Long waves are stretched, short ones kept, those between blended by their frequency."""
    wavelength = 2 * math.pi / base
    low = rope.original_max_position / rope.low_freq_factor
    high = rope.original_max_position / rope.high_freq_factor
    smooth = (rope.original_max_position / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    between = (1 - smooth) * base / rope.factor + smooth * base
    scaled = torch.where(wavelength > low, base / rope.factor, base)
    return torch.where((wavelength <= low) & (wavelength >= high), between, scaled)


def _yarn(rope: RopeSpec, base: torch.Tensor, head_dim: int) -> torch.Tensor:
    """As llama3, blended by the dimension: from that of `beta_fast` rotations to `beta_slow`'s."""

    def dimension(rotations: float) -> float:
        turns = rope.original_max_position / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low or 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return base / rope.factor * ramp + base * (1 - ramp)
