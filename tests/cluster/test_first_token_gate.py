"""First tokens at the gate of an attempt: what passes when, and what the client's bytes are."""

from __future__ import annotations

import asyncio
import time

import pytest
from diptych.cluster.gateway.attempt.first_token_gate import FirstTokenGate
from diptych.cluster.gateway.attempt.request import AnswerUpdate, PlacedTargets, Request
from diptych.protos import frames as f
from diptych.router.first_token import FirstTokenPacer, ReleaseReason

from .test_push import SAID, TEXT, Client, Gateway, Plane, Stream, begun, settle

TARGETS = PlacedTargets(ttft_s=60.0, itl_s=0.02)


def pacer_of(join_s: float) -> FirstTokenPacer:
    """A pacer that has observed this join time often."""
    pacer = FirstTokenPacer()
    for handed_over in (True, False):
        for _ in range(64):
            pacer.estimate(handed_over).observe(2, join_s)
    return pacer


class Attempt:
    """An attempt at a request of `n` answers, as far as its gate sees it."""

    def __init__(self, join_s: float | None = 0.050, n: int = 1) -> None:
        self.request = Request("r", [1, 2], [], f.Sampling(100, n=n))
        self.request.targets = TARGETS
        self.now = self.request.times.arrived_s
        self.pacer = None if join_s is None else pacer_of(join_s)
        self.gate = FirstTokenGate(self.request, self.pacer, handed_over=True)

    def token(
        self, id: int, after_s: float = 0.0, finish: str | None = None, answer_index: int = 0
    ) -> list[int]:
        """Journals a token, and returns the ids that pass."""
        answer = self.request.answers[answer_index]
        answer.journal.append(f.Token(id))
        answer.finish_reason = finish
        answer.stamp(1)
        return self.ids([AnswerUpdate(answer_index, [f.Token(id)], finish)], after_s)

    def ids(self, updates: list[AnswerUpdate], after_s: float, failed: bool = False) -> list[int]:
        self.now += after_s
        passed = self.gate.pass_on(updates, self.now, attempt_failed=failed)
        return [token.id for update in passed for token in update.tokens]


def test_a_first_token_waits_until_its_second_can_follow_and_then_goes_out() -> None:
    attempt = Attempt()
    assert attempt.token(7) == [] and attempt.gate.release_at == pytest.approx(attempt.now + 0.0304)
    assert attempt.ids([], 0.010) == []
    assert attempt.ids([], 0.021) == [7] and attempt.gate.release_at is None
    assert not attempt.gate.is_open, "the second token says how long it took"
    assert attempt.token(8, 0.010) == [8] and attempt.gate.is_open
    times = attempt.request.times
    assert times.first_token_held_s == pytest.approx(0.031)
    assert times.first_token_release == ReleaseReason.SECOND_EXPECTED


def test_the_second_token_takes_the_first_one_with_it_and_teaches_the_pacer() -> None:
    attempt = Attempt()
    assert attempt.pacer is not None
    joins = attempt.pacer.estimate(handed_over=True).joins
    assert attempt.token(7) == [] and attempt.token(8, 0.005) == [7, 8]
    assert attempt.token(9) == [9]
    assert attempt.request.times.first_token_release == ReleaseReason.SECOND_CAME
    assert attempt.pacer.estimate(handed_over=True).joins == joins + 1


def test_tokens_pass_at_once_without_a_pacer_or_targets_or_where_the_client_has_tokens() -> None:
    assert Attempt(join_s=None).token(7) == [7]
    for change in ("targets", "journal"):
        attempt = Attempt()
        if change == "targets":
            attempt.request.targets = PlacedTargets()
        else:
            attempt.request.answers[0].journal.append(f.Token(5))
        attempt.gate = FirstTokenGate(attempt.request, attempt.pacer, handed_over=True)
        assert attempt.token(7) == [7], change


def test_an_answer_of_one_token_is_not_held() -> None:
    assert Attempt().token(7, finish="length") == [7]


def test_a_failed_attempt_lets_out_what_is_held() -> None:
    attempt = Attempt()
    assert attempt.token(7) == []
    assert attempt.ids([], 0.001, failed=True) == [7]
    assert attempt.request.times.first_token_release == ReleaseReason.ATTEMPT_FAILED


def test_a_request_whose_own_target_is_over_waits_for_nothing() -> None:
    attempt = Attempt()
    attempt.now += TARGETS.ttft_s
    assert attempt.token(7) == [7]
    times = attempt.request.times
    assert (times.first_token_held_s, times.first_token_release) == (0.0, "ttft_target")


def test_first_tokens_of_several_answers_go_out_together_in_their_order() -> None:
    attempt = Attempt(n=2)
    assert attempt.token(7) == [] and attempt.token(8, answer_index=1) == []
    assert attempt.token(9, 0.001, answer_index=1) == [7, 8, 9]
    assert attempt.token(10) == [10]


def test_latencies_count_a_held_token_from_when_it_went_out() -> None:
    attempt = Attempt()
    attempt.token(7)
    before = attempt.request.answers[0].token_times[0]
    time.sleep(0.002)  # the clock moves on
    attempt.token(8, 0.001)
    assert attempt.request.answers[0].token_times[0] > before
    assert len(attempt.request.gaps_s) == 1 and attempt.request.gaps_s[0] >= 0


# ---- through the gateway -------------------------------------------------------------------------


class PacedPlane(Plane):
    """Its router says what the targets are."""

    def place(self, frame: f.PlaceAttempt) -> None:
        placed = f.AttemptPlaced(
            frame.attempt_key, 1, "p", "d", 0, 0.0, ttft_target_s=60.0, itl_target_s=0.02
        )
        self.inboxes[frame.attempt_key[0]].put_nowait(placed)


class ObservedClient(Client):
    """A client that says when it has the first text of the answer."""

    def __init__(self) -> None:
        super().__init__()
        self.has_text = asyncio.Event()

    async def send(self, message: dict) -> None:
        await super().send(message)
        if self.text:
            self.has_text.set()


def paced_gateway(join_s: float) -> Gateway:
    gateway = Gateway()
    gateway.plane = gateway.shelf._source.plane = PacedPlane()  # type: ignore[attr-defined]
    gateway.shelf._source.pacer = pacer_of(join_s)  # type: ignore[attr-defined]
    return gateway


async def test_a_stream_begins_with_its_second_token_and_goes_on_without_a_task() -> None:
    stream = Stream(paced_gateway(join_s=30.0), "r")
    task = await begun(stream)
    stream.say(" a")
    await settle()
    assert stream.client.messages == 0, "not even the head of the response is out"
    stream.say(" b")
    await settle()
    assert stream.client.text == " a b"
    stream.say(" c")  # no await: nobody else ran
    assert stream.client.text == " a b c"
    stream.put(finish="stop")
    await asyncio.wait_for(task, 5)


async def test_a_first_token_goes_out_by_itself_where_no_second_one_comes() -> None:
    stream = Stream(paced_gateway(join_s=0.040), "r")
    stream.client = ObservedClient()
    task = await begun(stream)
    stream.say(" a")
    await asyncio.wait_for(stream.client.has_text.wait(), 5)
    assert stream.client.text == " a"
    assert stream.request.times.first_token_release == "second_expected"
    stream.say(" b")
    stream.put(finish="stop")
    await asyncio.wait_for(task, 5)
    assert stream.client.text == " a b"


async def test_an_error_while_the_first_token_is_held_comes_behind_it() -> None:
    stream = Stream(paced_gateway(join_s=30.0), "r")
    task = await begun(stream)
    stream.say(" a")
    await settle()
    stream.fail()
    await asyncio.wait_for(task, 5)
    assert stream.client.text == " a" and b"gave up after 1 attempts" in stream.client.data


@pytest.mark.parametrize("pieces", [1, 2, 3])
async def test_what_was_held_or_not_the_client_s_bytes_are_the_same(pieces: int) -> None:
    ids = TEXT.encode(SAID, add_special_tokens=False)

    async def events(gateway: Gateway) -> list[dict]:
        stream = Stream(gateway, "r", stream_options={"include_usage": True}, logprobs=True)
        task = await begun(stream)
        for start in range(0, len(ids), pieces):
            is_last = start + pieces >= len(ids)
            stream.put(*ids[start : start + pieces], finish="length" if is_last else None)
            await settle()
        await asyncio.wait_for(task, 5)
        return [event | {"created": 0} for event in stream.client.events]

    assert await events(paced_gateway(join_s=30.0)) == await events(Gateway())
