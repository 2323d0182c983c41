"""`engine.ops` on a GPU: Triton's kernels between the matrices, an attention backend, linears.

Under TRITON_INTERPRET the same code runs on the CPU, which is how it is tested without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib import import_module

import torch
import torch.nn.functional as F

from ..attention import LayerCache, StepRows
from ..errors import KernelUnavailable
from ..linear import Linear
from ..ops import Ops, RmsNorm
from . import elementwise
from .adapters import AttentionBackend, adapt_library
from .backends import (
    AttentionNeeds,
    BackendChoice,
    choose_backend,
    log_choice,
    probe_environment,
    supports_fp8,
)
from .experts import GroupedExperts
from .few_rows import FEW_ROWS, make_few_rows_product
from .fp8 import Fp8Linear
from .matmul import matmul
from .paged import PagedAttention
from .varlen import Varlen, copy_to_device, send_together, split_by_phase


@dataclass
class DeviceStepRows(StepRows):
    """The rows of a step on the device; `varlen` says the same to attention backends."""

    varlen: list[Varlen] = field(default_factory=list)  #: Runs of prefill and of decode.


class GpuLinear(Linear):
    """A linear layer by cuBLAS, with the residual inside the product's epilogue.

    Where the operations are `exact` the product is `matmul`, which has the same tile size for any
    number of rows.
    """

    _ops: GpuOps

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, gated: bool, ops: GpuOps
    ) -> None:
        self._weight = ops.keep(weight)
        self._bias = None if bias is None else ops.keep(bias)
        self._ops = ops
        self._gated = gated
        self._few_rows = None
        if not ops.exact:
            self._few_rows = make_few_rows_product(self._weight, bias=self._bias, gated=gated)

    def __call__(
        self,
        rows: torch.Tensor,
        norm: RmsNorm | None = None,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        rows = rows if norm is None else self._ops.norm(rows, norm)
        if self._few_rows is not None and len(rows) <= FEW_ROWS:
            return self._few_rows(rows, rows.dtype, residual=residual)
        out = self.product(rows, residual)
        return self._ops.silu_mul(out) if self._gated else out

    def product(self, rows: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Return rows W^T + bias + residual, where `residual` is [T, outputs] or None.

        cuBLAS adds to what is in its output: the residual's own memory, which needs no copy then.
        """
        if self._ops.exact:
            return matmul(rows, self._weight, self._bias, residual)
        if residual is None:
            return F.linear(rows, self._weight, self._bias)
        out = residual.addmm_(rows, self._weight.T)
        return out if self._bias is None else out.add_(self._bias)


class GpuOps(Ops):
    """Operations on `device`, which is a GPU, or the CPU under TRITON_INTERPRET.

    `Ops` says what each method takes and returns. `needs` is what attention has to compute,
    `max_model_len` is the length in tokens of the longest sequence, `setting` the name of an
    attention backend or "auto". With `fp8` linear layers and experts have weights in FP8 (e4m3), but
    for `precise` layers and shapes that `Fp8Linear` does not take. The constructor raises
    KernelUnavailable if the device cannot do what was asked.
    """

    #: `decode.DecodeRunner` can run steps of pure decode with these operations, the choice of the
    #: next ids included.
    device_steps = True

    def __init__(
        self,
        device: torch.device,
        needs: AttentionNeeds,
        max_model_len: int,
        setting: str,
        fp8: bool,
    ) -> None:
        if fp8 and needs.dtype == "float32" and device.type == "cuda":
            raise KernelUnavailable(
                "weights in FP8 are multiplied in bfloat16 only: set model.dtype bfloat16, or "
                "engine.weights model"
            )
        if fp8 and needs.exact:
            raise KernelUnavailable("exact: products of FP8 weights depend on the batch")
        environment = probe_environment(device)
        if fp8 and not supports_fp8(environment):
            raise KernelUnavailable("weights in FP8 need compute capability 8.9")
        self.device = device

        #: True: a row's bits do not depend on the rows beside it, as on a CPU.
        self.exact = needs.exact

        self._fp8 = fp8
        choice = choose_backend(environment, needs, setting)
        log_choice(choice)
        self.attention = _open_attention(
            choice, device, max_model_len=max_model_len, exact=needs.exact
        )
        self.name = f"gpu: {choice.name}"
        if isinstance(self.attention, PagedAttention) and needs.exact:
            # bits depend on the GPU and on where splits begin: peers compare both
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
        matrices: Iterable[tuple[torch.Tensor, torch.Tensor]],
        combine: Callable[[torch.Tensor], torch.Tensor] | None,
    ) -> GroupedExperts:
        """Return a mixture's experts. `combine` sums what the ranks compute; None: one rank."""
        return GroupedExperts(self, count, matrices, combine, fp8=self._fp8, exact=self.exact)

    def place(self, token_ids: torch.Tensor, step: StepRows) -> tuple[torch.Tensor, StepRows]:
        if isinstance(step, DeviceStepRows):
            return token_ids, step
        runs = split_by_phase(step.spans)
        host = [token_ids, step.positions, step.slot_blocks, step.slot_offsets]
        for run in runs:
            host += run.tensors
        token_ids, positions, slot_blocks, slot_offsets, *rest = send_together(host, self.device)
        device_step = DeviceStepRows(
            positions=positions,
            slot_blocks=slot_blocks,
            slot_offsets=slot_offsets,
            spans=step.spans,
            varlen=[
                run.on_device(rest[3 * index : 3 * index + 3]) for index, run in enumerate(runs)
            ],
        )
        return token_ids, device_step

    def place_indices(self, rows: torch.Tensor) -> torch.Tensor:
        return copy_to_device(rows, self.device)

    def attend(
        self,
        queries: torch.Tensor,
        cache: LayerCache,
        step: StepRows,
        *,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        assert isinstance(step, DeviceStepRows)
        results = [
            self.attention(
                queries[run.first_row : run.first_row + run.row_count],
                cache,
                run,
                scale=scale,
                window=window,
            )
            for run in step.varlen
        ]
        return results[0] if len(results) == 1 else torch.cat(results)

    def norm(self, rows: torch.Tensor, norm: RmsNorm) -> torch.Tensor:
        return elementwise.rms_norm(rows, norm)

    def silu_mul(self, gates_and_values: torch.Tensor) -> torch.Tensor:
        return elementwise.silu_mul(gates_and_values)

    def rope_store(
        self,
        qkv: torch.Tensor,
        cache: LayerCache,
        norms: tuple[RmsNorm, RmsNorm] | None,
        angles: tuple[torch.Tensor, torch.Tensor],
        step: StepRows,
    ) -> torch.Tensor:
        slots = step.slot_blocks, step.slot_offsets
        return elementwise.rope_store(qkv, cache, norms, angles=angles, slots=slots)


def _open_attention(
    choice: BackendChoice, device: torch.device, *, max_model_len: int, exact: bool
) -> AttentionBackend:
    """Import and return the attention backend that was chosen."""
    if choice.name == "triton":
        return PagedAttention(max_model_len, exact)
    return adapt_library(choice.name, import_module(choice.module), device)
