"""vLLM as an `EngineLike`: its scheduler, models and kernels, our sampling, pins and block names.

Main path, `step()`: vLLM plans and computes one step. In the middle of it vLLM calls the hooks here
(`hooks.VllmHooks`): when it plans, when a layer's KV is in the pool, when ids are to be drawn. What
it has sampled is then booked in our sequences, and delivered.

A block that a transfer reads is pinned here, with a reference of our own in vLLM's block pool: so
vLLM may preempt or end its request at any time, and the bytes stay as they are until `release`.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from ...kv_transfer.identity import block_hashes, partition_salt
from ...kv_transfer.slices import piece_count
from ...protos.frames import AttemptKey, Grammar, ScoredToken, Token
from ..adapters import read_adapter
from ..checkpoint_facts import read_facts
from ..commands import BlocksReserved, EngineObservation, PrefixStaged, StagePrefix
from ..engine import no_tier_blocks
from ..engine_like import ReportProgress, StepEvent
from ..errors import InvalidRequest
from ..grammar import GrammarCompiler
from ..options import EngineOptions, SchedulerLimits
from ..sampler import SamplingFault, sample_tokens
from ..sequence import BlocksFilled, Sequence, SequenceOutput
from ..spec import fingerprint
from ..step_counters import StepCounters
from .adapters import load_adapters
from .hooks import HOOKS, REQUEST_ID
from .hosted_request import HostedRequest, RequestState, request_id_of
from .internals import (
    describe_attention,
    find_window,
    give_worker_connector,
    is_preempted,
    take_worker_connector,
)
from .models import check_window
from .pool import VllmPool, describe_format, format_hash
from .prefix_blocks import PrefixBlocks
from .prefix_names import PrefixNames
from .self_test import check_moved_blocks
from .start import check_version, start_core
from .statistics import VllmStatistics

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.engine import EngineCoreOutput

#: Steps with budget to spare that a reservation waits for. Without blocks in them the pool is too
#: full. A step whose budget of tokens a long prompt takes up says nothing: vLLM has not looked.
RESERVE_STEPS = 3
GROWTH_RESERVE_SHARE = 16  #: One block in so many is left to answers that grow.
#: Added to the priority of what the router sends as background work, since it cannot be in time any
#: more; a lower priority goes first.
BACKGROUND_PRIORITY = 1 << 40
RESERVE_PRIORITY = -1  #: A reservation costs no computing, so it goes before all prompts.


def open_vllm(options: EngineOptions, progress: ReportProgress | None = None) -> VllmEngine:
    """Loads the model into vLLM, and checks that blocks can be moved (`self_test.py`).

    Raises what `VllmEngine` raises, and EngineError where moved blocks give another answer.
    """
    engine = VllmEngine(options, progress)
    if progress:
        progress("self test", 1.0)
    try:
        check_moved_blocks(engine, read_facts(options.model_folder).vocabulary)
        engine.forget_self_test()
    except BaseException:
        engine.close()
        raise
    return engine


class VllmEngine:
    """An `EngineLike` that hosts vLLM. One thread owns it (`loop.EngineThread`)."""

    def __init__(self, options: EngineOptions, progress: ReportProgress | None = None) -> None:
        """Loads the model into vLLM; `progress` gets what goes on, and the loaded share of the weights.

        Raises errors of `errors.py`, among them UnsupportedModel, and `start.VllmUnavailable`. vLLM is
        ended then.
        """
        self.options = options
        self._name = uuid.uuid4().hex
        HOOKS[self._name] = self
        if progress:
            progress("vLLM starts", 0.0)
        self._registered_pools: list[VllmPool] = []
        self._layer_numbers: dict[str, int] = {}
        try:
            self._core = start_core(options, self._name)
        except BaseException:
            HOOKS.pop(self._name, None)
            raise
        try:
            self._take_over(options)
        except BaseException:
            self.close()
            raise
        if progress:
            progress("vLLM has the weights", 1.0)

    def _take_over(self, options: EngineOptions) -> None:
        """Sets what is read of vLLM once it has started. Raises UnsupportedModel."""
        # vLLM keeps the connector of the model in a global of the process. An engine takes its own
        # out of it, and puts it back before each step, so that several engines can be in one process.
        self._connector = take_worker_connector()
        # vLLM has registered its KV cache while it started.
        (self.kv_pool,) = self._registered_pools
        scheduler: Any = self._core.scheduler
        self._scheduler = scheduler
        #: By name, what vLLM's requests for an adapter carry.
        self._adapters = load_adapters(self._core, options.adapters)
        #: How many ids vLLM has room for in a step.
        self._step_tokens_limit = int(scheduler.max_num_scheduled_tokens)
        scheduler.kv_event_publisher = self  # `publish` below gets the events of each step
        self._block_pool = scheduler.kv_cache_manager.block_pool
        layout = self.kv_pool.layout
        model = self._core.vllm_config.model_config
        self.max_model_len: int = min(
            model.max_model_len, self.block_count * options.limits.block_tokens
        )
        check_window(model.architecture, find_window(scheduler.kv_cache_config), self.max_model_len)
        self._salt = fingerprint(options.model_folder)
        self.format_facts = describe_format(
            layout,
            self._salt,
            describe_attention(self._core.vllm_config, self._layer_numbers),
            options.vllm_arguments,
            {name: read_adapter(folder).fingerprint for name, folder in options.adapters.items()},
        )
        self.compatibility = format_hash(layout, self.format_facts)
        self.piece_count = piece_count(layout, ranks=1)
        self.exact = False  # vLLM promises no bits that do not depend on the batch
        facts = read_facts(options.model_folder)
        self._grammars = GrammarCompiler(options.model_folder, facts.vocabulary, facts.end_ids)
        self.announce_filled: Callable[[list[BlocksFilled]], None] = lambda filled: None
        # How many leading blocks of a prefix the tiers below the pool hold. Part of every engine's
        # interface; nobody sets another function here, as these tiers are refused with vLLM.
        self.count_tier_blocks: Callable[[list[bytes]], int] = no_tier_blocks

        #: By vLLM's id, until vLLM has ended it and no transfer reads or writes its blocks.
        self._requests: dict[str, HostedRequest] = {}
        #: Blocks with a reference of ours, as transfers of an attempt read them.
        self._pinned: dict[AttemptKey, list[KVCacheBlock]] = {}
        self._names = PrefixNames(options.limits.block_tokens)
        self._prefixes = PrefixBlocks(
            self._block_pool,
            self._names,
            options.limits.block_tokens,
            self._core.request_block_hasher,
            self._adapters,
        )
        #: Prompts for transfers that have not begun, as others hold too much of the pool.
        self._deferred: list[Sequence] = []
        self._arrived: set[str] = set()  #: To be reported to vLLM in the next step.
        self._answers: list[StepEvent] = []  #: To be delivered by the step that runs, or the next.
        #: Blocks that this step fills, by attempt: (first block, blocks).
        self._filling: list[tuple[AttemptKey, int, list[int]]] = []
        self._drawing: set[str] = set()  #: Requests whose ids are all computed after this step.
        self._step_prefill_tokens = 0
        self._step_tokens = 0

        self.reset_counters()

    def forget_self_test(self) -> None:
        """Begins with an empty cache and with no counts: what the self test computed is nobody's."""
        manager = self._scheduler.kv_cache_manager
        manager.reset_prefix_cache()
        self._prefixes.take_events(manager.take_events())
        self._names.drain()
        self.reset_counters()

    def reset_counters(self) -> None:
        """Begins to count anew."""
        self._counters = StepCounters()
        self._preemptions = 0
        self._own_statistics = VllmStatistics()

    @property
    def rank_sockets(self) -> list[Any]:
        """Sockets to the processes of ranks above 0: none, as vLLM runs in this process alone."""
        return []

    @property
    def limits(self) -> SchedulerLimits:
        return self.options.limits

    #: vLLM's kernels have threads of their own, and borrow no cores.
    core_sharing = None

    @property
    def cores(self) -> tuple[int, ...]:
        return self.options.cores

    @property
    def block_count(self) -> int:
        """Blocks that sequences can use: all but vLLM's null block."""
        return int(self._block_pool.num_gpu_blocks) - 1

    @property
    def growth_reserve_blocks(self) -> int:
        """Blocks that reservations and fetched prefixes leave to answers that grow.

        The first reservation, beside no other request, may take them. Prompts that are computed here begin without regard to them: vLLM
        preempts where its pool is too small.
        """
        return self.block_count // GROWTH_RESERVE_SHARE

    def close(self) -> None:
        """Ends vLLM."""
        HOOKS.pop(self._name, None)
        self._core.shutdown()

    # ---- sequences ---------------------------------------------------------------------------

    def has_grammar(self, grammar: Grammar) -> bool:
        """Returns whether the grammar is compiled, so that sampling need not do it. Any thread."""
        return self._grammars.is_prepared(grammar)

    def compile_grammar(self, grammar: Grammar) -> None:
        """Compiles the grammar, in the calling thread's time. Any thread."""
        self._grammars.prepare(grammar)

    def add(self, sequence: Sequence) -> None:
        """Prefills the sequence, then decodes it (or holds its blocks, if it stops there).

        A prompt for a transfer begins when the others leave it room (`held_share`). A sequence that
        is too long for the pool or the model is refused with the next step's events: for blocks
        that the pool never has, vLLM would wait for ever.
        """
        length = len(sequence.token_ids)
        if length >= self.max_model_len:  # an id is sampled behind them
            if self.max_model_len < self.block_count * self.limits.block_tokens:
                reason = (
                    f"no_capacity: {length} tokens, and a prompt and its answer have at most "
                    f"{self.max_model_len} together, by the model or by model.max_model_len"
                )
            else:
                reason = (
                    f"no_capacity: {length} tokens, and the KV pool has room for "
                    f"{self.max_model_len}, the answer's included: raise pools.*.engine.kv_mib"
                )
            self._answers.append(SequenceOutput(sequence.attempt_key, error=reason))
        elif sequence.stop_after_first:
            self._deferred.append(sequence)
        else:
            self._start(sequence, RequestState.WAITING, length)

    def _start_deferred(self) -> None:
        """Starts prompts for transfers, the most urgent first, while they leave room to others.

        Together they hold at most `held_share` of the pool, until their transfers have ended. So a
        slow receiver stops new ones, never one that has begun. A prompt that needs more than that share
        begins when no other one holds blocks.
        """
        limit = int(self.block_count * self.limits.held_share)
        while self._deferred:
            held_blocks = self._held_blocks()
            sequence = min(self._deferred, key=_priority)
            needed = self._blocks_for(len(sequence.token_ids))
            if held_blocks and held_blocks + needed > limit:
                return
            self._deferred.remove(sequence)
            self._start(sequence, RequestState.WAITING, len(sequence.token_ids))

    def _held_blocks(self) -> int:
        """Returns how many blocks prompts for transfers hold, or are going to."""
        pinned = {block.block_id for blocks in self._pinned.values() for block in blocks}
        coming = sum(
            self._blocks_for(request.start_tokens) - request.sequence.filled_blocks
            for request in self._requests.values()
            if request.state is RequestState.WAITING and request.sequence.stop_after_first
        )
        return len(pinned) + coming

    def reserve(self, sequence: Sequence) -> BlocksReserved | None:
        """Asks vLLM for blocks for KV that is going to arrive.

        Returns a refusal where the pool is too full now for the sequence and its growth, beside what
        is left to others' (`growth_reserve_blocks`). Else it
        returns None: vLLM gives blocks in a step, and the answer is among the events of a later
        step, which may be a refusal too.
        """
        needed = self.required_blocks(sequence)
        if self._requests:
            needed += self.growth_reserve_blocks
        # Blocks of what was given up come back with the next step.
        coming = sum(
            len(request.blocks)
            for request in self._requests.values()
            if request.state is RequestState.ABORTED
        )
        if needed > self._block_pool.get_num_free_blocks() + coming:
            return BlocksReserved(sequence.attempt_key, None)
        self._start(sequence, RequestState.RESERVING, len(sequence.token_ids))
        return None

    def required_blocks(self, sequence: Sequence) -> int:
        """Returns the blocks that the sequence takes for its ids and a growth allowance."""
        length = len(sequence.token_ids)
        if sequence.stop_after_first:
            return self._blocks_for(length)
        tokens_left = sequence.sampling.max_tokens - sequence.generated_tokens
        return self._blocks_for(length + min(tokens_left, self.limits.growth_tokens))

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
        the sequence itself ended with its first id. `waited_s`: since that id was sent; our own
        engine keeps steps short by it, and vLLM has no such limit.
        """
        request_id = request_id_of(sequence.attempt_key, 0)
        request = self._requests.get(request_id)
        if request is None or request.state is not RequestState.RECEIVING:
            return  # it was released in the meantime
        sequence.waited_s = waited_s
        request.state = RequestState.WAITING
        request.received = True
        request.sequence = sequence
        self._arrived.add(request_id)
        for index, first_id in other_answers:
            fork = sequence.fork(index)
            fork.token_ids.append(first_id)
            # It begins when vLLM has cached the blocks that have arrived: then it shares them.
            request.waiting_forks.append(fork)
        if first_answer_ended:
            # It goes on until vLLM has taken note of the arrival, and caches its blocks. Then it ends,
            # as a sequence does whose grammar is complete, whether it has a grammar or not.
            sequence.grammar_complete = True

    def release(self, attempt_key: AttemptKey) -> None:
        """Ends a sequence wherever it is. Its blocks are free after the next step at the latest."""
        for request in self._requests_of(attempt_key):
            self._give_up(request)
        self._deferred = [
            sequence for sequence in self._deferred if sequence.attempt_key != attempt_key
        ]
        self._prefixes.release(attempt_key)
        self._prefixes.unpin(self._pinned.pop(attempt_key, []))

    def _give_up(self, request: HostedRequest) -> None:
        """Has vLLM end a request, if it has not, and forgets it where nothing else needs it.

        A request for which KV was to arrive keeps its blocks until vLLM hears, in the next step, that it
        has: vLLM waits for that. The caller has ended the transfer, so nothing is written any more.
        """
        request_id = request.request_id
        match request.state:
            case RequestState.HELD:
                self._forget(request)
            case RequestState.RECEIVING:
                self._core.abort_requests([request_id])
                request.state = RequestState.ABORTED
                self._arrived.add(request_id)
            case RequestState.ABORTED:
                pass
            case RequestState.WAITING | RequestState.RESERVING:
                self._core.abort_requests([request_id])
                if request_id in self._arrived:  # vLLM waits to hear that the KV has arrived
                    request.state = RequestState.ABORTED
                else:
                    self._forget(request)

    def _start(self, sequence: Sequence, state: RequestState, start_tokens: int) -> None:
        """Makes vLLM's request for a sequence, of which the first `start_tokens` ids are prompt."""
        from vllm import SamplingParams
        from vllm.v1.engine import EngineCoreRequest

        request = HostedRequest(sequence, state, start_tokens)
        request_id = request.request_id
        sampling = sequence.sampling
        tokens_left = sequence.prompt_tokens + sampling.max_tokens - start_tokens
        parameters = SamplingParams(
            temperature=0.0,
            max_tokens=1 if sequence.stop_after_first else max(1, tokens_left),
            ignore_eos=True,
            detokenize=False,
            prompt_logprobs=self._prompt_logprobs(sequence, state),
            extra_args={REQUEST_ID: request_id},
        )
        priority = _priority(sequence)
        if state is RequestState.RESERVING:
            priority = RESERVE_PRIORITY
        core_request = EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=list(sequence.token_ids[:start_tokens]),
            mm_features=None,
            sampling_params=parameters,
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=self._adapters[sampling.adapter] if sampling.adapter else None,
            cache_salt=sequence.cache_partition.hex() or None,
            data_parallel_rank=None,
            priority=priority,
        )
        vllm_request, wave = self._core.preprocess_add_request(core_request)
        request.vllm_request = vllm_request
        self._requests[request_id] = request
        self._names.learn(0, vllm_request.block_hashes, sequence.block_hashes, request_id)
        self._core.add_request(vllm_request, wave)

    def _prompt_logprobs(self, sequence: Sequence, state: RequestState) -> int | None:
        """Returns how many logprobs of each prompt id vLLM is to compute, or None.

        Only the first answer computes the prompt. Where the prompt's KV arrives they are not asked for:
        vLLM would compute the whole prompt again to give them. `prompt_logprobs_sent` counts the first
        id too, which has none.
        """
        if state is RequestState.RESERVING or sequence.answer_index > 0:
            return None
        if sequence.prompt_logprobs_sent >= sequence.prompt_tokens:
            return None
        return sequence.sampling.prompt_logprobs

    def _requests_of(self, attempt_key: AttemptKey) -> list[HostedRequest]:
        return [
            request
            for request in self._requests.values()
            if request.sequence.attempt_key == attempt_key
        ]

    def _forget(self, request: HostedRequest) -> None:
        """Drops a request that vLLM has ended, and counts how often vLLM has preempted it."""
        if self._requests.pop(request.request_id, None) is not None:
            self._preemptions += request.vllm_request.num_preemptions
        self._names.forget_request(request.request_id)
        self._drawing.discard(request.request_id)

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.limits.block_tokens)

    # ---- hooks of vLLM -----------------------------------------------------------------------

    def register_pool(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Takes the pool's memory, while vLLM starts."""
        self._registered_pools.append(VllmPool(kv_caches, self.options.limits.block_tokens))
        self._layer_numbers = {name: number for number, name in enumerate(kv_caches)}

    def expected_tokens(self, request_id: str, cached_tokens: int) -> int:
        """Returns how many ids behind the cached ones have KV that is going to arrive."""
        request = self._requests[request_id]
        if request.state is not RequestState.RESERVING:
            return 0
        return request.start_tokens - cached_tokens

    def blocks_allocated(self, request_id: str, blocks: list[int], arriving_tokens: int) -> None:
        """Answers a reservation, for which vLLM has allocated blocks now."""
        request = self._requests[request_id]
        if not arriving_tokens or request.state is not RequestState.RESERVING:
            return
        request.state = RequestState.RECEIVING
        request.blocks = list(blocks)
        held_tokens = request.start_tokens - arriving_tokens
        # Blocks that this pool held: their hashes were told to the routers when they were filled.
        request.sequence.published_blocks = held_tokens // self.limits.block_tokens
        request.sequence.hit_tokens = held_tokens
        self._answers.append(
            BlocksReserved(
                request.sequence.attempt_key, list(blocks), request.sequence.published_blocks
            )
        )

    def step_scheduled(self, scheduler_output: Any) -> None:
        """Takes note of what this step computes, and which blocks it fills for transfers."""
        computed_tokens = {
            new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs
        }
        first_time = set(computed_tokens)
        cached = scheduler_output.scheduled_cached_reqs
        computed_tokens.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        self._drawing.clear()
        self._filling.clear()
        self._step_prefill_tokens = 0
        self._step_tokens = scheduler_output.total_num_scheduled_tokens
        for request_id, count in scheduler_output.num_scheduled_tokens.items():
            request = self._requests[request_id]
            computed = computed_tokens[request_id]
            end = computed + count
            request.computed_tokens = end
            if request_id in first_time and not request.received:
                request.sequence.hit_tokens = min(computed, request.sequence.prompt_tokens)
            if end >= request.next_position:
                self._drawing.add(request_id)
            # Where the KV came from a peer, vLLM computes the last id alone; but all of the prompt
            # once it has taken the blocks for others.
            if not request.received or request.vllm_request.num_preemptions:
                prompt_end = min(end, request.start_tokens)
                self._step_prefill_tokens += max(0, prompt_end - computed)
            if request.sequence.stop_after_first:
                self._note_filling(request, end)

    def _note_filling(self, request: HostedRequest, end: int) -> None:
        """Pins the blocks of a prompt that this step completes: its first `end` ids have KV after it.

        Blocks that were cached come with them, and are announced with this step, not before: another
        prompt of the same step may be computing them.
        """
        sequence = request.sequence
        final = end // self.limits.block_tokens
        if end >= request.start_tokens:
            final = self._blocks_for(request.start_tokens)
        first = sequence.filled_blocks
        if final <= first:
            return
        manager = self._scheduler.kv_cache_manager
        (block_ids,) = manager.get_block_ids(request.request_id)
        request.blocks = list(block_ids)
        numbers = request.blocks[first:final]
        blocks = [self._block_pool.blocks[number] for number in numbers]
        self._block_pool.touch(blocks)
        self._pinned.setdefault(sequence.attempt_key, []).extend(blocks)
        sequence.filled_blocks = final
        self._filling.append((sequence.attempt_key, first, numbers))

    def layer_saved(self, layer_name: str) -> None:
        """Announces the blocks of this step, once the last layer of a piece of the layers is computed.

        A model's layers are cut into `piece_count` equal pieces, which are sent one after the other.
        vLLM calls this behind each layer; on CPUs, the layer is computed by then.
        """
        if not self._filling:
            return
        piece_layers = self.kv_pool.layout.layers // self.piece_count
        done, rest = divmod(self._layer_numbers[layer_name] + 1, piece_layers)
        if rest == 0:
            self.announce_filled(
                [BlocksFilled(key, first, blocks, done - 1) for key, first, blocks in self._filling]
            )

    def arrived_requests(self) -> set[str]:
        """Returns the requests whose blocks no transfer writes any more, once each.

        Of these, those that were given up are forgotten here: vLLM ends them now.
        """
        arrived = self._arrived
        self._arrived = set()
        for request_id in arrived:
            request = self._requests[request_id]
            if request.state is RequestState.ABORTED:
                self._forget(request)
        return arrived

    def sample(self, logits: torch.Tensor, request_ids: dict[int, str]) -> None:
        """Draws the next id of each request whose ids are all computed, and makes vLLM take it.

        A request with a `forced_id` has its next id already. Where none can be drawn (`SamplingFault`),
        vLLM takes one of its own, and the request ends with this step.
        """
        rows: list[int] = []
        sequences: list[Sequence] = []
        for row in range(len(logits)):
            request = self._requests.get(request_ids.get(row, ""))
            if request is None or request.request_id not in self._drawing:
                continue
            forced_id = request.forced_id
            if forced_id is not None:
                _leave_only(logits, row, forced_id)
                continue
            rows.append(row)
            sequences.append(request.sequence)
        if not rows:
            return
        # `logits[rows]` is a copy. `_draw_further` reads its row of `logits` before `_leave_only`
        # overwrites that.
        tokens = sample_tokens(logits[rows], sequences, self._grammars)
        for row, token in zip(rows, tokens, strict=True):
            request = self._requests[request_ids[row]]
            request.drawn = token
            self._draw_further(request, logits[row])
            if isinstance(token, Token):
                _leave_only(logits, row, token.id)

    def _draw_further(self, request: HostedRequest, row: torch.Tensor) -> None:
        """Draws the first ids of the further answers to a prompt, from the same logits.

        `further_answers` is true of a first answer of several, until it has an id of its own.
        """
        sequence = request.sequence
        if not sequence.further_answers:
            return
        forks = [sequence.fork(index) for index in range(1, sequence.sampling.n)]
        logits = row.repeat(len(forks), 1)
        drawn = sample_tokens(logits, forks, self._grammars)
        # Kept with their ids, and booked later: drawing notes in a sequence that its grammar is complete.
        request.drawn_further = list(zip(forks, drawn, strict=True))

    # ---- vLLM's events of its prefix cache ---------------------------------------------------

    def publish(self, batch: Any) -> None:
        """Takes vLLM's events of stored and removed blocks, once a step."""
        self._prefixes.take_events(batch.events)

    def shutdown(self) -> None:
        """Does nothing: vLLM calls this to end its publisher of events."""

    # ---- stepping ----------------------------------------------------------------------------

    def step(self) -> list[StepEvent]:
        """Has vLLM compute one step; returns what came of it. Any exception ends the worker."""
        self._start_deferred()
        if not self._scheduler.has_requests():
            return self._take_answers()
        give_worker_connector(self._connector)
        # vLLM reads its budget whenever it plans a step.
        self._scheduler.max_num_scheduled_tokens = self._step_budget()
        began = time.perf_counter()
        outputs_by_client, computed = self._core.step_fn()
        self._core.post_step(computed)
        if computed:
            self._counters.count_step(
                time.perf_counter() - began,
                prefill_tokens=self._step_prefill_tokens,
                step_tokens=self._step_tokens,
            )
        self._refuse_overdue_reservations()
        events = self._take_answers()
        for outputs in (outputs_by_client or {}).values():
            if outputs.scheduler_stats is not None:
                self._own_statistics.take(outputs.scheduler_stats)
            for output in outputs.outputs:
                events += self._book(output)
        return events

    def _step_budget(self) -> int:
        """Returns how many ids vLLM may compute in the step that begins now.

        That are `max_step_tokens` of prompts, and one of each answer that goes on. vLLM has one
        budget for both, and would give to prompts whatever the answers leave of a fixed one. An
        answer whose KV has arrived begins within the share of the prompts.
        """
        answers = sum(request.computes_one_id for request in self._requests.values())
        return min(self.limits.max_step_tokens + answers, self._step_tokens_limit)

    def _take_answers(self) -> list[StepEvent]:
        answers = self._answers
        self._answers = []
        return answers

    def idle(self) -> bool:
        """Returns whether no step has anything to do before the next command comes.

        It is asked behind a step without outputs. Prompts that wait for room (`_deferred`) wait for a
        command too: for the release of others.
        """
        if self._arrived or self._answers or self._scheduler.finished_req_ids:
            return False
        waiting = (RequestState.RECEIVING, RequestState.HELD)
        return all(request.state in waiting for request in self._requests.values())

    def _refuse_overdue_reservations(self) -> None:
        """Gives up reservations for which vLLM found no blocks in a few steps.

        While the ids of a step use up its budget, vLLM does not look at what waits for blocks.
        """
        if self._step_tokens >= self._scheduler.max_num_scheduled_tokens:
            return
        for request in list(self._requests.values()):
            if request.state is not RequestState.RESERVING:
                continue
            request.waited_steps += 1
            if request.waited_steps >= RESERVE_STEPS:
                self._give_up(request)
                self._answers.append(BlocksReserved(request.sequence.attempt_key, None))

    def _book(self, output: EngineCoreOutput) -> list[StepEvent]:
        """Moves a sequence on by what vLLM sampled for it; returns what to deliver."""
        request = self._requests.get(output.request_id)
        if request is None:
            return []
        sequence = request.sequence
        if not output.new_token_ids:
            if not output.finished:
                return []
            self._forget(request)
            return [_ended_by_vllm(sequence, output)]
        was_forced = request.forced_id is not None
        request.sampled_tokens += 1
        if was_forced:
            forks = request.waiting_forks
            request.waiting_forks = []
            for fork in forks:
                self._start(fork, RequestState.WAITING, fork.prompt_tokens)
            # An answer that ended with the id that it arrived with is here for its blocks only.
            if self._finish_reason(sequence) is not None:
                self._end(request)
            return []
        drawn = request.drawn
        request.drawn = None
        assert drawn is not None, "vLLM sampled an id that was not drawn here"
        further = request.drawn_further
        request.drawn_further = []
        scores = _prompt_scores(sequence, output.new_prompt_logprobs_tensors)
        events = self._book_token(sequence, drawn, scores)
        self._name_new_blocks(request)
        is_over = self._finish_reason(sequence) is not None or sequence.stop_after_first
        is_over = is_over or isinstance(drawn, SamplingFault)
        if output.finished and not is_over:
            events.append(_ended_by_vllm(sequence, output))  # for a reason that is none of ours
        if is_over or output.finished:
            self._end(request)
        for fork, first in further:
            events += self._book_further(fork, first)
        return events

    def _book_token(
        self,
        sequence: Sequence,
        token: Token | SamplingFault,
        prompt_scores: list[ScoredToken] | None = None,
    ) -> list[StepEvent]:
        """Appends a token to its sequence, or ends that by a fault; returns what to deliver."""
        if isinstance(token, SamplingFault):
            return [
                SequenceOutput(
                    sequence.attempt_key,
                    error=token.reason,
                    answer_index=sequence.answer_index,
                    request_at_fault=not token.model_damaged,
                )
            ]
        offset = sequence.generated_tokens
        sequence.token_ids.append(token.id)
        return [
            SequenceOutput(
                sequence.attempt_key,
                offset,
                token,
                self._finish_reason(sequence),
                hit_tokens=sequence.hit_tokens,
                prompt_logprobs=prompt_scores or [],
                answer_index=sequence.answer_index,
            )
        ]

    def _finish_reason(self, sequence: Sequence) -> str | None:
        """Returns why the answer has ended, or None while it goes on.

        It also ends, by its length, where the model or the pool has no room for a further id.
        """
        finish_reason = sequence.finish_reason()
        if finish_reason is None and len(sequence.token_ids) >= self.max_model_len:
            return "length"
        return finish_reason

    def _book_further(self, fork: Sequence, first: Token | SamplingFault) -> list[StepEvent]:
        """Begins a further answer with its first token; on a prefill worker it ends with that."""
        events = self._book_token(fork, first)
        goes_on = isinstance(first, Token) and self._finish_reason(fork) is None
        if goes_on and not fork.stop_after_first:
            self._start(fork, RequestState.WAITING, fork.prompt_tokens)
        return events

    def _end(self, request: HostedRequest) -> None:
        """Ends a request in vLLM, if vLLM has not; pinned blocks stay for their transfer."""
        sequence = request.sequence
        # An answer that goes on elsewhere, was released or failed is not counted: it has no end here.
        if self._finish_reason(sequence) is not None:
            self._counters.request_preemptions.observe(request.vllm_request.num_preemptions)
        self._core.abort_requests([request.request_id])  # one that has ended is ignored
        if sequence.stop_after_first and sequence.attempt_key in self._pinned:
            request.state = RequestState.HELD
        else:
            self._forget(request)

    def _name_new_blocks(self, request: HostedRequest) -> None:
        """Names the blocks that vLLM has hashed since the last call, which it does when ids fill them.

        So the chain of content hashes goes on into sampled ids.
        """
        sequence = request.sequence
        their_hashes = request.vllm_request.block_hashes
        block = self.limits.block_tokens
        named_blocks = len(sequence.block_hashes)
        for index in range(named_blocks, len(their_hashes)):
            ids = sequence.token_ids[index * block : (index + 1) * block]
            parent = partition_salt(self._salt, sequence.cache_partition)
            if index:
                parent = sequence.block_hashes[index - 1]
            sequence.block_hashes += block_hashes(ids, parent, block)
        self._names.learn(
            named_blocks,
            their_hashes[named_blocks:],
            sequence.block_hashes[named_blocks:],
            request.request_id,
        )

    # ---- cached prefixes ---------------------------------------------------------------------

    def stage(self, command: StagePrefix) -> PrefixStaged:
        """Stages a prefix: pins what the pool holds of it, with blocks for what a peer may bring.

        `PrefixBlocks.stage` says when it stages nothing.
        """
        return self._prefixes.stage(command, self.growth_reserve_blocks)

    def cache_staged(self, attempt_key: AttemptKey, block_count: int) -> None:
        """Caches the first `block_count` staged blocks of this key, and releases all of them.

        The cached ones stay in the cache until they are evicted.
        """
        self._prefixes.cache_staged(attempt_key, block_count)
        self._prefixes.take_events(self._scheduler.kv_cache_manager.take_events())

    def pin_for_demotion(self) -> list[tuple[int, bytes]]:
        """Returns nothing: tiers below vLLM's pool are refused when the worker is configured."""
        return []

    def finish_demotion(self, block: int, copied: bool) -> None:
        """Raises InvalidRequest: nothing is pinned for a demotion, so nobody may call this."""
        raise InvalidRequest("vLLM's pool has no tiers below it")

    def forget_in_tiers(self, hashes: list[bytes]) -> None:
        """Raises InvalidRequest: there are no tiers that could hold anything."""
        raise InvalidRequest("vLLM's pool has no tiers below it")

    # ---- what others see ---------------------------------------------------------------------

    def observe(self) -> EngineObservation:
        """Returns the cached contents that routers look up, what changed in them, and the load.

        What changed is since the last call.
        """
        self._prefixes.take_events(self._scheduler.kv_cache_manager.take_events())
        stored, evicted = self._names.drain()
        counters = self._counters
        running = [request for request in self._requests.values() if request.is_decoding]
        return EngineObservation(
            hashes=self._names.looked_up_hashes(),
            stored=stored,
            evicted=evicted,
            free_blocks=self._block_pool.get_num_free_blocks(),
            prefill_tokens=counters.prefill_tokens,
            prefill_s=counters.prefill_s,
            decode_steps=counters.decode_steps,
            decode_s=counters.decode_s,
            running_sequences=len(running),
            preempted_sequences=sum(map(is_preempted, self._vllm_requests())),
            kv_tokens=sum(len(request.sequence.token_ids) for request in running),
        )

    def _vllm_requests(self) -> list[Any]:
        """Returns vLLM's own requests of all that is hosted."""
        return [request.vllm_request for request in self._requests.values()]

    def block_holders(self) -> Iterator[tuple[AttemptKey, int]]:
        """Yields each attempt that has blocks, with their number, once for each use. Any thread.

        Callers add up what an attempt is yielded with; blocks that it both runs on and has pinned
        count twice then.
        """
        for request in list(self._requests.values()):
            if request.state is RequestState.HELD:
                continue  # its pins are counted below
            if is_preempted(request.vllm_request):
                continue  # it has none until vLLM computes it again
            # Blocks for KV that is going to arrive are there before vLLM has computed anything.
            blocks = max(len(request.blocks), self._blocks_for(request.computed_tokens))
            yield request.sequence.attempt_key, blocks
        for attempt_key, pinned_blocks in list(self._pinned.items()):
            yield attempt_key, len(pinned_blocks)
        for attempt_key, prefix in list(self._prefixes.staged.items()):
            yield attempt_key, len(prefix.blocks)

    def statistics(self) -> dict[str, Any]:
        """Returns a snapshot. Any thread."""
        requests = list(self._requests.values())
        prefilling = sum(
            request.state is RequestState.WAITING
            and not request.sampled_tokens
            and request.computed_tokens > 0
            for request in requests
        )
        waiting = len(self._deferred) + sum(
            request.state is RequestState.WAITING and not request.computed_tokens
            for request in requests
        )
        return {
            **self._counters.values(),
            "exact": self.exact,
            "kernels": f"vllm:{check_version()}",
            "dtype": self.options.dtype,
            "cores": list(self.options.cores),
            "waiting": waiting,
            "prefilling": prefilling,
            "ready": 0,  # whose KV has arrived and that wait for a place; vLLM counts them as waiting
            "running": sum(request.is_decoding for request in requests),
            "preemptions": self._preemptions,
            "drafted": 0,
            "accepted": 0,
            "kv_blocks": self._block_statistics(requests),
            "vllm": self._own_statistics.values(),
        }

    def _block_statistics(self, requests: list[HostedRequest]) -> dict[str, int]:
        """Returns the number of blocks by their use; a block that several share counts once."""
        total = self.block_count
        unused = self._block_pool.get_num_free_blocks()
        cached = sum(
            block.ref_cnt == 0 and block.block_hash is not None for block in self._block_pool.blocks
        )
        reserved = {block.block_id for blocks in list(self._pinned.values()) for block in blocks}
        for request in requests:
            if request.state in (RequestState.RECEIVING, RequestState.ABORTED):
                reserved.update(request.blocks)
        staged = {
            block.block_id
            for prefix in list(self._prefixes.staged.values())
            for block in prefix.blocks
        } - reserved
        cached = min(cached, unused)  # another thread may have moved a block in between
        return {
            "total": total,
            "free": unused - cached,
            "cached": cached,
            "reserved": len(reserved),
            "staged": len(staged),
            "demoting": 0,
            "active": total - unused - len(reserved) - len(staged),
        }


def _ended_by_vllm(sequence: Sequence, output: EngineCoreOutput) -> SequenceOutput:
    """Returns the error for an answer that vLLM has ended and we have not."""
    return SequenceOutput(
        sequence.attempt_key,
        error=f"vLLM ended the request: {output.finish_reason}",
        answer_index=sequence.answer_index,
    )


def _priority(sequence: Sequence) -> int:
    """Returns vLLM's priority of a sequence, by its deadline; a lower one goes first."""
    priority = int(1e3 * (sequence.deadline_s or time.monotonic()))
    return priority + BACKGROUND_PRIORITY if sequence.background else priority


def _leave_only(logits: torch.Tensor, row: int, token_id: int) -> None:
    """Leaves one id to choose in a row."""
    logits[row] = -torch.inf
    logits[row, token_id] = 0.0


def _prompt_scores(sequence: Sequence, tensors: Any) -> list[ScoredToken]:
    """Returns vLLM's logprobs of the prompt, from its second id on, as ours; [] if there are none.

    In a row of vLLM's tensors the prompt's own id comes first, then the likeliest ones.
    """
    if tensors is None:
        return []
    scores: list[ScoredToken] = []
    rows = zip(
        tensors.logprob_token_ids.tolist(),
        tensors.logprobs.tolist(),
        tensors.selected_token_ranks.tolist(),
        strict=True,
    )
    for ids, logprobs, rank in rows:
        top = tuple(zip(ids[1:], logprobs[1:], strict=True))
        scores.append(ScoredToken(ids[0], logprobs[0], top, rank))
    sequence.prompt_logprobs_sent += len(scores)
    return scores
