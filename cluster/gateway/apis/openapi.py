"""`GET /openapi.json`: the HTTP API as an OpenAPI 3.1 document (pure).

Bodies of requests are the schemas of the very models that read them. Responses are described as far
as the published APIs name their fields; errors are the table of `errors`.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import version
from typing import Any, NamedTuple

from pydantic.json_schema import models_json_schema

from ..errors import KINDS
from .chat import ChatRequest
from .completions import CompletionRequest, DetokenizeRequest, TokenizeRequest
from .messages import ERRORS, CountRequest, MessagesRequest
from .responses import ResponsesRequest
from .schema import Body

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "number"}
FLAG: Schema = {"type": "boolean"}
FREE: Schema = {"type": "object"}
FINISH: Schema = {"enum": ["stop", "length", "tool_calls", None]}


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def const(value: str) -> Schema:
    return {"const": value}


def array(of: Schema) -> Schema:
    return {"type": "array", "items": of}


def maybe(one: Schema) -> Schema:
    return {"anyOf": [one, {"type": "null"}]}


def record(optional: Iterable[str] = (), **fields: Schema) -> Schema:
    """An object of these fields and no others."""
    left_out = set(optional)
    return {
        "type": "object",
        "properties": fields,
        "required": [name for name in fields if name not in left_out],
        "additionalProperties": False,
    }


USAGE = record(
    prompt_tokens=COUNT,
    completion_tokens=COUNT,
    total_tokens=COUNT,
    prompt_tokens_details=record(cached_tokens=COUNT),
)
TOP = {"token": TEXT, "logprob": NUMBER, "bytes": array(COUNT)}
LOGPROBS = maybe(
    record(
        content=array(record(**TOP, top_logprobs=array(record(**TOP)))),
        refusal={"type": "null"},
    )
)
CALL = {
    "id": TEXT,
    "type": const("function"),
    "function": record(name=TEXT, arguments=TEXT),
}
MESSAGE = record(
    ("reasoning_content", "tool_calls"),
    role=const("assistant"),
    content=maybe(TEXT),
    refusal={"type": "null"},
    reasoning_content=maybe(TEXT),
    tool_calls=array(record(**CALL)),
)
DELTA = record(
    ("role", "content", "reasoning_content", "tool_calls"),
    role=const("assistant"),
    content=TEXT,
    reasoning_content=TEXT,
    tool_calls=array(record(index=COUNT, **CALL)),
)
HEAD = {"id": TEXT, "created": COUNT, "model": TEXT}

ANSWERS: dict[str, Schema] = {
    "Usage": USAGE,
    "ChatCompletion": record(
        **HEAD,
        object=const("chat.completion"),
        choices=array(
            record(index=COUNT, message=MESSAGE, logprobs=LOGPROBS, finish_reason=FINISH)
        ),
        usage=ref("Usage"),
    ),
    "ChatCompletionChunk": record(
        ("usage",),
        **HEAD,
        object=const("chat.completion.chunk"),
        choices=array(record(index=COUNT, delta=DELTA, logprobs=LOGPROBS, finish_reason=FINISH)),
        usage=ref("Usage"),
    ),
    "Completion": record(
        ("usage",),
        **HEAD,
        object=const("text_completion"),
        choices=array(
            record(
                index=COUNT,
                text=TEXT,
                logprobs=maybe(
                    record(
                        tokens=array(TEXT),
                        token_logprobs=array(maybe(NUMBER)),
                        top_logprobs=maybe(array(maybe(FREE))),
                        text_offset=array(COUNT),
                    )
                ),
                finish_reason=FINISH,
            )
        ),
        usage=ref("Usage"),
    ),
    "Response": {
        "type": "object",
        "properties": {
            "id": TEXT,
            "object": const("response"),
            "status": {"enum": ["completed", "incomplete", "in_progress"]},
            "output": array(FREE),
            "usage": maybe(FREE),
        },
        "required": ["id", "object", "status", "output", "usage"],
    },
    "AnthropicMessage": record(
        id=TEXT,
        type=const("message"),
        role=const("assistant"),
        model=TEXT,
        content=array(FREE),
        stop_reason={"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use", None]},
        stop_sequence=maybe(TEXT),
        usage={"type": "object", "required": ["input_tokens", "output_tokens"]},
    ),
    "TokenCount": record(input_tokens=COUNT),
    "Tokens": {
        "type": "object",
        "properties": {
            "count": COUNT,
            "max_model_len": COUNT,
            "tokens": array(COUNT),
            "token_strs": maybe(array(TEXT)),
        },
        "required": ["count", "max_model_len", "tokens"],
    },
    "Text": record(prompt=TEXT),
    "Model": record(
        id=TEXT,
        object=const("model"),
        created=COUNT,
        owned_by=TEXT,
        max_model_len=COUNT,
    ),
    "ModelList": record(object=const("list"), data=array(ref("Model"))),
    "Status": record(("missing",), status=TEXT, missing=array(TEXT)),
    "Error": record(
        error=record(
            message={"type": "string", "minLength": 1, "maxLength": 502},
            type={"enum": sorted({kind.type for kind in KINDS.values()})},
            param=maybe(TEXT),
            code={"enum": list(KINDS)},
        ),
        request_id=TEXT,
    ),
    "AnthropicError": record(
        type=const("error"),
        error=record(
            type={"enum": sorted({ERRORS.get(name, kind.type) for name, kind in KINDS.items()})},
            message={"type": "string", "minLength": 1, "maxLength": 502},
        ),
        request_id=TEXT,
    ),
}


class Operation(NamedTuple):
    """A route that takes a body. `event`: the schema of the data of its events, if it streams."""

    name: str
    summary: str
    body: type[Body]
    answer: str
    event: str = ""


POSTS = {
    "/v1/chat/completions": Operation(
        "chat", "A chat's next turn", ChatRequest, "ChatCompletion", "ChatCompletionChunk"
    ),
    "/v1/completions": Operation(
        "complete", "Plain text goes on", CompletionRequest, "Completion", "Completion"
    ),
    "/v1/responses": Operation(
        "respond", "OpenAI's Responses", ResponsesRequest, "Response", "one of its events"
    ),
    "/v1/messages": Operation(
        "message", "Anthropic's Messages", MessagesRequest, "AnthropicMessage", "one of its events"
    ),
    "/v1/messages/count_tokens": Operation(
        "count_tokens", "How long a prompt is", CountRequest, "TokenCount"
    ),
    "/tokenize": Operation("tokenize", "Text to ids", TokenizeRequest, "Tokens"),
    "/detokenize": Operation("detokenize", "Ids to text", DetokenizeRequest, "Text"),
}
GETS = {
    "/v1/models": ("models", "What is served", "ModelList"),
    "/v1/models/{model}": ("model", "One of these", "Model"),
    "/health": ("health", "The process lives", "Status"),
    "/ready": ("ready", "Requests would be served", "Status"),
}
HEADERS = {
    "x-request-id": ("names the request; else one is made", TEXT),
    "x-slo-class": ("a class of service", TEXT),
    "x-slo-ttft-ms": ("target until the first token", NUMBER),
    "x-slo-itl-ms": ("target between tokens", NUMBER),
    "x-session-id": ("names a conversation, for `diptych explain`", TEXT),
    "x-request-timeout-ms": ("the client waits no longer", NUMBER),
    "x-resume": ("ids | keep: the client may come back", TEXT),
    "x-resume-from": ("tell only what comes behind this event", TEXT),
}


def document() -> Schema:
    """The whole of it."""
    bodies = sorted({post.body for post in POSTS.values()}, key=lambda body: body.__name__)
    _, made = models_json_schema(
        [(body, "validation") for body in bodies], ref_template="#/components/schemas/{model}"
    )
    schemas = made["$defs"]
    for body in bodies:
        for name, values in body.NEUTRAL.items():
            schemas[body.__name__]["properties"][name] = {"enum": [None, *_others(values)]}
    paths: dict[str, Schema] = {path: {"post": _post(path, one)} for path, one in POSTS.items()}
    paths |= {path: {"get": _get(path, *one)} for path, one in GETS.items()}
    paths["/metrics"] = {"get": _metrics()}
    paths["/openapi.json"] = {"get": _get("/openapi.json", "openapi", "This document", "")}
    keys: Schema = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Diptych",
            "version": version("diptych"),
            "license": {"name": "Apache-2.0"},
        },
        "paths": paths,
        "components": {"schemas": schemas | ANSWERS, "securitySchemes": keys},
        "security": [{}, {"bearer": []}, {"key": []}],
    }


def _others(values: list) -> list:
    return [value for value in values if value is not None]


def _errors(path: str) -> Schema:
    """Every status of the table, with what leads to it; and what routes themselves refuse."""
    name = "AnthropicError" if path.startswith("/v1/messages") else "Error"
    reasons: dict[int, list[str]] = {405: ["another method"]}
    for reason, kind in KINDS.items():
        reasons.setdefault(kind.http, []).append(reason)
    return {
        str(status): {
            "description": ", ".join(why),
            "content": {"application/json": {"schema": ref(name)}},
        }
        for status, why in sorted(reasons.items())
    }


def _post(path: str, post: Operation) -> Schema:
    content: Schema = {"application/json": {"schema": ref(post.answer)}}
    if post.event:
        about = (
            f"`data:` of each event is {post.event}; an error of an open stream is event `error`"
        )
        fields = {name: {"type": "string"} for name in ("event", "data", "id")}
        event = {"type": "object", "properties": fields, "required": ["data"]}
        content["text/event-stream"] = {"schema": {**event, "description": about}}
    body = {"application/json": {"schema": ref(post.body.__name__)}}
    return {
        "operationId": post.name,
        "summary": post.summary,
        "parameters": [
            {"name": name, "in": "header", "description": about, "schema": schema}
            for name, (about, schema) in HEADERS.items()
        ],
        "requestBody": {"required": True, "content": body},
        "responses": {"200": {"description": "answered", "content": content}, **_errors(path)},
    }


def _get(path: str, name: str, summary: str, answer: str) -> Schema:
    schema = ref(answer) if answer else FREE
    told = {"application/json": {"schema": schema}}
    responses = {"200": {"description": "told", "content": told}, **_errors(path)}
    if path == "/ready":
        responses["503"] = {"description": "what is missing", "content": told}
    operation: Schema = {"operationId": name, "summary": summary, "responses": responses}
    if "{model}" in path:
        given = {"name": "model", "in": "path", "required": True, "schema": TEXT}
        operation["parameters"] = [given]
    return operation


def _metrics() -> Schema:
    page = {"text/plain": {"schema": TEXT}, "application/openmetrics-text": {"schema": TEXT}}
    told = {"200": {"description": "Prometheus", "content": page}, **_errors("/metrics")}
    return {"operationId": "metrics", "summary": "Metrics of this gateway", "responses": told}
