"""The tools that a body of `/v1/responses` offers, as functions of a chat (pure).

A chat knows functions only. A custom tool, whose input is a text, becomes a function with this one
parameter, and the tools of a namespace become functions whose names begin with the namespace's.
Calls are told under the names that the client knows.

Tools that run on OpenAI's own servers are refused, but for those that coding agents offer to every
model: these are ignored beside tools that the client runs (`responses.py` refuses a body that has no
others). A strict gateway, which refuses all that it would ignore, refuses them too.

The discriminators of the unions name branches `#function` and the like: errors show where they are,
and `#` tells a branch from a field of the body.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from pydantic import ConfigDict, Discriminator, Field, Tag, ValidationInfo, field_validator

from .chat_parts import PART_TYPE_CHARS_MAX, TOOLS_MAX, FunctionName
from .schema import BodyPart, JsonObject, is_strict

NAMESPACE_SEPARATOR = "__"
CUSTOM_INPUT = "input"  #: The one parameter of the function that a custom tool becomes.
_OWN_FUNCTION_HINT = "give the model a function of your own that does it"
#: What works instead of tools that run on OpenAI's servers, by their type.
_TOOL_HINTS = {
    "mcp": "call the server yourself, and name its tools as functions",
}
#: What an answer can do without, as long as it has tools of the client.
IGNORABLE_TOOL_TYPES = frozenset(
    {"web_search", "web_search_preview", "image_generation", "tool_search"}
)


def refusal_of(tool_type: str) -> str:
    """Return why a type of tool is refused, and what works instead."""
    hint = _TOOL_HINTS.get(tool_type, _OWN_FUNCTION_HINT)
    shown_type = tool_type[:PART_TYPE_CHARS_MAX]
    return (
        f"tools of type {shown_type!r} are not offered, only 'function', 'custom' and 'namespace' "
        f"are: {hint}"
    )


def chat_name(name: str, namespace: str | None) -> str:
    """Return what a tool is called in a chat."""
    return f"{namespace}{NAMESPACE_SEPARATOR}{name}" if namespace else name


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A tool as the client knows it, and the function that it becomes."""

    name: str
    namespace: str | None
    is_custom: bool
    function: JsonObject  #: As a chat's body has it.

    @property
    def chat_name(self) -> str:
        return chat_name(self.name, self.namespace)


class FunctionTool(BodyPart):
    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def offered(self, namespace: NamespaceTool | None = None) -> OfferedTool:
        """Return the tool as it is offered to the model."""
        fields = self.model_dump(exclude={"type"}, exclude_none=True)
        return _offered(self.name, fields, namespace)


class CustomTool(BodyPart):
    """A tool whose input is a text, of a grammar if it has a `format`."""

    type: Literal["custom"]
    name: FunctionName
    description: str | None = None
    format: dict[str, Any] | None = None

    def offered(self, namespace: NamespaceTool | None = None) -> OfferedTool:
        """Return the tool as it is offered to the model, which reads the grammar as a text."""
        input_schema: JsonObject = {"type": "string", "description": "The input of the tool"}
        definition = (self.format or {}).get("definition")
        if isinstance(definition, str):
            syntax = (self.format or {}).get("syntax")
            input_schema["description"] += f", of this grammar ({syntax}):\n{definition}"
        fields: JsonObject = {
            "name": self.name,
            "parameters": {
                "type": "object",
                "properties": {CUSTOM_INPUT: input_schema},
                "required": [CUSTOM_INPUT],
                "additionalProperties": False,
            },
        }
        if self.description is not None:
            fields["description"] = self.description
        return _offered(self.name, fields, namespace, is_custom=True)


def _offered(
    name: str, fields: JsonObject, namespace: NamespaceTool | None, *, is_custom: bool = False
) -> OfferedTool:
    """Return a tool with the function of these fields, under the name that it has in a chat."""
    namespace_name = None if namespace is None else namespace.name
    fields["name"] = chat_name(name, namespace_name)
    if namespace is not None and namespace.description:
        own_description = fields.get("description") or ""
        fields["description"] = f"{namespace.description}\n{own_description}".rstrip()
    function = {"type": "function", "function": fields}
    return OfferedTool(name, namespace_name, is_custom, function)


def _type_of(value: Any) -> Any:
    """Return the `type` of an object that is to be read, or of one that was read."""
    return value.get("type") if isinstance(value, dict) else getattr(value, "type", None)


def _inner_branch(tool: Any) -> str:
    return "#custom" if _type_of(tool) == "custom" else "#function"


class NamespaceTool(BodyPart):
    """Tools under a common name."""

    type: Literal["namespace"]
    name: FunctionName
    description: str | None = None
    tools: Annotated[
        list[
            Annotated[
                Annotated[FunctionTool, Tag("#function")] | Annotated[CustomTool, Tag("#custom")],
                Discriminator(_inner_branch),
            ]
        ],
        Field(max_length=TOOLS_MAX),
    ]


class ServerTool(BodyPart):
    """A tool that OpenAI's servers would run. Nothing of it is read but its type."""

    model_config = ConfigDict(extra="ignore")
    type: Annotated[str, Field(json_schema_extra={"enum": sorted(IGNORABLE_TOOL_TYPES)})]

    @field_validator("type")
    @classmethod
    def _check_type(cls, tool_type: str, info: ValidationInfo) -> str:
        if is_strict(info) or tool_type not in IGNORABLE_TOOL_TYPES:
            raise ValueError(refusal_of(tool_type))
        return tool_type


def _tool_branch(tool: Any) -> str:
    tool_type = _type_of(tool)
    if tool_type in ("function", "custom", "namespace"):
        return f"#{tool_type}"
    return "#server" if isinstance(tool_type, str) else "#function"


ResponseTool = Annotated[
    Annotated[FunctionTool, Tag("#function")]
    | Annotated[CustomTool, Tag("#custom")]
    | Annotated[NamespaceTool, Tag("#namespace")]
    | Annotated[ServerTool, Tag("#server")],
    Discriminator(_tool_branch),
]


def offered_tools(tools: Iterable[ResponseTool]) -> list[OfferedTool]:
    """Return the tools that the model gets to know."""
    offered: list[OfferedTool] = []
    for tool in tools:
        match tool:
            case FunctionTool() | CustomTool():
                offered.append(tool.offered())
            case NamespaceTool():
                offered += [each.offered(tool) for each in tool.tools]
    return offered


def response_tool(tool: ResponseTool) -> JsonObject:
    """Return a tool as a response repeats it: with all of its fields, null where one was left out."""
    return tool.model_dump(include=set(type(tool).model_fields))


# ---- tool choice ---------------------------------------------------------------------------------


class NamedTool(BodyPart):
    """A choice of one tool."""

    type: Literal["function", "custom"]
    name: str
    namespace: str | None = None

    @field_validator("type", mode="before")
    @classmethod
    def _check_type(cls, tool_type: Any) -> Any:
        # These two are offered, or no tool at all: the type is just wrong here, and it is said so.
        known_types = ("function", "custom", "namespace", "allowed_tools")
        if isinstance(tool_type, str) and tool_type not in known_types:
            raise ValueError(refusal_of(tool_type))
        return tool_type

    def chat_tool(self) -> JsonObject:
        """Return the name of the function as a chat's `tool_choice` has it."""
        name = chat_name(self.name, self.namespace)
        return {"type": "function", "function": {"name": name}}


class AllowedTools(BodyPart):
    """Which of the tools may be called, and whether one has to be."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=TOOLS_MAX)]

    def chat_tool(self) -> JsonObject:
        """Return the same as a chat's `tool_choice`."""
        allowed_tools = {"mode": self.mode, "tools": [tool.chat_tool() for tool in self.tools]}
        return {"type": self.type, "allowed_tools": allowed_tools}


def _choice_branch(choice: Any) -> str:
    if isinstance(choice, str):
        return "#mode"
    return "#allowed_tools" if _type_of(choice) == "allowed_tools" else "#function"


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("#mode")]
    | Annotated[NamedTool, Tag("#function")]
    | Annotated[AllowedTools, Tag("#allowed_tools")],
    Discriminator(_choice_branch),
]


# ---- calls of custom tools -----------------------------------------------------------------------


def custom_arguments(text: str) -> str:
    """Return the arguments of a chat's call that stands for a custom tool's, of this input."""
    return msgspec.json.encode({CUSTOM_INPUT: text}).decode()


def custom_input(arguments: str) -> str:
    """Return the input of a custom tool in a call's arguments; these themselves if they are cut."""
    try:
        fields = msgspec.json.decode(arguments or "{}")
    except (msgspec.DecodeError, RecursionError):
        return arguments
    text = fields.get(CUSTOM_INPUT, "") if isinstance(fields, dict) else arguments
    return text if isinstance(text, str) else arguments
