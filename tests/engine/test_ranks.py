"""Tensor parallelism: two processes with gloo compute what one computes."""

from __future__ import annotations

import datetime
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch
from diptych.engine.collectives import RankLost
from diptych.engine.engine import Engine, EngineOptions
from diptych.engine.errors import KernelUnavailable, UnsupportedModel
from diptych.engine.rank_processes import ComputeLogits, RankProcesses, _send
from diptych.engine.scheduler import SchedulerLimits
from diptych.protos.frames import Sampling

from . import rig

SLOW = pytest.mark.slow

#: A program that begins to read late, and prints the length of the first message.
READ_LATE = """
import sys, time
from diptych.engine.rank_processes import read_messages
time.sleep(0.3)
print(len(next(read_messages(sys.stdin.buffer))))
"""
TEXTS = [rig.prompt(n, seed) for n, seed in ((130, 1), (64, 2), (3, 3), (200, 4))]

#: A prompt that no engine has cached from another test.
UNSEEN = rig.prompt(130, 8)


@contextmanager
def on(ranks: int, folder: Path, dtype: str, **limits: int) -> Iterator[Engine]:
    config = EngineOptions(
        folder,
        dtype,
        64 << 20,
        rig.MAX_LEN,
        limits=SchedulerLimits(**limits),
        tensor_parallel=ranks,
    )
    engine = Engine(config)
    yield engine
    engine.close()


def answers(engine: Engine, sampling: Sampling, texts: list[list[int]] = TEXTS) -> dict:
    requests = [rig.request(engine, f"r{i}", ids, sampling) for i, ids in enumerate(texts)]
    return rig.finish(engine, requests)


@dataclass(frozen=True)
class Pair:
    """Two ranks of `llama` in float32 that tests share, and where this process listened before they began."""

    engine: Engine
    listening_before: set[tuple[str, int]]


def assert_equal_answers(one: Engine, two: Engine) -> None:
    assert two.kv_pool.layout.heads * 2 == one.kv_pool.layout.heads
    assert two.compatibility == one.compatibility, "KV may travel between the two"
    sampling = Sampling(20, logprobs=4)
    expected, found = answers(one, sampling), answers(two, sampling)
    for key, tokens in expected.items():
        assert [t.id for t in found[key]] == [t.id for t in tokens]
        for ours, theirs in zip(found[key], tokens, strict=True):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)


class TestOnePair:
    """What one pair of ranks shows to several tests, as it takes four seconds to start."""

    @pytest.fixture(scope="class")
    def pair(self, checkpoint) -> Iterator[Pair]:
        listening_before = set(_listening(psutil.Process()))
        with on(2, checkpoint("llama"), "float32") as engine:
            yield Pair(engine, listening_before)

    @pytest.fixture(scope="class")
    def alone(self, checkpoint) -> Iterator[Engine]:
        """One rank of the same."""
        with on(1, checkpoint("llama"), "float32") as engine:
            yield engine

    def test_two_ranks_answer_as_one(self, alone: Engine, pair: Pair) -> None:
        assert_equal_answers(alone, pair.engine)

    def test_ranks_meet_on_loopback(self, pair: Pair) -> None:
        """Neither the store nor gloo asks for a secret."""
        this_process = psutil.Process()
        processes = [this_process, *this_process.children()]
        found = {address for process in processes for address in _listening(process)}
        assert len(found - pair.listening_before) >= 3, "the store, and gloo in both ranks"
        assert {host for host, _ in found - pair.listening_before} == {"127.0.0.1"}

    def test_prompt_logprobs_are_joined_from_all_ranks(self, alone: Engine, pair: Pair) -> None:
        sampling = Sampling(1, prompt_logprobs=2)
        results = []
        for engine in (alone, pair.engine):
            engine.add(rig.request(engine, "logprobs", UNSEEN, sampling))
            _, seen = rig.drain(engine)
            results.append([token for output in seen for token in output.prompt_logprobs])
        assert [t.id for t in results[0]] == [t.id for t in results[1]] == UNSEEN[1:]
        for one, two in zip(*results, strict=True):
            assert one.logprob == pytest.approx(two.logprob, abs=1e-4)

    def test_several_answers_begin_on_every_rank(self, pair: Pair) -> None:
        engine = pair.engine
        engine.add(rig.request(engine, "several", rig.prompt(100, 9), Sampling(20, n=3)))
        answers: dict[int, list[int]] = {}
        while engine.scheduler.live:
            for output in engine.step():
                assert output.token is not None
                answers.setdefault(output.answer_index, []).append(output.token.id)
        assert answers[0] == answers[1] == answers[2]


@pytest.mark.parametrize(
    "name", ["qwen3_moe", *(pytest.param(n, marks=SLOW) for n in ("qwen2", "qwen3", "mixtral"))]
)
def test_two_ranks_of_other_architectures_answer_as_one(checkpoint, name: str) -> None:
    with on(1, checkpoint(name), "float32") as one, on(2, checkpoint(name), "float32") as two:
        assert_equal_answers(one, two)


@SLOW
def test_two_ranks_are_exact_in_bf16(checkpoint) -> None:
    sampling = Sampling(16, temperature=0.7, seed=3, logprobs=3)
    with on(2, checkpoint("llama"), "bfloat16", max_step_tokens=512) as pair:
        assert pair.exact
        together = answers(pair, sampling)
        for index, ids in enumerate(TEXTS):
            pair.scheduler.pool.release(
                pair.scheduler.pool.allocate(pair.scheduler.pool.total_blocks)
            )
            assert answers(pair, sampling, [ids])["r0"] == together[f"r{index}"]
    with on(2, checkpoint("llama"), "bfloat16", max_step_tokens=64) as pair:
        assert answers(pair, sampling) == together


def test_ranks_meet_on_loopback_whatever_the_environment_names(
    checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-device")
    with on(2, checkpoint("llama"), "float32") as pair:
        answers(pair, Sampling(2), TEXTS[2:3])


def _listening(process: psutil.Process) -> list[tuple[str, int]]:
    connections = process.net_connections("tcp")
    return [
        (connection.laddr.ip.removeprefix("::ffff:"), connection.laddr.port)
        for connection in connections
        if connection.status == psutil.CONN_LISTEN
    ]


def test_a_rank_that_cannot_start_is_named_at_once(checkpoint) -> None:
    config = EngineOptions(
        checkpoint("llama"), tensor_parallel=2, rank_program="diptych.engine.no_such_module"
    )
    with pytest.raises(RankLost, match="rank 1 of this replica has not started: it ended with 1"):
        Engine(config)


def test_a_rank_whose_leader_is_gone_ends_before_its_share_is_loaded(checkpoint) -> None:
    """A large share takes minutes to load, and its memory is needed for the next start."""
    config = EngineOptions(checkpoint("llama"), kv_bytes=64 << 20, tensor_parallel=2)
    ranks = RankProcesses.start(config)
    try:
        (follower,) = ranks.processes
        assert follower.poll() is None  # it waits for rank 0 to connect, and then loads
        assert follower.stdin
        follower.stdin.close()
        assert follower.wait(timeout=10) == 0
    finally:
        ranks.close()


def test_ranks_on_gpus_need_a_gpu_each(checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    config = EngineOptions(checkpoint("llama"), device="cuda", tensor_parallel=2, kv_bytes=64 << 20)
    with pytest.raises(KernelUnavailable, match="2 ranks need a GPU each: this process sees 1"):
        Engine(config)


@pytest.mark.parametrize(
    "way", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_the_end_of_a_rank_ends_the_replica(checkpoint, way: signal.Signals) -> None:
    with on(2, checkpoint("llama"), "bfloat16") as pair:
        answers(pair, Sampling(3))
        (follower,) = pair._model.rank_processes.processes
        os.kill(follower.pid, way)
        follower.wait(timeout=10)
        pair.add(rig.request(pair, "late", TEXTS[0], Sampling(3)))
        with pytest.raises(RankLost, match="of this replica"):
            rig.drain(pair)


def test_a_message_to_a_frozen_rank_ends_the_replica(
    checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message is larger than the pipe, so a blocking write would wait for ever."""
    with on(2, checkpoint("llama"), "bfloat16") as pair:
        processes = pair._model.rank_processes
        (follower,) = processes.processes
        follower.send_signal(signal.SIGSTOP)
        try:
            timeout = datetime.timedelta(seconds=0.3)
            monkeypatch.setattr("diptych.engine.rank_processes.COLLECTIVE_TIMEOUT", timeout)
            with pytest.raises(RankLost, match="of this replica reads nothing"):
                processes.broadcast(ComputeLogits(list(range(100_000))))
        finally:
            follower.kill()
            follower.wait(timeout=10)


def test_a_message_larger_than_the_pipe_reaches_a_rank_that_reads_late() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", READ_LATE], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdin and process.stdout
        os.set_blocking(process.stdin.fileno(), False)
        _send(process, bytes(1_000_000))
        assert int(process.stdout.readline()) == 1_000_000
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def test_ranks_end_with_their_engine(checkpoint) -> None:
    with on(2, checkpoint("llama"), "bfloat16") as pair:
        (follower,) = pair._model.rank_processes.processes
        assert follower.poll() is None
    assert follower.poll() == 0


def test_sizes_that_do_not_divide_are_named(checkpoint) -> None:
    config = EngineOptions(checkpoint("llama"), tensor_parallel=3)
    with pytest.raises(UnsupportedModel, match="num_attention_heads 4 cannot be shared by 3"):
        Engine(config)
