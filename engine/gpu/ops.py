"""`engine.ops` on a GPU: Triton's kernels between the matrices, an attention backend, linears."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib import import_module

import torch
import torch.nn.functional as F

from ..attention import Cache, Meta
from ..errors import KernelUnavailable
from ..linear import Linear
from ..ops import Norm, Ops
from . import elementwise
from .adapters import Attention, adapter
from .backends import Need, choose, knows_fp8, probe, report
from .experts import GroupedExperts
from .fp8 import Fp8Linear
from .matmul import matmul
from .paged import PagedAttention
from .varlen import Varlen, carry, parts


@dataclass
class Step(Meta):
    """A step's rows on the device; `varlen` says the same to attention libraries."""

    varlen: list[Varlen] = field(default_factory=list)


class GpuLinear(Linear):
    """cuBLAS, the residual inside the product's epilogue; or one Triton tile where `exact`."""

    _ops: GpuOps

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, gated: bool, ops: GpuOps
    ) -> None:
        self._weight, self._bias = ops.keep(weight), None if bias is None else ops.keep(bias)
        self._ops, self._gated = ops, gated

    def __call__(
        self, x: torch.Tensor, norm: Norm | None = None, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        x = x if norm is None else self._ops.norm(x, norm)
        out = self.product(x, residual)
        return self._ops.silu_mul(out) if self._gated else out

    def product(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """x W^T + b, + residual [T, out]."""
        if self._ops.exact:
            return matmul(x, self._weight, self._bias, residual)
        if residual is None:
            return F.linear(x, self._weight, self._bias)
        out = torch.addmm(residual, x, self._weight.T)
        return out if self._bias is None else out + self._bias


class GpuOps(Ops):
    """Operations on `device`; the CPU itself under TRITON_INTERPRET. Raises KernelUnavailable.

    `exact`: a row's bits do not depend on the rows beside it, as on a CPU.
    """

    device_steps = True

    def __init__(
        self, device: torch.device, need: Need, max_len: int, wanted: str, fp8: bool
    ) -> None:
        if fp8 and need.exact:
            raise KernelUnavailable("exact: products of FP8 weights depend on the batch")
        found = probe(device)
        if fp8 and not knows_fp8(found):
            raise KernelUnavailable("weights in FP8 need compute capability 8.9")
        self.device, self.exact, self._fp8 = device, need.exact, fp8
        choice = choose(found, need, wanted)
        report(choice)
        self.attention: Attention = (
            PagedAttention(max_len, need.exact)
            if choice.name == "triton"
            else adapter(choice.name, import_module(choice.module), device)
        )
        self.name = f"gpu: {choice.name}"
        if isinstance(self.attention, PagedAttention) and need.exact:
            gpu = "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device)
            self.name = f"exact on {gpu} by {self.attention.split}: triton"

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device, copy=tensor.device.type == "cpu")

    def linear(
        self, weight: torch.Tensor, bias: torch.Tensor | None, gated: bool, precise: bool
    ) -> Linear:
        if self._fp8 and not precise and Fp8Linear.fits(weight):
            return Fp8Linear(weight, bias, gated, self)
        return GpuLinear(weight, bias, gated, self)

    def experts(
        self,
        count: int,
        parts: Iterable[tuple[torch.Tensor, torch.Tensor]],
        together: Callable[[torch.Tensor], torch.Tensor] | None,
    ) -> GroupedExperts:
        return GroupedExperts(self, count, parts, together, self._fp8, self.exact)

    def place(self, ids: torch.Tensor, meta: Meta) -> tuple[torch.Tensor, Meta]:
        if isinstance(meta, Step):
            return ids, meta
        step = Step(
            carry(meta.positions, self.device),
            carry(meta.slot_block, self.device),
            carry(meta.slot_offset, self.device),
            meta.pieces,
            varlen=[part.to(self.device) for part in parts(meta.pieces)],
        )
        return carry(ids, self.device), step

    def attend(
        self, q: torch.Tensor, cache: Cache, meta: Meta, scale: float, window: int | None
    ) -> torch.Tensor:
        assert isinstance(meta, Step)
        found = [
            self.attention(q[one.first : one.first + one.rows], cache, one, scale, window)
            for one in meta.varlen
        ]
        return found[0] if len(found) == 1 else torch.cat(found)

    def norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        return elementwise.rms_norm(x, norm)

    def silu_mul(self, x: torch.Tensor) -> torch.Tensor:
        return elementwise.silu_mul(x)

    def rope_store(
        self,
        qkv: torch.Tensor,
        cache: Cache,
        norms: tuple[Norm, Norm] | None,
        angles: tuple[torch.Tensor, torch.Tensor],
        meta: Meta,
    ) -> torch.Tensor:
        slots = meta.slot_block, meta.slot_offset
        return elementwise.rope_store(qkv, cache, norms, angles, slots)
