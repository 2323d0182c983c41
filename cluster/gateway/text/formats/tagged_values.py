"""Calls whose arguments are values between tags (pure).

- Qwen 3 Coder, Qwen 3.5: `<function=NAME>`, `<parameter=KEY>` value `</parameter>`, in
  `<tool_call>` or without it.
- GLM 4.5 and later: `<tool_call>NAME`, `<arg_key>KEY</arg_key>`, and `<arg_value>` value
  `</arg_value>`.
- DeepSeek V3.2 and later: `<｜DSML｜invoke name="NAME">`, and
  `<｜DSML｜parameter name="KEY" string="true">` value `</｜DSML｜parameter>`.

Values are raw text, so the schema of a function says which of them are strings. Strings come out
as they are generated, all other values when they are complete. A value may have its own closing tag
as text, for example in code: the tag ends the value only if the next tag of a call follows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .arguments import ArgumentWriter
from .json_calls import CALL_CLOSE, CALL_OPEN, read_call
from .parts import PartKind
from .reader import AnswerReader, Markers, Reading

DSML = "｜DSML｜"  #: In each tag of DeepSeek's; the bars are no ASCII characters.
#: The attributes of a DSML tag, of a call or of a parameter.
_DSML_ATTRIBUTES = re.compile(r'name="(?P<name>[^"]*)"(?:\s+string="(?P<is_string>true|false)")?')


@dataclass(frozen=True, slots=True)
class TagStyle:
    """The tags of one format that end values and calls."""

    value_closing: str  #: Ends a value; taken with it.
    fields_closing: str  #: Ends the fields of a call.
    #: Each text that may end a value, and what must follow it, behind white space, so that it does.
    #: An empty follower: anything may follow. Where the text is not `value_closing`, the model left
    #: that out, and the text stays in the buffer.
    followers: Mapping[str, tuple[str, ...]]
    #: A value stands on lines of its own: the line breaks next to its tags are no part of it.
    strips_line_breaks: bool = False

    @property
    def field_ends(self) -> set[str]:
        """The tags that end stray text between fields, which is none of a value."""
        return {self.fields_closing, *self.followers[self.value_closing]}


QWEN = TagStyle(
    value_closing="</parameter>",
    fields_closing="</function>",
    followers={
        "</parameter>": ("<parameter=", "</function>", CALL_CLOSE),
        # Models sometimes leave the value's own tag out:
        "</function>": (CALL_CLOSE,),
        "\n<parameter=": ("",),
    },
    strips_line_breaks=True,
)
GLM = TagStyle(
    value_closing="</arg_value>",
    fields_closing=CALL_CLOSE,
    followers={"</arg_value>": ("<arg_key>", CALL_CLOSE)},
)


def _dsml_style(space: str) -> TagStyle:
    """Return DeepSeek's tags; `space` is what stands in them behind the last bar, V4.1's space."""
    value_closing = f"</{DSML}{space}parameter>"
    fields_closing = f"</{DSML}{space}invoke>"
    return TagStyle(
        value_closing,
        fields_closing,
        followers={value_closing: (f"<{DSML}{space}parameter", fields_closing)},
    )


class _ValueReader:
    """Finds the ends of the values of one call, and writes the values."""

    def __init__(self, reader: AnswerReader, style: TagStyle) -> None:
        self._reader = reader
        self._style = style
        self._closings = Markers(*style.followers)  #: All texts that may end a value.

    def next_piece(self) -> tuple[str, bool]:
        """Take the next piece of the value that is certain; return it, and whether the value ended.

        What may become the end of the value stays in the buffer until more text has come. If the
        answer has ended, all text is taken.
        """
        reader = self._reader
        certain_chars = len(reader.buffer) - self._closings.possible_chars(reader.buffer)
        search_start = 0
        while found := self._closings.find(reader.buffer, search_start):
            rest = reader.buffer[found.end() :].lstrip()
            followers = self._style.followers[found.group()]
            may_follow = any(follower.startswith(rest) for follower in followers)
            if rest.startswith(followers) or (reader.has_ended and may_follow):
                piece = reader.take(found.start())
                if found.group() == self._style.value_closing:
                    reader.take(len(found.group()))
                return self._without_line_break(piece), True
            if may_follow:  # more text will say
                certain_chars = found.start()
                break
            search_start = found.end()
        if reader.has_ended:
            return reader.take_all(), False
        return reader.take(self._line_break_before(certain_chars)), False

    def _line_break_before(self, chars: int) -> int:
        """Return how many of the first `chars` characters are certain to be part of the value.

        A line break at their end is not, if it may be the one in front of the closing tag.
        """
        if self._style.strips_line_breaks and self._reader.buffer[:chars].endswith("\n"):
            return chars - 1
        return chars

    def _without_line_break(self, text: str) -> str:
        """Return the end of a value without the line break in front of its closing tag."""
        return text.removesuffix("\n") if self._style.strips_line_breaks else text

    def read(self, writer: ArgumentWriter, key: str, is_string: bool | None) -> Reading[bool]:
        """Write the value of a field. Return False if the answer ended inside of it.

        `is_string` is what the tag says about the value; None: the schema decides.
        """
        reader = self._reader
        if self._style.strips_line_breaks:
            yield from reader.takes("\n")
        if is_string is None:
            is_string = writer.is_string(key)
        if is_string:
            writer.begin_string()
        text = ""
        while True:
            ended_before = reader.has_ended
            piece, is_complete = self.next_piece()
            if is_string:
                writer.add_to_string(piece)
            else:
                text += piece
            if is_complete:
                break
            if ended_before:
                if not is_string:
                    writer.add_json(text)  # as it is: its type cannot be told from its beginning
                return False
            yield from reader.more()
        if is_string:
            writer.end_string()
        else:
            writer.add_value(key, text)
        return True


# ---- Qwen ------------------------------------------------------------------------------------

_QWEN_OPENINGS = (CALL_OPEN, "<function=")
_QWEN_OPENING = Markers(*_QWEN_OPENINGS)
_QWEN_NAME_END = Markers(">", "\n", CALL_CLOSE, *_QWEN_OPENINGS)
_QWEN_CLOSING = Markers(CALL_CLOSE)


def read_qwen_xml(reader: AnswerReader) -> Reading[None]:
    """Read content with calls in it. Some models leave `<tool_call>` out."""
    while marker := (yield from reader.release_until(_QWEN_OPENING, PartKind.CONTENT)):
        opening = marker
        if marker == CALL_OPEN:
            opening += yield from reader.skip_space()
            function = yield from reader.takes("<function=")
            if not function:
                yield from _read_other_block(reader, opening)
                continue
            opening += function
        name, end = yield from reader.hold_until(_QWEN_NAME_END)
        if end in _QWEN_OPENINGS:  # another call may begin there
            reader.buffer = end + reader.buffer
            _release_opening(reader, opening + name)
            continue
        opening += name + end
        if end == ">" and name.strip() in reader.function_names:
            yield from _read_fields(reader, name.strip(), QWEN, _read_qwen_key)
            yield from reader.skip_space()
            yield from _take_call_close(reader)
        elif marker == CALL_OPEN:
            yield from _read_other_block(reader, opening)
        else:  # nothing says where it ends, and a call may stand behind it
            _release_opening(reader, opening)


def _release_opening(reader: AnswerReader, text: str) -> None:
    """Add text that began like a call, and is none, as content.

    White space at its end goes back: it is content unless the marker of a call comes next.
    """
    content = text.rstrip()
    reader.buffer = text[len(content) :] + reader.buffer
    reader.add_unread(content)


def _take_call_close(reader: AnswerReader) -> Reading[None]:
    """Take `</tool_call>` behind a call, if it comes next; of an answer that is cut, a part of it."""
    found = yield from reader.takes(CALL_CLOSE)
    if not found and reader.is_cut and CALL_CLOSE.startswith(reader.buffer):
        reader.take_all()


def _read_other_block(reader: AnswerReader, opening: str) -> Reading[None]:
    """Read up to `</tool_call>` what is no call of one of the functions in this format.

    `opening` is the text of the block so far. If it is `<tool_call>` alone, which only Qwen's
    reader passes, a JSON object behind it is a call, as in Hermes's format; all else is content.
    """
    if opening.endswith(CALL_CLOSE):
        reader.add_unread(opening)
        return
    text, marker = yield from reader.hold_until(_QWEN_CLOSING)
    call = read_call(text)
    if call is not None and opening.strip() == CALL_OPEN:
        reader.add_whole_call(call.name, call.arguments)
    else:
        reader.add_unread(opening + text + marker)


@dataclass(slots=True)
class _Key:
    """A field that begins."""

    name: str
    is_string: bool | None = None  #: None: the schema says whether it is.


#: Takes the tag with the key of the next field; gives None, and takes nothing, if none comes next.
KeyReader = Callable[[AnswerReader], Reading["_Key | None"]]
_QWEN_KEY_END = Markers(">", "\n")


def _read_qwen_key(reader: AnswerReader) -> Reading[_Key | None]:
    """Take the tag of the next field, `<parameter=KEY>`."""
    if not (yield from reader.takes("<parameter=")):
        return None
    name, _ = yield from reader.hold_until(_QWEN_KEY_END)
    return _Key(name.strip().strip('"'))


def _read_fields(
    reader: AnswerReader, name: str, style: TagStyle, read_key: KeyReader
) -> Reading[None]:
    """Read the fields of a call of one of the functions, up to the tag that ends them."""
    reader.begin_call(name)
    writer = ArgumentWriter(reader, name)
    values = _ValueReader(reader, style)
    while True:
        yield from reader.skip_space()
        key = yield from read_key(reader)
        if key is not None:
            writer.begin_field(key.name)
            if not (yield from values.read(writer, key.name, key.is_string)):
                reader.end_call(is_cut=True)
                return
            continue
        if (yield from reader.takes(style.fields_closing)):
            break
        if not reader.buffer:
            if reader.is_cut:
                reader.end_call(is_cut=True)
                return
            break  # the model ended by itself, and left the last tags out: the call is whole
        stray_text, marker = yield from _hold_stray_text(reader, Markers(*style.field_ends))
        reader.add_stray(stray_text)
        reader.buffer = marker + reader.buffer
        if marker == CALL_CLOSE != style.fields_closing:
            break  # Qwen's `</function>` is missing; the caller takes this tag
    writer.end()
    reader.end_call()


def _hold_stray_text(reader: AnswerReader, tags: Markers) -> Reading[tuple[str, str]]:
    """Take the text up to the next of a call's tags; return both, as `hold_until` does.

    The beginning of a tag, at the end of an answer that is cut, is left out.
    """
    text, tag = yield from reader.hold_until(tags)
    if not tag and reader.is_cut:
        text = text[: len(text) - tags.possible_chars(text)]
    return text, tag


# ---- GLM -------------------------------------------------------------------------------------

_GLM_OPENING = Markers(CALL_OPEN)
_GLM_NAME_END = Markers("\n", "<arg_key>", CALL_CLOSE)
_GLM_KEY_END = Markers("</arg_key>")


def read_glm(reader: AnswerReader) -> Reading[None]:
    """Read content with calls in it."""
    while (yield from reader.release_until(_GLM_OPENING, PartKind.CONTENT)):
        opening = CALL_OPEN + (yield from reader.skip_space())
        name, end = yield from reader.hold_until(_GLM_NAME_END)
        if not end or name.strip() not in reader.function_names:
            yield from _read_other_block(reader, opening + name + end)
            continue
        if end != "\n":
            reader.buffer = end + reader.buffer
        yield from _read_fields(reader, name.strip(), GLM, _read_glm_key)


def _read_glm_key(reader: AnswerReader) -> Reading[_Key | None]:
    """Take the tags of the next field, `<arg_key>KEY</arg_key><arg_value>`."""
    if not (yield from reader.takes("<arg_key>")):
        return None
    name, _ = yield from reader.hold_until(_GLM_KEY_END)
    yield from reader.skip_space()
    yield from reader.takes("<arg_value>")
    return _Key(name.strip())


# ---- DeepSeek V3.2 ---------------------------------------------------------------------------

_DSML_OPENING = Markers(f"<{DSML}function_calls>", f"<{DSML}tool_calls>", f"<{DSML} calls>")
_DSML_INVOKE = (f"<{DSML}invoke", f"<{DSML} invoke")
_DSML_CALLS_END = Markers(
    *_DSML_INVOKE, f"</{DSML}function_calls>", f"</{DSML}tool_calls>", f"</{DSML} calls>"
)
_DSML_PARAMETER = (f"<{DSML}parameter", f"<{DSML} parameter")
_DSML_TAG_END = Markers(">")


def read_deepseek_dsml(reader: AnswerReader) -> Reading[None]:
    """Read content with sections of calls in it. V4.1 has a space in its tags.

    Text of a section that is no call is content.
    """
    while (yield from reader.release_until(_DSML_OPENING, PartKind.CONTENT)):
        while True:
            stray_text, marker = yield from _hold_stray_text(reader, _DSML_CALLS_END)
            reader.add_unread(stray_text)
            if marker not in _DSML_INVOKE:
                break
            yield from _read_invocation(reader, marker)


def _read_invocation(reader: AnswerReader, marker: str) -> Reading[None]:
    """Read a call whose tag begins with `marker`.

    A call of a function that is none of the request's is content.
    """
    style = _dsml_style(" " if marker.endswith(" invoke") else "")
    tag, end = yield from reader.hold_until(_DSML_TAG_END)
    parsed_tag = _DSML_ATTRIBUTES.search(tag)
    name = parsed_tag["name"] if parsed_tag else ""
    is_known = bool(end) and name in reader.function_names
    if is_known and tag.endswith("/"):  # the tag is the whole call
        reader.add_whole_call(name, "{}")
    elif is_known:
        yield from _read_fields(reader, name, style, _read_dsml_key)
    else:
        text, closing = "", ""
        if end:
            text, closing = yield from reader.hold_until(Markers(style.fields_closing))
        reader.add_unread(marker + tag + end + text + closing)


def _read_dsml_key(reader: AnswerReader) -> Reading[_Key | None]:
    """Take the tag of the next field, `<｜DSML｜parameter name="KEY" string="true">`."""
    if not (yield from reader.takes(*_DSML_PARAMETER)):
        return None
    tag, _ = yield from reader.hold_until(_DSML_TAG_END)
    parsed_tag = _DSML_ATTRIBUTES.search(tag)
    if parsed_tag is None:
        return _Key(tag.strip())
    is_string = parsed_tag["is_string"]
    return _Key(parsed_tag["name"], None if is_string is None else is_string == "true")
