"""Tokens become text: characters that span tokens, stop strings, several answers at once."""

from __future__ import annotations

import functools
import random
from pathlib import Path

import pytest
from diptych.cluster.gateway.attempt.request import AnswerUpdate, Request
from diptych.cluster.gateway.text.answers import AnswerTexts, Output, TextDelta
from diptych.cluster.gateway.text.tokenizer import ChatTokenizer
from diptych.engine.demo import CHECKPOINT
from diptych.protos import frames as f
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from tests.support.examples import examples

TEXTS = st.text(st.sampled_from("ab 日本👩‍👩‍👧‍👦🇩🇪é\n<"), max_size=12)


@functools.cache
def text() -> ChatTokenizer:
    return ChatTokenizer(CHECKPOINT)


@pytest.fixture(scope="module")
def byte_text(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return ChatTokenizer(byte_tokenizer(tmp_path_factory.mktemp("bytes")))


def run(
    answers: list[list[int]], output: Output, order: random.Random
) -> tuple[dict[int, list[TextDelta]], AnswerTexts, Request]:
    """Feeds all answers, in pieces of random sizes and in any order."""
    request = Request("r", [1], [], f.Sampling(99, n=len(answers), logprobs=0))
    made, left = AnswerTexts(request, text(), output), [list(ids) for ids in answers]
    got: dict[int, list[TextDelta]] = {index: [] for index in range(len(answers))}
    while any(left):
        index = order.choice([index for index, ids in enumerate(left) if ids])
        size = order.randint(1, 4)
        piece, left[index] = left[index][:size], left[index][size:]
        tokens = [f.Token(one, -0.5) for one in piece]
        finish = None if left[index] else "length"
        for delta in made.feed([AnswerUpdate(index, tokens, finish)]):
            got[delta.index].append(delta)
    return got, made, request


def said(deltas: list[TextDelta]) -> str:
    return "".join(delta.text for delta in deltas)


@settings(max_examples=examples(150))
@given(st.lists(TEXTS, min_size=1, max_size=3), st.randoms(use_true_random=False))
def test_answers_that_come_interleaved_come_out_whole(
    texts: list[str], order: random.Random
) -> None:
    ids = [text().encode(one + ".", add_special_tokens=False) for one in texts]
    got, made, request = run(ids, Output(), order)
    for index, whole in enumerate(texts):
        assert said(got[index]) == whole + "."
        assert not any("\ufffd" in delta.text for delta in got[index])
        assert [token.id for delta in got[index] for token in delta.tokens] == ids[index]
    assert made.used_tokens == sum(map(len, ids))
    assert not any(answer.stopped_early for answer in request.answers)


@settings(max_examples=examples(150))
@given(st.lists(st.integers(0, 1535), min_size=1, max_size=24), st.randoms(use_true_random=False))
def test_deltas_of_any_ids_are_the_text_of_all_of_them(
    ids: list[int], order: random.Random
) -> None:
    got, _, _ = run([ids], Output(stop_strings=("zebra",)), order)
    whole = text().tokenizer.decode(ids, skip_special_tokens=True)
    if "zebra" not in whole:
        assert said(got[0]) == whole
        assert [token.id for delta in got[0] for token in delta.tokens] == ids


@settings(max_examples=examples(200))
@given(
    TEXTS,
    TEXTS,
    st.sampled_from(["日本", "👩‍👧", " a", "b<", "\n"]),
    st.randoms(use_true_random=False),
)
@example(" ", "", "👩‍👧", random.Random(0))  # a token holds the space and bytes of the emoji
def test_a_stop_string_ends_one_answer_and_leaks_in_no_way(
    head: str, tail: str, stop: str, order: random.Random
) -> None:
    whole = head + stop + tail + "."
    before = whole[: whole.index(stop)]
    ids = [text().encode(one, add_special_tokens=False) for one in (whole, "other")]
    got, made, request = run(ids, Output(stop_strings=(stop,)), order)
    assert said(got[0]) == before and said(got[1]) == "other"
    assert (got[0][-1].finish_reason, got[0][-1].stop_string) == ("stop", stop)
    assert [answer.stopped_early for answer in request.answers] == [True, False]
    told = [token.id for delta in got[0] for token in delta.tokens]
    assert before.startswith(text().decode(told)), "logprobs tell of the stop string"
    used = made.used_tokens - len(ids[1])
    assert stop in text().decode(ids[0][:used]) and stop not in text().decode(ids[0][: used - 1])


@pytest.mark.parametrize("stops", [(), ("zebra",)])
@pytest.mark.parametrize("keep", [False, True])
def test_the_stop_token_counts_and_has_no_text(stops: tuple[str, ...], keep: bool) -> None:
    *words, end = text().encode("one two.", add_special_tokens=False)
    request = Request("r", [1], [], f.Sampling(99, stop_ids=(end,)))
    made = AnswerTexts(request, text(), Output(stops, keep))
    deltas = made.feed([AnswerUpdate(0, [f.Token(word) for word in words], None)])
    deltas += made.feed([AnswerUpdate(0, [f.Token(end)], "stop")])
    assert said(deltas) == ("one two." if keep else "one two")
    assert deltas[-1].finish_reason == "stop" and made.used_tokens == len(words) + 1
    assert [token.id for delta in deltas for token in delta.tokens] == [*words, end]


def test_stop_strings_count_behind_the_least_tokens() -> None:
    ids = text().encode("a stop, a stop.", add_special_tokens=False)
    place = next(i for i in range(len(ids)) if "stop" in text().decode(ids[:i]))
    got, _, _ = run([ids], Output(("stop",), min_tokens=place), random.Random(0))
    assert said(got[0]) == "a stop, a "


@pytest.mark.parametrize("min_tokens", range(8))
def test_a_stop_string_may_begin_within_the_least_tokens(min_tokens: int) -> None:
    """As in vLLM, it counts where it ends."""
    whole = "say END and END again"
    ids = text().encode(whole, add_special_tokens=False)
    ends = [
        count
        for count in range(min_tokens + 1, len(ids) + 1)
        if text().decode(ids[:count]).count("END") > text().decode(ids[: count - 1]).count("END")
    ]
    got, made, _ = run([ids], Output(("END",), min_tokens=min_tokens), random.Random(min_tokens))
    if not ends:
        assert said(got[0]) == whole
        return
    shown = text().decode(ids[: ends[0]])
    assert (said(got[0]), made.used_tokens) == (shown[: shown.rindex("END")], ends[0])
    assert got[0][-1].stop_string == "END"


def byte_tokenizer(folder: Path) -> Path:
    """Words and bytes, as Llama 2's: what is no word is its bytes."""
    words = ["<unk>", "</s>", "▁one", "▁two", "▁"]
    vocab = {word: i for i, word in enumerate([*words, *(f"<0x{i:02X}>" for i in range(256))])}
    made = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    made.add_special_tokens(["</s>"])
    made.save(str(folder / "tokenizer.json"))
    return folder


@settings(max_examples=examples(150))
@given(st.lists(st.integers(0, 260), max_size=24))
@example([2, 5 + 10, 5 + 0xE6, 3])  # an incomplete character behind a line break
@example([5 + 0xE6] * 24)
@example([2, *[1] * 5, *[5 + byte for byte in "👩".encode()], 2, 2])  # hidden ids count for nothing
@example([2, 5 + 0xE4, *[5 + byte for byte in ("你好" * 5).encode()], 2, 3])  # a stray byte
def test_any_bytes_come_out_as_text_and_in_time(byte_text: ChatTokenizer, ids: list[int]) -> None:
    stream = byte_text.detokenizer()
    deltas = [stream.feed([one]) for one in ids]
    whole = "".join(deltas) + stream.flush()
    expected = byte_text.tokenizer.decode(ids, skip_special_tokens=True)
    if "\ufffd" not in expected:
        assert whole == expected
    assert whole.replace("\ufffd", "").count("one") == ids.count(2)
    silent = "".join("x" if delta else "." for delta in deltas)
    assert "." * 12 not in silent or 1 in ids
    marked = byte_text.detokenizer(specials=True)
    assert "".join(map(marked.feed, [[2], [1], [2]])) == "one</s> one"
