"""Tickets of a prefill and a decode worker on virtual time: what they are asked, what goes wrong,
and what must hold.

A worker is a `Fan` over one or two ranks (`sim_worker`), between them is a hostile network
(`sim_network`). Either is killed at any step of the run and may come back as another incarnation,
or is taken for lost by mistake. The checks stand in the model itself: they see every tile, whose it
is and who writes on it.
"""

import heapq
import itertools
import random
from collections import Counter
from dataclasses import dataclass, field

from diptych.kv_transfer import commands as c
from diptych.kv_transfer import tickets as t
from diptych.kv_transfer.fan import Fan

from .sim_network import FATES, Network, Weather, content
from .sim_worker import TILE, Worker

P, D = "prefill", "decode"
LIMITS = t.TicketTimeouts(chunk_s=4, idle_s=0.5, resend_s=0.2, quarantine_s=1.5, offer_s=3)
CALM_S = 25.0  #: one more request, which lands if both workers live
END_S = 60.0
LAST = "last#0"
TICK_S = 0.1
POOL = 10  #: blocks of the sink: few, so that they are used again soon
RANKS = [(1, 1), (1, 2), (2, 1)]
KINDS = (
    "OfferMessage",
    "ChunkMessage",
    "FinishMessage",
    "FailedMessage",
    "StopMessage",
    "StoppedMessage",
    "QueryMessage",
    "ProgressMessage",
    "UnknownTicketMessage",
)


@dataclass
class Plan:
    """One game: everything that a test wants to choose, the rest is drawn from the seed."""

    weather: Weather
    requests: int
    ranks: tuple[int, int]
    pieces: int
    refuses: bool
    kill: tuple[int, str] = (0, "")  #: step, role
    restart: bool = False
    disaster: str = ""  #: "sever" or "mistake"
    trouble: float = 0.15  #: chance of a cancel, of a request that nobody finishes, ...


def draw(rng):
    weather = Weather(
        rng.choice((0, 0.05, 0.3)),
        rng.choice((0, 0.1, 0.4, 0.9)),
        rng.choice((0.0, 0.01, 0.3)),
        rng.choice((0, 0.1)),
        rng.choice((0, 0.1)),
    )
    if rng.random() < 0.5:
        weather.fate = rng.choice(KINDS), rng.randint(1, 6), rng.choice(FATES)
    if rng.random() < 0.3:
        since = rng.uniform(0, 6)
        until = since + rng.choice((0.3, 2.0, 5.0))
        weather.stuck[rng.choice((P, D))] = since, until, rng.choice(("cut", "clog"))
    ranks, pieces = rng.choice(RANKS), rng.choice((1, 1, 2, 3))
    plan = Plan(weather, rng.randint(1, 8), ranks, pieces, rng.random() < 0.5)
    what = rng.random()
    if what < 0.3:
        plan.kill = rng.randint(1, 300), rng.choice((P, D))
        plan.restart = rng.random() < 0.6
    elif what < 0.4:
        plan.disaster = "mistake" if plan.refuses else "sever"
    return plan


@dataclass(eq=False)
class Opening:
    """A reservation of blocks at the decode worker."""

    ticket_id: str
    blocks: list[int]
    held: int
    hashes: tuple
    told: list = field(default_factory=list)  #: kinds of outcomes


class Simulation:
    """`run` plays one seed to its end; a broken promise raises `AssertionError`."""

    limits = LIMITS

    def __init__(self, seed, plan=None, sink=t.TicketReceiver, source=t.TicketSender, fan=Fan):
        self.rng = random.Random(seed)
        self.plan = plan or draw(self.rng)
        self.pieces = self.plan.pieces
        self.machines, self.fan = {P: source, D: sink}, fan
        self.now, self.heap, self.order, self.steps = 0.0, [], itertools.count(), 0
        self.log, self.reasons = [], Counter()
        self.network = Network(self, self.plan.weather, self.plan.refuses)
        self.workers, self.births = {}, Counter()
        self.openings = {}  #: ticket_id -> the open one
        self.owner = [None] * POOL  #: of the decode worker's blocks
        self.tags = {}  #: (agent, lane, generation) -> opening
        self.lives = {}  #: ticket_id -> number of its `Expect` that is not closed yet
        self.numbers = itertools.count()
        self.released = set()  #: numbers of closed ones
        self.last = ""  #: the request that must land, if any
        for role in (P, D):
            self.birth(role)
        for index in range(self.plan.requests):
            self.script(f"r{index}#0")
        if self.plan.disaster:
            self.at(self.rng.uniform(0, 8), getattr(self, self.plan.disaster))
        self.at(CALM_S, self.calm)

    # ---- the clock and the log -------------------------------------------------------------------

    def at(self, delay, call, *args):
        heapq.heappush(self.heap, (self.now + delay, next(self.order), call, args))

    def note(self, who, what):
        self.log.append((self.now, who, what))

    def run(self):
        self.at(TICK_S, self.tick)
        while self.heap:
            self.now, _, call, args = heapq.heappop(self.heap)
            if call != self.tick:
                self.steps += 1
                if self.steps == self.plan.kill[0]:
                    self.kill(self.plan.kill[1])
            call(*args)
        for worker in self.workers.values():
            for rank in worker.ranks if worker.alive else ():
                assert not rank.machine.tickets, f"never ended: {rank.machine.tickets}"
            assert not worker.alive or not worker.fan.tickets, f"never ended: {worker.fan.tickets}"
        assert not self.openings, f"never freed: {self.openings}"
        assert not self.lives, f"never closed: {self.lives}"
        assert self.owner == [None] * POOL, f"lost blocks: {self.owner}"
        assert not self.last, "a request on a calm network did not land"

    def tick(self):
        living = [worker for worker in self.workers.values() if worker.alive]
        for rank in (rank for worker in living for rank in worker.ranks):
            rank.act(t.TicketTick())
            states = (ticket.state for ticket in rank.machine.tickets.values())
            self.reasons["quarantined"] += sum(
                state is t.ReceivingState.QUARANTINED for state in states
            )
        idle = all(worker.idle for worker in living)
        if self.now < END_S and (self.heap or not idle):
            pause = self.heap[0][0] - self.now if idle else 0.0
            self.at(max(TICK_S, pause), self.tick)

    # ---- what the two workers are asked to do ----------------------------------------------------

    def script(self, ticket_id):
        rng, trouble, start = self.rng, self.plan.trouble, self.rng.uniform(0, 6)
        count, asks = rng.randint(1, 4), rng.random() < 0.25
        held = rng.choice((0, 0, rng.randint(0, count)))
        self.at(start, self.receive, ticket_id, count, held, asks)
        if rng.random() < trouble * 2:  # the same frame again, when the first one may be over
            again = start + rng.choice((rng.uniform(0.2, 1), rng.uniform(0.2, 5)))
            self.at(again, self.receive, ticket_id, count, held, asks)
        for end in (D, P):
            if rng.random() < trouble:
                self.at(
                    start + rng.uniform(0, 3),
                    self.tell,
                    end,
                    c.CancelTransfer(ticket_id, "aborted"),
                )
        if asks or rng.random() < trouble / 3:
            return  # the source hears of it by the sink, or never
        when = max(0.0, start + rng.uniform(-1, 1))
        self.at(when, self.push, ticket_id, count)
        if rng.random() < trouble:
            self.at(when + rng.uniform(0.2, 5), self.push, ticket_id, count)

    def calm(self):
        """Everything else is over by now: no block may be missing, no worker be wedged."""
        if all(worker.alive for worker in self.workers.values()) and self.plan.disaster != "sever":
            assert self.owner == [None] * POOL, f"still held: {self.owner}"
            self.last = LAST
            self.receive(LAST, 4, 1, False)
            self.push(LAST, 4, finish=True)

    def tell(self, role, command):
        self.note(self.workers[role].name, command)
        self.workers[role].handle(command)

    def receive(self, ticket_id, count, held, asks):
        """The decode worker reserves blocks, the same ones again if it can."""
        worker = self.workers[D]
        free = [block for block in range(POOL) if self.owner[block] is None]
        if len(free) < count or not worker.alive or ticket_id in self.openings:
            return
        blocks = self.rng.sample(free, count) if self.rng.random() < 0.3 else free[:count]
        hashes = tuple(b"%d" % index for index in range(count)) if asks else ()
        opening = self.openings[ticket_id] = Opening(ticket_id, blocks, held, hashes)
        for block in blocks:
            self.owner[block] = opening
        tokens = count * TILE
        self.fill_held(opening)
        self.tell(
            D, c.OfferBlocks(ticket_id, self.workers[P].name, blocks, tokens, held * TILE, hashes)
        )

    def fill_held(self, opening):
        for rank, block in itertools.product(self.workers[D].ranks, opening.blocks[: opening.held]):
            for place in itertools.product(range(2), range(self.pieces)):
                rank.memory[block, *place] = "held", opening

    def opened(self, rank, lane):
        """A rank of the decode worker has opened its lane of the ticket."""
        ticket = rank.machine.tickets[lane]
        tag = rank.agent, lane, ticket.offer.generation
        self.tags[tag] = self.openings[lane.partition("/")[0]]

    def push(self, ticket_id, count, cancel="", finish=False):
        """The prefill worker expects a ticket, and pushes `count` blocks of it as they fill."""
        worker, rng, when = self.workers[P], self.rng, 0.0
        if not worker.alive or ticket_id in self.lives:
            return
        life = self.lives[ticket_id] = next(self.numbers)
        self.tell(P, c.ExpectOffer(ticket_id, self.workers[D].name, count * TILE))
        first = 0
        while first < count:
            when += rng.choice((0.0, rng.uniform(0, 0.5)))
            size = rng.choice((count - first, rng.randint(1, count - first)))
            blocks = [(life, index) for index in range(first, first + size)]
            pieces = [-1] if rng.random() < 0.4 else rng.sample(range(self.pieces), self.pieces)
            for piece in pieces:
                when += rng.choice((0.0, 0.05))
                self.at(when, self.step_of, life, c.PushBlocks(ticket_id, first, blocks, piece))
            first += size
        last = c.CancelTransfer(ticket_id, cancel) if cancel else c.FinishPush(ticket_id, b"meta")
        if cancel or finish or rng.random() > self.plan.trouble / 3:
            self.at(when + rng.choice((0, 0.3)), self.step_of, life, last)

    def step_of(self, life, command):
        if self.lives.get(command.ticket_id) == life:
            self.tell(P, command)

    def wanted(self, ticket_id, count):
        """The prefill role: how much of the prefix it holds, in a moment."""
        some = self.rng.randint(0, count) if self.plan.trouble else count
        nothing = "miss" if some == 0 and self.rng.random() < 0.5 else ""
        self.at(self.rng.choice((0, 0.3)), self.push, ticket_id, some, nothing)

    # ---- what they tell, and what must hold ------------------------------------------------------

    def ended(self, worker, outcome):
        match outcome:
            case t.PrefixRequested(ticket_id, _, hashes):
                self.wanted(ticket_id, len(hashes))
            case t.PushEnded(ticket_id, ok):
                self.reasons["closed" if ok else outcome.reason] += 1
                assert ticket_id in self.lives, f"{ticket_id} closed twice"
                self.released.add(self.lives.pop(ticket_id))
            case _:
                self.sink_ended(worker, outcome)

    def sink_ended(self, worker, outcome):
        opening = self.openings.get(outcome.ticket_id)
        assert opening is not None, f"told after the end: {outcome}"
        opening.told.append(type(outcome).__name__)
        right = opening.told in (
            ["BlocksArrived"],
            ["TransferFailed"],
            ["TransferFailed", "BlocksFreed"],
        )
        assert right, f"{outcome.ticket_id} told {opening.told}"
        if isinstance(outcome, t.TransferFailed):
            self.reasons[outcome.reason] += 1
            return
        if isinstance(outcome, c.BlocksArrived):
            self.reasons["landed"] += 1
            self.landed(worker, opening, outcome.tokens // TILE)
            self.last = "" if outcome.ticket_id == LAST else self.last
        del self.openings[outcome.ticket_id]
        for block in opening.blocks:
            self.owner[block] = None

    def landed(self, worker, opening, tiles):
        """The tiles hold what the source pushed for this very reservation, held ones untouched."""
        assert opening.held <= tiles <= len(opening.blocks)
        assert opening.hashes or tiles == len(opening.blocks), f"landed as {tiles} tiles"
        self.reasons["landed in part"] += tiles < len(opening.blocks)
        self.reasons["held"] += opening.held > 0
        tags = [tag for tag, of in self.tags.items() if of is opening]
        assert len(tags) == max(self.plan.ranks), f"{opening.ticket_id} landed before all its lanes"
        for agent, lane, generation in tags:
            final = agent, lane, generation
            assert final in self.network.finals, f"{lane} landed without a final"
            memory = self.network.ranks[agent].memory
            rank = int(lane.rpartition("/")[2][0]) if "/" in lane else 0
            for index, piece in itertools.product(range(tiles), range(self.pieces)):
                found = memory.get((opening.blocks[index], rank, piece))
                wanted = content(lane, index, piece), (agent, lane, generation)
                wanted = ("held", opening) if index < opening.held else wanted
                assert found == wanted, f"{lane} landed as {found}, not {wanted}"

    def writes(self, rank, source, target, tile, index, tag):
        """A write lands: `source` is a life and a tile of it, `tag` for whom it was meant."""
        life = source[0]
        assert life not in self.released, f"{tag}: its blocks were released under a write"
        opening, owner = self.tags[tag], self.owner[tile]
        assert owner is opening, f"a late write of {tag} hits block {tile} of {owner}"
        assert opening.blocks[index] == tile and index >= opening.held, f"{tag} writes {index}"
        assert source[1] == index, f"{tag} writes tile {source[1]} as {index}"

    # ---- disasters -------------------------------------------------------------------------------

    def birth(self, role):
        number, self.births[role] = self.births[role], self.births[role] + 1
        ranks = self.plan.ranks[0 if role == P else 1]
        name = f"{role}.{number}"
        worker = Worker(self, role, name, ranks, self.machines[role], self.fan)
        self.note("world", f"{name} is born")
        self.workers[role] = worker
        other = self.workers.get(P if role == D else D)
        if other is not None:
            for one, two in ((worker, other), (other, worker)):
                one.handle(c.AddPeer(two.name, two.cards))

    def kill(self, role):
        """All ranks of a worker die. The other one's cluster and transports notice some time."""
        worker, other = self.workers[role], self.workers[P if role == D else D]
        self.note("world", f"{worker.name} dies")
        self.reasons[f"killed {role}"] += 1
        worker.alive, self.last = False, ""
        if role == D:
            self.openings.clear()
            self.owner = [None] * POOL
        else:
            self.lives.clear()
        for rank, card in itertools.product(other.ranks, worker.cards):
            self.at(self.rng.uniform(0, 4), rank.lose, card.agent)
        self.at(self.rng.uniform(0, 4), other.handle, c.LosePeer(worker.name))
        if self.plan.restart:
            self.at(self.rng.uniform(0.1, 6), self.birth, role)

    def sever(self):
        """The network between the two is gone for good; both live on."""
        self.note("world", "cut")
        for role in (P, D):
            self.network.weather.stuck[role] = self.now, END_S * 2, "cut"
        for one, other in itertools.permutations(self.workers.values(), 2):
            self.at(self.rng.uniform(0, 4), one.handle, c.LosePeer(other.name))

    def mistake(self):
        """The cluster takes a worker for lost, and names it again a moment later."""
        one, other = self.rng.sample(list(self.workers.values()), 2)
        self.note("world", f"{one.name} takes {other.name} for lost")
        one.handle(c.LosePeer(other.name))
        later = self.rng.uniform(0.05, 3)
        self.at(later, one.handle, c.AddPeer(other.name, other.cards))
