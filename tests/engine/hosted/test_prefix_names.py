"""Which of our contents vLLM's prefix cache holds, by its events alone."""

from __future__ import annotations

from diptych.engine.vllm.prefix_names import PrefixNames
from diptych.kv_transfer.identity import FRONT_BLOCKS, LOOKUP_STRIDE

THEIRS = [b"t0", b"t1", b"t2"]
OURS = [b"o0", b"o1", b"o2"]


def named() -> PrefixNames:
    names = PrefixNames(64)
    names.learn(0, THEIRS, OURS, "request")
    return names


def test_a_block_counts_as_cached_from_its_event_until_its_removal() -> None:
    names = named()
    assert names.their_hash(b"o0") is None
    names.record_stored(b"t0")
    assert names.their_hash(b"o0") == b"t0"
    assert names.drain() == ([b"o0"], [])
    names.record_removed(b"t0")
    assert names.their_hash(b"o0") is None
    assert names.drain() == ([], [b"o0"])
    assert names.looked_up_hashes() == []


def test_what_came_and_went_between_two_looks_is_not_told() -> None:
    names = named()
    names.record_stored(b"t0")
    names.record_removed(b"t0")
    assert names.drain() == ([], [])


def test_what_went_and_came_back_is_not_told() -> None:
    names = named()
    names.record_stored(b"t0")
    names.drain()
    names.record_removed(b"t0")
    names.record_stored(b"t0")
    assert names.drain() == ([], [])
    assert names.looked_up_hashes() == [b"o0"]


def test_what_came_back_and_went_again_is_told_as_evicted() -> None:
    names = named()
    names.record_stored(b"t0")
    names.drain()
    names.record_removed(b"t0")
    names.record_stored(b"t0")
    names.record_removed(b"t0")
    assert names.drain() == ([], [b"o0"])


def test_a_waiting_request_still_names_a_block_that_was_evicted_before_it_began() -> None:
    names = named()
    names.record_stored(b"t0")
    names.forget_request("request")
    names.learn(0, THEIRS, OURS, "waiting")
    names.record_removed(b"t0")
    names.drain()
    names.record_stored(b"t0")
    assert names.drain() == ([b"o0"], [])


def test_an_ended_request_leaves_the_names_that_it_shares_with_a_live_one() -> None:
    names = named()
    names.learn(0, THEIRS, OURS, "live")
    names.forget_request("request")
    for their_hash in THEIRS:
        names.record_stored(their_hash)
    assert sorted(names.drain()[0]) == OURS
    names.forget_request("live")
    names.clear()
    assert not names._names and not names._named_by, "nothing is kept of them"


def test_a_block_of_unknown_content_is_never_told() -> None:
    names = named()
    names.record_stored(b"somebody's")
    names.record_removed(b"somebody's")
    assert names.drain() == ([], [])


def test_a_block_that_is_named_after_it_was_cached_is_told() -> None:
    names = PrefixNames(64)
    names.record_stored(b"t0")
    assert names.drain() == ([], [])
    names.learn(0, THEIRS, OURS, "request")
    assert names.drain() == ([b"o0"], [])
    assert names.their_hash(b"o0") == b"t0"


def test_names_of_an_ended_request_go_unless_its_blocks_are_cached() -> None:
    names = named()
    names.record_stored(b"t1")
    names.forget_request("request")
    names.record_stored(b"t0")
    assert names.their_hash(b"o0") is None
    assert names.their_hash(b"o1") == b"t1"


def test_only_what_routers_look_up_is_told() -> None:
    count = FRONT_BLOCKS + LOOKUP_STRIDE
    theirs = [b"t%d" % index for index in range(count)]
    ours = [b"o%d" % index for index in range(count)]
    names = PrefixNames(64)
    names.learn(0, theirs, ours)
    for their_hash in theirs:
        names.record_stored(their_hash)
    told = {*ours[:FRONT_BLOCKS], ours[-1]}
    assert set(names.drain()[0]) == set(names.looked_up_hashes()) == told
    assert names.their_hash(ours[FRONT_BLOCKS]) == theirs[FRONT_BLOCKS], "found all the same"


def test_a_cleared_cache_evicts_everything() -> None:
    names = named()
    for their_hash in THEIRS:
        names.record_stored(their_hash)
    names.drain()
    names.clear()
    assert sorted(names.drain()[1]) == OURS
