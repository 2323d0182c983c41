"""A gateway's own first requests: they go the clients' way, and count for nobody."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from diptych.cluster.gateway import rehearsal
from diptych.protos import frames as f

from ..support import standin
from ..support.standin import StandIn, Workers, standing_in


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return standin.checkpoint(tmp_path_factory.mktemp("rehearsal") / "demo")


@pytest.fixture
def placed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ids of the requests that were placed, in order."""
    ids: list[str] = []
    place = Workers.place

    def noted(workers: Workers, frame: f.PlaceAttempt) -> None:
        ids.append(frame.attempt_key[0])
        place(workers, frame)

    monkeypatch.setattr(Workers, "place", noted)
    return ids


def ready(gateway: StandIn) -> dict[str, Any]:
    answer: dict[str, Any] = httpx.get(f"{gateway.url}/ready", trust_env=False).json()
    return answer


def wait_until_ready(gateway: StandIn) -> None:
    deadline = time.monotonic() + 30
    while ready(gateway)["status"] != "ready":
        assert time.monotonic() < deadline, ready(gateway)
        time.sleep(0.02)


def counted_requests(gateway: StandIn) -> float:
    page = httpx.get(f"{gateway.url}/metrics", trust_env=False).text
    rows = [line for line in page.splitlines() if line.startswith("diptych_requests_total{")]
    return sum(float(row.rsplit(" ", 1)[1]) for row in rows)


def test_a_gateway_asks_its_model_before_it_is_ready_and_counts_nothing_of_it(
    folder: Path, placed: list[str]
) -> None:
    with standing_in(folder, questions=4) as gateway:
        wait_until_ready(gateway)
        names = [wire_id.rsplit("-", 1)[0] for wire_id in placed]
        assert names == [f"rehearsal-{number}" for number in range(4)]
        assert len(gateway.model.shelf) == 0
        assert gateway.model.statistics("")["requests"] == {
            "running": 0,
            "finished": 0,
            "good": 0,
            "refused": 0,
            "cancelled": 0,
            "retries": 0,
        }
        assert counted_requests(gateway) == 0

        body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
        url = f"{gateway.url}/v1/chat/completions"
        assert httpx.post(url, json=body, trust_env=False).status_code == 200
        assert gateway.model.statistics("")["requests"]["finished"] == 1
        assert counted_requests(gateway) == 1
        assert len(placed) == 5


def test_a_gateway_that_is_told_not_to_asks_nothing(folder: Path, placed: list[str]) -> None:
    with standing_in(folder, questions=4, gateway={"rehearsal": False}) as gateway:
        assert ready(gateway)["status"] == "ready"
        assert not placed


def test_a_model_without_a_chat_template_is_asked_too(folder: Path, placed: list[str]) -> None:
    bare = folder.parent / "bare"
    standin.checkpoint(bare)
    (bare / "chat_template.jinja").unlink()
    settings = json.loads((bare / "tokenizer_config.json").read_text())
    settings.pop("chat_template")
    (bare / "tokenizer_config.json").write_text(json.dumps(settings))
    with standing_in(bare, questions=2) as gateway:
        wait_until_ready(gateway)
        assert len(placed) == 2


def test_workers_that_do_not_answer_delay_a_gateway_for_a_while_only(
    folder: Path, monkeypatch: pytest.MonkeyPatch, placed: list[str]
) -> None:
    monkeypatch.setattr(Workers, "submit", lambda *given, **more: None)
    monkeypatch.setattr(rehearsal, "LIMIT_S", 3.0)
    with standing_in(folder, questions=1) as gateway:
        assert ready(gateway)["missing"] == ["rehearsal"]
        wait_until_ready(gateway)
        assert len(placed) == 1
        assert gateway.workers.tasks == {}


def test_a_refused_question_does_not_keep_a_gateway_from_being_ready(
    folder: Path, placed: list[str]
) -> None:
    with standing_in(folder, questions=2, model={"max_model_len": 8}) as gateway:
        wait_until_ready(gateway)
        assert not placed


def test_a_stream_that_breaks_off_is_the_last_question(
    folder: Path, monkeypatch: pytest.MonkeyPatch, placed: list[str]
) -> None:
    async def break_off(workers: Workers, asked: f.StartDecode) -> None:
        inbox = workers._inboxes[asked.attempt_key]
        inbox.put_nowait(f.AnswerTokens(asked.attempt_key, 0, [f.Token(5)]))
        await asyncio.sleep(0.1)
        inbox.put_nowait(f.AttemptFailed(asked.attempt_key, "decode/1", "broken", final=True))

    monkeypatch.setattr(Workers, "_answer", break_off)
    with standing_in(folder, questions=3, slo={"pace_first_token": False}) as gateway:
        wait_until_ready(gateway)
        assert len(placed) == 1
        assert gateway.model.statistics("")["requests"]["retries"] == 0


def test_a_model_may_be_taken_away_while_it_is_asked(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Workers, "submit", lambda *given, **more: None)
    with standing_in(folder, questions=1) as gateway:
        assert ready(gateway)["missing"] == ["rehearsal"]
        (task,) = gateway.deployment._directory._rehearsals.values()
        gateway.models.clear()
        deadline = time.monotonic() + 20
        while gateway.gateway.models or gateway.gateway._leaving:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert task.cancelled()
