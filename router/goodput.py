"""Goodput: which requests met their targets, per class and tenant (pure).

    met    first token within the TTFT target, and the gaps within the ITL target: their mean, and
           their p99 where there are `GAPS_FOR_P99` of them at least: no more than one in a hundred
           late, so none of fewer than 100. The gap between the first and the second token, in which
           the hand-over lies, is a gap like any other.
    share  of the requests of the last `WINDOW_S`: those that met both, by all

Refused and failed requests are misses. A client that leaves in time is not counted; one that
leaves after a target was missed is a miss.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..protos.frames import RequestOutcome

WINDOW_S = 300.0
PARTS = 30  #: slices of the window, which leave it one by one
#: Of fewer gaps than this only the mean is judged: in a short answer one hiccup says little.
GAPS_FOR_P99 = 20
#: Tenants, and classes, that are counted by name, as each name is a series of a metric; the rest
#: together as `OTHER`.
NAMED = 50
OTHER = "other"
FINISHED = ("stop", "length")  #: reasons of requests that have ended well
MET = ("both", "ttft", "itl", "none")  #: which targets a request met


class GoodputGroup(NamedTuple):
    """What requests are counted by."""

    slo_class: str  #: the request's class of service, by name
    tenant: str
    met: str  #: which targets were met, one of `MET`


def p99(gaps: Sequence[float]) -> float:
    """Return the 99th percentile of the gaps, by nearest rank; 0.0 if there are none.

    Of fewer than 100 gaps that is the longest. The simulator and the load tests judge by the same.
    """
    return sorted(gaps)[-1 - len(gaps) // 100] if gaps else 0.0


def judge(outcome: RequestOutcome, ttft_s: float, itl_s: float) -> str | None:
    """Return which targets were met, one of `MET`; None: the request does not count.

    `ttft_s` and `itl_s` are the targets of a request whose outcome has none.
    """
    ttft_target_s = outcome.ttft_target_s or ttft_s
    itl_target_s = outcome.itl_target_s or itl_s
    in_time = outcome.waited_s <= ttft_target_s
    p99_met = outcome.gaps < GAPS_FOR_P99 or outcome.itl_p99_s <= itl_target_s
    itl_met = outcome.itl_mean_s <= itl_target_s and p99_met
    if outcome.reason == "cancelled":
        if in_time and itl_met:  # nothing was missed until then, and nobody knows the rest
            return None
        ttft_met = in_time and outcome.tokens > 0
    elif outcome.reason in FINISHED:
        ttft_met = in_time  # an answer without tokens is in time if it ends in time
    else:
        return "none"
    if ttft_met and itl_met:
        return "both"
    if ttft_met:
        return "ttft"
    return "itl" if itl_met else "none"


@dataclass(slots=True)
class WindowPart:
    """What ended in one slice of the window."""

    number: int  #: of the slice, counted from the clock's zero
    met: Counter[GoodputGroup] = field(default_factory=Counter)


class Goodput:
    """Counts ended requests by the targets that they met."""

    def __init__(self) -> None:
        self._names: dict[str, set[str]] = {"tenant": set(), "class": set()}
        self._parts: deque[WindowPart] = deque()
        self.total: Counter[GoodputGroup] = Counter()  #: requests since the start

    def observe(self, outcome: RequestOutcome, ttft_s: float, itl_s: float, now: float) -> None:
        """Count a request that has ended now; the targets are those of `judge`."""
        met = judge(outcome, ttft_s, itl_s)
        if met is None:
            return
        slo_class = self._counted_name("class", outcome.slo_class)
        tenant = self._counted_name("tenant", outcome.tenant)
        group = GoodputGroup(slo_class, tenant, met)
        self.total[group] += 1
        self._part(now).met[group] += 1

    def _counted_name(self, kind: str, name: str) -> str:
        """Return `name`, or `OTHER` for names beyond the first `NAMED`."""
        names = self._names[kind]
        if name in names:
            return name
        if len(names) >= NAMED:
            return OTHER
        names.add(name)
        return name

    def _part(self, now: float) -> WindowPart:
        number = int(now * PARTS / WINDOW_S)
        self.forget(now)
        if not self._parts or self._parts[-1].number < number:
            self._parts.append(WindowPart(number))
        return self._parts[-1]

    def forget(self, now: float) -> None:
        """Forget whole slices, so that what ended in the last 290 to 300 s is kept."""
        if not self._parts:
            return
        oldest = int(now * PARTS / WINDOW_S) - PARTS + 1
        while self._parts and self._parts[0].number < oldest:
            self._parts.popleft()

    def statistics(self) -> dict[str, Any]:
        """Return the shares of the window; call `forget` before. "share" is None if none ended.

        "share" is of requests that met both targets; a class's or tenant's "ttft" and "itl" are of
        those that met this one, the other or not.
        """
        met: Counter[GoodputGroup] = sum((part.met for part in self._parts), Counter())
        everything = _shares(met, lambda _: "").get("", {})
        return {
            "window_s": WINDOW_S,
            "requests": everything.get("requests", 0),
            "share": everything.get("share"),
            "classes": _shares(met, lambda group: group.slo_class),
            "tenants": _shares(met, lambda group: group.tenant),
        }


def _shares(
    met: Counter[GoodputGroup], name_of: Callable[[GoodputGroup], str]
) -> dict[str, dict[str, float]]:
    """Return each name's requests, and the shares that met both targets, and each of them."""
    counts = Counter[tuple[str, str]]()
    for group, count in met.items():
        counts[name_of(group), group.met] += count
    shares = {}
    for name in sorted({name for name, _ in counts}):
        requests = sum(counts[name, targets] for targets in MET)
        both = counts[name, "both"]
        shares[name] = {
            "requests": requests,
            "share": round(both / requests, 4),
            "ttft": round((both + counts[name, "ttft"]) / requests, 4),
            "itl": round((both + counts[name, "itl"]) / requests, 4),
        }
    return shares
