"""A bounded load of streamed chats that notices everything that a client could notice.

    ip netns exec diptych-box python -m tests.kube.load URL SECONDS CLIENTS

Greedy answers to the same question must be the same: a stream that differs counts as wrong.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import dataclass, field

import httpx

QUESTIONS = 7
MAX_TOKENS = 48
PAUSE_S = 0.15  #: Between a client's requests.
PAUSE_AFTER_FAILURE_S = 0.3
NOTABLE_GAP_S = 1.5
TIMEOUT = httpx.Timeout(30, connect=3)


class StreamFailed(Exception):
    """A stream ended without its closing line. The message says how."""


@dataclass(slots=True)
class LoadReport:
    """What all clients together noticed."""

    sent: int = 0
    completed: int = 0
    wrong: int = 0  #: Streams that completed with another text than before.
    failures: list[str] = field(default_factory=list)  #: A sentence for each, with its time.
    #: The longest time in which no stream completed, and when it ended, in seconds of the load.
    longest_gap_s: float = 0.0
    longest_gap_at_s: float = 0.0
    longest_stream_s: float = 0.0

    def __str__(self) -> str:
        return (
            f"{self.sent} sent, {self.completed} completed, {len(self.failures)} failed, "
            f"{self.wrong} wrong; longest gap between ends {self.longest_gap_s:.1f} s "
            f"(at {self.longest_gap_at_s:.0f} s), longest stream {self.longest_stream_s:.1f} s"
        )


class LoadClients:
    def __init__(self, url: str, seconds: float) -> None:
        self.report = LoadReport()
        self._url = url
        self._began = time.monotonic()
        self._end = self._began + seconds
        self._last_completion = self._began
        self._texts: dict[int, str] = {}  #: The first answer to each question.

    async def run(self, clients: int) -> LoadReport:
        # A connection for each request, so that each one meets the service as it is then.
        limits = httpx.Limits(max_keepalive_connections=0)
        async with (
            httpx.AsyncClient(timeout=TIMEOUT, limits=limits) as http,
            asyncio.TaskGroup() as group,
        ):
            for number in range(clients):
                group.create_task(self._be_client(http, number))
        return self.report

    async def _be_client(self, http: httpx.AsyncClient, number: int) -> None:
        question = number
        while time.monotonic() < self._end:
            question = (question + 1) % QUESTIONS
            await self._send(http, question)
            await asyncio.sleep(PAUSE_S)

    async def _send(self, http: httpx.AsyncClient, question: int) -> None:
        self.report.sent += 1
        began = time.monotonic()
        try:
            text = await self._stream(http, question)
        except (StreamFailed, httpx.HTTPError) as error:
            at_s = time.monotonic() - self._began
            self.report.failures.append(f"{at_s:.1f} s: {error!r}")
            await asyncio.sleep(PAUSE_AFTER_FAILURE_S)
            return
        now = time.monotonic()
        self.report.completed += 1
        self.report.longest_stream_s = max(self.report.longest_stream_s, now - began)
        gap_s = now - self._last_completion
        if gap_s > self.report.longest_gap_s:
            self.report.longest_gap_s = gap_s
            self.report.longest_gap_at_s = now - self._began
        self._last_completion = now
        if self._texts.setdefault(question, text) != text:
            self.report.wrong += 1

    async def _stream(self, http: httpx.AsyncClient, question: int) -> str:
        body = {
            "model": "demo",
            "stream": True,
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "messages": [{"role": "user", "content": f"What is prefill? Number {question}"}],
        }
        text = ""
        async with http.stream("POST", f"{self._url}/v1/chat/completions", json=body) as response:
            if response.status_code != httpx.codes.OK:
                content = (await response.aread())[:160]
                raise StreamFailed(f"HTTP {response.status_code} {content!r}")
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    return text
                if not line.startswith("data: "):
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise StreamFailed(f"error in the stream: {event['error']}")
                for choice in event["choices"]:
                    text += choice["delta"].get("content") or ""
        raise StreamFailed("the stream ended without its closing line")


def main(arguments: list[str]) -> None:
    url, seconds, clients = arguments
    report = asyncio.run(LoadClients(url, float(seconds)).run(int(clients)))
    for failure in report.failures[:20]:
        print(failure)
    print(report)


if __name__ == "__main__":
    main(sys.argv[1:])
