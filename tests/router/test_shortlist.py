"""Of a large fleet few workers are compared: those that are idle, not those that seem the fastest."""

from __future__ import annotations

import pytest
from diptych.protos.frames import AttemptPlaced
from diptych.router import events as e
from diptych.router.cells import report_of
from diptych.router.worker_state import PrefillWork, WorkerState
from msgspec.structs import replace

from .test_core import Rig, card

WORKERS = 40  #: more than `COMPARE_ALL_MAX`
OBSERVED = 60  #: prompts, by which a worker's own correction has become what they say


@pytest.fixture
def rig() -> Rig:
    """All workers have computed many prompts as fast as their cards say."""
    names = [f"prefill/{number:02}" for number in range(WORKERS)]
    made = Rig(*names, "decode/x", policy="diptych", blocks=10_000)
    for worker in workers_of(made):
        teach(made, worker, 1.0)
    return made


def work(seconds: float, deadline: float = 0.0) -> PrefillWork:
    return PrefillWork(
        seconds=seconds,
        uncached_tokens=int(2000 * seconds),
        prompt_tokens=int(2000 * seconds),
        assigned_at=0.0,
        deadline=deadline,
        delayed=False,
        background=False,
    )


def teach(rig: Rig, worker: WorkerState, factor: float) -> None:
    """Let the worker's prompts take so many times what its card says."""
    for _ in range(OBSERVED):
        rig.router.fleet.correct_prefill(worker, work(1.0), factor, rig.now)


def workers_of(rig: Rig) -> list[WorkerState]:
    return rig.router.fleet.prefill_workers


def test_a_prompt_goes_to_an_idle_worker_though_many_busy_ones_seem_faster(rig: Rig) -> None:
    """Of many workers some always seem fast: their own corrections err. They got what came."""
    fast = workers_of(rig)[:6]
    for number, worker in enumerate(fast):
        teach(rig, worker, 0.5)
        prompt = work(0.2, deadline=rig.now + 0.3)
        rig.router.fleet.give_prompt(worker, (f"before{number}", 0), prompt, rig.now)
    for number in range(8):
        placed = rig.ask(f"r{number}", prompt=64)
        assert isinstance(placed, AttemptPlaced)
        assert placed.prefill_worker not in {worker.card.id for worker in fast}
        rig.send(e.FirstTokenSent((f"r{number}", 0)))


def test_idle_workers_that_are_slow_do_not_hide_the_others(rig: Rig) -> None:
    slow = workers_of(rig)[:6]
    for worker in slow:
        teach(rig, worker, 4.0)
    for number in range(4):
        placed = rig.ask(f"r{number}", prompt=640)
        assert isinstance(placed, AttemptPlaced)
        assert placed.prefill_worker not in {worker.card.id for worker in slow}


def test_a_type_that_is_slower_than_its_cards_say_is_listed_behind_another() -> None:
    """What all workers of a type have learned is no error of one of them."""
    names = [f"prefill/{number:02}" for number in range(WORKERS)]
    made = Rig("decode/x", policy="diptych", blocks=10_000)
    for number, name in enumerate(names):
        gpu = "A" if number < WORKERS // 2 else "B"
        made.send(e.WorkerJoined(replace(card(name), gpu=gpu), 0, []))
    type_a = workers_of(made)[: WORKERS // 2]
    for worker in type_a:
        teach(made, worker, 2.0)
    placed = made.ask("r", prompt=640)
    assert isinstance(placed, AttemptPlaced)
    assert placed.prefill_worker not in {worker.card.id for worker in type_a}


def test_a_cell_tells_what_its_middling_worker_costs_not_that_of_one_that_seems_fast(
    rig: Rig,
) -> None:
    middle = workers_of(rig)[WORKERS // 2]
    teach(rig, middle, 0.25)
    report = report_of(rig.router, rig.now)
    assert report is not None
    assert report.cost.prefill_token == pytest.approx(workers_of(rig)[0].cost.prefill_token)
    assert report.cost.prefill_token > 2 * middle.cost.prefill_token
