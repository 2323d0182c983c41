"""A sequence in the engine: token ids, blocks, and how far its KV is."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import xxhash

from ..protos.frames import AnswerTokens, AttemptKey, DeliverFrame, Sampling, Token


@dataclass(slots=True, eq=False)
class Sequence:
    """`ids` = prompt + generated. `computed` ids have KV; the last id has none until its step.

    It may begin with generated ids: an answer that another engine left. All that it goes on by is a
    function of ids, parameters and position.
    """

    attempt_key: AttemptKey
    token_ids: list[int]
    prompt_tokens: int  #: number of prompt ids
    sampling: Sampling
    block_hashes: list[bytes] = field(
        default_factory=list
    )  #: of full blocks: the prompt's, then more
    stop_after_first: bool = False  #: prefill worker: decode goes on elsewhere
    blocks: list[int] = field(default_factory=list)
    computed_tokens: int = 0
    hit_tokens: int = 0  #: prompt tokens whose KV was found in the prefix cache
    published_blocks: int = 0  #: blocks whose content hash is published
    filled_blocks: int = 0  #: blocks that were told as `Filled`, in all layers
    deadline_s: float = 0.0  #: the caller's order of prefill: lower first, ties by arrival
    waited_s: float = 0.0  #: seconds since its last token, when it was committed
    arrival_number: int = 0  #: its age, given by the scheduler; a resumed sequence keeps it
    was_preempted: bool = False  #: was preempted
    answer_index: int = 0  #: which of the answers to its prompt
    prompt_logprobs_sent: int = (
        1  #: leading prompt ids whose logprobs were delivered; the first has none
    )
    grammar_complete: bool = False  #: its grammar admits nothing behind the last id
    sampler_state: Any = field(
        default=None, repr=False
    )  #: the sampler's; rebuilt from ids if missing
    ngrams: Any = field(default=None, repr=False)  #: what drafts are guessed from
    drafts: list[int] = field(default_factory=list)  #: guesses to verify; cut if there is no room
    queue: SequenceQueue | None = field(
        default=None, repr=False
    )  #: where it stands; None: blocks are held

    @property
    def name(self) -> tuple[AttemptKey, int]:
        """What tells it apart: answers to one prompt share their key."""
        return self.attempt_key, self.answer_index

    @property
    def further_answers(self) -> int:
        """Further answers that begin when its prompt is computed."""
        return self.sampling.n - 1 if self.answer_index == 0 and self.generated_tokens == 0 else 0

    def fork(self, index: int) -> Sequence:
        """Answer `index` to the same prompt: without blocks, its draws by a seed of its own."""
        return Sequence(
            self.attempt_key,
            self.token_ids[: self.prompt_tokens],
            self.prompt_tokens,
            sampling_of_answer(self.sampling, index),
            list(self.block_hashes),
            self.stop_after_first,
            hit_tokens=self.hit_tokens,
            deadline_s=self.deadline_s,
            answer_index=index,
            prompt_logprobs_sent=self.prompt_tokens,
        )

    @property
    def prefill_order(self) -> tuple[bool, float, int]:
        """Order of prefill: resumed ones by age, then new ones by deadline and arrival."""
        return (
            not self.was_preempted,
            0.0 if self.was_preempted else self.deadline_s,
            self.arrival_number,
        )

    @property
    def generated_tokens(self) -> int:
        return len(self.token_ids) - self.prompt_tokens

    @property
    def cacheable_tokens(self) -> int:
        """Leading ids whose KV may come from the prefix cache: their logits are not needed."""
        most = len(self.token_ids) - 1
        if self.sampling.prompt_logprobs is None or self.prompt_logprobs_sent == self.prompt_tokens:
            return most
        return min(most, self.prompt_logprobs_sent - 1)

    def finish_reason(self) -> str | None:
        """Why the answer ends with the last id, if it does."""
        if self.generated_tokens and (
            self.grammar_complete or self.token_ids[-1] in self.sampling.stop_ids
        ):
            return "stop"
        return "length" if self.generated_tokens >= self.sampling.max_tokens else None


def sampling_of_answer(sampling: Sampling, index: int) -> Sampling:
    """What answer `index` of several is sampled by: its draws have a seed of their own."""
    if index == 0:
        return msgspec.structs.replace(sampling, n=1)
    seed = xxhash.xxh3_64_intdigest(f"{sampling.seed}/{index}".encode())
    return msgspec.structs.replace(sampling, seed=seed, n=1)


class SequenceQueue(list[Sequence]):
    """Sequences in order of a key that no two share; each knows the line it stands in."""

    def __init__(self, key: Callable[[Sequence], Any]) -> None:
        super().__init__()
        self._key = key

    def enter(self, seq: Sequence) -> None:
        assert seq.queue is None, seq
        insort(self, seq, key=self._key)
        seq.queue = self

    def leave(self, seq: Sequence) -> None:
        index = bisect_left(self, self._key(seq), key=self._key)
        assert self[index] is seq, seq
        del self[index]
        seq.queue = None


@dataclass(frozen=True, slots=True)
class BlocksFilled:
    """Told while a prefill's step runs: the KV of its blocks `first`.. is final.

    `piece`: in the layers of this piece (`slices.piece_layers`); -1: in all.
    """

    attempt_key: AttemptKey
    first_block: int
    blocks: list[int]
    piece: int = -1


@dataclass(frozen=True, slots=True)
class SequenceOutput:
    """What a step did for one sequence.

    `prompt`: the next ids of the prompt with their logprobs, from the second id on, each once.
    `error`: the sequence ended without an answer, and why; `refused`: the request is at fault.
    `index`: which of the answers.
    """

    attempt_key: AttemptKey
    offset: int = 0
    token: Token | None = None
    finish_reason: str | None = None
    hit_tokens: int = 0
    prompt_logprobs: list[Token] = field(default_factory=list)
    error: str | None = None
    answer_index: int = 0
    request_at_fault: bool = False


def tokens_frame(gateway: str, output: SequenceOutput) -> DeliverFrame:
    """What an output is for the gateway of its request."""
    tokens = [output.token] if output.token else []
    fields = (
        output.attempt_key,
        output.offset,
        tokens,
        output.finish_reason,
        output.answer_index,
        output.prompt_logprobs,
    )
    return DeliverFrame(gateway, AnswerTokens(*fields))
