"""The backends that compute with `gpu/`: on a GPU, and on a CPU by Triton's interpreter.

What the methods take and return is said in `backend.Backend`. Triton is imported when operations
are made, behind the checks that need none of it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch

from ..kv_transfer import KVLayout
from .attention import StepRows
from .backend import BookToken
from .cpu_backend import CpuBackend
from .decoder import Decoder
from .errors import KernelUnavailable
from .gpu.backends import AttentionNeeds
from .gpu.layer_events import DeviceEvent, LayerCallbacks
from .gpu.memory import DevicePool
from .gpu.pipeline import DecodePipeline
from .memory import GpuMemory, check_gpu_memory, gpu_pool_bytes
from .ops import Ops
from .options import EngineOptions
from .pool import KVPool
from .scheduler import Scheduler
from .spec import ModelSpec

if TYPE_CHECKING:
    from .gpu.decode import DecodeRunner
    from .rank_processes import RankProcesses


#: The variables that set torch's allocator, the newer name first.
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


class InterpretedBackend(CpuBackend):
    """A GPU's operations on a CPU, under TRITON_INTERPRET: how they are tested without a GPU."""

    def make_ops(
        self,
        options: EngineOptions,
        spec: ModelSpec,
        device: torch.device,
        pool_tokens: int | None,
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
        # Attention is laid out for the longest sequence that is served, not for the longest that the
        # model knows: splits of a short context would be few, and workspaces large.
        longest_sequence = options.max_model_len or spec.max_positions
        if pool_tokens is not None:
            longest_sequence = min(longest_sequence, pool_tokens)
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
        _check_allocator(os.environ)
        for rank in range(ranks):
            free_bytes, total_bytes = torch.cuda.mem_get_info(rank)
            check_gpu_memory(spec, options, GpuMemory(rank, total_bytes, free_bytes))

    def open_device(self, rank: int) -> torch.device:
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)  # of this thread: Triton starts kernels there
        return device

    def size_pool(
        self,
        options: EngineOptions,
        device: torch.device,
        make_steps: Callable[[], list[Callable[[], None]]],
    ) -> int:
        step_bytes = sum(_peak_bytes(device, step) for step in make_steps())
        torch.cuda.empty_cache()  # what the steps took is free again, and counts as such
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        memory = GpuMemory(device.index or 0, total_bytes, free_bytes)
        held_bytes = torch.cuda.memory_reserved(device)
        return gpu_pool_bytes(options, memory, held_bytes=held_bytes, step_bytes=step_bytes)

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

    def mark_work(self) -> DeviceEvent | None:
        event = torch.cuda.Event()
        event.record()
        return event

    def claims_exactness(self, options: EngineOptions) -> bool:
        return options.dtype == "bfloat16" and options.exact

    def sums_in_any_order(self, options: EngineOptions) -> bool:
        return not options.exact

    def collective_device(self, rank: int) -> torch.device | None:
        return torch.device("cuda", rank)


def _check_allocator(environment: Mapping[str, str]) -> None:
    """Raises KernelUnavailable if torch would allocate memory that peers cannot be given."""
    for name in ALLOCATOR_VARIABLES:
        setting = environment.get(name, "")
        if "expandable_segments:true" in setting.replace(" ", "").lower():
            raise KernelUnavailable(
                f"{name}={setting}: a KV pool in expandable segments cannot be registered for "
                "transfers to other GPUs or hosts; take expandable_segments out of it"
            )


def _peak_bytes(device: torch.device, step: Callable[[], None]) -> int:
    """Returns how much more memory than before a step holds at a time, at most."""
    torch.cuda.reset_peak_memory_stats(device)
    before_bytes = torch.cuda.memory_allocated(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before_bytes
