"""The backends that compute with `gpu/`: on a GPU, and on a CPU by Triton's interpreter.

What the methods take and return is said in `backend.Backend`. Triton is imported when operations
are made, behind the checks that need none of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from ..kv_transfer import KVLayout
from .attention import StepRows
from .backend import BookToken
from .cpu_backend import CpuBackend
from .decoder import Decoder
from .errors import KernelUnavailable
from .gpu.backends import AttentionNeeds
from .gpu.layer_events import LayerCallbacks
from .gpu.memory import DevicePool
from .gpu.pipeline import DecodePipeline
from .ops import Ops
from .options import EngineOptions
from .pool import KVPool
from .scheduler import Scheduler
from .spec import ModelSpec

if TYPE_CHECKING:
    from .gpu.decode import DecodeRunner
    from .rank_processes import RankProcesses


class InterpretedBackend(CpuBackend):
    """A GPU's operations on a CPU, under TRITON_INTERPRET: how they are tested without a GPU."""

    def make_ops(
        self, options: EngineOptions, spec: ModelSpec, device: torch.device, pool_tokens: int
    ) -> tuple[Ops, str]:
        try:
            from .gpu.ops import GpuOps
        except ImportError as error:
            raise KernelUnavailable(f"{error}: pip install 'diptych[gpu]'") from None
        need = AttentionNeeds(
            dtype=options.dtype,
            kv_dtype=options.pool_dtype,
            block_tokens=options.limits.block_tokens,
            head_dim=spec.head_dim,
            exact=options.exact,
        )
        # attention is laid out for it; a longer one has no positions, or no room in the pool
        longest_sequence = min(spec.max_positions, pool_tokens)
        fp8_weights = options.weights == "fp8"
        ops = GpuOps(device, need, longest_sequence, options.attention, fp8=fp8_weights)
        return ops, ops.name

    def make_decode_runner(
        self,
        decoder: Decoder,
        ops: Ops,
        row_limit: int,
        max_model_len: int,
        block_tokens: int,
        ranks: RankProcesses | None,
    ) -> DecodeRunner | None:
        from .gpu.decode import DecodeRunner
        from .gpu.ops import GpuOps

        assert isinstance(ops, GpuOps)
        runner = DecodeRunner(
            decoder, ops, row_limit, max_model_len, block_tokens=block_tokens, ranks=ranks
        )
        runner.capture()
        return runner

    def make_pipeline(
        self,
        runner: DecodeRunner | None,
        scheduler: Scheduler,
        book_token: BookToken,
        max_model_len: int,
    ) -> DecodePipeline | None:
        assert runner is not None
        return DecodePipeline(runner, scheduler, book_token, max_model_len)


class CudaBackend(InterpretedBackend):
    """`backend.Backend` in the memory of GPUs, of which rank r has the r-th; sums go by NCCL."""

    collective_library = "nccl"

    def check(self, options: EngineOptions, spec: ModelSpec) -> None:
        ranks = options.tensor_parallel
        devices = torch.cuda.device_count()
        if not devices:
            raise KernelUnavailable(f"device {options.device}: torch finds no CUDA device here")
        if devices < ranks:
            raise KernelUnavailable(f"{ranks} ranks need a GPU each: this process sees {devices}")

    def open_device(self, rank: int) -> torch.device:
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)  # of this thread: Triton starts kernels there
        return device

    def make_pool(
        self, options: EngineOptions, layout: KVLayout, blocks: int, device: torch.device
    ) -> KVPool:
        return DevicePool(layout, blocks, getattr(torch, layout.dtype), device)

    def compute_hidden(
        self,
        decoder: Decoder,
        ids: torch.Tensor,
        meta: StepRows,
        after: Callable[[int], None] | None,
    ) -> torch.Tensor:
        if after is None:
            return decoder.hidden(ids, meta)
        behind = LayerCallbacks(after, torch.cuda.Event)
        hidden = decoder.hidden(ids, meta, behind.launched)
        behind.finish()
        return hidden

    def claims_exactness(self, options: EngineOptions) -> bool:
        return options.dtype == "bfloat16" and options.exact

    def sums_in_any_order(self, options: EngineOptions) -> bool:
        return not options.exact

    def collective_device(self, rank: int) -> torch.device | None:
        return torch.device("cuda", rank)
