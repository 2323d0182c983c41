"""A random model of a given shape, made on the device: no checkpoint, no download."""

from __future__ import annotations

import torch

from ..decoder import Decoder, DecoderLayer, DecoderWeights, Mlp
from ..linear import make_linear
from ..ops import RmsNorm
from ..sizing import kv_layout
from ..spec import ModelSpec
from .backends import AttentionNeeds
from .memory import DevicePool
from .ops import GpuOps


def make_random_model(
    spec: ModelSpec,
    device: torch.device,
    blocks: int,
    attention: str = "auto",
    block_tokens: int = 64,
    fp8: bool = False,
    kv_dtype: str | None = None,
    exact: bool = False,
) -> tuple[Decoder, GpuOps]:
    """Return a decoder of a dense model, with a pool of `blocks` blocks, and its operations.

    Weights are normal with a deviation that keeps activations near 1, and the same at every call.
    `attention` is a backend's name, or `auto` for the best that fits. `fp8` is for the weights of
    linear layers; `kv_dtype` None is the model's dtype. With `exact`, the bits of a sequence do not
    depend on what else is in its batch. Raises KernelUnavailable where the device lacks a kernel
    for this, and OutOfMemory.
    """
    needs = AttentionNeeds(
        dtype=spec.dtype,
        kv_dtype=kv_dtype or spec.dtype,
        block_tokens=block_tokens,
        head_dim=spec.head_dim,
        exact=exact,
    )
    ops = GpuOps(device, needs, spec.max_positions, attention, fp8=fp8)
    weights = _RandomWeights(spec, device, ops).make()
    layout = kv_layout(spec, needs.kv_dtype, block_tokens)
    pool = DevicePool(layout, blocks, getattr(torch, layout.dtype), device)
    return Decoder(spec, weights, pool, ops), ops


class _RandomWeights:
    """Draws the weights of a model from one generator, so their order decides what each one is."""

    def __init__(self, spec: ModelSpec, device: torch.device, ops: GpuOps) -> None:
        self._spec = spec
        self._device = device
        self._ops = ops
        self._dtype = getattr(torch, spec.dtype)
        self._generator = torch.Generator(device).manual_seed(0)

    def make(self) -> DecoderWeights:
        """Draw the head, the layers and the embedding, in this order."""
        spec = self._spec
        # `precise`: the head stays in the model's dtype even with fp8
        head = make_linear(self._matrix(spec.vocab, spec.hidden), ops=self._ops, precise=True)
        layers = [self._layer() for _ in range(spec.layers)]
        embedding = self._matrix(spec.vocab, spec.hidden)
        return DecoderWeights(embedding=embedding, layers=layers, norm=self._norm(), head=head)

    def _layer(self) -> DecoderLayer:
        spec = self._spec
        query_size = spec.heads * spec.head_dim
        kv_size = spec.kv_heads * spec.head_dim
        gate_up = self._matrix(2 * spec.intermediate, spec.hidden)
        mlp = Mlp(
            gate_up=make_linear(gate_up, gated=True, ops=self._ops),
            down=make_linear(self._matrix(spec.hidden, spec.intermediate), ops=self._ops),
        )
        return DecoderLayer(
            norm=self._norm(),
            qkv=make_linear(self._matrix(query_size + 2 * kv_size, spec.hidden), ops=self._ops),
            qk_norms=None,
            output=make_linear(self._matrix(spec.hidden, query_size), ops=self._ops),
            mlp_norm=self._norm(),
            mlp=mlp,
        )

    def _matrix(self, outputs: int, inputs: int) -> torch.Tensor:
        drawn = torch.randn(
            outputs, inputs, dtype=self._dtype, device=self._device, generator=self._generator
        )
        return drawn * inputs**-0.5

    def _norm(self) -> RmsNorm:
        ones = torch.ones(self._spec.hidden, dtype=self._dtype, device=self._device)
        return RmsNorm(ones, self._spec.norm_eps)
