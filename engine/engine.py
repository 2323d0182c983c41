"""The engine of one replica. Main path: `step()` = plan, run the decoder, sample, book.

It knows no network and no role: a prefill worker adds sequences that stop after their first token
and keeps their blocks until `release`; a decode worker reserves blocks and commits sequences whose
KV has arrived; a mixed worker just adds. One runner serves all three.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from ..kv_transfer.slices import piece_count
from ..kv_transfer.statistics import Histogram
from ..protos.frames import AttemptKey, Token
from .batch import Batch, build
from .blocks import BlockPool
from .commands import PrefixStaged, StagePrefix
from .drafts import NGrams
from .exactness import is_exact
from .gpu.pipeline import Pipeline
from .grammar import Grammars
from .memory import available_memory, check_memory
from .model import ModelConfig, part_of, start_model
from .sampler import SLICE, Fault, sample, score
from .scheduler import Scheduler, SchedulerLimits
from .sequence import BlocksFilled, Sequence, SequenceOutput
from .sizing import context_limit, kv_layout
from .spec import fingerprint, read_spec

DEMOTE_BELOW = 8  #: tiers copy cached blocks while less than this part of the pool is free
DEMOTING = 16  #: blocks that they copy at a time, at most
STEP_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
STEP_TOKENS = tuple(2**power for power in range(15))  #: rows of a step


def nothing_below(hashes: list[bytes]) -> int:
    """No tiers."""
    return 0


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """`kv_bytes` is the size of the KV pool; it bounds `max_model_len` (`sizing.py`)."""

    model: Path
    dtype: str = "bfloat16"
    kv_bytes: int = 256 << 20
    max_model_len: int | None = None  #: default: the model's, or what the pool holds
    threads: int = 1
    limits: SchedulerLimits = field(default_factory=SchedulerLimits)
    kernels: str = "auto"  #: auto | avx512 | torch
    tensor_parallel: int = 1  #: processes that share the model; `kv_bytes` are of each
    cores: tuple[int, ...] = ()  #: that the thread which steps is bound to; none: any
    shared_kv: bool = False  #: other processes can map the KV pool
    rank_program: str = "diptych.engine.ranks"  #: the module that the others run
    device: str = "cpu"  #: cpu | cuda (the first that this process sees)
    attention: str = "auto"  #: auto | cpp | torch on a CPU; auto | a name of `gpu.backends`
    exact: bool = False  #: a GPU's bits do not depend on the batch either, for a price
    kv_dtype: str | None = None  #: None: `dtype`; float8_e4m3fn on a GPU
    weights: str = "model"  #: model | fp8: quantized at load, on a GPU

    def of_model(self, blocks: int) -> ModelConfig:
        return ModelConfig(
            *(self.model, self.dtype, blocks, self.limits.block_tokens, self.threads),
            *(self.kernels, self.shared_kv, self.device, self.attention, self.exact),
            *(self.kv_dtype, self.weights),
        )


class Engine:
    """Not thread safe: one thread owns it (`loop.EngineThread`)."""

    def __init__(
        self, config: EngineConfig, progress: Callable[[str, float], None] | None = None
    ) -> None:
        self.config = config
        self.spec = read_spec(config.model)
        ranks, size = config.tensor_parallel, config.limits.block_tokens
        layout = kv_layout(part_of(self.spec, ranks), config.kv_dtype or config.dtype, size)
        self.max_model_len = context_limit(self.spec, layout, config.kv_bytes, config.max_model_len)
        blocks = config.kv_bytes // layout.block_bytes
        if config.device == "cpu":
            check_memory(self.spec, config.dtype, config.kv_bytes * ranks, available_memory())
        self._model = start_model(config.of_model(blocks), ranks, progress, config.rank_program)
        self.kv, self.kernels = self._model.kv, self._model.kernels
        salt = fingerprint(config.model)
        self.scheduler = Scheduler(BlockPool(blocks), config.limits, salt)
        promised = config.dtype == "bfloat16" and (config.device == "cpu" or config.exact)
        self.exact = promised and is_exact(self._model, size)
        self._grammars = Grammars(config.model, self.spec.vocab, self.spec.eos_ids)
        backend = self.kernels.split(":")[0].encode()  # another one has other last bits
        known = salt + backend + self.kv.digest_kind
        self.compatibility = layout.compatibility(known, ranks)
        self.pieces = piece_count(layout, ranks)
        self._pipeline = self._device_steps()
        self.announce: Callable[[list[BlocksFilled]], None] = lambda _: None  #: called in mid-step
        #: how many leading blocks of these contents the tiers hold; set by whoever has tiers
        self.below: Callable[[list[bytes]], int] = nothing_below
        self.steps = self.drafted = self.accepted = 0
        self.prefill_tokens, self.prefill_seconds = 0, 0.0
        self.decode_steps, self.decode_seconds = 0, 0.0  #: of steps without prefill
        self.step_s = {phase: Histogram(STEP_S) for phase in ("prefill", "decode")}
        self.step_tokens = Histogram(STEP_TOKENS)

    @property
    def followers(self) -> list[socket.socket]:
        """A socket to each process of a rank above 0, for `rank_program`."""
        return self._model.ranks.controls if self._model.ranks else []

    def close(self) -> None:
        """Ends the other ranks' processes."""
        if self._model.ranks:
            self._model.ranks.close()

    # ---- sequences ---------------------------------------------------------------------------

    def add(self, seq: Sequence) -> None:
        """Prefills `seq`, then decodes it (or holds its blocks, if it stops after the first)."""
        assert 0 < seq.prompt_tokens <= len(seq.token_ids) < self.max_model_len, (
            seq.prompt_tokens,
            len(seq.token_ids),
        )
        self.scheduler.add(seq)

    def reserve(self, seq: Sequence) -> list[int] | None:
        self._settled()
        return self.scheduler.reserve(seq)

    def commit(
        self,
        seq: Sequence,
        others: tuple[tuple[int, int], ...] = (),
        ended: bool = False,
        waited: float = 0.0,
    ) -> None:
        """Decodes `seq`, whose KV has arrived; `others`: (index, first id) of further answers.

        `ended`: `seq` itself ended with its first id. `waited`: seconds since that was sent.
        """
        self.scheduler.commit(seq, waited)
        for one, (_, first) in zip(self._fork(seq, [i for i, _ in others]), others, strict=True):
            one.waited_s = waited
            self.scheduler.sampled(one, first)
        if ended:
            self.scheduler.end(seq)

    def _fork(self, seq: Sequence, indices: list[int]) -> list[Sequence]:
        """Further answers to a prompt whose KV is there; on a prefill worker just their names."""
        if seq.sampling.n == 1:
            return []
        if seq.stop_after_first:
            return [seq.fork(index) for index in indices]
        siblings = self.scheduler.fork(seq, indices)
        whole, partial = divmod(seq.prompt_tokens, self.config.limits.block_tokens)
        for one in siblings:
            if partial and one.blocks:
                self._model.copy(seq.blocks[whole], one.blocks[whole])
        return siblings

    def stage(self, command: StagePrefix) -> PrefixStaged:
        """Blocks for a prefix of which the pool, the tiers below or a peer may hold a part."""
        self._settled()
        known = self.scheduler.pool.known(command.hashes)
        below = 0 if command.pin_only else self.below(command.hashes[known:])
        count = 0 if command.pin_only else max(known + below, command.peer_blocks)
        if command.pin_only or count > known:
            self.scheduler.stage(command.attempt_key, command.hashes, count)
        blocks, _ = self.scheduler.staged.get(command.attempt_key, ([], []))
        return PrefixStaged(command.attempt_key, blocks, known, below)

    def demote(self) -> list[tuple[int, bytes]]:
        """Cached blocks that the tiers shall copy before they are evicted: the pool runs low."""
        pool = self.scheduler.pool
        low = self.below is not nothing_below and pool.free < pool.total // DEMOTE_BELOW
        return pool.demote(min(DEMOTING, pool.total // 16 + 1)) if low else []

    def drop(self, key: AttemptKey) -> None:
        """Ends a sequence wherever it is; its blocks are free before the next step."""
        self.scheduler.remove(key)

    # ---- stepping ----------------------------------------------------------------------------

    def step(self) -> list[SequenceOutput]:
        """Runs one step over all live sequences; [] when there is nothing to do."""
        began = time.perf_counter()
        if self._pipeline and (told := self._pipeline.step()) is not None:
            return self._steady(told, began)
        self._guess()
        plan = self.scheduler.plan()
        if not plan:
            return []
        if self._pipeline and not plan.prefill and self._pipeline.takes(plan.decode):
            self._pipeline.start(plan.decode)
            return self._steady(self._pipeline.step() or [], began)
        batch = build(plan, self.config.limits.block_tokens)
        hidden = self._model.hidden(batch.ids, batch.meta, self._stream(plan.prefill))
        prompts = {
            seq.attempt_key: self._prompt_logprobs(seq, count, hidden, piece.row)
            for (seq, count), piece in zip(batch.sequences, batch.meta.pieces, strict=True)
            if seq.sampling.prompt_logprobs is not None
        }
        outputs = self._book(batch, self._model.logits(hidden, batch.wanted), prompts)
        self.steps += 1
        seconds = time.perf_counter() - began
        prefilled = sum(count for _, count in plan.prefill)
        self.scheduler.cost.observe(seconds, batch.work(len(plan.prefill)))
        self.step_s["prefill" if plan.prefill else "decode"].observe(seconds)
        self.step_tokens.observe(len(batch.ids))
        if plan.prefill:
            self.prefill_tokens += prefilled
            self.prefill_seconds += seconds
        else:
            self.decode_steps += 1
            self.decode_seconds += seconds
        return outputs

    def _device_steps(self) -> Pipeline | None:
        """Decode on a device of its own, one step ahead of what is booked."""
        limits, book = self.config.limits, partial(self._output, scored=[])
        runner = self._model.runner(limits.max_running, self.max_model_len, limits.block_tokens)
        return Pipeline(runner, self.scheduler, book, self.max_model_len) if runner else None

    def _settled(self) -> None:
        """Before blocks are written by others than this engine's steps: those are over."""
        if self._pipeline:
            self._pipeline.wait()

    def _steady(self, outputs: list[SequenceOutput], began: float) -> list[SequenceOutput]:
        """Accounts for a decode step of the pipeline."""
        assert self._pipeline
        seconds = time.perf_counter() - began
        self.scheduler.cost.observe(seconds, self._pipeline.work)
        self.steps += 1
        self.decode_steps += 1
        self.decode_seconds += seconds
        self.step_s["decode"].observe(seconds)
        self.step_tokens.observe(len(outputs))
        return outputs

    def _stream(self, prefills: list[tuple[Sequence, int]]) -> Callable[[int], None] | None:
        """Announces what transfers may read: cached blocks now, others as their layers are done."""
        known, coming = [], []
        for seq, count in prefills:
            if not seq.stop_after_first:
                continue
            first, whole, last = self.scheduler.fills(seq, count)
            if first < whole:
                known.append(BlocksFilled(seq.attempt_key, first, seq.blocks[first:whole]))
            if whole < last:
                coming.append((seq.attempt_key, whole, seq.blocks[whole:last]))
            seq.filled_blocks = last
        if known:
            self.announce(known)
        if not coming:
            return None
        size = self.spec.layers // self.pieces

        def after(layer: int) -> None:
            piece, inner = divmod(layer + 1, size)
            if not inner:
                self.announce([BlocksFilled(*blocks, piece - 1) for blocks in coming])

        return after

    def _guess(self) -> None:
        """Drafts for those that run, where so few run that more rows cost little."""
        limits, running = self.config.limits, self.scheduler.running
        if not limits.draft_tokens or len(running) > limits.draft_below:
            return
        for seq in running:
            left = min(
                seq.sampling.max_tokens - seq.generated_tokens,
                self.max_model_len - len(seq.token_ids),
            )
            most = min(limits.draft_tokens, left - 1)
            if most > 0:
                seq.ngrams = seq.ngrams or NGrams()
                seq.drafts = seq.ngrams.propose(seq.token_ids, most)

    def _prompt_logprobs(
        self, seq: Sequence, count: int, hidden: torch.Tensor, row: int
    ) -> list[Token | Fault]:
        """Logprobs of the ids behind `count` rows of `hidden` from `row` on, if not told yet."""
        asked = seq.sampling.prompt_logprobs
        assert asked is not None
        first = max(seq.computed_tokens, seq.prompt_logprobs_sent - 1)
        end = min(seq.computed_tokens + count, seq.prompt_tokens - 1)
        tokens: list[Token | Fault] = []
        for start in range(first, end, SLICE):  # float32 logits of all rows would be gigabytes
            stop = min(start + SLICE, end)
            rows = torch.arange(start, stop) + row - seq.computed_tokens
            logits = self._model.logits(hidden, rows)
            tokens += score(logits, seq.token_ids[start + 1 : stop + 1], asked, start + 1)
        return tokens

    def _book(
        self, batch: Batch, logits: torch.Tensor, prompts: dict[AttemptKey, list[Token | Fault]]
    ) -> list[SequenceOutput]:
        """Moves every sequence on by its rows, and those whose ids are all computed by a token.

        Then by another one for each draft that is what the row before it gave.
        """
        outputs: list[SequenceOutput | None] = []
        live: list[tuple[Sequence, int]] = []
        for (seq, count), at in zip(batch.sequences, batch.at, strict=True):
            if self.scheduler.computed(seq, count):
                more = (
                    self._fork(seq, list(range(1, seq.sampling.n))) if seq.further_answers else []
                )
                live += [(one, at) for one in (seq, *more)]
            else:
                outputs.append(self._output(seq, None, prompts.get(seq.attempt_key, [])))
        depth = 0
        while live:
            rows = [at + depth for _, at in live]
            wanted = logits if rows == list(range(len(logits))) else logits[rows]
            tokens = sample(wanted, [seq for seq, _ in live], self._grammars)
            right = []
            for (seq, at), token in zip(live, tokens, strict=True):
                output = self._output(seq, token, [] if depth else prompts.get(seq.attempt_key, []))
                outputs.append(output)
                if self._guessed(seq, depth, output):
                    self.scheduler.computed(seq, 1)
                    right.append((seq, at))
            live, depth = right, depth + 1
        return [output for output in outputs if output]

    def _guessed(self, seq: Sequence, depth: int, output: SequenceOutput | None) -> bool:
        """The token of row `depth` is the draft behind it, so the next row counts as well."""
        if not seq.drafts or output is None or output.token is None:
            return False
        right = depth < len(seq.drafts) and output.token.id == seq.drafts[depth]
        self.drafted += depth < len(seq.drafts)
        self.accepted += right
        if right and output.finish_reason is None:
            return True
        assert isinstance(seq.ngrams, NGrams)
        seq.ngrams.verified(len(seq.drafts), depth + right)
        seq.drafts = []
        return False

    def _output(
        self, seq: Sequence, token: Token | Fault | None, scored: list[Token | Fault]
    ) -> SequenceOutput | None:
        prompt = [one for one in scored if isinstance(one, Token)]
        if isinstance(token, Fault) or len(prompt) < len(scored):
            faults = [one for one in (*scored, token) if isinstance(one, Fault)]
            if seq.name in self.scheduler.live:
                self.scheduler.fail(seq, faults[0].damage)
            reason, refused = faults[0].reason, not faults[0].damage
            return SequenceOutput(
                seq.attempt_key,
                error=reason,
                answer_index=seq.answer_index,
                request_at_fault=refused,
            )
        prompt = [] if seq.answer_index else prompt  # each is told once, with the first answer
        seq.prompt_logprobs_sent += len(prompt)
        if token is None:
            return SequenceOutput(seq.attempt_key, prompt_logprobs=prompt) if prompt else None
        offset = seq.generated_tokens
        finish = self.scheduler.sampled(seq, token.id)
        return SequenceOutput(
            seq.attempt_key,
            offset,
            token,
            finish,
            seq.hit_tokens,
            prompt,
            answer_index=seq.answer_index,
        )

    def statistics(self) -> dict:
        """A snapshot. Any thread."""
        scheduler, pool = self.scheduler, self.scheduler.pool
        held = set().union(*scheduler.held.values())  # prefixes are shared
        staged = set().union(*(blocks for blocks, _ in list(scheduler.staged.values())))
        return {
            "steps": self.steps,
            "exact": self.exact,
            "kernels": self.kernels,
            "dtype": self.config.dtype,
            "cores": list(self.config.cores),
            "waiting": len(scheduler.waiting),
            "prefilling": len(scheduler.filling),
            "ready": len(scheduler.ready),
            "running": len(scheduler.running),
            "preemptions": scheduler.preemptions,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "prefill_tokens": self.prefill_tokens,
            "step_s": {phase: seconds.values() for phase, seconds in self.step_s.items()},
            "step_tokens": self.step_tokens.values(),
            "kv_blocks": {
                "total": pool.total,
                "free": pool.available - pool.cached,
                "cached": pool.cached,
                "reserved": len(held),
                "staged": len(staged - held),
                "demoting": pool.demoting,
                "active": pool.used - len(held | staged) - pool.demoting,
            },
        }
