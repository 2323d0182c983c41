"""Long streams that a test keeps open while it does things to the cluster below them."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

LIMIT_S = 120.0  #: of one stream


class Streams:
    """`count` clients that ask the same again and again, each its own question, and compare."""

    def __init__(self, url: str, count: int, tokens: int) -> None:
        self._url, self._count, self._tokens = f"{url}/v1/chat/completions", count, tokens
        self._over = threading.Event()
        self.expected: list[str] = []
        self.wrong: list[str] = []
        self.ended = 0  #: as expected
        self.longest_s = 0.0  #: without a token, of any stream

    def learn(self) -> None:
        """What they are answered while nobody disturbs them."""

        async def learn() -> list[str]:
            async with httpx.AsyncClient(timeout=LIMIT_S) as client:
                asked = [self._ask(client, index) for index in range(self._count)]
                return await asyncio.gather(*asked)

        self.expected = asyncio.run(learn())
        assert len(set(self.expected)) == self._count
        self.longest_s = 0.0  # from here on

    def has_ended(self, count: int) -> bool:
        """Whether so many streams have ended as expected."""
        return self.ended >= count

    @contextmanager
    def running(self) -> Iterator[None]:
        """All of them are open all the time; at the end each is waited for."""
        self._over.clear()
        thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join(2 * LIMIT_S)

    async def _run(self) -> None:
        async with httpx.AsyncClient(timeout=LIMIT_S) as client, asyncio.TaskGroup() as group:
            for index in range(self._count):
                group.create_task(self._repeat(client, index))

    async def _repeat(self, client: httpx.AsyncClient, index: int) -> None:
        while not self._over.is_set():
            try:
                text = await self._ask(client, index)
            except (httpx.HTTPError, AssertionError) as error:
                self.wrong.append(f"stream {index}: {error!r}")
                continue
            if text == self.expected[index]:
                self.ended += 1
            else:
                self.wrong.append(f"stream {index}: {len(text)} characters, not as expected")

    async def _ask(self, client: httpx.AsyncClient, index: int) -> str:
        body = {
            "messages": [{"role": "user", "content": f"{index}: what is a KV cache? " * 8}],
            "stream": True,
            "max_tokens": self._tokens,
            "ignore_eos": True,
            "temperature": 1.0 if index % 2 else 0.0,
            "seed": index,
        }
        raw, last = [], time.monotonic()
        async with client.stream("POST", self._url, json=body) as response:
            async for part in response.aiter_raw():
                now = time.monotonic()
                if raw:  # the first token waits in a queue, which is no gap
                    self.longest_s = max(self.longest_s, now - last)
                raw.append(part)
                last = now
            told = b"".join(raw).decode()
            assert response.status_code == 200, told
        assert told.rstrip().endswith("data: [DONE]"), told[-300:]
        events = [json.loads(line[6:]) for line in told.split("\n") if line.startswith("data: {")]
        assert not any("error" in event for event in events), told[-300:]
        choices = [choice for event in events for choice in event["choices"]]
        assert choices[-1]["finish_reason"] == "length", choices[-1]
        return "".join(choice["delta"].get("content") or "" for choice in choices)
