"""The same run with the ticket machines of `kv_transfer`, links that are shared, and every step.

What differs from `sim.py`: KV moves by `kv_transfer.tickets` in pieces of layers behind each chunk,
transfers share links fairly (each flow gets the smaller of its shares at both ends), and each step
is planned by itself (without `repeat.py`). What stays: the workers, and the time that a step takes.
Faults: slow workers, stale reports, mispredictions; no kills.

A run of this kind takes many times longer. It shows what the shortcuts of `sim.py` cost.

A ticket is one transfer of an attempt's KV. Its receiver offers blocks, its sender pushes into
them; the messages between the two ends take a hop each. A tile is a block here, as all workers have
blocks of one size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any, assert_never

from ..kv_transfer import messages, ticket_events, tickets
from ..kv_transfer.identity import attempt_key_of, ticket_id_of
from .attempt import SimulatedAttempt
from .hardware import LAYER_GROUPS, Hardware
from .repeat import RepeatedSteps
from .sim import Moment, Setting, Simulation
from .trace import Trace
from .worker import HOP_S, SimulatedWorker

SENT_TOKENS = 1e-6  #: a flow with fewer tokens left is over: the rest is rounding


@dataclass(slots=True)
class Flow:
    """A write under way, from one worker's link to another's."""

    source: SimulatedWorker
    sink: SimulatedWorker
    write: ticket_events.WriteTiles
    #: What is not sent yet, in tokens: of a piece of the layers, each token counts in part.
    tokens_left: float
    tokens_per_s: float = 0.0  #: its share of the links now


class ExactSimulation(Simulation):
    """`Simulation` with a ticket for each transfer, links that are shared, and every step."""

    def __init__(
        self, setting: Setting, trace: Trace, seed: int = 0, log: Callable[[str], Any] | None = None
    ) -> None:
        self.senders: dict[str, tickets.TicketSender] = {}  #: worker -> its tickets as source
        self.receivers: dict[str, tickets.TicketReceiver] = {}  #: worker -> its tickets as sink
        self.flows: list[Flow] = []
        self.flows_at = 0.0  #: the moment for which `tokens_left` of the flows holds
        self.flows_version = 0  #: entries of the clock with an older one are ignored
        super().__init__(setting, trace, seed, log)  # makes the workers, whose tickets go above

    def _make_handlers(self) -> dict[Moment, Callable[[Any], None]]:
        return super()._make_handlers() | {
            Moment.MESSAGE: self._message_arrives,
            Moment.FLOWS: self._end_flows,
            Moment.TICKET: self._send_later,
        }

    def _new_worker(
        self, name: str, role: str, hardware: Hardware, step_budget_s: float
    ) -> SimulatedWorker:
        worker = super()._new_worker(name, role, hardware, step_budget_s)
        worker.skips_repeated_steps = False
        self.senders[name] = tickets.TicketSender()
        self.receivers[name] = tickets.TicketReceiver()
        return worker

    # ---- the life of a request -------------------------------------------------------------------

    def _begin(self, attempt: SimulatedAttempt) -> None:
        super()._begin(attempt)
        prefill_worker, decode_worker = self._workers_of(attempt)
        if attempt.is_remote:
            ticket_id = ticket_id_of(attempt.key)
            expected = ticket_events.ExpectTileOffer(ticket_id, decode_worker.name)
            self._tell_sender(prefill_worker, expected)

    def _look_at_reservations(self, worker: SimulatedWorker) -> None:
        """Offers blocks that were reserved to the prefill worker."""
        reserved = worker.reserved
        worker.reserved = []
        for attempt in reserved:
            sequence = worker.scheduler.live[attempt.key, 0]
            blocks = sequence.blocks[: worker.scheduler.blocks_for(attempt.context_tokens)]
            prefill_worker, _ = self._workers_of(attempt)
            offer = ticket_events.OfferTiles(
                ticket_id_of(attempt.key), prefill_worker.name, blocks, sequence.published_blocks
            )
            self._tell_receiver(worker, offer)
        self._schedule_worker(worker)

    def _work(self, subject: tuple[SimulatedWorker, int]) -> None:
        worker, _ = subject
        steps_before = worker.steps
        super()._work(subject)
        if worker.steps is not None and worker.steps is not steps_before:
            self._schedule_pieces(worker, worker.steps)

    def _schedule_pieces(self, worker: SimulatedWorker, steps: RepeatedSteps) -> None:
        """Pushes the layers of each chunk piece by piece, while the step computes them."""
        length_s = steps.ends_at - steps.begins_at
        for sequence, tokens in steps.plan.prefill:
            if not sequence.stop_after_first:
                continue
            first, _, last = worker.scheduler.filled_range(sequence, tokens)
            sequence.filled_blocks = last
            ticket_id = ticket_id_of(sequence.attempt_key)
            blocks = sequence.blocks[first:last]
            for piece in range(LAYER_GROUPS):
                push = ticket_events.PushTiles(
                    ticket_id, first, blocks, piece=piece, pieces=LAYER_GROUPS
                )
                computed_at = steps.begins_at + length_s * (piece + 1) / LAYER_GROUPS
                self._schedule(computed_at, Moment.TICKET, (worker, push))

    def _start_transfer(self, source: SimulatedWorker, attempt: SimulatedAttempt) -> None:
        """Lets the transfer, which began with the prefill, end behind the last piece."""
        tiles = source.scheduler.blocks_for(attempt.context_tokens)
        finish = ticket_events.FinishTilePush(ticket_id_of(attempt.key), tiles, b"")
        self._schedule(self.now, Moment.TICKET, (source, finish))

    def _answer_filled(self, worker: SimulatedWorker, attempt: SimulatedAttempt) -> None:
        if attempt.is_remote:
            cancel = ticket_events.CancelTicket(ticket_id_of(attempt.key), "finished")
            self._schedule(self.now, Moment.TICKET, (worker, cancel))
        self._ended(attempt)

    # ---- tickets ---------------------------------------------------------------------------------

    def _send_later(self, subject: tuple[SimulatedWorker, ticket_events.SenderEvent]) -> None:
        worker, event = subject
        self._tell_sender(worker, event)

    def _tell_sender(self, worker: SimulatedWorker, event: ticket_events.SenderEvent) -> None:
        for action in self.senders[worker.name].handle(event, self.now):
            match action:
                case ticket_events.SendMessage(peer, message):
                    # True: it is for the peer's receiving end.
                    note = (peer, worker.name, message, True)
                    self._schedule(self.now + HOP_S, Moment.MESSAGE, note)
                case ticket_events.WriteTiles():
                    self._start_flow(worker, action)
                case ticket_events.PushEnded(ticket_id):
                    self._release(worker, ticket_id)
                case ticket_events.PrefixRequested():
                    pass  # prefixes are fetched in closed form: no ticket asks for one
                case _:
                    assert_never(action)

    def _tell_receiver(self, worker: SimulatedWorker, event: ticket_events.ReceiverEvent) -> None:
        for action in self.receivers[worker.name].handle(event, self.now):
            match action:
                case ticket_events.SendMessage(peer, message):
                    note = (peer, worker.name, message, False)
                    self._schedule(self.now + HOP_S, Moment.MESSAGE, note)
                case ticket_events.VerifyChunk(ticket_id, _, chunk):
                    verified = ticket_events.ChunkVerified(ticket_id, chunk.chunk_number, True)
                    self._tell_receiver(worker, verified)
                case ticket_events.TilesArrived(ticket_id):
                    self._commit(worker, self.attempts[attempt_key_of(ticket_id)])
                case ticket_events.BlocksFreed(ticket_id):
                    self._release(worker, ticket_id)
                case ticket_events.TransferFailed():
                    pass  # an answer of one token: its ticket was cancelled
                case _:
                    assert_never(action)

    def _message_arrives(self, subject: tuple[str, str, messages.AnyMessage, bool]) -> None:
        name, sender, message, is_for_receiver = subject
        worker = self.workers[name]
        received = ticket_events.MessageReceived(sender, message)
        if is_for_receiver:
            self._tell_receiver(worker, received)
        else:
            self._tell_sender(worker, received)

    def _release(self, worker: SimulatedWorker, ticket_id: str) -> None:
        """No write is under way any more: the blocks are free again."""
        attempt = worker.attempts.get(attempt_key_of(ticket_id))
        if attempt is not None:
            worker.set_time(self.now)
            worker.release(attempt)
            self._schedule_worker(worker)

    # ---- links -----------------------------------------------------------------------------------

    def _start_flow(self, worker: SimulatedWorker, write: ticket_events.WriteTiles) -> None:
        tokens = len(write.source_tiles) * self.trace.block_tokens / write.pieces
        self._advance_flows()
        self.flows.append(Flow(worker, self.workers[write.peer], write, tokens))
        self._share_links()

    def _advance_flows(self) -> None:
        """Takes off each flow what it has sent until now."""
        span = self.now - self.flows_at
        self.flows_at = self.now
        for flow in self.flows:
            flow.tokens_left -= flow.tokens_per_s * span

    def _share_links(self) -> None:
        """Gives each flow the smaller of an equal share of both links, and finds the next end."""
        flows_out: dict[str, int] = {}
        flows_in: dict[str, int] = {}
        for flow in self.flows:
            flows_out[flow.source.name] = flows_out.get(flow.source.name, 0) + 1
            flows_in[flow.sink.name] = flows_in.get(flow.sink.name, 0) + 1
        soonest_s = inf
        for flow in self.flows:
            out_share = 1 / (flow.source.cost.transfer_token * flows_out[flow.source.name])
            in_share = 1 / (flow.sink.cost.transfer_token * flows_in[flow.sink.name])
            flow.tokens_per_s = min(out_share, in_share)
            soonest_s = min(soonest_s, max(flow.tokens_left, 0.0) / flow.tokens_per_s)
        self.flows_version += 1
        if soonest_s < inf:
            self._schedule(self.now + soonest_s, Moment.FLOWS, self.flows_version)

    def _end_flows(self, version: int) -> None:
        """Ends the writes that are complete: their chunk's message goes, and the sender is told."""
        if version != self.flows_version:
            return
        self._advance_flows()
        ended = [flow for flow in self.flows if flow.tokens_left <= SENT_TOKENS]
        self.flows = [flow for flow in self.flows if flow.tokens_left > SENT_TOKENS]
        self._share_links()
        for flow in ended:
            write = flow.write
            chunk = messages.ChunkMessage(
                ticket_id=write.ticket_id,
                generation=write.generation,
                chunk_number=write.chunk_number,
                first_tile=write.first_tile,
                piece=write.piece,
                pieces=write.pieces,
                checksums=[0] * len(write.source_tiles),
            )
            note = (flow.sink.name, flow.source.name, chunk, True)
            self._schedule(self.now + HOP_S, Moment.MESSAGE, note)
            self._tell_sender(flow.source, ticket_events.WriteEnded(write.ticket_id, True))
