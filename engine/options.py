"""What an engine is started with: its settings, and their defaults (pure: imports no torch).

`cluster.yaml` -> `EngineOptions` -> the engine, its scheduler and every rank process. A default is
written here and nowhere else.

`SchedulerSettings` and `ComputeSettings` are what operators set. The section `pools.*.engine` of
cluster.yaml (`cluster/config.py`) inherits from both: a field that is added to one of them is a
setting at once, with its default and its bounds, and reaches the engine. The fields of
`SchedulerLimits` and `EngineOptions` are filled in by whoever starts the engine.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias

from annotated_types import Ge, Gt, Le

Count: TypeAlias = Annotated[int, Ge(1)]  #: A number of things, at least one.
BlockTokens: TypeAlias = Literal[64, 128, 256]  #: What operators may choose from.
Dtype: TypeAlias = Literal["bfloat16", "float32"]  #: What a model may be computed in.
Device: TypeAlias = Literal["cpu", "cuda"]  #: Names of `backend_registry.BACKENDS`.
#: cpp and torch are for CPUs, the others libraries for GPUs; auto takes the fastest that runs.
AttentionKernels: TypeAlias = Literal[
    "auto", "fa3", "fa2", "fa4", "flashinfer", "triton", "cpp", "torch"
]

#: Tokens of a KV block by default: as many as one content hash covers, so that prefixes are shared
#: in the smallest steps; and what the C++ attention kernels know.
BLOCK_TOKENS: Final = 64


#: Of a KV pool whose size nobody gave, in host memory.
DEFAULT_KV_BYTES: Final = 256 << 20


@dataclass(frozen=True, kw_only=True)
class SchedulerSettings:
    """What operators set of a step. The bounds hold for cluster.yaml; tests may go below them."""

    max_step_tokens: Annotated[int, Ge(64)] = 512  #: Prefill tokens of one step, at most.
    max_running: Count = 64  #: Sequences that prefill or decode at a time, at most.
    #: Tokens of an answer whose room is reserved from the start, at most. A longer answer gets more
    #: as it grows, and may have to wait for it (preemption).
    growth_tokens: Count = 256
    #: Tokens that n-grams guess for a decoding sequence and one step verifies, at most; 0: none.
    draft_tokens: Annotated[int, Ge(0), Le(16)] = 0


@dataclass(frozen=True, kw_only=True)
class ComputeSettings:
    """What operators set of the hardware, and of how it computes."""

    threads: Count = 1  #: CPU threads that compute in each rank's process.
    #: On a CPU, with our own engine: also compute on cores of other workers of this machine while
    #: these have nothing to compute, and lend them one's own. Needs cores enough for all threads.
    share_idle_cores: bool = True
    device: Device = "cpu"  #: With `cuda`, rank r takes the r-th GPU.
    #: The library that computes attention: auto, cpp or torch on a CPU; auto or another on a GPU.
    attention: AttentionKernels = "auto"
    #: On a GPU: results do not depend on the batch in any bit, for a price. On a CPU they never do.
    exact: bool = False
    #: Type of the numbers in the KV pool, on a GPU; None: the type that the model computes in.
    kv_dtype: Literal["float8_e4m3fn"] | None = None
    weights: Literal["model", "fp8"] = "model"  #: On a GPU, `fp8` quantizes them at load.
    #: On a GPU without a given size of the KV pool: the share of the GPU's memory that weights,
    #: steps and pool take together. Two engines on one GPU share it.
    gpu_memory_share: Annotated[float, Gt(0), Le(1)] = 0.9


@dataclass(frozen=True)
class SchedulerLimits(SchedulerSettings):
    """What a step, and the pool between steps, may hold. Checked when it is made."""

    block_tokens: int = BLOCK_TOKENS  #: Tokens whose KV a block holds.
    #: Share of the pool, rounded up to blocks, that newcomers leave to sequences that get longer:
    #: without it, each newcomer into a full pool would soon be preempted again.
    watermark: float = 0.02
    #: Share of a prefill worker's pool that sequences may hold whose KV is sent elsewhere. The rest
    #: stays with the prefix cache, however slow the receivers are.
    held_share: float = 0.75
    #: Seconds that a step with decodes may take, a little below the target for the gap between two
    #: tokens (ITL); None: no limit.
    itl_budget_s: float | None = None
    draft_below: int = 8  #: No guesses while more sequences run: their rows are no longer cheap.
    #: When decode leaves no time for prefill, every so many steps prefill a block all the same, so
    #: that no prompt starves.
    prefill_every: int = 8

    def __post_init__(self) -> None:
        assert self.max_step_tokens >= self.block_tokens > 0, self
        assert self.max_running > 0 and self.prefill_every > 0, self
        assert 0 <= self.watermark < 1 and 0 < self.held_share <= 1, self


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeLimits:
    """What a decode step that a device runs by itself may hold: its buffers have these sizes."""

    rows: int  #: Rows of a step, at most.
    max_model_len: int  #: Tokens of a sequence, at most.
    block_tokens: int  #: Tokens of a KV block.


@dataclass(frozen=True)
class EngineOptions(ComputeSettings):
    """The model, the hardware that computes it, and the limits of its scheduler.

    Travels to the rank processes as MessagePack (`rank_processes.RankAssignment`).
    """

    model_folder: Path  #: The checkpoint, in Hugging Face format.
    dtype: Dtype = "bfloat16"  #: What the model is computed in, whatever the checkpoint has.
    #: Of each rank's KV pool; bounds `max_model_len` (`sizing.py`). None, on a GPU: what
    #: `gpu_memory_share` leaves beside the weights and the largest step.
    kv_bytes: int | None = DEFAULT_KV_BYTES
    max_model_len: int | None = None  #: In tokens; None: the model's, or what the pool holds.
    limits: SchedulerLimits = field(default_factory=SchedulerLimits)
    kernels: str = "auto"  #: Of a CPU: auto (the fastest) | amx | avx512 | avx2 | torch
    tensor_parallel: int = 1  #: Processes that share the model.
    cores: tuple[int, ...] = ()  #: Those that the engine's thread is bound to; empty: any.
    core_states: Path | None = None  #: By which engines share idle cores (`core_sharing.py`).
    shared_kv: bool = False  #: True if other processes can map the KV pool.
    rank_program: str = "diptych.engine.rank_follower"  #: The module that ranks above 0 run.
    #: With vLLM as the engine (`engine/vllm/`): further arguments of its `EngineArgs`, by name.
    vllm_arguments: dict[str, Any] = field(default_factory=dict)
    #: With vLLM as the engine: the folders of LoRA adapters, by the names that requests have.
    adapters: dict[str, Path] = field(default_factory=dict)

    @property
    def pool_dtype(self) -> str:
        """The type of the numbers in the KV pool."""
        return self.kv_dtype or self.dtype
