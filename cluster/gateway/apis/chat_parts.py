"""What the body of a chat consists of: messages and their content, tools, a choice among them.

`chat.ChatRequest` is the body itself. The other APIs borrow these parts and their bounds.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from pydantic import Discriminator, Field, Tag, ValidationInfo, field_validator, model_validator

from ..errors import ApiError
from .schema import BodyPart, JsonObject, is_strict

TOOLS_MAX = 128  #: OpenAI's limit.
#: Bounds that OpenAI does not have: a template goes through each message and each document.
MESSAGES_MAX = 1000
DOCUMENTS_MAX = 1000
PART_TYPE_CHARS_MAX = 40  #: An error shows so many characters of a part's type that is not read.
#: The roles that OpenAI knows. A template may know others; only a strict gateway refuses those.
PUBLISHED_ROLES = ("system", "developer", "user", "assistant", "tool")
#: OpenAI allows names of 64 characters, Anthropic of 128.
FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]


class _TextPart(BodyPart):
    keeps_unknown_fields: ClassVar[bool] = True

    type: Literal["text"]
    text: str

    @field_validator("type", mode="before")
    @classmethod
    def _check_type(cls, part_type: Any) -> Any:
        if isinstance(part_type, str) and part_type != "text":
            shown_type = part_type[:PART_TYPE_CHARS_MAX]
            raise ValueError(f"parts of type {shown_type!r} are not read, only 'text' is")
        return part_type


class _CalledFunction(BodyPart):
    name: str
    arguments: str = "{}"


class _PastToolCall(BodyPart):
    """A call in an assistant's earlier message."""

    id: str = ""
    type: Literal["function"] = "function"
    function: _CalledFunction
    index: int | None = None  #: Only chunks have it; clients that kept one send it back.

    @property
    def parsed_arguments(self) -> dict[str, Any]:
        """The arguments as an object.

        A model may write arguments that are no JSON object. They stay in the conversation, as the
        text under the only key `INVALID_JSON`.
        """
        text = self.function.arguments
        try:
            arguments = msgspec.json.decode(text or "{}")
        except (msgspec.DecodeError, RecursionError):
            arguments = None
        return arguments if isinstance(arguments, dict) else {"INVALID_JSON": text}


def content_branch(content: Any) -> str:
    """Return the tag of the branch that reads `content`, in a union of a text and a list of parts.

    What is neither has the tag of texts, and the error then says that it should be a text.
    """
    return "#parts" if isinstance(content, list) else "#text"


#: A message's text, whole or in parts. `content_branch` chooses first, so that a validation error is
#: about that branch alone.
Content = Annotated[
    Annotated[str, Tag("#text")] | Annotated[list[_TextPart], Tag("#parts")],
    Discriminator(content_branch),
]


class ChatMessage(BodyPart):
    # A message of the conversation; templates may know further roles and fields than OpenAI's.
    keeps_unknown_fields: ClassVar[bool] = True

    role: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    content: Content | None = None
    name: str | None = None
    tool_calls: list[_PastToolCall] | None = None
    tool_call_id: str | None = None
    #: The reasoning of an earlier answer, under either of the names that servers give it.
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None  #: What the assistant said instead of its content.

    @model_validator(mode="after")
    def _check_role(self, info: ValidationInfo) -> ChatMessage:
        if self.role not in PUBLISHED_ROLES and is_strict(info):
            raise ValueError(f"role must be one of {', '.join(PUBLISHED_ROLES)}")
        if self.content is None and self.role != "assistant":
            raise ValueError(f"a message of role {self.role} needs content")
        if self.tool_calls and self.role != "assistant":
            raise ValueError("tool_calls are the assistant's")
        if self.role == "tool" and not self.tool_call_id:
            raise ValueError("a message of role tool needs tool_call_id")
        return self

    @property
    def text(self) -> str:
        """The content as one text; without content, what the assistant said instead."""
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or self.refusal or ""

    @property
    def other_chars(self) -> int:
        """How many characters a template may show beside the text and the calls.

        They are those of the reasoning, of `tool_call_id` and of the name.
        """
        texts = (self.reasoning_content or self.reasoning, self.tool_call_id, self.name)
        return sum([len(text) for text in texts if text])

    @property
    def _template_content(self) -> str | list[JsonObject]:
        """The content as one text; as its parts, if one of them has fields for the template."""
        if not isinstance(self.content, list) or not any(part.model_extra for part in self.content):
            return self.text
        return [
            {**(part.model_extra or {}), "type": part.type, "text": part.text}
            for part in self.content
        ]

    def template_message(self, knows_developers: bool) -> JsonObject:
        """Return the message as chat templates read it.

        The arguments of calls are objects there, not text. A developer's message is the system's,
        unless the template `knows_developers`. All other roles are left to the template. Fields
        that no model here declares are there if the template reads them (`settle_template_fields`).
        """
        role = self.role
        if role == "developer" and not knows_developers:
            role = "system"
        message: JsonObject = {
            **(self.model_extra or {}),
            "role": role,
            "content": self._template_content,
        }
        reasoning = self.reasoning_content or self.reasoning
        if reasoning:
            message["reasoning_content"] = reasoning
        if self.tool_call_id:
            message["tool_call_id"] = self.tool_call_id
        if self.name:
            message["name"] = self.name
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": call.parsed_arguments},
                }
                for call in self.tool_calls
            ]
        return message


class _Function(BodyPart):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None  #: A JSON schema; None: any object.
    strict: bool | None = None  #: For the template alone: it binds nothing here.


class ChatTool(BodyPart):
    type: Literal["function"]
    function: _Function


class _NamedFunction(BodyPart):
    name: str


class NamedToolChoice(BodyPart):
    type: Literal["function"] = "function"
    function: _NamedFunction


class _AllowedTools(BodyPart):
    """Which of the tools may be called, and whether one has to be."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedToolChoice], Field(min_length=1, max_length=TOOLS_MAX)]


class AllowedToolsChoice(BodyPart):
    type: Literal["allowed_tools"]
    allowed_tools: _AllowedTools


def _tool_choice_branch(choice: Any) -> str:
    """Return the tag of the branch that reads a `tool_choice`."""
    if not isinstance(choice, dict):
        return "#mode"
    return "#allowed_tools" if choice.get("type") == "allowed_tools" else "#function"


ChatToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("#mode")]
    | Annotated[NamedToolChoice, Tag("#function")]
    | Annotated[AllowedToolsChoice, Tag("#allowed_tools")],
    Discriminator(_tool_choice_branch),
]


class StreamOptions(BodyPart):
    # What a stream has beside the answers.
    include_usage: bool = False  #: The last chunk of a stream has the usage.
    continuous_usage_stats: bool = False  #: With `include_usage`, all chunks have it.
    include_obfuscation: bool = False  #: Taken without effect: events get no padding.


def check_stream_options(options: StreamOptions | None, stream: bool) -> None:
    """Raise ApiError for options of a stream where there is none, as OpenAI and vLLM do."""
    if options is not None and not stream:
        message = "stream_options need stream: true"
        raise ApiError("invalid_request", message, "stream_options")
