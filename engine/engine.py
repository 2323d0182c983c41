"""The engine of one replica. Main path: `step()` = plan, run the decoder, sample, book.

It knows no network and no role: a prefill worker adds sequences that stop after their first token
and keeps their blocks until `release`; a decode worker reserves blocks and commits sequences whose
KV has arrived; a mixed worker just adds. One runner serves all three.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ..protos.frames import Key
from .attention import Attend, Meta, Piece, attend, is_exact
from .blocks import BlockPool
from .decoder import Decoder
from .kernels import CppAttention, KernelUnavailable
from .loader import load
from .pool import KVPool
from .sampler import sample
from .scheduler import Limits, Plan, Scheduler
from .sequence import Output, Sequence
from .sizing import context_limit, kv_layout
from .spec import fingerprint, read_spec

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """`kv_bytes` is the size of the KV pool; it bounds `max_model_len` (`sizing.py`)."""

    model: Path
    dtype: str = "bfloat16"
    kv_bytes: int = 256 << 20
    max_model_len: int | None = None  #: default: the model's, or what the pool holds
    threads: int = 1
    limits: Limits = field(default_factory=Limits)
    attention: str = "auto"  #: auto | torch


class Engine:
    """Not thread safe: one thread owns it (`loop.EngineThread`)."""

    def __init__(
        self, config: EngineConfig, progress: Callable[[str, float], None] | None = None
    ) -> None:
        torch.set_num_threads(config.threads)  # as many as cores in two processes collapse
        self.config = config
        self.spec = read_spec(config.model)
        layout = kv_layout(self.spec, config.dtype, config.limits.block_tokens)
        self.max_model_len = context_limit(self.spec, layout, config.kv_bytes, config.max_model_len)
        blocks = config.kv_bytes // layout.block_bytes
        weights = load(config.model, self.spec, DTYPES[config.dtype], progress)
        self.kv = KVPool(layout, blocks, DTYPES[config.dtype])
        self.scheduler = Scheduler(BlockPool(blocks), config.limits)
        spec, bf16 = self.spec, config.dtype == "bfloat16"
        attention, self.attention = _attention(config, spec.head_dim)
        self.exact = bf16 and is_exact(attention, spec.heads, spec.kv_heads, spec.head_dim)
        self._decoder = Decoder(spec, weights, self.kv, attention)
        backend = self.attention.split(":")[0].encode()  # another one has other last bits
        self.compatibility = layout.compatibility(fingerprint(config.model) + backend)
        self.steps = 0
        self.prefill_tokens, self.prefill_seconds = 0, 0.0

    # ---- sequences ---------------------------------------------------------------------------

    def add(self, seq: Sequence) -> None:
        """Prefills `seq`, then decodes it (or holds its blocks, if it stops after the first)."""
        assert 0 < seq.prompt <= len(seq.ids) < self.max_model_len, (seq.prompt, len(seq.ids))
        self.scheduler.add(seq)

    def reserve(self, seq: Sequence) -> list[int] | None:
        return self.scheduler.reserve(seq)

    def commit(self, seq: Sequence) -> None:
        self.scheduler.commit(seq)

    def drop(self, key: Key) -> None:
        """Ends a sequence wherever it is; its blocks are free before the next step."""
        self.scheduler.remove(key)

    # ---- stepping ----------------------------------------------------------------------------

    def step(self) -> list[Output]:
        """Runs one step over all live sequences; [] when there is nothing to do."""
        plan = self.scheduler.plan()
        if not plan:
            return []
        began = time.perf_counter()
        sequences = [(seq, count) for seq, count in plan.prefill]
        sequences += [(seq, 1) for seq in plan.decode]
        logits = self._run(plan, sequences)
        outputs = [
            self._book(seq, count, logits[index]) for index, (seq, count) in enumerate(sequences)
        ]
        self.steps += 1
        if plan.prefill:
            self.prefill_tokens += sum(count for _, count in plan.prefill)
            self.prefill_seconds += time.perf_counter() - began
        return [output for output in outputs if output]

    def _run(self, plan: Plan, sequences: list[tuple[Sequence, int]]) -> torch.Tensor:
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        last: list[int] = []
        pieces: list[Piece] = []
        size = self.config.limits.block_tokens
        for index, (seq, count) in enumerate(sequences):
            start, end = seq.computed, seq.computed + count
            table = seq.blocks[: -(-end // size)]
            pieces.append(Piece(len(ids), count, start, table, index >= len(plan.prefill)))
            ids += seq.ids[start:end]
            positions += range(start, end)
            slots += [table[position // size] for position in range(start, end)]
            last.append(len(ids) - 1)
        at = torch.tensor(positions)
        meta = Meta(at, torch.tensor(slots), at % size, pieces)
        return self._decoder.forward(torch.tensor(ids), meta, torch.tensor(last))

    def _book(self, seq: Sequence, count: int, logits: torch.Tensor) -> Output | None:
        complete = self.scheduler.computed(seq, count)
        filled = seq.computed // self.config.limits.block_tokens
        if not complete:
            return Output(seq.key, filled=seq.blocks[:filled]) if seq.stop_after_first else None
        offset = seq.generated
        token = sample(logits, seq.sampling, len(seq.ids))
        filled = self.scheduler.blocks_for(seq.computed)
        blocks = seq.blocks[:filled] if seq.stop_after_first else []
        finish = self.scheduler.sampled(seq, token.id)
        return Output(seq.key, offset, token, finish, blocks, seq.hit)

    def statistics(self) -> dict:
        scheduler, pool = self.scheduler, self.scheduler.pool
        held = sum(map(len, scheduler.held.values()))
        return {
            "steps": self.steps,
            "exact": self.exact,
            "attention": self.attention,
            "dtype": self.config.dtype,
            "waiting": len(scheduler.waiting),
            "prefilling": len(scheduler.filling),
            "running": len(scheduler.running),
            "preemptions": scheduler.preemptions,
            "kv_blocks": {
                "total": pool.total,
                "free": pool.available - pool.cached,
                "cached": pool.cached,
                "reserved": held,
                "active": pool.used - held,
            },
        }


def _attention(config: EngineConfig, head_dim: int) -> tuple[Attend, str]:
    """The fastest attention that runs here, and its name (with the reason, if it is torch's)."""
    if config.dtype != "bfloat16" or config.attention == "torch":
        return attend, "torch"
    try:
        kernel = CppAttention(head_dim, config.threads)
    except KernelUnavailable as error:
        return attend, f"torch: {error}"
    return kernel, kernel.name
