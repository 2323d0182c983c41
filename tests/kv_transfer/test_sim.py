"""Tickets through a hostile network: what `tickets` and `fan` promise, on many schedules.

No block is written after it was freed or landed, none is lost; a ticket lands only with the KV that
its source pushed for this very reservation; every ticket ends once at both ends, once messages get
through or the peer is down and fenced.

`KV_SIM_SEED=17` plays one seed only, and prints its last events if it fails.
"""

import os
from collections import Counter
from dataclasses import replace

import msgspec
import pytest
from diptych.kv_transfer import commands as c
from diptych.kv_transfer import messages as m
from diptych.kv_transfer import tickets as t
from diptych.kv_transfer.fan import Fan

from tests.support.examples import examples
from tests.support.variants import daily_but

from .sim import KINDS, LIMITS, RANKS, D, P, Plan, Simulation
from .sim_network import FATES, Weather

ONE = os.environ.get("KV_SIM_SEED")
COMMAND = "KV_SIM_SEED={seed} .venv/bin/python -m pytest tests/kv_transfer/test_sim.py -k many"
several_seeds = pytest.mark.skipif(ONE is not None, reason="one seed is played")


def play(seeds, **machines):
    """Plays the seeds; returns how often what happened."""
    seen = Counter()
    for seed in [int(ONE)] if ONE is not None else seeds:
        simulation = Simulation(seed, **machines)
        run(simulation, f"seed {seed}", COMMAND.format(seed=seed))
        seen += simulation.reasons
    return seen


def run(simulation, what, replay):
    try:
        simulation.run()
    except Exception as error:
        events = "\n".join("{:8.3f} {:12} {}".format(*entry) for entry in simulation.log[-60:])
        pytest.fail(f"{events}\n{what}: {error!r}\nreplay: {replay}", pytrace=False)


def test_many_seeds():
    seen = play(range(examples(1000)))
    usual = {"landed", "landed in part", "held", "closed", "aborted", "checksum", "timeout"}
    usual |= {
        "peer_lost",
        "failed",
        "quarantined",
        "no_offer",
        "miss",
        f"killed {P}",
        f"killed {D}",
    }
    if ONE is None:
        assert usual <= seen.keys(), "the simulation no longer reaches what it is for"


@pytest.mark.long
@several_seeds
def test_10000_seeds():
    play(range(1000, 11_000))


def test_the_same_seed_plays_the_same_game():
    games = [Simulation(7), Simulation(7)]
    for game in games:
        game.run()
    first, second = ([(now, who, str(what)) for now, who, what in game.log] for game in games)
    assert first == second and first


# ---- every step, every message -------------------------------------------------------------------


def fair(ranks, **weather):
    """Three requests, and nothing goes wrong but what the test says."""
    return Plan(Weather(delay_s=0.01, **weather), 3, ranks, 2, refuses=False, trouble=0.0)


def played(seed, plan, **machines):
    """Plays a plan; fails with the arguments that play it again."""
    simulation = Simulation(seed, plan, **machines)
    run(simulation, f"seed {seed} of {plan}", f"Simulation({seed}, {plan}).run()")
    return simulation


@pytest.mark.parametrize("ranks", daily_but([(1, 1), (2, 1)], RANKS), ids=str)
@pytest.mark.parametrize("role", [P, D])
@pytest.mark.parametrize("restart", [False, True], ids=["for good", "restarts"])
def test_a_worker_may_die_at_every_step(ranks, role, restart):
    steps = played(1, fair(ranks)).steps
    assert steps > 50
    for step in range(1, steps + 1):
        plan = fair(ranks)
        plan.kill, plan.restart = (step, role), restart
        assert played(1, plan).reasons[f"killed {role}"] == 1


@pytest.mark.parametrize("ranks", RANKS, ids=str)
@pytest.mark.parametrize("fate", FATES)
def test_every_message_may_be_lost_doubled_or_late(ranks, fate):
    befall(ranks, fate)


def befall(ranks, fate, **machines):
    """All but a lost `Chunk` is made good: three tickets land all the same, and the last one."""
    sent = played(2, fair(ranks)).network.sent
    assert {"OfferMessage", "ChunkMessage", "FinishMessage"} <= sent.keys()
    for kind, count in sent.items():
        for number in range(1, count + 1):
            plan = fair(ranks, fate=(kind, number, fate))
            seen = played(2, plan, **machines).reasons
            good = 4 - (kind == "ChunkMessage" and fate == "lose")
            assert seen["landed"] >= good, f"{number}. {kind}, {fate}: {seen}"


class Patient(Simulation):
    limits = replace(LIMITS, chunk_s=20, offer_s=20)


def crawl(**machines):
    """Notes and data take their time and overtake each other, and most notes come twice."""
    for seed in range(60):
        weather = Weather(delay_s=0.3, double=0.6)
        plan = Plan(weather, 2, RANKS[seed % 3], 2, refuses=False, trouble=0.0)
        simulation = Patient(seed, plan, **machines)
        run(simulation, f"seed {seed} of {plan}", f"Patient({seed}, {plan}).run()")
        assert simulation.reasons["landed"] == 3, f"seed {seed}: {simulation.reasons}"


def test_on_a_network_that_is_only_slow_every_ticket_lands():
    crawl()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", RANKS, ids=str)
@pytest.mark.parametrize("fate", FATES)
def test_every_message_of_a_ticket_that_fails_may_be_lost_doubled_or_late(ranks, fate):
    """Cancels, bad checksums and writes that fail bring out the messages of the other half."""
    told = Counter()
    for seed in range(40):
        plan = fair(ranks, wrong=0.2, failing=0.2)
        plan.trouble = 0.5
        told += (sent := played(seed, plan).network.sent)
        for kind in sent.keys() - {"OfferMessage", "ChunkMessage", "FinishMessage"}:
            plan = fair(ranks, wrong=0.2, failing=0.2, fate=(kind, 1, fate))
            plan.trouble = 0.5
            played(seed, plan)
    assert told.keys() == set(KINDS), "a kind of message was never sent"


# ---- known mistakes ------------------------------------------------------------------------------


class FreesOnStop(t.TicketReceiver):
    """The classic mistake: free the blocks when the stop is sent, not when it is answered."""

    def _fail_and_stop(self, ticket, reason, now):
        actions = super()._fail_and_stop(ticket, reason, now)
        return [*actions, *self._free(ticket)] if actions else actions


class DrainsAtOnce(t.TicketSender):
    """The other one: answer the stop when it is received."""

    def _end_if_drained(self, ticket):
        ticket.writes_under_way = 0
        return super()._end_if_drained(ticket)

    def handle(self, event, now):
        if isinstance(event, t.WriteEnded) and event.ticket_id not in self.tickets:
            return []
        return super().handle(event, now)


class TrustsTheWire(t.TicketReceiver):
    def _verified(self, ticket, chunk_number, ok, now):
        return super()._verified(ticket, chunk_number, True, now)


class NeverAsks(t.TicketReceiver):
    """A stop that is sent once only: a lost message leaks the blocks."""

    def _check_timeouts(self, ticket, now):
        if ticket.state is not t.ReceivingState.RESERVED:
            return []
        return super()._check_timeouts(ticket, now)


class IgnoresGeneration(t.TicketReceiver):
    """The finish, or a second copy of a chunk, of an old reservation counts for the new one."""

    def _receive(self, ticket, message, now):
        if isinstance(message, m.ChunkMessage | m.FinishMessage):
            offer = msgspec.structs.replace(ticket.offer, generation=message.generation)
            ticket.offer = offer
        return super()._receive(ticket, message, now)


class CountsOneMoreAsHeld(t.TicketReceiver):
    def handle(self, event, now):
        if isinstance(event, t.OfferTiles) and event.held_tiles < len(event.tiles):
            event = replace(event, held_tiles=event.held_tiles + 1)
        return super().handle(event, now)


class SkipsNothing(t.TicketSender):
    """Writes from the first tile on, whatever the receiver holds."""

    def _write_of(self, ticket, offer, push):
        moved = replace(push, first_tile=max(push.first_tile, offer.first_tile))
        return super()._write_of(ticket, offer, moved)


class TakesOnePieceForAll(t.TicketReceiver):
    """Counts tiles, not the pieces of them."""

    def _complete(self, ticket, now):
        if ticket.finish:
            ticket.chunks = {
                number: msgspec.structs.replace(chunk, piece=-1)
                for number, chunk in ticket.chunks.items()
            }
            finish = ticket.finish
            ticket.finish = msgspec.structs.replace(finish, chunks=min(1, finish.chunks))
        return super()._complete(ticket, now)


class LandsWithItsFirstLane(Fan):
    def _lane_outcome(self, outcome):
        return ends_with(self, outcome, c.BlocksArrived) or super()._lane_outcome(outcome)


class AsksAgainWhatItKnows(t.TicketSender):
    """A sender that waits for an offer says that all is well: a lost offer is never repeated."""

    def _receive(self, peer, message, now):
        if isinstance(message, m.QueryMessage) and message.ticket_id in self.tickets:
            return [t.SendMessage(peer, m.ProgressMessage(message.ticket_id))]
        return super()._receive(peer, message, now)


class TakesAnOldUnknownForNews(t.TicketReceiver):
    """An answer that the first chunk overtook breaks a ticket that is well."""

    def _receive(self, ticket, message, now):
        if isinstance(message, m.UnknownTicketMessage) and ticket.chunks:
            return self._fail_and_stop(ticket, "source_forgot", now)
        return super()._receive(ticket, message, now)


class FreesWithItsFirstLane(Fan):
    def _lane_outcome(self, outcome):
        return ends_with(self, outcome, t.BlocksFreed) or super()._lane_outcome(outcome)


class ClosesWithItsFirstLane(Fan):
    def _lane_outcome(self, outcome):
        return ends_with(self, outcome, t.PushEnded) or super()._lane_outcome(outcome)


def ends_with(fan, event, kind):
    """The end of a lane, told as that of the whole."""
    ticket_id = event.ticket_id.partition("/")[0]
    if isinstance(event, kind) and ticket_id in fan.tickets:
        del fan.tickets[ticket_id]
        return [msgspec.structs.replace(event, ticket_id=ticket_id)]
    return []


MISTAKES = [
    ("sink", FreesOnStop, "a late write of"),
    ("source", DrainsAtOnce, "released under a write"),
    ("sink", TrustsTheWire, "landed as"),
    ("sink", NeverAsks, "still held|never ended"),
    ("sink", IgnoresGeneration, "landed without a final"),
    ("sink", CountsOneMoreAsHeld, "landed as"),
    ("source", SkipsNothing, "writes tile|did not land"),
    ("sink", TakesOnePieceForAll, "landed as"),
    ("fan", LandsWithItsFirstLane, "landed (as|without|before)|told"),
    ("fan", FreesWithItsFirstLane, r"a late write of|AssertionError\('r"),
    ("fan", ClosesWithItsFirstLane, "released under a write"),
]


@pytest.mark.parametrize(
    ("what", "mistake", "symptom"), MISTAKES, ids=[mistake.__name__ for _, mistake, _ in MISTAKES]
)
@several_seeds
def test_the_simulation_finds_a_known_mistake(what, mistake, symptom):
    with pytest.raises(pytest.fail.Exception, match=symptom):
        play(range(1000), **{what: mistake})


@several_seeds
def test_a_lost_offer_that_is_not_repeated_is_found():
    with pytest.raises(AssertionError, match="OfferMessage, lose"):
        befall((1, 1), "lose", source=AsksAgainWhatItKnows)


@several_seeds
def test_an_old_answer_that_breaks_a_ticket_which_is_well_is_found():
    with pytest.raises(AssertionError, match="source_forgot"):
        crawl(sink=TakesAnOldUnknownForNews)
