"""Journals give back what was put in, and take few bytes; what waits for a client is measured."""

from __future__ import annotations

import tracemalloc

import msgspec
from diptych.cluster.gateway.attempt.backlog import Backlog, frame_bytes
from diptych.cluster.gateway.attempt.journal import Journal
from diptych.cluster.gateway.attempt.plane import Inbox
from diptych.protos.frames import AnswerTokens, AttemptFailed, Token
from hypothesis import given
from hypothesis import strategies as st

LOGPROBS = st.floats(max_value=0.0, allow_nan=False)
IDS = st.integers(0, 2**32 - 1)
TOKENS = st.builds(
    Token,
    IDS,
    st.none() | LOGPROBS,
    st.lists(st.tuples(IDS, LOGPROBS), max_size=3).map(tuple),
)


@given(st.lists(TOKENS), st.lists(TOKENS), st.slices(12))
def test_a_journal_is_the_list_of_its_tokens(
    first: list[Token], second: list[Token], part: slice
) -> None:
    journal = Journal(first)
    copied = journal.copy()
    journal += second
    tokens = [*first, *second]
    assert list(journal) == tokens and journal == tokens and len(journal) == len(tokens)
    assert journal[part] == tokens[part]
    assert copied == first, "a copy does not grow with its original"
    for index, token in enumerate(tokens):
        assert journal[index] == token and journal[index - len(tokens)] == token


def decoded(tokens: int, top: int) -> bytes:
    """A frame as it comes from a worker; all numbers differ, as they do there."""
    likeliest = [
        [(300 + index + place, -0.5 - index / 7 - place) for place in range(top)]
        for index in range(tokens)
    ]
    made = [Token(1000 + index, -index / 3, tuple(likeliest[index])) for index in range(tokens)]
    return msgspec.msgpack.encode(AnswerTokens(("r", 0), 0, made))


def traced_bytes(make: object) -> tuple[object, int]:
    tracemalloc.start()
    try:
        made = make()  # type: ignore[operator]
        return made, tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def test_a_token_with_twenty_likeliest_ones_takes_a_tenth_in_the_journal() -> None:
    data = decoded(4000, 20)
    frame, frame_size = traced_bytes(lambda: msgspec.msgpack.decode(data, type=AnswerTokens))
    assert isinstance(frame, AnswerTokens)
    journal, journal_size = traced_bytes(lambda: Journal(frame.tokens))
    assert isinstance(journal, Journal)
    print(f"4000 tokens: {frame_size} bytes as objects, {journal_size} in the journal")
    assert journal_size < frame_size / 8
    # Arrays grow by an eighth more than they need.
    assert 0.85 * journal_size < journal.nbytes <= journal_size


def test_the_estimate_of_a_frame_is_near_what_it_takes() -> None:
    for tokens, top in ((4000, 0), (4000, 5), (4000, 20)):
        data = decoded(tokens, top)
        frame, size = traced_bytes(
            lambda data=data: msgspec.msgpack.decode(data, type=AnswerTokens)
        )
        assert 0.75 < frame_bytes(frame) / size < 1.25, (tokens, top, frame_bytes(frame), size)


def test_what_waits_in_an_inbox_counts_until_it_is_taken() -> None:
    backlog = Backlog()
    inbox = Inbox(backlog)
    frame = AnswerTokens(("r", 0), 0, [Token(1), Token(2)])
    inbox.put_nowait(frame)
    inbox.put_nowait(frame)
    assert backlog.bytes == 2 * frame_bytes(frame)
    assert inbox.get_nowait() is frame and backlog.bytes == frame_bytes(frame)
    inbox.clear()
    assert backlog.bytes == 0 and inbox.empty()


def plain(index: int, offset: int, token: Token, **fields: object) -> AnswerTokens:
    return AnswerTokens(("r", 0), offset, [token], answer_index=index, **fields)  # type: ignore[arg-type]


@given(st.lists(st.tuples(st.integers(0, 2), TOKENS, st.booleans()), max_size=60))
def test_what_is_packed_comes_out_in_order(events: list[tuple[int, Token, bool]]) -> None:
    """Tokens of three answers, and ends among them: each answer's frames keep their order."""
    backlog = Backlog()
    inbox = Inbox(backlog)
    put: dict[int, list[tuple[int, Token, str | None]]] = {0: [], 1: [], 2: []}
    for index, token, ends in events:
        offset = len(put[index])
        finish_reason = "stop" if ends else None
        put[index].append((offset, token, finish_reason))
        inbox.put_nowait(plain(index, offset, token, finish_reason=finish_reason))
    got: dict[int, list[tuple[int, Token, str | None]]] = {0: [], 1: [], 2: []}
    while not inbox.empty():
        frame = inbox.get_nowait()
        assert isinstance(frame, AnswerTokens)
        for place, token in enumerate(frame.tokens):
            last = place == len(frame.tokens) - 1
            found = (frame.offset + place, token, frame.finish_reason if last else None)
            got[frame.answer_index].append(found)
    assert got == put and backlog.bytes == 0


def test_a_failure_stays_behind_the_tokens_before_it_and_before_those_behind_it() -> None:
    inbox = Inbox()
    events = [plain(0, offset, Token(offset)) for offset in range(20)]
    failure = AttemptFailed(("r", 0), "decode/a", "worker_lost")
    for event in (*events[:12], failure, *events[12:]):
        inbox.put_nowait(event)
    got = []
    while not inbox.empty():
        got.append(inbox.get_nowait())
    at = got.index(failure)
    assert [token.id for frame in got[:at] for token in frame.tokens] == list(range(12))
    assert [token.id for frame in got[at + 1 :] for token in frame.tokens] == list(range(12, 20))
    assert len(got) == 8 + 1 + 1 + 1, "those behind the first eight are packed"


def test_tokens_of_a_client_that_lags_take_a_tenth() -> None:
    backlog = Backlog()
    inbox = Inbox(backlog)
    frame = msgspec.msgpack.decode(decoded(2000, 20), type=AnswerTokens)
    for offset, token in enumerate(frame.tokens):
        inbox.put_nowait(plain(offset % 2, offset // 2, token))
    as_objects = sum(frame_bytes(plain(0, 0, token)) for token in frame.tokens)
    assert backlog.bytes < as_objects / 8


def test_a_backlog_overflows_once() -> None:
    overflows = []
    backlog = Backlog()
    backlog.limit_bytes = 100
    backlog.on_overflow = lambda: overflows.append(backlog.bytes)
    backlog.add(100)
    assert not overflows
    backlog.add(1)
    backlog.add(50)
    assert overflows == [101]
