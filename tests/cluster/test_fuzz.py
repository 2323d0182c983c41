"""Malformed bodies at the real handlers: a 4xx with a sentence each, and nothing that stays."""

from __future__ import annotations

import asyncio
import gc
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.malformed import VALID, mutant, sentence
from tests.support.standin import ANSWER, QUESTION, StandIn, checkpoint, standing_in

AT_A_TIME = 4
WARM = 1000  #: bodies until every cache has what it will hold
GROWTH_MIB = 48  #: of the process over all others


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandIn]:
    folder = checkpoint(tmp_path_factory.mktemp("fuzz") / "demo")
    with standing_in(folder, gateway={"resume_s": 0}) as running:
        yield running


def resident_mib() -> float:
    gc.collect()
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


def throw(gateway: StandIn, seed: int, bodies: int) -> Counter[int]:
    """Asks until so many `bodies` were refused. Returns how often which status came."""

    async def asked() -> Counter[int]:
        transport = httpx.ASGITransport(gateway.app, raise_app_exceptions=True)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            parts = [(seed * 100 + i, -(-bodies // AT_A_TIME)) for i in range(AT_A_TIME)]
            told = await asyncio.gather(*(part(client, *one) for one in parts))
        return sum(told, Counter())

    async def part(client: httpx.AsyncClient, seed: int, bodies: int) -> Counter[int]:
        order, seen = random.Random(seed), Counter[int]()
        while seen.total() - seen[200] < bodies:
            path = order.choice(list(VALID))
            body = mutant(order, VALID[path])
            response = await client.post(path, content=body)
            seen[response.status_code] += 1
            if response.status_code == 200:
                continue
            said = path, body[:2000], response.status_code, response.text
            assert 400 <= response.status_code < 500, said
            assert sentence(response.json()["error"]["message"]), said
        return seen

    return gateway.run(asked(), limit_s=3000)


def holds(gateway: StandIn, bodies: int) -> None:
    seen = throw(gateway, 0, WARM)
    sizes = [resident_mib()]
    for quarter in range(4):
        seen += throw(gateway, 1 + quarter, -(-(bodies - WARM) // 4))
        sizes.append(resident_mib())
    print(f"{dict(seen)}, resident MiB by quarters: {[round(size) for size in sizes]}")
    assert seen.total() - seen[200] >= bodies and sizes[-1] - sizes[0] < GROWTH_MIB
    assert sizes[-1] - sizes[2] < GROWTH_MIB / 2, "it grows as long as they come"
    assert not gateway.workers.tasks and not gateway.workers._inboxes
    assert not gateway.gateway._live and len(gateway.gateway.shelf) == 0
    ask = {"messages": [{"role": "user", "content": QUESTION}]}
    answer = httpx.post(f"{gateway.url}/v1/chat/completions", json=ask).json()
    assert answer["choices"][0]["message"]["content"] == ANSWER


def test_malformed_bodies_get_a_sentence_and_leave_nothing_behind(gateway: StandIn) -> None:
    holds(gateway, 5000)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_hundred_thousand_malformed_bodies(gateway: StandIn) -> None:
    holds(gateway, 100_000)
