"""LangChain: ChatOpenAI over chat completions and the Responses API, and ChatAnthropic."""

from features import API_KEY, MODEL, QUESTION, URL, V1_URL, feature, refusal, run_features
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from openai import BadRequestError
from pydantic import BaseModel


class Weather(BaseModel):
    """Where to look."""

    city: str


def chat_model(**settings: object) -> ChatOpenAI:
    return ChatOpenAI(
        model=MODEL,
        base_url=V1_URL,
        api_key=API_KEY,
        max_retries=0,
        timeout=60,
        stream_usage=True,
        **settings,
    )


def messages_model(**settings: object) -> ChatAnthropic:
    return ChatAnthropic(
        model_name=MODEL, base_url=URL, api_key=API_KEY, max_retries=0, timeout=60, **settings
    )


def call_and_answer(model: ChatOpenAI | ChatAnthropic) -> None:
    """Force a call, hand its result back, and expect a text."""
    asked = model.bind_tools([Weather], tool_choice="any").invoke(QUESTION)
    assert asked.tool_calls[0]["name"] == "Weather"
    results = [ToolMessage("dry", tool_call_id=call["id"]) for call in asked.tool_calls]
    turns = [HumanMessage(QUESTION), asked, *results]
    assert model.bind_tools([Weather]).invoke(turns).content


@feature("chat")
def chat() -> None:
    assert chat_model().invoke(QUESTION).content


@feature("stream")
def stream() -> None:
    assert len([piece for piece in chat_model().stream(QUESTION) if piece.content]) > 5


@feature("usage")
def usage() -> None:
    total = None
    for piece in chat_model().stream(QUESTION):
        total = piece if total is None else total + piece
    assert total.usage_metadata["output_tokens"] > 5


@feature("tools")
def tools() -> None:
    call_and_answer(chat_model())


@feature("structured")
def structured() -> None:
    for method in ("json_schema", "function_calling"):
        filled = chat_model().with_structured_output(Weather, method=method).invoke(QUESTION)
        assert isinstance(filled, Weather)


@feature("logprobs")
def logprobs() -> None:
    answer = chat_model(logprobs=True, top_logprobs=2, max_tokens=5).invoke(QUESTION)
    assert len(answer.response_metadata["logprobs"]["content"]) == 5


@feature("errors")
def errors() -> None:
    error = refusal(BadRequestError, lambda: chat_model().invoke(QUESTION, temperature=7))
    assert "temperature" in str(error)


@feature("responses")
def responses() -> None:
    assert chat_model(use_responses_api=True).invoke(QUESTION).content


@feature("responses tools")
def responses_tools() -> None:
    call_and_answer(chat_model(use_responses_api=True))


@feature("messages")
def messages() -> None:
    assert messages_model().invoke(QUESTION).content
    assert len(list(messages_model().stream(QUESTION))) > 5


@feature("messages tools")
def messages_tools() -> None:
    call_and_answer(messages_model())


run_features()
