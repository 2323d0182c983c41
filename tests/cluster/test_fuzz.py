"""Malformed bodies at the real handlers: a 4xx with a sentence each, and nothing that stays."""

from __future__ import annotations

import asyncio
import gc
import random
import string
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from diptych.cluster.gateway.apis.ignored_fields import HEADER_CHARS_MAX, HEADER_NAME
from diptych.cluster.gateway.text import tokenizer as text

from tests.support.malformed import VALID, mutant, sentence
from tests.support.standin import ANSWER, QUESTION, StandIn, checkpoint, standing_in

AT_A_TIME = 4
WARM = 1000  #: bodies until every cache has what it will hold,
WARM_LONG = 25_000  #: and until 256 grammars are compiled, which take a megabyte for five of them
#: Of the process over all others. The first texts of 100,000 characters and more, which few mutants have, take up to
#: 40 MiB that the allocator keeps; what the tokenizer remembers of words grows, too.
GROWTH_MIB = 64
SECOND_HALF_MIB = 8  #: Of the process over the second half of them: the caches have what they hold.


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandIn]:
    folder = checkpoint(tmp_path_factory.mktemp("fuzz") / "demo")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "SEGMENT_BYTES", 1 << 20)  # 64 MiB of such short texts would take hours
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
        async with httpx.AsyncClient(transport=transport, base_url=gateway.url) as client:
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
            ignored = response.headers.get(HEADER_NAME, "")
            assert ignored.isascii() and ignored.isprintable(), body[:2000]
            assert len(ignored) <= HEADER_CHARS_MAX and "set-cookie" not in response.headers
            if response.status_code == 200:
                continue
            said = path, body[:2000], response.status_code, response.text
            assert response.status_code in (400, 404), said  # 403 would say nothing of the body
            assert sentence(response.json()["error"]["message"]), said
        return seen

    return gateway.run(asked(), limit_s=3000)


def fill(gateway: StandIn) -> None:
    """The tokenizer remembers words up to a bound: asks for new ones until it is there."""
    order, sizes = random.Random(1), [resident_mib()]

    async def asked() -> None:
        transport = httpx.ASGITransport(gateway.app)
        async with httpx.AsyncClient(transport=transport, base_url=gateway.url) as client:
            for _ in range(1000):
                words = "".join(order.choices(string.ascii_letters + 9 * " ", k=3000))
                response = await client.post("/tokenize", json={"prompt": words})
                assert response.status_code == 200, response.text

    while len(sizes) < 4 or sizes[-1] - sizes[-3] > 1:
        assert len(sizes) < 60, f"the caches have no bound: {sizes}"
        gateway.run(asked())
        sizes.append(resident_mib())
    print(f"resident MiB while caches fill: {[round(size) for size in sizes]}")


def holds(gateway: StandIn, bodies: int, warm: int = WARM) -> None:
    seen = throw(gateway, 0, warm)
    sizes = [resident_mib()]
    for quarter in range(4):
        seen += throw(gateway, 1 + quarter, -(-(bodies - warm) // 4))
        sizes.append(resident_mib())
    print(f"{dict(seen)}, resident MiB by quarters: {[round(size) for size in sizes]}")
    assert seen[200] > bodies // 100, "most places of a body make no difference"
    assert seen.total() - seen[200] >= bodies and sizes[-1] - sizes[0] < GROWTH_MIB
    assert sizes[-1] - sizes[2] < SECOND_HALF_MIB, "it grows as long as they come"
    assert not gateway.workers.tasks and not gateway.workers._inboxes
    assert not gateway.model._live and len(gateway.model.shelf) == 0
    ask = {"messages": [{"role": "user", "content": QUESTION}]}
    answer = httpx.post(f"{gateway.url}/v1/chat/completions", json=ask).json()
    assert answer["choices"][0]["message"]["content"] == ANSWER


@pytest.mark.slow
def test_malformed_bodies_get_a_sentence_and_leave_nothing_behind(gateway: StandIn) -> None:
    holds(gateway, 5000)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_hundred_thousand_malformed_bodies(gateway: StandIn) -> None:
    fill(gateway)
    holds(gateway, 100_000, WARM_LONG)
