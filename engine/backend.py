"""The hardware that an engine computes on, behind one interface.

The engine, the model and the ranks ask a `Backend` for everything that differs between a CPU and a
GPU: the device, the KV pool's memory, the kernels, decode steps whose tokens the device draws
itself, and how ranks add up. A backend is a small object without state.

`backend_registry.open_backend` makes the one that the options name. There are `cpu_backend.py` and
`gpu_backend.py`.

*Exact* means that a row's bits do not depend on the rows that are computed beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import torch

from ..kv_transfer import KVLayout
from ..protos.frames import Token
from .attention import StepRows
from .decoder import Decoder
from .ops import Ops
from .options import DecodeLimits, EngineOptions
from .pool import KVPool
from .sampler import SamplingFault
from .scheduler import Scheduler
from .sequence import Sequence, SequenceOutput
from .spec import ModelSpec

if TYPE_CHECKING:
    from .gpu.decode import DecodeRunner
    from .gpu.layer_events import DeviceEvent
    from .gpu.pipeline import DecodePipeline
    from .rank_processes import RankProcesses

#: books the token that the device drew for a sequence, or why there is none; returns what to
#: deliver, or None if that is nothing
BookToken = Callable[[Sequence, Token | SamplingFault], SequenceOutput | None]


class Backend(Protocol):
    """What differs between kinds of hardware."""

    #: torch.distributed's library for sums over ranks: gloo | nccl
    collective_library: str

    def check(self, options: EngineOptions, spec: ModelSpec) -> None:
        """Checks that this machine has what the options need, before a weight is read.

        Raises KernelUnavailable (too few devices) or OutOfMemory (the model does not fit).
        """
        ...

    def open_device(self, rank: int) -> torch.device:
        """Returns this rank's device, and makes it the calling thread's."""
        ...

    def make_ops(
        self,
        options: EngineOptions,
        spec: ModelSpec,
        device: torch.device,
        pool_tokens: int | None,
    ) -> tuple[Ops, str]:
        """Returns the fastest operations that run here, and their name.

        The name gives the reason where slower operations are taken. `spec` is the whole model's,
        `pool_tokens` how many tokens the KV pool holds; None: nobody knows yet. Raises
        KernelUnavailable if what the options name cannot run here.
        """
        ...

    def size_pool(
        self,
        options: EngineOptions,
        device: torch.device,
        make_steps: Callable[[], list[Callable[[], None]]],
    ) -> int:
        """Returns the bytes of this rank's KV pool, once the weights are loaded.

        `make_steps` returns the largest steps (`largest_step`), for who has to know their memory.
        Raises OutOfMemory if pool and steps do not fit beside the weights.
        """
        ...

    def make_pool(
        self, options: EngineOptions, layout: KVLayout, blocks: int, device: torch.device
    ) -> KVPool:
        """Allocates the KV pool. Raises OutOfMemory."""
        ...

    def compute_hidden(
        self,
        decoder: Decoder,
        token_ids: torch.Tensor,
        step: StepRows,
        layer_written: Callable[[int], None] | None,
    ) -> torch.Tensor:
        """Returns the last layer's rows, [T, hidden], of `token_ids` int64 [T].

        `step` says where these rows are in their sequences. `layer_written(layer)`, if there is
        one, is called once that layer's KV can be read.
        """
        ...

    def mark_work(self) -> DeviceEvent | None:
        """Returns a point behind all that the calling thread has launched; None on a CPU.

        A GPU computes behind the host's back: until it has passed the point, no other than the
        engine's own steps may read or write what these touch.
        """
        ...

    def make_decode_runner(
        self, decoder: Decoder, ops: Ops, limits: DecodeLimits, *, ranks: RankProcesses | None
    ) -> DecodeRunner | None:
        """Returns what runs decode steps, sampling included, on the device; None on a CPU.

        Steps stay within `limits`. `ranks` are the other ranks, which get every step; None if there
        are none, or this is one of them.
        """
        ...

    def make_pipeline(
        self,
        runner: DecodeRunner | None,
        scheduler: Scheduler,
        book_token: BookToken,
        max_model_len: int,
    ) -> DecodePipeline | None:
        """Returns what keeps `runner` one step ahead of the host; None where there is no runner."""
        ...

    def claims_exactness(self, options: EngineOptions) -> bool:
        """Returns whether a row's bits shall not depend on the batch; a check at start proves it."""
        ...

    def sums_in_any_order(self, options: EngineOptions) -> bool:
        """Returns whether sums over ranks may have any order, as nobody asked for exactness."""
        ...

    def collective_device(self, rank: int) -> torch.device | None:
        """Returns the device that the collective library binds this rank to; None for gloo."""
        ...
