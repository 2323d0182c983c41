"""Why a request went where it went: one record for each decision, the outcome joined later.

A record holds plain numbers as they were when the request was placed: who waited, who was passed
over, the best workers with each term of their cost, how many others there were, the prediction.
The names of its fields are what `diptych explain -o json` shows.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from enum import StrEnum
from itertools import islice
from typing import Any, NamedTuple

import msgspec

from ..protos.frames import AttemptKey

#: Names of the terms of a worker's cost: what it has left to do, and the prompt's prefill.
PREFILL_TERMS = ("left", "prefill")
#: A step with this request, transfer that the prefill does not hide, what a fuller KV pool costs,
#: and by how much the gap between first and second token exceeds its target. (`shortlist`)
DECODE_TERMS = ("step", "exposed", "memory", "handover")


class PlacementKind(StrEnum):
    """How a pair of workers was found, or that none was."""

    PUSH = "push"  #: the request chose its worker
    PULL = "pull"  #: a worker with credit chose the request
    EARLY = "early"  #: the policy is one that places requests as they come, without a queue
    LOCAL = "local"  #: the decode worker computes the prompt
    REFUSED = "refused"


class Option(NamedTuple):
    """A worker that could have taken a stage: the prefill or the decode of a request."""

    worker: str  #: its id
    cost: float  #: what the policy compared: the least wins
    terms: tuple[float, ...]  #: seconds, named by `PREFILL_TERMS` or `DECODE_TERMS`


class PassedOver(NamedTuple):
    """A more urgent request that a worker left alone."""

    request_id: str
    time_left_s: float  #: to its deadline
    reason: str  #: as people read it


class Decision(msgspec.Struct):
    """One placement or refusal. Seconds; moments by the router's clock."""

    number: int  #: counts the router's decisions from 1
    at: float  #: when it was decided
    key: AttemptKey  #: (request id, number of the attempt)
    policy: str  #: name of the router's policy
    kind: PlacementKind
    prompt_tokens: int
    slo_class: str  #: the request's class of service
    tenant: str  #: for whom it is
    ttft_target_s: float  #: from its arrival to its first token
    itl_target_s: float  #: between two tokens
    waited_s: float  #: from the request's arrival to the decision
    waiting: int  #: requests in the queue, this one not counted
    prefill: str | None = None  #: the chosen prefill worker; None: the decode worker computes
    decode: str | None = None  #: the chosen decode worker; None: refused
    fetch: str | None = None  #: the worker that the prefix is fetched from, if any
    hit_tokens: int = 0  #: of the prompt, cached on the worker that computes it, or fetched
    passed_over: list[PassedOver] = []
    prefill_options: list[Option] = []  #: the chosen worker and the best others
    decode_options: list[Option] = []  #: the same for decode
    others: int = 0  #: decode workers that are not named
    note: str = ""  #: why it was refused
    left_s: float = 0.0  #: predictions: what its prefill worker still had to do
    prefill_s: float = 0.0  #: its own prefill
    ttft_s: float = 0.0  #: from its arrival
    itl_s: float = 0.0  #: between two tokens
    exposed_s: float = 0.0  #: transfer that the prefill does not hide
    observed: dict[str, Any] = {}  #: the outcome, once it is known
    session: str = ""  #: as the client names the conversation
    ttft_target: str = ""  #: the target as in `max(1s, 3x)`; "": a plain time
    #: Seconds that the whole prompt would take if nothing of it were cached and the cluster had no
    #: other work (its isolated prefill). 0: the TTFT target does not depend on them.
    isolated_s: float = 0.0
    loaded_tokens: int = 0  #: of `hit_tokens`, that come from the tiers of the worker's own

    def to_plain(self) -> dict[str, Any]:
        """Return the record in plain types, with a name for each term. Times are in seconds."""
        values = msgspec.to_builtins(self)
        values["prefill_options"] = _named_terms(self.prefill_options, PREFILL_TERMS)
        values["decode_options"] = _named_terms(self.decode_options, DECODE_TERMS)
        return values


def _named_terms(
    options: list[Option], names: tuple[str, ...]
) -> list[tuple[str, float, dict[str, float]]]:
    return [
        (option.worker, option.cost, dict(zip(names, option.terms, strict=False)))
        for option in options
    ]


class Decisions:
    """The last `limit` records, by attempt: a second decision on an attempt replaces the first."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._by_key: OrderedDict[AttemptKey, Decision] = OrderedDict()
        self.count = 0  #: decisions since the start, those included that are forgotten

    def add(self, decision: Decision) -> None:
        """Keep a record, and forget the oldest beyond the limit."""
        self._by_key[decision.key] = decision
        if len(self._by_key) > self._limit:
            self._by_key.popitem(last=False)

    def latest(self, count: int) -> list[Decision]:
        """Return the last records, newest first."""
        return list(islice(reversed(self._by_key.values()), count))

    def next_number(self) -> int:
        """Return the number of a new decision."""
        self.count += 1
        return self.count

    def get(self, key: AttemptKey) -> Decision | None:
        """Return an attempt's record, if it is kept."""
        return self._by_key.get(key)

    def find(self, request_id: str) -> list[Decision]:
        """Return the records of all attempts at a request.

        `request_id` is the request's id, or the client's id from which a gateway made it by adding
        "~" and more.
        """
        prefix = request_id + "~"
        return [
            decision
            for (name, _), decision in self._by_key.items()
            if name == request_id or name.startswith(prefix)
        ]

    def __iter__(self) -> Iterator[Decision]:
        return iter(self._by_key.values())

    def __len__(self) -> int:
        return len(self._by_key)
