"""Texts of a wanted number of tokens, with shared prefixes, for a tokenizer that is not known.

`probe` finds words that are one token each when they follow a space, by the prompt tokens that the
endpoint itself counts. A text is then words of that alphabet, one per token; a block's words are a
function of (seed, block id), so equal ids are equal tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from .arrivals import Arrival
from .errors import LoadError

#: short words that most tokenizers know whole
CANDIDATES = (
    *("the", "a", "of", "to", "and", "is", "in", "it", "that", "for", "on", "with", "as", "are"),
    *("be", "this", "can", "one", "not", "from", "by", "at", "or", "an", "each", "when", "what"),
)
START = CANDIDATES[0]
REPEATS = 8  #: a candidate is judged by the tokens that so many of it add
WORDS = 12  #: enough of them
FEWEST = 2


@dataclass(frozen=True, slots=True)
class Words:
    """`alphabet`: words of one token each behind a space; `template`: tokens of a prompt whose
    message is `START` alone. Every message begins with that: without a space in front, a word may
    be any number of tokens."""

    alphabet: tuple[str, ...]
    template: int
    seed: int = 0

    def block(self, name: int | str, tokens: int) -> str:
        """Text of `tokens` tokens that begins with a space."""
        picked = random.Random(f"{self.seed}/{name}").choices(self.alphabet, k=tokens)
        return "".join(f" {word}" for word in picked)

    def text(self, arrival: Arrival) -> str:
        """The message of a prompt of `arrival.prompt` tokens, the template's included."""
        left = max(0, arrival.prompt - self.template)
        parts = [START]
        for name, tokens in arrival.blocks:
            parts.append(self.block(name, min(tokens, left)))
            left -= min(tokens, left)
        parts.append(self.block(f"own {arrival.index}", left))
        return "".join(parts)

    def message(self, name: str, tokens: int) -> str:
        """A message of its own, of about `tokens` tokens."""
        return START + self.block(name, tokens - 1)


def probe(count: Callable[[str], int], seed: int = 0) -> Words:
    """`count(text)`: tokens of a prompt whose one message is `text`. Raises LoadError."""
    base = count(START)
    found = []
    for word in CANDIDATES:
        if count(START + f" {word}" * REPEATS) - base == REPEATS:
            found.append(word)
        if len(found) == WORDS:
            break
    if len(found) < FEWEST:
        raise LoadError("no words of one token each were found: does the endpoint count usage?")
    return Words(tuple(found), base, seed)
