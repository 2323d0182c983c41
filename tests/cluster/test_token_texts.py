"""What logprobs say of the places, the labels and the bytes of tokens.

Two kinds of tokenizers are tried: the demo's byte-level one, and one with the decoder of Llama 2,
whose tokens are words behind a mark, and single bytes by their names.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from diptych.cluster.gateway.apis.chat_shape import logprobs_object
from diptych.cluster.gateway.apis.completions import CompletionRequest, CompletionShape
from diptych.cluster.gateway.apis.response_shape import _TextTokens
from diptych.cluster.gateway.apis.schema import parse_body
from diptych.cluster.gateway.attempt.request import Request
from diptych.cluster.gateway.text.answers import TextDelta
from diptych.cluster.gateway.text.detokenizer import INCOMPLETE_IDS_MAX, LibraryDetokenizer
from diptych.cluster.gateway.text.tokenizer import ChatTokenizer
from diptych.engine.demo import CHECKPOINT
from diptych.protos import frames
from tokenizers import AddedToken, Tokenizer, decoders, models

WORDS = ["<unk>", "▁hello", "▁world", "▁foo", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>", "world"]
END = len(WORDS)  #: The id of a special token.
LLAMA_IDS = [1, 2, 3, 4, 5, 6, 7, 2]
LLAMA_TEXT = "hello world foo😀 world"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    """A tokenizer with the decoder of Llama 2, Mistral 7B, TinyLlama and Phi-3."""
    vocabulary = {word: token_id for token_id, word in enumerate(WORDS)}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    folder = tmp_path_factory.mktemp("llama")
    tokenizer.save(str(folder / "tokenizer.json"))
    return ChatTokenizer(folder)


@pytest.fixture(scope="module")
def demo() -> Iterator[ChatTokenizer]:
    tokenizer = ChatTokenizer(CHECKPOINT)
    yield tokenizer
    tokenizer.close()


class GappyTokenizer:
    """Ids from 100 on are holes of its vocabulary, which have no text."""

    def __init__(self) -> None:
        self.longest = 0  #: The most ids that it was given at a time.

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        self.longest = max(self.longest, len(token_ids))
        return "".join(chr(ord("a") + token_id) for token_id in token_ids if token_id < 100)


def test_ids_without_text_are_not_decoded_ever_again() -> None:
    tokenizer = GappyTokenizer()
    detokenizer = LibraryDetokenizer(tokenizer, frozenset())  # type: ignore[arg-type]
    text = detokenizer.feed([0, 1, *range(100, 5100), 2, 3]) + detokenizer.flush()
    assert text == "abcd"
    assert tokenizer.longest <= 2 * INCOMPLETE_IDS_MAX + 2


def completion(**fields: Any) -> CompletionRequest:
    return parse_body(
        CompletionRequest, json.dumps({"prompt": [1], "logprobs": 0, **fields}).encode()
    )


def shape_of(
    body: CompletionRequest, tokenizer: ChatTokenizer, prompt_ids: list[int]
) -> CompletionShape:
    request = Request("r", prompt_ids, [], frames.Sampling(max_tokens=99))
    request.prompt_logprobs = [frames.ScoredToken(one, -0.5) for one in prompt_ids[1:]]
    return CompletionShape(body, [request], tokenizer, model="m", call_id="r")


def choice_of(
    tokenizer: ChatTokenizer, token_ids: list[int], prompt_ids: list[int], **fields: Any
) -> dict[str, Any]:
    """Return the choice of a whole answer of these ids."""
    body = completion(**fields)
    detokenizer = tokenizer.detokenizer(specials=not body.skip_special_tokens)
    text = detokenizer.feed(token_ids) + detokenizer.flush()
    tokens = [frames.Token(token_id, -0.5) for token_id in token_ids]
    delta = TextDelta(0, text, tokens, "length")
    shape = shape_of(body, tokenizer, prompt_ids)
    choice: dict[str, Any] = shape.whole([delta], len(tokens))["choices"][0]
    return choice


def test_offsets_count_the_characters_of_a_text_whose_tokens_are_parts_of_them(
    demo: ChatTokenizer,
) -> None:
    text = "😀 ok 你好 fine"
    token_ids = demo.encode(text, add_special_tokens=False)
    choice = choice_of(demo, token_ids, [1])
    assert choice["text"] == text
    offsets = choice["logprobs"]["text_offset"]
    tokens = [demo.token_text(token_id) for token_id in token_ids]
    assert tokens[:2] == ["\ufffd", "\ufffd"] and offsets[:2] == [0, 0]
    assert offsets == sorted(offsets) and offsets[-1] == len(text) - len(tokens[-1])
    for offset, token in zip(offsets, tokens, strict=True):
        assert "\ufffd" in token or text[offset:].startswith(token)


def test_offsets_count_the_spaces_that_a_token_alone_does_not_have(llama: ChatTokenizer) -> None:
    choice = choice_of(llama, LLAMA_IDS, [1])
    assert choice["text"] == LLAMA_TEXT
    assert choice["logprobs"]["text_offset"] == [0, 5, 11, 15, 15, 15, 15, 16]


def test_offsets_of_a_stream_go_on_from_chunk_to_chunk(llama: ChatTokenizer) -> None:
    shape = shape_of(completion(), llama, [1])
    offsets = []
    for token_id, text in ((1, "hello"), (2, " world"), (3, " foo")):
        delta = TextDelta(0, text, [frames.Token(token_id, -0.5)])
        [chunk] = shape.delta(delta)
        offsets += chunk["choices"][0]["logprobs"]["text_offset"]
    assert offsets == [0, 5, 11]


def test_offsets_behind_an_echo_begin_where_the_answer_does(llama: ChatTokenizer) -> None:
    choice = choice_of(llama, [1, 2], [1, 4, 5, 6, 7, 2, END], echo=True)
    assert choice["text"] == "hello😀 world</s>hello world"
    assert choice["logprobs"]["text_offset"] == [0, 5, 5, 5, 5, 6, 12, 16, 21]


@pytest.mark.parametrize("shown", [True, False])
def test_offsets_count_special_tokens_only_where_they_are_text(
    llama: ChatTokenizer, shown: bool
) -> None:
    choice = choice_of(llama, [1, END, 8], [1], skip_special_tokens=not shown)
    last = choice["logprobs"]["text_offset"][-1]
    assert choice["text"][last:] == "world"


def test_of_tokens_of_one_label_the_chosen_one_and_then_the_likeliest_counts(
    demo: ChatTokenizer, llama: ChatTokenizer
) -> None:
    """Each byte of an emoji is called the same, and so are "▁world" and "world"."""
    emoji = demo.encode("😀", add_special_tokens=False)
    other = demo.encode("x", add_special_tokens=False)[0]
    for tokenizer, chosen, top, expected in (
        (demo, emoji[0], [(emoji[0], -0.1), (emoji[1], -3.0), (emoji[2], -4.0)], {"\ufffd": -0.1}),
        (demo, other, [(emoji[1], -0.5), (emoji[2], -4.0)], {"x": -0.1, "\ufffd": -0.5}),
        (llama, 8, [(2, -0.05), (8, -0.1)], {"world": -0.1}),
    ):
        token = frames.Token(chosen, -0.1, tuple(top))
        shape = shape_of(completion(logprobs=3), tokenizer, [1])
        whole = shape.whole([TextDelta(0, "", [token], "stop")], 1)
        assert whole["choices"][0]["logprobs"]["top_logprobs"] == [expected]


def test_the_bytes_of_llama_2_s_tokens_combine_to_the_text(llama: ChatTokenizer) -> None:
    tokens = [frames.Token(token_id, -0.5) for token_id in LLAMA_IDS]
    content = logprobs_object(completion(), tokens, llama)["content"]
    # The decoder takes away the space in front of the whole text.
    assert b"".join(bytes(entry["bytes"]) for entry in content) == f" {LLAMA_TEXT}".encode()
    assert llama.token_bytes(END) == b"</s>" and llama.token_bytes(9999) == b""


def test_the_tokens_of_a_text_are_found_behind_llama_2_s_decoder(llama: ChatTokenizer) -> None:
    tokens = [frames.Token(token_id, -0.5) for token_id in LLAMA_IDS]
    whole = _TextTokens(llama)
    whole.add(tokens)
    assert whole.take(LLAMA_TEXT) == tokens
    streamed = _TextTokens(llama)
    streamed.add(tokens[:2])
    assert streamed.take("hello") == tokens[:1] and streamed.take(" world") == tokens[1:2]
    streamed.add(tokens[2:])
    assert streamed.take(" foo😀 world") == tokens[2:]
