"""Harmony, which gpt-oss writes: messages with channels and recipients (pure).

    <|channel|>analysis<|message|>..<|end|><|start|>assistant<|channel|>final<|message|>..

The channel `analysis` is reasoning, all others are content. A message to `functions.NAME` is a call
of this function; the text of the message is its arguments.

`openai-harmony` reads the same from token ids, but fetches its vocabulary from the internet when it
is first used, and clusters are often offline.
"""

from __future__ import annotations

import re

from .parts import PartKind
from .reader import AnswerReader, Markers, Reading

START = "<|start|>"
CHANNEL = "<|channel|>"
MESSAGE = "<|message|>"
CONSTRAIN = "<|constrain|>"
END = "<|end|>"
CALL = "<|call|>"
RETURN = "<|return|>"
ANALYSIS = "analysis"

_BODY_END = Markers(END, CALL, RETURN, START, CHANNEL)
_HEADER_END = Markers(MESSAGE, END, CALL, RETURN)
_RECIPIENT = re.compile(r"to=(?P<name>[^\s<]+)")
_CHANNEL_NAME = re.compile(re.escape(CHANNEL) + r"\s*(?P<name>\w+)")
_FUNCTIONS = "functions."


def read_harmony(reader: AnswerReader) -> Reading[None]:
    """Read an answer's messages. The first header may have begun in the prompt."""
    yield from reader.skip_space()
    marker = yield from reader.takes(CHANNEL, START)
    if not marker and not (yield from _begins_with_header(reader)):
        marker = yield from reader.release_until(_BODY_END, PartKind.CONTENT)
    while True:
        if marker in (START, CHANNEL) or not marker:
            marker = yield from _read_message(reader, marker)
        else:
            # Text between messages belongs to none.
            text, marker = yield from reader.hold_until(_BODY_END)
            reader.add_unread(text)
        if not marker and not reader.buffer:
            return


def _begins_with_header(reader: AnswerReader) -> Reading[bool]:
    """Return whether the text goes on with a header that began in the prompt."""
    return bool((yield from _peeks(reader, " to=", "to=")))


def _peeks(reader: AnswerReader, *texts: str) -> Reading[str]:
    found = yield from reader.takes(*texts)
    reader.buffer = found + reader.buffer
    return found


def _read_message(reader: AnswerReader, opening: str) -> Reading[str]:
    """Read a header and its message; return the marker behind it."""
    header, end = yield from reader.hold_until(_HEADER_END)
    header = opening + header
    if end != MESSAGE:
        reader.add_unread(header.removeprefix(START).removeprefix("assistant"))
        return end
    recipient = _RECIPIENT.search(header)
    name = recipient["name"] if recipient else "assistant"
    if name.startswith(_FUNCTIONS) or name != "assistant":
        return (yield from _read_call(reader, name, header + end))
    channel = _CHANNEL_NAME.search(header)
    is_reasoning = channel is not None and channel["name"] == ANALYSIS
    kind = PartKind.REASONING if is_reasoning else PartKind.CONTENT
    return (yield from reader.release_until(_BODY_END, kind))


def _read_call(reader: AnswerReader, recipient: str, opening: str) -> Reading[str]:
    """Read the message of a call; return the marker behind it."""
    name = recipient.removeprefix(_FUNCTIONS)
    if name not in reader.function_names:
        text, marker = yield from reader.hold_until(_BODY_END)
        is_function = recipient.startswith(_FUNCTIONS)
        reader.add_foreign_call(name if is_function else "", text.strip(), opening + text)
        return marker
    reader.begin_call(name)
    yield from reader.skip_space()
    marker = ""
    has_ended = True
    if reader.buffer.startswith("{"):
        has_ended = yield from reader.read_object(CALL)
    if has_ended:
        text, marker = yield from reader.hold_until(_BODY_END)
        text = text.strip()
        if reader.has_arguments:
            reader.add_stray(text)
        else:
            reader.add_arguments(text or "{}")
    reader.end_call(is_cut=not has_ended or (not marker and reader.is_cut))
    return marker
