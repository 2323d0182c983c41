"""The text side of one checkpoint: its chat template, its tokenizer, and text of token ids.

Workers know token ids only. A conversation becomes ids here, by the checkpoint's chat template and
tokenizer, and the ids of an answer become text again, by a detokenizer for each answer.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import jinja2
from tokenizers import Encoding, Tokenizer

from ....engine.errors import WeightsError
from ....engine.spec import read_json
from ..errors import ApiError
from .detokenizer import LibraryDetokenizer, PieceDetokenizer
from .formats.parts import CallFlaw
from .formats.reasoning import ReasoningFormat
from .formats.registry import (
    AUTO,
    ToolFormat,
    find_reasoning_format,
    find_tool_format,
)
from .limited import BusyError, RefusedError, SetupError
from .template_reading import TemplateFields
from .templates import ChatTemplates

log = logging.getLogger(__name__)

SEGMENT_BYTES = 64 << 20  #: Of text and ids that the fast encoder remembers.
#: A text that tokenizers are known to differ on: spaces, digits, contractions, composed and
#: decomposed accents, scripts, and emoji of several code points.
PROBE_TEXT = (
    "  Don't  we'LL\t\n\n\r\n x=3.14159;\u00a0caf\u00e9 cafe\u0301 \ufb01 \u1e9b\u0323 "
    "\u4f60\u597d\uff0c\u4e16\u754c \u3053\u3093 \ud55c\uad6d "
    "\u0645\u0631\u062d\u0628\u0627 \u0939\u093f\u0928\u094d\u0926\u0940 "
    "\U0001f469\u200d\U0001f4bb\U0001f1e9\U0001f1ea \u200b\ufeff<|x|> [INST] </s> ..!? 1234567890 "
)
#: Variables of chat templates that the gateway itself sets; requests may set the others.
GATEWAY_VARIABLES = {
    "messages",
    "tools",
    "add_generation_prompt",
    "bos_token",
    "eos_token",
    "pad_token",
}
TEMPLATE_ERROR_CHARS_MAX = 300  #: Of what a template says when it refuses a conversation.
#: Markers that are text in any answer, though a checkpoint may call them special tokens. Further
#: ones are so in answers that are parsed for them.
MARKERS = {"<tool_call>", "</tool_call>", "<think>", "</think>"}
#: Stands behind the content of a message that is to be continued while a template is rendered. A
#: template that strips contents takes the last space away.
OPEN_END_MARK = "<|open-end-of-the-last-message|> "
#: So many ids are decoded in one call of the library, which takes about 2 ms: other threads of the
#: gateway do not run meanwhile.
DECODED_AT_ONCE = 2048
#: Characters of a prompt that the event loop may tokenize: in 0.1 ms, in 2.5 at most. To hand it
#: to a thread costs 0.25 ms of CPU. The second limit is that of `fastokens`.
SHORT_PROMPT_CHARS = 2048
FAST_SHORT_PROMPT_CHARS = 16_384
#: What a template makes of such a prompt has so many bytes for each character at most; of a longer
#: text a thread takes care.
BRIEF_BYTES_PER_CHARACTER = 8
SHORT_PROMPT_MESSAGES = 32
SPACE_MARK = "\u2581"  #: Stands for a space in the tokens of SentencePiece.
BYTE_NAME = re.compile(r"<0x[0-9A-Fa-f]{2}>")  #: A token that is a single byte.
PROMPT_END_CHARS = 64  #: Enough of a prompt's end to see what the answer begins in.


Detokenizer = LibraryDetokenizer | PieceDetokenizer  #: Turns the ids of one text into text.


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """The token ids of a prompt, and the last characters of its text."""

    token_ids: list[int]
    text_end: str  #: It shows what the answer begins in; empty where that is of no interest.
    #: What the assistant has said already in the message that the answer continues; else empty.
    open_text: str = ""


class PromptEnding(StrEnum):
    """How the prompt of a conversation ends."""

    ANSWER = "answer"  #: The assistant's message has begun.
    OPEN_MESSAGE = "open_message"  #: The last message has not ended; the model continues it.
    CLOSED = "closed"  #: The last message has ended, and nothing has begun.


class Encoder(Protocol):
    """What makes ids of a text: `tokenizers.Tokenizer`, or a faster library's."""

    def encode(self, text: str, *, add_special_tokens: bool) -> Encoding: ...


class ChatTokenizer:
    """The chat template and the tokenizer of the checkpoint in `folder`.

    The file `template_path`, if there is one, takes the place of the checkpoint's own template.
    `tool_format` and `reasoning_format` name how the model marks calls and reasoning, or are
    "auto": then the templates show it. Call `start` before the first chat, and `close` at the end.
    Raises WeightsError if the checkpoint has no fast tokenizer, or a template that is none.
    """

    def __init__(
        self,
        folder: Path,
        template_path: Path | None = None,
        *,
        tool_format: str = AUTO,
        reasoning_format: str = AUTO,
    ) -> None:
        tokenizer_path = folder / "tokenizer.json"
        if not tokenizer_path.exists():
            raise WeightsError(f"tokenizer.json is missing in {folder}: export a fast tokenizer")
        try:
            #: The library's own object; `encode` is faster where it can be.
            self.tokenizer = Tokenizer.from_file(str(tokenizer_path))
        except Exception as error:  # the library raises bare Exception
            raise WeightsError(f"{tokenizer_path} is not a tokenizer: {error}") from None
        #: The same ids as those of `tokenizer`, made faster where that can be.
        self._encoder = _fast_encoder(tokenizer_path, self.tokenizer)
        #: Tokens beside the trained vocabulary, by id: special ones, and others such as tags.
        self._added_tokens = self.tokenizer.get_added_tokens_decoder()
        #: Filled as it is asked for, with two entries or so: a model has one set of markers, and
        #: answers that are not parsed have none.
        self._hidden_ids_by_markers: dict[frozenset[str], frozenset[int]] = {}
        self._pieces_by_hidden_ids: dict[frozenset[int], list[str | bytes]] = {}
        settings_path = folder / "tokenizer_config.json"
        #: The checkpoint's tokenizer_config.json: names of special tokens, maybe the template.
        self._settings = read_json(settings_path) if settings_path.exists() else {}

        #: Sources of the templates for chats without and with tools. Empty: there is none.
        self.template, self.tool_template = self._find_templates(folder, template_path)
        try:
            self._templates = ChatTemplates(self.template, self.tool_template)
        except jinja2.TemplateError as error:
            raise WeightsError(f"the chat template does not compile: {error}") from None
        self.template_variables = self._templates.variables  #: Those that either template reads.
        #: How the model marks calls and reasoning. `tool_format` is None where the template shows
        #: no known format of calls.
        self.tool_format, self.reasoning_format = self._formats(tool_format, reasoning_format)
        #: What was wrong with calls, counted over all answers.
        self.call_flaws: Counter[CallFlaw] = Counter()

    def start(self) -> None:
        """Start what renders templates, so that the first conversation need not wait for it."""
        self._templates.start()

    def close(self) -> None:
        """End what renders templates."""
        self._templates.close()

    def _formats(self, tools: str, reasoning: str) -> tuple[ToolFormat | None, ReasoningFormat]:
        """Return the formats of these names; `auto` stands for what the templates show."""
        templates = self.template + self.tool_template
        try:
            tool_format = find_tool_format(tools, self.tool_template)
            reasoning_format = find_reasoning_format(reasoning, templates)
        except ValueError as error:
            raise WeightsError(f"model.tool_format, model.reasoning_format: {error}") from None
        return tool_format, reasoning_format

    def _find_templates(self, folder: Path, template_path: Path | None) -> tuple[str, str]:
        """Return the sources of the templates for chats without and with tools."""
        if template_path is not None:
            try:
                template_text = template_path.read_text()
            except (OSError, UnicodeDecodeError) as error:
                raise WeightsError(f"cannot read the chat template: {error}") from None
            return template_text, template_text
        path = folder / "chat_template.jinja"
        template = path.read_text() if path.exists() else self._settings.get("chat_template")
        if isinstance(template, list):  # a checkpoint may have several templates, by name
            templates = {entry["name"]: entry["template"] for entry in template}
            default = templates.get("default", "")
            return default, templates.get("tool_use", default)
        return template or "", template or ""

    @property
    def knows_developers(self) -> bool:
        """True if the template has a place of its own for the messages of developers."""
        return "developer" in self.template

    @cached_property
    def settable_variables(self) -> frozenset[str]:
        """Variables of the templates that requests may set."""
        return frozenset(self.template_variables - GATEWAY_VARIABLES)

    @property
    def short_prompt_chars(self) -> int:
        """Characters of a prompt that is tokenized faster than a thread wakes."""
        is_fast = self._encoder is not self.tokenizer
        return FAST_SHORT_PROMPT_CHARS if is_fast else SHORT_PROMPT_CHARS

    def template_fields(self, *, tools: bool) -> TemplateFields:
        """Return what the template for chats with, or without, tools reads of messages."""
        return self._templates.template_fields(tools=tools)

    # ---- text to ids -----------------------------------------------------------------------------

    def tokenize_chat(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        template_arguments: dict[str, Any] | None = None,
        *,
        ending: PromptEnding = PromptEnding.ANSWER,
        add_special_tokens: bool = False,
    ) -> TokenizedPrompt:
        """Return the prompt of a conversation, up to where the model goes on.

        A long conversation takes seconds. `template_arguments` are further variables of the
        template. `add_special_tokens`: with what the tokenizer puts around a text, though templates
        have it already. Raises ApiError if the template refuses the conversation, takes long while
        others wait, or no process gets ready to render it. On the thread of an event loop,
        NotAtOnceError says that another thread has to do it.
        """
        has_tools = bool(tools)
        if not self._templates.has(tools=has_tools):
            raise ApiError("invalid_request", "this model has no chat template")
        if tools and "tools" not in self.template_variables:
            message = "tools: this model's chat template has no place for them"
            raise ApiError("invalid_request", message, "tools")
        variables = {
            **(template_arguments or {}),
            "messages": _open_ended(messages) if ending is PromptEnding.OPEN_MESSAGE else messages,
            "add_generation_prompt": ending is PromptEnding.ANSWER,
            "tools": tools,
            "bos_token": self._special_token("bos_token"),
            "eos_token": self._special_token("eos_token"),
            "pad_token": self._special_token("pad_token"),
        }
        try:
            text = self._templates.render(
                variables,
                tools=has_tools,
                brief_bytes=BRIEF_BYTES_PER_CHARACTER * self.short_prompt_chars,
            )
        except BusyError as error:
            message = f"this conversation was not rendered: {error}"
            raise ApiError("no_capacity", message) from None
        except SetupError as error:
            log.warning("no process that renders conversations got ready: %s", error)
            message = "this conversation was not rendered: no process got ready for it"
            raise ApiError("no_capacity", message) from None
        except RefusedError as error:
            cause = " ".join(str(error).split())[:TEMPLATE_ERROR_CHARS_MAX]
            message = f"the model's chat template refuses this: {cause}"
            raise ApiError("invalid_request", message, "messages") from None
        if ending is PromptEnding.OPEN_MESSAGE:
            text = _cut_at_open_end(text)
        return TokenizedPrompt(
            token_ids=self.encode(text, add_special_tokens),
            text_end=text[-PROMPT_END_CHARS:],
        )

    def _special_token(self, name: str) -> str:
        """Return the text of a token that the tokenizer's settings name; empty if they do not.

        The settings have the text, or an object with the text in `content`.
        """
        value: Any = self._settings.get(name) or ""
        return value if isinstance(value, str) else value.get("content", "")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text.

        `add_special_tokens`: with what the tokenizer puts around a text, such as a first id.
        """
        token_ids: list[int] = self._encoder.encode(text, add_special_tokens=add_special_tokens).ids
        return token_ids

    # ---- ids to text -----------------------------------------------------------------------------

    @property
    def longest_token_chars(self) -> int:
        """Characters of the longest token, special ones included."""
        return max(len(token) for token in self.tokenizer.get_vocab(with_added_tokens=True))

    @cached_property
    def vocabulary_size(self) -> int:
        """One more than the highest id that the tokenizer knows."""
        return max(self.tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of ids, with the special tokens."""
        return self.tokenizer.decode(token_ids, skip_special_tokens=False)

    def decode_in_steps(self, token_ids: list[int]) -> str:
        """Return the same text, and let other threads run meanwhile.

        The library decodes without letting go of the interpreter: 1 us an id.
        """
        if len(token_ids) <= DECODED_AT_ONCE:
            return self.decode(token_ids)
        detokenizer = self.detokenizer(specials=True)
        return detokenizer.feed(token_ids) + detokenizer.flush()

    def token_text(self, token_id: int) -> str:
        """Return what `decode` makes of this id alone."""
        return self.decode([token_id])

    def token_name(self, token_id: int) -> str | None:
        """Return the token as the vocabulary has it; None for an id that is none."""
        return self.tokenizer.id_to_token(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """Return a token's own bytes, which may be no whole characters.

        A space in front of a word is among them, though some decoders leave it out at the beginning
        of a text.
        """
        name = self.token_name(token_id)
        if not name or token_id in self._added_tokens:
            return self.token_text(token_id).encode()
        if self._decodes_bytes:
            return bytes(BYTE_OF_CHARACTER.get(character, 0) for character in name)
        if self._names_bytes and BYTE_NAME.fullmatch(name):
            return bytes.fromhex(name[3:5])
        if self._marks_spaces:
            return name.replace(SPACE_MARK, " ").encode()
        return self.token_text(token_id).encode()

    @cached_property
    def special_ids(self) -> dict[str, int]:
        """The ids of the special tokens by their texts."""
        return {
            token.content: token_id
            for token_id, token in self._added_tokens.items()
            if token.special
        }

    @cached_property
    def grammar_ids(self) -> dict[str, int]:
        """The ids of the tokens that grammars match by their ids, by their texts.

        llguidance takes added tokens in angle brackets for special ones, too.
        """
        return {
            token.content: token_id
            for token_id, token in self._added_tokens.items()
            if token.special or (token.content.startswith("<") and token.content.endswith(">"))
        }

    def detokenizer(
        self, specials: bool = False, markers: frozenset[str] = frozenset()
    ) -> Detokenizer:
        """Return what turns the ids of one answer into text.

        With `specials`, special tokens are text; `markers` are those that are text in any case.
        """
        pieces = self._all_pieces if specials else self._visible_pieces(markers)
        if pieces:
            return PieceDetokenizer(pieces)
        hidden_ids = frozenset() if specials else self._hidden_ids(markers)
        return LibraryDetokenizer(self.tokenizer, hidden_ids)

    @cached_property
    def _decodes_bytes(self) -> bool:
        """True if the tokenizer's decoder puts bytes together, among what else it may do."""
        return "ByteLevel" in repr(self.tokenizer.decoder)

    @cached_property
    def _names_bytes(self) -> bool:
        """True if tokens such as `<0x0A>` are single bytes, as Llama 2 and Gemma have them."""
        return "ByteFallback" in repr(self.tokenizer.decoder)

    @cached_property
    def _marks_spaces(self) -> bool:
        """True if the decoder makes spaces of `SPACE_MARK` in the names of tokens."""
        return SPACE_MARK in repr(self.tokenizer.decoder)

    def _hidden_ids(self, markers: frozenset[str]) -> frozenset[int]:
        """Return the ids of the special tokens, which are no text, but for the markers."""
        if markers not in self._hidden_ids_by_markers:
            self._hidden_ids_by_markers[markers] = frozenset(
                token_id
                for token, token_id in self.special_ids.items()
                if token not in MARKERS and token not in markers
            )
        return self._hidden_ids_by_markers[markers]

    @cached_property
    def _all_pieces(self) -> list[str | bytes]:
        """What each id adds to a text, as bytes where a token is no whole characters.

        Empty unless the text of ids is that of their bytes in turn. So it is with byte-level BPE
        (GPT-2's, Llama 3's, Qwen's), whose decoder puts bytes together and does nothing else.
        """
        if type(self.tokenizer.decoder).__name__ != "ByteLevel":
            return []
        pieces: list[str | bytes] = [""] * self.vocabulary_size
        for name, token_id in self.tokenizer.get_vocab(with_added_tokens=True).items():
            if all(character in BYTE_OF_CHARACTER for character in name):
                data = bytes(BYTE_OF_CHARACTER[character] for character in name)
            else:
                data = name.encode()
            try:
                pieces[token_id] = data.decode()
            except UnicodeDecodeError:
                pieces[token_id] = data
        return pieces

    def _visible_pieces(self, markers: frozenset[str]) -> list[str | bytes]:
        """Return `_all_pieces`, where hidden tokens add nothing."""
        hidden_ids = self._hidden_ids(markers)
        if hidden_ids not in self._pieces_by_hidden_ids:
            pieces = list(self._all_pieces)
            for token_id in hidden_ids:
                if token_id < len(pieces):
                    pieces[token_id] = ""
            self._pieces_by_hidden_ids[hidden_ids] = pieces
        return self._pieces_by_hidden_ids[hidden_ids]


def _open_ended(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with a mark at the end of the last one, where `_cut_at_open_end` cuts."""
    last = messages[-1]
    content = last["content"]
    if isinstance(content, str):
        return [*messages[:-1], {**last, "content": content + OPEN_END_MARK}]
    last_part = {**content[-1], "text": content[-1]["text"] + OPEN_END_MARK}
    return [*messages[:-1], {**last, "content": [*content[:-1], last_part]}]


def _cut_at_open_end(text: str) -> str:
    """Return a rendered text up to the mark, stripped there if the template strips contents.

    Raises ApiError if the template left the mark out.
    """
    before, mark, after = text.rpartition(OPEN_END_MARK.strip())
    if not mark:
        message = "continue_final_message: this model's chat template leaves out the final message"
        raise ApiError("invalid_request", message, "continue_final_message")
    return before if after.startswith(" ") else before.rstrip()


def _fast_encoder(path: Path, tokenizer: Tokenizer) -> Encoder:
    """Return an encoder with the same ids as `tokenizer`, or `tokenizer` if there is none.

    `fastokens` is many times as fast. It also remembers the ids of the segments between added
    tokens, which are the turns of a chat, so the next turn of a conversation costs its new text
    only. Its ids are compared once, on texts that tokenizers are known to differ on.
    """
    try:
        import fastokens

        encoder = fastokens.Tokenizer.from_file(str(path))
        encoder.enable_segment_cache(SEGMENT_BYTES)
        _check_same_ids(encoder, tokenizer)
    except Exception as error:  # not installed, or a kind of tokenizer that it does not know
        log.warning("%s is tokenized the slow way: %s", path, error)
        return tokenizer
    return encoder


def _check_same_ids(encoder: Encoder, tokenizer: Tokenizer) -> None:
    """Raise ValueError if both make different ids of a probe."""
    # The added tokens in a row, and as what separates texts: both ways are cut differently.
    added_tokens = "".join(token.content for token in tokenizer.get_added_tokens_decoder().values())
    probes = (PROBE_TEXT, added_tokens, added_tokens.join((PROBE_TEXT, PROBE_TEXT, "")))
    for text in probes:
        for add_special_tokens in (False, True):
            expected_ids = tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
            for _ in range(2):  # the second time the ids are remembered ones
                if encoder.encode(text, add_special_tokens=add_special_tokens).ids != expected_ids:
                    raise ValueError("ids differ")


def _byte_level_alphabet() -> dict[str, int]:
    """Return the byte that each character stands for in byte-level BPE (GPT-2).

    Printable bytes are themselves, all others are the characters from U+0100 on.
    """
    printable_bytes = [*range(33, 127), *range(161, 173), *range(174, 256)]
    other_bytes = [byte for byte in range(256) if byte not in printable_bytes]
    alphabet = {chr(byte): byte for byte in printable_bytes}
    for number, byte in enumerate(other_bytes):
        alphabet[chr(256 + number)] = byte
    return alphabet


#: The byte that a character of a byte-level vocabulary's tokens stands for.
BYTE_OF_CHARACTER = _byte_level_alphabet()
