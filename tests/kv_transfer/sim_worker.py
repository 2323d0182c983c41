"""A worker of the simulation: its fan, and for each rank one of the two ticket machines.

What `service.TransferService` does around the machines is done here on virtual time, and a block is
a tile. Ranks are told, and tell, over queues of their own: each has its own lag.
"""

from diptych.kv_transfer import KVLayout, PeerCard
from diptych.kv_transfer import commands as c
from diptych.kv_transfer import tickets as t
from diptych.kv_transfer.fan import RankCommand

TILE = 64  #: tokens
HEADS = 2  #: of the model: at most two ranks share them


class Worker:
    """One incarnation of a role. A restarted one is another worker."""

    def __init__(self, world, role, name, ranks, machine, fan):
        self.world, self.role, self.name, self.alive = world, role, name, True
        layout = KVLayout(1, HEADS // ranks, 1, TILE, 1, "uint8", 1)
        self.cards = [
            PeerCard(f"{name}:{rank}", "sim", b"", b"", 0, 0, layout, rank, ranks)
            for rank in range(ranks)
        ]
        self.ranks = [Rank(self, card, machine(world.limits)) for card in self.cards]
        self.fan = fan(self.cards)

    def handle(self, event):
        """A command for all ranks, or the outcome of one."""
        if not self.alive:
            return
        for action in self.fan.handle(event):
            if isinstance(action, RankCommand):
                rank = self.ranks[action.rank]
                self.world.at(rank.lag, rank.command, action.command)
            else:
                self.world.note(self.name, action)
                self.world.ended(self, action)

    @property
    def idle(self):
        return not self.fan.tickets and not any(rank.machine.tickets for rank in self.ranks)


class Rank:
    def __init__(self, worker, card, machine):
        self.worker, self.machine = worker, machine
        self.agent, self.number = card.agent, card.rank
        self.world, self.network = worker.world, worker.world.network
        self.network.ranks[self.agent] = self
        self.lag = self.world.rng.choice((0.0, 0.0, 0.05))
        self.memory = {}  #: (tile, source rank, piece) -> what was written there, and by whom
        self.cards = {}  #: agent -> its worker: who the cluster says is there
        self.peers = {}  #: of these, whom the transport reaches -> epoch of the connection
        self.dying = set()
        self.tiles = {}  #: lane -> how many tiles its source expects to push

    def command(self, command):
        if not self.worker.alive:
            return
        match command:
            case c.AddPeer(worker, cards):
                self.cards.update({card.agent: worker for card in cards})
                for card in cards:
                    self.reach(card.agent)
            case c.LosePeer(worker):
                for agent in [a for a, of in self.cards.items() if of == worker]:
                    del self.cards[agent]
                    self.lose(agent)
            case c.OfferBlocks(ticket_id, peer, blocks, tokens, held, hashes):
                assert tokens == TILE * len(blocks)
                if self.reach(peer):
                    self.act(t.OfferTiles(ticket_id, peer, blocks, held // TILE, hashes))
                    self.world.opened(self, ticket_id)
                else:
                    self.tell(t.TransferFailed(ticket_id, "peer_lost"))
                    self.tell(t.BlocksFreed(ticket_id))
            case c.ExpectOffer(ticket_id, peer, tokens):
                self.tiles[ticket_id] = tokens // TILE
                reached = self.reach(peer)
                self.act(t.ExpectTileOffer(ticket_id, peer))
                if not reached:
                    self.act(t.CancelTicket(ticket_id, "peer_lost"))
            case c.PushBlocks(ticket_id, first, blocks, piece):
                self.act(t.PushTiles(ticket_id, first, blocks, piece, self.world.pieces))
            case c.FinishPush(ticket_id, meta):
                self.act(t.FinishTilePush(ticket_id, self.tiles.get(ticket_id, 0), meta))
            case c.CancelTransfer(ticket_id, reason):
                self.act(t.CancelTicket(ticket_id, reason))

    def act(self, event):
        if not self.worker.alive:
            return
        for action in self.machine.handle(event, self.world.now):
            self.world.note(self.agent, action)
            match action:
                case t.SendMessage(peer, message):
                    if peer in self.peers:
                        self.network.carry(self, peer, message)
                    else:
                        self.world.at(0, self.unreachable, peer)
                case t.WriteTiles():
                    self.network.post(self, action)
                case t.VerifyChunk():
                    self.verify(action)
                case t.TilesArrived(ticket_id, meta, tiles):
                    self.tell(c.BlocksArrived(ticket_id, meta, tiles * TILE))
                case outcome:
                    self.tell(outcome)

    def tell(self, outcome):
        self.world.at(self.lag, self.worker.handle, outcome)

    def verify(self, check):
        chunk = check.chunk
        sums = self.network.checksums(chunk, self.memory, check.tiles)
        verified = t.ChunkVerified(check.ticket_id, chunk.chunk_number, sums == chunk.checksums)
        self.world.at(self.world.rng.choice((0, 0, 0.2)), self.act, verified)

    def admits(self, peer, chunk):
        """`TransferService._admit`: may the data of this chunk be stored?"""
        ticket = self.machine.tickets.get(chunk.ticket_id)
        return (
            ticket is not None
            and ticket.peer == peer
            and ticket.state is t.ReceivingState.RESERVED
            and ticket.offer.generation == chunk.generation
        )

    # ---- peers -----------------------------------------------------------------------------------

    def reach(self, agent):
        """Is this peer reached? One that was lost, and that the cluster names, may be back."""
        if agent in self.cards and agent not in self.peers and agent not in self.dying:
            self.peers[agent] = self.network.epoch(self.agent, agent)
        return agent in self.peers

    def lose(self, agent):
        if self.peers.pop(agent, None) is None:
            return
        self.dying.add(agent)
        self.act(t.PeerWentDown(agent))
        self.world.at(self.world.rng.uniform(0, 2), self.fence, agent)

    def fence(self, agent):
        if self.worker.alive:
            self.world.note(self.agent, f"fences {agent}")
            self.network.hang_up(self.agent, agent)
            self.dying.discard(agent)
            self.act(t.PeerFenced(agent))

    def unreachable(self, agent):
        self.act(t.PeerWentDown(agent))
        if agent not in self.dying and agent not in self.peers:
            self.act(t.PeerFenced(agent))
