"""The client of a cell: a process of its own that offers one load to one server.

    echo '{"url": .., "load": .., "warm_up": 4, "limit_s": 300}' |
        python -m diptych.cluster.bench.live.client

The process reads a `ClientTask` from stdin as JSON and writes a `ClientReport` to stdout. If the
endpoint cannot be probed or the warm-up fails, the process writes the reason to stderr and exits
with 1. HTTP, server-sent events and the kernel's time stamps are the load test's
(`loadtests/sse.py`, `loadtests/endpoint.py`).
Every session is a greenlet. A request that gets no byte for 60 s fails as `timeout`. What has not
ended `limit_s` after the start counts as unfinished, and what was not sent until then counts as
failed too: a server that holds requests up, or refuses a chat's first turn, must not have fewer of
them in its figures.
"""

from __future__ import annotations

from gevent import monkey

if __name__ == "__main__":
    monkey.patch_all()  # before anything imports sockets

import resource
import sys
import time
from collections.abc import Iterator, Sequence

import gevent
import msgspec
from gevent.pool import Pool

from ....loadtests.arrivals import Arrival
from ....loadtests.endpoint import EndpointFacts, HttpLoadClient, probe_endpoint
from ....loadtests.errors import LoadError
from ....loadtests.outcomes import LoadOutcome
from .loads import (
    ChatLoad,
    ChatSession,
    ClosedLoad,
    Load,
    PoissonLoad,
    chat_sessions,
    closed_requests,
    digest,
    poisson_arrivals,
    warm_up_requests,
)
from .results import ClientReport, MeasuredAnswer

UNFINISHED = "unfinished"  #: the error of an answer that had not ended at the time limit
NOT_SENT = "not sent"  #: the error of a chat's turn behind one that failed, or behind the limit
WARM_UP_LIMIT_S = 120.0  #: seconds for the whole warm-up; what has not ended then is a failure
#: Requests under way. Further arrivals wait in the client, and that wait counts as latency: it is
#: the server that has not answered.
CONCURRENT_LIMIT = 8192
#: Open files of this process besides the connections of requests under way: idle connections and
#: pipes.
OTHER_FILES = 64
ERROR_EXIT_CODE = 1


class ClientTask(msgspec.Struct, frozen=True):
    """What a client does, as its parent process tells it."""

    url: str
    load: Load
    warm_up: int = 4  #: requests before the load
    limit_s: float = 300.0  #: seconds from the load's start, after which requests are cut short


class LoadClient:
    """Sends requests and keeps what became of them. Its clock starts with the object."""

    def __init__(self, facts: EndpointFacts, seed: int) -> None:
        self.words = facts.words(seed)
        self.answers: list[MeasuredAnswer] = []  #: in the order in which they ended
        #: What is reported of requests that are planned and not sent yet, by the request's name.
        self.unsent: dict[str, MeasuredAnswer] = {}
        self._http = HttpLoadClient(facts)
        self._count = 0  #: requests sent so far, from which their ids are made
        self.began_s = time.perf_counter()

    @property
    def now_s(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self.began_s

    def send(self, arrival: Arrival, held_up: bool = False) -> None:
        """Send one request of an open or closed loop, and wait for its end.

        `held_up` says that the request waited in this client for others to end: then its latencies
        count from its arrival.
        """
        messages = [_message("user", self.words.text(arrival))]
        counted_from_s = arrival.arrival_s if held_up else None
        self.exchange(
            messages,
            arrival.output_tokens,
            name=arrival_name(arrival),
            counted_from_s=counted_from_s,
        )

    def exchange(
        self,
        messages: list[dict[str, str]],
        tokens: int,
        *,
        name: str,
        turn: int = 0,
        counted_from_s: float | None = None,
    ) -> str | None:
        """Send one request for `tokens` tokens; return the answer's text, or None if it failed.

        `name` is the request's among `unsent`. Latencies count from `counted_from_s`, or from now.
        An error is not raised but noted in the answer. A greenlet that is killed meanwhile leaves
        an answer with the error `UNFINISHED`.
        """
        self.unsent.pop(name, None)
        self._count += 1
        sent_s = self.now_s
        counted_from_s = sent_s if counted_from_s is None else counted_from_s
        outcome = LoadOutcome(id=f"live-{self._count}", arrival_s=counted_from_s, sent_s=sent_s)
        text = ""
        try:
            text = self._http.chat(outcome, messages, tokens)
        except gevent.GreenletExit:
            outcome.error = UNFINISHED
            raise
        finally:
            self.answers.append(MeasuredAnswer.of(outcome, ended_s=self.now_s, turn=turn))
        return None if outcome.error else text


def _message(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


def arrival_name(arrival: Arrival) -> str:
    """Return the name of an open or closed loop's request among those that are not sent yet."""
    return f"arrival {arrival.index}"


def warm_up(facts: EndpointFacts, task: ClientTask) -> None:
    """Send the warm-up at once, and wait for its end. Raises LoadError if a request fails."""
    load = task.load
    # Another seed makes other texts: no prompt of the load is cached by the warm-up.
    client = LoadClient(facts, load.seed + 1)
    pool = Pool()
    for arrival in warm_up_requests(load, task.warm_up):
        pool.spawn(client.send, arrival)
    pool.join(WARM_UP_LIMIT_S)
    pool.kill()
    errors = sorted({answer.error for answer in client.answers if answer.error})
    if errors:
        raise LoadError(f"the warm-up failed: {', '.join(errors)}")


def offer(facts: EndpointFacts, task: ClientTask) -> ClientReport:
    """Send the load's requests until all have ended or the time is over; return all answers.

    A planned request that was not sent is an answer with an error.
    """
    load = task.load
    requests_digest = digest(load, facts.words(load.seed))
    cpu_began_s = time.process_time()
    client = LoadClient(facts, load.seed)
    pool = Pool(concurrent_limit())
    with gevent.Timeout(task.limit_s, False):  # False: the block ends at the limit without error
        _spawn(client, load, pool)
        pool.join()
    pool.kill()
    # Failed ones too: the time in which a server served nobody is part of the measurement.
    ends_s = [answer.sent_s + answer.e2e_s for answer in client.answers]
    answers = [*client.answers, *client.unsent.values()]
    return ClientReport(
        digest=requests_digest,
        span_s=max(ends_s, default=client.now_s),
        cpu_s=time.process_time() - cpu_began_s,
        answers=sorted(answers, key=lambda answer: answer.sent_s),
        model=facts.model,
    )


def raise_open_file_limit() -> None:
    """Let this process open as many files as it may: a connection is one, and 1,024 are usual."""
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))


def concurrent_limit() -> int:
    """Return how many requests may be under way: no more than this process can have connections.

    A connection that could not be opened would count as the server's failure.
    """
    soft_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft_limit == resource.RLIM_INFINITY:
        return CONCURRENT_LIMIT
    return max(1, min(CONCURRENT_LIMIT, soft_limit - OTHER_FILES))


def _spawn(client: LoadClient, load: Load, pool: Pool) -> None:
    """Start a greenlet for each request, user or chat; return when the last one has been started.

    `pool.spawn` blocks while as many greenlets are under way as the pool holds.
    """
    match load:
        case PoissonLoad():
            _spawn_arrivals(client, poisson_arrivals(load), pool)
        case ClosedLoad():
            requests = closed_requests(load)
            for _ in range(load.users):
                # All users take their requests from one iterator, so no request is sent twice.
                pool.spawn(_send_in_turn, client, requests, load.seconds)
        case ChatLoad():
            sessions = chat_sessions(load)
            for session in sessions:
                for number, turn in enumerate(session.turns):
                    client.unsent[turn.name] = MeasuredAnswer(
                        session.start_s,
                        prompt_tokens=0,
                        output_tokens=0,
                        error=NOT_SENT,
                        turn=number,
                    )
            for session in sessions:
                gevent.sleep(max(0.0, session.start_s - client.now_s))
                pool.spawn(_converse, client, session)


def _spawn_arrivals(client: LoadClient, arrivals: Sequence[Arrival], pool: Pool) -> None:
    """Start a greenlet for each arrival of an open loop at its time, or when the pool has room."""
    for arrival in arrivals:
        client.unsent[arrival_name(arrival)] = MeasuredAnswer(
            arrival.arrival_s, arrival.prompt_tokens, output_tokens=0, error=UNFINISHED
        )
    held_up = False
    for arrival in arrivals:
        wait_s = arrival.arrival_s - client.now_s
        gevent.sleep(max(0.0, wait_s))
        # Behind an arrival that found the pool full, those whose time came meanwhile are late too.
        held_up = pool.full() or (held_up and wait_s < 0)
        pool.spawn(client.send, arrival, held_up)


def _send_in_turn(client: LoadClient, requests: Iterator[Arrival], seconds: float) -> None:
    """Send one request after the other until the time is over."""
    while client.now_s < seconds:
        client.send(next(requests))


def _converse(client: LoadClient, session: ChatSession) -> None:
    """Send the turns of one chat, each with all that was said before; end it at an error."""
    messages: list[dict[str, str]] = []
    for number, turn in enumerate(session.turns):
        gevent.sleep(turn.think_s)
        messages.append(_message("user", client.words.message(turn.name, turn.message_tokens)))
        text = client.exchange(messages, turn.output_tokens, name=turn.name, turn=number)
        if text is None:
            return
        messages.append(_message("assistant", text))


def main() -> None:
    """Offer the task that stdin holds, and write its report to stdout."""
    raise_open_file_limit()
    task = msgspec.json.decode(sys.stdin.buffer.read(), type=ClientTask)
    try:
        facts = probe_endpoint(task.url)
        warm_up(facts, task)
        report = offer(facts, task)
    except LoadError as error:
        print(error, file=sys.stderr)
        sys.exit(ERROR_EXIT_CODE)
    sys.stdout.buffer.write(msgspec.json.encode(report))


if __name__ == "__main__":
    main()
