"""Structured output: which ids may come next, by llguidance.

A matcher's state is a function of the grammar and the generated ids, so it is rebuilt from them
wherever a sequence goes on. Stop ids are allowed where the grammar may end, and only there.
"""

from __future__ import annotations

import json
import threading
from functools import cached_property, lru_cache
from pathlib import Path

import llguidance
import numpy as np

from ..protos.frames import Grammar
from .errors import InvalidRequest

COMPILED = 64  #: grammars that are kept compiled
TEXT_MAX = 64 << 10  #: characters of a grammar
STACK = 256 << 20  #: bytes: rules that lead to rules recurse, ~5 KiB a step; 3,000 overflow 8 MiB
TERSE = llguidance.LLParserLimits(verbose_errors=False)


class Grammars:
    """The grammars of one checkpoint; its tokenizer is read when the first one is asked for."""

    def __init__(self, folder: Path, vocab: int, ends: tuple[int, ...]) -> None:
        self._folder, self._vocab, self._ends = folder, vocab, ends
        self._compiled = lru_cache(COMPILED)(self._compile)

    @cached_property
    def _tokenizer(self) -> llguidance.LLTokenizer:
        path = self._folder / "tokenizer.json"
        try:
            ends = list(self._ends) or None
            return llguidance.LLTokenizer(str(path), n_vocab=self._vocab, eos_token=ends)
        except ValueError as error:
            raise InvalidRequest(f"no grammar can be used with this model: {error}") from None

    def matcher(self, grammar: Grammar, stop_ids: tuple[int, ...]) -> Matcher:
        """A matcher before the first id. Raises InvalidRequest."""
        matcher = self._compiled(grammar).deep_copy()
        return Matcher(matcher, self._vocab, tuple(self._tokenizer.eos_tokens), stop_ids)

    def _compile(self, grammar: Grammar) -> llguidance.LLMatcher:
        tokenizer, made = self._tokenizer, []
        source = _source(grammar)

        def compile_it() -> None:
            made.append(llguidance.LLMatcher(tokenizer, source, log_level=0, limits=TERSE))

        thread = threading.Thread(target=compile_it, name="grammar")
        before = threading.stack_size(STACK)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
        thread.join()
        if made[0].is_error():
            raise InvalidRequest(f"invalid grammar: {_first(made[0].get_error())}")
        return made[0]


def _source(grammar: Grammar) -> str:
    """The grammar in llguidance's own form. Raises InvalidRequest."""
    make, text = llguidance.LLMatcher, grammar.text
    if len(text) > TEXT_MAX:
        raise InvalidRequest(f"invalid grammar: {len(text)} characters, more than {TEXT_MAX}")
    match grammar.kind:
        case "json_schema":
            try:
                json.loads(text)  # or what is behind its end would be read as llguidance's own
                return make.grammar_from_json_schema(text)
            except (ValueError, RecursionError) as error:
                raise InvalidRequest(f"invalid grammar: not JSON: {_first(str(error))}") from None
        case "json_object":
            return make.grammar_from_json_schema('{"type": "object"}')
        case "regex":
            return make.grammar_from_regex(text)
        case "lark":
            return make.grammar_from_lark(text)
    kinds = "json_schema, json_object, regex, lark"
    raise InvalidRequest(f"invalid grammar: {grammar.kind!r} is none of {kinds}")


def _first(error: str) -> str:
    """What llguidance says first, without the grammar that it repeats."""
    lines = [line.strip() for line in error.split("\n") if line.strip()]
    causes = [line for line in lines if line.startswith("error:")]
    return " ".join(line[:150] for line in [*lines[:1], *causes])


class Matcher:
    """Where one answer stands in its grammar. `fed`: how many ids it has seen."""

    def __init__(
        self, matcher: llguidance.LLMatcher, vocab: int, ends: tuple[int, ...], stops: tuple
    ) -> None:
        self._matcher, self._vocab = matcher, vocab
        self._ends = [end for end in ends if end < vocab]
        self._stops = [stop for stop in stops if 0 <= stop < vocab]
        self.fed = 0
        self._look()

    def feed(self, ids: list[int]) -> None:
        """Takes the next ids of the answer. Raises InvalidRequest."""
        self.fed += len(ids)
        if not self._matcher.consume_tokens(ids):
            error = _first(self._matcher.get_error())
            raise InvalidRequest(f"the answer left its grammar: {error}")
        self._look()

    def _look(self) -> None:
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            error = _first(self._matcher.get_error())
            raise InvalidRequest(f"the grammar admits no id here: {error}")
        allowed = np.unpackbits(bits, count=self._vocab, bitorder="little").view(bool)
        allowed[self._ends] = False
        allowed[self._stops] = False
        may_end = self._matcher.is_accepting()
        #: nothing but the end can follow
        self.complete = may_end and (self._matcher.is_stopped() or not allowed.any())
        allowed[self._stops] = may_end
        self.allowed = allowed  #: bool [vocab]
