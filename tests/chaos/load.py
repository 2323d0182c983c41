"""The mixed load: requests of every kind, whose answers are known, and clients that do not give up.

An answer must be the same whatever happens to the cluster. So each kind of request is answered
twice before any fault, and every later answer is compared with that.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import httpx
from diptych.protos import inference_pb2 as pb
from diptych.protos.inference_pb2_grpc import InferenceStub

TRY_AGAIN_S = 60.0  #: A client that is cut off, or told to come back, tries for so long.
PAUSE_S = 0.25  #: Between two tries.
RETRYABLE = {408, 409, 429, 502, 503}  #: Statuses after which the same request may be sent again.
QUESTION = [{"role": "user", "content": "What is prefill?"}]

#: Pieces of answers: (number of the answer, text). The tokens' logprobs are an answer of their own,
#: under the number `~answer`: which tokens come in one event depends on time, what they are does not.
Pieces = list[tuple[int, str]]


@dataclass(frozen=True)
class RequestKind:
    """One kind of request, always with the same body. `read` gets the pieces out of an event."""

    name: str
    path: str
    body: dict[str, Any]
    read: Callable[[dict[str, Any]], Pieces]


def _of_chat(event: dict[str, Any]) -> Pieces:
    pieces: Pieces = []
    for choice in event.get("choices", []):
        text = choice["delta"].get("content") or ""
        scores = (choice.get("logprobs") or {}).get("content") or []
        pieces.append((choice["index"], text + (choice.get("finish_reason") or "")))
        if scores:
            logprobs = "".join(f"[{score['logprob']:.6f}]" for score in scores)
            pieces.append((~choice["index"], logprobs))
    return pieces


def _of_completion(event: dict[str, Any]) -> Pieces:
    return [
        (choice["index"], choice["text"] + (choice.get("finish_reason") or ""))
        for choice in event.get("choices", [])
    ]


def _of_message(event: dict[str, Any]) -> Pieces:
    return [(0, event.get("delta", {}).get("text", ""))]


def _of_response(event: dict[str, Any]) -> Pieces:
    is_text = event.get("type") == "response.output_text.delta"
    return [(0, event["delta"])] if is_text else []


_CHAT, _COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_SCHEMA = {
    "type": "object",
    "properties": {"phase": {"enum": ["prefill", "decode"]}, "share": {"type": "integer"}},
    "required": ["phase", "share"],
    "additionalProperties": False,
}
KINDS = (
    RequestKind("chat", _CHAT, {"messages": QUESTION, "temperature": 0}, _of_chat),
    RequestKind(
        "long chat",
        _CHAT,
        {
            "messages": QUESTION,
            "max_tokens": 200,
            "ignore_eos": True,
            "temperature": 0.8,
            "seed": 5,
        },
        _of_chat,
    ),
    RequestKind(
        "n and logprobs",
        _CHAT,
        {
            "messages": QUESTION,
            "n": 2,
            "logprobs": True,
            "temperature": 0.9,
            "seed": 7,
            "max_tokens": 64,
        },
        _of_chat,
    ),
    RequestKind(
        "penalties",
        _COMPLETIONS,
        {
            "prompt": "Prefill is",
            "max_tokens": 64,
            "temperature": 0.7,
            "seed": 3,
            "presence_penalty": 0.5,
            "frequency_penalty": 0.2,
        },
        _of_completion,
    ),
    RequestKind(
        "stop",
        _COMPLETIONS,
        {"prompt": "What is decode?", "max_tokens": 64, "stop": ["."], "temperature": 0},
        _of_completion,
    ),
    RequestKind(
        "json_schema",
        _CHAT,
        {
            "messages": QUESTION,
            "max_tokens": 64,
            "temperature": 0,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "share", "schema": _SCHEMA, "strict": True},
            },
        },
        _of_chat,
    ),
    RequestKind(
        "messages",
        "/v1/messages",
        {"messages": QUESTION, "max_tokens": 64, "temperature": 0},
        _of_message,
    ),
    RequestKind(
        "responses",
        "/v1/responses",
        {"input": "What is prefill?", "temperature": 0},
        _of_response,
    ),
    RequestKind("gRPC", "", {}, lambda _: []),
)


@dataclass
class Answered:
    """What a client got for one request."""

    kind: str
    texts: dict[int, str] = field(default_factory=dict)  #: of each answer
    #: Longest time in seconds without a word: to the first event, between two, or over tries.
    longest_pause_s: float = 0.0
    tries: int = 1  #: more than one: it was cut off, or told to come back
    error: str = ""  #: why it has no complete answer in the end


class CutOffError(Exception):
    """The connection broke, or the server said to come back: the same request may be sent again."""


class Client:
    """Sends requests to one cluster. A request keeps its id over all tries."""

    def __init__(self, url: str, grpc_address: str) -> None:
        self._http = httpx.AsyncClient(base_url=url, timeout=30.0, limits=httpx.Limits())
        self._grpc_address = grpc_address
        self.open_requests = 0

    async def close(self) -> None:
        """Closes all connections."""
        await self._http.aclose()

    async def ask(self, kind: RequestKind) -> Answered:
        """Sends a request, again after each cut, until it is answered or `TRY_AGAIN_S` are over."""
        answered = Answered(kind.name)
        request_id = uuid.uuid4().hex
        began_at = time.monotonic()
        heard_at = began_at
        self.open_requests += 1
        try:
            while True:
                answered.texts = {}
                try:
                    async for pieces in self._events(kind, request_id):
                        now = time.monotonic()
                        answered.longest_pause_s = max(answered.longest_pause_s, now - heard_at)
                        heard_at = now
                        for number, text in pieces:
                            answered.texts[number] = answered.texts.get(number, "") + text
                    return answered
                except CutOffError as error:
                    if time.monotonic() - began_at > TRY_AGAIN_S:
                        answered.error = f"gave up: {error}"
                        return answered
                answered.tries += 1
                await asyncio.sleep(PAUSE_S)
        except ValueError as error:
            answered.error = str(error)
            return answered
        finally:
            self.open_requests -= 1

    def _events(self, kind: RequestKind, request_id: str) -> AsyncIterator[Pieces]:
        if kind.name == "gRPC":
            return self._grpc_events(request_id)
        return self._http_events(kind, request_id)

    async def _http_events(self, kind: RequestKind, request_id: str) -> AsyncIterator[Pieces]:
        """The pieces of a stream's events. Raises CutOffError, and ValueError for other errors."""
        body = {**kind.body, "model": "demo", "stream": True}
        headers = {"x-request-id": request_id}
        ended = False
        try:
            async with self._http.stream("POST", kind.path, json=body, headers=headers) as reply:
                if reply.status_code in RETRYABLE:
                    raise CutOffError(f"status {reply.status_code}: {await reply.aread()!r}")
                if reply.status_code != 200:
                    raise ValueError(f"status {reply.status_code}: {await reply.aread()!r}")
                async for line in reply.aiter_lines():
                    if not line.startswith("data: "):
                        continue
                    if line == "data: [DONE]":
                        ended = True
                        continue
                    event = json.loads(line.removeprefix("data: "))
                    if event.get("error"):
                        raise CutOffError(str(event["error"]))
                    ended |= event.get("type") in ("message_stop", "response.completed")
                    yield kind.read(event)
        except httpx.HTTPError as error:
            raise CutOffError(f"{type(error).__name__}: {error}") from None
        if not ended:
            raise CutOffError("the stream ended early")

    async def _grpc_events(self, request_id: str) -> AsyncIterator[Pieces]:
        message = pb.ChatRequest(messages=[pb.Message(role="user", content="What is prefill?")])
        message.request_id = request_id
        message.temperature = 0.0
        # A channel of its own for each try: one that has failed waits longer and longer.
        async with grpc.aio.insecure_channel(self._grpc_address) as channel:
            try:
                async for reply in InferenceStub(channel).Chat(message, timeout=30.0):
                    yield [(reply.index, reply.delta + reply.finish_reason)]
            except grpc.aio.AioRpcError as error:
                raise CutOffError(f"{error.code().name}: {error.details()}") from None


async def references(client: Client) -> dict[str, dict[int, str]]:
    """Returns the answer to each kind, which two undisturbed rounds agree on. Raises ValueError."""
    found: dict[str, dict[int, str]] = {}
    for _ in range(2):
        for kind in KINDS:
            answered = await client.ask(kind)
            if answered.error or answered.tries > 1 or not any(answered.texts.values()):
                raise ValueError(f"{kind.name}, undisturbed: {answered}")
            if found.setdefault(kind.name, answered.texts) != answered.texts:
                raise ValueError(f"{kind.name}: two undisturbed answers differ")
    return found


async def use(client: Client, draw: random.Random, until: asyncio.Event) -> list[Answered]:
    """One user: one request after the other, of any kind, until the event is set."""
    answered = []
    while not until.is_set():
        answered.append(await client.ask(draw.choice(KINDS)))
    return answered
