"""The crash matrix's page: sums over repetitions, and what went wrong in words."""

from __future__ import annotations

from datetime import date
from typing import Any

from .faults import FAULTS
from .load import KINDS
from .matrix import Repetition, matrix_page


def repetition(fault: str, number: int, **changes: Any) -> Repetition:
    figures: dict[str, Any] = {
        "requests": 100,
        "wrong": 0,
        "failed": 0,
        "cut_off": 2,
        "longest_pause_s": 1.0 + number,
        "whole_s": 4.0 + number,
        "leaks": "",
    }
    return Repetition(fault, number, **{**figures, **changes})


def test_an_answer_is_the_same_whichever_tokens_come_in_one_event() -> None:
    def event(text: str, *logprobs: float) -> dict[str, Any]:
        scores = {"content": [{"logprob": logprob} for logprob in logprobs]}
        return {"choices": [{"index": 0, "delta": {"content": text}, "logprobs": scores}]}

    def texts(*events: dict[str, Any]) -> dict[int, str]:
        found: dict[int, str] = {}
        for one in events:
            for number, text in KINDS[0].read(one):
                found[number] = found.get(number, "") + text
        return found

    apart = texts(event("a", -1.0), event("b", -2.0))
    assert texts(event("ab", -1.0, -2.0)) == apart
    assert texts(event("ab", -1.0, -2.5)) != apart


def test_a_row_adds_up_its_repetitions() -> None:
    page = matrix_page([repetition("KILL router", number) for number in range(3)], date(2026, 1, 2))
    assert "| KILL router | 3 | 300 | 0 | 0 | 6 | 2.0 / 2.9 | 5.0 / 6.0 | 0 |" in page
    assert "Of 300 requests under 3 faults 0 got a wrong answer, and 0 got none." in page
    assert "2026-01-02" in page and "What went wrong" not in page


def test_what_went_wrong_is_counted_and_said() -> None:
    bad = repetition("KILL decode", 1, wrong=1, failed=2, whole_s=None, errors=["stop", "stop"])
    leaking = repetition("KILL decode", 2, leaks="blocks or jobs are held")
    page = matrix_page([repetition("KILL decode", 0), bad, leaking], date(2026, 1, 2))
    assert "| KILL decode | 3 | 300 | 1 | 2 | 6 | 2.0 / 2.9 | 5.0 / 6.0, 1 times not | 1 |" in page
    assert page.endswith("## What went wrong\n\n- KILL decode: stop\n")
    assert not bad.is_whole and not leaking.is_whole


def test_every_fault_has_a_name_of_its_own() -> None:
    names = [fault.name for fault in FAULTS]
    assert len(set(names)) == len(names)
