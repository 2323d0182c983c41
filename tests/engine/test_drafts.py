"""Guesses from the sequence's own text."""

from __future__ import annotations

from diptych.engine.drafts import PAUSE_LIMIT_STEPS, NGramDrafter


def test_what_followed_before_is_guessed_to_follow_again() -> None:
    assert NGramDrafter().propose([1, 2, 3, 4, 5, 6, 9, 1, 2, 3], 3) == [4, 5, 6]


def test_the_latest_and_the_longest_precedent_wins() -> None:
    assert NGramDrafter().propose([1, 2, 3, 7, 1, 2, 3, 8, 5, 1, 2, 3], 1) == [8]
    assert NGramDrafter().propose([1, 2, 3, 7, 9, 2, 3, 8, 5, 1, 2, 3], 1) == [7]


def test_a_loop_goes_on() -> None:
    assert NGramDrafter().propose([5, 1, 2, 1, 2, 1, 2], 5) == [1, 2, 1, 2, 1]


def test_nothing_is_guessed_without_a_precedent() -> None:
    for ids in ([1], [1, 2], [1, 2, 3, 4, 5], [7, 7, 8]):
        assert NGramDrafter().propose(ids, 4) == []


def test_ids_that_arrive_later_are_learned_once() -> None:
    grown, ids = NGramDrafter(), []
    for one in [1, 2, 3, 4, 1, 2, 5, 1, 2]:
        ids.append(one)
        guess = grown.propose(ids, 2)
    assert guess == NGramDrafter().propose(ids, 2) == [5, 1]


def test_wrong_guesses_make_it_wait_and_a_right_one_ends_that() -> None:
    ids = [1, 2, 3, 1, 2]
    guesser = NGramDrafter()
    waits = []
    for _ in range(7):
        assert guesser.propose(ids, 1) == [3]
        guesser.record_verified(1, 0)
        wait = 0
        while not guesser.propose(ids, 1):
            wait += 1
        waits.append(wait)
    assert waits == [1, 2, 4, 8, 16, PAUSE_LIMIT_STEPS, PAUSE_LIMIT_STEPS]
    guesser.record_verified(1, 1)
    assert guesser.propose(ids, 1) == [3]
