"""Texts of a given number of tokens, with shared prefixes, for a tokenizer that is not known.

`probe` finds words that are one token each when they follow a space, by the prompt tokens that the
endpoint itself counts. A text is then words of that alphabet, one per token. A block's words are a
function of (seed, block id), so equal ids are equal tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from .arrivals import Arrival
from .errors import LoadError

#: short words that most tokenizers have as one token
CANDIDATES = [
    "the",
    "a",
    "of",
    "to",
    "and",
    "is",
    "in",
    "it",
    "that",
    "for",
    "on",
    "with",
    "as",
    "are",
    "be",
    "this",
    "can",
    "one",
    "not",
    "from",
    "by",
    "at",
    "or",
    "an",
    "each",
    "when",
    "what",
]
START = CANDIDATES[0]
REPEATS = 8  #: a candidate is judged by the tokens that so many of it add
ENOUGH_WORDS = 12  #: after so many found words the search ends: each one costs a request
FEWEST_WORDS = 2  #: with one word alone all prompts would be alike, and cached


@dataclass(frozen=True, slots=True)
class Words:
    """Makes texts of known length; equal seeds and names make equal texts.

    Every message begins with `START`: without a space in front, a word may be any number of tokens.
    """

    alphabet: tuple[str, ...]  #: words of one token each behind a space
    #: Tokens of a prompt whose message is `START` alone; all but one come from the chat template.
    template: int
    seed: int = 0

    def block(self, name: int | str, tokens: int) -> str:
        """Returns a text of `tokens` tokens that begins with a space; `name` decides the words."""
        words = random.Random(f"{self.seed}/{name}").choices(self.alphabet, k=tokens)
        return "".join(f" {word}" for word in words)

    def text(self, arrival: Arrival) -> str:
        """Returns a message whose prompt has the arrival's `prompt_tokens` by the chat template."""
        tokens_left = max(0, arrival.prompt_tokens - self.template)
        parts = [START]
        for name, tokens in arrival.blocks:
            block_tokens = min(tokens, tokens_left)
            parts.append(self.block(name, block_tokens))
            tokens_left -= block_tokens
        parts.append(self.block(f"own {arrival.index}", tokens_left))
        return "".join(parts)

    def message(self, name: str, tokens: int) -> str:
        """Returns a message of about `tokens` tokens, the first of which is `START`."""
        return START + self.block(name, tokens - 1)


def probe(count_tokens: Callable[[str], int], seed: int = 0) -> Words:
    """Finds words that are one token each.

    `count_tokens(text)` counts the tokens of a prompt whose one message is `text`. Raises
    LoadError.
    """
    template = count_tokens(START)
    alphabet: list[str] = []
    for word in CANDIDATES:
        if count_tokens(START + f" {word}" * REPEATS) - template == REPEATS:
            alphabet.append(word)
        if len(alphabet) == ENOUGH_WORDS:
            break
    if len(alphabet) < FEWEST_WORDS:
        raise LoadError("no words of one token each were found: does the endpoint count usage?")
    return Words(tuple(alphabet), template, seed)
