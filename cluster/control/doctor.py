"""Drives `diptych doctor`: asks every worker what it sees, has pairs move bytes, one at a time."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Any

import msgspec

from ...kv_transfer.diagnosis import HostEnvironment
from ..gateway.attempt.plane import Plane
from ..gateway.errors import ApiError
from .diagnosis import Measured, Report, Seen, choose, judge, pair_of

LIMIT_S = 120.0  #: what was not measured until then is not
ANSWER_S = 15.0  #: one worker's answer
ROUNDS, PAIR_S = 8, 5.0  #: probes of a pair, and seconds after which no other begins
ENOUGH = 0.6  #: of the expected bandwidth: no more probes of this pair
SIZE_MIB = 64


class Size(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The request's body. `mib`: of one probe, at most."""

    mib: int = SIZE_MIB


def parse_size(body: bytes) -> int:
    """Bytes of one probe, at most. Raises ApiError."""
    try:
        mib = msgspec.json.decode(body or b"{}", type=Size).mib
    except msgspec.DecodeError as error:
        raise ApiError("invalid_request", f"the body: {error}") from None
    if not 1 <= mib <= 1024:
        raise ApiError("invalid_request", "mib must be between 1 and 1024", "mib")
    return mib << 20


class Doctor:
    """One examination at a time."""

    def __init__(self, plane: Plane, configured: str) -> None:
        self.plane, self._configured = plane, configured
        self._busy = False

    async def run(self, probe_bytes: int) -> AsyncGenerator[dict, None]:
        """`{"progress": sentence}` again and again, then `{"report": ..}`. ApiError: it is busy."""
        if self._busy:
            raise ApiError("busy", "a doctor is at work already; it takes two minutes at most")
        self._busy = True
        try:
            deadline = time.monotonic() + LIMIT_S
            seen: dict[str, Seen] = {}
            measured: list[Measured] = []
            cards = dict(self.plane.cards)
            for name in sorted(cards):
                yield {"progress": f"{name}: looking at its host"}
                found = await self._look(name)
                if found is None:
                    measured.append(Measured(name, name, reason="no_answer"))
                else:
                    seen[name] = found
            pairs, scope = choose([(name, cards[name].role) for name in seen])
            for number, (source, sink) in enumerate(pairs, 1):
                if time.monotonic() > deadline:
                    scope += f"; only {number - 1} of these in {LIMIT_S:.0f} s"
                    break
                yield {"progress": f"{source} -> {sink}: moving blocks ({number} of {len(pairs)})"}
                measured.append(await self._measure(source, sink, probe_bytes, seen))
            report: Report = judge(list(seen.values()), measured, self._configured, scope)
            yield {"report": msgspec.to_builtins(report)}
        finally:
            self._busy = False

    async def _look(self, worker: str) -> Seen | None:
        """Its environment, and its clock by the middle of the round trip."""
        card = self.plane.cards.get(worker)
        if card is None:
            return None
        host = card.address.rpartition(":")[0]
        pids = [
            other.pid
            for other in self.plane.cards.values()
            if other.address.rpartition(":")[0] == host and other.id != worker
        ]
        clock, began = time.time(), time.monotonic()
        values = await self.plane.probe(worker, ANSWER_S, pids=pids)
        if values is None:
            return None
        seen = msgspec.convert(values, HostEnvironment)
        rtt = max(0.0, time.monotonic() - began - seen.took_s)
        return Seen(seen, round(seen.clock_s - clock - rtt / 2, 6), round(rtt, 6))

    async def _measure(
        self, source: str, sink: str, probe_bytes: int, seen: dict[str, Seen]
    ) -> Measured:
        """The best of some probes: the first one also wires the two up."""
        known = {name: one.environment for name, one in seen.items()}
        best = Measured(source, sink, reason="no_answer")
        began = time.monotonic()
        for _ in range(ROUNDS):
            values: dict[str, Any] | None
            values = await self.plane.probe(sink, ANSWER_S, source, bytes=probe_bytes)
            one = Measured(source, sink, **(values or {"reason": "no_answer"}))
            if one.reason:
                return one if best.reason else best
            best = max(best, one, key=lambda each: each.gib_s)
            share = pair_of(best, known).of_expected
            if share is None or share > ENOUGH or time.monotonic() - began > PAIR_S:
                break
        return best
