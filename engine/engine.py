"""The engine of one replica. Main path: `step()` = plan, run the decoder, sample, book.

To book a token is to add it to its sequence, to free what the sequence needs no more if it ended,
and to make the output that is delivered.

It knows no network and no role: a prefill worker adds sequences that stop after their first token
and keeps their blocks until `release`; a decode worker reserves blocks and commits sequences whose
KV has arrived; a mixed worker just adds. One engine serves all three (`engine_like.EngineLike`).

What the hardware decides is behind `backend.Backend`. On a GPU, steps of pure decode go through a
pipeline that is one step ahead of what is booked here.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from ..kv_transfer.slices import piece_count
from ..protos.frames import AttemptKey, Grammar, ScoredToken, Token
from .backend_registry import open_backend
from .batch import StepBatch, build_batch
from .blocks import BlockPool
from .commands import BlocksReserved, EngineObservation, PrefixStaged, StagePrefix
from .core_sharing import open_core_sharing
from .drafts import NGramDrafter
from .engine_like import ReportProgress
from .exactness import is_exact
from .gpu.layer_events import DeviceEvent, wait_for_event
from .grammar import GrammarCompiler
from .model import rank_share, start_model
from .options import DecodeLimits, EngineOptions, SchedulerLimits
from .sampler import SCORED_ROWS, SamplingFault, sample_tokens, score_prompt
from .scheduler import Scheduler, StepPlan
from .sequence import BlocksFilled, Sequence, SequenceOutput
from .sizing import context_limit, kv_layout
from .spec import fingerprint, read_spec
from .step_counters import StepCounters

if TYPE_CHECKING:
    from .gpu.pipeline import DecodePipeline, PromptScores

log = logging.getLogger(__name__)

#: Tiers (host memory and disk below the pool) copy cached blocks while less than one in so many of
#: the pool's blocks is free: cached ones are soon evicted then.
LOW_POOL_DIVISOR = 8
#: Blocks that they copy at a time, at most: these cannot be given out meanwhile.
DEMOTION_LIMIT = 16


def no_tier_blocks(hashes: list[bytes]) -> int:
    """Returns 0: stands for the tiers where there are none."""
    return 0


def _ignore_filled(filled: list[BlocksFilled]) -> None:
    """Does nothing: stands for a listener to filled blocks where there is none."""


class Engine:
    """An `EngineLike` on our own decoder. One thread owns it (`loop.EngineThread`)."""

    def __init__(self, options: EngineOptions, progress: ReportProgress | None = None) -> None:
        """Loads the model of `options` and allocates the KV pool.

        `progress(what, share)`, if given, follows the loading.

        Raises what `errors.py` lists, each with the cause and what to do about it.
        """
        self.options = options
        self.spec = read_spec(options.model_folder)
        limits = options.limits
        ranks = options.tensor_parallel
        layout = kv_layout(rank_share(self.spec, ranks), options.pool_dtype, limits.block_tokens)
        if options.kv_bytes is not None:  # else the pool's size is known once the model is loaded
            context_limit(self.spec, layout, options.kv_bytes, options.max_model_len)
        self._backend = backend = open_backend(options)
        backend.check(options, self.spec)
        self._model = start_model(options, backend, progress)
        self.kv_pool = self._model.kv  #: this rank's KV blocks, which transfers read and write
        #: tokens of the longest sequence, prompt and answer
        self.max_model_len = context_limit(
            self.spec, layout, self.kv_pool.size, options.max_model_len
        )
        #: name of the kernels that compute, with the reason if slower ones are taken
        self.kernels = self._model.kernels
        states = options.core_states if options.share_idle_cores else None
        #: Lends idle cores to other engines, and borrows theirs; None where nobody does.
        self.core_sharing = open_core_sharing(states, options.cores, self._model.ops)

        salt = fingerprint(options.model_folder)
        self.scheduler = Scheduler(BlockPool(self.kv_pool.blocks), limits, salt)
        #: True if the backend claims, and a test run just now confirmed, that a row's bits do not
        #: depend on the rows computed beside it
        self.exact = backend.claims_exactness(options) and is_exact(
            self._model, limits.block_tokens
        )
        self._grammars = GrammarCompiler(options.model_folder, self.spec.vocab, self.spec.eos_ids)

        kernel_kind = self.kernels.split(":")[0].encode()  # another kind has other last bits
        #: Workers exchange KV only if this hash is the same. It is of the model, the KV's shape
        #: (layers, heads of all ranks, size of a head, data type), the kernels and the checksums.
        self.compatibility = layout.compatibility(
            salt + kernel_kind + self.kv_pool.digest_kind, ranks
        )
        #: What `compatibility` is made of beside the KV's shape, by name: peers whose hashes differ
        #: report the entries that differ.
        self.format_facts = {
            "engine": "diptych",
            "model": salt.hex(),
            "kernels": kernel_kind.decode(),
            "checksums": self.kv_pool.digest_kind.decode() or "xxh3",
        }
        #: Parts of the layers whose KV is sent one by one, while the next layers are computed.
        self.piece_count = piece_count(layout, ranks)

        decode_limits = DecodeLimits(
            rows=limits.max_running,
            max_model_len=self.max_model_len,
            block_tokens=limits.block_tokens,
        )
        runner = self._model.make_decode_runner(decode_limits)
        self._pipeline: DecodePipeline | None = backend.make_pipeline(
            runner, self.scheduler, self._book_token, self.max_model_len
        )
        if self._pipeline:
            self._pipeline.grammars = self._grammars

        #: Marks the end of the last work on blocks that this class launched (at first the zeroing
        #: of the pool), the pipeline's work apart; None once the device is known to have passed it.
        self._launched: DeviceEvent | None = backend.mark_work()

        #: called in mid-step with the blocks whose KV may be read by transfers
        self.announce_filled: Callable[[list[BlocksFilled]], None] = _ignore_filled
        #: how many leading blocks of these contents the tiers hold; set by whoever has tiers
        self.count_tier_blocks: Callable[[list[bytes]], int] = no_tier_blocks

        # Counts since the start.
        self.counters = StepCounters()
        self.failed_steps = 0  #: for which the device had too little memory
        self.drafted_tokens = 0  #: guessed tokens that a step verified
        self.accepted_tokens = 0  #: those of them that were right

    @property
    def rank_sockets(self) -> list[socket.socket]:
        """A socket to each process of a rank above 0, for `rank_program`."""
        ranks = self._model.rank_processes
        return ranks.control_sockets if ranks else []

    @property
    def limits(self) -> SchedulerLimits:
        """What a step, and the pool between steps, may hold."""
        return self.options.limits

    @property
    def cores(self) -> tuple[int, ...]:
        """Cores that the thread which steps is to be bound to; empty: any."""
        return self.options.cores

    @property
    def block_count(self) -> int:
        """How many blocks of the pool sequences can use."""
        return self.scheduler.pool.total_blocks

    @property
    def growth_reserve_blocks(self) -> int:
        """Blocks that newcomers leave to sequences that get longer, at most."""
        return self.scheduler.growth_reserve_blocks

    def close(self) -> None:
        """Ends the other ranks' processes, and the lending of cores."""
        if self.core_sharing:
            self.core_sharing.close()
        if self._model.rank_processes:
            self._model.rank_processes.close()

    # ---- sequences ---------------------------------------------------------------------------

    def has_grammar(self, grammar: Grammar) -> bool:
        """Returns whether the grammar is compiled, so that sampling need not do it. Any thread."""
        return self._grammars.is_prepared(grammar)

    def compile_grammar(self, grammar: Grammar) -> None:
        """Compiles the grammar, in the calling thread's time. Any thread."""
        self._grammars.prepare(grammar)

    def add(self, sequence: Sequence) -> None:
        """Queues the sequence. Later steps prefill it, then decode it.

        If it stops after its first token, its blocks are held instead until `release`.
        """
        prompt = sequence.prompt_tokens
        length = len(sequence.token_ids)
        assert 0 < prompt <= length < self.max_model_len, (prompt, length)
        self.scheduler.add(sequence)

    def reserve(self, sequence: Sequence) -> BlocksReserved:
        """Returns blocks for KV that is going to arrive, or the answer that there are too few."""
        self._wait_for_device()
        blocks = self.scheduler.reserve(sequence)
        return BlocksReserved(sequence.attempt_key, blocks, sequence.published_blocks)

    def required_blocks(self, sequence: Sequence) -> int:
        """Returns the blocks that the sequence reserves: for its ids and a growth allowance."""
        return self.scheduler.required_blocks(sequence)

    def commit(
        self,
        sequence: Sequence,
        other_answers: tuple[tuple[int, int], ...] = (),
        *,
        first_answer_ended: bool = False,
        waited_s: float = 0.0,
    ) -> None:
        """Decodes a sequence whose KV has arrived.

        `other_answers`: (index, first id) of further answers to its prompt. `first_answer_ended`:
        the sequence itself ended with its first id. `waited_s`: since that id was sent.
        """
        # The sequence ends last: until then its blocks, which its forks share, are surely there.
        self.scheduler.commit(sequence, waited_s)
        indices = [index for index, _ in other_answers]
        forks = self._fork(sequence, indices)
        for fork, (_, first_token) in zip(forks, other_answers, strict=True):
            fork.waited_s = waited_s
            self.scheduler.append_token(fork, first_token)
        if first_answer_ended:
            self.scheduler.end(sequence)

    def _fork(self, sequence: Sequence, indices: list[int]) -> list[Sequence]:
        """Makes further answers to a prompt whose KV is there.

        On a prefill worker they get no blocks: they are decoded elsewhere.
        """
        if sequence.sampling.n == 1:
            return []
        if sequence.stop_after_first:
            return [sequence.fork(index) for index in indices]
        forks = self.scheduler.fork(sequence, indices)
        full_blocks, partial = divmod(sequence.prompt_tokens, self.limits.block_tokens)
        for fork in forks:
            # The full blocks are shared. A fork writes into the last one, so it has a copy; a fork
            # that got no blocks is going to compute the prompt again.
            if partial and fork.blocks:
                self._model.copy(sequence.blocks[full_blocks], fork.blocks[full_blocks])
                self._launched = self._backend.mark_work()
        return forks

    def release(self, attempt_key: AttemptKey) -> None:
        """Ends a sequence wherever it is; its blocks are free before the next step."""
        self.scheduler.remove(attempt_key)

    # ---- cached prefixes ---------------------------------------------------------------------

    def stage(self, command: StagePrefix) -> PrefixStaged:
        """Reserves blocks for a prefix of which the pool, the tiers or a peer may hold a part."""
        self._wait_for_device()
        held_blocks = self.scheduler.pool.prefix_length(command.hashes)
        # A prefix that is served to a peer is only pinned; a fetch reserves room for all that can
        # come, and nothing if the pool has as much.
        if command.pin_only:
            tier_blocks = 0
            self.scheduler.stage(command.attempt_key, command.hashes, 0)
        else:
            tier_blocks = self.count_tier_blocks(command.hashes[held_blocks:])
            count = max(held_blocks + tier_blocks, command.peer_blocks)
            if count > held_blocks:
                self.scheduler.stage(command.attempt_key, command.hashes, count)
        blocks, _ = self.scheduler.staged.get(command.attempt_key, ([], []))
        return PrefixStaged(command.attempt_key, blocks, held_blocks, tier_blocks)

    def cache_staged(self, attempt_key: AttemptKey, block_count: int) -> None:
        """Caches the first `block_count` staged blocks of this key, and releases all of them.

        The cached ones stay in the cache until they are evicted.
        """
        self.scheduler.cache_staged(attempt_key, block_count)

    def pin_for_demotion(self) -> list[tuple[int, bytes]]:
        """Pins cached blocks that the tiers shall copy before they are evicted: the pool runs low.

        Returns (block, content) of each, in the order in which they would be evicted.
        """
        pool = self.scheduler.pool
        if self.count_tier_blocks is no_tier_blocks:
            return []
        if pool.free_blocks >= pool.total_blocks // LOW_POOL_DIVISOR:
            return []
        # In a small pool only a sixteenth, and one block more, may be pinned at a time: pinned
        # blocks cannot be given out.
        pinned = pool.pin_for_demotion(min(DEMOTION_LIMIT, pool.total_blocks // 16 + 1))
        if pinned:  # else the host may plan on while the device computes
            self._wait_for_device()
        return pinned

    def finish_demotion(self, block: int, copied: bool) -> None:
        """Unpins a block of `pin_for_demotion`, which a tier has `copied` or not."""
        self.scheduler.pool.finish_demotion(block, copied)

    def forget_in_tiers(self, hashes: list[bytes]) -> None:
        """Takes note that no tier holds these contents any more."""
        self.scheduler.pool.forget_in_tiers(hashes)

    # ---- stepping ----------------------------------------------------------------------------

    def step(self) -> list[SequenceOutput]:
        """Computes a step over all live sequences; [] if nothing is to be done or delivered.

        Raises RankLost, and torch.OutOfMemoryError if there are other ranks: without them,
        sequences of the step end with an error instead.
        """
        began = time.perf_counter()
        if self._pipeline:
            # None: no step is under way, so this one is planned here.
            ahead = self._pipeline.step()
            if ahead is not None:
                return self._account_ahead(ahead, self._pipeline, began)
        self._propose_drafts()
        plan = self.scheduler.plan(time.monotonic())
        if not plan:
            return []
        if self._pipeline and not plan.prefill and self._pipeline.can_run(plan.decode):
            self._pipeline.start(plan.decode)
            return self._account_ahead(self._pipeline.step() or [], self._pipeline, began)

        batch = build_batch(plan, self.limits.block_tokens)
        after_layer = self._announce_prefills(plan.prefill)
        sharing = self.core_sharing
        if sharing:
            sharing.begin_step(prefills=bool(plan.prefill))
        try:
            try:
                hidden = self._model.hidden(batch.token_ids, batch.step_rows, after_layer)
            finally:  # a part of it may be under way even if it raises
                self._launched = self._backend.mark_work()
            scored = self._score_prompts(batch, hidden)
            # a step of chunks that end no prompt draws no token
            logits = hidden[:0]
            if len(batch.logit_rows):
                logits = self._model.logits(hidden, batch.logit_rows)
            helped = sharing.end_step() if sharing else False
        except torch.OutOfMemoryError as error:
            if self._model.rank_processes:
                raise  # the other ranks wait for this one in mid-step
            return self._fail_step(plan, error)
        outputs = self._book(batch, logits, scored)
        if not len(batch.logit_rows):
            # Nobody has read what such a step gives. Its duration must be the device's all the
            # same: the time of the launch alone would teach the scheduler that prefill costs
            # nothing, and chunk after chunk would pile up in front of the next token.
            self._wait_for_device()
        self._account(plan, batch, time.perf_counter() - began, helped=helped)
        return outputs

    def idle(self) -> bool:
        """Returns whether, after a step without outputs, more steps are useless until a command."""
        return not self.scheduler.prefilling

    def _fail_step(self, plan: StepPlan, error: torch.OutOfMemoryError) -> list[SequenceOutput]:
        """Ends the sequences for which the device had no memory; the others' step comes again.

        Decode alone takes little, and always as much, so the prompts of a step are at fault. Nothing
        of the step was booked: what it wrote lies behind the KV that counts.
        """
        prompts = [sequence for sequence, _ in plan.prefill]
        failed = prompts or plan.decode
        reason = str(error).partition(". ")[0]
        log.error("a step ran out of memory, %d sequences fail: %s", len(failed), reason)
        self.failed_steps += 1
        outputs: list[SequenceOutput] = []
        for sequence in failed:
            self.scheduler.fail(sequence, damaged=False)
            outputs.append(
                SequenceOutput(
                    sequence.attempt_key,
                    error=f"the engine has too little memory for this request: {reason}",
                    answer_index=sequence.answer_index,
                    request_at_fault=bool(prompts),
                )
            )
        return outputs

    def _account(self, plan: StepPlan, batch: StepBatch, seconds: float, *, helped: bool) -> None:
        """Counts a step that was planned here; the scheduler learns from its duration.

        `helped`: it was computed on borrowed cores, too, so others like it may take longer.
        """
        alone_s = self.scheduler.observe_step(seconds, batch.work(len(plan.prefill)), helped=helped)
        prefill_tokens = sum(count for _, count in plan.prefill)
        self.counters.count_step(
            seconds,
            prefill_tokens=prefill_tokens,
            step_tokens=prefill_tokens + len(batch.logit_rows),
            alone_s=alone_s if helped else None,
        )

    def _account_ahead(
        self, outputs: list[SequenceOutput], pipeline: DecodePipeline, began: float
    ) -> list[SequenceOutput]:
        """Accounts for a decode step of the pipeline, and returns its outputs."""
        seconds = time.perf_counter() - began
        self.scheduler.observe_step(seconds, pipeline.work)
        self.counters.count_step(seconds, prefill_tokens=0, step_tokens=len(outputs))
        return outputs

    def _wait_for_device(self) -> None:
        """Waits for what is launched. Raises RankLost.

        The host may release blocks while a GPU still writes them: those of a sequence whose step
        ran out of memory on the way, or that ended while its next step was launched ahead. So
        whoever hands blocks to others than this engine's steps waits first: `reserve`, `stage`,
        `pin_for_demotion`, and the announcement of blocks from earlier steps.
        """
        if self._pipeline:
            self._pipeline.wait_for_device()
        if self._launched:
            wait_for_event(self._launched, self._model.rank_processes)
            self._launched = None

    def _announce_prefills(
        self, prefills: list[tuple[Sequence, int]]
    ) -> Callable[[int], None] | None:
        """Announces what transfers may read: cached blocks now, others as their layers are done.

        Returns what is to be called after each layer, or None if no block gets full in this step.
        """
        # `first`, `computed` and `last` are numbers of leading blocks of a sequence: those that are
        # announced, those whose KV is there, and those whose KV is there after this step.
        cached: list[BlocksFilled] = []
        coming: list[tuple[AttemptKey, int, list[int]]] = []
        for sequence, count in prefills:
            if not sequence.stop_after_first:
                continue  # decoded here: no transfer reads its KV
            first, computed, last = self.scheduler.filled_range(sequence, count)
            if first < computed:
                blocks = sequence.blocks[first:computed]
                cached.append(BlocksFilled(sequence.attempt_key, first, blocks))
            if computed < last:
                coming.append((sequence.attempt_key, computed, sequence.blocks[computed:last]))
            sequence.filled_blocks = last
        if cached:
            self._wait_for_device()
            self.announce_filled(cached)
        if not coming:
            return None
        piece_layers = self.spec.layers // self.piece_count

        def after_layer(layer: int) -> None:
            done, rest = divmod(layer + 1, piece_layers)
            if rest == 0:  # the layer is the last one of its piece
                self.announce_filled(
                    [BlocksFilled(key, first, blocks, done - 1) for key, first, blocks in coming]
                )

        return after_layer

    def _propose_drafts(self) -> None:
        """Guesses tokens of those that run, where so few run that more rows cost little."""
        limits = self.limits
        running = self.scheduler.running
        if not limits.draft_tokens or len(running) > limits.draft_below:
            return
        for sequence in running:
            tokens_left = min(
                sequence.sampling.max_tokens - sequence.generated_tokens,
                self.max_model_len - len(sequence.token_ids),
            )
            # The step gives one token more than there are right drafts.
            draft_limit = min(limits.draft_tokens, tokens_left - 1)
            if draft_limit > 0:
                sequence.ngrams = sequence.ngrams or NGramDrafter()
                sequence.drafts = sequence.ngrams.propose(sequence.token_ids, draft_limit)

    # ---- booking -----------------------------------------------------------------------------

    def _score_prompts(
        self, batch: StepBatch, hidden: torch.Tensor
    ) -> dict[AttemptKey, list[ScoredToken | SamplingFault]]:
        """Returns the logprobs of prompt ids, for the sequences of the step that want them."""
        scored: dict[AttemptKey, list[ScoredToken | SamplingFault]] = {}
        for (sequence, count), span in zip(batch.sequences, batch.step_rows.spans, strict=True):
            if sequence.sampling.prompt_logprobs is not None:
                scored[sequence.attempt_key] = self._score_prompt(
                    sequence, count, hidden, first_row=span.first_row
                )
        return scored

    def _score_prompt(
        self, sequence: Sequence, count: int, hidden: torch.Tensor, *, first_row: int
    ) -> list[ScoredToken | SamplingFault]:
        """Returns the logprobs of the ids behind `count` rows of `hidden` that are not sent yet."""
        logprob_count = sequence.sampling.prompt_logprobs
        assert logprob_count is not None
        computed = sequence.computed_tokens
        # A row scores the id behind it, so the last id of the prompt needs no row of its own.
        first = max(computed, sequence.prompt_logprobs_sent - 1)
        end = min(computed + count, sequence.prompt_tokens - 1)
        tokens: list[ScoredToken | SamplingFault] = []
        pending: list[PromptScores] = []  # what a device works out; read behind the last launch
        # A few rows at a time: float32 logits of all rows would be gigabytes.
        for start in range(first, end, SCORED_ROWS):
            stop = min(start + SCORED_ROWS, end)
            rows = torch.arange(start, stop) + first_row - computed
            logits = self._model.logits(hidden, rows)
            next_ids = list(sequence.token_ids[start + 1 : stop + 1])
            if self._pipeline and self._pipeline.can_score(logprob_count):
                pending.append(
                    self._pipeline.score(logits, next_ids, logprob_count, position=start + 1)
                )
            else:
                tokens += score_prompt(logits, next_ids, logprob_count, start + 1)
        for scores in pending:
            tokens += scores.read()
        return tokens

    def _book(
        self,
        batch: StepBatch,
        logits: torch.Tensor,
        scored: dict[AttemptKey, list[ScoredToken | SamplingFault]],
    ) -> list[SequenceOutput]:
        """Moves every sequence on by its rows, and those whose ids are all computed by a token.

        Then by one token more for each draft that equals the token drawn from the row before it.
        """
        outputs: list[SequenceOutput | None] = []
        #: sequences to draw a token for, each with the index of its row in `logits`
        drawing: list[tuple[Sequence, int]] = []
        for (sequence, count), row in zip(batch.sequences, batch.logit_starts, strict=True):
            if not self.scheduler.record_computed(sequence, count):
                prompt_scores = scored.get(sequence.attempt_key, ())
                outputs.append(self._book_token(sequence, None, prompt_scores))
                continue
            drawing.append((sequence, row))
            if sequence.further_answers:
                # Every answer draws its first token from the same logits.
                indices = list(range(1, sequence.sampling.n))
                drawing += [(fork, row) for fork in self._fork(sequence, indices)]

        depth = 0  # how many drafts of each sequence were right so far
        while drawing:
            rows = [row + depth for _, row in drawing]
            tokens = self._draw(logits, rows, [sequence for sequence, _ in drawing])
            continuing: list[tuple[Sequence, int]] = []
            for (sequence, row), token in zip(drawing, tokens, strict=True):
                prompt_scores = () if depth else scored.get(sequence.attempt_key, ())
                output = self._book_token(sequence, token, prompt_scores)
                outputs.append(output)
                if sequence.drafts and self._draft_was_right(sequence, depth, output):
                    self.scheduler.record_computed(sequence, 1)
                    continuing.append((sequence, row))
            drawing = continuing
            depth += 1
        return [output for output in outputs if output]

    def _draw(
        self, logits: torch.Tensor, rows: list[int], sequences: list[Sequence]
    ) -> list[Token | SamplingFault]:
        """Returns the next token of each sequence, from its row of `logits`."""
        if self._pipeline and self._pipeline.can_draw(sequences):
            return self._pipeline.draw(logits, rows, sequences)
        # Indexing copies the logits; mostly all of them are needed.
        drawn_logits = logits if rows == list(range(len(logits))) else logits[rows]
        return sample_tokens(drawn_logits, sequences, self._grammars)

    def _draft_was_right(
        self, sequence: Sequence, depth: int, output: SequenceOutput | None
    ) -> bool:
        """Returns whether the token of row `depth` is the draft behind: then the next row counts."""
        if output is None or output.token is None:
            return False
        # Behind the last draft is a row too, whose token nothing was guessed for.
        has_draft = depth < len(sequence.drafts)
        right = has_draft and output.token.id == sequence.drafts[depth]
        self.drafted_tokens += has_draft
        self.accepted_tokens += right
        if right and output.finish_reason is None:
            return True
        assert isinstance(sequence.ngrams, NGramDrafter)
        sequence.ngrams.record_verified(len(sequence.drafts), depth + right)
        sequence.drafts = []
        return False

    def _book_token(
        self,
        sequence: Sequence,
        token: Token | SamplingFault | None,
        prompt_scores: Iterable[ScoredToken | SamplingFault] = (),
    ) -> SequenceOutput | None:
        """Moves a sequence on by a token, or ends it by a fault; returns what to deliver."""
        prompt_logprobs: list[ScoredToken] = []
        for entry in prompt_scores:
            if isinstance(entry, SamplingFault):
                return self._book_fault(sequence, entry)
            prompt_logprobs.append(entry)
        if isinstance(token, SamplingFault):
            return self._book_fault(sequence, token)
        if sequence.answer_index:  # the first answer delivers them for all
            prompt_logprobs = []
        sequence.prompt_logprobs_sent += len(prompt_logprobs)
        if token is None:
            if not prompt_logprobs:
                return None
            return SequenceOutput(sequence.attempt_key, prompt_logprobs=prompt_logprobs)
        offset = sequence.generated_tokens
        finish_reason = self.scheduler.append_token(sequence, token.id)
        if finish_reason:
            self.counters.request_preemptions.observe(sequence.preemptions)
        return SequenceOutput(
            sequence.attempt_key,
            offset,
            token,
            finish_reason,
            hit_tokens=sequence.hit_tokens,
            prompt_logprobs=prompt_logprobs,
            answer_index=sequence.answer_index,
        )

    def _book_fault(self, sequence: Sequence, fault: SamplingFault) -> SequenceOutput:
        """Ends a sequence for which no token can be drawn."""
        # A further answer on a prefill worker is not live: it has no blocks here.
        if sequence.name in self.scheduler.live:
            self.scheduler.fail(sequence, damaged=fault.model_damaged)
        return SequenceOutput(
            sequence.attempt_key,
            error=fault.reason,
            answer_index=sequence.answer_index,
            request_at_fault=not fault.model_damaged,
        )

    # ---- what others see ---------------------------------------------------------------------

    def observe(self) -> EngineObservation:
        """Returns the cached contents, what changed in them since the last call, and the load."""
        scheduler = self.scheduler
        pool = scheduler.pool
        counters = self.counters
        changes = pool.drain_events()
        return EngineObservation(
            hashes=pool.hashes(),
            stored=changes.stored,
            evicted=changes.evicted,
            demoted=changes.demoted,
            demoted_hashes=pool.demoted_hashes(),
            free_blocks=pool.available_blocks,
            prefill_tokens=counters.prefill_tokens,
            prefill_s=counters.prefill_s,
            decode_steps=counters.decode_steps,
            decode_s=counters.decode_s,
            running_sequences=len(scheduler.running),
            kv_tokens=sum(len(sequence.token_ids) for sequence in scheduler.running),
            preempted_sequences=sum(sequence.was_preempted for sequence in scheduler.waiting),
            step_s=scheduler.planned_step_s,
        )

    def block_holders(self) -> Iterator[tuple[AttemptKey, int]]:
        """Yields the attempt and the number of blocks of each live answer and each staged prefix.

        An attempt with several answers comes once for each, and blocks that they share count each
        time. The number is 0 for an answer that waits for blocks. Any thread.
        """
        for (attempt_key, _), sequence in list(self.scheduler.live.items()):
            yield attempt_key, len(sequence.blocks)
        for attempt_key, (blocks, _) in list(self.scheduler.staged.items()):
            yield attempt_key, len(blocks)

    def statistics(self) -> dict[str, Any]:
        """Returns a snapshot of the load and of the counters since the start. Any thread.

        The keys are those that `EngineLike.statistics` promises.
        """
        scheduler = self.scheduler
        pool = scheduler.pool
        return {
            **self.counters.values(),
            "failed_steps": self.failed_steps,
            "exact": self.exact,
            "kernels": self.kernels,
            "dtype": self.options.dtype,
            "cores": list(self.options.cores),
            "waiting": len(scheduler.waiting),
            "prefilling": len(scheduler.prefilling),
            "ready": len(scheduler.ready),
            "running": len(scheduler.running),
            "preemptions": scheduler.preemptions,
            "drafted": self.drafted_tokens,
            "accepted": self.accepted_tokens,
            "kv_blocks": self._block_statistics(pool),
        }

    def _block_statistics(self, pool: BlockPool) -> dict[str, int]:
        """Returns the number of blocks by their use; a block that several share counts once."""
        scheduler = self.scheduler
        # A sequence's blocks that a transfer reads or writes.
        reserved = set().union(*scheduler.held_blocks.values())
        staged = set().union(*(blocks for blocks, _ in list(scheduler.staged.values())))
        return {
            "total": pool.total_blocks,
            "free": pool.free_blocks,
            "cached": pool.cached_blocks,
            "reserved": len(reserved),
            "staged": len(staged - reserved),
            "demoting": pool.demoting_blocks,
            "active": pool.used_blocks - len(reserved | staged) - pool.demoting_blocks,
        }
