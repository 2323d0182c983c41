"""The same run step by step: the engine's scheduler and block pool, the two ticket machines.

What differs from `worker.py`: every step is planned by `engine.scheduler` (chunks on block borders,
the ITL budget by its learned `StepCost`, reservation, preemption), blocks are `engine.blocks`, KV
moves by `kv_transfer.tickets` in pieces of layers behind each chunk, and transfers share links
fairly (each flow gets the smaller of its shares at both ends). What stays: the time that a step
takes, by the same closed form. Faults: slow workers, stale reports, mispredictions; no kills.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any

from ..engine.blocks import BlockPool
from ..engine.pacing import StepWork, attended_pairs
from ..engine.scheduler import Scheduler, SchedulerLimits, StepPlan
from ..engine.sequence import Sequence
from ..kv_transfer import messages as m
from ..kv_transfer import tickets as t
from ..kv_transfer.identity import ticket_id_of
from ..protos.frames import Sampling
from .hardware import PIECES, Hardware
from .sim import FIRST, HOP_S, Setting, Simulation
from .trace import HASH_TOKENS, Request, Trace
from .worker import Job, Worker

NOTE, FLOW, PIECE, ARRIVED = range(11, 15)


@dataclass(slots=True)
class Flow:
    """A write under way: `left` tokens, from one worker's link to another's."""

    source: ExactWorker
    sink: ExactWorker
    post: t.WriteTiles
    left: float
    rate: float = 0.0


class ExactWorker(Worker):
    """A worker whose steps are the engine's."""

    def __init__(
        self, name: str, role: str, hardware: Hardware, unit: int, budget_s: float
    ) -> None:
        super().__init__(name, role, hardware.cost, hardware.kv_tokens, unit, budget_s)
        limits = SchedulerLimits(
            block_tokens=HASH_TOKENS,
            max_step_tokens=hardware.chunk_tokens,
            max_running=hardware.max_running,
            itl_budget_s=None if budget_s == inf else budget_s * hardware.planned,
        )
        self.pool = BlockPool(hardware.kv_tokens // HASH_TOKENS + 1)
        self.scheduler = Scheduler(self.pool, limits)
        self.source, self.sink = t.TicketSender(), t.TicketReceiver()
        self.jobs: dict[tuple[str, int], Job] = {}
        self.lasts: dict[tuple[str, int], float] = {}  #: when a stream's last token came
        self.begun: set[tuple[str, int]] = set()  #: prompts with a chunk behind them
        self.coming: list[tuple[float, int, Job, str]] = []  #: (when, order, job, what for)
        self.refused: list[Job] = []  #: decode blocks that were not to be had yet
        self.opens: list[tuple[Job, Sequence]] = []  #: reserved since the driver last looked
        self.plan: StepPlan | None = None
        self.ends = inf
        self.kicked = False

    # ---- what the driver asks ----------------------------------------------------------------

    def advance(self, now: float) -> None:
        self.at = now

    def due(self) -> float:
        if self.plan is not None:
            return self.ends
        if self.kicked:
            return self.at
        return max(self.at, min((entry[0] for entry in self.coming), default=inf))

    def cached(self, request: Request) -> int:
        """Leading tokens of the prompt in the pool."""
        parts, blocks = self.unit // HASH_TOKENS, request.blocks[: request.whole]
        names = [name_of(block, part) for block in blocks for part in range(parts)]
        return self.pool.prefix_length(names) * HASH_TOKENS

    def keep(self, request: Request, answer: bool = False) -> None:
        """The scheduler publishes blocks itself."""

    def changes(self) -> tuple[list[bytes], list[bytes]]:
        return self.pool.drain_events()

    @property
    def free_tokens(self) -> int:
        return self.pool.available_blocks * HASH_TOKENS

    @property
    def waiting(self) -> int:
        return sum(seq.was_preempted for seq in self.scheduler.waiting) + len(self.refused)

    def receive(self, job: Job, when: float, what: str) -> None:
        """`what`: prefill, decode (of KV to come) or local."""
        self._numbers += 1
        self.coming.append((when, self._numbers, job, what))

    def settle(self) -> tuple[list[Job], list[Job]]:
        self.kicked = False
        ended: list[Job] = []
        filled: list[Job] = []
        if self.plan is not None and self.at >= self.ends - 1e-12:
            self._book(self.plan, ended, filled)
            self.plan = None
        for entry in sorted(entry for entry in self.coming if entry[0] <= self.at + 1e-12):
            self.coming.remove(entry)
            self._enter_scheduler(entry[2], entry[3])
        waiting, self.refused = self.refused, []
        for job in waiting:
            self._reserve(job)
        if self.plan is None:
            plan = self.scheduler.plan()
            if plan:
                self.plan = plan
                self.ends = self.at + self._seconds(plan)
        self.rows = len(self.scheduler.running)
        self.tokens = float(sum(len(seq.token_ids) for seq in self.scheduler.running))
        return ended, filled

    # ---- steps -------------------------------------------------------------------------------

    def _enter_scheduler(self, job: Job, what: str) -> None:
        job.started = self.at
        self.jobs[job.key] = job
        if what == "decode":
            self._reserve(job)
            return
        if job.fetched:
            self._adopt(job)
        seq = self._sequence(job)
        seq.stop_after_first = what == "prefill"
        self.scheduler.add(seq)

    def _reserve(self, job: Job) -> None:
        seq = self._sequence(job)
        if self.scheduler.reserve(seq) is None:
            self.refused.append(job)
        else:
            self.opens.append((job, seq))

    def _sequence(self, job: Job) -> Sequence:
        request = job.request
        sampling = Sampling(max_tokens=request.output)
        hashes = names_of(request, self.unit)
        ids = [0] * request.prompt
        return Sequence(job.key, ids, len(ids), sampling, hashes, deadline_s=job.deadline)

    def _adopt(self, job: Job) -> None:
        """The fetched prefix is cached here now, if there is room for it."""
        names = names_of(job.request, self.unit)[: job.fetched // HASH_TOKENS]
        self.scheduler.stage(job.key, names, len(names))
        self.scheduler.cache_staged(job.key, len(names))

    def _seconds(self, plan: StepPlan) -> float:
        """The closed form: decode of the rows; chunks by tokens, pairs and their share of base."""
        cost, seconds = self.cost, 0.0
        if plan.decode:
            rows = len(plan.decode)
            keys = sum(len(seq.token_ids) for seq in plan.decode)
            weights = max(cost.step_row * rows, cost.step_weights)
            seconds = cost.step_base + weights + cost.step_token * keys
        for seq, count in plan.prefill:
            chunk = cost.prefill_token * count
            chunk += cost.prefill_pair * (attended_pairs(count, seq.computed_tokens) - count / 2)
            chunk += cost.prefill_base * count / (len(seq.token_ids) - seq.hit_tokens)
            seconds += chunk * (self.jobs[seq.attempt_key].work or 1.0)
        return seconds * self.slow

    def _book(self, plan: StepPlan, ended: list[Job], filled: list[Job]) -> None:
        seconds = self._seconds(plan)
        keys = sum(len(seq.token_ids) for seq in plan.decode)
        tokens = sum(count for _, count in plan.prefill)
        seen = sum(attended_pairs(count, seq.computed_tokens) for seq, count in plan.prefill)
        self.scheduler.cost.observe(
            seconds, StepWork(len(plan.decode), keys, tokens, seen, len(plan.prefill))
        )
        self.dirty = True
        if tokens:
            self.prefill_tokens += tokens
            alone = StepPlan(prefill=plan.prefill)
            self.prefill_s += self._seconds(alone)
        else:
            self.steps += 1
            self.steps_s += seconds
        for seq, count in plan.prefill:
            self._chunk(seq, count, ended, filled)
        for seq in plan.decode:
            self.scheduler.record_computed(seq, 1)
            self._token(seq)
            if self.scheduler.append_token(seq, 0):
                self._over(seq, ended)

    def _chunk(self, seq: Sequence, count: int, ended: list[Job], filled: list[Job]) -> None:
        if seq.attempt_key not in self.begun:
            self.begun.add(seq.attempt_key)
            if not self.jobs[seq.attempt_key].hit:
                self.jobs[seq.attempt_key].hit = seq.hit_tokens
        if not self.scheduler.record_computed(seq, count):
            return
        self.begun.discard(seq.attempt_key)
        if seq.generated_tokens:  # computed again after a preemption: no new first token
            self._token(seq)
        else:
            filled.append(self.jobs[seq.attempt_key])
            self.lasts[seq.attempt_key] = self.at + HOP_S
        if (
            self.scheduler.append_token(seq, 0)
            and not seq.stop_after_first
            and seq.generated_tokens > 1
        ):
            self._over(seq, ended)

    def _token(self, seq: Sequence) -> None:
        """Gaps as the client sees them, the one behind the first token included."""
        job, now = self.jobs[seq.attempt_key], self.at + HOP_S
        gap = now - self.lasts.get(seq.attempt_key, job.first)
        self.lasts[seq.attempt_key] = now
        if not job.first_gap:
            job.first_gap = gap
        job.late += gap > self.itl_s

    def _over(self, seq: Sequence, ended: list[Job]) -> None:
        ended.append(self.jobs.pop(seq.attempt_key))
        self.lasts.pop(seq.attempt_key, None)

    def join(self, job: Job) -> None:
        """A local prompt goes on by itself."""


def name_of(block: int, part: int) -> bytes:
    return (block * 8 + part).to_bytes(16, "little")


def names_of(request: Request, unit: int) -> list[bytes]:
    """Content hashes of 64-token blocks: the prompt's full ones, and the answer's if known."""
    parts = unit // HASH_TOKENS
    answer = request.blocks[request.whole :]
    full = request.prompt // unit
    ids = request.blocks[:full] + answer if answer else request.blocks[: request.whole]
    names = [name_of(block, part) for block in ids for part in range(parts)]
    return names if answer else names[: request.prompt // HASH_TOKENS]


class ExactSimulation(Simulation):
    """`Simulation` with workers that step, tickets between them and links that are shared."""

    workers: dict[str, ExactWorker]  # type: ignore[assignment]

    def __init__(
        self, setting: Setting, trace: Trace, seed: int = 0, log: Callable[[str], Any] | None = None
    ) -> None:
        self.flows: list[Flow] = []
        self.flowed, self.flow_version = 0.0, 0
        super().__init__(setting, trace, seed, log)
        self.acts = (*self.acts, self._note, self._flow, self._piece, self._arrived)

    def _worker(
        self, name: str, role: str, hardware: Hardware, unit: int, budget_s: float
    ) -> ExactWorker:
        return ExactWorker(name, role, hardware, unit, budget_s)

    def _submit(self, job: Job, start: float) -> None:
        prefill, decode = job.prefill, job.decode
        assert isinstance(prefill, ExactWorker) and isinstance(decode, ExactWorker)
        if not job.remote:
            prefill.receive(job, start, "local")
        else:
            prefill.receive(job, start, "prefill")
            decode.receive(job, start, "decode")
            self._at(start, ARRIVED, job)
            self._schedule(decode)
        self._schedule(prefill)

    def _arrived(self, job: Job) -> None:
        """The prefill worker expects the decode worker's offer."""
        assert job.decode is not None
        self._source(job.prefill, t.ExpectTileOffer(ticket_id_of(job.key), job.decode.name))

    def _work(self, what: tuple[Worker, int]) -> None:
        worker = what[0]
        assert isinstance(worker, ExactWorker)
        before = worker.plan
        super()._work(what)
        for job, seq in worker.opens:
            assert job.prefill is not None
            tiles = seq.blocks[: -(-seq.prompt_tokens // HASH_TOKENS)]
            job.moved = seq.prompt_tokens - seq.published_blocks * HASH_TOKENS
            self._sink(
                worker,
                t.OfferTiles(ticket_id_of(job.key), job.prefill.name, tiles, seq.published_blocks),
            )
        worker.opens.clear()
        if worker.plan is not None and worker.plan is not before:
            self._pieces(worker, worker.plan)

    def _pieces(self, worker: ExactWorker, plan: StepPlan) -> None:
        """Layer groups of each chunk are pushed as they are done."""
        length = worker.ends - worker.at
        for seq, count in plan.prefill:
            if not seq.stop_after_first:
                continue
            end = seq.computed_tokens + count
            first = seq.filled_blocks
            last = -(-end // HASH_TOKENS) if end == len(seq.token_ids) else end // HASH_TOKENS
            seq.filled_blocks = last
            for piece in range(PIECES):
                push = t.PushTiles(
                    ticket_id_of(seq.attempt_key), first, seq.blocks[first:last], piece, PIECES
                )
                self._at(worker.at + length * (piece + 1) / PIECES, PIECE, (worker, push))

    def _piece(self, what: tuple[ExactWorker, t.PushTiles]) -> None:
        self._source(*what)

    def _filled(self, worker: Worker, job: Job) -> None:
        remote, request = job.remote, job.request
        job.first = self.now + HOP_S
        if job.first - job.arrived > job.target:
            self.misses += 1
            job.done = True
        self._at(self.now + HOP_S, FIRST, job.key)
        assert isinstance(worker, ExactWorker)
        if job.left <= 0:
            self._single(worker, job)
        elif remote:
            tiles = -(-request.prompt // HASH_TOKENS)
            finish = t.FinishTilePush(ticket_id_of(job.key), tiles, b"")
            self._at(self.now, PIECE, (worker, finish))  # behind the last piece

    def _single(self, worker: ExactWorker, job: Job) -> None:
        """An answer of one token: nothing has to move."""
        if job.remote:
            self._at(self.now, PIECE, (worker, t.CancelTicket(ticket_id_of(job.key), "finished")))
        else:
            worker.jobs.pop(job.key, None)
            worker.lasts.pop(job.key, None)
        self._ended(job)

    # ---- tickets ---------------------------------------------------------------------------------

    def _source(self, worker: Any, event: Any) -> None:
        for action in worker.source.handle(event, self.now):
            match action:
                case t.SendMessage(peer, message):
                    self._at(self.now + HOP_S, NOTE, (peer, worker.name, message, "sink"))
                case t.WriteTiles():
                    self._post(worker, action)
                case t.PushEnded(ticket_id):
                    self._release(worker, ticket_id)

    def _sink(self, worker: ExactWorker, event: Any) -> None:
        for action in worker.sink.handle(event, self.now):
            match action:
                case t.SendMessage(peer, message):
                    self._at(self.now + HOP_S, NOTE, (peer, worker.name, message, "source"))
                case t.VerifyChunk(ticket_id, _, chunk):
                    self._sink(worker, t.ChunkVerified(ticket_id, chunk.chunk_number, True))
                case t.TilesArrived(ticket_id):
                    self._landed(worker, key_of(ticket_id))
                case t.BlocksFreed(ticket_id):
                    self._release(worker, ticket_id)

    def _note(self, what: tuple[str, str, m.AnyMessage, str]) -> None:
        to, sender, message, end = what
        worker = self.workers[to]
        if end == "sink":
            self._sink(worker, t.MessageReceived(sender, message))
        else:
            self._source(worker, t.MessageReceived(sender, message))

    def _landed(self, worker: ExactWorker, key: tuple[str, int]) -> None:
        worker.advance(self.now)
        seq = worker.scheduler.live[key, 0]
        seq.token_ids.append(0)
        worker.lasts[key] = worker.jobs[key].first
        starts = worker.ends if worker.plan is not None else self.now
        worker.scheduler.commit(seq, starts - worker.jobs[key].first)
        self._kick(worker)

    def _release(self, worker: ExactWorker, ticket_id: str) -> None:
        """No write is under way: the blocks are free again."""
        worker.scheduler.remove(key_of(ticket_id))
        worker.jobs.pop(key_of(ticket_id), None)
        worker.lasts.pop(key_of(ticket_id), None)
        self._kick(worker)

    def _kick(self, worker: ExactWorker) -> None:
        worker.advance(self.now)
        worker.kicked = True
        self._schedule(worker)

    # ---- links -----------------------------------------------------------------------------------

    def _post(self, worker: ExactWorker, post: t.WriteTiles) -> None:
        tokens = len(post.source_tiles) * HASH_TOKENS / post.pieces
        self._progress()
        self.flows.append(Flow(worker, self.workers[post.peer], post, tokens))
        self._shares()

    def _progress(self) -> None:
        span, self.flowed = self.now - self.flowed, self.now
        for flow in self.flows:
            flow.left -= flow.rate * span

    def _shares(self) -> None:
        """Each flow gets the smaller of an equal share of both links."""
        out: dict[str, int] = {}
        into: dict[str, int] = {}
        for flow in self.flows:
            out[flow.source.name] = out.get(flow.source.name, 0) + 1
            into[flow.sink.name] = into.get(flow.sink.name, 0) + 1
        soonest = inf
        for flow in self.flows:
            own = 1 / (flow.source.cost.transfer_token * out[flow.source.name])
            other = 1 / (flow.sink.cost.transfer_token * into[flow.sink.name])
            flow.rate = min(own, other)
            soonest = min(soonest, max(flow.left, 0.0) / flow.rate)
        self.flow_version += 1
        if soonest < inf:
            self._at(self.now + soonest, FLOW, self.flow_version)

    def _flow(self, version: int) -> None:
        if version != self.flow_version:
            return
        self._progress()
        done = [flow for flow in self.flows if flow.left <= 1e-6]
        self.flows = [flow for flow in self.flows if flow.left > 1e-6]
        self._shares()
        for flow in done:
            post = flow.post
            place = post.first_tile, post.piece, post.pieces, [0] * len(post.source_tiles)
            chunk = m.ChunkMessage(post.ticket_id, post.generation, post.chunk_number, *place)
            self._at(self.now + HOP_S, NOTE, (flow.sink.name, flow.source.name, chunk, "sink"))
            self._source(flow.source, t.WriteEnded(post.ticket_id, True))


def key_of(ticket_id: str) -> tuple[str, int]:
    request, _, attempt = ticket_id.rpartition("#")
    return request, int(attempt)
