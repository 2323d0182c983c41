"""`GET /openapi.json`: the HTTP API as an OpenAPI 3.1 document (pure).

The schemas of request bodies are made from the models that read them. The schemas of responses are
written here, as far as the published APIs name their fields. Errors come from the table of
`errors`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib.metadata import version
from typing import Any, NamedTuple

from pydantic.json_schema import models_json_schema

from ..errors import ERROR_KINDS
from .chat import ChatRequest
from .completions import CompletionRequest, DetokenizeRequest, TokenizeRequest
from .ignored_fields import HEADER_CHARS_MAX, HEADER_NAME
from .known_fields import KnownField, Treatment, known_fields_of
from .messages import ANTHROPIC_ERROR_TYPES, CountTokensRequest, MessagesRequest
from .responses import ResponsesRequest
from .schema import ApiBody, Reading

Schema = dict[str, Any]  #: A JSON schema, or another object of the document.

TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "number"}
ANY_OBJECT: Schema = {"type": "object"}
FINISH_REASON: Schema = {"enum": ["stop", "length", "tool_calls", None]}


def ref(name: str) -> Schema:
    """Refer to a schema of the document by its name."""
    return {"$ref": f"#/components/schemas/{name}"}


def const(value: str | bool) -> Schema:
    """Describe this very value."""
    return {"const": value}


def array(items: Schema) -> Schema:
    """Describe a list."""
    return {"type": "array", "items": items}


def nullable(schema: Schema) -> Schema:
    """Describe what the schema describes, or null."""
    return {"anyOf": [schema, {"type": "null"}]}


def record(optional: Iterable[str] = (), **fields: Schema) -> Schema:
    """Describe an object with these fields and no others; those in `optional` may be missing."""
    optional_names = set(optional)
    return {
        "type": "object",
        "properties": fields,
        "required": [name for name in fields if name not in optional_names],
        "additionalProperties": False,
    }


USAGE = record(
    ("completion_tokens_details",),
    prompt_tokens=COUNT,
    completion_tokens=COUNT,
    total_tokens=COUNT,
    prompt_tokens_details=record(cached_tokens=COUNT),
    completion_tokens_details=record(reasoning_tokens=COUNT),  # of chats only
)
TOP_LOGPROB_FIELDS = {"token": TEXT, "logprob": NUMBER, "bytes": array(COUNT)}
TOKEN_IDS = array(COUNT)
PROMPT_LOGPROBS = array(nullable(ANY_OBJECT))
LOGPROBS = nullable(
    record(
        content=array(
            record(**TOP_LOGPROB_FIELDS, top_logprobs=array(record(**TOP_LOGPROB_FIELDS)))
        ),
        refusal={"type": "null"},
    )
)
TOOL_CALL_FIELDS = {
    "id": TEXT,
    "type": const("function"),
    "function": record(name=TEXT, arguments=TEXT),
}
MESSAGE = record(
    ("reasoning_content", "reasoning", "tool_calls"),
    role=const("assistant"),
    content=nullable(TEXT),
    refusal={"type": "null"},
    reasoning_content=nullable(TEXT),
    reasoning=nullable(TEXT),
    tool_calls=array(record(**TOOL_CALL_FIELDS)),
)
MESSAGE_DELTA = record(
    ("role", "content", "reasoning_content", "reasoning", "tool_calls"),
    role=const("assistant"),
    content=TEXT,
    reasoning_content=TEXT,
    reasoning=TEXT,
    # Only the first piece of a call has its id, its type and its function's name.
    tool_calls=array(
        record(
            ("id", "type"),
            index=COUNT,
            **{**TOOL_CALL_FIELDS, "function": record(("name",), name=TEXT, arguments=TEXT)},
        )
    ),
)
COMMON_FIELDS = {"id": TEXT, "created": COUNT, "model": TEXT}  #: of OpenAI's answers and chunks

#: By the names under which the document refers to them. Items and blocks of the newer APIs are any
#: objects here, as their own publishers describe them.
RESPONSE_SCHEMAS: dict[str, Schema] = {
    "Usage": USAGE,
    "ChatCompletion": record(
        **COMMON_FIELDS,
        object=const("chat.completion"),
        prompt_logprobs=nullable(PROMPT_LOGPROBS),
        choices=array(
            record(
                index=COUNT,
                message=MESSAGE,
                logprobs=LOGPROBS,
                finish_reason=FINISH_REASON,
                token_ids=nullable(TOKEN_IDS),
            )
        ),
        usage=ref("Usage"),
        prompt_token_ids=nullable(TOKEN_IDS),
    ),
    "ChatCompletionChunk": record(
        ("usage", "prompt_token_ids"),
        **COMMON_FIELDS,
        object=const("chat.completion.chunk"),
        choices=array(
            record(
                ("token_ids",),
                index=COUNT,
                delta=MESSAGE_DELTA,
                logprobs=LOGPROBS,
                finish_reason=FINISH_REASON,
                token_ids=TOKEN_IDS,
            )
        ),
        usage=ref("Usage"),
        prompt_token_ids=TOKEN_IDS,
    ),
    "Completion": record(
        ("usage",),
        **COMMON_FIELDS,
        object=const("text_completion"),
        choices=array(
            record(
                ("token_ids", "prompt_token_ids", "prompt_logprobs"),
                prompt_logprobs=nullable(PROMPT_LOGPROBS),
                index=COUNT,
                text=TEXT,
                logprobs=nullable(
                    record(
                        tokens=array(TEXT),
                        token_logprobs=array(nullable(NUMBER)),
                        top_logprobs=nullable(array(nullable(ANY_OBJECT))),
                        text_offset=array(COUNT),
                    )
                ),
                finish_reason=FINISH_REASON,
                token_ids=nullable(TOKEN_IDS),
                prompt_token_ids=nullable(TOKEN_IDS),
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
            "output": array(ANY_OBJECT),
            "usage": nullable(ANY_OBJECT),
        },
        "required": ["id", "object", "status", "output", "usage"],
    },
    "AnthropicMessage": record(
        id=TEXT,
        type=const("message"),
        role=const("assistant"),
        model=TEXT,
        content=array(ANY_OBJECT),
        stop_reason={"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use", None]},
        stop_sequence=nullable(TEXT),
        usage={"type": "object", "required": ["input_tokens", "output_tokens"]},
    ),
    "DeletedResponse": record(id=TEXT, object=const("response"), deleted=const(True)),
    "TokenCount": record(input_tokens=COUNT),
    "Tokens": {
        "type": "object",
        "properties": {
            "count": COUNT,
            "max_model_len": COUNT,
            "tokens": array(COUNT),
            "token_strs": nullable(array(TEXT)),
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
    "Version": record(version=TEXT),
    "Load": record(server_load=COUNT),
    "Error": record(
        error=record(
            # A message is cut at 500 characters, and gets two dots then.
            message={"type": "string", "minLength": 1, "maxLength": 502},
            type={"enum": sorted({kind.error_type for kind in ERROR_KINDS.values()})},
            param=nullable(TEXT),
            code={"enum": list(ERROR_KINDS)},
        ),
        request_id=TEXT,
    ),
    "AnthropicError": record(
        type=const("error"),
        error=record(
            ("details",),
            type={
                "enum": sorted(
                    {
                        ANTHROPIC_ERROR_TYPES.get(name, kind.error_type)
                        for name, kind in ERROR_KINDS.items()
                    }
                )
            },
            message={"type": "string", "minLength": 1, "maxLength": 502},
            details=ANY_OBJECT,
        ),
        request_id=TEXT,
    ),
}


class PostRoute(NamedTuple):
    """A route that takes a body."""

    operation_id: str  #: The operation's name for programs, unique in the document.
    summary: str
    body: type[ApiBody]  #: The model that reads the body.
    response_schema: str  #: Its name in `RESPONSE_SCHEMAS`.
    #: What `data:` of its events is; empty if the route does not stream.
    event_data: str = ""


class GetRoute(NamedTuple):
    """A route without a body."""

    operation_id: str
    summary: str
    response_schema: str  #: Its name in `RESPONSE_SCHEMAS`; empty: any object.


#: The routes that take a body, by path.
POST_OPERATIONS = {
    "/v1/chat/completions": PostRoute(
        operation_id="chat",
        summary="A chat's next turn",
        body=ChatRequest,
        response_schema="ChatCompletion",
        event_data="ChatCompletionChunk",
    ),
    "/v1/completions": PostRoute(
        operation_id="complete",
        summary="Plain text goes on",
        body=CompletionRequest,
        response_schema="Completion",
        event_data="Completion",
    ),
    "/v1/responses": PostRoute(
        operation_id="respond",
        summary="OpenAI's Responses",
        body=ResponsesRequest,
        response_schema="Response",
        event_data="one of its events",
    ),
    "/v1/messages": PostRoute(
        operation_id="message",
        summary="Anthropic's Messages",
        body=MessagesRequest,
        response_schema="AnthropicMessage",
        event_data="one of its events",
    ),
    "/v1/messages/count_tokens": PostRoute(
        operation_id="count_tokens",
        summary="How long a prompt is",
        body=CountTokensRequest,
        response_schema="TokenCount",
    ),
    "/tokenize": PostRoute("tokenize", "Text to ids", TokenizeRequest, "Tokens"),
    "/detokenize": PostRoute("detokenize", "Ids to text", DetokenizeRequest, "Text"),
}
STORED_RESPONSE_PATH = "/v1/responses/{response_id}"
CANCEL_PATH = f"{STORED_RESPONSE_PATH}/cancel"
#: The routes without a body, by path; a few that are special are added in `openapi_document`.
GET_OPERATIONS = {
    "/v1/models": GetRoute("models", "What is served", "ModelList"),
    "/v1/models/{model}": GetRoute("model", "One of these", "Model"),
    STORED_RESPONSE_PATH: GetRoute("stored_response", "A response that is stored", "Response"),
    "/health": GetRoute("health", "The process lives", "Status"),
    "/ready": GetRoute("ready", "Requests would be served", "Status"),
    "/ping": GetRoute("ping", "As /health, for SageMaker", "Status"),
    "/version": GetRoute("version", "The version of this server", "Version"),
    "/load": GetRoute("load", "How many requests run on this gateway", "Load"),
    "/openapi.json": GetRoute("openapi", "This document", ""),
}
#: What each header of a request means, and its schema.
HEADERS = {
    "x-request-id": ("names the request; else one is made", TEXT),
    "x-slo-class": ("a class of service", TEXT),
    "x-slo-ttft": ("target until the first token, as 2s or max(1s, 3x)", TEXT),
    "x-slo-ttft-ms": ("the same in milliseconds", NUMBER),
    "x-slo-itl": ("target between tokens, as 50ms", TEXT),
    "x-slo-itl-ms": ("the same in milliseconds", NUMBER),
    "x-session-id": ("names a conversation, for `diptych explain`", TEXT),
    "traceparent": ("W3C trace context, to which the request's spans belong", TEXT),
    "x-request-timeout-ms": ("the client waits no longer", NUMBER),
    "x-resume": ("ids | keep: the client may come back", TEXT),
    "x-resume-from": ("tell only what comes behind this event", TEXT),
    "last-event-id": ("the same, as browsers' EventSource says it", TEXT),
}
IGNORED_FIELDS_HEADER: Schema = {
    "description": "names the fields of the body that had no effect, at most 16",
    "schema": {"type": "string", "maxLength": HEADER_CHARS_MAX},
}


def openapi_document(reading: Reading = Reading.LENIENT) -> Schema:
    """Return the whole document of a gateway; `reading` is what it does with unknown fields."""
    paths: dict[str, Schema] = {}
    for path, post_route in POST_OPERATIONS.items():
        paths[path] = {"post": _post_operation(path, post_route)}
    for path, get_route in GET_OPERATIONS.items():
        paths[path] = {"get": _get_operation(path, get_route)}
    deletion = GetRoute("delete_response", "Forget a stored response", "DeletedResponse")
    paths[STORED_RESPONSE_PATH]["delete"] = _get_operation(STORED_RESPONSE_PATH, deletion)
    paths[CANCEL_PATH] = {"post": _cancel_operation()}
    ping = GetRoute("post_ping", "As /health, for SageMaker", "Status")
    paths["/ping"]["post"] = _get_operation("/ping", ping)
    paths["/invocations"] = {"post": _invocations_operation()}
    paths["/metrics"] = {"get": _metrics_operation()}
    paths["/docs"] = {"get": _docs_operation()}
    security_schemes: Schema = {
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
        "components": {
            "schemas": _body_schemas(reading) | RESPONSE_SCHEMAS,
            "securitySchemes": security_schemes,
        },
        "security": [{}, {"bearer": []}, {"key": []}],  # {}: no key, where none is configured
    }


def _body_schemas(reading: Reading) -> dict[str, Schema]:
    """Return the schemas of all bodies and of their parts, by the names of their models."""
    bodies = {route.body for route in POST_OPERATIONS.values()}
    sorted_bodies = sorted(bodies, key=lambda body: body.__name__)
    _, made = models_json_schema(
        [(body, "validation") for body in sorted_bodies],
        ref_template="#/components/schemas/{model}",
    )
    schemas: dict[str, Schema] = made["$defs"]
    for schema in schemas.values():
        if "properties" not in schema:
            continue
        if reading is Reading.STRICT:
            schema["additionalProperties"] = False
        else:
            _allow_nulls(schema)
    for body in sorted_bodies:
        properties = schemas[body.__name__]["properties"]
        for name, known_field in known_fields_of(body.api).items():
            if reading is Reading.LENIENT or known_field.neutral_if_strict:
                properties[name] = _known_field_schema(known_field, reading)
    return schemas


def _allow_nulls(schema: Schema) -> None:
    """Let each property that may be left out be null, too."""
    required_names = schema.get("required", [])
    for name, property_schema in schema["properties"].items():
        alternatives = property_schema.get("anyOf", [])
        if name not in required_names and {"type": "null"} not in alternatives:
            schema["properties"][name] = nullable(property_schema)


def _known_field_schema(known_field: KnownField, reading: Reading) -> Schema:
    """Describe a field that has no effect here: whether it is ignored, or taken at some values."""
    if reading is Reading.LENIENT and known_field.treatment is Treatment.IGNORED:
        return {"description": f"ignored: {known_field.explanation}"}
    accepted_values = [None, *known_field.neutral_values]
    if reading is Reading.STRICT:
        return {"enum": accepted_values}
    return {"enum": accepted_values, "description": f"else refused: {known_field.explanation}"}


def _error_responses(path: str) -> Schema:
    """Return all statuses of the table of errors, each with the reasons that lead to it.

    405 is not in the table: the routes themselves send it.
    """
    schema_name = "AnthropicError" if path.startswith("/v1/messages") else "Error"
    reasons_by_status: dict[int, list[str]] = {405: ["another method"]}
    for reason, kind in ERROR_KINDS.items():
        reasons_by_status.setdefault(kind.http_status, []).append(reason)
    return {
        str(status): {
            "description": ", ".join(reasons),
            "content": {"application/json": {"schema": ref(schema_name)}},
        }
        for status, reasons in sorted(reasons_by_status.items())
    }


def _post_operation(path: str, route: PostRoute) -> Schema:
    content: Schema = {"application/json": {"schema": ref(route.response_schema)}}
    if route.event_data:
        content["text/event-stream"] = {"schema": _event_schema(route.event_data)}
    body_content = {"application/json": {"schema": ref(route.body.__name__)}}
    return {
        "operationId": route.operation_id,
        "summary": route.summary,
        "parameters": [
            {"name": name, "in": "header", "description": description, "schema": schema}
            for name, (description, schema) in HEADERS.items()
        ],
        "requestBody": {"required": True, "content": body_content},
        "responses": {
            "200": {
                "description": "answered",
                "content": content,
                "headers": {HEADER_NAME: IGNORED_FIELDS_HEADER},
            },
            **_error_responses(path),
        },
    }


def _invocations_operation() -> Schema:
    """Describe SageMaker's route.

    A body with `prompt` and without `messages` is a completion's, any other one a chat's.
    """
    chat_operation = _post_operation("/invocations", POST_OPERATIONS["/v1/chat/completions"])
    bodies = [ref("ChatRequest"), ref("CompletionRequest")]
    answers = [ref("ChatCompletion"), ref("Completion")]
    content: Schema = {
        "application/json": {"schema": {"anyOf": answers}},
        "text/event-stream": {"schema": _event_schema("ChatCompletionChunk or Completion")},
    }
    answered = {**chat_operation["responses"]["200"], "content": content}
    return {
        **chat_operation,
        "operationId": "invoke",
        "summary": "A chat or a completion, by its body",
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": {"anyOf": bodies}}},
        },
        "responses": {**chat_operation["responses"], "200": answered},
    }


def _event_schema(event_data: str) -> Schema:
    """Describe a server-sent event by its lines; `event_data` says in words what `data:` is."""
    return {
        "type": "object",
        "properties": {name: {"type": "string"} for name in ("event", "data", "id")},
        "required": ["data"],
        "description": (
            f"`data:` of each event is {event_data}; an error of an open stream is event `error`"
        ),
    }


def _get_operation(path: str, route: GetRoute) -> Schema:
    schema = ref(route.response_schema) if route.response_schema else ANY_OBJECT
    content = {"application/json": {"schema": schema}}
    responses = {"200": {"description": "told", "content": content}, **_error_responses(path)}
    if path == "/ready":
        # Its 503 is no error object: it has the status and what is missing.
        responses["503"] = {"description": "what is missing", "content": content}
    operation: Schema = {
        "operationId": route.operation_id,
        "summary": route.summary,
        "responses": responses,
    }
    parameter_names = re.findall(r"{(\w+)}", path)
    if parameter_names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": TEXT}
            for name in parameter_names
        ]
    return operation


def _cancel_operation() -> Schema:
    """Describe a route that only refuses: 400 for a stored response, 404 for another one."""
    cancellation = GetRoute("cancel_response", "Refused: none runs in the background", "Response")
    operation = _get_operation(CANCEL_PATH, cancellation)
    del operation["responses"]["200"]
    return operation


def _docs_operation() -> Schema:
    return {
        "operationId": "docs",
        "summary": "This document, as a page",
        "responses": {
            "200": {"description": "told", "content": {"text/html": {"schema": TEXT}}},
            **_error_responses("/docs"),
        },
    }


def _metrics_operation() -> Schema:
    content = {"text/plain": {"schema": TEXT}, "application/openmetrics-text": {"schema": TEXT}}
    return {
        "operationId": "metrics",
        "summary": "Metrics of this gateway",
        "responses": {
            "200": {"description": "Prometheus", "content": content},
            **_error_responses("/metrics"),
        },
    }
