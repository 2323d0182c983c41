"""A gateway's own first requests for a model, so that the first client does not pay for them.

The first requests through a new process are slow: code runs for the first time, workers compute
their first steps, and nobody knows yet how soon a second token follows the first one. So each model
is asked `QUESTIONS` questions, one after the other, before `/ready` says that it is served.
They take the road of every streamed answer, but for its socket. Neither the gateway nor the router
counts or records them. To the workers they are ordinary requests, whose ids begin with
`rehearsal-`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Message

from .apis.api import Api
from .attempt.terms import Terms
from .served_model import ServedModel
from .service import GatewayService

log = logging.getLogger(__name__)

#: For each model: as many answers as the pacing of first tokens learns from before it uses what it
#: has learned (`router.first_token.JOINS_MINIMUM`), and one more for its first use.
QUESTIONS = 9
#: Seconds for all questions to one model. A large model answers only a few in that time. That is
#: enough, as what a first request costs beside its steps is little there.
LIMIT_S = 3.0
ANSWER_TOKENS = 4
POLL_S = 0.02  #: Between two looks whether the model has workers.
#: Each question has its own number, as a conversation that was just rendered is not rendered again.
QUESTION = "What is prefill? (Question {number} of the gateway itself, before the first client's.)"


async def rehearse(service: GatewayService, model: ServedModel) -> None:
    """Waits until the model has workers, asks it, and marks it as rehearsed.

    A failure is only logged: a client is told of it when its own request fails.
    """
    while model.missing_parts():  # noqa: ASYNC110  # no event says it
        await asyncio.sleep(POLL_S)
    try:
        async with asyncio.timeout(LIMIT_S):
            for number in range(QUESTIONS):
                await _ask(service, model, number)
    except TimeoutError:
        log.info("%s: rehearsed for %s s, with fewer questions than wanted", model.name, LIMIT_S)
    except Exception as error:  # of any kind, as of a client's request
        log.info("%s: not rehearsed: %s", model.name, error)
    finally:
        model.is_rehearsed = True


async def _ask(service: GatewayService, model: ServedModel, number: int) -> None:
    """Asks one question, and reads the whole stream. Raises what a client would be told."""
    request_id = f"rehearsal-{number}-{secrets.token_hex(4)}"
    terms = Terms(slo_class=service.classes[0], arrived_s=time.monotonic(), is_rehearsal=True)
    api = Api(service)
    try:
        if model.text.template:
            http = _post("/v1/chat/completions", _chat_body(model.name, number), request_id, terms)
            response = await api.chat(http)
        else:
            http = _post("/v1/completions", _completion_body(model.name, number), request_id, terms)
            response = await api.completions(http)
        await _read_stream(response, http)
    finally:
        model.shelf.discard(terms.tenant, request_id)


def _chat_body(model_name: str, number: int) -> dict[str, Any]:
    question = {"role": "user", "content": QUESTION.format(number=number)}
    return {"messages": [question], **_common_fields(model_name)}


def _completion_body(model_name: str, number: int) -> dict[str, Any]:
    return {"prompt": QUESTION.format(number=number), **_common_fields(model_name)}


def _common_fields(model_name: str) -> dict[str, Any]:
    return {
        "model": model_name,
        "stream": True,
        "max_tokens": ANSWER_TOKENS,
        "cache_salt": secrets.token_hex(8),  # no client's prompt finds the question in the cache
    }


def _post(path: str, body: dict[str, Any], request_id: str, terms: Terms) -> HttpRequest:
    """Returns a request as the guard leaves it for its route. Its client never leaves."""
    body_bytes = json.dumps(body).encode()
    body_message: Message = {"type": "http.request", "body": body_bytes, "more_body": False}
    unread = [body_message]

    async def receive() -> Message:
        if unread:
            return unread.pop()
        return await asyncio.get_running_loop().create_future()

    headers = [(b"content-type", b"application/json"), (b"x-request-id", request_id.encode())]
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "query_string": b"",
        "headers": headers,
        "state": {"terms": terms},
    }
    return HttpRequest(scope, receive)


async def _read_stream(response: Response, http: HttpRequest) -> None:
    """Reads an answer to its end. Raises RuntimeError, with the error's event, if it breaks off."""
    errors: list[str] = []

    async def take(message: Message) -> None:
        body: bytes = message.get("body", b"")
        if body.startswith(b"event: error"):
            errors.append(body.decode())

    await response(http.scope, http.receive, take)
    if errors:  # what `take` raised would only be logged by the response
        raise RuntimeError(errors[0])
