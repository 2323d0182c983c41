"""Structured output: what a grammar admits comes, nothing else, and it ends where it may."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import jsonschema
import msgspec
import pytest
import torch
from diptych.engine.engine import Engine
from diptych.engine.errors import InvalidRequest
from diptych.engine.grammar import GrammarCompiler
from diptych.engine.sampler import SamplingFault, sample_tokens
from diptych.engine.sequence import Sequence, SequenceOutput
from diptych.protos.frames import Grammar, Sampling, Token
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tests.support.checkpoints import VOCAB

from .rig import alone, drain, engine, prompt, request

END, STOP = 1, 3  #: the checkpoint's end id, and one more that a request may name
BYTES = range(5, 261)  #: ids that decode to something
DRAWN = Sampling(60, 1.0, 1, (END,), logprobs=2)


@pytest.fixture
def llama(checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint("llama")


@pytest.fixture
def owner(llama: Path) -> Engine:
    return engine(llama)


@pytest.fixture
def grammars(llama: Path) -> GrammarCompiler:
    return GrammarCompiler(llama, VOCAB, (END,))


def answer(
    owner: Engine, grammar: Grammar, sampling: Sampling = DRAWN, seed: int = 1
) -> tuple[str, SequenceOutput]:
    """The text without stop ids, and the last output."""
    ask = msgspec.structs.replace(sampling, grammar=grammar, seed=seed)
    owner.add(request(owner, "r", prompt(20), ask))
    streams, outputs = drain(owner)
    ids = [token.id for token in streams.get("r", []) if token.id not in ask.stop_ids]
    assert set(ids) <= set(BYTES)
    decoder = Tokenizer.from_file(str(owner.options.model_folder / "tokenizer.json"))
    return decoder.decode(ids), outputs[-1]


def allowed(
    grammars: GrammarCompiler, grammar: Grammar, text: str, stops: tuple[int, ...]
) -> set[int]:
    matcher = grammars.matcher(grammar, stops)
    matcher.consume([ord(char) - ord("!") + 5 for char in text])
    return set(matcher.allowed.nonzero()[0].tolist())


def ids(text: str) -> set[int]:
    return {ord(char) - ord("!") + 5 for char in text}


# ---- what may come -------------------------------------------------------------------------------


def test_only_what_continues_the_grammar_is_allowed(grammars: GrammarCompiler) -> None:
    word = Grammar("regex", "ab+c")
    assert allowed(grammars, word, "", (END,)) == ids("a")
    assert allowed(grammars, word, "a", (END,)) == ids("b")
    assert allowed(grammars, word, "ab", (END,)) == ids("bc")
    assert allowed(grammars, word, "abc", (END,)) == {END}


@pytest.mark.parametrize("stops", [(), (END,), (STOP,), (END, STOP), (STOP, 400, 9999)])
def test_stop_ids_are_allowed_where_it_may_end_and_only_there(
    grammars: GrammarCompiler, stops: tuple[int, ...]
) -> None:
    word = Grammar("regex", "ab*")
    assert allowed(grammars, word, "", stops) == ids("a")
    assert allowed(grammars, word, "ab", stops) == ids("b") | (set(stops) - {9999})


def test_a_stop_id_that_is_also_text_only_ends(grammars: GrammarCompiler) -> None:
    (b,) = ids("b")
    assert allowed(grammars, Grammar("regex", "ab?b?c"), "a", (b,)) == ids("c")
    assert allowed(grammars, Grammar("regex", "a(bc)?"), "a", (b,)) == {b}
    matcher = grammars.matcher(Grammar("regex", "a(bc)?"), (b,))
    matcher.consume(sorted(ids("a")))
    assert matcher.complete


@pytest.mark.parametrize(("text", "complete"), [("a", False), ("aa", False), ("aaa", True)])
def test_complete_is_a_grammar_that_admits_nothing_more(
    grammars: GrammarCompiler, text: str, complete: bool
) -> None:
    matcher = grammars.matcher(Grammar("regex", "a{1,3}"), ())
    matcher.consume(sorted(ids("a")) * len(text))
    assert matcher.complete is complete


def test_ids_behind_the_tokenizer_never_come(grammars: GrammarCompiler) -> None:
    assert max(allowed(grammars, Grammar("regex", "(?s:.*)"), "", ())) < 261


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("ebnf", 'root ::= "a" word*\nword ::= [b-c]'),
        Grammar("ebnf", "start: /a[bc]*/"),
    ],
)
def test_ebnf_is_gbnf_or_lark(grammars: GrammarCompiler, grammar: Grammar) -> None:
    assert allowed(grammars, grammar, "", (END,)) == ids("a")
    assert allowed(grammars, grammar, "ab", (END,)) == ids("bc") | {END}


@pytest.mark.parametrize(
    ("at_least_one", "stop_after_first", "admitted"),
    [
        (False, False, ["", "x", "x<f=a>null</f>y", "<f=a>null</f><f=b>1</f>"]),
        (True, False, ["x<f=a>null</f>y", "<f=a>null</f><f=b>1</f>"]),
        (False, True, ["", "x", "x<f=a>null</f>"]),
        (True, True, ["x<f=a>null</f>"]),
    ],
)
def test_a_trigger_begins_a_structure(
    grammars: GrammarCompiler, at_least_one: bool, stop_after_first: bool, admitted: list[str]
) -> None:
    structures = [
        {"trigger": "<f=", "begin": "<f=a>", "schema": {"type": "null"}, "end": "</f>"},
        {"trigger": "<f=", "begin": "<f=b>", "schema": {"enum": [1]}, "end": "</f>"},
    ]
    tags = {
        "structures": structures,
        "at_least_one": at_least_one,
        "stop_after_first": stop_after_first,
    }
    grammar = Grammar("structural_tag", json.dumps(tags))
    texts = ["", "x", "x<f=a>null</f>", "x<f=a>null</f>y", "<f=a>null</f><f=b>1</f>"]
    for text in [*texts, "<f=c>", "<f=a>1</f>", "<f=a>null</g>"]:
        try:
            may_end = END in allowed(grammars, grammar, text, (END,))
        except InvalidRequest:
            may_end = False
        assert may_end is (text in admitted or text == "x<f=a>null</f>"), text


def with_special(folder: Path, *tokens: str) -> tuple[GrammarCompiler, Tokenizer]:
    """The checkpoint with further special tokens, as far as its vocabulary has room."""
    path = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_special_tokens([*tokens])
    tokenizer.save(str(path))
    vocab = max(VOCAB, tokenizer.get_vocab_size())
    return GrammarCompiler(folder, vocab, (END,)), tokenizer


@pytest.mark.parametrize(
    ("trigger", "begin"),
    [
        ("\n<call>", "\n<call>"),
        ("\n<call>[", "\n<call>["),
        ("\n<call>", "\n<call>["),
        ("\n<ca", "\n<call>"),
        ("\n<[<call>", "\n<[<call>"),
        ("\n<[", "\n<[x]>"),
        ("<ca", "<call>["),
        ("<call>", "<call>["),
        ("<call>[", "<call>["),
    ],
)
@pytest.mark.parametrize("at_least_one", [False, True])
def test_a_trigger_may_have_a_special_token(
    llama: Path, trigger: str, begin: str, at_least_one: bool
) -> None:
    compiler, tokenizer = with_special(llama, "<call>", "</call>")
    tag = {"trigger": trigger, "begin": begin, "schema": {"type": "null"}, "end": "</call>"}
    other = {"trigger": "<f=", "begin": "<f=a>", "schema": {"enum": [1]}, "end": "</f>"}
    tags = {"structures": [tag, other], "at_least_one": at_least_one, "stop_after_first": False}
    grammar = Grammar("structural_tag", json.dumps(tags))

    def may_end_behind(text: str) -> bool:
        matcher = compiler.matcher(grammar, (END,))
        for token_id in tokenizer.encode(text, add_special_tokens=False).ids:
            if not matcher.allowed[token_id]:
                return False
            matcher.consume([token_id])
        return bool(matcher.allowed[END])

    structure = f"{begin}null</call>"
    assert may_end_behind(structure)
    assert may_end_behind(f"a\n\nb{structure}c{structure}")
    assert may_end_behind(f"a{structure}b<f=a>1</f>{structure}c")
    assert may_end_behind("a\nb\n") is not at_least_one
    assert not may_end_behind(f"a{begin}1</call>")
    assert not may_end_behind(f"a{begin}null")
    if begin.startswith("\n"):
        assert not may_end_behind(f"a{structure.removeprefix(chr(10))}")


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("json_schema", '{"const": "b"}'),
        Grammar("regex", '"b"'),
        Grammar("lark", 'start: "\\"b\\""'),
        Grammar("ebnf", 'root ::= "\\"b\\""'),
    ],
)
def test_a_prefix_stands_in_front_of_any_grammar(
    grammars: GrammarCompiler, grammar: Grammar
) -> None:
    (z,) = ids("z")
    prefixed = msgspec.structs.replace(grammar, prefix=f"(<[{z}]> /a*/ <[{z}]>)?")
    assert allowed(grammars, prefixed, "", (END,)) == ids('z"')
    assert allowed(grammars, prefixed, "z", (END,)) == ids("az")
    assert allowed(grammars, prefixed, "zaaz", (END,)) == ids('"')
    assert allowed(grammars, prefixed, 'zz"b"', (END,)) == {END}


# ---- answers -------------------------------------------------------------------------------------


SCHEMAS = [
    {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]},
    {"type": "array", "items": {"enum": ["x", 1, None]}, "minItems": 2, "maxItems": 4},
    {"type": "string", "minLength": 3, "maxLength": 9},
    {"type": "string", "pattern": "^[a-f]{4}-[0-9]{2}$"},
    {"type": "integer", "minimum": 10, "maximum": 4000},
    {"anyOf": [{"const": "é€"}, {"type": "null"}]},
    {
        "type": "object",
        "properties": {
            "who": {"type": "string", "maxLength": 5},
            "at": {"$ref": "#/$defs/point"},
        },
        "required": ["who", "at"],
        "additionalProperties": False,
        "$defs": {
            "point": {
                "type": "object",
                "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}},
                "required": ["x"],
                "additionalProperties": False,
            }
        },
    },
]


def closed(schema: dict) -> Grammar:
    """No other properties and no white space without end, so that answers are short."""
    limits = {"whitespace_flexible": False}
    schema = {"additionalProperties": False, **schema, "x-guidance": limits}
    return Grammar("json_schema", json.dumps(schema))


@pytest.mark.parametrize("temperature", [0.0, 1.0, 1.8])
@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: json.dumps(schema)[:40])
def test_answers_parse_and_validate(owner: Engine, schema: dict, temperature: float) -> None:
    for seed in range(4):
        sampling = msgspec.structs.replace(DRAWN, max_tokens=200, temperature=temperature)
        text, last = answer(owner, closed(schema), sampling, seed)
        assert last.finish_reason == "stop", (text, last)
        jsonschema.validate(json.loads(text), schema)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_objects_of_random_schemas_validate(owner: Engine, data: st.DataObject) -> None:
    plain = [{"type": "boolean"}, {"type": "null"}, {"enum": ["a", "b\\", 'c"']}]
    integer = {"type": "integer", "minimum": -5, "maximum": 50}
    leaf = st.sampled_from([*plain, integer, {"type": "string", "maxLength": 4}])

    def wider(inner: st.SearchStrategy) -> st.SearchStrategy:
        array = st.builds(lambda items: {"type": "array", "items": items, "maxItems": 2}, inner)
        fields = st.dictionaries(st.sampled_from("pqr"), inner, min_size=1)
        return array | fields.map(
            lambda properties: {
                "type": "object",
                "properties": properties,
                "required": list(properties),
                "additionalProperties": False,
            }
        )

    schema = data.draw(st.recursive(leaf, wider, max_leaves=4))
    sampling = msgspec.structs.replace(DRAWN, max_tokens=500, temperature=1.3)
    text, last = answer(owner, closed(schema), sampling, data.draw(st.integers(0, 1000)))
    assert last.finish_reason == "stop"
    jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        (Grammar("regex", "[0-9]{3}(-[xyz]+)?"), "[0-9]{3}(-[xyz]+)?"),
        (Grammar("lark", 'start: "<" WORD ("," WORD)* ">"\nWORD: /[a-c]{1,4}/'), "<.*>"),
        (Grammar("json_object"), r"\{.*"),
    ],
)
def test_other_grammars_are_followed(owner: Engine, grammar: Grammar, pattern: str) -> None:
    for seed in range(5):
        text, last = answer(owner, grammar, msgspec.structs.replace(DRAWN, max_tokens=300), seed)
        assert last.finish_reason in ("stop", "length")
        assert last.finish_reason == "length" or re.fullmatch(pattern, text, re.S), text
        if last.finish_reason == "stop" and grammar.kind == "json_object":
            assert isinstance(json.loads(text), dict)


def test_a_complete_answer_stops_with_its_last_id_and_costs_no_end_id(owner: Engine) -> None:
    for stops in ((END,), ()):
        ask = msgspec.structs.replace(DRAWN, stop_ids=stops, grammar=Grammar("regex", "(yes|no)!"))
        owner.add(request(owner, "r", prompt(20), ask))
        streams, outputs = drain(owner)
        assert outputs[-1].finish_reason == "stop"
        assert len(streams["r"]) in (3, 4)
        assert owner.scheduler.pool.used_blocks == 0


def test_min_tokens_holds_back_the_end_of_a_grammar_that_can_go_on(owner: Engine) -> None:
    for least in (0, 10):
        ask = msgspec.structs.replace(DRAWN, min_tokens=least, logit_bias=((END, 100.0),))
        text, last = answer(owner, Grammar("regex", "[ab]*"), ask)
        assert (len(text), last.finish_reason) == (least, "stop")


def test_a_grammar_changes_neither_logprobs_nor_neighbours(owner: Engine, llama: Path) -> None:
    free = msgspec.structs.replace(DRAWN, max_tokens=1)
    bound = msgspec.structs.replace(free, grammar=Grammar("regex", "zzz"))
    (plain,), (held,) = (alone(engine(llama), prompt(20), ask) for ask in (free, bound))
    assert held.top == plain.top and {held.id} == ids("z")
    for index in range(3):
        owner.add(request(owner, f"n{index}", prompt(20 + index), DRAWN))
    owner.add(request(owner, "bound", prompt(20), bound))
    streams, _ = drain(owner)
    for index in range(3):
        assert streams[f"n{index}"] == alone(engine(llama), prompt(20 + index), DRAWN)


def test_a_grammar_that_ends_with_the_first_id_ends_a_prefill(owner: Engine) -> None:
    ask = Sampling(9, grammar=Grammar("regex", "[xy]"))
    owner.add(request(owner, "r", prompt(20), ask, first_only=True))
    (output,) = drain(owner)[1]
    assert output.finish_reason == "stop"


# ---- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grammar", "word"),
    [
        (Grammar("regex", "a["), "unclosed character class"),
        (Grammar("lark", "start: foo"), "foo"),
        (Grammar("json_schema", "{nope"), "not JSON"),
        (Grammar("json_schema", '{}, "x": {}'), "not JSON"),
        (Grammar("json_schema", "[" * 60_000), "not JSON"),
        (Grammar("json_schema", '{"items": ' * 900 + "{}" + "}" * 900), "recursion"),
        (Grammar("regex", "(" * 20_000 + ")" * 20_000), "nest"),
        (Grammar("regex", "a" * 70_000), "70000 characters"),
        (Grammar("json_schema", '{"type": "objct"}'), "objct"),
        (Grammar("json_schema", '{"type": "string", "minLength": 5, "maxLength": 3}'), "minLength"),
        (Grammar("gbnf", "root ::= x"), "gbnf"),
        (Grammar("ebnf", "root ::= x"), "Rule 'x' not found"),
        (Grammar("ebnf", 'root ::= "'), "neither Lark, which has a rule `start`, nor GBNF"),
        (Grammar("ebnf", "root ::= " + "(" * 5000), "recursion"),
        (Grammar("lark", '{"grammars": []}', "/a/"), "no grammar of ours"),
    ],
)
def test_an_invalid_grammar_is_an_error_that_says_what_is_wrong(
    owner: Engine, grammar: Grammar, word: str
) -> None:
    text, last = answer(owner, grammar)
    assert text == "" and last.finish_reason is None
    assert last.error and last.error.startswith("invalid grammar: ") and word in last.error
    assert len(last.error) < 400 and "\n" not in last.error
    assert owner.scheduler.pool.used_blocks == 0
    assert answer(owner, Grammar("regex", "ok"))[0] == "ok"


def test_a_grammar_that_nothing_follows_is_an_error(owner: Engine) -> None:
    last = answer(owner, Grammar("lark", "start: A\nA: /a+/ & /b+/"))[1]
    assert last.error == "the grammar admits no id here: NoExtensionBias"


def test_rules_that_lead_to_rules_do_not_overflow_the_stack(grammars: GrammarCompiler) -> None:
    count = 4500
    rules = "\n".join(f"r{index}: r{index + 1}" for index in range(count))
    grammar = Grammar("lark", f'start: r0\n{rules}\nr{count}: "a"')
    assert allowed(grammars, grammar, "", ()) == ids("a")
    assert allowed(grammars, grammar, "a", (END,)) == {END}


def test_ids_that_left_the_grammar_are_an_error(grammars: GrammarCompiler) -> None:
    seq = Sequence(("r", 0), [5, 6, 7], 1, Sampling(9, grammar=Grammar("regex", "ab")))
    (fault,) = sample_tokens(torch.zeros(1, VOCAB), [seq], grammars)
    assert isinstance(fault, SamplingFault) and not fault.model_damaged
    assert "the answer left its grammar" in fault.reason and "\n" not in fault.reason


def test_without_a_tokenizer_only_requests_with_a_grammar_fail(tmp_path: Path) -> None:
    grammars = GrammarCompiler(tmp_path, VOCAB, (END,))
    plain = Sequence(("a", 0), [5], 1, Sampling(9))
    bound = Sequence(("b", 0), [5], 1, Sampling(9, grammar=Grammar("json_object")))
    token, fault = sample_tokens(torch.zeros(2, VOCAB), [plain, bound], grammars)
    assert token == Token(0)
    assert isinstance(fault, SamplingFault) and "tokenizer.json" in fault.reason
    with pytest.raises(InvalidRequest, match=r"tokenizer\.json"):
        grammars.matcher(Grammar("json_object"), ())
