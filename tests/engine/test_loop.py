"""The engine thread: commands in, outcomes out through `deliver`."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from diptych.engine import commands, loop
from diptych.engine.engine import Engine, EngineOptions
from diptych.engine.loop import EngineThread
from diptych.engine.priority import COMPUTE_NICENESS
from diptych.engine.sequence import BlocksFilled, SequenceOutput
from diptych.protos.frames import Sampling

from .rig import alone, engine, prompt, request

PATIENCE_S = 60.0


class BlockedEngine:
    """An engine with work that no step gets done, as all blocks are in use."""

    cores = ()
    core_sharing: Any = None
    kv_pool = SimpleNamespace(memory="VRAM")

    def __init__(self) -> None:
        self.steps = 0
        self.announce_filled: Any = None
        self.thread: Any = None

    def step(self) -> list[Any]:
        self.steps += 1
        return []

    def idle(self) -> bool:
        return False

    def pin_for_demotion(self) -> list[Any]:
        return []

    def release(self, attempt_key: object) -> None:
        """Nothing is here to be released."""


class Harness:
    """A running engine thread and everything that it delivered."""

    def __init__(self, folder: Path, **limits: float) -> None:
        self.engine = engine(folder, **limits)
        self.inbox: queue.SimpleQueue[list] = queue.SimpleQueue()
        self.thread = EngineThread(self.engine, self.inbox.put)
        self.thread.start()
        self.seen: list[Any] = []
        self.told: list[Any] = []

    def until(self, wanted: Callable[[Any], bool]) -> Any:
        """The first outcome that is wanted; all before it are dropped; `told` has all."""
        while True:
            while self.seen:
                outcome = self.seen.pop(0)
                if wanted(outcome):
                    return outcome
            fresh = self.inbox.get(timeout=PATIENCE_S)
            self.seen += fresh
            self.told += fresh

    def tokens(self, name: str) -> list:
        """All tokens of a request, to its end."""
        tokens = []
        while True:
            output = self.until(
                lambda o: isinstance(o, SequenceOutput) and o.attempt_key[0] == name and o.token
            )
            tokens.append(output.token)
            if output.finish_reason:
                return tokens

    def observe(self) -> commands.EngineObservation:
        self.thread.submit(commands.ObserveEngine())
        return self.until(lambda o: isinstance(o, commands.EngineObservation))

    def reserve(self, seq) -> commands.BlocksReserved:
        self.thread.submit(commands.ReserveBlocks(seq))
        return self.until(
            lambda o: isinstance(o, commands.BlocksReserved) and o.attempt_key == seq.attempt_key
        )


@pytest.fixture
def harness(checkpoint) -> Iterator[Harness]:
    made = Harness(checkpoint("llama"))
    yield made
    made.thread.stop()
    assert not made.thread.alive


def test_an_added_sequence_is_answered_to_its_end(harness: Harness) -> None:
    seq = request(harness.engine, "a", prompt(600), Sampling(20))
    harness.thread.submit(commands.AddSequence(seq))
    assert harness.tokens("a") == alone(
        engine(harness.engine.options.model_folder), seq.token_ids[:600], Sampling(20)
    )


def test_the_thread_and_no_other_is_bound_to_the_engine_s_cores(checkpoint) -> None:
    core, mine = max(os.sched_getaffinity(0)), os.sched_getaffinity(0)
    owner = Engine(EngineOptions(checkpoint("llama"), cores=(core,)))
    where: queue.SimpleQueue[set[int]] = queue.SimpleQueue()
    thread = EngineThread(owner, lambda _: where.put(os.sched_getaffinity(0)))
    thread.start()
    thread.submit(commands.ObserveEngine())
    assert where.get(timeout=PATIENCE_S) == {core}
    assert os.sched_getaffinity(0) == mine
    assert owner.statistics()["cores"] == [core]
    thread.stop()


class NotedSharing:
    """What an engine's thread does with the sharing of cores, and the thread that did it."""

    def __init__(self) -> None:
        self.calls: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()

    def lend(self) -> None:
        self._note("lend")

    def take_back(self) -> None:
        self._note("take back")

    def _note(self, call: str) -> None:
        self.calls.put((call, threading.current_thread().name))

    def calls_to(self, last: str) -> list[tuple[str, str]]:
        """All calls to the next one of this name, each with its thread."""
        calls = [self.calls.get(timeout=PATIENCE_S)]
        while calls[-1][0] != last:
            calls.append(self.calls.get(timeout=PATIENCE_S))
        return calls


def test_the_thread_lends_its_cores_while_it_sleeps_and_no_longer(checkpoint) -> None:
    owner = engine(checkpoint("llama"))
    sharing = NotedSharing()
    owner.core_sharing = sharing  # type: ignore[assignment]
    thread = EngineThread(owner, lambda _: None)
    thread.start()
    assert sharing.calls_to("lend") == [("take back", "engine"), ("lend", "engine")]
    thread.submit(commands.ObserveEngine())
    # by who sends the command, as the core may be busy with somebody else's work
    assert sharing.calls_to("lend") == [
        ("take back", threading.current_thread().name),
        ("take back", "engine"),
        ("lend", "engine"),
    ]
    thread.stop()
    assert [call for call, _ in sharing.calls_to("take back")] == ["take back"]


def test_a_pause_for_transfers_lends_nothing(
    blocked: BlockedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is a millisecond, in which a borrower would hardly begin."""
    blocked.core_sharing = sharing = NotedSharing()
    blocked.thread.start()
    sharing.calls_to("take back")
    deadline = time.monotonic() + PATIENCE_S
    while blocked.steps < 5 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert sharing.calls.empty()


def test_it_sleeps_and_wakes_up_again(harness: Harness) -> None:
    for name in ("a", "b"):
        harness.thread.submit(
            commands.AddSequence(request(harness.engine, name, prompt(5), Sampling(3)))
        )
        assert len(harness.tokens(name)) == 3
        assert harness.thread.alive


def test_a_dropped_sequence_gives_its_blocks_back(harness: Harness) -> None:
    before = harness.observe().free_blocks
    seq = request(harness.engine, "a", prompt(100), Sampling(900))
    harness.thread.submit(commands.AddSequence(seq))
    harness.until(lambda o: isinstance(o, SequenceOutput))
    assert harness.observe().free_blocks < before
    harness.thread.submit(commands.ReleaseSequence(("a", 0)))
    assert harness.observe().free_blocks == before


def test_dropping_what_is_gone_changes_nothing(harness: Harness) -> None:
    harness.thread.submit(commands.ReleaseSequence(("nobody", 0)))
    harness.thread.submit(
        commands.AddSequence(request(harness.engine, "a", prompt(5), Sampling(2)))
    )
    assert len(harness.tokens("a")) == 2


def test_reserved_blocks_are_named_and_refused_when_there_are_none(harness: Harness) -> None:
    big = Sampling(500)
    names = [f"r{index}" for index in range(30)]
    answers = [harness.reserve(request(harness.engine, n, prompt(250), big)) for n in names]
    blocks = [block for answer in answers for block in answer.blocks or []]
    assert len(blocks) == len(set(blocks)) and 0 not in blocks
    refused = [answer.blocks is None for answer in answers]
    assert refused == [False] * 14 + [True] * 16, "8 of 120 blocks each, and 3 are kept for growth"
    harness.thread.submit(commands.ReleaseSequence((names[0], 0)))
    assert harness.reserve(request(harness.engine, "again", prompt(250), big)).blocks


def test_a_committed_sequence_goes_on_from_its_last_id(harness: Harness) -> None:
    seq = request(harness.engine, "a", prompt(1), Sampling(5))
    assert harness.reserve(seq).blocks
    seq.token_ids.append(9)
    harness.thread.submit(commands.CommitBlocks(seq))
    assert len(harness.tokens("a")) == 4
    assert len(seq.token_ids) == 6


def test_a_committed_sequence_has_waited_for_its_kv_and_for_the_thread(harness: Harness) -> None:
    seq = request(harness.engine, "a", prompt(1), Sampling(5))
    assert harness.reserve(seq).blocks
    seq.token_ids.append(9)
    release, begun = threading.Event(), time.perf_counter()
    harness.engine.release = lambda _: release.wait(PATIENCE_S)  # the thread is busy
    harness.thread.submit(commands.ReleaseSequence(("nobody", 0)))
    harness.thread.submit(commands.CommitBlocks(seq, waited_s=2.0))
    time.sleep(0.05)
    release.set()
    harness.tokens("a")
    assert 2.05 <= seq.waited_s <= 2.0 + time.perf_counter() - begun


def test_observations_tell_how_long_a_step_is_planned_to_take(checkpoint) -> None:
    made = Harness(checkpoint("llama"), itl_budget_s=0.2)
    assert made.observe().step_s == 0.2
    made.engine.scheduler.cost.tail_ratio = 1.25
    assert made.observe().step_s == pytest.approx(0.16)
    made.thread.stop()


def test_observations_tell_the_cache_and_the_work_since_the_last_one(harness: Harness) -> None:
    assert harness.observe().hashes == []
    seq = request(harness.engine, "a", prompt(200), Sampling(2))
    harness.thread.submit(commands.AddSequence(seq))
    harness.tokens("a")
    seen = harness.observe()
    assert (
        set(seen.hashes) == set(seen.stored) == set(seq.block_hashes) and len(seq.block_hashes) == 3
    )
    assert seen.evicted == [] and seen.prefill_tokens == 200 and seen.prefill_s > 0
    again = harness.observe()
    assert again.stored == [] and set(again.hashes) == set(seq.block_hashes)


def test_a_prefill_tells_its_blocks_chunk_by_chunk_and_piece_by_piece(harness: Harness) -> None:
    seq = request(harness.engine, "a", prompt(600), Sampling(20), first_only=True)
    harness.thread.submit(commands.AddSequence(seq))
    last = harness.until(lambda o: isinstance(o, SequenceOutput))
    assert last.token is not None and last.finish_reason is None
    told = [one for one in harness.told if isinstance(one, BlocksFilled)]
    pieces = list(range(harness.engine.piece_count))
    assert [one.piece for one in told] == pieces + pieces
    chunks = [(one.first_block, len(one.blocks)) for one in told]
    assert chunks == [(0, 8)] * len(pieces) + [(8, 2)] * len(pieces)  # 512 tokens a step
    assert told[0].blocks + told[-1].blocks == seq.blocks


def test_blocks_that_are_known_are_told_at_once_in_all_layers(harness: Harness) -> None:
    for name in "ab":
        seq = request(harness.engine, name, prompt(300), Sampling(20), first_only=True)
        harness.thread.submit(commands.AddSequence(seq))
        harness.until(
            lambda o, key=seq.attempt_key: isinstance(o, SequenceOutput) and o.attempt_key == key
        )
    told = [
        one for one in harness.told if isinstance(one, BlocksFilled) and one.attempt_key == ("b", 0)
    ]
    assert (told[0].first_block, told[0].piece, len(told[0].blocks)) == (0, -1, 4)
    assert {(one.first_block, len(one.blocks)) for one in told[1:]} == {(4, 1)}


def test_it_stops_in_the_middle_of_work(checkpoint) -> None:
    made = Harness(checkpoint("llama"))
    made.thread.submit(commands.AddSequence(request(made.engine, "a", prompt(100), Sampling(900))))
    made.until(lambda o: isinstance(o, SequenceOutput))
    made.thread.stop()
    assert not made.thread.alive


def niceness(thread: EngineThread) -> int:
    assert thread._thread.native_id is not None
    return os.getpriority(os.PRIO_PROCESS, thread._thread.native_id)


def test_a_thread_that_computes_on_cpus_goes_behind_those_that_carry_messages(
    harness: Harness,
) -> None:
    harness.observe()
    assert niceness(harness.thread) == min(
        19, os.getpriority(os.PRIO_PROCESS, 0) + COMPUTE_NICENESS
    )


def test_so_do_the_threads_that_compute_with_it(checkpoint) -> None:
    mine = os.getpriority(os.PRIO_PROCESS, 0)
    before = set(os.listdir("/proc/self/task"))
    owner = Engine(EngineOptions(checkpoint("llama"), threads=2))
    inbox: queue.SimpleQueue[list] = queue.SimpleQueue()
    thread = EngineThread(owner, inbox.put)
    thread.start()
    thread.submit(commands.AddSequence(request(owner, "a", prompt(600), Sampling(2))))
    while not any(
        isinstance(o, SequenceOutput) and o.finish_reason for o in inbox.get(timeout=PATIENCE_S)
    ):
        pass
    new = set(os.listdir("/proc/self/task")) - before - {str(thread._thread.native_id)}
    computing = []
    for task in new:
        with suppress(ProcessLookupError):  # a thread that has ended meanwhile
            if os.getpriority(os.PRIO_PROCESS, int(task)) > mine:
                computing.append(task)
    thread.stop()
    assert computing, "OpenMP's threads inherit the priority of the thread that starts them"


def test_a_thread_that_drives_a_gpu_keeps_its_priority(blocked: BlockedEngine) -> None:
    blocked.thread.start()
    deadline = time.monotonic() + PATIENCE_S
    while not blocked.steps:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert niceness(blocked.thread) == os.getpriority(os.PRIO_PROCESS, 0)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_broken_contract_ends_the_thread_where_it_can_be_seen(checkpoint) -> None:
    made = Harness(checkpoint("llama"))
    made.thread.submit("not a command")
    made.thread._thread.join(PATIENCE_S)
    assert not made.thread.alive


@pytest.fixture
def blocked(monkeypatch: pytest.MonkeyPatch) -> Iterator[BlockedEngine]:
    monkeypatch.setattr(loop, "enter_device", lambda pool: None)
    made = BlockedEngine()
    made.thread = EngineThread(made, lambda events: None)  # type: ignore[arg-type]
    yield made
    made.thread.stop()
    assert not made.thread.alive


def test_it_does_not_spin_while_steps_bring_nothing(blocked: BlockedEngine) -> None:
    """Transfers hold the blocks, and to end they need the interpreter."""
    began = time.perf_counter()
    blocked.thread.start()
    time.sleep(0.2)
    seconds = time.perf_counter() - began
    assert 2 < blocked.steps <= 3 + seconds / 1e-3, "it steps more than once in a millisecond"


def test_a_command_ends_the_pause_and_two_steps_follow_at_once(
    blocked: BlockedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first one vLLM takes note of KV that has arrived, in the second it computes."""
    monkeypatch.setattr(loop, "FRUITLESS_ROUND_S", 2 * PATIENCE_S)
    deadline = time.monotonic() + PATIENCE_S
    blocked.thread.start()
    for commands_sent in range(3):
        expected = 2 * (commands_sent + 1)
        while blocked.steps < expected and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.02)
        assert blocked.steps == expected
        blocked.thread.submit(commands.ReleaseSequence(("nobody", 0)))
