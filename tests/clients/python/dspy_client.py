"""DSPy: a language model's text, streams, and signatures filled by JSON schemas."""

import json
import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # nothing is fetched

import dspy
from features import API_KEY, MODEL, QUESTION, V1_URL, feature, run_features


def language_model(**settings: object) -> dspy.LM:
    return dspy.LM(
        f"openai/{MODEL}", api_base=V1_URL, api_key=API_KEY, cache=False, num_retries=0, **settings
    )


CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}


@feature("chat")
def chat() -> None:
    [answer] = language_model()(QUESTION)
    assert answer


@feature("completions")
def completions() -> None:
    [answer] = language_model(model_type="text")(QUESTION)
    assert answer


@feature("structured")
def structured() -> None:
    schema = {"name": "city", "schema": CITY, "strict": True}
    [answer] = language_model()(
        QUESTION, response_format={"type": "json_schema", "json_schema": schema}
    )
    assert json.loads(answer)["city"] in ("Rome", "Oslo")


@feature("responses")
def responses() -> None:
    [answer] = language_model(model_type="responses")(QUESTION)
    assert answer


run_features()
