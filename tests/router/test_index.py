"""Which worker holds which prefix."""

from __future__ import annotations

from diptych.router.index import PrefixIndex
from hypothesis import given
from hypothesis import strategies as st

A, B, C, D = (bytes([i]) for i in range(4))


def index(**held: list[bytes]) -> PrefixIndex:
    made = PrefixIndex()
    for worker, hashes in held.items():
        made.store(worker, hashes)
    return made


def test_depth_counts_leading_blocks_only() -> None:
    assert index(x=[A, B, D], y=[A], z=[B, C]).depths([A, B, C, D]) == {"x": 2, "y": 1}


def test_nobody_holds_an_unknown_prefix() -> None:
    assert index(x=[B]).depths([A, B]) == {}
    assert index(x=[B]).depths([]) == {}


def test_an_evicted_block_ends_the_prefix() -> None:
    made = index(x=[A, B, C], y=[A, B, C])
    made.evict("x", [B])
    assert made.depths([A, B, C]) == {"x": 1, "y": 3}


def test_evicting_what_is_not_held_changes_nothing() -> None:
    made = index(x=[A])
    made.evict("x", [B])
    made.evict("y", [A])
    assert made.depths([A]) == {"x": 1}


def test_a_dropped_worker_holds_nothing_and_leaves_nothing_behind() -> None:
    made = index(x=[A, B], y=[A])
    made.drop("x")
    assert made.depths([A, B]) == {"y": 1}
    assert len(made) == 1
    made.drop("y")
    made.drop("y")
    assert len(made) == 0


def test_storing_twice_is_storing_once() -> None:
    made = index(x=[A, A])
    made.store("x", [A])
    made.evict("x", [A])
    assert len(made) == 0


steps = st.lists(
    st.tuples(
        st.sampled_from(["store", "evict", "drop"]),
        st.sampled_from(["x", "y", "z"]),
        st.lists(st.sampled_from([A, B, C, D]), max_size=3),
    ),
    max_size=30,
)


@given(steps)
def test_it_agrees_with_a_set_per_worker(steps) -> None:
    made, held = PrefixIndex(), {"x": set(), "y": set(), "z": set()}
    for verb, worker, hashes in steps:
        if verb == "drop":
            made.drop(worker)
            held[worker].clear()
        else:
            getattr(made, verb)(worker, hashes)
            held[worker] = (
                held[worker] | set(hashes) if verb == "store" else held[worker] - {*hashes}
            )
    for wanted in ([A, B, C, D], [B, A], [D]):
        expected = {}
        for worker, mine in held.items():
            depth = next((i for i, h in enumerate(wanted) if h not in mine), len(wanted))
            if depth:
                expected[worker] = depth
        assert made.depths(wanted) == expected
    assert len(made) == len(set().union(*held.values()))
