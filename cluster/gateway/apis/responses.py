"""OpenAI's `/v1/responses`: its body, read as a chat (pure).

What the answer becomes is in `response_shape`.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from ..errors import ApiError
from ..text.tokenizer import ChatTokenizer
from .chat import ChatRequest, effort_arguments
from .chat_parts import MESSAGES_MAX, TOOLS_MAX
from .known_fields import ApiName
from .parameters import CommonSamplingFields, ModelLimits
from .response_items import (
    InputItem,
    chat_messages,
    is_message_of,
    user_message,
)
from .response_tools import (
    OfferedTool,
    ResponseTool,
    ServerTool,
    ToolChoice,
    offered_tools,
    refusal_of,
)
from .schema import BodyPart, JsonObject, read_fields

#: By this entry of `include`, a client asks for the logprobs of the answer's text.
LOGPROBS_INCLUDABLE = "message.output_text.logprobs"
#: What a response can be asked to include. All but the logprobs are about tools and files that are
#: not offered, or about reasoning, which is never encrypted: there is nothing to include.
INCLUDABLES = frozenset(
    {
        LOGPROBS_INCLUDABLE,
        "file_search_call.results",
        "web_search_call.results",
        "web_search_call.action.sources",
        "message.input_image.image_url",
        "computer_call_output.output.image_url",
        "code_interpreter_call.outputs",
        "reasoning.encrypted_content",
    }
)
INCLUDES_MAX = 32  #: Of one body; each is compared with the known ones.
#: Bounds of `metadata`, which are OpenAI's: pairs, and characters of a key and of a value.
METADATA_PAIRS_MAX = 16
METADATA_KEY_CHARS_MAX = 64
METADATA_VALUE_CHARS_MAX = 512
#: The fields of this API by those of the chat that a body becomes, as errors name them.
_FIELDS_BY_CHAT_FIELD = {
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
}


class _TextFormat(BodyPart):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    content: Annotated[dict[str, Any] | None, Field(alias="schema")] = None  #: For json_schema.
    strict: bool | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> Self:
        if self.type == "json_schema" and self.content is None:
            raise ValueError("type json_schema needs a schema")
        return self

    def response_format(self) -> JsonObject:
        """Return the same as a chat's `response_format`."""
        if self.type != "json_schema":
            return {"type": self.type}
        schema = {"name": self.name, "schema": self.content}
        return {"type": self.type, "json_schema": schema}


class _TextOptions(BodyPart):
    format: _TextFormat | None = None


class _ReasoningOptions(BodyPart):
    effort: Annotated[str, Field(max_length=64)] | None = None


def _input_branch(value: Any) -> str:
    return "#items" if isinstance(value, list) else "#text"


_Metadata = Annotated[
    dict[
        Annotated[str, Field(max_length=METADATA_KEY_CHARS_MAX)],
        Annotated[str, Field(max_length=METADATA_VALUE_CHARS_MAX)],
    ],
    Field(max_length=METADATA_PAIRS_MAX),
]
_Input = Annotated[
    Annotated[str, Tag("#text")]
    | Annotated[
        list[InputItem],
        Tag("#items"),
        Field(min_length=1, max_length=MESSAGES_MAX),
    ],
    Discriminator(_input_branch),
]


class ResponsesRequest(CommonSamplingFields):
    """What `/v1/responses` takes."""

    api: ClassVar[ApiName] = ApiName.RESPONSES

    model: str = ""
    input: _Input  #: A text of the user's, or the items of a conversation.
    instructions: str | None = None  #: The system's message in front of the conversation.
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None  #: None: what the context leaves.
    stream: bool = False
    text: _TextOptions | None = None
    tools: Annotated[list[ResponseTool], Field(max_length=TOOLS_MAX)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: _ReasoningOptions | None = None
    include: Annotated[list[str], Field(max_length=INCLUDES_MAX)] | None = None
    #: So many of the likeliest tokens at each place, beside the chosen one.
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    #: auto: the oldest items are left out if the input is too long; otherwise it is refused.
    truncation: Literal["auto", "disabled"] | None = None
    store: bool | None = None  #: False: the response is not kept.
    previous_response_id: str | None = None  #: The input goes on behind this response.
    user: str | None = None
    metadata: _Metadata | None = None  #: The response repeats it.
    safety_identifier: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_response_messages: bool = False  #: vLLM's: what the model read and wrote goes along.

    @property
    def wants_logprobs(self) -> bool:
        """True if texts of the answer have the logprobs of their tokens."""
        return LOGPROBS_INCLUDABLE in (self.include or []) or bool(self.top_logprobs)

    @property
    def offered_tools(self) -> list[OfferedTool]:
        """The tools that the model gets to know."""
        return offered_tools(self.tools or [])

    @property
    def input_items(self) -> list[InputItem]:
        """The items of the input."""
        return [user_message(self.input)] if isinstance(self.input, str) else self.input

    def as_chat(
        self, tokenizer: ChatTokenizer, limits: ModelLimits, items: list[InputItem]
    ) -> ChatRequest:
        """Return the same request as a chat, which notes here what it ignores. Raises ApiError.

        `items` are those of the whole conversation; none of them is a reference. With `truncation:
        auto` the chat lacks the oldest of them if it would be too long. To find out takes seconds,
        so it does not belong on the event loop.
        """
        if self.truncation == "auto":
            items = self._fitting_items(tokenizer, limits, items)
        self._note_unused(tokenizer)
        chat = self._chat(tokenizer, items)
        chat.read_like(self)
        return chat

    def _fitting_items(
        self, tokenizer: ChatTokenizer, limits: ModelLimits, items: list[InputItem]
    ) -> list[InputItem]:
        """Return the conversation without as many of its oldest items as it takes to fit.

        The items left begin with a user's message, so that no output of a call is without its call.
        Messages of the system stay. If the last message of the user is too long, it stays too.
        """
        user_indices = [index for index, item in enumerate(items) if is_message_of(item, "user")]
        starts = [0, *(index for index in user_indices if index > 0)]
        candidates = [
            [item for item in items[:start] if is_message_of(item, "system", "developer")]
            + items[start:]
            for start in starts
        ]

        def is_fitting(candidate: list[InputItem]) -> bool:
            return self._fits(tokenizer, limits, candidate)

        # Each candidate is shorter than the one before, so those that fit come last: the first of
        # them is found by halving. The last one is taken unseen, as there is no other.
        number = bisect_left(candidates, True, hi=len(candidates) - 1, key=is_fitting)
        return candidates[number]

    def _fits(self, tokenizer: ChatTokenizer, limits: ModelLimits, items: list[InputItem]) -> bool:
        """Return whether the prompt has room for an answer of the length that is asked for.

        An answer as long as the whole context has room behind no prompt. Then its length only
        bounds the answer, as with `truncation: disabled`, and room for one token is enough.
        """
        if len(self._messages(items)) > MESSAGES_MAX:
            return False
        chat = self._chat(tokenizer, items)
        try:
            chat.check(tokenizer, limits)
        except ApiError as error:
            if error.reason == "context_length_exceeded":
                return False
            raise
        prompt_tokens = len(chat.prompt(tokenizer).token_ids)
        answer_tokens = self.max_output_tokens or 1
        if answer_tokens >= limits.max_model_len:
            answer_tokens = 1
        return prompt_tokens + answer_tokens <= limits.max_model_len

    def _messages(self, items: list[InputItem]) -> list[JsonObject]:
        """Return the messages of a chat of these items."""
        messages: list[JsonObject] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        return messages + chat_messages(items)

    def _chat(self, tokenizer: ChatTokenizer, items: list[InputItem]) -> ChatRequest:
        """Return a chat of these items, with the sampling fields that the client sent.

        Raises ApiError.
        """
        messages = self._messages(items)
        if len(messages) > MESSAGES_MAX:
            message = (
                f"input: with instructions and earlier turns it is {len(messages)} messages for "
                f"the model, the limit is {MESSAGES_MAX}"
            )
            raise ApiError("invalid_request", message, "input")
        chat: JsonObject = self.model_dump(
            include=set(CommonSamplingFields.model_fields),
            exclude_unset=True,
            exclude_none=True,
            by_alias=True,
        )
        chat |= {"model": self.model, "messages": messages, **self._tool_fields()}
        if self.chat_template_kwargs is not None:
            chat["chat_template_kwargs"] = self.chat_template_kwargs
        if self.wants_logprobs:
            chat |= {"logprobs": True, "top_logprobs": self.top_logprobs or 0}
        if self.max_output_tokens is not None:
            chat["max_tokens"] = self.max_output_tokens
        if self.text and self.text.format:
            chat["response_format"] = self.text.format.response_format()
        effort = self.reasoning.effort if self.reasoning else None
        if effort is not None and (self.is_strict or effort_arguments(effort, tokenizer)):
            chat["reasoning_effort"] = effort
        return read_fields(ChatRequest, chat)

    def _note_unused(self, tokenizer: ChatTokenizer) -> None:
        """Note, or refuse if the gateway is strict, what fields that are read ask for in vain."""
        effort = self.reasoning.effort if self.reasoning else None
        if effort is not None and not self.is_strict and not effort_arguments(effort, tokenizer):
            self.ignored_fields.add_documented("reasoning", "effort")
        for index, tool in enumerate(self.tools or []):
            if not isinstance(tool, ServerTool):
                continue
            if not self.offered_tools and self.tool_choice != "none":
                message = f"tools.{index}.type: {refusal_of(tool.type)}"
                raise ApiError("invalid_request", message, f"tools.{index}.type")
            self.ignored_fields.add_documented("tools", tool.type)
        for name in self.include or []:
            if name in INCLUDABLES:
                continue
            if self.is_strict:
                message = "include: only what OpenAI names can be included"
                raise ApiError("invalid_request", message, "include")
            self.ignored_fields.add_unknown("include", name, INCLUDABLES)

    def _tool_fields(self) -> JsonObject:
        """Return the fields of a chat about tools."""
        fields: JsonObject = {}
        if self.tools:
            fields["tools"] = [tool.function for tool in self.offered_tools]
        if isinstance(self.tool_choice, str):
            fields["tool_choice"] = self.tool_choice
        elif self.tool_choice is not None:
            fields["tool_choice"] = self.tool_choice.chat_tool()
        if self.parallel_tool_calls is not None:
            fields["parallel_tool_calls"] = self.parallel_tool_calls
        return fields


def error_of_responses(error: ApiError) -> ApiError:
    """Return the error of a chat that a body became, with the name that the field has here."""
    chat_field = error.param or ""
    field = _FIELDS_BY_CHAT_FIELD.get(chat_field)
    if field is None:
        return error
    message = error.message
    if message.startswith(f"{chat_field}:"):
        message = field + message.removeprefix(chat_field)
    return ApiError(error.reason, message, field)
