"""OpenAI's `/v1/responses`, the part without tools and stored state: read as a chat (pure)."""

from __future__ import annotations

import time
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from ..attempt.stream import Request
from ..text.answers import Delta, Output
from ..text.content import Content
from ..text.tokenizer import Prompt, Text
from .chat import ChatRequest
from .parameters import dumped
from .schema import Body, Strict, parse


class _Part(Strict):
    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: Annotated[list, Field(max_length=0)] | None = None
    logprobs: Annotated[list, Field(max_length=0)] | None = None


class _Item(Strict):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[_Part]
    id: str | None = None
    status: str | None = None
    phase: str | None = None

    def message(self) -> dict:
        given = self.content
        text = given if isinstance(given, str) else "".join(part.text for part in given)
        return {"role": self.role, "content": text}


class _Format(Strict):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    content: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None

    def response_format(self) -> dict:
        if self.type != "json_schema":
            return {"type": self.type}
        schema = {"name": self.name, "schema": self.content}
        return {"type": self.type, "json_schema": schema}


class _TextOptions(Strict):
    format: _Format | None = None


class ResponsesRequest(Body):
    """What `/v1/responses` takes. A field that is not here is refused by name."""

    NEUTRAL: ClassVar[dict[str, list]] = {
        "store": [False],
        "background": [False],
        "truncation": ["disabled"],
        "tools": [[]],
        "tool_choice": ["auto", "none"],
        "service_tier": ["auto", "default"],
        "include": [[]],
        "previous_response_id": [None],
        "reasoning": [{}],
    }
    model: str = ""
    input: str | Annotated[list[_Item], Field(min_length=1, max_length=1000)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    stream: bool = False
    text: _TextOptions | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    parallel_tool_calls: bool | None = None
    store: Any = None
    background: Any = None
    truncation: Any = None
    tools: Any = None
    tool_choice: Any = None
    service_tier: Any = None
    include: Any = None
    previous_response_id: Any = None
    reasoning: Any = None

    def as_chat(self) -> ChatRequest:
        """The same as a chat. Raises ApiError."""
        first = [{"role": "system", "content": self.instructions}] if self.instructions else []
        turns = self.input
        said = (
            [{"role": "user", "content": turns}]
            if isinstance(turns, str)
            else [item.message() for item in turns]
        )
        chat: dict[str, Any] = {"model": self.model, "messages": [*first, *said]}
        given = {
            "max_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
        }
        chat |= {name: value for name, value in given.items() if value is not None}
        if self.text and self.text.format:
            chat["response_format"] = self.text.format.response_format()
        return parse(ChatRequest, dumped(chat).encode())


class ResponseShape:
    """What one request is answered with: a reasoning item, if there is one, then a message."""

    def __init__(
        self,
        asked: ResponsesRequest,
        chat: ChatRequest,
        request: Request,
        text: Text,
        model: str,
        prompt: Prompt,
    ) -> None:
        self._asked, self._chat, self._request, self._model = asked, chat, request, model
        self._content = Content(chat.grasp(text, prompt))
        self._created = time.time()
        self._number = 0  #: of the next event
        self._texts: dict[str, str] = {}  #: of the items begun, by kind
        self._finish: str | None = None

    @property
    def output(self) -> Output:
        return self._chat.output()

    def begin(self) -> list[dict]:
        told = self._response("in_progress", [], None)
        return [
            self._event("response.created", response=told),
            self._event("response.in_progress", response=told),
        ]

    def plain(self, index: int, text: str) -> dict | None:
        return None

    def delta(self, delta: Delta) -> list[dict]:
        events = []
        for kind, value in self._parts(delta):
            if kind not in self._texts:
                events += self._close()
                self._texts[kind] = ""
                item = self._item(kind, "", "in_progress")
                at = len(self._texts) - 1
                events.append(self._event("response.output_item.added", output_index=at, item=item))
                part = {**_PARTS[kind], "text": ""}
                events.append(self._of_part("response.content_part.added", kind, part=part))
            self._texts[kind] += value
            name = f"response.{_NAMES[kind]}.delta"
            more: dict[str, list] = {"logprobs": []} if kind == "content" else {}
            events.append(self._of_part(name, kind, delta=value, **more))
        return events

    def end(self, used: int) -> list[dict]:
        closed = self._close()
        status = "incomplete" if self._finish == "length" else "completed"
        whole = self._response(status, self._items(), used)
        return [*closed, self._event(f"response.{status}", response=whole)]

    def whole(self, deltas: list[Delta], used: int) -> dict:
        for kind, value in self._parts(deltas[0]):
            self._texts[kind] = self._texts.get(kind, "") + value
        status = "incomplete" if self._finish == "length" else "completed"
        return self._response(status, self._items(), used)

    def _parts(self, delta: Delta) -> list:
        parts = self._content.feed(delta.text)
        if delta.finish:
            self._finish = delta.finish
            parts += self._content.end()
        return parts

    def _event(self, name: str, **fields: Any) -> dict:
        self._number += 1
        return {"type": name, "sequence_number": self._number - 1, **fields}

    def _of_part(self, name: str, kind: str, **fields: Any) -> dict:
        at = list(self._texts).index(kind)
        item = self._name(kind)
        return self._event(name, item_id=item, output_index=at, content_index=0, **fields)

    def _name(self, kind: str) -> str:
        return f"{'rs' if kind == 'reasoning' else 'msg'}_{self._request.id}"

    def _close(self) -> list[dict]:
        """The end of the last item."""
        if not self._texts:
            return []
        kind, text = list(self._texts.items())[-1]
        part = {**_PARTS[kind], "text": text}
        more: dict[str, list] = {"logprobs": []} if kind == "content" else {}
        item, at = self._item(kind, text, "completed"), len(self._texts) - 1
        return [
            self._of_part(f"response.{_NAMES[kind]}.done", kind, text=text, **more),
            self._of_part("response.content_part.done", kind, part=part),
            self._event("response.output_item.done", output_index=at, item=item),
        ]

    def _items(self) -> list[dict]:
        return [self._item(kind, text, "completed") for kind, text in self._texts.items()]

    def _item(self, kind: str, text: str, status: str) -> dict:
        parts = [{**_PARTS[kind], "text": text}] if text else []
        item = {"id": self._name(kind), "status": status, "content": parts}
        if kind == "reasoning":
            return {"type": "reasoning", "summary": [], **item}
        return {"type": "message", "role": "assistant", **item}

    def _response(self, status: str, items: list[dict], used: int | None) -> dict:
        short = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self._request.id,
            "object": "response",
            "created_at": int(self._created),
            "status": status,
            "error": None,
            "incomplete_details": short,
            "instructions": self._asked.instructions,
            "max_output_tokens": self._asked.max_output_tokens,
            "metadata": self._asked.metadata or {},
            "model": self._model,
            "output": items,
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "store": False,
            "temperature": self._request.sampling.temperature,
            "tool_choice": "auto",
            "tools": [],
            "top_p": self._request.sampling.top_p,
            "truncation": "disabled",
            "usage": None if used is None else self._usage(used),
        }

    def _usage(self, used: int) -> dict:
        prompt = len(self._request.ids)
        return {
            "input_tokens": prompt,
            "input_tokens_details": {
                "cached_tokens": self._request.hit_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": used,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + used,
        }


_PARTS: dict[str, dict] = {
    "reasoning": {"type": "reasoning_text"},
    "content": {"type": "output_text", "annotations": [], "logprobs": []},
}
_NAMES = {"reasoning": "reasoning_text", "content": "output_text"}
