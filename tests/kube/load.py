"""A bounded load of streamed chats that notices everything that a client could notice.

    ip netns exec diptych-box python -m tests.kube.load URL SECONDS CLIENTS

The clients are OpenAI's Python SDK as it comes: it repeats a call up to twice that gets no headers
of an answer, or 408, 409, 429 or 5xx, and never a stream that has begun. The report counts what was
repeated of calls that were answered in the end.
Greedy answers to the same question must be the same: a stream that differs counts as wrong.
SIGTERM ends the load 20 s later, so that it also sees what comes after a change.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from dataclasses import dataclass, field

from openai import AsyncOpenAI, Timeout

QUESTIONS = 7
MAX_TOKENS = 48
PAUSE_S = 0.15  #: Between a client's requests.
PAUSE_AFTER_FAILURE_S = 0.3
AFTERMATH_S = 20.0  #: How long the load goes on after SIGTERM.
TIMEOUT = Timeout(30, connect=5)  #: The SDK's for a connection, and a shorter one to wait.


class StreamFailed(Exception):
    """A stream ended before its usage, which comes last."""


@dataclass(slots=True)
class LoadReport:
    """What all clients together noticed."""

    sent: int = 0
    repeated: int = 0  #: Attempts that the SDK made again, of calls that were answered in the end.
    completed: int = 0
    wrong: int = 0  #: Streams that completed with another text than before.
    failures: list[str] = field(default_factory=list)  #: A sentence for each, with its time.
    #: The longest time in which no stream completed, and when it ended, in seconds of the load.
    longest_gap_s: float = 0.0
    longest_gap_at_s: float = 0.0
    longest_stream_s: float = 0.0

    def __str__(self) -> str:
        return (
            f"{self.sent} sent, {self.repeated} repeated, {self.completed} completed, "
            f"{len(self.failures)} failed, {self.wrong} wrong; "
            f"longest gap between ends {self.longest_gap_s:.1f} s "
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
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._end_soon)
        async with (
            AsyncOpenAI(
                base_url=f"{self._url}/v1",
                api_key="none",
                timeout=TIMEOUT,
                # A connection for each request, so that each one meets the service as it is then.
                default_headers={"Connection": "close"},
            ) as client,
            asyncio.TaskGroup() as group,
        ):
            for number in range(clients):
                group.create_task(self._be_client(client, number))
        return self.report

    def _end_soon(self) -> None:
        self._end = min(self._end, time.monotonic() + AFTERMATH_S)

    async def _be_client(self, client: AsyncOpenAI, number: int) -> None:
        question = number
        while time.monotonic() < self._end:
            question = (question + 1) % QUESTIONS
            await self._send(client, question)
            await asyncio.sleep(PAUSE_S)

    async def _send(self, client: AsyncOpenAI, question: int) -> None:
        self.report.sent += 1
        began = time.monotonic()
        try:
            text = await self._stream(client, question)
        except Exception as error:  # the SDK's, those of the HTTP library beneath it, ours
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

    async def _stream(self, client: AsyncOpenAI, question: int) -> str:
        answer = await client.chat.completions.with_raw_response.create(
            model="demo",
            stream=True,
            stream_options={"include_usage": True},
            max_tokens=MAX_TOKENS,
            temperature=0,
            messages=[{"role": "user", "content": f"What is prefill? Number {question}"}],
        )
        text = ""
        is_complete = False
        self.report.repeated += answer.retries_taken
        async for chunk in answer.parse():
            for choice in chunk.choices:
                text += choice.delta.content or ""
            is_complete = chunk.usage is not None
        if not is_complete:
            raise StreamFailed(f"the stream ended after {len(text)} characters without its usage")
        return text


def main(arguments: list[str]) -> None:
    url, seconds, clients = arguments
    report = asyncio.run(LoadClients(url, float(seconds)).run(int(clients)))
    for failure in report.failures[:20]:
        print(failure)
    print(report)


if __name__ == "__main__":
    main(sys.argv[1:])
