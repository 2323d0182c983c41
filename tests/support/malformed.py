"""Bodies that are nearly right: a valid one of each API, changed in a place or two."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

ASK: Any = [{"role": "user", "content": "What is prefill?"}]
CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
CITY["additionalProperties"] = False
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": CITY}}]
CHAT = {"messages": ASK, "max_tokens": 2, "stop": ["x"], "n": 1, "temperature": 0.5, "tools": TOOLS}
VALID: dict[str, dict] = {
    "/v1/chat/completions": CHAT | {"logit_bias": {"5": 1}, "response_format": {"type": "text"}},
    "/v1/completions": {"prompt": ["a", "b"], "max_tokens": 1, "logprobs": 1, "echo": True},
    "/v1/messages": {
        "model": "demo",
        "max_tokens": 2,
        "system": [{"type": "text", "text": "x"}],
        "messages": ASK,
        "tools": [{"name": "weather", "input_schema": CITY}],
    },
    "/v1/messages/count_tokens": {"model": "demo", "messages": ASK},
    "/v1/responses": {"input": ASK, "max_output_tokens": 2, "text": {"format": {"type": "text"}}},
    "/tokenize": {"messages": ASK},
    "/detokenize": {"tokens": [1, 2]},
}
ODD = [None, True, -1, 0, 1e308, 10**400, "", "\ud800", "x" * 9999, [], {}, [[[]]], [None]]
ODD += [{"": {}}, float("nan"), float("-inf"), 2**63, -(2**63), "\0", "{{ 7*7 }}", [1, "a"]]


def places(value: Any, path: tuple = ()) -> list[tuple]:
    """Where something can be changed."""
    found = [path] if path else []
    if isinstance(value, dict | list):
        inner = value.items() if isinstance(value, dict) else enumerate(value)
        found += [one for key, part in inner for one in places(part, (*path, key))]
    return found


def mutant(order: random.Random, body: dict) -> bytes:
    body = json.loads(json.dumps(body))
    for _ in range(order.randint(1, 2)):
        *path, last = order.choice(places(body))
        target: Any = body
        for key in path:
            target = target[key]
        kind = order.random()
        if kind < 0.7:
            target[last] = copy.deepcopy(order.choice(ODD))
        elif kind < 0.85 and isinstance(target, dict):
            target[f"{last}x"] = target.pop(last)
        elif not isinstance(target, list) or len(target) > 1:
            del target[last]
        if not body:
            return b"{"
    raw = json.dumps(body).encode()
    if order.random() < 0.3:
        at = order.randrange(len(raw))
        piece = order.choice([b"", b"\xff", b'"', b"[" * 500, b"\0", b"}", b"9" * 5000])
        raw = raw[:at] + piece + raw[at + order.randint(1, 4) :]
    return raw


def sentence(message: str) -> bool:
    """What an error may say: one line, of a size to read, nothing of our insides."""
    return 0 < len(message) <= 502 and "\n" not in message and "Traceback" not in message
