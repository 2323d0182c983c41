"""Answers that a client may come back for: what was generated is kept for a while.

The same tenant, request id and request is the same answer. So a client whose connection broke sends
the same request again, and goes on where it was. Life of a kept answer:
    1. Asked for: the answer is generated for its reader, or by a task of its own if the client
       wants it kept (`x-resume: keep`).
    2. The reader leaves: generating stops, and the journal stays. A kept answer goes on.
    3. Asked for again: the reader gets the journal behind what it has, and what is missing is
       generated. A reader that is still there is sent away: its connection is one that broke.
    4. `window_s` after the last reader has left, the answer is forgotten.
A reader for whom too much waits is cut off (`held_bytes.py`), and may come back as in 3.
A gateway that does not know the answer takes it from the one that has it. If none has, it generates
the answer again, and the reader gets what it lacks: the default seed derives from the request id,
so the tokens are the same. A client that sends the ids it has spares the gateway that.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import msgspec

from ....protos import frames
from ..errors import ApiError, busy_error
from ..text.answers import Output
from .held_bytes import AnswerLimits, CutReason, HeldBytes, ReaderCutOff
from .request import AnswerUpdate, PushSink, Request
from .resume import Cursor, Resume

#: What an answer may have that is sent to another gateway: ids of prompts, tokens and their
#: logprobs; about 10 bytes each.
GIVEN_MAX = 1 << 18
#: Of an answer that is in the journal already, a reader gets so many tokens at a time.
PUSHED_TOKENS = 256

DEFAULT_LIMITS = AnswerLimits()
AnswerName = tuple[str, str]  #: tenant and request id


class AnswerSource(Protocol):
    """Generates answers: the gateway's service, behind the shelf."""

    async def run(self, request: Request, sink: PushSink) -> None:
        """Pushes what the request lacks, until all answers have ended. Raises ApiError."""

    def dismiss(self, request: Request) -> None:
        """Ends a request with an error: another connection has taken it over."""


@dataclass(slots=True, eq=False)
class KeptAnswer:
    """The answers to one request whose client may come back.

    If they go on without a reader, this is the sink of their generator: it only tells the readers
    that the journal has grown, as each of them reads the journal at its own pace.
    """

    request: Request  #: With the journals of its answers.
    output: Output  #: How its text was asked for; another way makes it another request.
    goes_on: bool = False  #: The answers are generated without a reader too.
    readers: int = 0  #: Connections that read the answers now.
    task: asyncio.Task[None] | None = None  #: Generates, if the answers go on.
    error: Exception | None = None  #: What ended the task.
    #: Set, and replaced by a new one, each time that the journal grows or the task ends.
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    forget: asyncio.TimerHandle | None = None  #: Runs while there is no reader, then forgets this.
    unread_bytes: int = 0  #: What it counts of the shelf's limit while there is no reader.

    @property
    def held_bytes(self) -> int:
        return 0

    def push(self, updates: list[AnswerUpdate]) -> bool:
        self.wake_readers()
        return True

    def replay(self, updates: list[AnswerUpdate]) -> None:
        """Does nothing: the journal has these tokens."""

    async def drain(self) -> None:
        """Does not wait, as readers do not hold up the answers."""

    def wake_readers(self) -> None:
        """Lets each `wait_for_change` return: its reader looks at the journal then."""
        self.changed.set()
        self.changed = asyncio.Event()

    async def wait_for_change(self) -> None:
        """Waits until the journal has grown or the task has ended. Raises what ended the task."""
        if self.error:
            raise self.error
        await self.changed.wait()


class CatchUpSink:
    """Holds tokens back until the journal has all that the client has, then lets them pass.

    The client's share is replayed, what else there is by then is pushed. If a stop string ended the
    client's answer, the replay finds that stop string too.
    """

    def __init__(self, request: Request, sink: PushSink, cursors: tuple[Cursor, ...]) -> None:
        self._request = request
        self._sink = sink
        self._cursors = cursors  #: What the client has of each answer; empty: nothing.
        self.caught_up = False  #: True once tokens pass.
        self.try_to_catch_up()

    @property
    def held_bytes(self) -> int:
        return self._sink.held_bytes

    def push(self, updates: list[AnswerUpdate]) -> bool:
        if self.caught_up:
            return self._sink.push(updates)
        self.try_to_catch_up()
        return not self.caught_up

    def replay(self, updates: list[AnswerUpdate]) -> None:
        self._sink.replay(updates)

    async def drain(self) -> None:
        await self._sink.drain()

    def try_to_catch_up(self) -> None:
        """Passes the journal on, if it has all that the client has."""
        targets = _padded(self._cursors, self._request)
        if not _reached(self._request, targets):
            return
        self.caught_up = True
        position = _beginning(self._request)
        if self._cursors:
            self._sink.replay(advance(self._request, position, targets))
        updates = advance(self._request, position)
        if updates:
            self._sink.push(updates)


class Reader:
    """One connection that reads a request's answers, in the task that makes this object."""

    def __init__(self, kept: KeptAnswer, sink: PushSink) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.kept = kept
        self.sink = sink
        #: How much of each answer the reader has of what was journaled when it came, or since then
        #: if the answer goes on without it.
        self.position: list[Cursor] = []
        self.cut_reason: CutReason | None = None  #: Why it is cut off.
        self._task = task
        self._cancels_before = task.cancelling()

    def cut_off(self, reason: CutReason) -> None:
        """Cancels the reader's task; `push_answers` then raises ReaderCutOff."""
        if self.cut_reason is None:
            self.cut_reason = reason
            self._task.cancel()

    def take_cancel(self) -> bool:
        """Returns whether nobody but `cut_off` has cancelled the task, and takes that back."""
        return self.cut_reason is not None and self._task.uncancel() <= self._cancels_before

    @property
    def lagging_bytes(self) -> int:
        """What waits for this reader alone: in inboxes.

        What it has not read of the journal is there with and without it.
        """
        return self.kept.request.backlog.bytes


class Shelf:
    """Keeps answers by tenant and request id, `window_s` seconds after their last reader has left.

    `window_s` 0: nothing is kept. `source` generates what an answer lacks.
    """

    def __init__(
        self, source: AnswerSource, window_s: float, limits: AnswerLimits = DEFAULT_LIMITS
    ) -> None:
        self._source = source
        self._window_s = window_s
        self._limits = limits
        self._kept: dict[AnswerName, KeptAnswer] = {}
        #: Those without a reader, in the order in which the last one left: the first is dropped
        #: first when they weigh too much.
        self._unread: dict[AnswerName, KeptAnswer] = {}
        self._unread_bytes = 0  #: The sum of their bytes, at most the limit of kept answers.
        #: Those of them that are still generated, and so grow.
        self._unread_growing: dict[AnswerName, KeptAnswer] = {}
        self._readers: dict[Reader, None] = {}  #: Those that read now.
        self.resumed = 0  #: How many requests found a kept answer.
        self.cut_readers = Counter[str]()  #: Readers that were cut off, by reason.
        self.forgotten = 0  #: Answers that were forgotten before their window ended, for room.

    def find(self, request: Request, output: Output, resume: Resume) -> Request:
        """Returns the request to read: `request`, which now has what is kept under its name.

        An answer that goes on has a request already; that one is returned. The caller gives the
        returned request to `push_answers`. Raises ApiError when another request with this id is
        being answered.
        """
        if not self._window_s:
            return request
        name = _name(request)
        kept = self._kept.get(name)
        if kept is not None and not _asks_the_same(kept, request, output):
            if kept.readers or kept.task:
                message = f"another request with id {request.id} is running already"
                raise ApiError("invalid_request", message, "x-request-id")
            self._drop(name)
        elif kept is not None:
            self.resumed += 1
            if kept.task:
                # The task's request stays; the new connection's targets and deadline count.
                kept.request.terms = request.terms
                return kept.request
            request.adopt(kept.request)
            if kept.readers:
                self._source.dismiss(kept.request)
            self._drop(name)

        kept = KeptAnswer(request, output, resume.keep_generating)
        self._kept[name] = kept
        # Without a reader until `push_answers`: a caller that never gets there leaves no answer.
        self._without_reader(name, kept)
        return request

    def keeps(self, tenant: str, request_id: str) -> bool:
        """Returns whether something is kept under a request's name."""
        return (tenant, request_id) in self._kept

    def discard(self, tenant: str, request_id: str) -> None:
        """Forgets what is kept under a request's name, if anything is."""
        name = (tenant, request_id)
        if name in self._kept:
            self._drop(name)

    def lacks(self, request: Request) -> bool:
        """Returns whether nothing is kept under the request's name, though answers are kept."""
        return self._window_s > 0 and _name(request) not in self._kept

    def give(self, frame: frames.TakeAnswer) -> frames.AnswerTaken:
        """Gives kept answers to another gateway, whose client has come back there.

        A reader that is still here gets an error, as its connection is one that broke. The reply
        has no journals if nothing is kept under that name, if it is not what the client asks for,
        or if it is too much to be sent.
        """
        name = (frame.tenant, frame.request_id)
        kept = self._kept.get(name)
        if kept is None or digest_of(kept.request, kept.output) != frame.digest:
            return frames.AnswerTaken(frame.call_id)
        request = kept.request
        if _weight(request) > GIVEN_MAX:
            return frames.AnswerTaken(frame.call_id)
        taken = frames.AnswerTaken(
            frame.call_id,
            [
                frames.AnswerJournal(list(answer.journal), answer.finish_reason)
                for answer in request.answers
            ],
            list(request.prompt_logprobs),
            request.hit_tokens,
            goes_on=kept.goes_on,
            tool_call_suffix=request.tool_call_suffix,
        )
        if kept.readers:
            self._source.dismiss(request)
        self._drop(name)
        return taken

    async def push_answers(
        self, request: Request, sink: PushSink, cursors: tuple[Cursor, ...] = ()
    ) -> None:
        """Pushes all answers into `sink`; replays, first, what a client with `cursors` has.

        A request that the shelf does not keep is generated without being kept. Cancelling ends the
        answers, if nobody else reads them and they are not to go on. Raises ApiError, SinkError,
        and ReaderCutOff when too much waits for the reader.
        """
        name = _name(request)
        kept = self._kept.get(name)
        if kept is None or kept.request is not request:
            kept = KeptAnswer(request, Output())
        reader = Reader(kept, sink)
        self._with_reader(name, kept, reader)
        try:
            if kept.goes_on:
                await self._follow(reader, cursors)
            else:
                await self._generate(reader, cursors)
        except asyncio.CancelledError:
            if not reader.take_cancel():
                raise
            assert reader.cut_reason is not None
            self.cut_readers[reader.cut_reason] += 1
            raise ReaderCutOff(reader.cut_reason) from None
        except ReaderCutOff as cut_off:
            self.cut_readers[cut_off.reason] += 1
            raise
        finally:
            del self._readers[reader]
            kept.readers -= 1
            self._without_reader(name, kept)

    async def _generate(self, reader: Reader, cursors: tuple[Cursor, ...]) -> None:
        """Pushes what is journaled, and then what comes."""
        request = reader.kept.request
        cut_off = partial(reader.cut_off, CutReason.READER_LAGS)
        request.backlog.limit_bytes = self._limits.stream_bytes
        request.backlog.on_overflow = cut_off
        try:
            await self._push_from(reader, cursors)
        finally:
            # The reader refers to the request: without this circle both are freed at once, not at
            # the next full collection.
            if request.backlog.on_overflow is cut_off:
                request.backlog.on_overflow = None

    async def _push_from(self, reader: Reader, cursors: tuple[Cursor, ...]) -> None:
        """Pushes what the client lacks of the journal, and generates the rest."""
        request = reader.kept.request
        sink = reader.sink
        journaled = any(answer.journal or answer.ended for answer in request.answers)
        if cursors or journaled:
            targets = _padded(cursors, request)
            if _reached(request, targets):
                await self._push_journal(reader, cursors, targets)
            else:
                sink = CatchUpSink(request, sink, cursors)
        if not request.ended:
            await self._source.run(request, sink)

    async def _push_journal(
        self, reader: Reader, cursors: tuple[Cursor, ...], targets: list[Cursor]
    ) -> None:
        """Replays the client's share of the journal, and pushes what is behind it."""
        request = reader.kept.request
        position = reader.position = _beginning(request)
        if cursors:
            reader.sink.replay(advance(request, position, targets))
            await reader.sink.drain()
        while updates := advance(request, position, tokens_limit=PUSHED_TOKENS):
            reader.sink.push(updates)
            await reader.sink.drain()

    async def _follow(self, reader: Reader, cursors: tuple[Cursor, ...]) -> None:
        """Pushes what the answer's own task generates, at the reader's pace."""
        kept = reader.kept
        request = kept.request
        request.shared = True
        if kept.task is None and not request.ended:
            kept.error = None
            kept.task = asyncio.get_running_loop().create_task(self._keep_generating(kept))

        targets = _padded(cursors, request)
        while not _reached(request, targets):
            await kept.wait_for_change()
        await self._push_journal(reader, cursors, targets)
        while True:
            updates = advance(request, reader.position, tokens_limit=PUSHED_TOKENS)
            if updates:
                reader.sink.push(updates)
                await reader.sink.drain()
            elif request.ended:
                return
            else:
                await kept.wait_for_change()

    async def _keep_generating(self, kept: KeptAnswer) -> None:
        """Generates answers that go on with or without a reader, in a task of their own."""
        try:
            await self._source.run(kept.request, kept)
        except asyncio.CancelledError:  # another gateway has the answer now
            kept.error = busy_error()
            raise
        except Exception as error:  # its readers raise it
            kept.error = error
        finally:
            kept.task = None
            kept.wake_readers()

    def _with_reader(self, name: AnswerName, kept: KeptAnswer, reader: Reader) -> None:
        """Counts one more reader, which stops the window."""
        self._readers[reader] = None
        kept.readers += 1
        if kept.forget:
            kept.forget.cancel()
            kept.forget = None
        if self._unread.get(name) is kept:
            del self._unread[name]
            self._unread_growing.pop(name, None)
            self._unread_bytes -= kept.unread_bytes

    def _without_reader(self, name: AnswerName, kept: KeptAnswer) -> None:
        """Starts the window of an answer that nobody reads, and keeps the bound of all of them."""
        if kept.readers or self._kept.get(name) is not kept:
            return
        kept.unread_bytes = kept.request.kept_bytes
        loop = asyncio.get_running_loop()
        kept.forget = loop.call_later(self._window_s, self._drop, name)
        self._unread[name] = kept
        if kept.goes_on:
            self._unread_growing[name] = kept
        self._unread_bytes += kept.unread_bytes
        self._keep_limit()

    def _keep_limit(self) -> None:
        """Forgets answers without a reader until all of them keep their limit."""
        while self._unread_bytes > self._limits.kept_bytes:
            self._drop(next(iter(self._unread)))
            self.forgotten += 1

    def measure_unread(self) -> int:
        """Returns the bytes of all answers without a reader.

        Those that go on without one are measured anew, and forgotten beyond the limit.
        """
        for kept in self._unread_growing.values():
            self._unread_bytes -= kept.unread_bytes
            kept.unread_bytes = kept.request.kept_bytes
            self._unread_bytes += kept.unread_bytes
        self._keep_limit()
        return self._unread_bytes

    def held_without_reader(self) -> list[HeldBytes[Reader | KeptAnswer]]:
        """Returns what each answer without a reader holds, the one first that was left first.

        There may be tens of thousands: after every answer its client may come back for a while.
        """
        return [
            HeldBytes(kept, kept.unread_bytes, has_reader=False) for kept in self._unread.values()
        ]

    def held_by_readers(self) -> list[HeldBytes[Reader | KeptAnswer]]:
        """Returns what the answers that are read hold now."""
        held: list[HeldBytes[Reader | KeptAnswer]] = []
        counted = set[int]()  # Several readers may read one answer, which counts once.
        for reader in self._readers:
            kept_bytes = 0
            if id(reader.kept) not in counted:
                counted.add(id(reader.kept))
                # Prompts of running requests have a limit of their own: of requests at a time.
                kept_bytes = reader.kept.request.answers_bytes
            lagging_bytes = reader.lagging_bytes
            unread_bytes = lagging_bytes + reader.sink.held_bytes
            held.append(HeldBytes(reader, kept_bytes, unread_bytes, lagging_bytes=lagging_bytes))
        return held

    def forget(self, kept: KeptAnswer) -> None:
        """Forgets an answer without a reader before its window ends."""
        name = _name(kept.request)
        if self._unread.get(name) is kept:
            self._drop(name)
            self.forgotten += 1

    def _drop(self, name: AnswerName) -> None:
        """Forgets an answer, and ends its generating if it goes on."""
        kept = self._kept.pop(name)
        if self._unread.pop(name, None):
            self._unread_growing.pop(name, None)
            self._unread_bytes -= kept.unread_bytes
        if kept.forget:
            kept.forget.cancel()
        if kept.task:
            kept.task.cancel()

    def close(self) -> None:
        """Forgets all answers, and ends those that go on."""
        for name in list(self._kept):
            self._drop(name)

    def __len__(self) -> int:
        return len(self._kept)


def _name(request: Request) -> AnswerName:
    return request.terms.tenant, request.id


def _weight(request: Request) -> int:
    """Returns how many ids and logprobs the request and its answers have."""
    # Beside the token, each of the likeliest ones has an id and a logprob.
    weight_per_token = 1 + 2 * (request.sampling.logprobs or 0)
    return len(request.prompt_ids) + weight_per_token * request.generated_tokens


def digest_of(request: Request, output: Output) -> bytes:
    """Returns what two requests have in common that would have the same answers."""
    parts = (
        request.prompt_ids,
        request.sampling,
        output.stop_strings,
        output.keep_stop_string,
        output.min_tokens,
        output.special_tokens,
        sorted(output.markers),
    )
    return hashlib.sha256(msgspec.msgpack.encode(parts)).digest()


def _asks_the_same(kept: KeptAnswer, request: Request, output: Output) -> bool:
    """Returns whether a request of this name would have the kept answers."""
    return (
        kept.request.prompt_ids == request.prompt_ids
        and kept.request.sampling == request.sampling
        and kept.output == output
    )


def _beginning(request: Request) -> list[Cursor]:
    """Returns the cursors of a reader that has nothing."""
    return [Cursor()] * len(request.answers)


def _padded(cursors: tuple[Cursor, ...], request: Request) -> list[Cursor]:
    """Returns what the client has of each answer: nothing of those that it did not name."""
    return [*cursors, *_beginning(request)][: len(request.answers)]


def _reached(request: Request, targets: list[Cursor]) -> bool:
    """Is True if the journal has what the cursors say.

    An answer that has ended has no more: where a stop string ended it, this gateway finds the stop
    string in what is there.
    """
    return all(
        answer.ended or len(answer.journal) >= target.tokens
        for answer, target in zip(request.answers, targets, strict=True)
    )


def advance(
    request: Request,
    position: list[Cursor],
    targets: list[Cursor] | None = None,
    *,
    tokens_limit: int | None = None,
) -> list[AnswerUpdate]:
    """Returns the tokens between a reader's position and `targets`, and advances the position.

    Without `targets` it returns all tokens, and the ends of answers, behind the position; of each
    answer `tokens_limit` tokens at most.
    """
    updates = []
    for index, answer in enumerate(request.answers):
        cursor = position[index]
        target = targets[index] if targets else Cursor(len(answer.journal), ended=True)
        if tokens_limit is not None and target.tokens > cursor.tokens + tokens_limit:
            target = Cursor(cursor.tokens + tokens_limit)
        tokens = answer.journal[cursor.tokens : target.tokens]
        finish_reason = answer.finish_reason if target.ended and not cursor.ended else None
        if tokens or finish_reason:
            updates.append(AnswerUpdate(index, tokens, finish_reason))
            ended = cursor.ended or finish_reason is not None
            position[index] = Cursor(cursor.tokens + len(tokens), ended)
    return updates
