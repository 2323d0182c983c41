"""The library of the command `llm`, with a model from its file extra-openai-models.yaml."""

import json
import os
import tempfile
from pathlib import Path

import llm
from features import API_KEY, MODEL, QUESTION, V1_URL, feature, run_features
from pydantic import BaseModel

folder = tempfile.mkdtemp()
os.environ["LLM_USER_PATH"] = folder
SETTINGS = {
    "model_name": MODEL,
    "api_base": V1_URL,
    "supports_schema": True,
    "supports_tools": True,
}
ENTRIES = [
    {"model_id": "chat", **SETTINGS},
    {"model_id": "responses", "responses": True, **SETTINGS},
    {"model_id": "completion", "completion": True, **SETTINGS},
]
(Path(folder) / "extra-openai-models.yaml").write_text(json.dumps(ENTRIES))  # JSON is YAML


class Event(BaseModel):
    name: str
    attendees: list[str]


def model(name: str = "chat") -> llm.Model:
    found = llm.get_model(name)
    found.key = API_KEY
    return found


def get_weather(city: str) -> str:
    """The weather in a city."""
    return "sunny"


@feature("chat")
def chat() -> None:
    assert model().prompt(QUESTION, stream=False).text()


@feature("stream")
def stream() -> None:
    assert len(list(model().prompt(QUESTION))) > 5


@feature("usage")
def usage() -> None:
    response = model().prompt(QUESTION)
    assert response.text()
    assert response.usage().output > 5


@feature("tools")
def tools() -> None:
    assert model().chain(QUESTION, tools=[get_weather]).text()


@feature("structured")
def structured() -> None:
    assert Event.model_validate_json(model().prompt(QUESTION, schema=Event).text())


@feature("completions")
def completions() -> None:
    assert model("completion").prompt(QUESTION, max_tokens=20).text()


@feature("responses")
def responses() -> None:
    assert model("responses").prompt(QUESTION).text()


run_features()
