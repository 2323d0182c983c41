"""One request over several attempts: dedupe, order, retries. The plane is scripted."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from diptych.cluster.gateway.attempt.generator import HANDOVERS_MAX, Generator, RetryState
from diptych.cluster.gateway.attempt.request import AnswerUpdate, Request
from diptych.cluster.gateway.attempt.terms import Terms
from diptych.cluster.gateway.errors import ApiError
from diptych.cluster.telemetry.gateway_metrics import outcome_of
from diptych.engine.sequence import sampling_of_answer
from diptych.kv_transfer.identity import block_hashes
from diptych.protos import frames as f


class ScriptedPlane:
    """Answers `place` and `submit` with what the script says; the rest is as in `Plane`."""

    def __init__(self, script: Callable[[ScriptedPlane, Any], None]) -> None:
        self.script, self.link, self.cards = script, self, {}
        self.inboxes: dict[f.AttemptKey, asyncio.Queue] = {}
        self.said: list = []
        self.connected_router = True

    @property
    def router_connected(self) -> bool:
        return self.connected_router

    def watch(self, key: f.AttemptKey, backlog: object = None) -> asyncio.Queue:
        return self.inboxes.setdefault(key, asyncio.Queue())

    def place(self, frame: f.PlaceAttempt) -> None:
        self.said.append(frame)
        self.script(self, frame)

    def submit(self, worker: str, frame: Any, ask_for_life: bool = False) -> None:
        self.said.append(frame)
        self.script(self, frame)

    def connected(self, worker: str) -> bool:
        return False

    def alias(self, worker: str) -> str:
        return f"alias of {worker}"

    def send(self, frame: Any) -> None:
        self.said.append(frame)

    def prompt_prefilled(self, placed: f.AttemptPlaced) -> None:
        self.send(f.PromptPrefilled(placed.attempt_key))

    def forget(self, outcome: f.AttemptOutcome, cancel: bool) -> None:
        self.said += [("cancelled" if cancel else "over", outcome.attempt_key), outcome]

    def end_requests(self, error: ApiError, wire_id: str = "") -> None:
        """Reaches nobody, as between two attempts."""

    def put(self, *frames: Any) -> None:
        for frame in frames:
            self.inboxes[frame.attempt_key].put_nowait(frame)


Script = Callable[[ScriptedPlane, Any], None]


class Reader:
    """A client that takes everything at once; `after_push` is what it does then."""

    def __init__(self, after_push: Callable[[], None] = lambda: None) -> None:
        self.token_ids: list[int] = []
        self.after_push = after_push

    def push(self, updates: list[AnswerUpdate]) -> bool:
        self.token_ids += [token.id for update in updates for token in update.tokens]
        self.after_push()
        return True

    def replay(self, updates: list[AnswerUpdate]) -> None: ...
    async def drain(self) -> None: ...


def placed(key: f.AttemptKey, local: bool = False) -> f.AttemptPlaced:
    return f.AttemptPlaced(key, 1, None if local else "p", "d", 0, 0.0)


def placing(start_prefill: Script) -> Script:
    """A script that places each attempt on p and d; `start_prefill` is what p then does."""

    def script(plane: ScriptedPlane, frame: Any) -> None:
        if isinstance(frame, f.PlaceAttempt):
            plane.put(placed(frame.attempt_key))
        elif isinstance(frame, f.StartPrefill):
            start_prefill(plane, frame)

    return script


def tokens(key: f.AttemptKey, offset: int, *ids: int, finish: str | None = None) -> f.AnswerTokens:
    return f.AnswerTokens(key, offset, [f.Token(i) for i in ids], finish)


def run(
    script: Callable, attempts: int = 3, sampling: f.Sampling | None = None
) -> tuple[list[int], ScriptedPlane, Request]:
    async def collect() -> tuple[list[int], ScriptedPlane, Request]:
        plane = ScriptedPlane(script)
        request = Request("r", [1, 2, 3], [], sampling or f.Sampling(8))
        request.wire_id = "r"
        reader = Reader()
        async with asyncio.timeout(5):
            generator = Generator(plane, attempts, 5.0)  # type: ignore[arg-type]
            await generator.run(request, reader)
        return reader.token_ids, plane, request

    return asyncio.run(collect())


def test_first_token_comes_from_prefill_and_the_rest_from_decode() -> None:
    @placing
    def script(plane: ScriptedPlane, frame: f.StartPrefill) -> None:
        plane.put(
            tokens(frame.attempt_key, 0, 10),
            tokens(frame.attempt_key, 1, 11, 12, finish="stop"),
        )

    got, plane, request = run(script)
    assert got == [10, 11, 12] and request.route == "alias of p,alias of d"
    assert plane.said[-2] == ("over", ("r", 0)), "an answer that ended is not aborted"


def test_tokens_that_overtake_the_first_one_wait_for_it() -> None:
    @placing
    def script(plane: ScriptedPlane, frame: f.StartPrefill) -> None:
        plane.put(
            tokens(frame.attempt_key, 2, 12, finish="length"), tokens(frame.attempt_key, 1, 11)
        )
        plane.put(tokens(frame.attempt_key, 0, 10))

    got, _, request = run(script)
    assert got == [10, 11, 12] and request.finish_reason == "length"


def test_a_second_attempt_goes_on_at_the_next_token() -> None:
    @placing
    def script(plane: ScriptedPlane, frame: f.StartPrefill) -> None:
        if frame.attempt_key[1] == 0:
            plane.put(tokens(frame.attempt_key, 0, 10), tokens(frame.attempt_key, 1, 11))
            plane.put(f.AttemptFailed(frame.attempt_key, "d", "worker_lost"))
        else:
            plane.put(
                tokens(frame.attempt_key, 3, 13, finish="stop"), tokens(frame.attempt_key, 2, 12)
            )

    got, plane, request = run(script)
    assert got == [10, 11, 12, 13] and request.attempt_count == 2
    places = [frame for frame in plane.said if isinstance(frame, f.PlaceAttempt)]
    assert [place.lost_workers for place in places] == [[], ["d"]], (
        "a dead worker is not asked again"
    )
    assert [(place.prompt_tokens, place.max_tokens) for place in places] == [(3, 8), (5, 6)]
    again = [frame for frame in plane.said if isinstance(frame, f.StartPrefill | f.StartDecode)][2:]
    assert [(one.token_ids, one.resumed_tokens) for one in again] == [([1, 2, 3, 10, 11], 2)] * 2
    assert all(one.sampling == f.Sampling(8) for one in again), "limits are of the whole answer"
    assert ("cancelled", ("r", 0)) in plane.said, "the other worker is told of the failed attempt"
    first, second = (frame for frame in plane.said if isinstance(frame, f.AttemptOutcome))
    assert (first.reason, first.tokens, second.reason, second.tokens) == (
        "worker_lost",
        2,
        "stop",
        4,
    )
    assert (second.ttft_ms or 0) >= 0 and (second.itl_p99_ms or -1) >= 0


def test_a_retry_keeps_its_deadline_until_it_has_a_token() -> None:
    @placing
    def script(plane: ScriptedPlane, frame: f.StartPrefill) -> None:
        if frame.attempt_key[1] < 2:
            plane.put(*[tokens(frame.attempt_key, 0, 10)] * frame.attempt_key[1])
            plane.put(f.AttemptFailed(frame.attempt_key, "d", "kv_checksum"))
        else:
            plane.put(tokens(frame.attempt_key, 1, 11, finish="stop"))

    first, second, _ = (one for one in run(script)[1].said if isinstance(one, f.PlaceAttempt))
    assert second.waited_s > first.waited_s >= 0, "since it arrived"


def test_what_the_targets_first_came_to_holds_for_all_attempts_and_for_goodput() -> None:
    def script(plane: ScriptedPlane, frame: Any) -> None:
        if isinstance(frame, f.PlaceAttempt):
            seconds = 1.62 if frame.attempt_key[1] == 0 else 9.0
            plane.put(
                msgspec.structs.replace(
                    placed(frame.attempt_key),
                    ttft_target_s=seconds,
                    itl_target_s=0.05,
                    ttft_target="max(1s, 3x)",
                )
            )
        elif isinstance(frame, f.StartPrefill) and frame.attempt_key[1] == 0:
            plane.put(f.AttemptFailed(frame.attempt_key, "d", "kv_checksum"))
        elif isinstance(frame, f.StartPrefill):
            plane.put(tokens(frame.attempt_key, 0, 10, finish="stop"))

    _, plane, request = run(script)
    first, second = (frame for frame in plane.said if isinstance(frame, f.PlaceAttempt))
    assert (first.ttft_s, first.itl_s, first.ttft) == (0.0, 0.0, "")
    assert (second.ttft_s, second.itl_s, second.ttft) == (1.62, 0.05, "max(1s, 3x)")
    outcome = outcome_of(request, "stop")
    assert (outcome.ttft_target_s, outcome.itl_target_s) == (1.62, 0.05)
    assert outcome.prompt_tokens == 3


def test_hashes_go_on_into_the_journal() -> None:
    ids = list(range(100))
    request = Request("r", ids, block_hashes(ids, b"salt"), f.Sampling(99), b"salt")
    request.begin_attempt()
    assert request.attempt_input() is request
    request.answers[0].journal = [f.Token(one) for one in range(100, 140)]
    attempt = request.begin_attempt()
    whole = list(range(140))
    continued = request.attempt_input()
    assert continued.prompt_ids == whole and continued.hashes == block_hashes(whole, b"salt")
    assert continued.sampling == request.sampling
    assert attempt.resumed_tokens == 40 and request.prompt_ids == ids


@pytest.mark.parametrize(
    ("is_connected", "limit_s", "ttft_s"),
    [(True, 5.0, 0.0), (False, 5.0, 0.0), (True, 0.01, 0.0), (True, 0.01, 5.0)],
)
async def test_a_place_is_waited_for_as_long_as_a_router_is_there(
    is_connected: bool, limit_s: float, ttft_s: float
) -> None:
    """The router's queue has the request; without a router, or past all limits, it is lost."""

    def script(plane: ScriptedPlane, frame: Any) -> None:
        placed = f.AttemptPlaced(frame.attempt_key, 1, None, "d", 0, 0.0, background=True)
        if isinstance(frame, f.PlaceAttempt):
            asyncio.get_running_loop().call_later(0.2, plane.put, placed)
        elif isinstance(frame, f.StartDecode):
            assert frame.background, "the worker hears that it is late"
            plane.put(tokens(frame.attempt_key, 0, 0, finish="stop"))

    plane = ScriptedPlane(script)
    plane.connected_router = is_connected
    request = Request("r", [1, 2, 3], [], f.Sampling(9), b"salt")
    request.terms = Terms(ttft_target_s=ttft_s)
    generator = Generator(plane, 3, 0.02, limit_s)  # type: ignore[arg-type]
    if is_connected and limit_s + ttft_s > 1:
        await generator.run(request, Reader())
        assert request.background
        return
    with pytest.raises(ApiError, match="no router answered"):
        await generator.run(request, Reader())


@pytest.mark.parametrize("target", ["600s", "max(1s, 3x, 600s)", "600s/1k"])
async def test_a_target_that_is_an_expression_is_waited_for_too(target: str) -> None:
    def script(plane: ScriptedPlane, frame: Any) -> None:
        if isinstance(frame, f.PlaceAttempt):
            answer = f.AttemptRefused(frame.attempt_key, "queue_full", "full", 1.0)
            asyncio.get_running_loop().call_later(0.2, plane.put, answer)

    plane = ScriptedPlane(script)
    plane.connected_router = True
    request = Request("r", [1] * 1000, [], f.Sampling(9), b"salt", terms=Terms(ttft_target=target))
    with pytest.raises(ApiError, match="full"):
        await Generator(plane, 3, 0.02, 0.04).run(request, Reader())  # type: ignore[arg-type]


@pytest.mark.parametrize("is_part", [False, True])
async def test_an_answer_that_is_taken_between_two_attempts_is_not_made_again(
    is_part: bool,
) -> None:
    """No inbox is there then that could be told."""
    second_failed = asyncio.Event()

    def script(plane: ScriptedPlane, frame: Any) -> None:
        if isinstance(frame, f.PlaceAttempt):
            plane.put(placed(frame.attempt_key))
        elif isinstance(frame, f.StartPrefill):
            plane.put(f.AttemptFailed(frame.attempt_key, "d", "no_capacity"))
            if frame.attempt_key[1] >= 1:
                asyncio.get_running_loop().call_soon(second_failed.set)

    plane = ScriptedPlane(script)
    request = Request("r", [1, 2, 3], [], f.Sampling(9, n=2))
    generator = Generator(plane, 99, 5.0)  # type: ignore[arg-type]
    asked = request.part(0) if is_part else request
    running = asyncio.create_task(generator.run(asked, Reader()))
    async with asyncio.timeout(10):
        await second_failed.wait()
        await asyncio.sleep(0.01)
        generator.dismiss(request)
        with pytest.raises(ApiError) as failure:
            await running
    assert failure.value.reason == "busy"


@pytest.mark.parametrize("reason", ["handover", "draining", "wrong_role", "kv_handover"])
def test_a_stream_that_is_handed_over_does_not_count_as_failed(reason: str) -> None:
    """Nine workers in turn, where three attempts may fail."""

    def script(plane: ScriptedPlane, frame: Any) -> None:
        attempt = frame.attempt_key[1]
        if isinstance(frame, f.PlaceAttempt):
            plane.put(f.AttemptPlaced(frame.attempt_key, 1, "p", f"d{attempt}", 0, 0.0))
        elif isinstance(frame, f.StartPrefill):
            plane.put(
                tokens(frame.attempt_key, attempt, attempt, finish="stop" if attempt == 9 else None)
            )
            plane.put(f.AttemptFailed(frame.attempt_key, f"d{attempt}", reason))

    got, plane, request = run(script, 3)
    assert got == list(range(10)) and request.attempt_count == 10
    places = [frame for frame in plane.said if isinstance(frame, f.PlaceAttempt)]
    assert places[9].avoided_workers == [f"d{number}" for number in range(9)]
    assert not any(place.lost_workers or place.local_prefill for place in places)


def test_handovers_are_bounded_too() -> None:
    def script(plane: ScriptedPlane, frame: Any) -> None:
        if isinstance(frame, f.PlaceAttempt):
            plane.put(
                f.AttemptPlaced(frame.attempt_key, 1, "p", f"d{frame.attempt_key[1]}", 0, 0.0)
            )
        elif isinstance(frame, f.StartPrefill):
            plane.put(f.AttemptFailed(frame.attempt_key, f"d{frame.attempt_key[1]}", "handover"))

    with pytest.raises(ApiError, match=f"gave up after {HANDOVERS_MAX + 1} attempts"):
        run(script)


def test_a_worker_that_hands_over_twice_is_asked_again_after_a_pause() -> None:
    retries = RetryState(3)
    where = f.AttemptPlaced(("r", 0), 1, "p", "d", 0, 0.0)
    pauses = [
        retries.record(f.AttemptFailed(("r", 0), "d", "handover"), where, 0) for _ in range(4)
    ]
    assert pauses == [0.0, 0.08, 0.16, 0.32]
    assert retries.failed_attempts == 0 and not retries.exhausted


def test_a_prefill_worker_lost_after_the_first_token_is_no_failure() -> None:
    @placing
    def script(plane: ScriptedPlane, frame: f.StartPrefill) -> None:
        plane.put(
            tokens(frame.attempt_key, 0, 10),
            f.AttemptFailed(frame.attempt_key, "p", "worker_lost"),
        )
        plane.put(tokens(frame.attempt_key, 1, 11, finish="stop"))

    got, _, request = run(script)
    assert got == [10, 11] and request.attempt_count == 1


def test_the_last_attempt_does_without_a_transfer_then_the_client_is_told() -> None:
    def script(plane: ScriptedPlane, frame: Any) -> None:
        if isinstance(frame, f.PlaceAttempt):
            plane.put(placed(frame.attempt_key, frame.local_prefill))
        elif isinstance(frame, f.StartDecode):
            plane.put(f.AttemptFailed(frame.attempt_key, "d", "kv_checksum"))

    with pytest.raises(ApiError) as error:
        run(script)
    assert error.value.reason == "kv_transfer_failed"
    assert "gave up after 3 attempts: alias of d: kv_checksum" in error.value.message


def test_a_refusal_reaches_the_client_with_its_retry_time() -> None:
    def script(plane: ScriptedPlane, frame: Any) -> None:
        plane.put(f.AttemptRefused(frame.attempt_key, "queue_full", "9 requests wait already", 2.0))

    with pytest.raises(ApiError) as error:
        run(script)
    assert error.value.kind.http_status == 429 and error.value.headers() == {"retry-after": "2"}


def test_a_frame_of_an_older_stream_does_not_end_the_wait_for_a_place() -> None:
    def script(plane: ScriptedPlane, frame: Any) -> None:
        if isinstance(frame, f.PlaceAttempt):
            plane.put(f.AttemptFailed(frame.attempt_key, "d", "late"), placed(frame.attempt_key))
        elif isinstance(frame, f.StartPrefill):
            plane.put(tokens(frame.attempt_key, 0, 10, finish="stop"))

    assert run(script)[0] == [10]


def test_two_runs_of_one_request_id_are_different_attempts_on_the_wire() -> None:
    first, second = (Request("same", [1], [], f.Sampling(1)) for _ in range(2))
    assert first.wire_id != second.wire_id and first.id == second.id


SEVERAL = f.Sampling(16, n=3, seed=7, prompt_logprobs=0)


def repeated(answers: list[list[int]], order: random.Random) -> Callable:
    """Attempts that fail after some frames, which come in any order.

    An attempt without a journal gives all answers, any other the rest of one.
    """
    left = {"r": 2} | {str(index): 2 for index in range(len(answers))}

    def rest(key: f.AttemptKey, ids: list[int], at: int, index: int) -> list[f.AnswerTokens]:
        told, first = [], at
        while at < len(ids):
            size = 1 if at == first else order.randint(1, 3)
            end = "stop" if at + size >= len(ids) else None
            piece = [f.Token(one) for one in ids[at : at + size]]
            told.append(f.AnswerTokens(key, at, piece, end, index))
            at += size
        return told

    @placing
    def script(plane: ScriptedPlane, frame: f.StartPrefill) -> None:
        _, _, part = frame.attempt_key[0].partition(".")
        of = part.partition(".")[0] or "r"
        if part:
            assert (frame.sampling.n, frame.sampling.prompt_logprobs) == (1, None)
            assert frame.sampling == msgspec.structs.replace(
                sampling_of_answer(SEVERAL, int(of)), prompt_logprobs=None
            )
            ids = answers[int(of)]
            assert frame.token_ids == [1, 2, 3, *ids[: frame.resumed_tokens]]
            told = rest(frame.attempt_key, ids, frame.resumed_tokens, 0)
            order.shuffle(told)
        else:
            assert frame.resumed_tokens == 0 and frame.token_ids == [1, 2, 3]
            scored = [
                f.AnswerTokens(frame.attempt_key, 0, [], prompt_logprobs=[f.ScoredToken(i, -1.0)])
                for i in (2, 3)
            ]
            told = [
                one for i, ids in enumerate(answers) for one in rest(frame.attempt_key, ids, 0, i)
            ]
            order.shuffle(told)
            told = [*scored, *told]
        left[of] -= 1
        if left[of] >= 0:
            told = told[: order.randint(0, len(told) - 1)]
            # Two workers lost at one place would end the request (`crashes.py`).
            first = not part and frame.attempt_key[1] == 0
            reason = "worker_lost" if first else "kv_timeout"
            told.append(f.AttemptFailed(frame.attempt_key, "d", reason))
        plane.put(*told)

    return script


@pytest.mark.parametrize("seed", range(40))
def test_each_answer_goes_on_by_itself_after_a_failure(seed: int) -> None:
    order = random.Random(seed)
    answers = [[index * 100 + at for at in range(order.randint(1, 9))] for index in range(3)]
    got, _, request = run(repeated(answers, order), 6, SEVERAL)
    assert sorted(got) == sorted(one for ids in answers for one in ids), "lost or told twice"
    assert [[one.id for one in answer.journal] for answer in request.answers] == answers
    assert all(got.index(a) < got.index(b) for ids in answers for a, b in itertools.pairwise(ids))
    assert [token.id for token in request.prompt_logprobs] == [2, 3]
    assert request.finish_reason == "stop" and request.generated_tokens == len(got)


def test_an_answer_that_was_cut_ends_the_attempt_and_tells_the_workers() -> None:
    async def collect() -> ScriptedPlane:
        @placing
        def script(plane: ScriptedPlane, frame: f.StartPrefill) -> None:
            plane.put(tokens(frame.attempt_key, 0, 10))

        plane = ScriptedPlane(script)
        request = Request("r", [1, 2, 3], [], f.Sampling(8))
        request.wire_id = "r"
        async with asyncio.timeout(5):
            stop = lambda: setattr(request.answers[0], "stopped_early", True)  # noqa: E731
            await Generator(plane, 3, 5.0).run(request, Reader(stop))  # type: ignore[arg-type]
        assert request.finish_reason == "stop"
        return plane

    assert ("cancelled", ("r", 0)) in asyncio.run(collect()).said


def test_what_a_stream_waits_for_is_its_next_token() -> None:
    request = Request("r", [1], [], f.Sampling(8))
    now = request.times.arrived_s
    request.times.arrived_s = now - 100
    assert request.waited_s >= 100
    request.answers[0].token_times = [now - 50, now - 1]
    assert 1 <= request.waited_s < 50


def test_a_first_token_counts_from_when_it_was_written() -> None:
    request = Request("r", [1], [], f.Sampling(8))
    answer = request.answers[0]
    answer.token_times = [request.times.arrived_s + 0.001]
    before = time.monotonic()
    request.mark_written()
    assert request.ttft_s is not None and request.ttft_s >= before - request.times.arrived_s
    answer.token_times.append(answer.token_times[0] + 0.01)
    assert request.gaps_s == pytest.approx([0.01])


def test_an_answer_taken_apart_again_has_another_id_on_the_wire() -> None:
    """Workers would take it for what they know."""
    request = Request("r", [1], [], f.Sampling(8, n=2))
    names = []
    for _ in range(2):
        request.begin_attempt()
        names += [request.part(index).wire_id for index in (0, 1)]
    assert len(set(names)) == 4
