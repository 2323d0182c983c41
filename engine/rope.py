"""Rotary frequencies (RoPE, arXiv:2104.09864) of every kind of scaling that `spec.RopeSpec` knows.

The formulas are those of transformers' `modeling_rope_utils`, so that the same checkpoint gives the
same numbers.
"""

from __future__ import annotations

import math

import torch

from .spec import RopeSpec


def rope_frequencies(rope: RopeSpec, head_dim: int) -> torch.Tensor:
    """Return by how many radians each pair of numbers turns per position, float32 [head_dim / 2].

    Without scaling, pair i turns by theta ** (-2 i / head_dim).
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    base = 1.0 / (rope.theta**exponents)
    match rope.kind:
        case "linear":
            return base / rope.factor
        case "llama3":
            return _llama3(rope, base)
        case "yarn":
            return _yarn(rope, base, head_dim)
    assert rope.kind == "default", rope
    return base


def _llama3(rope: RopeSpec, base: torch.Tensor) -> torch.Tensor:
    """Stretch long waves by the factor, keep short ones, and blend those between.

    A wave is long, or short, compared with the original context over `low_freq_factor`, or over
    `high_freq_factor`. The blend is linear in the frequency.
    """
    wavelength = 2 * math.pi / base
    long_wave = rope.original_max_position / rope.low_freq_factor
    short_wave = rope.original_max_position / rope.high_freq_factor
    unscaled_share = (rope.original_max_position / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - unscaled_share) * base / rope.factor + unscaled_share * base
    stretched = torch.where(wavelength > long_wave, base / rope.factor, base)
    between = (wavelength <= long_wave) & (wavelength >= short_wave)
    return torch.where(between, blended, stretched)


def _yarn(rope: RopeSpec, base: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Keep fast turns, stretch slow ones by the factor, and blend those between (arXiv:2309.00071).

    The blend is linear in the dimension, from the one that turns `beta_fast` times within the
    original context to the one that turns `beta_slow` times.
    """

    def dimension_of(rotations: float) -> float:
        """Return the dimension that turns so many times within the original context."""
        turns = rope.original_max_position / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.theta))

    low = dimension_of(rope.beta_fast)
    high = dimension_of(rope.beta_slow)
    if rope.truncate:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, head_dim - 1)
    width = high - low or 0.001  # as transformers does, where both are the same dimension
    dimensions = torch.arange(head_dim // 2, dtype=torch.float32)
    stretched_share = ((dimensions - low) / width).clamp(0, 1)
    return base / rope.factor * stretched_share + base * (1 - stretched_share)
