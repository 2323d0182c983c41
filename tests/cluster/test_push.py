"""From a frame to the client's socket without waking a task; the same stream if one is woken."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from diptych.cluster.gateway.apis import api
from diptych.cluster.gateway.apis.chat import ChatRequest
from diptych.cluster.gateway.apis.chat_shape import ChatShape
from diptych.cluster.gateway.apis.schema import parse_body
from diptych.cluster.gateway.attempt import generator as generators
from diptych.cluster.gateway.attempt.backlog import Backlog
from diptych.cluster.gateway.attempt.generator import Generator
from diptych.cluster.gateway.attempt.plane import Inbox
from diptych.cluster.gateway.attempt.request import Request
from diptych.cluster.gateway.attempt.shelf import Shelf
from diptych.cluster.gateway.attempt.terms import Terms
from diptych.cluster.gateway.edge import sse
from diptych.cluster.gateway.errors import ApiError
from diptych.cluster.gateway.text.tokenizer import ChatTokenizer, TokenizedPrompt
from diptych.engine.demo import CHECKPOINT
from diptych.protos import frames as f
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.requests import Request as HttpRequest
from tokenizers import Tokenizer, decoders, models

from tests.support.examples import examples

TEXT = ChatTokenizer(CHECKPOINT)
SAID = "Grüße 👩‍💻🇩🇪, 你好，世界! STOP here — café."


class Plane:
    """Places at once; frames are what the test puts into the inboxes."""

    def __init__(self) -> None:
        self.inboxes: dict[str, Inbox] = {}
        self.link, self.cards = self, {}
        self.cancelled: list[bool] = []

    def watch(self, key: f.AttemptKey, backlog: Backlog | None = None) -> Inbox:
        inbox = self.inboxes[key[0]] = Inbox(backlog)
        return inbox

    def place(self, frame: f.PlaceAttempt) -> None:
        self.inboxes[frame.attempt_key[0]].put_nowait(
            f.AttemptPlaced(frame.attempt_key, 1, None, "d", 0, 0.0)
        )

    def submit(self, worker: str, frame: Any, ask_for_life: bool = False) -> None: ...
    def send(self, frame: Any) -> None: ...
    def prompt_prefilled(self, placed: f.AttemptPlaced) -> None: ...
    def forget(self, outcome: f.AttemptOutcome, cancel: bool) -> None:
        self.cancelled.append(cancel)

    def connected(self, worker: str) -> bool:
        return True

    def alias(self, worker: str) -> str:
        return worker


class Gateway:
    """As much of one as a stream needs."""

    text = TEXT

    def __init__(self) -> None:
        self.plane = Plane()
        generator = Generator(self.plane, 1, 5.0)  # type: ignore[arg-type]
        self.shelf = Shelf(generator, 0.0)


class Client:
    """What an ASGI server is for one response."""

    def __init__(self) -> None:
        self.data = b""
        self.messages = 0
        self.free = asyncio.Event()
        self.free.set()

    async def send(self, message: dict) -> None:
        await self.free.wait()
        self.messages += 1
        self.data += message.get("body", b"")

    async def receive(self) -> dict:
        await asyncio.Event().wait()
        return {}

    @property
    def events(self) -> list[dict]:
        lines = self.data.decode().split("\n\n")
        return [json.loads(x[6:]) for x in lines if x.startswith("data: {")]

    @property
    def text(self) -> str:
        chosen = [event["choices"][0]["delta"] for event in self.events if event["choices"]]
        return "".join(delta.get("content", "") for delta in chosen)


class Stream:
    """One answered chat, driven by frames."""

    def __init__(self, gateway: Gateway, name: str, **fields: Any) -> None:
        body = {"messages": [{"role": "user", "content": "x"}], "stream": True, **fields}
        asked = parse_body(ChatRequest, json.dumps(body).encode())
        self.request = Request(name, [1, 2], [], f.Sampling(4000), wire_id=name)
        self.shape = ChatShape(asked, self.request, TEXT, "m", TokenizedPrompt([1, 2], ""))
        self.gateway, self.client, self._told = gateway, Client(), 0
        self.call = api.ApiCall([self.request], self.shape, True)

    async def run(self) -> None:
        http = HttpRequest({"type": "http"}, self.client.receive)
        handlers = api.Api(self.gateway)  # type: ignore[arg-type]
        self.response: Any = await handlers._answer(http, self.gateway, self.call)
        await self.response({"type": "http"}, self.client.receive, self.client.send)

    def put(self, *ids: int, finish: str | None = None) -> None:
        inbox = self.gateway.plane.inboxes[self.request.wire_id]
        tokens = [f.Token(i) for i in ids]
        inbox.put_nowait(f.AnswerTokens((self.request.wire_id, 0), self._told, tokens, finish))
        self._told += len(ids)

    def say(self, text: str) -> None:
        self.put(*TEXT.encode(text, add_special_tokens=False))

    def fail(self) -> None:
        failed = f.AttemptFailed((self.request.wire_id, 0), "d", "kv_checksum")
        self.gateway.plane.inboxes[self.request.wire_id].put_nowait(failed)


async def begun(stream: Stream) -> asyncio.Task[None]:
    """The task of a stream that waits for its first token."""
    task = asyncio.ensure_future(stream.run())
    await settle()
    return task


async def settle() -> None:
    for _ in range(8):
        await asyncio.sleep(0)


def answered(ids: list[int], seed: int, **fields: Any) -> Client:
    """The stream of `ids`, which come in pieces, at once or after others were written."""

    async def run() -> Client:
        stream, turn = Stream(Gateway(), "r", **fields), random.Random(seed)
        task = await begun(stream)
        rest = list(ids)
        while rest:
            size = turn.randint(1, 3)
            part, rest = rest[:size], rest[size:]
            stream.put(*part, finish=None if rest else "length")
            for _ in range(turn.choice((0, 0, 1, 8))):
                await asyncio.sleep(0)
        await asyncio.wait_for(task, 5)
        return stream.client

    return asyncio.run(run())


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("stop", [None, "STOP", "界! STOP"])
def test_both_ways_tell_the_same_text_usage_and_end(
    at_once: bool, stop: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not at_once:
        monkeypatch.setattr(generators, "push_at_once", lambda *given: False)
    ids = TEXT.encode(SAID, add_special_tokens=False)
    for seed in range(20):
        fields = {"stop": stop} if stop else {}
        client = answered(ids, seed, stream_options={"include_usage": True}, **fields)
        wanted = SAID.split(stop)[0] if stop else SAID
        assert client.text == wanted, seed
        *chunks, last = client.events
        assert chunks[-1]["choices"][0]["finish_reason"] == ("stop" if stop else "length")
        shortest = next(n for n in range(len(ids) + 1) if (stop or SAID) in TEXT.decode(ids[:n]))
        assert last["usage"]["completion_tokens"] == shortest
        assert client.data.endswith(b"data: [DONE]\n\n")


async def test_tokens_that_come_while_nothing_waits_wake_no_task() -> None:
    stream = Stream(Gateway(), "r")
    task = await begun(stream)
    stream.say("a b")
    await settle()
    before = stream.client.messages
    stream.say(" c")  # no await: nobody else ran
    assert stream.client.messages == before + 1 and stream.client.text == "a b c"
    stream.put(finish="length")
    await asyncio.wait_for(task, 5)


async def test_a_stop_string_ends_the_stream_with_the_token_that_completes_it() -> None:
    stream = Stream(Gateway(), "r", stop="STOP")
    task = await begun(stream)
    stream.say("a ST")
    await settle()
    stream.say("OP")
    await asyncio.wait_for(task, 5)
    assert stream.client.text == "a " and stream.gateway.plane.cancelled == [True]


async def test_a_client_that_does_not_read_delays_nobody_and_loses_nothing() -> None:
    gateway = Gateway()
    slow, quick = Stream(gateway, "slow"), Stream(gateway, "quick")
    tasks = [asyncio.ensure_future(one.run()) for one in (slow, quick)]
    await settle()
    for at, word in enumerate(("one", "two", "three")):
        for one in (slow, quick):
            one.say(f" {word}")
        await settle()
        if at == 0:
            slow.client.free.clear()
    assert (slow.client.text, quick.client.text) == (" one", " one two three")
    slow.client.free.set()
    for one in (slow, quick):
        one.put(finish="stop")
    await asyncio.wait_for(asyncio.gather(*tasks), 5)
    assert slow.client.text == quick.client.text == " one two three"


async def test_a_client_that_takes_nothing_for_long_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sse, "STALL_S", 0.05)

    gateway = Gateway()
    stream = Stream(gateway, "r")
    task = await begun(stream)
    stream.put(7, 8)
    await settle()
    stream.client.free.clear()
    stream.put(9)
    stream.put(10)
    await asyncio.wait_for(task, 5)
    assert gateway.plane.cancelled == [True]


async def test_a_client_that_takes_a_little_at_a_time_is_kept_until_it_takes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server takes more only once nearly all of its buffer is out."""
    monkeypatch.setattr(sse, "STALL_S", 0.01)
    client = Client()
    client.free.clear()
    looks = 0

    def count_unsent_bytes() -> int:
        nonlocal looks
        looks += 1
        return max(100 - looks, 95)

    body = sse.ResponseBody()
    body.begin()
    body.open(client.send, count_unsent_bytes)
    draining = asyncio.ensure_future(body.drain())
    async with asyncio.timeout(5):
        while looks < 4:
            assert not draining.done()
            await asyncio.sleep(0.001)
        with pytest.raises(sse.Stalled):
            await draining
    assert looks == 6
    body.close()


async def test_an_error_in_a_push_ends_its_own_stream_only() -> None:
    gateway = Gateway()
    broken, whole = Stream(gateway, "broken"), Stream(gateway, "whole")
    tasks = [asyncio.ensure_future(one.run()) for one in (broken, whole)]
    await settle()
    for one in (broken, whole):
        one.say(" a")
    await settle()
    broken.response._encoder._envelopes.clear()
    broken.shape.plain = broken.shape.delta = None  # type: ignore
    for one in (broken, whole):
        one.say(" b")
    whole.put(finish="stop")
    await asyncio.wait_for(asyncio.gather(*tasks), 5)
    assert b"event: error" in broken.client.data and whole.client.text == " a b"
    assert sorted(gateway.plane.cancelled) == [False, True]


async def test_an_error_before_the_first_token_is_raised_and_nothing_is_sent() -> None:
    stream = Stream(Gateway(), "r")
    task = await begun(stream)
    stream.fail()
    with pytest.raises(ApiError, match="gave up after 1 attempts"):
        await asyncio.wait_for(task, 5)
    assert stream.client.messages == 0 and stream.gateway.plane.cancelled == [True]


async def test_an_error_behind_the_first_token_is_the_last_event() -> None:
    stream = Stream(Gateway(), "r")
    task = await begun(stream)
    stream.say(" a")
    await settle()
    stream.fail()
    await asyncio.wait_for(task, 5)
    assert stream.client.text == " a" and b"gave up after 1 attempts" in stream.client.data


async def test_a_deadline_ends_what_waits_for_tokens_but_not_what_waits_for_the_client() -> None:
    stream = Stream(Gateway(), "r")
    task = await begun(stream)
    stream.say(" a")
    await settle()
    stream.client.free.clear()
    stream.say(" b")
    stream.request.terms = Terms(deadline=time.monotonic() + 0.02)
    stream.say(" c")
    await asyncio.sleep(0.05)
    assert not task.done()
    stream.client.free.set()
    await asyncio.wait_for(task, 5)
    assert stream.client.text == " a b c" and b"deadline_exceeded" in stream.client.data


async def test_writers_that_share_a_body_lose_nothing_when_the_client_is_slow() -> None:
    client, body = Client(), sse.ResponseBody()
    written: list[bytes] = []

    async def write(name: str) -> None:
        for number in range(20):
            data = f"{name}{number};".encode()
            written.append(data)
            await body.write(data)

    async def read() -> None:
        for _ in range(60):
            client.free.clear()
            await asyncio.sleep(0)
            client.free.set()
            await asyncio.sleep(0)

    writers = asyncio.gather(write("a"), write("b"), write("c"))
    await settle()
    assert body.begun.done() and len(written) == 3 and not client.data, "until the head is out"
    body.open(client.send)
    await asyncio.wait_for(asyncio.gather(writers, read()), 5)
    parts = client.data.split(b";")[:-1]
    for name in "abc":
        own = [part.decode() for part in parts if part.startswith(name.encode())]
        assert own == [f"{name}{number}" for number in range(20)]


# ---- text ----------------------------------------------------------------------------------------


@given(st.data())
@settings(max_examples=examples(100), deadline=None)
def test_text_by_pieces_is_the_tokenizer_s_whatever_the_ids_and_their_splits(data: Any) -> None:
    special = st.integers(0, 8)
    ids = data.draw(
        st.lists(st.one_of(special, st.integers(0, TEXT.vocabulary_size + 2)), max_size=40)
    )
    specials = data.draw(st.booleans())
    stream, said, at = TEXT.detokenizer(specials), "", 0
    while at < len(ids):
        size = data.draw(st.integers(1, 5))
        said += stream.feed(ids[at : at + size])
        at += size
    known = [i for i in ids if i < TEXT.vocabulary_size]
    assert said + stream.flush() == TEXT.tokenizer.decode(known, skip_special_tokens=not specials)


@given(st.text(st.characters(codec="utf-8"), max_size=60))
@settings(max_examples=examples(100), deadline=None)
def test_characters_of_several_tokens_come_whole(text: str) -> None:
    stream = TEXT.detokenizer()
    parts = [stream.feed([token]) for token in TEXT.encode(text, add_special_tokens=False)]
    assert "".join(parts) == text and stream.flush() == ""
    assert all("\ufffd" not in part for part in parts) or "\ufffd" in text


def test_a_tokenizer_with_another_decoder_is_asked_itself(tmp_path: Path) -> None:
    names = ["<unk>", "▁a", "b", "▁", "c", "<0xE4>", "<0xBD>", "<0xA0>"]
    model = models.BPE({name: at for at, name in enumerate(names)}, [], unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.Sequence(  # type: ignore[assignment]
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    text, turn = ChatTokenizer(tmp_path), random.Random(1)
    stream = text.detokenizer()
    assert stream.feed([1]) + stream.feed([5]) + stream.feed([6, 7, 2]) == " a你b"
    for _ in range(50):
        units = turn.choices([[1], [2], [3], [4], [5, 6, 7]], k=12)  # whole characters
        ids, stream = [one for unit in units for one in unit], text.detokenizer()
        said = "".join(stream.feed([one]) for one in ids) + stream.flush()
        assert said == tokenizer.decode(ids)


SPECIALS = [one.content for one in TEXT.tokenizer.get_added_tokens_decoder().values()]
WORDS = st.one_of(
    st.text(st.characters(codec="utf-8"), max_size=12),
    st.sampled_from([*SPECIALS, " the ", "\n\n", "  ", "don't", "12345", "👩‍💻", "<|", "|>"]),
)


def same(text: str) -> bool:
    wanted = TEXT.tokenizer.encode(text, add_special_tokens=False).ids
    return TEXT.encode(text, add_special_tokens=False) == wanted


@given(st.lists(WORDS, max_size=30))
@settings(max_examples=examples(100), deadline=None)
def test_ids_are_the_tokenizer_s(words: list[str]) -> None:
    assert same("".join(words))


def test_ids_of_a_known_conversation_are_those_of_its_whole_text() -> None:
    turn = random.Random(3)
    words = ["hello", " wörld", "\n", " 42", "👩‍💻", "<|end|", ">", " ", "'s", *SPECIALS]
    for _ in range(20):
        messages: list[dict] = []
        for number in range(6):
            content = "".join(turn.choices(words, k=30))
            messages.append({"role": ("user", "assistant")[number % 2], "content": content})
            prompt = TEXT.tokenize_chat(messages)
            whole = TEXT._templates.render(
                {"messages": messages, "add_generation_prompt": True, "bos_token": "<|bos|>"},
                tools=False,
            )
            assert prompt.token_ids == TEXT.tokenizer.encode(whole, add_special_tokens=False).ids


def test_a_long_text_of_ids_is_the_librarys_and_others_go_on_meanwhile() -> None:
    ids = random.Random(5).choices(range(TEXT.vocabulary_size), k=800_000)
    ids += TEXT.encode("wörld 👩‍💻", add_special_tokens=False)
    texts: list[str] = []
    working = threading.Thread(target=lambda: texts.append(TEXT.decode_in_steps(ids)))
    turns = 0
    working.start()
    while working.is_alive():  # the library, asked once, would let this thread have one turn
        time.sleep(0.001)
        turns += 1
    assert texts == [TEXT.decode(ids)]
    assert turns > 3
