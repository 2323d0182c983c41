"""The prefill role (pure): it has prompts computed, and pushes their KV to decode workers.

An attempt is one placement of a request on a pair of workers. Its KV travels in one transfer, the
ticket: the decode worker offers blocks, and this worker pushes into them.

Life of an attempt:
    COMPUTING  `submit` expects the decode worker's offer, and fetches the prefix from tiers or a
               peer (`PrefixExchange`); then the engine computes chunk by chunk. Blocks are pushed,
               a piece of the layers at a time, while the next layers are computed. Each answer's
               first token goes to the gateway at once.
    SENDING    Every answer has its first token: the ticket is finished with these tokens.
    CLOSING    Cancelled, failed in the engine, or nothing to send since every answer ended with
               its first token: the ticket is cancelled. The gateway hears no more of the attempt.
`PushEnded` ends the attempt from every state: no write is under way, so its blocks are released. A
prefix that is still being fetched has blocks of its own, which `PrefixExchange` keeps until no write
can land on them.

The engine announces all blocks of a prompt, as `BlocksFilled`: those that it computed, and at the
beginning those of a prefix that it found in its cache. So the whole prompt is pushed.

The reason of a `CancelTransfer` reaches the decode worker with the end of the ticket, as the reason of
its `TransferFailed`. By "finished" it knows that nothing went wrong.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias, assert_never

import msgspec

from ..engine.commands import BlocksLoaded, BlocksReserved, PrefixStaged, ReleaseSequence
from ..engine.prefixes import PrefixAction, PrefixExchange, is_prefix_ticket
from ..engine.roles import RoleEvent, error_frame, failure_frame, sequence_of
from ..engine.sequence import BlocksFilled, SequenceOutput, tokens_frame
from ..kv_transfer.commands import (
    BlocksArrived,
    BlocksFreed,
    CancelTransfer,
    ExpectOffer,
    FinishPush,
    PrefixRequested,
    PushBlocks,
    PushEnded,
    TransferFailed,
)
from ..kv_transfer.identity import prompt_digest, ticket_id_of
from ..kv_transfer.messages import FirstTokens
from ..protos.frames import HANDOVER, AttemptKey, CancelAttempt, DeliverFrame, StartPrefill

#: `PrefixAction` has `ReleaseSequence` and all commands about tickets (`ExpectOffer`, ...).
PrefillAction: TypeAlias = PrefixAction | DeliverFrame


class PrefillState(StrEnum):
    """The states in the life of an attempt, as the module describes it."""

    COMPUTING = "computing"
    SENDING = "sending"
    CLOSING = "closing"


@dataclass(slots=True)
class PrefillAttempt:
    """One attempt at a request on this worker."""

    attempt_key: AttemptKey
    gateway: str  #: The name of the gateway that gets the first tokens, or hears of the failure.
    answer_count: int  #: The `n` of the request's sampling.
    prompt_digest: int  #: Of the prompt's ids, for the decode worker to compare.
    state: PrefillState = PrefillState.COMPUTING
    first_outputs: dict[int, SequenceOutput] = field(default_factory=dict)  #: By answer index.


class PrefillRole:
    """All attempts of one prefill worker, and the prefixes that it fetches and serves."""

    def __init__(self, name: str, block_tokens: int, has_tiers: bool = False) -> None:
        """`block_tokens`: tokens of a block in the KV pool. `has_tiers`: there are tiers below it."""
        self.name = name  #: The worker's id, by which gateways hear of failures.
        self.prefixes = PrefixExchange(block_tokens, has_tiers)
        self.attempts: dict[str, PrefillAttempt] = {}  #: By ticket id.

    def submit(
        self,
        gateway: str,
        frame: StartPrefill,
        block_hashes: list[bytes],
        deadline_s: float = 0.0,
    ) -> list[PrefillAction]:
        """Begins a gateway's new attempt. A duplicate changes nothing.

        `block_hashes` are the content hashes of the full blocks of the frame's ids. `deadline_s` is
        when the first token is due, by the same clock for all attempts of this worker; 0: no deadline.
        The engine computes preempted prompts first, then the new one with the lowest `deadline_s`; a
        prompt without a deadline counts as urgent. Prompts whose deadline has passed go last.
        """
        ticket_id = ticket_id_of(frame.attempt_key)
        if ticket_id in self.attempts:
            return []
        self.attempts[ticket_id] = PrefillAttempt(
            frame.attempt_key, gateway, frame.sampling.n, prompt_digest(frame.token_ids)
        )
        sequence = sequence_of(frame, block_hashes, deadline_s, stop_after_first=True)
        expect = ExpectOffer(ticket_id, frame.decode_worker, tokens=len(frame.token_ids))
        # The sequence goes first: if the decode worker is lost, the answer to `expect` is
        # `PushEnded` at once, and the engine must not be told to release what it gets later.
        return [*self.prefixes.begin_sequence(sequence, frame.prefix_holder), expect]

    def handle(self, event: RoleEvent) -> list[PrefillAction]:
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
            case BlocksFilled():
                return self._push(event)
            case SequenceOutput():
                return self._output(event)
            case PushEnded():
                return self._end(event)
            case CancelAttempt(attempt_key):
                return self._cancel(ticket_id_of(attempt_key), "aborted")
            case BlocksArrived() | TransferFailed() | BlocksFreed() | BlocksReserved():
                raise AssertionError(f"no attempt of a prefill worker receives KV: {event!r}")
            case _:
                assert_never(event)

    def hand_over(self) -> list[PrefillAction]:
        """Gives up every attempt that still lacks an answer's first token.

        The worker calls this when it is to leave or to change its role. The gateway, told
        `HANDOVER`, has the request placed on another worker. The transfers of the other attempts
        end soon by themselves.
        """
        actions: list[PrefillAction] = []
        for ticket_id, attempt in list(self.attempts.items()):
            if attempt.state is PrefillState.COMPUTING:
                actions.append(self._failure(attempt, HANDOVER))
                actions += self._cancel(ticket_id, HANDOVER)
        return actions

    def lose_gateway(self, gateway: str) -> list[PrefillAction]:
        """Cancels the attempts of a gateway that is lost."""
        actions: list[PrefillAction] = []
        for ticket_id, attempt in self.attempts.items():
            if attempt.gateway == gateway:
                actions += self._cancel(ticket_id, "gateway_gone")
        return actions

    def _failure(self, attempt: PrefillAttempt, reason: str) -> DeliverFrame:
        return failure_frame(attempt.gateway, attempt.attempt_key, self.name, reason)

    def _push(self, filled: BlocksFilled) -> list[PrefillAction]:
        """Pushes blocks of which a piece is computed. A cancelled ticket ignores them."""
        ticket_id = ticket_id_of(filled.attempt_key)
        if ticket_id not in self.attempts:
            return []
        return [PushBlocks(ticket_id, filled.first_block, filled.blocks, filled.piece)]

    def _output(self, output: SequenceOutput) -> list[PrefillAction]:
        ticket_id = ticket_id_of(output.attempt_key)
        attempt = self.attempts.get(ticket_id)
        if attempt is None:
            # it ended while this step ran; a release that is repeated changes nothing
            return [ReleaseSequence(output.attempt_key)]
        closing = attempt.state is PrefillState.CLOSING
        if output.error is not None:
            cancel = self._cancel(ticket_id, "failed")
            # The gateway of a closing attempt hears nothing more, not even an error.
            return cancel if closing else [error_frame(attempt.gateway, self.name, output), *cancel]
        if closing:
            return []
        actions: list[PrefillAction] = [tokens_frame(attempt.gateway, output)]
        if output.token is not None:  # otherwise it has only the logprobs of a chunk of the prompt
            attempt.first_outputs[output.answer_index] = output
            if len(attempt.first_outputs) == attempt.answer_count:
                actions += self._finish(ticket_id, attempt)
        return actions

    def _finish(self, ticket_id: str, attempt: PrefillAttempt) -> list[PrefillAction]:
        """Ends the ticket, as every answer has its first token; the tokens travel with the finish.

        If no answer goes on, the ticket is cancelled instead.
        """
        outputs = [attempt.first_outputs[index] for index in range(attempt.answer_count)]
        # The decode worker gets every first token, to continue from; answers that have ended with
        # theirs are listed beside, and are not decoded.
        ended_answers = [output.answer_index for output in outputs if output.finish_reason]
        if len(ended_answers) == attempt.answer_count:
            return self._cancel(ticket_id, "finished")
        attempt.state = PrefillState.SENDING
        tokens = [output.token for output in outputs if output.token is not None]
        meta = msgspec.msgpack.encode(FirstTokens(tokens, ended_answers, attempt.prompt_digest))
        return [FinishPush(ticket_id, meta)]

    def _cancel(self, ticket_id: str, reason: str) -> list[PrefillAction]:
        """Cancels an attempt's ticket, and its fetch. Blocks stay until `PushEnded`.

        A second `CancelTransfer` of the same ticket has no effect.
        """
        attempt = self.attempts.get(ticket_id)
        if attempt is None:
            return []
        attempt.state = PrefillState.CLOSING
        cancel_prefix = self.prefixes.cancel(attempt.attempt_key)
        return [*cancel_prefix, CancelTransfer(ticket_id, reason)]

    def _end(self, ended: PushEnded) -> list[PrefillAction]:
        """Releases the attempt's blocks; tells the gateway if the transfer failed by itself."""
        attempt = self.attempts.pop(ended.ticket_id)
        cancel_prefix = self.prefixes.cancel(attempt.attempt_key)
        actions: list[PrefillAction] = [*cancel_prefix, ReleaseSequence(attempt.attempt_key)]
        if not ended.ok and attempt.state is not PrefillState.CLOSING:
            actions.append(self._failure(attempt, f"kv_{ended.reason}"))
        return actions
