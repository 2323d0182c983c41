"""The items that a body of `/v1/responses` has, as messages of a chat (pure).

An item is a message, a piece of reasoning, a call, or the output of a call. Clients send back the
items that they got, with ids and statuses. A chat has all that the assistant says at a time in one
message, so `chat_messages` joins items that follow each other.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import (
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    TypeAdapter,
    model_validator,
)

from .chat_parts import PART_TYPE_CHARS_MAX, content_branch
from .response_tools import chat_name, custom_arguments
from .schema import BodyPart, JsonObject

#: Types of content parts that have a text. They differ in who wrote it, and what for.
TEXT_PART_TYPES = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
INCOMPLETE = "incomplete"  #: The status of an item that lacks its end: the answer ended inside.


def _type_of(value: Any) -> Any:
    """Return the `type` of an object that is to be read, or of one that was read."""
    return value.get("type") if isinstance(value, dict) else getattr(value, "type", None)


class _ItemPart(BodyPart):
    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text", "refusal"]
    text: str = ""
    refusal: str = ""  #: What the assistant said instead of a text.

    @model_validator(mode="before")
    @classmethod
    def _check_type(cls, part: Any) -> Any:
        part_type = part.get("type") if isinstance(part, dict) else None
        if not isinstance(part_type, str):
            return part
        if part_type in TEXT_PART_TYPES:
            if not isinstance(part.get("text"), str):
                raise ValueError(f"a part of type {part_type!r} needs a text")
        elif part_type != "refusal":
            shown_type = part_type[:PART_TYPE_CHARS_MAX]
            raise ValueError(f"parts of type {shown_type!r} are not read, only texts are")
        return part


_Content = Annotated[
    Annotated[str, Tag("#text")] | Annotated[list[_ItemPart], Tag("#parts")],
    Discriminator(content_branch),
]


def _text_of(content: str | list[_ItemPart] | None) -> str:
    if isinstance(content, list):
        return "".join(part.text or part.refusal for part in content)
    return content or ""


class _Item(BodyPart):
    """What all items may have."""

    id: str | None = None
    status: str | None = None


class _MessageItem(_Item):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: _Content
    phase: str | None = None  #: OpenAI's mark of an interim or a final message; without effect.


class _ReasoningItem(_Item):
    type: Literal["reasoning"]
    content: list[_ItemPart] | None = None
    summary: list[_ItemPart] | None = None
    encrypted_content: str | None = None  #: Only who wrote it can read it; the content is read.


class _CallItem(_Item):
    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str = "{}"


class _CustomCallItem(_Item):
    """A call of a tool whose input is a text."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    namespace: str | None = None
    input: str


class _CallOutputItem(_Item):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: Annotated[str, Field(min_length=1)]
    output: _Content
    name: str | None = None


class ItemReference(_Item):
    """An item that a stored response has."""

    # `api.py` replaces each reference by the item that it names before a chat is made.

    type: Literal["item_reference"] = "item_reference"
    id: str


class _UnreadItem(BodyPart):
    """An item of a type that is not read."""

    model_config = ConfigDict(json_schema_extra={"not": {}})  # OpenAPI: nothing is such an item

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, item: Any) -> Any:
        item_type = item.get("type") if isinstance(item, dict) else None
        if not isinstance(item_type, str):
            raise ValueError("an item is an object with a type")
        shown_type = item_type[:PART_TYPE_CHARS_MAX]
        raise ValueError(
            f"items of type {shown_type!r} are not read; send messages, reasoning, "
            "calls of functions and of custom tools, and their outputs"
        )


_ITEM_TYPES = (
    *("message", "reasoning", "item_reference"),
    *("function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output"),
)


def _item_branch(item: Any) -> str:
    item_type = _type_of(item)
    if item_type is None and isinstance(item, dict):
        # An item without a type is a message, as in a chat; or the item has nothing but an id, and
        # refers to another item. Null stands for a field that is not there.
        fields = {name for name, value in item.items() if value is not None}
        item_type = "item_reference" if fields == {"id"} else "message"
    if item_type not in _ITEM_TYPES:
        return "#unread"
    return "#function_call_output" if item_type.endswith("_output") else f"#{item_type}"


InputItem = Annotated[
    Annotated[_MessageItem, Tag("#message")]
    | Annotated[_ReasoningItem, Tag("#reasoning")]
    | Annotated[_CallItem, Tag("#function_call")]
    | Annotated[_CustomCallItem, Tag("#custom_tool_call")]
    | Annotated[_CallOutputItem, Tag("#function_call_output")]
    | Annotated[ItemReference, Tag("#item_reference")]
    | Annotated[_UnreadItem, Tag("#unread")],
    Discriminator(_item_branch),
]
_ITEMS: TypeAdapter[list[InputItem]] = TypeAdapter(list[InputItem])


def read_items(text: bytes) -> list[InputItem]:
    """Return the items of a JSON text that this gateway or another one made of checked items."""
    return _ITEMS.validate_json(text)


def is_message_of(item: InputItem, *roles: str) -> bool:
    """Return whether an item is a message of one of these roles."""
    return isinstance(item, _MessageItem) and item.role in roles


def user_message(text: str) -> InputItem:
    """Return the user's message that a body's `input` stands for where it is a text, not items."""
    return _MessageItem(role="user", content=text)


# ---- a chat's messages ---------------------------------------------------------------------------


def chat_messages(items: Iterable[InputItem]) -> list[JsonObject]:
    """Return the items as messages of a chat. None of the items may be a reference.

    Items of the assistant that follow each other become one message as long as their order is that
    of a message: any reasoning, then one text, then any calls. Reasoning or a text behind a text or
    a call begins another message. A call that was cut is left out, as nobody can have run it.
    """
    messages: list[JsonObject] = []
    for item in items:
        match item:
            case _MessageItem(role="assistant"):
                message = _assistant_message(messages, {"content", "tool_calls"})
                message["content"] = _text_of(item.content)
            case _MessageItem():
                messages.append({"role": item.role, "content": _text_of(item.content)})
            case _ReasoningItem():
                message = _assistant_message(messages, {"content", "tool_calls"})
                reasoning = _text_of(item.content) or _text_of(item.summary)
                message["reasoning_content"] = message.get("reasoning_content", "") + reasoning
            case _CallItem():
                if item.status != INCOMPLETE:
                    _add_call(messages, item, item.arguments or "{}")
            case _CustomCallItem():
                if item.status != INCOMPLETE:
                    _add_call(messages, item, custom_arguments(item.input))
            case _CallOutputItem():
                output = _text_of(item.output)
                message = {"role": "tool", "tool_call_id": item.call_id, "content": output}
                messages.append(message)
    return messages


def _add_call(
    messages: list[JsonObject], item: _CallItem | _CustomCallItem, arguments: str
) -> None:
    """Add a call to the assistant's message."""
    message = _assistant_message(messages, set())
    function = {"name": chat_name(item.name, item.namespace), "arguments": arguments}
    call = {"id": item.call_id, "type": "function", "function": function}
    message.setdefault("tool_calls", []).append(call)


def _assistant_message(messages: list[JsonObject], ending_fields: set[str]) -> JsonObject:
    """Return the assistant's message that the next item belongs to.

    That is the last message, or a new one if the last message is not the assistant's or has one of
    `ending_fields`.
    """
    if not messages or messages[-1]["role"] != "assistant" or messages[-1].keys() & ending_fields:
        messages.append({"role": "assistant"})
    return messages[-1]
