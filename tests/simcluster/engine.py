"""The engine of a simulated worker: our own `Engine` around a model that is a hash.

Everything is real but the model: scheduler, blocks, prefix cache, sampler, and what an engine says
of them. The KV of a token is eight bytes of a hash chain over all tokens up to it. The logits of a
token depend on the KV of *all* tokens before it, as it lies in the pool. So whoever reads a block
that was not transferred, was transferred wrongly, or was used again too early, gets other tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import xxhash
from diptych.engine.attention import StepRows
from diptych.engine.batch import StepBatch
from diptych.engine.blocks import BlockPool
from diptych.engine.commands import EngineCommand, EngineEvent
from diptych.engine.engine import Engine, _ignore_filled, no_tier_blocks
from diptych.engine.engine_like import Deliver
from diptych.engine.loop import EngineThread
from diptych.engine.options import EngineOptions
from diptych.engine.scheduler import Scheduler, StepPlan
from diptych.engine.step_counters import StepCounters
from diptych.kv_transfer import KVLayout
from diptych.kv_transfer.slices import piece_count

from .clock import VirtualLoop

VOCAB = 64
LAYERS = 2
DIM = 2
BLOCK_TOKENS = 64
#: Eight bytes a token: two layers, K and V, two numbers of a byte each.
LAYOUT = KVLayout(LAYERS, 1, DIM, BLOCK_TOKENS, 1, "uint8", 1)
SALT = b"simulated model."
MAX_MODEL_LEN = 1_000

STEP_S = 0.004  #: what a step takes
PREFILL_TOKEN_S = 0.0002  #: and for each token of a prompt
_MULTIPLIERS = np.random.default_rng(7).integers(1, 2**63, VOCAB, dtype=np.uint64) | np.uint64(1)


class HashPool:
    """The KV blocks of one worker, in the layout of our own engine."""

    memory = "DRAM"
    device = 0
    fd = None
    digester = None
    digest_kind = b""
    layout = LAYOUT
    block_bytes = LAYOUT.block_bytes

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.size = blocks * self.block_bytes
        self._bytes = np.zeros(self.size, np.uint8)
        self.base = self._bytes.ctypes.data
        self.view = memoryview(self._bytes).cast("B")
        #: [block, layer, K or V, token, number]
        self.numbers = self._bytes.reshape(blocks, LAYERS, 2, BLOCK_TOKENS, DIM)

    def chain(self, blocks: list[int], tokens: int) -> np.ndarray:
        """Returns the KV of a sequence's first tokens: uint8 [tokens, 8]."""
        gathered = self.numbers[blocks].transpose(0, 3, 1, 2, 4)
        return gathered.reshape(-1, LAYERS * 2 * DIM)[:tokens]


class HashModel:
    """Stands for `RankModel`."""

    rank_processes = None
    kernels = "hash"

    def __init__(self, pool: HashPool) -> None:
        self.kv = pool
        self._digests: list[int] = []  #: of the last step's rows

    def hidden(
        self,
        token_ids: torch.Tensor,
        rows: StepRows,
        after_layer: Callable[[int], None] | None = None,
    ) -> torch.Tensor:
        """Writes the KV of the rows, a layer after the other; returns the rows' numbers."""
        ids = token_ids.tolist()
        links = np.empty((len(ids), LAYERS * 2 * DIM), np.uint8)
        for span in rows.spans:
            before = SALT
            if span.first_position:
                before = self.kv.chain(span.blocks, span.first_position)[-1].tobytes()
            for row in range(span.first_row, span.first_row + span.row_count):
                before = xxhash.xxh3_64_digest(before + ids[row].to_bytes(4))
                links[row] = np.frombuffer(before, np.uint8)
        blocks = rows.slot_blocks.numpy()
        offsets = rows.slot_offsets.numpy()
        parts = links.reshape(-1, LAYERS, 2, DIM)
        for layer in range(LAYERS):
            self.kv.numbers[blocks, layer, :, offsets] = parts[:, layer]
            if after_layer:
                after_layer(layer)
        self._digests = [0] * len(ids)
        for span in rows.spans:
            last_row = span.first_row + span.row_count - 1
            seen = self.kv.chain(span.blocks, span.end_position).tobytes()
            self._digests[last_row] = xxhash.xxh3_64_intdigest(seen)
        return torch.arange(len(ids))

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Returns logits [rows, VOCAB], each row a function of all KV that it sees."""
        digests = np.array([self._digests[row] for row in hidden[rows].tolist()], np.uint64)
        mixed = digests[:, None] * _MULTIPLIERS[None]
        return torch.from_numpy((mixed >> np.uint64(40)).astype(np.float32) / 2**22)

    def copy(self, source: int, target: int) -> None:
        self.kv.numbers[target] = self.kv.numbers[source]


class HashEngine(Engine):
    """Our engine around a `HashModel`. It is opened like any other engine."""

    def __init__(self, options: EngineOptions, blocks: int) -> None:
        """Makes what `Engine` makes of a checkpoint; `blocks` can be used."""
        self.options = options
        self.kv_pool = HashPool(blocks + 1)  # type: ignore[assignment]
        self._model = HashModel(self.kv_pool)  # type: ignore[assignment, arg-type]
        self.max_model_len = min(MAX_MODEL_LEN, blocks * BLOCK_TOKENS - 1)
        self.kernels = "hash"
        self.scheduler = Scheduler(BlockPool(blocks + 1), options.limits, SALT)
        self.exact = True
        self.compatibility = LAYOUT.compatibility(SALT)
        self.format_facts = {"engine": "simulated"}
        self.piece_count = piece_count(LAYOUT, 1)
        self._grammars = None  # type: ignore[assignment]
        self._pipeline = None
        self._launched = None
        self.core_sharing = None
        self._backend: Any = _NoDevice()
        self.spec: Any = _Spec()
        self.announce_filled = _ignore_filled
        self.count_tier_blocks = no_tier_blocks
        self.counters = StepCounters()
        self.failed_steps = 0
        self.drafted_tokens = 0
        self.accepted_tokens = 0
        self.step_s = STEP_S  #: what the last step takes

    def step(self) -> list[Any]:
        self.step_s = STEP_S
        return super().step()

    def _account(self, plan: StepPlan, batch: StepBatch, seconds: float, *, helped: bool) -> None:
        """As by the clock, which stands still while a step is computed."""
        prompt_tokens = sum(count for _, count in plan.prefill)
        self.step_s = STEP_S + PREFILL_TOKEN_S * prompt_tokens
        super()._account(plan, batch, self.step_s, helped=helped)


class _NoDevice:
    def mark_work(self) -> None:
        """Nothing is launched: a step is done when it returns."""


class _Spec:
    layers = LAYERS


class VirtualEngineThread(EngineThread):
    """The engine's loop as timers of a virtual loop: a step takes time, and then its outputs come.

    What arrives during a step waits until its end, as for a thread.
    """

    def __init__(self, engine: HashEngine, deliver: Deliver) -> None:
        super().__init__(engine, deliver)
        self._hash_engine = engine
        self._virtual: Any = None
        self._awake = False
        self._alive = False

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self._virtual = loop
        self._alive = True
        self._wake()

    def submit(self, command: EngineCommand | None) -> None:
        super().submit(command)
        if self._alive:
            self._wake()

    def stop(self) -> None:
        self._alive = False

    @property
    def alive(self) -> bool:
        return self._alive

    def _wake(self, delay_s: float = 0.0) -> None:
        if not self._awake:
            self._awake = True
            self._virtual.call_later(delay_s, self._round)

    def _round(self) -> None:
        self._awake = False
        if not self._alive:
            return
        self._carry_out_commands(wait=False)
        outputs = self._hash_engine.step()
        engine = self._hash_engine
        if outputs or not engine.idle():
            self._virtual.call_later(engine.step_s, self._end_step, list(outputs))
            self._awake = True

    def _end_step(self, outputs: list[EngineEvent]) -> None:
        self._awake = False
        if not self._alive:
            return
        if outputs:
            self._deliver(outputs)
        self._wake()
