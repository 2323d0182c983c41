"""Fields that OpenAI, Anthropic, vLLM or SGLang document and this server does not have.

A field is taken at its neutral values, which change nothing. At any other value it is ignored if
the answer is as good without it, and refused with a hint at what works instead if it is not. A
gateway that was told to be strict refuses the fields at any value, but those that say
`neutral_if_strict` at their neutral ones. The table in docs/http.md is made from this one by
`known_fields_table`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from types import MappingProxyType
from typing import Any


class ApiName(StrEnum):
    """The routes that take a body, as metrics and documents call them."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    RESPONSES = "responses"
    MESSAGES = "messages"
    COUNT_TOKENS = "count_tokens"
    TOKENIZE = "tokenize"
    DETOKENIZE = "detokenize"


class Treatment(StrEnum):
    """What is done with a field at a value that is not neutral."""

    IGNORED = "ignored"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class KnownField:
    """A documented field that no class of a body declares."""

    path: str  #: Names from the top of the body, joined by dots; lists count as their elements.
    apis: frozenset[ApiName]  #: The APIs that document it.
    treatment: Treatment
    explanation: str  #: Why the field may be ignored, or what works instead of it.
    neutral_values: tuple[Any, ...] = ()  #: They change nothing; null is always neutral.
    neutral_if_strict: bool = False  #: True if a strict gateway, too, takes the neutral values.
    #: What the details of the refusal say, for SDKs that then do without the field.
    error_code: str = ""  #: Empty: a refusal has no details.

    @property
    def refusal_details(self) -> Mapping[str, Any] | None:
        """The details of the refusal, as Anthropic's SDKs read them; None if there are none."""
        if not self.error_code:
            return None
        return {"error_code": self.error_code, "unsupported": [self.path]}

    def is_neutral(self, value: Any) -> bool:
        """Return whether the value asks for nothing: it is null, or one of `neutral_values`."""
        return value is None or value in self.neutral_values


# Which APIs document a field: the second argument of each row of `KNOWN_FIELDS`.
_CHAT = frozenset({ApiName.CHAT})
_COMPLETIONS = frozenset({ApiName.COMPLETIONS})
_RESPONSES = frozenset({ApiName.RESPONSES})
_MESSAGES = frozenset({ApiName.MESSAGES})
_ANTHROPIC = frozenset({ApiName.MESSAGES, ApiName.COUNT_TOKENS})
_SAMPLED = _CHAT | _COMPLETIONS  # those that have OpenAI's and vLLM's sampling fields
_GENERATED = _SAMPLED | _RESPONSES
_TOKENIZED = frozenset({ApiName.TOKENIZE})


def _rows(
    treatment: Treatment,
    paths: str,
    apis: frozenset[ApiName],
    explanation: str,
    neutral_values: Iterable[Any] = (),
    *,
    neutral_if_strict: bool = False,
    error_code: str = "",
) -> list[KnownField]:
    """Return a row for each of the paths, which are separated by spaces; all say the same."""
    return [
        KnownField(
            path,
            apis,
            treatment,
            explanation,
            neutral_values=tuple(neutral_values),
            neutral_if_strict=neutral_if_strict,
            error_code=error_code,
        )
        for path in paths.split()
    ]


_ignored = partial(_rows, Treatment.IGNORED)
_refused = partial(_rows, Treatment.REFUSED)

_CACHE_HINT = "a hint to caches; all prefixes are cached"
_IDENTITY = "names a client or a call; the answer is the same"
_MEDIA = "is about images and audio"
_BEAM = "has an effect on beam search only"
_OWN_TRANSFER = "leave it out: the cluster moves the cache"
_LOGIT_BIAS = "use logit_bias, with -100 for tokens that must not come"

#: Each row: the paths of fields, the APIs that document them, why they may be ignored or what works
#: instead, and the values that change nothing.
KNOWN_FIELDS: tuple[KnownField, ...] = (
    # ---- OpenAI: chats, completions --------------------------------------------------------------
    *_ignored("store", _SAMPLED, "answers are not stored", [False], neutral_if_strict=True),
    *_ignored(
        "service_tier",
        _CHAT | _RESPONSES,
        "the header x-slo-class names a class of service",
        ["auto", "default"],
        neutral_if_strict=True,
    ),
    *_ignored(
        "service_tier",
        _COMPLETIONS,
        "the header x-slo-class names a class of service",
        ["auto", "default"],
    ),
    *_ignored("metadata safety_identifier", _COMPLETIONS, _IDENTITY, [{}]),
    *_ignored("prompt_cache_options prompt_cache_retention", _GENERATED, _CACHE_HINT),
    *_ignored("prompt_cache_breakpoint", _CHAT, _CACHE_HINT),
    *_ignored(
        "messages.prompt_cache_breakpoint messages.content.prompt_cache_breakpoint "
        "messages.content.cache_control messages.cache_control tools.cache_control "
        "tools.function.cache_control",
        _CHAT | _TOKENIZED,
        _CACHE_HINT,
    ),
    *_ignored("verbosity", _CHAT, "say in a message how long the answer is to be", ["medium"]),
    *_ignored("prediction", _CHAT, "makes answers faster, not other ones"),
    *_ignored("moderation", _CHAT | _RESPONSES, "nothing is moderated"),
    *_ignored(
        "messages.annotations",
        _CHAT | _TOKENIZED,
        "is what a web search found",
        [[]],
        neutral_if_strict=True,
    ),
    *_ignored(
        "tools.defer_loading tools.function.defer_loading",
        _CHAT | _TOKENIZED,
        "all tools are loaded at once",
        [False],
    ),
    *_refused(
        "messages.audio",
        _CHAT | _TOKENIZED,
        "audio is not read; send its transcript as content",
        neutral_if_strict=True,
    ),
    *_refused(
        "messages.function_call",
        _CHAT | _TOKENIZED,
        "send the call in tool_calls",
        neutral_if_strict=True,
    ),
    *_refused("functions", _CHAT, "use tools", [[]]),
    *_refused("function_call", _CHAT, "use tool_choice, with tools", ["auto", "none"]),
    *_refused(
        "modalities", _CHAT, "answers are text; leave it out", [["text"]], neutral_if_strict=True
    ),
    *_refused("audio", _CHAT, "answers are text; leave it out"),
    *_refused("web_search_options", _CHAT, "nothing is searched; search with a tool of your own"),
    *_refused(
        "suffix",
        _COMPLETIONS,
        "write the model's own fill-in-the-middle tokens into the prompt",
        [""],
        neutral_if_strict=True,
    ),
    *_refused("best_of", _CHAT, "use n, and choose among the answers", [1]),
    # ---- OpenAI: responses -----------------------------------------------------------------------
    *_ignored(
        "reasoning.summary reasoning.generate_summary",
        _RESPONSES,
        "the reasoning itself is in its item",
        ["auto"],
    ),
    *_ignored(
        "reasoning.mode reasoning.context",
        _RESPONSES,
        "a model that thinks does so as its chat template has it",
        ["standard", "auto"],
    ),
    *_ignored(
        "tools.allowed_callers tools.defer_loading tools.output_schema",
        _RESPONSES,
        "the model sees name, description and schema",
        [False],
    ),
    *_ignored("text.verbosity", _RESPONSES, "say in the instructions how long the answer is to be"),
    *_ignored("context_management", _RESPONSES, "nothing is taken out of the input"),
    *_ignored("client_metadata", _RESPONSES, _IDENTITY),
    *_ignored("access_programs image", _RESPONSES, "is about OpenAI's own services"),
    *_ignored("max_tool_calls", _RESPONSES, "is about built-in tools, and there are none"),
    *_ignored("stream_options", _RESPONSES, "its padding of events is not made", [{}]),
    *_ignored(
        "input.content.annotations input.content.logprobs",
        _RESPONSES,
        "is no part of the text",
        [[]],
        neutral_if_strict=True,
    ),
    *_refused(
        "background",
        _RESPONSES,
        "leave it out, and stream the answer",
        [False],
        neutral_if_strict=True,
    ),
    *_refused("conversation", _RESPONSES, "send the whole conversation as input"),
    *_refused("prompt", _RESPONSES, "send the text of the stored prompt as instructions"),
    # ---- Anthropic -------------------------------------------------------------------------------
    *_ignored(
        "service_tier",
        _MESSAGES,
        "the header x-slo-class names a class of service",
        ["auto", "standard_only"],
        neutral_if_strict=True,
    ),
    *_ignored("speed", _ANTHROPIC, "the header x-slo-class names a class of service", ["standard"]),
    *_ignored(
        "user_profile_id workspace_id betas billing_policy fallback_credit_token inference_geo",
        _ANTHROPIC,
        "is about Anthropic's accounts and regions",
    ),
    *_ignored("diagnostics", _ANTHROPIC, "usage shows what was cached"),
    *_ignored("fallbacks", _ANTHROPIC, "the served model does not decline", [[]]),
    *_ignored("context_management", _ANTHROPIC, "nothing is taken out of the conversation"),
    *_ignored("output_config.effort", _ANTHROPIC, "the model thinks as its chat template has it"),
    *_ignored("output_config.task_budget", _ANTHROPIC, "max_tokens bounds the answer"),
    *_ignored(
        "messages.content.citations messages.content.content.citations system.citations",
        _ANTHROPIC,
        "is no part of the text",
        neutral_if_strict=True,
    ),
    *_ignored(
        "messages.content.caller",
        _ANTHROPIC,
        "says who called; the result is the same",
    ),
    *_ignored("messages.content.toolset_name", _ANTHROPIC, "names are unique without it"),
    *_ignored(
        "tools.strict tools.defer_loading tools.allowed_callers tools.eager_input_streaming "
        "tools.input_examples",
        _ANTHROPIC,
        "the model sees name, description and schema",
    ),
    *_refused("container", _MESSAGES, "no code is run; give the model a tool that runs it"),
    *_refused("mcp_servers", _ANTHROPIC, "call the servers yourself, and name them in tools", [[]]),
    *_refused("compaction", _MESSAGES, "ask for a summary in a message"),
    *_refused(
        "thread",
        _MESSAGES,
        "send the whole conversation as messages; Anthropic's SDKs then do so by themselves",
        error_code="thread_unsupported_request",
    ),
    # ---- vLLM ------------------------------------------------------------------------------------
    *_ignored(
        "priority",
        _SAMPLED,
        "the header x-slo-class names a class of service",
        [0],
        neutral_if_strict=True,
    ),
    *_ignored("priority", _RESPONSES, "the header x-slo-class names a class of service", [0]),
    *_ignored("request_id", _GENERATED, "the header x-request-id names a request"),
    *_ignored("session_id", _GENERATED, "the header x-session-id names a conversation"),
    *_ignored("length_penalty", _GENERATED, _BEAM, [1.0]),
    *_ignored("early_stopping", _GENERATED, _BEAM, [False]),
    *_ignored(
        "spaces_between_special_tokens", _GENERATED, "no spaces are put there", [True, False]
    ),
    *_ignored("media_io_kwargs mm_processor_kwargs", _GENERATED | _TOKENIZED, _MEDIA, [{}]),
    *_ignored("mm_payload", _GENERATED | _MESSAGES, _MEDIA, ["tensors", "none"]),
    *_ignored("return_mm_kwargs", _GENERATED | _MESSAGES, _MEDIA, [False]),
    *_ignored("return_token_offsets", _SAMPLED, "vLLM ignores it here, too", [False]),
    *_ignored("routed_experts_prompt_start", _SAMPLED, "no routes of experts are returned", [0]),
    *_ignored("stream_interval", _SAMPLED, "tokens are sent as they come", [1]),
    *_ignored("vllm_xargs", _GENERATED | _MESSAGES, "there are no extensions to read it", [{}]),
    *_ignored("guided_decoding_backend", _SAMPLED, "llguidance is the only one", ["auto"]),
    *_refused("use_beam_search", _SAMPLED, "use n, and choose among the answers", [False]),
    *_refused("watermarking", _GENERATED | _MESSAGES, "leave it out", [False]),
    *_refused("bad_words", _SAMPLED, _LOGIT_BIAS, [[]]),
    *_refused(
        "chat_template",
        _CHAT | _TOKENIZED,
        "templates are the server's; send the rendered prompt to /v1/completions",
    ),
    *_refused("prompt_embeds", _COMPLETIONS, "send text, or token ids", [[]]),
    *_refused("kv_transfer_params ec_transfer_params", _GENERATED | _MESSAGES, _OWN_TRANSFER, [{}]),
    *_refused("repetition_detection", _SAMPLED, "use a penalty, stop or max_tokens", [{}]),
    *_refused("return_weight_versions", _SAMPLED, "weights do not change while serving", [False]),
    *_refused("return_prompt_text", _CHAT, "/tokenize and /detokenize show the prompt", [False]),
    *_refused(
        "previous_input_messages",
        _RESPONSES,
        "send the whole conversation as input",
        [[]],
    ),
    *_ignored("thinking_token_budget", _COMPLETIONS, "no reasoning is told apart", [-1]),
    *_ignored("include_reasoning", _COMPLETIONS, "no reasoning is told apart", [True, False]),
    *_refused("include_reasoning", _RESPONSES, "leave out the items of reasoning yourself", [True]),
    *_refused(
        "structured_outputs.whitespace_pattern",
        _GENERATED,
        "use structured_outputs.grammar (Lark)",
    ),
    *_refused(
        "structured_outputs.disable_any_whitespace "
        "structured_outputs.disable_additional_properties",
        _GENERATED,
        "say so in the schema",
        [False],
    ),
    # ---- SGLang ----------------------------------------------------------------------------------
    *_ignored("rid", _SAMPLED, "the header x-request-id names a request"),
    *_ignored("separate_reasoning stream_reasoning", _CHAT, "reasoning is told apart", [True]),
    *_refused("guided_whitespace_pattern", _SAMPLED, "use guided_grammar (Lark)"),
    *_refused("lora_path", _SAMPLED, "name the adapter as the model (model.adapters)"),
)


def _by_api(fields: Iterable[KnownField]) -> dict[ApiName, dict[str, dict[str, KnownField]]]:
    """Return the fields by API, by the path of the part that has them, and by their last name."""
    table: dict[ApiName, dict[str, dict[str, KnownField]]] = {}
    for field in fields:
        parent, _, name = field.path.rpartition(".")
        for api in field.apis:
            names = table.setdefault(api, {}).setdefault(parent, {})
            assert name not in names, f"{field.path} of {api} is in the table twice"
            names[name] = field
    return table


_FIELDS_BY_API = _by_api(KNOWN_FIELDS)
_NO_FIELDS: Mapping[str, KnownField] = MappingProxyType({})


def known_fields_of(api: ApiName, part_path: str = "") -> Mapping[str, KnownField]:
    """Return the fields of a part of a body, by name; the empty path is the body itself."""
    return _FIELDS_BY_API.get(api, {}).get(part_path, _NO_FIELDS)


# ---- the table of the documents ------------------------------------------------------------------


def known_fields_table() -> str:
    """Return the tables of docs/http.md, in Markdown."""
    lines = ["| field | of | neutral | why the field may be ignored |", "|---|---|---|---|"]
    lines += [_table_row(field) for field in _sorted_fields(Treatment.IGNORED)]
    lines += ["", "| field | of | neutral | what works instead |", "|---|---|---|---|"]
    lines += [_table_row(field) for field in _sorted_fields(Treatment.REFUSED)]
    return "\n".join(lines) + "\n"


def _sorted_fields(treatment: Treatment) -> list[KnownField]:
    """Return the fields of one treatment, in the order of the documents' tables."""
    fields = [field for field in KNOWN_FIELDS if field.treatment is treatment]
    return sorted(fields, key=lambda field: (field.path, sorted(field.apis)))


def _table_row(field: KnownField) -> str:
    apis = ", ".join(api for api in ApiName if api in field.apis)
    neutral_values = ", ".join(f"`{json.dumps(value)}`" for value in field.neutral_values)
    return f"| `{field.path}` | {apis} | {neutral_values} | {field.explanation} |"


if __name__ == "__main__":
    print(known_fields_table(), end="")
