"""Separate prefill and decode workers on this machine, and the tokens of one engine alone.

Without an endpoint, a cluster of two prefill workers and one decode worker is started and stopped.
Every request is sent through both kinds of workers, so its KV blocks move between processes. Then
the same questions are answered by one engine in this process, and the token ids are compared.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from diptych import LLM
from diptych.loadtests.laptop import cluster
from diptych.loadtests.loopback import is_this_machine
from diptych.loadtests.sse import EventDecoder

DIPTYCH = Path(sys.executable).parent / "diptych"
SERVE_OPTIONS = ["--prefill", "2", "--decode", "1", "--set", "router.disaggregate=always"]
QUESTIONS = ["What is prefill?", "What is decode?", "What is a ticket?", "What is TTFT?"]
TOKENS_LIMIT = 64  #: of an answer
TIMEOUT_S = 60.0


@dataclass(slots=True)
class StreamedAnswer:
    """What a client sees of one answer."""

    sent_at: float = field(default_factory=time.perf_counter)
    route: str = ""  #: the workers that served it
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)  #: of each piece of text

    @property
    def ttft_ms(self) -> float:
        return (self.arrivals[0] - self.sent_at) * 1e3

    @property
    def itl_ms(self) -> float:
        return (self.arrivals[-1] - self.arrivals[0]) / max(1, len(self.arrivals) - 1) * 1e3


def body(question: str) -> dict[str, Any]:
    """Return the request that the cluster and the engine alone get."""
    return {
        "messages": [{"role": "user", "content": question}],
        "max_tokens": TOKENS_LIMIT,
        "return_token_ids": True,
    }


def ask(endpoint: str, question: str) -> StreamedAnswer:
    """Return the cluster's answer, streamed."""
    answer = StreamedAnswer()
    url = f"{endpoint}/v1/chat/completions"
    request = {**body(question), "stream": True}
    by_environment = not is_this_machine(url)  # no proxy knows a server of this machine
    with httpx.stream(
        "POST", url, json=request, timeout=TIMEOUT_S, trust_env=by_environment
    ) as response:
        if response.status_code != 200:
            response.read()
            sys.exit(f"{url} answered {response.status_code}: {response.text}")
        answer.route = response.headers.get("x-route", "").replace(",", " -> ")
        decoder = EventDecoder()  # httpx's iter_lines would cut a text at U+2028
        events = (event for content in response.iter_bytes() for event in decoder.feed(content))
        for event in events:
            if event.data == b"[DONE]":
                continue
            for choice in json.loads(event.data)["choices"]:
                answer.token_ids += choice.get("token_ids") or []
                piece = choice["delta"].get("content")
                if piece:
                    answer.text += piece
                    answer.arrivals.append(time.perf_counter())
    return answer


def main(
    endpoint: Annotated[
        str, typer.Option(envvar="DIPTYCH_ENDPOINT", help="A running cluster's URL.")
    ] = "",
) -> None:
    """Ask a cluster and an engine alone the same questions; exit code 1 if a token differs."""
    with ExitStack() as stack:
        if not endpoint:
            print(f"starting: diptych serve {' '.join(SERVE_OPTIONS)}")
            endpoint = stack.enter_context(cluster(str(DIPTYCH), SERVE_OPTIONS)).url
        answers = [ask(endpoint, question) for question in QUESTIONS]
    for question, answer in zip(QUESTIONS, answers, strict=True):
        print(f"\n{question}\n{answer.text}")
        print(f"{answer.route}   TTFT {answer.ttft_ms:.1f} ms   ITL {answer.itl_ms:.1f} ms")

    with LLM() as llm:
        alone = llm.run(body(question) for question in QUESTIONS)
    ids_alone = [completion["choices"][0]["token_ids"] for completion in alone]
    same_count = sum(
        answer.token_ids == ids for answer, ids in zip(answers, ids_alone, strict=True)
    )
    print(f"\nthe same token ids as one engine alone: {same_count} of {len(QUESTIONS)} answers")
    if same_count < len(QUESTIONS):
        sys.exit(1)


if __name__ == "__main__":
    typer.run(main)
