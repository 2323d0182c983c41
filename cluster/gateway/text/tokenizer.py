"""Text in, ids out, and back: chat template, tokenizer, incremental detokenizing."""

from __future__ import annotations

import codecs
import json
import logging
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
from tokenizers import Tokenizer

from ....engine.errors import WeightsError
from ....engine.spec import read_json
from ..errors import ApiError
from .sandbox import Sandbox

log = logging.getLogger(__name__)

SEGMENT_BYTES = 64 << 20  #: of text and ids that the tokenizer remembers
#: spaces, digits, contractions, accents (composed and not), scripts, emoji of several code points
PROBE = (
    "  Don't  we'LL\t\n\n\r\n x=3.14159;\u00a0caf\u00e9 cafe\u0301 \ufb01 \u1e9b\u0323 "
    "\u4f60\u597d\uff0c\u4e16\u754c \u3053\u3093 \ud55c\uad6d "
    "\u0645\u0631\u062d\u0628\u0627 \u0939\u093f\u0928\u094d\u0926\u0940 "
    "\U0001f469\u200d\U0001f4bb\U0001f1e9\U0001f1ea \u200b\ufeff<|x|> [INST] </s> ..!? 1234567890 "
)
#: variables of a template that are not a request's to set
GIVEN = {"messages", "tools", "add_generation_prompt", "bos_token", "eos_token", "pad_token"}
#: what a template raises that does not like its input
REFUSALS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    RecursionError,
)
#: what the gateway looks for in an answer: text, though a checkpoint may call it special
MARKS = {"<tool_call>", "</tool_call>", "<think>", "</think>"}
HELD = 8  #: ids at most that wait for the rest of a character
END = 64  #: characters of a prompt's end that tell what the answer begins in


@dataclass(frozen=True, slots=True)
class Prompt:
    """Ids of a conversation; `end`: the last characters of its text."""

    ids: list[int]
    end: str


class Text:
    """The text side of one checkpoint. Templates run in a sandbox; ids travel, text does not."""

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        if not path.exists():
            raise WeightsError(f"tokenizer.json is missing in {folder}: export a fast tokenizer")
        try:
            self.tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise WeightsError(f"{path} is not a tokenizer: {error}") from None
        self._encoder = _fast_encoder(path, self.tokenizer)
        settings = folder / "tokenizer_config.json"
        self._settings = read_json(settings) if settings.exists() else {}
        #: their sources, for chats without and with tools; empty: there is none
        self.template, self.tool_template = self._find_templates(folder)
        self.template_names: set[str] = set()  #: the variables that they know
        self._sandbox = _sandbox()
        self._template = self._compile(self.template)
        self._tool_template = self._compile(self.tool_template)
        self._byte_level = "ByteLevel" in repr(self.tokenizer.decoder)
        self._added = self.tokenizer.get_added_tokens_decoder()

    @property
    def token_chars(self) -> int:
        """Characters of the longest token, special ones included."""
        return max(len(token) for token in self.tokenizer.get_vocab(with_added_tokens=True))

    def _find_templates(self, folder: Path) -> tuple[str, str]:
        file = folder / "chat_template.jinja"
        template = file.read_text() if file.exists() else self._settings.get("chat_template")
        if isinstance(template, list):  # several, by name
            named = {entry["name"]: entry["template"] for entry in template}
            default = named.get("default", "")
            return default, named.get("tool_use", default)
        return template or "", template or ""

    def _compile(self, source: str) -> jinja2.Template | None:
        if not source:
            return None
        try:
            parsed = self._sandbox.parse(source)
            self.template_names |= jinja2.meta.find_undeclared_variables(parsed)
            return self._sandbox.from_string(source)
        except jinja2.TemplateError as error:
            raise WeightsError(f"the chat template does not compile: {error}") from None

    def chat(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict] | None = None,
        arguments: dict[str, Any] | None = None,
    ) -> Prompt:
        """A conversation, ready for the assistant's answer. Raises ApiError.

        `arguments`: further variables of the template; one that it does not know is refused.
        """
        template = self._tool_template if tools else self._template
        if template is None:
            raise ApiError("invalid_request", "this model has no chat template")
        for name in arguments or {}:
            if name not in self.template_names - GIVEN:
                message = f"chat_template_kwargs: this model's template knows no {name!r}"
                raise ApiError("invalid_request", message, "chat_template_kwargs")
        if tools and "tools" not in self.template_names:
            message = "tools: this model's chat template has no place for them"
            raise ApiError("invalid_request", message, "tools")
        specials = {name: self._special(name) for name in ("bos_token", "eos_token", "pad_token")}
        given = {"messages": messages, "add_generation_prompt": True, "tools": tools, **specials}
        try:
            text = self._sandbox.text(template, {**(arguments or {}), **given})
        except REFUSALS as error:
            said = " ".join(str(error).split())[:300]
            raise ApiError(
                "invalid_request", f"the model's chat template refuses this: {said}", "messages"
            ) from None
        return Prompt(self.encode(text, specials=False), text[-END:])

    def encode(self, text: str, specials: bool = True) -> list[int]:
        """`specials`: with what the tokenizer puts around a text, such as a first id."""
        ids: list[int] = self._encoder.encode(text, add_special_tokens=specials).ids
        return ids

    @cached_property
    def vocab(self) -> int:
        """Ids that the tokenizer knows are below."""
        return max(self.tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    def _special(self, name: str) -> str:
        value: Any = self._settings.get(name) or ""
        return value if isinstance(value, str) else value.get("content", "")

    def stream(self, specials: bool = False) -> TextStream | PieceStream:
        pieces = self._all_pieces if specials else self._pieces
        if pieces:
            return PieceStream(pieces)
        return TextStream(self.tokenizer, frozenset() if specials else self._hidden)

    @cached_property
    def _all_pieces(self) -> list[str | bytes]:
        """What each id adds to a text, as bytes where they are no whole characters.

        Empty unless the text of ids is that of their bytes in turn: byte-level BPE (GPT-2's, Llama
        3's, Qwen's), whose decoder puts bytes together and does nothing else.
        """
        if type(self.tokenizer.decoder).__name__ != "ByteLevel":
            return []
        found: list[str | bytes] = [""] * self.vocab
        for name, token in self.tokenizer.get_vocab(with_added_tokens=True).items():
            known = all(char in BYTE_OF for char in name)
            data = bytes(BYTE_OF[char] for char in name) if known else name.encode()
            try:
                found[token] = data.decode()
            except UnicodeDecodeError:
                found[token] = data
        return found

    @cached_property
    def _pieces(self) -> list[str | bytes]:
        """The same without hidden tokens."""
        hidden = self._hidden
        return ["" if i in hidden else piece for i, piece in enumerate(self._all_pieces)]

    @cached_property
    def _hidden(self) -> frozenset[int]:
        """Special tokens, but for the marks of calls and thoughts."""
        special = [(token, added) for token, added in self._added.items() if added.special]
        return frozenset(token for token, added in special if added.content not in MARKS)

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def piece(self, token: int) -> str:
        return self.tokenizer.decode([token], skip_special_tokens=False)

    def token_bytes(self, token: int) -> bytes:
        """A token's own bytes, also if they are no whole character."""
        name = self.tokenizer.id_to_token(token)
        if not name or token in self._added or not self._byte_level:
            return self.piece(token).encode()
        return bytes(BYTE_OF.get(char, 0) for char in name)


def _fast_encoder(path: Path, tokenizer: Tokenizer) -> Any:
    """An encoder with the same ids as `tokenizer`, many times as fast; itself if there is none.

    `fastokens` remembers what the segments between added tokens (a chat's turns) became: the next
    turn of a conversation costs its new text only. Ids are compared once, on what is known to
    differ between tokenizers.
    """
    try:
        import fastokens

        encoder = fastokens.Tokenizer.from_file(str(path))
        encoder.enable_segment_cache(SEGMENT_BYTES)
        names = "".join(one.content for one in tokenizer.get_added_tokens_decoder().values())
        for text in (PROBE, names, names.join((PROBE, PROBE, ""))):
            for specials in (False, True):
                ids = tokenizer.encode(text, add_special_tokens=specials).ids
                for _ in range(2):  # computed, and remembered
                    if encoder.encode(text, add_special_tokens=specials).ids != ids:
                        raise ValueError("ids differ")
    except Exception as error:  # not installed, or a kind of tokenizer that it does not know
        log.warning("%s is tokenized the slow way: %s", path, error)
        return tokenizer
    return encoder


class PieceStream:
    """Ids of one answer -> text deltas, by a table of pieces; the text is the tokenizer's own."""

    __slots__ = ("_decoder", "_pieces", "open")

    def __init__(self, pieces: list[str | bytes]) -> None:
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.open = False  #: a character has begun

    def feed(self, ids: list[int]) -> str:
        """Characters that span tokens come out whole. Ids that are no tokens add nothing."""
        if len(ids) == 1:
            return self._one(ids[0])
        return "".join([self._one(token) for token in ids])

    def _one(self, token: int) -> str:
        try:
            piece = self._pieces[token]
        except IndexError:
            return ""
        if isinstance(piece, str):
            if not self.open or not piece:
                return piece
            piece = piece.encode()
        text = self._decoder.decode(piece)
        self.open = bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        """What is left at the end: an incomplete character comes out as U+FFFD."""
        self.open = False
        return self._decoder.decode(b"", final=True)


class TextStream:
    """The same for any tokenizer: what it decodes, token by token."""

    open = False  #: what comes out ends with its token

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int]) -> None:
        self._tokenizer, self._hidden = tokenizer, hidden
        self._ids: list[int] = []  #: a few whose text is out, as context, then those held back
        self._out = 0  #: how many of them are out
        self._known = ""  #: their text

    def feed(self, ids: list[int]) -> str:
        return "".join([self._one(token) for token in ids])

    def _one(self, token: int) -> str:
        if token in self._hidden:
            return ""
        self._ids.append(token)
        text = self._decode()
        if len(text) < len(self._known):  # bytes that were none become one character
            self._known = text
        held = len(self._ids) - self._out
        if len(text) <= len(self._known) or (text.endswith("\ufffd") and held < HELD):
            return ""
        delta = text[len(self._known) :]
        self._ids = self._ids[self._out :]
        self._out, self._known = held, self._decode()
        return delta

    def _decode(self) -> str:
        text: str = self._tokenizer.decode(self._ids, skip_special_tokens=False)
        return text

    def flush(self) -> str:
        """What is left at the end: an incomplete character comes out as U+FFFD."""
        return self._decode()[len(self._known) :]


def _byte_of() -> dict[str, int]:
    """Byte-level BPE's alphabet (GPT-2): printable bytes are themselves, others follow U+0100."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {
        chr(256 + place): byte for place, byte in enumerate(hidden)
    }


BYTE_OF = _byte_of()


def _sandbox() -> Sandbox:
    """What templates expect of transformers, and no more."""
    sandbox = Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _Generation],
    )

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    sandbox.globals["raise_exception"] = refuse
    sandbox.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    sandbox.filters["tojson"] = _tojson
    return sandbox


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's words for training: here it marks nothing."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        body: list[jinja2.nodes.Node] = parser.parse_statements(
            ("name:endgeneration",), drop_needle=True
        )
        return body


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
