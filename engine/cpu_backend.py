"""The backend of CPUs: C++ kernels where they run, torch everywhere else.

The C++ kernels compute in bfloat16 and need AVX2 and a compiler. Torch, too, is exact only
in bfloat16: in other types a row's products depend on how many rows are computed beside it. What
the methods take and return is said in `backend.Backend`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from ..kv_transfer import KVLayout
from .attention import StepRows
from .backend import BookToken
from .decoder import Decoder
from .errors import KernelUnavailable
from .kernels import NativeOps, native_ops
from .memory import available_memory, check_memory
from .ops import Ops
from .options import DEFAULT_KV_BYTES, DecodeLimits, EngineOptions
from .pool import KVPool
from .scheduler import Scheduler
from .spec import ModelSpec

if TYPE_CHECKING:
    from .gpu.decode import DecodeRunner
    from .gpu.layer_events import DeviceEvent
    from .gpu.pipeline import DecodePipeline
    from .rank_processes import RankProcesses


class CpuBackend:
    """`backend.Backend` in this machine's memory; ranks add up by gloo, in rank order."""

    collective_library = "gloo"

    def check(self, options: EngineOptions, spec: ModelSpec) -> None:
        # every rank has a pool of this size
        kv_bytes = (options.kv_bytes or DEFAULT_KV_BYTES) * options.tensor_parallel
        ranks = options.tensor_parallel
        check_memory(spec, options.dtype, kv_bytes, available_memory(), ranks=ranks)

    def open_device(self, rank: int) -> torch.device:
        return torch.device("cpu")

    def make_ops(
        self,
        options: EngineOptions,
        spec: ModelSpec,
        device: torch.device,
        pool_tokens: int | None,
    ) -> tuple[Ops, str]:
        # `exact` chooses among a GPU's kernels; those of a CPU are exact in bfloat16 anyway.
        if options.pool_dtype != options.dtype or options.weights != "model" or options.exact:
            raise KernelUnavailable("kv_dtype, weights and exact are settings of a GPU's engine")
        # With `attention: cpp` it is an error if the C++ kernels cannot be used. Otherwise torch
        # computes: by the options, or because the kernels are unavailable, and then the name says
        # why they are.
        torch_named = "torch" in (options.kernels, options.attention)
        if (options.dtype != "bfloat16" or torch_named) and options.attention != "cpp":
            return Ops(), "torch"
        try:
            ops = _native_ops(options, spec)
        except KernelUnavailable as error:
            if options.attention == "cpp":
                raise
            return Ops(), f"torch: {error}"
        return ops, ops.name

    def size_pool(
        self,
        options: EngineOptions,
        device: torch.device,
        make_steps: Callable[[], list[Callable[[], None]]],
    ) -> int:
        return options.kv_bytes or DEFAULT_KV_BYTES

    def make_pool(
        self, options: EngineOptions, layout: KVLayout, blocks: int, device: torch.device
    ) -> KVPool:
        return KVPool(layout, blocks, getattr(torch, layout.dtype), options.shared_kv)

    def compute_hidden(
        self,
        decoder: Decoder,
        token_ids: torch.Tensor,
        step: StepRows,
        layer_written: Callable[[int], None] | None,
    ) -> torch.Tensor:
        return decoder.hidden(token_ids, step, layer_written)

    def mark_work(self) -> DeviceEvent | None:
        return None

    def make_decode_runner(
        self, decoder: Decoder, ops: Ops, limits: DecodeLimits, *, ranks: RankProcesses | None
    ) -> DecodeRunner | None:
        return None

    def make_pipeline(
        self,
        runner: DecodeRunner | None,
        scheduler: Scheduler,
        book_token: BookToken,
        max_model_len: int,
    ) -> DecodePipeline | None:
        return None

    def claims_exactness(self, options: EngineOptions) -> bool:
        return options.dtype == "bfloat16"

    def sums_in_any_order(self, options: EngineOptions) -> bool:
        return False

    def collective_device(self, rank: int) -> torch.device | None:
        return None


def _native_ops(options: EngineOptions, spec: ModelSpec) -> NativeOps:
    """Returns the C++ kernels that the options name, or the fastest. Raises KernelUnavailable."""
    if options.dtype != "bfloat16":
        raise KernelUnavailable(f"the C++ kernels do not compute in {options.dtype}")
    return native_ops(spec.head_dim, options.threads, options.kernels)
