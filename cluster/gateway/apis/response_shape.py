"""The `response` object of `/v1/responses`, and the events of a streamed one (pure).

A response is a list of output items: reasoning, messages, and calls. A streamed item goes through
these events, whose names begin with `response.`:

    text:  output_item.added -> content_part.added -> <text>.delta ... -> <text>.done
               -> content_part.done -> output_item.done
    call:  output_item.added -> function_call_arguments.delta ... -> function_call_arguments.done
               -> output_item.done
    call of a custom tool:  output_item.added -> custom_tool_call_input.delta
               -> custom_tool_call_input.done -> output_item.done

An item ends when the next one begins. The last item of an answer that was cut is `incomplete`.
"""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, assert_never

from ....protos import frames
from ..attempt.request import Request
from ..errors import ApiError
from ..text.answers import Output, TextDelta
from ..text.content import ContentParser
from ..text.formats.parts import ContentPart, PartKind
from ..text.reasoning_tokens import ReasoningCounter
from ..text.tokenizer import ChatTokenizer, TokenizedPrompt
from .chat import ChatRequest
from .chat_shape import logprobs_object
from .response_tools import custom_input, response_tool
from .responses import ResponsesRequest
from .schema import JsonObject


class _ItemStatus(StrEnum):
    """The values of `status` of an output item."""

    IN_PROGRESS = "in_progress"
    COMPLETED = "completed"
    INCOMPLETE = "incomplete"


#: The content part of an item of text, without the text.
_EMPTY_PARTS: dict[PartKind, JsonObject] = {
    PartKind.REASONING: {"type": "reasoning_text"},
    PartKind.CONTENT: {"type": "output_text", "annotations": []},
}
#: What the events of an item's text are called, up to `.delta` or `.done`.
_TEXT_EVENT_NAMES = {
    PartKind.REASONING: "response.reasoning_text",
    PartKind.CONTENT: "response.output_text",
}
#: OpenAI's beginnings of the ids of items.
_ITEM_ID_PREFIXES = {PartKind.REASONING: "rs", PartKind.CONTENT: "msg", PartKind.CALL: "fc"}


@dataclass(slots=True)
class _OutputItem:
    """An item of the answer, as far as it has come."""

    id: str
    kind: PartKind  #: REASONING, CONTENT (a message) or CALL.
    output_index: int  #: Its place among the items of the response.
    text: str = ""  #: Of a call, its arguments.
    call_id: str = ""  #: By which the client's output of the call refers to it; empty: no call.
    function_name: str = ""  #: As the client knows it.
    namespace: str | None = None  #: Of the function, if it has one.
    is_custom: bool = False  #: True of a call whose input is a text, which the arguments have.
    status: _ItemStatus = _ItemStatus.IN_PROGRESS
    logprobs: list[JsonObject] = field(default_factory=list)  #: Of the tokens of a message.

    def object(self) -> JsonObject:
        """Return the item as responses and events have it."""
        common_fields = {"id": self.id, "status": self.status}
        if self.kind == PartKind.CALL:
            return self._call_object(common_fields)
        # While an item is written, its text comes in events only.
        content = [] if self.status == _ItemStatus.IN_PROGRESS else [self.part()]
        if self.kind == PartKind.REASONING:
            return {"type": "reasoning", "summary": [], **common_fields, "content": content}
        return {"type": "message", "role": "assistant", **common_fields, "content": content}

    def _call_object(self, common_fields: JsonObject) -> JsonObject:
        """Return the item of a call."""
        call: JsonObject = {**common_fields, "call_id": self.call_id, "name": self.function_name}
        if self.namespace is not None:
            call["namespace"] = self.namespace
        if self.is_custom:
            return {"type": "custom_tool_call", **call, "input": custom_input(self.text)}
        return {"type": "function_call", **call, "arguments": self.text}

    def part(self) -> JsonObject:
        """Return the content part of an item of text."""
        part = {**_EMPTY_PARTS[self.kind], "text": self.text}
        if self.kind == PartKind.CONTENT:
            part["logprobs"] = self.logprobs
        return part


class _TextTokens:
    """Finds the tokens that a piece of the parsed text is made of.

    The parser holds text back, and takes markers and white space away, so its parts are not the
    texts of the tokens that came last. Texts are compared as bytes, because a token may hold a part
    of a character.
    """

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._bytes = bytearray()  #: What no part was made of, so far.
        self._tokens: list[frames.Token] = []  #: The tokens that begin there.
        self._starts: list[int] = []  #: Where they begin there.

    def add(self, tokens: list[frames.Token]) -> None:
        """Take the next tokens of the answer."""
        for token in tokens:
            self._tokens.append(token)
            self._starts.append(len(self._bytes))
            self._bytes += self._tokenizer.token_bytes(token.id)

    def take(self, text: str) -> list[frames.Token]:
        """Return the tokens of the next part of the text, and forget all up to its end.

        A token that began in an earlier part is not returned again. No token is returned, and none
        forgotten, for a text that is not there, such as arguments that the parser has written.
        """
        start = self._find(text.encode())
        if start is None:
            return []
        end = start + len(text.encode())
        # The token that has the start; none if that is in the rest of one that was returned.
        first = max(0, bisect_right(self._starts, start) - 1)
        behind = bisect_left(self._starts, end)
        taken = self._tokens[first:behind]
        del self._bytes[:end]
        self._tokens = self._tokens[behind:]
        self._starts = [token_start - end for token_start in self._starts[behind:]]
        return taken

    def _find(self, text: bytes) -> int | None:
        """Return where a text begins; None if it is empty, or not there.

        That is behind the last part, or where a token's text begins, but for white space. Only a
        text that is at no such place may begin inside of a token, as "hi" does in ">hi": elsewhere
        it may be part of a marker, as in "</think>".
        """
        if not text:
            return None
        first_start = start = self._bytes.find(text)
        while start >= 0:
            token_index = bisect_right(self._starts, start) - 1
            token_start = self._starts[token_index] if token_index >= 0 else 0
            if not self._bytes[token_start:start].strip():
                return start
            start = self._bytes.find(text, start + 1)
        return first_start if first_start >= 0 else None


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
        store: Callable[[JsonObject], None] | None = None,
    ) -> None:
        """Call `store`, if there is one, with the response when it has ended.

        `body` is what the client sent, and `chat` the same as a chat. `model` is the name that the
        response shows; `prompt` is what the request was made of.
        """
        self._body = body
        self._store = store
        self._chat = chat
        self._request = request
        self._model = model
        rules = chat.content_rules(tokenizer, prompt)
        self._markers = rules.markers  #: Special tokens that the parser must see as text.
        self._parser = ContentParser(rules)
        self._reasoning_counter = ReasoningCounter(tokenizer, rules)
        self._created_at_s = int(time.time())
        self._next_event_number = 0
        self._offered_tools = {tool.chat_name: tool for tool in body.offered_tools}
        self._items: list[_OutputItem] = []  #: In the order of the answer; only the last is open.
        self._finish_reason: str | None = None  #: stop or length, once the answer has ended.
        self._tokenizer = tokenizer
        #: None if the client wants no logprobs.
        self._text_tokens = _TextTokens(tokenizer) if body.wants_logprobs else None

    @property
    def output(self) -> Output:
        return self._chat.output(self._markers)

    def begin(self) -> list[JsonObject]:
        """Return the events that come before any text."""
        response = self._response("in_progress")
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
        for part in self._parse(delta):
            events += self._add_part(part)
        return events

    def end(self, used_tokens: int) -> list[JsonObject]:
        """Return the events behind the answer, which has `used_tokens` tokens."""
        events = self._end_items()
        response = self._ended_response(used_tokens)
        return [*events, self._event(f"response.{response['status']}", response=response)]

    def failed(self, error: ApiError) -> list[JsonObject]:
        """Return the event that says that the answer cannot be completed."""
        response = self._response("failed")
        response["error"] = {"code": "server_error", "message": error.message}
        return [self._event("response.failed", response=response)]

    def whole(self, deltas: list[TextDelta], used_tokens: int) -> JsonObject:
        """Return the `response` object of the whole answer, which has `used_tokens` tokens.

        `deltas` holds that one answer. The items are made as for a stream; the events are dropped.
        """
        self.delta(deltas[0])
        self._end_items()
        return self._ended_response(used_tokens)

    # ---- items -----------------------------------------------------------------------------------

    def _parse(self, delta: TextDelta) -> list[ContentPart]:
        """Return the parts of a piece of the answer; notes how the answer ended."""
        if self._text_tokens is not None:
            self._text_tokens.add(delta.tokens)
        parts = self._parser.feed(delta.text)
        if delta.finish_reason:
            self._finish_reason = delta.finish_reason
            parts += self._parser.end(is_cut=delta.is_cut)
            self._tokenizer.call_flaws.update(self._parser.flaws)
        has_ended = delta.finish_reason is not None
        self._reasoning_counter.feed(delta.tokens, parts, has_ended=has_ended)
        return parts

    def _add_part(self, part: ContentPart) -> list[JsonObject]:
        """Add a part of the answer to the items; return its events."""
        match part.kind:
            case PartKind.CALL:
                return self._begin_item(PartKind.CALL, function_name=part.text)
            case PartKind.ARGUMENTS:
                return self._add_text(part.text)
            case PartKind.REASONING | PartKind.CONTENT:
                events = [] if self._open_kind == part.kind else self._begin_item(part.kind)
                return events + self._add_text(part.text)
            case _:
                assert_never(part.kind)

    @property
    def _open_kind(self) -> PartKind | None:
        """The kind of the item that has not ended; None if all have."""
        if self._items and self._items[-1].status == _ItemStatus.IN_PROGRESS:
            return self._items[-1].kind
        return None

    def _begin_item(self, kind: PartKind, function_name: str = "") -> list[JsonObject]:
        """Begin an item, which ends the last one; return the events that say so."""
        events = self._end_last_item(_ItemStatus.COMPLETED)
        number = len(self._items)
        item = _OutputItem(
            id=f"{_ITEM_ID_PREFIXES[kind]}_{self._request.id}_{number}",
            kind=kind,
            output_index=number,
        )
        if kind == PartKind.CALL:
            item.call_id = f"call_{self._request.tool_call_suffix}{number:04d}"
            item.function_name = function_name
            tool = self._offered_tools.get(function_name)
            if tool is not None:
                item.function_name = tool.name
                item.namespace = tool.namespace
                item.is_custom = tool.is_custom
                if tool.is_custom:
                    item.id = f"ctc_{self._request.id}_{number}"
        self._items.append(item)
        events.append(
            self._event(
                "response.output_item.added",
                output_index=item.output_index,
                item=item.object(),
            )
        )
        if kind != PartKind.CALL:
            part = item.part()
            events.append(self._part_event("response.content_part.added", item, part=part))
        return events

    def _add_text(self, text: str) -> list[JsonObject]:
        """Add text, or arguments, to the last item; return the event that says so."""
        item = self._items[-1]
        item.text += text
        logprobs = self._logprobs(text)
        if item.is_custom:
            return []  # the input is known once the arguments are whole
        if item.kind == PartKind.CALL:
            event_name = "response.function_call_arguments.delta"
            return [self._item_event(event_name, item, delta=text)]
        event_name = f"{_TEXT_EVENT_NAMES[item.kind]}.delta"
        if item.kind == PartKind.REASONING:
            return [self._part_event(event_name, item, delta=text)]
        item.logprobs += logprobs
        event_logprobs = _event_logprobs(logprobs)
        return [self._part_event(event_name, item, delta=text, logprobs=event_logprobs)]

    def _logprobs(self, text: str) -> list[JsonObject]:
        """Return the logprobs of the tokens of the answer's next text, if they are wanted."""
        if self._text_tokens is None:
            return []
        tokens = self._text_tokens.take(text)
        logprobs: list[JsonObject] = logprobs_object(self._chat, tokens, self._tokenizer)["content"]
        return logprobs

    def _end_last_item(self, status: _ItemStatus) -> list[JsonObject]:
        """End the last item; return the events that say so, or none if no item is open."""
        if self._open_kind is None:
            return []
        item = self._items[-1]
        item.status = status
        if item.is_custom:
            text = custom_input(item.text)
            event_name = "response.custom_tool_call_input"
            events = [
                self._item_event(f"{event_name}.delta", item, delta=text),
                self._item_event(f"{event_name}.done", item, input=text),
            ]
        elif item.kind == PartKind.CALL:
            events = [
                self._item_event(
                    "response.function_call_arguments.done",
                    item,
                    name=item.function_name,
                    arguments=item.text,
                )
            ]
        else:
            event_name = f"{_TEXT_EVENT_NAMES[item.kind]}.done"
            logprobs_field = {}
            if item.kind == PartKind.CONTENT:
                logprobs_field["logprobs"] = _event_logprobs(item.logprobs)
            events = [
                self._part_event(event_name, item, text=item.text, **logprobs_field),
                self._part_event("response.content_part.done", item, part=item.part()),
            ]
        events.append(
            self._event(
                "response.output_item.done",
                output_index=item.output_index,
                item=item.object(),
            )
        )
        return events

    def _end_items(self) -> list[JsonObject]:
        """End the answer's last item; return the events that say so.

        A cut answer has an empty message if nothing of it can be shown.
        """
        events = []
        is_cut = self._finish_reason == "length"
        if is_cut and not self._items:
            events += self._begin_item(PartKind.CONTENT)
        if self._open_kind == PartKind.CALL:
            # The parser knows: a call may be whole at the limit, or cut by a stop string.
            is_cut = self._parser.has_cut_call
        status = _ItemStatus.INCOMPLETE if is_cut else _ItemStatus.COMPLETED
        return events + self._end_last_item(status)

    # ---- events ----------------------------------------------------------------------------------

    def _event(self, event_name: str, /, **fields: Any) -> JsonObject:
        """Return an event with the next number; clients see by it whether one is missing."""
        event = {"type": event_name, "sequence_number": self._next_event_number, **fields}
        self._next_event_number += 1
        return event

    def _item_event(self, event_name: str, item: _OutputItem, /, **fields: Any) -> JsonObject:
        """Return an event about an item."""
        return self._event(event_name, item_id=item.id, output_index=item.output_index, **fields)

    def _part_event(self, event_name: str, item: _OutputItem, /, **fields: Any) -> JsonObject:
        """Return an event about the content part of an item."""
        return self._item_event(event_name, item, content_index=0, **fields)

    # ---- the response ----------------------------------------------------------------------------

    def _ended_response(self, used_tokens: int) -> JsonObject:
        """Return the object of the response that has ended, and store it if it is to be stored."""
        status = "incomplete" if self._finish_reason == "length" else "completed"
        response = self._response(status)
        if status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        response["usage"] = self._usage(used_tokens)
        if self._body.enable_response_messages:
            answer_ids = [token.id for token in self._request.answers[0].journal[:used_tokens]]
            response["input_messages"] = [self._raw_message(self._request.prompt_ids)]
            response["output_messages"] = [self._raw_message(answer_ids)]
        if self._store is not None:
            self._store(response)
        return response

    def _raw_message(self, token_ids: list[int]) -> JsonObject:
        """Return what vLLM calls a message: a text as the model has it, with its token ids."""
        text = self._tokenizer.decode(token_ids)
        return {"type": "raw_message_tokens", "message": text, "tokens": token_ids}

    def _response(self, status: str) -> JsonObject:
        """Return the object of the response as far as it is there.

        It has those of OpenAI's fields that mean something here.
        """
        body = self._body
        tool_choice: str | JsonObject = "auto"
        if isinstance(body.tool_choice, str):
            tool_choice = body.tool_choice
        elif body.tool_choice is not None:
            tool_choice = body.tool_choice.model_dump(exclude_none=True)
        text: JsonObject = {"format": {"type": "text"}}
        if body.text and body.text.format:
            text["format"] = body.text.format.model_dump(by_alias=True, exclude_none=True)
        return {
            "id": self._request.id,
            "object": "response",
            "created_at": self._created_at_s,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._model,
            "output": [item.object() for item in self._items],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": body.reasoning.effort} if body.reasoning else None,
            "store": self._store is not None,
            "temperature": self._request.sampling.temperature,
            "text": text,
            "tool_choice": tool_choice,
            "tools": [response_tool(tool) for tool in body.tools or []],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": self._request.sampling.top_p,
            "truncation": body.truncation or "disabled",
            "usage": None,
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
            "output_tokens_details": {"reasoning_tokens": self._reasoning_counter.tokens},
            "total_tokens": prompt_tokens + used_tokens,
        }


def _event_logprobs(logprobs: list[JsonObject]) -> list[JsonObject]:
    """Return logprobs as events have them: without the bytes of the tokens."""
    return [
        {
            "token": entry["token"],
            "logprob": entry["logprob"],
            "top_logprobs": [
                {"token": top["token"], "logprob": top["logprob"]} for top in entry["top_logprobs"]
            ],
        }
        for entry in logprobs
    ]
