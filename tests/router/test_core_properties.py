"""The router under any order of events, for every policy: no request is lost, no block is promised
twice, no worker gets more than its credit, nobody starves, and the books add up."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import msgspec
import pytest
from diptych.protos.frames import (
    AttemptKey,
    AttemptOutcome,
    AttemptPlaced,
    AttemptRefused,
    Coefficients,
    PlaceAttempt,
    WorkerCard,
    WorkerReport,
)
from diptych.router import Router, RouterConfig
from diptych.router import events as e
from diptych.router.fleet import BATCH_TOKENS, HALTED_MAX, PREFETCH
from diptych.router.policies import POLICIES, DeadlinePolicy
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)

from tests.support.examples import examples

WORKERS = ["prefill/a", "prefill/b", "decode/x", "decode/y", "mixed/m"]
COST = Coefficients(0.01, 5e-4, 1e-8, 0.01, 1e-4, 5e-3, 1e-6, 1e-3, 1e-5, 0.1)
GATEWAYS = ["g", "h"]
HASHES = [bytes([i]) * 16 for i in range(6)]
BLOCKS = 40
ROWS = 3
TTL_S = 5.0

CONFIG = RouterConfig(
    queue_max=6, queue_ttl_s=TTL_S, background_wait_s=TTL_S / 2, growth_tokens=64, settle_s=0.0
)

hashes = st.lists(st.sampled_from(HASHES), max_size=4, unique=True)


class World(RuleBasedStateMachine):
    """Keeps who asked what, and what became of it: waiting, placed, or over."""

    config = CONFIG

    def __init__(self) -> None:
        super().__init__()
        self.router = Router(self.config, 1)
        self.now = 0.0
        self.fate: dict[AttemptKey, str] = {}
        self.owner: dict[AttemptKey, str] = {}
        self.blocks: dict[
            AttemptKey, tuple[str, int]
        ] = {}  #: decode worker (a name and its life), blocks
        self.lives = dict.fromkeys(WORKERS, 0)
        self.asked = 0
        self.told = {"placed": 0, "refused": 0, "hit": 0, "prompt": 0}
        self.places: dict[AttemptKey, PlaceAttempt] = {}
        self.joined: dict[str, int] = {}  #: worker -> its last report
        self.foreign: dict[
            AttemptKey, tuple[str, int]
        ] = {}  #: placed by another router: life, blocks
        self.told_over: set[AttemptKey] = set()  #: their workers said so
        self.computing: dict[
            AttemptKey, str
        ] = {}  #: prompts without a first token -> worker and life
        for gateway in GATEWAYS:
            self.send(e.GatewayJoined(gateway))

    def send(self, event: object) -> list:
        return self.take(self.router.handle(event, self.now))

    def take(self, actions: list) -> list:
        for action in actions:
            frame = getattr(action, "frame", None)
            if isinstance(frame, AttemptPlaced):
                self.placed(action.peer, frame)
            elif isinstance(frame, AttemptRefused):
                assert (
                    self.fate[frame.attempt_key] == "waiting"
                    and action.peer == self.owner[frame.attempt_key]
                )
                early = self.places[frame.attempt_key].slo_class == "sheddable"
                assert frame.retry_after_s > 0 and (frame.reason != "slo_unattainable" or early)
                self.fate[frame.attempt_key] = "over"
                self.told["refused"] += 1
        return actions

    def placed(self, peer: str, frame: AttemptPlaced) -> None:
        place = self.places[frame.attempt_key]
        assert self.fate[frame.attempt_key] == "waiting" and peer == self.owner[frame.attempt_key]
        assert frame.decode_worker in self.joined and not frame.decode_worker.startswith("prefill")
        local = place.local_prefill or self.config.disaggregate == "never"
        assert frame.prefill_worker is None or not local
        if self.config.disaggregate == "always" and frame.prefill_worker is None:
            assert local or frame.decode_worker.startswith("mixed")
        assert frame.prefill_worker is None or frame.prefill_worker in self.joined
        assert (
            frame.decode_worker not in place.lost_workers
            and frame.prefill_worker not in place.lost_workers
        )
        assert 0 <= frame.hit_tokens < place.prompt_tokens
        assert frame.predicted_ttft_ms >= frame.predicted_ready_ms >= 0
        self.fate[frame.attempt_key] = "placed"
        own = -(-(place.prompt_tokens + min(place.max_tokens, 64)) // 64)
        more = (place.answer_count - 1) * (own - place.prompt_tokens // 64)
        need = max(own, min(own + more, BLOCKS))
        self.blocks[frame.attempt_key] = (self.life(frame.decode_worker), need)
        self.computing[frame.attempt_key] = self.life(frame.prefill_worker or frame.decode_worker)
        self.told["placed"] += 1
        self.told["hit"] += frame.hit_tokens
        self.told["prompt"] += place.prompt_tokens

    def life(self, worker: str) -> str:
        return f"{worker}.{self.lives[worker]}"

    def over(self, key: AttemptKey) -> None:
        self.fate[key] = "over"
        self.blocks.pop(key, None)
        self.computing.pop(key, None)

    @rule(
        gateway=st.sampled_from(GATEWAYS),
        prompt=st.integers(1, 1500),
        most=st.integers(1, 200),
        content=hashes,
        avoid=st.lists(st.sampled_from(WORKERS), max_size=2),
        lost=st.lists(st.sampled_from(WORKERS), max_size=1),
        local=st.booleans(),
        tenant=st.sampled_from(["a", "b"]),
        slo_class=st.sampled_from(["interactive", "sheddable", "batch", "unknown"]),
        ttft=st.sampled_from([0.0, 0.05, 1.0]),
        answers=st.sampled_from([1, 1, 1, 2, 5]),
    )
    def ask(
        self, gateway, prompt, most, content, avoid, lost, local, tenant, slo_class, ttft, answers
    ):
        key = (f"r{self.asked}", 0)
        self.asked += 1
        self.places[key] = PlaceAttempt(
            key,
            prompt,
            most,
            content,
            avoid,
            lost,
            local,
            tenant,
            slo_class,
            ttft,
            answer_count=answers,
        )
        self.owner[key], self.fate[key] = gateway, "waiting"
        self.send(e.PlacementRequested(gateway, self.places[key]))

    @rule(data=st.data())
    def ask_again(self, data) -> None:
        live = [key for key, fate in self.fate.items() if fate != "over"]
        if live:
            key = data.draw(st.sampled_from(live))
            again = self.router.handle(
                e.PlacementRequested(self.owner[key], self.places[key]), self.now
            )
            if self.fate[key] == "placed":
                assert [a.frame for a in again] == [self.router.placed_attempts[key].placed]
            else:
                self.take(again)

    @rule(data=st.data(), first_token=st.booleans(), tell=st.booleans())
    def end(self, data, first_token, tell) -> None:
        if self.asked:
            key = (f"r{data.draw(st.integers(0, self.asked - 1))}", 0)
            if first_token and self.fate[key] == "placed":
                self.computing.pop(key, None)
                self.send(e.FirstTokenSent(key))
                return
            self.over(key)
            self.foreign.pop(key, None)  # its gateway is back, and says so
            self.send(
                e.AttemptEnded(key, AttemptOutcome(key, 20, 10.0, 5.0, "stop") if tell else None)
            )

    @rule(
        worker=st.sampled_from(WORKERS),
        cached=hashes,
        held=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 20)), max_size=3),
        cost=st.booleans(),
    )
    def join(self, worker, cached, held, cost) -> None:
        """New, or again with a whole snapshot: what runs there is what we know of, and others."""
        again = worker in self.joined
        self.lives[worker] += not again
        self.joined[worker] = 0
        life, room = self.life(worker), BLOCKS
        room -= sum(need for at, need in self.blocks.values() if at == life)
        for key in [key for key, (at, _) in self.foreign.items() if at == life]:
            del self.foreign[key]
        ours = {key for key, (at, _) in self.blocks.items() if at == life}
        self.told_over |= ours - self.computing.keys()  # they are not in what it holds
        told = []
        for name, blocks in dict(held).items() if not worker.startswith("prefill") else ():
            key = (f"f{name}.{life}", 0)
            if blocks <= room:
                room -= blocks
                told.append((*key, blocks))
                self.foreign[key] = (life, blocks)
        role = worker.split("/")[0]
        card = WorkerCard(
            worker, role, role, "", worker, 1, b"", BLOCKS, cost=COST if cost else None
        )
        card = msgspec.structs.replace(card, max_running=ROWS)
        self.send(e.WorkerJoined(card, 0, cached, told))

    @rule(worker=st.sampled_from(WORKERS))
    def lose(self, worker) -> None:
        self.joined.pop(worker, None)
        self.send(e.WorkerLost(worker))

    @rule(worker=st.sampled_from(WORKERS))
    def blip(self, worker) -> None:
        """Its connection breaks: it is back at once, what it had is not over for its gateways."""
        if worker in self.joined:
            self.lose(worker)
            self.join(worker, [], [], True)

    @rule(data=st.data())
    def foreign_stream_ends(self, data) -> None:
        if self.foreign:
            key = data.draw(st.sampled_from(sorted(self.foreign)))
            del self.foreign[key]
            self.send(e.AttemptEnded(key))

    @rule(
        worker=st.sampled_from(WORKERS),
        stored=hashes,
        evicted=hashes,
        gap=st.booleans(),
        speed=st.sampled_from([0.01, 1.0, 50.0]),
        waiting=st.sampled_from([0, 0, 1]),
        ended=st.integers(0, 2),
        demoted=hashes,
    )
    def report(self, worker, stored, evicted, gap, speed, waiting, ended, demoted) -> None:
        if worker not in self.joined:
            return
        number = self.joined[worker] + (2 if gap else 1)
        told = WorkerReport(
            number, 0, stored, evicted, 640, 0.5 * speed, 2, 900, 50, 0.7 * speed, waiting
        )
        told = msgspec.structs.replace(told, demoted=demoted, loaded_tokens=64, loading_seconds=0.1)
        life = self.life(worker)
        over = [key for key, (at, _) in self.foreign.items() if at == life][:ended]
        ours = [key for key, (at, _) in self.blocks.items() if at == life]
        ours = [key for key in ours if key not in self.computing][:ended]
        if not gap:
            told = msgspec.structs.replace(told, ended=over + ours)
            self.told_over.update(ours)
            for key in over:
                del self.foreign[key]
        actions = self.send(e.WorkerReported(worker, told))
        assert (e.DisconnectWorker(worker) in actions) == gap
        if not gap:
            self.joined[worker] = number

    @rule(gateway=st.sampled_from(GATEWAYS))
    def gateway_restarts(self, gateway) -> None:
        """Streams that decode already may go on: their workers say when they end."""
        for key in [key for key, owner in self.owner.items() if owner == gateway]:
            known = key in self.computing or key in self.told_over
            if self.fate[key] == "placed" and not known:
                at, need = self.blocks[key]
                if at in {self.life(name) for name in self.joined}:
                    self.foreign[key] = at, need
            self.over(key)
        self.send(e.GatewayLost(gateway))
        self.send(e.GatewayJoined(gateway))

    @rule(after=st.sampled_from([0.0, 0.01, 0.1, 1.0, TTL_S + 0.1]))
    def tick(self, after) -> None:
        self.now += after
        self.send(e.RouterTick())
        if after > TTL_S:
            assert not self.router.queue, "nobody waits longer than its time to live"

    @rule()
    def wake(self) -> None:
        """The clock goes to where the router wants it: something is left to wait for, or not."""
        wake = self.router.next_wake
        if wake is not None:
            self.now = max(self.now, wake)
            self.send(e.RouterTick())
            again = self.router.next_wake
            assert again is None or again > self.now, "no busy loop"
        else:
            assert not self.router.queue

    @rule()
    def everybody_is_free(self) -> None:
        """All that runs ends, all workers are up: whoever waits is served at once, in turn."""
        for worker in WORKERS:
            self.join(worker, [], [], True)
        until = self.now + TTL_S / 2
        while "placed" in self.fate.values() or (self.router.queue and self.now < until):
            for key in [key for key, fate in self.fate.items() if fate == "placed"]:
                self.over(key)
                self.send(e.AttemptEnded(key))
            if self.router.queue:
                self.wake()
        assert not self.router.queue

    @invariant()
    def who_has_nothing_to_do_can_be_given_something(self) -> None:
        router = self.router
        if not isinstance(router.policy, DeadlinePolicy):
            return
        for worker in self.router.workers.values():
            if router.placer.takes_prompts(worker) and not worker.pending_prefills:
                assert worker.slot in router.fleet.credited_slots | router.policy.idle_slots
                assert worker.busy_until < inf

    @invariant()
    def no_request_is_lost(self) -> None:
        waiting = {key for key, fate in self.fate.items() if fate == "waiting"}
        placed = {key for key, fate in self.fate.items() if fate == "placed"}
        assert set(self.router.queue.by_key) == waiting
        assert set(self.router.placed_attempts) == placed

    @invariant()
    def no_block_is_promised_twice(self) -> None:
        for name, worker in self.router.workers.items():
            life = self.life(name)
            mine = {k: need for k, (at, need) in self.blocks.items() if at == life}
            mine |= {k: need for k, (at, need) in self.foreign.items() if at == life}
            assert {k: one.blocks for k, one in worker.reservations.items()} == mine
            assert worker.reserved_blocks == sum(mine.values()) <= BLOCKS
            assert (
                len([k for k in worker.reservations if k not in self.foreign]) <= ROWS or not mine
            )

    @invariant()
    def no_worker_has_more_than_its_credit(self) -> None:
        for name, worker in self.router.workers.items():
            mine = {k for k, at in self.computing.items() if at == self.life(name)}
            assert set(worker.pending_prefills) == mine
            works = list(worker.pending_prefills.values())
            assert [w.deadline for w in works] == sorted(w.deadline for w in works)
            if isinstance(self.router.policy, DeadlinePolicy):
                long = [w for w in works if w.uncached_tokens >= BATCH_TOKENS]
                assert len(long) <= PREFETCH + HALTED_MAX

            assert worker.pending_tokens == sum(w.uncached_tokens for w in works)
            assert worker.rows == sum(one.rows for one in worker.reservations.values())
            takes = worker.can_decode and worker.rows < ROWS
            assert worker.reservable_blocks == (worker.room if takes else -1)

    @invariant()
    def the_queue_is_one_queue(self) -> None:
        queue = self.router.queue
        urgent = [request for _, request in queue.urgent]
        ranks = [rank for rank, _ in queue.urgent]
        assert sorted(ranks) == ranks
        assert {r.attempt_key for r in urgent} | set(queue.overdue) == set(queue.by_key)
        assert len(urgent) + len(queue.overdue) == len(queue.by_key)
        longest = queue.longest_urgent(len(urgent) + 1)
        assert {r.attempt_key for r in longest} == {r.attempt_key for r in urgent}
        lengths_s = [request.fastest_prefill_s for request in longest]
        assert lengths_s == sorted(lengths_s, reverse=True) and len(lengths_s) == len(urgent)
        preferring = [request for own in queue.preferring.values() for _, request in own]
        expected = {r.attempt_key for r in urgent if r.preferred_worker}
        assert {r.attempt_key for r in preferring} == expected
        for worker in self.router.workers.values():
            own_s = [r.preferred_prefill_s for r in preferring if r.preferred_worker is worker]
            assert worker.preferring_s == pytest.approx(sum(own_s), abs=1e-6)
        all_s = sum(r.preferred_prefill_s for r in preferring)
        assert queue.preferring_s == pytest.approx(all_s, abs=1e-6)
        fastest_s = sum(r.fastest_prefill_s for r in urgent)
        assert queue.prefill_s == pytest.approx(fastest_s, abs=1e-6)

    @invariant()
    def statistics_add_up(self) -> None:
        seen = self.router.statistics()
        told = (seen["placed"], seen["refused"], seen["hit_tokens"], seen["prompt_tokens"])
        assert told == tuple(self.told.values())
        fates = list(self.fate.values())
        assert seen["waiting"] == fates.count("waiting")
        assert seen["bound"] == fates.count("placed")


def world(policy: str, disaggregate: str, count: int) -> type:
    """The machine for one configuration, as a test case."""
    made = type(f"World_{policy}_{disaggregate}", (World,), {})
    made.config = replace(CONFIG, policy=policy, disaggregate=disaggregate)
    made.TestCase.settings = settings(
        max_examples=examples(count), stateful_step_count=50, deadline=None
    )
    return made.TestCase


TestLate = world("diptych", "always", 60)
TestLateAuto = world("diptych", "auto", 60)
TestLateNever = world("diptych", "never", 20)
TestEarly = world("min_ttft", "auto", 25)


@pytest.mark.parametrize("policy", sorted(set(POLICIES) - {"diptych", "min_ttft"}))
def test_every_baseline_keeps_the_same_promises(policy: str) -> None:
    run_state_machine_as_test(
        type("Baseline", (World,), {"config": replace(CONFIG, policy=policy)}),
        settings=settings(max_examples=4, stateful_step_count=40, deadline=None),
    )
