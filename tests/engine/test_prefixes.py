"""Prefixes from tiers and peers, event by event: every prompt is added once, every block let go."""

from __future__ import annotations

import pytest
from diptych.engine.commands import Add, Adopt, Drop, Load, Loaded, Stage, Staged
from diptych.engine.prefixes import FETCH, SERVE, Prefixes
from diptych.engine.sequence import Sequence
from diptych.kv_transfer import commands as transfer
from diptych.kv_transfer import tickets
from diptych.protos.frames import Sampling
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

HASHES = [b"h1", b"h2", b"h3"]
KEY, COMING = ("r", 0), ("r" + FETCH, 0)
XID = f"r{FETCH}#0"
BLOCKS = [5, 6, 7]


def sequence(tokens: int = 200) -> Sequence:
    return Sequence(KEY, list(range(tokens)), tokens, Sampling(8), list(HASHES))


def begun(peer: str | None = "decode/x", tiers: bool = True) -> tuple[Prefixes, Sequence]:
    prefixes, seq = Prefixes(64), sequence()
    assert prefixes.begin(seq, peer, tiers) == [Stage(COMING, HASHES, 3 if peer else 0)]
    return prefixes, seq


def fetching() -> tuple[Prefixes, Sequence]:
    prefixes, seq = begun()
    (receive,) = prefixes.handle(Staged(COMING, BLOCKS, held=1))
    assert receive == transfer.Receive(XID, "decode/x", BLOCKS, 192, 64, tuple(HASHES))
    return prefixes, seq


def test_without_tiers_and_peer_a_prompt_is_added_at_once() -> None:
    seq = sequence()
    assert Prefixes(64).begin(seq, None, False) == [Add(seq)]
    short = sequence(64)  # its last id must be computed, so no full block can come
    assert Prefixes(64).begin(short, "decode/x", True) == [Add(short)]


def test_what_a_tier_holds_is_loaded_adopted_and_found() -> None:
    prefixes, seq = begun(peer=None)
    load = prefixes.handle(Staged(COMING, BLOCKS, held=1, below=2))
    assert load == [Load(COMING, 1, [b"h2", b"h3"], [6, 7])]
    assert prefixes.handle(Loaded(COMING, 2)) == [Adopt(COMING, 2), Add(seq)]
    assert not prefixes.coming


def test_a_tier_that_holds_it_all_is_asked_before_the_peer() -> None:
    prefixes, _ = begun()
    (load,) = prefixes.handle(Staged(COMING, BLOCKS, held=0, below=3))
    assert isinstance(load, Load)


def test_nothing_to_be_had_is_computed() -> None:
    prefixes, seq = begun()
    assert prefixes.handle(Staged(COMING, [], held=3)) == [Adopt(COMING, 0), Add(seq)]


def test_what_a_peer_sends_is_adopted_as_far_as_it_goes() -> None:
    prefixes, seq = fetching()
    assert prefixes.handle(transfer.Arrived(XID, b"", 128)) == [Adopt(COMING, 2), Add(seq)]


def test_a_broken_fetch_is_computed_and_its_blocks_wait_for_freed() -> None:
    prefixes, seq = fetching()
    assert prefixes.handle(tickets.Broken(XID, "checksum")) == [Add(seq)]
    assert prefixes.knows(COMING)
    assert prefixes.handle(tickets.Freed(XID)) == [Drop(COMING)]
    assert not prefixes.knows(COMING)


@pytest.mark.parametrize("when", ["staging", "loading", "fetching", "broken"])
def test_a_forgotten_prompt_is_never_added_and_its_blocks_are_let_go(when: str) -> None:
    if when == "staging":
        prefixes, seq = begun()
        ends = [Staged(COMING, BLOCKS, held=1)]
    elif when == "loading":
        prefixes, seq = begun(peer=None)
        prefixes.handle(Staged(COMING, BLOCKS, held=1, below=2))
        ends = [Loaded(COMING, 3)]
    else:
        prefixes, seq = fetching()
        ends = [tickets.Broken(XID, "aborted"), tickets.Freed(XID)]
        if when == "broken":
            prefixes.handle(ends.pop(0))
    assert prefixes.forget(KEY) == [transfer.Cancel(XID, "aborted")]
    actions = [action for event in ends for action in prefixes.handle(event)]
    assert Add(seq) not in actions
    assert any(isinstance(action, Drop | Adopt) for action in actions)
    assert not prefixes.coming and prefixes.forget(KEY) == []


def test_a_peer_that_asks_gets_what_is_here() -> None:
    prefixes, pinned = Prefixes(64), (f"r{FETCH}{SERVE}", 0)
    assert prefixes.handle(tickets.Wanted(XID, "prefill/y", tuple(HASHES))) == [
        Stage(pinned, HASHES, 0, pin=True)
    ]
    assert prefixes.handle(Staged(pinned, [8, 9], held=2)) == [
        transfer.Expect(XID, "prefill/y", 128),
        transfer.Push(XID, 0, [8, 9]),
        transfer.Finish(XID, b""),
    ]
    assert prefixes.knows(pinned)
    assert prefixes.handle(tickets.Closed(XID, True)) == [Drop(pinned)]
    assert not prefixes.knows(pinned)


def test_a_peer_that_asks_for_what_is_not_here_is_told_so() -> None:
    prefixes, pinned = Prefixes(64), (f"r{FETCH}{SERVE}", 0)
    prefixes.handle(tickets.Wanted(XID, "prefill/y", tuple(HASHES)))
    _, cancel = prefixes.handle(Staged(pinned, []))
    assert cancel == transfer.Cancel(XID, "not_held")
    prefixes.handle(tickets.Closed(XID, False, "not_held"))
    assert not prefixes.serving


class Life(RuleBasedStateMachine):
    """One prompt, its events in any possible order."""

    def __init__(self) -> None:
        super().__init__()
        self.prefixes, self.seq = Prefixes(64), sequence()
        self.due: list[str] = ["staged"]  #: what may come next
        self.added = self.gone = 0
        self.forgotten = False
        self.carry_out(self.prefixes.begin(self.seq, "decode/x", True))

    def carry_out(self, actions: list) -> None:
        for action in actions:
            match action:
                case Add():
                    self.added += 1
                    assert not self.forgotten
                case Adopt() | Drop():
                    self.gone += 1
                case Load():
                    self.due = ["loaded"]
                case transfer.Receive():
                    self.due = ["arrived", "broken"]

    @rule(data=st.data(), below=st.integers(0, 3), full=st.booleans())
    def comes(self, data, below: int, full: bool) -> None:
        if not self.due:
            return
        event, self.due = data.draw(st.sampled_from(self.due)), []
        match event:
            case "staged":
                blocks = [] if full else BLOCKS
                self.carry_out(self.prefixes.handle(Staged(COMING, blocks, 0, below)))
            case "loaded":
                self.carry_out(self.prefixes.handle(Loaded(COMING, below)))
            case "arrived":
                self.carry_out(self.prefixes.handle(transfer.Arrived(XID, b"", 64 * below)))
            case "broken":
                self.due = ["freed"]
                self.carry_out(self.prefixes.handle(tickets.Broken(XID, "peer_lost")))
            case "freed":
                self.carry_out(self.prefixes.handle(tickets.Freed(XID)))

    @rule()
    def forget(self) -> None:
        self.carry_out(self.prefixes.forget(KEY))
        self.forgotten = True

    @invariant()
    def once(self) -> None:
        assert self.added <= 1 and self.gone <= 1
        assert bool(self.prefixes.coming) == bool(self.due)
        assert self.due or self.gone == 1, "its blocks are let go"
        assert self.due or self.added or self.forgotten, "it is computed"


Life.TestCase.settings = settings(max_examples=150, stateful_step_count=8, deadline=None)
TestLife = Life.TestCase
