"""One sink and one source on virtual time, over a channel that does what networks do.

Notes are lost, doubled, delayed and reordered; the data of a write lands at once or later, its note
after it; writes fail half way and carry wrong bytes; either end cancels, dies, or is cut off. The
checks stand in the model itself: they see every block and who may write on it.
"""

import heapq
import itertools
import random
from collections import Counter

from diptych.kv_transfer import messages as m
from diptych.kv_transfer import tickets as t

P, D = "prefill", "decode"
LIMITS = t.Limits(total_s=4, idle_s=0.5, resend_s=0.2, quarantine_s=1.5, offer_s=3)
HEAL_S = 12.0  #: nothing is lost from here on
END_S = 60.0
TICK_S = 0.1
POOL = 10  #: blocks of the sink: few, so that they are used again soon


class Simulation:
    """`run` plays one seed to its end; a broken promise raises `AssertionError`."""

    def __init__(self, seed, sink=t.Sink, source=t.Source):
        self.rng = rng = random.Random(seed)
        self.loss, self.double = rng.choice((0, 0.05, 0.3)), rng.choice((0, 0.1, 0.4))
        self.delay_s = rng.choice((0.0, 0.01, 0.3))
        self.wrong, self.failing = rng.choice((0, 0.1)), rng.choice((0, 0.1))
        self.now, self.heap, self.order = 0.0, [], itertools.count()
        self.sink, self.source = sink(LIMITS), source(LIMITS)
        self.alive = {P: True, D: True}
        self.cut = self.fenced = self.source_knows = False
        self.memory, self.owner = [None] * POOL, [None] * POOL  # of the sink
        self.blocks = {}  #: xid -> the sink's blocks, until they are free
        self.expected, self.closed = set(), set()
        self.outcomes = Counter()  #: (xid, kind) -> times
        self.reasons = Counter()
        self.log = []
        self.pending = 0  #: steps of scripts still to come
        for index in range(rng.randint(1, 8)):
            self.script(f"r{index}#0")
        if rng.random() < 0.4:
            self.at(rng.uniform(0, 8), rng.choice((self.kill_source, self.kill_sink, self.sever)))

    # ---- the clock and the log -------------------------------------------------------------------

    def at(self, delay, call, *args):
        heapq.heappush(self.heap, (self.now + delay, next(self.order), call, args))

    def script_at(self, delay, call, *args):
        def step():
            self.pending -= 1
            call(*args)

        self.pending += 1
        self.at(delay, step)

    def note(self, who, what):
        self.log.append(f"{self.now:8.3f} {who:7} {what}")

    def run(self):
        self.at(TICK_S, self.tick)
        while self.heap:
            self.now, _, call, args = heapq.heappop(self.heap)
            call(*args)
        if self.alive[D]:
            assert not self.sink.tickets, f"never ended at the sink: {self.sink.tickets}"
            assert not self.blocks, f"never freed: {self.blocks}"
        if self.alive[P]:
            assert not self.source.tickets, f"never ended at the source: {self.source.tickets}"
            assert self.closed == self.expected, "a ticket of the source never closed"

    def tick(self):
        self.to_sink(t.Tick())
        self.to_source(t.Tick())
        over = not self.pending and not self.sink.tickets and not self.source.tickets
        if self.now < END_S and not over:
            self.at(TICK_S, self.tick)

    # ---- what the ends are asked to do -----------------------------------------------------------

    def script(self, xid):
        rng, start = self.rng, self.rng.uniform(0, 6)
        count = rng.randint(1, 4)
        self.script_at(start, self.open, xid, count)
        if rng.random() < 0.05:
            return  # the source never hears of it
        when = max(0.0, start + rng.uniform(-1, 1))
        self.script_at(when, self.expect, xid)
        first = 0
        while first < count:
            when += rng.choice((0.0, rng.uniform(0, 0.5)))
            size = rng.randint(1, count - first)
            blocks = [(xid, index) for index in range(first, first + size)]
            self.script_at(when, self.to_source, t.Push(xid, first, blocks))
            first += size
        if rng.random() < 0.95:
            self.script_at(when + rng.choice((0, 0.3)), self.to_source, t.Finish(xid, b"meta"))
        for end, chance in ((self.to_sink, 0.15), (self.to_source, 0.15)):
            if rng.random() < chance:
                self.script_at(start + rng.uniform(0, 3), end, t.Cancel(xid, "aborted"))

    def open(self, xid, count):
        free = [block for block in range(POOL) if self.owner[block] is None]
        if len(free) < count or not self.alive[D]:
            return
        blocks = self.rng.sample(free, count)
        for block in blocks:
            self.owner[block] = xid
        self.blocks[xid] = blocks
        self.to_sink(t.Open(xid, P, blocks))

    def expect(self, xid):
        if self.alive[P]:
            self.expected.add(xid)
            self.to_source(t.Expect(xid, D))

    # ---- the two machines ------------------------------------------------------------------------

    def to_sink(self, event):
        if not self.alive[D]:
            return
        for action in self.sink.handle(event, self.now):
            self.note("sink", action)
            match action:
                case t.Send(_, message):
                    self.carry(P, message)
                    if self.fenced:
                        self.at(0, self.to_sink, t.PeerDown(P))
                        self.at(0, self.to_sink, t.Fenced(P))
                case t.Verify(xid, seq, _, blocks, checksums):
                    ok = [self.memory[block] for block in blocks] == checksums
                    self.at(self.rng.choice((0, 0, 0.2)), self.to_sink, t.Verified(xid, seq, ok))
                case _:
                    self.ended(action)
        quarantined = sum(k.state == "QUARANTINED" for k in self.sink.tickets.values())
        self.reasons["quarantined"] += quarantined

    def ended(self, outcome):
        xid, kind = outcome.xid, type(outcome).__name__
        self.outcomes[xid, kind] += 1
        assert self.outcomes[xid, kind] == 1, f"told twice: {outcome}"
        if isinstance(outcome, t.Broken):
            self.reasons[outcome.reason] += 1
            return
        blocks = self.blocks.pop(xid)
        if isinstance(outcome, t.Landed):
            self.reasons["landed"] += 1
            assert not self.outcomes[xid, "Broken"], f"{xid} landed after it broke"
            arrived = [self.memory[block] for block in blocks]
            assert arrived == [(xid, i) for i in range(len(blocks))], f"{xid} landed as {arrived}"
        else:
            assert self.outcomes[xid, "Broken"], f"{xid} was freed before it broke"
        for block in blocks:
            self.owner[block] = None

    def to_source(self, event):
        if not self.alive[P]:
            return
        for action in self.source.handle(event, self.now):
            self.note("source", action)
            match action:
                case t.Send(_, message):
                    self.carry(D, message)
                    if self.source_knows:
                        self.at(0, self.to_source, t.PeerDown(D))
                case t.Post():
                    self.post(action)
                case t.Closed(xid):
                    assert xid not in self.closed, f"{xid} closed twice"
                    self.closed.add(xid)

    # ---- the channel -----------------------------------------------------------------------------

    def delay(self):
        return self.rng.expovariate(1 / self.delay_s) if self.delay_s else 0.0

    def carry(self, to, message):
        lossy = self.now < HEAL_S
        if self.cut or (lossy and self.rng.random() < self.loss):
            self.note("network", f"lost {message}")
            return
        copies = 2 if lossy and self.rng.random() < self.double else 1
        for _ in range(copies):
            self.at(self.delay(), self.arrive, to, message)

    def arrive(self, to, message):
        if self.cut or (to == D and self.fenced):
            return
        self.note("network", f"to {to}: {message}")
        if to == D:
            self.to_sink(t.Noted(P, message))
        else:
            self.to_source(t.Noted(D, message))

    def post(self, post):
        if self.cut or self.source_knows:
            self.at(0, self.to_source, t.Written(post.xid, False, "peer_lost"))
            return
        blocks = list(zip(post.source, post.target, strict=True))
        failed = self.rng.random() < self.failing
        wrong = self.rng.random() < self.wrong
        count = self.rng.randint(0, len(blocks)) if failed else len(blocks)
        self.at(self.delay(), self.land, post, blocks[:count], failed, wrong)

    def land(self, post, blocks, failed, wrong):
        vanished = not self.alive[P] and self.rng.random() < 0.5
        if self.fenced or not self.alive[D] or vanished:
            self.to_source(t.Written(post.xid, False, "peer_lost"))
            return
        assert post.xid not in self.closed, f"{post.xid}: its blocks were released under a write"
        self.note("network", f"{post.xid} writes {post.target}")
        for source, target in blocks:
            owner = self.owner[target]
            assert owner == post.xid, f"a late write of {post.xid} hits block {target} of {owner}"
            self.memory[target] = "wrong" if wrong else source
        if not failed:
            self.carry(D, m.Chunk(post.xid, post.seq, post.first, post.source))
        written = t.Written(post.xid, not failed, "failed" if failed else "")
        self.at(self.delay(), self.to_source, written)

    # ---- disasters -------------------------------------------------------------------------------

    def kill_source(self):
        self.note("world", "the source dies")
        self.alive[P] = False
        self.sink_learns()

    def kill_sink(self):
        self.note("world", "the sink dies")
        self.alive[D] = False
        self.blocks.clear()
        self.at(self.rng.uniform(0, 2), self.source_learns)

    def sever(self):
        """The network between the two is gone for good; both live on."""
        self.note("world", "cut")
        self.cut = True
        self.sink_learns()
        self.at(self.rng.uniform(0, 4), self.source_learns)

    def sink_learns(self):
        heard = self.rng.uniform(0, 4)
        self.at(heard, self.to_sink, t.PeerDown(P))
        self.at(heard + self.rng.uniform(0, 2), self.fence)

    def fence(self):
        self.note("world", "the sink's transport fences the source")
        self.fenced = True
        self.to_sink(t.Fenced(P))

    def source_learns(self):
        self.source_knows = True
        self.to_source(t.PeerDown(D))
