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
from ..engine.sequence import Filled, Output, Sequence, tokens_of
from ..kv_transfer import commands as transfer
from ..kv_transfer import tickets
from ..kv_transfer.identity import ticket_id
from ..kv_transfer.messages import Handover
from ..protos.frames import HANDOVER, Abort, Decode, Deliver, Failed, Key, Moved


@dataclass(frozen=True, slots=True)
class Over:
    """The job is gone: nothing of it is left on this worker."""

    key: Key


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
        frame: Decode,
        hashes: list[bytes],
        tiers: bool = False,
        deadline: float = 0.0,
    ) -> list:
        """A gateway's new attempt. A duplicate changes nothing. `tiers`: there are some.

        `deadline`: by the clock that all of this worker's have, lower ones are computed first.
        """
        if ticket_id(frame.key) in self.jobs:
            return []
        prompt = len(frame.ids) - frame.given
        seq = Sequence(frame.key, frame.ids, prompt, frame.sampling, hashes, deadline=deadline)
        local, answers = frame.prefill is None, set(range(frame.sampling.n))
        job = Job(gateway, seq, frame.prefill, "RUNNING" if local else "RESERVING", answers)
        self.jobs[ticket_id(frame.key)] = job
        return self.prefixes.begin(seq, frame.fetch, tiers) if local else [commands.Reserve(seq)]

    def handle(self, event: object) -> list:
        if self.prefixes.owns(event):
            return self.prefixes.handle(event)
        match event:
            case Output():
                return self._output(event)
            case Filled():
                return []  # it was a prefill worker when it asked
            case commands.Reserved(key, blocks, held):
                return self._reserved(ticket_id(key), blocks, held)
            case transfer.Arrived():
                return self._arrived(event)
            case tickets.Broken(ticket, reason):
                return self._broken(ticket, reason)
            case tickets.Freed(ticket):
                return self._end(ticket)
            case Abort(key):
                return self._abort(ticket_id(key))
        raise AssertionError(event)

    def hand_over(self) -> list:
        """Every stream goes on elsewhere; what it has computed stays cached."""
        actions: list = []
        for ticket, job in list(self.jobs.items()):
            if not job.aborted and job.state != "DRAINING":
                failed = self._fail(job.gateway, job.seq.key, HANDOVER)
                actions += [failed, *self._abort(ticket, HANDOVER)]
        return actions

    def gateway_gone(self, gateway: str) -> list:
        mine = [ticket for ticket, job in self.jobs.items() if job.gateway == gateway]
        return [action for ticket in mine for action in self._abort(ticket)]

    def _fail(self, gateway: str, key: Key, reason: str) -> Deliver:
        return Deliver(gateway, Failed(key, self.name, reason))

    def _reserved(self, ticket: str, blocks: list[int] | None, held: int) -> list:
        job = self.jobs[ticket]
        if blocks is None:
            failed = [] if job.aborted else [self._fail(job.gateway, job.seq.key, "no_capacity")]
            return failed + self._end(ticket)
        if job.aborted:
            return self._end(ticket)
        job.state = "RECEIVING"
        assert job.prefill is not None
        known = held * self.block_tokens
        return [transfer.Receive(ticket, job.prefill, blocks, len(job.seq.ids), known)]

    def _arrived(self, arrived: transfer.Arrived) -> list:
        job = self.jobs[arrived.xid]
        if job.aborted:
            return self._end(arrived.xid)
        job.state = "RUNNING"
        given = msgspec.msgpack.decode(arrived.meta, type=Handover)
        job.seq.ids.append(given.firsts[0].id)
        job.open.difference_update(given.ended)
        others = [(index, given.firsts[index].id) for index in sorted(job.open - {0})]
        times = arrived.busy_s * 1e3, arrived.exposed_s * 1e3
        moved = Moved(job.seq.key, arrived.tokens, *times)
        ended, waited = 0 in given.ended, arrived.exposed_s
        commit = commands.Commit(job.seq, tuple(others), ended, waited)
        return [commit, Deliver(job.gateway, moved)]

    def _broken(self, ticket: str, reason: str) -> list:
        job = self.jobs[ticket]
        job.state = "DRAINING"
        if job.aborted or reason == "finished":
            return []
        return [self._fail(job.gateway, job.seq.key, f"kv_{reason}")]

    def _output(self, output: Output) -> list:
        job = self.jobs.get(ticket_id(output.key))
        if job is None:
            return []
        if output.error is not None:
            failed = Failed(output.key, self.name, output.error, final=output.refused)
            return [Deliver(job.gateway, failed), *self._end(ticket_id(output.key))]
        emit = [tokens_of(job.gateway, output)] if output.token or output.prompt else []
        if output.finish:
            job.open.discard(output.index)
        return emit if job.open else emit + self._end(ticket_id(output.key))

    def _abort(self, ticket: str, reason: str = "aborted") -> list:
        job = self.jobs.get(ticket)
        if job is None or job.aborted:
            return []
        job.aborted = True
        if job.state == "RECEIVING":
            return [transfer.Cancel(ticket, reason)]
        return self._end(ticket) if job.state == "RUNNING" else []

    def _end(self, ticket: str) -> list:
        job = self.jobs.pop(ticket)
        forget = self.prefixes.forget(job.seq.key)
        return [*forget, commands.Drop(job.seq.key), Over(job.seq.key)]
