"""Structured output: which ids may come next, by the library llguidance.

A matcher's state is a function of the grammar and the generated ids, so it is rebuilt from them
wherever a sequence goes on. Stop ids are allowed where the grammar may end, and only there.

llguidance matches a special token by its id alone. A text that spells one matches the ordinary
tokens of its letters.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from functools import cached_property
from pathlib import Path
from typing import Any

import llguidance
import numpy as np
from llguidance.gbnf_to_lark import any_to_lark

from ..protos.frames import Grammar
from .errors import InvalidRequest

#: So many grammars are kept compiled, the least recently used one goes first. That is more than the
#: sequences of an engine have, so that a grammar compiled for one is there when it is sampled.
COMPILED_LIMIT = 256

#: Characters of a grammar, at most: it bounds the time and the stack that compiling one takes.
TEXT_LIMIT = 64 << 10

#: Bytes of the stack on which a grammar is compiled. Rules that lead to rules recurse, with about
#: 5 KiB a step: 3,000 of them overflow the usual 8 MiB. These are room for 50,000 steps.
STACK_BYTES = 256 << 20

#: Keeps llguidance from repeating the grammar in its messages.
TERSE_ERRORS = llguidance.LLParserLimits(verbose_errors=False)

#: The kinds of `protos.frames.Grammar`.
KINDS = ("json_schema", "json_object", "regex", "lark", "ebnf", "structural_tag")

#: A regular expression of Lark for any text without special tokens.
ANY_TEXT = "/(?s:.*)/"


class GrammarCompiler:
    """Compiles grammars for one checkpoint, and keeps those used last. Any thread may call it.

    The checkpoint's tokenizer is read when the first grammar is compiled. `folder` is the
    checkpoint's, `vocab` the number of its ids, and `end_ids` are the ids that end an answer by the
    checkpoint's configuration.
    """

    def __init__(self, folder: Path, vocab: int, end_ids: tuple[int, ...]) -> None:
        self._folder = folder
        self._vocab = vocab
        self._end_ids = end_ids
        #: What came of each grammar, those used last at the end.
        self._compiled: OrderedDict[Grammar, llguidance.LLMatcher | InvalidRequest] = OrderedDict()
        self._lock = threading.Lock()
        self._tokenizer_lock = threading.Lock()

    @property
    def _tokenizer(self) -> llguidance.LLTokenizer:
        """The tokenizer. The lock makes the first callers wait for one reading of the file."""
        with self._tokenizer_lock:
            return self._read_tokenizer

    @cached_property
    def _read_tokenizer(self) -> llguidance.LLTokenizer:
        path = self._folder / "tokenizer.json"
        try:
            return llguidance.LLTokenizer(
                str(path), n_vocab=self._vocab, eos_token=list(self._end_ids) or None
            )
        except ValueError as error:
            raise InvalidRequest(f"no grammar can be used with this model: {error}") from None

    def matcher(self, grammar: Grammar, stop_ids: tuple[int, ...]) -> GrammarMatcher:
        """Return a matcher that has consumed no id yet.

        Compiles the grammar if that is not kept, which takes the calling thread's time. Raises
        InvalidRequest where the grammar, or the model's tokenizer, cannot be used.
        """
        compiled = self.prepare(grammar)
        if isinstance(compiled, InvalidRequest):
            raise compiled
        matcher = compiled.deep_copy()
        end_ids = tuple(self._tokenizer.eos_tokens)
        return GrammarMatcher(matcher, self._vocab, end_ids=end_ids, stop_ids=stop_ids)

    def is_prepared(self, grammar: Grammar) -> bool:
        """Return whether `matcher` need not compile the grammar any more."""
        return self._find(grammar) is not None

    def prepare(self, grammar: Grammar) -> llguidance.LLMatcher | InvalidRequest:
        """Compile the grammar if that is not kept; return what came of it, the error included.

        An error is kept too, so that a wrong grammar that comes again costs no time.
        """
        compiled = self._find(grammar)
        if compiled is not None:
            return compiled
        try:
            compiled = self._compile(grammar)
        except InvalidRequest as error:
            compiled = error
        with self._lock:
            self._compiled[grammar] = compiled
            if len(self._compiled) > COMPILED_LIMIT:
                self._compiled.popitem(last=False)
        return compiled

    def _find(self, grammar: Grammar) -> llguidance.LLMatcher | InvalidRequest | None:
        with self._lock:
            compiled = self._compiled.get(grammar)
            if compiled is not None:
                self._compiled.move_to_end(grammar)
            return compiled

    def _compile(self, grammar: Grammar) -> llguidance.LLMatcher:
        """Compile on a thread of its own, because only a new thread can have a larger stack.

        Raises InvalidRequest.
        """
        tokenizer = self._tokenizer
        source = _llguidance_source(grammar, tokenizer)
        if grammar.prefix:
            source = _with_prefix(source, grammar.prefix)
        compiled: list[llguidance.LLMatcher] = []

        def compile_source() -> None:
            matcher = llguidance.LLMatcher(tokenizer, source, log_level=0, limits=TERSE_ERRORS)
            compiled.append(matcher)

        thread = threading.Thread(target=compile_source, name="grammar", daemon=True)
        with self._lock:  # the size of stacks is one for all threads that are started
            usual_stack_bytes = threading.stack_size(STACK_BYTES)
            try:
                thread.start()
            finally:
                threading.stack_size(usual_stack_bytes)
        thread.join()
        (matcher,) = compiled
        if matcher.is_error():
            raise InvalidRequest(f"invalid grammar: {_first_causes(matcher.get_error())}")
        return matcher


def _llguidance_source(grammar: Grammar, tokenizer: llguidance.LLTokenizer) -> str:
    """Return the grammar in llguidance's own form, without its prefix. Raises InvalidRequest."""
    matcher_class = llguidance.LLMatcher
    text = grammar.text
    if len(text) > TEXT_LIMIT:
        raise InvalidRequest(f"invalid grammar: {len(text)} characters, more than {TEXT_LIMIT}")
    match grammar.kind:
        case "json_schema":
            try:
                # without this llguidance would read text behind the schema as its own language
                json.loads(text)
                return matcher_class.grammar_from_json_schema(text)
            except (ValueError, RecursionError) as error:
                reason = _first_causes(str(error))
                raise InvalidRequest(f"invalid grammar: not JSON: {reason}") from None
        case "json_object":
            return matcher_class.grammar_from_json_schema('{"type": "object"}')
        case "regex":
            return matcher_class.grammar_from_regex(text)
        case "lark":
            return matcher_class.grammar_from_lark(text)
        case "ebnf":
            return matcher_class.grammar_from_lark(_lark_of_ebnf(text))
        case "structural_tag":
            return matcher_class.grammar_from_lark(_lark_of_tags(json.loads(text), tokenizer))
    raise InvalidRequest(f"invalid grammar: {grammar.kind!r} is none of {', '.join(KINDS)}")


def _lark_of_ebnf(text: str) -> str:
    """Return a grammar in Lark, which is Lark already, or GBNF: EBNF as llama.cpp writes it.

    Raises InvalidRequest for what cannot be read as GBNF.
    """
    try:
        return any_to_lark(text)
    except Exception as error:  # a parser of texts: it also lets IndexError and KeyError out
        reason = f"neither Lark, which has a rule `start`, nor GBNF: {error}"
        raise InvalidRequest(f"invalid grammar: {_first_causes(reason)}") from None


def _lark_of_tags(tags: dict[str, Any], tokenizer: llguidance.LLTokenizer) -> str:
    """Return the Lark grammar of a text in which a trigger begins one of the structures.

    `tags` has `structures`, each with `begin`, `schema` and `end`, and the `trigger` that its begin
    begins with; `at_least_one` and `stop_after_first` bound how many of them come.
    """
    names = " | ".join(f"tag_{number}" for number in range(len(tags["structures"])))
    if tags["stop_after_first"]:
        start = f"({names})" if tags["at_least_one"] else f"({names}) | TEXT"
    else:
        start = f"({names})+ TEXT" if tags["at_least_one"] else f"({names})* TEXT"
    rules = [f"start: {start}", f"TEXT: {ANY_TEXT}"]
    for number, structure in enumerate(tags["structures"]):
        trigger = _whole_trigger(structure["begin"], structure["trigger"], tokenizer)
        first_term, *further_terms = _terms_of(trigger, tokenizer)
        begin = lark_terms(structure["begin"].removeprefix(trigger), tokenizer)
        end = lark_terms(structure["end"], tokenizer)
        if not first_term.startswith('"'):
            rules.append(f"trigger_{number}: TEXT {' '.join([first_term, *further_terms])}")
        elif not further_terms:
            # Lazy, so that no text in front of the structure has the trigger.
            rules.append(f"trigger_{number}[lazy]: TEXT {first_term}")
        else:
            # One terminal up to the special token, which alone ends it: TEXT by itself would take
            # the trigger's own text, and a lazy rule admits no special token.
            rules.append(f"HEAD_{number}: TEXT {first_term}")
            rules.append(f"trigger_{number}: HEAD_{number} {' '.join(further_terms)}")
        rules.append(f"tag_{number}: trigger_{number} {begin} schema_{number} {end}")
        rules.append(f"schema_{number}: %json {json.dumps(structure['schema'])}")
    return "\n".join(rules)


def _whole_trigger(begin: str, trigger: str, tokenizer: llguidance.LLTokenizer) -> str:
    """Return the trigger that `begin` begins with, longer if it ends inside of a special token.

    The text of such a trigger would never be there, as a model writes the token as a whole.
    """
    wanted_bytes = len(trigger.encode())
    text = b""
    for token_id in tokenizer.tokenize_str(begin, parse_special=True):
        if len(text) >= wanted_bytes:
            break
        text += tokenizer.decode_bytes([token_id])
        if tokenizer.is_special_token(token_id) and len(text) > wanted_bytes:
            # Tokens that take white space beside them have other bytes than the text.
            return text.decode() if begin.encode().startswith(text) else trigger
    return trigger


def lark_terms(text: str, tokenizer: llguidance.LLTokenizer) -> str:
    """Return Lark's terms for a text; its special tokens become `<[ID]>`. Empty for no text."""
    return " ".join(_terms_of(text, tokenizer))


def _terms_of(text: str, tokenizer: llguidance.LLTokenizer) -> list[str]:
    """Return Lark's terms for a text: JSON texts of what is ordinary, `<[ID]>` of what is not."""
    terms = []
    ordinary_ids: list[int] = []
    for token_id in [*tokenizer.tokenize_str(text, parse_special=True), None]:
        if token_id is not None and not tokenizer.is_special_token(token_id):
            ordinary_ids.append(token_id)
            continue
        if ordinary_ids:
            terms.append(json.dumps(tokenizer.decode_str(ordinary_ids)))
            ordinary_ids = []
        if token_id is not None:
            terms.append(f"<[{token_id}]>")
    return terms


def _with_prefix(source: str, prefix: str) -> str:
    """Return a grammar in which the Lark terms `prefix` stand in front of the one of `source`.

    Raises InvalidRequest for a text that llguidance would take for its own form, and is not.
    """
    if source.startswith("{"):
        try:
            answer, *others = json.loads(source)["grammars"]
            answer = {**answer, "name": "answer"}
        except (ValueError, LookupError, TypeError, RecursionError):
            raise InvalidRequest("invalid grammar: it is no grammar of ours") from None
    else:
        answer = {"name": "answer", "lark_grammar": source}
        others = []
    prefixed = {"name": "whole", "lark_grammar": f"start: {prefix} @answer"}
    return json.dumps({"grammars": [prefixed, answer, *others]})


def _first_causes(error: str) -> str:
    """Return the first line and the causes of llguidance's message, without the grammar in it."""
    lines = [line.strip() for line in error.split("\n") if line.strip()]
    causes = [line for line in lines if line.startswith("error:")]
    return " ".join(line[:150] for line in [*lines[:1], *causes])


class GrammarMatcher:
    """Where one answer stands in its grammar."""

    #: How many ids of the answer were consumed.
    consumed_tokens: int

    #: True if nothing but the end can follow.
    complete: bool

    #: Which ids may come next, bool [vocab].
    allowed: np.ndarray

    def __init__(
        self,
        matcher: llguidance.LLMatcher,
        vocab: int,
        *,
        end_ids: tuple[int, ...],
        stop_ids: tuple[int, ...],
    ) -> None:
        """`matcher` has consumed nothing; `vocab` is the number of the model's ids.

        `end_ids` are the tokenizer's, `stop_ids` the request's.

        Only stop ids end an answer: an end id that is none of them is never allowed. Raises
        InvalidRequest where the grammar admits nothing.
        """
        self._matcher = matcher
        self._vocab = vocab
        self._end_ids = [end_id for end_id in end_ids if end_id < vocab]
        self._stop_ids = [stop_id for stop_id in stop_ids if 0 <= stop_id < vocab]
        self.consumed_tokens = 0
        self._update()

    def consume(self, token_ids: list[int]) -> None:
        """Advance by the next ids of the answer. Raises InvalidRequest where these do not fit."""
        self.consumed_tokens += len(token_ids)
        if not self._matcher.consume_tokens(token_ids):
            error = _first_causes(self._matcher.get_error())
            raise InvalidRequest(f"the answer left its grammar: {error}")
        self._update()

    def _update(self) -> None:
        """Work out what may come next. Raises InvalidRequest where nothing may."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            error = _first_causes(self._matcher.get_error())
            raise InvalidRequest(f"the grammar admits no id here: {error}")
        allowed = np.unpackbits(bits, count=self._vocab, bitorder="little").view(bool)
        allowed[self._end_ids] = False
        allowed[self._stop_ids] = False
        may_end = self._matcher.is_accepting()
        self.complete = may_end and (self._matcher.is_stopped() or not allowed.any())
        allowed[self._stop_ids] = may_end
        self.allowed = allowed
