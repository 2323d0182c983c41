"""The simulated fabric in virtual time: it does what it is told, and all of it from one seed."""

import threading
import time

import pytest
from diptych.kv_transfer.errors import PeerLost
from diptych.kv_transfer.transport import (
    NotificationReceived,
    PeerDisconnected,
    PostedWriteEnded,
    card_of,
)

from ..kit.conformance import DEADLINE_S, MemoryPool, spans
from ..kit.fabric import Fabric, FabricLink, FenceKind

BLOCK = 4096
LINK = FabricLink(delay_s=0.001, bytes_s=BLOCK * 1000, piece_bytes=BLOCK)  # a block per millisecond


class World:
    """Agents a, b, c on one fabric, each with a pool of 32 blocks, and the time."""

    def __init__(self, link=LINK, seed=0, fence=FenceKind.GRACE, agents="abc", **options):
        self.now = 0.0
        self.fabric = Fabric(lambda: self.now, seed, link, fence, **options)
        self.pools, self.ends, self.events, self.refused = {}, {}, {}, set()
        for index, agent in enumerate(agents):
            self.pools[agent] = MemoryPool(32, BLOCK, seed=index)
            admit = lambda _, note: note not in self.refused  # noqa: E731
            self.ends[agent] = self.fabric.open(agent, self.pools[agent], admit)
            self.events[agent] = []
        for one in agents:
            for other in agents.replace(one, ""):
                self.ends[one].add_peer(card_of(other, self.ends[other], self.pools[other]))

    def write(self, source, target, blocks, to, note=b"note"):
        return self.ends[source].write(target, spans(BLOCK, blocks, to), note)

    def until(self, when):
        """Plays the fabric up to `when`; every agent polls after every step."""
        while (at := self.fabric.next_at()) is not None and at <= when:
            self.now = max(self.now, at)
            self.poll()
        self.now = when
        self.poll()

    def poll(self):
        for agent, end in self.ends.items():
            self.events[agent] += [(self.now, event) for event in end.poll()]

    def told(self, agent):
        return [event for _, event in self.events[agent]]

    def landed(self, source, target, pairs):
        mine, theirs = self.pools[source], self.pools[target]
        return [(s, t) for s, t in pairs if mine.block(s) == theirs.block(t)]


FOUR = [(i, 10 + i) for i in range(4)]
UNITS = [i for i, _ in FOUR], [t for _, t in FOUR]


def test_data_lands_piece_by_piece_and_the_note_follows_it():
    world = World()
    handle = world.write("a", "b", *UNITS)
    seen = []
    for tick in range(9):
        world.until(0.0005 + tick * 0.001)
        seen.append(len(world.landed("a", "b", FOUR)))
    # 1 ms until it begins, a block per ms, then 1 ms for the note and for the confirmation
    assert seen == [0, 0, 1, 2, 3, 4, 4, 4, 4]
    assert world.events["b"] == [(pytest.approx(0.006), NotificationReceived("a", b"note"))]
    assert world.events["a"] == [(pytest.approx(0.006), PostedWriteEnded(handle, True))]


def test_writes_of_a_link_share_its_bytes_and_links_do_not_share():
    world = World()
    first = world.write("a", "b", *UNITS, b"one")
    second = world.write("a", "b", [8, 9, 10, 11], [20, 21, 22, 23], b"two")
    alone = world.write("c", "b", [0, 1, 2, 3], [4, 5, 6, 7], b"three")
    world.until(1.0)
    ends = {e.handle: at for at, e in world.events["a"]}
    assert ends == {first: pytest.approx(0.009), second: pytest.approx(0.010)}  # in turns
    assert world.events["c"] == [(pytest.approx(0.006), PostedWriteEnded(alone, True))]


def test_a_source_that_is_reused_too_early_shows():
    world = World()
    world.write("a", "b", *UNITS)
    world.until(0.0025)
    world.pools["a"].fill(3, bytes(BLOCK))
    world.until(1.0)
    assert world.pools["b"].block(13) == bytes(BLOCK)


def test_a_cut_is_one_way_loses_notes_and_holds_data_until_it_heals():
    world = World()
    world.fabric.cut("a", "b")
    handle = world.write("a", "b", *UNITS)
    world.ends["a"].notify("b", b"lost")
    world.ends["b"].notify("a", b"heard")
    world.until(10.0)
    assert world.landed("a", "b", FOUR) == []
    assert (world.told("a"), world.told("b")) == ([NotificationReceived("b", b"heard")], [])
    world.fabric.heal("a", "b")
    world.until(20.0)
    assert world.landed("a", "b", FOUR) == FOUR
    assert world.told("b") == [NotificationReceived("a", b"note")]
    assert PostedWriteEnded(handle, True) in world.told("a")


def test_a_cut_in_the_middle_of_a_write_holds_the_rest_and_the_way_back_its_end():
    world = World()
    handle = world.write("a", "b", *UNITS)
    world.until(0.0035)
    world.fabric.cut("a", "b")
    world.fabric.cut("b", "a")
    world.until(5.0)
    assert len(world.landed("a", "b", FOUR)) == 2
    world.fabric.heal("a", "b")
    world.until(6.0)
    assert world.landed("a", "b", FOUR) == FOUR
    assert world.told("a") == []
    world.fabric.heal("b", "a")
    world.until(7.0)
    assert world.told("a") == [PostedWriteEnded(handle, True)]


def test_a_clog_stalls_everything_and_loses_nothing():
    world = World()
    world.fabric.clog("a", "b", 2.0)
    world.write("a", "b", *UNITS)
    world.ends["a"].notify("b", b"late")
    world.until(1.9)
    assert world.told("b") == [] == world.landed("a", "b", FOUR)
    world.until(3.0)
    assert sorted(event.data for event in world.told("b")) == [b"late", b"note"]
    assert world.landed("a", "b", FOUR) == FOUR


def test_a_slow_agent_takes_its_factor_longer():
    world = World()
    world.fabric.slow("b", 10.0)
    world.write("a", "b", *UNITS)
    world.until(1.0)
    assert world.events["b"] == [(pytest.approx(0.060), NotificationReceived("a", b"note"))]


def test_jitter_lets_notes_overtake_each_other():
    world = World(FabricLink(delay_s=0.001, jitter_s=0.05), seed=3)
    sent = [b"%d" % i for i in range(50)]
    for note in sent:
        world.ends["a"].notify("b", note)
    world.until(10.0)
    heard = [event.data for event in world.told("b")]
    assert heard != sent
    assert sorted(heard) == sorted(sent)


@pytest.mark.parametrize(
    ("link", "least", "most"),
    [
        (FabricLink(loss=0.3), 600, 800),
        (FabricLink(duplication=0.3), 1200, 1400),
        (FabricLink(), 1000, 1000),
    ],
)
def test_notes_are_lost_and_doubled_as_often_as_asked(link, least, most):
    world = World(link, seed=1)
    for index in range(1000):
        world.ends["a"].notify("b", b"%d" % index)
    world.until(1.0)
    assert least <= len(world.told("b")) <= most


# ---- death ---------------------------------------------------------------------------------------


def crash_in_the_middle(fence, seed):
    world = World(seed=seed, fence=fence, notice_s=0.01)
    world.write("a", "b", list(range(16)), list(range(16, 32)))
    world.until(0.0045)
    pairs = list(zip(range(16), range(16, 32), strict=True))
    before = len(world.landed("a", "b", pairs))
    world.fabric.crash("a")
    return world, pairs, before


def test_late_bytes_of_a_dead_writer_land_before_the_fence_and_not_after_it():
    late = set()
    for seed in range(20):
        world, pairs, before = crash_in_the_middle(FenceKind.GRACE, seed)
        assert not world.ends["b"].fenced("a")
        while not world.ends["b"].fenced("a"):
            world.until(world.now + 0.01)
        landed = len(world.landed("a", "b", pairs))
        late.add(landed - before)
        world.until(100.0)
        assert len(world.landed("a", "b", pairs)) == landed
        assert not any(isinstance(event, NotificationReceived) for event in world.told("b"))
    assert len(late) > 5, "sometimes few, sometimes many"


def test_a_process_that_is_gone_late_is_fenced_a_grace_later():
    world = World(fence=FenceKind.GONE)
    assert not world.ends["b"].fenced("a")
    world.until(10.0)
    world.fabric.crash("a")
    world.until(10.9)
    assert not world.ends["b"].fenced("a")
    world.until(11.1)
    assert world.ends["b"].fenced("a")


def test_a_dead_writer_that_was_hung_up_on_has_no_late_bytes():
    late = 0
    for seed in range(20):
        world, pairs, before = crash_in_the_middle(FenceKind.REFUSE, seed)
        world.until(world.now + 0.009)
        landed = len(world.landed("a", "b", pairs))
        late += landed - before
        assert world.ends["b"].fenced("a")
        world.until(100.0)
        assert len(world.landed("a", "b", pairs)) == landed
    assert late > 0, "until then some land"


def test_a_hang_up_ends_the_connection_that_was_there_and_not_the_next_one():
    for met_again, told in ((False, [PeerDisconnected("b")]), (True, [])):
        world = World(fence=FenceKind.REFUSE)
        card = card_of("b", world.ends["b"], world.pools["b"])
        world.ends["b"].remove_peer("a")
        if met_again:
            world.ends["a"].remove_peer("b")
            world.ends["a"].add_peer(card)
        world.until(1.0)
        assert world.told("a") == told


def test_who_refuses_is_asked_for_every_piece_and_hangs_up_for_good():
    world = World(fence=FenceKind.REFUSE)
    world.write("a", "b", *UNITS)
    world.until(0.0035)
    world.refused.add(b"note")
    world.until(1.0)
    assert len(world.landed("a", "b", FOUR)) == 2
    assert world.told("b") == [NotificationReceived("a", b"note")]
    world.refused.clear()
    handle = world.write("a", "b", *UNITS)
    world.until(1.0025)
    assert world.ends["b"].fenced("a")
    world.until(2.0)
    assert len(world.landed("a", "b", FOUR)) == 2
    assert world.told("a")[-2:] == [
        PostedWriteEnded(handle, False, "closed"),
        PeerDisconnected("b"),
    ]


def test_a_frozen_writer_goes_on_when_it_thaws_and_only_one_fence_waits_for_it():
    for fence, fenced in (
        (FenceKind.GRACE, True),
        (FenceKind.GONE, False),
        (FenceKind.REFUSE, True),
    ):
        world = World(fence=fence)
        world.write("a", "b", *UNITS)
        world.until(0.0025)
        world.fabric.freeze("a")
        world.ends["b"].fenced("a")
        world.until(50.0)
        assert world.ends["b"].fenced("a") is fenced
        assert len(world.landed("a", "b", FOUR)) == 1
        world.fabric.thaw("a")
        world.until(60.0)
        assert len(world.landed("a", "b", FOUR)) == (1 if fence is FenceKind.REFUSE else 4)
        world.fabric.crash("a")
        world.until(70.0)
        assert world.ends["b"].fenced("a")


def test_writes_to_an_agent_that_crashes_end_and_so_do_those_before_it_is_noticed():
    world = World(notice_s=0.5)
    first = world.write("a", "b", *UNITS)
    world.until(0.002)
    world.fabric.crash("b")
    second = world.write("a", "b", *UNITS)
    third = world.write("c", "b", *UNITS)
    world.ends["a"].notify("b", b"unheard")
    world.until(0.5)
    assert world.told("a") == []
    world.until(0.6)
    ends = [
        PostedWriteEnded(first, False, "closed"),
        PostedWriteEnded(second, False, "closed"),
        PeerDisconnected("b"),
    ]
    assert world.told("a") == ends
    assert world.told("c") == [PostedWriteEnded(third, False, "closed"), PeerDisconnected("b")]
    with pytest.raises(PeerLost):
        world.ends["a"].notify("b", b"x")


@pytest.mark.parametrize(
    ("fence", "told"), [(FenceKind.REFUSE, [PeerDisconnected("a")]), (FenceKind.GRACE, [])]
)
def test_a_death_is_told_where_there_is_a_connection_and_else_found(fence, told):
    world = World(fence=fence, notice_s=0.1)
    world.fabric.crash("a")
    world.until(1.0)
    assert world.told("b") == told
    with pytest.raises(PeerLost):
        world.ends["b"].notify("a", b"x")
    world.poll()
    assert world.told("b") == [PeerDisconnected("a")]


# ---- seeds and clocks ----------------------------------------------------------------------------


def play(seed):
    """A busy minute with everything that can happen; the whole record of it."""
    record = []
    witness = lambda *landing: record.append((world.now, *landing))  # noqa: E731
    link = FabricLink(0.01, 0.05, 0.2, 0.2, BLOCK * 100, BLOCK // 2)
    world = World(link, seed, agents="abcd", witness=witness)
    for step in range(100):
        for source, target in (("a", "b"), ("c", "b"), ("b", "c"), ("d", "a")):
            try:
                world.write(source, target, [step % 32, 31], [31 - step % 32, 0], b"%d" % step)
            except PeerLost:
                record.append((world.now, source, target))
        {
            10: lambda: world.fabric.clog("a", "b", 0.7),
            20: lambda: world.fabric.cut("c", "b"),
            30: lambda: world.fabric.slow("b", 3.0),
            40: lambda: world.fabric.heal("c", "b"),
            50: lambda: world.fabric.crash("d"),
        }.get(step, lambda: None)()
        world.until(world.now + 0.05)
    world.until(1000.0)
    return record, world.events


def test_one_seed_is_one_history():
    assert play(5) == play(5)
    assert play(5) != play(6)


def test_every_write_on_a_hostile_fabric_ends_once():
    _, events = play(7)
    ends = [event.handle for _, event in events["a"] if isinstance(event, PostedWriteEnded)]
    assert sorted(ends) == list(range(100))


def test_in_real_time_it_throttles_threads_over_real_pools():
    """A lower bound only: 1 MiB at 16 MiB/s cannot be there in less than 1/16 s."""
    fabric = Fabric(time.monotonic, 0, FabricLink(bytes_s=16 << 20))
    pools = [MemoryPool(16, 64 << 10, seed=i) for i in (1, 2)]
    near, far = fabric.open("near", pools[0]), fabric.open("far", pools[1])
    near.add_peer(card_of("far", far, pools[1]))
    heard = threading.Event()

    def listen():
        while not heard.is_set():
            if any(isinstance(event, NotificationReceived) for event in far.poll()):
                heard.set()

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    began = time.monotonic()
    near.write("far", spans(64 << 10, range(16), range(16)), b"all")
    while not heard.is_set():
        near.poll()
        assert time.monotonic() < began + DEADLINE_S
    thread.join(DEADLINE_S)
    assert time.monotonic() - began >= 1 / 16
    assert bytes(pools[0].view) == bytes(pools[1].view)
