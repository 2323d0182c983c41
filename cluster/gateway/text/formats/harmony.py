"""Harmony, which gpt-oss writes: messages with channels and recipients (pure).

    <|channel|>analysis<|message|>..<|end|><|start|>assistant<|channel|>final<|message|>..

A message is a header and a body, which `<|message|>` separates. The header has the author, a
channel, and in calls a recipient: `assistant<|channel|>commentary to=functions.NAME`. The channel
`analysis` is reasoning, all others are content. A message to `functions.NAME` is a call of this
function; the text of the message is its arguments.

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
#: Stands in a header, in front of the type of the body, such as `json`.
CONSTRAIN = "<|constrain|>"
END = "<|end|>"  #: Ends a message.
CALL = "<|call|>"  #: Ends a message that is a call.
RETURN = "<|return|>"  #: Ends the last message of an answer.
ANALYSIS = "analysis"  #: The channel whose messages are the reasoning.

#: A body whose end is missing ends where the next header begins, with START or CHANNEL.
_BODY_END = Markers(END, CALL, RETURN, START, CHANNEL)
_HEADER_END = Markers(MESSAGE, END, CALL, RETURN)
_RECIPIENT = re.compile(r"to=(?P<name>[^\s<]+)")
_CHANNEL_NAME = re.compile(re.escape(CHANNEL) + r"\s*(?P<name>\w+)")
_FUNCTIONS = "functions."  #: In front of the name in the recipient of a call.


def read_harmony(reader: AnswerReader) -> Reading[None]:
    """Read an answer's messages. The first header may have begun in the prompt."""
    yield from reader.skip_space()
    marker = yield from reader.takes(CHANNEL, START)
    if not marker and not (yield from _begins_with_header(reader)):
        # The prompt ended behind a header, or the model left the header out: a body begins.
        marker = yield from reader.release_until(_BODY_END, PartKind.CONTENT)
    while True:
        # Without a marker, the header began in the prompt, or nothing is left to read.
        if marker in (START, CHANNEL) or not marker:
            marker = yield from _read_message(reader, marker)
        else:
            # The marker ended a message. Text between messages belongs to none.
            text, marker = yield from reader.hold_until(_BODY_END)
            reader.add_unread(text)
        if not marker and not reader.buffer:
            return


def _begins_with_header(reader: AnswerReader) -> Reading[bool]:
    """Return whether the text goes on with a header that began in the prompt; takes nothing."""
    found = yield from reader.takes("to=")
    reader.buffer = found + reader.buffer
    return bool(found)


def _read_message(reader: AnswerReader, opening: str) -> Reading[str]:
    """Read a header and its message; return the marker behind it, empty at the end of the answer.

    `opening` is the marker in front of the header, if there is one.
    """
    header, end = yield from reader.hold_until(_HEADER_END)
    header = opening + header
    if end != MESSAGE:  # a header without a body; its author is no text of the model's
        reader.add_unread(header.removeprefix(START).removeprefix("assistant"))
        return end
    recipient = _RECIPIENT.search(header)
    name = recipient["name"] if recipient else "assistant"
    if name != "assistant":
        return (yield from _read_call(reader, name, header + end))
    channel = _CHANNEL_NAME.search(header)
    is_reasoning = channel is not None and channel["name"] == ANALYSIS
    kind = PartKind.REASONING if is_reasoning else PartKind.CONTENT
    return (yield from reader.release_until(_BODY_END, kind))


def _read_call(reader: AnswerReader, recipient: str, opening: str) -> Reading[str]:
    """Read the message of a call; return the marker behind it, empty at the end of the answer.

    `opening` is the text of the message so far. A recipient that is no function, such as a tool
    that OpenAI builds in, makes the message content.
    """
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
        elif text or marker or not reader.is_cut:
            reader.add_arguments(text or "{}")  # an empty body: the call has no arguments
    reader.end_call(is_cut=not has_ended or (not marker and reader.is_cut))
    return marker
