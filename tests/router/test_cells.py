"""The splitter before cells: it keeps prefixes together as long as no cell falls behind."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from diptych.protos.frames import Coefficients
from diptych.router.cells import (
    LENGTH_CLASSES,
    SENT_HALF_LIFE_S,
    CellReport,
    CellSplitter,
    SplitCell,
    length_class,
    marks_of,
    tokens_of_marks,
)
from diptych.router.index import positions

PREFILL_TOKEN_S = 1e-4
COST = Coefficients(
    prefill_base=0.0,
    prefill_token=PREFILL_TOKEN_S,
    prefill_pair=0.0,
    step_base=0.02,
    step_row=1e-3,
    step_weights=0.0,
    step_token=0.0,
)
BLOCK = 64


def idle_cell(workers: int = 10, backlog_s: float = 0.0, answer_step_s: float = 1e-3) -> CellReport:
    return CellReport(
        prefill_workers=workers,
        decode_workers=workers,
        backlog_s=backlog_s,
        step_s=0.02,
        answer_step_s=answer_step_s,
        answer_tokens=100.0,
        cost=COST,
    )


def splitter_of(*reports: CellReport | None) -> CellSplitter:
    splitter = CellSplitter(len(reports))
    for cell, report in enumerate(reports):
        splitter.report(cell, report)
    return splitter


def prompt(conversation: int, blocks: int) -> list[bytes]:
    return [b"%d/%d" % (conversation, block) for block in range(blocks)]


def test_the_kept_prefixes_double() -> None:
    hashes = prompt(0, 9)
    assert marks_of(hashes) == [hashes[0], hashes[1], hashes[3], hashes[7]]
    assert marks_of([]) == []
    assert [tokens_of_marks(depth) for depth in range(5)] == [0, 64, 128, 256, 512]


def test_a_conversation_stays_where_its_prefix_is() -> None:
    splitter = splitter_of(idle_cell(), idle_cell(), idle_cell())
    first_turns = [splitter.choose(prompt(number, 16), 16 * BLOCK, 0.0) for number in range(3)]
    assert sorted(first_turns) == [0, 1, 2]  # new prompts go to the cell with the least work
    later_turns = [splitter.choose(prompt(number, 20), 20 * BLOCK, 5.0) for number in range(3)]
    assert later_turns == first_turns


@pytest.mark.parametrize(("backlog_s", "moves"), [(2.5, False), (3.0, True)])
def test_a_prefix_is_worth_the_seconds_that_it_saves(backlog_s: float, moves: bool) -> None:
    # 16 blocks are 1,024 tokens, whose prefill takes 0.1 s. Ten workers at home are 0.25 or 0.3 s
    # behind, the mean cell is by half as much, and 1.25 times that is free: 0.094 or 0.113 s.
    splitter = splitter_of(idle_cell(), idle_cell())
    home = splitter.choose(prompt(0, 16), 16 * BLOCK, 0.0)
    splitter._cells[home].sent_s = [0.0] * LENGTH_CLASSES
    for cell in (0, 1):
        splitter.report(cell, idle_cell(backlog_s=backlog_s if cell == home else 0.0))
    assert (splitter.choose(prompt(0, 16), 16 * BLOCK, 0.1) != home) == moves


@pytest.mark.parametrize(("step_s", "moves"), [(0.022, False), (0.05, True)])
def test_slow_steps_send_requests_away(step_s: float, moves: bool) -> None:
    """Answers of 100 tokens take 2.2 or 5 s at home, and 2 s elsewhere."""
    splitter = splitter_of(idle_cell(), idle_cell())
    home = splitter.choose(prompt(0, 16), 16 * BLOCK, 0.0)
    splitter.report(home, replace(idle_cell(), step_s=step_s))
    splitter.report(1 - home, idle_cell())
    assert (splitter.choose(prompt(0, 16), 16 * BLOCK, 0.1) != home) == moves


def test_answers_that_were_sent_count_before_the_next_report() -> None:
    """Each of them makes the steps of ten workers longer by a tenth of 20 ms."""
    splitter = splitter_of(idle_cell(answer_step_s=0.02), idle_cell(answer_step_s=0.02))
    home = splitter.choose(prompt(0, 16), 16 * BLOCK, 0.0)
    chosen = [splitter.choose(prompt(0, 16), 16 * BLOCK, 0.0) for _ in range(30)]
    assert set(chosen[:3]) == {home}
    assert set(chosen) == {0, 1}


def test_an_answer_is_as_long_in_every_cell() -> None:
    """A cell that happened to get short answers does not attract requests by that."""
    short = replace(idle_cell(), answer_tokens=1.0)
    silent = replace(idle_cell(), answer_tokens=0.0)  # it was asked nothing yet
    splitter = splitter_of(short, idle_cell(), silent)
    chosen = Counter(splitter.choose(prompt(number, 8), 8 * BLOCK, 0.0) for number in range(30))
    assert chosen == {0: 10, 1: 10, 2: 10}
    assert splitter._answer_tokens == pytest.approx(50.5)


def test_each_length_is_shared_out_by_itself() -> None:
    """By the sum of all lengths, a long prompt would be worth sixteen short ones elsewhere."""
    splitter = splitter_of(idle_cell(), idle_cell())
    chosen: Counter[tuple[int, int]] = Counter()
    for number in range(170):
        blocks = 64 if number % 17 == 0 else 4
        chosen[blocks, splitter.choose(prompt(number, blocks), blocks * BLOCK, 0.0)] += 1
    assert chosen == {(64, 0): 5, (64, 1): 5, (4, 0): 80, (4, 1): 80}


@pytest.mark.parametrize("waited_s", [0.0, 300.0])
def test_a_cell_that_comes_later_gets_its_share_and_no_more(waited_s: float) -> None:
    splitter = splitter_of(idle_cell(), None)
    for number in range(1000):
        assert splitter.choose(prompt(number, 8), 8 * BLOCK, 0.0) == 0
    for cell in (0, 1):
        splitter.report(cell, idle_cell())
    chosen = Counter(
        splitter.choose(prompt(number, 8), 8 * BLOCK, waited_s) for number in range(1000, 1100)
    )
    assert chosen[0] == pytest.approx(50, abs=2)


def test_half_of_what_was_sent_is_forgotten() -> None:
    splitter = splitter_of(idle_cell(), idle_cell())
    for _ in range(100):
        splitter._cells[0].note_sent(idle_cell(), 1.0, length_class(8 * BLOCK))
    splitter.report(0, idle_cell())
    chosen = [splitter.choose(prompt(n, 8), 8 * BLOCK, SENT_HALF_LIFE_S) for n in range(200)]
    # 5 s for each of ten workers are left: as much as 976 prompts of 0.0512 s.
    assert set(chosen) == {1}
    assert splitter._cells[0].sent_s[length_class(8 * BLOCK)] == pytest.approx(5.0)


def test_a_cell_that_was_lost_has_lost_its_prefixes() -> None:
    splitter = splitter_of(idle_cell(), idle_cell())
    home = splitter.choose(prompt(0, 64), 64 * BLOCK, 0.0)
    splitter.report(home, None)
    splitter.report(home, idle_cell())
    splitter._cells[home].sent_s = [1e-3] * LENGTH_CLASSES
    assert splitter.choose(prompt(0, 64), 64 * BLOCK, 1.0) != home


def test_very_long_prompts_are_one_class() -> None:
    assert length_class(1) == 1
    assert length_class(1023) == 10
    assert length_class(1024) == 11
    assert length_class(1 << 40) == length_class(1 << 30) == LENGTH_CLASSES - 1


def test_gateways_send_the_hashes_that_are_kept() -> None:
    """A gateway leaves out hashes that no router looks up."""
    for blocks in (1, 2, 100, 5000):
        marks = [2**power - 1 for power in range(blocks.bit_length())]
        assert {mark for mark in marks if mark < blocks} <= set(positions(blocks))


def test_what_was_sent_counts_at_once() -> None:
    splitter = splitter_of(idle_cell(), idle_cell(), idle_cell(), idle_cell())
    chosen = Counter(splitter.choose(prompt(number, 8), 8 * BLOCK, 0.0) for number in range(400))
    assert chosen == {0: 100, 1: 100, 2: 100, 3: 100}


def test_prompts_of_one_token_are_shared_out() -> None:
    splitter = splitter_of(idle_cell(), idle_cell())
    chosen = Counter(splitter.choose([], 1, 0.0) for _ in range(100))
    assert chosen == {0: 50, 1: 50}


def test_a_larger_cell_takes_more() -> None:
    splitter = splitter_of(idle_cell(workers=30), idle_cell(workers=10))
    chosen = Counter(splitter.choose(prompt(number, 8), 8 * BLOCK, 0.0) for number in range(400))
    assert chosen[0] == pytest.approx(300, abs=5)


def test_a_cell_without_workers_gets_nothing() -> None:
    splitter = splitter_of(None, idle_cell())
    assert {splitter.choose(prompt(number, 8), 8 * BLOCK, 0.0) for number in range(20)} == {1}
    splitter.report(1, None)
    assert splitter.choose(prompt(0, 8), 8 * BLOCK, 1.0) == 0


def test_a_prefix_is_forgotten() -> None:
    splitter = CellSplitter(2, prefix_ttl_s=60.0)
    for cell in (0, 1):
        splitter.report(cell, idle_cell())
    home = splitter.choose(prompt(0, 16), 16 * BLOCK, 0.0)
    for cell in (0, 1):
        splitter.report(cell, idle_cell(backlog_s=0.01 if cell == home else 0.0))
    assert splitter.choose(prompt(0, 16), 16 * BLOCK, 61.0) != home


def test_prefill_that_was_sent_waits_before_the_next_report() -> None:
    cell = SplitCell()
    report = idle_cell(backlog_s=2.0)
    cell.note_sent(report, 5.0, length_class(8 * BLOCK))
    assert cell.queue_s(report) == pytest.approx(0.7)  # 7 s for ten workers


def test_the_last_token_of_a_prompt_is_computed_again() -> None:
    splitter = splitter_of(idle_cell())
    for _ in range(2):
        splitter.choose(prompt(0, 1), BLOCK, 0.0)
    sent_s = splitter._cells[0].sent_s[length_class(BLOCK)]
    assert sent_s == pytest.approx((BLOCK + 1) * PREFILL_TOKEN_S / 10)
