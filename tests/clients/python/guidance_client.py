"""guidance: text, choices, regular expressions and JSON, with its model for vLLM servers and the one for OpenAI's."""

import json

import guidance
from features import API_KEY, MODEL, QUESTION, V1_URL, feature, run_features
from guidance import assistant, gen, select, system, user
from guidance.models import OpenAI
from guidance.models.experimental import VLLMModel

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}


def asked(kind: type) -> object:
    model = kind(MODEL, base_url=V1_URL, api_key=API_KEY, echo=False)
    with system():
        model += "Be brief."
    with user():
        model += QUESTION
    return model


@feature("chat")
def chat() -> None:
    model = asked(OpenAI)
    with assistant():
        model += gen(name="answer", max_tokens=20)
    assert model["answer"]


@feature("structured")
def structured() -> None:
    model = asked(OpenAI)
    with assistant():
        model += guidance.json(name="answer", schema=CITY)
    assert json.loads(model["answer"])["city"] in ("Rome", "Oslo")


@feature("grammar: choice")
def choice() -> None:
    model = asked(VLLMModel)
    with assistant():
        model += select(["Rome", "Oslo"], name="answer")
    assert model["answer"] in ("Rome", "Oslo")


@feature("grammar: regex")
def regex() -> None:
    model = asked(VLLMModel)
    with assistant():
        model += gen(name="answer", regex=r"[0-9]{3}")
    assert len(model["answer"]) == 3
    assert model["answer"].isdigit()


@feature("grammar: json")
def grammar_json() -> None:
    model = asked(VLLMModel)
    with assistant():
        model += guidance.json(name="answer", schema=CITY)
    assert json.loads(model["answer"])["city"] in ("Rome", "Oslo")


run_features()
