"""The prefill role (pure): turns prompts into KV on another worker and a first token.

Life of a job:
    Prefill frame -> the prefix may come from tiers or a peer (`Prefixes`), then the engine computes
                     chunk by chunk; the ticket expects the decode worker's offer
    layers done   -> its blocks are pushed, a group of layers at a time, while it computes the next
    first token   -> emitted to the gateway at once, ticket finished
    ticket closed -> no write is under way: blocks given back, job over
An abort, or an error of the engine, cancels the ticket first: blocks are given back only when no
write reads them any more.
"""

from __future__ import annotations

from dataclasses import dataclass, field

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
    StartPrefill,
)


@dataclass(slots=True)
class Job:
    gateway: str
    answers: int  #: first tokens to come
    firsts: dict[int, SequenceOutput] = field(default_factory=dict)  #: by answer
    quiet: bool = False  #: aborted or finished: its end is nobody's news


class PrefillRole:
    """`handle` takes frames with their gateway, engine outputs and ticket outcomes."""

    def __init__(self, name: str, block_tokens: int) -> None:
        self.name = name
        self.prefixes = Prefixes(block_tokens)
        self.jobs: dict[str, tuple[AttemptKey, Job]] = {}

    def submit(
        self,
        gateway: str,
        frame: StartPrefill,
        hashes: list[bytes],
        tiers: bool = False,
        deadline: float = 0.0,
    ) -> list:
        """A gateway's new attempt. A duplicate changes nothing. `tiers`: there are some.

        `deadline`: by the clock that all of this worker's have, lower ones are computed first.
        """
        ticket = ticket_id_of(frame.attempt_key)
        if ticket in self.jobs:
            return []
        self.jobs[ticket] = (frame.attempt_key, Job(gateway, frame.sampling.n))
        seq = Sequence(
            frame.attempt_key,
            frame.token_ids,
            len(frame.token_ids) - frame.resumed_tokens,
            frame.sampling,
            hashes,
            stop_after_first=True,
            deadline_s=deadline,
        )
        expect = transfer.ExpectOffer(ticket, frame.decode_worker, len(frame.token_ids))
        return [expect, *self.prefixes.begin(seq, frame.prefix_holder, tiers)]

    def handle(self, event: object) -> list:
        if self.prefixes.owns(event):
            return self.prefixes.handle(event)
        match event:
            case BlocksFilled(key, first, blocks, piece):
                ticket = ticket_id_of(key)
                return (
                    [transfer.PushBlocks(ticket, first, blocks, piece)]
                    if ticket in self.jobs
                    else []
                )
            case SequenceOutput():
                return self._output(event)
            case tickets.PushEnded(ticket, ok, reason):
                return self._closed(ticket, ok, reason)
            case CancelAttempt(key):
                return self._cancel(ticket_id_of(key), "aborted")
        raise AssertionError(event)

    def hand_over(self) -> list:
        """Jobs without all of their first tokens go elsewhere; the others' transfers end soon."""
        actions: list = []
        for ticket, (key, job) in list(self.jobs.items()):
            if not job.quiet and len(job.firsts) < job.answers:
                actions += [self._fail(job.gateway, key, HANDOVER), *self._cancel(ticket, HANDOVER)]
        return actions

    def gateway_gone(self, gateway: str) -> list:
        mine = [ticket for ticket, (_, job) in self.jobs.items() if job.gateway == gateway]
        return [action for ticket in mine for action in self._cancel(ticket, "gateway_gone")]

    def _fail(self, gateway: str, key: AttemptKey, reason: str) -> DeliverFrame:
        return DeliverFrame(gateway, AttemptFailed(key, self.name, reason))

    def _output(self, output: SequenceOutput) -> list:
        ticket = ticket_id_of(output.attempt_key)
        if ticket not in self.jobs:
            return [commands.ReleaseSequence(output.attempt_key)]
        job = self.jobs[ticket][1]
        if output.error is not None:
            failed = AttemptFailed(
                output.attempt_key, self.name, output.error, final=output.request_at_fault
            )
            news = [] if job.quiet else [DeliverFrame(job.gateway, failed)]
            return [*news, *self._cancel(ticket, "failed")]
        told = [] if job.quiet else [tokens_frame(job.gateway, output)]
        if output.token is not None:
            job.firsts[output.answer_index] = output
        if len(job.firsts) < job.answers or output.token is None:
            return told
        firsts = [job.firsts[index] for index in range(job.answers)]
        ended = [one.answer_index for one in firsts if one.finish_reason]
        if len(ended) == job.answers:
            return [*told, *self._cancel(ticket, "finished")]
        tokens = [one.token for one in firsts if one.token]
        return [
            *told,
            transfer.FinishPush(ticket, msgspec.msgpack.encode(FirstTokens(tokens, ended))),
        ]

    def _cancel(self, ticket: str, reason: str) -> list:
        if ticket not in self.jobs:
            return []
        key, job = self.jobs[ticket]
        job.quiet = True
        return [*self.prefixes.forget(key), transfer.CancelTransfer(ticket, reason)]

    def _closed(self, ticket: str, ok: bool, reason: str) -> list:
        key, job = self.jobs.pop(ticket)
        failed = [] if ok or job.quiet else [self._fail(job.gateway, key, f"kv_{reason}")]
        return [*self.prefixes.forget(key), commands.ReleaseSequence(key), *failed]
