"""An OpenAI-compatible endpoint: what it serves and takes, and one streamed answer of it.

What differs between servers is found by asking once (`ask`): the model's name and context, which
words are one token, whether `ignore_eos` and `stream_options` are taken. `Facts` travel to workers.
"""

from __future__ import annotations

import json
import math
import re
import time
from contextlib import suppress
from typing import Any

import msgspec

from .errors import LoadError
from .outcomes import Outcome
from .prompts import Words, probe
from .sse import Connection, Events, ProtocolError

PATH = "/v1/chat/completions"
TIMEOUT_S = 60.0  #: without a byte
DEFAULT_CONTEXT = 4096  #: where /v1/models tells none
ENOUGH = 16  #: idle connections kept


class Facts(msgspec.Struct, frozen=True):
    """What is known about an endpoint."""

    url: str
    model: str
    context: int
    alphabet: tuple[str, ...]
    template: int
    ignore_eos: bool  #: taken: answers have the length that was asked for
    usage: bool  #: streams end with the numbers of tokens
    server: str = ""
    grpc: str = ""

    def words(self, seed: int) -> Words:
        return Words(self.alphabet, self.template, seed)


class Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class Choice(msgspec.Struct):
    delta: Delta = msgspec.field(default_factory=Delta)
    finish_reason: str | None = None


class Details(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: Details | None = None


class Chunk(msgspec.Struct):
    """What is read of an event. `error`: of one that ends a stream in its midst."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(Chunk).decode


class Reader:
    """One stream: pieces with their times in, the fields of an `Outcome` out. Pure."""

    def __init__(self, outcome: Outcome, sent: float) -> None:
        self.outcome, self._sent = outcome, sent
        self._events = Events()
        self._last = math.nan
        self._finished = False
        self.text: list[str] = []

    def feed(self, stamp: float, data: bytes) -> None:
        """Raises ProtocolError."""
        for name, payload in self._events.feed(data):
            if payload == b"[DONE]":
                continue
            try:
                chunk = _decode(payload)
            except msgspec.DecodeError as error:
                raise ProtocolError(f"no chat completion chunk: {error}") from None
            if name == "error" or chunk.error:
                self.outcome.error = "error in mid-stream"
                return
            self._take(stamp, chunk)

    def _take(self, stamp: float, chunk: Chunk) -> None:
        one = self.outcome
        for choice in chunk.choices:
            delta = choice.delta
            text = delta.content or delta.reasoning_content or delta.reasoning
            if text:
                self.token(stamp, text)
            self._finished |= choice.finish_reason is not None
        if chunk.usage and chunk.usage.completion_tokens:
            one.prompt, one.output = chunk.usage.prompt_tokens, chunk.usage.completion_tokens
            details = chunk.usage.prompt_tokens_details
            one.cached = (details.cached_tokens if details else None) or 0

    def token(self, stamp: float, text: str) -> None:
        """Text arrived at `stamp`."""
        one = self.outcome
        if math.isnan(self._last):
            one.ttft_s = stamp - self._sent
        else:
            one.gaps_s.append(stamp - self._last)
        self._last = stamp
        self.text.append(text)

    def finish(self) -> None:
        """Of one that may have been cut short. Without usage, a piece counts as a token."""
        one = self.outcome
        one.error = "" if self._finished else one.error or "ended early"
        if not one.error and math.isnan(self._last):
            one.error = "no token"
        one.e2e_s = self._last - self._sent if not one.error else math.nan
        one.output = one.output or len(self.text)

    def end(self) -> None:
        """The server said that this was all."""
        self._finished = True


class Client:
    """Streams of one endpoint over kept connections. Not for threads; for greenlets."""

    def __init__(self, facts: Facts, key: str = "") -> None:
        self._facts = facts
        self._headers = {"content-type": "application/json", "accept": "text/event-stream"}
        if key:
            self._headers["authorization"] = f"Bearer {key}"
        self._idle: list[Connection] = []

    def chat(self, outcome: Outcome, messages: list[dict[str, str]], tokens: int) -> str:
        """Fills in `outcome`; returns the answer's text. Errors are told in `outcome.error`."""
        body = chat_body(self._facts, messages, tokens)
        headers = self._headers | {"x-request-id": outcome.id}
        try:
            return self._stream(outcome, json.dumps(body).encode(), headers)
        except TimeoutError:
            outcome.error = "timeout"
        except OSError as error:
            outcome.error = type(error).__name__
        except ProtocolError as error:
            outcome.error = str(error)
        return ""

    def _stream(self, outcome: Outcome, body: bytes, headers: dict[str, str]) -> str:
        begun = time.perf_counter()  # a new connection is part of the request
        while self._idle:  # one that the server gave up meanwhile is no failure
            connection = self._idle.pop()
            try:
                return self._on(connection, outcome, body, headers, begun)
            except (OSError, ProtocolError) as error:
                if connection.response.status or isinstance(error, TimeoutError):
                    raise
        return self._on(Connection(self._facts.url, TIMEOUT_S), outcome, body, headers, begun)

    def _on(
        self, connection: Connection, outcome: Outcome, body: bytes, headers: dict, begun: float
    ) -> str:
        reader, other = Reader(outcome, begun), []
        try:
            connection.send("POST", PATH, body, headers)
            for stamp, piece in connection.pieces():
                if connection.response.status == 200:
                    reader.feed(stamp, piece)
                else:
                    other.append(piece)
        except BaseException:
            connection.close()
            raise
        outcome.lags_s, connection.lags_s = connection.lags_s, []
        response = connection.response
        if response.reusable and len(self._idle) < ENOUGH:
            self._idle.append(connection)
        else:
            connection.close()
        if response.status != 200:
            outcome.error = refusal(response.status, b"".join(other))
            return ""
        reader.finish()
        outcome.server_ttft_s = server_ttft_s(response.headers.get("server-timing", ""))
        return "".join(reader.text)


def chat_body(facts: Facts, messages: list[dict[str, str]], tokens: int) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": facts.model,
        "messages": messages,
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
    }
    if facts.ignore_eos:
        body["ignore_eos"] = True
    if facts.usage:
        body["stream_options"] = {"include_usage": True}
    return body


def refusal(status: int, body: bytes) -> str:
    """`429 queue_full`: the status, and the code or type that the body names."""
    reason = ""
    with suppress(ValueError, TypeError, KeyError, AttributeError):
        error = json.loads(body)["error"]
        reason = error.get("code") or error.get("type") or ""
    return f"{status} {reason}".strip()


def server_ttft_s(header: str) -> float:
    """From arrival at the server to its first token, as a Diptych gateway tells it: the sum of
    `queue` and `prefill` in `server-timing`. nan: not told."""
    found = dict(re.findall(r"(\w[\w-]*);dur=([\d.]+)", header))
    if not {"queue", "prefill"} <= found.keys():
        return math.nan
    return (float(found["queue"]) + float(found["prefill"])) / 1e3


# ---- what is asked before the load ---------------------------------------------------------------


def ask(url: str, key: str = "", model: str = "", grpc: str = "", seed: int = 0) -> Facts:
    """Raises LoadError. Costs about 15 to 30 requests of one token, which also warm the server."""
    headers = {"content-type": "application/json"}
    if key:
        headers["authorization"] = f"Bearer {key}"
    url = url.rstrip("/").removesuffix("/v1")
    try:
        connection = Connection(url, TIMEOUT_S)
        asker = _Asker(url, connection, headers)
        name, context, server = asker.model(model)
        asker.base = {"model": name, "max_tokens": 1, "temperature": 0}
        words = probe(asker.count, seed)
        takes = asker.takes({"ignore_eos": True})
        usage = asker.takes({"stream": True, "stream_options": {"include_usage": True}})
    except (OSError, ProtocolError) as error:
        reason = str(error) or type(error).__name__
        raise LoadError(f"no endpoint at {url} ({reason}); start one with: diptych serve") from None
    asker.close()
    return Facts(url, name, context, words.alphabet, words.template, takes, usage, server, grpc)


class _Asker:
    def __init__(self, url: str, connection: Connection, headers: dict[str, str]) -> None:
        self._url, self._connection, self._headers = url, connection, headers
        self.base: dict[str, Any] = {}

    def close(self) -> None:
        self._connection.close()

    def model(self, wanted: str) -> tuple[str, int, str]:
        status, body = self._request("GET", "/v1/models", None)
        try:
            cards = {card["id"]: card for card in body["data"]}
            card = cards[wanted or next(iter(cards))]
        except (KeyError, TypeError, StopIteration):
            told = f"model {wanted!r} is not served" if wanted else f"/v1/models answers {status}"
            raise LoadError(f"{self._url}: {told}") from None
        context = card.get("max_model_len") or card.get("context_length") or DEFAULT_CONTEXT
        server = self._connection.response.headers.get("server", "")
        return card["id"], int(context), str(card.get("owned_by") or server)

    def count(self, text: str) -> int:
        status, body = self._chat({}, text)
        try:
            return int(body["usage"]["prompt_tokens"])
        except (KeyError, TypeError):
            reason = refusal(status, json.dumps(body).encode())
            raise LoadError(f"{self._url}{PATH} answers {reason} without usage") from None

    def takes(self, fields: dict[str, Any]) -> bool:
        return self._chat(fields, "the")[0] == 200

    def _chat(self, fields: dict[str, Any], text: str) -> tuple[int, Any]:
        body = {**self.base, "messages": [{"role": "user", "content": text}], **fields}
        return self._request("POST", PATH, body)

    def _request(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        sent = b"" if body is None else json.dumps(body).encode()
        try:
            answer = self._exchange(method, path, sent)
        except (OSError, ProtocolError):
            if self._connection.response.status:
                raise
            self._connection.close()  # it was given up between two requests
            self._connection = Connection(self._url, TIMEOUT_S)
            answer = self._exchange(method, path, sent)
        response = self._connection.response
        if not response.reusable:
            self._connection.close()
            self._connection = Connection(self._url, TIMEOUT_S)
            self._connection.response = response
        try:
            return response.status, json.loads(answer)
        except ValueError:
            return response.status, None

    def _exchange(self, method: str, path: str, body: bytes) -> bytes:
        self._connection.send(method, path, body, self._headers)
        return self._connection.body()
