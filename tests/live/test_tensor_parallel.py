"""Two ranks prefill, one decodes, on a real cluster: the tokens are those of one rank alone."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.learned import ANSWERS
from tests.support.live import Live, eventually, running

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

QUESTIONS = list(ANSWERS)[:24]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    log = tmp_path_factory.mktemp("tp") / "serve.log"
    with running(log, "--set", "pools.prefill.tensor_parallel=2") as cluster:
        yield cluster


def followers(worker: dict) -> list[int]:
    """Processes that a worker started: its ranks above 0."""
    children = f"/proc/{worker['pid']}/task"
    pids = []
    for task in os.listdir(children):
        with open(f"{children}/{task}/children") as file:
            pids += [int(pid) for pid in file.read().split()]
    return pids


def test_two_prefill_ranks_feed_one_decode_rank_token_for_token(live: Live) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(live.chat, QUESTIONS))
    for question, response in zip(QUESTIONS, answers, strict=True):
        body = response.json()
        assert body["choices"][0]["message"]["content"] == ANSWERS[question]
        assert response.headers["x-route"].startswith("prefill/")
    assert not live.worker("prefill")["transfer"]["failures"]
    eventually(live.idle)


def test_both_ranks_of_a_replica_send_their_heads(live: Live) -> None:
    live.chat(QUESTIONS[0])
    sent = eventually(lambda: live.worker("prefill")["transfer"]["bytes_sent"])
    received = live.worker("decode")["transfer"]["bytes_received"]
    eventually(lambda: live.worker("prefill")["transfer"]["bytes_sent"] == received)
    assert sent and len(followers(live.worker("prefill"))) == 1


@pytest.mark.slow
def test_a_dead_rank_is_a_dead_replica_and_the_next_one_serves(live: Live) -> None:
    before = live.worker("prefill")
    (follower,) = followers(before)
    os.kill(follower, signal.SIGKILL)
    response = live.chat(QUESTIONS[1])
    body = response.json()
    assert body["choices"][0]["message"]["content"] == ANSWERS[QUESTIONS[1]], json.dumps(body)

    def replaced() -> bool:
        workers = [w for w in live.status()["workers"] if w["home"] == "prefill"]
        return bool(workers) and all(w["pid"] != before["pid"] for w in workers)

    eventually(replaced, 90)
    assert (
        live.chat(QUESTIONS[2]).json()["choices"][0]["message"]["content"] == ANSWERS[QUESTIONS[2]]
    )
    eventually(live.idle)
