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
ITEMS: Any = [
    {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "x"}], "summary": []},
    {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "dry"},
    {"type": "custom_tool_call", "call_id": "d", "name": "patch", "input": "x", "namespace": "n"},
    {"type": "custom_tool_call_output", "call_id": "d", "output": "done"},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]},
]
PATCH: Any = {"type": "custom", "name": "patch", "format": {"definition": "x", "syntax": "lark"}}
RESPONSE_TOOLS: Any = [
    {"type": "function", "name": "weather", "parameters": CITY},
    PATCH,
    {"type": "namespace", "name": "n", "description": "x", "tools": [PATCH]},
]
STRUCTURAL_TAG: Any = {
    "type": "structural_tag",
    "structures": [{"begin": "<f>", "schema": {"enum": [1]}, "end": "</f>"}],
    "triggers": ["<f"],
}
CHAT = {"messages": ASK, "max_tokens": 2, "stop": ["x"], "n": 1, "temperature": 0.5, "tools": TOOLS}
VALID: dict[str, dict] = {
    "/v1/chat/completions": CHAT | {"logit_bias": {"5": 1}, "response_format": {"type": "text"}},
    "/v1/completions": {"prompt": ["a", "b"], "max_tokens": 1, "logprobs": 1, "echo": True}
    | {"structured_outputs": {"structural_tag": STRUCTURAL_TAG}},
    "/v1/messages": {
        "model": "demo",
        "max_tokens": 2,
        "system": [{"type": "text", "text": "x"}],
        "messages": ASK,
        "tools": [{"name": "weather", "input_schema": CITY}],
    },
    "/v1/messages/count_tokens": {"model": "demo", "messages": ASK},
    "/v1/responses": {
        "input": [*ASK, *ITEMS],
        "max_output_tokens": 2,
        "text": {"format": {"type": "text"}},
        "tools": RESPONSE_TOOLS,
        "tool_choice": "auto",
        "reasoning": {},
    },
    "/tokenize": {"messages": ASK},
    "/detokenize": {"tokens": [1, 2]},
}
ODD = [None, True, -1, 0, 1e308, 10**400, "", "\ud800", "x" * 9999, [], {}, [[[]]], [None]]
ODD += [{"": {}}, float("nan"), float("-inf"), 2**63, -(2**63), "\0", "{{ 7*7 }}", [1, "a"]]
ODD += [{"type": "web_search", "filters": {}}]
#: Names of fields that no API has, and some that others have.
ODD_NAMES = ["", " ", "\r\n", "a: b\r\nset-cookie: c", "\0", "é", "漢" * 300, "🙂" * 5000, "%0d%0a"]
ODD_NAMES += [",", ";did-you-mean=", '"', "a.b", "x" * 99_999, "__class__", "model_fields", "*"]
ODD_NAMES += ["model_extra", "__pydantic_extra__", "reading", "ignored_fields", "self", "cls"]
ODD_NAMES += ["maxTokens", "temprature", "store", "use_beam_search", "best_of", "include", "thread"]
ODD_NAMES += [f"field_{number}" for number in range(40)]
#: Fields that are read, and that no body above has: they get odd values, too.
ODD_NAMES += ["prompt_logprobs", "truncate_prompt_tokens", "truncation_side", "return_token_ids"]
ODD_NAMES += ["continue_final_message", "add_generation_prompt", "tool_choice", "tool_calls"]
ODD_NAMES += ["parallel_tool_calls", "include_reasoning", "reasoning_effort", "documents", "seed"]
ODD_NAMES += ["chat_template_kwargs", "stream_options", "structured_outputs", "output_config"]
ODD_NAMES += ["thinking", "cache_control", "refusal", "reasoning", "role", "add_special_tokens"]
ODD_NAMES += ["previous_response_id", "truncation", "enable_response_messages", "tools", "status"]
ODD_NAMES += ["logprobs", "top_logprobs", "echo", "stop_token_ids", "min_tokens", "stream"]
ODD_NAMES += ["ebnf", "guided_grammar", "structural_tag", "format", "namespace", "triggers"]


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
        elif kind < 0.8 and isinstance(target, dict):
            target[f"{last}x"] = target.pop(last)
        elif kind < 0.9 and isinstance(target, dict):
            names = order.choices(ODD_NAMES, k=order.choice([1, 1, 1, 40]))
            target.update({name: copy.deepcopy(order.choice(ODD)) for name in names})
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
