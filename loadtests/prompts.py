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
REPEATS = 8  #: a candidate is judged by the tokens that so many of it add
WORDS = 12  #: enough of them
FEWEST = 2


@dataclass(frozen=True, slots=True)
class Words:
    """`alphabet`: words of one token each; `template`: tokens of a prompt with an empty message."""

    alphabet: tuple[str, ...]
    template: int
    seed: int = 0

    def block(self, name: int | str, tokens: int) -> str:
        """Text of `tokens` tokens that begins with a space."""
        picked = random.Random(f"{self.seed}/{name}").choices(self.alphabet, k=tokens)
        return "".join(f" {word}" for word in picked)

    def text(self, arrival: Arrival) -> str:
        """The message of a prompt of `arrival.prompt` tokens, the template's included: at least one
        word. It begins with a word that no template can merge or strip."""
        left = max(1, arrival.prompt - self.template)
        parts = []
        for name, tokens in arrival.blocks:
            parts.append(self.block(name, min(tokens, left)))
            left -= min(tokens, left)
        parts.append(self.block(f"own {arrival.index}", left))
        return "".join(parts).lstrip()


def probe(count: Callable[[str], int], seed: int = 0) -> Words:
    """`count(text)`: tokens of a prompt whose one message is `text`. Raises LoadError."""
    start = CANDIDATES[0]
    base = count(start)
    found = []
    for word in CANDIDATES:
        if count(start + f" {word}" * REPEATS) - base == REPEATS:
            found.append(word)
        if len(found) == WORDS:
            break
    if len(found) < FEWEST:
        raise LoadError("no words of one token each were found: does the endpoint count usage?")
    return Words(tuple(found), base - 1, seed)
