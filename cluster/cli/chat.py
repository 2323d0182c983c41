"""`diptych chat`: ask, stream the answer, then show route, TTFT and ITL."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

import httpx
import typer

from .common import (
    DEFAULT_ENDPOINT,
    NO_ANSWER,
    ApiKey,
    Endpoint,
    check_output,
    error_message,
    fail,
    unreachable,
)

READ_TIMEOUT_S = 120.0  #: Between two pieces of an answer.
CONNECT_TIMEOUT_S = 10.0
EVENT_PREFIX = "data: "
LAST_EVENT = "data: [DONE]"  #: OpenAI's mark of the stream's end, which is no JSON.


@dataclass(slots=True)
class ChatTurn:
    """One answer as it arrived."""

    #: When the question was sent, by the monotonic clock.
    sent_at: float
    text: str = ""
    #: The workers that served the request, the prefill worker first, separated by commas.
    route: str = ""
    #: Of the prompt, the tokens that were cached.
    hit_tokens: int = 0
    usage: dict[str, Any] = field(default_factory=dict)  #: OpenAI's; it comes with the last event.
    #: Empty while the answer is incomplete.
    finish_reason: str = ""
    #: When each piece of text arrived, by the monotonic clock.
    arrivals: list[float] = field(default_factory=list)

    @property
    def ttft_ms(self) -> float | None:
        """The time to the first piece of text, in milliseconds; None before it."""
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

    def summary(self) -> dict[str, Any]:
        """Return what `-o json` prints."""
        return {
            "text": self.text,
            "finish_reason": self.finish_reason,
            "route": self.route,
            "ttft_ms": self.ttft_ms,
            "itl_ms": self.itl_ms,
            "prefix_hit_tokens": self.hit_tokens,
            "usage": self.usage,
        }


def chat(
    question: Annotated[
        str | None, typer.Argument(help="Asked once; without it, a dialogue.")
    ] = None,
    model: Annotated[str, typer.Option(help="Model name. Default: the served one.")] = "",
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer, in tokens.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    output: Annotated[str, typer.Option("-o", "--output", help="text or json")] = "text",
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    token: ApiKey = "",
) -> None:
    """Chat with the served model; shows route, TTFT and ITL after each answer."""
    check_output(output, "text", "json")
    messages = [{"role": "system", "content": system}] if system else []
    client = _connect(endpoint, token)
    for text in [question] if question else _typed_lines():
        messages.append({"role": "user", "content": text})
        body: dict[str, Any] = {"model": model, "messages": messages}
        if max_tokens is not None:
            body["max_tokens"] = max_tokens
        if temperature is not None:
            body["temperature"] = temperature
        turn = _ask(client, body, echo=output == "text")
        messages.append({"role": "assistant", "content": turn.text})
        typer.echo(json.dumps(turn.summary()) if output == "json" else _describe(turn))


def _connect(endpoint: str, token: str) -> httpx.Client:
    """Return a connected client, so that the first TTFT is the server's alone."""
    timeout = httpx.Timeout(CONNECT_TIMEOUT_S, read=READ_TIMEOUT_S)
    headers = {"authorization": f"Bearer {token}"} if token else {}
    try:
        client = httpx.Client(base_url=endpoint, headers=headers, timeout=timeout)
        client.get("/health")
    except NO_ANSWER as error:
        unreachable(endpoint, error)
    return client


def _typed_lines() -> Iterator[str]:
    """Yield what the user types, until ^C or ^D."""
    while True:
        try:
            line = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            typer.echo()
            return
        if line:
            yield line


def _ask(client: httpx.Client, body: dict[str, Any], *, echo: bool) -> ChatTurn:
    """Return the whole answer; with `echo` its text is printed as it arrives."""
    turn = ChatTurn(sent_at=time.monotonic())
    streamed_body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    try:
        with client.stream("POST", "/v1/chat/completions", json=streamed_body) as response:
            if response.is_error:
                content = response.read()
                fail(error_message(content) or f"HTTP {response.status_code}")
            turn.route = response.headers.get("x-route", "")
            turn.hit_tokens = int(response.headers.get("x-prefix-hit-tokens", 0))
            for line in response.iter_lines():
                if line.startswith(EVENT_PREFIX) and line != LAST_EVENT:
                    _add_event(turn, json.loads(line.removeprefix(EVENT_PREFIX)), echo=echo)
    except NO_ANSWER as error:
        unreachable(str(client.base_url), error)
    if echo:
        sys.stdout.write("\n")
    if not turn.finish_reason:
        fail("the answer broke off before its end")
    return turn


def _add_event(turn: ChatTurn, event: dict[str, Any], *, echo: bool) -> None:
    """Add a chunk of the stream to the answer. Fails if it is the error that breaks the answer off.

    A chunk with empty text counts as no arrival.
    """
    if "error" in event:
        fail(event["error"]["message"])
    turn.usage = event.get("usage") or turn.usage
    for choice in event["choices"]:
        text = choice["delta"].get("content") or ""
        if text:
            turn.arrivals.append(time.monotonic())
            turn.text += text
            if echo:
                sys.stdout.write(text)
                sys.stdout.flush()
        turn.finish_reason = choice["finish_reason"] or turn.finish_reason


def _describe(turn: ChatTurn) -> str:
    """Return the line below an answer; without usage, pieces of text are counted as tokens."""
    route = turn.route.replace(",", " -> ")
    itl = "-" if turn.itl_ms is None else f"{turn.itl_ms:.1f} ms"
    tokens = turn.usage.get("completion_tokens", len(turn.arrivals))
    return (
        f"\n{route}   TTFT {turn.ttft_ms} ms   ITL {itl}   "
        f"{tokens} tokens   prefix hit {turn.hit_tokens}"
    )
