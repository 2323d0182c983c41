"""The backends that compute with `gpu/`: on a GPU, and on a CPU by Triton's interpreter.

What the methods take and return is said in `backend.Backend`. *Exact* means, as there, that a row's
bits do not depend on the rows that are computed beside it.

Triton is first imported by `make_ops`: `check`, which runs before it, works without Triton.
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
from .options import DecodeLimits, EngineOptions
from .pool import KVPool
from .scheduler import Scheduler
from .spec import ModelSpec

if TYPE_CHECKING:
    from .gpu.decode import DecodeRunner
    from .rank_processes import RankProcesses


#: The variables that set torch's allocator, the newer name first.
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


class InterpretedBackend(CpuBackend):
    """Computes with a GPU's operations on a CPU, under TRITON_INTERPRET, as tests of them do.

    All else is as with `CpuBackend`.
    """

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
        # Attention is laid out for the longest sequence that is served. If it were laid out for the
        # longest that the model knows, a short context would be cut into few splits, and
        # workspaces would be larger than they need to be.
        longest_sequence = options.max_model_len or spec.max_positions
        if pool_tokens is not None:
            longest_sequence = min(longest_sequence, pool_tokens)
        fp8_weights = options.weights == "fp8"
        ops = GpuOps(device, need, longest_sequence, options.attention, fp8=fp8_weights)
        return ops, ops.name

    def make_decode_runner(
        self, decoder: Decoder, ops: Ops, limits: DecodeLimits, *, ranks: RankProcesses | None
    ) -> DecodeRunner | None:
        from .gpu.decode import DecodeRunner
        from .gpu.ops import GpuOps

        assert isinstance(ops, GpuOps)
        runner = DecodeRunner(decoder, ops, limits, ranks=ranks)
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
        # The steps are the largest one with a prompt and the largest one of decode alone. They run
        # one after the other, but both peaks count: the CUDA graphs of decode keep memory of their
        # own, which steps with a prompt cannot use. The second peak has the buffers of sampling in
        # it, which are allocated once the pool is there.
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
        token_ids: torch.Tensor,
        step: StepRows,
        layer_written: Callable[[int], None] | None,
    ) -> torch.Tensor:
        if layer_written is None:
            return decoder.hidden(token_ids, step)
        callbacks = LayerCallbacks(layer_written, torch.cuda.Event)
        hidden = decoder.hidden(token_ids, step, callbacks.launched)
        callbacks.finish()
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
    """Runs a step; returns the peak of its memory in bytes, beyond what was allocated before."""
    torch.cuda.reset_peak_memory_stats(device)
    before_bytes = torch.cuda.memory_allocated(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before_bytes
