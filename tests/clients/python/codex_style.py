"""A loop over the Responses API as the Codex CLI makes it: streamed, not stored, all items sent back.

The bodies have the fields and the kinds of tools that Codex 0.169 sends. The tool is forced in the first turn, as the
model of the run does not decide to call one.
"""

from typing import Any

from features import API_KEY, MODEL, QUESTION, V1_URL, feature, run_features
from openai import OpenAI

client = OpenAI(base_url=V1_URL, api_key=API_KEY, max_retries=0, timeout=60)
SHELL = {
    "type": "function",
    "name": "exec_command",
    "description": "Runs a command in a PTY.",
    "strict": False,
    "parameters": {
        "type": "object",
        "properties": {"cmd": {"type": "string"}, "login": {"type": "boolean"}},
        "required": ["cmd"],
        "additionalProperties": False,
    },
}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}
AGENTS = {
    "type": "namespace",
    "name": "multi_agent_v1",
    "description": "Tools for spawning and managing sub-agents.",
    "tools": [{**SHELL, "name": "close_agent"}],
}
TOOLS = [SHELL, PATCH, AGENTS, {"type": "web_search", "external_web_access": False}]
BODY: dict[str, Any] = {
    "model": MODEL,
    "tools": TOOLS,
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "c0ffee",
    "max_output_tokens": 200,
    "extra_body": {"client_metadata": {"session_id": "c0ffee"}},
}


def first_input() -> list[Any]:
    developer = [{"type": "input_text", "text": "You are a coding agent."}]
    user = [{"type": "input_text", "text": QUESTION}]
    return [
        {"type": "message", "role": "developer", "content": developer},
        {"type": "message", "id": "msg_1", "role": "user", "content": user},
    ]


def turn(items: list[Any], tool_choice: Any) -> list[Any]:
    """Stream one turn, and return its items as `response.output_item.done` has them."""
    done = []
    with client.responses.create(
        input=items, tool_choice=tool_choice, stream=True, **BODY
    ) as events:
        for event in events:
            if event.type == "response.output_item.done":
                done.append(event.item)
    assert event.type in ("response.completed", "response.incomplete")
    assert event.response.usage.total_tokens > 0
    return done


def loop(tool_choice: dict[str, str], expected_type: str) -> Any:
    """Force a call, send its output back, and expect a text; return the call."""
    items = first_input()
    *_, call = turn(items, tool_choice)
    assert call.type == expected_type, call
    sent_call = call.model_dump(exclude_none=True)
    output = {"type": f"{call.type}_output", "call_id": call.call_id, "output": "Exit code: 0"}
    items += [sent_call, output]
    message = turn(items, "auto")[-1]
    assert message.type == "message"
    assert message.content[0].text
    return call


@feature("responses tools streamed")
def function_loop() -> None:
    call = loop({"type": "function", "name": "exec_command"}, "function_call")
    assert call.name == "exec_command"


@feature("custom tools")
def custom_loop() -> None:
    call = loop({"type": "custom", "name": "apply_patch"}, "custom_tool_call")
    assert call.name == "apply_patch"
    assert isinstance(call.input, str)


@feature("namespaces of tools")
def namespace_loop() -> None:
    choice = {"type": "function", "name": "close_agent", "namespace": "multi_agent_v1"}
    call = loop(choice, "function_call")
    assert (call.namespace, call.name) == ("multi_agent_v1", "close_agent")


run_features()
