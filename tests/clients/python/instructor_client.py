"""instructor: classes filled by tool calls and by JSON schemas, whole and in parts."""

import instructor
from features import API_KEY, MODEL, QUESTION, V1_URL, feature, run_features
from openai import OpenAI
from pydantic import BaseModel

client = OpenAI(base_url=V1_URL, api_key=API_KEY, max_retries=0, timeout=60)
MESSAGES = [{"role": "user", "content": QUESTION}]


class Event(BaseModel):
    name: str
    attendees: list[str]


def filled(mode: instructor.Mode) -> None:
    event = instructor.from_openai(client, mode=mode).chat.completions.create(
        model=MODEL, messages=MESSAGES, response_model=Event, max_retries=0
    )
    assert isinstance(event, Event)


@feature("tools")
def tools() -> None:
    filled(instructor.Mode.TOOLS)


@feature("structured")
def structured() -> None:
    filled(instructor.Mode.JSON_SCHEMA)


@feature("structured streamed")
def structured_streamed() -> None:
    parts = instructor.from_openai(
        client, mode=instructor.Mode.JSON_SCHEMA
    ).chat.completions.create_partial(
        model=MODEL, messages=MESSAGES, response_model=Event, max_retries=0
    )
    assert len(list(parts)) > 1


@feature("tools streamed")
def tools_streamed() -> None:
    parts = instructor.from_openai(
        client, mode=instructor.Mode.TOOLS
    ).chat.completions.create_partial(
        model=MODEL, messages=MESSAGES, response_model=Event, max_retries=0
    )
    assert len(list(parts)) > 1


run_features()
