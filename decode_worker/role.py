"""The decode role (pure): receives KV and turns it into a token stream.

Life of an attempt:
    RESERVING  The engine is asked for blocks. If it has none, the attempt fails (`no_capacity`).
    RECEIVING  The ticket is open: the prefill worker fills the blocks.
    RUNNING    Every block has arrived and is verified: the sequence is decoded, and each further
               token goes to the gateway. The first token of each answer went there from the
               prefill worker.
    DRAINING   The transfer has failed, or was cancelled: the attempt's blocks stay reserved until
               no write can land on them.

An attempt is one placement of a request on a pair of workers. Its KV travels in one transfer, the
ticket: this worker offers blocks, and the prefill worker pushes into them.

An attempt without a prefill worker skips the transfer, and begins as RUNNING: the engine computes
its prompt here, and the prefix may come from tiers or a peer (`PrefixExchange`). This worker then
sends the first tokens too.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias, assert_never

import msgspec

from ..engine.commands import (
    BlocksLoaded,
    BlocksReserved,
    CommitBlocks,
    PrefixStaged,
    ReleaseSequence,
    ReserveBlocks,
)
from ..engine.prefixes import PrefixAction, PrefixExchange, is_prefix_ticket
from ..engine.roles import RoleEvent, error_frame, failure_frame, sequence_of
from ..engine.sequence import BlocksFilled, Sequence, SequenceOutput, tokens_frame
from ..kv_transfer.commands import (
    BlocksArrived,
    BlocksFreed,
    CancelTransfer,
    OfferBlocks,
    PrefixRequested,
    PushEnded,
    TransferFailed,
)
from ..kv_transfer.identity import prompt_digest, ticket_id_of
from ..kv_transfer.messages import FirstTokens
from ..protos.frames import (
    HANDOVER,
    AttemptKey,
    CancelAttempt,
    DeliverFrame,
    PromptArrived,
    StartDecode,
)


@dataclass(frozen=True, slots=True)
class DecodeAttemptEnded:
    """The attempt is over on this worker, which forgets it: no frame goes anywhere."""

    attempt_key: AttemptKey


#: `PrefixAction` already includes `ReleaseSequence`, `OfferBlocks` and `CancelTransfer`.
DecodeAction: TypeAlias = (
    PrefixAction | ReserveBlocks | CommitBlocks | DeliverFrame | DecodeAttemptEnded
)


class DecodeState(StrEnum):
    """The states in the life of an attempt, as the module describes it."""

    RESERVING = "reserving"
    RECEIVING = "receiving"
    RUNNING = "running"
    DRAINING = "draining"


@dataclass(slots=True)
class DecodeAttempt:
    """One attempt at a request on this worker."""

    gateway: str  #: Who gets the answers' tokens.
    sequence: Sequence  #: Of answer 0; the engine makes those of further answers from it.
    prefill_worker: str | None  #: None: the prompt is computed here.
    state: DecodeState
    open_answers: set[int]  #: Indices of the answers that go on.
    cancelled: bool = False  #: True if the gateway is to hear no more of the attempt.


class DecodeRole:
    """All attempts of one decode worker, and the prefixes that it fetches and serves."""

    def __init__(self, name: str, block_tokens: int, has_tiers: bool = False) -> None:
        """`has_tiers`: there are tiers below the KV pool."""
        self.name = name  #: The worker's id, by which gateways hear of failures.
        self.block_tokens = block_tokens  #: Tokens of a block in this worker's KV pool.
        self.prefixes = PrefixExchange(block_tokens, has_tiers)
        self.attempts: dict[str, DecodeAttempt] = {}  #: By ticket id.

    def submit(
        self,
        gateway: str,
        frame: StartDecode,
        block_hashes: list[bytes],
        deadline_s: float = 0.0,
    ) -> list[DecodeAction]:
        """Begins a gateway's new attempt. A duplicate changes nothing.

        `block_hashes` are the content hashes of the full blocks of the frame's ids. `deadline_s` is
        when the first token is due, by the same clock for all attempts of this worker; 0: no deadline.
        The engine computes preempted prompts first, then the new one with the lowest `deadline_s`; a
        prompt without a deadline counts as urgent. Prompts whose deadline has passed go last.
        """
        ticket_id = ticket_id_of(frame.attempt_key)
        if ticket_id in self.attempts:
            return []
        sequence = sequence_of(frame, block_hashes, deadline_s)
        local_prefill = frame.prefill_worker is None
        self.attempts[ticket_id] = DecodeAttempt(
            gateway,
            sequence,
            frame.prefill_worker,
            state=DecodeState.RUNNING if local_prefill else DecodeState.RESERVING,
            open_answers=set(range(frame.sampling.n)),
        )
        if local_prefill:
            return [*self.prefixes.begin_sequence(sequence, frame.prefix_holder)]
        return [ReserveBlocks(sequence)]

    def handle(self, event: RoleEvent) -> list[DecodeAction]:
        """Takes what happened on this worker, and returns what the worker is to do about it.

        Tickets of two kinds are told apart by their ids: those of prefixes, and those of attempts.
        """
        match event:
            case PrefixRequested() | PrefixStaged() | BlocksLoaded():
                return [*self.prefixes.handle(event)]
            case BlocksArrived() | TransferFailed() | BlocksFreed() | PushEnded() if (
                is_prefix_ticket(event.ticket_id)
            ):
                return [*self.prefixes.handle(event)]
            case SequenceOutput():
                return self._output(event)
            case BlocksFilled():
                return []  # the engine got this sequence while the worker's role was prefill
            case BlocksReserved():
                return self._reserved(event)
            case BlocksArrived():
                return self._arrived(event)
            case TransferFailed(ticket_id, reason):
                return self._failed(self.attempts[ticket_id], reason)
            case BlocksFreed(ticket_id):
                return self._end(ticket_id)
            case CancelAttempt(attempt_key):
                return self._cancel(ticket_id_of(attempt_key), "aborted")
            case PushEnded():
                # Not even one of the worker's former role, which changes only when none is left. Events
                # of the engine may still be under way then, and are ignored above.
                raise AssertionError(f"no attempt of a decode worker pushes KV: {event!r}")
            case _:
                assert_never(event)

    def hand_over(self) -> list[DecodeAction]:
        """Gives up every attempt, so that its gateway goes on with it at another worker.

        Attempts that were cancelled, or whose transfer has failed, are given up already. The KV
        that was computed stays cached.
        """
        actions: list[DecodeAction] = []
        for ticket_id, attempt in list(self.attempts.items()):
            if not attempt.cancelled and attempt.state is not DecodeState.DRAINING:
                actions.append(self._failure(attempt, HANDOVER))
                actions += self._cancel(ticket_id, HANDOVER)
        return actions

    def lose_gateway(self, gateway: str) -> list[DecodeAction]:
        """Cancels the attempts of a gateway that is lost."""
        actions: list[DecodeAction] = []
        for ticket_id, attempt in list(self.attempts.items()):
            if attempt.gateway == gateway:
                actions += self._cancel(ticket_id, "aborted")
        return actions

    def _failure(self, attempt: DecodeAttempt, reason: str) -> DeliverFrame:
        return failure_frame(attempt.gateway, attempt.sequence.attempt_key, self.name, reason)

    def _reserved(self, reserved: BlocksReserved) -> list[DecodeAction]:
        ticket_id = ticket_id_of(reserved.attempt_key)
        attempt = self.attempts[ticket_id]
        if attempt.cancelled:
            return self._end(ticket_id)
        if reserved.blocks is None:
            return [self._failure(attempt, "no_capacity"), *self._end(ticket_id)]
        attempt.state = DecodeState.RECEIVING
        # Without one, the attempt would have begun as RUNNING, and reserved nothing.
        assert attempt.prefill_worker is not None
        # All blocks of the prompt are offered; KV of the first `held_tokens` is in this worker's cache
        # already, so the prefill worker need not push it.
        offer = OfferBlocks(
            ticket_id,
            attempt.prefill_worker,
            reserved.blocks,
            tokens=len(attempt.sequence.token_ids),
            held_tokens=reserved.held_blocks * self.block_tokens,
        )
        return [offer]

    def _arrived(self, arrived: BlocksArrived) -> list[DecodeAction]:
        """Decodes on: the KV is here, and with it the first token of each answer."""
        attempt = self.attempts[arrived.ticket_id]
        if attempt.cancelled:
            return self._end(arrived.ticket_id)
        attempt.state = DecodeState.RUNNING
        sequence = attempt.sequence
        try:
            first = msgspec.msgpack.decode(arrived.meta, type=FirstTokens)
        except msgspec.DecodeError:
            first = FirstTokens([])
        if len(first.tokens) < sequence.sampling.n:
            reason = "the prefill worker did not send the first token of each answer"
            return [self._failure(attempt, reason), *self._end(arrived.ticket_id)]
        if first.prompt_digest not in (0, prompt_digest(sequence.token_ids)):
            # The KV is intact, but it is that of another prompt: decoding on would answer another
            # question. (The digest is 0 if an older prefill worker sent none.)
            return [self._failure(attempt, "kv_prompt"), *self._end(arrived.ticket_id)]
        # The prompt's KV is here, the first token's is not: the first step here computes it.
        sequence.token_ids.append(first.tokens[0].id)
        attempt.open_answers.difference_update(first.ended_answers)
        other_answers = sorted(attempt.open_answers - {0})
        commit = CommitBlocks(
            sequence,
            other_answers=tuple((index, first.tokens[index].id) for index in other_answers),
            first_answer_ended=0 in first.ended_answers,
            # Since the prefill worker sent the first token: the scheduler counts that time as part of
            # the gap before the second one.
            waited_s=arrived.exposed_s,
        )
        # For the gateway's record: the tokens whose KV arrived, how long any of it was on its way, and
        # how long of that the prompt was computed already.
        prompt_arrived = PromptArrived(
            sequence.attempt_key, arrived.tokens, arrived.busy_s * 1e3, arrived.exposed_s * 1e3
        )
        return [commit, DeliverFrame(attempt.gateway, prompt_arrived)]

    def _failed(self, attempt: DecodeAttempt, reason: str) -> list[DecodeAction]:
        """Tells the gateway of a failed transfer. The attempt ends with `BlocksFreed`."""
        attempt.state = DecodeState.DRAINING
        # "finished": each answer ended with its first token. The prefill worker sent these tokens
        # to the gateway, and cancelled the transfer.
        if attempt.cancelled or reason == "finished":
            return []
        return [self._failure(attempt, f"kv_{reason}")]

    def _output(self, output: SequenceOutput) -> list[DecodeAction]:
        ticket_id = ticket_id_of(output.attempt_key)
        attempt = self.attempts.get(ticket_id)
        if attempt is None:
            # The attempt ended while the step ran, or before, in the worker's role as prefill
            # worker. A release that is repeated changes nothing.
            return [ReleaseSequence(output.attempt_key)]
        if output.error is not None:
            return [error_frame(attempt.gateway, self.name, output), *self._end(ticket_id)]
        actions: list[DecodeAction] = []
        if output.token or output.prompt_logprobs:
            actions.append(tokens_frame(attempt.gateway, output))
        if output.finish_reason:
            attempt.open_answers.discard(output.answer_index)
        if not attempt.open_answers:
            actions += self._end(ticket_id)
        return actions

    def _cancel(self, ticket_id: str, reason: str) -> list[DecodeAction]:
        """Cancels an attempt, once.

        A running one ends now. One that is RESERVING ends with the engine's answer. One whose
        ticket is open ends with its transfer, since until then its blocks may be written to.
        """
        attempt = self.attempts.get(ticket_id)
        if attempt is None or attempt.cancelled:
            return []
        attempt.cancelled = True
        match attempt.state:
            case DecodeState.RECEIVING:
                return [CancelTransfer(ticket_id, reason)]
            case DecodeState.RUNNING:
                return self._end(ticket_id)
            case DecodeState.RESERVING | DecodeState.DRAINING:
                return []
            case _:
                assert_never(attempt.state)

    def _end(self, ticket_id: str) -> list[DecodeAction]:
        """Releases everything that the attempt has on this worker: its fetch and its blocks.

        No transfer writes into these blocks any more. A fetch that is still under way writes into blocks
        of its own, which `PrefixExchange` keeps until it is over.
        """
        attempt_key = self.attempts.pop(ticket_id).sequence.attempt_key
        cancel_prefix = self.prefixes.cancel(attempt_key)
        return [*cancel_prefix, ReleaseSequence(attempt_key), DecodeAttemptEnded(attempt_key)]
