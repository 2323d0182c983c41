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
    error_message,
    fail,
    unreachable,
)


@dataclass(slots=True)
class Turn:
    """One answer as it came in. Times in seconds, of the monotonic clock."""

    text: str = ""
    route: str = ""
    hit_tokens: int = 0
    usage: dict[str, Any] = field(default_factory=dict)
    finish: str = ""
    asked: float = 0.0
    arrivals: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        gaps = [b - a for a, b in zip(self.arrivals, self.arrivals[1:], strict=False)]
        mean = sum(gaps) / len(gaps) * 1e3 if gaps else None
        return {
            "text": self.text,
            "finish_reason": self.finish,
            "route": self.route,
            "ttft_ms": round((self.arrivals[0] - self.asked) * 1e3, 1) if self.arrivals else None,
            "itl_ms": None if mean is None else round(mean, 2),
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
    if output not in ("text", "json"):
        fail(f"-o {output}: expected text or json", 2)
    messages = [{"role": "system", "content": system}] if system else []
    headers = {"authorization": f"Bearer {token}"} if token else {}
    try:
        client = httpx.Client(
            base_url=endpoint, headers=headers, timeout=httpx.Timeout(10, read=120)
        )
        client.get("/health")  # connects, so that TTFT is the server's
    except NO_ANSWER as error:
        unreachable(endpoint, error)
    for text in [question] if question else _lines():
        messages.append({"role": "user", "content": text})
        body: dict[str, Any] = {"model": model, "messages": messages}
        if max_tokens is not None:
            body["max_tokens"] = max_tokens
        if temperature is not None:
            body["temperature"] = temperature
        turn = _ask(client, body, echo=output == "text")
        messages.append({"role": "assistant", "content": turn.text})
        typer.echo(json.dumps(turn.summary()) if output == "json" else _stats(turn))


def _lines() -> Iterator[str]:
    while True:
        try:
            line = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            typer.echo()
            return
        if line:
            yield line


def _ask(client: httpx.Client, body: dict[str, Any], echo: bool) -> Turn:
    turn = Turn(asked=time.monotonic())
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    try:
        with client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.is_error:
                content = response.read()
                fail(error_message(content) or f"HTTP {response.status_code}")
            turn.route = response.headers.get("x-route", "")
            turn.hit_tokens = int(response.headers.get("x-prefix-hit-tokens", 0))
            for line in response.iter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    _take(turn, json.loads(line[6:]), echo)
    except NO_ANSWER as error:
        unreachable(str(client.base_url), error)
    if echo:
        sys.stdout.write("\n")
    if not turn.finish:
        fail("the answer broke off before its end")
    return turn


def _take(turn: Turn, event: dict[str, Any], echo: bool) -> None:
    if "error" in event:
        fail(event["error"]["message"])
    turn.usage = event.get("usage") or turn.usage
    for choice in event["choices"]:
        delta = choice["delta"].get("content") or ""
        if delta:
            turn.arrivals.append(time.monotonic())
            turn.text += delta
            if echo:
                sys.stdout.write(delta)
                sys.stdout.flush()
        turn.finish = choice["finish_reason"] or turn.finish


def _stats(turn: Turn) -> str:
    facts = turn.summary()
    itl = "-" if facts["itl_ms"] is None else f"{facts['itl_ms']:.1f} ms"
    tokens = turn.usage.get("completion_tokens", len(turn.arrivals))
    return (
        f"\n{turn.route.replace(',', ' -> ')}   TTFT {facts['ttft_ms']} ms   ITL {itl}   "
        f"{tokens} tokens   prefix hit {turn.hit_tokens}"
    )
