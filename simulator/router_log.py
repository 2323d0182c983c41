"""The events of a router's log, put together by worker and by request.

`router/replay.py` reads the lines. A `RouterLog` holds what one life of a router says: the cards of
the workers, what each reported, and for each request when it arrived, when its first token came and
how it ended.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ..protos.frames import AttemptOutcome, PlaceAttempt, WorkerCard, WorkerReport
from ..router.events import (
    AttemptEnded,
    FirstTokenSent,
    PlacementRequested,
    RouterEvent,
    WorkerJoined,
    WorkerLost,
    WorkerReported,
)
from ..router.goodput import FINISHED
from ..router.replay import LogError, LogHead, read


@dataclass(slots=True)
class LoggedRequest:
    """One request over all its attempts. Moments are in seconds by the router's clock."""

    place: PlaceAttempt  #: what the gateway asked for the first attempt
    arrived_at: float  #: at the gateway
    first_token_at: float = 0.0  #: 0: no token came
    ended_at: float = 0.0  #: end of the last attempt; 0: the log ends before
    outcome: AttemptOutcome | None = None  #: of the last attempt; None if nobody told it

    @property
    def served(self) -> bool:
        """Whether the answer came to its own end."""
        return (
            self.first_token_at > 0 and self.outcome is not None and self.outcome.reason in FINISHED
        )


@dataclass(slots=True)
class RouterLog:
    """The last life of the router that the log tells of."""

    head: LogHead  #: the router's configuration and term, which numbers its lives
    #: Each worker's latest card, by name.
    cards: dict[str, WorkerCard] = field(default_factory=dict)
    living: dict[str, WorkerCard] = field(default_factory=dict)  #: the cards of workers not lost
    #: The cards of the most workers that lived at once; of equally many, the latest.
    most_living: list[WorkerCard] = field(default_factory=list)
    #: In order of arrival at the router, by request id.
    requests: dict[str, LoggedRequest] = field(default_factory=dict)
    #: Each worker's reports in order of arrival, by name.
    reports: dict[str, list[WorkerReport]] = field(default_factory=dict)

    @staticmethod
    def of(lines: Iterable[bytes]) -> RouterLog:
        """Return what the lines say. Raises LogError if no served request is among them."""
        log: RouterLog | None = None
        for at, event in read(lines):
            if isinstance(event, LogHead):
                # The same term again is only the head of the life's next file.
                if log is None or event.term != log.head.term:
                    log = RouterLog(event)
            elif log is None:
                raise LogError("line 1: expected the head of a router's log")
            else:
                log._add(event, at)
        if log is None or not log.served_requests():
            raise LogError("no request in it was served")
        return log

    def served_requests(self) -> list[LoggedRequest]:
        """Return the requests whose answer came to its own end, in order of their log entries."""
        return [request for request in self.requests.values() if request.served]

    def _add(self, event: RouterEvent, at: float) -> None:
        match event:
            case WorkerJoined(card):
                self.cards[card.id] = card
                self.living[card.id] = card
                if len(self.living) >= len(self.most_living):
                    self.most_living = list(self.living.values())
            case WorkerLost(worker):
                self.living.pop(worker, None)
            case WorkerReported(worker, report):
                self.reports.setdefault(worker, []).append(report)
            case PlacementRequested(_, place) if place.is_rehearsal:
                pass  # nobody's request
            case PlacementRequested(_, place):
                request_id, _ = place.attempt_key
                # A request that is known already is attempted again, or asked for again.
                request = LoggedRequest(place, arrived_at=at - place.waited_s)
                self.requests.setdefault(request_id, request)
            case FirstTokenSent((request_id, _)):
                logged = self.requests.get(request_id)
                if logged is not None and not logged.first_token_at:
                    logged.first_token_at = at
            case AttemptEnded((request_id, _), outcome):
                logged = self.requests.get(request_id)
                if logged is not None:
                    logged.ended_at = at
                    logged.outcome = outcome
            case _:
                pass  # the other events tell nothing of what workers cost
