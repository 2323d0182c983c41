"""litellm as a client, in a process of its own: `python litellm_client.py URL`.

Prints, as JSON, what a program that uses litellm sees. Its dependencies exclude ours (`litellm.txt`
has them), so that it imports nothing of this project.
"""

import json
import os
import sys
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # nothing is fetched

import litellm

ASK = [{"role": "user", "content": "What is prefill?"}]
CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
CITY["additionalProperties"] = False
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": CITY}}]
SHAPED = {"type": "json_schema", "json_schema": {"name": "c", "schema": CITY, "strict": True}}


def ask(**more: Any) -> Any:
    given = {"model": "openai/demo", "api_base": f"{sys.argv[1]}/v1", "api_key": "none"}
    return litellm.completion(**given, messages=ASK, num_retries=0, **more)


def streamed(**more: Any) -> dict:
    chunks = list(ask(stream=True, stream_options={"include_usage": True}, **more))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    usage = next(chunk.usage for chunk in chunks if getattr(chunk, "usage", None))
    return {
        "text": "".join(delta.content or "" for delta in deltas),
        "pieces": len(deltas),
        "arguments": "".join(call.function.arguments for call in calls),
        "tokens": usage.completion_tokens,
    }


def refused() -> str:
    try:
        ask(temperature=7)
    except litellm.BadRequestError as error:
        return str(error)
    return ""


def main() -> None:
    whole = ask()
    forced = ask(tools=TOOLS, tool_choice="required").choices[0]
    claude = litellm.completion(
        model="anthropic/demo", api_base=sys.argv[1], api_key="none", messages=ASK, max_tokens=99
    )
    told = {
        "text": whole.choices[0].message.content,
        "finish": whole.choices[0].finish_reason,
        "tokens": whole.usage.completion_tokens,
        "prompt": whole.usage.prompt_tokens,
        "streamed": streamed(),
        "call": json.loads(forced.message.tool_calls[0].function.arguments),
        "call_finish": forced.finish_reason,
        "streamed_call": streamed(tools=TOOLS, tool_choice="required"),
        "shaped": json.loads(ask(response_format=SHAPED).choices[0].message.content),
        "refused": refused(),
        "claude": claude.choices[0].message.content,
    }
    print(json.dumps(told))


main()
