"""The network of the simulation: notes, and writes whose data lands at once or much later.

Notes are lost, doubled, delayed and reordered. Writes fail half way, carry wrong bytes, and of a
dead writer some still land until the connection is fenced. A direction can be clogged (nothing is
lost, nothing comes through) or cut (notes are lost; writes, or the news of their end, hang).
"""

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from diptych.kv_transfer import messages as m
from diptych.kv_transfer import tickets as t

HEAL_S = 12.0  #: nothing is lost or late from here on
FATES = "lose", "double", "delay"


@dataclass
class Weather:
    """How bad it is. Chances in 0..1, seconds; `fate` befalls the `number`-th note of `kind`."""

    loss: float = 0.0
    double: float = 0.0
    delay_s: float = 0.0
    wrong: float = 0.0
    failing: float = 0.0
    fate: tuple = ("", 0, "")  #: kind, number, one of FATES
    stuck: dict = field(default_factory=dict)  #: receiving role -> (from, until, "cut" | "clog")


class Network:
    def __init__(self, world, weather, refuses):
        self.world, self.rng, self.weather = world, world.rng, weather
        self.refuses = refuses  #: like TCP: the sink is asked for each write that comes in
        self.ranks = {}  #: agent -> rank
        self.epochs = defaultdict(int)  #: of the connection between two agents
        self.sent = Counter()  #: notes by kind
        self.finals = set()  #: (agent, lane, generation) that were told that all was written

    def epoch(self, one, other):
        return self.epochs[min(one, other), max(one, other)]

    def hang_up(self, one, other):
        """Nothing that is under way comes through, and the other end notices in a while."""
        self.epochs[min(one, other), max(one, other)] += 1
        if self.refuses:
            self.world.at(self.rng.uniform(0, 0.5), self.ranks[other].lose, one)

    def stuck(self, role):
        since, until, how = self.weather.stuck.get(role, (0, 0, ""))
        return (how, until - self.world.now) if since <= self.world.now < until else ("", 0.0)

    def delay(self, role):
        _, stuck = self.stuck(role)
        mean = self.weather.delay_s if self.world.now < HEAL_S else 0.01
        return stuck + (self.rng.expovariate(1 / mean) if mean else 0.0)

    # ---- notes -----------------------------------------------------------------------------------

    def copies(self, message):
        """When the copies of a note are sent: [] if it is lost."""
        kind, number, fate = self.weather.fate
        lossy = self.world.now < HEAL_S
        self.sent[type(message).__name__] += 1
        if lossy and type(message).__name__ == kind and self.sent[kind] == number:
            self.world.note("network", f"fate: {fate} {message}")
            return {"lose": [], "double": [0, self.rng.uniform(0, 3)], "delay": [1.0]}[fate]
        if lossy and self.rng.random() < self.weather.loss:
            return []
        if lossy and self.rng.random() < self.weather.double:
            return [0, self.rng.choice((0, self.rng.uniform(0, 2)))]
        return [0]

    def carry(self, rank, peer, message):
        other, epoch = self.ranks[peer], rank.peers[peer]
        if isinstance(message, m.FinishMessage):
            self.finals.add((peer, message.ticket_id, message.generation))
        copies = self.copies(message)
        if self.stuck(other.worker.role)[0] == "cut" or not copies:
            self.world.note("network", f"lost {message}")
            return
        for late in copies:
            delay = late + self.delay(other.worker.role)
            self.world.at(delay, self.arrive, rank.agent, other, epoch, message)

    def arrive(self, sender, rank, epoch, message):
        if epoch == self.epoch(sender, rank.agent) and rank.reach(sender):
            self.world.note(rank.agent, message)
            rank.act(t.MessageReceived(sender, message))

    # ---- writes ----------------------------------------------------------------------------------

    def post(self, rank, post):
        epoch = rank.peers.get(post.peer)
        if epoch != self.epoch(rank.agent, post.peer):
            self.world.at(0, rank.act, t.WriteEnded(post.ticket_id, False, "peer_lost"))
            self.world.at(0, rank.lose, post.peer)
            return
        delay = self.delay(self.ranks[post.peer].worker.role)
        self.world.at(delay, self.land, rank, post, epoch)

    def land(self, rank, post, epoch):
        target = self.ranks[post.peer]
        vanished = not rank.worker.alive and self.rng.random() < 0.5
        gone = epoch != self.epoch(rank.agent, post.peer) or not target.worker.alive
        if gone or vanished:
            rank.act(t.WriteEnded(post.ticket_id, False, "peer_lost"))
            return
        self.world.note("network", f"{post.ticket_id} writes {post.target_tiles} of {post.peer}")
        bad = self.world.now < HEAL_S
        failed = bad and self.rng.random() < self.weather.failing
        wrong = bad and self.rng.random() < self.weather.wrong
        chunk = self.chunk(post)
        if not self.refuses or target.admits(rank.agent, chunk):
            count = len(post.source_tiles)
            self.store(rank, post, self.rng.randint(0, count) if failed else count, wrong)
        if not failed and post.peer in rank.peers:
            self.carry(rank, post.peer, chunk)
        written = t.WriteEnded(post.ticket_id, not failed, "failed" if failed else "")
        self.world.at(self.delay(rank.worker.role), rank.act, written)

    def store(self, rank, post, count, wrong):
        target = self.ranks[post.peer]
        tag = target.agent, post.ticket_id, post.generation
        for index, source, tile in zip(
            range(count), post.source_tiles, post.target_tiles, strict=False
        ):
            self.world.writes(rank, source, target, tile, post.first_tile + index, tag)
            for piece in pieces_of(post.piece, post.pieces):
                data = "wrong" if wrong else content(post.ticket_id, post.first_tile + index, piece)
                target.memory[tile, rank.number, piece] = data, tag

    def chunk(self, post):
        place = (
            post.ticket_id,
            post.generation,
            post.chunk_number,
            post.first_tile,
            post.piece,
            post.pieces,
        )
        chunk = m.ChunkMessage(*place, [])
        data = [
            [
                content(post.ticket_id, post.first_tile + index, k)
                for k in pieces_of(post.piece, post.pieces)
            ]
            for index in range(len(post.source_tiles))
        ]
        return m.ChunkMessage(*place, [(place_of(chunk, i), each) for i, each in enumerate(data)])

    def checksums(self, chunk, memory, tiles):
        """What a checksum can tell: the bytes that are there, and the place they were sent to."""
        rank, pieces = source_rank(chunk.ticket_id), pieces_of(chunk.piece, chunk.pieces)
        found = [[memory.get((tile, rank, k), (None,))[0] for k in pieces] for tile in tiles]
        return [(place_of(chunk, index), each) for index, each in enumerate(found)]


def content(lane, index, piece):
    """The KV of a lane's share of a tile: the same whenever this prompt is computed."""
    return lane, index, piece


def place_of(chunk, index):
    return chunk.ticket_id, chunk.generation, chunk.first_tile + index, chunk.piece


def pieces_of(piece, pieces):
    return range(pieces) if piece < 0 else (piece,)


def source_rank(lane):
    """`request#0/1>0` comes from source rank 1."""
    return int(lane.rpartition("/")[2][0]) if "/" in lane else 0
