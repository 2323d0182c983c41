"""Mixed requests and leavers, a worker killed in each round; nothing leaks, lies or wedges."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path

import httpx
import pytest

from tests.support.learned import ANSWERS
from tests.support.live import Live, eventually, running

pytestmark = pytest.mark.cluster

REQUESTS = 60


async def _round(live: Live, draw: random.Random) -> list[str]:
    """Requests at random moments; a third leaves early. Returns what went wrong."""
    wrong: list[str] = []
    url = f"{live.url}/v1/chat/completions"

    async def one(client: httpx.AsyncClient, question: str, patience: float | None) -> None:
        await asyncio.sleep(draw.uniform(0, 5))
        body = {"messages": [{"role": "user", "content": question}]}
        try:
            async with asyncio.timeout(patience):
                response = await client.post(url, json=body)
        except TimeoutError:
            return
        if response.status_code != 200:
            wrong.append(response.text)
        elif response.json()["choices"][0]["message"]["content"] != ANSWERS[question]:
            wrong.append(f"wrong answer to {question}")

    client = httpx.AsyncClient(timeout=120, limits=httpx.Limits())
    async with client, asyncio.TaskGroup() as group:
        for _ in range(REQUESTS):
            patience = draw.uniform(0.01, 0.5) if draw.random() < 0.33 else None
            group.create_task(one(client, draw.choice(sorted(ANSWERS)), patience))
        group.create_task(_kill(live, draw))
    return wrong


async def _kill(live: Live, draw: random.Random) -> None:
    await asyncio.sleep(draw.uniform(1, 4))
    workers = live.status()["workers"]
    if workers:
        os.kill(draw.choice(workers)["pid"], signal.SIGKILL)


@pytest.mark.long
@pytest.mark.parametrize("rounds", [2, 12])
def test_rounds_of_load_and_kills_leave_no_wrong_answer_and_no_leak(
    tmp_path: Path, rounds: int
) -> None:
    draw = random.Random(20)
    with running(tmp_path / "serve.log", "--prefill", "2", "--decode", "2") as live:
        for _ in range(rounds):
            assert asyncio.run(_round(live, draw)) == []
            eventually(live.idle, seconds=60)
            live.until_healthy()
