"""Whole requests: what each costs a server from its arrival to its last byte.

A client of this process sends requests one after the other on each of its connections. The prompts
differ, so that nothing is cached, and have a known number of tokens. The same bodies go to every
server that is measured, but for the model's name.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...gateway.text.tokenizer import ChatTokenizer
from .cluster import HOST, BenchError, countable_token_ids
from .usage import cpu_s_of, pin

#: Tokens a second behind an answer's first one. In place of an engine our measured workers have a
#: *token source* (`source.py`), which reads its pace from the request's seed. It has no effect on
#: answers of one token, as those of `LOADS`.
SOURCE_PACE = 1000
END_OF_HEAD = b"\r\n\r\n"
END_OF_EVENT = b"\n\n"
END_OF_BODY = b"0\r\n\r\n"  #: The last chunk of a chunked body, which is empty.
REQUEST_LIMIT_S = 60.0  #: From a request until its last byte.
ERROR_CHARACTERS_LIMIT = 300
#: More bytes than an answer of the bench has: the client's buffer never holds up a server.
BUFFER_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class RequestLoad:
    """A number of requests of one kind."""

    name: str  #: In the result.
    clients: int  #: Connections, each of which has one request at a time.
    requests: int  #: In all.
    prompt_tokens: int
    max_tokens: int  #: Of each answer, which has exactly so many.


#: The kinds that are measured: many short prompts, and long ones.
LOADS = (
    RequestLoad("short", clients=64, requests=3000, prompt_tokens=128, max_tokens=1),
    RequestLoad("long", clients=64, requests=600, prompt_tokens=2048, max_tokens=1),
)
WARM_UP_REQUESTS = RequestLoad("warm-up", clients=32, requests=128, prompt_tokens=128, max_tokens=1)


@dataclass(frozen=True, slots=True)
class MeasuredServer:
    """A server to compare: where it listens, and the processes whose CPU time counts."""

    name: str  #: In the result.
    port: int  #: Of 127.0.0.1.
    model: str  #: The name that requests have to give.
    #: Returns the ids of the server's processes, by part of the server.
    pids: Callable[[], dict[str, list[int]]]

    def cpu_s(self) -> dict[str, float]:
        """Return the CPU seconds by part since the processes started."""
        return {part: sum(map(cpu_s_of, pids)) for part, pids in self.pids().items()}

    def pin(self, cores: set[int]) -> None:
        """Let the server run on these cores only."""
        for pids in self.pids().values():
            pin(pids, cores)


@dataclass(frozen=True, slots=True)
class ClientTimes:
    """What a client saw of one request.

    Times are in seconds from when the request was handed to the socket; connecting is not counted.
    """

    first_event_s: float
    last_byte_s: float
    body: bytes  #: Of the answer, in its chunks.


def prompt_texts(tokenizer: ChatTokenizer, load: RequestLoad, seed: int) -> Iterator[str]:
    """Yield the load's prompts. Raises BenchError if the tokenizer does not split them as meant."""
    words = [tokenizer.token_text(token_id) for token_id in countable_token_ids(tokenizer)]
    # No prompt of one load begins as one of another load: it would be taken for cached.
    generator = random.Random(f"{load.name} {seed}")
    for index in range(load.requests):
        text = "".join(generator.choices(words, k=load.prompt_tokens))
        if index == 0:
            token_count = len(tokenizer.encode(text))
            # Some tokenizers add an id at the beginning.
            if not load.prompt_tokens <= token_count <= load.prompt_tokens + 1:
                raise BenchError(
                    f"this tokenizer makes {token_count} tokens of {load.prompt_tokens} words"
                )
        yield text


def request_bytes(text: str, model: str, load: RequestLoad) -> bytes:
    """Return a whole HTTP request for a streamed completion. Its seed is `SOURCE_PACE`."""
    content = {
        "model": model,
        "prompt": text,
        "max_tokens": load.max_tokens,
        "stream": True,
        "ignore_eos": True,
        "seed": SOURCE_PACE,
    }
    body = json.dumps(content).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def measure_requests(
    server: MeasuredServer, load: RequestLoad, tokenizer: ChatTokenizer, seed: int
) -> dict[str, Any]:
    """Put the load on the server, and return a row of `diptych bench gateway --requests`.

    CPU is that of the processes in `server.pids` from before the first request until after the last
    one, in microseconds per request: by part of the server (`cpu_us_per_request`) and in sum
    (`cpu_us`). `requests_s` are requests per second. Raises BenchError if any request fails, be it
    in its first event or behind that.
    """
    requests = [
        request_bytes(text, server.model, load) for text in prompt_texts(tokenizer, load, seed)
    ]
    cpu_before = server.cpu_s()
    began_at = time.perf_counter()
    times = asyncio.run(_send_all(server.port, requests, load.clients))
    duration_s = time.perf_counter() - began_at
    cpu_after = server.cpu_s()
    cpu_us = {
        part: round((cpu_after[part] - cpu_before[part]) / load.requests * 1e6, 1)
        for part in cpu_after
    }
    # Read only now, so that it takes no time from the requests beside it.
    for client_times in times:
        check_answer(client_times.body)
    ttft_p50, ttft_p99 = _percentiles_ms([client_times.first_event_s for client_times in times])
    end_p50, end_p99 = _percentiles_ms([client_times.last_byte_s for client_times in times])
    return {
        "server": server.name,
        "load": load.name,
        "prompt_tokens": load.prompt_tokens,
        "max_tokens": load.max_tokens,
        "clients": load.clients,
        "requests_s": round(load.requests / duration_s),
        "cpu_us_per_request": cpu_us,
        "cpu_us": round(sum(cpu_us.values()), 1),
        "ttft_ms_p50": ttft_p50,
        "ttft_ms_p99": ttft_p99,
        "last_byte_ms_p50": end_p50,
        "last_byte_ms_p99": end_p99,
    }


def _percentiles_ms(seconds: list[float]) -> tuple[float, float]:
    """Return the median and the 99th percentile, in milliseconds."""
    p50, p99 = np.percentile(seconds, (50, 99))
    return round(1e3 * float(p50), 1), round(1e3 * float(p99), 1)


def check_answer(body: bytes) -> None:
    """Raise BenchError unless the events of a chunked body say that the request was served.

    An answer with status 200 may still end in an error. An answer whose length is complete counts
    without text too, as some tokens have none.
    """
    content = _without_chunks(body)
    is_served = False
    for event in content.split(END_OF_EVENT):
        for line in event.splitlines():
            name, _, value = line.partition(b": ")
            if name != b"data" or value == b"[DONE]":
                continue
            try:
                fields = json.loads(value)
                choices = fields.get("choices", [])
            except (ValueError, AttributeError):
                raise BenchError(f"no event of an answer: {_excerpt(line)}") from None
            if "error" in fields:
                raise BenchError(f"a request failed: {_excerpt(value)}")
            is_served = is_served or any(
                choice.get("text") or choice.get("finish_reason") == "length" for choice in choices
            )
    if not is_served:
        raise BenchError(f"a request has no answer: {_excerpt(content)}")


def _without_chunks(body: bytes) -> bytes:
    """Return the content of a chunked body."""
    content = b""
    rest = body
    while rest:
        size_line, _, rest = rest.partition(b"\r\n")
        size = int(size_line.partition(b";")[0], 16)
        content += rest[:size]
        rest = rest[size + len(b"\r\n") :]
    return content


def _excerpt(text: bytes) -> str:
    return text.decode(errors="replace")[:ERROR_CHARACTERS_LIMIT]


async def _send_all(port: int, requests: list[bytes], clients: int) -> list[ClientTimes]:
    """Send all requests over `clients` connections, and return the times of each."""
    remaining = iter(requests)

    async def send_some() -> list[ClientTimes]:
        reader, writer = await asyncio.open_connection(HOST, port, limit=BUFFER_BYTES)
        try:
            connection = writer.get_extra_info("socket")
            return [await _send(request, reader, writer, connection) for request in remaining]
        finally:
            writer.close()

    try:
        parts = await asyncio.gather(*(send_some() for _ in range(clients)))
    except (OSError, asyncio.IncompleteReadError, TimeoutError) as error:
        raise BenchError(f"a request failed: {str(error) or type(error).__name__}") from error
    return [times for part in parts for times in part]


async def _send(
    request: bytes,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    connection: socket.socket,
) -> ClientTimes:
    """Send one request and read its answer. Raises BenchError if the status is not 200."""
    async with asyncio.timeout(REQUEST_LIMIT_S):
        began_at = time.perf_counter()
        writer.write(request)
        head = await reader.readuntil(END_OF_HEAD)
        # Acknowledge at once: a server may hold its next small segment back until then (Nagle's
        # algorithm), and an acknowledgement that is delayed would count as the server's time.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
        if not head.startswith(b"HTTP/1.1 200"):
            rest = await reader.read(ERROR_CHARACTERS_LIMIT)
            status = head.splitlines()[0].decode(errors="replace")
            raise BenchError(f"{status}: {rest.decode(errors='replace')}")
        body = await reader.readuntil(END_OF_EVENT)
        first_event_s = time.perf_counter() - began_at
        body += await reader.readuntil(END_OF_BODY)
        return ClientTimes(first_event_s, time.perf_counter() - began_at, body)
