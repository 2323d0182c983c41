"""The decode role (pure): receives KV, turns it into a token stream.

Life of a job:
    RESERVING  blocks asked of the engine (none to be had: the gateway places it elsewhere)
    RECEIVING  ticket open: the prefill worker fills the blocks
    RUNNING    all blocks verified: the sequence decodes; each token goes to its gateway
    DRAINING   failed or aborted: blocks stay reserved until no write can land on them
A local prefill (`prefill` is None) starts as RUNNING; its prefix may come from tiers or a peer.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from ..engine import commands
from ..engine.prefixes import Prefixes
from ..engine.sequence import BlocksFilled, Sequence, SequenceOutput, tokens_frame
from ..kv_transfer import commands as transfer
from ..kv_transfer import tickets
from ..kv_transfer.identity import ticket_id_of
from ..kv_transfer.messages import FirstTokens
from ..protos.frames import (
    HANDOVER,
    AttemptFailed,
    AttemptKey,
    CancelAttempt,
    DeliverFrame,
    PromptArrived,
    StartDecode,
)


@dataclass(frozen=True, slots=True)
class Over:
    """The job is gone: nothing of it is left on this worker."""

    key: AttemptKey


@dataclass(slots=True)
class Job:
    gateway: str
    seq: Sequence
    prefill: str | None
    state: str
    open: set[int]  #: answers that go on
    aborted: bool = False


class DecodeRole:
    """`handle` takes engine outputs and answers, ticket outcomes and aborts."""

    def __init__(self, name: str, block_tokens: int) -> None:
        self.name = name
        self.block_tokens = block_tokens
        self.prefixes = Prefixes(block_tokens)
        self.jobs: dict[str, Job] = {}

    def submit(
        self,
        gateway: str,
        frame: StartDecode,
        hashes: list[bytes],
        tiers: bool = False,
        deadline: float = 0.0,
    ) -> list:
        """A gateway's new attempt. A duplicate changes nothing. `tiers`: there are some.

        `deadline`: by the clock that all of this worker's have, lower ones are computed first.
        """
        if ticket_id_of(frame.attempt_key) in self.jobs:
            return []
        prompt = len(frame.token_ids) - frame.resumed_tokens
        seq = Sequence(
            frame.attempt_key, frame.token_ids, prompt, frame.sampling, hashes, deadline_s=deadline
        )
        local, answers = frame.prefill_worker is None, set(range(frame.sampling.n))
        job = Job(gateway, seq, frame.prefill_worker, "RUNNING" if local else "RESERVING", answers)
        self.jobs[ticket_id_of(frame.attempt_key)] = job
        return (
            self.prefixes.begin(seq, frame.prefix_holder, tiers)
            if local
            else [commands.ReserveBlocks(seq)]
        )

    def handle(self, event: object) -> list:
        if self.prefixes.owns(event):
            return self.prefixes.handle(event)
        match event:
            case SequenceOutput():
                return self._output(event)
            case BlocksFilled():
                return []  # it was a prefill worker when it asked
            case commands.BlocksReserved(key, blocks, held):
                return self._reserved(ticket_id_of(key), blocks, held)
            case transfer.BlocksArrived():
                return self._arrived(event)
            case tickets.TransferFailed(ticket, reason):
                return self._broken(ticket, reason)
            case tickets.BlocksFreed(ticket):
                return self._end(ticket)
            case CancelAttempt(key):
                return self._abort(ticket_id_of(key))
        raise AssertionError(event)

    def hand_over(self) -> list:
        """Every stream goes on elsewhere; what it has computed stays cached."""
        actions: list = []
        for ticket, job in list(self.jobs.items()):
            if not job.aborted and job.state != "DRAINING":
                failed = self._fail(job.gateway, job.seq.attempt_key, HANDOVER)
                actions += [failed, *self._abort(ticket, HANDOVER)]
        return actions

    def gateway_gone(self, gateway: str) -> list:
        mine = [ticket for ticket, job in self.jobs.items() if job.gateway == gateway]
        return [action for ticket in mine for action in self._abort(ticket)]

    def _fail(self, gateway: str, key: AttemptKey, reason: str) -> DeliverFrame:
        return DeliverFrame(gateway, AttemptFailed(key, self.name, reason))

    def _reserved(self, ticket: str, blocks: list[int] | None, held: int) -> list:
        job = self.jobs[ticket]
        if blocks is None:
            failed = (
                [] if job.aborted else [self._fail(job.gateway, job.seq.attempt_key, "no_capacity")]
            )
            return failed + self._end(ticket)
        if job.aborted:
            return self._end(ticket)
        job.state = "RECEIVING"
        assert job.prefill is not None
        known = held * self.block_tokens
        return [transfer.OfferBlocks(ticket, job.prefill, blocks, len(job.seq.token_ids), known)]

    def _arrived(self, arrived: transfer.BlocksArrived) -> list:
        job = self.jobs[arrived.ticket_id]
        if job.aborted:
            return self._end(arrived.ticket_id)
        job.state = "RUNNING"
        given = msgspec.msgpack.decode(arrived.meta, type=FirstTokens)
        job.seq.token_ids.append(given.tokens[0].id)
        job.open.difference_update(given.ended_answers)
        others = [(index, given.tokens[index].id) for index in sorted(job.open - {0})]
        times = arrived.busy_s * 1e3, arrived.exposed_s * 1e3
        moved = PromptArrived(job.seq.attempt_key, arrived.tokens, *times)
        ended, waited = 0 in given.ended_answers, arrived.exposed_s
        commit = commands.CommitBlocks(job.seq, tuple(others), ended, waited)
        return [commit, DeliverFrame(job.gateway, moved)]

    def _broken(self, ticket: str, reason: str) -> list:
        job = self.jobs[ticket]
        job.state = "DRAINING"
        if job.aborted or reason == "finished":
            return []
        return [self._fail(job.gateway, job.seq.attempt_key, f"kv_{reason}")]

    def _output(self, output: SequenceOutput) -> list:
        job = self.jobs.get(ticket_id_of(output.attempt_key))
        if job is None:
            return []
        if output.error is not None:
            failed = AttemptFailed(
                output.attempt_key, self.name, output.error, final=output.request_at_fault
            )
            return [DeliverFrame(job.gateway, failed), *self._end(ticket_id_of(output.attempt_key))]
        emit = [tokens_frame(job.gateway, output)] if output.token or output.prompt_logprobs else []
        if output.finish_reason:
            job.open.discard(output.answer_index)
        return emit if job.open else emit + self._end(ticket_id_of(output.attempt_key))

    def _abort(self, ticket: str, reason: str = "aborted") -> list:
        job = self.jobs.get(ticket)
        if job is None or job.aborted:
            return []
        job.aborted = True
        if job.state == "RECEIVING":
            return [transfer.CancelTransfer(ticket, reason)]
        return self._end(ticket) if job.state == "RUNNING" else []

    def _end(self, ticket: str) -> list:
        job = self.jobs.pop(ticket)
        forget = self.prefixes.forget(job.seq.attempt_key)
        return [*forget, commands.ReleaseSequence(job.seq.attempt_key), Over(job.seq.attempt_key)]
