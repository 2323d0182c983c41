"""What a client sent without effect: the fields' names in a header, and their number.

The header tells names only, percent-encoded, as many as fit. A name that is nearly one that the
server knows gets a suggestion:

    x-ignored-fields: max_token;did-you-mean=max_tokens, messages.mood, *;more=7
"""

from __future__ import annotations

from collections import Counter
from difflib import get_close_matches
from enum import StrEnum
from functools import lru_cache
from urllib.parse import quote

HEADER_NAME = "x-ignored-fields"
NAMES_MAX = 16  #: So many fields are named; the others are only counted.
HEADER_CHARS_MAX = 1024  #: Of the header's value; proxies refuse responses with long headers.
NAME_CHARS_MAX = 48  #: Of the client's own name; the rest of a longer one is left out.
MORE_CHARS_MAX = 24  #: Set aside for the count of the fields that are not named.
EMPTY_NAME = '""'  #: How the header writes a field whose name has no characters.
#: Longer names get no suggestion, as the comparison takes time that grows with their length.
COMPARED_CHARS_MAX = 40
CLOSENESS_MINIMUM = 0.8  #: How much of two names is the same (`difflib`'s ratio), for a suggestion.
SUGGESTIONS_CACHED = 1024  #: A client makes the same mistake in each of its requests.


class IgnoredKind(StrEnum):
    """Why a field is ignored: the values of the metric's label `kind`."""

    UNKNOWN = "unknown"  #: This API has no field of such a name.
    MISSPELT = "misspelt"  #: It is nearly a field that the server knows.
    #: OpenAI, Anthropic, vLLM or SGLang document it, and it has no effect here.
    DOCUMENTED = "documented"


class IgnoredFields:
    """The fields of one body that had no effect."""

    def __init__(self) -> None:
        self.counts: Counter[IgnoredKind] = Counter()  #: All fields, named in the header or not.
        #: Of each field that the header names, by the path of its part and its name.
        self._named_kinds: dict[tuple[str, str], IgnoredKind] = {}
        self._entries: list[str] = []  #: What the header says of each named field, in order.
        self._entries_chars = 0  #: With what separates the entries.
        self._is_full = False  #: True once a field did not fit.
        self._unnamed = 0  #: Fields that the header has no room for.

    def add_documented(self, part_path: str, name: str) -> None:
        """Take note of a field that the server knows, and has nothing to set by."""
        self._add(part_path, name, IgnoredKind.DOCUMENTED, suggestion="")

    def add_unknown(self, part_path: str, name: str, expected_names: frozenset[str]) -> None:
        """Take note of a field that no API has, in a part whose fields are `expected_names`.

        Only names that the header has room for are compared with the expected ones.
        """
        is_named = (part_path, name) in self._named_kinds
        is_compared = not is_named and not self._is_full
        suggestion = nearest_name(name, expected_names) if is_compared else ""
        kind = IgnoredKind.MISSPELT if suggestion else IgnoredKind.UNKNOWN
        self._add(part_path, name, kind, suggestion)

    def headers(self) -> dict[str, str]:
        """Return the header of the response; none if every field had an effect."""
        entries = list(self._entries)
        if self._unnamed:
            entries.append(f"*;more={self._unnamed}")
        return {HEADER_NAME: ", ".join(entries)} if entries else {}

    def _add(self, part_path: str, name: str, kind: IgnoredKind, suggestion: str) -> None:
        """Count a field, and name it if the header has room.

        `part_path` is where it stands, empty for the body itself; an empty `suggestion` is none.
        """
        key = (part_path, name)
        # The same field in each of many messages is named once, and counted each time.
        if key in self._named_kinds:
            self.counts[self._named_kinds[key]] += 1
            return
        self.counts[kind] += 1
        if self._is_full:
            self._unnamed += 1
            return
        entry = _encoded_name(name)
        if part_path:
            entry = f"{part_path}.{entry}"
        if suggestion:
            entry += f";did-you-mean={suggestion}"
        chars = self._entries_chars + len(entry) + 2  # the comma and the space
        if len(self._entries) == NAMES_MAX or chars > HEADER_CHARS_MAX - MORE_CHARS_MAX:
            self._is_full = True
            self._unnamed += 1
            return
        self._named_kinds[key] = kind
        self._entries.append(entry)
        self._entries_chars = chars


def _encoded_name(name: str) -> str:
    """Return a client's name as the header may have it: ASCII letters, digits and `_-~%`."""
    if not name:
        return EMPTY_NAME
    shown = name if len(name) <= NAME_CHARS_MAX else name[:NAME_CHARS_MAX] + "\u2026"
    return quote(shown, safe="", errors="replace").replace(".", "%2E")


def nearest_name(name: str, expected_names: frozenset[str]) -> str:
    """Return the expected name that `name` is nearly the same as; empty if there is none.

    Capitals, `-` and `_` make no difference: `maxTokens` is `max_tokens`.
    """
    if len(name) > COMPARED_CHARS_MAX:
        return ""
    return _find_nearest_name(name, expected_names)


@lru_cache(SUGGESTIONS_CACHED)
def _find_nearest_name(name: str, expected_names: frozenset[str]) -> str:
    names_by_letters = {_letters_of(expected): expected for expected in sorted(expected_names)}
    # Compared without what makes no difference; the result leads back to the name as it is written.
    [nearest] = get_close_matches(
        _letters_of(name), names_by_letters, n=1, cutoff=CLOSENESS_MINIMUM
    ) or [""]
    return names_by_letters.get(nearest, "")


def _letters_of(name: str) -> str:
    """Return a name without what makes no difference."""
    return name.lower().replace("-", "").replace("_", "")
