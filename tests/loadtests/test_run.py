"""What one process of a load test sends, to a client that answers at once."""

from __future__ import annotations

import random

import pytest
from diptych.loadtests import run as run_module
from diptych.loadtests.arrivals import Arrival
from diptych.loadtests.endpoint import EndpointFacts
from diptych.loadtests.outcomes import LoadOutcome
from diptych.loadtests.plan import LoadPlan
from diptych.loadtests.run import LoadRun, ProcessShare

FACTS = EndpointFacts("http://x", "m", 100, ("a", "b"), 3, True, True, "diptych")


class Client:
    """Answers each prompt, or fails with `error`."""

    def __init__(self, error: str = "") -> None:
        self.error = error
        self.prompts: list[int] = []

    def chat(self, outcome: LoadOutcome, messages: list[dict[str, str]], tokens: int) -> str:
        self.prompts.append(outcome.prompt_tokens)
        outcome.error = self.error
        outcome.ttft_s = outcome.e2e_s = 0.0
        outcome.output_tokens = tokens
        return "a"


def made(client: Client, plan: LoadPlan, share: ProcessShare | None = None) -> LoadRun:
    run = LoadRun(
        plan,
        FACTS,
        share=share or ProcessShare(),
        key="",
        on_end=lambda outcome, stage: None,
        name="t",
    )
    run._client = client
    return run


def session(*lengths: int, think_s: float = 0.0) -> Arrival:
    turn: Arrival | None = None
    for length in reversed(lengths):
        turn = Arrival(0.0, length, 10, next_turn=turn, think_s=think_s)
    assert turn is not None
    return turn


@pytest.mark.parametrize(
    ("error", "lengths", "sent"),
    [
        ("", (10, 20, 30), [10, 20, 30]),
        ("", (10, 91, 30), [10]),
        ("500", (10, 20, 30), [10]),
    ],
)
def test_a_session_ends_with_a_turn_that_failed_or_before_one_without_room(
    error: str, lengths: tuple[int, ...], sent: list[int]
) -> None:
    client = Client(error)
    made(client, LoadPlan(duration=5.0))._run_session(session(*lengths))
    assert client.prompts == sent
    assert session(*lengths).exceeds(100) == (91 in lengths)


def test_nobody_thinks_beyond_the_end_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(run_module.gevent, "sleep", slept.append)
    client = Client()
    made(client, LoadPlan(duration=5.0))._run_session(session(10, 20, think_s=60.0))
    assert client.prompts == [10] and slept == []


def test_a_users_seed_depends_on_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[str] = []

    rng = random.Random(0)

    def seeded(seed: str) -> random.Random:
        seeds.append(seed)
        return rng

    run = made(Client(), LoadPlan(load="chat", duration=0.0, seed=7))
    monkeypatch.setattr(run_module.random, "Random", seeded)
    run.converse(lambda: True)
    run._new_outcome(0.0, 0, 10)
    run.converse(lambda: True)
    assert seeds == ["7/user/0/1", "7/user/0/2"]
