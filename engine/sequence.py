"""A sequence in the engine: token ids, blocks, and how far its KV is. And what a step says of it.

A sequence is one answer to one prompt, on one engine. It may begin with generated ids: an answer
that another engine left. All that it goes on by is a function of ids, parameters and position. It
belongs to an attempt: one placement of a request on workers, named by its `AttemptKey`.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, MutableSequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import xxhash

from ..protos.frames import AnswerTokens, AttemptKey, DeliverFrame, Sampling, ScoredToken, Token


@dataclass(frozen=True, slots=True)
class RunMark:
    """Where the clock of steps (`step_limit.StepClock`) stood when an answer began to run.

    The difference to what the clock says later is what the answer has been through since.
    """

    elapsed_s: float  #: seconds of all steps before
    late_steps: int  #: how many of these steps took longer than the target for gaps allows
    generated_tokens: int  #: of the answer, at that time


@dataclass(slots=True, eq=False)
class Sequence:
    """What the engine computes for one answer.

    `token_ids` are the prompt's and the generated ones. The first `computed_tokens` of them have
    KV; the last id has none until its step. Engines keep them in a list. The simulator, whose ids
    say nothing but where an answer ends, keeps a byte of each.
    """

    attempt_key: AttemptKey
    token_ids: MutableSequence[int]
    prompt_tokens: int  #: number of prompt ids
    sampling: Sampling
    #: content hashes of full blocks: the prompt's first, and the answer's as they get full
    block_hashes: list[bytes] = field(default_factory=list)
    stop_after_first: bool = False  #: on a prefill worker: decode goes on elsewhere
    blocks: list[int] = field(default_factory=list)  #: of the engine's pool, in order of the ids
    computed_tokens: int = 0
    hit_tokens: int = 0  #: prompt tokens whose KV was found in the prefix cache
    published_blocks: int = 0  #: leading blocks whose content hash is published
    filled_blocks: int = 0  #: leading blocks that were announced as `BlocksFilled`, in all layers
    #: when its first token is due, by the clock of `Scheduler.plan`: prefill in this order, ties by
    #: arrival; 0: in order of arrival
    deadline_s: float = 0.0
    background: bool = False  #: its first token is late: others go first, its gaps limit no step
    waited_s: float = 0.0  #: seconds from its last token, made elsewhere, to its commit here
    run_mark: RunMark | None = None  #: where the engine's clock stood when it began to run
    #: its age, set by the scheduler: lower is older; a preempted sequence keeps it
    arrival_number: int = 0
    #: it lost its blocks, or got none as a further answer: it goes before all that is new
    was_preempted: bool = False
    preemptions: int = 0  #: so often its blocks were taken away on this engine
    answer_index: int = 0  #: which of the answers to its prompt
    #: leading prompt ids whose logprobs were delivered; the first id has none, so it counts as sent
    prompt_logprobs_sent: int = 1
    grammar_complete: bool = False  #: its grammar admits nothing behind the last id
    #: the sampler's memory of the ids (`sampler.SamplerState`); rebuilt from them if missing
    sampler_state: Any = field(default=None, repr=False)
    ngrams: Any = field(default=None, repr=False)  #: a `drafts.NGramDrafter`, once it is needed
    #: guesses at the next ids, which its next step verifies; none if there is no room for their KV
    drafts: list[int] = field(default_factory=list)
    cache_partition: bytes = b""  #: who shares the blocks: `kv_transfer.identity.partition_salt`
    #: the scheduler's queue in which it stands; None: a transfer reads or writes its blocks, or the
    #: sequence is new or over
    queue: SequenceQueue | None = field(default=None, repr=False)

    @property
    def name(self) -> tuple[AttemptKey, int]:
        """The key of the attempt and the number of the answer: no other sequence has both."""
        return self.attempt_key, self.answer_index

    @property
    def further_answers(self) -> int:
        """How many further answers begin when its prompt is computed."""
        if self.answer_index > 0 or self.generated_tokens > 0:
            return 0
        return self.sampling.n - 1

    def fork(self, index: int) -> Sequence:
        """Returns answer `index` to the same prompt: without blocks, with draws of its own."""
        return Sequence(
            attempt_key=self.attempt_key,
            token_ids=self.token_ids[: self.prompt_tokens],
            prompt_tokens=self.prompt_tokens,
            sampling=sampling_of_answer(self.sampling, index),
            block_hashes=list(self.block_hashes),
            cache_partition=self.cache_partition,
            stop_after_first=self.stop_after_first,
            hit_tokens=self.hit_tokens,
            deadline_s=self.deadline_s,
            background=self.background,
            answer_index=index,
            prompt_logprobs_sent=self.prompt_tokens,
        )

    @property
    def prefill_order(self) -> tuple[bool, float, int]:
        """Order of prefill: preempted sequences by age, then new ones by deadline and arrival."""
        if self.was_preempted:
            return False, 0.0, self.arrival_number
        return True, self.deadline_s, self.arrival_number

    @property
    def generated_tokens(self) -> int:
        """How many ids of the answer there are, those from another engine included."""
        return len(self.token_ids) - self.prompt_tokens

    @property
    def cacheable_tokens(self) -> int:
        """How many leading ids may have their KV from the prefix cache: no logits of theirs needed.

        The last id's logits give the next token. The logits of an id also give the logprob of the
        id behind it, so prompt logprobs that are still to be sent need the ids before them.
        """
        without_last = len(self.token_ids) - 1
        if self.sampling.prompt_logprobs is None or self.prompt_logprobs_sent == self.prompt_tokens:
            return without_last
        return min(without_last, self.prompt_logprobs_sent - 1)

    def finish_reason(self) -> str | None:
        """Returns why the answer ends with the last id, or None if it goes on."""
        generated_tokens = self.generated_tokens
        if generated_tokens and (
            self.grammar_complete or self.token_ids[-1] in self.sampling.stop_ids
        ):
            return "stop"
        if generated_tokens >= self.sampling.max_tokens:
            return "length"
        return None


def sampling_of_answer(sampling: Sampling, index: int) -> Sampling:
    """Returns what answer `index` of several is sampled by: its draws have a seed of their own.

    Answer 0 keeps the request's seed, so it is what a request for one answer gets.
    """
    if index == 0:
        return msgspec.structs.replace(sampling, n=1)
    seed = xxhash.xxh3_64_intdigest(f"{sampling.seed}/{index}".encode())
    return msgspec.structs.replace(sampling, seed=seed, n=1)


class SequenceQueue:
    """Sequences in order of a key that no two share. Each stands in at most one queue, its `queue`.

    What the key reads of a sequence must not change while it stands in the queue.
    """

    def __init__(self, key: Callable[[Sequence], Any]) -> None:
        """`key` gives what sequences are ordered by, the lowest first."""
        self.sequences: list[Sequence] = []  #: in order, to be read; `enter` and `leave` change it
        self._key = key

    def enter(self, sequence: Sequence) -> None:
        """Puts the sequence at its place."""
        assert sequence.queue is None, sequence
        insort(self.sequences, sequence, key=self._key)
        sequence.queue = self

    def leave(self, sequence: Sequence) -> None:
        """Takes the sequence out. Its key must be the one that it entered with."""
        index = bisect_left(self.sequences, self._key(sequence), key=self._key)
        assert self.sequences[index] is sequence, sequence
        del self.sequences[index]
        sequence.queue = None

    def __len__(self) -> int:
        return len(self.sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self.sequences)

    def __getitem__(self, index: int) -> Sequence:
        return self.sequences[index]


@dataclass(frozen=True, slots=True)
class BlocksFilled:
    """Tells while a prefill's step runs: the KV of these blocks is final, so it may be sent."""

    attempt_key: AttemptKey
    first_block: int  #: place of the first of `blocks` in the sequence
    blocks: list[int]  #: of the pool
    #: the layers in which it is final: piece i of the equal pieces that the layers are cut into
    #: (`slices.piece_layers`); -1: all layers
    piece: int = -1


@dataclass(frozen=True, slots=True)
class SequenceOutput:
    """What a step did for one sequence."""

    attempt_key: AttemptKey
    offset: int = 0  #: place of `token` in the answer, from 0
    token: Token | None = None  #: None: the step only computed a part of the prompt, or failed
    finish_reason: str | None = None  #: stop | length, with the last token; None: it goes on
    hit_tokens: int = 0  #: prompt tokens whose KV was found in the prefix cache
    #: the next ids of the prompt with their logprobs, from the second id on, each once
    prompt_logprobs: list[ScoredToken] = field(default_factory=list)
    error: str | None = None  #: why the sequence ended without an answer
    answer_index: int = 0
    request_at_fault: bool = False  #: the error is the request's, not the engine's


def tokens_frame(gateway: str, output: SequenceOutput) -> DeliverFrame:
    """Returns the frame that brings an output without `error` to the gateway of its request."""
    tokens = AnswerTokens(
        output.attempt_key,
        output.offset,
        [output.token] if output.token else [],
        output.finish_reason,
        answer_index=output.answer_index,
        prompt_logprobs=output.prompt_logprobs,
    )
    return DeliverFrame(gateway, tokens)
