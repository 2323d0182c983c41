"""What an answer's text consists of (pure): reasoning, content, and calls with their arguments."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class PartKind(StrEnum):
    """What the text of a part is."""

    REASONING = "reasoning"  #: What the model wrote between the tags of its thinking.
    CONTENT = "content"  #: The answer proper, and what could not be read as anything else.
    CALL = "call"  #: A call begins; the text is the name of its function.
    ARGUMENTS = "arguments"  #: The next piece of the last call's arguments.


class ContentPart(NamedTuple):
    """A piece of an answer; a stream has several of one kind in a row, whose texts are joined."""

    kind: PartKind
    text: str


class CallFlaw(StrEnum):
    """What was wrong with something that looked like a call; metrics count these."""

    UNREAD = "unread"  #: It could not be read, and came out as content, markers included.
    CUT = "cut"  #: The answer ended inside of it; it came out with the beginning of its arguments.
    NO_JSON = "no_json"  #: Its arguments are no JSON object; they came out as the model wrote them.
