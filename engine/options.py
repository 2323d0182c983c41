"""What an engine is started with: one struct, one set of defaults (pure: imports no torch).

`cluster.yaml` -> `EngineOptions` -> the engine, its scheduler and every rank process. A default of
an engine outside a cluster is written here and nowhere else; `cluster.yaml` has defaults of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """What a step, and the pool between steps, may hold. Checked when it is made."""

    block_tokens: int = 64
    max_step_tokens: int = 512  #: prefill tokens of one step
    max_running: int = 128  #: sequences that decode together
    growth_tokens: int = 256  #: reserved behind a sequence's ids, at most
    watermark: float = 0.02  #: share of the pool, rounded up, that newcomers leave for growth
    held_share: float = 0.75  #: of the pool, for prefills that wait for their transfer or will
    itl_budget_s: float | None = None  #: how long a step with decodes may take; None: no limit
    draft_tokens: int = 0  #: guesses of a decoding sequence that a step verifies, at most
    draft_below: int = 8  #: no guesses while more sequences run: their rows are no longer cheap
    prefill_every: int = 8  #: steps over the budget after which a block is prefilled all the same

    def __post_init__(self) -> None:
        assert self.max_step_tokens >= self.block_tokens > 0, self
        assert self.max_running > 0 and self.prefill_every > 0, self
        assert 0 <= self.watermark < 1 and 0 < self.held_share <= 1, self


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The model, the hardware that computes it, and the limits of its scheduler.

    Travels to the rank processes as MessagePack (`rank_processes.RankAssignment`).
    """

    model_folder: Path
    dtype: str = "bfloat16"
    kv_bytes: int = 256 << 20  #: of each rank's KV pool; bounds `max_model_len` (`sizing.py`)
    max_model_len: int | None = None  #: tokens; None: the model's, or what the pool holds
    threads: int = 1  #: of each rank
    limits: SchedulerLimits = field(default_factory=SchedulerLimits)
    kernels: str = "auto"  #: auto | avx512 | torch
    tensor_parallel: int = 1  #: processes that share the model
    cores: tuple[int, ...] = ()  #: that the thread which steps is bound to; none: any
    shared_kv: bool = False  #: other processes can map the KV pool
    rank_program: str = "diptych.engine.rank_follower"  #: the module that ranks above 0 run
    device: str = (
        "cpu"  #: a name of `backend_registry.BACKENDS`: cpu | cuda (rank r takes the r-th GPU)
    )
    attention: str = "auto"  #: auto | cpp | torch on a CPU; auto | a name of `gpu.backends`
    exact: bool = False  #: a GPU's bits do not depend on the batch either, for a price
    kv_dtype: str | None = None  #: None: `dtype`; float8_e4m3fn on a GPU
    weights: str = "model"  #: model | fp8: quantized at load, on a GPU

    @property
    def pool_dtype(self) -> str:
        """The type of the numbers in the KV pool."""
        return self.kv_dtype or self.dtype
