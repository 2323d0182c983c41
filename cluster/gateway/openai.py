"""The OpenAI shapes: chat requests in, completions and chunks out."""

from __future__ import annotations

import re
import time
from typing import Annotated, Any, Literal

import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from ...protos import frames as f
from .errors import ApiError
from .stream import Request
from .text import Text

COLD = 1e-5  #: temperatures below are greedy: the division would overflow
REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid")
    type: Literal["text"]
    text: str


class Message(BaseModel):
    model_config = ConfigDict(extra="forbid")
    role: Literal["system", "developer", "user", "assistant"]
    content: str
    name: str | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _join_parts(cls, value: Any) -> Any:
        if value is None:  # as the SDK sends an assistant's turn without text
            return ""
        if isinstance(value, list):
            return "".join(_Part.model_validate(part).text for part in value)
        return value

    def template(self) -> dict[str, str]:
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": self.content}


class _StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")
    include_usage: bool = False
    include_obfuscation: bool = False


class ChatRequest(BaseModel):
    """What `/v1/chat/completions` takes. A field that is not here is refused by name."""

    model_config = ConfigDict(extra="forbid")
    model: str = ""
    messages: Annotated[list[Message], Field(min_length=1, max_length=1000)]
    stream: bool = False
    stream_options: _StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    # accepted at the value that changes nothing (NEUTRAL); another one is refused, never dropped
    n: Any = None
    top_p: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    stop: Any = None
    store: Any = None


NEUTRAL: dict[str, list] = {
    "n": [1],
    "top_p": [1],
    "presence_penalty": [0],
    "frequency_penalty": [0],
    "stop": [[]],
    "store": [False],
}


def parse_chat(body: bytes) -> ChatRequest:
    """Validates a body. Raises ApiError with one sentence about the first thing that is wrong."""
    try:
        chat = ChatRequest.model_validate_json(body)
        for name, values in NEUTRAL.items():
            if getattr(chat, name) not in [None, *values]:
                message = f"{name} is not supported, except as {values[0]!r}"
                raise ApiError("invalid_request", message, name)
        return chat
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            message = f"{where} is not supported"
        elif first["type"] == "json_invalid":
            message = f"the body is not valid JSON: {first['msg'].split(': ', 1)[-1]}"
        else:
            message = f"{where or 'the body'}: {first['msg'].lower()}"
        raise ApiError("invalid_request", message, where or None) from None


def sampling_of(chat: ChatRequest, request_id: str, prompt: int, text_limits: Limits) -> f.Sampling:
    """Sampling parameters; the default seed derives from the request id. Raises ApiError."""
    room = text_limits.max_model_len - prompt
    if room < 1:
        message = (
            f"the prompt has {prompt} tokens, the model's context is "
            f"{text_limits.max_model_len}: shorten the conversation"
        )
        raise ApiError("context_length_exceeded", message, "messages")
    wanted = chat.max_completion_tokens or chat.max_tokens or room
    if chat.top_logprobs is not None and not chat.logprobs:
        raise ApiError("invalid_request", "top_logprobs needs logprobs: true", "top_logprobs")
    seed = xxhash.xxh3_64_intdigest(request_id.encode()) if chat.seed is None else chat.seed
    given = text_limits.temperature if chat.temperature is None else chat.temperature
    return f.Sampling(
        max_tokens=min(wanted, room),
        temperature=given if given >= COLD else 0.0,
        seed=seed & 0xFFFFFFFFFFFFFFFF,
        stop_ids=text_limits.stop_ids,
        logprobs=(chat.top_logprobs or 0) if chat.logprobs else None,
    )


class Limits(BaseModel):
    """What the served model sets: context, longest token, end ids, default temperature."""

    max_model_len: int
    token_chars: int = 1 << 20  #: characters of the vocabulary's longest token
    stop_ids: tuple[int, ...]
    temperature: float


def check_size(messages: list[dict[str, str]], limits: Limits) -> None:
    """Refuses what cannot fit whatever its tokens are, before it costs seconds to tokenize."""
    chars = sum(len(message["content"]) for message in messages)
    if chars > limits.max_model_len * limits.token_chars:
        message = (
            f"the messages have {chars} characters, the model's context is "
            f"{limits.max_model_len} tokens: shorten the conversation"
        )
        raise ApiError("context_length_exceeded", message, "messages")


def usage(request: Request) -> dict:
    prompt, completion = len(request.ids), len(request.journal)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": request.hit_tokens},
    }


def logprobs(tokens: list[f.Token], text: Text) -> dict:
    def entry(token: int, logprob: float) -> dict:
        piece = text.piece(token)
        return {"token": piece, "logprob": logprob, "bytes": list(piece.encode())}

    return {
        "content": [
            {
                **entry(token.id, token.logprob or 0.0),
                "top_logprobs": [entry(i, value) for i, value in token.top],
            }
            for token in tokens
        ],
        "refusal": None,
    }


def completion(request: Request, model: str, content: str, lps: dict | None) -> dict:
    """The `chat.completion` object."""
    return {
        "id": request.id,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": content, "refusal": None},
                "logprobs": lps,
                "finish_reason": request.finish,
            }
        ],
        "usage": usage(request),
    }


class Chunks:
    """`chat.completion.chunk` events of one stream; what never changes is encoded once."""

    def __init__(self, request: Request, model: str) -> None:
        self._base = {
            "id": request.id,
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": model,
        }

    def delta(self, delta: dict, finish: str | None = None, lps: dict | None = None) -> dict:
        choice = {"index": 0, "delta": delta, "logprobs": lps, "finish_reason": finish}
        return {**self._base, "choices": [choice]}

    def usage(self, request: Request) -> dict:
        return {**self._base, "choices": [], "usage": usage(request)}
