"""Grammars that somebody made to be slow: refused by the gateway, and off every engine's thread."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from diptych.cluster.gateway.errors import ApiError
from diptych.cluster.gateway.text import grammars
from diptych.cluster.gateway.text.grammars import GrammarChecks
from diptych.cluster.worker import grammars as queues
from diptych.cluster.worker.grammars import GrammarQueue
from diptych.engine.demo import CHECKPOINT
from diptych.engine.priority import COMPUTE_NICENESS
from diptych.protos import frames as f

from tests.support.standin import QUESTION, checkpoint, standing_in

#: A few hundred characters, and minutes of one core.
SLOW_SCHEMA = {
    "allOf": [{"type": "string", "pattern": f".*{chr(97 + index)}.{{10}}"} for index in range(20)]
}
SLOW = f.Grammar("json_schema", json.dumps(SLOW_SCHEMA))
QUICK = f.Grammar("regex", "[a-z]{3}")


async def test_the_wait_for_a_grammar_counts_in_the_deadline() -> None:
    may_end = threading.Event()
    begun: asyncio.Queue[f.StartPrefill] = asyncio.Queue()
    engine = SimpleNamespace(
        has_grammar=lambda grammar: False, compile_grammar=lambda grammar: may_end.wait(30)
    )
    queue = GrammarQueue(
        engine,  # type: ignore[arg-type]
        lambda gateway, frame: begun.put_nowait(frame),
        lambda *refused: None,
    )
    sampling = f.Sampling(1, grammar=QUICK)
    for number, deadline_s in enumerate((0.0, 0.05, 60.0)):
        frame = f.StartPrefill(("r", number), 1, [1], sampling, "d", deadline_s=deadline_s)
        queue.begin_when_compiled("gateway/a", frame)
    began_s = time.monotonic()
    await asyncio.sleep(0.2)
    may_end.set()
    async with asyncio.timeout(20):
        none, over, far = [(await begun.get()).deadline_s for _ in range(3)]
    assert none == 0.0 and over == 1e-3
    assert 60.0 - (time.monotonic() - began_s) - 0.1 <= far <= 59.81


async def test_grammars_compile_behind_what_carries_messages() -> None:
    niceness: list[int] = []
    begun: asyncio.Queue[f.StartPrefill] = asyncio.Queue()
    engine = SimpleNamespace(
        has_grammar=lambda grammar: False,
        compile_grammar=lambda grammar: niceness.append(os.nice(0)),
    )
    queue = GrammarQueue(
        engine,  # type: ignore[arg-type]
        lambda gateway, frame: begun.put_nowait(frame),
        lambda *refused: None,
    )
    sampling = f.Sampling(1, grammar=QUICK)
    queue.begin_when_compiled("g", f.StartPrefill(("r", 0), 1, [1], sampling, "d"))
    async with asyncio.timeout(20):
        await begun.get()
    assert niceness == [min(19, os.nice(0) + COMPUTE_NICENESS)]


async def test_any_number_of_grammars_that_nobody_awaits_any_more_is_passed_over() -> None:
    may_end = threading.Event()
    begun: asyncio.Queue[tuple[str, int]] = asyncio.Queue()
    engine = SimpleNamespace(
        has_grammar=lambda grammar: False, compile_grammar=lambda grammar: may_end.wait(30)
    )
    queue = GrammarQueue(
        engine,  # type: ignore[arg-type]
        lambda gateway, frame: begun.put_nowait(frame.attempt_key),
        lambda *refused: None,
    )

    def begin(gateway: str, number: int) -> None:
        sampling = f.Sampling(1, grammar=f.Grammar("regex", str(number)))
        frame = f.StartPrefill((gateway, number), 1, [1], sampling, "decode/a")
        queue.begin_when_compiled(gateway, frame)

    for number in range(1300):
        begin("gone", number)
    begin("here", 1300)
    queue.forget_gateway("gone")
    may_end.set()
    async with asyncio.timeout(20):
        assert await begun.get() == ("here", 1300)


def test_a_grammar_is_compiled_within_a_limit_and_others_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grammars, "COMPILE_LIMIT_S", 1.0)
    checks = GrammarChecks(CHECKPOINT)
    checks.check(QUICK)
    began_s = time.monotonic()
    with pytest.raises(ApiError, match="it takes more than 1 s") as error:
        checks.check(SLOW)
    assert error.value.reason == "invalid_request" and time.monotonic() - began_s < 20
    assert checks.is_known(SLOW) and checks.is_known(QUICK)
    with pytest.raises(ApiError, match="it takes more than 1 s"):
        checks.check(SLOW)
    checks.check(f.Grammar("regex", "[0-9]"))  # another process took the place of the killed one
    with pytest.raises(ApiError, match="invalid grammar"):
        checks.check(f.Grammar("regex", "(" * 9))
    checks.close()


def test_a_checkpoint_that_cannot_be_read_is_no_fault_of_the_grammar(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = checkpoint(tmp_path / "demo")
    checks = GrammarChecks(folder)
    (folder / "config.json").rename(folder / "away")
    with pytest.raises(ApiError, match="no process got ready for it") as error:
        checks.check(QUICK)
    assert error.value.reason == "no_capacity" and str(folder) not in error.value.message
    assert str(folder) in caplog.text and not checks.is_known(QUICK)
    (folder / "away").rename(folder / "config.json")
    checks.check(QUICK)
    assert checks.is_known(QUICK)
    checks.close()


def test_a_gateway_refuses_a_slow_grammar_and_answers_others_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "COMPILE_LIMIT_S", 2.0)
    with standing_in(checkpoint(tmp_path / "demo")) as gateway:
        body: dict[str, Any] = {"messages": [{"role": "user", "content": QUESTION}]}
        assert httpx.post(f"{gateway.url}/v1/chat/completions", json=body).status_code == 200
        statuses: list[int] = []

        def ask_slowly() -> None:
            slow = body | {"guided_json": SLOW_SCHEMA}
            answer = httpx.post(f"{gateway.url}/v1/chat/completions", json=slow, timeout=60)
            statuses.append(answer.status_code)

        asking = threading.Thread(target=ask_slowly)
        asking.start()
        others = 0
        while asking.is_alive():
            answer = httpx.post(f"{gateway.url}/v1/chat/completions", json=body, timeout=10)
            assert answer.status_code == 200
            others += asking.is_alive()
        assert statuses == [400] and others > 3
        assert not gateway.workers.tasks, "nothing of it reached a worker"


class SlowEngine:
    """Compiles when it is told to."""

    def __init__(self) -> None:
        self.compiled: set[f.Grammar] = set()
        self.go_on = threading.Event()
        self.threads: list[int] = []

    def has_grammar(self, grammar: f.Grammar) -> bool:
        return grammar in self.compiled

    def compile_grammar(self, grammar: f.Grammar) -> None:
        self.threads.append(threading.get_ident())
        assert self.go_on.wait(10)
        self.compiled.add(grammar)


def start_of(name: str, grammar: f.Grammar | None) -> f.StartDecode:
    sampling = f.Sampling(9, grammar=grammar)
    return f.StartDecode((name, 0), 1, [1, 2], sampling, None)


def run(test: Callable[[GrammarQueue, SlowEngine, SimpleNamespace], Any]) -> None:
    async def bounded() -> None:
        engine = SlowEngine()
        noted = SimpleNamespace(began=[], refused=[])
        queue = GrammarQueue(
            engine,  # type: ignore[arg-type]
            begin=lambda _, frame: noted.began.append(frame.attempt_key[0]),
            refuse=lambda _, key, reason, final: noted.refused.append((key[0], reason, final)),
        )
        async with asyncio.timeout(20):
            await test(queue, engine, noted)

    asyncio.run(bounded())


async def until(holds: Callable[[], bool]) -> None:
    for _ in range(2000):
        if holds():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it never came to be")


def test_an_attempt_begins_when_another_thread_has_compiled_its_grammar() -> None:
    async def test(queue: GrammarQueue, engine: SlowEngine, noted: SimpleNamespace) -> None:
        for name in ("one", "same", "one"):
            queue.begin_when_compiled("g", start_of(name, SLOW))
        queue.begin_when_compiled("g", start_of("cancelled", SLOW))
        queue.begin_when_compiled("lost", start_of("orphan", SLOW))
        queue.begin_when_compiled("g", start_of("plain", None))
        assert noted.began == ["plain"] and len(queue) == 4
        assert queue.forget(("cancelled", 0)) and not queue.forget(("cancelled", 0))
        queue.forget_gateway("lost")
        engine.go_on.set()
        await until(lambda: not len(queue))
        assert noted.began == ["plain", "one", "same"] and not noted.refused
        assert len(engine.threads) == 1 and threading.get_ident() not in engine.threads
        queue.begin_when_compiled("g", start_of("later", SLOW))
        assert noted.began[-1] == "later"

    run(test)


def test_an_attempt_that_waits_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queues, "COMPILE_LIMIT_S", 0.05)

    async def test(queue: GrammarQueue, engine: SlowEngine, noted: SimpleNamespace) -> None:
        queue.begin_when_compiled("g", start_of("slow", SLOW))
        await until(lambda: bool(noted.refused))
        ((name, reason, final),) = noted.refused
        assert name == "slow" and "takes more than 0.05 s" in reason and final
        assert not len(queue) and not noted.began
        engine.go_on.set()
        await until(lambda: not queue._compiling)

    run(test)


def test_a_grammar_behind_slow_ones_is_not_at_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queues, "COMPILE_LIMIT_S", 0.05)

    async def test(queue: GrammarQueue, engine: SlowEngine, noted: SimpleNamespace) -> None:
        for number in range(queues.THREADS):
            grammar = f.Grammar("regex", f"a{number}")
            queue.begin_when_compiled("g", start_of(f"slow {number}", grammar))
        queue.begin_when_compiled("g", start_of("behind", QUICK))
        await until(lambda: len(noted.refused) == queues.THREADS + 1)
        assert [final for _, _, final in noted.refused] == [True] * queues.THREADS + [False]
        assert "other grammars" in noted.refused[-1][1]
        engine.go_on.set()
        await until(lambda: not queue._compiling)

    run(test)


def test_a_grammar_that_was_begun_late_is_not_at_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queues, "COMPILE_LIMIT_S", 0.05)
    monkeypatch.setattr(queues, "THREADS", 1)

    async def test(queue: GrammarQueue, engine: SlowEngine, noted: SimpleNamespace) -> None:
        wait = engine.compile_grammar
        engine.compile_grammar = lambda grammar: (  # type: ignore[method-assign]
            time.sleep(0.02) if grammar is QUICK else wait(grammar)
        )
        queue.begin_when_compiled("g", start_of("first", QUICK))
        queue.begin_when_compiled("g", start_of("behind", SLOW))
        await until(lambda: bool(noted.refused))
        assert noted.refused[-1][0] == "behind" and not noted.refused[-1][2]
        engine.go_on.set()
        await until(lambda: not queue._compiling)

    run(test)


def test_those_that_wait_are_handed_over() -> None:
    async def test(queue: GrammarQueue, engine: SlowEngine, noted: SimpleNamespace) -> None:
        for number in range(4):
            grammar = f.Grammar("regex", f"a{number}")
            queue.begin_when_compiled("g", start_of(f"r{number}", grammar))
        handed_over = [attempt.frame.attempt_key[0] for attempt in queue.forget_all()]
        assert handed_over == ["r0", "r1", "r2", "r3"] and not len(queue)
        engine.go_on.set()
        await until(lambda: len(engine.compiled) == queues.THREADS and not queue._compiling)
        assert len(engine.threads) == queues.THREADS, "what nobody waits for is not compiled"
        assert not noted.began

    run(test)
