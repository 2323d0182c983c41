"""Goodput: which requests met their targets, per class and tenant (pure).

    met    first token within the TTFT target, and the gaps within the ITL target: their mean, and
           their p99 where there are `FEW` of them at least: no more than one in a hundred late,
           so none of fewer than 100. The gap between the first and the second token, in which
           the hand-over lies, is a gap like any other.
    share  of the requests of the last `WINDOW_S`: those that met both, by all

Refused and failed requests are misses. A client that leaves in time is not counted; one that
leaves after a target was missed is a miss.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..protos.frames import RequestOutcome

WINDOW_S, PARTS = 300.0, 30
FEW = 20  #: gaps below which only their mean is judged
NAMED = 50  #: tenants, and classes, that are counted by name; the rest together as `OTHER`
OTHER = "other"
FINISHED = ("stop", "length")
MET = ("both", "ttft", "itl", "none")
Group = tuple[str, str, str]  #: class, tenant, which targets were met


def p99(gaps: Sequence[float]) -> float:
    """By nearest rank: the least that 99 % of the gaps keep, of fewer than 100 the longest; the
    simulator and the load tests judge by the same. 0.0: there are none."""
    return sorted(gaps)[-1 - len(gaps) // 100] if gaps else 0.0


def judge(outcome: RequestOutcome, ttft_s: float, itl_s: float) -> str | None:
    """Which targets were met, one of `MET`; None: it does not count. For requests that name no
    targets, `ttft_s` and `itl_s` are theirs."""
    ttft_s, itl_s = outcome.ttft_target_s or ttft_s, outcome.itl_target_s or itl_s
    ttft = outcome.tokens > 0 and outcome.waited_s <= ttft_s
    itl = outcome.itl_mean_s <= itl_s and (outcome.gaps < FEW or outcome.itl_p99_s <= itl_s)
    if outcome.reason == "cancelled":
        late = outcome.waited_s > ttft_s
        if not late and itl:
            return None
    elif outcome.reason not in FINISHED:
        return "none"
    elif outcome.tokens == 0:
        ttft = outcome.waited_s <= ttft_s
    return {(1, 1): "both", (1, 0): "ttft", (0, 1): "itl", (0, 0): "none"}[ttft, itl]


@dataclass(slots=True)
class Part:
    """What ended in one slice of the window."""

    number: int
    met: Counter[Group] = field(default_factory=Counter)


class Goodput:
    """Targets are those of requests that name none, in seconds."""

    def __init__(self, ttft_s: float, itl_s: float) -> None:
        self._ttft_s, self._itl_s = ttft_s, itl_s
        self._names: dict[str, set[str]] = {"tenant": set(), "class": set()}
        self._parts: deque[Part] = deque()
        self.total: Counter[Group] = Counter()  #: requests since the start

    def observe(self, outcome: RequestOutcome, now: float) -> None:
        met = judge(outcome, self._ttft_s, self._itl_s)
        if met is None:
            return
        slo_class = self._name("class", outcome.slo_class)
        key = (slo_class, self._name("tenant", outcome.tenant), met)
        self.total[key] += 1
        self._part(now).met[key] += 1

    def _name(self, kind: str, name: str) -> str:
        known = self._names[kind]
        if name in known:
            return name
        if len(known) >= NAMED:
            return OTHER
        known.add(name)
        return name

    def _part(self, now: float) -> Part:
        number = int(now * PARTS / WINDOW_S)
        self.forget(now)
        if not self._parts or self._parts[-1].number < number:
            self._parts.append(Part(number))
        return self._parts[-1]

    def forget(self, now: float) -> None:
        """What ended before the window."""
        if not self._parts:
            return
        oldest = int(now * PARTS / WINDOW_S) - PARTS + 1
        while self._parts and self._parts[0].number < oldest:
            self._parts.popleft()

    def statistics(self) -> dict:
        """Of the window; call `forget` before. Shares are None where nothing ended."""
        met: Counter[Group] = sum((part.met for part in self._parts), Counter())
        everything = _shares(met, lambda _: "").get("", {})
        return {
            "window_s": WINDOW_S,
            "requests": everything.get("requests", 0),
            "share": everything.get("share"),
            "classes": _shares(met, lambda group: group[0]),
            "tenants": _shares(met, lambda group: group[1]),
        }


def _shares(met: Counter[Group], name: Callable[[Group], str]) -> dict[str, dict]:
    """Of each name: requests, and the shares of them that met both targets, and each of them."""
    counts = Counter[tuple[str, str]]()
    for group, count in met.items():
        counts[name(group), group[2]] += count
    told = {}
    for one in sorted({one for one, _ in counts}):
        every, both = sum(counts[one, which] for which in MET), counts[one, "both"]
        told[one] = {
            "requests": every,
            "share": round(both / every, 4),
            "ttft": round((both + counts[one, "ttft"]) / every, 4),
            "itl": round((both + counts[one, "itl"]) / every, 4),
        }
    return told
