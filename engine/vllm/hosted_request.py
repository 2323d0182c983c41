"""What the hosting keeps of each sequence that vLLM computes (pure: imports neither torch nor vLLM).

vLLM knows requests, we know sequences. One request of vLLM computes one answer to one prompt. Its
prompt are the ids that the sequence had when the request was made (`start_tokens`). Ids that the
sequence got in the meantime, from a prefill worker or from an answer that began elsewhere, are
forced on vLLM one by one: it samples them and nothing else, and nobody is told of them again.

Life of a request:
    WAITING     vLLM computes it as soon as it can.
    RESERVING   It is to get blocks for KV that is going to arrive. It has them after the first
                step that has budget for it; if vLLM has none in a few steps, it is refused.
    RECEIVING   It has blocks; a transfer writes into them, and vLLM waits.
    HELD        Its prompt is computed, and vLLM has ended it; our pins keep the blocks for a
                transfer that reads them.
    ABORTED     It was given up before vLLM heard that its KV has arrived; vLLM frees the blocks in
                its next step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from ...protos.frames import AttemptKey, Token
from ..sampler import SamplingFault
from ..sequence import Sequence


class RequestState(StrEnum):
    """The states in the life of a request, as the module describes it."""

    WAITING = "waiting"
    RESERVING = "reserving"
    RECEIVING = "receiving"
    HELD = "held"
    ABORTED = "aborted"


@dataclass(slots=True, eq=False)
class HostedRequest:
    """One request of vLLM, and the sequence that it computes."""

    sequence: Sequence
    state: RequestState
    #: How many of the sequence's ids are vLLM's prompt; what it samples comes behind them.
    start_tokens: int
    vllm_request: Any = None  #: vLLM's own `Request`; set when it is handed over.
    sampled_tokens: int = 0  #: Ids that vLLM has sampled, forced ones included.
    blocks: list[int] = field(default_factory=list)  #: Of its KV, as far as vLLM has told.
    #: True if its prompt's KV came from a peer, so that computing it is no prefill unless vLLM has
    #: taken the blocks for others.
    received: bool = False
    #: Steps with budget to spare in which a RESERVING request got no blocks.
    waited_steps: int = 0
    #: What this step drew for its next id; None while vLLM computes the prompt.
    drawn: Token | SamplingFault | None = None
    #: With `drawn`, the further answers to its prompt, each with the first token drawn for it.
    drawn_further: list[tuple[Sequence, Token | SamplingFault]] = field(default_factory=list)
    #: Further answers to its prompt that begin once its blocks are cached.
    waiting_forks: list[Sequence] = field(default_factory=list)
    computed_tokens: int = 0  #: Ids with KV, as vLLM schedules it; at the end of a step.

    @property
    def request_id(self) -> str:
        """The id that vLLM has it by."""
        return request_id_of(self.sequence.attempt_key, self.sequence.answer_index)

    @property
    def next_position(self) -> int:
        """Where the id stands that vLLM samples next, in the sequence's ids."""
        return self.start_tokens + self.sampled_tokens

    @property
    def forced_id(self) -> int | None:
        """The id that vLLM must sample next as the sequence has it already; None: any may come."""
        if self.next_position < len(self.sequence.token_ids):
            return self.sequence.token_ids[self.next_position]
        return None

    @property
    def is_decoding(self) -> bool:
        """Whether its prompt is computed and it goes on token by token."""
        return self.state is RequestState.WAITING and self.sampled_tokens > 0

    @property
    def computes_one_id(self) -> bool:
        """Whether its answer goes on in the next step, by computing the id that it got last.

        False also while vLLM computes its ids again, having taken their blocks for others.
        """
        if not self.is_decoding:
            return False
        return bool(self.next_position - self.vllm_request.num_computed_tokens == 1)


def request_id_of(attempt_key: AttemptKey, answer_index: int) -> str:
    """Returns the id of the request for an answer of an attempt; no other request has it."""
    request, attempt = attempt_key
    return f"{request}#{attempt}#{answer_index}"
