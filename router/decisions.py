"""Why a request went where it went: one record for each decision, the outcome joined later.

A record holds plain numbers as they were when the request was bound: who waited, who was passed
over, the best workers with each term of their cost, the rest in one line, the prediction.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice
from typing import Any

import msgspec

from ..protos.frames import AttemptKey

#: a worker that could have taken a stage: (name, the policy's score: the least wins, its terms in
#: seconds, named by `PREFILL_TERMS` or `DECODE_TERMS`)
Option = tuple[str, float, tuple[float, ...]]
PREFILL_TERMS = ("left", "prefill")
DECODE_TERMS = ("step", "exposed", "memory", "handover")


class Decision(msgspec.Struct):
    """One placement or refusal. Seconds; moments by the router's clock."""

    number: int
    at: float
    key: AttemptKey
    policy: str
    kind: str  #: chosen by worker (pull) or by request (push), early, local, or refused
    prompt_tokens: int
    slo_class: str
    tenant: str
    ttft_target_s: float
    itl_target_s: float
    waited_s: float
    waiting: int  #: requests in the line, this one not counted
    prefill: str | None = None
    decode: str | None = None
    fetch: str | None = None  #: who the prefix comes from, if not from itself
    hit_tokens: int = 0
    passed_over: list[tuple[str, float, str]] = []  #: requests: id, seconds to its deadline, why
    prefill_options: list[Option] = []  #: the chosen one and the best others
    decode_options: list[Option] = []
    others: int = 0  #: workers that could have decoded it and are not named
    note: str = ""
    left_s: float = 0.0  #: predictions: what its prefill worker still had to do
    prefill_s: float = 0.0
    ttft_s: float = 0.0  #: from its arrival
    itl_s: float = 0.0
    exposed_s: float = 0.0  #: transfer that the prefill does not hide
    observed: dict[str, Any] = {}  #: joined when known
    session: str = ""  #: as the client names the conversation

    def told(self) -> dict[str, Any]:
        """The record with the terms named, in plain types. Seconds."""
        values = msgspec.to_builtins(self)
        for stage, names in (("prefill", PREFILL_TERMS), ("decode", DECODE_TERMS)):
            values[f"{stage}_options"] = [
                (worker, score, dict(zip(names, terms, strict=False)))
                for worker, score, terms in getattr(self, f"{stage}_options")
            ]
        return values


class Decisions:
    """The last `limit` records, by number and by key."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._by_key: OrderedDict[AttemptKey, Decision] = OrderedDict()
        self.count = 0

    def add(self, decision: Decision) -> None:
        self._by_key[decision.key] = decision
        if len(self._by_key) > self._limit:
            self._by_key.popitem(last=False)

    def latest(self, count: int) -> list[Decision]:
        """The last ones, newest first."""
        return list(islice(reversed(self._by_key.values()), count))

    def next_number(self) -> int:
        self.count += 1
        return self.count

    def get(self, key: AttemptKey) -> Decision | None:
        return self._by_key.get(key)

    def find(self, request_id: str) -> list[Decision]:
        """Every attempt at a request, by its id or by the client's id that it was made from."""
        prefix = request_id + "~"
        return [
            decision
            for (name, _), decision in self._by_key.items()
            if name == request_id or name.startswith(prefix)
        ]

    def __iter__(self):
        return iter(self._by_key.values())

    def __len__(self) -> int:
        return len(self._by_key)
