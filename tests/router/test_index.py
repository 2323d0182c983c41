"""Which worker holds which prefix."""

from __future__ import annotations

from functools import partial

from diptych.router.index import PrefixIndex, blocks_at, positions, sample
from hypothesis import given
from hypothesis import strategies as st

A, B, C, D, E, F, G = (bytes([i]) for i in range(7))


def index(**held: list[bytes]) -> PrefixIndex:
    made = PrefixIndex()
    for worker, hashes in held.items():
        made.store("xyz".index(worker), hashes)
    return made


def depths(made: PrefixIndex, hashes: list[bytes]) -> dict[str, int]:
    hits = made.match(hashes)
    return {name: hits.depth(slot) for slot, name in enumerate("xyz") if hits.depth(slot)}


def test_the_front_is_looked_up_block_by_block_and_the_rest_by_512_tokens() -> None:
    assert positions(3) == (0, 1, 2)
    assert positions(16) == tuple(range(16)) == positions(23)
    assert positions(40) == (*range(16), 23, 31, 39)
    hashes = [bytes([i]) for i in range(40)]
    assert sample(hashes)[-3:] == (bytes([23]), bytes([31]), bytes([39]))
    assert [blocks_at(depth) for depth in (0, 1, 16, 17, 19)] == [0, 1, 16, 24, 40]


def test_depth_counts_leading_blocks_only() -> None:
    assert depths(index(x=[A, B, D], y=[A], z=[B, C]), [A, B, C, D]) == {"x": 2, "y": 1}


def test_nobody_holds_an_unknown_prefix() -> None:
    assert index(x=[B]).match([A, B]).deepest == 0
    assert index(x=[B]).match([]).deepest == 0


def test_an_evicted_block_ends_the_prefix() -> None:
    made = index(x=[A, B, C], y=[A, B, C])
    made.evict(0, [B])
    assert depths(made, [A, B, C]) == {"x": 1, "y": 3}


def test_evicting_what_is_not_held_changes_nothing() -> None:
    made = index(x=[A])
    made.evict(0, [B])
    made.evict(1, [A])
    assert depths(made, [A]) == {"x": 1}


def test_a_dropped_worker_holds_nothing_and_leaves_nothing_behind() -> None:
    made = index(x=[A, B], y=[A])
    made.drop(0)
    assert depths(made, [A, B]) == {"y": 1}
    assert len(made) == 1
    made.drop(1)
    made.drop(1)
    assert len(made) == 0 and made.match([A]).deepest == 0


def test_a_surplus_takes_the_oldest_prefix_from_its_tail() -> None:
    for note in (PrefixIndex.store, partial(PrefixIndex.predict, now=0.0)):
        made = PrefixIndex(per_worker=4)
        note(made, 0, [A, B, C])
        note(made, 0, [D, E])
        assert made.depth(0, [A, B, C]) == 2, note
        assert made.depth(0, [D, E]) == 2, note
        note(made, 0, [A, B])
        note(made, 0, [F, G])
        assert [made.depth(0, hashes) for hashes in ([A, B], [D, E], [F, G])] == [2, 0, 2], note


def test_what_was_reported_can_be_stored_in_another_index_as_it_is() -> None:
    made = index(x=[A, B, C])
    made.store(0, [D, E])
    other = PrefixIndex(per_worker=4)
    other.store(0, made.reported_hashes(0))
    assert [other.depth(0, hashes) for hashes in ([A, B, C], [D, E])] == [2, 2]


def test_storing_twice_is_storing_once() -> None:
    made = index(x=[A, A])
    made.store(0, [A])
    made.evict(0, [A])
    assert len(made) == 0


def test_a_predicted_entry_ends_unless_it_is_confirmed() -> None:
    made = PrefixIndex(predicted_ttl_s=10.0)
    made.predict(0, [A, B, C], now=0.0)
    made.store(0, [A])
    made.predict(0, [B], now=5.0)
    made.expire(9.9)
    assert depths(made, [A, B, C]) == {"x": 3}
    made.expire(10.0)
    assert depths(made, [A, B, C]) == {"x": 2}, "C was predicted once, B again later"
    made.expire(100.0)
    assert depths(made, [A, B, C]) == {"x": 1}
    assert made.reported_hashes(0) == [A]


def test_a_workers_entries_are_bounded_and_a_prefix_loses_its_tail_first() -> None:
    made = PrefixIndex(per_worker=4)
    made.predict(0, [A, B, C], now=0.0)
    made.predict(0, [D, bytes([9])], now=1.0)
    assert made.held_count(0) == 4
    assert depths(made, [A, B, C]) == {"x": 2}
    assert depths(made, [D, bytes([9])]) == {"x": 2}


steps = st.lists(
    st.tuples(
        st.sampled_from(["store", "evict", "drop", "predict"]),
        st.sampled_from([0, 1, 2]),
        st.lists(st.sampled_from([A, B, C, D]), max_size=3),
    ),
    max_size=30,
)


def _depths(held: dict[int, set[bytes]], wanted: list[bytes]) -> list[tuple[int, set[bytes]]]:
    """(leading hashes, all) of each."""
    return [
        (next((i for i, h in enumerate(wanted) if h not in mine), len(wanted)), mine)
        for mine in held.values()
    ]


def test_a_lookup_names_every_depth_and_knows_when_it_is_old() -> None:
    hashes = [bytes([i]) * 16 for i in range(40)]
    made = PrefixIndex()
    depths_of = {slot: (slot * 7) % 40 for slot in range(30)}
    for slot, depth in depths_of.items():
        made.store(slot, hashes[:depth])
    hits = made.find(hashes)
    assert {slot: hits.depth(slot) for slot in depths_of} == depths_of
    assert hits.deepest == max(depths_of.values()) and made.stands(hits, hashes)
    (best,) = (slot for slot, depth in depths_of.items() if depth == hits.deepest)
    made.store(best, hashes)
    assert not made.stands(hits, hashes), "somebody holds more"
    again = made.find(hashes)
    made.evict(best, hashes[-1:])
    assert not made.stands(again, hashes), "nobody holds as much"


@given(steps)
def test_it_agrees_with_a_set_per_worker(steps) -> None:
    made, held = PrefixIndex(), {0: set(), 1: set(), 2: set()}
    for verb, slot, hashes in steps:
        if verb == "drop":
            made.drop(slot)
            held[slot].clear()
        elif verb == "evict":
            made.evict(slot, hashes)
            held[slot] -= set(hashes)
        else:
            made.store(slot, hashes) if verb == "store" else made.predict(slot, hashes, 0.0)
            held[slot] |= set(hashes)
    for wanted in ([A, B, C, D], [B, A], [D]):
        expected = {}
        for slot, mine in held.items():
            depth = next((i for i, h in enumerate(wanted) if h not in mine), len(wanted))
            if depth:
                expected["xyz"[slot]] = depth
            assert made.depth(slot, wanted) == depth
        assert depths(made, wanted) == expected
        hits = made.find(wanted)
        if all(set(wanted[:d]) == mine & set(wanted) for d, mine in _depths(held, wanted)):
            assert {"xyz"[s]: hits.depth(s) for s in held if hits.depth(s)} == expected
            assert hits.deepest == max(expected.values(), default=0)
            assert made.stands(hits, wanted)
    assert len(made) == sum(map(len, held.values()))


# ---- tiers ---------------------------------------------------------------------------------------


def pooled(made: PrefixIndex, slot: int, hashes: list[bytes]) -> int:
    exact = made.match(hashes)
    depth = exact.pooled_depth(slot, exact.depth(slot))
    quick = made.find(hashes)
    assert quick.pooled_depth(slot, quick.depth(slot)) == depth
    return depth


def test_a_demoted_prefix_is_held_but_not_in_the_pool() -> None:
    made = index(x=[A, B, C, D], y=[A, B, C, D])
    made.demote(0, [C, D])
    assert depths(made, [A, B, C, D]) == {"x": 4, "y": 4}
    assert [pooled(made, slot, [A, B, C, D]) for slot in range(2)] == [2, 4]
    assert made.demoted_hashes(0) == [C, D]


def test_a_demoted_prefix_that_comes_back_or_is_gone_is_demoted_no_more() -> None:
    made = index(x=[A, B, C])
    made.demote(0, [B, C])
    made.store(0, [B])
    assert pooled(made, 0, [A, B, C]) == 2
    made.evict(0, [C])
    assert depths(made, [A, B, C]) == {"x": 2} and made.demoted_hashes(0) == []
    made.demote(0, [B])
    made.drop(0)
    made.store(0, [A, B])
    assert pooled(made, 0, [A, B]) == 2


def test_a_prediction_does_not_bring_a_demoted_prefix_back() -> None:
    made = index(x=[A, B])
    made.demote(0, [B])
    made.predict(0, [A, B], now=0.0)
    assert pooled(made, 0, [A, B]) == 1
    made.expire(1e9)
    assert depths(made, [A, B]) == {"x": 2}


def test_a_prediction_that_is_demoted_before_any_report_of_it_does_not_end() -> None:
    made = PrefixIndex()
    made.predict(0, [A, B], now=0.0)
    made.demote(0, [A, B])
    made.expire(1e9)
    assert depths(made, [A, B]) == {"x": 2} and pooled(made, 0, [A, B]) == 0


def test_what_a_worker_demotes_unheard_is_held() -> None:
    made = PrefixIndex()
    made.demote(0, [A, B])
    assert depths(made, [A, B]) == {"x": 2} and pooled(made, 0, [A, B]) == 0


def test_entries_beyond_the_bound_are_demoted_no_more() -> None:
    made = PrefixIndex(per_worker=2)
    made.demote(0, [A, B])
    made.store(0, [C, D])
    assert made.held_count(0) == 2 and made.demoted_hashes(0) == []
    made.demote(0, [A, B, E, F, G])
    assert made.held_count(0) == 2 and made.demoted_hashes(0) == [A, B], "roots go last"
    assert made.find([A]).demoted_by_slot == {0: {A, B}}
    made.drop(0)
    assert not made.find([A]).demoted_by_slot


@given(count=st.integers(1, 40), held=st.integers(0, 40), in_pool=st.integers(0, 40))
def test_what_the_pool_holds_of_a_prefix_is_found_wherever_it_ends(
    count: int, held: int, in_pool: int
) -> None:
    hashes = [bytes([number]) for number in range(count)]
    made = PrefixIndex()
    made.store(0, hashes[:held])
    made.demote(0, hashes[in_pool:held])
    assert pooled(made, 0, hashes) == min(count, held, in_pool)
