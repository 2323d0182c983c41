"""A request: what was asked for, its answers so far, the attempt under way, and its times.

A request lives from its arrival until all of its `n` answers have ended. An attempt is one
placement of the request on a pair of workers; when one fails, the next one follows (`generator`).
The journal of an answer holds all of its tokens, so another attempt, or another connection of the
same client, can go on where the last one stopped.
"""

from __future__ import annotations

import itertools
import secrets
import time
from array import array
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import msgspec

from ....engine.sequence import sampling_of_answer
from ....kv_transfer.identity import HASH_TOKENS, block_hashes
from ....protos import frames
from .backlog import Backlog, tokens_bytes
from .journal import Journal
from .terms import Terms

#: About what a prompt takes by token: an id in a list, and its share of the hashes.
PROMPT_TOKEN_BYTES = 40


class EndReason(StrEnum):
    """How an attempt ended."""

    FINISHED = "finished"  #: Its answers are complete.
    FAILED = "failed"  #: A worker could not go on; another one may.
    CANCELLED = "cancelled"  #: The client left, or wants no more.
    REFUSED = "refused"  #: The request itself is at fault: any worker would refuse it.
    HANDED_OVER = "handed_over"  #: A sound worker wants the request to go on elsewhere.
    LOST = "lost"  #: The connection to a worker ended.


class AnswerUpdate(msgspec.Struct, frozen=True, gc=False):
    """New tokens of one answer."""

    answer_index: int  #: Which of the request's `n` answers, from 0.
    tokens: list[frames.Token]
    finish_reason: str | None  #: stop or length, with the answer's last tokens; None before.


class SinkError(Exception):
    """The client can get no more: to make its bytes, or to send them, has failed."""


class PushSink(Protocol):
    """Takes the new tokens of a request as they come, and leads them to the client.

    `push` and `replay` are called from callbacks of the event loop too, where nobody could handle
    an exception: they do not raise. An error is kept, and the next `drain` raises a SinkError.
    """

    @property
    def held_bytes(self) -> int:
        """About how many bytes the sink holds for the client now."""

    def push(self, updates: list[AnswerUpdate]) -> bool:
        """Sends new tokens towards the client, without waiting for it.

        False: the client has not taken all of it, or it failed. Then nothing should be pushed
        before the next `drain`; meanwhile tokens wait in the inbox of their attempt.
        """

    def replay(self, updates: list[AnswerUpdate]) -> None:
        """Takes note of tokens that the client has already; nothing of them is sent."""

    async def drain(self) -> None:
        """Waits until the client has taken what was pushed. Raises SinkError."""


async def push_and_drain(sink: PushSink, updates: list[AnswerUpdate]) -> None:
    """Pushes when the sink has room, and waits until it has room again. Raises as `drain` does."""
    await sink.drain()
    if updates:
        sink.push(updates)
        await sink.drain()


@dataclass(slots=True)
class Answer:
    """One of the `n` answers to a request."""

    #: All tokens of the answer, in order.
    journal: Journal = field(default_factory=Journal)
    #: Why the workers ended the answer: stop or length.
    finish_reason: str | None = None
    #: True once the gateway wants no more of the answer, as its text is complete.
    stopped_early: bool = False
    #: When each token came, in seconds of the monotonic clock. This is an array, as Python's
    #: garbage collector looks at every item of a list.
    token_times: array[float] = field(default_factory=lambda: array("d"))
    #: Frames with tokens behind a gap: the decode worker's tokens came before the first token,
    #: which the prefill worker sends on another connection.
    early_frames: list[frames.AnswerTokens] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        """Is True if the answer gets no more tokens."""
        return self.stopped_early or self.finish_reason is not None

    def add(self, frame: frames.AnswerTokens) -> list[frames.Token]:
        """Journals and returns the new tokens; frames may come late, twice or out of order."""
        length_before = len(self.journal)
        if not self.early_frames and frame.offset == length_before:
            self.journal += frame.tokens
            self.finish_reason = self.finish_reason or frame.finish_reason
            return frame.tokens

        self.early_frames.append(frame)
        for early in sorted(self.early_frames, key=lambda frame: frame.offset):
            length = len(self.journal)
            if early.offset > length:
                break
            self.early_frames.remove(early)
            self.journal += early.tokens[length - early.offset :]
            self.finish_reason = self.finish_reason or early.finish_reason
        return self.journal[length_before:]

    def stamp(self, count: int) -> None:
        """Notes that `count` tokens came now."""
        self.token_times.extend([time.monotonic()] * count)


@dataclass(slots=True)
class RequestTimes:
    """When a request arrived and was placed, in seconds of the monotonic clock; and its hold."""

    #: The clock is looked up at each call, so that a simulation can put its own in its place.
    arrived_s: float = field(default_factory=lambda: time.monotonic())
    placed_s: float = 0.0  #: When the router first named workers; 0 before.
    #: For how many seconds the first token was held back, and why it then went out. Empty: it has
    #: not gone out, or was not the gate's to hold (`first_token_gate.py`).
    first_token_held_s: float = 0.0
    first_token_release: str = ""


@dataclass(slots=True)
class RunningAttempt:
    """The attempt under way."""

    key: frames.AttemptKey  #: The request's id on the wire, and the attempt's number, from 0.
    #: Tokens of the answer that the attempt starts with.
    resumed_tokens: int = 0
    #: Indices of the answers of which this attempt has given its first token.
    begun_answers: set[int] = field(default_factory=set)
    #: Of so many of the prompt's ids this attempt has given logprobs.
    scored_prompt_tokens: int = 0
    #: Why the attempt has to be repeated, once it has failed.
    failure: frames.AttemptFailed | None = None


@dataclass(frozen=True, eq=False)
class RequestInput:
    """What the workers are to compute; nothing of it ever changes."""

    id: str  #: The client's name of the request; another request may have it too.
    prompt_ids: list[int]  #: Of an attempt that goes on, with the tokens of the answer behind it.
    #: Of the prompt's full blocks of `HASH_TOKENS` ids, by which the router finds cached prefixes.
    #: Each hash contains the one before, its parent.
    hashes: list[bytes]
    sampling: frames.Sampling
    #: The parent of the first hash: it stands for the model and for who shares the cache.
    salt: bytes = b""
    #: The name of the part of the prefix cache that is searched; empty: the part of all requests
    #: without a name.
    cache_partition: bytes = b""

    def continued(self, journal: Journal) -> RequestInput:
        """Returns the input of an attempt that goes on behind `journal`: its tokens join the
        prompt.
        """
        prompt_ids = self.prompt_ids + [token.id for token in journal]
        hashes = self.hashes
        if hashes or self.salt:  # both are empty for a request that no cache is searched for
            parent = hashes[-1] if hashes else self.salt
            hashed_tokens = len(hashes) * HASH_TOKENS
            hashes = hashes + block_hashes(prompt_ids[hashed_tokens:], parent)
        sampling = _without_prompt_logprobs(self.sampling)
        return RequestInput(
            self.id,
            prompt_ids,
            hashes,
            sampling,
            salt=self.salt,
            cache_partition=self.cache_partition,
        )


@dataclass(frozen=True, slots=True)
class PlacedTargets:
    """What a request's targets came to when it was first placed; 0: the router has not said."""

    ttft_s: float = 0.0
    itl_s: float = 0.0
    ttft: str = ""  #: The TTFT target as in `max(1s, 3x)`; empty: a plain time.


class Request(RequestInput):
    """One prompt with its targets, until its end.

    What was asked for is in the fields of `RequestInput`, and frozen. The rest changes: the terms
    when the client comes back on another connection, all else as the answers grow.
    """

    def __init__(
        self,
        id: str,
        prompt_ids: list[int],
        hashes: list[bytes],
        sampling: frames.Sampling,
        salt: bytes = b"",
        cache_partition: bytes = b"",
        terms: Terms | None = None,
        wire_id: str = "",
        answers: list[Answer] | None = None,
    ) -> None:
        super().__init__(
            id, prompt_ids, hashes, sampling, salt=salt, cache_partition=cache_partition
        )
        self.terms = terms or Terms()
        #: The request's id on the wire. It is unique, as clients use their ids again.
        self.wire_id = wire_id or f"{id}~{secrets.token_hex(4)}"
        #: A part of the ids of the answers' calls of tools, which makes them unique. It stays the
        #: same when the client comes back, as it has these ids already.
        self.tool_call_suffix = self.wire_id.rpartition("~")[2]
        self.times = RequestTimes()

        self.answers: list[Answer] = answers or [Answer() for _ in range(sampling.n)]
        #: The prompt's tokens with their logprobs, from the second on, if they were asked for.
        self.prompt_logprobs: list[frames.ScoredToken] = []

        self.attempt_count = 0  #: Attempts that were begun.
        self.attempt: RunningAttempt | None = None  #: The last one that was begun.
        self.failures: list[frames.AttemptFailed] = []  #: Of all attempts.
        #: Ids of the last attempt's workers, the prefill worker first.
        self.workers: list[str] = []
        self.route = ""  #: The same workers by their aliases, as clients are told.
        #: True if the router saw that the request could not be in time: then it gets only the time
        #: of workers that no other request can use.
        self.background = False
        self.targets = PlacedTargets()
        self.hit_tokens = 0  #: Prompt tokens that were in a cache when the request was placed.
        #: How long the KV transfer took, of the last attempt that had one.
        self.prompt_arrived: frames.PromptArrived | None = None

        self.backlog = Backlog()  #: What is generated, and waits for the client.
        #: W3C traceparent for the processes that work for the request; empty: it is not traced.
        self.trace = ""
        #: True once its latencies are in the metrics; a client may come back after that.
        self.accounted = False
        #: True if the answers are generated whether or not somebody reads them.
        self.shared = False
        #: True once the client has the answers on another connection.
        self.dismissed = False
        self.parent: Request | None = None  #: Of a part: the request that it is one answer of.

    # ---- attempts --------------------------------------------------------------------------------

    def begin_attempt(self) -> RunningAttempt:
        """Begins the next attempt. It goes on behind the journal, if there is only one answer.

        Several answers that have tokens are never attempted together, but each as a `part`.
        """
        resumed_tokens = len(self.answers[0].journal) if len(self.answers) == 1 else 0
        self.attempt = RunningAttempt((self.wire_id, self.attempt_count), resumed_tokens)
        self.attempt_count += 1
        for answer in self.answers:
            answer.early_frames.clear()  # the new attempt sends these tokens again
        return self.attempt

    def attempt_input(self) -> RequestInput:
        """Returns what the attempt under way computes: the prompt and the tokens it starts with."""
        if self.attempt is None or not self.attempt.resumed_tokens:
            return self
        return self.continued(self.answers[0].journal)

    def adopt(self, other: Request) -> None:
        """Takes over the journal, the route and the lane of an earlier run of the same request, to
        go on behind it, and the suffix of its calls' ids.
        """
        self.tool_call_suffix = other.tool_call_suffix
        self.prompt_logprobs = list(other.prompt_logprobs)
        self.workers = list(other.workers)
        self.route = other.route
        self.background = other.background
        self.hit_tokens = other.hit_tokens
        for answer, other_answer in zip(self.answers, other.answers, strict=True):
            answer.journal = other_answer.journal.copy()
            answer.finish_reason = other_answer.finish_reason

    def adopt_taken(self, taken: frames.AnswerTaken) -> None:
        """Takes over the journal that another gateway kept of the same request.

        The suffix of its calls' ids is taken over too, if the gateway sent it.
        """
        self.tool_call_suffix = taken.tool_call_suffix or self.tool_call_suffix
        self.prompt_logprobs = list(taken.prompt_logprobs)
        self.hit_tokens = taken.hit_tokens
        for answer, journal in zip(self.answers, taken.journals, strict=True):
            answer.journal = Journal(journal.tokens)
            answer.finish_reason = journal.finish_reason

    def part(self, answer_index: int) -> Request:
        """Returns one of several answers as a request of its own, which shares journal and
        failures.
        """
        sampling = sampling_of_answer(self.sampling, answer_index)
        part = Request(
            self.id,
            self.prompt_ids,
            self.hashes,
            _without_prompt_logprobs(sampling),
            salt=self.salt,
            cache_partition=self.cache_partition,
            terms=self.terms,
            # The number of attempts makes the id unique: the answer may be taken apart again.
            wire_id=f"{self.wire_id}.{answer_index}.{self.attempt_count}",
            answers=[self.answers[answer_index]],
        )
        part.times = self.times
        part.backlog = self.backlog
        part.prompt_logprobs = self.prompt_logprobs
        part.failures = self.failures
        part.workers = list(self.workers)
        part.route = self.route
        part.targets = self.targets
        part.hit_tokens = self.hit_tokens
        part.trace = self.trace
        part.parent = self
        return part

    @property
    def is_dismissed(self) -> bool:
        """Is True once the client has the answers, or those it is a part of, elsewhere."""
        return self.dismissed or (self.parent is not None and self.parent.is_dismissed)

    @property
    def all_answers_begun(self) -> bool:
        """Is True once the attempt under way has given the first token of every answer."""
        return self.attempt is not None and len(self.attempt.begun_answers) == len(self.answers)

    # ---- answers ---------------------------------------------------------------------------------

    @property
    def ended(self) -> bool:
        # This is asked for each frame: a loop costs a third of `all` and a generator.
        for answer in self.answers:
            if answer.finish_reason is None and not answer.stopped_early:
                return False
        return True

    @property
    def finish_reason(self) -> str | None:
        """Why the first answer ended, once all have; None before."""
        if not self.ended:
            return None
        first = self.answers[0]
        return "stop" if first.stopped_early else first.finish_reason

    @property
    def generated_tokens(self) -> int:
        """The number of tokens of all answers."""
        return sum(len(answer.journal) for answer in self.answers)

    @property
    def kept_bytes(self) -> int:
        """About how many bytes the prompt and the tokens so far take."""
        return PROMPT_TOKEN_BYTES * len(self.prompt_ids) + self.answers_bytes

    @property
    def answers_bytes(self) -> int:
        """About how many bytes the tokens so far take, and the logprobs of the prompt."""
        journals_bytes = sum(
            answer.journal.nbytes + answer.token_times.itemsize * len(answer.token_times)
            for answer in self.answers
        )
        return journals_bytes + tokens_bytes(self.prompt_logprobs)

    # ---- times -----------------------------------------------------------------------------------

    @property
    def age_s(self) -> float:
        """Seconds since the request arrived."""
        return time.monotonic() - self.times.arrived_s

    @property
    def waited_s(self) -> float:
        """Seconds since the last token of any answer, or since the arrival if there is none."""
        last_tokens = [answer.token_times[-1] for answer in self.answers if answer.token_times]
        return time.monotonic() - max(last_tokens, default=self.times.arrived_s)

    @property
    def ttft_s(self) -> float | None:
        """Seconds from the arrival to the first token of any answer; None before it."""
        first_tokens = [answer.token_times[0] for answer in self.answers if answer.token_times]
        return min(first_tokens) - self.times.arrived_s if first_tokens else None

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between two tokens of the same answer, the answers one after the other.

        The first gap of an answer contains the KV transfer.
        """
        return [
            later - earlier
            for answer in self.answers
            for earlier, later in itertools.pairwise(answer.token_times)
        ]

    def mark_written(self) -> None:
        """Notes that the tokens so far reached their first reader now, and not earlier.

        The first tokens wait until the head of the response is out, and latencies are what the
        client sees.
        """
        now = time.monotonic()
        for answer in self.answers:
            answer.token_times = array("d", [now] * len(answer.token_times))


def _without_prompt_logprobs(sampling: frames.Sampling) -> frames.Sampling:
    """Returns the sampling of an answer that has begun: the prompt's logprobs came before it."""
    if sampling.prompt_logprobs is None:
        return sampling
    return msgspec.structs.replace(sampling, prompt_logprobs=None)
