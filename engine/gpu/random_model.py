"""A random model of a given shape, made on the device: no checkpoint, no download."""

from __future__ import annotations

import torch

from ..decoder import Decoder, Layer, Mlp, Weights
from ..linear import make_linear
from ..ops import Norm
from ..sizing import kv_layout
from ..spec import ModelSpec
from .backends import Need
from .memory import DevicePool
from .ops import GpuOps


def make(
    spec: ModelSpec,
    device: torch.device,
    blocks: int,
    attention: str = "auto",
    block_tokens: int = 64,
    fp8: bool = False,
    kv_dtype: str | None = None,
    exact: bool = False,
) -> tuple[Decoder, GpuOps]:
    """Weights are normal with a deviation that keeps activations near 1; the same at every call."""
    dtype = getattr(torch, spec.dtype)
    need = Need(spec.dtype, kv_dtype or spec.dtype, block_tokens, spec.head_dim, exact)
    ops = GpuOps(device, need, spec.max_positions, attention, fp8)

    seeded = torch.Generator(device).manual_seed(0)

    def draw(outputs: int, inputs: int) -> torch.Tensor:
        drawn = torch.randn(outputs, inputs, dtype=dtype, device=device, generator=seeded)
        return drawn * inputs**-0.5

    def norm() -> Norm:
        return Norm(torch.ones(spec.hidden, dtype=dtype, device=device), spec.norm_eps)

    def layer() -> Layer:
        q, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        gate_up = make_linear(draw(2 * spec.intermediate, spec.hidden), gated=True, ops=ops)
        down = make_linear(draw(spec.hidden, spec.intermediate), ops=ops)
        return Layer(
            norm=norm(),
            qkv=make_linear(draw(q + 2 * kv, spec.hidden), ops=ops),
            qk_norms=None,
            output=make_linear(draw(spec.hidden, q), ops=ops),
            mlp_norm=norm(),
            mlp=Mlp(gate_up, down),
        )

    head = make_linear(draw(spec.vocab, spec.hidden), ops=ops, precise=True)
    layers = [layer() for _ in range(spec.layers)]
    weights = Weights(draw(spec.vocab, spec.hidden), layers, norm(), head)
    layout = kv_layout(spec, kv_dtype or spec.dtype, block_tokens)
    pool = DevicePool(layout, blocks, getattr(torch, layout.dtype), device)
    return Decoder(spec, weights, pool, ops), ops
