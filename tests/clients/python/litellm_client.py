"""litellm: chat, tools and schemas over OpenAI's API, and Anthropic's messages."""

import json
import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # nothing is fetched

import litellm
from features import API_KEY, MODEL, QUESTION, URL, V1_URL, feature, refusal, run_features

MESSAGES = [{"role": "user", "content": QUESTION}]
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": CITY}}]


def ask(**fields: object) -> object:
    return litellm.completion(
        model=f"openai/{MODEL}",
        api_base=V1_URL,
        api_key=API_KEY,
        messages=MESSAGES,
        num_retries=0,
        timeout=60,
        **fields,
    )


@feature("chat")
def chat() -> None:
    assert ask().choices[0].message.content


@feature("stream")
def stream() -> None:
    assert len(list(ask(stream=True))) > 5


@feature("usage")
def usage() -> None:
    chunks = list(ask(stream=True, stream_options={"include_usage": True}))
    [counted] = [chunk.usage for chunk in chunks if getattr(chunk, "usage", None)]
    assert counted.completion_tokens > 5


@feature("tools")
def tools() -> None:
    call = ask(tools=TOOLS, tool_choice="required").choices[0].message.tool_calls[0]
    assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")


@feature("structured")
def structured() -> None:
    schema = {"name": "city", "schema": CITY, "strict": True}
    answer = ask(response_format={"type": "json_schema", "json_schema": schema})
    assert json.loads(answer.choices[0].message.content)["city"] in ("Rome", "Oslo")


@feature("logprobs")
def logprobs() -> None:
    assert ask(logprobs=True, top_logprobs=2, max_tokens=5).choices[0].logprobs


@feature("errors")
def errors() -> None:
    assert "temperature" in str(refusal(litellm.BadRequestError, lambda: ask(temperature=7)))


@feature("responses")
def responses() -> None:
    answer = litellm.responses(
        model=f"openai/{MODEL}", api_base=V1_URL, api_key=API_KEY, input=QUESTION, timeout=60
    )
    assert answer.output


@feature("messages")
def messages() -> None:
    answer = litellm.completion(
        model=f"anthropic/{MODEL}",
        api_base=URL,
        api_key=API_KEY,
        messages=MESSAGES,
        max_tokens=99,
        timeout=60,
    )
    assert answer.choices[0].message.content


@feature("hosted vllm")
def hosted_vllm() -> None:
    answer = litellm.completion(
        model=f"hosted_vllm/{MODEL}",
        api_base=V1_URL,
        api_key=API_KEY,
        messages=MESSAGES,
        timeout=60,
        reasoning_effort="low",
    )
    assert answer.choices[0].message.content


run_features()
