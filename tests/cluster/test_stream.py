"""One request over several attempts: dedupe, order, retries. The plane is scripted."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
from diptych.cluster.gateway.errors import ApiError
from diptych.cluster.gateway.stream import Generator, Request
from diptych.protos import frames as f


class ScriptedPlane:
    """Answers `place` and `submit` with what the script says; the rest is as in `Plane`."""

    def __init__(self, script: Callable[[ScriptedPlane, Any], None]) -> None:
        self.script, self.link, self.cards = script, self, {}
        self.inbox: asyncio.Queue = asyncio.Queue()
        self.said: list = []

    def watch(self, key: f.Key) -> asyncio.Queue:
        self.inbox = asyncio.Queue()
        return self.inbox

    def place(self, frame: f.Place) -> None:
        self.said.append(frame)
        self.script(self, frame)

    def submit(self, worker: str, frame: Any) -> None:
        self.said.append(frame)
        self.script(self, frame)

    def connected(self, worker: str) -> bool:
        return False

    def send(self, frame: Any) -> None:
        self.said.append(frame)

    def forget(self, over: f.Over, abort: bool) -> None:
        self.said += [("aborted" if abort else "over", over.key), over]

    def put(self, *frames: Any) -> None:
        for frame in frames:
            self.inbox.put_nowait(frame)


def placed(key: f.Key, local: bool = False) -> f.Placed:
    return f.Placed(key, 1, None if local else "p", "d", 0, 0.0)


def tokens(key: f.Key, offset: int, *ids: int, finish: str | None = None) -> f.Tokens:
    return f.Tokens(key, offset, [f.Token(i) for i in ids], finish)


def run(
    script: Callable, attempts: int = 3, sampling: f.Sampling | None = None
) -> tuple[list[int], ScriptedPlane, Request]:
    async def collect() -> tuple[list[int], ScriptedPlane, Request]:
        plane = ScriptedPlane(script)
        request = Request("r", [1, 2, 3], [], sampling or f.Sampling(8))
        request.wire = "r"
        got: list[int] = []
        async with asyncio.timeout(5):
            generator = Generator(plane, attempts, 5.0)  # type: ignore[arg-type]
            async for batch in generator.run(request):
                got += [token.id for news in batch for token in news.tokens]
        return got, plane, request

    return asyncio.run(collect())


def test_first_token_comes_from_prefill_and_the_rest_from_decode() -> None:
    def script(plane: ScriptedPlane, frame: Any) -> None:
        if isinstance(frame, f.Place):
            plane.put(placed(frame.key))
        elif isinstance(frame, f.Prefill):
            plane.put(tokens(frame.key, 0, 10), tokens(frame.key, 1, 11, 12, finish="stop"))

    got, plane, request = run(script)
    assert got == [10, 11, 12] and request.route == "p,d"
    assert plane.said[-2] == ("over", ("r", 0)), "an answer that ended is not aborted"


def test_tokens_that_overtake_the_first_one_wait_for_it() -> None:
    def script(plane: ScriptedPlane, frame: Any) -> None:
        if isinstance(frame, f.Place):
            plane.put(placed(frame.key))
        elif isinstance(frame, f.Prefill):
            plane.put(tokens(frame.key, 2, 12, finish="length"), tokens(frame.key, 1, 11))
            plane.put(tokens(frame.key, 0, 10))

    got, _, request = run(script)
    assert got == [10, 11, 12] and request.finish == "length"


def test_a_second_attempt_repeats_nothing_and_loses_nothing() -> None:
    def script(plane: ScriptedPlane, frame: Any) -> None:
        if isinstance(frame, f.Place):
            plane.put(placed(frame.key))
        elif isinstance(frame, f.Prefill) and frame.key[1] == 0:
            plane.put(tokens(frame.key, 0, 10), tokens(frame.key, 1, 11))
            plane.put(f.Failed(frame.key, "d", "worker_lost"))
        elif isinstance(frame, f.Prefill):
            plane.put(tokens(frame.key, 0, 10), tokens(frame.key, 1, 11, 12))
            plane.put(tokens(frame.key, 3, 13, finish="stop"))

    got, plane, request = run(script)
    assert got == [10, 11, 12, 13] and request.attempts == 2
    places = [frame for frame in plane.said if isinstance(frame, f.Place)]
    assert [place.lost for place in places] == [[], ["d"]], "a dead worker is not asked again"
    assert ("aborted", ("r", 0)) in plane.said, "the other worker is told of the failed attempt"
    first, second = (frame for frame in plane.said if isinstance(frame, f.Over))
    assert (first.reason, first.tokens, second.reason, second.tokens) == (
        "worker_lost",
        2,
        "stop",
        4,
    )
    assert (second.ttft_ms or 0) >= 0 and (second.itl_p99_ms or -1) >= 0
    assert places[1].waited_s > places[0].waited_s >= 0, "a retry keeps its deadline"


def test_a_prefill_worker_lost_after_the_first_token_is_no_failure() -> None:
    def script(plane: ScriptedPlane, frame: Any) -> None:
        if isinstance(frame, f.Place):
            plane.put(placed(frame.key))
        elif isinstance(frame, f.Prefill):
            plane.put(tokens(frame.key, 0, 10), f.Failed(frame.key, "p", "worker_lost"))
            plane.put(tokens(frame.key, 1, 11, finish="stop"))

    got, _, request = run(script)
    assert got == [10, 11] and request.attempts == 1


def test_the_last_attempt_does_without_a_transfer_then_the_client_is_told() -> None:
    def script(plane: ScriptedPlane, frame: Any) -> None:
        if isinstance(frame, f.Place):
            plane.put(placed(frame.key, frame.local))
        elif isinstance(frame, f.Decode):
            plane.put(f.Failed(frame.key, "d", "kv_checksum"))

    with pytest.raises(ApiError) as error:
        run(script)
    assert error.value.reason == "kv_transfer_failed"
    assert "gave up after 3 attempts" in error.value.message


def test_a_refusal_reaches_the_client_with_its_retry_time() -> None:
    def script(plane: ScriptedPlane, frame: Any) -> None:
        plane.put(f.Refused(frame.key, "queue_full", "9 requests wait already", 2.0))

    with pytest.raises(ApiError) as error:
        run(script)
    assert error.value.kind.http == 429 and error.value.headers() == {"retry-after": "2"}


def test_a_frame_of_an_older_stream_does_not_end_the_wait_for_a_place() -> None:
    def script(plane: ScriptedPlane, frame: Any) -> None:
        if isinstance(frame, f.Place):
            plane.put(f.Failed(frame.key, "d", "late"), placed(frame.key))
        elif isinstance(frame, f.Prefill):
            plane.put(tokens(frame.key, 0, 10, finish="stop"))

    assert run(script)[0] == [10]


def test_two_runs_of_one_request_id_are_different_attempts_on_the_wire() -> None:
    first, second = (Request("same", [1], [], f.Sampling(1)) for _ in range(2))
    assert first.wire != second.wire and first.id == second.id


def repeated(answers: list[list[int]], order: random.Random) -> Callable:
    """Attempts that fail after some frames; each repeats all answers, in any order of frames."""

    def script(plane: ScriptedPlane, frame: Any) -> None:
        if isinstance(frame, f.Place):
            plane.put(placed(frame.key))
        elif isinstance(frame, f.Prefill):
            scored = [f.Tokens(frame.key, 0, [], prompt=[f.Token(one, -1.0)]) for one in (2, 3)]
            told = []
            for index, ids in enumerate(answers):
                at = 0
                while at < len(ids):
                    size = 1 if at == 0 else order.randint(1, 3)
                    end = "stop" if at + size >= len(ids) else None
                    piece = [f.Token(one) for one in ids[at : at + size]]
                    told.append(f.Tokens(frame.key, at, piece, end, index))
                    at += size
            order.shuffle(told)
            told = [*scored, *told]
            if frame.key[1] < 2:
                told = told[: order.randint(0, len(told) - 1)]
                told.append(f.Failed(frame.key, "d", "worker_lost"))
            plane.put(*told)

    return script


@pytest.mark.parametrize("seed", range(40))
def test_each_answer_has_its_own_journal_over_all_attempts(seed: int) -> None:
    order = random.Random(seed)
    answers = [[index * 100 + at for at in range(order.randint(1, 9))] for index in range(3)]
    sampling = f.Sampling(16, n=3, prompt_logprobs=0)
    got, _, request = run(repeated(answers, order), 4, sampling)
    assert sorted(got) == sorted(one for ids in answers for one in ids), "lost or told twice"
    assert [[one.id for one in answer.journal] for answer in request.answers] == answers
    assert all(got.index(a) < got.index(b) for ids in answers for a, b in itertools.pairwise(ids))
    assert [token.id for token in request.prompt] == [2, 3]
    assert request.finish == "stop" and request.generated == len(got)


def test_an_answer_that_was_cut_ends_the_attempt_and_tells_the_workers() -> None:
    async def collect() -> ScriptedPlane:
        def script(plane: ScriptedPlane, frame: Any) -> None:
            if isinstance(frame, f.Place):
                plane.put(placed(frame.key))
            elif isinstance(frame, f.Prefill):
                plane.put(tokens(frame.key, 0, 10))

        plane = ScriptedPlane(script)
        request = Request("r", [1, 2, 3], [], f.Sampling(8))
        request.wire = "r"
        async with asyncio.timeout(5):
            async for _ in Generator(plane, 3, 5.0).run(request):  # type: ignore[arg-type]
                request.answers[0].cut = True
        assert request.finish == "stop"
        return plane

    assert ("aborted", ("r", 0)) in asyncio.run(collect()).said
