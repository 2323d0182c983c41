"""An OpenAI-compatible endpoint: what it serves and takes, and one streamed answer of it.

What differs between servers is found once, by `probe_endpoint`: the model's name and context, which
words are one token, whether `ignore_eos` and `stream_options` are taken. The `EndpointFacts` travel
to workers.
"""

from __future__ import annotations

import json
import math
import re
import time
from contextlib import closing, suppress
from typing import Any, NamedTuple

import msgspec

from .errors import LoadError
from .outcomes import LoadOutcome
from .prompts import Words, probe
from .sse import EventDecoder, HttpConnection, ProtocolError

PATH = "/v1/chat/completions"
#: Seconds without a byte (over gRPC: without a message) after which a request has failed.
TIMEOUT_S = 60.0
DEFAULT_CONTEXT = 4096  #: tokens of prompt and answer, where /v1/models tells no limit
#: An idle connection that the server has closed fails this soon after a request was sent on it. What
#: breaks later, breaks while the server works on the request.
IDLE_LOSS_S = 0.2
IDLE_CONNECTION_LIMIT = 16  #: of one client; connections beyond are closed after their answer
#: Statuses by which an endpoint, or a proxy before it, says that it has no room or no time. They do
#: not say whether it takes a field.
BUSY_STATUSES = (408, 429, 502, 503, 504)


class EndpointFacts(msgspec.Struct, frozen=True):
    """What is known about an endpoint."""

    url: str
    model: str
    context: int  #: tokens of prompt and answer
    alphabet: tuple[str, ...]  #: words that are one token each behind a space
    template: int  #: tokens of the shortest prompt; most of them come from the chat template
    #: True if the server does not refuse `ignore_eos`: answers have the length that is asked for,
    #: unless the server ignores the field.
    ignore_eos: bool
    #: True if the server does not refuse `stream_options`: streams end with token counts, unless the
    #: server ignores the field.
    usage: bool
    server: str = ""  #: what software answers, as far as it says so
    grpc: str = ""  #: address of the endpoint's gRPC service, if the load goes there

    def words(self, seed: int) -> Words:
        """Returns a maker of prompts of known length; equal seeds make equal prompts."""
        return Words(self.alphabet, self.template, seed)


# ---- what is read of an event --------------------------------------------------------------------
# The fields of OpenAI's chat completion chunk that matter here; `reasoning` and `reasoning_content`
# are servers' own names for text that comes before the answer.


class ChatDelta(msgspec.Struct):
    """A piece of an answer's text."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class ChatChoice(msgspec.Struct):
    """What a chunk says of one answer; `finish_reason` comes with the answer's last chunk."""

    delta: ChatDelta = msgspec.field(default_factory=ChatDelta)
    finish_reason: str | None = None


class PromptTokenDetails(msgspec.Struct):
    """How many of the prompt's tokens the server had cached; None: it does not say."""

    cached_tokens: int | None = None


class ChatUsage(msgspec.Struct):
    """How many tokens the prompt and the answers have."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: PromptTokenDetails | None = None


class ChatChunk(msgspec.Struct):
    """One event of a streamed answer."""

    choices: list[ChatChoice] = []
    usage: ChatUsage | None = None
    error: Any = None  #: of an event that ends a stream in its midst


_decode_chunk = msgspec.json.Decoder(ChatChunk).decode


class AnswerStreamReader:
    """Reads one stream: takes its pieces with their times, and fills in a `LoadOutcome`. Pure.

    Times are in seconds by one clock, `perf_counter`'s.
    """

    def __init__(self, outcome: LoadOutcome, sent: float) -> None:
        """`sent` is when the request began, by the clock of the pieces' stamps."""
        self.outcome = outcome
        self.text: list[str] = []
        self._sent = sent
        self._events = EventDecoder()
        self._last_piece = math.nan  #: when the latest piece with text came
        self._finished = False  #: the server has said that the answer is complete

    def feed(self, stamp: float, data: bytes) -> None:
        """Takes bytes that arrived at `stamp`. Raises ProtocolError."""
        for event in self._events.feed(data):
            if event.data == b"[DONE]":
                continue
            try:
                chunk = _decode_chunk(event.data)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise ProtocolError(f"no chat completion chunk: {error}") from None
            if event.name == "error" or chunk.error:
                self.outcome.error = "error in mid-stream"
                return
            self._take(stamp, chunk)

    def _take(self, stamp: float, chunk: ChatChunk) -> None:
        for choice in chunk.choices:
            delta = choice.delta
            text = delta.content or delta.reasoning_content or delta.reasoning
            if text:
                self.add_text(stamp, text)
            if choice.finish_reason is not None:
                self._finished = True

        usage = chunk.usage
        if usage is not None and usage.completion_tokens:
            details = usage.prompt_tokens_details
            self.outcome.prompt_tokens = usage.prompt_tokens
            self.outcome.output_tokens = usage.completion_tokens
            self.outcome.cached_tokens = (details.cached_tokens if details else None) or 0

    def add_text(self, stamp: float, text: str) -> None:
        """Notes text that arrived at `stamp`: the first one makes the TTFT, others make gaps."""
        if math.isnan(self._last_piece):
            self.outcome.ttft_s = stamp - self._sent
        else:
            self.outcome.gaps_s.append(stamp - self._last_piece)
        self._last_piece = stamp
        self.text.append(text)

    def mark_complete(self) -> None:
        """Note that the server has said that this was all."""
        self._finished = True

    def finish(self) -> None:
        """Fill in the outcome's end: the stream is over, be it complete or cut short.

        Where the server tells no token counts, a piece counts as a token.
        """
        outcome = self.outcome
        if self._finished:
            outcome.error = ""  # an error after the complete answer does not count against it
        elif not outcome.error:
            outcome.error = "ended early"
        if not outcome.error and math.isnan(self._last_piece):
            outcome.error = "no token"
        outcome.e2e_s = math.nan if outcome.error else self._last_piece - self._sent
        outcome.output_tokens = outcome.output_tokens or len(self.text)


class HttpLoadClient:
    """Streams of one endpoint over kept connections. Not for threads; for greenlets.

    `key` is the endpoint's API key; empty: none is sent.
    """

    def __init__(self, facts: EndpointFacts, key: str = "") -> None:
        self._facts = facts
        self._headers = _json_headers(key) | {"accept": "text/event-stream"}
        self._idle: list[HttpConnection] = []

    def chat(self, outcome: LoadOutcome, messages: list[dict[str, str]], tokens: int) -> str:
        """Sends `messages` for an answer of `tokens` tokens; fills in `outcome`.

        Returns the answer's text: after an error within the stream the part that came, and nothing
        after a refusal or a broken connection. Such failures are not raised, but named in
        `outcome.error`.
        """
        body = json.dumps(chat_body(self._facts, messages, tokens)).encode()
        try:
            return self._send(outcome, body)
        except TimeoutError:
            outcome.error = "timeout"
        except OSError as error:
            outcome.error = type(error).__name__
        except ProtocolError as error:
            outcome.error = str(error)
        return ""

    def _send(self, outcome: LoadOutcome, body: bytes) -> str:
        began = time.perf_counter()  # the time of a new connection counts as the request's
        while self._idle:
            connection = self._idle.pop()
            sent_s = time.perf_counter()
            try:
                return self._exchange(connection, outcome, body, began)
            except (OSError, ProtocolError) as error:
                # A connection that the server gave up while it was idle is no failure: the next
                # connection is tried.
                if not _was_idle(connection, error, sent_s):
                    raise
        connection = HttpConnection(self._facts.url, TIMEOUT_S)
        return self._exchange(connection, outcome, body, began)

    def _exchange(
        self, connection: HttpConnection, outcome: LoadOutcome, body: bytes, began: float
    ) -> str:
        """Sends one request on this connection and reads its answer to the end."""
        reader = AnswerStreamReader(outcome, began)
        refusal_body: list[bytes] = []
        headers = self._headers | {"x-request-id": outcome.id}
        try:
            connection.send("POST", PATH, body, headers)
            for stamp, piece in connection.pieces():
                if connection.response.status == 200:
                    reader.feed(stamp, piece)
                else:
                    refusal_body.append(piece)
        except BaseException:
            connection.close()
            raise

        outcome.lags_s = connection.lags_s
        connection.lags_s = []  # the connection's next request begins a list of its own
        response = connection.response
        self._keep_or_close(connection)
        if response.status != 200:
            outcome.error = refusal(response.status, b"".join(refusal_body))
            return ""
        reader.finish()
        outcome.server_ttft_s = server_ttft_s(response.headers.get("server-timing", ""))
        return "".join(reader.text)

    def _keep_or_close(self, connection: HttpConnection) -> None:
        if connection.response.reusable and len(self._idle) < IDLE_CONNECTION_LIMIT:
            self._idle.append(connection)
        else:
            connection.close()


def _was_idle(connection: HttpConnection, error: Exception, sent_s: float) -> bool:
    """Returns whether the server had given the connection up before the request of `sent_s`.

    It looks so if no status came back, and the connection failed at once; not by a timeout.
    """
    if connection.response.status or isinstance(error, TimeoutError):
        return False
    return time.perf_counter() - sent_s < IDLE_LOSS_S


def _json_headers(key: str) -> dict[str, str]:
    headers = {"content-type": "application/json"}
    if key:
        headers["authorization"] = f"Bearer {key}"
    return headers


def chat_body(facts: EndpointFacts, messages: list[dict[str, str]], tokens: int) -> dict[str, Any]:
    """Returns the body of a request for an answer of `tokens` tokens."""
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
    """Returns "429 queue_full": the status, and the code or type that the body names.

    A code that is a number, as vLLM's, only repeats the status.
    """
    reasons: list[str] = []
    with suppress(ValueError, TypeError, KeyError, AttributeError):
        error = json.loads(body)["error"]
        values = (error.get("code"), error.get("type"))
        reasons = [value for value in values if value and isinstance(value, str)]
    return " ".join([str(status), *reasons[:1]])


def server_ttft_s(header: str) -> float:
    """Returns the seconds from arrival at the server to its first token, as a Diptych gateway says.

    They are the sum of `queue` and `prefill` in `server-timing`; nan if one of them is missing or is
    no number.
    """
    durations_ms = dict(re.findall(r"(\w[\w-]*);dur=([\d.]+)", header))
    try:
        return (float(durations_ms["queue"]) + float(durations_ms["prefill"])) / 1e3
    except (KeyError, ValueError):
        return math.nan


# ---- what is asked before the load ---------------------------------------------------------------


class ModelCard(NamedTuple):
    """What /v1/models says of the model."""

    name: str
    context: int  #: tokens of prompt and answer
    server: str  #: what software answers; empty if nothing says so


def probe_endpoint(url: str, key: str = "", model: str = "", grpc: str = "") -> EndpointFacts:
    """Finds out what the endpoint serves and takes. Raises LoadError.

    `url` may end in `/v1`. `model` empty: the first that the endpoint names. `grpc` is only noted.
    Costs about 15 to 30 requests of one token, which warm the server.
    """
    url = url.rstrip("/").removesuffix("/v1")
    try:
        with closing(_EndpointProber(url, key)) as prober:
            card = prober.find_model(model)
            words = probe(prober.count_tokens)
            takes_ignore_eos = prober.takes({"ignore_eos": True})
            tells_usage = prober.takes({"stream": True, "stream_options": {"include_usage": True}})
    except (OSError, ProtocolError, ValueError) as error:  # ValueError: of a URL that is none
        reason = str(error) or type(error).__name__
        raise LoadError(f"no endpoint at {url} ({reason}); start one with: diptych serve") from None
    return EndpointFacts(
        url=url,
        model=card.name,
        context=card.context,
        alphabet=words.alphabet,
        template=words.template,
        ignore_eos=takes_ignore_eos,
        usage=tells_usage,
        server=card.server,
        grpc=grpc,
    )


class _EndpointProber:
    """Asks an endpoint, request by request. Raises LoadError, OSError and ProtocolError."""

    def __init__(self, url: str, key: str) -> None:
        self._url = url
        self._headers = _json_headers(key)
        self._connection = HttpConnection(url, TIMEOUT_S)
        self._model = ""

    def close(self) -> None:
        self._connection.close()

    def find_model(self, name: str) -> ModelCard:
        """Finds the model that later requests are for: `name`, or the first one if empty."""
        status, body = self._request("GET", "/v1/models", None)
        try:
            cards = {card["id"]: card for card in body["data"]}
        except (KeyError, TypeError):
            reason = refusal(status, json.dumps(body).encode())
            raise LoadError(f"{self._url}: /v1/models answers {reason}") from None
        if name and name not in cards:
            raise LoadError(f"{self._url}: model {name!r} is not served")
        if not cards:
            raise LoadError(f"{self._url}: /v1/models names no model")
        card = cards[name or next(iter(cards))]
        self._model = card["id"]
        context = card.get("max_model_len") or card.get("context_length") or DEFAULT_CONTEXT
        server = card.get("owned_by") or self._connection.response.headers.get("server", "")
        return ModelCard(self._model, int(context), str(server))

    def count_tokens(self, text: str) -> int:
        """Returns the tokens of a prompt whose one message is `text`."""
        status, body = self._chat({}, text)
        try:
            return int(body["usage"]["prompt_tokens"])
        except (KeyError, TypeError):
            reason = refusal(status, json.dumps(body).encode())
            raise LoadError(f"{self._url}{PATH} answers {reason} without usage") from None

    def takes(self, fields: dict[str, Any]) -> bool:
        """Returns whether the endpoint answers a request that has these fields too.

        An endpoint that refuses fields answers with another status than 200. Raises LoadError if
        the status says that the endpoint is busy.
        """
        status, body = self._chat(fields, "the")
        if status in BUSY_STATUSES:
            reason = refusal(status, json.dumps(body).encode())
            raise LoadError(f"{self._url}{PATH} answers {reason} before the load: try again")
        return status == 200

    def _chat(self, fields: dict[str, Any], text: str) -> tuple[int, Any]:
        body = {
            "model": self._model,
            "max_tokens": 1,
            "temperature": 0,
            "messages": [{"role": "user", "content": text}],
            **fields,
        }
        return self._request("POST", PATH, body)

    def _request(self, method: str, path: str, body: dict[str, Any] | None) -> tuple[int, Any]:
        """Returns the status, and the answer's JSON or None."""
        payload = b"" if body is None else json.dumps(body).encode()
        sent_s = time.perf_counter()
        try:
            answer = self._exchange(method, path, payload)
        except (OSError, ProtocolError) as error:
            if not _was_idle(self._connection, error, sent_s):
                raise
            self._reconnect()  # and try once more
            answer = self._exchange(method, path, payload)
        response = self._connection.response
        if not response.reusable:
            self._reconnect()
            self._connection.response = response  # the caller may still read its headers
        try:
            return response.status, json.loads(answer)
        except ValueError:
            return response.status, None

    def _reconnect(self) -> None:
        self._connection.close()
        self._connection = HttpConnection(self._url, TIMEOUT_S)

    def _exchange(self, method: str, path: str, body: bytes) -> bytes:
        self._connection.send(method, path, body, self._headers)
        return self._connection.body()
