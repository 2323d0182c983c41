"""Stop strings, whatever pieces a text comes in."""

from __future__ import annotations

from diptych.cluster.gateway.text.stops import StopStringFilter
from hypothesis import given
from hypothesis import strategies as st

LETTERS = st.text("ab日", max_size=30)


def cuts(text: str, sizes: list[int]) -> list[str]:
    pieces, at = [], 0
    for size in sizes:
        pieces.append(text[at : at + size])
        at += size
    return [*pieces, text[at:]]


def naive(text: str, stops: list[str], passed_chars: int = 0) -> tuple[str, str | None]:
    """The first end of any stop; of those that end there, the longest.

    No stop ends among the first `passed_chars` characters.
    """
    for end in range(passed_chars + 1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end - len(stop)], stop
    return text, None


@given(
    LETTERS,
    st.lists(st.text("ab日", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(0, 4)),
)
def test_pieces_change_nothing_and_no_character_of_a_stop_comes_out(
    text: str, stops: list[str], sizes: list[int]
) -> None:
    watch, out = StopStringFilter(tuple(stops)), ""
    before, found = naive(text, stops)
    for piece in cuts(text, sizes):
        out += watch.feed(piece)
        assert before.startswith(out), "told what may not be told"
    out += watch.flush()
    assert (out, watch.found_stop) == (before, found)


@given(LETTERS, st.text("ab", min_size=1, max_size=3), st.lists(st.integers(0, 4)))
def test_a_stop_may_be_kept(text: str, stop: str, sizes: list[int]) -> None:
    watch = StopStringFilter((stop,), keep_stop=True)
    out = "".join(watch.feed(piece) for piece in cuts(text, sizes)) + watch.flush()
    before, found = naive(text, [stop])
    assert out == before + (found or "")


@given(
    LETTERS,
    LETTERS,
    st.lists(st.text("ab日", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(0, 4)),
)
def test_a_stop_may_begin_but_not_end_in_what_is_passed_by(
    passed: str, text: str, stops: list[str], sizes: list[int]
) -> None:
    watch, out = StopStringFilter(tuple(stops)), ""
    before, found = naive(passed + text, stops, len(passed))
    for piece in cuts(passed, sizes):
        out += watch.pass_by(piece)
        assert before.startswith(out), "told what may not be told"
    assert watch.found_stop is None
    for piece in cuts(text, sizes):
        out += watch.feed(piece)
        assert before.startswith(out), "told what may not be told"
    out += watch.flush()
    assert (out, watch.found_stop) == (before, found)


def test_only_what_may_become_a_stop_is_held_back() -> None:
    watch = StopStringFilter(("STOP", "\n\n"))
    assert watch.feed("go S") == "go "
    assert watch.feed("T") == ""
    assert watch.feed("ART\n") == "START"
    assert watch.feed("x") == "\nx"
    assert watch.feed("\n\nmore") == "" and watch.found_stop == "\n\n"
    assert watch.feed("anything") == "" and watch.flush() == ""
