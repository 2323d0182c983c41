"""The router under any order of events: no request is lost, no block is promised twice."""

from __future__ import annotations

from diptych.protos.frames import Key, Place, Placed, Refused, Report, WorkerCard
from diptych.router import events as e
from diptych.router.core import Router, RouterConfig
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

WORKERS = ["prefill/a", "prefill/b", "decode/x", "decode/y"]
GATEWAYS = ["g", "h"]
HASHES = [bytes([i]) * 16 for i in range(6)]
BLOCKS = 10
TTL_S = 5.0

CONFIG = RouterConfig(queue_max=4, queue_ttl_s=TTL_S, growth_tokens=64, settle_s=0.0)

hashes = st.lists(st.sampled_from(HASHES), max_size=4, unique=True)


class World(RuleBasedStateMachine):
    """Keeps who asked what, and what became of it: waiting, placed, or over."""

    def __init__(self) -> None:
        super().__init__()
        self.router = Router(CONFIG, 1)
        self.now = 0.0
        self.fate: dict[Key, str] = {}
        self.owner: dict[Key, str] = {}
        self.blocks: dict[Key, tuple[str, int]] = {}  #: decode worker (a name and its life), blocks
        self.lives = dict.fromkeys(WORKERS, 0)
        self.asked = 0
        self.told = {"placed": 0, "refused": 0, "hit": 0, "prompt": 0}
        self.places: dict[Key, Place] = {}
        self.joined: dict[str, int] = {}  #: worker -> its last report
        for gateway in GATEWAYS:
            self.send(e.GatewayJoined(gateway))

    def send(self, event: object) -> list:
        actions = self.router.handle(event, self.now)
        for action in actions:
            frame = getattr(action, "frame", None)
            if isinstance(frame, Placed):
                self.placed(action.peer, frame)
            elif isinstance(frame, Refused):
                assert self.fate[frame.key] == "waiting" and action.peer == self.owner[frame.key]
                self.fate[frame.key] = "over"
                self.told["refused"] += 1
        return actions

    def placed(self, peer: str, frame: Placed) -> None:
        place = self.places[frame.key]
        assert self.fate[frame.key] == "waiting" and peer == self.owner[frame.key]
        assert frame.decode in self.joined and frame.decode.startswith("decode")
        assert (frame.prefill is None) == place.local
        assert frame.prefill is None or frame.prefill in self.joined
        assert frame.decode not in place.lost and frame.prefill not in place.lost
        assert 0 <= frame.hit_tokens < place.prompt_tokens
        self.fate[frame.key] = "placed"
        need = -(-(place.prompt_tokens + min(place.max_tokens, 64)) // 64)
        self.blocks[frame.key] = (f"{frame.decode}.{self.lives[frame.decode]}", need)
        self.told["placed"] += 1
        self.told["hit"] += frame.hit_tokens
        self.told["prompt"] += place.prompt_tokens

    @rule(
        gateway=st.sampled_from(GATEWAYS),
        prompt=st.integers(1, 500),
        most=st.integers(1, 200),
        content=hashes,
        avoid=st.lists(st.sampled_from(WORKERS), max_size=2),
        lost=st.lists(st.sampled_from(WORKERS), max_size=1),
        local=st.booleans(),
    )
    def ask(self, gateway, prompt, most, content, avoid, lost, local) -> None:
        key = (f"r{self.asked}", 0)
        self.asked += 1
        self.places[key] = Place(key, prompt, most, content, avoid=avoid, lost=lost, local=local)
        self.owner[key], self.fate[key] = gateway, "waiting"
        self.send(e.Asked(gateway, self.places[key]))

    @rule(data=st.data())
    def ask_again(self, data) -> None:
        live = [key for key, fate in self.fate.items() if fate != "over"]
        if live:
            key = data.draw(st.sampled_from(live))
            again = self.router.handle(e.Asked(self.owner[key], self.places[key]), self.now)
            if self.fate[key] == "placed":
                assert [a.frame for a in again] == [self.router.bound[key].placed]
            else:
                assert again == []

    @rule(data=st.data(), first_token=st.booleans())
    def end(self, data, first_token) -> None:
        if self.asked:
            key = (f"r{data.draw(st.integers(0, self.asked - 1))}", 0)
            if first_token and self.fate[key] == "placed":
                assert self.send(e.FirstToken(key)) == []
                return
            self.fate[key] = "over"
            self.blocks.pop(key, None)
            self.send(e.Ended(key))

    @rule(worker=st.sampled_from(WORKERS), cached=hashes)
    def join(self, worker, cached) -> None:
        if worker not in self.joined:
            self.lives[worker] += 1
        self.joined[worker] = 0
        role = worker.split("/")[0]
        self.send(e.Joined(WorkerCard(worker, role, role, "", worker, 1, b"", BLOCKS), 0, cached))

    @rule(worker=st.sampled_from(WORKERS))
    def lose(self, worker) -> None:
        self.joined.pop(worker, None)
        self.send(e.Lost(worker))

    @rule(worker=st.sampled_from(WORKERS), stored=hashes, evicted=hashes, gap=st.booleans())
    def report(self, worker, stored, evicted, gap) -> None:
        if worker not in self.joined:
            return
        number = self.joined[worker] + (2 if gap else 1)
        actions = self.send(e.Reported(worker, Report(number, 0, stored, evicted, 640, 0.5)))
        assert actions == ([e.Disconnect(worker)] if gap else [])
        if not gap:
            self.joined[worker] = number

    @rule(gateway=st.sampled_from(GATEWAYS))
    def gateway_restarts(self, gateway) -> None:
        for key in [key for key, owner in self.owner.items() if owner == gateway]:
            self.fate[key] = "over"
            self.blocks.pop(key, None)
        self.send(e.GatewayLost(gateway))
        self.send(e.GatewayJoined(gateway))

    @rule(after=st.sampled_from([0.1, 1.0, TTL_S + 0.1]))
    def tick(self, after) -> None:
        self.now += after
        self.send(e.Tick())
        if after > TTL_S:
            assert not self.router.waiting, "nobody waits longer than its time to live"

    @invariant()
    def no_request_is_lost(self) -> None:
        waiting = {key for key, fate in self.fate.items() if fate == "waiting"}
        placed = {key for key, fate in self.fate.items() if fate == "placed"}
        assert set(self.router.waiting) == waiting
        assert set(self.router.bound) == placed

    @invariant()
    def no_block_is_promised_twice(self) -> None:
        for name, worker in self.router.workers.items():
            life = f"{name}.{self.lives[name]}"
            mine = sum(need for at, need in self.blocks.values() if at == life)
            assert sum(worker.reserved.values()) == mine <= BLOCKS
            assert set(worker.queued) <= set(self.router.bound)

    @invariant()
    def statistics_add_up(self) -> None:
        seen = self.router.statistics()
        told = (seen["placed"], seen["refused"], seen["hit_tokens"], seen["prompt_tokens"])
        assert told == tuple(self.told.values())
        fates = list(self.fate.values())
        assert seen["waiting"] == fates.count("waiting")
        assert seen["bound"] == fates.count("placed")


World.TestCase.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
TestWorld = World.TestCase
