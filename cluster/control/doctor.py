"""Runs an examination for `diptych doctor`: first every worker's host, then pairs that move bytes.

Pairs are measured one after the other, so that none disturbs another. What the measurements mean is
decided in `diagnosis.py`.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Any

import msgspec

from ...kv_transfer.diagnosis import HostEnvironment
from ..gateway.attempt.plane import Plane
from ..gateway.errors import ApiError
from .bodies import decode_body
from .diagnosis import HostObservation, PairMeasurement, choose_pairs, diagnose, diagnose_pair

EXAMINATION_LIMIT_S = 120.0  #: After this no further pair is begun.
#: For one answer of a worker. A worker gives a probe up after 10 s, so its answer says why.
ANSWER_LIMIT_S = 15.0
PAIR_PROBES_LIMIT = 8  #: Probes of one pair: the first is slow, as it connects the two workers.
PAIR_LIMIT_S = 5.0  #: After this no further probe of a pair begins.
GOOD_SHARE = 0.6  #: Of the expected bandwidth; a pair that reaches it needs no further probe.
DEFAULT_PROBE_MIB = 64  #: Enough that a probe's fixed costs hardly count.
PROBE_MIB_LIMIT = 1024


class DoctorBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /admin/v1/doctor`: MiB that one probe moves at most."""

    mib: int = DEFAULT_PROBE_MIB


def parse_probe_size(body: bytes) -> int:
    """Return how many bytes one probe may move; an empty body asks for the default.

    Raises ApiError.
    """
    mib = decode_body(body, DoctorBody).mib
    if not 1 <= mib <= PROBE_MIB_LIMIT:
        raise ApiError("invalid_request", f"mib must be between 1 and {PROBE_MIB_LIMIT}", "mib")
    return mib << 20


class Doctor:
    """Runs one examination at a time.

    `plane` has the connections to all workers. `configured_transport` is `kv_transfer.transport`.
    """

    def __init__(self, plane: Plane, configured_transport: str) -> None:
        self._plane = plane
        self._configured_transport = configured_transport
        self._examination_running = False

    async def run(self, probe_bytes: int) -> AsyncGenerator[dict[str, Any], None]:
        """Examine the cluster: yield `{"progress": sentence}` often, then `{"report": ..}`.

        The report is a `Diagnosis` in plain types. `probe_bytes` is what one probe moves at most.
        Raises ApiError when another examination is under way. Closing the generator ends this one.
        """
        if self._examination_running:
            raise ApiError("busy", "a doctor is at work already; it takes about two minutes")
        self._examination_running = True
        try:
            deadline = time.monotonic() + EXAMINATION_LIMIT_S
            hosts: dict[str, HostObservation] = {}
            measurements: list[PairMeasurement] = []

            cards = dict(self._plane.cards)
            for worker in sorted(cards):
                yield {"progress": f"{worker}: looking at its host"}
                host = await self._observe_host(worker)
                if host is None:  # `diagnose` makes a finding of such a pair with itself
                    measurements.append(PairMeasurement(worker, worker, reason="no_answer"))
                else:
                    hosts[worker] = host

            pairs, scope = choose_pairs([(worker, cards[worker].role) for worker in hosts])
            for number, (source, sink) in enumerate(pairs, 1):
                if time.monotonic() > deadline:
                    scope += f"; only {number - 1} of these in {EXAMINATION_LIMIT_S:.0f} s"
                    break
                yield {"progress": f"{source} -> {sink}: moving blocks ({number} of {len(pairs)})"}
                environments = {worker: host.environment for worker, host in hosts.items()}
                measurements.append(
                    await self._measure_pair(source, sink, probe_bytes, environments)
                )

            diagnosis = diagnose(
                list(hosts.values()), measurements, self._configured_transport, scope
            )
            yield {"report": msgspec.to_builtins(diagnosis)}
        finally:
            self._examination_running = False

    async def _observe_host(self, worker: str) -> HostObservation | None:
        """Return a worker's host and clock, or None if the worker does not answer."""
        card = self._plane.cards.get(worker)
        if card is None:
            return None
        sent_at = time.time()
        began = time.monotonic()
        answer = await self._plane.probe(
            worker, ANSWER_LIMIT_S, pids=self._neighbour_pids(worker, card.address)
        )
        if answer is None:
            return None
        environment = msgspec.convert(answer, HostEnvironment)
        rtt_s = max(0.0, time.monotonic() - began - environment.took_s)
        # The worker read its clock when the question arrived, half a round trip after it was sent.
        # The round trip leaves out `took_s`, in which the worker looked at its host.
        offset_s = environment.clock_s - sent_at - rtt_s / 2
        return HostObservation(environment, offset_s=round(offset_s, 6), rtt_s=round(rtt_s, 6))

    def _neighbour_pids(self, worker: str, address: str) -> list[int]:
        """Return the process ids of the other workers on the host with this `host:port`."""
        host_name = address.rpartition(":")[0]
        return [
            card.pid
            for card in self._plane.cards.values()
            if card.id != worker and card.address.rpartition(":")[0] == host_name
        ]

    async def _measure_pair(
        self, source: str, sink: str, probe_bytes: int, environments: dict[str, HostEnvironment]
    ) -> PairMeasurement:
        """Return the fastest of several probes, or the first one's reason if it moved nothing.

        The first probe also connects the two workers. Nothing is probed again where the expected
        bandwidth is not known, as nothing would tell when to stop.
        """
        best = PairMeasurement(source, sink, reason="no_answer")
        began = time.monotonic()
        for _ in range(PAIR_PROBES_LIMIT):
            # The sink fetches blocks from the source.
            answer = await self._plane.probe(sink, ANSWER_LIMIT_S, source, size_bytes=probe_bytes)
            values: dict[str, Any] = answer or {"reason": "no_answer"}
            measurement = PairMeasurement(source, sink, **values)
            if measurement.reason:
                return measurement if best.reason else best
            best = max(best, measurement, key=lambda candidate: candidate.gib_s)
            share = diagnose_pair(best, environments).of_expected
            if share is None or share > GOOD_SHARE or time.monotonic() - began > PAIR_LIMIT_S:
                break
        return best
