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
from ..engine.sequence import Filled, Output, Sequence, tokens_of
from ..kv_transfer import commands as transfer
from ..kv_transfer import tickets
from ..kv_transfer.identity import ticket_id
from ..kv_transfer.messages import Handover
from ..protos.frames import HANDOVER, Abort, Deliver, Failed, Key, Prefill


@dataclass(slots=True)
class Job:
    gateway: str
    answers: int  #: first tokens to come
    firsts: dict[int, Output] = field(default_factory=dict)  #: by answer
    quiet: bool = False  #: aborted or finished: its end is nobody's news


class PrefillRole:
    """`handle` takes frames with their gateway, engine outputs and ticket outcomes."""

    def __init__(self, name: str, block_tokens: int) -> None:
        self.name = name
        self.prefixes = Prefixes(block_tokens)
        self.jobs: dict[str, tuple[Key, Job]] = {}

    def submit(
        self,
        gateway: str,
        frame: Prefill,
        hashes: list[bytes],
        tiers: bool = False,
        deadline: float = 0.0,
    ) -> list:
        """A gateway's new attempt. A duplicate changes nothing. `tiers`: there are some.

        `deadline`: by the clock that all of this worker's have, lower ones are computed first.
        """
        ticket = ticket_id(frame.key)
        if ticket in self.jobs:
            return []
        self.jobs[ticket] = (frame.key, Job(gateway, frame.sampling.n))
        seq = Sequence(
            frame.key,
            frame.ids,
            len(frame.ids) - frame.given,
            frame.sampling,
            hashes,
            stop_after_first=True,
            deadline=deadline,
        )
        expect = transfer.Expect(ticket, frame.decode, len(frame.ids))
        return [expect, *self.prefixes.begin(seq, frame.fetch, tiers)]

    def handle(self, event: object) -> list:
        if self.prefixes.owns(event):
            return self.prefixes.handle(event)
        match event:
            case Filled(key, first, blocks, piece):
                ticket = ticket_id(key)
                return [transfer.Push(ticket, first, blocks, piece)] if ticket in self.jobs else []
            case Output():
                return self._output(event)
            case tickets.Closed(ticket, ok, reason):
                return self._closed(ticket, ok, reason)
            case Abort(key):
                return self._cancel(ticket_id(key), "aborted")
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

    def _fail(self, gateway: str, key: Key, reason: str) -> Deliver:
        return Deliver(gateway, Failed(key, self.name, reason))

    def _output(self, output: Output) -> list:
        ticket = ticket_id(output.key)
        if ticket not in self.jobs:
            return [commands.Drop(output.key)]
        job = self.jobs[ticket][1]
        if output.error is not None:
            failed = Failed(output.key, self.name, output.error, final=output.refused)
            news = [] if job.quiet else [Deliver(job.gateway, failed)]
            return [*news, *self._cancel(ticket, "failed")]
        told = [] if job.quiet else [tokens_of(job.gateway, output)]
        if output.token is not None:
            job.firsts[output.index] = output
        if len(job.firsts) < job.answers or output.token is None:
            return told
        firsts = [job.firsts[index] for index in range(job.answers)]
        ended = [one.index for one in firsts if one.finish]
        if len(ended) == job.answers:
            return [*told, *self._cancel(ticket, "finished")]
        tokens = [one.token for one in firsts if one.token]
        return [*told, transfer.Finish(ticket, msgspec.msgpack.encode(Handover(tokens, ended)))]

    def _cancel(self, ticket: str, reason: str) -> list:
        if ticket not in self.jobs:
            return []
        key, job = self.jobs[ticket]
        job.quiet = True
        return [*self.prefixes.forget(key), transfer.Cancel(ticket, reason)]

    def _closed(self, ticket: str, ok: bool, reason: str) -> list:
        key, job = self.jobs.pop(ticket)
        failed = [] if ok or job.quiet else [self._fail(job.gateway, key, f"kv_{reason}")]
        return [*self.prefixes.forget(key), commands.Drop(key), *failed]
