"""First tokens that wait for the second, on a live cluster: who waits, why, and what is the same."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.live.test_demo import ANSWER, QUESTION
from tests.support.live import Live, eventually

pytestmark = pytest.mark.cluster

LEARNED = 12  #: answers after which the gateway knows how long the hand-over takes


def stream(live: Live, **headers: str) -> tuple[str, str]:
    """Streams the answer; returns the request's id and the text."""
    body = {"messages": [{"role": "user", "content": QUESTION}], "stream": True}
    pieces: list[str] = []
    request_id = ""
    url = f"{live.url}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, headers=headers, timeout=120) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                request_id = event["id"]
                pieces += [choice["delta"].get("content", "") for choice in event["choices"]]
    return request_id, "".join(pieces)


def observed(live: Live, request_id: str) -> dict[str, Any]:
    """What `explain` says came of the request, once that is known."""

    def ended() -> dict[str, Any] | None:
        answer = json.loads(live.cli("explain", request_id, "-o", "json").stdout)
        (decision,) = answer["decisions"]
        return decision["observed"] if "reason" in decision["observed"] else None

    return eventually(ended)


def test_a_first_token_waits_only_where_its_targets_ask_for_it(live: Live) -> None:
    for _ in range(LEARNED):
        assert live.chat(QUESTION).status_code == 200

    # Nothing follows within 1 ms: the first token waits for the second.
    held_id, text = stream(live, **{"x-slo-itl": "1ms", "x-slo-ttft": "60s"})
    held = observed(live, held_id)
    assert text == ANSWER
    assert held["first_token_release"] in ("second_expected", "second_came")
    assert held["first_token_held_ms"] > 0
    assert "first token held for" in live.cli("explain", held_id).stdout

    # Everything follows within a minute, so nothing waits for it.
    loose_id, text = stream(live, **{"x-slo-itl": "60s", "x-slo-ttft": "60s"})
    assert text == ANSWER
    loose = observed(live, loose_id)
    assert (loose["first_token_release"], loose["first_token_held_ms"]) == ("in_time", 0.0)

    # A first token that is late already waits for nothing.
    late_id, text = stream(live, **{"x-slo-itl": "1ms", "x-slo-ttft": "1ms"})
    assert text == ANSWER
    late = observed(live, late_id)
    assert (late["first_token_release"], late["first_token_held_ms"]) == ("ttft_target", 0.0)
