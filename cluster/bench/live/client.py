"""The client of a cell: a process of its own that offers one load to one server.

    echo '{"url": .., "load": .., "warm_up": 4, "limit_s": 300}' | python -m diptych.cluster.bench.live.client

The process reads a `ClientTask` from stdin as JSON and writes a `ClientReport` to stdout. If the
endpoint cannot be probed or the warm-up fails, the process writes the reason to stderr and exits
with 1. HTTP, server-sent events and the kernel's time stamps are the load test's
(`loadtests/sse.py`, `loadtests/endpoint.py`).
Every session is a greenlet. What has not ended `limit_s` after the start counts as unfinished.
"""

from __future__ import annotations

from gevent import monkey

if __name__ == "__main__":
    monkey.patch_all()  # before anything imports sockets

import sys
import time
from collections.abc import Callable, Iterator

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
WARM_UP_LIMIT_S = 120.0  #: seconds for the whole warm-up; what has not ended then is a failure
CONCURRENT_LIMIT = 8192  #: requests under way; further arrivals wait in the client
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
        self._http = HttpLoadClient(facts)
        self._count = 0  #: requests sent so far, from which their ids are made
        self.began_s = time.perf_counter()

    @property
    def now_s(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self.began_s

    def send(self, arrival: Arrival) -> None:
        """Send one request of an open or closed loop, and wait for its end."""
        self.exchange([_message("user", self.words.text(arrival))], arrival.output_tokens)

    def exchange(self, messages: list[dict[str, str]], tokens: int, turn: int = 0) -> str | None:
        """Send one request for `tokens` tokens; return the answer's text, or None if it failed.

        An error is not raised but noted in the answer. A greenlet that is killed meanwhile leaves
        an answer with the error `UNFINISHED`.
        """
        self._count += 1
        # `arrival_s` is not used here: a `MeasuredAnswer` counts from when the request was sent.
        outcome = LoadOutcome(id=f"live-{self._count}", arrival_s=0.0, sent_s=self.now_s)
        text = ""
        try:
            text = self._http.chat(outcome, messages, tokens)
        except gevent.GreenletExit:
            outcome.error = UNFINISHED
            raise
        finally:
            self.answers.append(MeasuredAnswer.of(outcome, turn))
        return None if outcome.error else text


def _message(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


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
    """Send the load's requests until all have ended or the time is over; return all answers."""
    load = task.load
    requests_digest = digest(load, facts.words(load.seed))
    cpu_began_s = time.process_time()
    client = LoadClient(facts, load.seed)
    pool = Pool(CONCURRENT_LIMIT)
    with gevent.Timeout(task.limit_s, False):  # False: the block ends at the limit without error
        _spawn(client, load, pool.spawn)
        pool.join()
    pool.kill()
    ends_s = [answer.sent_s + answer.e2e_s for answer in client.answers if not answer.error]
    return ClientReport(
        digest=requests_digest,
        span_s=max(ends_s, default=client.now_s),
        cpu_s=time.process_time() - cpu_began_s,
        answers=sorted(client.answers, key=lambda answer: answer.sent_s),
        model=facts.model,
    )


def _spawn(client: LoadClient, load: Load, spawn: Callable[..., object]) -> None:
    """Start a greenlet for each request, user or chat; return when the last one has been started.

    `spawn` blocks while as many greenlets are under way as the pool holds.
    """
    match load:
        case PoissonLoad():
            for arrival in poisson_arrivals(load):
                gevent.sleep(max(0.0, arrival.arrival_s - client.now_s))
                spawn(client.send, arrival)
        case ClosedLoad():
            requests = closed_requests(load)
            for _ in range(load.users):
                # All users take their requests from one iterator, so no request is sent twice.
                spawn(_send_in_turn, client, requests, load.seconds)
        case ChatLoad():
            for session in chat_sessions(load):
                gevent.sleep(max(0.0, session.start_s - client.now_s))
                spawn(_converse, client, session)


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
        text = client.exchange(messages, turn.output_tokens, turn=number)
        if text is None:
            return
        messages.append(_message("assistant", text))


def main() -> None:
    """Offer the task that stdin holds, and write its report to stdout."""
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
