"""A loop over Anthropic's API as Claude Code makes it: system in blocks, many tools, streamed, results sent back.

The bodies have the fields and betas that Claude Code 2.1 sends. The tool is forced in the first turn, as the model of
the run does not decide to call one.
"""

from typing import Any

import anthropic
from features import API_KEY, MODEL, QUESTION, URL, feature, run_features

client = anthropic.Anthropic(base_url=URL, api_key=API_KEY, max_retries=0, timeout=60)
CACHED = {"cache_control": {"type": "ephemeral"}}
NAMES = ["Agent", "Bash", "Edit", "Glob", "Grep", "NotebookEdit", "Read", "Skill", "TaskCreate"]
NAMES += ["TaskList", "TaskStop", "TaskUpdate", "WebFetch", "WebSearch", "Workflow", "Write"]
TOOLS = [
    {
        "name": name,
        "description": f"Does what {name} does.",
        "input_schema": {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "type": "object",
            "properties": {"command": {"type": "string"}, "timeout": {"type": "number"}},
            "required": ["command"],
            "additionalProperties": False,
        },
    }
    for name in NAMES
]
SYSTEM = [
    {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1;"},
    {"type": "text", "text": "You are a coding agent.", **CACHED},
]
BETAS = [
    *("claude-code-20250219", "interleaved-thinking-2025-05-14", "effort-2025-11-24"),
    *("context-management-2025-06-27", "prompt-caching-scope-2026-01-05"),
]
BODY: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 2000,
    "system": SYSTEM,
    "tools": TOOLS,
    "metadata": {"user_id": '{"session_id": "c0ffee"}'},
    "thinking": {"type": "adaptive"},
    "betas": BETAS,
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
}


def turn(messages: list[Any], **fields: Any) -> Any:
    """Stream one turn and return its message."""
    with client.beta.messages.stream(messages=messages, **BODY, **fields) as stream:
        events = [event.type for event in stream]
        message = stream.get_final_message()
    assert "message_delta" in events
    assert message.usage.output_tokens > 0
    return message


def first_messages() -> list[Any]:
    reminder = {"type": "text", "text": "<system-reminder>Today is Monday.</system-reminder>"}
    question = {"type": "text", "text": QUESTION, **CACHED}
    return [
        {"role": "user", "content": [reminder, question]},
        {"role": "system", "content": "Available agent types: general."},
    ]


@feature("messages tools")
def tool_loop() -> None:
    messages = first_messages()
    for step in range(2):
        call = turn(messages, tool_choice={"type": "tool", "name": "Bash"}).content[-1]
        assert call.type == "tool_use"
        assert set(call.input) >= {"command"}
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "Exit code 1"}
        messages += [
            {
                "role": "assistant",
                "content": [call.model_dump(include={"type", "id", "name", "input"})],
            },
            {"role": "user", "content": [{**result, "is_error": step == 0, **CACHED}]},
        ]
    answer = turn(messages)
    assert answer.content[-1].text
    assert answer.stop_reason in ("end_turn", "max_tokens")


@feature("count tokens")
def count_tokens() -> None:
    counted = client.beta.messages.count_tokens(
        model=MODEL, messages=first_messages(), system=SYSTEM, tools=TOOLS
    )
    assert counted.input_tokens > 100


run_features()
