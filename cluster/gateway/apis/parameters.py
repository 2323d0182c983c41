"""How an answer is sampled: the parameters that all APIs share, as `protos.frames.Sampling`.

Beside OpenAI's own there are those that clients of vLLM and SGLang send, under their names there.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import xxhash
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from ....protos import frames as f
from ..errors import ApiError
from ..text.answers import Output
from .schema import Body, Strict

COLD = 1e-5  #: temperatures below are greedy: the division would overflow
STOPS_MAX, STOP_CHARS = 16, 1000
ID_MAX = 2**31 - 1

Share = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Id = Annotated[int, Field(ge=0, le=ID_MAX)]
Stop = Annotated[str, Field(min_length=1, max_length=STOP_CHARS)]
Stops = Annotated[list[Stop], Field(max_length=STOPS_MAX)]


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class JsonSchema(BaseModel):
    """OpenAI's wrapping of a schema. What else is in it describes, and changes nothing."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)
    name: str | None = None
    description: str | None = None
    content: Annotated[dict[str, Any] | bool, Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(BaseModel):
    """vLLM's."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)
    schema_: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None
    regex: str | None = None
    choice: Annotated[list[str], Field(min_length=1, max_length=1000)] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class Parameters(Body):
    """Fields of `/v1/chat/completions` and `/v1/completions` that say how to sample."""

    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: (
        Annotated[dict[Id, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=1024)] | None
    ) = None
    n: Annotated[int, Field(ge=1, le=16)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: Annotated[Stops, BeforeValidator(_listed, json_schema_input_type=Stop | Stops)] | None = (
        None
    )
    user: str | None = None
    # of vLLM and SGLang
    top_k: Annotated[int, Field(ge=-1, le=ID_MAX)] | None = None
    min_p: Share | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=ID_MAX)] | None = None
    ignore_eos: bool = False
    stop_token_ids: Annotated[list[Id], Field(max_length=64)] | None = None
    include_stop_str_in_output: bool = False
    no_stop_trim: bool = False
    skip_special_tokens: bool = True
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(min_length=1, max_length=1000)] | None = None
    guided_grammar: str | None = None
    regex: str | None = None
    json_schema: str | None = None

    def output(self) -> Output:
        keep = self.include_stop_str_in_output or self.no_stop_trim
        specials, least = not self.skip_special_tokens, self.min_tokens or 0
        return Output(tuple(self.stop or ()), keep, least, specials)


class Limits(BaseModel):
    """What the served model sets: context, longest token, end ids, defaults of its publisher."""

    max_model_len: int
    token_chars: int = 1 << 20  #: characters of the vocabulary's longest token
    stop_ids: tuple[int, ...]
    temperature: float
    top_p: float = 1.0
    top_k: int = 0


def sampling_of(
    asked: Parameters,
    request_id: str,
    prompt: int,
    limits: Limits,
    *,
    max_tokens: int | None = None,
    logprobs: int | None = None,
    grammar: f.Grammar | None = None,
) -> f.Sampling:
    """Parameters for a prompt of `prompt` ids; the default seed derives from the request id.

    `grammar` overrides none of the request's own: both is an error. Raises ApiError.
    """
    room = room_for(prompt, limits)
    most = min(max_tokens or asked.max_tokens or room, room)
    least = asked.min_tokens or 0
    if least > most:
        message = f"min_tokens is {least}, but the answer has {most} tokens at most"
        raise ApiError("invalid_request", message, "min_tokens")
    own = grammar_of(asked)
    if own and grammar:
        message = "a structured answer and a tool call cannot both be required"
        raise ApiError("invalid_request", message, "tool_choice")
    seed = xxhash.xxh3_64_intdigest(request_id.encode()) if asked.seed is None else asked.seed
    given = limits.temperature if asked.temperature is None else asked.temperature
    ends = () if asked.ignore_eos else limits.stop_ids
    top_k = limits.top_k if asked.top_k is None else asked.top_k
    return f.Sampling(
        max_tokens=most,
        temperature=given if given >= COLD else 0.0,
        seed=seed & 0xFFFFFFFFFFFFFFFF,
        stop_ids=(*ends, *(asked.stop_token_ids or ())),
        logprobs=logprobs,
        top_k=max(0, top_k),
        top_p=limits.top_p if asked.top_p is None else asked.top_p,
        min_p=asked.min_p or 0.0,
        presence_penalty=asked.presence_penalty or 0.0,
        frequency_penalty=asked.frequency_penalty or 0.0,
        repetition_penalty=asked.repetition_penalty or 1.0,
        logit_bias=tuple((asked.logit_bias or {}).items()),
        min_tokens=least,
        grammar=own or grammar,
        n=asked.n or 1,
    )


def room_for(prompt: int, limits: Limits) -> int:
    """Tokens that an answer may have. Raises ApiError if there is room for none."""
    if prompt == 0:
        raise ApiError("invalid_request", "the prompt has no tokens", "prompt")
    room = limits.max_model_len - prompt
    if room < 1:
        message = (
            f"the prompt has {prompt} tokens, the model's context is "
            f"{limits.max_model_len}: shorten the conversation"
        )
        raise ApiError("context_length_exceeded", message, "messages")
    return room


def grammar_of(asked: Parameters) -> f.Grammar | None:
    """The one grammar of a request. Raises ApiError if it has several."""
    structured = asked.structured_outputs or StructuredOutputs()
    whole = asked.response_format.type if asked.response_format else "text"
    wrapped = asked.response_format and asked.response_format.json_schema
    if whole == "json_schema" and not wrapped:
        message = "response_format.json_schema is missing"
        raise ApiError("invalid_request", message, "response_format")
    named = {
        "response_format": _schema(wrapped.content) if whole == "json_schema" and wrapped else None,
        "response_format.type": f.Grammar("json_object") if whole == "json_object" else None,
        "structured_outputs.json": _schema(structured.schema_),
        "structured_outputs.regex": _plain("regex", structured.regex),
        "structured_outputs.choice": _choice(structured.choice),
        "structured_outputs.grammar": _plain("lark", structured.grammar),
        "structured_outputs.json_object": (
            f.Grammar("json_object") if structured.json_object else None
        ),
        "guided_json": _schema(asked.guided_json),
        "guided_regex": _plain("regex", asked.guided_regex),
        "guided_choice": _choice(asked.guided_choice),
        "guided_grammar": _plain("lark", asked.guided_grammar),
        "regex": _plain("regex", asked.regex),
        "json_schema": _schema(asked.json_schema),
    }
    found = {name: grammar for name, grammar in named.items() if grammar}
    if len(found) > 1:
        message = f"only one of {' and '.join(found)} can be asked for"
        raise ApiError("invalid_request", message, next(iter(found)))
    return next(iter(found.values()), None)


def _plain(kind: str, text: str | None) -> f.Grammar | None:
    return f.Grammar(kind, text) if text is not None else None


def _schema(schema: dict | bool | str | None) -> f.Grammar | None:
    if schema is None:
        return None
    return f.Grammar("json_schema", schema if isinstance(schema, str) else dumped(schema))


def _choice(choice: list[str] | None) -> f.Grammar | None:
    if choice is None:
        return None
    return f.Grammar("lark", "start: " + " | ".join(json.dumps(one) for one in choice))


def dumped(value: Any) -> str:
    """JSON text of what was parsed from JSON. Raises ApiError for numbers too long to print."""
    try:
        return json.dumps(value, ensure_ascii=False)
    except (ValueError, RecursionError) as error:
        raise ApiError("invalid_request", f"a schema cannot be used: {error}") from None
