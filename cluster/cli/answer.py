"""One answer of the gateway's chat API, streamed: for `diptych chat` and `diptych run`."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from .common import (
    NO_ANSWER,
    error_message,
    event_data,
    fail,
    gateway_url,
    http_client,
    no_gateway,
    unreachable,
)
from .terminal import AnswerWriter

READ_TIMEOUT_S = 120.0  #: Before an answer, and between two pieces of it.
CONNECT_TIMEOUT_S = 10.0
LAST_EVENT_DATA = b"[DONE]"  #: OpenAI's mark of the stream's end, which is no JSON.
JSON_HEADERS = {"content-type": "application/json"}
BROKEN_OFF = "the answer broke off before its end"
FILES_LIMIT_BYTES = 8 << 20  #: Of all files of `--file` together; a gateway's limit is 8 MiB.
INTERRUPTED = 130  #: The exit code of a command that ^C ended, as shells have it.


def check_temperature(temperature: float | None) -> float | None:
    """Return the value of the option. Raises typer.BadParameter for nan and inf, which JSON lacks."""
    if temperature is not None and not math.isfinite(temperature):
        raise typer.BadParameter("expected a number")
    return temperature


# Options that the commands which ask have in common.
ModelName = Annotated[str, typer.Option(help="Model name. Default: the served one.")]
SystemPrompt = Annotated[str | None, typer.Option(help="System prompt.")]
MaxTokens = Annotated[int | None, typer.Option(help="Longest answer, in tokens.")]
Temperature = Annotated[float | None, typer.Option(help="0 is greedy.", callback=check_temperature)]
AnswerOutput = Annotated[str, typer.Option("-o", "--output", help="text or json")]


class AnswerError(Exception):
    """There is no whole answer; the message is one sentence that says why."""


@dataclass(slots=True)
class ReceivedAnswer:
    """One answer as it arrives, with its times and what the server says of it."""

    #: When the question was sent, by the monotonic clock.
    sent_at: float
    text: str = ""
    #: What the model thought before its answer; empty of models that do not think.
    reasoning: str = ""
    #: By this id `diptych explain` finds the request.
    request_id: str = ""
    #: The workers that served the request, the prefill worker first, separated by commas.
    route: str = ""
    #: Of the prompt, the tokens that were cached.
    hit_tokens: int = 0
    usage: dict[str, Any] = field(default_factory=dict)  #: OpenAI's; it comes with the last chunk.
    #: Empty while the answer is incomplete.
    finish_reason: str = ""
    #: When each piece of text or of thinking arrived, by the monotonic clock.
    arrivals: list[float] = field(default_factory=list)

    @property
    def ttft_ms(self) -> float | None:
        """The time to the first piece of text or of thinking, in milliseconds; None before it."""
        if not self.arrivals:
            return None
        return round((self.arrivals[0] - self.sent_at) * 1e3, 1)

    @property
    def itl_ms(self) -> float | None:
        """The mean gap between two pieces, in milliseconds; None of fewer than two pieces."""
        gap_count = len(self.arrivals) - 1
        if gap_count < 1:
            return None
        return round((self.arrivals[-1] - self.arrivals[0]) / gap_count * 1e3, 2)

    @property
    def tokens(self) -> int:
        """The tokens of the answer; without usage, pieces of text and of thinking are counted."""
        count: int = self.usage.get("completion_tokens", len(self.arrivals))
        return count

    def summary(self) -> dict[str, Any]:
        """Return what `-o json` prints."""
        return {
            "text": self.text,
            "reasoning": self.reasoning,
            "finish_reason": self.finish_reason,
            "request_id": self.request_id,
            "route": self.route,
            "ttft_ms": self.ttft_ms,
            "itl_ms": self.itl_ms,
            "prefix_hit_tokens": self.hit_tokens,
            "usage": self.usage,
        }


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """What is asked of every answer of a dialogue; None leaves it to the server."""

    model: str = ""
    max_tokens: int | None = None
    temperature: float | None = None

    def body(self, messages: list[dict[str, str]]) -> dict[str, Any]:
        """Return the body of a streamed `POST /v1/chat/completions`."""
        body: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.max_tokens is not None:
            body["max_tokens"] = self.max_tokens
        if self.temperature is not None:
            body["temperature"] = self.temperature
        return body


def no_piece(_: str) -> None:
    """Do nothing with a piece of an answer."""


@dataclass(frozen=True, slots=True)
class PieceSink:
    """Who gets the pieces of an answer as they arrive."""

    on_text: Callable[[str], None] = no_piece
    on_reasoning: Callable[[str], None] = no_piece


def connect(endpoint: str, token: str) -> httpx.Client:
    """Return a connected client, so that the first TTFT is the server's alone.

    `endpoint` may be `common.HERE`. If no gateway answers, a sentence ends the command.
    """
    endpoint = gateway_url(endpoint)
    timeout = httpx.Timeout(CONNECT_TIMEOUT_S, read=READ_TIMEOUT_S)
    headers = {"authorization": f"Bearer {token}"} if token else {}
    try:
        client = http_client(endpoint, headers, timeout)
        client.get("/health")
    except NO_ANSWER as error:
        unreachable(endpoint, error)
    return client


def ask(
    client: httpx.Client, body: dict[str, Any], answer: ReceivedAnswer, sink: PieceSink
) -> None:
    """Send the body, and add what arrives to `answer`, until the answer is whole.

    Raises AnswerError, and what the sink raises. Whatever raises, `answer` has what had arrived, and
    the connection is closed, so that the server computes no further. A body that is no text in
    UTF-8 ends the command with exit code 2.
    """
    content = _encode(body)
    # Closed at once, and not when the generator is collected: that closes the connection.
    with contextlib.closing(_receive_events(client, content, answer)) as events:
        for event in events:
            add_event(answer, event, sink)
    if not answer.finish_reason:
        raise AnswerError(BROKEN_OFF)


def _encode(body: dict[str, Any]) -> bytes:
    """Return the body as JSON. What is no text in UTF-8 ends the command with a sentence.

    Such text comes from arguments and, in some locales, from stdin: Python keeps its bytes as
    surrogates.
    """
    try:
        return json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        fail("what is asked is no text in UTF-8", 2)


def _receive_events(
    client: httpx.Client, content: bytes, answer: ReceivedAnswer
) -> Generator[dict[str, Any], None, None]:
    """Send the body; yield the chunks of the stream, after the headers were added to `answer`.

    Raises AnswerError.
    """
    has_begun = False
    try:
        with client.stream(
            "POST", "/v1/chat/completions", content=content, headers=JSON_HEADERS
        ) as response:
            has_begun = True
            if not response.is_success:
                problem = error_message(response.read()) or f"HTTP {response.status_code}"
                raise AnswerError(problem)
            answer.request_id = response.headers.get("x-request-id", "")
            answer.route = response.headers.get("x-route", "")
            answer.hit_tokens = int(response.headers.get("x-prefix-hit-tokens", 0))
            for data in event_data(response):
                if data != LAST_EVENT_DATA:
                    yield json.loads(data)
    except httpx.HTTPError as error:
        if has_begun:
            raise AnswerError(BROKEN_OFF) from None
        if isinstance(error, httpx.ReadTimeout):
            raise AnswerError(f"no answer within {READ_TIMEOUT_S:g} s") from None
        raise AnswerError(no_gateway(str(client.base_url), error)) from None
    except ValueError:
        raise AnswerError(f"{client.base_url} does not answer as a gateway does") from None


def new_answer() -> ReceivedAnswer:
    """Return the answer, still empty, of a question that is sent now."""
    return ReceivedAnswer(sent_at=time.monotonic())


def add_event(answer: ReceivedAnswer, event: dict[str, Any], sink: PieceSink) -> None:
    """Add a chunk of the stream to the answer. Raises AnswerError if the chunk is an error.

    A chunk with empty text counts as no arrival.
    """
    if "error" in event:
        raise AnswerError(event["error"]["message"])
    answer.usage = event.get("usage") or answer.usage
    for choice in event["choices"]:
        reasoning = choice["delta"].get("reasoning_content") or ""
        text = choice["delta"].get("content") or ""
        if reasoning or text:
            answer.arrivals.append(time.monotonic())
        if reasoning:
            answer.reasoning += reasoning
            sink.on_reasoning(reasoning)
        if text:
            answer.text += text
            sink.on_text(text)
        answer.finish_reason = choice["finish_reason"] or answer.finish_reason


@contextlib.contextmanager
def one_answer(writer: AnswerWriter) -> Iterator[None]:
    """End the answer's last line when the context is left; what goes wrong ends the command.

    The exit code is 1 after an AnswerError, whose sentence is printed, and 130 after ^C.
    """
    try:
        yield
    except AnswerError as error:
        writer.end()
        fail(str(error))
    except KeyboardInterrupt:
        writer.end()
        raise typer.Exit(INTERRUPTED) from None
    writer.end()


def read_files(files: Iterable[Path]) -> str:
    """Return the texts of all files, with an empty line behind each.

    A file that cannot be read, or that makes them too long, ends the command with exit code 2.
    """
    texts = []
    total_bytes = 0
    for file in files:
        try:
            with file.open("rb") as stream:
                content = stream.read(FILES_LIMIT_BYTES + 1)
        except OSError as error:
            fail(f"cannot read {file}: {error.strerror}", 2)
        total_bytes += len(content)
        # Before decoding: what was read of a longer file may end within a character.
        if total_bytes > FILES_LIMIT_BYTES:
            fail(f"--file: more than {FILES_LIMIT_BYTES >> 20} MiB of text", 2)
        try:
            texts.append(content.decode())
        except UnicodeDecodeError:
            fail(f"{file} is no text in UTF-8", 2)
    return "".join(f"{text.rstrip()}\n\n" for text in texts)
