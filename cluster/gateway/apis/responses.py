"""OpenAI's `/v1/responses`, the part without tools and stored state: read as a chat (pure).

A response is a list of output items: reasoning, if the model thinks, then a message. A streamed
item goes through these events, whose names begin with `response.`:

    output_item.added -> content_part.added -> <text>.delta ... -> <text>.done
        -> content_part.done -> output_item.done
"""

from __future__ import annotations

import time
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from ..attempt.request import Request
from ..text.answers import Output, TextDelta
from ..text.content import ContentParser, ContentPart, PartKind
from ..text.tokenizer import ChatTokenizer, TokenizedPrompt
from .chat import MESSAGES_MAX, ChatRequest, JsonObject
from .known_fields import ApiName
from .parameters import CommonSamplingFields, to_json
from .schema import BodyPart, parse_body


class _InputPart(BodyPart):
    type: Literal["input_text", "output_text", "text"]
    text: str


class _InputItem(BodyPart):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[_InputPart]
    id: str | None = None
    status: str | None = None
    phase: str | None = None

    def chat_message(self) -> JsonObject:
        """Return the item as a chat's message."""
        if isinstance(self.content, str):
            text = self.content
        else:
            text = "".join(part.text for part in self.content)
        return {"role": self.role, "content": text}


class _TextFormat(BodyPart):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    content: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None

    def response_format(self) -> JsonObject:
        """Return the same as a chat's `response_format`."""
        if self.type != "json_schema":
            return {"type": self.type}
        schema = {"name": self.name, "schema": self.content}
        return {"type": self.type, "json_schema": schema}


class _TextOptions(BodyPart):
    format: _TextFormat | None = None


class ResponsesRequest(CommonSamplingFields):
    """What `/v1/responses` takes."""

    api: ClassVar[ApiName] = ApiName.RESPONSES

    model: str = ""
    input: str | Annotated[list[_InputItem], Field(min_length=1, max_length=MESSAGES_MAX)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    stream: bool = False
    text: _TextOptions | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def as_chat(self) -> ChatRequest:
        """Return the same request as a chat, which notes here what it ignores. Raises ApiError."""
        messages: list[JsonObject] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            messages.append({"role": "user", "content": self.input})
        else:
            messages += [item.chat_message() for item in self.input]

        chat: JsonObject = self.model_dump(
            include=set(CommonSamplingFields.model_fields),
            exclude_unset=True,
            exclude_none=True,
            by_alias=True,
        )
        chat |= {"model": self.model, "messages": messages}
        if self.chat_template_kwargs is not None:
            chat["chat_template_kwargs"] = self.chat_template_kwargs
        if self.max_output_tokens is not None:
            chat["max_tokens"] = self.max_output_tokens
        if self.text and self.text.format:
            chat["response_format"] = self.text.format.response_format()
        request = parse_body(ChatRequest, to_json(chat).encode())
        request.read_like(self)
        return request


#: The empty content part of an item of each kind.
_EMPTY_PARTS: dict[PartKind, JsonObject] = {
    PartKind.REASONING: {"type": "reasoning_text"},
    PartKind.CONTENT: {"type": "output_text", "annotations": [], "logprobs": []},
}
#: What the events of an item's text are called.
_TEXT_EVENT_NAMES = {
    PartKind.REASONING: "response.reasoning_text",
    PartKind.CONTENT: "response.output_text",
}
_ITEM_ID_PREFIXES = {PartKind.REASONING: "rs", PartKind.CONTENT: "msg"}


class ResponseShape:
    """Makes the `response` object, or its events, of the answer to one request."""

    def __init__(
        self,
        body: ResponsesRequest,
        chat: ChatRequest,
        request: Request,
        tokenizer: ChatTokenizer,
        model: str,
        prompt: TokenizedPrompt,
    ) -> None:
        self._body = body
        self._chat = chat
        self._request = request
        self._model = model
        self._parser = ContentParser(chat.content_rules(tokenizer, prompt))
        self._created_at_s = int(time.time())
        self._next_event_number = 0
        #: The text of each item that has begun, by the item's kind and in the order of the items.
        self._item_texts: dict[PartKind, str] = {}
        self._finish_reason: str | None = None

    @property
    def output(self) -> Output:
        return self._chat.output()

    def begin(self) -> list[JsonObject]:
        """Return the events that come before any text."""
        response = self._response("in_progress", items=[], usage=None)
        return [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
        ]

    def plain(self, index: int, text: str) -> JsonObject | None:
        """Return None: every event has a number of its own, so `delta` makes them all."""
        return None

    def delta(self, delta: TextDelta) -> list[JsonObject]:
        """Return the events of a piece of the answer."""
        events = []
        for kind, text in self._parse(delta):
            assert isinstance(text, str), "calls need tools, which this API does not take"
            if kind not in self._item_texts:
                events += self._close_last_item()
                events += self._open_item(kind)
            self._item_texts[kind] += text
            event_name = f"{_TEXT_EVENT_NAMES[kind]}.delta"
            events.append(self._part_event(event_name, kind, delta=text, **_empty_logprobs(kind)))
        return events

    def end(self, used_tokens: int) -> list[JsonObject]:
        """Return the events behind the answer, which has `used_tokens` tokens."""
        events = self._close_last_item()
        response = self._ended_response(used_tokens)
        return [*events, self._event(f"response.{response['status']}", response=response)]

    def whole(self, deltas: list[TextDelta], used_tokens: int) -> JsonObject:
        """Return the `response` object of the whole answer, which has `used_tokens` tokens."""
        for kind, text in self._parse(deltas[0]):
            assert isinstance(text, str), "calls need tools, which this API does not take"
            self._item_texts[kind] = self._item_texts.get(kind, "") + text
        return self._ended_response(used_tokens)

    def _parse(self, delta: TextDelta) -> list[ContentPart]:
        parts = self._parser.feed(delta.text)
        if delta.finish_reason:
            self._finish_reason = delta.finish_reason
            parts += self._parser.end(is_cut=delta.is_cut)
        return parts

    def _event(self, name: str, **fields: Any) -> JsonObject:
        event = {"type": name, "sequence_number": self._next_event_number, **fields}
        self._next_event_number += 1
        return event

    def _part_event(self, name: str, kind: PartKind, **fields: Any) -> JsonObject:
        """Return an event about the content part of an item."""
        return self._event(
            name,
            item_id=self._item_id(kind),
            output_index=list(self._item_texts).index(kind),
            content_index=0,
            **fields,
        )

    def _open_item(self, kind: PartKind) -> list[JsonObject]:
        """Begin an item; return the events that say so."""
        output_index = len(self._item_texts)
        self._item_texts[kind] = ""
        item = self._item(kind, text="", status="in_progress")
        part = {**_EMPTY_PARTS[kind], "text": ""}
        return [
            self._event("response.output_item.added", output_index=output_index, item=item),
            self._part_event("response.content_part.added", kind, part=part),
        ]

    def _close_last_item(self) -> list[JsonObject]:
        """Return the events that end the last item, or none if no item has begun."""
        if not self._item_texts:
            return []
        kind, text = list(self._item_texts.items())[-1]
        output_index = len(self._item_texts) - 1
        part = {**_EMPTY_PARTS[kind], "text": text}
        item = self._item(kind, text, status="completed")
        text_event_name = f"{_TEXT_EVENT_NAMES[kind]}.done"
        return [
            self._part_event(text_event_name, kind, text=text, **_empty_logprobs(kind)),
            self._part_event("response.content_part.done", kind, part=part),
            self._event("response.output_item.done", output_index=output_index, item=item),
        ]

    def _item_id(self, kind: PartKind) -> str:
        return f"{_ITEM_ID_PREFIXES[kind]}_{self._request.id}"

    def _item(self, kind: PartKind, text: str, status: str) -> JsonObject:
        parts = [{**_EMPTY_PARTS[kind], "text": text}] if text else []
        common_fields = {"id": self._item_id(kind), "status": status, "content": parts}
        if kind == PartKind.REASONING:
            return {"type": "reasoning", "summary": [], **common_fields}
        return {"type": "message", "role": "assistant", **common_fields}

    def _ended_response(self, used_tokens: int) -> JsonObject:
        status = "incomplete" if self._finish_reason == "length" else "completed"
        items = [self._item(kind, text, "completed") for kind, text in self._item_texts.items()]
        return self._response(status, items, self._usage(used_tokens))

    def _response(
        self, status: str, items: list[JsonObject], usage: JsonObject | None
    ) -> JsonObject:
        incomplete_details = None
        if status == "incomplete":
            incomplete_details = {"reason": "max_output_tokens"}
        return {
            "id": self._request.id,
            "object": "response",
            "created_at": self._created_at_s,
            "status": status,
            "error": None,
            "incomplete_details": incomplete_details,
            "instructions": self._body.instructions,
            "max_output_tokens": self._body.max_output_tokens,
            "metadata": self._body.metadata or {},
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
            "usage": usage,
        }

    def _usage(self, used_tokens: int) -> JsonObject:
        prompt_tokens = len(self._request.prompt_ids)
        return {
            "input_tokens": prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": self._request.hit_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": used_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt_tokens + used_tokens,
        }


def _empty_logprobs(kind: PartKind) -> dict[str, list[Any]]:
    """Return the field that events of a message's text have, and those of reasoning do not."""
    return {"logprobs": []} if kind == PartKind.CONTENT else {}
